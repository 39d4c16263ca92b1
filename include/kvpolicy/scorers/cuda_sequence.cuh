// Scores and gradients of whole sequences on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it
// where they are instantiated.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/scorers/score_backward.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// Rows, planes, weights, gradients, states, status, a Rope's frequencies, and the arrays of `sequences` are
// device memory; the scorer itself is host memory, read during the call. Work is enqueued on the context's
// stream; nothing is allocated, nothing waited for, and grids depend on shapes alone, so that a captured
// graph serves later lengths and weights.
//
// For the library's LinearScorer, BasicMlpScorer of keys and values (Silu or GeluErf), mLSTMScorer (Softmax
// or Hedgehog) and ConvScorer. bf16 and fp16 rows: widths that are multiples of 8, aligned to 16 bytes;
// matrix products on tensor cores with fp32 sums, of weights and hidden numbers rounded to 16 bits (an
// mLSTM's features, values and states to bf16, whatever T is); linear scorers and gates in fp32. float rows:
// plain sums in fp32, to check the others with. An mLSTM has up to 128 features and 128 values (64 for
// gradients with float rows). Wide inputs are refused where a block of the device has too little shared
// memory: docs/cuda.md, Architectures, says which.

/// Bytes of device workspace that score_sequence needs for a call with the same arguments. Weights in T; an
/// mLSTM also, with F and V its compiled widths, about 4 F + 2 V bytes a token and head, and 2 F V for every
/// 64 tokens (twice that for float rows).
template <class Widths = all_mlstm_widths, Scorer S, class K, class V>
std::size_t score_sequence_workspace_bytes(const cuda& ctx, const S& scorer, rows_view<K> k, rows_view<V> v,
                                           const Sequences& sequences,
                                           const BasicScoreOptions<real_of<K>>& options = {});

/// As the host's score_sequence: the same entries of `scores` are written, to 16-bit rounding (fp32 to
/// rounding) the same numbers, and options.states are the same arrays. options.how: fastest, or chunkwise for
/// an mLSTM. A NaN in what a scorer looks at of a token (WriteGateScorer: the key alone) makes the token's
/// score NaN; an infinity does, too, or gives an infinity where one sum decides. An mLSTM's reads are NaN
/// from either on, ConvScorer's scores up to 6 tokens before and after it, at even distances.
///
/// options.status [B], where given, is OR-ed into: status_bad_length for a length or start that cannot be,
/// and edges that do not rise from 0 to the length. Such a sequence counts as empty, and its states stay
/// as they are. Refuses, before anything is enqueued, what the host refuses as far as no device memory
/// must be read, widths and alignment as above, inputs of an MLP that a block has no space for, and
/// form::recurrent of an mLSTM.
template <class Widths = all_mlstm_widths, Scorer S, class K, class V>
void score_sequence(const cuda& ctx, const S& scorer, rows_view<K> k, rows_view<V> v,
                    const Sequences& sequences, std::int32_t delay, plane_view<real_of<K>> scores,
                    workspace_view workspace, const BasicScoreOptions<real_of<K>>& options = {});

/// Bytes of device workspace that score_sequence_backward needs.
template <class Widths = all_mlstm_widths, Scorer S, Storage T>
std::size_t score_sequence_backward_workspace_bytes(const cuda& ctx, const S& scorer,
                                                    const ScoreBackward<T>& call);

/// As the host's score_sequence_backward (scorers/backward.hpp): gradients of parameters are added to,
/// call.d_k and call.d_v are overwritten for the lengths, null arrays are left out. The same bits in every
/// run: sums over tokens are made in parts whose order depends on shapes alone, and on which kernels the GPU
/// has (Hopper's or portable ones; a convolution's by its blocks' shared memory). Hidden numbers' gradients
/// are rounded to 16 bits before they are multiplied. For fp16 rows they are scaled by the power of two that
/// brings each head's largest |d_scores| to [1, 2), and sums are scaled back, so d_scores of any size lose as
/// little as those near 1; that takes 4 bytes of workspace a token and head.
///
/// options.status [B], where given, is OR-ed into: status_bad_length as above, status_not_finite for a NaN or
/// infinity in k, v or d_scores, which the host refuses; gradients then mean nothing. Refuses, before
/// anything is added to, the rest of what the host refuses as far as no device memory must be read;
/// sequences.starts of an mLSTM or a convolution; inputs of an MLP that a block has no space for.
template <class Widths = all_mlstm_widths, Scorer S, Storage T>
void score_sequence_backward(const cuda& ctx, const S& scorer, const ScoreBackward<T>& call,
                             typename S::template parameters<compute_t<T>> gradients,
                             workspace_view workspace, const ScoreBackwardOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
