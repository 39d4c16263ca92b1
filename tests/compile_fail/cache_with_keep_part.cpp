// Keys that are kept by position grow without bound.
// expect: kvpolicy: a FixedBudgetCache cannot hold a policy that keeps keys by position, since nothing bounds
//     them
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/policies/window.hpp>

struct EverySixteenth {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::keep;
    constexpr bool keeps(kvpolicy::position_t t) const { return t % 16 == 0; }
};

void make(const kvpolicy::CacheShape& shape) {
#ifndef KVPOLICY_CONTROL
    kvpolicy::FixedBudgetCache<kvpolicy::Policy<kvpolicy::Window<4>, EverySixteenth>, float> cache(shape);
#else
    kvpolicy::FixedBudgetCache<kvpolicy::Policy<kvpolicy::Window<4>>, float> cache(shape);
#endif
}
