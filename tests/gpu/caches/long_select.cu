// Twenty thousand steps of caches whose policy has a selection, which write before they read: the host's keys
// in the host's rows.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "long_case.hpp"
#include "paged_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

constexpr std::int32_t sinks[] = {0, 3}, windows[] = {9, 1}, budgets[] = {30, 70};

CacheShape shape_of(std::int32_t group) {
    return {.layers = 1,
            .max_sequences = 1,
            .query_heads = 2 * group,
            .kv_heads = 2,
            .head_dim_qk = 8,
            .head_dim_vo = 8,
            .page_size = 32};
}

}  // namespace

TEST_CASE_TEMPLATE("a FixedBudgetCache", T, bf16, float) {
    using P = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>, QuestPages<16>>;
    const P policy{Sink<>{per_head(sinks, 1, 2)}, Window<>{per_head(windows, 1, 2)},
                   TopKBudget<>{per_head(budgets, 1, 2)}, Decay<dynamic>{-0.01f, 1}, QuestPages<16>{2}};
    BothCaches<P, T, head_dims<64>, false> both(shape_of(4), policy, nullptr, nullptr, {}, 4099);
    check_long<head_dims<64>, T>(both, Scores::few_values, [](std::int32_t) {});
}

TEST_CASE_TEMPLATE("a DualCache", T, bf16, float) {
    using P = Policy<Sink<>, Window<>, ThresholdGate<at_least>, QuestPages<16>>;
    const float thresholds[] = {1.8f, 2.5f};  // of random scores 4% and 1% pass
    const P policy{Sink<>{per_head(sinks, 1, 2)}, Window<>{per_head(windows, 1, 2)},
                   ThresholdGate<at_least>{per_head(thresholds, 1, 2)}, QuestPages<16>{3}};
    BothDuals<P, T, head_dims<64>> both(
        shape_of(3), {.slab_pages = 64, .max_slabs = 200, .max_seq_len = long_steps + 1000}, policy);
    check_long<head_dims<64>, T>(both, Scores::random,
                                 [&](std::int32_t ahead) { REQUIRE(both.reserve({0}, {ahead})); });
}
