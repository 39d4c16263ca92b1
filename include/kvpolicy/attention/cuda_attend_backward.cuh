// attend_backward on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they
// are instantiated.
#pragma once

#include <kvpolicy/attention/cuda_attend.cuh>
#include <kvpolicy/attention/gradients.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/head_dims.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

/// Bytes of device workspace for the attend_backward call with the same arguments, and for every call on the
/// same GPU that differs from it only by fewer queries or keys. O(S D): with D the head_dim that the kernels
/// are compiled for, 8 D bytes a query and head (packed copies of q and d_out, and fp32 sums of d_q), 8 D a
/// key and KV head, and the lists of live keys.
template <Storage T, class Dims = all_head_dims>
std::size_t attend_backward_workspace_bytes(const cuda& ctx, const AttentionParams& attention,
                                            input_rows<T> q, const kv_view<T>& all,
                                            const Sequences& sequences, const BackwardOptions& options = {});

/// Gradients of attend() through the mask: arguments and equations of the host's attend_backward
/// (attention/attend.hpp). All tensors, planes and arrays of numbers (lengths, starts, cu_seqlens, bias_from)
/// are device memory.
///
/// bf16 and fp16: tensor cores, fp32 sums; weights and gradients of logits are rounded to T before they are
/// multiplied. Any head_dim that is a multiple of 8 up to the largest of Dims, Dk and Dv each their own; rows
/// must begin at multiples of 16 bytes. fp16 has few digits below 6e-5 and none below 3e-8, in gradients of
/// logits and in results alike, which are smaller than d_out by the weights of single keys: scale the loss so
/// that the largest d_out is between 1 and 100 (docs/cuda.md has what smaller ones cost). float and double:
/// plain loops in their own precision for head_dims up to 256, to check others with.
///
/// Overwrites d_q for the first sequences.lengths[b] queries of sequence b, and d_k, d_v and d_log_bias for
/// the rows that all.lengths counts: 0 for keys that nobody sees, whatever they hold. Work is enqueued on the
/// context's stream; nothing is allocated, nothing waited for, and grids depend on shapes alone. Time goes
/// with the live pairs, in blocks of 128 keys and 64 queries; without expiries, positions or packed segments
/// with all pairs that are not in the future. Unless `deterministic`, sums of 16-bit calls are added up in
/// another order in every run.
///
/// What the host would refuse but the device finds too late: lengths as in attend. Numbers that are not
/// finite spread to those who see them, and to no other; rows of d_q that they spoil are computed once
/// more, one by one and slowly, unless the query's own numbers are not finite. Outputs must not share
/// memory with inputs.
///
/// Refuses, before anything is enqueued: what the host refuses as far as no device memory must be read, a
/// head_dim beyond Dims, rows that are not aligned, too little workspace. Failing CUDA calls throw
/// kvpolicy::cuda_error.
template <Storage T, class Dims = all_head_dims>
void attend_backward(const cuda& ctx, const AttentionParams& attention, input_rows<T> q,
                     const kv_view<T>& all, const Sequences& sequences, const SavedForward<T>& saved,
                     const AttentionGrads<T>& grads, workspace_view workspace,
                     const BackwardOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
