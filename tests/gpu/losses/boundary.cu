// The boundary loss on the device against the host's: examples and draws to the integer, value and
// gradients to rounding.
#include <kvpolicy/losses/cuda/dispatch_boundary.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/loss_value.hpp"
#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using test::Device;

namespace {

using Any = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;

enum class Target { random, few_levels, improving, worsening, equal };

struct Case {
    std::string name;
    std::int32_t batch = 2, heads = 2, length = 300;
    std::vector<std::int32_t> sinks{2, 0}, windows{5, 3}, budgets{7, 40};
    std::vector<float> log_gamma{-0.0078125f, -0.03125f};
    std::vector<std::int32_t> lengths, edges;
    Target target = Target::random;
    BoundaryLoss loss{};

    [[nodiscard]] Any policy() const {
        return Any{Sink<>{per_head(sinks.data(), 1, heads)}, Window<>{per_head(windows.data(), 1, heads)},
                   TopKBudget<>{per_head(budgets.data(), 1, heads)},
                   Decay<dynamic>{per_head(log_gamma.data(), 1, heads), 1}};
    }
    [[nodiscard]] Sequences sequences(const std::int32_t* of_sequences, const std::int32_t* of_pack) const {
        Sequences all{batch, length, lengths.empty() ? nullptr : of_sequences, nullptr, nullptr, 0};
        if (!edges.empty()) {
            all.cu_seqlens = of_pack;
            all.segments = static_cast<std::int32_t>(edges.size()) - 1;
        }
        return all;
    }
};

__global__ void pass_time(long long cycles) {
    const long long begun = clock64();
    while (clock64() - begun < cycles) {
    }
}

struct late_stream {
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;

    late_stream() {
        test::ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        test::ok(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    }
    late_stream(const late_stream&) = delete;
    late_stream& operator=(const late_stream&) = delete;
    ~late_stream() {
        static_cast<void>(cudaEventDestroy(done));
        static_cast<void>(cudaStreamDestroy(stream));
    }
};

void check(const Case& c) {
    CAPTURE(c.name);
    const auto count = static_cast<std::size_t>(c.batch * c.heads) * static_cast<std::size_t>(c.length);
    std::mt19937 generator(static_cast<unsigned>(count));
    std::normal_distribution<float> normal;
    std::vector<float> scores(count), target(count);
    for (std::size_t i = 0; i < count; ++i) {
        scores[i] = normal(generator);
        const auto t = static_cast<float>(i % static_cast<std::size_t>(c.length));
        target[i] = c.target == Target::random       ? normal(generator)
                    : c.target == Target::few_levels ? static_cast<float>(generator() % 5)
                    : c.target == Target::improving  ? t
                    : c.target == Target::worsening  ? -t
                                                     : 1.0f;
    }
    constexpr float untouched = -77.0f;
    constexpr double before = 0.5;  // d_log_gamma is added to
    const auto plane = [&](auto* data) { return view_bhs(data, c.batch, c.heads, c.length); };
    const Any policy = c.policy();

    const host host_ctx(1);
    std::vector<float> wanted(count, untouched);
    std::vector<double> wanted_gamma(static_cast<std::size_t>(c.heads), before);
    const Sequences sequences = c.sequences(c.lengths.data(), c.edges.data());
    std::vector<std::byte> memory(c.loss.workspace_bytes(host_ctx, policy, sequences, c.heads));
    const BoundaryValue value = test::value_of<BoundaryValue>([&](auto* into) {
        c.loss(host_ctx, policy, plane(static_cast<const float*>(scores.data())),
               plane(static_cast<const float*>(target.data())), sequences, plane(wanted.data()),
               wanted_gamma.data(), into, {memory.data(), memory.size()});
    });

    const Device<float> device_scores(scores), device_target(target),
        gradient(std::vector<float>(count, untouched));
    const Device<double> gamma(std::vector<double>(static_cast<std::size_t>(c.heads), before));
    const Device<std::int32_t> lengths(c.lengths), edges(c.edges);
    const Device<BoundaryValue> result(1);
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(c.batch), 0u));
    const kvpolicy::cuda ctx{};
    const Sequences on_device = c.sequences(lengths.data(), edges.data());
    const Device<unsigned char> workspace(c.loss.workspace_bytes(ctx, policy, on_device, c.heads));
    c.loss(ctx, policy, plane(static_cast<const float*>(device_scores.data())),
           plane(static_cast<const float*>(device_target.data())), on_device, plane(gradient.data()),
           gamma.data(), result.data(), workspace, {.status = status.data()});
    const BoundaryValue got = result.read()[0];
    CHECK(got.sampled == value.sampled);
    CHECK(got.count == value.count);
    CHECK(got.kept == value.kept);
    CHECK(got.agreed == value.agreed);
    // Doubles: exponentials to 2 ulp, sums of up to some thousand terms of either sign.
    CHECK(std::fabs(got.value - value.value) <= 1e-12 * (1.0 + std::fabs(value.value)));
    const std::vector<float> gradients = gradient.read();
    double largest = 0.0;
    for (const float d : wanted) {
        largest = d == untouched ? largest : std::max(largest, static_cast<double>(std::fabs(d)));
    }
    for (std::size_t i = 0; i < count; ++i) {
        CAPTURE(i);
        if (wanted[i] == untouched) {
            REQUIRE(gradients[i] == untouched);
        } else {
            const double error =
                std::fabs(static_cast<double>(gradients[i]) - static_cast<double>(wanted[i]));
            REQUIRE(error <= 0x1p-23 * std::fabs(static_cast<double>(wanted[i])) + 1e-12 * largest);
        }
    }
    const std::vector<double> gammas = gamma.read();
    for (std::size_t h = 0; h < gammas.size(); ++h) {
        CHECK(std::fabs(gammas[h] - wanted_gamma[h]) <= 1e-10 * (1.0 + std::fabs(wanted_gamma[h])));
    }
    CHECK(status.read() == std::vector<std::uint32_t>(static_cast<std::size_t>(c.batch), status_ok));
    // A second time: the same bits, and added to.
    c.loss(ctx, policy, plane(static_cast<const float*>(device_scores.data())),
           plane(static_cast<const float*>(device_target.data())), on_device, plane(gradient.data()), nullptr,
           result.data(), workspace);
    CHECK(gradient.read() == gradients);
    CHECK(result.read()[0].value == got.value);
    // Scores that another stream makes, long after the target has been ranked.
    const Device<float> late(std::vector<float>(count, std::nanf("")));
    const late_stream other;
    pass_time<<<1, 1, 0, other.stream>>>(2'000'000);
    test::ok(cudaMemcpyAsync(late.data(), device_scores.data(), late.bytes(), cudaMemcpyDeviceToDevice,
                             other.stream));
    test::ok(cudaEventRecord(other.done, other.stream));
    BoundaryOptions options;
    options.scores_ready = other.done;
    c.loss(ctx, policy, plane(static_cast<const float*>(late.data())),
           plane(static_cast<const float*>(device_target.data())), on_device, plane(gradient.data()), nullptr,
           result.data(), workspace, options);
    CHECK(gradient.read() == gradients);
    CHECK(result.read()[0].value == got.value);
}

}  // namespace

TEST_CASE("targets of every order") {
    for (const Target target :
         {Target::random, Target::few_levels, Target::improving, Target::worsening, Target::equal}) {
        for (const bool decay : {false, true}) {
            Case c;
            c.name = "target " + std::to_string(static_cast<int>(target)) + (decay ? ", decay" : "");
            c.target = target;
            if (!decay) {
                c.log_gamma = {0.0f, 0.0f};
            }
            check(c);
        }
    }
}

TEST_CASE("weights, samples, shares of late ones") {
    for (const std::int32_t count : {0, 5, 200, 400}) {
        for (const float late : {0.0f, 0.5f, 1.0f}) {
            Case c;
            c.name = "count " + std::to_string(count) + ", late " + std::to_string(late);
            c.loss.sampler = {count, late, 42};
            c.loss.layer = 0;
            c.loss.temperature = 0.5f;
            c.loss.margin = {0.25f, 2.0f};
            c.loss.balance.enabled = count != 200;
            c.loss.scale = 0.125f;
            check(c);
        }
    }
}

TEST_CASE("lengths, tiles, budgets that never fill") {
    Case ragged;
    ragged.name = "ragged";
    ragged.batch = 3;
    ragged.lengths = {300, 0, 20};
    check(ragged);
    Case tiles;
    tiles.name = "several tiles";
    tiles.length = 1700;
    tiles.budgets = {300, 1};
    check(tiles);
    Case never_full;
    never_full.name = "budgets that never fill";
    never_full.budgets = {0, unlimited};
    check(never_full);
    Case short_one;
    short_one.name = "one query more than none";
    short_one.length = 2 + 5 + 7 + 1;
    short_one.budgets = {7, 100};
    check(short_one);
}

TEST_CASE("packed segments count for themselves, and share the draws") {
    for (const Target target : {Target::random, Target::few_levels, Target::worsening}) {
        for (const std::int32_t count : {unlimited, 0, 5, 300}) {
            Case c;
            c.name =
                "target " + std::to_string(static_cast<int>(target)) + ", count " + std::to_string(count);
            c.target = target;
            c.loss.sampler = {count, 0.5f, 11};
            // Segments without a token, without a valid query, with one, and across tiles.
            c.length = 1700;
            c.edges = {0, 0, 14, 29, 29, 80, 700, 701, 1600, 1700};
            check(c);
            c.name += ", ragged";
            c.batch = 4;
            c.lengths = {1700, 0, 20, 900};
            check(c);
        }
    }
    Case many;  // more segments than a warp, and than some have draws
    many.name = "many segments";
    many.length = 3000;
    many.budgets = {7, 3};
    many.loss.sampler = {40, 1.0f, 12};
    for (std::int32_t i = 0; i <= 100; ++i) {
        many.edges.push_back(30 * i);
    }
    check(many);
}

TEST_CASE("edges that do not rise to the length leave no token") {
    Case c;
    const Any policy = c.policy();
    const Device<float> scores(std::vector<float>(1200, 0.5f)), gradient(std::vector<float>(1200, 3.0f));
    const Device<BoundaryValue> result(1);
    const kvpolicy::cuda ctx{};
    for (const std::vector<std::int32_t>& wrong :
         {std::vector<std::int32_t>{0, 150, 299}, {0, 200, 150, 300}, {1, 150, 300}}) {
        c.edges = wrong;
        const Device<std::int32_t> edges(wrong);
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(2, 0u));
        const Sequences sequences = c.sequences(nullptr, edges.data());
        const Device<unsigned char> workspace(c.loss.workspace_bytes(ctx, policy, sequences, 2));
        const auto plane = [](auto* data) { return view_bhs(data, 2, 2, 300); };
        c.loss(ctx, policy, plane(static_cast<const float*>(scores.data())),
               plane(static_cast<const float*>(scores.data())), sequences, plane(gradient.data()), nullptr,
               result.data(), workspace, {.status = status.data()});
        CHECK(status.read() == std::vector<std::uint32_t>(2, status_bad_length));
        CHECK(gradient.read() == std::vector<float>(1200, 3.0f));
        CHECK(result.read()[0].count == 0);
        CHECK(result.read()[0].sampled == 0);
    }
}

TEST_CASE("layers in one call are layers one by one; a decay that stays on the device") {
    constexpr std::int32_t layers = 3, heads = 2, length = 700, all = layers * heads;
    const std::vector<float> log_gamma{-0.01f, -0.002f, 0.0f, -0.03f, -0.0005f, -0.2f};
    std::mt19937 generator(5);
    std::normal_distribution<float> normal;
    std::vector<float> scores(2 * all * length), target(scores.size());
    for (std::size_t i = 0; i < scores.size(); ++i) {
        scores[i] = normal(generator), target[i] = normal(generator);
    }
    const std::vector<std::int32_t> budgets{7, 40, 100, 7, 3, 650};
    BoundaryLoss loss;
    loss.layer = 2;
    loss.sampler = {100, 0.5f, 9};
    loss.scale = 0.25f;
    const Sequences sequences{2, length};
    // The host, layer by layer: planes [2, layers * heads, length].
    const host host_ctx(1);
    std::vector<float> wanted(scores.size());
    std::vector<double> wanted_gamma(all, 0.0);
    BoundaryValue sum;
    for (std::int32_t l = 0; l < layers; ++l) {
        const Any policy{Sink<>{2}, Window<>{5}, TopKBudget<>{per_head(budgets.data() + l * heads, 1, heads)},
                         Decay<dynamic>{per_head(log_gamma.data() + l * heads, 1, heads), 1}};
        const auto plane = [&](auto* data) {
            auto view = view_bhs(data + l * heads * length, 2, heads, length);
            view.batch_stride = std::int64_t{all} * length;
            return view;
        };
        BoundaryLoss one = loss;
        one.layer = loss.layer + l;
        std::vector<std::byte> memory(one.workspace_bytes(host_ctx, policy, sequences, heads));
        const BoundaryValue value = test::value_of<BoundaryValue>([&](auto* into) {
            one(host_ctx, policy, plane(static_cast<const float*>(scores.data())),
                plane(static_cast<const float*>(target.data())), sequences, plane(wanted.data()),
                wanted_gamma.data() + l * heads, into, {memory.data(), memory.size()});
        });
        sum.value += value.value;
        sum.sampled += value.sampled, sum.count += value.count, sum.kept += value.kept,
            sum.agreed += value.agreed;
    }
    // The policy's own decay is another: it must not be looked at.
    const Any policy{Sink<>{2}, Window<>{5}, TopKBudget<>{per_head(budgets.data(), 1, all)},
                     Decay<dynamic>{0.0f, 1}};
    const Device<float> device_scores(scores), device_target(target), gradient(scores.size()),
        gammas(log_gamma);
    const Device<double> of_gamma(std::vector<double>(all, 0.0));
    const Device<BoundaryValue> result(1);
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(loss.workspace_bytes(ctx, policy, sequences, all));
    const auto plane = [](auto* data) { return view_bhs(data, 2, all, length); };
    BoundaryOptions options;
    options.layers = layers;
    options.log_gamma = gammas.data();
    loss(ctx, policy, plane(static_cast<const float*>(device_scores.data())),
         plane(static_cast<const float*>(device_target.data())), sequences, plane(gradient.data()),
         of_gamma.data(), result.data(), workspace, options);
    const BoundaryValue got = result.read()[0];
    CHECK(got.sampled == sum.sampled);
    CHECK(got.count == sum.count);
    CHECK(got.kept == sum.kept);
    CHECK(got.agreed == sum.agreed);
    CHECK(got.value == doctest::Approx(sum.value).epsilon(1e-12));
    const std::vector<float> gradients = gradient.read();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        CAPTURE(i);
        REQUIRE(std::fabs(gradients[i] - wanted[i]) <= 1e-6f * std::fabs(wanted[i]) + 1e-12f);
    }
    const std::vector<double> got_gamma = of_gamma.read();
    for (std::size_t h = 0; h < got_gamma.size(); ++h) {
        CHECK(std::fabs(got_gamma[h] - wanted_gamma[h]) <= 1e-10 * (1.0 + std::fabs(wanted_gamma[h])));
    }
    options.layers = 4;
    CHECK_THROWS_WITH_AS(loss(ctx, policy, plane(static_cast<const float*>(device_scores.data())),
                              plane(static_cast<const float*>(device_target.data())), sequences,
                              plane(gradient.data()), nullptr, result.data(), workspace, options),
                         doctest::Contains("options.layers: 4 is not allowed"), invalid_argument);
}

TEST_CASE("a NaN target ranks last, a NaN score is told") {
    Case c;
    const Any policy = c.policy();
    std::vector<float> scores(1200, 0.5f), target(1200, 1.0f);
    target[40] = std::numeric_limits<float>::quiet_NaN();
    scores[650] = std::numeric_limits<float>::quiet_NaN();  // b = 1
    const Device<float> device_scores(scores), device_target(target), gradient(1200);
    const Device<BoundaryValue> result(1);
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(2, 0u));
    const kvpolicy::cuda ctx{};
    const Sequences sequences{2, 300};
    const Device<unsigned char> workspace(c.loss.workspace_bytes(ctx, policy, sequences, 2));
    const auto plane = [](auto* data) { return view_bhs(data, 2, 2, 300); };
    c.loss(ctx, policy, plane(static_cast<const float*>(device_scores.data())),
           plane(static_cast<const float*>(device_target.data())), sequences, plane(gradient.data()), nullptr,
           result.data(), workspace, {.status = status.data()});
    CHECK(status.read() == std::vector<std::uint32_t>{status_nan_score, status_not_finite});

    Case steps;
    const Decay<dynamic> slow(-0.01f, 2);
    const Any two(Sink<>{1}, Window<>{4}, TopKBudget<>{8}, slow);
    const Device<unsigned char> more(steps.loss.workspace_bytes(ctx, two, sequences, 2));
    CHECK_THROWS_WITH_AS(steps.loss(ctx, two, plane(static_cast<const float*>(device_scores.data())),
                                    plane(static_cast<const float*>(device_target.data())), sequences,
                                    plane(gradient.data()), nullptr, result.data(), more),
                         doctest::Contains("decay step n: 2 is not allowed"), invalid_argument);
}
