// Gradients of scores times a power of two, so that what is made of them has a place in fp16
// (scorer_plan.cuh, score_gradients).
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int scale_threads = 128;  // a warp per chunk
inline std::int64_t scale_blocks(const scorer_streams& streams) {
    const std::int64_t chunks = std::int64_t{streams.batch} * streams.heads * streams.chunks;
    return (chunks + scale_threads / 32 - 1) / (scale_threads / 32);
}

/// Calls body(plane's span, token) for the warp's chunk: the tokens that have a score, which is read `delay`
/// tokens later.
template <class Body>
__device__ inline scorer_span for_each_scored(const scorer_streams& streams, const Body& body) {
    const std::int64_t chunk = std::int64_t{blockIdx.x} * (scale_threads / 32) + warp_id();
    scorer_span s{};
    if (chunk < std::int64_t{streams.batch} * streams.heads * streams.chunks) {
        s = streams.span(static_cast<std::int32_t>(chunk / streams.chunks),
                         static_cast<std::int32_t>(chunk % streams.chunks));
    }
    for (int r = lane_id(); r < s.count; r += 32) {
        if (s.first + r < s.end - streams.delay) {
            body(s, s.first + r);
        }
    }
    return s;
}

/// The largest |d score| of each head, for the scale of fp16 gradients.
/// Grid: a warp per chunk of 64 tokens. Block: 128 threads. Shared memory: none.
/// In: d_scores [B, heads, S] fp32; numbers: heads, or 1 for one maximum of all.
/// Out: largest [numbers] uint32, the bits of |d score|; 0 before the launch; a NaN is above all. Atomic
/// maxima of bits: the same result in every run.
/// 1. Each lane takes the maximum of its tokens.
/// 2. One lane per warp adds the warp's maximum.
template <class Bits>
__global__ void __launch_bounds__(scale_threads)
    largest_gradients_kernel(const scorer_streams streams, const plane_view<const float> d_scores,
                             const std::int32_t numbers, Bits* const largest) {
    Bits own = 0;
    const scorer_span s = for_each_scored(streams, [&](const scorer_span& of, std::int32_t t) {
        own = max(own, __float_as_uint(fabsf(d_scores.head(of.b, of.h)[t])));
    });
    own = __reduce_max_sync(all_lanes, own);
    if (lane_id() == 0 && own > 0) {
        atomicMax(largest + s.h % numbers, own);
    }
}

/// Enqueues it: [numbers], one a head or one for all.
inline void find_largest_gradients(const cuda& ctx, const scorer_streams& streams,
                                   const plane_view<const float>& d_scores, std::int32_t numbers,
                                   std::uint32_t* largest) {
    check(cudaMemsetAsync(largest, 0, static_cast<std::size_t>(numbers) * sizeof(std::uint32_t), ctx.stream),
          "cudaMemsetAsync");
    launch("largest_gradients_kernel", largest_gradients_kernel<std::uint32_t>, scale_blocks(streams),
           scale_threads, 0, ctx, streams, d_scores, numbers, largest);
}

/// d_scores times the power of two that brings each head's largest |d score| to [1, 2).
/// Grid: a warp per chunk of 64 tokens. Block: 128 threads. Shared memory: none.
/// In: d_scores [B, heads, S] fp32, streams.largest [heads].
/// Out: to [B, heads, S] fp32, overwritten where a score is.
template <class Float>
__global__ void __launch_bounds__(scale_threads)
    scale_gradients_kernel(const scorer_streams streams, const plane_view<const Float> d_scores,
                           const plane_view<Float> to) {
    for_each_scored(streams, [&](const scorer_span& s, std::int32_t t) {
        to.head(s.b, s.h)[t] = d_scores.head(s.b, s.h)[t] * gradient_scale(streams.largest[s.h]);
    });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
