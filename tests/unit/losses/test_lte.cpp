// LTE's training by its equations (3.1.2, algorithm 1): the start, the keys that count, the cap, the
// controller.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/losses/gates.hpp>
#include <kvpolicy/lte.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/scorers/initialize.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "../../support/cases.hpp"
#include "../../support/loss_value.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

using namespace kvpolicy;

namespace {

template <std::int32_t Width>
using Gated = Policy<Sink<4>, Window<Width>, ThresholdGate<above>>;

double sigmoid(double z) { return 1.0 / (1.0 + std::exp(-z)); }
float logit(double r) { return static_cast<float>(std::log(r / (1.0 - r))); }

constexpr std::int32_t dim = 16;

/// A scorer of one head as initialize() leaves it.
struct Start {
    std::vector<std::vector<float>> arrays;
    ConvParameters<float> into;
    ConvScorer<dim> scorer;

    Start() {
        scorer.heads = 1;
        scorer.rope = {rope_layout::half_split, 10000.0f};
        for_each_parameter(scorer, into, [&](const char*, float*& array, std::size_t count, bool) {
            arrays.emplace_back(count);
            array = arrays.back().data();
        });
        initialize(scorer, into, 1);
        scorer.weights = {into.w1, into.b1, into.w2,      into.b2,
                          into.w3, into.b3, into.readout, into.readout_bias};
    }
    Start(const Start&) = delete;

    /// Writes scores of drawn keys and values.
    void score(std::int32_t delay, test::Plane<float>& scores) const {
        const host ctx{1};
        std::mt19937 generator(3);
        test::Tensor<float> k(1, 1, scores.length, dim), v(1, 1, scores.length, dim);
        k.fill_normal(generator);
        v.fill_normal(generator);
        const test::Tensor<float>&ck = k, &cv = v;
        const Sequences sequences{.batch = 1, .length = scores.length};
        test::Workspace memory(score_sequence_workspace_bytes(ctx, scorer, ck.view(), cv.view(), sequences));
        score_sequence(ctx, scorer, ck.view(), cv.view(), sequences, delay, scores.view(), memory);
    }
};

double penalty_of(const test::Plane<float>& scores, gate_scope scope) {
    const float lambda[] = {1.0f};
    test::Plane<float> d(1, 1, scores.length);
    const Gated<16> policy;
    return test::value_of([&](auto* into) {
               RetentionPenalty{.scope = scope, .term = {lambda}}(
                   host{1}, policy, scores.view(), {.batch = 1, .length = scores.length}, d.view(), into, {});
           })
        .value;
}

/// lambda after an update for each average of a head.
float updated(const LambdaController& controller, std::initializer_list<double> averages) {
    controller.start(host{1});
    for (const double average : averages) {
        *controller.average = average;
        controller.update(host{1});
    }
    return *controller.lambda;
}

}  // namespace

TEST_CASE("gates start open: all keys are kept, and all that queries see get a gradient") {
    const Start start;
    test::Plane<float> scores(1, 1, 96);
    start.score(16, scores);
    const test::Plane<float>& s = scores;
    test::Plane<expiry_t> expiry(1, 1, 96);
    const Gated<16> policy;
    build_mask(host{1}, policy, s.view(), {.batch = 1, .length = 96}, expiry.view(), {});
    CHECK(std::count(expiry.data.begin() + 4, expiry.data.begin() + 80, never) == 76);

    // A loss at queries 40 .. 63; keys 4 .. 31 have left a window of 8 before.
    const host ctx{1};
    constexpr std::int32_t length = 64;
    const Sequences sequences{.batch = 1, .length = length};
    std::mt19937 generator(5);
    test::Tensor<float> q(1, 1, length, dim), k(q), v(q), out(q), d_out(q), d_q(q), d_k(q), d_v(q);
    for (auto* x : {&q, &k, &v, &d_out}) {
        x->fill_normal(generator);
    }
    std::fill_n(d_out.data.begin(), 40 * dim, 0.0f);
    test::Plane<float> first(1, 1, length), lse(1, 1, length), d_scores(1, 1, length);
    start.score(6, first);
    test::Plane<expiry_t> mask(1, 1, length);
    const Gated<8> narrow;
    const test::Plane<float>&z = first, &saved_lse = lse;
    const test::Plane<expiry_t>& visible = mask;
    const test::Tensor<float>&cq = q, &ck = k, &cv = v, &c_out = out, &c_d_out = d_out, &c_d_v = d_v;
    build_mask(ctx, narrow, z.view(), sequences, mask.view(), {});
    const kv_view<float> kv{.k = ck.view(), .v = cv.view(), .mask = {.expiry = visible.view()}};
    const AttentionParams attention{.sm_scale = 0.25f};
    test::Workspace workspace(std::size_t{1} << 20);
    attend(ctx, attention, cq.view(), kv, sequences, out.view(), lse.view(), workspace);
    attend_backward(ctx, attention, cq.view(), kv, sequences,
                    SavedForward{c_out.view(), saved_lse.view(), c_d_out.view()},
                    AttentionGrads<float>{d_q.view(), d_k.view(), d_v.view()}, workspace);
    straight_through_values(ctx, narrow, z.view(), cv.view(), c_d_v.view(), sequences, d_scores.view(), {});
    CHECK(std::count_if(d_scores.data.begin() + 4, d_scores.data.begin() + 32,
                        [](float d) { return d != 0.0f; }) == 28);
}

// Key 20 of 32 has not left a window of 16: eq. 6 and 7 and c_h are about it all the same.
TEST_CASE("straight-through, penalty and count are about the same keys") {
    constexpr std::int32_t length = 32, window = 16;
    const host ctx{1};
    const Gated<window> policy;
    const Sequences sequences{.batch = 1, .length = length};
    const float lambda[] = {1.0f};
    test::Plane<float> scores(1, 1, length, logit(0.88));
    test::Tensor<float> v(1, 1, length, 8), d_v(1, 1, length, 8);
    for (const bool drawn : {false, true}) {
        std::mt19937 generator(4);
        if (drawn) {
            std::normal_distribution<float> normal(0.0f, 2.0f);
            for (float& z : scores.data) {
                z = normal(generator);
            }
        }
        v.fill_normal(generator);
        d_v.fill_normal(generator);
        if (!drawn) {  // <v, d v> of key 20
            std::fill_n(&v.view().row(0, 0, 20)[0], 8, 1.0f);
            std::fill_n(&d_v.view().row(0, 0, 20)[0], 8, -1.53314f / 8);
        }
        const test::Plane<float>& s = scores;
        const test::Tensor<float>&cv = v, &cd = d_v;
        for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
            test::Plane<float> through(1, 1, length, 7.0f), of_penalty(1, 1, length, 7.0f);
            straight_through_values(ctx, policy, s.view(), cv.view(), cd.view(), sequences, through.view(),
                                    {}, {.scope = scope});
            const double value = test::value_of([&](auto* into) {
                                     RetentionPenalty{.scope = scope, .term = {lambda}}(
                                         ctx, policy, s.view(), sequences, of_penalty.view(), into, {});
                                 }).value;
            double count = -1.0, penalty = 0.0, retained = 0.0;
            retention_counts(ctx, policy, s.view(), sequences, &count, {}, {.scope = scope});
            for (std::int32_t t = 0; t < length; ++t) {
                const bool outside = t + window < length;
                const double r = sigmoid(static_cast<double>(scores.at(0, 0, t))), slope = r * (1.0 - r);
                double dot = 0.0;
                for (std::int32_t i = 0; i < 8; ++i) {
                    dot += static_cast<double>(v.view().row(0, 0, t)[i]) *
                           static_cast<double>(d_v.view().row(0, 0, t)[i]);
                }
                if (scope == gate_scope::all || (outside && t >= 4)) {
                    CHECK(std::abs(static_cast<double>(through.at(0, 0, t)) - dot * slope) < 1e-6);
                    CHECK(std::abs(static_cast<double>(of_penalty.at(0, 0, t)) - (r > 0.5 ? slope : 0.0)) <
                          1e-7);
                    penalty += std::max(0.0, r - 0.5);
                } else {
                    CHECK(through.at(0, 0, t) == 0.0f);
                    CHECK(of_penalty.at(0, 0, t) == 0.0f);
                }
                retained += (scope == gate_scope::all || outside) && (t < 4 || r > 0.5) ? 1.0 : 0.0;
            }
            CHECK(value == doctest::Approx(penalty).epsilon(1e-6));
            CHECK(count == retained);
            if (!drawn) {
                const bool all = scope == gate_scope::all;
                CHECK(count == (all ? 32.0 : 16.0));
                CHECK(static_cast<double>(through.at(0, 0, 20)) ==
                      doctest::Approx(all ? -0.1619 : 0.0).epsilon(1e-4));
                CHECK(static_cast<double>(of_penalty.at(0, 0, 20)) == doctest::Approx(all ? 0.1056 : 0.0));
            }
        }
    }
    // The paper's sums are the default.
    double count = 0.0;
    std::fill(scores.data.begin(), scores.data.end(), 1.0f);
    const test::Plane<float>& s = scores;
    retention_counts(ctx, policy, s.view(), sequences, &count, {});
    CHECK(count == 32.0);
    CHECK(RetentionPenalty{}.scope == gate_scope::all);
    CHECK(GateOptions{}.scope == gate_scope::all);
}

TEST_CASE("a penalty reads no score that the convolution does not have") {
    const Start start;
    start.into.readout_bias[0] = logit(0.27);
    for (const std::int32_t delay : {6, 16}) {
        test::Plane<float> scores(1, 1, 96, 9.0f);
        start.score(delay, scores);
        CHECK(penalty_of(scores, gate_scope::all) == 0.0);
        CHECK(penalty_of(scores, gate_scope::decided) == 0.0);
        const test::Plane<float>& s = scores;
        double count = -1.0;
        retention_counts(host{1}, Gated<16>{}, s.view(), {.batch = 1, .length = 96}, &count, {});
        CHECK(count == 4.0);  // the sinks
    }
    start.into.readout_bias[0] = logit(0.88);
    test::Plane<float> scores(1, 1, 96, 9.0f);
    start.score(6, scores);
    CHECK(penalty_of(scores, gate_scope::all) == doctest::Approx(90 * 0.38));
    start.score(16, scores);
    CHECK(penalty_of(scores, gate_scope::all) == doctest::Approx(80 * 0.38));
}

// LTE<4, 768, 512> holds 4 sinks and 508 other keys beside its window. The controller counts the same keys.
TEST_CASE("controller and cap agree") {
    using Capped = LTE<4, 768, 512, GivenScores>;
    const Gated<768> policy;
    for (const std::int32_t open : {508, 509, 511}) {
        const std::int32_t length = 4 + 600 + 768;
        test::Plane<float> scores(1, 1, length, -1.0f);
        std::fill_n(scores.data.begin() + 4, open, 1.0f);
        const test::Plane<float>& s = scores;
        const Sequences sequences{.batch = 1, .length = length};
        double count = -1.0;
        retention_counts(host{1}, policy, s.view(), sequences, &count, {}, {.scope = gate_scope::decided});
        CHECK(count == open + 4.0);
        retention_counts(host{1}, policy, s.view(), sequences, &count, {});
        CHECK(count == open + 4.0);

        test::Plane<expiry_t> expiry(1, 1, length);
        const Capped capped;
        test::Workspace workspace(build_mask_workspace_bytes(host{1}, capped, sequences, 1));
        build_mask(host{1}, capped, s.view(), sequences, expiry.view(), workspace);
        const auto held = std::count(expiry.data.begin(), expiry.data.begin() + (length - 768), never);
        CHECK(held == std::min(open + 4, 512));

        float lambda = 0.0f;
        double average = 0.0;
        const LambdaController controller{.heads = 1, .lambda = &lambda, .average = &average, .cap = 512.0};
        CHECK((updated(controller, {count}) > 1e-9f) == (held < open + 4));
    }
}

TEST_CASE("as many steps down as up lead back to the least lambda, and one more to 0") {
    float lambda = 0.0f;
    double average = 0.0;
    LambdaController controller{.heads = 1, .lambda = &lambda, .average = &average, .cap = 10.0};
    for (const float factor : {1.5f, 1.2f, 1.1f, 1.01f, 1.0001f, 2.0f, 7.3f}) {
        CAPTURE(factor);
        controller.factor = factor;
        CHECK(updated(controller, {11.0, 11.0, 1.0, 1.0}) == 1e-9f);
        CHECK(updated(controller, {11.0, 11.0, 1.0, 1.0, 1.0}) == 0.0f);
        CHECK(updated(controller, {1.0}) == 0.0f);
        CHECK(updated(controller, {1.0, 1.0, 11.0}) == 1e-9f);
    }
    // Random steps, by their number: lambda = least factor^n, and 0 below n = 0.
    for (const float factor : {1.5f, 1.2f, 1.05f}) {
        CAPTURE(factor);
        controller.factor = factor;
        controller.start(host{1});
        std::mt19937 generator(6);
        for (std::int32_t i = 0, n = 0; i < 2000; ++i) {
            const bool up = n < 20 && generator() % 2 == 0;
            n = up ? n + 1 : std::max(n - 1, -1);
            average = up ? 11.0 : 1.0;
            controller.update(host{1});
            const double wanted = n < 0 ? 0.0 : 1e-9 * std::pow(static_cast<double>(factor), n);
            REQUIRE(std::abs(static_cast<double>(lambda) - std::min(wanted, 1.0)) <= 1e-4 * wanted);
        }
    }
}
