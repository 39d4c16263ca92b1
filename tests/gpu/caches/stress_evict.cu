// A thousand random operations on a DualCache that evicts over all heads (WG-KV, appendix K) after them,
// beside a naive model that does so, too. In double, where masses agree so closely that the order of two keys
// never depends on who computed them.
#include "stress_case.hpp"

using namespace stress;

namespace {

using P = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>, SnapKVEviction>;

void check(std::uint32_t seed, std::int32_t operations, const SnapKVEviction& head_params) {
    const std::int32_t sinks[] = {2, 0}, windows[] = {5, 9}, budgets[] = {unlimited, 40};
    run<P, DualCache<P, double>>(P{Sink<>{per_head(sinks, 1, heads)}, Window<>{per_head(windows, 1, heads)},
                                   ThresholdGate<above>{-1.0f}, TopKBudget<>{per_head(budgets, 1, heads)},
                                   Decay<dynamic>{-0.01f, seed % 2 == 0 ? 1 : 3}, head_params},
                                 seed, operations);
}

}  // namespace

TEST_CASE("few operations") { check(1, 40, {.average = 14, .share = 0.2f, .observing = 8, .pool = 3}); }

TEST_CASE("a thousand operations, maxima of a group") {
    check(2, 1000, {.average = 30, .share = 0.1f, .observing = 8, .pool = 5});
}

TEST_CASE("a thousand operations, means of a group, each key by itself") {
    check(3, 1000,
          {.average = 18, .share = 0.3f, .observing = 33, .pool = 1, .aggregate = group_aggregate::mean});
}
