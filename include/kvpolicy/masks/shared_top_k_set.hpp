// The top-k slots that the heads of a layer share, and their updates, on the host (docs/shared-budget.md).
// Masks run it over a sequence, caches over a chunk.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/top_k_heaps.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::detail {

/// A key that holds a slot of its layer.
struct shared_entry {
    position_t position;  // logical position
    float score;          // raw score
    std::int32_t head;
    std::int32_t key;  // the caller's name for it
};

/// What a set knows of its layer: the numbers of all heads, and what follows from them together.
struct shared_layer {
    const HeadParams* all_params;  // [heads]
    std::int32_t heads;
    std::int64_t top_k_slots;  // the sum of the heads' budgets
    bool is_static;            // Policy::has_static_shared_order
};

/// What the memory of a set depends on.
struct shared_sizes {
    std::int32_t heads = 0;
    std::int64_t competitors = 0;  // keys that will ever compete, at most
    std::int64_t top_k_slots = 0;
    std::int64_t classes = 0;  // the sum of the heads' decay steps
    bool by_class = true;      // no head has more than max_classes

    static constexpr std::int32_t max_classes = 256;  // beyond it a scan of the slots is no slower

    /// One more head, with sequences of `length` tokens.
    void add(const HeadParams& head_params, std::int32_t length) {
        const std::int64_t leaving = std::int64_t{length} - head_params.sinks - head_params.window;
        ++heads;
        competitors += std::max<std::int64_t>(0, leaving);
        top_k_slots += head_params.budget;
        classes += head_params.decay_step;
        by_class = by_class && head_params.decay_step <= max_classes;
    }
};

/// The held keys of a layer: at most `floor` of each head that nothing evicts but better keys of the head, at
/// most `cap` of it, at most top_k_slots in all. A head's worst key is on top of
///
///     by_priority  a static order: one heap of priorities; a tournament of the heads finds the worst of all.
///                  O(log of the slots + log heads) per update
///     by_class     other decays: one heap per class of positions mod n (class_heaps). O(sum of the heads' n)
///     by_scan      many classes, or ages beyond the heaps' reach: no heap. O(slots)
class shared_top_k_set {
  public:
    /// Bytes of the caller's memory.
    static std::size_t bytes(const shared_sizes& sizes) { return layout(sizes, nullptr).bytes; }

    /// `memory` has bytes(), aligned to detail::alignment. Updates are those of `tokens` tokens from position
    /// `base` on.
    shared_top_k_set(std::byte* memory, const shared_sizes& sizes, const shared_layer& layer,
                     position_t limit, position_t base, std::int32_t tokens)
        : layer_(layer), limit_(limit), origin_(base), memory_(layout(sizes, memory)) {
        way_ = layer.is_static ? by_priority : sizes.by_class ? by_class : by_scan;
        std::int32_t roots = 0;
        for (std::int32_t h = 0; h < layer.heads; ++h) {
            memory_.first_root[h] = roots;
            roots += sizes.by_class ? layer.all_params[h].decay_step : 0;
            memory_.held[h] = 0;
            memory_.priority_roots[h] = none;
            memory_.tree[h] = memory_.tree[layer.heads + h] = none;
            if (way_ == by_class &&
                (base + tokens) / layer.all_params[h].decay_step >= kvpolicy::rebase_limit) {
                way_ = by_scan;
            }
        }
        for (std::int32_t h = 0; way_ == by_class && h < layer.heads; ++h) {
            classes_of(h).clear();
        }
    }

    /// Puts a key that holds a slot already, before any update.
    void restore(const shared_entry& one) {
        if (origin_ - one.position > max_distance) {
            way_ = by_scan;  // no key has been put into a heap
        }
        memory_.entries[used_++] = one;
        ++size_;
        ++memory_.held[one.head];
        restored_ = true;
    }

    /// A key leaves its window at query q and competes. q must not fall between calls; the candidates of a
    /// query may come in any order. True where a key is evicted: `evicted`, which is the candidate itself
    /// where it is rejected.
    bool update(const shared_entry& candidate, position_t q, shared_entry& evicted) {
        start(q);
        const HeadParams& head_params = layer_.all_params[candidate.head];
        const std::int32_t held = memory_.held[candidate.head];
        if (way_ == by_priority && is_rejected(candidate, head_params, held)) {
            evicted = candidate;
            return true;
        }
        insert(candidate);
        if (held >= head_params.cap) {
            evicted = remove(worst_of(candidate.head, moment_));
            return true;
        }
        if (size_ > layer_.top_k_slots) {
            evicted = remove(worst_of_all());
            return true;
        }
        return false;
    }

    [[nodiscard]] std::int64_t size() const { return size_; }

  private:
    enum way : std::uint8_t { by_priority, by_class, by_scan };
    static constexpr std::int32_t none = -1;
    static constexpr position_t max_distance = position_t{1} << 28;

    /// A key in the heap of its head: its number is its entry's.
    struct priority_node {
        double value;           // ordered()
        std::int32_t position;  // relative
        std::int32_t left, right;
    };
    /// A head's worst key.
    struct worst_key {
        double value;  // ordered()
        position_t position;
        std::int32_t head;
        std::int32_t entry;
    };
    struct parts {
        shared_entry* entries = nullptr;
        priority_node* priorities = nullptr;
        class_heaps::node* classes = nullptr;
        std::int32_t** links = nullptr;
        std::int32_t* class_roots = nullptr;
        std::int32_t* first_root = nullptr;      // [heads]
        std::int32_t* priority_roots = nullptr;  // [heads]
        std::int32_t* held = nullptr;            // [heads]
        std::int32_t* tree =
            nullptr;  // [2 heads]: a head, the one with the worst key below; leaves at the end
        std::size_t bytes = 0;
    };

    /// Bytes do not depend on log gamma, which may be learned.
    static parts layout(const shared_sizes& sizes, std::byte* memory) {
        parts all;
        const auto take = [&]<class Element>(Element*& array, std::size_t count) {
            array = memory == nullptr ? nullptr : reinterpret_cast<Element*>(memory + all.bytes);
            all.bytes += aligned_size(count * sizeof(Element));
        };
        // One more than the slots: a candidate is put beside the held keys before one of them is evicted.
        const auto entries = static_cast<std::size_t>(std::min(sizes.top_k_slots, sizes.competitors)) + 1;
        const auto heads = static_cast<std::size_t>(sizes.heads);
        take(all.entries, entries);
        take(all.classes, sizes.by_class ? entries : 0);
        take(all.links, sizes.by_class ? entries + 1 : 0);
        take(all.class_roots, sizes.by_class ? static_cast<std::size_t>(sizes.classes) : 0);
        take(all.priorities, sizes.by_class ? 0 : entries);
        if (sizes.by_class) {  // a set has one of both
            static_assert(sizeof(priority_node) <= sizeof(class_heaps::node));
            all.priorities = reinterpret_cast<priority_node*>(all.classes);
        }
        take(all.first_root, heads);
        take(all.priority_roots, heads);
        take(all.held, heads);
        take(all.tree, 2 * heads);
        return all;
    }

    [[nodiscard]] class_heaps classes_of(std::int32_t head) const {
        return {memory_.classes, memory_.links, memory_.class_roots + memory_.first_root[head],
                layer_.all_params[head], origin_};
    }
    [[nodiscard]] double value_of(const shared_entry& one, position_t q) const {
        return ordered(shared_rank_value(layer_.all_params[one.head], layer_.is_static, one.score,
                                         one.position, q, limit_));
    }
    static bool worse(const worst_key& a, const worst_key& b) {
        if (a.value != b.value) {
            return a.value < b.value;
        }
        return a.position != b.position ? a.position > b.position : a.head > b.head;
    }

    /// Puts what was restored into heaps, and all keys anew where the base of static priorities has moved.
    void start(position_t q) {
        const bool moved = layer_.is_static && priority_base(q, limit_) != priority_base(moment_, limit_);
        moment_ = q;
        if (!moved && !restored_) {
            return;
        }
        restored_ = false;
        for (std::int32_t h = 0; h < layer_.heads; ++h) {
            memory_.priority_roots[h] = none;
        }
        for (std::int32_t i = 0; i < used_; ++i) {
            if (i != spare_) {
                put_into_heap(i);
            }
        }
        for (std::int32_t h = 0; way_ == by_priority && h < layer_.heads; ++h) {
            update_tree(h);
        }
    }

    void put_into_heap(std::int32_t entry) {
        const shared_entry& one = memory_.entries[entry];
        if (way_ == by_priority) {
            memory_.priorities[entry] = {value_of(one, moment_),
                                         static_cast<std::int32_t>(one.position - origin_), none, none};
            std::int32_t& root = memory_.priority_roots[one.head];
            root = merge(root, entry);
        } else if (way_ == by_class) {
            const double offset = layer_.all_params[one.head].score_offset;
            classes_of(one.head).insert(entry, one.position, static_cast<double>(one.score) + offset);
        }
    }
    [[nodiscard]] std::int32_t merge(std::int32_t a, std::int32_t b) const {
        return merge_skew_heaps(
            memory_.priorities, a, b, [](const priority_node& one, const priority_node& other) {
                return one.value != other.value ? one.value < other.value : one.position > other.position;
            });
    }

    void insert(const shared_entry& candidate) {
        const std::int32_t entry = spare_ != none ? spare_ : used_++;
        spare_ = none;
        memory_.entries[entry] = candidate;
        ++size_;
        ++memory_.held[candidate.head];
        put_into_heap(entry);
        if (way_ == by_priority) {
            update_tree(candidate.head);
        }
    }
    /// Takes out a worst key.
    shared_entry remove(const worst_key& one) {
        if (way_ == by_priority) {
            std::int32_t& root = memory_.priority_roots[one.head];
            root = merge(memory_.priorities[root].left, memory_.priorities[root].right);
        } else if (way_ == by_class) {
            classes_of(one.head).remove_worst(moment_, one.value);
        }
        spare_ = one.entry;
        --size_;
        --memory_.held[one.head];
        if (way_ == by_priority) {
            update_tree(one.head);
        }
        return memory_.entries[one.entry];
    }

    /// Whether a candidate is certain to be rejected: the usual case, without a look at its head's heap.
    [[nodiscard]] bool is_rejected(const shared_entry& candidate, const HeadParams& head_params,
                                   std::int32_t held) const {
        if (size_ < layer_.top_k_slots || (held <= head_params.floor && head_params.floor > 0)) {
            return false;
        }
        const std::int32_t head = memory_.tree[1];
        return head != none && worse({value_of(candidate, moment_), candidate.position, candidate.head, none},
                                     worst_of(head, moment_));
    }

    /// The worst key of a head that holds keys.
    [[nodiscard]] worst_key worst_of(std::int32_t head, position_t q) const {
        if (way_ == by_priority) {
            const std::int32_t root = memory_.priority_roots[head];
            return {memory_.priorities[root].value, memory_.entries[root].position, head, root};
        }
        if (way_ == by_class) {
            const class_heaps heaps = classes_of(head);
            const double value = heaps.worst_value(q);
            const std::int32_t entry = heaps.find_worst(q, value);
            return {value, memory_.entries[entry].position, head, entry};
        }
        return scan([head](std::int32_t h) { return h == head; });
    }
    /// The worst key of the heads that hold more than their floor.
    [[nodiscard]] worst_key worst_of_all() const {
        if (way_ == by_priority) {
            return worst_of(memory_.tree[1], moment_);
        }
        const auto above_floor = [this](std::int32_t h) {
            return memory_.held[h] > layer_.all_params[h].floor;
        };
        if (way_ == by_scan) {
            return scan(above_floor);
        }
        worst_key worst{0.0, 0, 0, none};
        for (std::int32_t h = 0; h < layer_.heads; ++h) {
            if (above_floor(h)) {
                const worst_key one = worst_of(h, moment_);
                worst = worst.entry == none || worse(one, worst) ? one : worst;
            }
        }
        return worst;
    }
    template <class Counts>
    [[nodiscard]] worst_key scan(Counts&& counts) const {
        worst_key worst{0.0, 0, 0, none};
        for (std::int32_t i = 0; i < used_; ++i) {
            const shared_entry& entry = memory_.entries[i];
            if (i != spare_ && counts(entry.head)) {
                const worst_key one{value_of(entry, moment_), entry.position, entry.head, i};
                worst = worst.entry == none || worse(one, worst) ? one : worst;
            }
        }
        return worst;
    }

    /// The tournament after a change of one head's worst key or count.
    void update_tree(std::int32_t head) {
        std::int32_t* const tree = memory_.tree;
        std::int32_t at = layer_.heads + head;
        tree[at] = memory_.held[head] > layer_.all_params[head].floor ? head : none;
        for (at /= 2; at >= 1; at /= 2) {
            const std::int32_t a = tree[2 * at], b = tree[2 * at + 1];
            tree[at] = a == none || (b != none && worse(worst_of(b, moment_), worst_of(a, moment_))) ? b : a;
        }
    }

    shared_layer layer_;
    position_t limit_, origin_;
    parts memory_;
    way way_ = by_scan;
    bool restored_ = false;
    position_t moment_ = 0;  // the query of the last update
    std::int32_t used_ = 0;  // entries in use, the spare one included
    std::int32_t spare_ = none;
    std::int64_t size_ = 0;
};

}  // namespace kvpolicy::detail
