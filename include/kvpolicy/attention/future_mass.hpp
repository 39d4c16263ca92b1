// The future-attention target: how much attention a key receives after it has left the window
// (KVpop, 3.1, 3.2, D).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/head_dims.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvpolicy {

/// Options of the target. The defaults are the paper's.
struct FutureMassOptions {
    PerHead<std::int32_t> window{1};      ///< w, by head; a key is scored on queries d >= t + w
    std::int32_t look_ahead = unlimited;  ///< L: only queries d <= t + w + L count
    bool normalize = true;                ///< divide by N_t; false gives the workshop paper's sum
    float epsilon = 1e-8f;                ///< eps, also what a key without future queries gets: log(eps)
    /// max_g log(eps + M_g): kept if any query head relies on it (the paper's default); or
    /// log(eps + mean_g M_g).
    group_aggregate aggregate = group_aggregate::max;
    /// Tempering, 1 to infinity: M = (mean_d p^beta)^(1/beta). 1 is the paper's mean, infinity the largest
    /// attention that any single query pays. Beyond the papers: at tight budgets beta >= 2 keeps keys that
    /// few queries need badly.
    float beta = 1.0f;
    std::int32_t layer = 0;  ///< the layer whose windows hold
    std::uint32_t* status =
        nullptr;  ///< [B], OR-ed into: status_bad_length, for a length that then counts as 0
};

/// Options of causal_lse.
struct CausalLseOptions {
    std::uint32_t* status = nullptr;  ///< as in FutureMassOptions
};

/// Bytes of workspace for causal_lse and future_mass.
template <Storage T>
std::size_t future_mass_workspace_bytes(const host& ctx, rows_view<const T> q, input_rows<T> k);

/// lse[b][hq][d] = log sum_{t <= d} exp(logit(d, t)), the dense causal normalizer (eq. 28), natural log. q
/// [B, Hq, S, Dk], k [B, Hkv, S, Dk], lse [B, Hq, S]: overwritten for the sequences' lengths. Synchronous,
/// O(S^2) time, no S x S array. Refuses what future_mass refuses.
template <Storage T, class Dims = all_head_dims>
void causal_lse(const host& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                const Sequences& sequences, plane_view<float> lse, workspace_view workspace,
                const CausalLseOptions& options = {});

/// Writes target [B, Hkv, S] from q [B, Hq, S, Dk], k [B, Hkv, S, Dk] and lse [B, Hq, S] (natural log; dense
/// from causal_lse, which makes the target exact, or the sparse pass's own, eq. 9). With p_d(t) =
/// exp(logit(d, t) - lse_d) and d running over [t + w, min(S - 1, t + w + L)]:
///
///     M_g(t) = ( (1 / N_t) sum_d p_d(t)^beta )^(1/beta),   N_t = max(1, S - (t + w)) clipped to L + 1   (eq.
///         2, 8, 16)
///     target(t) = max_g log(eps + M_g)   or   log(eps + mean_g M_g)
///         (eq. 3, 14, 15)
///
/// It is the transposed attention pass of D.2: keys take the part of queries, -lse that of a bias. A query
/// whose lse is -inf contributes nothing; with a sparse lse a mass may exceed 1. Overwrites target for the
/// sequences' lengths. Synchronous, O(S^2) time, no S x S array. Refuses: shapes that disagree, null data, no
/// query heads, beta < 1, epsilon < 0 or infinite, window < 1, look_ahead < 0, packed segments, starts, too
/// little workspace. A window of S or more leaves every key without future queries.
template <Storage T, class Dims = all_head_dims>
void future_mass(const host& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                 plane_view<const float> lse, const Sequences& sequences, plane_view<float> target,
                 workspace_view workspace, const FutureMassOptions& options = {});

// The same of queries that may be written.
template <Storage T>
std::size_t future_mass_workspace_bytes(const host& ctx, rows_view<T> q, input_rows<T> k) {
    return future_mass_workspace_bytes(ctx, input_rows<T>(q), k);
}
template <Storage T, class Dims = all_head_dims>
void causal_lse(const host& ctx, const AttentionParams& attention, rows_view<T> q, input_rows<T> k,
                const Sequences& sequences, plane_view<float> lse, workspace_view workspace,
                const CausalLseOptions& options = {}) {
    causal_lse<T, Dims>(ctx, attention, input_rows<T>(q), k, sequences, lse, workspace, options);
}
template <Storage T, class Dims = all_head_dims>
void future_mass(const host& ctx, const AttentionParams& attention, rows_view<T> q, input_rows<T> k,
                 plane_view<const float> lse, const Sequences& sequences, plane_view<float> target,
                 workspace_view workspace, const FutureMassOptions& options = {}) {
    future_mass<T, Dims>(ctx, attention, input_rows<T>(q), k, lse, sequences, target, workspace, options);
}

}  // namespace kvpolicy

#include <kvpolicy/attention/host/host_future_mass.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/attention/cuda_future_mass.cuh>
#endif
