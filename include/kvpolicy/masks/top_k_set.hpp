// The top-k slots of one head, and its updates, on the host. Masks run it over a sequence, caches over a
// chunk; single steps of a cache decide the same by a scan (caches/host/entries.hpp).
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/top_k_heaps.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::detail {

/// A key that holds a top-k slot.
struct top_k_entry {
    double value;         // its rank value at the query of the last top-k update, of a set that scans
    position_t position;  // logical position
    float score;          // raw score
    std::int32_t key;     // the caller's name for it (an index into its arrays)
    std::int32_t slot;    // its place, 0 <= place < k; an admitted key takes its victim's
};

/// The outcome of a top-k update. `lost` is the evicted key: the candidate, a key that held a slot, or none.
struct top_k_outcome {
    enum : std::uint8_t { took_free_slot, replaced, refused } kind;
    std::int32_t slot;  // the candidate's place, where it has one
    std::int32_t lost;  // top_k_entry::key of the evicted key; the candidate's where refused; -1 where none
};

/// The k best of the keys that have competed so far. A full set finds the worst of them
///
///     by_priority  decay step 1, or no decay: on top of a heap of static priorities, O(log k)
///     by_class     decay step n > 1: on top of one of n heaps (class_heaps), O(n + log k)
///     by_scan      of all keys: many classes for few keys, few updates, or positions beyond the heaps' reach
class top_k_set {
  public:
    /// Top-k slots in use when at most `competitors` keys will ever compete.
    static std::int64_t capacity(const HeadParams& head_params, std::int64_t competitors) {
        return std::min<std::int64_t>(head_params.budget, competitors);
    }
    /// Bytes of the caller's memory for `top_k_slots` top-k slots.
    static std::size_t bytes(const HeadParams& head_params, std::size_t top_k_slots) {
        return layout(head_params, top_k_slots, nullptr).bytes;
    }
    /// The keys in that memory, in no order: size() of them.
    static top_k_entry* entries(std::byte* memory) { return reinterpret_cast<top_k_entry*>(memory); }

    /// `memory` has bytes(), aligned to detail::alignment. Updates are those of `tokens` tokens from position
    /// `base` on.
    top_k_set(std::byte* memory, std::size_t top_k_slots, const HeadParams& head_params, position_t limit,
              position_t base, std::int32_t tokens)
        : head_params_(head_params),
          limit_(limit),
          origin_(base),
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

    /// Puts a key that already holds a slot, before any top-k update.
    void restore(position_t position, float score, std::int32_t key, std::int32_t slot) {
        memory_.entries[size_++] = {0.0, position, score, key, slot};
        if (origin_ - position > max_distance) {
            way_ = by_scan;
        }
    }

    /// Key `position` leaves the window at query q and competes. q must not fall between calls. A candidate
    /// that finds the budget not used up gets `free_slot`; by default slots are counted by the keys that
    /// compete.
    top_k_outcome update(position_t position, float score, std::int32_t key, position_t q,
                         std::int32_t free_slot = -1) {
        if (size_ < head_params_.budget) {
            const std::int32_t slot = free_slot >= 0 ? free_slot : size_;
            memory_.entries[size_++] = {0.0, position, score, key, slot};
            return {top_k_outcome::took_free_slot, slot, -1};
        }
        if (head_params_.budget == 0) {
            return {top_k_outcome::refused, -1, key};
        }
        query_ = q;
        const std::int32_t entry = way_ == by_priority ? admit_by_priority(position, score)
                                   : way_ == by_class  ? admit_by_class(position, score)
                                                       : admit_by_scan(position, score);
        if (entry < 0) {
            return {top_k_outcome::refused, -1, key};
        }
        top_k_entry& one = memory_.entries[entry];
        const std::int32_t evicted = one.key;
        one = {one.value, position, score, key, one.slot};
        return {top_k_outcome::replaced, one.slot, evicted};
    }

    [[nodiscard]] std::int32_t size() const { return size_; }
    /// The worst key held after the last top-k update, which found no free slot: the boundary of the set.
    [[nodiscard]] const top_k_entry& worst() const {
        const std::int32_t entry = way_ == by_priority ? heap_.worst().entry
                                   : way_ == by_class
                                       ? classes_.find_worst(query_, classes_.worst_value(query_))
                                       : find_worst();
        return memory_.entries[entry];
    }

  private:
    enum way : std::uint8_t { by_priority, by_class, by_scan };
    static constexpr std::int32_t max_classes = 256;  // beyond it a scan of the top-k slots is no slower
    static constexpr std::int32_t least_tokens = 16;
    static constexpr position_t max_distance = position_t{1} << 30;  // relative positions are int32

    struct parts {
        top_k_entry* entries = nullptr;
        priority_heap::node* priorities = nullptr;
        class_heaps::node* classes = nullptr;
        std::int32_t** links = nullptr;
        std::int32_t* roots = nullptr;
        std::size_t bytes = 0;
    };

    /// Whether n tops take less time to look at than k keys.
    static bool has_classes(const HeadParams& head_params) {
        const std::int32_t n = head_params.decay_step;
        return n > 1 && n <= max_classes && 2 * n <= head_params.budget;
    }
    static way way_of(const HeadParams& head_params) {
        if (!std::isfinite(head_params.log_gamma)) {
            return by_scan;
        }
        // Without decay a score is a static priority for every step.
        if (head_params.decay_step == 1 || head_params.log_gamma == 0.0f) {
            return by_priority;
        }
        return has_classes(head_params) ? by_class : by_scan;
    }

    /// Bytes do not depend on log gamma, which may be learned.
    static parts layout(const HeadParams& head_params, std::size_t top_k_slots, std::byte* memory) {
        parts all;
        const auto take = [&]<class Element>(Element*& array, std::size_t count) {
            array = memory == nullptr ? nullptr : reinterpret_cast<Element*>(memory + all.bytes);
            all.bytes += aligned_size(count * sizeof(Element));
        };
        take(all.entries, top_k_slots);
        const bool classes = has_classes(head_params) && top_k_slots != 0;
        take(all.classes, classes ? top_k_slots : 0);
        take(all.links, classes ? top_k_slots + 1 : 0);
        take(all.roots, classes ? static_cast<std::size_t>(head_params.decay_step) : 0);
        take(all.priorities, classes ? 0 : top_k_slots);
        if (classes) {  // a set has one of both
            static_assert(sizeof(priority_heap::node) <= sizeof(class_heaps::node));
            all.priorities = reinterpret_cast<priority_heap::node*>(all.classes);
        }
        return all;
    }

    /// Whether static priorities must be computed, since none are, or since their base moves: where it does,
    /// rounding may order near-equal keys anew.
    bool moves_base() {
        const position_t base = priority_base(query_, limit_);
        const bool moves = !ranked_ || base != base_;
        ranked_ = true;
        base_ = base;
        return moves;
    }

    [[nodiscard]] priority_heap::node priority(position_t t, float score, std::int32_t entry) const {
        return {ordered(static_priority(score, head_params_.log_gamma, t, base_)),
                static_cast<std::int32_t>(t - origin_), entry};
    }

    // The entry that a candidate replaces, or -1; by_scan, the candidate's value is there already.

    std::int32_t admit_by_priority(position_t t, float score) {
        if (moves_base()) {
            heap_.clear();
            for (std::int32_t i = 0; i < size_; ++i) {
                heap_.fill(priority(memory_.entries[i].position, memory_.entries[i].score, i));
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

    std::int32_t admit_by_class(position_t t, float score) {
        if (!ranked_) {
            ranked_ = true;
            classes_.clear();
            for (std::int32_t i = 0; i < size_; ++i) {
                classes_.insert(i, memory_.entries[i].position, memory_.entries[i].score);
            }
        }
        const double value = ordered(rank_value(head_params_, score, t, query_, limit_));
        const double worst = classes_.worst_value(query_);
        if (!(value > worst)) {  // equal: the older key stays, and all that hold top-k slots are older
            return -1;
        }
        const std::int32_t entry = classes_.remove_worst(query_, worst);
        classes_.insert(entry, t, score);
        return entry;
    }

    std::int32_t admit_by_scan(position_t t, float score) {
        const auto rank = [this](float s, position_t p) {
            return rank_value(head_params_, s, p, query_, limit_);
        };
        if (moves_base() || head_params_.decay_step != 1) {
            for (std::int32_t i = 0; i < size_; ++i) {
                memory_.entries[i].value = rank(memory_.entries[i].score, memory_.entries[i].position);
            }
        }
        const std::int32_t entry = find_worst();
        top_k_entry& one = memory_.entries[entry];
        const double value = rank(score, t);
        if (!ranks_before(value, t, one.value, one.position)) {
            return -1;
        }
        one.value = value;
        return entry;
    }
    [[nodiscard]] std::int32_t find_worst() const {
        const auto better = [](const top_k_entry& a, const top_k_entry& b) {
            return ranks_before(a.value, a.position, b.value, b.position);
        };
        const top_k_entry* const all = memory_.entries;
        return static_cast<std::int32_t>(std::max_element(all, all + size_, better) - all);
    }

    HeadParams head_params_;
    position_t limit_, origin_;
    parts memory_;
    priority_heap heap_;
    class_heaps classes_;
    way way_;
    bool ranked_ = false;
    position_t base_ = 0;
    position_t query_ = 0;  // of the last top-k update of a full set
    std::int32_t size_ = 0;
};

}  // namespace kvpolicy::detail
