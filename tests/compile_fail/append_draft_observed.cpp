// A draft that is not accepted must leave no trace, and masses are traces.
// expect: kvpolicy: append_draft takes a policy whose scores do not change with every query
#include <kvpolicy/tova.hpp>

void make(const kvpolicy::host& ctx, const kvpolicy::FixedBudgetCache<kvpolicy::TOVA<8>, float>& cache,
          kvpolicy::rows_view<float> rows) {
    const kvpolicy::Batch batch{.count = 1};
#ifndef KVPOLICY_CONTROL
    kvpolicy::append_draft(ctx, cache.layer(0),
                           {.q = rows, .k = rows, .v = rows, .out = rows, .batch = batch}, {});
#else
    kvpolicy::step(ctx, cache.layer(0), {.q = rows, .k = rows, .v = rows, .out = rows, .batch = batch}, {});
#endif
}
