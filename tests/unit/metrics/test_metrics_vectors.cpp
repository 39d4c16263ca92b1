// Metrics of a mask against an independent reference (tests/reference/metrics.py), and against their
// definitions on masks that no policy makes; what they refuse.
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/metrics/density.hpp>
#include <kvpolicy/metrics/gates.hpp>
#include <kvpolicy/metrics/recall.hpp>
#include <kvpolicy/metrics/retention.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/cases.hpp"
#include "support/lifetime_cases.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

using namespace kvpolicy;
using kvpolicy_test::for_each_case;
using kvpolicy_test::LifetimeCase;
using kvpolicy_test::vectors;
using kvpolicy_test::with_policy;

namespace {

const vectors& file() {
    static const vectors loaded = vectors::load("metrics.kvpv");
    return loaded;
}

bool close(double a, double b) { return std::abs(a - b) <= 1e-12; }

/// By the definition: the pairs (q, t), one by one.
template <class Include>
double share_visible(const expiry_t* expiry, std::int32_t length, Include&& include, bool gone) {
    double pairs = 0.0, seen = 0.0;
    for (std::int32_t q = 0; q < length; ++q) {
        for (std::int32_t t = 0; t <= q; ++t) {
            if (!include(q, t)) {
                continue;
            }
            pairs += 1.0;
            seen += (q < expiry[t]) != gone ? 1.0 : 0.0;
        }
    }
    return pairs == 0.0 ? 0.0 : seen / pairs;
}

/// Masks that no policy makes too: keys that are never visible, negative expiries, `never`.
void fill_expiry(test::Plane<expiry_t>& plane, std::mt19937& generator) {
    for (expiry_t& e : plane.data) {
        switch (generator() % 6) {
            case 0:
                e = never;
                break;
            case 1:
                e = -5;
                break;
            case 2:
                e = 0;
                break;
            default:
                e = static_cast<expiry_t>(generator() % static_cast<std::uint32_t>(plane.length + 3));
                break;
        }
    }
}

}  // namespace

TEST_CASE("live keys, density, evict ratio and oracle recall are the reference's") {
    const host ctx(2);
    for_each_case(file(), [&](const LifetimeCase& c, std::int64_t index) {
        CAPTURE(index);
        const auto length = static_cast<std::int32_t>(file().get<float>("scores").shape[2]);
        const float* scores = file().get<float>("scores").row(index);
        const std::int32_t* wanted_expiry = file().get<std::int32_t>("expiry").row(index);
        const double* wanted = file().get<double>("numbers").row(index);
        const std::int32_t* wanted_live = file().get<std::int32_t>("live").row(index);
        const Sequences pair{.batch = 2, .length = length};
        with_policy(c, [&](const auto& policy) {
            // Teacher and student as one batch of two.
            test::Plane<expiry_t> expiry(2, 1, length);
            test::Workspace workspace(build_mask_workspace_bytes(ctx, policy, pair, 1));
            build_mask(ctx, policy, view_bhs(scores, 2, 1, length), pair, expiry.view(), workspace);
            bool masks_agree = true;
            for (std::size_t i = 0; i < expiry.data.size(); ++i) {
                masks_agree = masks_agree && std::min(expiry.data[i], length) == wanted_expiry[i];
            }
            CHECK(masks_agree);

            test::Plane<std::int32_t> live(2, 1, length, -1);
            live_keys(ctx, expiry.view(), pair, live.view());
            CHECK(std::equal(wanted_live, wanted_live + length, live.view().head(1, 0)));

            double densities[2] = {-1, -1}, ratios[2] = {-1, -1};
            density(ctx, expiry.view(), pair, densities);
            evict_ratio(ctx, policy, expiry.view(), pair, ratios);
            CHECK(close(densities[1], wanted[0]));
            CHECK(close(ratios[1], wanted[1]));
            CHECK(close(densities[0], wanted[7]));
            CHECK(close(ratios[0], wanted[8]));

            const auto one = [&](std::int32_t b) {
                return plane_view<const expiry_t>{expiry.view().head(b, 0), 1, 1, length, length, length};
            };
            const Sequences single{.batch = 1, .length = length};
            Recall recall{.queries = -1, .mean = -1, .chance_mean = -1, .last = -1, .chance_last = -1};
            test::Workspace memory(oracle_recall_workspace_bytes(ctx, one(0), single));
            oracle_recall(ctx, policy, one(0), one(1), single, &recall, memory);
            CHECK(close(recall.mean, wanted[2]));
            CHECK(close(recall.chance_mean, wanted[3]));
            CHECK(close(recall.last, wanted[4]));
            CHECK(close(recall.chance_last, wanted[5]));
            CHECK(static_cast<double>(recall.queries) == wanted[6]);

            oracle_recall(ctx, policy, one(0), one(0), single, &recall, memory);
            CHECK(recall.mean == 1.0);
            CHECK(recall.last == 1.0);
        });
    });
}

TEST_CASE("density by pairs and by gates, coverage of gates by layouts") {
    const host ctx(2);
    constexpr std::int32_t heads = 3, length = 256, window = 128;
    // Head 0: all gates shut; head 1: all open; head 2: every fourth, whatever the window.
    test::Plane<float> scores(1, heads, length, -3.0f);
    for (std::int32_t t = 0; t < length; ++t) {
        scores.at(0, 1, t) = 3.0f;
        scores.at(0, 2, t) = t % 4 == 0 ? 0.0f : -3.0f;
    }
    const Policy<Window<window>, ThresholdGate<>> policy{{}, ThresholdGate<>::probability(0.5)};
    const Sequences all{.batch = 1, .length = length};
    const auto view = view_bhs<const float>(scores.data.data(), 1, heads, length);
    double rho[heads], pairs[heads];
    open_gates(ctx, policy, view, all, rho);
    CHECK(rho[0] == 0.0);
    CHECK(rho[1] == 1.0);
    CHECK(rho[2] == 0.25);
    test::Plane<expiry_t> expiry(1, heads, length);
    test::Workspace workspace(build_mask_workspace_bytes(ctx, policy, all, heads));
    build_mask(ctx, policy, view, all, expiry.view(), workspace);
    density(ctx, expiry.view(), all, pairs);
    // A window of half the sequence alone: 128 * 129 / 2 + 128 * 128 of 256 * 257 / 2 pairs.
    CHECK(pairs[0] == 24640.0 / 32896.0);
    CHECK(pairs[1] == 1.0);

    // A layout: head 1 dense, the others a window. 128 keys leave the window; of head 2 every fourth is open.
    test::Plane<expiry_t> layout(1, heads, length, never);
    for (std::int32_t t = 0; t < length; ++t) {
        layout.at(0, 0, t) = layout.at(0, 2, t) = t + window;
    }
    Coverage covered[heads];
    coverage(ctx, policy, expiry.view(), layout.view(), all, covered);
    CHECK((covered[0].keys == 0 && covered[0].covered == 0));
    CHECK((covered[1].keys == 128 && covered[1].covered == 128));
    CHECK((covered[2].keys == 32 && covered[2].covered == 0));
    coverage(ctx, policy, expiry.view(), expiry.view(), all, covered);
    CHECK((covered[2].keys == 32 && covered[2].covered == 32));

    scores.at(0, 2, 4) = std::nanf("");
    CHECK_REFUSED(open_gates(ctx, policy, view, all, rho), "scores[0][2][4]: NaN");
    std::uint32_t status = 0;
    open_gates(ctx, policy, view, all, rho, {}, {.status = &status});
    CHECK(status == status_nan_score);
    CHECK(rho[2] == 63.0 / 256.0);
    CHECK_REFUSED(open_gates(ctx, policy, view, all, nullptr), "out: null");
    CHECK_REFUSED(coverage(ctx, policy, expiry.view(), layout.view(), all, nullptr), "out: null");
    test::Plane<expiry_t> other(1, 2, length, never);
    CHECK_REFUSED(coverage(ctx, policy, expiry.view(), other.view(), all, covered), "other: 1 x 2 x 256");
}

TEST_CASE("any mask, heads of their own rules, sequences of their own lengths") {
    const host ctx(3);
    std::mt19937 generator(1);
    constexpr std::int32_t batch = 4, heads = 3, length = 23;
    const std::int32_t lengths[batch] = {0, 23, 1, 14};
    const std::int32_t sinks[] = {0, 2, 30}, windows[] = {1, 5, 40}, budgets[] = {3, 0, unlimited};
    const Policy<Sink<>, Window<>, TopKBudget<>> policy{Sink<>{per_head(sinks, 1, heads)},
                                                        Window<>{per_head(windows, 1, heads)},
                                                        TopKBudget<>{per_head(budgets, 1, heads)}};
    const Sequences sequences{.batch = batch, .length = length, .lengths = lengths};
    const std::size_t all_heads = std::size_t{batch} * heads;
    for (int round = 0; round < 30; ++round) {
        test::Plane<expiry_t> teacher(batch, heads, length), student(batch, heads, length);
        fill_expiry(teacher, generator);
        fill_expiry(student, generator);
        test::Plane<std::int32_t> live(batch, heads, length, -9);
        std::vector<double> densities(all_heads, -9.0), ratios(all_heads, -9.0);
        std::vector<Recall> recalls(all_heads);
        live_keys(ctx, teacher.view(), sequences, live.view());
        density(ctx, teacher.view(), sequences, densities.data());
        evict_ratio(ctx, policy, teacher.view(), sequences, ratios.data());
        test::Workspace memory(oracle_recall_workspace_bytes(ctx, teacher.view(), sequences));
        oracle_recall(ctx, policy, teacher.view(), student.view(), sequences, recalls.data(), memory);
        const auto query = static_cast<std::int32_t>(generator() % length);
        std::vector<std::int32_t> holding(std::size_t{batch} * length, -9);
        retention_map(ctx, teacher.view(), sequences, query, holding.data());
        for (std::int32_t b = 0; b < batch; ++b) {
            const std::int32_t n = lengths[b];
            for (std::int32_t h = 0; h < heads; ++h) {
                CAPTURE(b);
                CAPTURE(h);
                const auto at = static_cast<std::size_t>(b) * heads + static_cast<std::size_t>(h);
                const expiry_t* of_teacher = teacher.view().head(b, h);
                const expiry_t* of_student = student.view().head(b, h);
                const auto eligible = [&](std::int32_t q, std::int32_t t) {
                    return t >= sinks[h] && t <= q - windows[h];
                };
                bool live_agree = true;
                for (std::int32_t q = 0; q < length; ++q) {
                    std::int32_t count = 0;
                    for (std::int32_t t = 0; t <= q; ++t) {
                        count += q < of_teacher[t] ? 1 : 0;
                    }
                    live_agree = live_agree && live.at(b, h, q) == (q < n ? count : -9);
                }
                CHECK(live_agree);
                const auto all = [](std::int32_t, std::int32_t) { return true; };
                CHECK(close(densities[at], share_visible(of_teacher, n, all, false)));
                CHECK(close(ratios[at], share_visible(of_teacher, n, eligible, true)));

                Recall wanted;
                double recall_sum = 0.0, chance_sum = 0.0;
                for (std::int32_t q = 0; q < n; ++q) {
                    double keys = 0, kept = 0, tried = 0, both = 0;
                    for (std::int32_t t = 0; t <= q; ++t) {
                        if (!eligible(q, t)) {
                            continue;
                        }
                        keys += 1;
                        kept += q < of_teacher[t] ? 1 : 0;
                        tried += q < of_student[t] ? 1 : 0;
                        both += q < of_teacher[t] && q < of_student[t] ? 1 : 0;
                    }
                    wanted.last = kept == 0 ? 1.0 : both / kept;
                    wanted.chance_last = keys == 0 ? 1.0 : tried / keys;
                    if (q >= std::int64_t{sinks[h]} + windows[h] + budgets[h]) {
                        ++wanted.queries;
                        recall_sum += wanted.last;
                        chance_sum += wanted.chance_last;
                    }
                }
                if (wanted.queries > 0) {
                    wanted.mean = recall_sum / static_cast<double>(wanted.queries);
                    wanted.chance_mean = chance_sum / static_cast<double>(wanted.queries);
                }
                CHECK(recalls[at].queries == wanted.queries);
                CHECK(close(recalls[at].mean, wanted.mean));
                CHECK(close(recalls[at].chance_mean, wanted.chance_mean));
                CHECK(close(recalls[at].last, wanted.last));
                CHECK(close(recalls[at].chance_last, wanted.chance_last));
            }
            bool map_agrees = true;
            for (std::int32_t t = 0; t < length; ++t) {
                std::int32_t count = 0;
                for (std::int32_t h = 0; h < heads; ++h) {
                    count += t <= query && query < teacher.at(b, h, t) ? 1 : 0;
                }
                map_agrees = map_agrees &&
                             holding[static_cast<std::size_t>(b) * length + static_cast<std::size_t>(t)] ==
                                 (t < n ? count : -9);
            }
            CHECK(map_agrees);
        }
    }
}

TEST_CASE("metrics refuse what they cannot read") {
    const host ctx(1);
    const Policy<Sink<>, Window<>, TopKBudget<>> policy{Sink<>{1}, Window<>{2}, TopKBudget<>{3}};
    test::Plane<expiry_t> expiry(1, 1, 10, never);
    test::Plane<std::int32_t> live(1, 1, 10, -9), short_live(1, 1, 9, -9);
    double number = -9.0;
    Recall recall{.queries = -9};
    const Sequences all{.batch = 1, .length = 10};
    const Sequences longer{.batch = 1, .length = 11}, two{.batch = 2, .length = 10};
    const std::int32_t negative[] = {-1};
    const Sequences bad{.batch = 1, .length = 10, .lengths = negative};
    CHECK_REFUSED(live_keys(ctx, expiry.view(), longer, live.view()),
                  "sequences.length: 11 is not allowed; it must be 0 to");
    CHECK_REFUSED(live_keys(ctx, expiry.view(), two, live.view()), "sequences.batch: 2");
    CHECK_REFUSED(live_keys(ctx, expiry.view(), bad, live.view()), "sequences.lengths[0]: -1");
    CHECK_REFUSED(live_keys(ctx, expiry.view(), all, short_live.view()),
                  "live: 1 x 1 x 9 is not allowed; it must be 1 x 1 x at least 10");
    CHECK_REFUSED(density(ctx, expiry.view(), bad, &number), "sequences.lengths[0]: -1");
    CHECK_REFUSED(evict_ratio(ctx, policy, expiry.view(), bad, &number), "sequences.lengths[0]: -1");
    CHECK_REFUSED(retention_map(ctx, expiry.view(), all, -1, live.data.data()), "query: -1");
    // A chunk's start; packed samples, whose sinks and pairs are not those of one sequence.
    const std::int32_t start[] = {3}, edges[] = {0, 4, 10};
    const Sequences chunk{.batch = 1, .length = 10, .starts = start};
    const Sequences packed{.batch = 1, .length = 10, .cu_seqlens = edges, .segments = 2};
    test::Workspace for_recall(oracle_recall_workspace_bytes(ctx, expiry.view(), all));
    CHECK_REFUSED(live_keys(ctx, expiry.view(), chunk, live.view()), "sequences.starts: given");
    CHECK_REFUSED(retention_map(ctx, expiry.view(), chunk, 1, live.data.data()), "sequences.starts: given");
    // (Named copies, since clang 14 does not capture a structured binding.)
    for (const auto& one :
         {std::pair{chunk, "sequences.starts: given"}, std::pair{packed, "sequences.cu_seqlens: given"}}) {
        const Sequences sequences = one.first;
        const char* const text = one.second;
        CHECK_REFUSED(density(ctx, expiry.view(), sequences, &number), text);
        CHECK_REFUSED(evict_ratio(ctx, policy, expiry.view(), sequences, &number), text);
        CHECK_REFUSED(
            oracle_recall(ctx, policy, expiry.view(), expiry.view(), sequences, &recall, for_recall), text);
    }
    CHECK_REFUSED(oracle_recall_workspace_bytes(ctx, expiry.view(), {.batch = 1}), "sequences.length: -1");

    test::Workspace memory(oracle_recall_workspace_bytes(ctx, expiry.view(), all));
    const workspace_view small{memory.memory.data(), memory.memory.size() - 1};
    CHECK_REFUSED(oracle_recall(ctx, policy, expiry.view(), expiry.view(), all, &recall, small),
                  "workspace.bytes");
    test::Plane<expiry_t> other(1, 2, 10, never);
    CHECK_REFUSED(oracle_recall(ctx, policy, expiry.view(), other.view(), all, &recall, memory),
                  "student: 1 x 2 x 10 is not allowed; it must be 1 x 1 x at least 10");

    // Numbers that no policy can have would send the counts out of bounds.
    const Policy<Sink<>, Window<>, TopKBudget<>> below{Sink<>{-1}, Window<>{2}, TopKBudget<>{3}};
    const Policy<Sink<>, Window<>, TopKBudget<>> narrow{Sink<>{1}, Window<>{0}, TopKBudget<>{3}};
    CHECK_REFUSED(evict_ratio(ctx, below, expiry.view(), all, &number), "sinks of layer 0, head 0: -1");
    CHECK_REFUSED(evict_ratio(ctx, narrow, expiry.view(), all, &number), "window of layer 0, head 0: 0");
    CHECK_REFUSED(oracle_recall(ctx, below, expiry.view(), expiry.view(), all, &recall, memory),
                  "sinks of layer 0");
    CHECK_REFUSED(evict_ratio(ctx, policy, expiry.view(), all, &number, {}, {.layer = -1}), "layer: -1");
    CHECK_REFUSED(live_keys(ctx, expiry.view(), all, {nullptr, 1, 1, 10, 10, 10}), "live: null");
    CHECK_REFUSED(density(ctx, expiry.view(), all, nullptr),
                  "out: null is not allowed; it must be a pointer to the results");
    CHECK_REFUSED(evict_ratio(ctx, policy, expiry.view(), all, nullptr), "out: null");
    CHECK_REFUSED(oracle_recall(ctx, policy, expiry.view(), expiry.view(), all, nullptr, memory),
                  "out: null");
    CHECK_REFUSED(retention_map(ctx, expiry.view(), all, 0, nullptr), "heads_holding: null");

    const plane_view<const expiry_t> none{nullptr, 1, 1, 10, 10, 10};
    CHECK_REFUSED(live_keys(ctx, none, all, live.view()),
                  "expiry: null is not allowed; it must be a pointer to its numbers");
    CHECK_REFUSED(density(ctx, none, all, &number), "expiry: null");
    CHECK_REFUSED(evict_ratio(ctx, policy, none, all, &number), "expiry: null");
    CHECK_REFUSED(retention_map(ctx, none, all, 0, live.data.data()), "expiry: null");
    CHECK_REFUSED(oracle_recall(ctx, policy, none, expiry.view(), all, &recall, memory), "teacher: null");
    CHECK_REFUSED(oracle_recall(ctx, policy, expiry.view(), none, all, &recall, memory), "student: null");
    // Where there is nothing to read, nothing is missing.
    double nothing = -9.0;
    density(ctx, none, {.batch = 1, .length = 0}, &nothing);
    CHECK(nothing == 0.0);
    CHECK(number == -9.0);
    CHECK(recall.queries == -9);
    CHECK(live.at(0, 0, 0) == -9);
}
