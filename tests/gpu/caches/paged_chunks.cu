// Whole lives of sequences in a DualCache on a device: chunks, draft tokens and commits among steps, in fp32,
// where outputs agree closely. Whatever calls come, it keeps what the host's keeps.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "paged_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

constexpr std::int32_t layers = 2, kv_heads = 3;

constexpr std::int32_t sinks[] = {0, 2, 1, 3, 0, 1}, windows[] = {1, 4, 17, 2, 40, 3},
                       budgets[] = {unlimited, 0, 400, 130, unlimited, 1}, steps[] = {1, 1, 1, 3, 1, 1};
constexpr float slopes[] = {0.0f, 0.0f, -0.1f, -0.4f, -0.02f, 0.0f},
                gates[] = {-9.0f, 9.0f, 0.0f, -1.0f, 0.5f, 1.5f};

/// Lives with slabs of few pages, as they are needed; and with a pool that never suffices.
template <class P>
void check(const P& policy, position_t rebase_limit = kvpolicy::rebase_limit,
           const AttentionParams& attention = {}) {
    std::mt19937 generator(11);
    for (const Scores kind : {Scores::random, Scores::few_values, Scores::improving}) {
        CAPTURE(name(kind));
        CacheShape shape{.layers = layers,
                         .max_sequences = 4,
                         .query_heads = kv_heads * 3,
                         .kv_heads = kv_heads,
                         .head_dim_qk = 8,
                         .head_dim_vo = 16,
                         .page_size = 16,
                         .max_draft_tokens = 5};
        BothDuals<P, float, all_head_dims, true> ample(
            shape, {.slab_pages = 7, .max_slabs = 400, .max_seq_len = 9000}, policy, nullptr, nullptr,
            attention, rebase_limit);
        CHECK(random_life(ample, kind, 120, generator) != 0);
        shape.query_heads = kv_heads;
        BothDuals<P, float, all_head_dims, true> scarce(
            shape, {.slab_pages = 20, .max_slabs = 4, .max_seq_len = 9000}, policy, nullptr, nullptr,
            attention, rebase_limit);
        CHECK(random_life(scarce, kind, 120, generator) != 0);
    }
}

}  // namespace

TEST_CASE("budgets by layer and head, some unlimited") {
    check(Policy<Sink<>, Window<>, TopKBudget<>>{Sink<>{per_head(sinks, layers, kv_heads)},
                                                 Window<>{per_head(windows, layers, kv_heads)},
                                                 TopKBudget<>{per_head(budgets, layers, kv_heads)}});
}

TEST_CASE("gates by layer and head") {
    check(Policy<Sink<>, Window<>, ThresholdGate<at_least>>{
        Sink<>{per_head(sinks, layers, kv_heads)}, Window<>{per_head(windows, layers, kv_heads)},
        ThresholdGate<at_least>{per_head(gates, layers, kv_heads)}});
}

TEST_CASE("capped gates, with decay, rebased often, with a logits_soft_cap") {
    check(
        Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>{
            Sink<>{per_head(sinks, layers, kv_heads)}, Window<>{per_head(windows, layers, kv_heads)},
            ThresholdGate<above>{-0.5f}, TopKBudget<>{per_head(budgets, layers, kv_heads)},
            Decay<dynamic>{per_head(slopes, layers, kv_heads), per_head(steps, layers, kv_heads)}},
        11, {.sm_scale = 0.3f, .logits_soft_cap = 2.0f});
}
