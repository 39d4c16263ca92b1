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

/// Attention over the visible keys by mma.sync (bf16, fp16; compute capability 8.0): out = softmax(logits) V,
/// and lse.
///
/// Grid: call.count() query tiles, one per block. Block: S::threads. Shared memory: what attend_block takes
/// (dynamic). Reads q [B, Hq, S, Dk], keys and values [B, Hkv, rows, D], the plan or the frames. Overwrites
/// out [B, Hq, S, Dv] in T and lse [B, Hq, S] in fp32, where it is given. Sets *not_finite where an output is
/// not finite. Phases: attend_block::run (agent_forward_portable.cuh).
template <class S>
__global__ void __launch_bounds__(S::threads)
    attend_kernel(const __grid_constant__ attend_launch<typename S::T> call) {
    attend_block<S>(call, dynamic_shared()).run(blockIdx.x);
}

/// attend_kernel by wgmma and TMA (compute capability 9.0a). Blocks stay and take one query tile after
/// another.
///
/// Grid: as many blocks as fit. Block: S::threads = 128 * (consumers + 1): consumer warpgroups of 64 rows,
/// one producer. Shared memory: attend_hopper_shared_bytes<S>() (dynamic). Reads, overwrites and sets what
/// attend_kernel does; `boxes` are tensor maps of keys and values. Adds to *next, the count of tiles handed
/// out, 0 at first. Phases: agent_forward_producer.cuh and agent_forward_consumer.cuh.
template <class S>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(S::threads))
    attend_hopper_kernel(const __grid_constant__ attend_launch<typename S::T> call,
                         const __grid_constant__ attend_boxes boxes, std::uint32_t* const next) {
#if KVPOLICY_HOPPER_CODE
    attend_warpgroups<S>(call, boxes, dynamic_shared(), next);
#endif
}

/// attend_kernel by plain loops in compute_t<T>, for fp32 and double inputs and any head_dim up to 1024.
///
/// Grid: B * Hq * S / plain_warps, a warp per query of a head. Block: 32 * plain_warps. Shared memory: none.
/// Reads frames, not the plan. Overwrites out [B, Hq, S, Dv] and lse [B, Hq, S].
template <class T>
__global__ void __launch_bounds__(32 * plain_warps)
    attend_plain_kernel(const __grid_constant__ attend_launch<T> call, const double scale,
                        const double softcap) {
    using C = compute_t<T>;
    const attention_problem<T>& problem = call.problem;
    const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * plain_warps + warp_id();
    const auto query = static_cast<std::int32_t>(number % problem.length);
    const auto head = static_cast<std::int32_t>(number / problem.length);
    const std::int32_t query_heads = problem.kv_heads * problem.group;
    if (head >= problem.batch * query_heads || query >= problem.length_of(head / query_heads)) {
        return;
    }
    attend_plain<plain_most_dim>(call, static_cast<C>(scale), static_cast<C>(softcap), head / query_heads,
                                 head % query_heads, query);
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
    attend_mend_kernel(const __grid_constant__ attend_launch<T> call) {
    if (*call.not_finite == 0) {
        return;
    }
    const attention_problem<T>& problem = call.problem;
    const std::int32_t query_heads = problem.kv_heads * problem.group;
    const std::int64_t count = std::int64_t{problem.batch} * query_heads * problem.length;
    for (std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * plain_warps + warp_id();
         number < count; number += static_cast<std::int64_t>(gridDim.x) * plain_warps) {
        const auto query = static_cast<std::int32_t>(number % problem.length);
        const auto head = static_cast<std::int32_t>(number / problem.length);
        if (query >= problem.length_of(head / query_heads)) {
            continue;
        }
        const T* const out = call.out.row(head / query_heads, head % query_heads, query);
        // What the query itself brought cannot be repaired.
        if (!finite_row(out, call.out.dim) &&
            finite_row(problem.q.row(head / query_heads, head % query_heads, query), problem.q.dim)) {
            attend_plain<256>(call, problem.scale, problem.softcap, head / query_heads, head % query_heads,
                              query);
        }
    }
}

/// Before a call's launches: counters[0, count) = 0, and status_bad_length for sequences whose device lengths
/// cannot be (they count as empty).
///
/// Grid:
/// 1. Block: 256. Shared memory: none. Adds bits to status [B], uint32, where it is given.
template <class Frames>
__global__ void attend_begin_kernel(const __grid_constant__ Frames frames, const std::int32_t batch,
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
