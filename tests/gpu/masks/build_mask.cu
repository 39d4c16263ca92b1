// build_mask on CUDA: the host's integers, for every composition, length and order of scores.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/lifetime_cases.hpp"
#include "../support/mask_check.hpp"

#include <doctest/doctest.h>

#include <algorithm>
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

// A gate of a user's own, opposite in sign to the library's.
struct BelowGate {
    static constexpr part_kind kind = part_kind::gate;
    float tau = 0.0f;
    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t, std::int32_t) const {
        head_params.threshold = tau;
    }
    // True for NaN: whether NaN competes is the gate's to say.
    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const HeadParams& head_params) const {
        return !(score > head_params.threshold);
    }
};

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;

Budget budget(std::int32_t sinks, std::int32_t window, std::int32_t k, float log_gamma = 0.0f,
              std::int32_t step = 1) {
    return Budget(Sink<>{sinks}, Window<>{window}, TopKBudget<>{k}, Decay<dynamic>{log_gamma, step});
}

MaskCase random_case(std::int32_t batch, std::int32_t heads, std::int32_t length, unsigned seed = 1) {
    MaskCase input{Plane<float>(batch, heads, length), {}, {}, {}};
    std::mt19937 generator(seed);
    fill_scores(input.scores, Scores::random, generator);
    return input;
}

/// Orders of scores whose values round to equal ones, or absorb their decay.
enum class NaiveScores { random, signs, tiny, huge, masked };
constexpr NaiveScores all_naive_scores[] = {NaiveScores::random, NaiveScores::signs, NaiveScores::tiny,
                                            NaiveScores::huge, NaiveScores::masked};

float naive_score(NaiveScores kind, std::mt19937& generator) {
    const auto pick = [&](std::uint32_t below) { return static_cast<int>(generator() % below); };
    switch (kind) {
        case NaiveScores::random:
            break;
        case NaiveScores::signs: {
            constexpr float infinite = std::numeric_limits<float>::infinity();
            const float some[] = {0.0f, -0.0f, infinite, -infinite, std::nanf(""), 1e-42f};
            return some[pick(6)];
        }
        case NaiveScores::tiny:
            return static_cast<float>(pick(3)) * 1e-30f;
        case NaiveScores::huge:
            return (pick(2) == 0 ? -1.0f : 1.0f) * std::ldexp(1.0f, 30 + 6 * pick(8));
        case NaiveScores::masked:
            if (pick(3) != 0) {
                return -3e38f;
            }
            break;
    }
    return std::normal_distribution<float>()(generator);
}

/// The definition for decay steps above 1 in double, one head: at every query the minimum of all held keys.
MaskResult naive_decayed_mask(const Plane<float>& scores, std::int32_t sinks, std::int32_t window,
                              std::int32_t k, float log_gamma, std::int32_t step) {
    MaskResult result{std::vector<expiry_t>(scores.data.size()), {0u}};
    const auto value = [&](std::int32_t t, std::int32_t q) {
        return static_cast<double>(scores.data[static_cast<std::size_t>(t)]) +
               std::floor(static_cast<double>(q - t) / step) * static_cast<double>(log_gamma);
    };
    // Whether a is evicted before b at q: smaller, NaN before all numbers, the younger of equal ones.
    const auto worse = [&](std::int32_t a, std::int32_t b, std::int32_t q) {
        const double of_a = value(a, q), of_b = value(b, q);
        const bool nan_a = of_a != of_a, nan_b = of_b != of_b;
        return nan_a != nan_b ? nan_a : nan_a || of_a == of_b ? a > b : of_a < of_b;
    };
    std::vector<std::int32_t> held;
    for (std::int32_t t = 0; t < scores.length; ++t) {
        result.expiry[static_cast<std::size_t>(t)] = t < sinks ? never : t + window;
        const std::int32_t u = t - window;
        if (u < sinks) {
            continue;
        }
        const float score = scores.data[static_cast<std::size_t>(u)];
        result.status[0] |= score != score ? status_nan_score : 0u;
        if (static_cast<std::int32_t>(held.size()) < k) {
            held.push_back(u);
            result.expiry[static_cast<std::size_t>(u)] = never;
            continue;
        }
        const auto worst = std::min_element(held.begin(), held.end(),
                                            [&](std::int32_t a, std::int32_t b) { return worse(a, b, t); });
        if (worse(*worst, u, t)) {
            result.expiry[static_cast<std::size_t>(*worst)] = t;
            result.expiry[static_cast<std::size_t>(u)] = never;
            *worst = u;
        }
    }
    return result;
}

}  // namespace

TEST_CASE("every composition gives the host's integers") {
    for (const std::int32_t length : {1, 33, 700, 1500}) {
        MaskCase input = random_case(2, 3, length, static_cast<unsigned>(length));
        CAPTURE(length);
        const Sink<> sink{3};
        const Window<> window{17};
        const TopKBudget<> k{40};
        const ThresholdGate<at_least> gate(0.2f);
        const ThresholdGate<above> strict(0.2f);
        const Decay<1> decay(-0.01f);
        check_mask(Policy<Window<>>(window), input, "window");
        check_mask(Policy<Sink<>, Window<>>(sink, window), input, "sinks, window");
        check_mask(Policy<Sink<>, Window<>, KeepEvery>(sink, window, KeepEvery{16}), input,
                   "sinks, window, keep");
        check_mask(Policy<Window<>, ThresholdGate<at_least>>(window, gate), input, "window, gate");
        check_mask(Policy<Sink<>, Window<>, ThresholdGate<above>>(sink, window, strict), input,
                   "strict gate");
        check_mask(
            Policy<Sink<>, Window<>, BelowGate, KeepEvery>(sink, window, BelowGate{-0.5f}, KeepEvery{7}),
            input, "a user's gate, keep");
        check_mask(Policy<TopKBudget<>>(k), input, "budget alone");
        check_mask(Policy<Sink<>, Window<>, TopKBudget<>>(sink, window, k), input, "budget");
        check_mask(Policy<Sink<>, Window<>, TopKBudget<>, Decay<1>>(sink, window, k, decay), input,
                   "budget, decay");
        check_mask(Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>>(sink, window, strict, k),
                   input, "capped gate");
        check_mask(Policy<Sink<>, Window<>, BelowGate, TopKBudget<>, Decay<1>, KeepEvery>(
                       sink, window, BelowGate{0.4f}, k, decay, KeepEvery{5}),
                   input, "a user's gate, budget, decay, keep");
    }
}

TEST_CASE("lengths around powers of two and the edges of chunks") {
    for (const std::int32_t length :
         {0, 1, 2, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049}) {
        MaskCase input = random_case(1, 2, length, static_cast<unsigned>(length + 7));
        for (const std::int32_t k : {1, 5, 100}) {
            check_mask(budget(2, 9, k), input,
                       "length " + std::to_string(length) + ", k " + std::to_string(k));
            check_mask(budget(0, 1, k, -0.003f), input,
                       "decay, length " + std::to_string(length) + ", k " + std::to_string(k));
        }
    }
}

TEST_CASE("long sequences") {
    for (const std::int32_t length : {4095, 4096, 4097, 16383, 16384, 16385, 40000}) {
        MaskCase input = random_case(1, 2, length, static_cast<unsigned>(length));
        check_mask(budget(4, 256, 3836, -0.001f), input, "length " + std::to_string(length));
        check_mask(budget(4, 64, 100), input, "k = 100, length " + std::to_string(length));
    }
}

TEST_CASE("orders of scores that break careless rankings") {
    std::mt19937 generator(5);
    for (const std::int32_t length : {600, 3000}) {
        for (const float log_gamma : {0.0f, -1e-3f, -0.5f, -1e-9f}) {
            for (const std::int32_t k : {1, 33, 500, 1400}) {
                const std::string end = ", length " + std::to_string(length) + ", k " + std::to_string(k) +
                                        ", log gamma " + std::to_string(log_gamma);
                MaskCase input = random_case(1, 1, length);
                for (const Scores kind : all_scores) {
                    fill_scores(input.scores, kind, generator);
                    check_mask(budget(1, 13, k, log_gamma), input, name(kind) + end);
                }
                for (const HardScores kind : all_hard_scores) {
                    fill_scores(input.scores, kind, log_gamma, generator);
                    check_mask(budget(1, 13, k, log_gamma), input, name(kind) + end);
                }
            }
        }
    }
}

TEST_CASE("budgets of nothing, of everything, and without a limit") {
    for (const std::int32_t length : {40, 1100}) {
        MaskCase input = random_case(1, 2, length);
        for (const std::int32_t k :
             {0, 1, length - 30, length - 21, length - 20, length - 19, length, length + 5, unlimited}) {
            const std::string end = ", length " + std::to_string(length) + ", k " + std::to_string(k);
            check_mask(budget(2, 18, k), input, "budget" + end);
            check_mask(budget(2, 18, k, -0.1f), input, "decay" + end);
            check_mask(budget(2, 18, k, -0.1f, 8), input, "decayed top-k" + end);
        }
        check_mask(budget(2, unlimited, 3), input, "a window over everything");
        check_mask(budget(unlimited, 1, 3), input, "sinks only");
    }
}

TEST_CASE("numbers by head") {
    const std::int32_t heads = 5;
    const std::vector<std::int32_t> sinks{0, 4, 1, 9, 2}, windows{1, 30, 256, 7, 64},
        budgets{0, 50, unlimited, 1, 700};
    const std::vector<std::int32_t> steps{1, 1, 1, 16, 1};
    const std::vector<float> decays{0.0f, -0.01f, -0.2f, -0.05f, 0.0f}, taus{-0.5f, 0.0f, 0.7f, -9.0f, 0.1f};
    const Policy<Sink<>, Window<>, ThresholdGate<at_least>, TopKBudget<>, Decay<dynamic>> policy(
        Sink<>{per_head(sinks.data(), 1, heads)}, Window<>{per_head(windows.data(), 1, heads)},
        ThresholdGate<at_least>(per_head(taus.data(), 1, heads)),
        TopKBudget<>{per_head(budgets.data(), 1, heads)},
        Decay<dynamic>(per_head(decays.data(), 1, heads), per_head(steps.data(), 1, heads)));
    MaskCase input = random_case(2, heads, 2000, 3);
    check_mask(policy, input, "numbers by head");

    // Another layer's numbers.
    const std::vector<std::int32_t> layers{1, 2, 3, 40, 500, 60};
    const Policy<Window<>, TopKBudget<>, Decay<dynamic>> deep(
        Window<>{5}, TopKBudget<>{per_head(layers.data(), 2, 3)}, Decay<dynamic>(-0.01f, 1));
    MaskCase deep_input = random_case(1, 3, 1200, 5);
    deep_input.options.layer = 1;
    check_mask(deep, deep_input, "layer 1");

    // More heads than one launch's parameters hold.
    std::vector<std::int32_t> many(300);
    for (std::size_t h = 0; h < many.size(); ++h) {
        many[h] = static_cast<std::int32_t>(h % 37);
    }
    const Policy<Window<>, TopKBudget<>> wide(Window<>{3}, TopKBudget<>{per_head(many.data(), 1, 300)});
    MaskCase wide_input = random_case(1, 300, 64, 4);
    check_mask(wide, wide_input, "300 heads");
}

TEST_CASE("sequences of different lengths, and packed segments") {
    for (const float log_gamma : {0.0f, -0.01f}) {
        for (const std::int32_t step : {1, 4}) {
            MaskCase input = random_case(5, 2, 1700, 9);
            input.lengths = {1700, 0, 1, 513, 1024};
            check_mask(budget(2, 20, 100, log_gamma, step), input, "lengths");
            input.cu_seqlens = {0, 0, 1, 40, 513, 514, 1300, 1300, 1700};
            check_mask(budget(2, 20, 100, log_gamma, step), input, "lengths and packed");
            input.lengths.clear();
            check_mask(budget(2, 20, 100, log_gamma, step), input, "packed");
            check_mask(budget(0, 1, 3, log_gamma, step), input, "packed, small budget");
        }
    }
    MaskCase input = random_case(2, 2, 1700, 10);
    input.cu_seqlens = {0, 600, 1700};
    check_mask(Policy<Sink<>, Window<>>(Sink<>{3}, Window<>{30}), input, "packed, unranked");
    check_mask(
        Policy<Sink<>, Window<>, ThresholdGate<above>>(Sink<>{3}, Window<>{30}, ThresholdGate<above>(0.3f)),
        input, "packed, gate");
}

TEST_CASE("more segments than one round of counting holds") {
    MaskCase input = random_case(1, 1, 30000, 12);
    input.cu_seqlens = {0};
    std::mt19937 generator(12);
    while (input.cu_seqlens.back() < 29000) {  // many are empty, or shorter than the window
        input.cu_seqlens.push_back(input.cu_seqlens.back() + static_cast<std::int32_t>(generator() % 7));
    }
    input.cu_seqlens.push_back(30000);
    REQUIRE(input.cu_seqlens.size() > cuda_backend::counted_chunks);
    check_mask(budget(0, 1, 2), input, "short segments");
    check_mask(budget(1, 2, 30, -0.01f), input, "short segments, decay");
}

TEST_CASE("views with strides of their own, longer than the sequences") {
    // Heads outside, sequences inside, rows padded, and nothing aligned to more than a number.
    constexpr std::int32_t batch = 3, heads = 2, length = 1100, score_pitch = 1113, pitch = 1131;
    MaskCase input = random_case(batch, heads, length, 13);
    std::vector<float> padded(3 + batch * heads * score_pitch, std::numeric_limits<float>::quiet_NaN());
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            std::copy_n(&input.scores.at(b, h, 0), length,
                        &padded[static_cast<std::size_t>(3 + (h * batch + b) * score_pitch)]);
        }
    }
    const Device<float> scores(padded);
    const Sequences sequences{batch, length};
    const kvpolicy::cuda ctx{};
    for (const std::int32_t step : {1, 4}) {
        const auto policy = budget(2, 20, 100, -0.01f, step);
        const std::vector<expiry_t> wanted = host_mask(policy, input).expiry;
        for (const cuda_backend::mask_tuning& tuning : all_tunings()) {
            const Device<expiry_t> expiry(
                std::vector<expiry_t>(static_cast<std::size_t>(5 + batch * heads * pitch), untouched));
            const Device<unsigned char> workspace(
                cuda_backend::mask_workspace_bytes(ctx, policy, sequences, heads, {}, tuning));
            cuda_backend::build_mask_tuned(
                ctx, policy,
                plane_view<const float>{scores.data() + 3, batch, heads, score_pitch, score_pitch,
                                        batch * score_pitch},
                sequences, plane_view<expiry_t>{expiry.data() + 5, batch, heads, pitch, pitch, batch * pitch},
                workspace, {}, nullptr, tuning);
            const std::vector<expiry_t> got = expiry.read();
            std::vector<expiry_t> expected(got.size(), untouched);
            for (std::int32_t b = 0; b < batch; ++b) {
                for (std::int32_t h = 0; h < heads; ++h) {
                    std::copy_n(wanted.begin() + (b * heads + h) * length, length,
                                expected.begin() + 5 + (h * batch + b) * pitch);
                }
            }
            same(got, expected, pitch, "strides, step " + std::to_string(step));
        }
    }
}

TEST_CASE("a NaN score under every kind of gate") {
    MaskCase input = random_case(2, 2, 1300, 14);
    std::mt19937 generator(14);
    fill_scores(input.scores, HardScores::nan, 0.0f, generator);
    const Sink<> sink{1};
    const Window<> window{9};
    for (const std::int32_t k : {0, 60, 1000, unlimited}) {
        const std::string end = ", k " + std::to_string(k);
        const TopKBudget<> places{k};
        check_mask(Policy<Sink<>, Window<>, ThresholdGate<at_least>, TopKBudget<>>(
                       sink, window, ThresholdGate<at_least>(-0.5f), places),
                   input, "at least" + end);
        check_mask(Policy<Sink<>, Window<>, BelowGate, TopKBudget<>, Decay<1>>(sink, window, BelowGate{0.5f},
                                                                               places, Decay<1>(-0.01f)),
                   input, "a gate that is open for NaN" + end);
    }
    const MaskResult gated = check_mask(
        Policy<Window<>, ThresholdGate<above>>(window, ThresholdGate<above>(-9.0f)), input, "above");
    CHECK(gated.status == std::vector<std::uint32_t>{status_nan_score, status_nan_score});
    check_mask(Policy<Window<>, BelowGate>(window, BelowGate{0.5f}), input, "open for NaN");
    check_mask(Policy<Window<>>(window), input, "no score is read");
}

TEST_CASE("top-k updates whose order depends on the query") {
    for (const std::int32_t step : {2, 3, 32, 33, 64, 1000, 1025, 5000}) {
        for (const std::int32_t k : {1, 64, 700}) {
            MaskCase input = random_case(1, 2, 1500, static_cast<unsigned>(step));
            const std::string end = ", step " + std::to_string(step) + ", k " + std::to_string(k);
            check_mask(budget(2, 20, k, -0.05f, step), input, "decayed top-k" + end);
            std::mt19937 generator(8);
            for (const Scores kind :
                 {Scores::equal, Scores::improving, Scores::few_values, Scores::infinities}) {
                fill_scores(input.scores, kind, generator);
                check_mask(budget(2, 20, k, -0.05f, step), input, name(kind) + end);
            }
            fill_scores(input.scores, HardScores::nan, -0.05f, generator);
            check_mask(budget(2, 20, k, -0.05f, step), input, "NaN" + end);
        }
    }
    for (const position_t limit : {64, 1000}) {
        MaskCase input = random_case(1, 2, 1500, 21);
        input.options.rebase_limit = limit;
        check_mask(budget(2, 20, 64, -0.05f), input, "rebase at " + std::to_string(limit));
        check_mask(budget(2, 20, 64), input, "rebase without decay");
        std::mt19937 generator(8);
        fill_scores(input.scores, HardScores::nearly_level, -0.05f, generator);
        check_mask(budget(2, 20, 64, -0.05f), input, "rebase, nearly level");
    }
}

TEST_CASE("top-k updates whose order depends on the query equal a naive model") {
    std::mt19937 generator(31);
    for (const std::int32_t step : {2, 3, 33, 1000}) {
        for (const float log_gamma : {-0.05f, -1e-7f, -3.0f, -1e-40f}) {
            for (const NaiveScores kind : all_naive_scores) {
                MaskCase input = random_case(1, 1, 900, 3);
                for (float& x : input.scores.data) {
                    x = naive_score(kind, generator);
                }
                const MaskResult wanted = naive_decayed_mask(input.scores, 2, 7, 100, log_gamma, step);
                const std::string what = "step " + std::to_string(step) + ", log gamma " +
                                         std::to_string(log_gamma) + ", scores " +
                                         std::to_string(static_cast<int>(kind));
                const MaskResult got =
                    device_mask(budget(2, 7, 100, log_gamma, step), input, all_tunings()[0]);
                same(got.expiry, wanted.expiry, 900, what);
                CHECK_MESSAGE(got.status == wanted.status, what, ": status");
            }
        }
    }
}

TEST_CASE("top-k updates whose order depends on the query, in rounds") {
    std::mt19937 generator(32);
    for (const std::int32_t step : {3, 64}) {
        for (const std::int32_t k : {700, 3836, 4608, 4609}) {
            MaskCase input = random_case(1, 2, 16384, static_cast<unsigned>(k));
            const std::string end = ", step " + std::to_string(step) + ", k " + std::to_string(k);
            check_mask(budget(4, 256, k, -1e-3f, step), input, "random" + end);
            for (const Scores kind : {Scores::equal, Scores::improving, Scores::few_values}) {
                fill_scores(input.scores, kind, generator);
                check_mask(budget(4, 256, k, -1e-3f, step), input, name(kind) + end);
            }
        }
    }
    // Gates and keep parts beside it, and a round that ends with its candidates.
    MaskCase input = random_case(2, 2, 13000, 33);
    check_mask(Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<3>, KeepEvery>(
                   Sink<>{3}, Window<>{17}, ThresholdGate<above>(-0.5f), TopKBudget<>{1000}, Decay<3>(-0.01f),
                   KeepEvery{5}),
               input, "gate, keep, decay step 3");
    input.cu_seqlens = {0, 0, 5, 4000, 12999, 13000};
    check_mask(budget(1, 9, 300, -0.01f, 3), input, "packed, decay step 3");
}

TEST_CASE("top-k updates of more entries than a thread's registers hold, and around it") {
    for (const std::int32_t k : {1024, 1025, 2000, 4096, 4097, 5000}) {
        MaskCase input = random_case(1, 1, 6000, static_cast<unsigned>(k));
        // A step that rounds take, and one that is too large for them.
        for (const std::int32_t step : {7, 1500}) {
            const std::string end = ", k " + std::to_string(k) + ", step " + std::to_string(step);
            check_mask(budget(2, 20, k, -0.05f, step), input, "decayed top-k" + end);
            // All keys equal: the younger loses, whoever holds it.
            std::mt19937 generator(8);
            MaskCase equal = input;
            fill_scores(equal.scores, Scores::equal, generator);
            check_mask(budget(2, 20, k, -0.05f, step), equal, "decayed top-k, equal" + end);
        }
    }
}

TEST_CASE("priorities that agree to more bits than a sort key has") {
    for (const std::int32_t length : {3000, 20000, 40000}) {
        for (const float log_gamma : {-1e-3f, -0x1p-10f}) {  // the latter: equal to the last bit
            MaskCase input = random_case(1, 3, length);
            std::mt19937 generator(4);
            for (const HardScores kind : {HardScores::level, HardScores::nearly_level,
                                          HardScores::minus_infinity, HardScores::masked}) {
                fill_scores(input.scores, kind, log_gamma, generator);
                check_mask(budget(2, 20, 300, log_gamma), input,
                           name(kind) + ", length " + std::to_string(length) + ", log gamma " +
                               std::to_string(log_gamma));
            }
            // Packed, so that runs end with their segment.
            input.cu_seqlens = {0, 5, length / 2, length};
            fill_scores(input.scores, HardScores::level, log_gamma, generator);
            check_mask(budget(2, 20, 300, log_gamma), input, "packed, length " + std::to_string(length));
        }
    }
}

TEST_CASE("lengths and edges in device memory that cannot be") {
    MaskCase input = random_case(4, 2, 600, 2);
    input.lengths = {600, -1, 601, 77};
    for (const cuda_backend::mask_tuning& tuning : all_tunings()) {
        for (const std::int32_t step : {1, 4}) {
            const MaskResult got = device_mask(budget(2, 20, 100, -0.1f, step), input, tuning);
            MaskCase right = input;
            right.lengths = {600, 0, 0, 77};
            same(got.expiry, host_mask(budget(2, 20, 100, -0.1f, step), right).expiry, 600, "bad lengths");
            CHECK(got.status == std::vector<std::uint32_t>{0, status_bad_length, status_bad_length, 0});
        }
        MaskCase packed = random_case(1, 1, 600, 2);
        for (const std::vector<std::int32_t>& edges : {std::vector<std::int32_t>{0, 300, 200, 600},
                                                       {1, 300, 600},
                                                       {0, 300, 599},
                                                       {0, 1 << 30, 600},
                                                       {0, -5, 600}}) {
            packed.cu_seqlens = edges;
            const MaskResult got = device_mask(budget(2, 20, 100, -0.1f), packed, tuning);
            CHECK(got.expiry == std::vector<expiry_t>(600, untouched));
            CHECK(got.status == std::vector<std::uint32_t>{status_bad_length});
        }
    }
}
