// Gradients and counts of gates on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where
// they are instantiated.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/losses/gates.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// The host's calls of these names. Tensors, counts, status and the arrays of `sequences` are device memory,
// the policy's numbers by head host memory; nothing is allocated, nothing waited for. Scores are fp32. A
// length or edge that cannot be counts as 0 and sets status_bad_length where options.status [B] is given. A
// NaN score sets status_nan_score; it adds nothing, and its gradient is 0.

/// Bytes of device workspace that straight_through_values needs.
template <AnyPolicy P>
std::size_t straight_through_values_workspace_bytes(const cuda& ctx, const P& policy,
                                                    const Sequences& sequences, std::int32_t heads);

/// v and d_v [B, Hkv, S, Dv]; overwrites d_scores [B, Hkv, S] for the sequences' lengths. Where v or d_v of a
/// key in options.scope is not finite, status_not_finite says so.
template <AnyPolicy P, class V>
void straight_through_values(const cuda& ctx, const P& policy, input_plane<real_of<V>> scores, rows_view<V> v,
                             input_rows<V> d_v, const Sequences& sequences, plane_view<real_of<V>> d_scores,
                             workspace_view workspace, const GateOptions& options = {});

/// Bytes of device workspace that retention_counts needs.
template <AnyPolicy P>
std::size_t retention_counts_workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                             std::int32_t heads);

/// Overwrites counts [Hkv], exactly the host's.
template <AnyPolicy P, class Real>
void retention_counts(const cuda& ctx, const P& policy, plane_view<Real> scores, const Sequences& sequences,
                      double* counts, workspace_view workspace, const GateOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
