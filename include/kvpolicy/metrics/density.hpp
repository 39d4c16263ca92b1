// How much of the past a mask shows: live keys, density, evict ratio. Sequences are whole; shares of pairs,
// which a packed sample has fewer of, are refused for packed segments.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/metrics/each_head.hpp>
#include <kvpolicy/metrics/options.hpp>
#include <kvpolicy/policies/compose.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// live[b][h][q] = |{t : t <= q < expiry[b][h][t]}|, the keys that query q sees. expiry and live are [B, Hkv,
/// S]; overwrites live for the sequences' lengths. Synchronous, O(S) a head.
inline void live_keys(const host& ctx, plane_view<const expiry_t> expiry, const Sequences& sequences,
                      plane_view<std::int32_t> live, workspace_view workspace = {},
                      const MetricOptions& options = {}) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return live_keys(ctx, expiry, repaired.sequences, live, workspace, options);
    }
    checks::check_whole_sequences(sequences, expiry.batch, expiry.length);
    checks::check_plane("expiry", expiry, expiry.batch, expiry.heads, sequences.length);
    checks::check_plane("live", live, expiry.batch, expiry.heads, sequences.length);
    ctx.parallel_for(std::int64_t{expiry.batch} * expiry.heads, [&](std::int64_t task) {
        const std::int64_t b = task / expiry.heads, h = task % expiry.heads;
        const std::int32_t length = sequences.length_of(b);
        const expiry_t* e = expiry.head(b, h);
        std::int32_t* out = live.head(b, h);
        std::fill_n(out, length, 0);
        for (std::int32_t t = 0; t < length; ++t) {
            if (e[t] <= t) {
                continue;
            }  // never visible at all
            ++out[t];
            if (e[t] < length) {
                --out[e[t]];
            }
        }
        for (std::int32_t q = 1; q < length; ++q) {
            out[q] += out[q - 1];
        }
    });
}

/// density[b * Hkv + h]: the share of visible pairs among the S (S + 1) / 2 causal ones; 1 is dense
/// attention, 0 for S = 0. A window alone has some; SP-KV's density, of gates, is open_gates
/// (metrics/gates.hpp).
inline void density(const host& ctx, plane_view<const expiry_t> expiry, const Sequences& sequences,
                    double* out, workspace_view workspace = {}, const MetricOptions& options = {}) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return density(ctx, expiry, repaired.sequences, out, workspace, options);
    }
    checks::check_whole_sequences(sequences, expiry.batch, expiry.length);
    checks::check_not_packed(sequences);
    checks::check_plane("expiry", expiry, expiry.batch, expiry.heads, sequences.length);
    checks::check_metric("out", out, expiry.batch, 1);
    ctx.parallel_for(std::int64_t{expiry.batch} * expiry.heads, [&](std::int64_t task) {
        const std::int64_t b = task / expiry.heads;
        const std::int64_t length = sequences.length_of(b);
        const expiry_t* e = expiry.head(b, task % expiry.heads);
        std::int64_t pairs = 0;
        for (std::int64_t t = 0; t < length; ++t) {
            pairs += std::max<std::int64_t>(0, std::min<std::int64_t>(e[t], length) - t);
        }
        const double causal = static_cast<double>(length) * static_cast<double>(length + 1) / 2.0;
        out[task] = length == 0 ? 0.0 : static_cast<double>(pairs) / causal;
    });
}

/// evict_ratio[b * Hkv + h] (KVpop, figure 8): the share of pairs with t in E(q) = {t : s <= t <= q -
/// w} that are not visible. 0 is dense attention, 1 means nothing beyond sinks and window; 0 where no
/// such pair exists.
template <AnyPolicy P>
void evict_ratio(const host& ctx, const P& policy, plane_view<const expiry_t> expiry,
                 const Sequences& sequences, double* out, workspace_view workspace = {},
                 const MetricOptions& options = {}) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return evict_ratio(ctx, policy, expiry, repaired.sequences, out, workspace, options);
    }
    const std::int32_t layer = options.layer;
    checks::check_whole_sequences(sequences, expiry.batch, expiry.length);
    checks::check_not_packed(sequences);
    policy.check_layer(layer, expiry.heads);
    checks::check_plane("expiry", expiry, expiry.batch, expiry.heads, sequences.length);
    checks::check_metric("out", out, expiry.batch, 1);
    host_backend::for_each_head(ctx, expiry, [&](std::int64_t b, std::int32_t h, std::int64_t task) {
        const std::int64_t length = sequences.length_of(b);
        const HeadParams head_params = policy.params(layer, h);
        const expiry_t* e = expiry.head(b, h);
        std::int64_t pairs = 0, gone = 0;
        for (std::int64_t t = head_params.sinks; t + head_params.window < length; ++t) {
            const std::int64_t eligible = t + head_params.window;
            pairs += length - eligible;
            gone += length - std::clamp<std::int64_t>(e[t], eligible, length);
        }
        out[task] = pairs == 0 ? 0.0 : static_cast<double>(gone) / static_cast<double>(pairs);
    });
}

}  // namespace kvpolicy

#if defined(__CUDACC__)
#include <kvpolicy/metrics/cuda_metrics.cuh>
#endif
