// Distillation losses, which keep a sparse student close to its dense teacher (KVpop, algorithm 1 and F;
// WG-KV, 3.3).
//
// Rows are [B, 1, S, N] views: N logits, or a hidden state, per token. Means are over the tokens
// of all sequences.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/losses/concept.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

// On CUDA: rows of fp32, bf16 or fp16; stored values are rounded once, sums and exponentials are fp32 or
// better. A mean over n tokens has gradients of 1 / n and less, and fp16 has no digits below 3e-8: give a
// loss of fp16 rows a scale of about n, and take it out of the fp32 gradients that it becomes. Rows, labels,
// indices, *value, status and lengths are device memory; nothing is allocated, nothing waited for.
//
// options.status reports on both contexts: status_bad_length, for a length that cannot be, which counts as 0;
// status_not_finite, for a NaN logit or hidden number, whose token's results then mean nothing;
// status_bad_index, for a label or index outside its row, which is left out. Without a status the host
// refuses all three.

/// Bytes of workspace for top_logits: none on CUDA.
std::size_t top_logits_workspace_bytes(const host& ctx, std::int32_t vocabulary);

/// Writes the `values.dim` largest logits of each token, largest first (equal ones by rising index), and
/// their indices: logits [B, 1, S, V], values and indices [B, 1, S, K], K <= V. So a teacher's logits can be
/// stored, and the teacher left out of training. Overwrites. A NaN logit ranks last, or is refused (see
/// above).
template <Storage T>
void top_logits(const host& ctx, input_rows<T> logits, const Sequences& sequences, rows_view<T> values,
                rows_view<std::int32_t> indices, workspace_view workspace, const LossOptions& options = {});

/// What a student's softmax is over: the teacher's top logits, or all logits of its row.
enum class student_softmax : std::int32_t { top, all };

/// KL over the teacher's top logits, both sides renormalized over that set: with p and s the softmaxes of
/// teacher and student logits / temperature over the set,
///
///     forward:  sum p (log p - log s)         d z = (s - p) / temperature
///     reverse:  sum s (log s - log p)         d z = s (log s - log p - KL) / temperature
///
/// and d z = 0 outside the set. No factor of temperature^2 is applied.
///
/// So a student may have any logits outside the set. With student_softmax::all, s is its softmax over all
/// logits: the forward value grows by -log of the student's mass in the set, and d z = (s - p) / temperature
/// everywhere, with p = 0 outside. (The reverse value needs a teacher outside the set, and is refused.)
struct TopDistillation {
    std::int32_t top = 256;    ///< logits of a token that count; all where a row has fewer
    float temperature = 1.0f;  ///< above 0
    bool reverse = false;
    float scale = 1.0f;  ///< multiplies value and gradient
    student_softmax over = student_softmax::top;

    /// Bytes of workspace for the first form, and for the second.
    template <class Rows>
    [[nodiscard]] std::size_t workspace_bytes(const host& ctx, rows_view<Rows> teacher,
                                              const Sequences& sequences) const;
    template <class Rows>
    [[nodiscard]] std::size_t workspace_bytes(const host& ctx, rows_view<Rows> values,
                                              rows_view<const std::int32_t> indices,
                                              const Sequences& sequences) const;

    /// teacher and student [B, 1, S, V]; overwrites d_student [B, 1, S, V] for the sequences'
    /// lengths, and *value. Refuses shapes that disagree, and `reverse` with student_softmax::all;
    /// NaN logits as above, the student's where they count. On CUDA `top` is at most max_top_logits.
    template <Storage T>
    void operator()(const host& ctx, input_rows<T> teacher, input_rows<T> student, const Sequences& sequences,
                    rows_view<T> d_student, LossValue* value, workspace_view workspace,
                    const LossOptions& options = {}) const;

    /// The same from stored logits: values and indices [B, 1, S, K] as top_logits writes them, the indices of
    /// one token distinct; `top` does not count.
    template <Storage T>
    void operator()(const host& ctx, input_rows<T> values, rows_view<const std::int32_t> indices,
                    input_rows<T> student, const Sequences& sequences, rows_view<T> d_student,
                    LossValue* value, workspace_view workspace, const LossOptions& options = {}) const;

#if defined(__CUDACC__)
    template <class Rows, class Build = cuda_build>
    [[nodiscard]] std::size_t workspace_bytes(const cuda& ctx, rows_view<Rows> teacher,
                                              const Sequences& sequences) const;
    template <class Rows, class Build = cuda_build>
    [[nodiscard]] std::size_t workspace_bytes(const cuda& ctx, rows_view<Rows> values,
                                              rows_view<const std::int32_t> indices,
                                              const Sequences& sequences) const;
    template <Storage T, class Build = cuda_build>
    void operator()(const cuda& ctx, input_rows<T> teacher, input_rows<T> student, const Sequences& sequences,
                    rows_view<T> d_student, LossValue* value, workspace_view workspace,
                    const LossOptions& options = {}) const;
    template <Storage T, class Build = cuda_build>
    void operator()(const cuda& ctx, input_rows<T> values, rows_view<const std::int32_t> indices,
                    input_rows<T> student, const Sequences& sequences, rows_view<T> d_student,
                    LossValue* value, workspace_view workspace, const LossOptions& options = {}) const;
#endif
};

/// Cross-entropy of labels: mean over tokens with a label of -log softmax(z)[label]; d z = (softmax(z) -
/// onehot) / count.
struct CrossEntropy {
    float scale = 1.0f;

    /// Bytes of workspace: none on the host.
    template <class Rows>
    [[nodiscard]] std::size_t workspace_bytes(const host& ctx, rows_view<Rows> student,
                                              const Sequences& sequences) const;

    /// student [B, 1, S, V]; labels [B, 1, S], where -1 leaves a token out; overwrites d_student for the
    /// sequences' lengths, and *value. Refuses shapes that disagree; other labels and NaN logits as above.
    template <Storage T>
    void operator()(const host& ctx, plane_view<const std::int32_t> labels, input_rows<T> student,
                    const Sequences& sequences, rows_view<T> d_student, LossValue* value,
                    workspace_view workspace, const LossOptions& options = {}) const;

#if defined(__CUDACC__)
    template <class Rows, class Build = cuda_build>
    [[nodiscard]] std::size_t workspace_bytes(const cuda& ctx, rows_view<Rows> student,
                                              const Sequences& sequences) const;
    template <Storage T, class Build = cuda_build>
    void operator()(const cuda& ctx, plane_view<const std::int32_t> labels, input_rows<T> student,
                    const Sequences& sequences, rows_view<T> d_student, LossValue* value,
                    workspace_view workspace, const LossOptions& options = {}) const;
#endif
};

/// L2 distillation of hidden states (WG-KV): mean over tokens and dimensions of (student - teacher)^2.
struct L2Distillation {
    float scale = 1.0f;

    /// Bytes of workspace: none on the host.
    template <class Rows>
    [[nodiscard]] std::size_t workspace_bytes(const host& ctx, rows_view<Rows> teacher,
                                              const Sequences& sequences) const;

    /// teacher, student and d_student [B, 1, S, D] (or any number of heads). Overwrites d_student for the
    /// lengths, and *value.
    template <Storage T>
    void operator()(const host& ctx, input_rows<T> teacher, input_rows<T> student, const Sequences& sequences,
                    rows_view<T> d_student, LossValue* value, workspace_view workspace,
                    const LossOptions& options = {}) const;

#if defined(__CUDACC__)
    template <class Rows, class Build = cuda_build>
    [[nodiscard]] std::size_t workspace_bytes(const cuda& ctx, rows_view<Rows> teacher,
                                              const Sequences& sequences) const;
    template <Storage T, class Build = cuda_build>
    void operator()(const cuda& ctx, input_rows<T> teacher, input_rows<T> student, const Sequences& sequences,
                    rows_view<T> d_student, LossValue* value, workspace_view workspace,
                    const LossOptions& options = {}) const;
#endif
};

}  // namespace kvpolicy

#include <kvpolicy/losses/host/host_distill.hpp>

namespace kvpolicy {
static_assert(DistillationLoss<TopDistillation> && DistillationLoss<L2Distillation>);
}  // namespace kvpolicy
#if defined(__CUDACC__)
#include <kvpolicy/losses/cuda_distill.cuh>
#endif
