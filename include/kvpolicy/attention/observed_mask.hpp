// From an observed policy and the queries and keys of a sequence to lifetimes: what H2O, TOVA
// and SnapKV keep.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/head_dims.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/scorers/observed.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// How an observed mask is built, where the default does not do.
struct ObservedMaskOptions {
    std::int32_t layer = 0;
    /// The first so many tokens are the prompt, cut into blocks as the policy's scorer says; the
    /// rest is decoded.
    std::int32_t prompt = unlimited;
    std::uint32_t* status =
        nullptr;  ///< [B], OR-ed into: status_bad_length, for a length that then counts as 0
};

/// Bytes of workspace that build_observed_mask needs.
template <Storage T, AnyPolicy P>
std::size_t build_observed_mask_workspace_bytes(const host& ctx, const P& policy, rows_view<const T> q,
                                                input_rows<T> k);

/// Writes expiry [B, Hkv, S] for the sequences' lengths, from q [B, Hq, S, Dk] and k [B, Hkv, S, Dk]: the
/// keys that a cache of the same policy holds when it takes the prompt in one prefill() and the rest in
/// steps. A key that is evicted after query q has expiry q + 1. Queries see the keys that their policy left
/// them, so the masses are those of the sparse attention; the queries and keys are given, as in training with
/// a frozen model or a test: where evictions change the hidden states of later layers, run the model through
/// a cache instead.
///
/// Synchronous; O(S * rows) products a query head, and O(S^2) for a prompt in one block. The bits do not
/// depend on the number of threads. Refuses, before anything is written: numbers that no policy can have,
/// shapes that disagree, packed segments, starts, a q or k that is not finite (named), rules that differ
/// between the heads of a layer that is averaged (TOVA), too little workspace.
template <AnyPolicy P, Storage T, class Dims = all_head_dims>
void build_observed_mask(const host& ctx, const P& policy, const AttentionParams& attention,
                         rows_view<const T> q, input_rows<T> k, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace,
                         const ObservedMaskOptions& options = {});

// The same of queries that may be written.
template <Storage T, AnyPolicy P>
std::size_t build_observed_mask_workspace_bytes(const host& ctx, const P& policy, rows_view<T> q,
                                                input_rows<T> k) {
    return build_observed_mask_workspace_bytes(ctx, policy, input_rows<T>(q), k);
}
template <AnyPolicy P, Storage T, class Dims = all_head_dims>
void build_observed_mask(const host& ctx, const P& policy, const AttentionParams& attention, rows_view<T> q,
                         input_rows<T> k, const Sequences& sequences, plane_view<expiry_t> expiry,
                         workspace_view workspace, const ObservedMaskOptions& options = {}) {
    build_observed_mask<P, T, Dims>(ctx, policy, attention, input_rows<T>(q), k, sequences, expiry, workspace,
                                    options);
}

}  // namespace kvpolicy

#include <kvpolicy/attention/host/host_observed_mask.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/attention/cuda_observed_mask.cuh>
#endif
