// Packed batches whose scores the cache computes, in both kinds of caches: of hidden states, by a launch of
// their own, by warps of the step's kernels, by a write gate, an mLSTM and a convolution.
#define KVPOLICY_TEST_LISTS_BYTES 200000  // so that a DualCache attends to some entries after others

#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/spkv.hpp>
#include <kvpolicy/wgkv.hpp>

#include "packed_case.hpp"
#include "two_scorers.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

template <class S>
void check_fixed(const S& sizes, float share) {
    using P = Policy<Sink<2>, Window<24>, TopKBudget<40>, S>;
    std::mt19937 generator(11);
    const TwoScorers<S> scorers(sizes, true, generator);
    const P policy{Sink<2>{}, Window<24>{}, TopKBudget<40>{}, scorers.of_host};
    const CacheShape shape = packed_shape(sizes.head_dim_qk, sizes.head_dim_vo);
    BothCaches<P, float, PackedDims> packed(shape, policy, &scorers.of_host, &scorers.of_device),
        padded(shape, policy, &scorers.of_host, &scorers.of_device);
    packed_life<float>(packed, padded, 0, share);
}

/// `slabs` of 40 pages: few of them are not enough for all entries.
template <class P, class S>
void check_paged(const P& policy, const TwoScorers<S>& scorers, std::int32_t slabs,
                 std::int32_t hidden_width) {
    CAPTURE(slabs);
    const PoolShape pool{.slab_pages = 40, .max_slabs = slabs, .max_seq_len = 500};
    BothDuals<P, bf16, PackedDims, true> packed(packed_shape(16, 24), pool, policy, &scorers.of_host,
                                                &scorers.of_device),
        padded(packed_shape(16, 24), pool, policy, &scorers.of_host, &scorers.of_device);
    while (packed.add_slab() && padded.add_slab()) {
    }
    packed_life<bf16>(packed, padded, hidden_width, score_tolerance);
}

UtilityPredictor predictor() {
    UtilityPredictor scorer{};
    scorer.heads = 2;
    scorer.hidden = 37;
    scorer.input.width = 100;
    return scorer;
}

}  // namespace

TEST_CASE("scores of hidden states, in a DualCache with and without pages enough") {
    using P = SPKV<7, UtilityPredictor>;
    std::mt19937 generator(2);
    const TwoScorers<UtilityPredictor> scorers(predictor(), true, generator);
    check_paged(P{{}, {}, {}, scorers.of_host}, scorers, 8, 100);
    check_paged(P{{}, {}, {}, scorers.of_host}, scorers, 1, 100);
}

TEST_CASE("scores by a launch of their own, in a DualCache") {
    using P = Policy<Sink<2>, Window<7>, TopKBudget<>, MlpScorer<>>;
    auto silu = sized<MlpScorer<>>();
    silu.hidden = 37;
    std::mt19937 generator(4);
    const TwoScorers<MlpScorer<>> scorers(silu, true, generator);
    constexpr std::int32_t budgets[] = {40, unlimited};
    check_paged(P{Sink<2>{}, Window<7>{}, TopKBudget<>{per_head(budgets, 1, 2)}, scorers.of_host}, scorers, 8,
                0);
}

TEST_CASE("a linear scorer, in a FixedBudgetCache") { check_fixed(sized<LinearScorer<>>(), score_tolerance); }

TEST_CASE("a write gate, in a DualCache with and without pages enough") {
    using P = WGKV<7, WriteGateScorer<>>;
    auto gate = sized<WriteGateScorer<>>();
    gate.hidden = 37;
    gate.input.rope = {rope_layout::half_split, 10000.0f, 0, nullptr};
    std::mt19937 generator(6);
    const TwoScorers<WriteGateScorer<>> scorers(gate, true, generator);
    check_paged(P{{}, {}, {}, scorers.of_host}, scorers, 8, 0);
    check_paged(P{{}, {}, {}, scorers.of_host}, scorers, 1, 0);
}

// Chunks of more than 32 tokens by the kernels of score_sequence, whose tolerance for fp32 is 1e-4.
TEST_CASE("an mLSTM, in a FixedBudgetCache") {
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    check_fixed(hedgehog, 1e-4f);
}

TEST_CASE("a convolution, in a FixedBudgetCache") {
    auto scorer = sized<ConvScorer<>>();
    scorer.rope = {rope_layout::half_split, 10000.0f, 0, nullptr};
    check_fixed(scorer, score_tolerance);
}
