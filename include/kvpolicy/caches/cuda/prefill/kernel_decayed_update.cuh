// Top-k updates where the order of keys depends on the query (decay steps above 1), one after another.
#pragma once

#include <kvpolicy/caches/cuda/prefill/kernel_lifetimes.cuh>
#include <kvpolicy/caches/cuda/prefill/prefill_params.cuh>
#include <kvpolicy/caches/cuda/warp_group.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Shared memory of a head's top-k updates: positions, scores, the worst slot of every tile.
inline std::size_t decayed_update_bytes(std::int64_t top_k_slots, std::int64_t tiles) {
    return static_cast<std::size_t>(top_k_slots) * (sizeof(position_t) + sizeof(float)) +
           static_cast<std::size_t>(tiles) * sizeof(std::int32_t);
}

/// The top-k updates of a chunk for heads whose keys rank by the query: as top_k_update_kernel, which leaves
/// them out.
///
/// Grid: count * Hkv blocks. Block: prefill_threads; phase 2 is one warp's.
/// Shared memory: dynamic decayed_update_bytes() where `in_shared`.
/// In: what prefill_lifetimes_kernel wrote; records [count, Hkv, tiles] int32 is scratch.
/// Overwrites: as top_k_update_kernel.
///
/// Phases: 1. Copy the slots to shared memory. 2. The updates, one candidate after another. 3. Copy back.
template <class View, class Gate>
__global__ void __launch_bounds__(prefill_threads)
    prefill_decayed_update_kernel(const __grid_constant__ prefill_params<View> call, const Gate gate,
                                  std::int32_t* const records, const std::int32_t tiles,
                                  const bool in_shared) {
    const prefill_head<View> at(call, static_cast<std::int32_t>(blockIdx.x));
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const HeadParams& head_params = at.rows.head_params;
    const std::int32_t tokens = at.active.tokens;
    if (tokens == 0 || !ranks_by_query(head_params)) {
        return;
    }
    const std::int32_t num_long_range = call.cache.num_long_range[at.rows.index];
    const top_k_update_params& top_k = call.top_k;
    const std::int64_t of_head = std::int64_t{at.pair} * top_k.top_k_slots;
    detail::chunk_slots chunk{
        {head_params, call.cache.rebase_limit, top_k.slot_score + of_head, top_k.slot_position + of_head},
        top_k.holder + of_head,
        records + std::int64_t{at.pair} * tiles,
        top_k.past_expiry + std::int64_t{at.pair} * top_k.max_entries,
        top_k.chunk_expiry + std::int64_t{at.pair} * top_k.most};
    // 1. To shared memory.
    if (in_shared) {
        chunk.of.position = reinterpret_cast<position_t*>(dynamic_shared());
        chunk.of.score = reinterpret_cast<float*>(chunk.of.position + top_k.top_k_slots);
        chunk.record = reinterpret_cast<std::int32_t*>(chunk.of.score + top_k.top_k_slots);
        for (std::int32_t p = thread; p < num_long_range; p += prefill_threads) {
            chunk.of.score[p] = top_k.slot_score[of_head + p];
            chunk.of.position[p] = top_k.slot_position[of_head + p];
        }
        __syncthreads();
    }
    // 2. The updates.
    if (warp_id() == 0) {
        std::int32_t num_protected = 0;
        if constexpr (detail::holds_keys<Gate>) {
            num_protected = call.cache.num_protected[at.rows.index];
        }
        const float* const scores = top_k.leaving_score + std::int64_t{at.pair} * top_k.most;
        const std::int32_t after = detail::update_top_k(
            warp_group{}, chunk, gate, at.base, tokens, num_long_range,
            [&](std::int32_t j) { return scores[j]; }, [&](position_t u) { return at.name(u); },
            at.rows.capacity(), &num_protected);
        if (lane_id() == 0) {
            top_k.num_long_range[at.pair] = after;
            if (top_k.num_protected != nullptr) {
                top_k.num_protected[at.pair] = num_protected;
            }
        }
    }
    // 3. Back.
    if (in_shared) {
        __syncthreads();
        const std::int32_t after = top_k.num_long_range[at.pair];
        for (std::int32_t p = thread; p < after; p += prefill_threads) {
            top_k.slot_score[of_head + p] = chunk.of.score[p];
            top_k.slot_position[of_head + p] = chunk.of.position[p];
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
