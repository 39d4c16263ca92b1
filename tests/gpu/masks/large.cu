// Masks of a million tokens against the host, and a hundred runs that must agree bit for bit.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../support/mask_check.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<1>>;

MaskCase case_of(std::int32_t batch, std::int32_t heads, std::int32_t length) {
    return {Plane<float>(batch, heads, length), {}, {}, {}};
}

}  // namespace

TEST_CASE("a million tokens") {
    std::mt19937 generator(11);
    MaskCase input = case_of(1, 2, 1 << 20);
    for (const float log_gamma : {0.0f, -1e-4f}) {
        for (const std::int32_t k : {3836, 100, 500000}) {
            const Budget policy(Sink<>{4}, Window<>{256}, TopKBudget<>{k}, Decay<1>(log_gamma));
            const std::string end = ", k " + std::to_string(k) + ", log gamma " + std::to_string(log_gamma);
            for (const Scores kind :
                 {Scores::random, Scores::equal, Scores::improving, Scores::worsening, Scores::few_values}) {
                fill_scores(input.scores, kind, generator);
                check_mask(policy, input, name(kind) + end);
            }
            for (const HardScores kind :
                 {HardScores::masked, HardScores::level, HardScores::nearly_level, HardScores::jump}) {
                fill_scores(input.scores, kind, log_gamma, generator);
                check_mask(policy, input, name(kind) + end);
            }
        }
    }
}

TEST_CASE("lengths around powers of two") {
    std::mt19937 generator(12);
    for (const std::int32_t power : {1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 20}) {
        for (const std::int32_t length : {power - 1, power, power + 1}) {
            MaskCase input = case_of(1, 1, length);
            fill_scores(input.scores, Scores::random, generator);
            check_mask(Budget(Sink<>{4}, Window<>{256}, TopKBudget<>{3836}, Decay<1>(-1e-4f)), input,
                       "length " + std::to_string(length));
        }
    }
}

TEST_CASE("lengths around 2^14 with many heads") {
    for (const std::int32_t length : {16383, 16384, 16385}) {
        std::mt19937 generator(static_cast<unsigned>(length));
        MaskCase input = case_of(2, 8, length);
        for (const Scores kind : all_scores) {
            fill_scores(input.scores, kind, generator);
            for (const float log_gamma : {0.0f, -1e-3f}) {
                check_mask(Budget(Sink<>{4}, Window<>{256}, TopKBudget<>{3836}, Decay<1>(log_gamma)), input,
                           name(kind) + ", length " + std::to_string(length) + ", log gamma " +
                               std::to_string(log_gamma));
            }
        }
    }
}

TEST_CASE("a hundred runs give the same integers") {
    std::mt19937 generator(3);
    for (const std::int32_t length : {1000, 16384, 50000}) {
        MaskCase input = case_of(2, 4, length);
        fill_scores(input.scores, Scores::few_values, generator);
        const Budget policy(Sink<>{4}, Window<>{64}, TopKBudget<>{7}, Decay<1>(-1e-3f));
        for (const cuda_backend::mask_tuning& tuning : all_tunings()) {
            const MaskResult first = device_mask(policy, input, tuning);
            int different = 0;
            for (int run = 1; run < 100; ++run) {
                different += device_mask(policy, input, tuning).expiry == first.expiry ? 0 : 1;
            }
            CHECK(different == 0);
        }
    }
}
