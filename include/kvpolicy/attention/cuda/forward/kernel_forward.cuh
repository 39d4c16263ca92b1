// Entry points of the forward pass.
#pragma once

#include <kvpolicy/attention/cuda/forward/agent_forward_hopper.cuh>
#include <kvpolicy/attention/cuda/forward/agent_forward_plain.cuh>
#include <kvpolicy/attention/cuda/forward/agent_forward_portable.cuh>
#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One block a tile.
template <class S>
__global__ void __launch_bounds__(S::threads)
    forward_portable_kernel(const __grid_constant__ forward_params<typename S::T> call) {
    agent_forward_portable<S>(call, dynamic_shared()).run(blockIdx.x);
}

/// As many blocks as fit; each takes tiles from `next`, which is 0 at first.
template <class S>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(S::threads))
    forward_hopper_kernel(const __grid_constant__ forward_params<typename S::T> call,
                          const __grid_constant__ forward_boxes boxes, std::uint32_t* const next) {
#if KVPOLICY_HOPPER_CODE
    agent_forward_hopper<S>(call, boxes, dynamic_shared(), next);
#endif
}

/// One warp a query of a head.
template <class T>
__global__ void __launch_bounds__(32 * plain_warps)
    forward_plain_kernel(const __grid_constant__ forward_params<T> call, const double scale,
                         const double logits_soft_cap) {
    using C = compute_t<T>;
    const attention_params<T>& params = call.params;
    const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * plain_warps + warp_id();
    const auto query = static_cast<std::int32_t>(number % params.length);
    const auto head = static_cast<std::int32_t>(number / params.length);
    const std::int32_t query_heads = params.kv_heads * params.group;
    if (head >= params.batch * query_heads || query >= params.length_of(head / query_heads)) {
        return;
    }
    agent_forward_plain<plain_max_dim>(call, static_cast<C>(scale), static_cast<C>(logits_soft_cap),
                                       head / query_heads, head % query_heads, query);
}

/// A row whose key some queries of a tile see and others do not has weight 0 for the others, and 0 times a value that is not
/// finite is a NaN. So where some output of a call was not finite, all that are not are computed again by what they see alone,
/// one warp a query of a head. Nearly always there is nothing to do.
template <class T>
__global__ void __launch_bounds__(32 * plain_warps)
    forward_fix_nonfinite_kernel(const __grid_constant__ forward_params<T> call) {
    if (*call.not_finite == 0) {
        return;
    }
    const attention_params<T>& params = call.params;
    const std::int32_t query_heads = params.kv_heads * params.group;
    const std::int64_t count = std::int64_t{params.batch} * query_heads * params.length;
    for (std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * plain_warps + warp_id();
         number < count; number += static_cast<std::int64_t>(gridDim.x) * plain_warps) {
        const auto query = static_cast<std::int32_t>(number % params.length);
        const auto head = static_cast<std::int32_t>(number / params.length);
        if (query >= params.length_of(head / query_heads)) {
            continue;
        }
        const T* const out = call.out.row(head / query_heads, head % query_heads, query);
        // What the query itself brought cannot be fixed.
        if (!finite_row(out, call.out.dim) &&
            finite_row(params.q.row(head / query_heads, head % query_heads, query), params.q.dim)) {
            agent_forward_plain<256>(call, params.scale, params.logits_soft_cap, head / query_heads,
                                     head % query_heads, query);
        }
    }
}

/// Says which sequences have lengths that cannot be (they count as empty), and sets the tile counters of the launches to 0.
template <class Frames>
__global__ void forward_begin_kernel(const __grid_constant__ Frames frames, const std::int32_t batch,
                                     std::uint32_t* const status, std::uint32_t* const counters,
                                     const std::int32_t count) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count;
         i += static_cast<std::int32_t>(blockDim.x)) {
        counters[i] = 0;
    }
    for (auto b = static_cast<std::int32_t>(threadIdx.x); status != nullptr && b < batch;
         b += static_cast<std::int32_t>(blockDim.x)) {
        const auto bad = [b](const std::int32_t* lengths, std::int32_t most) {
            return lengths != nullptr && (lengths[b] < 0 || lengths[b] > most);
        };
        if (bad(frames.lengths, frames.length) || bad(frames.past.lengths, frames.past.rows)) {
            atomicOr(status + b, static_cast<std::uint32_t>(status_bad_length));
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
