// Twenty thousand steps of a FixedBudgetCache with every structure of a policy, every storage type and many
// groups: the host's keys in the host's rows.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "long_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

template <class T, class P>
void check(const P& policy, std::int32_t group, Scores kind,
           position_t rebase_limit = kvpolicy::rebase_limit) {
    CAPTURE(group);
    BothCaches<P, T, head_dims<64>> both({.layers = 1,
                                          .max_sequences = 1,
                                          .query_heads = 2 * group,
                                          .kv_heads = 2,
                                          .head_dim_qk = 8,
                                          .head_dim_vo = 8},
                                         policy, nullptr, nullptr, {}, rebase_limit);
    check_long<head_dims<64>, T>(both, kind, [](std::int32_t) {});
}

constexpr std::int32_t sinks[] = {0, 3}, windows[] = {9, 1}, budgets[] = {30, 70};

}  // namespace

TEST_CASE_TEMPLATE("budgets, decays, capped gates, windows alone", T, bf16, fp16, float, double) {
    const Sink<> sink{per_head(sinks, 1, 2)};
    const Window<> window{per_head(windows, 1, 2)};
    const TopKBudget<> budget{per_head(budgets, 1, 2)};
    const std::int32_t groups[] = {1, 3, 4, 8, 12};
    const auto shift = static_cast<std::int32_t>(sizeof(T));
    const auto group = [&](std::int32_t i) { return groups[(i + shift) % 5]; };
    check<T>(Policy<Sink<>, Window<>, TopKBudget<>>{sink, window, budget}, group(0), Scores::random);
    check<T>(Policy<Sink<>, Window<>, TopKBudget<>>{sink, window, budget}, group(1), Scores::few_values);
    check<T>(Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>{sink, window, budget,
                                                                    Decay<dynamic>{-0.01f, 1}},
             group(2), Scores::improving, 4099);
    check<T>(Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>{sink, window, budget,
                                                                    Decay<dynamic>{-0.05f, 5}},
             group(3), Scores::random);
    check<T>(Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>>{sink, window,
                                                                          ThresholdGate<above>{0.5f}, budget},
             group(4), Scores::few_values);
    check<T>(Policy<Sink<>, Window<>>{sink, window}, group(2), Scores::random);
}

TEST_CASE("bf16 at other groups") {
    for (const std::int32_t group : {2, 5, 7, 16}) {
        check<bf16>(Policy<Sink<2>, Window<5>, TopKBudget<40>>{}, group, Scores::random);
    }
}
