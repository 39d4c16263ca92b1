// Soft gates as log-biases, and the losses and gradients of gates.
#include <kvpolicy/losses/gates.hpp>
#include <kvpolicy/masks/log_bias.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/cases.hpp"
#include "../../support/differences.hpp"
#include "../../support/lifetime_cases.hpp"
#include "../../support/loss_value.hpp"
#include "../../support/normal.hpp"
#include "../../support/refusal.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace kvpolicy;

namespace {

using Gated = Policy<Sink<2>, Window<4>, ThresholdGate<at_least>>;

double sigmoid(double z) { return 1.0 / (1.0 + std::exp(-z)); }

template <class G>
void check_slope(const G& gate, double z) {
    CAPTURE(z);
    const gate_value<double> at = gate(z, {3, 5});
    double moved = z;
    const double slope = test::difference(
        z, 1e-3, [&](double x) { moved = x; },
        [&] {
            return gate(moved, gate_place{3, 5}).log_bias;
        });
    CHECK(std::abs(at.derivative - slope) < 1e-9);
    const gate_value<float> single = gate(static_cast<float>(z), {3, 5});
    CHECK(single.open == at.open);
    // fp32: exp and log are within a few ulp of numbers up to |z| + 1.
    CHECK(std::abs(static_cast<double>(single.log_bias) - at.log_bias) <= 0x1p-21 * (std::abs(z) + 1.0));
    CHECK(std::abs(static_cast<double>(single.derivative) - at.derivative) <= 0x1p-21);
}

}  // namespace

TEST_CASE("gates: values and slopes") {
    for (double z = -9.5; z < 10.0; z += 0.75) {
        check_slope(SoftGate{}, z);
        check_slope(SoftWriteGate{}, z);
        check_slope(SoftWriteGate{0.25f}, z);
        check_slope(AnnealedGate{0.375f, 0.5f}, z);
        check_slope(ThresholdSoftGate{0.25f}, z);
        CHECK(SoftGate{}(z).log_bias == doctest::Approx(std::log(sigmoid(z))).epsilon(1e-12));
        CHECK(SoftWriteGate{0.25f}(z).log_bias ==
              doctest::Approx(std::log(sigmoid(z) + 0.25)).epsilon(1e-12));
        const bool above = z >= 0.0;
        CHECK(AnnealedGate{0.375f, 0.5f}(z).log_bias ==
              doctest::Approx(std::log(0.625 * sigmoid(z) + (above ? 0.375 : 0.0))).epsilon(1e-12));
        CHECK(AnnealedGate{0.375f, 0.5f}(z).open);
        CHECK(AnnealedGate{1.0f, 0.5f}(z).open == above);
        CHECK(AnnealedGate{1.0f, 0.5f}(z).log_bias == 0.0);
        CHECK(AnnealedGate{0.0f, 0.5f}(z).log_bias == SoftGate{}(z).log_bias);
        CHECK(ThresholdSoftGate{0.5f}(z).open == above);
    }
    // Far out: log u is z itself, never -infinity.
    CHECK(SoftGate{}(-1000.0f).log_bias == -1000.0f);
    CHECK(SoftGate{}(1000.0f).log_bias == 0.0f);
    CHECK(std::isfinite(SoftWriteGate{0.0f}(-1000.0f).derivative));
    CHECK(std::isfinite(AnnealedGate{0.5f, 0.0f}(-1000.0f).log_bias));
}

TEST_CASE("Bernoulli gates draw u, clipped, by place") {
    for (const float clip : {0.0f, 0.1f}) {
        for (const double z : {-30.0, -1.0, 0.0, 2.0, 30.0}) {
            const BernoulliGate gate{clip, 7};
            int open = 0;
            for (std::uint64_t t = 0; t < 20000; ++t) {
                const gate_value<double> one = gate(z, {1, t});
                CHECK(one.open == gate(static_cast<float>(z), {1, t}).open);
                CHECK(one.derivative == doctest::Approx(sigmoid(-z)));
                open += one.open ? 1 : 0;
            }
            const double expected =
                std::min(std::max(sigmoid(z), static_cast<double>(clip)), 1.0 - static_cast<double>(clip));
            CHECK(std::abs(open / 20000.0 - expected) < 0.015);  // 4 standard errors
        }
    }
}

TEST_CASE("a log-bias mask, and the way back") {
    const host on{2};
    const Gated policy;
    std::mt19937 generator(1);
    test::Normal<float> normal(0.0f, 2.0f);
    test::Plane<float> scores(1, 2, 40), d_bias(1, 2, 40), bias(1, 2, 40, 9.0f), d_scores(1, 2, 40, 9.0f);
    test::Plane<expiry_t> expiry(1, 2, 40, 9);
    for (float& x : scores.data) {
        x = normal(generator);
    }
    for (float& x : d_bias.data) {
        x = normal(generator);
    }
    scores.at(0, 0, 38) = std::numeric_limits<float>::quiet_NaN();  // never leaves the window
    scores.at(0, 1, 1) = std::numeric_limits<float>::quiet_NaN();   // a sink
    const std::vector<std::int32_t> edges{0, 15, 38};
    const test::Plane<float>&s = scores, &d = d_bias;
    for (const bool packed : {false, true}) {
        Sequences sequences{.batch = 1, .length = 38};
        if (packed) {
            sequences.cu_seqlens = edges.data(), sequences.segments = 2;
        }
        const BernoulliGate gate{0.0f, 3};
        build_log_bias(on, policy, gate, s.view(), sequences, expiry.view(), bias.view(), {});
        log_bias_backward(on, policy, gate, s.view(), d.view(), sequences, d_scores.view(), {});
        for (std::int32_t h = 0; h < 2; ++h) {
            for (std::int32_t t = 0; t < 38; ++t) {
                const std::int32_t begin = packed && t >= 15 ? 15 : 0, end = packed && t < 15 ? 15 : 38;
                const bool decided = t - begin >= 2 && t + 4 < end;
                const auto z = scores.at(0, h, t);
                const gate_value<float> one =
                    gate(z, {static_cast<std::uint64_t>(h), static_cast<std::uint64_t>(t)});
                const expiry_t lasting = packed ? end : never;
                CHECK(expiry.at(0, h, t) == (decided && !one.open ? t + 4 : lasting));
                CHECK(bias.at(0, h, t) == 0.0f);
                CHECK(d_scores.at(0, h, t) == (decided ? one.derivative * d_bias.at(0, h, t) : 0.0f));
            }
        }
        build_log_bias(on, policy, SoftGate{}, s.view(), sequences, expiry.view(), bias.view(), {});
        CHECK(bias.at(0, 0, 8) == SoftGate{}(scores.at(0, 0, 8)).log_bias);
        CHECK(bias.at(0, 0, 1) == 0.0f);
        CHECK(bias.at(0, 0, 35) == 0.0f);
        CHECK(bias.at(0, 0, 39) == 9.0f);
    }
    std::int32_t windows[2];
    windows_of(policy, 2, windows);
    CHECK(windows[1] == 4);
    scores.at(0, 1, 9) = std::numeric_limits<float>::quiet_NaN();
    const Sequences sequences{.batch = 1, .length = 38};
    const auto call = [&](auto gate) {
        build_log_bias(on, policy, gate, s.view(), sequences, expiry.view(), bias.view(), {});
    };
    CHECK_REFUSED(call(SoftGate{}), "scores[0][1][9]: NaN");
    // With a status the gate is closed to NaN, as on a device.
    d_bias.at(0, 1, 9) = std::numeric_limits<float>::infinity();
    for (std::uint32_t status = 0; const bool back : {false, true}) {
        const MaskOptions options{.status = &status};
        if (back) {
            log_bias_backward(on, policy, SoftGate{}, s.view(), d.view(), sequences, d_scores.view(), {},
                              options);
            CHECK(d_scores.at(0, 1, 9) == 0.0f);
            CHECK(d_scores.at(0, 1, 10) == SoftGate{}(scores.at(0, 1, 10)).derivative * d_bias.at(0, 1, 10));
        } else {
            build_log_bias(on, policy, SoftGate{}, s.view(), sequences, expiry.view(), bias.view(), {},
                           options);
            CHECK(expiry.at(0, 1, 9) == 13);
            CHECK(expiry.at(0, 1, 10) == never);
            CHECK(bias.at(0, 1, 9) == 0.0f);
            CHECK(bias.at(0, 1, 10) == SoftGate{}(scores.at(0, 1, 10)).log_bias);
        }
        CHECK(status == status_nan_score);
        status = 0;
    }
    scores.at(0, 1, 9) = 0.0f;
    CHECK_REFUSED(call(AnnealedGate{1.5f, 0.5f}), "AnnealedGate.alpha: 1.5");
    CHECK_REFUSED(call(ThresholdSoftGate{-0.5f}), "ThresholdSoftGate.tau: -0.5");
    CHECK_REFUSED(call(BernoulliGate{0.75f, 0}), "BernoulliGate.clip: 0.75");
    CHECK_REFUSED(call(SoftWriteGate{-1.0f}), "SoftWriteGate.epsilon: -1");
}

TEST_CASE("gate losses by formula and by differences") {
    const host on{2};
    const Gated policy;
    std::mt19937 generator(2);
    test::Plane<double> scores(2, 2, 30), d(2, 2, 30);
    test::Normal<double> normal(0.0, 2.0);
    for (double& x : scores.data) {
        x = normal(generator);
    }
    const test::Plane<double>& s = scores;
    const std::vector<std::int32_t> lengths{30, 17};
    const Sequences sequences{.batch = 2, .length = 30, .lengths = lengths.data()};
    const float lambda[2] = {0.5f, 0.125f};
    for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
        double sparse = 0.0, density = 0.0, penalty = 0.0, count = 0.0;
        for (std::int32_t b = 0; b < 2; ++b) {
            for (std::int32_t h = 0; h < 2; ++h) {
                const std::int32_t length = lengths[static_cast<std::size_t>(b)];
                for (std::int32_t t = 0; t < length; ++t) {
                    if (scope == gate_scope::decided && (t < 2 || t + 4 >= length)) {
                        continue;
                    }
                    const double g = sigmoid(scores.at(b, h, t));
                    sparse += g + g * (1.0 - g);
                    density += g;
                    penalty += static_cast<double>(lambda[h]) * std::max(0.0, g - 0.5) / 2.0;
                    count += 1.0;
                }
            }
        }
        const auto check = [&](auto loss, double expected) {
            const LossValue got = test::value_of(
                [&](auto* into) { loss(on, policy, s.view(), sequences, d.view(), into, {}); });
            CHECK(got.value == doctest::Approx(expected).epsilon(1e-12));
            CHECK(static_cast<double>(got.count) == count);
            const test::Plane<double> gradient = d;
            for (std::size_t i = 0; i < scores.data.size(); i += 3) {
                if (i % 60 >= 47 && i >= 60) {
                    continue;
                }
                const double slope = test::difference(
                    scores.data[i], 1e-3, [&](double x) { scores.data[i] = x; },
                    [&] {
                        return test::value_of([&](auto* into) {
                                   loss(on, policy, s.view(), sequences, d.view(), into, {});
                               })
                            .value;
                    });
                if (static_cast<std::int32_t>(i % 30) < lengths[i / 60]) {
                    CHECK(test::relative(gradient.data[i], slope, 1e-2) < 1e-6);
                }
            }
        };
        check(GateSparsity{2.0f, scope}, 2.0 * sparse / count);
        check(GateDensity{2.0f, scope}, -2.0 * density / count);
        check(RetentionPenalty{.scope = scope, .term = {lambda}}, penalty);
    }
    const Sequences nothing{.batch = 2, .length = 0};
    CHECK(test::value_of([&](auto* into) {
              GateSparsity{}(on, policy, s.view(), nothing, d.view(), into, {});
          }).count == 0);
    scores.at(1, 0, 7) = std::numeric_limits<double>::quiet_NaN();
    CHECK_REFUSED(test::value_of([&](auto* into) {
                      GateSparsity{}(on, policy, s.view(), sequences, d.view(), into, {});
                  }),
                  "scores[1][0][7]: NaN");
    CHECK_REFUSED(test::value_of([&](auto* into) {
                      RetentionPenalty{}(on, policy, s.view(), sequences, d.view(), into, {});
                  }),
                  "lambda: null");
}

TEST_CASE("straight-through values, counts and the lambda controller") {
    const host on{2};
    const Gated policy;
    std::mt19937 generator(3);
    test::Tensor<double> v(1, 2, 12, 8), d_v(1, 2, 12, 8);
    v.fill_normal(generator);
    d_v.fill_normal(generator);
    test::Plane<double> scores(1, 2, 12), d(1, 2, 12, 7.0);
    for (std::int32_t t = 0; t < 12; ++t) {
        scores.at(0, 0, t) = t % 3 - 1.0, scores.at(0, 1, t) = 0.0;
    }
    const test::Plane<double>& s = scores;
    const test::Tensor<double>&cv = v, &cd = d_v;
    const Sequences sequences{.batch = 1, .length = 12};
    const GateOptions decided{.scope = gate_scope::decided};
    for (const bool all : {true, false}) {
        straight_through_values(on, policy, s.view(), cv.view(), cd.view(), sequences, d.view(), {},
                                all ? GateOptions{} : decided);
        for (std::int32_t t = 0; t < 12; ++t) {
            double dot = 0.0;
            for (std::int32_t i = 0; i < 8; ++i) {
                dot += v.view().row(0, 0, t)[i] * d_v.view().row(0, 0, t)[i];
            }
            const double r = sigmoid(scores.at(0, 0, t));
            const double wanted = !all && (t < 2 || t >= 8) ? 0.0 : dot * r * (1.0 - r);
            CHECK(std::abs(d.at(0, 0, t) - wanted) < 1e-14);
        }
    }
    d_v.view().row(0, 1, 5)[2] = std::numeric_limits<double>::quiet_NaN();
    const auto again = [&] {
        straight_through_values(on, policy, s.view(), cv.view(), cd.view(), sequences, d.view(), {});
    };
    CHECK_REFUSED(again(), "d_v[0][1][5]");

    double counts[2] = {-1.0, -1.0};
    retention_counts(on, policy, s.view(), sequences, counts, {}, decided);
    CHECK(counts[0] == 2.0 + 2.0);  // t = 2 and 5 of 2 .. 7 have z = 1; two sinks
    CHECK(counts[1] == 0.0 + 2.0);  // r = 0.5 is not above 0.5
    retention_counts(on, policy, s.view(), sequences, counts, {});
    CHECK(counts[0] == 4.0 + 2.0);  // and t = 8 and 11
    CHECK(counts[1] == 0.0 + 2.0);
    const Policy<Window<4>, kvpolicy_test::KeepEvery> keeping{Window<4>{}, {3}};
    retention_counts(on, keeping, s.view(), sequences, counts, {}, decided);
    CHECK(counts[0] == 3.0 + 2.0);  // t = 0, 3, 6 by position, 2 and 5
    CHECK(counts[1] == 3.0);

    float lambda[3];
    double average[3];
    const LambdaController controller{
        .heads = 3, .lambda = lambda, .average = average, .cap = 10.0, .factor = 2.0f};
    controller.start(on);
    CHECK(lambda[2] == 1e-9f);
    CHECK(controller.due(0));
    CHECK(!controller.due(31));
    CHECK(controller.due(64));
    const double seen[3] = {20.0, 9.75, 1.0};
    controller.observe(on, seen);
    CHECK(average[0] == 20.0);
    controller.update(on);
    CHECK(lambda[0] == 2e-9f);
    CHECK(lambda[1] == 1e-9f);  // within [0.95 cap, cap]: as it was
    CHECK(lambda[2] == 0.0f);
    const double later[3] = {30.0, 9.75, 2000.0};
    controller.observe(on, later);
    const double a = 2.0 / (1.0 + 16.0);
    CHECK(average[0] == doctest::Approx((1.0 - a) * 20.0 + a * 30.0));
    controller.update(on);
    CHECK(lambda[2] == 1e-9f);  // woken again
    for (int i = 0; i < 100; ++i) {
        controller.update(on);
    }
    CHECK(lambda[0] == 1.0f);
    const double bad[3] = {1.0, std::numeric_limits<double>::quiet_NaN(), 1.0};
    CHECK_REFUSED(controller.observe(on, bad), "counts[1]: nan");
    CHECK_REFUSED(controller.observe(on, nullptr), "counts: null");
    CHECK(controller.due(0));
    CHECK_FALSE(controller.due(1));
    CHECK_REFUSED(LambdaController{.every = 0}.due(1), "every: 0");
    std::int32_t windows[2] = {-9, -9};
    const Policy<Window<7>> plain;
    windows_of(plain, 2, windows);
    CHECK(windows[1] == 7);
    CHECK_REFUSED(windows_of(plain, 2, windows, -1), "layer: -1");
    CHECK_REFUSED(windows_of(plain, 2, nullptr), "out: null");
    LambdaController other = controller;
    other.factor = 1.0f;
    CHECK_REFUSED(other.update(on), "factor: 1");
}

TEST_CASE("a length out of range counts as 0 where a status is given, and is refused where none is") {
    const host ctx{1};
    const Gated policy;
    const test::Plane<float> scores(2, 1, 20, 1.0f);
    test::Plane<float> d(2, 1, 20, -5.0f), wanted(2, 1, 20, -5.0f);
    const std::int32_t bad[] = {20, 21}, good[] = {20, 0};
    const Sequences sequences{.batch = 2, .length = 20, .lengths = bad};
    std::uint32_t status[2] = {0, 0};
    LossValue value;
    GateSparsity{}(ctx, policy, scores.view(), sequences, d.view(), &value, {}, {.status = status});
    CHECK(status[0] == status_ok);
    CHECK(status[1] == status_bad_length);
    LossValue alone;
    GateSparsity{}(ctx, policy, scores.view(), {.batch = 2, .length = 20, .lengths = good}, wanted.view(),
                   &alone, {});
    CHECK(value.value == alone.value);
    CHECK(d.data == wanted.data);
    CHECK_REFUSED(GateSparsity{}(ctx, policy, scores.view(), sequences, d.view(), &value, {}),
                  "sequences.lengths[1]: 21");
    // Edges that do not rise leave no sequence any token.
    const std::int32_t edges[] = {0, 12, 8};
    status[1] = status_ok;
    GateSparsity{}(ctx, policy, scores.view(), {.batch = 2, .length = 20, .cu_seqlens = edges, .segments = 2},
                   d.view(), &value, {}, {.status = status});
    CHECK(status[0] == status_bad_length);
    CHECK(status[1] == status_bad_length);
    CHECK(value.count == 0);
    CHECK(d.data == wanted.data);
}

TEST_CASE("with a status, a NaN score adds 0, has gradient 0 and is reported, as on a device") {
    const host ctx{2};
    const Gated policy;
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    test::Plane<double> scores(2, 1, 20, 1.0), d(2, 1, 20, -5.0), rest(2, 1, 20, -5.0);
    const test::Plane<double>& s = scores;
    const Sequences sequences{.batch = 2, .length = 20};
    std::uint32_t status[2] = {0, 0};
    const float lambda[] = {0.5f};
    const auto check = [&](const auto& loss) {
        const auto call = [&](auto& to) {
            return test::value_of([&](auto* into) {
                loss(ctx, policy, s.view(), sequences, to.view(), into, {}, {.status = status});
            });
        };
        scores.at(1, 0, 7) = 1.0;
        const LossValue all = call(rest);
        CHECK(status[1] == status_ok);
        scores.at(1, 0, 7) = nan;
        const LossValue value = call(d);
        CHECK(status[0] == status_ok);
        CHECK(status[1] == status_nan_score);
        status[1] = status_ok;
        CHECK(value.count == all.count);
        const double term = loss.term(static_cast<double>(loss.scale), 0, 1.0).value;
        const double over =
            loss.term.mean_over_keys ? static_cast<double>(all.count) : static_cast<double>(sequences.batch);
        CHECK(std::abs(value.value - (all.value - term / over)) < 1e-14);
        CHECK(d.at(1, 0, 7) == 0.0);
        d.at(1, 0, 7) = rest.at(1, 0, 7);
        CHECK(d.data == rest.data);
    };
    for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
        check(GateSparsity{.scope = scope});
        check(GateDensity{.scope = scope});
        check(RetentionPenalty{.scope = scope, .term = {lambda}});
    }

    // Straight-through values: v and d_v are reported, too.
    test::Tensor<double> v(2, 1, 20, 8), d_v(2, 1, 20, 8);
    v.fill(1.0f), d_v.fill(2.0f);
    const test::Tensor<double>&cv = v, &cd = d_v;
    const GateOptions options{.scope = gate_scope::decided, .status = status};
    d_v.view().row(0, 0, 8)[3] = nan;
    d_v.view().row(0, 0, 1)[3] = nan;  // a sink: not read
    straight_through_values(ctx, policy, s.view(), cv.view(), cd.view(), sequences, d.view(), {}, options);
    CHECK(status[0] == status_not_finite);
    CHECK(status[1] == status_nan_score);
    CHECK(d.at(0, 0, 1) == 0.0);
    CHECK(std::isnan(d.at(0, 0, 8)));
    CHECK(d.at(1, 0, 7) == 0.0);
    CHECK(std::abs(d.at(1, 0, 8) - 16.0 * sigmoid(1.0) * sigmoid(-1.0)) < 1e-14);

    // A NaN score is not above 0.
    status[0] = status[1] = status_ok;
    double count = 0.0;
    retention_counts(ctx, policy, s.view(), sequences, &count, {}, options);
    CHECK(count == (16.0 + 15.0) / 2.0);
    CHECK(status[0] == status_ok);
    CHECK(status[1] == status_nan_score);
    retention_counts(ctx, policy, s.view(), sequences, &count, {});
    CHECK(count == (20.0 + 19.0) / 2.0);
}
