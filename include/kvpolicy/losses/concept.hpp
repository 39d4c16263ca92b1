// What a loss is: a functor that gives a value and writes its gradient in one call. No graph, no framework: whoever calls
// it hands the gradient on (scorers/backward.hpp, attention/attend.hpp, or a framework's own tape).
//
// Gradients of activations (scores, logits, hidden states) are overwritten for the sequences' lengths; gradients of
// parameters are added to.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/view.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// The value of a loss, and over how many examples it is a mean. No example: value 0, zero gradient, count 0.
struct LossValue {
    double value = 0.0;
    std::int64_t count = 0;
};

/// A loss on scores that a teacher's target supervises: loss(on, policy, scores, target, sequences, d_scores,
/// d_log_gamma, workspace), with scores, target and d_scores [B, Hkv, S] and d_log_gamma [Hkv] (may be null).
template <class L, class P>
concept ScoreLoss = requires(const L& loss, const host& on, const P& policy, plane_view<const float> target,
                             plane_view<float> d_scores, const Sequences& sequences, double* d_log_gamma,
                             workspace_view workspace) {
    { loss.workspace_bytes(on, policy, sequences, std::int32_t{1}) } -> std::convertible_to<std::size_t>;
    {
        loss(on, policy, target, target, sequences, d_scores, d_log_gamma, workspace).value
        } -> std::convertible_to<double>;
};

/// A loss on gates, from their raw logits alone: loss(on, policy, scores, sequences, d_scores), both [B, Hkv, S].
template <class L, class P>
concept GateLoss = requires(const L& loss, const host& on, const P& policy, plane_view<const float> scores,
                            plane_view<float> d_scores, const Sequences& sequences) {
    { loss(on, policy, scores, sequences, d_scores).value } -> std::convertible_to<double>;
};

/// A loss between a teacher's and a student's rows (logits, hidden states), [B, 1, S, N] each: loss(on, teacher, student,
/// sequences, d_student, workspace).
template <class L>
concept DistillationLoss = requires(const L& loss, const host& on, rows_view<const float> rows,
                                    rows_view<float> d_student, const Sequences& sequences,
                                    workspace_view workspace) {
    { loss.workspace_bytes(on, rows) } -> std::convertible_to<std::size_t>;
    { loss(on, rows, rows, sequences, d_student, workspace).value } -> std::convertible_to<double>;
};

}  // namespace kvpolicy
