// A chunk of tokens for the heads of a layer that share a budget: after each head has said what leaves its
// window (chunk_decision), which pairs (head, key) hold the layer's slots at each token.
#pragma once

#include <kvpolicy/caches/host/chunk_plan.hpp>
#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/shared_top_k_set.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// The chunk of one sequence. It fills expiries, holders and counts of the heads' plans, with slots as single
/// steps would give them (shared_step::apply).
template <class Cache>
class shared_chunk {
  public:
    static std::size_t bytes(const Cache& cache) { return memory_of(cache, nullptr).bytes; }

    /// plan_of(head) is the head's plan, decided; `data` has bytes().
    template <class PlanOf>
    shared_chunk(const Cache& cache, std::int32_t seq, std::int32_t tokens, const PlanOf& plan_of,
                 std::byte* data)
        : cache_(cache),
          seq_(seq),
          tokens_(tokens),
          base_(cache.length[seq]),
          memory_(memory_of(cache, data)),
          set_(memory_.set, sizes_of(cache),
               {cache.all_params, cache.kv_heads, cache.shared_slots, cache.is_static}, cache.rebase_limit,
               base_, tokens) {
        for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
            memory_.plans[head] = plan_of(head);
        }
    }

    void run() {
        for (std::int32_t head = 0; head < cache_.kv_heads; ++head) {
            take_present(head);
        }
        for (std::int32_t j = 0; j < tokens_; ++j) {
            lost_ = 0;
            std::fill_n(memory_.candidates, cache_.kv_heads, none);
            for (std::int32_t head = 0; head < cache_.kv_heads; ++head) {
                compete(head, j);
            }
            // By head; of a head the oldest key first.
            std::sort(memory_.lost, memory_.lost + lost_, [](const lost_slot& a, const lost_slot& b) {
                return a.head != b.head ? a.head < b.head : a.position < b.position;
            });
            lost_slot* next = memory_.lost;
            for (std::int32_t head = 0; head < cache_.kv_heads; ++head) {
                lost_slot* const end = std::find_if(next, memory_.lost + lost_,
                                                    [&](const lost_slot& one) { return one.head != head; });
                place(head, j, next, end);
                next = end;
            }
        }
    }

  private:
    struct lost_slot {
        position_t position;
        std::int32_t head, slot;
    };
    struct parts {
        chunk_plan* plans = nullptr;         // [kv_heads]
        std::int32_t* candidates = nullptr;  // [kv_heads]: names of keys that get slots at a token, or none
        lost_slot* lost = nullptr;           // [kv_heads]: slots given up at a token
        std::byte* set = nullptr;
        std::size_t bytes = 0;
    };
    static constexpr std::int32_t none = -1;

    static parts memory_of(const Cache& cache, std::byte* data) {
        parts all;
        const auto heads = static_cast<std::size_t>(cache.kv_heads);
        const auto take = [&]<class Element>(Element*& array, std::size_t count) {
            array = data == nullptr ? nullptr : reinterpret_cast<Element*>(data + all.bytes);
            all.bytes += detail::aligned_size(count * sizeof(Element));
        };
        take(all.plans, heads);
        take(all.candidates, heads);
        take(all.lost, heads);
        take(all.set, detail::shared_top_k_set::bytes(sizes_of(cache)));
        return all;
    }
    static detail::shared_sizes sizes_of(const Cache& cache) {
        detail::shared_sizes sizes;
        for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
            sizes.add(cache.all_params[head], static_cast<std::int32_t>(cache.max_seq_len));
        }
        return sizes;
    }

    /// The slots as they are before the chunk.
    void take_present(std::int32_t head) {
        const head_state<Cache> rows(cache_, seq_, head);
        const chunk_plan& plan = memory_.plans[head];
        for (std::int32_t slot = 0; slot < plan.counts->num_long_range; ++slot) {
            const std::int32_t row = rows.layout.slot(slot);
            const position_t t = rows.position(row);
            hold(plan, slot, {t, rows.score(row), row});
            if (!rows.keeps(t)) {
                set_.restore({t, rows.score(row), head, row});
            }
        }
    }
    static void hold(const chunk_plan& plan, std::int32_t slot, const shared_holder& one) {
        plan.holders[slot] = one;
        plan.slot_of[one.key] = slot;
    }

    /// The key that leaves a head's window at token j competes, or has a slot for its position.
    void compete(std::int32_t head, std::int32_t j) {
        const chunk_plan& plan = memory_.plans[head];
        const leaving_key key = plan.leaving[j];
        if (key.kind == leaving_key::evicted) {
            return;
        }
        const std::int32_t name = name_of(head, j);
        memory_.candidates[head] = name;
        plan.expiry[name] = never;
        if (key.kind == leaving_key::is_protected) {
            ++plan.counts->num_protected;
            return;
        }
        detail::shared_entry evicted{};
        if (!set_.update({leaving_position(head, j), key.score, head, name}, base_ + j, evicted)) {
            return;
        }
        const chunk_plan& its = memory_.plans[evicted.head];
        its.expiry[evicted.key] = j;
        if (evicted.key == memory_.candidates[evicted.head]) {
            memory_.candidates[evicted.head] = none;
        } else {
            memory_.lost[lost_++] = {evicted.position, evicted.head, its.slot_of[evicted.key]};
        }
    }

    [[nodiscard]] position_t leaving_position(std::int32_t head, std::int32_t j) const {
        return base_ + j - cache_.all_params[head].window;
    }
    [[nodiscard]] std::int32_t name_of(std::int32_t head, std::int32_t j) const {
        const position_t u = leaving_position(head, j);
        return u < base_ ? cache_.layout(head).recent(u)
                         : memory_.plans[head].expirable + static_cast<std::int32_t>(u - base_);
    }

    /// The candidate of a head, if it is admitted, takes the slot of the oldest evicted key, or the next one.
    /// The other slots of [lost, end) are filled with the last ones, from the highest down.
    void place(std::int32_t head, std::int32_t j, lost_slot* lost, lost_slot* end) {
        const chunk_plan& plan = memory_.plans[head];
        std::int32_t& used_slots = plan.counts->num_long_range;
        if (const std::int32_t name = memory_.candidates[head]; name != none) {
            hold(plan, lost != end ? lost++->slot : used_slots++,
                 {leaving_position(head, j), plan.leaving[j].score, name});
        }
        std::sort(lost, end, [](const lost_slot& a, const lost_slot& b) { return a.slot > b.slot; });
        for (; lost != end; ++lost) {
            const shared_holder last = plan.holders[--used_slots];
            if (lost->slot != used_slots) {
                hold(plan, lost->slot, last);
            }
        }
    }

    const Cache& cache_;
    std::int32_t seq_, tokens_;
    position_t base_;
    parts memory_;
    detail::shared_top_k_set set_;
    std::int32_t lost_ = 0;  // slots given up at the token
};

}  // namespace kvpolicy::host_backend
