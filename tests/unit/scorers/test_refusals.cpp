// Bad input to scorers gets a sentence before anything is written.
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/initialize.hpp>

#include "../../support/refusal.hpp"
#include "scorer_cases.hpp"

#include <doctest/doctest.h>

using namespace kvpolicy;
using test::mlstm_case;
using test::mlstm_weights;

namespace {

/// A good call, of which each test spoils one thing.
struct call {
    mlstm_case c = [] {
        mlstm_case one;
        one.length = 20;
        one.delay = 4;
        return one;
    }();
    mlstm_weights weights{c};
    mLSTMScorer<> scorer = weights.scorer<mLSTMScorer<>>();
    std::vector<float> keys = std::vector<float>(static_cast<std::size_t>(c.keys()));
    std::vector<float> values = std::vector<float>(static_cast<std::size_t>(c.values()));
    std::vector<float> scores = std::vector<float>(static_cast<std::size_t>(c.heads * c.length), -77.0f);
    rows_view<float> k = view_bhsd(keys.data(), 1, c.heads, c.length, 16);
    rows_view<float> v = view_bhsd(values.data(), 1, c.heads, c.length, 16);
    plane_view<float> out = view_bhs(scores.data(), 1, c.heads, c.length);
    Sequences sequences{1, c.length};
    std::int32_t delay = 4;
    ScoreOptions options;
    std::size_t missing = 0;

    void operator()() const {
        const host ctx(1);
        std::vector<std::byte> memory(score_sequence_workspace_bytes(ctx, scorer, k, v, sequences, options));
        score_sequence(ctx, scorer, k, v, sequences, delay, out, {memory.data(), memory.size() - missing},
                       options);
    }
    [[nodiscard]] bool untouched() const {
        for (const float score : scores) {
            if (score != -77.0f) {
                return false;
            }
        }
        return true;
    }
};

template <class Spoil>
void refused(const char* text, Spoil&& spoil) {
    call one;
    spoil(one);
    CHECK_REFUSED(one(), text);
    CHECK(one.untouched());
}

}  // namespace

TEST_CASE("the call that the others spoil is a good one") {
    call one;
    one();
    CHECK_FALSE(one.untouched());
}

TEST_CASE("views and sequences that disagree are refused") {
    refused("v: [1, 1, 20, 16]", [](call& c) { c.v.heads = 1; });
    refused("sequences.batch: 2", [](call& c) { c.sequences.batch = 2; });
    refused("sequences.length: 21", [](call& c) { c.sequences.length = 21; });
    refused("sequences.length: -1", [](call& c) { c.sequences.length = -1; });
    static constexpr std::int32_t negative = -1;
    refused("sequences.lengths[0]: -1", [](call& c) { c.sequences.lengths = &negative; });
    refused("sequences.starts[0]: -1", [](call& c) { c.sequences.starts = &negative; });
    static constexpr std::int32_t five = 5;
    refused("0 without options.states", [](call& c) {
        c.sequences.length = 10;
        c.sequences.starts = &five;
    });
    refused("at most the rows of k and v, 20", [](call& c) { c.sequences.starts = &five; });
    static constexpr std::int32_t edges[3] = {0, 7, 20};
    static float states[1000] = {};
    refused("0 where cu_seqlens is given", [](call& c) {
        c.sequences.cu_seqlens = edges;
        c.sequences.segments = 2;
        c.sequences.starts = &five;
        c.options.states = states;
        c.k.length = c.v.length = 40;
    });
    static constexpr std::int32_t falling[3] = {0, 21, 20};
    refused("sequences.cu_seqlens[2]: 20", [](call& c) {
        c.sequences.cu_seqlens = falling;
        c.sequences.segments = 2;
    });
    refused("scores: 1 x 2 x 19", [](call& c) { c.out.length = 19; });
    refused("k.data: null", [](call& c) { c.k.data = nullptr; });
    refused("scores.data: null", [](call& c) { c.out.data = nullptr; });
    refused("delay: -1", [](call& c) { c.delay = -1; });
    refused("workspace.bytes", [](call& c) { c.missing = 1; });
    refused("options.how: 7", [](call& c) { c.options.how = static_cast<form>(7); });
}

TEST_CASE("no workspace is asked for sequences whose length nobody said") {
    const host ctx(1);
    const rows_view<const float> rows{nullptr, 1, 2, 20, 16, 640, 320, 16};
    const Sequences unset{.batch = 1};
    const auto refused_bytes = [&](auto scorer) {
        scorer.heads = 2;
        ScoreBackward<float> back{};
        back.k = back.v = rows;
        back.sequences = unset;
        CHECK_REFUSED(score_sequence_workspace_bytes(ctx, scorer, rows, rows, unset), "sequences.length: -1");
        CHECK_REFUSED(score_sequence_backward_workspace_bytes(ctx, scorer, back), "sequences.length: -1");
    };
    refused_bytes(mLSTMScorer<16>{});
    refused_bytes(LinearScorer<16>{});
    refused_bytes(MlpScorer<16>{});
    refused_bytes(ConvScorer<16>{});
}

TEST_CASE("scorers that do not fit the layer are refused") {
    refused("mLSTMScorer.heads: 3 is not allowed; it must be the layer's KV heads, 2",
            [](call& c) { c.scorer.heads = 3; });
    refused("mLSTMScorer.head_dim_qk: 0", [](call& c) { c.scorer.head_dim_qk = 0; });
    refused("mLSTMScorer.head_dim_vo: 17", [](call& c) { c.scorer.head_dim_vo = 17; });
    refused("mLSTMScorer.d_qk: 7 is not allowed; it must be 2 or more, and even",
            [](call& c) { c.scorer.d_qk = 7; });
    refused("mLSTMScorer.d_qk: -4", [](call& c) { c.scorer.d_qk = -4; });
    refused("mLSTMScorer.d_v: -1", [](call& c) { c.scorer.d_v = -1; });
    refused("mLSTMScorer.gate_softcap: -1", [](call& c) { c.scorer.gate_softcap = -1.0f; });
    refused("mLSTMScorer.gate_softcap: nan",
            [](call& c) { c.scorer.gate_softcap = std::numeric_limits<float>::quiet_NaN(); });
    refused("mLSTMScorer.weights.w_q: null is not allowed; it must be an array of 512 floats",
            [](call& c) { c.scorer.weights.w_q = nullptr; });
    refused("mLSTMScorer.weights.w_v: null", [](call& c) { c.scorer.weights.w_v = nullptr; });
    refused("mLSTMScorer.weights.readout: null", [](call& c) { c.scorer.weights.readout = nullptr; });
    mLSTMScorer<64> fixed;
    fixed.heads = 1;
    CHECK_REFUSED(fixed.check(1, 128, 128),
                  "mLSTMScorer.head_dim_qk: 64 is not allowed; it must be the width of the keys, 128");
    fixed.head_dim_qk = 128;
    CHECK_REFUSED(fixed.check(1, 128, 128), "as mLSTMScorer<64> says");
    mLSTMScorer<8, Hedgehog, DirectValues> direct;
    direct.heads = 1;
    direct.d_v = 4;
    CHECK_REFUSED(direct.check(1, 8, 8), "since DirectValues writes them as they are");
    MlpScorer<8> mlp;
    mlp.heads = 1;
    CHECK_REFUSED(mlp.check(1, 8, 8), "MlpScorer.hidden: 0");
    mlp.hidden = 4;
    CHECK_REFUSED(mlp.check(1, 8, 8),
                  "MlpScorer.weights.w1: null is not allowed; it must be an array of 64 floats");
    LinearScorer<> linear;
    CHECK_REFUSED(linear.check(0, 0, 8), "LinearScorer.head_dim_qk: 0");
    linear.heads = 2;
    linear.head_dim_qk = linear.head_dim_vo = 8;
    CHECK_REFUSED(linear.check(2, 8, 8),
                  "LinearScorer.weights.weight: null is not allowed; it must be an array of 32");
}

TEST_CASE("empty calls need nothing and write nothing but states") {
    call one;
    one.sequences.length = 0;
    one.k.data = nullptr;
    one.v.data = nullptr;
    one.out.data = nullptr;
    std::vector<float> states(2 * one.scorer.state_size(), 9.0f);
    one.options.states = states.data();
    one();
    std::vector<float> fresh(states.size());
    one.scorer.reset(fresh.data());
    one.scorer.reset(fresh.data() + one.scorer.state_size());
    CHECK(test::same_bits(states, fresh));
}
