// Losses and gradients of gates on the device against the host's: counts exactly, values and
// gradients to rounding.
#include <kvpolicy/losses/cuda/dispatch_gates.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/lifetime_cases.hpp"
#include "../../support/loss_value.hpp"
#include "../support/captured.hpp"
#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

using namespace kvpolicy;
using kvpolicy_test::KeepEvery;
using test::Device;

namespace {

using Plain = Policy<Sink<>, Window<>>;
using Gated = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;
using Kept = Policy<Sink<>, Window<>, KeepEvery>;

constexpr float untouched = -77.0f;

struct Case {
    std::int32_t batch = 2, heads = 3, length = 1300;
    std::vector<std::int32_t> lengths{}, edges{};
    std::vector<float> scores{};

    Case(std::int32_t b, std::int32_t h, std::int32_t s) : batch(b), heads(h), length(s), scores(count()) {
        std::mt19937 generator(static_cast<unsigned>(s));
        std::normal_distribution<float> normal(0.0f, 3.0f);
        for (float& z : scores) {
            z = normal(generator);
        }
        scores[0] = 0.0f;
    }
    [[nodiscard]] std::size_t count() const {
        return static_cast<std::size_t>(batch * heads) * static_cast<std::size_t>(length);
    }
    [[nodiscard]] Sequences sequences(const std::int32_t* of_lengths, const std::int32_t* of_edges) const {
        return {batch,
                length,
                lengths.empty() ? nullptr : of_lengths,
                nullptr,
                edges.empty() ? nullptr : of_edges,
                edges.empty() ? 0 : static_cast<std::int32_t>(edges.size()) - 1};
    }
    template <class T>
    [[nodiscard]] plane_view<T> plane(T* data) const {
        return view_bhs(data, batch, heads, length);
    }
};

void close(const std::vector<float>& got, const std::vector<float>& wanted) {
    REQUIRE(got.size() == wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
        CAPTURE(i);
        REQUIRE(std::fabs(got[i] - wanted[i]) <=
                0x1p-22f * std::fabs(wanted[i]));  // roundings of equal doubles
    }
}

/// `loss` for the host, and the same with device memory where it has pointers.
template <class L, class P>
void check_loss(const L& loss, const L& on_gpu, const P& policy, const Case& c) {
    const host host_ctx(1);
    std::vector<float> wanted(c.count(), untouched);
    const LossValue value = test::value_of([&](auto* into) {
        loss(host_ctx, policy, c.plane(c.scores.data()), c.sequences(c.lengths.data(), c.edges.data()),
             c.plane(wanted.data()), into, {});
    });
    const Device<float> scores(c.scores), d(std::vector<float>(c.count(), untouched));
    const Device<std::int32_t> lengths(c.lengths), edges(c.edges);
    const Device<LossValue> result(1);
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(c.batch), 0u));
    const Sequences sequences = c.sequences(lengths.data(), edges.data());
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(on_gpu.workspace_bytes(ctx, policy, sequences, c.heads));
    on_gpu(ctx, policy, c.plane(static_cast<const float*>(scores.data())), sequences, c.plane(d.data()),
           result.data(), workspace, {.status = status.data()});
    const LossValue got = result.read()[0];
    CHECK(got.count == value.count);
    CHECK(std::fabs(got.value - value.value) <= 1e-12 * (1e-300 + std::fabs(value.value)));
    close(d.read(), wanted);
    CHECK(status.read() == std::vector<std::uint32_t>(static_cast<std::size_t>(c.batch), 0u));
}

template <class P>
void check_losses(const P& policy, const Case& c) {
    std::vector<float> lambda(static_cast<std::size_t>(c.heads));
    for (std::size_t h = 0; h < lambda.size(); ++h) {
        lambda[h] = 0.25f * static_cast<float>(h + 1);
    }
    const Device<float> on_gpu(lambda);
    for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
        check_loss(GateSparsity{0.5f, scope}, GateSparsity{0.5f, scope}, policy, c);
        check_loss(GateDensity{2.0f, scope}, GateDensity{2.0f, scope}, policy, c);
        check_loss(RetentionPenalty{.scale = 3.0f, .scope = scope, .term = {lambda.data()}},
                   RetentionPenalty{.scale = 3.0f, .scope = scope, .term = {on_gpu.data()}}, policy, c);
    }
    // Counts.
    const host host_ctx(1);
    std::vector<double> wanted(static_cast<std::size_t>(c.heads));
    const Device<float> scores(c.scores);
    const Device<std::int32_t> lengths(c.lengths), edges(c.edges);
    const Sequences sequences = c.sequences(lengths.data(), edges.data());
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(retention_counts_workspace_bytes(ctx, policy, sequences, c.heads));
    const Device<double> counts(wanted.size());
    for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
        retention_counts(host_ctx, policy, c.plane(c.scores.data()),
                         c.sequences(c.lengths.data(), c.edges.data()), wanted.data(), {}, {.scope = scope});
        retention_counts(ctx, policy, c.plane(static_cast<const float*>(scores.data())), sequences,
                         counts.data(), workspace, {.scope = scope});
        CHECK(counts.read() == wanted);
    }
}

template <class T, class P>
void check_straight_through(const P& policy, const Case& c, std::int32_t dim, gate_scope scope) {
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    std::vector<T> v(c.count() * static_cast<std::size_t>(dim)), d_v(v.size());
    for (std::size_t i = 0; i < v.size(); ++i) {
        v[i] = static_cast<T>(normal(generator));
        d_v[i] = static_cast<T>(normal(generator));
    }
    const auto rows = [&](const T* data) { return view_bhsd(data, c.batch, c.heads, c.length, dim); };
    const host host_ctx(1);
    std::vector<float> wanted(c.count(), untouched);
    straight_through_values(host_ctx, policy, c.plane(static_cast<const float*>(c.scores.data())),
                            rows(v.data()), rows(d_v.data()), c.sequences(c.lengths.data(), c.edges.data()),
                            c.plane(wanted.data()), {}, {.scope = scope});
    const Device<float> scores(c.scores), d(std::vector<float>(c.count(), untouched));
    const Device<T> of_v(v), of_d_v(d_v);
    const Device<std::int32_t> lengths(c.lengths), edges(c.edges);
    const Sequences sequences = c.sequences(lengths.data(), edges.data());
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(
        straight_through_values_workspace_bytes(ctx, policy, sequences, c.heads));
    const auto of_gpu = [&](T* data) { return view_bhsd(data, c.batch, c.heads, c.length, dim); };
    straight_through_values(ctx, policy, c.plane(scores.data()), of_gpu(of_v.data()), of_gpu(of_d_v.data()),
                            sequences, c.plane(d.data()), workspace, {.scope = scope});
    const std::vector<float> got = d.read();
    for (std::size_t i = 0; i < got.size(); ++i) {
        CAPTURE(i);  // sums of doubles in another order
        REQUIRE(std::fabs(got[i] - wanted[i]) <= 0x1p-22f * std::fabs(wanted[i]) + 1e-12f);
    }
}

template <class T, class P>
void check_straight_through(const P& policy, const Case& c, std::int32_t dim) {
    for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
        check_straight_through<T>(policy, c, dim, scope);
    }
}

/// DMS's loss: sums over two calls, then the loss on its own and with the sums of both.
template <class P>
void check_compression(const CompressionLoss& loss, const P& policy, const Case& c) {
    CAPTURE(loss.straight_through);
    CAPTURE(loss.target);
    const host host_ctx(1);
    const auto in = c.plane(c.scores.data());
    const Sequences of_host = c.sequences(c.lengths.data(), c.edges.data());
    EvictionSums both;
    loss.sums(host_ctx, policy, in, of_host, &both, {});
    const Device<float> scores(c.scores), d(std::vector<float>(c.count(), untouched));
    const Device<std::int32_t> lengths(c.lengths), edges(c.edges);
    const Sequences sequences = c.sequences(lengths.data(), edges.data());
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(loss.workspace_bytes(ctx, policy, sequences, c.heads));
    const Device<EvictionSums> sums(std::vector<EvictionSums>(1));
    const Device<LossValue> result(1);
    const auto of_gpu = c.plane(static_cast<const float*>(scores.data()));
    for (int i = 0; i < 2; ++i) {
        loss.sums(ctx, policy, of_gpu, sequences, sums.data(), workspace);
    }
    both.evicted *= 2.0;
    both.keys *= 2;
    const EvictionSums got = sums.read()[0];
    CHECK(got.keys == both.keys);
    CHECK(std::fabs(got.evicted - both.evicted) <= 1e-12 * both.evicted);
    for (int i = 0; i < 3; ++i) {  // on its own, with a total on the host, with one on the device
        CAPTURE(i);
        CompressionLoss one = loss;
        one.total = i == 0 ? EvictionSums{} : both;
        std::vector<float> wanted(c.count(), untouched);
        const LossValue value = test::value_of(
            [&](auto* into) { one(host_ctx, policy, in, of_host, c.plane(wanted.data()), into, {}); });
        one.total = i == 2 ? EvictionSums{} : one.total;
        one(ctx, policy, of_gpu, sequences, c.plane(d.data()), result.data(), workspace,
            {.total = i == 2 ? sums.data() : nullptr});
        CHECK(result.read()[0].count == value.count);
        CHECK(std::fabs(result.read()[0].value - value.value) <= 1e-12);
        const std::vector<float> slopes = d.read();
        for (std::size_t j = 0; j < slopes.size(); ++j) {
            CAPTURE(j);
            REQUIRE(std::fabs(slopes[j] - wanted[j]) <= 0x1p-22f * std::fabs(wanted[j]));
        }
    }
}

}  // namespace

TEST_CASE("values and gradients and counts are the host's") {
    for (const std::int32_t length : {1, 31, 512, 1300}) {
        CAPTURE(length);
        Case c(2, 3, length);
        check_losses(Gated{Sink<>{3}, Window<>{17}, {}}, c);
        check_losses(Kept{Sink<>{0}, Window<>{1}, KeepEvery{5}}, c);
        check_straight_through<bf16>(Gated{Sink<>{3}, Window<>{17}, {}}, c, 40);
        c.lengths = {length, length / 2};
        check_losses(Gated{Sink<>{2}, Window<>{9}, {}}, c);
        check_straight_through<float>(Kept{Sink<>{0}, Window<>{1}, KeepEvery{5}}, c, 7);
    }
}

TEST_CASE("packed segments and rules by head") {
    Case c(1, 4, 1100);
    c.edges = {0, 5, 5, 600, 1100};
    const std::vector<std::int32_t> sinks{0, 1, 2, 3}, windows{4, 8, 16, 700};
    const Plain policy{Sink<>{per_head(sinks.data(), 1, 4)}, Window<>{per_head(windows.data(), 1, 4)}};
    check_losses(policy, c);
    check_straight_through<fp16>(policy, c, 64);
}

TEST_CASE("nothing to decide; a NaN score is told and adds nothing; lengths that cannot be") {
    Case few(2, 1, 10);
    check_losses(Gated{Sink<>{4}, Window<>{17}, {}}, few);

    Case c(3, 1, 40);
    c.lengths = {40, -1, 41};
    c.scores[20] = std::numeric_limits<float>::quiet_NaN();
    const Device<float> scores(c.scores), d(std::vector<float>(c.count(), untouched));
    const Device<std::int32_t> lengths(c.lengths);
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(3, 0u));
    const Device<LossValue> result(1);
    const Sequences sequences = c.sequences(lengths.data(), nullptr);
    const kvpolicy::cuda ctx{};
    const Gated policy{Sink<>{4}, Window<>{8}, {}};
    const Device<unsigned char> workspace(GateSparsity{}.workspace_bytes(ctx, policy, sequences, 1));
    GateSparsity{}(ctx, policy, c.plane(static_cast<const float*>(scores.data())), sequences,
                   c.plane(d.data()), result.data(), workspace, {.status = status.data()});
    CHECK(status.read() ==
          std::vector<std::uint32_t>{status_nan_score, status_bad_length, status_bad_length});
    CHECK(result.read()[0].count == 40);
    CHECK(std::isfinite(result.read()[0].value));
    CHECK(d.read()[20] == 0.0f);
    CHECK(d.read()[40] == untouched);

    CHECK_THROWS_AS(RetentionPenalty{}(ctx, policy, c.plane(static_cast<const float*>(scores.data())),
                                       sequences, c.plane(d.data()), result.data(), workspace),
                    invalid_argument);
    CHECK_THROWS_AS(GateSparsity{}(ctx, policy, c.plane(static_cast<const float*>(scores.data())), sequences,
                                   c.plane(d.data()), nullptr, workspace),
                    invalid_argument);
    CHECK_THROWS_AS(GateSparsity{}(ctx, policy, c.plane(static_cast<const float*>(scores.data())), sequences,
                                   c.plane(d.data()), result.data(), {workspace.data(), 8}),
                    invalid_argument);
}

TEST_CASE("DMS's compression loss") {
    for (const gate_scope scope : {gate_scope::all, gate_scope::decided}) {
        for (const float target : {0.25f, 0.9f}) {  // below and above what is evicted
            for (const bool straight : {false, true}) {
                CompressionLoss loss;
                loss.target = target;
                loss.scale = 2.0f;
                loss.gate = {0.7f, true, 11};
                loss.straight_through = straight;
                loss.scope = scope;
                Case c(2, 3, 700);
                check_compression(loss, Gated{Sink<>{3}, Window<>{17}, {}}, c);
                c.lengths = {700, 40};
                check_compression(loss, Kept{Sink<>{0}, Window<>{1}, KeepEvery{5}}, c);
            }
        }
    }
}

TEST_CASE("packed compression losses; refusals") {
    Case packed(1, 2, 600);
    packed.edges = {0, 100, 600};
    check_compression(CompressionLoss{0.8f}, Plain{Sink<>{1}, Window<>{9}}, packed);
    check_compression(CompressionLoss{0.8f}, Gated{Sink<>{4}, Window<>{17}, {}}, Case(2, 1, 10));
    const Case c(1, 1, 10);
    const Device<float> scores(c.scores), d(c.count());
    const Device<LossValue> result(1);
    const kvpolicy::cuda ctx{};
    const Gated policy{Sink<>{4}, Window<>{17}, {}};
    const Device<unsigned char> workspace(
        CompressionLoss{}.workspace_bytes(ctx, policy, {.batch = 1, .length = 10}, 1));
    CHECK_THROWS_AS(
        CompressionLoss{1.5f}(ctx, policy, c.plane(static_cast<const float*>(scores.data())),
                              {.batch = 1, .length = 10}, c.plane(d.data()), result.data(), workspace),
        invalid_argument);
}

TEST_CASE("the controller of lambda is the host's") {
    constexpr std::int32_t heads = 300;
    std::vector<float> lambda(heads);
    std::vector<double> average(heads), counts(heads);
    LambdaController wanted{heads, lambda.data(), average.data()};
    wanted.every = 3;
    wanted.least = 0.01f;
    const Device<float> of_lambda(static_cast<std::size_t>(heads));
    const Device<double> of_average(static_cast<std::size_t>(heads));
    LambdaController got = wanted;
    got.lambda = of_lambda.data();
    got.average = of_average.data();
    const kvpolicy::cuda ctx{};
    const host host_ctx(1);
    wanted.start(host_ctx);
    got.start(ctx);
    for (std::int64_t step = 1; step <= 60; ++step) {
        for (std::int32_t h = 0; h < heads; ++h) {
            counts[static_cast<std::size_t>(h)] = (step < 30 ? 4.0 : 1.0) * h;
        }
        const Device<double> of_counts(counts);
        wanted.observe(host_ctx, counts.data());
        got.observe(ctx, of_counts.data());
        if (wanted.due(step)) {
            wanted.update(host_ctx);
            got.update(ctx);
        }
    }
    const std::vector<float> lambdas = of_lambda.read();
    const std::vector<double> averages = of_average.read();
    for (std::size_t h = 0; h < lambdas.size(); ++h) {
        CHECK(lambdas[h] == doctest::Approx(lambda[h]).epsilon(1e-6));
        CHECK(averages[h] == doctest::Approx(average[h]).epsilon(1e-12));
    }
    got.cap = -1.0;
    CHECK_THROWS_AS(got.update(ctx), invalid_argument);
}

TEST_CASE("captured losses serve other scores, lengths and weights") {
    Case c(2, 3, 700);
    c.lengths = {700, 300};
    const Gated policy(Sink<>{2}, Window<>{9}, ThresholdGate<at_least>{0.0f});
    const Device<float> scores(c.scores), d(c.count()), lambda(std::vector<float>{0.25f, 1.0f, 2.0f});
    const Device<std::int32_t> lengths(c.lengths);
    const Device<LossValue> value(1);
    const Device<EvictionSums> sums(std::vector<EvictionSums>(1));
    const Device<double> counts(3);
    const auto in = c.plane(static_cast<const float*>(scores.data()));
    const Sequences sequences = c.sequences(lengths.data(), nullptr);
    const Device<unsigned char> workspace(
        GateSparsity{}.workspace_bytes(kvpolicy::cuda{}, policy, sequences, c.heads));
    const auto check = [&](const auto& call) {
        const test::Captured graph(call);
        for (const std::int32_t length : {700, 41, 0}) {
            CAPTURE(length);
            std::vector<float> turned = c.scores;
            std::rotate(turned.begin(), turned.begin() + length, turned.end());
            test::write(scores, turned);
            test::write(lengths, {length, 350});
            test::write(lambda, {1.0f, static_cast<float>(length), 0.5f});
            const std::vector<float> before(c.count(), untouched);
            const auto run = [&](const auto& one) {
                test::write(d, before);
                test::write(sums, std::vector<EvictionSums>(1));
                test::poison(value);
                test::poison(counts);
                test::poison(workspace);
                one();
                return std::tuple(d.read(), value.read()[0].value, value.read()[0].count,
                                  sums.read()[0].evicted, sums.read()[0].keys, counts.read());
            };
            const auto wanted = run([&] { call(kvpolicy::cuda{}); });
            const auto got = run([&] { graph.replay(); });
            CHECK(std::memcmp(std::get<0>(got).data(), std::get<0>(wanted).data(), d.bytes()) == 0);
            CHECK(std::get<2>(got) == std::get<2>(wanted));
            CHECK(std::memcmp(&std::get<1>(got), &std::get<1>(wanted), sizeof(double)) == 0);
            CHECK(std::get<3>(got) == std::get<3>(wanted));
            CHECK(std::get<4>(got) == std::get<4>(wanted));
            CHECK(std::memcmp(std::get<5>(got).data(), std::get<5>(wanted).data(), counts.bytes()) == 0);
        }
    };
    const auto loss = [&](const auto& of) {
        check([&](const kvpolicy::cuda& ctx) {
            of(ctx, policy, in, sequences, c.plane(d.data()), value.data(), workspace);
        });
    };
    loss(GateSparsity{0.5f, gate_scope::all});
    loss(GateDensity{2.0f, gate_scope::decided});
    loss(RetentionPenalty{.scale = 3.0f, .scope = gate_scope::decided, .term = {lambda.data()}});
    check([&](const kvpolicy::cuda& ctx) {
        retention_counts(ctx, policy, in, sequences, counts.data(), workspace);
    });
    const CompressionLoss compression{.target = 0.6f};
    check([&](const kvpolicy::cuda& ctx) {
        compression.sums(ctx, policy, in, sequences, sums.data(), workspace);
        compression(ctx, policy, in, sequences, c.plane(d.data()), value.data(), workspace,
                    {.total = sums.data()});
    });
}
