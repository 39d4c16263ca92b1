// Entry points of the forward pass.
#pragma once

#include <kvpolicy/attention/cuda/forward/agent_forward_hopper.cuh>
#include <kvpolicy/attention/cuda/forward/agent_forward_plain.cuh>
#include <kvpolicy/attention/cuda/forward/agent_forward_portable.cuh>
#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Attention over the visible keys by mma.sync (bf16, fp16; compute capability 8.0): out = softmax(logits) V,
/// and lse.
///
/// Grid: call.count() query tiles, one per block. Block: S::threads. Shared memory: what
/// agent_forward_portable takes (dynamic). Reads q [B, Hq, S, Dk], keys and values [B, Hkv, rows, D], the
/// plan or the frames. Overwrites out [B, Hq, S, Dv] in T and lse [B, Hq, S] in fp32, where it is given. Sets
/// *not_finite where an output is not finite. Phases: agent_forward_portable::run
/// (agent_forward_portable.cuh).
template <class S>
__global__ void __launch_bounds__(S::threads)
    forward_portable_kernel([[maybe_unused]] const __grid_constant__ forward_params<typename S::T> call) {
    if constexpr (portable_code<typename S::T>) {
        agent_forward_portable<S>(call, dynamic_shared()).run(blockIdx.x);
    }
}

/// forward_portable_kernel by wgmma and TMA (compute capability 9.0a). Blocks stay and take one query
/// tile after another.
///
/// Grid: as many blocks as fit. Block: S::threads = 128 * (consumers + 1): consumer warpgroups of 64 rows,
/// one producer. Shared memory: forward_hopper_shared_bytes<S>() (dynamic). Reads, overwrites and sets what
/// forward_portable_kernel does; `boxes` are tensor maps of keys and values. Adds to *next, the count of
/// tiles handed out, 0 at first. Phases: agent_forward_producer.cuh and agent_forward_consumer.cuh.
template <class S>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(S::threads))
    forward_hopper_kernel(const __grid_constant__ forward_params<typename S::T> call,
                          const __grid_constant__ forward_boxes boxes, std::uint32_t* const next) {
#if KVPOLICY_HOPPER_CODE
    agent_forward_hopper<S>(call, boxes, dynamic_shared(), next);
#endif
}

/// forward_portable_kernel by plain loops in compute_t<T>, for fp32 and double inputs and any
/// head_dim up to 1024.
///
/// Grid: B * Hq * S / plain_warps, a warp per query of a head. Block: 32 * plain_warps. Shared memory: none.
/// Reads frames, not the plan. Overwrites out [B, Hq, S, Dv] and lse [B, Hq, S].
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

/// fix_nonfinite: masked keys that hold NaN or Inf poison a tile's outputs, since 0 * NaN is a NaN. Where
/// *not_finite is set, recomputes every row of out that is not finite from the keys that its query sees.
/// Normally it returns at once.
///
/// Grid: as many blocks as fit; warps take queries in turn. Block: 32 * plain_warps. Shared memory: none.
/// Reads and overwrites out [B, Hq, S, Dv] and lse [B, Hq, S] of those rows. Rows whose own query is not
/// finite stay.
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
        const std::int32_t at = params.query_row(head / query_heads, query);
        const T* const out = call.out.row(head / query_heads, head % query_heads, at);
        // What the query itself brought cannot be repaired.
        if (!finite_row(out, call.out.dim) &&
            finite_row(params.q.row(head / query_heads, head % query_heads, at), params.q.dim)) {
            agent_forward_plain<256>(call, params.scale, params.logits_soft_cap, head / query_heads,
                                     head % query_heads, query);
        }
    }
}

/// Before a call's launches: counters[0, count) = 0, and status_bad_length for sequences whose device lengths
/// cannot be (they count as empty).
///
/// Grid: one block. Block: 256. Shared memory: none. Adds bits to status [B], uint32, where it is given.
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
