// Distillation and cross-entropy on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they are
// instantiated.
#pragma once

#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/losses/distill.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// The host's calls, for rows of fp32, bf16 or fp16: what is stored is rounded once, sums and exponentials are fp32 or
// better. A mean over n tokens has gradients of 1 / n and less, and fp16 has no digits below 3e-8: give a loss of fp16
// rows a scale of about n, and take it out of the fp32 gradients that it becomes.
//
// Rows, labels, indices, *value, status and lengths are device memory; nothing is allocated, nothing waited
// for. `status` [B], where given, is OR-ed into: status_bad_length for a length that cannot be, which counts as 0;
// status_not_finite for a NaN logit or hidden number, whose token's results then mean nothing; status_bad_index for a
// label or index outside its row, which is left out.

/// The most logits of a token that top_logits and TopDistillation take on a device.
inline constexpr std::int32_t max_top_logits = 4096;

/// Bytes of device workspace that the losses need: for stored top logits, CrossEntropy and L2Distillation.
template <class L>
std::size_t row_loss_workspace_bytes(const cuda& on, const L& loss, const Sequences& sequences,
                                     std::int32_t heads);

/// Bytes of device workspace for TopDistillation from the teacher's rows.
template <Storage T>
std::size_t top_distillation_workspace_bytes(const cuda& on, const TopDistillation& loss,
                                             rows_view<const T> teacher, const Sequences& sequences);
/// The same of rows that may be written.
template <Storage T>
std::size_t top_distillation_workspace_bytes(const cuda& on, const TopDistillation& loss,
                                             rows_view<T> teacher, const Sequences& sequences) {
    return top_distillation_workspace_bytes(on, loss, input_rows<T>(teacher), sequences);
}

/// The host's top_logits: the same logits and indices in the same order. logits [B, 1, S, V]; overwrites values and indices
/// [B, 1, S, K] for the sequences' lengths. K is 1 to V, and at most max_top_logits. No workspace.
template <Storage T>
void top_logits(const cuda& on, std::type_identity_t<rows_view<const T>> logits, const Sequences& sequences,
                rows_view<T> values, rows_view<std::int32_t> indices, std::uint32_t* status = nullptr);

/// TopDistillation from the teacher's rows: teacher and student [B, 1, S, V]; overwrites d_student [B, 1, S, V] for
/// the sequences' lengths, and *value.
template <Storage T>
void row_loss(const cuda& on, const TopDistillation& loss, std::type_identity_t<rows_view<const T>> teacher,
              std::type_identity_t<rows_view<const T>> student, const Sequences& sequences,
              rows_view<T> d_student, LossValue* value, workspace_view workspace,
              std::uint32_t* status = nullptr);

/// The same from stored logits, values and indices [B, 1, S, K] as top_logits writes them: indices of one token are distinct.
template <Storage T>
void row_loss(const cuda& on, const TopDistillation& loss, std::type_identity_t<rows_view<const T>> values,
              rows_view<const std::int32_t> indices, std::type_identity_t<rows_view<const T>> student,
              const Sequences& sequences, rows_view<T> d_student, LossValue* value, workspace_view workspace,
              std::uint32_t* status = nullptr);

/// CrossEntropy: labels [B, 1, S], -1 leaves a token out; overwrites d_student [B, 1, S, V] for the sequences'
/// lengths, and *value.
template <Storage T>
void row_loss(const cuda& on, const CrossEntropy& loss, plane_view<const std::int32_t> labels,
              std::type_identity_t<rows_view<const T>> student, const Sequences& sequences,
              rows_view<T> d_student, LossValue* value, workspace_view workspace,
              std::uint32_t* status = nullptr);

/// L2Distillation: teacher, student and d_student [B, heads, S, D]; overwrites d_student for the lengths, and *value.
template <Storage T>
void row_loss(const cuda& on, const L2Distillation& loss, std::type_identity_t<rows_view<const T>> teacher,
              std::type_identity_t<rows_view<const T>> student, const Sequences& sequences,
              rows_view<T> d_student, LossValue* value, workspace_view workspace,
              std::uint32_t* status = nullptr);

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
