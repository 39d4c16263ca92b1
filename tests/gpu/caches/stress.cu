// A thousand random operations on caches of either kind.
#include "stress_case.hpp"

using namespace stress;

namespace {

using P = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>;

template <class Cache>
void check(std::uint32_t seed, std::int32_t operations) {
    const std::int32_t sinks[] = {2, 0}, windows[] = {5, 9},
                       budgets[] = {Cache::ref_type::pooled ? unlimited : 70, 12};
    run<P, Cache>(P{Sink<>{per_head(sinks, 1, heads)}, Window<>{per_head(windows, 1, heads)},
                    ThresholdGate<above>{-1.0f}, TopKBudget<>{per_head(budgets, 1, heads)},
                    Decay<dynamic>{-0.01f, seed % 2 == 0 ? 1 : 3}},
                  seed, operations);
}

}  // namespace

TEST_CASE("few operations") {
    check<FixedBudgetCache<P, float>>(1, 40);
    check<DualCache<P, float>>(5, 40);
}

TEST_CASE("a thousand operations on a FixedBudgetCache") { check<FixedBudgetCache<P, float>>(4, 1000); }

TEST_CASE("a thousand operations on a DualCache") { check<DualCache<P, float>>(6, 1000); }
