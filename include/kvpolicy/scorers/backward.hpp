// Gradients of scorers over whole sequences: from d loss / d score to weights, and to keys and
// values when asked.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/scorers/score_backward.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// Bytes of workspace for the backward pass of a linear scorer, of an MLP, of an mLSTM, of a convolution.
template <std::int32_t D, Storage T>
std::size_t backward_workspace_bytes(const host& ctx, const LinearScorer<D>& scorer,
                                     const ScoreBackward<T>& call);
template <class Input, class Act, std::int32_t D, Storage T>
std::size_t backward_workspace_bytes(const host& ctx, const BasicMlpScorer<Input, Act, D>& scorer,
                                     const ScoreBackward<T>& call);
template <std::int32_t D, class Feature, class Values, Storage T>
std::size_t backward_workspace_bytes(const host& ctx, const mLSTMScorer<D, Feature, Values>& scorer,
                                     const ScoreBackward<T>& call);
template <std::int32_t D, Storage T>
std::size_t backward_workspace_bytes(const host& ctx, const ConvScorer<D>& scorer,
                                     const ScoreBackward<T>& call);

/// d weight += sum d r [k; v],  d bias += sum d r,  d [k; v] = d r weight
template <std::int32_t D, Storage T>
void backward(const host& ctx, const LinearScorer<D>& scorer, const ScoreBackward<T>& call,
              LinearParameters<compute_t<T>> gradients, workspace_view workspace);

/// With y = W1 x + b1:  d y = d r w2 act'(y),  d W1 += sum d y x^T,  d b1 += sum d y,  d w2 += sum d r
///     act(y),
/// d b2 += sum d r,  d x = W1^T d y
template <class Input, class Act, std::int32_t D, Storage T>
void backward(const host& ctx, const BasicMlpScorer<Input, Act, D>& scorer, const ScoreBackward<T>& call,
              MlpParameters<compute_t<T>> gradients, workspace_view workspace);

/// Chunkwise, with the states before each chunk computed again (scorers/host/mlstm_backward_stream.hpp
/// has the equations). The stabilizer cancels in h, and is a constant to the gradient where the clamp of
/// the divisor acts.
template <std::int32_t D, class Feature, class Values, Storage T>
void backward(const host& ctx, const mLSTMScorer<D, Feature, Values>& scorer, const ScoreBackward<T>& call,
              mLSTMParameters<compute_t<T>> gradients, workspace_view workspace);

/// The layers of scorers/conv.hpp in reverse, with the forward pass's dropout: d y_{l-1}[t + 2 j] +=
/// W_l[j]^T d y_l[t], and d W_l[j] += sum over t of d y_l[t] y_{l-1}[t + 2 j]^T. d k is rotated, since x
/// was rotated back.
template <std::int32_t D, Storage T>
void backward(const host& ctx, const ConvScorer<D>& scorer, const ScoreBackward<T>& call,
              ConvParameters<compute_t<T>> gradients, workspace_view workspace);

/// A scorer that can be trained: parameters<Float>, a struct of arrays that for_each_parameter visits, and
/// functions backward(ctx, scorer, call, gradients, workspace) and
/// backward_workspace_bytes(ctx, scorer, call)
/// beside the scorer's type. backward adds to every array of `gradients` that is not null, and overwrites
/// call.d_k and call.d_v where they are not empty. Results must not depend on the number of threads.
template <class S>
concept DifferentiableScorer = Scorer<S> &&
    requires(const S& scorer, const host& ctx, const ScoreBackward<float>& call,
             typename S::template parameters<float> gradients, workspace_view workspace) {
    { backward_workspace_bytes(ctx, scorer, call) } -> std::convertible_to<std::size_t>;
    {backward(ctx, scorer, call, gradients, workspace)};
};

static_assert(DifferentiableScorer<LinearScorer<>> && DifferentiableScorer<MlpScorer<64>>);
static_assert(DifferentiableScorer<BasicMlpScorer<NormalizedInput, GeluErf>>);
static_assert(DifferentiableScorer<ConvScorer<>>);
static_assert(DifferentiableScorer<mLSTMScorer<>> &&
              DifferentiableScorer<mLSTMScorer<128, Softmax, DirectValues>>);

/// Bytes of workspace that score_sequence_backward needs for a call with the same arguments: the scorer's
/// backward_workspace_bytes.
template <class Widths = all_mlstm_widths, Scorer S, Storage T>
requires DifferentiableScorer<S> std::size_t score_sequence_backward_workspace_bytes(
    const host& ctx, const S& scorer, const ScoreBackward<T>& call);

/// backward() of any such scorer, after the checks that all share. Gradients of parameters are added to, so
/// that batches and micro-batches add up; null arrays are left out. Synchronous; the bits do not depend on
/// the number of threads.
///
/// Refuses, before anything is written: views that disagree, continued sequences (starts above 0, since
/// the past's gradient would be lost) of a scorer that looks at other tokens, a scorer that does not
/// fit (check()), a NaN or infinity in k, v or d_scores (named with batch, head and position), too
/// little workspace.
template <class Widths = all_mlstm_widths, Scorer S, Storage T>
requires DifferentiableScorer<S>
void score_sequence_backward(const host& ctx, const S& scorer, const ScoreBackward<T>& call,
                             typename S::template parameters<compute_t<T>> gradients,
                             workspace_view workspace, const ScoreBackwardOptions& options = {});

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_backward.hpp>
