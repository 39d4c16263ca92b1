// Keep parts in a DualCache on a device: keys that have a place for their position, outside of
// gate and budget.
#include <kvpolicy/policies/decay.hpp>

#include "paged_parts.hpp"

using namespace kvpolicy;
using namespace test;

TEST_CASE("few calls") { check_parts<float>(Policy<Sink<2>, Window<6>, TopKBudget<8>, Stride<5>>{}, 16, 14); }

TEST_CASE("a stride beside sinks and a window") {
    check_parts<float>(Policy<Sink<>, Window<>, Stride<5>>{Sink<>{of_parts(part_sinks)},
                                                           Window<>{of_parts(part_windows)}, Stride<5>{}});
}

TEST_CASE("a stride beside budgets, with decay, rebased often") {
    constexpr std::int32_t steps[] = {1, 1, 1, 3, 1, 1};
    constexpr float slopes[] = {0.0f, 0.0f, -0.1f, -0.4f, -0.02f, 0.0f};
    check_parts<float>(
        Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>, Stride<>>{
            Sink<>{of_parts(part_sinks)}, Window<>{of_parts(part_windows)}, ThresholdGate<above>{-0.5f},
            TopKBudget<>{of_parts(part_budgets)}, Decay<dynamic>{of_parts(slopes), of_parts(steps)},
            Stride<>{3}},
        16, 120, 11, {.sm_scale = 0.3f, .logits_soft_cap = 2.0f});
}
