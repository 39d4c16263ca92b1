// Every structure of a policy, in fp32, where outputs agree closely: whatever calls come, a cache on a device
// keeps what the host's keeps, in the same rows.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cache_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

constexpr std::int32_t layers = 2, kv_heads = 3;

// By layer and head: a head without long-range part, one that fills at once, one of several tiles, one
// that never fills.
constexpr std::int32_t sinks[] = {0, 2, 1, 3, 0, 1}, windows[] = {1, 4, 6, 2, 5, 3},
                       budgets[] = {2, 0, 400, 130, 9, 1};
constexpr std::int32_t steps[] = {1, 1, 1, 3, 1, 1};
constexpr float slopes[] = {0.0f, 0.0f, -0.1f, -0.4f, -0.02f, 0.0f};

CacheShape shape_of(std::int32_t group) {
    return {.layers = layers,
            .max_sequences = 4,
            .query_heads = kv_heads * group,
            .kv_heads = kv_heads,
            .head_dim_qk = 8,
            .head_dim_vo = 16,
            .page_size = 1,
            .max_draft_tokens = 5};
}

template <class P>
void check(const P& policy, position_t rebase_limit = kvpolicy::rebase_limit,
           const AttentionParams& attention = {}) {
    std::mt19937 generator(7);
    for (const Scores kind : all_scores) {
        BothCaches<P, float> both(shape_of(kind == Scores::random ? 3 : 1), policy, nullptr, nullptr,
                                  attention, rebase_limit);
        random_life(both, kind, 60, generator);
    }
}

}  // namespace

TEST_CASE("few calls") {
    using P = Policy<Sink<2>, Window<4>, ThresholdGate<above>, TopKBudget<66>, Decay<dynamic>>;
    std::mt19937 generator(3);
    BothCaches<P, float> both(shape_of(2),
                              P{{}, {}, ThresholdGate<above>{-0.5f}, {}, Decay<dynamic>{-0.02f, 1}}, nullptr,
                              nullptr, {}, 11);
    random_life(both, Scores::few_values, 16, generator);
}

TEST_CASE("budgets by layer and head") {
    check(Policy<Sink<>, Window<>, TopKBudget<>>{Sink<>{per_head(sinks, layers, kv_heads)},
                                                 Window<>{per_head(windows, layers, kv_heads)},
                                                 TopKBudget<>{per_head(budgets, layers, kv_heads)}});
}

TEST_CASE("decay steps by layer and head, rebased often") {
    check(
        Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>{
            Sink<>{per_head(sinks, layers, kv_heads)}, Window<>{per_head(windows, layers, kv_heads)},
            TopKBudget<>{per_head(budgets, layers, kv_heads)},
            Decay<dynamic>{per_head(slopes, layers, kv_heads), per_head(steps, layers, kv_heads)}},
        11);
}

TEST_CASE("capped gates, with a logits_soft_cap") {
    check(
        Policy<Sink<2>, Window<4>, ThresholdGate<above>, TopKBudget<66>>{
            Sink<2>{}, Window<4>{}, ThresholdGate<above>{-0.5f}, TopKBudget<66>{}},
        kvpolicy::rebase_limit, {.sm_scale = 0.3f, .logits_soft_cap = 2.0f});
}

TEST_CASE("sinks and a window alone") { check(Policy<Sink<3>, Window<20>>{}); }

TEST_CASE("no sinks, a window of one") { check(Policy<TopKBudget<30>>{}); }

TEST_CASE("fp64, thousands of steps") {
    using P = Policy<Sink<1>, Window<5>, TopKBudget<200>, Decay<1>>;
    const P policy{Sink<1>{}, Window<5>{}, TopKBudget<200>{}, Decay<1>{-0.01f}};
    std::mt19937 generator(3);
    for (const Scores kind : {Scores::random, Scores::equal, Scores::improving, Scores::few_values}) {
        BothCaches<P, double> both({.layers = 1,
                                    .max_sequences = 2,
                                    .query_heads = 2,
                                    .kv_heads = 2,
                                    .head_dim_qk = 8,
                                    .head_dim_vo = 8},
                                   policy, nullptr, nullptr, {}, 777);
        const CallTensors<double> in(both.shape, 2, 1, kind, generator);
        for (std::int32_t t = 0; t < 1500; ++t) {
            CallTensors<double> one = in;
            fill_scores(one.scores, kind, generator);
            for (float& score : one.scores.data) {  // one number a call: an order in time, not within a call
                score += kind == Scores::improving ? 0.125f * static_cast<float>(t) : 0.0f;
            }
            both.call(Mode::step, {0, 1}, {1, t % 3 == 0 ? 0 : 1}, one);
        }
        both.same_rows("after 1500 steps");
    }
}
