// Twenty thousand steps of a DualCache with every structure of a policy and every storage type: the host's
// keys, in the host's order.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "long_case.hpp"
#include "paged_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

template <class T, class P>
void check(const P& policy, std::int32_t group, Scores kind,
           position_t rebase_limit = kvpolicy::rebase_limit) {
    CAPTURE(group);
    BothDuals<P, T, head_dims<64>> both(
        {.layers = 1,
         .max_sequences = 1,
         .query_heads = 2 * group,
         .kv_heads = 2,
         .head_dim_qk = 8,
         .head_dim_vo = 8,
         .page_size = 16},
        {.slab_pages = 64, .max_slabs = 200, .max_seq_len = long_steps + 1000}, policy, nullptr, nullptr, {},
        rebase_limit);
    check_long<head_dims<64>, T>(both, kind,
                                 [&](std::int32_t ahead) { REQUIRE(both.reserve({0}, {ahead})); });
}

constexpr std::int32_t sinks[] = {0, 3}, windows[] = {9, 1}, budgets[] = {30, 70};

}  // namespace

TEST_CASE_TEMPLATE("gates, budgets, a stride", T, bf16, fp16, float, double) {
    const Sink<> sink{per_head(sinks, 1, 2)};
    const Window<> window{per_head(windows, 1, 2)};
    const std::int32_t groups[] = {1, 3, 4, 8, 12};
    const auto shift = static_cast<std::int32_t>(sizeof(T));
    const auto group = [&](std::int32_t i) { return groups[(i + shift) % 5]; };
    const float thresholds[] = {1.8f, 2.5f};  // of random scores 4% and 1% pass
    check<T>(
        Policy<Sink<>, Window<>, ThresholdGate<at_least>>{
            sink, window, ThresholdGate<at_least>{per_head(thresholds, 1, 2)}},
        group(0), Scores::random);
    check<T>(
        Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>{
            sink, window, TopKBudget<>{per_head(budgets, 1, 2)}, Decay<dynamic>{-0.01f, 1}},
        group(1), Scores::few_values, 4099);
    check<T>(
        Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>, Stride<>>{
            sink, window, ThresholdGate<above>{0.5f}, TopKBudget<>{per_head(budgets, 1, 2)},
            Decay<dynamic>{-0.05f, 5}, Stride<>{37}},
        group(2), Scores::random);
}
