// The top-k updates of a chunk for one head whose keys rank by the query (decay steps n > 1), by one block:
// in rounds that rank keys by class, or one candidate after another with a scan of the top-k slots.
//
// Positions and slots equal those of single steps.
#pragma once

#include <kvpolicy/caches/cuda/prefill/agent_top_k_round.cuh>
#include <kvpolicy/caches/cuda/prefill/top_k_round.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/masks/cuda/agent_decayed_round.cuh>
#include <kvpolicy/masks/cuda/decay_classes.cuh>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The keys of a round: old ones by their top-k slots, candidates by their tokens.
struct chunk_round_keys {
    const float* slot_score;
    const position_t* slot_position;
    const std::int32_t* old_slot;
    const float* scores;
    const std::int32_t* tokens;
    int old;
    position_t first;  // the first candidate's position

    __device__ float score(int v) const {
        return v < old ? slot_score[old_slot[v]] : scores[tokens[v - old]];
    }
    __device__ std::int32_t token(int v) const {
        return v < old ? static_cast<std::int32_t>(slot_position[old_slot[v]] - first)
                       : tokens[v - old] - tokens[0];
    }
};

struct decayed_update_memory : decayed_round_memory<decayed_round_threads, decayed_round_items> {
    eviction_rank worst[decayed_round_threads / 32];
};
static_assert(sizeof(decayed_update_memory) <= 99 * 1024, "the least that a block of any GPU can have");

struct agent_decayed_update
    : agent_top_k_round<decayed_round_threads, decayed_round_items, decayed_update_memory> {
    static constexpr int threads = decayed_round_threads;
    using agent_top_k_round::agent_top_k_round;

    __device__ __forceinline__ void run() {
        constexpr std::int32_t few_tokens = 16;  // they do not pay for a sort
        const position_t span = head.base + head.tokens - oldest();
        if (head.tokens <= few_tokens || !ranks_by_class(head_params, span)) {
            for (std::int32_t j = head.first_leaving; j < head.tokens; ++j) {
                update_one(j);
                __syncthreads();
            }
            return;
        }
        const decay_clock clock(head_params, span);
        for (std::int32_t next = head.first_leaving; next < head.tokens;) {
            run_round(next, clock);
        }
    }

  private:
    /// The position of the oldest key that competes, or that leaves the window.
    __device__ __forceinline__ position_t oldest() {
        std::int32_t slot = -1;
        const position_t old_key =
            find_minimum(
                [this](std::int32_t p) {
                    return eviction_rank{~static_cast<std::uint64_t>(slot_position[p]), slot_position[p]};
                },
                slot)
                .position;
        __syncthreads();
        return old_key < 0 ? leaving(head.first_leaving) : old_key;
    }

    __device__ __forceinline__ void run_round(std::int32_t& next, const decay_clock& clock) {
        const int competing = used - outside;
        free = head_params.budget - competing;
        // A turn of gather() fits beside the largest budget of rounds.
        static_assert(decayed_round_items / 4 * decayed_round_threads <=
                      decayed_round_keys - decayed_round_keys / 4 * 3);
        const int staying =
            gather(next, head.tokens, capacity - competing, [](std::int32_t) { return true; });  // 1
        if (candidates > free) {
            old = competing;
            list_old([](std::int32_t) { return true; });  // 2
            const chunk_round_keys keys{slot_score, slot_position, old_slot,         scores,
                                        token,      old,           leaving(token[0])};
            agent_decayed_round<threads, decayed_round_items, decayed_update_memory, chunk_round_keys> round(
                memory, keys, clock, head_params, old, candidates, head_params.budget);
            round.run();                                                                   // 3
            write_decided(old + candidates, [&](int rank) { return round.holds(rank); });  // 4, 5, 6
        } else {
            write_into_free_slots();
        }
        end_round(staying);
    }

    /// The key that leaves at token j, against the minimum of all slots.
    __device__ __forceinline__ void update_one(std::int32_t j) {
        const unsigned char kind = kinds[j];
        if (kind == leaving_kind_evicted) {
            return;
        }
        if (kind == leaving_kind_protected || used - outside < head_params.budget) {
            if (thread == 0) {
                put(used, j);
                if (kind == leaving_kind_protected) {
                    slot_protected[used] = 1;
                }
            }
            ++used;
            outside += kind == leaving_kind_protected ? 1 : 0;
            return;
        }
        const auto code_of = [&](float score, position_t t) {
            return descending_code(rank_value(head_params, score, t, head.base + j));
        };
        std::int32_t slot = -1;
        const eviction_rank minimum = find_minimum(
            [&](std::int32_t p) {
                return eviction_rank{code_of(slot_score[p], slot_position[p]), slot_position[p]};
            },
            slot);
        if (slot >= 0 && code_of(scores[j], leaving(j)) < minimum.code) {
            expire(holder[slot], j);
            put(slot, j);
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
