// Heads that share a budget hold different numbers of entries.
// expect: kvpolicy: a FixedBudgetCache gives each head entries of its own; the heads of this policy share a
//     budget, which a DualCache holds
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/window.hpp>

using Shared = kvpolicy::Policy<kvpolicy::Window<8>, kvpolicy::SharedBudget<4>>;

void make(const kvpolicy::CacheShape& shape, const kvpolicy::PoolShape& pool) {
#ifndef KVPOLICY_CONTROL
    kvpolicy::FixedBudgetCache<Shared, float> cache(shape);
    static_cast<void>(pool);
#else
    kvpolicy::DualCache<Shared, float> cache(shape, pool);
#endif
}
