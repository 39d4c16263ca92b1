// The future-attention target on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they
// are instantiated.
#pragma once

#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/head_dims.hpp>

#include <cstddef>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// As in masks/cuda_build.cuh: tensors and `sequences.lengths` are device memory, numbers by head
// (`options.window`) are host memory, read during the call; work is enqueued on the context's stream, nothing
// is allocated, nothing waited for, and grids depend on shapes alone. A length in device memory that no view
// holds counts as 0, and sets status_bad_length in options.status (device memory), where that is given.
//
// bf16 and fp16 with head_dim up to the largest of Dims go to the tensor cores (wgmma where the binary has
// code for compute capability 9.0a and the GPU is one, mma.sync else), if the views' data and strides are
// multiples of 16 bytes; everything else (fp32, double, other heads, odd strides) takes a plain kernel, which
// is for checking. Sums are taken in the same order in every run: results are the same bits. Rows beyond a
// sequence's length may hold anything. The others must be finite: the host refuses a NaN, here results that
// it takes part in are anything.

/// Bytes of device workspace for causal_lse and future_mass: 4 bytes a query of a head, a word for every
/// 128 of them, the windows, and a word for the next item of work.
template <Storage T>
std::size_t future_mass_workspace_bytes(const cuda& ctx, rows_view<const T> q, input_rows<T> k);

/// As the host's causal_lse: lse [B, Hq, S] (natural log) of q [B, Hq, S, D] and k [B, Hkv, S, D]. Overwrites
/// it for the sequences' lengths. O(S^2) time.
template <Storage T, class Dims = all_head_dims>
void causal_lse(const cuda& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                const Sequences& sequences, plane_view<float> lse, workspace_view workspace,
                const CausalLseOptions& options = {});

/// As the host's future_mass: target [B, Hkv, S] of q [B, Hq, S, D], k [B, Hkv, S, D] and lse [B, Hq, S] (eq.
/// 2, 3, 8, 14-16), refusing the same. One pass over the pairs of keys and later queries. Masses are kept as
/// logarithms throughout, so that a sparse lse, or a small epsilon with a large beta, loses nothing that the
/// host's result has; where fp32 does not hold p^beta itself, keys take a second pass that costs more.
template <Storage T, class Dims = all_head_dims>
void future_mass(const cuda& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                 plane_view<const float> lse, const Sequences& sequences, plane_view<float> target,
                 workspace_view workspace, const FutureMassOptions& options = {});

// The same of queries that may be written.
template <Storage T>
std::size_t future_mass_workspace_bytes(const cuda& ctx, rows_view<T> q, input_rows<T> k) {
    return future_mass_workspace_bytes(ctx, input_rows<T>(q), k);
}
template <Storage T, class Dims = all_head_dims>
void causal_lse(const cuda& ctx, const AttentionParams& attention, rows_view<T> q, input_rows<T> k,
                const Sequences& sequences, plane_view<float> lse, workspace_view workspace,
                const CausalLseOptions& options = {}) {
    causal_lse<T, Dims>(ctx, attention, input_rows<T>(q), k, sequences, lse, workspace, options);
}
template <Storage T, class Dims = all_head_dims>
void future_mass(const cuda& ctx, const AttentionParams& attention, rows_view<T> q, input_rows<T> k,
                 plane_view<const float> lse, const Sequences& sequences, plane_view<float> target,
                 workspace_view workspace, const FutureMassOptions& options = {}) {
    future_mass<T, Dims>(ctx, attention, input_rows<T>(q), k, lse, sequences, target, workspace, options);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
