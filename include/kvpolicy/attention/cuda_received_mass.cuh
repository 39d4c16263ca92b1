// The mass that keys receive, on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they
// are instantiated.
#pragma once

#include <kvpolicy/attention/received_mass.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/head_dims.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstddef>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// As in attention/cuda_future_mass.cuh: tensors, planes, masks with their bias_from, and `sequences.lengths`
// are device memory; work is enqueued on the context's stream, nothing is allocated, nothing waited for.
// Without a mask, with all queries and the mean over the group (or a group of 1), bf16 and fp16 take the
// kernels of causal_lse and future_mass. Every other call of theirs takes mma.sync, whose rate is about half
// of Hopper's own; fp32, double, other head_dims and odd strides take plain loops, which are for checking.
// Sums are in fp32 (double for double), in the same order in every run: results are the same bits. Rows
// beyond a sequence's length may hold anything. The others must be finite: results that a NaN takes part in
// are anything.

/// Bytes of device workspace for received_mass: 4 bytes a query of a head, and what future_mass needs.
template <Storage T>
std::size_t received_mass_workspace_bytes(const cuda& ctx, rows_view<const T> q, input_rows<T> k);

/// As the host's received_mass: mass [B, Hkv, S] of q [B, Hq, S, Dk] and k [B, Hkv, S, Dk], overwritten for
/// the sequences' lengths, refusing the same. Two passes over the pairs of keys and queries that count.
template <Storage T, class Dims = all_head_dims>
void received_mass(const cuda& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                   const mask_view& mask, const Sequences& sequences, plane_view<float> mass,
                   workspace_view workspace, const ReceivedMassOptions& options = {});

// The same of queries that may be written.
template <Storage T, class Dims = all_head_dims>
void received_mass(const cuda& ctx, const AttentionParams& attention, rows_view<T> q, input_rows<T> k,
                   const mask_view& mask, const Sequences& sequences, plane_view<float> mass,
                   workspace_view workspace, const ReceivedMassOptions& options = {}) {
    received_mass<T, Dims>(ctx, attention, input_rows<T>(q), k, mask, sequences, mass, workspace, options);
}
template <Storage T>
std::size_t received_mass_workspace_bytes(const cuda& ctx, rows_view<T> q, input_rows<T> k) {
    return received_mass_workspace_bytes(ctx, input_rows<T>(q), k);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
