// score_sequence: what it writes and what it leaves, and that no path, thread count or instruction set
// shows in a score.
#include "../../support/loops.hpp"
#include "scorer_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace kvpolicy;
using test::mlstm_case;
using test::mlstm_weights;
using test::same_bits;
using test::score_all;

namespace {

struct inputs {
    std::vector<float> k, v;
    rows_view<const float> keys, values;

    explicit inputs(const mlstm_case& c, std::int32_t batch = 1)
        : k(test::draw(c.seed, test::array::k, batch * c.keys(), c.value_scale)),
          v(test::draw(c.seed, test::array::v, batch * c.values(), c.value_scale)) {
        keys = view_bhsd<const float>(k.data(), batch, c.heads, c.length, c.head_dim_qk);
        values = view_bhsd<const float>(v.data(), batch, c.heads, c.length, c.head_dim_vo);
    }
    inputs(const inputs&) = delete;
    inputs& operator=(const inputs&) = delete;
};

constexpr float mark = -77.0f;

void check_close(const std::vector<float>& a, const std::vector<float>& b, float tolerance) {
    REQUIRE(a.size() == b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
        CAPTURE(i);
        REQUIRE(std::abs(a[i] - b[i]) <= tolerance * (1.0f + std::abs(b[i])));
    }
}

}  // namespace

TEST_CASE("the recurrent form is absorb and read, bit for bit, on every instruction set and thread count") {
    for (const bool hedgehog : {false, true}) {
        for (const std::int32_t delay : {0, 1, 64, 149, 150, 1000}) {
            mlstm_case c;
            c.hedgehog = hedgehog;
            c.projected = hedgehog;
            c.d_v = hedgehog ? 11 : c.head_dim_vo;  // no multiple of a vector
            c.delay = delay;
            c.norm = true;
            c.skip = true;
            const inputs in(c);
            const mlstm_weights weights(c);
            with_mlstm(weights, [&](const auto& scorer) {
                const auto stepped = test::step_all(scorer, in.keys, in.values, c.sequences(), delay, mark);
                for (const isa set : {isa::portable, detected_isa()}) {
                    for (const int threads : {1, 3}) {
                        const host ctx(threads, set);
                        CHECK(same_bits(stepped, score_all(ctx, scorer, in.keys, in.values, c.sequences(),
                                                           delay, form::recurrent, mark)));
                    }
                }
            });
        }
    }
}

TEST_CASE(
    "the chunkwise form agrees with the recurrent one, and with itself on any threads and instruction set") {
    for (const std::int32_t length : {1, 63, 64, 65, 200, 700}) {
        for (const std::int32_t delay : {0, 1, 63, 64, 65, 150}) {
            if (test::short_loops && length > 65 && delay != (length == 200 ? 150 : 64)) {
                continue;
            }
            constexpr float infinite = std::numeric_limits<float>::infinity();
            for (const float forget_bias : {-infinite, -20.0f, 0.0f, 3.0f, 18.0f, infinite}) {
                mlstm_case c;
                c.length = length;
                c.delay = delay;
                c.forget_bias = forget_bias;
                c.input_scale = 5.0f;
                c.forget_scale = forget_bias == 0.0f ? 5.0f : 0.1f;
                const inputs in(c);
                const mlstm_weights weights(c);
                const auto scorer = weights.scorer<mLSTMScorer<16>>();
                const host one(1);
                const auto chunked =
                    score_all(one, scorer, in.keys, in.values, c.sequences(), delay, form::chunkwise, mark);
                check_close(
                    chunked,
                    score_all(one, scorer, in.keys, in.values, c.sequences(), delay, form::recurrent, mark),
                    2e-5f);
                const host three(3, isa::portable);
                CHECK(same_bits(chunked, score_all(three, scorer, in.keys, in.values, c.sequences(), delay,
                                                   form::fastest, mark)));
            }
        }
    }
}

TEST_CASE("a score is written for every key that leaves its window, and for no other") {
    mlstm_case c;
    c.length = 100;
    const inputs in(c, 3);
    const mlstm_weights weights(c);
    const auto scorer = weights.scorer<mLSTMScorer<>>();
    const std::int32_t lengths[3] = {100, 0, 37};
    for (const form how : {form::recurrent, form::chunkwise}) {
        for (const std::int32_t delay : {0, 10, 36, 37, 200}) {
            const host ctx(2);
            Sequences sequences{3, c.length};
            sequences.lengths = lengths;
            const auto scores = score_all(ctx, scorer, in.keys, in.values, sequences, delay, how, mark);
            for (std::int32_t b = 0; b < 3; ++b) {
                for (std::int32_t h = 0; h < c.heads; ++h) {
                    for (std::int32_t t = 0; t < c.length; ++t) {
                        const bool written = scores[test::at(b * c.heads + h, c.length, t)] != mark;
                        REQUIRE(written == (t + delay < lengths[b]));
                    }
                }
            }
        }
    }
}

TEST_CASE("rows past a sequence's length are not read") {
    mlstm_case c;
    c.length = 90;
    c.delay = 5;
    inputs in(c);
    const mlstm_weights weights(c);
    const auto scorer = weights.scorer<mLSTMScorer<>>();
    const std::int32_t length = 70;
    Sequences sequences{1, c.length};
    sequences.lengths = &length;
    const host ctx(1);
    for (const form how : {form::recurrent, form::chunkwise}) {
        const auto before = score_all(ctx, scorer, in.keys, in.values, sequences, c.delay, how, mark);
        for (std::int32_t h = 0; h < c.heads; ++h) {
            for (std::int32_t t = length; t < c.length; ++t) {
                in.k[test::at(h * c.length + t, c.head_dim_qk, 0)] = std::numeric_limits<float>::quiet_NaN();
            }
        }
        CHECK(same_bits(before, score_all(ctx, scorer, in.keys, in.values, sequences, c.delay, how, mark)));
    }
}

TEST_CASE("a score sees the tokens up to t + delay and nothing after them; a NaN spreads to those alone") {
    mlstm_case c;
    c.length = 200;
    c.delay = 30;
    c.heads = 1;
    const mlstm_weights weights(c);
    const auto scorer = weights.scorer<mLSTMScorer<>>();
    const host ctx(2);
    for (const form how : {form::recurrent, form::chunkwise}) {
        for (const bool in_value : {false, true}) {
            for (const std::int32_t at : {0, 63, 64, 101, 102, 103, 199}) {
                inputs in(c);
                const auto before =
                    score_all(ctx, scorer, in.keys, in.values, c.sequences(), c.delay, how, mark);
                auto& array = in_value ? in.v : in.k;
                array[test::at(at, 16, 3)] = std::numeric_limits<float>::quiet_NaN();
                const auto after =
                    score_all(ctx, scorer, in.keys, in.values, c.sequences(), c.delay, how, mark);
                for (std::int32_t t = 0; t + c.delay < c.length; ++t) {
                    const auto i = static_cast<std::size_t>(t);
                    CAPTURE(t);
                    CAPTURE(at);
                    if (t + c.delay >= at) {
                        REQUIRE(std::isnan(after[i]));
                    } else {
                        REQUIRE(after[i] == before[i]);
                    }
                }
            }
        }
    }
}

TEST_CASE("the delayed tokens matter: a later token changes an earlier score") {
    mlstm_case c;
    c.length = 100;
    c.delay = 30;
    c.heads = 1;
    inputs in(c);
    const mlstm_weights weights(c);
    const auto scorer = weights.scorer<mLSTMScorer<>>();
    const host ctx(1);
    const auto before =
        score_all(ctx, scorer, in.keys, in.values, c.sequences(), c.delay, form::fastest, mark);
    for (std::size_t i = 0; i < 16; ++i) {
        in.v[test::at(80, 16, 0) + i] += 10.0f;
    }
    const auto after =
        score_all(ctx, scorer, in.keys, in.values, c.sequences(), c.delay, form::fastest, mark);
    CHECK(before[49] == after[49]);
    CHECK(std::abs(before[50] - after[50]) > 1e-4f);
    CHECK(std::abs(before[69] - after[69]) > 1e-4f);
}

TEST_CASE("packed segments score as sequences of their own") {
    for (const form how : {form::recurrent, form::chunkwise}) {
        mlstm_case c;
        c.cu = {0, 0, 70, 75, 75, 150, 150};
        c.delay = 6;
        const inputs in(c);
        const mlstm_weights weights(c);
        const auto scorer = weights.scorer<mLSTMScorer<>>();
        const host ctx(2);
        const auto packed = score_all(ctx, scorer, in.keys, in.values, c.sequences(), c.delay, how, mark);
        for (std::size_t s = 0; s + 1 < c.cu.size(); ++s) {
            const std::int32_t begin = c.cu[s], length = c.cu[s + 1] - c.cu[s];
            rows_view<const float> k = in.keys, v = in.values;
            k.data += begin * k.row_stride;
            v.data += begin * v.row_stride;
            k.length = v.length = length;
            const auto alone = score_all(ctx, scorer, k, v, {1, length}, c.delay, how, mark);
            for (std::int32_t h = 0; h < c.heads; ++h) {
                for (std::int32_t t = 0; t < length; ++t) {
                    REQUIRE(alone[static_cast<std::size_t>(h * length + t)] ==
                            packed[static_cast<std::size_t>(h * c.length + begin + t)]);
                }
            }
        }
    }
}

TEST_CASE("a sequence that comes in parts scores as one that comes whole, and leaves the same state") {
    mlstm_case c;
    c.length = 230;
    c.delay = 40;
    const inputs in(c, 2);
    const mlstm_weights weights(c);
    const auto scorer = weights.scorer<mLSTMScorer<>>();
    const host ctx(2);
    for (const form how : {form::recurrent, form::chunkwise}) {
        const std::size_t size = scorer.state_size();
        std::vector<float> whole_states(4 * size), states(4 * size, 5.0f);
        const auto whole = score_all(ctx, scorer, in.keys, in.values, {2, c.length}, c.delay, how, mark,
                                     whole_states.data());
        std::vector<float> parts(whole.size(), mark);
        // Parts at chunk edges and elsewhere, empty ones among them.
        for (const bool edges : {true, false}) {
            std::fill(parts.begin(), parts.end(), mark);
            std::int32_t at = 0;
            for (const std::int32_t part : edges ? std::vector<std::int32_t>{64, 128, 38}
                                                 : std::vector<std::int32_t>{0, 1, 0, 77, 100, 52}) {
                const std::int32_t starts[2] = {at, at};
                Sequences sequences{2, part};
                sequences.starts = starts;
                BasicScoreOptions<float> options{how, states.data()};
                std::vector<std::byte> memory(
                    score_sequence_workspace_bytes(ctx, scorer, in.keys, in.values, sequences, options));
                score_sequence(ctx, scorer, in.keys, in.values, sequences, c.delay,
                               view_bhs(parts.data(), 2, c.heads, c.length), {memory.data(), memory.size()},
                               options);
                at += part;
            }
            REQUIRE(at == c.length);
            if (how == form::recurrent) {
                CHECK(same_bits(whole, parts));
                CHECK(same_bits(whole_states, states));
            } else {
                check_close(parts, whole, 2e-5f);
                check_close(states, whole_states, 2e-5f);
            }
        }
    }
}

TEST_CASE("a state that a sequence call leaves is taken up by absorb and read") {
    mlstm_case c;
    c.length = 120;
    c.delay = 20;
    c.heads = 1;
    const inputs in(c);
    const mlstm_weights weights(c);
    const auto scorer = weights.scorer<mLSTMScorer<>>();
    const host ctx(1);
    const auto stepped = test::step_all(scorer, in.keys, in.values, c.sequences(), c.delay, mark);
    for (const form how : {form::recurrent, form::chunkwise}) {
        std::vector<float> state(scorer.state_size()), scratch(scorer.scratch_size());
        static_cast<void>(
            score_all(ctx, scorer, in.keys, in.values, {1, 100}, c.delay, how, mark, state.data()));
        for (std::int32_t q = 100; q < c.length; ++q) {
            scorer.absorb(0, state.data(), in.keys.row(0, 0, q), in.values.row(0, 0, q), scratch.data());
            const float* same = state.data();
            const float score =
                scorer.read(0, same, in.keys.row(0, 0, q - 20), in.values.row(0, 0, q - 20), scratch.data());
            const float want = stepped[static_cast<std::size_t>(q - 20)];
            CHECK(std::abs(score - want) <=
                  (how == form::recurrent ? 0.0f : 2e-5f * (1.0f + std::abs(want))));
        }
    }
}

TEST_CASE("strided keys and values, and halves of one fused row, score as dense ones") {
    mlstm_case c;
    c.delay = 9;
    const inputs in(c, 2);
    const mlstm_weights weights(c);
    const host ctx(2);
    // [batch, length, heads, 2 D + 3]: k and v of one row side by side.
    const std::int64_t row = 2 * 16 + 3;
    std::vector<float> fused(test::at(std::int64_t{2} * c.length * c.heads, row, 0),
                             std::numeric_limits<float>::quiet_NaN());
    rows_view<const float> k{fused.data(), 2, c.heads, c.length, 16, row * c.length * c.heads, row,
                             c.heads * row};
    rows_view<const float> v = k;
    v.data += 16;
    for (std::int32_t b = 0; b < 2; ++b) {
        for (std::int32_t h = 0; h < c.heads; ++h) {
            for (std::int32_t t = 0; t < c.length; ++t) {
                float* to = fused.data() + test::at((b * c.length + t) * c.heads + h, row, 0);
                std::copy_n(in.keys.row(b, h, t), 16, to);
                std::copy_n(in.values.row(b, h, t), 16, to + 16);
            }
        }
    }
    const Sequences sequences{2, c.length};
    const auto scorer = weights.scorer<mLSTMScorer<16>>();
    for (const form how : {form::recurrent, form::chunkwise}) {
        CHECK(same_bits(score_all(ctx, scorer, in.keys, in.values, sequences, c.delay, how, mark),
                        score_all(ctx, scorer, k, v, sequences, c.delay, how, mark)));
    }
    LinearScorer<16> linear;
    linear.heads = c.heads;
    linear.weights.weight = weights.skip.data();
    CHECK(same_bits(score_all(ctx, linear, in.keys, in.values, sequences, 0, form::fastest, mark),
                    score_all(ctx, linear, k, v, sequences, 0, form::fastest, mark)));
}

TEST_CASE_TEMPLATE("16-bit keys and values score as the numbers they hold", T, bf16, fp16) {
    mlstm_case c;
    c.delay = 9;
    const inputs in(c);
    const auto narrow_k = test::converted<T>(in.k);
    const auto narrow_v = test::converted<T>(in.v);
    std::vector<float> wide_k(narrow_k.size()), wide_v(narrow_v.size());
    for (std::size_t i = 0; i < wide_k.size(); ++i) {
        wide_k[i] = static_cast<float>(narrow_k[i]);
    }
    for (std::size_t i = 0; i < wide_v.size(); ++i) {
        wide_v[i] = static_cast<float>(narrow_v[i]);
    }
    const auto view = [&](const auto& data) { return view_bhsd(data.data(), 1, c.heads, c.length, 16); };
    const mlstm_weights weights(c);
    const host ctx(2);
    const auto check = [&](const auto& scorer, form how) {
        using S = std::decay_t<decltype(scorer)>;
        CHECK(same_bits(
            score_all<S, T>(ctx, scorer, view(narrow_k), view(narrow_v), c.sequences(), c.delay, how, mark),
            score_all<S, float>(ctx, scorer, view(wide_k), view(wide_v), c.sequences(), c.delay, how, mark)));
    };
    check(weights.scorer<mLSTMScorer<16>>(), form::recurrent);
    check(weights.scorer<mLSTMScorer<16>>(), form::chunkwise);
    LinearScorer<16> linear;
    linear.heads = c.heads;
    linear.weights.weight = weights.skip.data();
    check(linear, form::fastest);
}

TEST_CASE("forget gates near 1 forget at their own pace over 100,000 tokens, in fp32") {
    // One head, the first token e^5 times as heavy as each of the others, and 1 - f = 3.05e-6 of everything
    // forgotten at each step. The stabilizer moves by as little from 30, where floats stand 1.9e-6 apart:
    // kept in one float, it would forget at a rate that is off by a third.
    const float w_i[2] = {5.0f, 0.0f};
    const float zero[2] = {0.0f, 0.0f};
    const float input_bias = 25.0f;
    const float forget_bias = 12.7f;
    const float one = 1.0f;
    mLSTMScorer<1, Softmax, DirectValues> scorer;
    scorer.heads = 1;
    scorer.weights.w_q = scorer.weights.w_k = scorer.weights.w_f = zero;
    scorer.weights.w_i = w_i;
    scorer.weights.b_i = &input_bias;
    scorer.weights.b_f = &forget_bias;
    scorer.weights.readout = &one;
    const auto run = [&](auto real) {
        using Real = decltype(real);
        std::vector<Real> state(scorer.state_size()), scratch(scorer.scratch_size());
        const Real first[1] = {1}, rest[1] = {0};
        scorer.reset(state.data());
        scorer.absorb(0, state.data(), first, first, scratch.data());
        for (int t = 1; t < 100000; ++t) {
            scorer.absorb(0, state.data(), rest, rest, scratch.data());
        }
        return static_cast<double>(state[0]) / static_cast<double>(state[1]);  // h: the first token's share
    };
    const double log_f = -std::log1p(std::exp(-static_cast<double>(forget_bias)));
    const double n = 100000.0;
    const double heavy = std::exp(5.0 + log_f * (n - 1.0));
    const double others = std::expm1(log_f * (n - 1.0)) / std::expm1(log_f);
    const double share = heavy / (heavy + others);
    CHECK(std::abs(run(0.0) / share - 1.0) < 1e-9);
    // n rounding errors of u in f, and as many in the sum of z: 2 n u = 1.2%.
    CHECK(std::abs(run(0.0f) / share - 1.0) < 2.0 * n * 0x1p-24);
}
