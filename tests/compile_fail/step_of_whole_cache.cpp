// Calls take one layer, not the cache of all of them.
// expect: kvpolicy: this call takes one layer of a cache: cache.layer(layer) in place of cache
#include <kvpolicy/kvpop.hpp>

namespace kvp = kvpolicy;
using Cache = kvp::FixedBudgetCache<kvp::KVpop<4, 8, 16>, kvp::bf16>;

void decode(const kvp::host& ctx, const Cache& cache, kvp::rows_view<kvp::bf16> rows,
            kvp::plane_view<float> scores, kvp::Buffer& workspace) {
#ifndef KVPOLICY_CONTROL
    kvp::step(ctx, cache,
              {.q = rows, .k = rows, .v = rows, .out = rows, .batch = {.count = 1}, .scores = scores},
              workspace);
#else
    kvp::step(ctx, cache.layer(0),
              {.q = rows, .k = rows, .v = rows, .out = rows, .batch = {.count = 1}, .scores = scores},
              workspace);
#endif
}
