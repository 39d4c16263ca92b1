// Top-k updates of a budget that the heads of a layer share, where a sort does not do: floors and caps of
// heads, decays whose order depends on the query, and priorities whose base moves (rebase_limit). Exact and
// serial: one block per segment takes one candidate after another and looks at every held key,
// O(keys * slots / threads) per layer.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/masks/cuda/shared_mask_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A key that holds a slot of its layer, or competes for one.
struct layer_entry {
    float score;
    std::int32_t t;
    std::int32_t head;
};

/// How bad a key is: the larger code is evicted, then the younger key, then that of the higher head. No entry
/// (-1) is better than any.
struct layer_eviction_order {
    std::uint64_t code = 0;
    std::int32_t t = -1;
    std::int32_t head = -1;
    std::int32_t entry = -1;

    __device__ bool worse_than(const layer_eviction_order& other) const {
        if (code != other.code) {
            return code > other.code;
        }
        return t != other.t ? t > other.t : head > other.head;
    }
};

/// The worst of a warp's, in every lane.
__device__ inline layer_eviction_order worst_of_warp(layer_eviction_order mine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const layer_eviction_order other{__shfl_xor_sync(all_lanes, mine.code, distance),
                                         __shfl_xor_sync(all_lanes, mine.t, distance),
                                         __shfl_xor_sync(all_lanes, mine.head, distance),
                                         __shfl_xor_sync(all_lanes, mine.entry, distance)};
        if (other.worse_than(mine)) {
            mine = other;
        }
    }
    return mine;
}

inline constexpr int shared_top_k_threads = 512;

/// One segment by one block. `held` [heads] is the block's shared memory behind `memory`.
template <class Gate, class Keep>
struct shared_top_k_block {
    static constexpr int threads = shared_top_k_threads;
    static constexpr int warps = threads / 32;

    struct shared {
        layer_entry candidates[threads];
        layer_eviction_order worst[warps];
        int total[warps];
    };

    const shared_mask_params<Gate, Keep>& params;
    const plane_view<expiry_t>& out;
    const std::int32_t b;
    const segment_range tokens;  // of the segment
    const std::int32_t n;
    layer_entry* const entries;  // [slots + 1]
    shared& memory;
    std::int32_t* const held;  // [heads]: keys of a head that hold slots
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = lane_id();
    // The same in all threads.
    std::int32_t used = 0;    // entries in use, the spare one included
    std::int32_t spare = -1;  // an entry without a key
    std::int32_t size = 0;
    bool nan = false;

    __device__ __forceinline__ shared_top_k_block(const shared_mask_params<Gate, Keep>& call,
                                                  const plane_view<expiry_t>& to, std::int32_t sequence,
                                                  const segment_range& range, layer_entry* of_task,
                                                  shared& block_memory)
        : params(call),
          out(to),
          b(sequence),
          tokens(range),
          n(range.length()),
          entries(of_task),
          memory(block_memory),
          held(reinterpret_cast<std::int32_t*>(&block_memory + 1)) {}

    __device__ __forceinline__ void run() {
        for (std::int32_t h = thread; h < params.heads; h += threads) {
            held[h] = 0;
        }
        const std::int32_t units = n * params.heads;
        for (std::int32_t first = 0; first < units; first += threads) {
            const int candidates = gather(first + thread, units);  // 1
            for (int i = 0; i < candidates; ++i) {
                update(memory.candidates[i]);  // 2
            }
            __syncthreads();
        }
    }

  private:
    __device__ __forceinline__ void expire(const layer_entry& key, expiry_t value) const {
        params.by_head().expire(out, b, key.head, tokens, key.t, value);
    }

    /// Lists the candidates among the next units, one per thread, and writes the expiries of the others.
    __device__ __forceinline__ int gather(std::int32_t unit, std::int32_t units) {
        bool competes = false;
        layer_entry mine{};
        if (unit < units) {
            const layer_key key = params.key_of(unit, n);
            const HeadParams head_params = params.all_params.of(key.head);
            mine = {0.0f, key.t, key.head};
            if (params.leaves(head_params, key.t, n)) {
                mine.score = params.scores.head(b, key.head)[tokens.begin + key.t];
                nan = nan || mine.score != mine.score;
                competes = params.gate.open(mine.score, head_params);
            }
            if (!competes) {
                params.by_head().expire_alone(out, b, key.head, tokens, head_params, key.t);
            }
        }
        const unsigned coming = __ballot_sync(all_lanes, competes);
        if (lane == 0) {
            memory.total[thread / 32] = __popc(coming);
        }
        __syncthreads();
        const block_sum sums = sum_of_warps<warps>(memory.total);
        if (competes) {
            memory.candidates[sums.before + __popc(coming & lanes_before(lane))] = mine;
        }
        __syncthreads();
        return sums.total;
    }

    /// One candidate: it is put beside the held keys, and above its head's cap or the layer's slots the worst
    /// key is evicted.
    __device__ __forceinline__ void update(const layer_entry candidate) {
        const HeadParams head_params = params.all_params.of(candidate.head);
        const std::int32_t entry = spare >= 0 ? spare : used++;
        spare = -1;
        ++size;
        const bool above_cap = held[candidate.head] >= head_params.cap;
        const bool full = size > params.layer_params.budget;
        __syncthreads();
        if (thread == 0) {
            entries[entry] = candidate;
            ++held[candidate.head];
            expire(candidate, never);
        }
        __syncthreads();
        if (!above_cap && !full) {
            return;
        }
        const std::int32_t q = candidate.t + head_params.window;
        layer_eviction_order mine;
        for (std::int32_t i = thread; i < used; i += threads) {
            const layer_entry key = entries[i];
            const HeadParams of_key = params.all_params.of(key.head);
            if (above_cap ? key.head == candidate.head : held[key.head] > of_key.floor) {
                const double value =
                    shared_rank_value(of_key, params.is_static, key.score, key.t, q, params.limit);
                const layer_eviction_order its{descending_code(value), key.t, key.head, i};
                if (its.worse_than(mine)) {
                    mine = its;
                }
            }
        }
        mine = worst_of_warp(mine);
        if (lane == 0) {
            memory.worst[thread / 32] = mine;
        }
        __syncthreads();
        const layer_eviction_order worst = worst_of_warp(memory.worst[lane < warps ? lane : 0]);
        spare = worst.entry;
        --size;
        __syncthreads();
        if (thread == 0) {
            --held[worst.head];
            expire({0.0f, worst.t, worst.head}, q);
        }
        __syncthreads();
    }
};

/// Expiries of layers whose heads share a budget, one top-k update after another.
///
/// Grid: batch * segments. Block: shared_top_k_threads. Shared memory: shared_top_k_block::shared and [heads]
/// int32 (dynamic). Reads scores [B, Hkv, S], fp32. Overwrites out [B, Hkv, S], int32. `entries` [grid,
/// capacity] holds the keys. Reports status_bad_length and status_nan_score.
/// Per shared_top_k_threads units:
/// 1. Gather the candidates, in the order in which they leave their windows.
/// 2. Update: one candidate after another.
template <class Gate, class Keep>
__global__ void __launch_bounds__(shared_top_k_threads)
    shared_top_k_kernel(const shared_mask_params<Gate, Keep> params, const plane_view<expiry_t> out,
                        layer_entry* const entries, const std::int64_t capacity) {
    using block = shared_top_k_block<Gate, Keep>;
    const auto b = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(params.segments));
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(params.segments));
    if (threadIdx.x == 0 && index == 0) {
        params.check_length(b);
    }
    const segment_range tokens = params.by_head().segment(b, index);
    if (tokens.length() == 0) {
        return;
    }
    block updates(params, out, b, tokens, entries + static_cast<std::int64_t>(blockIdx.x) * capacity,
                  *reinterpret_cast<typename block::shared*>(dynamic_shared()));
    updates.run();
    if (updates.nan) {
        params.report(b, status_nan_score);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
