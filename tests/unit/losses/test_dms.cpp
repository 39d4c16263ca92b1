// DMS: its gate, its relaxed gate with and without noise, its loss, against NumPy in float64
// (tests/reference/baselines.py).
#include <kvpolicy/dms.hpp>

#include "../../support/bound_dual.hpp"
#include "../../support/cases.hpp"
#include "../../support/loss_value.hpp"
#include "../../support/refusal.hpp"
#include "../../support/vectors.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

using namespace kvpolicy;

namespace {

struct File {
    std::vector<float> z;
    float temperature, target, scale;
    std::uint64_t seed, stream;
    std::vector<double> bias, slope, loss, loss_slope;  // without noise, then with it

    File() {
        const auto file = kvpolicy_test::vectors::load("baselines.kvpv");
        z = file.get<float>("gates").values;
        const auto& levels = file.get<float>("gate_levels");
        temperature = levels[0], target = levels[1], scale = levels[2];
        seed = static_cast<std::uint64_t>(file.get<std::int32_t>("gate_seed")[0]);
        stream = static_cast<std::uint64_t>(file.get<std::int32_t>("gate_seed")[1]);
        bias = file.get<double>("gate_bias").values;
        slope = file.get<double>("gate_slope").values;
        loss = file.get<double>("loss").values;
        loss_slope = file.get<double>("loss_slope").values;
    }
    [[nodiscard]] DmsGate gate(bool noise) const { return {temperature, noise, seed}; }
    [[nodiscard]] std::size_t at(bool noise, std::size_t t) const { return (noise ? z.size() : 0) + t; }
};

bool close(double a, double b, double relative) {
    return std::fabs(a - b) <= relative * std::fabs(b) + 1e-300;
}

}  // namespace

TEST_CASE("the gate and its noise") {
    const File file;
    for (const bool noise : {false, true}) {
        const DmsGate gate = file.gate(noise);
        for (std::size_t t = 0; t < file.z.size(); ++t) {
            CAPTURE(file.z[t]);
            const gate_place place{file.stream, t};
            const auto wide = gate(static_cast<double>(file.z[t]), place);
            // NumPy's logaddexp and ours differ in their last digits; the noise brings a few more.
            CHECK(close(wide.log_bias, file.bias[file.at(noise, t)], 1e-13));
            CHECK(close(wide.derivative, file.slope[file.at(noise, t)], 1e-13));
            CHECK(wide.open);
            const auto narrow = gate(file.z[t], place);
            CHECK(narrow.log_bias == static_cast<float>(wide.log_bias));
            CHECK(narrow.derivative == static_cast<float>(wide.derivative));
            const double alpha = 1.0 / (1.0 + std::exp(-gate.relaxed(static_cast<double>(file.z[t]), place)));
            CHECK(std::exp(wide.log_bias) == doctest::Approx(1.0 - alpha));
        }
    }
}

TEST_CASE("the relaxed mask: log-biases outside the window, nothing expires") {
    const host ctx{1};
    const DMS<4> policy;
    const DmsGate gate{.temperature = 0.5f, .seed = 7};
    test::Plane<float> scores(2, 3, 20), bias(2, 3, 20, -1.0f), back(2, 3, 20);
    test::Plane<expiry_t> expiry(2, 3, 20);
    std::mt19937 generator(1);
    test::fill_scores(scores, test::Scores::random, generator);
    build_log_bias(ctx, policy, gate, std::as_const(scores).view(), {.batch = 2, .length = 20}, expiry.view(),
                   bias.view(), {});
    test::Plane<float> ones(2, 3, 20, 1.0f);
    log_bias_backward(ctx, policy, gate, std::as_const(scores).view(), std::as_const(ones).view(),
                      {.batch = 2, .length = 20}, back.view(), {});
    for (std::int32_t b = 0; b < 2; ++b) {
        for (std::int32_t h = 0; h < 3; ++h) {
            for (std::int32_t t = 0; t < 20; ++t) {
                const auto answer = gate(scores.at(b, h, t), {static_cast<std::uint64_t>(b * 3 + h),
                                                              static_cast<std::uint64_t>(t)});
                CHECK(expiry.at(b, h, t) == never);
                CHECK(bias.at(b, h, t) == (t < 16 ? answer.log_bias : 0.0f));
                CHECK(back.at(b, h, t) == (t < 16 ? answer.derivative : 0.0f));
            }
        }
    }
}

TEST_CASE("hard decisions: the mask and the cache evict what asks for it, after w queries") {
    const host ctx{1};
    const DMS<4> policy;
    test::Plane<float> scores(1, 1, 30);
    std::mt19937 generator(3);
    test::fill_scores(scores, test::Scores::random, generator);
    scores.at(0, 0, 5) = 0.0f;  // alpha = 0.5 stays
    scores.at(0, 0, 6) = std::nextafter(0.0f, 1.0f);
    test::Plane<expiry_t> expiry(1, 1, 30);
    build_mask(ctx, policy, scores.view(), {.batch = 1, .length = 30}, expiry.view(), {});
    for (std::int32_t t = 0; t < 30; ++t) {
        const bool evict = scores.at(0, 0, t) > 0.0f;
        CHECK((expiry.at(0, 0, t) >= 30) == (!evict || t + 4 >= 30));
        CHECK((expiry.at(0, 0, t) == t + 4 || !evict || t + 4 >= 30));
    }
    CHECK(expiry.at(0, 0, 5) == never);
    CHECK(expiry.at(0, 0, 6) == 10);
    test::BoundDual<DMS<4>, float> bound(
        ctx, {.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 4},
        {.slab_pages = 4, .max_slabs = 20, .max_seq_len = 40}, policy);
    test::Tensor<float> x(1, 1, 30, 8), out(1, 1, 30, 8);
    x.fill_normal(generator);
    const test::Tensor<float>& in = x;
    for (std::int32_t q = 0; q < 30; ++q) {
        bound.reserve(ctx, {.count = 1});
        test::call_ref<DMS<4>, float>(ctx, bound.cache.layer(0), {.count = 1}, in.tokens(q, 1),
                                      in.tokens(q, 1), in.tokens(q, 1), out.tokens(q, 1),
                                      {.scores = std::as_const(scores).tokens(q, 1)}, true);
        bound.cache.advance(ctx, {.count = 1});
        std::vector<position_t> held;
        for (std::int32_t t = 0; t <= q; ++t) {
            if (q < expiry.at(0, 0, t)) {
                held.push_back(t);
            }
        }
        CHECK(bound.sorted(0, 0, 0) == held);
    }
    // A threshold of one's own, and a NaN.
    CHECK(EvictionGate::probability(0.9).threshold.value == doctest::Approx(2.1972246));
    CHECK(!EvictionGate{}.open(std::numeric_limits<float>::quiet_NaN(), HeadParams{}));
    scores.at(0, 0, 2) = std::numeric_limits<float>::quiet_NaN();
    CHECK_REFUSED(build_mask(ctx, policy, scores.view(), {.batch = 1, .length = 30}, expiry.view(), {}),
                  "scores[0][0][2]");
}

TEST_CASE("the compression loss") {
    const host ctx{1};
    const File file;
    const auto n = static_cast<std::int32_t>(file.z.size());
    // The file's stream is 3: head 3 of four, of which the others hold no keys of their own (lengths
    // are by sequence).
    for (const bool noise : {false, true}) {
        const CompressionLoss loss{.target = file.target, .scale = file.scale, .gate = file.gate(noise)};
        test::Plane<double> scores(4, 1, n), d(4, 1, n, 9.0);
        const std::int32_t lengths[] = {0, 0, 0, n};
        for (std::int32_t t = 0; t < n; ++t) {
            scores.at(3, 0, t) = static_cast<double>(file.z[static_cast<std::size_t>(t)]);
        }
        const Sequences sequences{.batch = 4, .length = n, .lengths = lengths};
        const LossValue value = test::value_of(
            [&](auto* into) { loss(ctx, DMS<4>{}, scores.view(), sequences, d.view(), into, {}); });
        CHECK(value.count == n);
        CHECK(close(value.value, file.loss[noise ? 1 : 0], 1e-13));
        for (std::int32_t t = 0; t < n; ++t) {
            CHECK(d.at(0, 0, t) == 9.0);
            CHECK(close(d.at(3, 0, t), file.loss_slope[file.at(noise, static_cast<std::size_t>(t))], 1e-13));
        }
        // Counting decisions leaves the gradient as it is.
        CompressionLoss counting = loss;
        counting.straight_through = true;
        test::Plane<double> same(4, 1, n);
        double evicted = 0.0;
        for (std::int32_t t = 0; t < n; ++t) {
            const gate_place place{file.stream, static_cast<std::uint64_t>(t)};
            evicted += loss.gate.relaxed(scores.at(3, 0, t), place) > 0.0 ? 1.0 : 0.0;
        }
        CHECK(test::value_of([&](auto* into) {
                  counting(ctx, DMS<4>{}, scores.view(), sequences, same.view(), into, {});
              }).value == doctest::Approx(2.0 * (0.75 - evicted / n)));
        for (std::int32_t t = 0; t < n; ++t) {
            CHECK(same.at(3, 0, t) == d.at(3, 0, t));
        }
        // Two layers as one loss: the sums of both, and each layer's part of the gradient.
        CompressionLoss both = loss;
        EvictionSums sums;
        loss.sums(ctx, DMS<4>{}, std::as_const(scores).view(), sequences, &sums, {});
        CHECK(sums.keys == n);
        both.total = {sums.evicted * 2.0, sums.keys * 2};
        test::Plane<double> half(4, 1, n);
        CHECK(test::value_of([&](auto* into) {
                  both(ctx, DMS<4>{}, scores.view(), sequences, half.view(), into, {});
              }).value == doctest::Approx(value.value));
        for (std::int32_t t = 0; t < n; ++t) {
            CHECK(half.at(3, 0, t) == doctest::Approx(d.at(3, 0, t) / 2.0));
        }
        // The gradient is that of the value.
        for (const std::int32_t t : {0, 7, 20}) {
            const double step = 1e-5, here = scores.at(3, 0, t);
            const auto at = [&](double z) {
                scores.at(3, 0, t) = z;
                const double v = test::value_of([&](auto* into) {
                                     loss(ctx, DMS<4>{}, scores.view(), sequences, half.view(), into, {});
                                 }).value;
                scores.at(3, 0, t) = here;
                return v;
            };
            CHECK((at(here + step) - at(here - step)) / (2.0 * step) ==
                  doctest::Approx(d.at(3, 0, t)).epsilon(1e-5));
        }
    }
    // More than was asked for costs nothing; only keys whose gate is asked; nothing at all.
    test::Plane<float> scores(1, 1, 10, 8.0f), d(1, 1, 10, 9.0f);
    CHECK(test::value_of([&](auto* into) {
              CompressionLoss{.target = 0.5f, .gate = {.noise = false}}(
                  ctx, DMS<4>{}, scores.view(), {.batch = 1, .length = 10}, d.view(), into, {});
          }).value == 0.0);
    CHECK(d.at(0, 0, 3) == 0.0f);
    CHECK(test::value_of([&](auto* into) {
              CompressionLoss{.target = 1.0f, .gate = {.noise = false}, .scope = gate_scope::decided}(
                  ctx, DMS<4>{}, scores.view(), {.batch = 1, .length = 10}, d.view(), into, {});
          }).count == 6);
    CHECK(d.at(0, 0, 5) < 0.0f);
    CHECK(d.at(0, 0, 6) == 0.0f);
    CHECK(test::value_of([&](auto* into) {
              CompressionLoss{.target = 1.0f}(ctx, DMS<4>{}, scores.view(), {.batch = 1, .length = 0},
                                              d.view(), into, {});
          }).value == 0.0);
}

TEST_CASE("schedule and refusals") {
    const host ctx{1};
    CHECK(eviction_target(0, 8.0) == 0.0f);
    CHECK(eviction_target(100, 8.0) == 0.5f);
    CHECK(eviction_target(300, 8.0) == 0.75f);
    CHECK(eviction_target(100000, 8.0) == 0.875f);
    CHECK_REFUSED(eviction_target(-1, 8.0), "step: -1");
    CHECK_REFUSED(eviction_target(1, 0.5), "compression: 0.5");
    test::Plane<float> scores(1, 1, 10), d(1, 1, 10);
    const auto call = [&](const CompressionLoss& loss) {
        return test::value_of([&](auto* into) {
            loss(ctx, DMS<4>{}, scores.view(), {.batch = 1, .length = 10}, d.view(), into, {});
        });
    };
    CHECK_REFUSED(call({.target = 1.5f}), "CompressionLoss.target: 1.5");
    CHECK_REFUSED(call({.target = 0.5f, .gate = {.temperature = 0.0f}}), "DmsGate.temperature: 0");
    CHECK_REFUSED(call({.target = 0.5f, .total = {1.0, 3}}), "CompressionLoss.total.keys: 3");
    scores.at(0, 0, 4) = std::numeric_limits<float>::quiet_NaN();
    CHECK_REFUSED(call({.target = 0.5f}), "scores[0][0][4]");
    // With a status the key counts, with alpha and gradient 0, as on a device.
    for (const bool straight_through : {false, true}) {
        const CompressionLoss loss{
            .target = 1.0f, .gate = {.noise = false}, .straight_through = straight_through};
        std::uint32_t status = status_ok;
        const CompressionOptions options{.status = &status};
        const auto with_status = [&] {
            return test::value_of([&](auto* into) {
                loss(ctx, DMS<4>{}, scores.view(), {.batch = 1, .length = 10}, d.view(), into, {}, options);
            });
        };
        const LossValue value = with_status();
        CHECK(status == status_nan_score);
        CHECK(value.count == 10);
        CHECK(d.at(0, 0, 4) == 0.0f);
        CHECK(d.at(0, 0, 5) < 0.0f);
        EvictionSums sums;
        loss.sums(ctx, DMS<4>{}, scores.view(), {.batch = 1, .length = 10}, &sums, {}, options);
        CHECK(sums.keys == 10);
        scores.at(0, 0, 4) = -std::numeric_limits<float>::infinity();
        CHECK(with_status().value == value.value);
        scores.at(0, 0, 4) = std::numeric_limits<float>::quiet_NaN();
    }
}
