// Scorers inside a DualCache's calls, whose pool runs out now and then: a score decides as the host's does,
// and a state advances only with the step.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "near_scores.hpp"
#include "paged_case.hpp"
#include "two_scorers.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

template <class S>
void check(const S& sizes, bool optional, std::int32_t turns = 60) {
    using P = Policy<Sink<2>, Window<7>, TopKBudget<>, S>;
    std::mt19937 generator(11);
    const TwoScorers<S> scorers(sizes, optional, generator);
    constexpr std::int32_t budgets[] = {40, unlimited};
    const P policy{Sink<2>{}, Window<7>{}, TopKBudget<>{per_head(budgets, 1, 2)}, scorers.of_host};
    const CacheShape shape{.layers = 1,
                           .max_sequences = 3,
                           .query_heads = 4,
                           .kv_heads = 2,
                           .head_dim_qk = 16,
                           .head_dim_vo = 24,
                           .page_size = 16,
                           .max_draft_tokens = 6};
    BothDuals<P, float, all_head_dims, true> both(shape,
                                                  {.slab_pages = 3, .max_slabs = 100, .max_seq_len = 2000},
                                                  policy, &scorers.of_host, &scorers.of_device);
    NearScores<S> near(scorers.of_host, shape);
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        const Mode mode = turn % 3 == 0 ? Mode::step : turn % 3 == 1 ? Mode::prefill : Mode::append_draft;
        const std::int32_t most = mode == Mode::step ? 1 : mode == Mode::append_draft ? 6 : 25;
        const auto some = [&](std::int32_t limit) {
            return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(limit + 1));
        };
        std::vector<std::int32_t> q_len, accepted;
        for (int i = 0; i < 3; ++i) {
            q_len.push_back(some(most));
            accepted.push_back(some(q_len.back()));
        }
        const CallTensors<float> in(shape, 3, most, Scores::random, generator);
        both.call(mode, {1, 2, 0}, q_len, in, accepted);
        near.take({1, 2, 0}, mode == Mode::append_draft ? accepted : q_len, in);
        CAPTURE(turn);
        both.near_rows(near);
    }
    near.check();
}

}  // namespace

TEST_CASE("few calls") {
    check(sized<LinearScorer<>>(), true, 6);
    auto silu = sized<MlpScorer<>>();
    silu.hidden = 37;
    check(silu, true, 6);
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    check(hedgehog, true, 6);
}

TEST_CASE("LinearScorer") { check(sized<LinearScorer<>>(), true); }

TEST_CASE("MlpScorer") {
    auto silu = sized<MlpScorer<>>();
    silu.hidden = 37;
    check(silu, true);
}

TEST_CASE("mLSTMScorer") {
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    check(hedgehog, true);
}
