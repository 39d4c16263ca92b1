// Losses and gradients of gates on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they are
// instantiated.
#pragma once

#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/losses/gates.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// The host's calls of these names. Tensors, values, counts, status and the arrays of `sequences` are device memory,
// the policy's numbers by head host memory; nothing is allocated, nothing waited for. Scores are fp32. A length or
// edge that cannot be counts as 0 and sets status_bad_length where `status` [B] is given; so does a NaN score
// status_nan_score: it adds nothing, and its gradient is 0.

/// Bytes of device workspace that each of these calls needs.
template <AnyPolicy P>
std::size_t gate_loss_workspace_bytes(const cuda& on, const P& policy, const Sequences& sequences,
                                      std::int32_t heads);

/// GateSparsity, GateDensity or RetentionPenalty, whose lambda is then device memory, read when the work runs. scores
/// and d_scores [B, Hkv, S]. Overwrites d_scores for the sequences' lengths, and *value. Value and gradients are the
/// host's to rounding, the same bits in every run.
template <class L, AnyPolicy P>
void gate_loss(const cuda& on, const L& loss, const P& policy, plane_view<const float> scores,
               const Sequences& sequences, plane_view<float> d_scores, LossValue* value,
               workspace_view workspace, std::uint32_t* status = nullptr);

/// v and d_v [B, Hkv, S, Dv]; overwrites d_scores [B, Hkv, S] for the sequences' lengths. Where v or d_v of a key
/// that counts is not finite, status_not_finite says so.
template <AnyPolicy P, Storage T>
void straight_through_values(const cuda& on, const P& policy, plane_view<const float> scores,
                             rows_view<const T> v, std::type_identity_t<rows_view<const T>> d_v,
                             const Sequences& sequences, plane_view<float> d_scores, workspace_view workspace,
                             std::int32_t layer = 0, std::uint32_t* status = nullptr);
/// The same of values that may be written.
template <AnyPolicy P, Storage T>
void straight_through_values(const cuda& on, const P& policy, plane_view<const float> scores, rows_view<T> v,
                             input_rows<T> d_v, const Sequences& sequences, plane_view<float> d_scores,
                             workspace_view workspace, std::int32_t layer = 0,
                             std::uint32_t* status = nullptr) {
    straight_through_values(on, policy, scores, input_rows<T>(v), d_v, sequences, d_scores, workspace, layer,
                            status);
}

/// Overwrites counts [Hkv], exactly the host's.
template <AnyPolicy P>
void retention_counts(const cuda& on, const P& policy, plane_view<const float> scores,
                      const Sequences& sequences, double* counts, workspace_view workspace,
                      std::int32_t layer = 0, std::uint32_t* status = nullptr);

/// LambdaController's calls, its lambda and average in device memory, so that the penalty's weights never leave the
/// device. Which step is due, the caller knows. Refuse what the controller's check() refuses; a negative count is
/// taken as it is.
template <class Controller>
requires std::is_same_v<Controller, LambdaController>
void controller_start(const cuda& on, const Controller& controller);
template <class Controller>
requires std::is_same_v<Controller, LambdaController>
void controller_observe(const cuda& on, const Controller& controller, const double* counts);
template <class Controller>
requires std::is_same_v<Controller, LambdaController>
void controller_update(const cuda& on, const Controller& controller);

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
