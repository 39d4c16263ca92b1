// What an observed policy asks back from attention: the mass that each key receives.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/head_dims.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/masks/expiry.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// Which queries count, and how the heads of a group become one number.
struct ReceivedMassOptions {
    std::int32_t queries = unlimited;  ///< the last so many of the sequence
    group_aggregate aggregate = group_aggregate::mean;
    std::uint32_t* status =
        nullptr;  ///< [B], OR-ed into: status_bad_length, for a length that then counts as 0
};

/// Bytes of workspace for received_mass.
template <Storage T>
std::size_t received_mass_workspace_bytes(const host& ctx, rows_view<const T> q, input_rows<T> k);

/// Overwrites mass [B, Hkv, S] for the sequences' lengths. With p_q,g(t) = exp(logit(q, t) - lse_q) over the
/// keys that query head g sees at q through the mask (attend.hpp has logit and seen), and q over the last
/// options.queries queries:
///
///     mass[t] = sum_q agg_g p_q,g(t),      agg = mean or max over the G query heads of the KV head
///
/// The sum over all queries is H2O's, the last query's alone TOVA's, the observation window's SnapKV's. q [B,
/// Hq, S, Dk], k [B, Hkv, S, Dk], the mask [B, Hkv, S] or empty (dense causal); values take no part. A query
/// that sees nothing contributes nothing, and what invisible keys hold does not matter. Sums are in double
/// (fp32 per weight; all double for double). Synchronous, O(queries * S), no array of that size; the bits do
/// not depend on the number of threads. Refuses: shapes that disagree, null data, queries below 0, packed
/// segments, starts, too little workspace.
template <Storage T, class Dims = all_head_dims>
void received_mass(const host& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                   const mask_view& mask, const Sequences& sequences, plane_view<float> mass,
                   workspace_view workspace, const ReceivedMassOptions& options = {});

// The same of queries that may be written.
template <Storage T, class Dims = all_head_dims>
void received_mass(const host& ctx, const AttentionParams& attention, rows_view<T> q, input_rows<T> k,
                   const mask_view& mask, const Sequences& sequences, plane_view<float> mass,
                   workspace_view workspace, const ReceivedMassOptions& options = {}) {
    received_mass<T, Dims>(ctx, attention, input_rows<T>(q), k, mask, sequences, mass, workspace, options);
}
template <Storage T>
std::size_t received_mass_workspace_bytes(const host& ctx, rows_view<T> q, input_rows<T> k) {
    return received_mass_workspace_bytes(ctx, input_rows<T>(q), k);
}

}  // namespace kvpolicy

#include <kvpolicy/attention/host/host_received_mass.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/attention/cuda_received_mass.cuh>
#endif
