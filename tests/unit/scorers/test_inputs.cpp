// The MLP's other inputs: WG-KV's write gate on the stored key, SP-KV's predictor on hidden states.
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/hidden.hpp>
#include <kvpolicy/scorers/initialize.hpp>

#include "../../support/cases.hpp"
#include "../../support/differences.hpp"
#include "../../support/normal.hpp"
#include "../../support/refusal.hpp"
#include "../../support/vectors.hpp"
#include "scorer_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace kvpolicy;

namespace {

const kvpolicy_test::vectors& file() {
    static const kvpolicy_test::vectors loaded = kvpolicy_test::vectors::load("inputs.kvpv");
    return loaded;
}

/// A case of inputs.kvpv: columns as tests/reference/inputs.py has them.
struct input_case {
    std::int32_t hidden_state, dim, hidden, heads, length, layout, dims, seed;
    std::vector<std::int32_t> cu;
    std::vector<float> k, w1, b1, w2, b2;

    explicit input_case(std::int64_t i) {
        const std::int32_t* n = file().get<std::int32_t>("cases").row(i);
        hidden_state = n[0], dim = n[1], hidden = n[2], heads = n[3], length = n[4], layout = n[5],
        dims = n[6], seed = n[7];
        const auto& edges = file().get<std::int32_t>("cu");
        const auto& offsets = file().get<std::int32_t>("cu_offsets");
        cu.assign(edges.data() + offsets[i], edges.data() + offsets[i + 1]);
        const std::int32_t layers = hidden_state != 0 ? 1 : heads, inputs = hidden_state != 0 ? dim : 2 * dim;
        k = test::draw(seed, test::array::k, std::int64_t{layers} * length * dim, 2.0f);
        w1 = test::draw(seed, test::array::w1, std::int64_t{layers} * hidden * inputs, 0.5f);
        b1 = test::draw(seed, test::array::b1, std::int64_t{layers} * hidden, 1.0f);
        w2 = test::draw(seed, test::array::w2, std::int64_t{heads} * hidden, 1.0f);
        b2 = test::draw(seed, test::array::b2, heads, 1.0f);
    }
    [[nodiscard]] Sequences sequences() const {
        Sequences all{1, length, nullptr, nullptr, nullptr, 0};
        if (!cu.empty()) {
            all.cu_seqlens = cu.data();
            all.segments = static_cast<std::int32_t>(cu.size()) - 1;
        }
        return all;
    }
    [[nodiscard]] WriteGateScorer<> gate() const {
        WriteGateScorer<> s;
        s.heads = heads, s.head_dim_qk = dim, s.head_dim_vo = 4, s.hidden = hidden;
        s.weights = {w1.data(), b1.data(), w2.data(), b2.data()};
        s.input.rope = {static_cast<rope_layout>(layout), 10000.0f, dims};
        return s;
    }
    [[nodiscard]] UtilityPredictor predictor() const {
        UtilityPredictor s;
        s.heads = heads, s.hidden = hidden;
        s.input.width = dim;
        s.weights = {w1.data(), b1.data(), w2.data(), b2.data()};
        return s;
    }
};

template <class T>
std::vector<compute_t<T>> run_hidden(const host& ctx, const UtilityPredictor& scorer,
                                     const std::vector<T>& states, const Sequences& sequences,
                                     std::int32_t length) {
    using Real = compute_t<T>;
    std::vector<Real> scores(static_cast<std::size_t>(scorer.heads * length), Real(-77));
    test::Workspace workspace(score_hidden_workspace_bytes<UtilityPredictor, Real>(
        ctx, scorer, view_bhsd(states.data(), 1, 1, length, scorer.input.width), sequences));
    score_hidden(ctx, scorer, view_bhsd(states.data(), 1, 1, length, scorer.input.width), sequences,
                 view_bhs(scores.data(), 1, scorer.heads, length), workspace);
    return scores;
}

template <class T>
void compare(double tolerance) {
    for (std::int64_t i = 0; i < file().get<std::int32_t>("cases").shape[0]; ++i) {
        CAPTURE(i);
        const input_case c(i);
        const double* want = file().get<double>("scores").data() + file().get<std::int32_t>("offsets")[i];
        const auto rows = test::converted<T>(c.k);
        const std::vector<T> values(static_cast<std::size_t>(c.heads * c.length * 4));
        std::vector<compute_t<T>> first;
        for (const int threads : {1, 3}) {
            for (const isa set : {isa::portable, detected_isa()}) {
                const host ctx(threads, set);
                const auto got =
                    c.hidden_state != 0
                        ? run_hidden<T>(ctx, c.predictor(), rows, c.sequences(), c.length)
                        : test::score_all<WriteGateScorer<>, T>(
                              ctx, c.gate(), view_bhsd<const T>(rows.data(), 1, c.heads, c.length, c.dim),
                              view_bhsd<const T>(values.data(), 1, c.heads, c.length, 4), c.sequences(), 0,
                              form::fastest, T(-77));
                first = first.empty() ? got : first;
                REQUIRE(test::same_bits(got, first));
                for (std::size_t t = 0; t < got.size(); ++t) {
                    REQUIRE(std::abs(static_cast<double>(got[t]) - want[t]) <=
                            tolerance * (1.0 + std::abs(want[t])));
                }
            }
        }
    }
}

double largest(const std::vector<double>& values) {
    double most = 0.0;
    for (const double x : values) {
        most = std::max(most, std::abs(x));
    }
    return most;
}

void quantize(std::vector<float>& values) {
    for (float& x : values) {
        x = std::nearbyint(x * 4096.0f) / 4096.0f;
    }
}

/// Every array of parameters, a few entries each, by differences of loss().
template <class Loss>
void check_weights(input_case& c, const std::vector<std::vector<double>>& d, Loss&& loss) {
    std::vector<float>* arrays[] = {&c.w1, &c.b1, &c.w2, &c.b2};
    for (std::size_t a = 0; a < 4; ++a) {
        CAPTURE(a);
        const double scale = largest(d[a]);
        CHECK(scale > 0.0);
        for (std::size_t at = 0; at < arrays[a]->size(); at += arrays[a]->size() / 9 + 1) {
            float& x = (*arrays[a])[at];
            const double slope = test::difference(
                static_cast<double>(x), 0x1p-8, [&](double to) { x = static_cast<float>(to); }, loss);
            CHECK(test::relative(d[a][at], slope, scale) < 1e-6);
        }
    }
}

}  // namespace

TEST_CASE("scores in double are the reference's") { compare<double>(1e-12); }

// As for the other MLPs (test_stateless): at most 128 products of magnitude about 1, twice, and for the gate
// angles up to 100 that are off by half a unit in the last place.
TEST_CASE("scores in fp32 lie within rounding of the reference's") {
    compare<float>((2.0 * 128 + 100) * 0x1p-24);
}

TEST_CASE("the write gate: gradients by differences, through both norms and the rotation, packed or not") {
    for (std::int64_t i = 0; i < file().get<std::int32_t>("cases").shape[0]; ++i) {
        input_case c(i);
        if (c.hidden_state != 0 || c.length > 40) {
            continue;
        }
        CAPTURE(i);
        for (auto* array : {&c.w1, &c.b1, &c.w2, &c.b2}) {
            quantize(*array);
        }
        const host ctx{2};
        auto keys = test::converted<double>(c.k);
        const std::vector<double> values(static_cast<std::size_t>(c.heads * c.length * 4), 1.0);
        test::Plane<double> d(1, c.heads, c.length);
        std::mt19937 generator(2);
        test::Normal<double> normal;
        for (double& x : d.data) {
            x = normal(generator);
        }
        const auto k = [&] { return view_bhsd<const double>(keys.data(), 1, c.heads, c.length, c.dim); };
        const auto v = view_bhsd<const double>(values.data(), 1, c.heads, c.length, 4);
        const auto loss = [&] {
            const auto scores = test::score_all<WriteGateScorer<>, double>(
                ctx, c.gate(), k(), v, c.sequences(), 0, form::fastest, 0.0);
            double sum = 0.0;
            for (std::size_t t = 0; t < scores.size(); ++t) {
                sum += scores[t] * d.data[t];
            }
            return sum;
        };
        const WriteGateScorer<> scorer = c.gate();
        std::vector<std::vector<double>> got{
            std::vector<double>(c.w1.size()), std::vector<double>(c.b1.size()),
            std::vector<double>(c.w2.size()), std::vector<double>(c.b2.size())};
        test::Tensor<double> d_k(1, c.heads, c.length, c.dim), d_v(1, c.heads, c.length, 4);
        d_v.fill(-3.0f);
        const test::Plane<double>& fixed = d;
        ScoreBackward<double> call{k(), v, c.sequences(), 0, fixed.view()};
        call.d_k = d_k.view();
        call.d_v = d_v.view();
        test::Workspace workspace(score_sequence_backward_workspace_bytes(ctx, scorer, call));
        score_sequence_backward(ctx, scorer, call,
                                {got[0].data(), got[1].data(), got[2].data(), got[3].data()}, workspace);
        check_weights(c, got, loss);
        const double scale = largest(d_k.data);
        for (std::size_t at = 0; at < keys.size(); at += 7) {
            const double slope = test::difference(
                keys[at], 0x1p-9, [&](double to) { keys[at] = to; }, loss);
            CHECK(test::relative(d_k.data[at], slope, scale) < 1e-6);
        }
        CHECK(largest(d_v.data) == 0.0);
    }
}

TEST_CASE("the predictor: gradients by differences, of states of any batch and start") {
    input_case c(0);
    REQUIRE(c.hidden_state != 0);
    for (auto* array : {&c.w1, &c.b1, &c.w2, &c.b2}) {
        quantize(*array);
    }
    const std::int32_t length = 90;
    test::Tensor<double> states(2, 1, length, c.dim);
    std::mt19937 generator(2);
    states.fill_normal(generator);
    test::Plane<double> d(2, c.heads, length);
    test::Normal<double> normal;
    for (double& x : d.data) {
        x = normal(generator);
    }
    const std::int32_t lengths[] = {71, 3}, starts[] = {2, 80};
    const Sequences sequences{.batch = 2, .length = 80, .lengths = lengths, .starts = starts};
    const host ctx{2};
    const auto loss = [&] {
        test::Plane<double> scores(2, c.heads, length);
        test::Workspace workspace(score_hidden_workspace_bytes<UtilityPredictor, double>(
            ctx, c.predictor(), std::as_const(states).view(), sequences));
        score_hidden(ctx, c.predictor(), std::as_const(states).view(), sequences, scores.view(), workspace);
        double sum = 0.0;
        for (std::size_t t = 0; t < scores.data.size(); ++t) {
            sum += scores.data[t] * d.data[t];
        }
        return sum;
    };
    const auto run = [&](const host& with, test::Tensor<double>* d_hidden) {
        std::vector<std::vector<double>> got{
            std::vector<double>(c.w1.size()), std::vector<double>(c.b1.size()),
            std::vector<double>(c.w2.size()), std::vector<double>(c.b2.size())};
        HiddenBackward<double, double> call{std::as_const(states).view(), sequences, std::as_const(d).view()};
        if (d_hidden != nullptr) {
            call.d_hidden = d_hidden->view();
        }
        test::Workspace workspace(score_hidden_backward_workspace_bytes(with, c.predictor(), call));
        score_hidden_backward(with, c.predictor(), call,
                              {got[0].data(), got[1].data(), got[2].data(), got[3].data()}, workspace);
        return got;
    };
    test::Tensor<double> d_hidden(2, 1, length, c.dim);
    d_hidden.fill(-3.0f);
    const auto got = run(ctx, &d_hidden);
    check_weights(c, got, loss);
    for (std::int32_t b = 0; b < 2; ++b) {
        for (std::int32_t t = 0; t < length; ++t) {
            const bool in = t >= starts[b] && t < starts[b] + lengths[b];
            const std::int32_t at = t % c.dim;
            const double mine = d_hidden.view().row(b, 0, t)[at];
            if (!in) {
                CHECK(mine == -3.0);
            } else if (t % 3 == 0) {
                double& x = states.view().row(b, 0, t)[at];
                const double slope = test::difference(
                    x, 0x1p-9, [&](double to) { x = to; }, loss);
                CHECK(test::relative(mine, slope, 10.0) < 1e-6);
            }
        }
    }
    const auto again = run(host{1}, nullptr);
    for (std::size_t a = 0; a < 4; ++a) {
        CHECK(test::same_bits(got[a], again[a]));
    }
    states.view().row(0, 0, 5)[1] = std::nan("");
    CHECK_REFUSED(run(ctx, nullptr), "hidden[0][5]: NaN or infinite");
    states.view().row(0, 0, 5)[1] = 0.0;
    d.at(1, 1, 81) = std::nan("");
    CHECK_REFUSED(run(ctx, nullptr), "d_scores[1][1][81]: nan");
}

TEST_CASE("hidden states of every storage type are the same states") {
    const input_case c(0);
    std::vector<float> exact = c.k;
    for (float& x : exact) {
        x = static_cast<float>(static_cast<bf16>(x));
        x = static_cast<float>(static_cast<fp16>(x));
    }
    const auto scores = [&](auto like) {
        using T = decltype(like);
        std::vector<T> rows;
        for (const float x : exact) {
            rows.push_back(static_cast<T>(x));
        }
        std::vector<float> out(static_cast<std::size_t>(c.heads * c.length));
        const host ctx{1};
        test::Workspace workspace(score_hidden_workspace_bytes(
            ctx, c.predictor(), view_bhsd<const T>(rows.data(), 1, 1, c.length, c.dim), c.sequences()));
        score_hidden(ctx, c.predictor(), view_bhsd<const T>(rows.data(), 1, 1, c.length, c.dim),
                     c.sequences(), view_bhs(out.data(), 1, c.heads, c.length), workspace);
        return out;
    };
    const auto plain = scores(0.0f);
    CHECK(test::same_bits(plain, scores(0.0)));
    CHECK(test::same_bits(plain, scores(bf16(0.0f))));
    CHECK(test::same_bits(plain, scores(fp16(0.0f))));
}

TEST_CASE("the write gate far from position 0, against its formula in double") {
    constexpr std::size_t dim = 32, hidden = 9;
    const auto w1 = test::draw(1, test::array::w1, hidden * 2 * dim, 0.5f);
    const auto w2 = test::draw(1, test::array::w2, hidden, 1.0f);
    const auto k = test::draw(1, test::array::k, dim, 2.0f);
    WriteGateScorer<> gate;
    gate.heads = 1, gate.head_dim_qk = 32, gate.head_dim_vo = 4, gate.hidden = 9;
    gate.weights = {w1.data(), nullptr, w2.data(), nullptr};
    gate.input.rope = {rope_layout::half_split, 10000.0f};
    const std::vector<float> value(4);
    std::vector<float> scratch(gate.scratch_size());
    for (const position_t first : {position_t{1} << 24, position_t{1} << 30, position_t{1} << 40}) {
        std::vector<float> scores;
        for (position_t t = first - 2; t < first + 3; ++t) {
            CAPTURE(t);
            // WG-KV, 3.2, with the angle as Rope says.
            std::vector<double> x(2 * dim), key(k.begin(), k.end());
            double squares = 0.0;
            for (std::size_t a = 0, b = dim / 2; a < dim / 2; ++a, ++b) {
                const auto f = static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(a) / 32.0));
                const double angle = t <= position_t{1} << 24 ? static_cast<double>(static_cast<float>(t) * f)
                                                              : static_cast<double>(t) * double{f};
                x[a] = key[a] * std::cos(angle) + key[b] * std::sin(angle);
                x[b] = key[b] * std::cos(angle) - key[a] * std::sin(angle);
                squares += key[a] * key[a] + key[b] * key[b];
            }
            std::copy(key.begin(), key.end(), x.begin() + dim);
            const double norm = std::sqrt(squares / 32.0 + double{gate.input.norm.epsilon});
            double wanted = 0.0;
            for (std::size_t j = 0; j < hidden; ++j) {
                double y = 0.0;
                for (std::size_t i = 0; i < 2 * dim; ++i) {
                    y += double{w1[j * 2 * dim + i]} * x[i] / norm;
                }
                wanted += double{w2[j]} * 0.5 * y * (1.0 + std::erf(y / std::sqrt(2.0)));
            }
            scores.push_back(gate.score(0, k.data(), value.data(), scratch.data(), detected_isa(), t));
            CHECK(std::abs(static_cast<double>(scores.back()) - wanted) <= 1e-5 * (1.0 + std::abs(wanted)));
        }
        // Neighbors have keys of their own.
        std::sort(scores.begin(), scores.end());
        for (std::size_t i = 1; i < scores.size(); ++i) {
            CHECK(scores[i] - scores[i - 1] > 1e-4f);
        }
    }
}

TEST_CASE("what does not fit gets a sentence; a predictor starts open") {
    input_case c(0);
    UtilityPredictor scorer = c.predictor();
    const host ctx{1};
    std::vector<float> out(static_cast<std::size_t>(c.heads * c.length));
    std::int32_t width = c.dim, heads = c.heads;
    const auto run = [&] {
        test::Workspace workspace(score_hidden_workspace_bytes(
            ctx, scorer, view_bhsd<const float>(c.k.data(), 1, 1, c.length, width), c.sequences()));
        score_hidden(ctx, scorer, view_bhsd<const float>(c.k.data(), 1, 1, c.length, width), c.sequences(),
                     view_bhs(out.data(), 1, heads, c.length), workspace);
    };
    run();
    width = 3;
    CHECK_REFUSED(run(), "the width that the scorer reads");
    width = c.dim;
    heads = 1;
    CHECK_REFUSED(run(), "UtilityPredictor.heads: 2");
    heads = c.heads;
    scorer.hidden = 0;
    CHECK_REFUSED(run(), "UtilityPredictor.hidden: 0");
    scorer = c.predictor();
    scorer.weights.w1 = nullptr;
    CHECK_REFUSED(run(), "UtilityPredictor.weights.w1: null");

    scorer = c.predictor();
    MlpParameters<float> into{c.w1.data(), c.b1.data(), c.w2.data(), c.b2.data()};
    initialize(scorer, into, 3);
    CHECK(c.b2[1] == 5.0f);  // sigmoid(5) = 0.993
    WriteGateScorer<> gate;
    gate.heads = 2, gate.head_dim_qk = 8, gate.head_dim_vo = 8, gate.hidden = 4;
    CHECK_REFUSED(gate.check(2, 8, 8), "WriteGateScorer.input.rope.layout: none");
    gate.input.rope = {rope_layout::half_split, 10000.0f, 9};
    CHECK_REFUSED(gate.check(2, 8, 8), "WriteGateScorer.input.rope.dims: 9");
    WriteGateScorer<16> fixed;
    fixed.heads = 2, fixed.head_dim_qk = 8;
    CHECK_REFUSED(
        fixed.check(2, 8, 8),
        "WriteGateScorer.head_dim_qk: 8 is not allowed; it must be 16, as WriteGateScorer<16> says");
    BasicMlpScorer<NormalizedInput, GeluErf> other;
    CHECK_REFUSED(other.check(2, 8, 8), "BasicMlpScorer.heads: 0");
}
