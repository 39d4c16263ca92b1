// build_mask and its kin on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they
// are instantiated.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/masks/build.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// All calls below: scores, outputs, status, and of `sequences` the arrays lengths and cu_seqlens are device
// memory. The policy and the numbers by head that it points to (per_head) are host memory, read during the
// call: a captured graph keeps the numbers of its capture. Work is enqueued on the context's stream; nothing
// is allocated, nothing waited for, and grids depend on shapes alone. `workspace` is device memory that the
// call's work uses until it has run: the next call on the same stream may have it.
//
// What a host would refuse but a device finds too late: a NaN score ranks last and sets
// status_nan_score; a length below 0 or over S counts as 0 and sets status_bad_length; cu_seqlens that
// do not rise from 0 to the length make every segment empty and set status_bad_length for all sequences.
// options.status is device memory.
//
// Refused before anything is enqueued: numbers that no policy can have, shapes that disagree, too little
// workspace. Failing CUDA calls throw kvpolicy::cuda_error.

/// Bytes of device workspace that build_mask needs for `heads` KV heads.
template <AnyPolicy P>
std::size_t build_mask_workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                       std::int32_t heads, const MaskOptions& options = {});

/// expiry [B, Hkv, S] (int32) from scores [B, Hkv, S] (fp32), the same integers as the host's build_mask with
/// nan_ranks_last. Overwrites expiry[b][h][t] for t < the sequence's length only.
///
/// Gates and keep parts run in kernels: their `open` and `keeps` must be KVPOLICY_HOST_DEVICE. Decay steps
/// above 1, and sequences longer than options.rebase_limit with gamma < 1, run one top-k update after the
/// other, O(S k / 512) per head; everything else is a sort. A SharedBudget is one sort of all keys of a
/// layer. With floors, caps, decay steps above 1, decays that differ by head, or a base that moves it is one
/// top-k update after the other, O(Hkv S * held keys / 512) per sequence. Batch * heads * S is at most 2^31
/// - 2^24 where S is over 16384.
template <AnyPolicy P>
void build_mask(const cuda& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                plane_view<expiry_t> expiry, workspace_view workspace, const MaskOptions& options = {});

/// Bytes of device workspace that build_cutoffs needs.
template <Cutoff C = ParallelCutoff, AnyPolicy P>
std::size_t build_cutoffs_workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                          std::int32_t heads, const MaskOptions& options = {});

/// rank and cutoff [B, Hkv, S], int32, as the host's build_cutoffs writes them, for t < the sequence's
/// length. Another Cutoff than ParallelCutoff runs on one thread a head, and must be KVPOLICY_HOST_DEVICE
/// (FenwickCutoff and LinkedCutoff are).
template <Cutoff C = ParallelCutoff, AnyPolicy P>
void build_cutoffs(const cuda& ctx, const P& policy, plane_view<const float> scores,
                   const Sequences& sequences, plane_view<std::int32_t> rank, plane_view<std::int32_t> cutoff,
                   workspace_view workspace, const MaskOptions& options = {});

/// Bytes of device workspace that expiry_from_cutoffs needs.
template <AnyPolicy P>
std::size_t expiry_from_cutoffs_workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                                std::int32_t heads, const MaskOptions& options = {});

/// Expiry from what build_cutoffs wrote, by binary search. The same integers as build_mask.
template <AnyPolicy P>
void expiry_from_cutoffs(const cuda& ctx, const P& policy, plane_view<const std::int32_t> rank,
                         plane_view<const std::int32_t> cutoff, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace,
                         const MaskOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
