// The top-k slots of one head while a chunk passes: the decisions of masks/top_k_set.hpp, the same keys in
// the same top-k slots, at O(log k) per admitted key.
//
// Decay step 1, or no decay: priorities are static, and a binary heap has the worst key on top. A rejected
// candidate costs one comparison, an admitted one a descent.
//
// Decay step n > 1: two keys whose positions are equal mod n age at the same queries, so the real numbers
// score + age * log gamma keep their order. One heap per class has them in that order, as a pair of doubles
// that holds the number without rounding. Ranks are those of the rounded values (ranking.hpp). Rounding is
// monotonic, so the worst value of a class is its top's; keys that rounding makes equal to it form a subtree
// at the top, which is searched for the youngest of them. A top-k update costs O(n + log k).
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/top_k_set.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace kvpolicy::host_backend {

/// A rank value (ranking.hpp) as a number that < and == order as ranks_before() orders values: NaN becomes
/// -inf, and -inf the lowest double, which no value of a finite score comes near.
inline double ordered(double value) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const double number = value == -infinity ? std::numeric_limits<double>::lowest() : value;
    return std::isnan(value) ? -infinity : number;
}

/// A binary heap with the worst key on top. Values stand still after build(). Calls in order: fill(),
/// build(), then worst() and replace_worst().
class priority_heap {
  public:
    struct node {
        double value;           // ordered()
        std::int32_t position;  // relative; of two equal values the younger key is the worse one
        std::int32_t entry;     // whose priority it is
    };

    explicit priority_heap(node* nodes) : nodes_(nodes) {}

    static bool worse(const node& a, const node& b) {
        // Without branches: half of all comparisons would be predicted wrongly.
        return (a.value < b.value) | ((a.value == b.value) & (a.position > b.position));
    }

    void clear() { size_ = 0; }
    void fill(const node& one) { nodes_[size_++] = one; }
    void build() {
        for (std::int32_t i = size_ / 2; i-- > 0;) {
            descend(i, nodes_[i]);
        }
    }
    [[nodiscard]] std::int32_t size() const { return size_; }
    [[nodiscard]] const node& worst() const { return nodes_[0]; }
    void replace_worst(const node& one) { descend(0, one); }

  private:
    /// Puts `one` at i or below.
    void descend(std::int32_t i, const node one) {
        std::int32_t child = 2 * i + 1;
        for (; child + 1 < size_; child = 2 * i + 1) {
            child += static_cast<std::int32_t>(worse(nodes_[child + 1], nodes_[child]));
            if (!worse(nodes_[child], one)) {
                nodes_[i] = one;
                return;
            }
            nodes_[i] = nodes_[child];
            i = child;
        }
        if (child < size_ && worse(nodes_[child], one)) {
            nodes_[i] = nodes_[child];
            i = child;
        }
        nodes_[i] = one;
    }

    node* nodes_;
    std::int32_t size_ = 0;
};

/// For decay step n > 1: one skew heap for each class of positions mod n, the worst key on top. Nodes have
/// the numbers of the entries that they rank. Ages stay below rebase_limit, so age * log gamma is exact.
class class_heaps {
  public:
    struct node {
        double score;           // ordered()
        double high, low;       // score - (position / n) * log gamma, without rounding, as high + low
        double period;          // position / n, relative
        std::int32_t position;  // relative
        std::int32_t phase;     // position % n
        std::int32_t left, right;
    };

    /// Position `origin` has the relative position 0; nodes [k], links [k + 1], roots [decay step].
    class_heaps(node* nodes, std::int32_t** links, std::int32_t* roots, const HeadParams& head_params,
                position_t origin)
        : nodes_(nodes),
          links_(links),
          roots_(roots),
          steps_(head_params.decay_step),
          log_gamma_(head_params.log_gamma),
          origin_(origin) {}

    void clear() {
        for (std::int32_t phase = 0; phase < steps_; ++phase) {
            roots_[phase] = none;
        }
    }

    void insert(std::int32_t entry, position_t t, float score) {
        node& one = nodes_[entry];
        one.score = ordered(static_cast<double>(score));
        one.position = static_cast<std::int32_t>(t - origin_);
        one.phase = static_cast<std::int32_t>(t % steps_);
        one.period = period_of(t);
        one.left = one.right = none;
        // high + low is the difference itself (Knuth's two-sum), and a score that absorbs its decay stays
        // what it is.
        const double decay = one.period * log_gamma_;
        one.high = one.score - decay;
        const double taken = one.high - one.score;
        one.low = (one.score - (one.high - taken)) - (decay + taken);
        if (absorbs(one.score)) {
            one.low = 0.0;
        }
        roots_[one.phase] = merge(roots_[one.phase], entry);
    }

    /// The rounded value of the worst key at query q, ordered(): that of some top. At least one key is
    /// there.
    [[nodiscard]] double worst_value(position_t q) const {
        const double period = period_of(q);
        const auto phase = static_cast<std::int32_t>(q % steps_);
        double worst = std::numeric_limits<double>::infinity();
        for (std::int32_t i = 0; i < steps_; ++i) {
            if (roots_[i] != none) {
                const double value = value_of(nodes_[roots_[i]], period, phase);
                worst = value < worst ? value : worst;
            }
        }
        return worst;
    }

    /// Takes the worst key at query q out, whose value is `worst`, and returns its entry.
    std::int32_t remove_worst(position_t q, double worst) {
        const double period = period_of(q);
        const auto phase = static_cast<std::int32_t>(q % steps_);
        std::int32_t* youngest = nullptr;
        for (std::int32_t i = 0; i < steps_; ++i) {
            std::int32_t waiting = 0;
            links_[waiting++] = roots_ + i;
            while (waiting != 0) {
                std::int32_t* const link = links_[--waiting];
                if (*link == none || value_of(nodes_[*link], period, phase) != worst) {
                    continue;
                }
                node& one = nodes_[*link];
                if (youngest == nullptr || one.position > nodes_[*youngest].position) {
                    youngest = link;
                }
                // Values that absorb are equal without rounding: the youngest of those is on top.
                if (!absorbs(worst)) {
                    links_[waiting++] = &one.left;
                    links_[waiting++] = &one.right;
                }
            }
        }
        const std::int32_t entry = *youngest;
        *youngest = merge(nodes_[entry].left, nodes_[entry].right);
        return entry;
    }

  private:
    static constexpr std::int32_t none = -1;

    /// Whether x is the value of an infinite score or of a NaN: no decay changes it.
    static bool absorbs(double x) {
        return x == std::numeric_limits<double>::infinity() || x <= std::numeric_limits<double>::lowest();
    }
    static bool worse(const node& a, const node& b) {
        if (a.high != b.high) {
            return a.high < b.high;
        }
        return a.low != b.low ? a.low < b.low : a.position > b.position;
    }
    [[nodiscard]] double period_of(position_t t) const {
        return static_cast<double>(t / steps_ - origin_ / steps_);
    }
    /// effective_score(), from the query's period and phase: no division.
    [[nodiscard]] double value_of(const node& one, double period, std::int32_t phase) const {
        const double age = period - one.period - (one.phase > phase ? 1.0 : 0.0);
        return one.score + age * log_gamma_;
    }

    /// One heap of two. Children change sides on the way down, which keeps the paths short on average.
    std::int32_t merge(std::int32_t a, std::int32_t b) {
        std::int32_t top = none;
        std::int32_t* link = &top;
        while (a != none && b != none) {
            if (worse(nodes_[b], nodes_[a])) {
                std::swap(a, b);
            }
            *link = a;
            node& one = nodes_[a];
            a = one.right;
            one.right = one.left;
            link = &one.left;
        }
        *link = a != none ? a : b;
        return top;
    }

    node* nodes_;
    std::int32_t** links_;
    std::int32_t* roots_;
    std::int32_t steps_;
    double log_gamma_;
    position_t origin_;
};

/// top_k_set's calls and decisions for one chunk of one head. The entries are in the caller's memory, in no
/// order.
class chunk_top_k {
  public:
    /// Bytes of `memory` for `top_k_slots` top-k slots.
    static std::size_t bytes(const HeadParams& head_params, std::size_t top_k_slots) {
        return layout(head_params, top_k_slots, nullptr).bytes;
    }

    /// entries [top_k_slots]; `memory` has bytes(). The chunk has `tokens` tokens from position `base` on.
    chunk_top_k(detail::top_k_entry* entries, std::byte* memory, std::size_t top_k_slots,
                const HeadParams& head_params, position_t limit, position_t base, std::int32_t tokens)
        : entries_(entries),
          head_params_(head_params),
          limit_(limit),
          origin_(base),
          scan_(entries, head_params, limit),
          memory_(layout(head_params, top_k_slots, memory)),
          heap_(memory_.priorities),
          classes_(memory_.classes, memory_.links, memory_.roots, head_params, base),
          way_(way_of(head_params)) {
        // A few candidates do not pay for the heaps of n classes.
        const position_t reach = base + tokens;
        if (way_ == by_class &&
            (tokens < least_tokens || reach / head_params.decay_step >= kvpolicy::rebase_limit)) {
            way_ = by_scan;
        }
    }

    /// A key that has slot `slot`, before any top-k update.
    void restore(position_t position, float score, std::int32_t key, std::int32_t slot) {
        entries_[size_++] = {0.0, position, score, key, slot};
        if (origin_ - position > max_distance) {
            way_ = by_scan;
        }
    }

    /// Key `position` leaves the window at query q and competes; the budget is above 0. q must not fall
    /// between calls.
    detail::top_k_outcome update(position_t position, float score, std::int32_t key, position_t q,
                                 std::int32_t free_slot) {
        if (way_ == by_scan) {
            return update_by_scan(position, score, key, q, free_slot);
        }
        if (size_ < head_params_.budget) {
            entries_[size_++] = {0.0, position, score, key, free_slot};
            return {detail::top_k_outcome::took_free_slot, free_slot, -1};
        }
        const std::int32_t entry =
            way_ == by_priority ? admit_by_priority(position, score, q) : admit_by_class(position, score, q);
        if (entry < 0) {
            return {detail::top_k_outcome::refused, -1, key};
        }
        detail::top_k_entry& one = entries_[entry];
        const std::int32_t evicted = one.key;
        one = {0.0, position, score, key, one.slot};
        return {detail::top_k_outcome::replaced, one.slot, evicted};
    }

    [[nodiscard]] std::int32_t size() const { return size_; }

  private:
    enum way : std::uint8_t { by_priority, by_class, by_scan };
    static constexpr std::int32_t max_classes = 256;  // beyond it a scan of the top-k slots is no slower
    static constexpr std::int32_t least_tokens = 16;
    static constexpr position_t max_distance = position_t{1} << 30;  // relative positions are int32

    struct parts {
        priority_heap::node* priorities = nullptr;
        class_heaps::node* classes = nullptr;
        std::int32_t** links = nullptr;
        std::int32_t* roots = nullptr;
        std::size_t bytes = 0;
    };

    static way way_of(const HeadParams& head_params) {
        // Without decay a score is a static priority for every step.
        if (head_params.decay_step == 1 || head_params.log_gamma == 0.0f) {
            return by_priority;
        }
        return head_params.decay_step <= max_classes ? by_class : by_scan;
    }

    static parts layout(const HeadParams& head_params, std::size_t top_k_slots, std::byte* memory) {
        parts all;
        const auto take = [&]<class Element>(Element*& array, std::size_t count) {
            array = memory == nullptr ? nullptr : reinterpret_cast<Element*>(memory + all.bytes);
            all.bytes += detail::aligned_size(count * sizeof(Element));
        };
        const way chosen = way_of(head_params);
        take(all.priorities, chosen == by_priority ? top_k_slots : 0);
        const bool by_classes = chosen == by_class && top_k_slots != 0;
        take(all.classes, by_classes ? top_k_slots : 0);
        take(all.links, by_classes ? top_k_slots + 1 : 0);
        take(all.roots, by_classes ? static_cast<std::size_t>(head_params.decay_step) : 0);
        return all;
    }

    detail::top_k_outcome update_by_scan(position_t position, float score, std::int32_t key, position_t q,
                                         std::int32_t free_slot) {
        if (!ranked_) {
            for (std::int32_t i = 0; i < size_; ++i) {
                const detail::top_k_entry one = entries_[i];
                scan_.restore(one.position, one.score, one.key, one.slot);
            }
            ranked_ = true;
        }
        const detail::top_k_outcome outcome = scan_.update(position, score, key, q, free_slot);
        size_ = scan_.size();
        return outcome;
    }

    [[nodiscard]] priority_heap::node priority(position_t t, float score, std::int32_t entry) const {
        return {ordered(static_priority(score, head_params_.log_gamma, t, base_)),
                static_cast<std::int32_t>(t - origin_), entry};
    }

    /// The entry that the candidate replaces, or -1.
    std::int32_t admit_by_priority(position_t t, float score, position_t q) {
        if (const position_t base = priority_base(q, limit_); !ranked_ || base != base_) {
            // Priorities are rounded anew, which may reorder near-equal keys.
            ranked_ = true;
            base_ = base;
            heap_.clear();
            for (std::int32_t i = 0; i < size_; ++i) {
                heap_.fill(priority(entries_[i].position, entries_[i].score, i));
            }
            heap_.build();
        }
        priority_heap::node candidate = priority(t, score, 0);
        if (!priority_heap::worse(heap_.worst(), candidate)) {
            return -1;
        }
        candidate.entry = heap_.worst().entry;
        heap_.replace_worst(candidate);
        return candidate.entry;
    }

    std::int32_t admit_by_class(position_t t, float score, position_t q) {
        if (!ranked_) {
            ranked_ = true;
            classes_.clear();
            for (std::int32_t i = 0; i < size_; ++i) {
                classes_.insert(i, entries_[i].position, entries_[i].score);
            }
        }
        const double value = ordered(rank_value(head_params_, score, t, q, limit_));
        const double worst = classes_.worst_value(q);
        if (!(value > worst)) {  // equal: the older key stays, and all that hold top-k slots are older
            return -1;
        }
        const std::int32_t entry = classes_.remove_worst(q, worst);
        classes_.insert(entry, t, score);
        return entry;
    }

    detail::top_k_entry* entries_;
    HeadParams head_params_;
    position_t limit_, origin_;
    detail::top_k_set scan_;
    parts memory_;
    priority_heap heap_;
    class_heaps classes_;
    way way_;
    bool ranked_ = false;
    position_t base_ = 0;
    std::int32_t size_ = 0;
};

}  // namespace kvpolicy::host_backend
