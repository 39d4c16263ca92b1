// The tokens of append come without queries, which some policies look at.
// expect: kvpolicy: append takes a policy that does not look at queries
#include <kvpolicy/tova.hpp>

void make(const kvpolicy::host& on, const kvpolicy::FixedBudgetCache<kvpolicy::TOVA<8>, float>& cache,
          kvpolicy::rows_view<float> rows) {
    const kvpolicy::Batch batch{.count = 1};
#ifndef KVPOLICY_CONTROL
    kvpolicy::append(on, cache.ref(0), batch, rows, rows, {});
#else
    kvpolicy::step(on, cache.ref(0), batch, rows, rows, rows, rows, {});
#endif
}
