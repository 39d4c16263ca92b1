// Scorers inside a cache's calls: the scores that a device computes decide as the host's do, and agree to rounding.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cache_case.hpp"
#include "two_scorers.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

using namespace kvpolicy;
using namespace test;

namespace {

template <class T = float, class S>
void check(const S& sizes, bool optional, std::int32_t count = 3, std::int32_t turns = 60) {
    using P = Policy<Sink<2>, Window<7>, TopKBudget<40>, S>;
    std::mt19937 generator(11);
    const TwoScorers<S> scorers(sizes, optional, generator);
    const P policy{Sink<2>{}, Window<7>{}, TopKBudget<40>{}, scorers.of_host};
    const CacheShape shape{.layers = 1,
                           .slots = count,
                           .query_heads = 4,
                           .kv_heads = 2,
                           .dim_k = sizes.dim_k,
                           .dim_v = sizes.dim_v,
                           .page_rows = 1,
                           .proposals = 6};
    BothCaches<P, T> both(shape, policy, &scorers.of_host, &scorers.of_device);
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        const Mode mode = turn % 3 == 0 ? Mode::step : turn % 3 == 1 ? Mode::prefill : Mode::propose;
        const std::int32_t most = mode == Mode::step ? 1 : mode == Mode::propose ? 6 : 25;
        const auto some = [&](std::int32_t limit) {
            return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(limit + 1));
        };
        std::vector<std::int32_t> q_len, accepted;
        std::vector<std::int32_t> slots;
        for (std::int32_t i = 0; i < count; ++i) {
            slots.push_back((i + 1) % count);
            q_len.push_back(some(most));
            accepted.push_back(some(q_len.back()));
        }
        const CallTensors<T> in(shape, count, most, Scores::random, generator);
        both.call(mode, slots, q_len, in, accepted);
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

// Sequences that share a cluster of blocks, several groups of them one after the other, some without tokens.
TEST_CASE("mLSTMScorer, many sequences") {
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    check(hedgehog, true, 150, 12);
    auto direct = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    check(direct, false, 37, 12);
}

TEST_CASE("mLSTMScorer, large heads") {
    auto usual = sized<mLSTMScorer<>>();
    usual.dim_k = usual.dim_v = 128;
    check(usual, true, 5, 30);
    usual.d_v = 128;
    check(usual, false, 2, 15);
    auto wide = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    wide.dim_k = wide.dim_v = 128;
    check(wide, true, 2, 15);
    wide.d_qk = 256;
    check(wide, false, 2, 6);
    check(wide, false, 19, 3);
}

// Sizes that clusters do not take.
TEST_CASE("mLSTMScorer, odd sizes") {
    auto odd = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    odd.d_qk = 17;
    check(odd, true, 3, 20);
}

// Steps on the tensor cores begin beside the scorer's launch: as clusters, with a block that only decides, and with one block a head.
TEST_CASE("16-bit caches") {
    auto silu = sized<MlpScorer<>>();
    silu.hidden = 37;
    for (const std::int32_t count : {3, 40, 150}) {
        CAPTURE(count);
        check<bf16>(silu, true, count, 12);
        check<bf16>(sized<mLSTMScorer<>>(), true, count, 12);
    }
}

namespace {

/// Alone a sequence has a cluster of blocks for itself, in a batch it shares one, or a block that streams states: its sums are the same.
void check_bits(std::int32_t count) {
    CAPTURE(count);
    using S = mLSTMScorer<>;
    using P = Policy<Sink<2>, Window<7>, TopKBudget<40>, S>;
    std::mt19937 generator(5);
    const S sizes = sized<S>();
    const TwoScorers<S> scorers(sizes, true, generator);
    const P policy{Sink<2>{}, Window<7>{}, TopKBudget<40>{}, scorers.of_host};
    const CacheShape shape{.layers = 1,
                           .slots = count,
                           .query_heads = 4,
                           .kv_heads = 2,
                           .dim_k = sizes.dim_k,
                           .dim_v = sizes.dim_v,
                           .page_rows = 1,
                           .proposals = 0};
    BothCaches<P, float> together(shape, policy, &scorers.of_host, &scorers.of_device);
    BothCaches<P, float> alone(shape, policy, &scorers.of_host, &scorers.of_device);
    const std::vector<std::int32_t> ones(static_cast<std::size_t>(count), 1);
    std::vector<std::int32_t> slots;
    for (std::int32_t i = 0; i < count; ++i) {
        slots.push_back(i);
    }
    for (int turn = 0; turn < 15; ++turn) {
        const CallTensors<float> in(shape, count, 1, Scores::random, generator);
        together.call(Mode::step, slots, ones, in);
        for (std::int32_t i = 0; i < count; ++i) {
            CallTensors<float> one(shape, 1, 1, Scores::random, generator);
            const auto part = [i](const auto& from, auto& to) {
                const auto size = static_cast<std::ptrdiff_t>(to.size());
                std::copy_n(from.begin() + i * size, size, to.begin());
            };
            part(in.q.data, one.q.data);
            part(in.k.data, one.k.data);
            part(in.v.data, one.v.data);
            alone.call(Mode::step, {i}, {1}, one);
        }
        // As bits: rows that nobody wrote hold NaN.
        const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
            return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
        };
        const auto x = together.cache.ref(0), y = alone.cache.ref(0);
        const std::int64_t states = std::int64_t{x.slots} * x.kv_heads * x.state_size,
                           rows = x.slots * x.rows;
        CAPTURE(turn);
        CHECK(same(together.fetch(x.state, states), alone.fetch(y.state, states)));
        CHECK(same(together.fetch(x.score, rows), alone.fetch(y.score, rows)));
    }
}

}  // namespace

TEST_CASE("mLSTMScorer, the batch changes no bit") {
    check_bits(9);
    check_bits(70);
}
