// ConvScorer over whole sequences: against the reference, cuts, continued sequences, dropout,
// gradients, refusals.
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/initialize.hpp>

#include "../../support/cases.hpp"
#include "../../support/differences.hpp"
#include "../../support/normal.hpp"
#include "../../support/refusal.hpp"
#include "../../support/vectors.hpp"
#include "conv_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <random>

using namespace kvpolicy;
using test::conv_case;
using test::conv_weights;

namespace {

constexpr float mark = -77.0f;
constexpr float unscored = -std::numeric_limits<float>::infinity();

template <class T>
void compare(double tolerance) {
    const auto file = kvpolicy_test::vectors::load("conv.kvpv");
    const auto& cases = file.get<std::int32_t>("cases");
    const auto& edges = file.get<std::int32_t>("cu");
    const auto& edge_offsets = file.get<std::int32_t>("cu_offsets");
    for (std::int64_t i = 0; i < cases.shape[0]; ++i) {
        CAPTURE(i);
        const conv_case c(cases.row(i), file.get<float>("bases")[i],
                          {edges.data() + edge_offsets[i], edges.data() + edge_offsets[i + 1]});
        const conv_weights weights(c);
        const double* want = file.get<double>("scores").data() + file.get<std::int32_t>("offsets")[i];
        const auto keys = test::converted<T>(c.keys());
        const auto values = test::converted<T>(c.values());
        const auto k = view_bhsd<const T>(keys.data(), 1, c.heads, c.length, c.head_dim_qk);
        const auto v = view_bhsd<const T>(values.data(), 1, c.heads, c.length, c.head_dim_vo);
        std::vector<T> first;
        for (const isa set : {isa::portable, detected_isa()}) {
            for (const int threads : {1, 3}) {
                const auto got =
                    test::score_all<ConvScorer<>, T>(host(threads, set), weights.scorer(), k, v,
                                                     c.sequences(), c.delay, form::fastest, T(mark));
                for (std::size_t t = 0; t < got.size(); ++t) {
                    if (std::isnan(want[t])) {
                        REQUIRE(got[t] == T(unscored));
                    } else {
                        REQUIRE(std::abs(static_cast<double>(got[t]) - want[t]) <=
                                tolerance * (1.0 + std::abs(want[t])));
                    }
                }
                first = first.empty() ? got : first;
                REQUIRE(test::same_bits(first, got));
            }
        }
    }
}

struct Inputs {
    test::Tensor<double> k, v;
    test::Plane<double> d;
    Inputs(const conv_case& c, std::int32_t batch, unsigned seed)
        : k(batch, c.heads, c.length, c.head_dim_qk),
          v(batch, c.heads, c.length, c.head_dim_vo),
          d(batch, c.heads, c.length) {
        std::mt19937 generator(seed);
        k.fill_normal(generator);
        v.fill_normal(generator);
        test::Normal<double> normal;
        for (double& x : d.data) {
            x = normal(generator);
        }
    }
};

/// The forward pass in double, through the library's own forward call, which the reference has checked.
double loss_of(const host& ctx, const ConvScorer<>& scorer, const Inputs& in, const Sequences& sequences,
               std::int32_t delay, const Dropout& dropout) {
    const auto k = in.k.view();
    const auto v = in.v.view();
    BasicScoreOptions<double> options;
    options.dropout = dropout;
    test::Plane<double> scores(k.batch, k.heads, k.length);
    test::Workspace workspace(score_sequence_workspace_bytes(ctx, scorer, k, v, sequences, options));
    score_sequence(ctx, scorer, k, v, sequences, delay, scores.view(), workspace, options);
    double sum = 0.0;
    for (std::size_t i = 0; i < scores.data.size(); ++i) {
        // A key without a score adds nothing.
        sum += std::isinf(scores.data[i]) ? 0.0 : scores.data[i] * in.d.data[i];
    }
    return sum;
}

struct Gradients {
    std::vector<std::vector<double>> arrays;
    ConvParameters<double> views;
    explicit Gradients(const ConvScorer<>& scorer) {
        for_each_parameter(scorer, views, [&](const char*, double*&, std::size_t count, bool) {
            arrays.emplace_back(count, 0.0);
        });
        std::size_t i = 0;
        for_each_parameter(scorer, views, [&](const char*, double*& array, std::size_t, bool) {
            array = arrays[i++].data();
        });
    }
};

double largest(const std::vector<double>& values) {
    double most = 0.0;
    for (const double x : values) {
        most = std::max(most, std::abs(x));
    }
    return most;
}

void check_gradients(conv_case c, const Dropout& dropout, std::int32_t batch = 1,
                     const std::int32_t* lengths = nullptr) {
    CAPTURE(c.seed);
    conv_weights weights(c, 0.25f);
    for (auto* array : {&weights.w[0], &weights.w[1], &weights.w[2], &weights.b[0], &weights.b[1],
                        &weights.b[2], &weights.readout, &weights.readout_bias}) {
        for (float& x : *array) {
            x = std::nearbyint(x * 4096.0f) / 4096.0f;  // +- 2^-9 stays exact
        }
    }
    const ConvScorer<> scorer = weights.scorer();
    const host ctx{2};
    Inputs in(c, batch, static_cast<unsigned>(c.seed));
    Sequences sequences = c.sequences();
    sequences.batch = batch;
    sequences.lengths = lengths;
    const auto loss = [&] { return loss_of(ctx, scorer, in, sequences, c.delay, dropout); };
    Gradients got(scorer);
    test::Tensor<double> d_k(batch, c.heads, c.length, c.head_dim_qk),
        d_v(batch, c.heads, c.length, c.head_dim_vo);
    d_k.fill(-3.0f);
    d_v.fill(-3.0f);
    const Inputs& fixed = in;
    ScoreBackward<double> call{fixed.k.view(), fixed.v.view(), sequences, c.delay, fixed.d.view()};
    call.d_k = d_k.view();
    call.d_v = d_v.view();
    call.dropout = dropout;
    test::Workspace workspace(score_sequence_backward_workspace_bytes(ctx, scorer, call));
    score_sequence_backward(ctx, scorer, call, got.views, workspace);

    auto parameters = scorer.weights;
    std::size_t i = 0;
    for_each_parameter(
        scorer, parameters, [&](const char* name, const float*& array, std::size_t count, bool) {
            const std::vector<double>& d = got.arrays[i++];
            if (array == nullptr) {
                return;
            }
            CAPTURE(name);
            const double scale = largest(d);
            CHECK(scale > 0.0);
            for (std::size_t at = 0; at < count; at += count / 9 + 1) {
                float* x = const_cast<float*>(array) + at;
                const double slope = test::difference(
                    static_cast<double>(*x), 0x1p-9, [&](double to) { *x = static_cast<float>(to); }, loss);
                CAPTURE(at);
                CHECK(test::relative(d[at], slope, scale) < 1e-6);
            }
        });
    const auto check_rows = [&](test::Tensor<double>& x, test::Tensor<double>& d) {
        double scale = 0.0;
        for (const double y : d.data) {
            scale = std::max(scale, y == -3.0 ? 0.0 : std::abs(y));
        }
        for (std::int32_t b = 0; b < batch; ++b) {
            const std::int32_t length = sequences.length_of(b);
            for (std::int32_t h = 0; h < c.heads; ++h) {
                for (std::int32_t t = 0; t < c.length; t += 3) {
                    const std::int32_t at = (t * 5 + h) % x.dim;
                    CAPTURE(t);
                    if (t >= length) {
                        CHECK(d.view().row(b, h, t)[at] == -3.0);
                        continue;
                    }
                    double& one = x.view().row(b, h, t)[at];
                    const double slope = test::difference(
                        one, 0x1p-9, [&](double to) { one = to; }, loss);
                    CHECK(test::relative(d.view().row(b, h, t)[at], slope, scale) < 1e-6);
                }
            }
        }
    };
    check_rows(in.k, d_k);
    check_rows(in.v, d_v);

    // Weights alone, on another number of threads: the same bits.
    Gradients again(scorer);
    ScoreBackward<double> detached{fixed.k.view(), fixed.v.view(), sequences, c.delay, fixed.d.view()};
    detached.dropout = dropout;
    const host one{1};
    test::Workspace less(score_sequence_backward_workspace_bytes(one, scorer, detached));
    score_sequence_backward(one, scorer, detached, again.views, less);
    for (std::size_t j = 0; j < got.arrays.size(); ++j) {
        CHECK(test::same_bits(got.arrays[j], again.arrays[j]));
    }
}

}  // namespace

TEST_CASE("scores in double are the reference's") { compare<double>(1e-12); }

// Sums of up to 3 * 32 products, one after another through three layers, whose weights of up to 1/2 let
// errors grow by up to 1/2 (3 * 32)^(1/2) a layer; n^(1/2) u is typical of each, and angles up to 150 are off
// by half a unit in the last place.
TEST_CASE("scores in fp32 lie within rounding of the reference's") {
    compare<float>(150 * 0x1p-24 + 3 * 96 * 0x1p-24);
}

TEST_CASE("a span gives the same bits however it is cut") {
    conv_case c;
    c.length = 90;
    const conv_weights weights(c);
    const ConvScorer<> scorer = weights.scorer();
    const auto keys = c.keys(), values = c.values();
    const auto k = view_bhsd(keys.data(), 1, c.heads, c.length, c.head_dim_qk);
    const auto v = view_bhsd(values.data(), 1, c.heads, c.length, c.head_dim_vo);
    const auto whole =
        test::score_all<ConvScorer<>, float>(host{1}, scorer, k, v, c.sequences(), 13, form::fastest, mark);
    std::vector<float> scratch(scorer.span_scratch_size());
    for (const std::int32_t size : {1, 2, 7, 63, 64}) {
        bool same = true;
        for (std::int32_t t = 6; t + 13 < c.length; t += size) {
            const std::int32_t count = std::min(size, c.length - 13 - t);
            float scores[64];
            scorer.score_span(1, t, count, k.row(0, 1, t - 6), v.row(0, 1, t - 6), scores, scratch.data());
            same = same && std::equal(scores, scores + count, whole.data() + c.length + t);
        }
        CHECK(same);
    }
}

TEST_CASE("a score sees six tokens to either side, every other one, and zeros before the beginning") {
    conv_case c;
    c.heads = 1;
    c.length = 40;
    const conv_weights weights(c);
    const auto values = c.values();
    const auto v = view_bhsd(values.data(), 1, 1, c.length, c.head_dim_vo);
    const auto run = [&](const std::vector<float>& keys) {
        return test::score_all<ConvScorer<>, float>(host{1}, weights.scorer(),
                                                    view_bhsd(keys.data(), 1, 1, c.length, c.head_dim_qk), v,
                                                    c.sequences(), 13, form::fastest, mark);
    };
    const auto before = run(c.keys());
    for (const std::int32_t changed : {0, 3, 11, 26, 30, 39}) {
        auto keys = c.keys();
        keys[static_cast<std::size_t>(std::int64_t{changed} * c.head_dim_qk)] += 1.0f;
        const auto after = run(keys);
        for (std::int32_t t = 0; t + 13 < c.length; ++t) {
            const std::int32_t away = std::abs(t - changed);
            const auto at = static_cast<std::size_t>(t);
            CHECK((before[at] != after[at]) == (away <= 6 && away % 2 == 0));
        }
    }
}

TEST_CASE("chunks of a sequence get the scores of the whole, batches and lengths apart") {
    conv_case c;
    c.length = 100;
    const conv_weights weights(c);
    const ConvScorer<> scorer = weights.scorer();
    const host ctx{2};
    test::Tensor<bf16> k(2, c.heads, c.length, c.head_dim_qk), v(2, c.heads, c.length, c.head_dim_vo);
    std::mt19937 generator(4);
    k.fill_normal(generator);
    v.fill_normal(generator);
    const test::Tensor<bf16>&ck = k, &cv = v;
    const std::int32_t ends[] = {100, 57};
    for (const std::int32_t delay : {6, 13, 30}) {
        const auto whole = test::score_all<ConvScorer<>, bf16>(ctx, scorer, ck.view(), cv.view(),
                                                               {.batch = 2, .length = 100, .lengths = ends},
                                                               delay, form::fastest, mark);
        for (const std::int32_t chunk : {1, 9, 40}) {
            test::Plane<float> scores(2, c.heads, c.length, mark);
            for (std::int32_t from = 0; from < 100; from += chunk) {
                const std::int32_t starts[] = {std::min(from, 100), std::min(from, 57)};
                const std::int32_t lengths[] = {std::min(chunk, 100 - starts[0]),
                                                std::min(chunk, 57 - starts[1])};
                const Sequences part{.batch = 2, .length = chunk, .lengths = lengths, .starts = starts};
                test::Workspace memory(
                    score_sequence_workspace_bytes(ctx, scorer, ck.view(), cv.view(), part));
                score_sequence(ctx, scorer, ck.view(), cv.view(), part, delay, scores.view(), memory);
            }
            CHECK(test::same_bits(scores.data, whole));
        }
        for (std::int32_t t = 0; t < 100; ++t) {
            const float score = whole[static_cast<std::size_t>(2 * 100 + t)];
            CHECK((score == mark) == (t >= 57));
            CHECK((score == unscored) == (t < 57 && t + delay >= 57));
        }
    }
}

TEST_CASE("RoPE: its own frequencies, and undoing it gives the key back") {
    const std::int32_t dim = 16;
    std::mt19937 generator(3);
    test::Normal<double> normal;
    for (const rope_layout layout : {rope_layout::interleaved, rope_layout::half_split}) {
        for (const std::int32_t dims : {0, 6}) {
            const Rope rope{layout, 500000.0f, dims};
            std::vector<float> f(8), own{0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.01f, 0.02f, 0.03f};
            rope.fill_frequencies(dim, f.data());
            CHECK(f[0] == 1.0f);
            std::vector<double> key(dim), turned;
            for (double& x : key) {
                x = normal(generator);
            }
            turned = key;
            rope.apply(123457, dim, f.data(), turned.data());
            const std::size_t second = layout == rope_layout::interleaved ? 1 : dims == 0 ? 8 : 3;
            CHECK(turned[0] ==
                  doctest::Approx(key[0] * std::cos(123457.0) - key[second] * std::sin(123457.0)));
            CHECK(turned[second] ==
                  doctest::Approx(key[0] * std::sin(123457.0) + key[second] * std::cos(123457.0)));
            if (dims == 6) {
                CHECK(turned[7] == key[7]);
            }
            rope.undo(123457, dim, f.data(), turned.data());
            for (std::size_t i = 0; i < key.size(); ++i) {
                CHECK(std::abs(turned[i] - key[i]) < 1e-15 * 8);
            }
            Rope scaled = rope;
            scaled.frequencies = own.data();
            scaled.fill_frequencies(dim, f.data());
            CHECK(std::equal(f.begin(), f.begin() + scaled.rotated(dim) / 2, own.begin()));
        }
    }
}

// Angles up to position 2^24 are products in fp32; those beyond are within a rounding of double.
TEST_CASE("RoPE at positions that fp32 does not tell apart") {
    const std::int32_t dim = 16;
    const Rope rope{rope_layout::half_split, 10000.0f};
    for (const position_t first :
         {(position_t{1} << 24) - 2, (position_t{1} << 30) - 2, (position_t{1} << 40)}) {
        for (position_t t = first; t < first + 5; ++t) {
            CAPTURE(t);
            std::vector<float> key(dim, 0.0f);
            std::fill_n(key.begin(), dim / 2, 1.0f);
            rope.apply(t, dim, nullptr, key.data());
            for (std::int32_t i = 0; i < dim / 2; ++i) {
                const float f = rope.frequency(dim, i);
                const double angle = t <= (position_t{1} << 24)
                                         ? static_cast<double>(static_cast<float>(t) * f)
                                         : static_cast<double>(t) * static_cast<double>(f);
                CHECK(std::abs(static_cast<double>(key[static_cast<std::size_t>(i)]) - std::cos(angle)) <=
                      0x1p-24);
                CHECK(std::abs(static_cast<double>(key[static_cast<std::size_t>(i + dim / 2)]) -
                               std::sin(angle)) <= 0x1p-24);
            }
            rope.undo(t, dim, nullptr, key.data());
            for (std::int32_t i = 0; i < dim; ++i) {
                CHECK(std::abs(key[static_cast<std::size_t>(i)] - (i < dim / 2 ? 1.0f : 0.0f)) <=
                      4 * 0x1p-24f);
            }
        }
    }
}

TEST_CASE("dropout: by seed, at its rate, and with the mean kept") {
    conv_case c;
    c.heads = 1;
    c.length = 4000;
    const conv_weights weights(c);
    const ConvScorer<> scorer = weights.scorer();
    const auto keys = c.keys(), values = c.values();
    const auto k = view_bhsd(keys.data(), 1, 1, c.length, c.head_dim_qk);
    const auto v = view_bhsd(values.data(), 1, 1, c.length, c.head_dim_vo);
    const auto run = [&](float rate, std::uint64_t seed, int threads) {
        const host ctx{threads};
        ScoreOptions options;
        options.dropout = {rate, seed};
        std::vector<float> scores(static_cast<std::size_t>(c.length), 0.0f);
        test::Workspace memory(score_sequence_workspace_bytes(ctx, scorer, k, v, c.sequences(), options));
        score_sequence(ctx, scorer, k, v, c.sequences(), 13, view_bhs(scores.data(), 1, 1, c.length), memory,
                       options);
        return scores;
    };
    CHECK(test::same_bits(run(0.1f, 5, 1), run(0.1f, 5, 3)));
    CHECK_FALSE(test::same_bits(run(0.1f, 5, 1), run(0.1f, 6, 1)));
    CHECK(test::same_bits(run(0.0f, 5, 1), run(0.0f, 6, 1)));

    std::vector<float> row(1000, 1.0f);
    std::int64_t dropped = 0;
    double sum = 0.0;
    for (std::int64_t t = 0; t < 100; ++t) {
        std::fill(row.begin(), row.end(), 1.0f);
        DropoutStream{{0.1f, 77}, 3}.apply(2, t, 1000, row.data());
        for (const float x : row) {
            dropped += x == 0.0f ? 1 : 0;
            sum += static_cast<double>(x);
        }
    }
    // 100000 draws: a standard deviation is 95 of them.
    CHECK(std::abs(static_cast<double>(dropped) - 10000.0) < 5 * 95);
    CHECK(std::abs(sum - 100000.0) < 5 * 95 / 0.9);
}

TEST_CASE("gradients of weights and inputs by differences, with and without dropout") {
    conv_case c;
    c.length = 34;
    check_gradients(c, {});
    check_gradients(c, {0.25f, 9});
    c.seed = 3, c.layout = rope_layout::interleaved, c.head_dim_qk = 10, c.head_dim_vo = 6, c.dims = 4,
    c.biases = false, c.delay = 15;
    check_gradients(c, {0.1f, 2});
    c.seed = 4, c.cu = {0, 4, 18, 34};
    check_gradients(c, {0.5f, 3});
    c.seed = 5, c.cu.clear(), c.biases = true;
    const std::int32_t lengths[] = {34, 21, 15};
    check_gradients(c, {0.1f, 4}, 3, lengths);
    // Of all keys that have their later neighbors.
    c.seed = 6, c.delay = 6;
    check_gradients(c, {});
    check_gradients(c, {0.1f, 4}, 3, lengths);
    c.seed = 7, c.delay = 9, c.cu = {0, 4, 11, 18, 34};
    check_gradients(c, {0.25f, 5});
    c.delay = 6, c.biases = false;
    check_gradients(c, {});
}

TEST_CASE("a delay of the reach scores all keys with six keys after them, by the equations") {
    conv_case c;
    c.cu = {0, 5, 24, 60};
    const conv_weights weights(c);
    const auto keys = c.keys(), values = c.values();
    const auto k = view_bhsd(keys.data(), 1, c.heads, c.length, c.head_dim_qk);
    const auto v = view_bhsd(values.data(), 1, c.heads, c.length, c.head_dim_vo);
    const ConvScorer<> scorer = weights.scorer();
    const auto all =
        test::score_all<ConvScorer<>, float>(host{1}, scorer, k, v, c.sequences(), 6, form::fastest, mark);
    const auto some =
        test::score_all<ConvScorer<>, float>(host{2}, scorer, k, v, c.sequences(), 13, form::fastest, mark);
    for (std::int32_t h = 0; h < c.heads; ++h) {
        // y_l[t] of a segment, from its definition.
        const auto y = [&](const auto& self, std::int32_t layer, std::int32_t begin,
                           std::int32_t t) -> std::vector<double> {
            std::vector<double> out(static_cast<std::size_t>(scorer.channels(layer)), 0.0);
            if (layer == 0) {
                if (t < 0) {
                    return out;
                }
                std::copy_n(k.row(0, h, begin + t), c.head_dim_qk, out.begin());
                std::copy_n(v.row(0, h, begin + t), c.head_dim_vo, out.begin() + c.head_dim_qk);
                const std::int32_t half = c.head_dim_qk / 2;
                for (std::int32_t i = 0; i < half; ++i) {
                    const double angle = -t * std::pow(10000.0, -2.0 * i / c.head_dim_qk);
                    double &x = out[static_cast<std::size_t>(i)],
                           &z = out[static_cast<std::size_t>(i + half)];
                    const double turned = x * std::cos(angle) - z * std::sin(angle);
                    z = x * std::sin(angle) + z * std::cos(angle), x = turned;
                }
                return out;
            }
            const auto width = static_cast<std::size_t>(scorer.channels(layer)),
                       inputs = static_cast<std::size_t>(scorer.channels(layer - 1));
            const auto& w = weights.w[layer - 1];
            const auto& b = weights.b[layer - 1];
            for (std::size_t n = 0; n < width; ++n) {
                out[n] = static_cast<double>(b[static_cast<std::size_t>(h) * width + n]);
            }
            for (std::size_t tap = 0; tap < 3; ++tap) {
                const auto in = self(self, layer - 1, begin, t + 2 * static_cast<std::int32_t>(tap) - 2);
                for (std::size_t n = 0; n < width; ++n) {
                    for (std::size_t i = 0; i < inputs; ++i) {
                        const std::size_t row = (static_cast<std::size_t>(h) * width + n) * 3 + tap;
                        out[n] += static_cast<double>(w[row * inputs + i]) * in[i];
                    }
                }
            }
            for (double& x : out) {
                x /= 1.0 + std::exp(-x);
            }
            return out;
        };
        for (std::size_t i = 0; i + 1 < c.cu.size(); ++i) {
            for (std::int32_t t = c.cu[i]; t < c.cu[i + 1]; ++t) {
                CAPTURE(t);
                const auto at = static_cast<std::size_t>(h * c.length + t);
                if (t + 6 >= c.cu[i + 1]) {
                    REQUIRE(all[at] == unscored);
                    continue;
                }
                REQUIRE(some[at] == (t + 13 < c.cu[i + 1] ? all[at] : unscored));
                double score = static_cast<double>(weights.readout_bias[static_cast<std::size_t>(h)]);
                const auto last = y(y, 3, c.cu[i], t - c.cu[i]);
                for (std::size_t n = 0; n < last.size(); ++n) {
                    score +=
                        static_cast<double>(weights.readout[static_cast<std::size_t>(h) * last.size() + n]) *
                        last[n];
                }
                REQUIRE(std::abs(static_cast<double>(all[at]) - score) <= 1e-4 * (1.0 + std::abs(score)));
            }
        }
    }
}

TEST_CASE("bad input to ConvScorer gets a sentence") {
    conv_case c;
    c.length = 30;
    const conv_weights weights(c);
    ConvScorer<> scorer = weights.scorer();
    const auto keys = c.keys(), values = c.values();
    const auto k = view_bhsd(keys.data(), 1, c.heads, c.length, c.head_dim_qk);
    const auto v = view_bhsd(values.data(), 1, c.heads, c.length, c.head_dim_vo);
    std::int32_t delay = 13;
    ScoreOptions options;
    const auto run = [&] {
        const host ctx{1};
        test::Plane<float> scores(1, c.heads, c.length);
        test::Workspace memory(score_sequence_workspace_bytes(ctx, scorer, k, v, c.sequences(), options));
        score_sequence(ctx, scorer, k, v, c.sequences(), delay, scores.view(), memory, options);
    };
    run();
    delay = 5;
    CHECK_REFUSED(run(), "delay: 5 is not allowed; it must be 6 or more, since a score reads 6 later keys");
    delay = 13;
    options.dropout.rate = 1.0f;
    CHECK_REFUSED(run(), "dropout.rate: 1 is not allowed; it must be 0 (none) or more, and below 1");
    options.dropout.rate = 0.0f;
    scorer.batch = -1;
    CHECK_REFUSED(run(), "ConvScorer.batch: -1");
    scorer.batch = 0;
    scorer.rope.dims = 5;
    CHECK_REFUSED(run(),
                  "ConvScorer.rope.dims: 5 is not allowed; it must be an even number up to the keys' 8");
    scorer.rope.dims = 10;
    CHECK_REFUSED(run(), "ConvScorer.rope.dims: 10");
    scorer.rope.dims = 0;
    scorer.rope.base = 0.0f;
    CHECK_REFUSED(run(), "ConvScorer.rope.base: 0");
    scorer.rope.base = 1e4f;
    scorer.rope.layout = static_cast<rope_layout>(9);
    CHECK_REFUSED(run(), "ConvScorer.rope.layout: 9");
    scorer.rope.layout = rope_layout::none;
    scorer.weights.w2 = nullptr;
    CHECK_REFUSED(run(), "ConvScorer.weights.w2: null");
    scorer = weights.scorer();
    scorer.heads = 3;
    CHECK_REFUSED(run(), "ConvScorer.heads: 3");

    // A scorer without dropout says so.
    std::vector<float> weight(static_cast<std::size_t>(c.heads * (c.head_dim_qk + c.head_dim_vo)));
    LinearScorer<> linear;
    linear.heads = c.heads, linear.head_dim_qk = c.head_dim_qk, linear.head_dim_vo = c.head_dim_vo;
    linear.weights.weight = weight.data();
    options.dropout.rate = 0.1f;
    test::Plane<float> scores(1, c.heads, c.length);
    test::Workspace memory(1 << 16);
    CHECK_REFUSED(score_sequence(host{1}, linear, k, v, c.sequences(), 0, scores.view(), memory, options),
                  "dropout.rate: 0.1 is not allowed; it must be 0, since this scorer has no dropout");
}

TEST_CASE("a start: scores of 1, activations of a steady size, by seed") {
    conv_case c;
    c.head_dim_qk = c.head_dim_vo = 32;
    conv_weights weights(c);
    ConvScorer<> scorer = weights.scorer();
    const auto into = [&] {
        return ConvParameters<float>{weights.w[0].data(),    weights.b[0].data(),        weights.w[1].data(),
                                     weights.b[1].data(),    weights.w[2].data(),        weights.b[2].data(),
                                     weights.readout.data(), weights.readout_bias.data()};
    };
    initialize(scorer, into(), 7);
    const auto first = weights.w[1];
    double squares = 0.0;
    for (const float x : first) {
        squares += static_cast<double>(x * x);
    }
    CHECK(squares / static_cast<double>(first.size()) == doctest::Approx(2.0 / (3 * 32)).epsilon(0.1));
    CHECK(std::all_of(weights.readout.begin(), weights.readout.end(), [](float x) { return x == 0.0f; }));
    CHECK(std::all_of(weights.b[0].begin(), weights.b[0].end(), [](float x) { return x == 0.0f; }));
    CHECK(std::all_of(weights.readout_bias.begin(), weights.readout_bias.end(),
                      [](float x) { return x == 1.0f; }));
    initialize(scorer, into(), 8);
    CHECK(first != weights.w[1]);
    initialize(scorer, into(), 7);
    CHECK(first == weights.w[1]);
}
