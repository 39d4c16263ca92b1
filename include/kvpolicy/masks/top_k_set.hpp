// The top-k slots of one head, and its updates. Masks run it over a sequence, caches over a chunk; single
// steps of a cache decide the same by a scan (caches/host/entries.hpp).
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::detail {

/// A key that holds a top-k slot.
struct top_k_entry {
    double value;         // its rank value at the query of the last top-k update
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

/// The k best of the keys that have competed so far. Worst on top of a binary heap where priorities are
/// static (decay step 1), a scan of the keys held otherwise.
/// Storage is the caller's: capacity(head_params, competitors) entries.
class top_k_set {
  public:
    /// How many entries the storage needs when at most `competitors` keys will ever compete.
    static std::int64_t capacity(const HeadParams& head_params, std::int64_t competitors) {
        return std::min<std::int64_t>(head_params.budget, competitors);
    }

    top_k_set(top_k_entry* storage, const HeadParams& head_params, position_t limit)
        : entries_(storage), head_params_(head_params), limit_(limit) {}

    /// Puts a key that already holds a place, before any top-k update.
    void restore(position_t position, float score, std::int32_t key, std::int32_t slot) {
        entries_[size_++] = {0.0, position, score, key, slot};
        base_ = unknown;
    }

    /// Key `position` leaves the window at query q and competes. q must not fall between calls. A
    /// candidate that finds the budget not used up gets `free_slot`; by default places are counted by the
    /// keys that compete.
    top_k_outcome update(position_t position, float score, std::int32_t key, position_t q,
                         std::int32_t free_slot = -1) {
        top_k_entry candidate{rank_value(head_params_, score, position, q, limit_), position, score, key,
                              free_slot >= 0 ? free_slot : size_};
        if (head_params_.budget == 0) {
            return {top_k_outcome::refused, -1, key};
        }
        if (head_params_.decay_step == 1) {
            rebase(q);
        } else {
            rank_all(q);
        }
        if (size_ < head_params_.budget) {
            entries_[size_++] = candidate;
            if (head_params_.decay_step == 1) {
                std::push_heap(entries_, entries_ + size_, better);
            }
            return {top_k_outcome::took_free_slot, candidate.slot, -1};
        }
        top_k_entry* worst = entries_;
        if (head_params_.decay_step != 1) {
            worst = std::max_element(entries_, entries_ + size_, better);
        }
        if (!better(candidate, *worst)) {
            return {top_k_outcome::refused, -1, key};
        }
        const std::int32_t evicted = worst->key;
        candidate.slot = worst->slot;
        if (head_params_.decay_step == 1) {
            std::pop_heap(entries_, entries_ + size_, better);
            entries_[size_ - 1] = candidate;
            std::push_heap(entries_, entries_ + size_, better);
        } else {
            *worst = candidate;
        }
        return {top_k_outcome::replaced, candidate.slot, evicted};
    }

    [[nodiscard]] std::int32_t size() const { return size_; }
    /// The worst key held after the last top-k update, the boundary of the set; size() > 0.
    [[nodiscard]] const top_k_entry& worst() const {
        return head_params_.decay_step == 1 ? *entries_
                                            : *std::max_element(entries_, entries_ + size_, better);
    }
    /// The keys held, in no order.
    [[nodiscard]] const top_k_entry* begin() const { return entries_; }
    [[nodiscard]] const top_k_entry* end() const { return entries_ + size_; }

  private:
    static constexpr position_t unknown = -1;

    /// "a before b" as the standard heap wants it, with the worst key on top.
    static bool better(const top_k_entry& a, const top_k_entry& b) {
        return ranks_before(a.value, a.position, b.value, b.position);
    }

    void rank_all(position_t q) {
        for (std::int32_t i = 0; i < size_; ++i) {
            entries_[i].value = rank_value(head_params_, entries_[i].score, entries_[i].position, q, limit_);
        }
    }

    /// Static priorities hold for one base; where it moves, rounding may order near-equal keys anew.
    void rebase(position_t q) {
        const position_t base = priority_base(q, limit_);
        if (base == base_) {
            return;
        }
        base_ = base;
        rank_all(q);
        std::make_heap(entries_, entries_ + size_, better);
    }

    top_k_entry* entries_;
    HeadParams head_params_;
    position_t limit_;
    position_t base_ = unknown;
    std::int32_t size_ = 0;
};

}  // namespace kvpolicy::detail
