// The central promise: given the same scores, the mask, the stepped cache and the cache filled in any chunks
// hold the same keys after every token, and every query gets the same output.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/streaming_llm.hpp>

#include "cache_harness.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

using namespace kvpolicy;
using test::Sizes;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;
template <class Comparison>
using Capped = Policy<Sink<>, Window<>, ThresholdGate<Comparison>, TopKBudget<>, Decay<dynamic>>;

Budget budget(std::int32_t s, std::int32_t w, std::int32_t k, float log_gamma = 0.0f, std::int32_t n = 1) {
    return Budget{Sink<>{s}, Window<>{w}, TopKBudget<>{k}, Decay<dynamic>{log_gamma, n}};
}

struct Numbers {
    std::int32_t s, w, k;
};
// s = 0, w = 1, k = 0, a window longer than the sequence, a budget longer than the sequence,
// and ordinary ones.
constexpr Numbers numbers[] = {{0, 1, 0}, {0, 1, 1}, {2, 1, 3},  {3, 4, 0},
                               {4, 5, 7}, {0, 8, 5}, {1, 60, 4}, {2, 3, 60}};

}  // namespace

TEST_CASE("sinks, window and budget, every order of scores") {
    const host ctx{2};
    std::mt19937 generator(1);
    for (const test::Scores kind : test::all_scores) {
        for (const Numbers n : numbers) {
            CAPTURE(n.s);
            CAPTURE(n.w);
            CAPTURE(n.k);
            test::check_policy(ctx, budget(n.s, n.w, n.k), Sizes{.length = 41}, kind, generator);
        }
    }
}

TEST_CASE("decay with steps 1, 3 and 64") {
    const host ctx{1};
    std::mt19937 generator(2);
    for (const std::int32_t step : {1, 3, 64}) {
        for (const float log_gamma : {-1e-6f, -0.03125f, -0.3f}) {
            for (const test::Scores kind : test::all_scores) {
                CAPTURE(step);
                CAPTURE(log_gamma);
                test::check_policy(ctx, budget(2, 5, 6, log_gamma, step), Sizes{.length = 150}, kind,
                                   generator);
            }
        }
    }
}

TEST_CASE("priorities are rebased on one schedule") {
    const host ctx{1};
    std::mt19937 generator(3);
    for (const position_t limit : {1, 7, 32}) {
        for (const test::Scores kind : test::all_scores) {
            CAPTURE(limit);
            test::check_policy(ctx, budget(1, 4, 9, -0.1f), Sizes{.length = 100}, kind, generator, limit);
        }
    }
}

TEST_CASE("a rebase that reorders two keys changes the next victim, in every way of filling a cache") {
    // log gamma = -2^40, rebased every 8 tokens. Key 7 (score 2^40) and key 8 (score 2^-14) are worth 0 and
    // 2^-14 at the base 8, so key 7 is the next victim; at the base 16 both are -2^43 (2^-14 is rounded
    // away), so it is the younger one.
    constexpr std::int32_t length = 18;
    float scores[length];
    std::fill_n(scores, length, -3e38f);
    scores[7] = 0x1p40f;
    scores[8] = 0x1p-14f;
    scores[15] = 3e38f;
    const host ctx{1};
    const Budget policy = budget(0, 1, 2, -0x1p40f);
    const Sequences sequences{.batch = 1, .length = length};
    const MaskOptions options{.rebase_limit = 8};
    std::int32_t expiry[length];
    Buffer mask_workspace{ctx, build_mask_workspace_bytes(ctx, policy, sequences, 1, options)};
    build_mask(ctx, policy, view_bhs<const float>(scores, 1, 1, length), sequences,
               view_bhs(expiry, 1, 1, length), mask_workspace, options);
    CHECK(expiry[7] == never);
    CHECK(expiry[8] == 16);
    CHECK(expiry[15] == never);

    const std::vector<float> ones(8 * length, 1.0f);
    std::vector<float> out(8 * length);
    for (const std::int32_t chunk : {1, 2, 5, 11, length}) {
        CAPTURE(chunk);
        FixedBudgetCache<Budget, float> cache{
            {.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8}, policy};
        cache.rebase_limit(8);
        Buffer memory{ctx, cache.bytes().total()};
        cache.bind(ctx, memory);
        Buffer workspace{ctx, workspace_bytes(ctx, cache.layer(0), {.batch = 1, .tokens = length})};
        for (std::int32_t t = 0; t < length; t += chunk) {
            const std::int32_t n = std::min(chunk, length - t);
            const Batch batch{.count = 1, .length = n};
            const auto rows = view_bshd(ones.data(), 1, n, 1, 8);
            const test::Extras extras{.scores = view_bhs<const float>(scores + t, 1, 1, n)};
            if (n == 1) {
                step(ctx, cache.layer(0),
                     test::step_io(batch, rows, rows, rows, view_bshd(out.data(), 1, n, 1, 8), extras),
                     workspace);
            } else {
                prefill(ctx, cache.layer(0),
                        test::step_io(batch, rows, rows, rows, view_bshd(out.data(), 1, n, 1, 8), extras),
                        workspace);
            }
            cache.advance(ctx, batch);
        }
        std::vector<position_t> kept(static_cast<std::size_t>(cache.usage(0, 0, 0).size()));
        cache.retained(0, 0, 0, kept.data());
        std::ranges::sort(kept);
        CHECK(kept == std::vector<position_t>{7, 15, 17});
    }
}

TEST_CASE("a capped gate counts open keys only") {
    const host ctx{1};
    std::mt19937 generator(4);
    for (const test::Scores kind : test::all_scores) {
        for (const Numbers n : numbers) {
            const auto parts = [&](auto gate) {
                return Policy<Sink<>, Window<>, decltype(gate), TopKBudget<>, Decay<dynamic>>{
                    Sink<>{n.s}, Window<>{n.w}, gate, TopKBudget<>{n.k}, Decay<dynamic>{-0.01f, 1}};
            };
            test::check_policy(ctx, parts(ThresholdGate<at_least>{0.0f}), Sizes{.length = 41}, kind,
                               generator);
            test::check_policy(ctx, parts(ThresholdGate<above>{0.0f}), Sizes{.length = 41}, kind, generator);
        }
    }
}

TEST_CASE("StreamingLLM") {
    const host ctx{1};
    std::mt19937 generator(5);
    for (const std::int32_t length : {1, 2, 4, 5, 9, 10, 11, 40}) {
        test::check_policy(ctx, StreamingLLM<4, 6>{}, Sizes{.length = length}, test::Scores::random,
                           generator);
    }
}

TEST_CASE("lengths from 0 to a few windows") {
    const host ctx{1};
    std::mt19937 generator(6);
    for (std::int32_t length = 0; length <= 34; ++length) {
        test::check_policy(ctx, budget(2, 8, 3), Sizes{.batch = 2, .length = length}, test::Scores::random,
                           generator);
    }
}

TEST_CASE("budgets, windows and decay that differ by head") {
    const host ctx{2};
    std::mt19937 generator(7);
    const std::int32_t sinks[] = {0, 2, 5}, windows[] = {1, 9, 4}, keys[] = {6, 0, 11}, steps[] = {1, 3, 1};
    const float decays[] = {0.0f, -0.2f, -0.01f};
    const Budget policy{Sink<>{per_head(sinks, 1, 3)}, Window<>{per_head(windows, 1, 3)},
                        TopKBudget<>{per_head(keys, 1, 3)},
                        Decay<dynamic>{per_head(decays, 1, 3), per_head(steps, 1, 3)}};
    for (const test::Scores kind : test::all_scores) {
        test::check_policy(ctx, policy, Sizes{.kv_heads = 3, .group = 3, .length = 60}, kind, generator);
    }
}

TEST_CASE("groups of 1, 3, 5, 6, 7, 12 and 16 query heads") {
    const host ctx{1};
    std::mt19937 generator(8);
    for (const std::int32_t group : {1, 3, 5, 6, 7, 12, 16}) {
        test::check_policy(ctx, budget(1, 6, 8),
                           Sizes{.kv_heads = 1, .group = group, .length = 50, .dim = 64},
                           test::Scores::random, generator);
    }
}

TEST_CASE("gates without a budget, unlimited budgets, and both by head") {
    const host ctx{2};
    std::mt19937 generator(9);
    for (const test::Scores kind : test::all_scores) {
        for (const Numbers n : numbers) {
            CAPTURE(n.s);
            CAPTURE(n.w);
            const auto gated = [&](auto gate) {
                return Policy<Sink<>, Window<>, decltype(gate)>{Sink<>{n.s}, Window<>{n.w}, gate};
            };
            test::check_policy(ctx, gated(ThresholdGate<at_least>{0.0f}), Sizes{.length = 41}, kind,
                               generator);
            test::check_policy(ctx, gated(ThresholdGate<above>{0.5f}), Sizes{.length = 41}, kind, generator);
            test::check_policy(ctx, budget(n.s, n.w, unlimited, -0.1f, 3), Sizes{.length = 41}, kind,
                               generator);
            // DuoAttention: some heads keep everything, the others only sinks and window.
            const std::int32_t keys[] = {unlimited, 0, n.k};
            const Budget duo{Sink<>{n.s}, Window<>{n.w}, TopKBudget<>{per_head(keys, 1, 3)},
                             Decay<dynamic>{0.0f, 1}};
            test::check_policy(ctx, duo, Sizes{.kv_heads = 3, .length = 41}, kind, generator);
            const float thresholds[] = {-1.0f, 0.0f, 0.5f};
            const Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>> mixed{
                Sink<>{n.s}, Window<>{n.w}, ThresholdGate<above>{per_head(thresholds, 1, 3)},
                TopKBudget<>{per_head(keys, 1, 3)}, Decay<dynamic>{-0.05f, 1}};
            test::check_policy(ctx, mixed, Sizes{.kv_heads = 3, .length = 41}, kind, generator, 16);
        }
    }
}

namespace {

struct EveryFifth {
    static constexpr part_kind kind = part_kind::keep;
    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t t) const { return t % 5 == 0; }
};
struct Below {
    static constexpr part_kind kind = part_kind::keep;
    position_t limit = 0;
    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t t) const { return t < limit; }
};

}  // namespace

TEST_CASE("keys that are kept for their position, alone, under a gate and beside a budget") {
    const host ctx{1};
    std::mt19937 generator(10);
    for (const test::Scores kind : test::all_scores) {
        for (const Numbers n : numbers) {
            const Policy<Sink<>, EveryFifth, Window<>, Below> alone{Sink<>{n.s}, {}, Window<>{n.w}, Below{4}};
            test::check_policy(ctx, alone, Sizes{.length = 41}, kind, generator);
            const Policy<EveryFifth, Sink<>, Window<>, ThresholdGate<above>> gated{
                {}, Sink<>{n.s}, Window<>{n.w}, ThresholdGate<above>{0.0f}};
            test::check_policy(ctx, gated, Sizes{.length = 41}, kind, generator);
            for (const std::int32_t step : {1, 3}) {
                const Policy<Sink<>, Window<>, TopKBudget<>, Below, Decay<dynamic>, EveryFifth> ranked{
                    Sink<>{n.s}, Window<>{n.w}, TopKBudget<>{n.k}, Below{3}, Decay<dynamic>{-0.1f, step}, {}};
                test::check_policy(ctx, ranked, Sizes{.length = 60}, kind, generator,
                                   step == 1 ? 7 : rebase_limit);
            }
        }
    }
}

TEST_CASE("a budget that heads share: floors, caps and offsets, gates, keep parts and decays") {
    const host ctx{2};
    std::mt19937 generator(12);
    const std::int32_t windows[] = {3, 1, 6}, sinks[] = {0, 2, 1}, floors[] = {0, 2, 1}, caps[] = {30, 5, 9};
    const float offsets[] = {0.0f, 0.5f, -1.0f}, slopes[] = {-0.02f, -0.3f, 0.0f};
    const std::int32_t steps[] = {1, 7, 3};
    const Sink<> by_head_sinks{per_head(sinks, 1, 3)};
    const Window<> by_head_windows{per_head(windows, 1, 3)};
    const SharedLimits limits{per_head(floors, 1, 3), per_head(caps, 1, 3), per_head(offsets, 1, 3)};
    const Sizes sizes{.batch = 2, .kv_heads = 3, .group = 2, .length = 60};
    for (const test::Scores kind : test::all_scores) {
        for (const std::int32_t k : {0, 1, 4, 40}) {
            CAPTURE(k);
            test::check_policy(ctx,
                               Policy<Sink<>, Window<>, SharedBudget<>, Decay<1>>{
                                   by_head_sinks, by_head_windows,
                                   SharedBudget<>{k, k == 0 ? SharedLimits{} : limits}, Decay<1>{-0.02f}},
                               sizes, kind, generator, 1 + k);
        }
        test::check_policy(
            ctx,
            Policy<Sink<>, Window<>, ThresholdGate<at_least>, SharedBudget<>, Decay<dynamic>, Stride<>>{
                by_head_sinks, by_head_windows, ThresholdGate<at_least>{0.0f}, SharedBudget<>{4, limits},
                Decay<dynamic>{per_head(slopes, 1, 3), per_head(steps, 1, 3)}, Stride<>{9}},
            sizes, kind, generator);
    }
}
