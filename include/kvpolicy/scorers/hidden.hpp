// Scores from hidden states (SP-KV), of whole sequences: for masks and training. Caches take the states themselves
// (CacheExtras::hidden).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/hidden_rows.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/mlp.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

struct cublasLtContext;  // what cublasLtHandle_t points to

namespace kvpolicy {

/// What score_hidden and score_hidden_backward take besides the usual.
struct ScoreHiddenOptions {
    /// CUDA alone, where it must be given: the caller's cublasLtHandle_t.
    cublasLtContext* cublaslt = nullptr;
    /// [B], OR-ed into: status_bad_length for a length or start that cannot be, and from the backward pass
    /// status_not_finite for a NaN or infinity in d_scores or hidden (the gradients then mean nothing). Null:
    /// not wanted; the host then refuses both.
    std::uint32_t* status = nullptr;
};

/// Bytes of workspace that score_hidden needs; Real is that of the scores. On the host it depends on the
/// threads of `ctx`.
template <HiddenScorer S, class Real = float, class T>
std::size_t score_hidden_workspace_bytes(const host& ctx, const S& scorer, rows_view<T> hidden,
                                         const Sequences& sequences);

/// Scores the tokens of sequences from hidden [B, 1, S, width], of any Storage type: scores [B, Hkv, S] of
/// float (double for checks) are overwritten for t < length, all heads of a token at once, and nothing else
/// is. Every token has a score of its own, so cu_seqlens and starts change nothing but which rows are read
/// (starts[b] .. starts[b] + length - 1). Synchronous; the bits depend neither on threads nor on the
/// instruction set, and are those that a cache computes. Refuses, before anything is written: views that
/// disagree, a scorer that does not fit the views, too little workspace.
template <HiddenScorer S, class T, class Real>
void score_hidden(const host& ctx, const S& scorer, rows_view<T> hidden, const Sequences& sequences,
                  plane_view<Real> scores, workspace_view workspace, const ScoreHiddenOptions& options = {});

/// The arguments of score_hidden_backward: those of score_hidden, the gradient of its scores, and where to write the states'.
/// Real is float, or double for checks on the host.
template <class T, class Real = float>
struct HiddenBackward {
    rows_view<const T> hidden;  ///< [B, 1, S, width]
    Sequences sequences;
    plane_view<const Real> d_scores;  ///< [B, Hkv, S]
    rows_view<Real> d_hidden{};       ///< [B, 1, S, width], overwritten for the lengths; empty: not wanted
};

template <class T, class Real, class... Rest>
HiddenBackward(rows_view<T>, Sequences, plane_view<Real>, Rest...)
    -> HiddenBackward<std::remove_const_t<T>, std::remove_const_t<Real>>;

/// Bytes of workspace that score_hidden_backward needs.
template <class Input, class Act, std::int32_t D, class T, class Real>
requires takes_hidden_state<Input> std::size_t score_hidden_backward_workspace_bytes(
    const host& ctx, const BasicMlpScorer<Input, Act, D>& scorer, const HiddenBackward<T, Real>& call);

/// With y = W1 x + b1 and d r_h = d_scores[h]: d y = act'(y) sum over h of d r_h w2_h, d W1 += sum d y x^T, d b1 += sum d y,
/// d w2_h += sum d r_h act(y), d b2_h += sum d r_h, d x = W1^T d y. Null arrays are left out. Synchronous; the bits do
/// not depend on the number of threads. Refuses what score_hidden refuses, and NaN or infinity in d_scores or hidden (named).
template <class Input, class Act, std::int32_t D, class T, class Real>
requires takes_hidden_state<Input>
void score_hidden_backward(const host& ctx, const BasicMlpScorer<Input, Act, D>& scorer,
                           const HiddenBackward<T, Real>& call, MlpParameters<Real> gradients,
                           workspace_view workspace, const ScoreHiddenOptions& options = {});

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_hidden.hpp>
