// What a chunk of an observed policy leaves depends on the attention to it.
// expect: kvpolicy: append_chunk takes a policy whose scores do not change with every query
#include <kvpolicy/tova.hpp>

void make(const kvpolicy::host& ctx, const kvpolicy::FixedBudgetCache<kvpolicy::TOVA<8>, float>& cache,
          kvpolicy::rows_view<float> rows) {
#ifndef KVPOLICY_CONTROL
    kvpolicy::append_chunk(ctx, cache.layer(0), {.k = rows, .v = rows}, {});
#else
    kvpolicy::append(ctx, cache.layer(0), {.k = rows, .v = rows}, {});
#endif
}
