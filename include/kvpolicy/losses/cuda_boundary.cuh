// The boundary loss on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they are instantiated.
#pragma once

#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/losses/boundary.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// Planes, d_log_gamma, value, status and the array `lengths` of the sequences are device memory; loss, policy and its
// numbers by head are host memory, read during the call. Nothing is allocated, nothing waited for.

/// What boundary_loss can be told beside the loss.
struct BoundaryOptions {
    /// Layers whose heads stand one after another: planes are [B, layers * Hkv, S] and d_log_gamma [layers * Hkv],
    /// those of layer loss.layer first. Each layer is a loss of its own, with its own draws and mean, as in a call
    /// for it alone; value and counts are sums over the layers. The policy is asked for the rules of heads 0 to
    /// layers * Hkv - 1 of loss.layer.
    std::int32_t layers = 1;
    /// [layers * Hkv] in device memory, read when the work runs, in place of the policy's log gamma; so a decay that
    /// is learned stays on the device. Must be <= 0.
    const float* log_gamma = nullptr;
    /// Recorded where `scores` are ready, when another stream makes them: only what needs them waits for it, so that ranking the target, which
    /// a few SMs do, runs beside the scorer's forward pass. Null: they are ready.
    cudaEvent_t scores_ready = nullptr;
};

/// Bytes of device workspace that boundary_loss needs, with `heads` over all layers of the call.
template <AnyPolicy P>
std::size_t boundary_loss_workspace_bytes(const cuda& on, const BoundaryLoss& loss, const P& policy,
                                          const Sequences& sequences, std::int32_t heads);

/// The host's loss(on, policy, scores, target, ...): the same examples and draws, value and gradients to rounding,
/// the same bits in every run. Overwrites d_scores [B, Hkv, S] for the sequences' lengths, and *value; adds to
/// d_log_gamma [Hkv] where that is not null. Labels come from build_cutoffs on the target, so decay steps are 1 and
/// sequences are whole and not packed (cu_seqlens and starts null).
///
/// `status` [B], where given, is OR-ed into: status_nan_score for a NaN target, which ranks last, status_bad_length,
/// and status_not_finite for a score of an example that is not finite. Refuses, before anything is enqueued, the rest
/// of what the host refuses, and heads that options.layers does not divide.
template <AnyPolicy P>
void boundary_loss(const cuda& on, const BoundaryLoss& loss, const P& policy, plane_view<const float> scores,
                   plane_view<const float> target, const Sequences& sequences, plane_view<float> d_scores,
                   double* d_log_gamma, BoundaryValue* value, workspace_view workspace,
                   std::uint32_t* status = nullptr, const BoundaryOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
