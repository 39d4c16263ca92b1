// From a policy and scores to lifetimes: the mask that training and prefill read.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/cutoff.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// How a mask is built, where the default does not do.
struct MaskOptions {
    /// The layer whose rules hold.
    std::int32_t layer = 0;
    /// Static priorities are taken relative to a base that moves at multiples of this (tests lower it).
    position_t rebase_limit = kvpolicy::rebase_limit;
    /// On the host without a status: a NaN score that is read ranks last and closes its gate, as it does with
    /// a status and on a device. Otherwise the host refuses the score.
    bool nan_ranks_last = false;
    /// [B], OR-ed into: status_nan_score, for a NaN score that is read (it ranks last and closes its gate);
    /// status_bad_length, for a length that then counts as 0. Null: not wanted; the host then refuses both.
    std::uint32_t* status = nullptr;
};

/// Bytes of workspace that build_mask needs for `heads` KV heads.
template <AnyPolicy P>
std::size_t build_mask_workspace_bytes(const host& ctx, const P& policy, const Sequences& sequences,
                                       std::int32_t heads, const MaskOptions& options = {});

/// Writes expiry [B, Hkv, S], fp32 scores [B, Hkv, S] given (empty for a policy without ranks):
///
///     visible(h, q, t)  <=>  t <= q  and  q < expiry[h][t]
///     expiry = max(sink, keep, window, min(gate, budget))      (docs/concepts.md; KVpop, C.1)
///
/// Overwrites expiry[b][h][t] for t < the sequence's length only. A score is read only where its key leaves
/// the window before its sequence (or packed segment) ends, is no sink and not kept by position. With
/// cu_seqlens every segment starts anew and its keys expire with it. Heads share a SharedBudget within a
/// sequence (or segment). Synchronous; O(S log k) per head for decay step 1, O(S k) otherwise. With a shared
/// budget a sequence is one thread's work: O(Hkv S log(k Hkv)) for a static order, O(n Hkv^2 S) otherwise.
/// Refuses, before anything is written: numbers that no policy can have, shapes that disagree, lengths below
/// 0 or over S, starts (a mask begins at position 0), cu_seqlens that do not rise from 0 to the length, a
/// NaN score that is read (see MaskOptions), too little workspace.
template <AnyPolicy P>
void build_mask(const host& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                plane_view<expiry_t> expiry, workspace_view workspace, const MaskOptions& options = {});

/// Bytes of workspace that build_cutoffs needs.
template <Cutoff C = FenwickCutoff, AnyPolicy P>
std::size_t build_cutoffs_workspace_bytes(const host& ctx, const P& policy, const Sequences& sequences,
                                          std::int32_t heads, const MaskOptions& options = {});

/// The paper's pair for a kernel that takes a predicate (KVpop, C.3): rank [B, Hkv, S], 0 for the best of the
/// keys that compete in the sequence and no_rank for the others, and cutoff [B, Hkv, S], the rank of the k-th
/// best eligible key at each query. t is visible at q >= t + w iff it is a sink, or rank[t] != no_rank and
/// rank[t] <= cutoff[q]. For decay step 1, whole sequences without cu_seqlens, and lengths below
/// rebase_limit; other calls are refused.
template <Cutoff C = FenwickCutoff, AnyPolicy P>
void build_cutoffs(const host& ctx, const P& policy, plane_view<const float> scores,
                   const Sequences& sequences, plane_view<std::int32_t> rank, plane_view<std::int32_t> cutoff,
                   workspace_view workspace, const MaskOptions& options = {});

/// Bytes of workspace that expiry_from_cutoffs needs: none on the host.
template <AnyPolicy P>
std::size_t expiry_from_cutoffs_workspace_bytes(const host& ctx, const P& policy, const Sequences& sequences,
                                                std::int32_t heads, const MaskOptions& options = {});

/// Expiry from ranks and cutoffs by binary search: cutoffs only fall once the budget is full. The same
/// integers as build_mask. `rank` and `cutoff` come from build_cutoffs with the same policy and sequences.
template <AnyPolicy P>
void expiry_from_cutoffs(const host& ctx, const P& policy, plane_view<const std::int32_t> rank,
                         plane_view<const std::int32_t> cutoff, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace,
                         const MaskOptions& options = {});

}  // namespace kvpolicy

#include <kvpolicy/masks/host/host_build.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/masks/cuda_build.cuh>
#endif
