// Metrics on CUDA against the host.
#include <kvpolicy/metrics/cuda_metrics.cuh>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "../support/captured.hpp"
#include "../support/mask_check.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;

/// Expiries of a mask, and some that no policy gives: before the key, at the key, beyond the end.
Plane<expiry_t> mask_of(const Budget& policy, MaskCase& input, bool odd) {
    Plane<expiry_t> plane(input.scores.batch, input.scores.heads, input.scores.length, 0);
    plane.data = host_mask(policy, input).expiry;
    std::mt19937 generator(3);
    for (std::size_t i = 0; odd && i < plane.data.size(); i += 7) {
        const expiry_t values[] = {-5, 0, 100, never, static_cast<expiry_t>(generator() % 2000)};
        plane.data[i] = values[generator() % 5];
    }
    return plane;
}

void check_metrics(const Budget& policy, const Budget& other, MaskCase& input, bool odd,
                   const std::string& what) {
    CAPTURE(what);
    const std::int32_t batch = input.scores.batch, heads = input.scores.heads, length = input.scores.length;
    const auto planes = static_cast<std::size_t>(batch) * static_cast<std::size_t>(heads);
    MaskCase second = input;
    for (float& x : second.scores.data) {
        x = -x;
    }
    const Plane<expiry_t> teacher = mask_of(policy, input, odd);
    const Plane<expiry_t> student = mask_of(other, second, odd);
    const host& host_ctx = oracle_context();
    const Sequences sequences = input.sequences(input.lengths.data(), nullptr);
    Plane<std::int32_t> live(batch, heads, length, untouched);
    std::vector<double> dense(planes), evicted(planes);
    std::vector<Recall> recall(planes);
    std::vector<Coverage> covered(planes);
    coverage(host_ctx, policy, teacher.view(), student.view(), sequences, covered.data());
    live_keys(host_ctx, teacher.view(), sequences, live.view());
    density(host_ctx, teacher.view(), sequences, dense.data());
    evict_ratio(host_ctx, policy, teacher.view(), sequences, evicted.data());
    Workspace memory(oracle_recall_workspace_bytes(host_ctx, teacher.view(), sequences));
    oracle_recall(host_ctx, policy, teacher.view(), student.view(), sequences, recall.data(), memory);

    const kvpolicy::cuda ctx{};
    const Device<expiry_t> device_teacher(teacher.data);
    const Device<expiry_t> device_student(student.data);
    const Device<std::int32_t> lengths(input.lengths);
    const Device<std::int32_t> got_live(std::vector<std::int32_t>(live.data.size(), untouched));
    const Device<double> got_dense(planes), got_evicted(planes);
    const Device<Recall> got_recall(planes);
    const Sequences of = input.sequences(lengths.data(), nullptr);
    const auto view = view_bhs<const expiry_t>(device_teacher.data(), batch, heads, length);
    const auto student_view = view_bhs<const expiry_t>(device_student.data(), batch, heads, length);
    live_keys(ctx, view, of, view_bhs(got_live.data(), batch, heads, length));
    density(ctx, view, of, got_dense.data());
    evict_ratio(ctx, policy, view, of, got_evicted.data());
    const Device<unsigned char> workspace(oracle_recall_workspace_bytes(ctx, view, of));
    oracle_recall(ctx, policy, view, student_view, of, got_recall.data(), workspace);
    const Device<Coverage> got_covered(planes);
    coverage(ctx, policy, view, student_view, of, got_covered.data());
    const std::vector<Coverage> read_covered = got_covered.read();
    for (std::size_t i = 0; i < planes; ++i) {
        CHECK(read_covered[i].keys == covered[i].keys);
        CHECK(read_covered[i].covered == covered[i].covered);
    }
    same(got_live.read(), live.data, length, "live keys, " + what);
    CHECK(got_dense.read() == dense);
    CHECK(got_evicted.read() == evicted);
    const std::vector<Recall> got = got_recall.read();
    for (std::size_t i = 0; i < planes; ++i) {
        CAPTURE(i);
        CHECK(got[i].queries == recall[i].queries);
        CHECK(std::abs(got[i].mean - recall[i].mean) <= 1e-12 * std::abs(recall[i].mean));
        CHECK(std::abs(got[i].chance_mean - recall[i].chance_mean) <=
              1e-12 * std::abs(recall[i].chance_mean));
        CHECK(got[i].last == recall[i].last);
        CHECK(got[i].chance_last == recall[i].chance_last);
    }
}

}  // namespace

TEST_CASE("live keys, density, evict ratio and recall are the host's") {
    for (const std::int32_t length : {1, 2, 31, 511, 512, 513, 1700}) {
        for (const bool odd : {false, true}) {
            MaskCase input{Plane<float>(2, 3, length), {length, length / 2}, {}, {}};
            std::mt19937 generator(static_cast<unsigned>(length));
            fill_scores(input.scores, Scores::random, generator);
            const std::string what = "length " + std::to_string(length) + (odd ? ", odd" : "");
            check_metrics(Budget(Sink<>{2}, Window<>{9}, TopKBudget<>{40}),
                          Budget(Sink<>{2}, Window<>{9}, TopKBudget<>{25}), input, odd, what);
            check_metrics(Budget(Sink<>{0}, Window<>{1}, TopKBudget<>{0}),
                          Budget(Sink<>{0}, Window<>{1}, TopKBudget<>{3}), input, odd, what + ", k 0");
        }
    }
}

TEST_CASE("metrics of more heads than one launch's parameters hold, with numbers by head") {
    std::vector<std::int32_t> windows(300);
    for (std::size_t h = 0; h < windows.size(); ++h) {
        windows[h] = 1 + static_cast<std::int32_t>(h % 37);
    }
    const Budget policy(Sink<>{1}, Window<>{per_head(windows.data(), 1, 300)}, TopKBudget<>{5});
    MaskCase input{Plane<float>(2, 300, 64), {}, {}, {}};
    std::mt19937 generator(1);
    fill_scores(input.scores, Scores::random, generator);
    check_metrics(policy, policy, input, false, "300 heads");
}

TEST_CASE("shares of open gates are the host's, a NaN is closed and reported") {
    const auto check = [](const auto& policy) {
        constexpr std::int32_t batch = 3, heads = 2, length = 1300;
        MaskCase input{Plane<float>(batch, heads, length), {length, 0, 700}, {}, {}};
        std::mt19937 generator(4);
        fill_scores(input.scores, Scores::random, generator);
        input.scores.data[0] = 0.25f;  // a threshold
        std::vector<double> wanted(batch * heads);
        std::vector<std::uint32_t> told(batch, 0u);
        const float nan = std::nanf("");
        input.scores.data[static_cast<std::size_t>(2 * heads * length + 5)] = nan;
        open_gates(oracle_context(), policy, input.scores.view(),
                   input.sequences(input.lengths.data(), nullptr), wanted.data(), {},
                   {.status = told.data()});
        CHECK(told == std::vector<std::uint32_t>{0u, 0u, status_nan_score});
        const Device<float> scores(input.scores.data);
        const Device<std::int32_t> lengths(input.lengths);
        const Device<double> got(batch * heads);
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(batch, 0u));
        open_gates(kvpolicy::cuda{}, policy, view_bhs<const float>(scores.data(), batch, heads, length),
                   input.sequences(lengths.data(), nullptr), got.data(), {}, {.status = status.data()});
        CHECK(got.read() == wanted);
        CHECK(status.read() == told);
    };
    const float thresholds[] = {0.25f, -0.5f};
    check(Policy<Window<>, ThresholdGate<>>(Window<>{9}, ThresholdGate<>{per_head(thresholds, 1, 2)}));
    check(Policy<Sink<2>, Window<4>, ThresholdGate<above>>({}, {}, ThresholdGate<above>{0.25f}));
}

TEST_CASE("captured metrics serve other masks and lengths") {
    constexpr std::int32_t batch = 2, heads = 3, length = 900;
    const Budget policy(Sink<>{2}, Window<>{9}, TopKBudget<>{40}),
        other(Sink<>{2}, Window<>{9}, TopKBudget<>{25});
    MaskCase input{Plane<float>(batch, heads, length), {length, length / 2}, {}, {}};
    std::mt19937 generator(5);
    fill_scores(input.scores, Scores::random, generator);
    const Plane<expiry_t> one = mask_of(policy, input, false), two = mask_of(other, input, true);
    const Device<expiry_t> teacher(one.data), student(two.data);
    const Device<std::int32_t> lengths(input.lengths), live(one.data.size());
    const Device<double> dense(batch * heads), evicted(batch * heads);
    const Device<Recall> recall(batch * heads);
    const Sequences sequences = input.sequences(lengths.data(), nullptr);
    const auto view = [&](const Device<expiry_t>& of) {
        return view_bhs<const expiry_t>(of.data(), batch, heads, length);
    };
    const Device<unsigned char> workspace(
        oracle_recall_workspace_bytes(kvpolicy::cuda{}, view(teacher), sequences));
    const auto call = [&](const kvpolicy::cuda& ctx) {
        live_keys(ctx, view(teacher), sequences, view_bhs(live.data(), batch, heads, length));
        density(ctx, view(teacher), sequences, dense.data());
        evict_ratio(ctx, policy, view(teacher), sequences, evicted.data());
        oracle_recall(ctx, policy, view(teacher), view(student), sequences, recall.data(), workspace);
    };
    const test::Captured graph(call);
    for (const std::int32_t now : {length, 512, 1}) {
        CAPTURE(now);
        test::write(teacher, two.data);
        test::write(student, one.data);
        test::write(lengths, {now, length - now});
        const auto run = [&](const auto& make) {
            test::poison(live);
            test::poison(dense);
            test::poison(evicted);
            test::poison(recall);
            test::poison(workspace);
            make();
            std::vector<unsigned char> bytes;
            const auto add = [&](const auto& values) {
                const auto* from = reinterpret_cast<const unsigned char*>(values.data());
                bytes.insert(bytes.end(), from, from + values.size() * sizeof values[0]);
            };
            add(live.read());
            add(dense.read());
            add(evicted.read());
            for (const Recall& x : recall.read()) {
                add(std::vector<double>{x.mean, x.chance_mean, x.last, x.chance_last});
                CHECK(x.queries >= 0);
            }
            return bytes;
        };
        const auto wanted = run([&] { call(kvpolicy::cuda{}); });
        const auto got = run([&] { graph.replay(); });
        CHECK(got == wanted);
    }
}

TEST_CASE("metrics refuse what does not fit") {
    const Device<expiry_t> expiry(std::vector<expiry_t>(100, never));
    const Device<double> out(std::vector<double>(1, 0.0));
    const kvpolicy::cuda ctx{};
    const auto view = view_bhs<const expiry_t>(expiry.data(), 1, 1, 100);
    const Budget policy(Sink<>{1}, Window<>{4}, TopKBudget<>{5});
    const Device<Recall> recall(1);
    CHECK_REFUSED(density(ctx, view, {1, 101}, out.data()), "sequences.length");
    CHECK_REFUSED(density(ctx, view, {1, 100}, nullptr), "out");
    CHECK_REFUSED(live_keys(ctx, view, {1, 100}, {}), "live");
    const Device<std::int32_t> edges(std::vector<std::int32_t>{0, 40, 100});
    const Sequences chunk{.batch = 1, .length = 100, .starts = edges.data()};
    const Sequences packed{.batch = 1, .length = 100, .cu_seqlens = edges.data(), .segments = 2};
    CHECK_REFUSED(live_keys(ctx, view, chunk, {}), "sequences.starts: given");
    CHECK_REFUSED(density(ctx, view, packed, out.data()), "sequences.cu_seqlens: given");
    CHECK_REFUSED(evict_ratio(ctx, policy, view, packed, out.data()), "sequences.cu_seqlens: given");
    CHECK_REFUSED(oracle_recall(ctx, policy, view, view, packed, recall.data(), {}), "sequences.cu_seqlens");
    CHECK_REFUSED(oracle_recall(ctx, policy, view, view, {1, 100}, recall.data(), {}), "workspace.bytes");
}
