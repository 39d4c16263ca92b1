// An open gate alone bounds nothing.
// expect: kvpolicy: a FixedBudgetCache needs a TopKBudget beside a gate, since an open gate alone bounds
//     nothing
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

using Gate = kvpolicy::ThresholdGate<kvpolicy::above>;

void make(const kvpolicy::CacheShape& shape) {
#ifndef KVPOLICY_CONTROL
    kvpolicy::FixedBudgetCache<kvpolicy::Policy<kvpolicy::Window<4>, Gate>, float> cache(shape);
#else
    kvpolicy::FixedBudgetCache<kvpolicy::Policy<kvpolicy::Window<4>, Gate, kvpolicy::TopKBudget<8>>, float>
        cache(shape);
#endif
}
