// One step of the heads of a layer that share a budget: which of the keys that leave the heads' windows are
// admitted, and which pairs (head, key) are evicted for them. The decision reads the cache; then each head's
// entries change by themselves.
#pragma once

#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// A pair as it ranks at a query.
struct shared_pair {
    double value;
    position_t position;
    std::int32_t head;
    std::int32_t slot;  // the head's top-k slot; -1: the key that leaves the window
};

/// Whether pair a is evicted before pair b.
inline bool evicted_before(const shared_pair& a, const shared_pair& b) {
    return ranks_before(b.value, b.position, b.head, a.value, a.position, a.head);
}

/// What a step does to one head.
struct shared_head_step {
    shared_pair worst;           // of the slots that the head still has, if it has one
    shared_pair candidate;       // the key that leaves the window
    std::int32_t competitors;    // slots whose keys compete, less those evicted; and an admitted candidate
    std::int32_t evicted;        // slots that the head gives up
    std::int32_t first_evicted;  // the first of them among those of all heads
    std::int32_t slots_after;    // top-k slots in use after the step
    bool has_worst;
    bool takes_slot;    // the candidate is admitted
    bool is_protected;  // for its position alone: it does not compete
    bool gives_pages;   // see write_shared_heads()
};

/// The step of one sequence of a layer, in the caller's workspace.
template <class Cache>
class shared_step {
    using P = typename Cache::policy_type;

  public:
    static std::size_t bytes(const Cache& cache) {
        const auto heads = static_cast<std::size_t>(cache.kv_heads);
        return detail::aligned_size(heads * sizeof(shared_head_step)) +
               detail::aligned_size(heads * sizeof(shared_pair));
    }
    shared_step(const Cache& cache, std::int32_t seq, std::byte* memory)
        : cache_(cache),
          seq_(seq),
          q_(cache.length[seq]),
          heads_(reinterpret_cast<shared_head_step*>(memory)),
          evicted_(reinterpret_cast<shared_pair*>(
              memory +
              detail::aligned_size(static_cast<std::size_t>(cache.kv_heads) * sizeof(shared_head_step)))) {}

    /// The part of one head: what leaves its window with score `leaving`, and its worst slot.
    void look(std::int32_t head, float leaving) const {
        const head_state<Cache> rows(cache_, seq_, head);
        shared_head_step& mine = heads_[head] = {};
        mine.competitors = rows.competitors();
        const std::int32_t known = cache_.victim[rows.index];
        const bool ranks_stand = cache_.is_static && priority_base(q_, cache_.rebase_limit) ==
                                                         priority_base(q_ - 1, cache_.rebase_limit);
        mine.has_worst = mine.competitors > 0;
        if (mine.has_worst) {
            mine.worst = known >= 0 && ranks_stand ? pair_at(rows, head, known) : worst_slot(rows, head);
        }
        const position_t u = q_ - rows.head_params.window;
        if (u < rows.head_params.sinks) {
            return;
        }
        mine.is_protected = rows.keeps(u);
        mine.takes_slot = mine.is_protected || cache_.gate.open(leaving, rows.head_params);
        if (mine.takes_slot && !mine.is_protected) {
            mine.candidate = pair_of(rows, head, leaving, u, -1);
            ++mine.competitors;
        }
    }

    /// Evicts pairs until the layer has slots for the others: all heads have looked.
    void decide() const {
        std::int64_t competitors = 0;
        std::int32_t evictions = 0;
        std::fill_n(evicted_, cache_.kv_heads, shared_pair{0.0, 0, -1, -1});
        const auto evict = [&](std::int32_t head) {
            evict_worst(head, evictions);
            --competitors;
        };
        for (std::int32_t head = 0; head < cache_.kv_heads; ++head) {
            competitors += heads_[head].competitors;
        }
        for (std::int32_t head = 0; head < cache_.kv_heads; ++head) {
            if (heads_[head].competitors > cache_.slots_of(head)) {
                evict(head);
            }
        }
        while (competitors > cache_.shared_slots) {
            std::int32_t worst = -1;
            for (std::int32_t head = 0; head < cache_.kv_heads; ++head) {
                if (heads_[head].competitors > cache_.all_params[head].floor &&
                    (worst < 0 || evicted_before(worst_of(head), worst_of(worst)))) {
                    worst = head;
                }
            }
            evict(worst);  // floors are at most the slots
        }
        for (std::int32_t at = evictions - 1; at >= 0; --at) {
            heads_[evicted_[at].head].first_evicted = at;
        }
        for (std::int32_t head = 0; head < cache_.kv_heads; ++head) {
            shared_head_step& mine = heads_[head];
            mine.slots_after = cache_.num_long_range[cache_.head_index(seq_, head)] +
                               (mine.takes_slot ? 1 : 0) - mine.evicted;
        }
    }

    /// Entries of a head after the step.
    [[nodiscard]] std::int32_t rows_after(std::int32_t head) const {
        return cache_.layout(head).used(q_ + 1, heads_[head].slots_after);
    }
    [[nodiscard]] bool& gives_pages(std::int32_t head) const { return heads_[head].gives_pages; }

    /// Writes the decision to the head's top-k slots, before the new token overwrites the ring row of the
    /// key that leaves. The candidate takes the slot of the oldest evicted key, or the next one. Then the
    /// slots of the other evicted keys are filled with the last ones, from the highest down. Calls
    /// written(row) for rows that changed.
    template <class Written>
    void apply(std::int32_t head, float leaving, const Written& written) const {
        const head_state<Cache> rows(cache_, seq_, head);
        const shared_head_step& mine = heads_[head];
        std::int32_t& used_slots = cache_.num_long_range[rows.index];
        shared_pair* left = evicted_ + mine.first_evicted;
        shared_pair* const end = left + mine.evicted;
        std::int32_t victim = mine.has_worst ? mine.worst.slot : -1;
        if (mine.takes_slot) {
            std::int32_t taken = used_slots;
            if (left != end) {
                std::iter_swap(left, std::min_element(left, end, [](const auto& a, const auto& b) {
                                   return a.position < b.position;
                               }));
                taken = left++->slot;
            } else {
                ++used_slots;
            }
            const position_t u = q_ - rows.head_params.window;
            const std::int32_t from = rows.layout.recent(u), to = rows.layout.slot(taken);
            rows.put(to, rows.k(from), rows.v(from), u, leaving);
            written(to);
            if constexpr (P::has_keep) {
                cache_.num_protected[rows.index] += mine.is_protected ? 1 : 0;
            }
            if (!mine.is_protected && (!mine.has_worst || evicted_before(mine.candidate, mine.worst))) {
                victim = taken;
            }
        }
        std::sort(left, end, [](const auto& a, const auto& b) { return a.slot > b.slot; });
        for (; left != end; ++left) {
            const std::int32_t last = --used_slots, from = rows.layout.slot(last),
                               to = rows.layout.slot(left->slot);
            if (from != to) {
                rows.put(to, rows.k(from), rows.v(from), rows.position(from), rows.score(from));
                victim = victim == last ? left->slot : victim;
                written(to);
            }
            written(from);
        }
        cache_.victim[rows.index] = victim;
    }

  private:
    [[nodiscard]] shared_pair pair_of(const head_state<Cache>& rows, std::int32_t head, float score,
                                      position_t t, std::int32_t slot) const {
        return {shared_rank_value(rows.head_params, cache_.is_static, score, t, q_, cache_.rebase_limit), t,
                head, slot};
    }
    [[nodiscard]] shared_pair pair_at(const head_state<Cache>& rows, std::int32_t head,
                                      std::int32_t slot) const {
        const std::int32_t row = rows.layout.slot(slot);
        return pair_of(rows, head, rows.score(row), rows.position(row), slot);
    }
    /// The worst of the keys that hold the head's top-k slots, but for those evicted: [first, end).
    [[nodiscard]] shared_pair worst_slot(const head_state<Cache>& rows, std::int32_t head,
                                         const shared_pair* first = nullptr,
                                         const shared_pair* end = nullptr) const {
        shared_pair worst{};
        worst.slot = -1;
        for (std::int32_t slot = 0; slot < cache_.num_long_range[rows.index]; ++slot) {
            if (rows.keeps(rows.position(rows.layout.slot(slot))) ||
                std::any_of(first, end,
                            [&](const shared_pair& one) { return one.head == head && one.slot == slot; })) {
                continue;
            }
            const shared_pair one = pair_at(rows, head, slot);
            worst = worst.slot < 0 || evicted_before(one, worst) ? one : worst;
        }
        return worst;
    }

    [[nodiscard]] bool has_candidate(const shared_head_step& mine) const {
        return mine.takes_slot && !mine.is_protected;
    }
    /// The worst pair of a head with competitors.
    [[nodiscard]] const shared_pair& worst_of(std::int32_t head) const {
        const shared_head_step& mine = heads_[head];
        return !mine.has_worst || (has_candidate(mine) && evicted_before(mine.candidate, mine.worst))
                   ? mine.candidate
                   : mine.worst;
    }
    /// Evicts the worst pair of a head. `evictions`: slots that have been given up, of all heads; those of a
    /// head stand together.
    void evict_worst(std::int32_t head, std::int32_t& evictions) const {
        shared_head_step& mine = heads_[head];
        --mine.competitors;
        if (&worst_of(head) == &mine.candidate) {
            mine.takes_slot = false;
            return;
        }
        std::int32_t at = 0;
        while (at < evictions && evicted_[at].head != head) {
            ++at;
        }
        std::copy_backward(evicted_ + at, evicted_ + evictions, evicted_ + evictions + 1);
        evicted_[at] = mine.worst;
        ++evictions;
        ++mine.evicted;
        mine.has_worst = mine.competitors > (has_candidate(mine) ? 1 : 0);
        if (mine.has_worst) {
            const head_state<Cache> rows(cache_, seq_, head);
            mine.worst = worst_slot(rows, head, evicted_, evicted_ + evictions);
        }
    }

    const Cache& cache_;
    std::int32_t seq_;
    position_t q_;
    shared_head_step* heads_;  // [kv_heads]
    shared_pair* evicted_;     // [kv_heads]
};

}  // namespace kvpolicy::host_backend
