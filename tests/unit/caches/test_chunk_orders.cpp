// Which keys a chunk admits and evicts, and in which top-k slots they end: chunks of every length against
// single steps, byte for byte, for orders of scores that are hard on a search for the worst key.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/bound_dual.hpp"
#include "support/loops.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

using namespace kvpolicy;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr std::int32_t length = 201;

struct Order {
    const char* name;
    float (*score)(std::int32_t t, std::mt19937& generator);
};
const Order orders[] = {
    {"rising", [](std::int32_t t, std::mt19937&) { return static_cast<float>(t); }},
    {"falling", [](std::int32_t t, std::mt19937&) { return static_cast<float>(-t); }},
    {"equal", [](std::int32_t, std::mt19937&) { return 1.0f; }},
    {"zeros of both signs", [](std::int32_t t, std::mt19937&) { return t % 3 == 0 ? -0.0f : 0.0f; }},
    {"one beats all", [](std::int32_t t, std::mt19937&) { return t == 77 ? 1e9f : 0.5f; }},
    {"alternating", [](std::int32_t t, std::mt19937&) { return t % 2 == 0 ? 1.0f : -1.0f; }},
    {"infinities", [](std::int32_t t, std::mt19937&) { return t % 3 == 0   ? inf
                                                              : t % 3 == 1 ? -inf
                                                                           : 2.0f; }},
    {"values that absorb the decay",
     [](std::int32_t t, std::mt19937& g) {
         return 1e30f * static_cast<float>(1 + (static_cast<unsigned>(t) + g() % 2) % 2);
     }},
    {"random", [](std::int32_t, std::mt19937& g) { return static_cast<float>(g() % 2001) * 1e-3f - 1.0f; }},
};

/// A cache of one head in memory of its own. A DualCache has its pages from the start.
template <class P>
struct FixedCache : test::BoundCache<P, float> {
    FixedCache(const host& ctx, const CacheShape& shape, const P& policy, position_t limit)
        : test::BoundCache<P, float>(ctx, shape, policy, nullptr, {}, limit) {}
};
template <class P>
struct PooledCache : test::BoundDual<P, float> {
    PooledCache(const host& ctx, const CacheShape& shape, const P& policy, position_t limit)
        : test::BoundDual<P, float>(ctx, shape, {.slab_pages = length, .max_slabs = 1, .max_seq_len = length},
                                    policy, nullptr, limit) {
        this->add_slab(ctx);
    }
};

constexpr CacheShape shape{
    .layers = 1, .max_sequences = 1, .query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8};

/// The rows of a cache after all tokens, in chunks of `chunk` tokens; 0: in single steps.
template <template <class> class Kind, class P>
std::vector<unsigned char> rows_after(const host& ctx, const P& policy, const test::Plane<float>& scores,
                                      const test::Tensor<float>& rows, std::int32_t chunk, position_t limit) {
    Kind<P> bound(ctx, shape, policy, limit);
    test::Tensor<float> out(1, 1, length, 8);
    const std::int32_t count = std::max(chunk, 1);
    for (std::int32_t at = 0; at < length; at += count) {
        const Batch batch{.count = 1, .length = std::min(count, length - at)};
        const test::Extras extras{.scores = std::as_const(scores).tokens(at, batch.length)};
        test::call<P, float>(ctx, bound, 0, batch, rows.tokens(at, batch.length),
                             rows.tokens(at, batch.length), rows.tokens(at, batch.length),
                             out.tokens(at, batch.length), extras, chunk == 0);
        bound.cache.advance(ctx, batch);
    }
    return test::content_of(bound.cache.layer(0), 0);
}

/// How many checks there were.
std::size_t count_check() {
    static std::size_t checks = 0;
    return checks++;
}

/// All orders and chunks; where loops are short, one order and a third of the chunks, and others the next
/// time.
template <template <class> class Kind, class P>
void check(const P& policy, position_t limit = rebase_limit) {
    const host ctx{1};
    std::mt19937 generator(5);
    test::Tensor<float> rows(1, 1, length, 8);
    rows.fill_normal(generator);
    const std::size_t count = count_check();
    const Order& turn = orders[count % std::size(orders)];
    constexpr std::int32_t chunks[] = {1, 2, 31, 32, 33, 64, length};
    for (const Order& order : orders) {
        if (test::short_loops && &order != &turn) {
            continue;
        }
        CAPTURE(std::string(order.name));
        test::Plane<float> scores(1, 1, length);
        for (std::int32_t t = 0; t < length; ++t) {
            // The score of a sink is not read.
            scores.at(0, 0, t) = t < policy.params(0, 0).sinks ? std::numeric_limits<float>::quiet_NaN()
                                                               : order.score(t, generator);
        }
        const std::vector<unsigned char> stepped = rows_after<Kind>(ctx, policy, scores, rows, 0, limit);
        for (std::size_t i = 0; i < std::size(chunks); ++i) {
            if (test::short_loops && i % 3 != count / std::size(orders) % 3) {
                continue;
            }
            const std::int32_t chunk = chunks[i];
            CAPTURE(chunk);
            CHECK(rows_after<Kind>(ctx, policy, scores, rows, chunk, limit) == stepped);
        }
    }
}

constexpr std::int32_t budgets[] = {1, 2, 63, 64, 65, 250};

struct Aging {
    float log_gamma;
    std::int32_t step;
};
constexpr Aging agings[] = {{0.0f, 1}, {-0.03f, 1}, {0.0f, 3}, {-0.03f, 3}, {-0.2f, 40}, {-0.2f, 300}};

}  // namespace

TEST_CASE("a chunk leaves the rows of single steps: budgets and decay steps") {
    for (const std::int32_t budget : budgets) {
        for (const Aging aging : agings) {
            CAPTURE(budget);
            CAPTURE(aging.log_gamma);
            CAPTURE(aging.step);
            check<FixedCache>(Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>{
                Sink<>{2}, Window<>{5}, TopKBudget<>{budget}, Decay<dynamic>{aging.log_gamma, aging.step}});
        }
    }
}

TEST_CASE("a chunk leaves the rows of single steps: rebased often") {
    for (const position_t limit : {1, 7, 32}) {
        for (const std::int32_t budget : {2, 64}) {
            for (const std::int32_t step : {1, 3}) {
                CAPTURE(limit);
                CAPTURE(budget);
                CAPTURE(step);
                check<FixedCache>(
                    Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>{
                        Sink<>{1}, Window<>{1}, TopKBudget<>{budget}, Decay<dynamic>{-0.1f, step}},
                    limit);
            }
        }
    }
}

TEST_CASE("a chunk leaves the rows of single steps: gates and keep parts") {
    for (const std::int32_t budget : {1, 63, 65}) {
        for (const Aging aging : {agings[1], agings[3]}) {
            CAPTURE(budget);
            CAPTURE(aging.step);
            const Decay<dynamic> decay{aging.log_gamma, aging.step};
            const Policy<Sink<>, Window<>, ThresholdGate<at_least>, TopKBudget<>, Decay<dynamic>> gated{
                Sink<>{2}, Window<>{4}, ThresholdGate<at_least>{0.0f}, TopKBudget<>{budget}, decay};
            check<FixedCache>(gated);
            check<PooledCache>(gated);
            check<PooledCache>(
                Policy<Sink<2>, Window<4>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>, Stride<3>>{
                    Sink<2>{}, Window<4>{}, ThresholdGate<above>{-0.5f}, TopKBudget<>{budget}, decay,
                    Stride<3>{}},
                7);
        }
    }
}

TEST_CASE("a NaN that competes is refused and changes no row; a NaN that has a slot by position is not") {
    const host ctx{1};
    const test::Tensor<float> rows(1, 1, 12, 8);
    test::Tensor<float> out(1, 1, 12, 8);
    test::Plane<float> scores(1, 1, 12);
    const Batch batch{.count = 1, .length = 12};
    const auto prefill_into = [&](auto& bound, const auto& policy) {
        test::call<std::remove_cvref_t<decltype(policy)>, float>(
            ctx, bound, 0, batch, rows.tokens(0, 12), rows.tokens(0, 12), rows.tokens(0, 12),
            out.tokens(0, 12), test::Extras{.scores = std::as_const(scores).tokens(0, 12)}, false);
    };
    const Policy<Sink<2>, Window<2>, TopKBudget<3>, Stride<4>> kept{};
    scores.at(0, 0, 4) = std::numeric_limits<float>::quiet_NaN();
    PooledCache<std::remove_const_t<decltype(kept)>> pooled(ctx, shape, kept, rebase_limit);
    prefill_into(pooled, kept);
    const Policy<Sink<2>, Window<2>, TopKBudget<3>> ranked{};
    FixedCache<std::remove_const_t<decltype(ranked)>> bound(ctx, shape, ranked, rebase_limit);
#if KVPOLICY_EXCEPTIONS
    const std::vector<unsigned char> before = bound.memory;
    CHECK_THROWS_AS(prefill_into(bound, ranked), kvpolicy::invalid_argument);
    CHECK(bound.memory == before);
#endif
}
