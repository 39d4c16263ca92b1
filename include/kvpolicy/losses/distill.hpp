// Distillation: what keeps a sparse student close to its dense teacher (KVpop, algorithm 1 and F; WG-KV, 3.3).
//
// Rows are [B, 1, S, N] views: N logits, or a hidden state, per token. Means are over the tokens of all sequences.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/losses/concept.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// Writes the `values.dim` largest logits of each token, largest first (equal ones by rising index), and their indices:
/// logits [B, 1, S, V], values and indices [B, 1, S, K], K <= V. So a teacher's logits can be stored, and the teacher left
/// out of training. Overwrites. Refuses a NaN among the logits.
template <class Real>
void top_logits(const host& on, std::type_identity_t<rows_view<const Real>> logits,
                const Sequences& sequences, rows_view<Real> values, rows_view<std::int32_t> indices,
                workspace_view workspace);

/// Bytes of workspace for top_logits.
std::size_t top_logits_workspace_bytes(const host& on, std::int32_t vocabulary);

/// KL over the teacher's top logits, both sides renormalized over that set: with p and s the softmaxes of teacher and
/// student logits / temperature over the set,
///
///     forward:  sum p (log p - log s)         d z = (s - p) / temperature
///     reverse:  sum s (log s - log p)         d z = s (log s - log p - KL) / temperature
///
/// and d z = 0 outside the set. No factor of temperature^2 is applied.
struct TopDistillation {
    std::int32_t top = 256;    ///< logits of a token that count; all where a row has fewer
    float temperature = 1.0f;  ///< above 0
    bool reverse = false;
    float scale = 1.0f;  ///< multiplies value and gradient

    /// Bytes of workspace for the first form, and none for the second.
    template <class Real>
    [[nodiscard]] std::size_t workspace_bytes(const host& on, rows_view<Real> teacher) const;

    /// teacher and student [B, 1, S, V]; overwrites d_student [B, 1, S, V] for the sequences' lengths. Refuses shapes that
    /// disagree, a NaN logit that is read.
    template <class Real>
    LossValue operator()(const host& on, std::type_identity_t<rows_view<const Real>> teacher,
                         std::type_identity_t<rows_view<const Real>> student, const Sequences& sequences,
                         rows_view<Real> d_student, workspace_view workspace) const;

    /// The same from stored logits: values and indices [B, 1, S, K] as top_logits writes them; `top` does not count.
    template <class Real>
    LossValue operator()(const host& on, std::type_identity_t<rows_view<const Real>> values,
                         rows_view<const std::int32_t> indices,
                         std::type_identity_t<rows_view<const Real>> student, const Sequences& sequences,
                         rows_view<Real> d_student) const;
};

/// Cross-entropy of labels: mean over tokens with a label of -log softmax(z)[label]; d z = (softmax(z) - onehot) / count.
struct CrossEntropy {
    float scale = 1.0f;

    /// student [B, 1, S, V]; labels [B, 1, S], where -1 leaves a token out; overwrites d_student for the sequences' lengths.
    /// Refuses shapes that disagree, a label of V or more, a NaN logit.
    template <class Real>
    LossValue operator()(const host& on, plane_view<const std::int32_t> labels,
                         std::type_identity_t<rows_view<const Real>> student, const Sequences& sequences,
                         rows_view<Real> d_student) const;
};

/// L2 distillation of hidden states (WG-KV): mean over tokens and dimensions of (student - teacher)^2.
struct L2Distillation {
    float scale = 1.0f;

    template <class Real>
    [[nodiscard]] std::size_t workspace_bytes(const host&, rows_view<Real>) const {
        return 0;
    }
    /// teacher, student and d_student [B, 1, S, D] (or any number of heads). Overwrites d_student for the lengths.
    template <class Real>
    LossValue operator()(const host& on, std::type_identity_t<rows_view<const Real>> teacher,
                         std::type_identity_t<rows_view<const Real>> student, const Sequences& sequences,
                         rows_view<Real> d_student, workspace_view = {}) const;
};

}  // namespace kvpolicy

#include <kvpolicy/losses/host/host_distill.hpp>

namespace kvpolicy {
static_assert(DistillationLoss<TopDistillation> && DistillationLoss<L2Distillation>);
}  // namespace kvpolicy
#if defined(__CUDACC__)
#include <kvpolicy/losses/cuda_distill.cuh>
#endif
