// The long-range places of one head, and the contest for them. Masks run it over a sequence, caches over a chunk; single
// steps of a cache decide the same by a scan (caches/host/entries.hpp).
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::detail {

/// A key that holds a long-range place.
struct contestant {
    double value;         // its rank value at the query of the last contest
    position_t position;  // logical position
    float score;          // raw score
    std::int32_t key;     // the caller's name for it (an index into its arrays)
    std::int32_t place;   // its place, 0 <= place < k; a winner takes its victim's
};

/// What became of a newcomer. `lost` is who gave way: the newcomer itself, a key that held a place, or nobody.
struct contest_outcome {
    enum : std::uint8_t { took_free_place, replaced, refused } kind;
    std::int32_t place;  // the newcomer's place, where it has one
    std::int32_t lost;   // contestant::key of the loser; the newcomer's where refused; -1 where nobody lost
};

/// The k best of the keys that have competed so far. Worst on top of a binary heap where priorities are static (decay
/// step 1), a scan of the survivors otherwise (for n > 1 a newcomer contests the survivors only).
/// Storage is the caller's: capacity(rule, competitors) entries.
class long_range_set {
  public:
    /// How many entries the storage needs when at most `competitors` keys will ever compete.
    static std::int64_t capacity(const HeadRule& rule, std::int64_t competitors) {
        return std::min<std::int64_t>(rule.budget, competitors);
    }

    long_range_set(contestant* storage, const HeadRule& rule, position_t limit)
        : entries_(storage), rule_(rule), limit_(limit) {}

    /// Puts a key that already holds a place, before any contest.
    void restore(position_t position, float score, std::int32_t key, std::int32_t place) {
        entries_[size_++] = {0.0, position, score, key, place};
        base_ = unknown;
    }

    /// Key `position` leaves the window at query q and competes. q must not fall between calls. A newcomer that finds the
    /// budget not used up gets `free_place`; by default places are counted by the keys that compete.
    contest_outcome contest(position_t position, float score, std::int32_t key, position_t q,
                            std::int32_t free_place = -1) {
        contestant newcomer{rank_value(rule_, score, position, q, limit_), position, score, key,
                            free_place >= 0 ? free_place : size_};
        if (rule_.budget == 0) {
            return {contest_outcome::refused, -1, key};
        }
        if (rule_.decay_step == 1) {
            rebase(q);
        } else {
            rank_all(q);
        }
        if (size_ < rule_.budget) {
            entries_[size_++] = newcomer;
            if (rule_.decay_step == 1) {
                std::push_heap(entries_, entries_ + size_, better);
            }
            return {contest_outcome::took_free_place, newcomer.place, -1};
        }
        contestant* worst = entries_;
        if (rule_.decay_step != 1) {
            worst = std::max_element(entries_, entries_ + size_, better);
        }
        if (!better(newcomer, *worst)) {
            return {contest_outcome::refused, -1, key};
        }
        const std::int32_t loser = worst->key;
        newcomer.place = worst->place;
        if (rule_.decay_step == 1) {
            std::pop_heap(entries_, entries_ + size_, better);
            entries_[size_ - 1] = newcomer;
            std::push_heap(entries_, entries_ + size_, better);
        } else {
            *worst = newcomer;
        }
        return {contest_outcome::replaced, newcomer.place, loser};
    }

    [[nodiscard]] std::int32_t size() const { return size_; }
    /// The worst survivor after the last contest, the boundary of the set; size() > 0.
    [[nodiscard]] const contestant& worst() const {
        return rule_.decay_step == 1 ? *entries_ : *std::max_element(entries_, entries_ + size_, better);
    }
    /// The survivors, in no order.
    [[nodiscard]] const contestant* begin() const { return entries_; }
    [[nodiscard]] const contestant* end() const { return entries_ + size_; }

  private:
    static constexpr position_t unknown = -1;

    /// "a before b" as the standard heap wants it, with the worst key on top.
    static bool better(const contestant& a, const contestant& b) {
        return ranks_before(a.value, a.position, b.value, b.position);
    }

    void rank_all(position_t q) {
        for (std::int32_t i = 0; i < size_; ++i) {
            entries_[i].value = rank_value(rule_, entries_[i].score, entries_[i].position, q, limit_);
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

    contestant* entries_;
    HeadRule rule_;
    position_t limit_;
    position_t base_ = unknown;
    std::int32_t size_ = 0;
};

}  // namespace kvpolicy::detail
