// attend_backward on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they are instantiated.
#pragma once

#include <kvpolicy/attention/gradients.hpp>
#include <kvpolicy/attention/keys.hpp>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/config.cuh>

#include <cstddef>
#include <type_traits>

namespace kvpolicy {

/// The head_dims that kernels are compiled for: a call's takes the smallest that holds it.
template <int... Tiles>
struct head_dims {};

template <class T>
concept AttentionStorage = std::is_same_v<T, bf16> || std::is_same_v<T, fp16> || std::is_same_v<T, float>;

/// How attend_backward runs.
struct BackwardOptions {
    /// Bit-identical results in every run. d_q then comes from a pass of its own and super-tiles of 1024 queries go one after
    /// another for d_k and d_v: slower, most so where batch * KV heads is small.
    bool deterministic = false;
};

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

/// Bytes of device workspace for the attend_backward call with the same arguments, and for every call that differs from it
/// only by fewer queries or keys. O(S D): packed copies of q and d_out, fp32 sums of all gradients, and the lists of live keys.
template <class Dims = head_dims<64, 128, 256>, AttentionStorage T>
std::size_t attend_backward_workspace_bytes(const cuda& on, const Attention& attention,
                                            std::type_identity_t<rows_view<const T>> q, const keys<T>& all,
                                            const Sequences& sequences, const BackwardOptions& options = {});

/// Gradients of attend() through the mask: arguments and equations of the host's attend_backward (attention/sparse.hpp). All
/// tensors and arrays, lengths, starts and bias_from included, are device memory. Work is enqueued on the context's stream;
/// nothing is allocated, nothing waited for, and grids depend on shapes alone.
///
/// d_q, d_k and d_v are overwritten for the rows that count and untouched beyond. T is bf16 or fp16 (tensor cores, fp32 sums,
/// weights and gradients of logits rounded to T before they are multiplied) or float (plain loops, to check with). head_dims
/// are multiples of 8 up to the largest of Dims, at most 256, and may differ between k and v. Rows of bf16 and fp16 begin at
/// multiples of 16 bytes. Cost: the live pairs, in blocks; a dense call takes all pairs. Without `deterministic` the order of
/// fp32 additions, so the last bits, varies from run to run.
///
/// Refused before anything is enqueued: shapes that disagree, unsupported head_dims, strides that do not keep rows aligned,
/// too little workspace. What a host would refuse but a device finds too late (a NaN in a visible row) spreads; a length
/// below 0 or over the view counts as 0. Failing CUDA calls throw kvpolicy::cuda_error.
template <class Dims = head_dims<64, 128, 256>, AttentionStorage T>
void attend_backward(const cuda& on, const Attention& attention, std::type_identity_t<rows_view<const T>> q,
                     const keys<T>& all, const Sequences& sequences, const AttendGradient<T>& given,
                     const AttendGradients<T>& into, workspace_view workspace,
                     const BackwardOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
