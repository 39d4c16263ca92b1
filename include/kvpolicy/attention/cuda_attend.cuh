// Attention through a mask on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they
// are instantiated.
#pragma once

#include <kvpolicy/attention/attend.hpp>
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

/// Bytes of device workspace for the attend call with the same arguments, and for every call on the same GPU
/// that differs from it only by fewer queries or keys. With `gather` at most 256 bytes a row of a KV head
/// (448 with biases) and 8 bytes a query of a KV head (12 where a group fills a tile of queries: 64 heads and
/// more); nearly nothing with `scan`. Shapes and strides count; nothing is read, but no view may be null:
/// before tensors exist any address at a multiple of 16 bytes stands for them.
template <Storage T, class Dims = all_head_dims>
std::size_t attend_workspace_bytes(const cuda& ctx, const AttentionParams& attention, input_rows<T> q,
                                   const kv_view<T>& all, const Sequences& sequences,
                                   const AttendOptions& options = {});
template <Storage T, class Dims = all_head_dims>
std::size_t attend_workspace_bytes(const cuda& ctx, const AttentionParams& attention, input_rows<T> q,
                                   const kv_view<T>& past, const kv_view<T>& self, const Sequences& sequences,
                                   const AttendOptions& options = {});

/// The host's attend (attention/attend.hpp has the equation and the shapes) on CUDA. All tensors, planes and
/// arrays of numbers (lengths, starts, cu_seqlens, bias_from) are device memory.
///
/// bf16 and fp16: any head_dim that is a multiple of 8 up to the largest of Dims, Dk and Dv each their own,
/// computed by the tensor cores with fp32 sums. Rows must begin at multiples of 16 bytes. float and double:
/// plain kernels in their own precision for head_dims up to 1024, to check others with.
///
/// Overwrites out and lse for the first sequences.lengths[b] queries of sequence b. Work is enqueued on the
/// context's stream; nothing is allocated, nothing waited for. Grids depend on shapes alone, so a captured
/// graph serves other lengths, starts and lifetimes. The bits are the same in every run.
///
/// What a query does not see never reaches it, whatever the row holds, NaN and infinities included. (The
/// tensor cores multiply such a value by 0 where another query of the tile sees its row. So outputs that are
/// not finite are computed once more, one by one and slowly, unless the query itself is not finite: keys
/// that are not finite and that many queries see take some hundred times as long.) Outputs must not share
/// memory with inputs.
///
/// What the host would refuse but the device finds too late: lengths (of queries or keys) below 0 or beyond
/// the view count as 0, cu_seqlens that do not rise from 0 to sequences.length make every segment empty; both
/// set status_bad_length.
///
/// Refuses, before anything is enqueued: what the host refuses as far as no device memory must be read, a
/// head_dim beyond Dims, rows that are not aligned, too little workspace. Failing CUDA calls throw
/// kvpolicy::cuda_error.
template <Storage T, class Dims = all_head_dims>
void attend(const cuda& ctx, const AttentionParams& attention, input_rows<T> q, const kv_view<T>& all,
            const Sequences& sequences, output_rows<T> out, plane_view<float> lse, workspace_view workspace,
            const AttendOptions& options = {});

/// Two segments of keys, as on the host: the rows of a cache, and the chunk's own.
template <Storage T, class Dims = all_head_dims>
void attend(const cuda& ctx, const AttentionParams& attention, input_rows<T> q, const kv_view<T>& past,
            const kv_view<T>& self, const Sequences& sequences, output_rows<T> out, plane_view<float> lse,
            workspace_view workspace, const AttendOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
