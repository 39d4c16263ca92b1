// An eviction part counts all heads together, and a cache of fixed size gives each its own.
// expect: kvpolicy: a FixedBudgetCache has a budget for every head; an eviction part, which counts all heads
//     together, needs a DualCache
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

void make(const kvpolicy::CacheShape& shape) {
    using namespace kvpolicy;
#ifndef KVPOLICY_CONTROL
    FixedBudgetCache<Policy<Window<4>, TopKBudget<8>, SnapKVEviction>, float> cache(shape);
#else
    FixedBudgetCache<Policy<Window<4>, TopKBudget<8>>, float> cache(shape);
#endif
}
