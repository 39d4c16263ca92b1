// Linear and MLP scorers: against the reference, blocks against single tokens, activations,
// shared hidden layers.
#include "../../support/vectors.hpp"
#include "scorer_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace kvpolicy;

namespace {

const kvpolicy_test::vectors& file() {
    static const kvpolicy_test::vectors loaded = kvpolicy_test::vectors::load("scorers.kvpv");
    return loaded;
}

struct mlp_case {
    std::int32_t activation, head_dim_qk, head_dim_vo, hidden, heads, length, biases, seed;
    std::vector<float> k, v, w1, b1, w2, b2;

    explicit mlp_case(const std::int32_t* n)
        : activation(n[0]),
          head_dim_qk(n[1]),
          head_dim_vo(n[2]),
          hidden(n[3]),
          heads(n[4]),
          length(n[5]),
          biases(n[6]),
          seed(n[7]) {
        const std::int32_t inputs = head_dim_qk + head_dim_vo;
        k = test::draw(seed, test::array::k, std::int64_t{heads} * length * head_dim_qk, 2.0f);
        v = test::draw(seed, test::array::v, std::int64_t{heads} * length * head_dim_vo, 2.0f);
        w1 = test::draw(seed, test::array::w1, std::int64_t{heads} * hidden * inputs, 0.5f);
        b1 = test::draw(seed, test::array::b1, std::int64_t{heads} * hidden, 1.0f);
        w2 = test::draw(seed, test::array::w2, std::int64_t{heads} * (activation == 0 ? inputs : hidden),
                        1.0f);
        b2 = test::draw(seed, test::array::b2, heads, 1.0f);
    }

    template <class S>
    S mlp() const {
        S s;
        s.heads = heads;
        s.head_dim_qk = head_dim_qk;
        s.head_dim_vo = head_dim_vo;
        s.hidden = hidden;
        s.weights.w1 = w1.data();
        s.weights.w2 = w2.data();
        if (biases != 0) {
            s.weights.b1 = b1.data();
            s.weights.b2 = b2.data();
        }
        return s;
    }

    template <class Visit>
    void with_scorer(Visit&& visit) const {
        if (activation == 0) {
            LinearScorer<> s;
            s.heads = heads;
            s.head_dim_qk = head_dim_qk;
            s.head_dim_vo = head_dim_vo;
            s.weights = {w2.data(), biases != 0 ? b2.data() : nullptr};
            visit(s);
        } else if (activation == 1) {
            visit(mlp<MlpScorer<>>());
        } else {
            visit(mlp<BasicMlpScorer<KeyValueInput, GeluErf>>());
        }
    }
};

template <class T>
void compare(double tolerance) {
    const auto& cases = file().get<std::int32_t>("mlp_cases");
    const host ctx(2);
    for (std::int64_t i = 0; i < cases.shape[0]; ++i) {
        CAPTURE(i);
        const mlp_case c(cases.row(i));
        const double* want =
            file().get<double>("mlp_scores").data() + file().get<std::int32_t>("mlp_offsets")[i];
        const auto keys = test::converted<T>(c.k);
        const auto values = test::converted<T>(c.v);
        const auto k = view_bhsd(keys.data(), 1, c.heads, c.length, c.head_dim_qk);
        const auto v = view_bhsd(values.data(), 1, c.heads, c.length, c.head_dim_vo);
        c.with_scorer([&](const auto& scorer) {
            using S = std::decay_t<decltype(scorer)>;
            const auto got =
                test::score_all<S, T>(ctx, scorer, k, v, {1, c.length}, 3, form::fastest, T(-77));
            for (std::size_t t = 0; t < got.size(); ++t) {
                REQUIRE(std::abs(static_cast<double>(got[t]) - want[t]) <=
                        tolerance * (1.0 + std::abs(want[t])));
            }
            // One token at a time: the same bits.
            std::vector<T> scratch(scorer.scratch_size());
            for (std::int32_t h = 0; h < c.heads; ++h) {
                for (std::int32_t t = 0; t < c.length; ++t) {
                    const T one = scorer.score(h, k.row(0, h, t), v.row(0, h, t), scratch.data());
                    REQUIRE(one == got[test::at(h, c.length, t)]);
                }
            }
        });
    }
}

}  // namespace

TEST_CASE("stateless scores in double are the reference's") { compare<double>(1e-12); }

// Sums of at most n = 128 products of magnitude at most 1, twice: n^(1/2) u each is typical, n u the limit.
TEST_CASE("stateless scores in fp32 lie within rounding of the reference's") {
    compare<float>(2.0 * 128 * 0x1p-24);
}

TEST_CASE("activations keep their shape at the ends") {
    for (const isa set : {isa::portable, detected_isa()}) {
        float y[11] = {-1e4f, -100.0f, -88.5f, -20.0f, -0.0f, 0.0f, 1e-8f, 1.0f, 20.0f, 100.0f, 1e4f};
        float z[11];
        std::copy_n(y, 11, z);
        Silu::apply(set, y, 11);
        GeluErf::apply(set, z, 11);
        for (int i = 0; i < 3; ++i) {
            CHECK(std::abs(y[i]) <= 1e-30f);
        }
        CHECK(y[3] == doctest::Approx(-20.0 / (1.0 + std::exp(20.0))).epsilon(1e-6));
        CHECK(y[4] == 0.0f);
        CHECK(y[7] == doctest::Approx(1.0 / (1.0 + std::exp(-1.0))).epsilon(1e-6));
        CHECK(y[9] == 100.0f);
        CHECK(y[10] == 1e4f);
        CHECK(z[0] == 0.0f);
        CHECK(z[7] == doctest::Approx(0.841344746).epsilon(1e-6));
        CHECK(z[10] == 1e4f);
        float nan[3] = {1.0f, std::numeric_limits<float>::quiet_NaN(), 2.0f};
        Silu::apply(set, nan, 3);
        CHECK(std::isnan(nan[1]));
        CHECK(!std::isnan(nan[2]));
    }
}

namespace {
/// An input of one's own: the key's norm, with one hidden layer for all heads.
struct KeyNormInput {
    static constexpr bool per_head = false;
    float scale = 1.0f;
    [[nodiscard]] std::int32_t size(std::int32_t, std::int32_t) const { return 1; }
    template <class Real>
    void gather(isa, std::int32_t, const Real* key, const Real*, std::int32_t head_dim_qk, std::int32_t,
                Real* x) const {
        Real sum = 0;
        for (std::int32_t i = 0; i < head_dim_qk; ++i) {
            sum += key[i] * key[i];
        }
        x[0] = static_cast<Real>(scale) * std::sqrt(sum);
    }
};
static_assert(MlpInput<KeyNormInput>);
}  // namespace

TEST_CASE("an MLP takes another input, and a hidden layer that heads share") {
    BasicMlpScorer<KeyNormInput, Silu, 2> scorer;
    const float w1[2] = {1.0f, -1.0f};  // [1, 2, 1]: one layer for both heads
    const float w2[4] = {1.0f, 0.0f, 0.0f, 1.0f};
    scorer.heads = 2;
    scorer.hidden = 2;
    scorer.weights.w1 = w1;
    scorer.weights.w2 = w2;
    scorer.input.scale = 2.0f;
    scorer.check(2, 2, 2);
    const double key[2] = {3.0, 4.0};
    double scratch[3];
    CHECK(scorer.scratch_size() == 3);
    CHECK(scorer.score(0, key, key, scratch) == doctest::Approx(10.0 / (1.0 + std::exp(-10.0))));
    CHECK(scorer.score(1, key, key, scratch) == doctest::Approx(-10.0 / (1.0 + std::exp(10.0))));
}
