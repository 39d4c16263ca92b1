// Scores from hidden states (SP-KV's predictor) on CUDA, whose products are cuBLASLt's. No other header of
// the library includes this one, so that only those who use it link cuBLASLt (CMake: CUDA::cublasLt, else
// -lcublasLt). The bodies come with it.
//
//     cublasLtHandle_t handle;                                      // the caller's; one may serve all layers
//         and streams
//     cublasLtCreate(&handle);
//     const std::size_t bytes = kvpolicy::score_hidden_workspace_bytes(ctx, predictor, hidden, sequences);
//     kvpolicy::score_hidden(ctx, predictor, hidden, sequences, scores, {memory, bytes}, {.cublaslt =
//         handle});
//
// A cache on CUDA takes such scores as StepIO::scores of a policy with GivenScores. One whose policy has the
// predictor scores its tokens itself, in fp32 and without cuBLASLt (StepIO::hidden).
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/scorers/hidden.hpp>
#include <kvpolicy/scorers/mlp.hpp>

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// For UtilityPredictor, and any BasicMlpScorer of HiddenInput with Silu or GeluErf. Hidden states, weights,
// gradients, scores, status, and the arrays of `sequences` are device memory; the scorer itself is host
// memory, read during the call. Hidden states are bf16, fp16 or float; 16-bit rows: a width that is a
// multiple of 8, rows aligned to 16 bytes. Products are of hidden states and weights rounded to T, with fp32
// sums (float: cuBLASLt's plain fp32); activations and the heads' sums are fp32.
//
// Work is enqueued on the context's stream; nothing is allocated and nothing waited for, and what is enqueued
// depends on shapes alone, so that a captured graph serves later lengths and weights. Many rows go in parts
// of 8192, one product each. cu_seqlens changes nothing (a token's score is its own); with `starts` all rows
// of the view are computed, since they are known on the device alone.

/// Bytes of device workspace that score_hidden needs: the weights in T, 4 bytes for each of the hidden
/// layer's numbers of up to 8192 tokens, and 32 MB for cuBLASLt.
template <HiddenScorer S, class Real = float, class T>
std::size_t score_hidden_workspace_bytes(const cuda& ctx, const S& scorer, rows_view<T> hidden,
                                         const Sequences& sequences);

/// As the host's score_hidden: scores [B, Hkv, S] are overwritten for t < length (rows starts[b] on), nothing
/// else is, to 16-bit rounding (float: to rounding) the same numbers. options.status [B], where given, is
/// OR-ed into: status_bad_length for a length or start that cannot be; such a sequence counts as empty. Rows
/// of hidden beyond the lengths may hold anything.
///
/// Refuses, before anything is enqueued, what the host refuses as far as no device memory must be read, a
/// null handle, widths and alignment as above. A status of cuBLASLt's is thrown as cuda_error with its name.
template <HiddenScorer S, class T, class Real>
void score_hidden(const cuda& ctx, const S& scorer, rows_view<T> hidden, const Sequences& sequences,
                  plane_view<Real> scores, workspace_view workspace, const ScoreHiddenOptions& options = {});

/// Bytes of device workspace that score_hidden_backward needs: that of score_hidden, twice as much for
/// the hidden layer, and where lengths or starts are given a copy of the part's hidden states and of
/// their gradients.
template <class Input, class Act, std::int32_t D, class T, class Real>
requires takes_hidden_state<Input> std::size_t score_hidden_backward_workspace_bytes(
    const cuda& ctx, const BasicMlpScorer<Input, Act, D>& scorer, const HiddenBackward<T, Real>& call);

/// As the host's score_hidden_backward, with y = W1 x + b1 computed again: d y = act'(y) sum over h of d r_h
/// w2_h (rounded to T), d W1 += sum d y x^T, d b1 += sum d y, d w2_h += sum d r_h act(y), d b2_h += sum d
/// r_h, and where wanted d x = W1^T d y. Null arrays are left out. b1, w2 and b2 get the same bits in every
/// run, the others what cuBLASLt gives. fp16: d y is scaled by the power of two that brings the call's
/// largest |d_scores| to [1, 2), and products are scaled back, so that small d_scores do not vanish.
/// options.status is OR-ed into, as by score_hidden, and with status_not_finite where a gradient came from
/// NaN or infinity in d_scores or hidden. Refuses what score_hidden refuses.
template <class Input, class Act, std::int32_t D, class T, class Real>
requires takes_hidden_state<Input>
void score_hidden_backward(const cuda& ctx, const BasicMlpScorer<Input, Act, D>& scorer,
                           const HiddenBackward<T, Real>& call, MlpParameters<Real> gradients,
                           workspace_view workspace, const ScoreHiddenOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy

#include <kvpolicy/scorers/cuda/mlp/dispatch_predictor.cuh>
