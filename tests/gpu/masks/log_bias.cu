// Soft gates on CUDA against the host: expiries and draws alike, biases and slopes to 4 ulp.
#include <kvpolicy/masks/log_bias.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/lifetime_cases.hpp"
#include "../../support/refusal.hpp"
#include "../support/mask_check.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;
using kvpolicy_test::KeepEvery;

namespace {

using Plain = Policy<Sink<>, Window<>>;
using Kept = Policy<Sink<>, Window<>, KeepEvery>;

/// How many fp32 numbers lie between two.
std::int64_t ulps(float a, float b) {
    const auto place = [](float x) {
        const auto bits = std::bit_cast<std::int32_t>(x);
        return bits < 0 ? std::int64_t{std::numeric_limits<std::int32_t>::min()} - bits : std::int64_t{bits};
    };
    return std::abs(place(a) - place(b));
}

void close(const std::vector<float>& got, const std::vector<float>& wanted, const std::string& what) {
    std::int64_t worst = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        worst = std::max(worst, ulps(got[i], wanted[i]));
    }
    CHECK_MESSAGE(worst <= 4, what, ": ", worst, " ulp");
}

template <class P, class G>
void check_gate(const P& policy, const G& gate, MaskCase& input, const std::string& what) {
    const std::int32_t batch = input.scores.batch, heads = input.scores.heads, length = input.scores.length;
    const Plane<float>& scores = input.scores;
    const std::size_t count = scores.data.size();
    const std::vector<float> sentinel(count, 7.5f);
    std::mt19937 generator(1);
    Plane<float> d_bias(batch, heads, length);
    fill_scores(d_bias, Scores::random, generator);

    const Sequences host_ctx = input.sequences(input.lengths.data(), input.cu_seqlens.data());
    Plane<expiry_t> expiry(batch, heads, length, untouched);
    Plane<float> bias(batch, heads, length, 7.5f), d_scores(batch, heads, length, 7.5f);
    build_log_bias(oracle_context(), policy, gate, scores.view(), host_ctx, expiry.view(), bias.view(), {});
    log_bias_backward(oracle_context(), policy, gate, scores.view(),
                      static_cast<const Plane<float>&>(d_bias).view(), host_ctx, d_scores.view(), {});

    const Device<float> device_scores(scores.data);
    const Device<float> device_d_bias(d_bias.data);
    const Device<std::int32_t> lengths(input.lengths);
    const Device<std::int32_t> edges(input.cu_seqlens);
    const Device<expiry_t> got_expiry(std::vector<expiry_t>(count, untouched));
    const Device<float> got_bias(sentinel);
    const Device<float> got_d_scores(sentinel);
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(batch), 0));
    const Sequences on_device = input.sequences(lengths.data(), edges.data());
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(log_bias_workspace_bytes(ctx, policy, on_device, heads));
    const auto in = view_bhs<const float>(device_scores.data(), batch, heads, length);
    build_log_bias(ctx, policy, gate, in, on_device, view_bhs(got_expiry.data(), batch, heads, length),
                   view_bhs(got_bias.data(), batch, heads, length), workspace, {.status = status.data()});
    log_bias_backward(ctx, policy, gate, in,
                      view_bhs<const float>(device_d_bias.data(), batch, heads, length), on_device,
                      view_bhs(got_d_scores.data(), batch, heads, length), workspace);
    same(got_expiry.read(), expiry.data, length, what);
    close(got_bias.read(), bias.data, what + ", bias");
    close(got_d_scores.read(), d_scores.data, what + ", slope");
    CHECK(status.read() == std::vector<std::uint32_t>(static_cast<std::size_t>(batch), 0));
}

template <class P>
void check_gates(const P& policy, MaskCase& input, const std::string& what) {
    check_gate(policy, SoftGate{}, input, "soft, " + what);
    check_gate(policy, SoftWriteGate{}, input, "write, " + what);
    check_gate(policy, SoftWriteGate{0.0f}, input, "write without epsilon, " + what);
    for (const float alpha : {0.0f, 0.375f, 1.0f}) {
        check_gate(policy, AnnealedGate{alpha, 0.4f}, input,
                   "annealed by " + std::to_string(alpha) + ", " + what);
    }
    check_gate(policy, ThresholdSoftGate{0.3f}, input, "threshold, " + what);
    check_gate(policy, BernoulliGate{0.0f, 17}, input, "Bernoulli, " + what);
    check_gate(policy, BernoulliGate{0.2f, 99}, input, "clipped Bernoulli, " + what);
}

MaskCase case_of(std::int32_t batch, std::int32_t heads, std::int32_t length, float scale) {
    MaskCase input{Plane<float>(batch, heads, length), {}, {}, {}};
    std::mt19937 generator(static_cast<unsigned>(length));
    fill_scores(input.scores, Scores::random, generator);
    for (float& x : input.scores.data) {
        x *= scale;
    }
    return input;
}

}  // namespace

TEST_CASE("biases, expiries and slopes of every gate are the host's") {
    for (const std::int32_t length : {1, 31, 513, 1500}) {
        for (const float scale : {1.0f, 12.0f, 60.0f}) {
            MaskCase input = case_of(2, 3, length, scale);
            const std::string what = "length " + std::to_string(length) + ", scale " + std::to_string(scale);
            check_gates(Plain(Sink<>{3}, Window<>{17}), input, what);
            check_gates(Kept(Sink<>{0}, Window<>{1}, KeepEvery{5}), input, "keep, " + what);
        }
    }
}

TEST_CASE("scores at both ends of fp32") {
    MaskCase input = case_of(1, 1, 600, 1.0f);
    const float ends[] = {-std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::max(),
                          -104.0f,
                          104.0f,
                          1e-40f,
                          -0.0f,
                          -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::infinity()};
    for (std::size_t i = 0; i < input.scores.data.size(); ++i) {
        input.scores.data[i] = ends[i % 8];
    }
    check_gates(Plain(Sink<>{1}, Window<>{4}), input, "ends");
}

TEST_CASE("soft gates of sequences of different lengths, packed, and by head") {
    MaskCase input = case_of(3, 2, 1700, 3.0f);
    input.lengths = {1700, 0, 600};
    check_gates(Plain(Sink<>{2}, Window<>{20}), input, "lengths");
    input.cu_seqlens = {0, 0, 1, 40, 513, 1300, 1700};
    check_gates(Plain(Sink<>{2}, Window<>{20}), input, "lengths and packed");
    const std::vector<std::int32_t> windows{5, 900};
    input.lengths.clear();
    check_gates(Plain(Sink<>{2}, Window<>{per_head(windows.data(), 1, 2)}), input, "windows by head, packed");
}

TEST_CASE("a NaN score closes its gate and is reported; bad gates are refused") {
    const Plain policy(Sink<>{0}, Window<>{4});
    std::vector<float> values(2 * 64, 1.0f);
    values[64 + 10] = std::numeric_limits<float>::quiet_NaN();
    values[63] = values[64 + 10];  // never leaves the window: not read
    const Device<float> scores(values);
    const Device<expiry_t> expiry(values.size());
    const Device<float> bias(values.size());
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(2, 0));
    const Sequences sequences{2, 64};
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(log_bias_workspace_bytes(ctx, policy, sequences, 1));
    const auto in = view_bhs<const float>(scores.data(), 2, 1, 64);
    const auto ends = view_bhs(expiry.data(), 2, 1, 64);
    const auto out = view_bhs(bias.data(), 2, 1, 64);
    build_log_bias(ctx, policy, SoftGate{}, in, sequences, ends, out, workspace, {.status = status.data()});
    CHECK(status.read() == std::vector<std::uint32_t>{0, status_nan_score});
    CHECK(expiry.read()[64 + 10] == 14);
    CHECK(bias.read()[64 + 10] == 0.0f);
    CHECK(expiry.read()[63] == never);
    CHECK_REFUSED(build_log_bias(ctx, policy, AnnealedGate{1.5f, 0.5f}, in, sequences, ends, out, workspace),
                  "AnnealedGate.alpha");
    CHECK_REFUSED(build_log_bias(ctx, policy, SoftGate{}, in, sequences, ends, {}, workspace), "log_bias");
    CHECK_REFUSED(build_log_bias(ctx, policy, SoftGate{}, in, {3, 64}, ends, out, workspace),
                  "sequences.batch");
}
