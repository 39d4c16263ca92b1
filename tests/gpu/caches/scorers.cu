// Scorers inside a cache's calls: the scores that a device computes decide as the host's do, and agree to rounding.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cache_case.hpp"
#include "two_scorers.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

template <class S>
void check(const S& sizes, bool optional) {
    using P = Policy<Sink<2>, Window<7>, TopKBudget<40>, S>;
    std::mt19937 generator(11);
    const TwoScorers<S> scorers(sizes, optional, generator);
    const P policy{Sink<2>{}, Window<7>{}, TopKBudget<40>{}, scorers.of_host};
    const CacheShape shape{.layers = 1,
                           .slots = 3,
                           .query_heads = 4,
                           .kv_heads = 2,
                           .dim_k = 16,
                           .dim_v = 24,
                           .page_rows = 1,
                           .proposals = 6};
    BothCaches<P, float> both(shape, policy, &scorers.of_host, &scorers.of_device);
    for (std::int32_t turn = 0; turn < 60; ++turn) {
        const Mode mode = turn % 3 == 0 ? Mode::step : turn % 3 == 1 ? Mode::prefill : Mode::propose;
        const std::int32_t most = mode == Mode::step ? 1 : mode == Mode::propose ? 6 : 25;
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
        const auto ref = both.cache.ref(0), host_ref = both.oracle.cache.ref(0);
        const auto position = both.fetch(ref.position, ref.slots * ref.rows);
        const auto score = both.fetch(ref.score, ref.slots * ref.rows);
        bool same = true, near = true;
        for (std::int32_t slot = 0; slot < shape.slots; ++slot) {
            for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
                const auto first = static_cast<std::size_t>(host_ref.first_row(slot, h));
                for (std::size_t r = first; r < first + static_cast<std::size_t>(host_ref.used(slot, h));
                     ++r) {
                    same = same && position[r] == host_ref.position[r];
                    near = near && std::abs(score[r] - host_ref.score[r]) <=
                                       score_tolerance * (1.0f + std::abs(host_ref.score[r]));
                }
            }
        }
        CAPTURE(turn);
        CHECK(same);
        CHECK(near);
        const auto state = both.fetch(ref.state, ref.slots * ref.kv_heads * ref.state_size);
        bool states = true;
        for (std::size_t x = 0; x < state.size(); ++x) {
            const float a = state[x], b = host_ref.state[x];
            states = states && (a == b || std::abs(a - b) <= score_tolerance * (1.0f + std::abs(b)));
        }
        CHECK(states);
    }
}

}  // namespace

TEST_CASE("LinearScorer") {
    check(sized<LinearScorer<>>(), true);
    check(sized<LinearScorer<>>(), false);
}

TEST_CASE("MlpScorer") {
    auto silu = sized<MlpScorer<>>();
    silu.hidden = 37;
    check(silu, true);
    auto gelu = sized<BasicMlpScorer<KeyValueInput, GeluErf>>();
    gelu.hidden = 5;
    check(gelu, false);
}

TEST_CASE("mLSTMScorer") {
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    check(hedgehog, true);
    auto direct = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    direct.gate_softcap = 5.0f;
    check(direct, false);
}
