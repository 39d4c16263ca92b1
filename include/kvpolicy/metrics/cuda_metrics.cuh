// Metrics of masks on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they
// are instantiated.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/metrics/density.hpp>
#include <kvpolicy/metrics/gates.hpp>
#include <kvpolicy/metrics/recall.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// The same numbers as the host's calls of these names, into device memory: enqueued, nothing allocated,
// nothing waited for. A length in device memory that cannot be counts as 0; options.status is device memory.
// One block a plane: these are for evaluation, not for every step.

/// live[b][h][q], [B, Hkv, S]: the keys that query q sees.
template <class Expiry = expiry_t>
void live_keys(const cuda& ctx, plane_view<const expiry_t> expiry, const Sequences& sequences,
               plane_view<std::int32_t> live, workspace_view workspace = {},
               const MetricOptions& options = {});

/// density[b * Hkv + h].
template <class Expiry = expiry_t>
void density(const cuda& ctx, plane_view<const expiry_t> expiry, const Sequences& sequences, double* out,
             workspace_view workspace = {}, const MetricOptions& options = {});

/// evict_ratio[b * Hkv + h].
template <AnyPolicy P>
void evict_ratio(const cuda& ctx, const P& policy, plane_view<const expiry_t> expiry,
                 const Sequences& sequences, double* out, workspace_view workspace = {},
                 const MetricOptions& options = {});

/// open_gates[b * Hkv + h]. A NaN score is not open, and sets status_nan_score.
template <AnyPolicy P>
void open_gates(const cuda& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                double* out, workspace_view workspace = {}, const MetricOptions& options = {});

/// coverage[b * Hkv + h].
template <AnyPolicy P>
void coverage(const cuda& ctx, const P& policy, plane_view<const expiry_t> reference,
              plane_view<const expiry_t> other, const Sequences& sequences, Coverage* out,
              workspace_view workspace = {}, const MetricOptions& options = {});

/// Bytes of device workspace that oracle_recall needs.
inline std::size_t oracle_recall_workspace_bytes(const cuda& ctx, plane_view<const expiry_t> teacher,
                                                 const Sequences& sequences);

/// out[b * Hkv + h]. Means are sums in another order than the host's: they agree to rounding,
/// the rest exactly.
template <AnyPolicy P>
void oracle_recall(const cuda& ctx, const P& policy, plane_view<const expiry_t> teacher,
                   plane_view<const expiry_t> student, const Sequences& sequences, Recall* out,
                   workspace_view workspace, const MetricOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
