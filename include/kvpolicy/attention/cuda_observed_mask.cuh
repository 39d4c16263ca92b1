// Masks of H2O, TOVA and SnapKV on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where
// they are instantiated.
#pragma once

#include <kvpolicy/attention/observed_mask.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/head_dims.hpp>

#include <cstddef>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// As in attention/cuda_received_mass.cuh: tensors, `expiry` and `sequences.lengths` are device memory, and
// the policy's numbers by head host memory, read during the call; work is enqueued on the context's stream,
// nothing is allocated, nothing waited for. q and k must be finite, which the host checks and a device does
// not: NaN masses rank last.
//
// Masses are fp32 sums of the same terms as the host's. So both keep the same keys wherever the masses of
// competing keys are further apart than rounding; equal masses leave the place to the older key.

/// Bytes of device workspace for build_observed_mask: 12 bytes per key of a KV head, and 8 per query of a
/// head.
template <Storage T, AnyPolicy P>
std::size_t build_observed_mask_workspace_bytes(const cuda& ctx, const P& policy, rows_view<const T> q,
                                                input_rows<T> k);

/// As the host's build_observed_mask: expiry [B, Hkv, S] of q [B, Hq, S, Dk] and k [B, Hkv, S, Dk], refusing
/// what the host refuses of shapes and numbers. A prompt in one block costs two passes over its pairs of
/// queries and keys, of which only the queries that count take part (the last one, or the window's). Each
/// block takes four to six launches. So does each token beyond options.prompt, where decoded tokens evict,
/// one after the other: O(keys of a head) per token, by few blocks. A long decoded part is quicker through a
/// cache.
template <AnyPolicy P, Storage T, class Dims = all_head_dims>
void build_observed_mask(const cuda& ctx, const P& policy, const AttentionParams& attention,
                         rows_view<const T> q, input_rows<T> k, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace,
                         const ObservedMaskOptions& options = {});

// The same of queries that may be written.
template <Storage T, AnyPolicy P>
std::size_t build_observed_mask_workspace_bytes(const cuda& ctx, const P& policy, rows_view<T> q,
                                                input_rows<T> k) {
    return build_observed_mask_workspace_bytes(ctx, policy, input_rows<T>(q), k);
}
template <AnyPolicy P, Storage T, class Dims = all_head_dims>
void build_observed_mask(const cuda& ctx, const P& policy, const AttentionParams& attention, rows_view<T> q,
                         input_rows<T> k, const Sequences& sequences, plane_view<expiry_t> expiry,
                         workspace_view workspace, const ObservedMaskOptions& options = {}) {
    build_observed_mask<P, T, Dims>(ctx, policy, attention, input_rows<T>(q), k, sequences, expiry, workspace,
                                    options);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
