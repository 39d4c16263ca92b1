// The retention map: which tokens the heads of a layer still hold at one query (KVpop, figures 6 and 9).
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/metrics/options.hpp>

#include <cstdint>

namespace kvpolicy {

/// heads_holding[b * S + t] for t < the sequence's length: how many KV heads of the layer see key t at query
/// `query` (position in the mask's frame); 0 for t > query. `S` is sequences.length. Overwrites. Synchronous.
inline void retention_map(const host& ctx, plane_view<const expiry_t> expiry, const Sequences& sequences,
                          std::int32_t query, std::int32_t* heads_holding, workspace_view workspace = {},
                          const MetricOptions& options = {}) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return retention_map(ctx, expiry, repaired.sequences, query, heads_holding, workspace, options);
    }
    checks::check_whole_sequences(sequences, expiry.batch, expiry.length);
    checks::check_plane("expiry", expiry, expiry.batch, expiry.heads, sequences.length);
    checks::check_metric("heads_holding", heads_holding, expiry.batch, sequences.length);
    detail::require(query >= 0, "query", query, "0 or more");
    ctx.parallel_for(expiry.batch, [&](std::int64_t b) {
        std::int32_t* out = heads_holding + b * sequences.length;
        for (std::int32_t t = 0; t < sequences.length_of(b); ++t) {
            std::int32_t holding = 0;
            for (std::int32_t h = 0; h < expiry.heads; ++h) {
                holding += t <= query && query < expiry.head(b, h)[t] ? 1 : 0;
            }
            out[t] = holding;
        }
    });
}

}  // namespace kvpolicy
