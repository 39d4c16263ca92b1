// LTE's training by its equations (3.1.2, algorithm 1) on the device: the start, the keys that count, the
// cap, the controller.
#define KVPOLICY_TEST_GPU
#include <kvpolicy/cuda_scorers.cuh>
#include <kvpolicy/losses/cuda/dispatch_gates.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/initialize.hpp>

#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <vector>

using namespace kvpolicy;
using test::Device;

namespace {

using Gated = Policy<Sink<>, Window<>, ThresholdGate<above>>;
Gated gated(std::int32_t window) { return Gated{Sink<>{4}, Window<>{window}, {}}; }

float logit(double r) { return static_cast<float>(std::log(r / (1.0 - r))); }

template <class T>
plane_view<T> plane(const Device<float>& data) {
    return view_bhs<T>(data.data(), 1, 1, static_cast<std::int32_t>(data.size()));
}
Sequences whole(const Device<float>& scores) {
    return {.batch = 1, .length = static_cast<std::int32_t>(scores.size())};
}

/// Scores of drawn keys and values by a scorer as initialize() leaves it, but for its bias, if one is given.
template <class T>
std::vector<float> scores_of(std::int32_t dim, std::int32_t length, std::int32_t delay, const float* bias) {
    ConvScorer<> scorer;
    scorer.heads = 1, scorer.head_dim_qk = dim, scorer.head_dim_vo = dim;
    scorer.rope = {rope_layout::half_split, 10000.0f};
    std::vector<std::vector<float>> arrays;
    ConvParameters<float> into;
    for_each_parameter(scorer, into, [&](const char*, float*& array, std::size_t count, bool) {
        arrays.emplace_back(count);
        array = arrays.back().data();
    });
    initialize(scorer, into, 1);
    if (bias != nullptr) {
        into.readout_bias[0] = *bias;
    }
    std::vector<std::unique_ptr<Device<float>>> memory;
    for_each_parameter(scorer, scorer.weights, [&](const char*, const float*& array, std::size_t, bool) {
        memory.push_back(std::make_unique<Device<float>>(arrays[memory.size()]));
        array = memory.back()->data();
    });
    std::mt19937 generator(3);
    std::normal_distribution<float> normal;
    std::vector<T> drawn(static_cast<std::size_t>(length) * static_cast<std::size_t>(dim));
    for (T& x : drawn) {
        x = static_cast<T>(normal(generator));
    }
    const Device<T> rows(drawn);
    const auto view = view_bhsd<const T>(rows.data(), 1, 1, length, dim);
    const Device<float> scores(std::vector<float>(static_cast<std::size_t>(length), 9.0f));
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(
        score_sequence_workspace_bytes(ctx, scorer, view, view, whole(scores)));
    score_sequence(ctx, scorer, view, view, whole(scores), delay, plane<float>(scores), workspace);
    return scores.read();
}

double count_of(const std::vector<float>& of, std::int32_t window, gate_scope scope = gate_scope::all) {
    const Device<float> scores(of);
    const Device<double> count(1);
    const kvpolicy::cuda ctx{};
    const Gated policy = gated(window);
    const Device<unsigned char> workspace(retention_counts_workspace_bytes(ctx, policy, whole(scores), 1));
    retention_counts(ctx, policy, plane<const float>(scores), whole(scores), count.data(), workspace,
                     {.scope = scope});
    return count.read()[0];
}

/// RetentionPenalty with lambda 1: its value, then the gradient of each key.
std::vector<double> penalty_of(const std::vector<float>& of, gate_scope scope) {
    const Device<float> scores(of), d(of.size()), lambda(std::vector<float>{1.0f});
    const Device<LossValue> value(1);
    const kvpolicy::cuda ctx{};
    const Gated policy = gated(16);
    const RetentionPenalty penalty{.scope = scope, .term = {lambda.data()}};
    const Device<unsigned char> workspace(penalty.workspace_bytes(ctx, policy, whole(scores), 1));
    penalty(ctx, policy, plane<const float>(scores), whole(scores), plane<float>(d), value.data(), workspace);
    std::vector<double> all{value.read()[0].value};
    const std::vector<float> slopes = d.read();
    all.insert(all.end(), slopes.begin(), slopes.end());
    return all;
}

/// Gradients where <v_t, d v_t> is `dot` for every key.
std::vector<float> straight_through_of(const std::vector<float>& of, float dot, gate_scope scope) {
    constexpr std::int32_t dim = 8;
    const Device<float> scores(of), d(of.size()), v(std::vector<float>(of.size() * dim, 1.0f)),
        d_v(std::vector<float>(of.size() * dim, dot / dim));
    const auto rows = [&](const Device<float>& data) {
        return view_bhsd<const float>(data.data(), 1, 1, static_cast<std::int32_t>(of.size()), dim);
    };
    const kvpolicy::cuda ctx{};
    const Gated policy = gated(16);
    const Device<unsigned char> workspace(
        straight_through_values_workspace_bytes(ctx, policy, whole(scores), 1));
    straight_through_values(ctx, policy, plane<const float>(scores), rows(v), rows(d_v), whole(scores),
                            plane<float>(d), workspace, {.scope = scope});
    return d.read();
}

/// lambda after an update for each count, which the average is set to.
float updated(float factor, double cap, std::initializer_list<double> counts) {
    const Device<float> lambda(1);
    const Device<double> average(1);
    const kvpolicy::cuda ctx{};
    LambdaController controller{.heads = 1, .lambda = lambda.data(), .average = average.data(), .cap = cap};
    controller.factor = factor;
    controller.every = 1;  // the average is the last count
    controller.start(ctx);
    for (const double count : counts) {
        const Device<double> one(std::vector<double>{count});
        controller.observe(ctx, one.data());
        controller.update(ctx);
    }
    return lambda.read()[0];
}

template <class T>
void check_scored(std::int32_t dim) {
    constexpr float unscored = -std::numeric_limits<float>::infinity();
    for (const std::int32_t delay : {6, 16}) {
        CAPTURE(delay);
        const std::vector<float> start = scores_of<T>(dim, 96, delay, nullptr);
        for (std::int32_t t = 0; t < 96; ++t) {
            CAPTURE(t);
            CHECK(start[static_cast<std::size_t>(t)] == (t + delay < 96 ? 1.0f : unscored));
        }
        CHECK(count_of(start, 16, gate_scope::decided) == 4.0 + 76.0);
        const float shut = logit(0.27), open = logit(0.88);
        const std::vector<float> low = scores_of<T>(dim, 96, delay, &shut);
        CHECK(penalty_of(low, gate_scope::all)[0] == 0.0);
        CHECK(penalty_of(low, gate_scope::decided)[0] == 0.0);
        CHECK(count_of(low, 16) == 4.0);
        const double sum = penalty_of(scores_of<T>(dim, 96, delay, &open), gate_scope::all)[0];
        CHECK(sum == doctest::Approx((96 - delay) * 0.38));
    }
}

}  // namespace

TEST_CASE("gates start open, and a penalty reads no score that the convolution does not have") {
    check_scored<float>(16);
    check_scored<bf16>(64);  // on Hopper another kernel
    check_scored<fp16>(128);
}

TEST_CASE("straight-through, penalty and count are about the same keys") {
    const std::vector<float> scores(32, logit(0.88));
    for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
        const bool all = scope == gate_scope::all;
        const std::vector<float> through = straight_through_of(scores, -1.53314f, scope);
        const std::vector<double> penalty = penalty_of(scores, scope);
        CHECK(penalty[0] == doctest::Approx((all ? 32 : 12) * 0.38));
        for (std::size_t t = 0; t < 32; ++t) {
            const bool in = all || (t >= 4 && t < 16);
            CHECK(static_cast<double>(through[t]) == doctest::Approx(in ? -0.1619 : 0.0).epsilon(1e-4));
            CHECK(penalty[t + 1] == doctest::Approx(in ? 0.1056 : 0.0));
        }
        CHECK(count_of(scores, 16, scope) == (all ? 32.0 : 16.0));
    }
    std::vector<float> some(32, -1.0f);
    some[10] = some[20] = 1.0f;
    CHECK(count_of(some, 16) == 4.0 + 2.0);
    CHECK(count_of(some, 16, gate_scope::decided) == 4.0 + 1.0);
}

TEST_CASE("controller and cap agree") {
    for (const std::int32_t open : {508, 509, 511}) {
        std::vector<float> scores(4 + 600 + 768, -1.0f);
        std::fill_n(scores.begin() + 4, open, 1.0f);
        for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
            const double count = count_of(scores, 768, scope);
            CHECK(count == open + 4.0);
            // LTE<4, 768, 512> holds 4 sinks and 508 others.
            CHECK((updated(1.2f, 512.0, {count}) > 1e-9f) == (open > 508));
        }
    }
}

TEST_CASE("as many steps down as up lead back to the least lambda, and one more to 0") {
    for (const float factor : {1.5f, 1.2f, 1.1f, 1.01f, 1.0001f, 2.0f, 7.3f}) {
        CAPTURE(factor);
        CHECK(updated(factor, 10.0, {11.0, 11.0, 1.0, 1.0}) == 1e-9f);
        CHECK(updated(factor, 10.0, {11.0, 11.0, 1.0, 1.0, 1.0}) == 0.0f);
        CHECK(updated(factor, 10.0, {1.0, 1.0, 11.0}) == 1e-9f);
    }
}
