// Soft gates on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they are instantiated.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/masks/log_bias.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// As in masks/cuda_build.cuh: tensors, status, and the arrays of `sequences` are device memory, numbers by
// head are host memory; nothing is allocated, nothing waited for. The gate runs in a kernel: a gate of your
// own needs a KVPOLICY_HOST_DEVICE operator(). Scores are fp32. A NaN score closes its gate and sets
// status_nan_score.

/// Bytes of device workspace that build_log_bias and log_bias_backward need.
template <AnyPolicy P>
std::size_t log_bias_workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                     std::int32_t heads, const MaskOptions& options = {});

/// As the host's build_log_bias: the same expiries (but for scores within 4 ulp of tau), biases to 4 ulp, and
/// the same draws of a BernoulliGate.
template <AnyPolicy P, TrainingGate G, class Real>
void build_log_bias(const cuda& ctx, const P& policy, const G& gate, plane_view<Real> scores,
                    const Sequences& sequences, plane_view<expiry_t> expiry, plane_view<float> log_bias,
                    workspace_view workspace, const MaskOptions& options = {});

/// As the host's log_bias_backward. Where the score is NaN, d_scores is 0.
template <AnyPolicy P, TrainingGate G, class Real>
void log_bias_backward(const cuda& ctx, const P& policy, const G& gate, input_plane<Real> scores,
                       input_plane<Real> d_log_bias, const Sequences& sequences, plane_view<Real> d_scores,
                       workspace_view workspace, const MaskOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
