// build_mask on CUDA of budgets that the heads of a layer share: the host's integers, and the reference's.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/shared_cases.hpp"
#include "../support/mask_check.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;
using kvpolicy_test::draw_shared_case;
using kvpolicy_test::draw_shared_scores;
using kvpolicy_test::for_each_shared_vector;
using kvpolicy_test::SharedCase;
using kvpolicy_test::SharedVector;

namespace {

using Shared = Policy<Sink<>, Window<>, SharedBudget<>, Decay<1>>;

Shared shared(PerHead<std::int32_t> window, std::int32_t k, float log_gamma, SharedLimits limits = {}) {
    return Shared{Sink<>{3}, Window<>{window}, SharedBudget<>{k, limits}, Decay<1>{log_gamma}};
}

MaskCase case_of(std::int32_t batch, std::int32_t heads, std::int32_t length, unsigned seed = 1) {
    MaskCase input{Plane<float>(batch, heads, length), {}, {}, {}};
    std::mt19937 generator(seed);
    fill_scores(input.scores, Scores::random, generator);
    return input;
}

}  // namespace

// shared_top_k_kernel and, for static orders without limits, make_shared_sort_keys_kernel and the kernels
// that rank the keys of a head.
TEST_CASE("shared budgets: the reference's vectors") {
    const auto file = kvpolicy_test::vectors::load("shared.kvpv");
    for_each_shared_vector(file, [&](const SharedVector& one, std::int64_t index) {
        const SharedCase& numbers = one.numbers;
        MaskCase input{Plane<float>(1, numbers.heads, numbers.length), {}, one.cu_seqlens, {}};
        input.scores.data = one.scores;
        input.options.rebase_limit = numbers.rebase_limit;
        numbers.with_policy([&](const auto& policy) {
            std::vector<expiry_t> mask = device_mask(policy, input, all_tunings()[0]).expiry;
            std::vector<expiry_t> wanted(one.expiry, one.expiry + mask.size());
            for (expiry_t& expiry : mask) {
                expiry = std::min(expiry, numbers.length);
            }
            same(mask, wanted, numbers.length, "case " + std::to_string(index) + ": " + numbers.text());
        });
    });
}

TEST_CASE("shared budgets: random draws, in batches of different lengths and in packed segments") {
    std::mt19937 generator(9);
    for (int draw = 0; draw < 60; ++draw) {
        const auto length = static_cast<std::int32_t>(generator() % 400);
        const SharedCase numbers = draw_shared_case(generator, 9, length, 30);
        MaskCase input{Plane<float>(3, numbers.heads, length), {}, {}, {}};
        input.scores.data = draw_shared_scores(generator, input.scores.data.size());
        input.options.rebase_limit = numbers.rebase_limit;
        if (draw % 3 == 1) {
            input.lengths = {length, length / 3, 0};
        } else if (draw % 3 == 2) {
            input.cu_seqlens = {0, length / 4, length / 4, length / 2 + 1, length};
            std::sort(input.cu_seqlens.begin(), input.cu_seqlens.end());
            input.cu_seqlens.back() = length;
            input.cu_seqlens[3] = std::min(input.cu_seqlens[3], length);
        }
        numbers.with_policy([&](const auto& policy) { check_mask(policy, input, numbers.text()); });
    }
}

TEST_CASE("shared budgets: lengths around the edges of chunks, any number of heads") {
    for (const std::int32_t heads : {1, 3, 8}) {
        for (const std::int32_t length : {0, 1, 2, 63, 64, 65, 171, 512, 513, 1024, 1025, 3000}) {
            MaskCase input = case_of(2, heads, length, static_cast<unsigned>(length + heads));
            const std::string end = std::to_string(heads) + " heads, length " + std::to_string(length);
            check_mask(shared(9, 5, 0.0f), input, end);
            check_mask(shared(1, 100, -0.003f), input, "decay, " + end);
        }
    }
    for (const std::int32_t heads : {33, 128, 1000}) {
        MaskCase input = case_of(1, heads, 70, static_cast<unsigned>(heads));
        check_mask(shared(4, 7, -0.01f), input, std::to_string(heads) + " heads");
        check_mask(shared(4, 7, -0.01f, {.floor = 2, .cap = 20}), input,
                   std::to_string(heads) + " heads, limits");
    }
}

TEST_CASE("shared budgets: windows, offsets and gates by head, long sequences") {
    const std::int32_t windows[] = {1, 17, 300, 64, 64, 5000, 40, 2};
    const float offsets[] = {0.0f, 0.5f, -1.0f, 0.0f, 2.0f, 0.0f, 1e-8f, 0.0f};
    for (const std::int32_t length : {4097, 16384, 20000}) {
        MaskCase input = case_of(1, 8, length, static_cast<unsigned>(length));
        for (const float log_gamma : {0.0f, -0.001f}) {
            const std::string end =
                ", length " + std::to_string(length) + ", log gamma " + std::to_string(log_gamma);
            check_mask(shared(256, 1000, log_gamma), input, "one window" + end);
            check_mask(shared(per_head(windows, 1, 8), 300, log_gamma), input, "windows" + end);
            check_mask(
                shared(per_head(windows, 1, 8), 300, log_gamma, {.score_offset = per_head(offsets, 1, 8)}),
                input, "windows, offsets" + end);
        }
        const Policy<Window<>, ThresholdGate<above>, SharedBudget<>> gated{
            Window<>{64}, ThresholdGate<above>{0.3f}, SharedBudget<>{200}};
        check_mask(gated, input, "gate, length " + std::to_string(length));
    }
}

TEST_CASE("shared budgets: orders of scores that break careless rankings") {
    std::mt19937 generator(5);
    for (const float log_gamma : {0.0f, -1e-3f, -0.5f}) {
        for (const std::int32_t k : {1, 33, 700}) {
            MaskCase input = case_of(1, 3, 2500);
            const std::string end = ", k " + std::to_string(k) + ", log gamma " + std::to_string(log_gamma);
            for (const Scores kind : all_scores) {
                fill_scores(input.scores, kind, generator);
                check_mask(shared(13, k, log_gamma), input, name(kind) + end);
            }
            for (const HardScores kind : all_hard_scores) {
                fill_scores(input.scores, kind, log_gamma, generator);
                check_mask(shared(13, k, log_gamma), input, name(kind) + end);
            }
        }
    }
}

TEST_CASE("shared budgets: budgets of nothing and of everything") {
    MaskCase input = case_of(2, 4, 700);
    for (const std::int32_t k : {0, 699, 700, 100000}) {
        check_mask(shared(20, k, 0.0f), input, "k = " + std::to_string(k));
        check_mask(shared(20, k, -0.01f), input, "decay, k = " + std::to_string(k));
        check_mask(shared(20, k, 0.0f, {.cap = 0}), input, "cap 0, k = " + std::to_string(k));
    }
}
