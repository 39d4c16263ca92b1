// A loss is a functor that writes a value and its gradient in one call, on the host and on CUDA alike (there
// *value is device memory, and kvpolicy/cuda.cuh has the bodies). It needs no graph and no framework: the
// caller passes the gradient on (scorers/backward.hpp, attention/attend.hpp, or a framework's tape).
//
// Gradients of activations (scores, logits, hidden states) are overwritten for the sequences' lengths;
// gradients of parameters are added to.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/view.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#endif

namespace kvpolicy {

/// The value of a loss, and over how many examples it is a mean. No example: value 0, zero gradient, count 0.
struct LossValue {
    double value = 0.0;
    std::int64_t count = 0;
};

/// Options of a loss.
struct LossOptions {
    /// [B], OR-ed into: status_bad_length, for a length that then counts as 0; status_nan_score,
    /// status_not_finite and status_bad_index, for the numbers that each loss names. Null: not wanted; the
    /// host then refuses all of them.
    std::uint32_t* status = nullptr;
};

/// A loss on scores that a teacher's target supervises: loss(ctx, policy, scores, target, sequences,
/// d_scores, d_log_gamma, value, workspace), with scores, target and d_scores [B, Hkv, S] and d_log_gamma
/// [Hkv] (may be null). value_type is LossValue or a struct derived from it.
template <class L, class P>
concept ScoreLoss = std::derived_from<typename L::value_type, LossValue> &&
    requires(const L& loss, const host& ctx, const P& policy, plane_view<const float> target,
             plane_view<float> d_scores, const Sequences& sequences, double* d_log_gamma,
             typename L::value_type* value, workspace_view workspace) {
    { loss.workspace_bytes(ctx, policy, sequences, std::int32_t{1}) } -> std::convertible_to<std::size_t>;
    {loss(ctx, policy, target, target, sequences, d_scores, d_log_gamma, value, workspace)};
};

/// A loss on gates, from their raw logits alone: loss(ctx, policy, scores, sequences, d_scores, value,
/// workspace), scores and d_scores [B, Hkv, S].
template <class L, class P>
concept GateLoss = requires(const L& loss, const host& ctx, const P& policy, plane_view<const float> scores,
                            plane_view<float> d_scores, const Sequences& sequences, LossValue* value,
                            workspace_view workspace) {
    { loss.workspace_bytes(ctx, policy, sequences, std::int32_t{1}) } -> std::convertible_to<std::size_t>;
    {loss(ctx, policy, scores, sequences, d_scores, value, workspace)};
};

/// A loss between a teacher's and a student's rows (logits, hidden states), [B, 1, S, N] each: loss(ctx,
/// teacher, student, sequences, d_student, value, workspace).
template <class L>
concept DistillationLoss = requires(const L& loss, const host& ctx, rows_view<const float> rows,
                                    rows_view<float> d_student, const Sequences& sequences, LossValue* value,
                                    workspace_view workspace) {
    { loss.workspace_bytes(ctx, rows, sequences) } -> std::convertible_to<std::size_t>;
    {loss(ctx, rows, rows, sequences, d_student, value, workspace)};
};

}  // namespace kvpolicy
