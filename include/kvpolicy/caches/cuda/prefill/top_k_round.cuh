// The keys of one round of top-k updates, by one block: V of agent_top_k_update.cuh, and the slots.
#pragma once

#include <kvpolicy/caches/cuda/prefill/top_k_update_params.cuh>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/policies/ranking.hpp>

#include <cub/block/block_radix_sort.cuh>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// How early a key is evicted: the larger code first, of equal ones the younger key.
struct eviction_rank {
    std::uint64_t code = 0;
    position_t position = -1;  // -1: no key, which is evicted after all others

    __device__ bool before(const eviction_rank& other) const {
        return code != other.code ? code > other.code : position > other.position;
    }
};

/// Shared memory of a block that ranks static priorities, up to Threads * Items keys at once.
template <int Threads, int Items>
struct static_round_memory {
    static constexpr int capacity = Threads * Items;
    static constexpr int warps = Threads / 32;
    static constexpr int counted = std::min(256, capacity);  // so many keys are ranked by comparing all pairs
    static constexpr int padded = (capacity + 255) / 256 * 256;
    static constexpr bool sorts = capacity > counted;

    using index = std::uint16_t;
    static constexpr index none = 0xffff;
    static_assert(capacity < none && capacity % 32 == 0);
    template <int Each>
    using sorter = cub::BlockRadixSort<std::uint32_t, Threads, Each, index, 5, false>;

    struct pairs_memory {
        std::uint64_t code[counted];
        position_t position[counted];
    };
    struct select_memory {
        std::int32_t counts[256];
        std::uint64_t prefix;
        std::int32_t wanted;
    };
    union {
        pairs_memory pairs;
        select_memory select;
        unsigned char sort[sorts ? sizeof(typename sorter<Items>::TempStorage) : 1];
        std::uint32_t keys[capacity];                 // sorted
        std::uint32_t present[warps][capacity / 32];  // by warp, bit r: the key of rank r holds a slot
    };
    alignas(16) index order[padded];     // a rank -> its key in V
    index rank[capacity];                // a key of V -> its rank; then the key whose slot it takes
    std::int32_t checkpoint[warps + 1];  // the cutoff at the begin of a warp's share
    int total[2][warps];                 // in turns, so that one barrier a scan is enough
    eviction_rank worst[warps];
};

/// One head of an entry by one block of Threads. A round has up to Threads * Items keys. Shared has order,
/// rank, total and worst.
template <int Threads, int Items, class Shared>
struct top_k_round {
    static constexpr int capacity = Threads * Items;
    static constexpr int warps = Threads / 32;
    using index = std::uint16_t;
    static constexpr index none = 0xffff;
    using shared = Shared;

    const top_k_update_params& params;
    const top_k_head& head;
    shared& memory;
    const HeadParams head_params;
    const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), warp = warp_id();
    // The head's parts of the workspace. Slots are numbered as in the cache.
    float* slot_score;
    position_t* slot_position;
    std::int32_t* holder;
    unsigned char* slot_protected;  // null: no key stays for its position
    expiry_t* past_expiry;
    expiry_t* chunk_expiry;
    const float* scores;         // [tokens]: of the key that leaves when token j comes
    const unsigned char* kinds;  // [tokens]
    std::int32_t* old_slot;      // [max_members]: of V's old keys
    std::int32_t* token;         // [max_members]: of V's candidates, the token at which it leaves
    std::int32_t* free_slot;     // [max_members]: of V's candidates, the slot of those that find a free one
    // The head between rounds.
    std::int32_t used, outside;  // slots in use, and those of them whose keys do not compete
    int turn = 0;                // of memory.total
    // A round.
    position_t base;            // of its priorities
    int free, old, candidates;  // free slots; keys of V
    int places;                 // K

    __device__ __forceinline__ top_k_round(const top_k_update_params& call, const top_k_head& of,
                                           std::int64_t pair, shared& block_memory)
        : params(call),
          head(of),
          memory(block_memory),
          head_params(of.head_params),
          slot_score(call.slot_score + pair * call.top_k_slots - of.first_slot),
          slot_position(call.slot_position + pair * call.top_k_slots - of.first_slot),
          holder(call.holder + pair * call.top_k_slots - of.first_slot),
          slot_protected(call.slot_protected == nullptr
                             ? nullptr
                             : call.slot_protected + pair * call.top_k_slots - of.first_slot),
          past_expiry(call.past_expiry + pair * call.max_entries),
          chunk_expiry(call.chunk_expiry + pair * call.most),
          scores(call.leaving_score + pair * call.most),
          kinds(call.leaving_kind + pair * call.most),
          old_slot(call.members + pair * 3 * call.max_members),
          token(old_slot + call.max_members),
          free_slot(token + call.max_members),
          used(of.num_long_range),
          outside(of.num_protected) {}

    /// The position of the key that leaves at token j.
    __device__ __forceinline__ position_t leaving(std::int32_t j) const {
        return head.base + j - head_params.window;
    }
    /// Where the expiry of the key is that leaves at token j.
    __device__ __forceinline__ std::int32_t name_of(std::int32_t j) const {
        const position_t u = leaving(j);
        return u < head.base ? HeadRows{head_params.sinks, head_params.window}.recent(u)
                             : head.capacity + static_cast<std::int32_t>(u - head.base);
    }
    __device__ __forceinline__ void expire(std::int32_t name, expiry_t at) const {
        (name < head.capacity ? past_expiry[name] : chunk_expiry[name - head.capacity]) = at;
    }

    __device__ __forceinline__ std::uint64_t code(float score, position_t t) const {
        return head_params.log_gamma == 0.0f
                   ? static_cast<std::uint64_t>(descending_key(score)) << 32
                   : descending_code(static_priority(score, head_params.log_gamma, t, base));
    }
    /// A key of V.
    __device__ __forceinline__ eviction_rank key_of(int v) const {
        if (v < old) {
            const position_t t = slot_position[old_slot[v]];
            return {code(slot_score[old_slot[v]], t), t};
        }
        const std::int32_t j = token[v - old];
        return {code(scores[j], leaving(j)), leaving(j)};
    }
    __device__ __forceinline__ eviction_rank key_of_slot(std::int32_t p) const {
        return {code(slot_score[p], slot_position[p]), slot_position[p]};
    }
    __device__ __forceinline__ bool competes(std::int32_t p) const {
        return slot_protected == nullptr || slot_protected[p] == 0;
    }

    /// The sum of `mine` over the threads before, and over all. One barrier.
    __device__ __forceinline__ block_sum scan(int mine) {
        const int through = warp_inclusive_sum(mine);
        if (lane == 31) {
            memory.total[turn][warp] = through;
        }
        __syncthreads();
        const block_sum sums = sum_of_warps<warps>(memory.total[turn]);
        turn ^= 1;
        return {sums.before + through - mine, sums.total};
    }

    /// The key that leaves at token j holds slot p from now on.
    __device__ __forceinline__ void put(std::int32_t p, std::int32_t j) const {
        const std::int32_t name = name_of(j);
        expire(name, never);
        holder[p] = name;
        slot_score[p] = scores[j];
        slot_position[p] = leaving(j);
        if (slot_protected != nullptr) {
            slot_protected[p] = 0;
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
