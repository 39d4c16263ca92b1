// The optimizer of the training examples: against its formula, the schedule, resuming, and a
// scorer that learns.
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/initialize.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "../../../examples/train/adamw.hpp"
#include "../../support/cases.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

using namespace kvpolicy;

TEST_CASE("AdamW by its formula, and resumed") {
    train::AdamWOptions options;
    options.clip = 2.0;
    options.weight_decay = 0.125;
    std::vector<float> a{1.0f, -2.0f, 0.5f}, b{3.0f};
    train::AdamW adam(options);
    adam.add("a", a.data(), a.size(), true);
    adam.add("b", b.data(), b.size(), false, 30.0);
    double m = 0.0, v = 0.0, p = 1.0, pb = 3.0, mb = 0.0, vb = 0.0;
    for (int n = 1; n <= 20; ++n) {
        adam.zero_gradients();
        adam.arrays[0].gradient = {static_cast<float>(n), 0.0f, 0.0f};
        adam.arrays[1].gradient = {1.0f};
        const double size = adam.step(0.01), norm = std::sqrt(n * n + 1.0);
        CHECK(size == doctest::Approx(norm));
        const auto update = [&](double& mean, double& square, double& x, double g, double decay,
                                double factor = 1.0) {
            g *= norm > 2.0 ? 2.0 / norm : 1.0;
            mean = 0.9 * mean + 0.1 * g;
            square = 0.95 * square + 0.05 * g * g;
            x -= 0.01 * factor *
                 (mean / (1.0 - std::pow(0.9, n)) / (std::sqrt(square / (1.0 - std::pow(0.95, n))) + 1e-8) +
                  decay * x);
        };
        update(m, v, p, n, 0.125);
        update(mb, vb, pb, 1.0, 0.0, 30.0);
        CHECK(static_cast<double>(a[0]) == doctest::Approx(p).epsilon(1e-5));
        CHECK(static_cast<double>(b[0]) == doctest::Approx(pb).epsilon(1e-5));
    }
    CHECK(a[1] != -2.0f);  // decay alone
    std::vector<float> a2 = a, b2 = b;
    train::AdamW other(options);
    other.add("a", a2.data(), 3, true);
    other.add("b", b2.data(), 1, false, 30.0);
    other.steps_taken = adam.steps_taken;
    for (std::size_t i = 0; i < 2; ++i) {
        other.arrays[i].first = adam.arrays[i].first;
        other.arrays[i].second = adam.arrays[i].second;
        other.arrays[i].gradient = adam.arrays[i].gradient;
    }
    adam.step(0.02);
    other.step(0.02);
    CHECK(a == a2);
    CHECK(b == b2);
    adam.arrays[0].gradient[1] = std::nanf("");
    CHECK(!std::isfinite(adam.step(0.02)));
    CHECK(a == a2);
}

TEST_CASE("warm-up and cosine") {
    const train::Schedule schedule{1e-3, 8e-5, 100, 1000};
    CHECK(schedule.at(0) == doctest::Approx(1e-5));
    CHECK(schedule.at(99) == doctest::Approx(1e-3));
    CHECK(schedule.at(100) == doctest::Approx(1e-3));
    CHECK(schedule.at(999) == doctest::Approx(8e-5));
    CHECK(schedule.at(5000) == 8e-5);
    for (std::int64_t i = 100; i < 999; ++i) {
        CHECK(schedule.at(i) > schedule.at(i + 1));
    }
    CHECK(train::Schedule{1.0, 0.5, 0, 1}.at(0) == 0.5);
}

TEST_CASE("scorers learn a target that their input holds, with the library's losses and gradients") {
    // The target is a nonlinear function of each key: labels follow from it, and a scorer that finds it
    // agrees with the teacher.
    const host ctx{2};
    const std::int32_t length = 256, dim = 8, heads = 2;
    std::mt19937 generator(3);
    test::Tensor<float> k(1, heads, length, dim), v(1, heads, length, dim);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<float> target(1, heads, length), scores(1, heads, length), d_scores(1, heads, length);
    for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t t = 0; t < length; ++t) {
            target.at(0, h, t) = 2.0f * k.view().row(0, h, t)[0] - std::abs(v.view().row(0, h, t)[h]);
        }
    }
    const Sequences sequences{.batch = 1, .length = length};
    const test::Tensor<float>&ck = k, &cv = v;
    const test::Plane<float>&cs = scores, &ct = target, &cd = d_scores;

    const auto learn = [&](auto scorer, std::int32_t delay) {
        using Scorer = decltype(scorer);
        typename Scorer::template parameters<float> parameters, gradients;
        std::vector<std::vector<float>> memory;
        memory.reserve(16);
        for_each_parameter(scorer, parameters, [&](const char*, float*& array, std::size_t count, bool) {
            array = memory.emplace_back(count).data();
        });
        initialize(scorer, parameters, 1);
        train::AdamW adam;
        adam.arrays.reserve(16);
        std::vector<float*> pointers;
        for_each_parameter(scorer, parameters, [&](const char* name, float*& array, std::size_t count, bool) {
            pointers.push_back(adam.add(name, array, count, count > 64));
        });
        std::size_t i = 0;
        for_each_parameter(scorer, gradients,
                           [&](const char*, float*& array, std::size_t, bool) { array = pointers[i++]; });
        std::vector<const float*> weights;
        for_each_parameter(scorer, parameters,
                           [&](const char*, float*& array, std::size_t, bool) { weights.push_back(array); });
        i = 0;
        for_each_parameter(scorer, scorer.weights, [&](const char*, const float*& array, std::size_t, bool) {
            array = weights[i++];
        });

        BoundaryLoss loss;
        double alpha = 0.0;
        const auto evaluate = [&](bool step) {
            const float log_gamma = log_gamma_of(alpha, 0.999, 0.999999);
            const Policy<Sink<2>, Window<8>, TopKBudget<30>, Decay<1>> policy{
                {}, {}, {}, Decay<1>{log_gamma}};
            std::fill(scores.data.begin(), scores.data.end(), 0.0f);
            test::Workspace for_scores(
                score_sequence_workspace_bytes(ctx, scorer, ck.view(), cv.view(), sequences));
            score_sequence(ctx, scorer, ck.view(), cv.view(), sequences, delay, scores.view(), for_scores);
            std::vector<double> d_log_gamma(static_cast<std::size_t>(heads), 0.0);
            test::Workspace for_loss(loss.workspace_bytes(ctx, policy, sequences, heads));
            BoundaryValue value;
            loss(ctx, policy, cs.view(), ct.view(), sequences, d_scores.view(), d_log_gamma.data(), &value,
                 for_loss);
            if (step) {
                adam.zero_gradients();
                const ScoreBackward<float> call{ck.view(), cv.view(), sequences, delay, cd.view()};
                test::Workspace for_backward(score_sequence_backward_workspace_bytes(ctx, scorer, call));
                score_sequence_backward(ctx, scorer, call, gradients, for_backward);
                adam.step(1e-2);
                alpha -= 1e-2 * (d_log_gamma[0] + d_log_gamma[1]) * log_gamma_slope(alpha, 0.999, 0.999999);
            }
            return value;
        };
        const BoundaryValue before = evaluate(false);
        for (int n = 0; n < 150; ++n) {
            evaluate(true);
        }
        const BoundaryValue after = evaluate(false);
        CHECK(after.value < 0.3 * before.value);
        CHECK(static_cast<double>(after.agreed) > 0.93 * static_cast<double>(after.count));
    };
    MlpScorer<> mlp;
    mlp.heads = heads, mlp.head_dim_qk = mlp.head_dim_vo = dim, mlp.hidden = 32;
    learn(mlp, 0);
    mLSTMScorer<> mlstm;
    mlstm.heads = heads, mlstm.head_dim_qk = mlstm.head_dim_vo = dim, mlstm.d_qk = 8, mlstm.d_v = 8;
    learn(mlstm, 8);
}
