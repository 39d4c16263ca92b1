// Merging partial softmax results: exact, in any order, and never a NaN out of nothing.
#include <kvpolicy/attention/softmax_state.hpp>

#include "../../support/normal.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace kvpolicy;

namespace {

template <class Real>
void neutral_element() {
    const Real nothing = -std::numeric_limits<Real>::infinity();
    Real out[2] = {Real(0), Real(0)};
    Real lse = nothing;
    const Real none[2] = {Real(0), Real(0)};
    for (int i = 0; i < 8; ++i) {
        merge_output(out, lse, none, nothing, 2);
    }
    CHECK(lse == nothing);
    CHECK(out[0] == Real(0));
    CHECK(out[1] == Real(0));

    const Real some[2] = {Real(3), Real(-2)};
    merge_output(out, lse, some, Real(5), 2);
    CHECK(lse == Real(5));
    CHECK(out[0] == Real(3));
    // What an empty side holds is not read.
    const Real nan[2] = {std::numeric_limits<Real>::quiet_NaN(), std::numeric_limits<Real>::quiet_NaN()};
    merge_output(out, lse, nan, nothing, 2);
    CHECK(lse == Real(5));
    CHECK(out[1] == Real(-2));

    merge_weights<Real> weights;
    const softmax_state<Real> empty;
    const softmax_state<Real> merged = merge(empty, empty, weights);
    CHECK(merged.max == nothing);
    CHECK(merged.sum == Real(0));
    CHECK(weights.a == Real(0));
    CHECK(weights.b == Real(0));
    CHECK(lse_of(merged) == nothing);
    CHECK(merge(softmax_state<Real>{Real(2), Real(3)}, empty, weights).sum == Real(3));
    CHECK(weights.a == Real(1));
    CHECK(weights.b == Real(0));
    CHECK(merge_lse(nothing, nothing, weights) == nothing);
    CHECK(weights.a == Real(0));
}

}  // namespace

TEST_CASE("nothing merged with nothing is nothing, eight times") {
    neutral_element<float>();
    neutral_element<double>();
}

TEST_CASE("parts of a softmax merge to the whole, in both forms") {
    std::mt19937 generator(1);
    test::Normal<double> normal(0.0, 30.0);
    for (int round = 0; round < 50; ++round) {
        std::vector<double> logits(40), values(40);
        for (double& x : logits) {
            x = normal(generator);
        }
        for (double& x : values) {
            x = normal(generator);
        }
        double largest = -1e300, total = 0.0, mean = 0.0;
        for (const double x : logits) {
            largest = std::max(largest, x);
        }
        for (std::size_t i = 0; i < 40; ++i) {
            total += std::exp(logits[i] - largest);
            mean += std::exp(logits[i] - largest) * values[i];
        }
        softmax_state<double> state;
        double unnormalized = 0.0, out = 0.0, lse = -std::numeric_limits<double>::infinity();
        for (std::size_t i = 0; i < 40; ++i) {
            merge_weights<double> weights;
            state = merge(state, softmax_state<double>{logits[i], 1.0}, weights);
            unnormalized = weights.a * unnormalized + weights.b * values[i];
            merge_output(&out, lse, &values[i], logits[i], 1);
        }
        CHECK(std::fabs(unnormalized / state.sum - mean / total) < 1e-12 * 100.0);
        CHECK(std::fabs(out - mean / total) < 1e-12 * 100.0);
        CHECK(std::fabs(lse_of(state) - (largest + std::log(total))) < 1e-12 * 100.0);
        CHECK(std::fabs(lse - (largest + std::log(total))) < 1e-12 * 100.0);
    }
}

TEST_CASE("far apart, equal, and in base 2") {
    merge_weights<float> weights;
    CHECK(merge_lse(6e4f, -6e4f, weights) == 6e4f);
    CHECK(weights.a == 1.0f);
    CHECK(weights.b == 0.0f);
    CHECK(std::fabs(merge_lse(-6e4f, -6e4f, weights) - (-6e4f + std::log(2.0f))) < 0.005f);
    CHECK(weights.a == 0.5f);
    CHECK(weights.b == 0.5f);
    CHECK(lse_to_log2(0.0f) == 0.0f);
    CHECK(std::fabs(lse_to_log2(std::log(8.0)) - 3.0) < 1e-15);
    CHECK(std::fabs(lse_from_log2(3.0) - std::log(8.0)) < 1e-15);
    CHECK(lse_to_log2(-std::numeric_limits<float>::infinity()) == -std::numeric_limits<float>::infinity());
}
