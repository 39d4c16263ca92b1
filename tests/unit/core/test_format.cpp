// The texts of policies, shapes and reports (fmt.hpp).
#include <kvpolicy/dms.hpp>
#include <kvpolicy/fmt.hpp>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/lte.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/spkv.hpp>
#include <kvpolicy/tova.hpp>
#include <kvpolicy/uniform.hpp>

#include <doctest/doctest.h>

#include <string>

using namespace kvpolicy;

namespace {

template <class T>
std::string text(const T& object) {
    return fmt::format("{}", object);
}

struct Nameless {
    static constexpr part_kind kind = part_kind::keep;
    constexpr bool keeps(position_t t) const { return t == 7; }
};
struct Named : Nameless {
    std::string name() const { return "Seventh"; }
};

}  // namespace

TEST_CASE("policies, fixed and at run time") {
    CHECK(text(KVpop<4, 256, 3836>{}) ==
          "Sink 4 + Window 256 + TopKBudget 3836 + Decay 1 (log gamma 0) + GivenScores");
    const std::int32_t budgets[] = {1, 2, 3, 4, 5, 6};
    CHECK(text(KVpop<>{Sink<>{2}, Window<>{9}, TopKBudget<>{per_head(budgets, 3, 2)}, Decay<1>{-0.5f},
                       GivenScores{}}) ==
          "Sink 2 + Window 9 + TopKBudget [3 layers x 2 heads] + Decay 1 (log gamma -0.5) + GivenScores");
    CHECK(text(Policy<TopKBudget<>>{TopKBudget<>{unlimited}}) == "TopKBudget unlimited");
    CHECK(text(Policy<Decay<dynamic>>{Decay<dynamic>{-1.0f, 64}}) == "Decay 64 (log gamma -1)");
    CHECK(text(Policy<>{}) == "Policy without parts");
    CHECK(text(SPKV<128>{}) == "Sink 0 + Window 128 + ThresholdGate (open from 0) + GivenScores");
    CHECK(text(LTE<4, 768, 512, GivenScores>{}) ==
          "Sink 4 + Window 768 + ThresholdGate (open above 0) + TopKBudget 508 + GivenScores");
    CHECK(text(DMS<256>{}) == "Sink 0 + Window 256 + EvictionGate (closed above 0) + GivenScores");
    CHECK(text(h2o_for_total(10, 4)) ==
          "Window 5 + TopKBudget 6 + AccumulatedMass (dense then prune, mean over the group)");
    CHECK(text(tova_for_total(10, {ObservedPrefill::stepwise()})) ==
          "Window 1 + TopKBudget 10 + LastMass (stepwise, mean over the group, mean over the layer)");
    CHECK(text(snapkv_for_total(
              40, 8, {ObservedPrefill::in_chunks(64), MassPooling::max(7), group_aggregate::max})) ==
          "Window 8 + TopKBudget 32 + WindowMass (chunks of 64, max over the group, max over 7 keys)");
    CHECK(text(UniformStride<4, 64, 16>{}) == "Sink 4 + Window 64 + Stride 16");
    CHECK(text(RandomKeys<0, 4, 5>{Sink<0>{}, Window<4>{}, TopKBudget<5>{}, RandomScorer{3, 1}}) ==
          "Sink 0 + Window 4 + TopKBudget 5 + RandomScorer (seed 3, layer 1)");
    CHECK(text(Policy<Window<16>, KeepAll>{}) == "Window 16 + KeepAll");
    MlpScorer<> mlp;
    mlp.head_dim_qk = 64, mlp.head_dim_vo = 32, mlp.hidden = 16;
    CHECK(text(Policy<TopKBudget<8>, MlpScorer<>>{TopKBudget<8>{}, mlp}) ==
          "TopKBudget 8 + MlpScorer (64 + 32, hidden 16)");
    CHECK(text(Policy<Window<3>, QuestPages<16>, SnapKVEviction>{Window<3>{}, QuestPages<16>{4},
                                                                 SnapKVEviction{}}) ==
          "Window 3 + QuestPages (4 pages of 16 rows) + SnapKVEviction (4096 entries per head, 0.1 of them a "
          "round)");
    CHECK(text(Policy<TopKBudget<8>, WriteGateScorer<64>>{}) ==
          "TopKBudget 8 + WriteGateScorer (64 + 64, hidden 0)");
    CHECK(text(Policy<TopKBudget<8>, UtilityPredictor>{}) == "TopKBudget 8 + UtilityPredictor (hidden 0)");
    CHECK(text(Policy<TopKBudget<8>, ConvScorer<64>>{}) == "TopKBudget 8 + ConvScorer (64 + 64)");
    CHECK(text(Policy<TopKBudget<8>, LinearScorer<64>>{}) == "TopKBudget 8 + LinearScorer (64 + 64)");
    CHECK(text(Policy<TopKBudget<8>, mLSTMScorer<64>>{}) ==
          "TopKBudget 8 + mLSTMScorer (64 + 64, 64 features, 32 values)");
    CHECK(text(Policy<Window<3>, Nameless, Named>{}) == "Window 3 + a keep part of one's own + Seventh");
}

TEST_CASE("shapes, rules and numbers") {
    float x[48] = {};
    CHECK(text(view_bhsd(x, 1, 2, 3, 8)) == "[1, 2, 3, 8]");
    CHECK(text(view_bhs<const float>(x, 1, 2, 3)) == "[1, 2, 3]");
    CHECK(text(KVpop<4, 256, 3836>{}.params(0, 0)) ==
          "sinks 4, window 256, budget 3836, decay step 1, log gamma 0, threshold 0");
    CHECK(text(SPKV<128>{}.params(0, 0)) ==
          "sinks 0, window 128, budget unlimited, decay step 1, log gamma 0, threshold 0");
    CHECK(text(PerHead<float>{0.5f}) == "0.5");
    CHECK(text(CacheShape{.layers = 6,
                          .max_sequences = 2,
                          .query_heads = 8,
                          .kv_heads = 2,
                          .head_dim_qk = 64,
                          .head_dim_vo = 32}) ==
          "6 layers, 2 sequences, 8 query heads on 2 KV heads, 64 + 32 wide, pages of 1");
    CHECK(text(PoolShape{.slab_pages = 16, .max_slabs = 4, .max_seq_len = 4096}) ==
          "up to 4 slabs of 16 pages, sequences of up to 4096 tokens");
    CHECK(text(bf16(1.5f)) == "1.5");
    CHECK(fmt::format("{:.3f}", fp16(0.25f)) == "0.250");
}

TEST_CASE("reports") {
    CHECK(text(CacheBytes{3 * 1024 * 1024, 0, 512}) ==
          "3.00 MiB (keys and values 3.00 MiB, scorer state 0 B, bookkeeping 512 B)");
    CHECK(text(CacheBytes{2048, 1536, 0}) ==
          "3.50 KiB (keys and values 2.00 KiB, scorer state 1.50 KiB, bookkeeping 0 B)");
    CHECK(text(HeadUsage{.length = 5000, .sinks = 4, .window = 256, .long_range = 764, .capacity = 1024}) ==
          "1024 rows (4 sinks, 256 window, 764 long-range) of 5000 tokens");
    CHECK(text(LossValue{0.125, 42}) == "0.125 over 42");
    CHECK(text(Recall{10, 0.75, 0.25, 1.0, 0.5}) ==
          "recall 0.7500 (chance 0.2500) over 10 queries, at the end 1.0000 (chance 0.5000)");
    const FixedBudgetCache<KVpop<1, 2, 3>, float> cache(
        {.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8});
    CHECK(text(cache.policy()) == text(KVpop<1, 2, 3>{}));
    // Specs of a string.
    CHECK(fmt::format("{:>24}|", Policy<Window<3>>{}) == "                Window 3|");
    CHECK(fmt::format("{:.<12}", Policy<Window<3>>{}) == "Window 3....");
}
