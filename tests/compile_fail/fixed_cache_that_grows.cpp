// SnapKV keeps what is decoded.
// expect: kvpolicy: a FixedBudgetCache cannot hold a policy that keeps what is decoded (SnapKV), since
//     nothing bounds it; a DualCache can
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/snapkv.hpp>

void make(const kvpolicy::CacheShape& shape) {
#ifndef KVPOLICY_CONTROL
    kvpolicy::FixedBudgetCache<kvpolicy::SnapKV<8, 4>, float> cache(shape);
#else
    kvpolicy::FixedBudgetCache<kvpolicy::H2O<8, 4>, float> cache(shape);
#endif
}
