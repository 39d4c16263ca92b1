// Where training starts from, and the budget that pays for a state.
#include <kvpolicy/scorers/initialize.hpp>

#include "../../support/refusal.hpp"
#include "scorer_cases.hpp"

#include <doctest/doctest.h>

#include <map>

using namespace kvpolicy;

namespace {

/// Arrays of a scorer's parameters, allocated by their names.
template <class Parameters, class S>
struct owned {
    std::map<std::string, std::vector<float>> arrays;
    Parameters parameters;

    explicit owned(const S& scorer, bool optional_too = true) {
        for_each_parameter(scorer, parameters,
                           [&](const char* name, float*& pointer, std::size_t count, bool optional) {
                               if (count == 0 || (optional && !optional_too)) {
                                   return;
                               }
                               auto& array = arrays[name];
                               array.assign(count, std::numeric_limits<float>::quiet_NaN());
                               pointer = array.data();
                           });
    }
};

}  // namespace

TEST_CASE("an mLSTM starts from identity-like projections, slow forgetting and equal scores") {
    mLSTMScorer<16> scorer;
    scorer.heads = 4;
    owned<mLSTMParameters<float>, mLSTMScorer<16>> first(scorer), again(scorer), other(scorer);
    initialize(scorer, first.parameters, 7);
    initialize(scorer, again.parameters, 7);
    initialize(scorer, other.parameters, 8);
    CHECK(first.arrays == again.arrays);
    CHECK(first.arrays.at("w_q") != other.arrays.at("w_q"));
    CHECK(first.arrays.at("w_q") != first.arrays.at("w_k"));
    for (const auto& array : first.arrays) {
        CAPTURE(array.first);
        for (const float x : array.second) {
            REQUIRE(std::isfinite(x));
        }
    }
    for (std::int32_t h = 0; h < 4; ++h) {
        for (std::int32_t r = 0; r < 8; ++r) {
            for (std::int32_t i = 0; i < 32; ++i) {
                const std::size_t at = test::at(h * 8 + r, 32, i);
                REQUIRE(std::abs(first.arrays.at("w_q")[at] - (i == r ? 1.0f : 0.0f)) < 0.06f);
                REQUIRE(std::abs(first.arrays.at("w_k")[at] - (i == r ? 1.0f : 0.0f)) < 0.06f);
                REQUIRE(std::abs(first.arrays.at("w_v")[at] - (i == 16 + r ? 1.0f : 0.0f)) < 0.06f);
            }
        }
    }
    CHECK(first.arrays.at("b_f") == std::vector<float>{3, 4, 5, 6});
    CHECK(first.arrays.at("norm_gain") == std::vector<float>(32, 1.0f));

    // The weights as a scorer's: every key has the score 0.
    scorer.weights = {first.parameters.w_q,          first.parameters.w_k,       first.parameters.w_v,
                      first.parameters.w_i,          first.parameters.b_i,       first.parameters.w_f,
                      first.parameters.b_f,          first.parameters.norm_gain, first.parameters.readout,
                      first.parameters.readout_bias, first.parameters.skip};
    const auto x = test::draw(1, 3200, 2.0f);
    const auto view = view_bhsd(x.data(), 1, 4, 50, 16);
    const host ctx(1);
    const auto scores = test::score_all(ctx, scorer, view, view, {1, 50}, 0, form::fastest, 9.0f);
    CHECK(scores == std::vector<float>(200, 0.0f));
}

TEST_CASE("arrays that a scorer can do without may be missing when it starts") {
    mLSTMScorer<8, Softmax, DirectValues> scorer;
    scorer.heads = 1;
    scorer.d_qk = 20;  // more features than the key has numbers
    owned<mLSTMParameters<float>, decltype(scorer)> some(scorer, false);
    CHECK(some.arrays.size() == 5);
    initialize(scorer, some.parameters, 1);
    const auto& w_q = some.arrays.at("w_q");
    CHECK(w_q[8 * 16 + 0] > 0.9f);
    CHECK(w_q[19 * 16 + 3] > 0.9f);
    some.parameters.w_f = nullptr;
    CHECK_REFUSED(initialize(scorer, some.parameters, 1), "mLSTMScorer.weights.w_f: null");
}

TEST_CASE("MLP and linear scorers start with a zero head") {
    MlpScorer<8> mlp;
    mlp.heads = 3;
    mlp.hidden = 100;
    owned<MlpParameters<float>, MlpScorer<8>> weights(mlp);
    initialize(mlp, weights.parameters, 5);
    double square = 0.0;
    for (const float w : weights.arrays.at("w1")) {
        square += static_cast<double>(w) * static_cast<double>(w);
    }
    CHECK(square / 300.0 == doctest::Approx(1.0).epsilon(0.1));  // 16 inputs of variance 1 / 16
    CHECK(weights.arrays.at("w2") == std::vector<float>(300, 0.0f));
    LinearScorer<8> linear;
    linear.heads = 3;
    owned<LinearParameters<float>, LinearScorer<8>> flat(linear);
    initialize(linear, flat.parameters, 5);
    CHECK(flat.arrays.at("weight") == std::vector<float>(48, 0.0f));
}

TEST_CASE("a state is paid for in keys") {
    mLSTMScorer<128> scorer;
    CHECK(scorer.features() == 128);
    CHECK(scorer.projection() == 64);
    CHECK(scorer.value_width() == 64);
    CHECK(scorer.state_size() == 128 * 64 + 128 + 2);
    const std::size_t row = 2 * 128 * 2 + 12;  // bf16 key and value, position, score
    // 33,288 bytes of state: 63.5 rows of 524 bytes.
    CHECK(budget_matching_state(3836, scorer, row) == 3836 - 64);
    CHECK(budget_matching_state(64, scorer, row) == 0);
    CHECK(budget_matching_state(unlimited, scorer, row) == unlimited);
    CHECK(budget_matching_state(10, 0, row) == 10);
    CHECK(budget_matching_state(10, 2 * row, row) == 8);
    CHECK_REFUSED(budget_matching_state(63, scorer, row),
                  "budget: 63 is not allowed; it must be at least 64");
    CHECK_REFUSED(budget_matching_state(-1, scorer, row), "budget: -1");
    CHECK_REFUSED(budget_matching_state(5, scorer, 0), "row_bytes: 0");
    const mLSTMScorer<128, Softmax, DirectValues> direct;
    CHECK(direct.projection() == 128);
    CHECK(direct.value_width() == 128);
}
