// The system headers spell their policies as their pages say, and every cache that a page names holds
// what the mask says.
#include <kvpolicy/lte.hpp>
#include <kvpolicy/spkv.hpp>
#include <kvpolicy/wgkv.hpp>

#include "cache_harness.hpp"

#include <doctest/doctest.h>

using namespace kvpolicy;
using test::Sizes;

static_assert(std::is_same_v<SPKV<128>, Policy<Sink<0>, Window<128>, ThresholdGate<at_least>, GivenScores>>);
static_assert(std::is_same_v<WGKV<256>, Policy<Sink<0>, Window<256>, ThresholdGate<at_least>, GivenScores>>);
static_assert(
    std::is_same_v<LTE<4, 768, 512, ConvScorer<128>>,
                   Policy<Sink<4>, Window<768>, ThresholdGate<above>, TopKBudget<508>, ConvScorer<128>>>);
static_assert(
    std::is_same_v<LTE<>, Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, ConvScorer<>>>);

TEST_CASE("the examples of the pages") {
    const CacheShape shape{
        .query_heads = 2, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 16};
    const PoolShape pool{.slab_pages = 64, .max_slabs = 64, .max_seq_len = 131072};
    const SPKV<128> spkv;
    const DualCache<SPKV<128>, bf16> a{shape, pool, spkv};
    CHECK(spkv.params(0, 0).threshold == 0.0f);  // tau = 0.5
    const auto gate = ThresholdGate<at_least>::probability(0.1);
    const WGKV<256> wgkv{Sink<0>{}, Window<256>{}, gate, GivenScores{}};
    const DualCache<WGKV<256>, bf16> b{shape, pool, wgkv};
    CHECK(wgkv.params(0, 0).threshold == doctest::Approx(-2.1972246));
    using Conv = LTE<4, 768, 512, ConvScorer<8>>;
    std::vector<float> weights(8 * 3 * 16 + 4 * 3 * 8 + 2 * 3 * 4 + 2);
    ConvScorer<8> scorer;
    scorer.heads = 1;
    scorer.weights.w1 = weights.data();
    scorer.weights.w2 = scorer.weights.w1 + 8 * 3 * 16;
    scorer.weights.w3 = scorer.weights.w2 + 4 * 3 * 8;
    scorer.weights.readout = scorer.weights.w3 + 2 * 3 * 4;
    const FixedBudgetCache<Conv, bf16> all{shape, Conv{}, &scorer};
    const DualCache<Conv, bf16> grown{shape, pool, Conv{}, &scorer};
    CHECK(all.rows(0) == 1280);
    CHECK(!Conv{}.gate().open(0.0f, Conv{}.params(0, 0)));  // r = 0.5 is not above
    CHECK(spkv.gate().open(0.0f, spkv.params(0, 0)));
}

TEST_CASE("mask, steps and chunks agree for every system") {
    const host ctx{1};
    std::mt19937 generator(1);
    for (const test::Scores kind : test::all_scores) {
        test::check_policy(ctx, SPKV<6>{}, Sizes{.length = 50}, kind, generator);
        test::check_policy(
            ctx, WGKV<>{Sink<0>{}, Window<>{5}, ThresholdGate<at_least>::probability(0.1), GivenScores{}},
            Sizes{.length = 50}, kind, generator);
        test::check_policy(ctx, LTE<2, 5, 7, GivenScores>{}, Sizes{.length = 50}, kind, generator);
        // Hybrid layouts: a global head, a local one, and one that is gated.
        const float infinity = std::numeric_limits<float>::infinity();
        const float thresholds[] = {-infinity, infinity, 0.0f};
        const SPKV<6, GivenScores, 4> hybrid{
            Sink<4>{}, Window<6>{}, ThresholdGate<at_least>{per_head(thresholds, 1, 3)}, GivenScores{}};
        test::check_policy(ctx, hybrid, Sizes{.kv_heads = 3, .length = 50}, kind, generator);
    }
}
