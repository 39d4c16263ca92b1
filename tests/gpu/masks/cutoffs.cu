// build_cutoffs and expiry_from_cutoffs on CUDA: the host's integers, by every algorithm.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../support/cutoff_check.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <string>

using namespace kvpolicy;
using namespace test;

TEST_CASE("ranks and cutoffs are the host's, by every algorithm") {
    std::mt19937 generator(5);
    for (const std::int32_t length : {1, 200, 1100, 2600}) {
        for (const std::int32_t k : {0, 1, 60, 511, 2600, unlimited}) {
            for (const Scores kind :
                 {Scores::random, Scores::improving, Scores::worsening, Scores::few_values}) {
                MaskCase input{Plane<float>(2, 2, length), {length, length / 2}, {}, {}};
                fill_scores(input.scores, kind, generator);
                const Policy<Sink<>, Window<>, TopKBudget<>, Decay<1>> policy(
                    Sink<>{2}, Window<>{31}, TopKBudget<>{k}, Decay<1>(-0.004f));
                check_cutoffs(policy, input,
                              name(kind) + ", length " + std::to_string(length) + ", k " + std::to_string(k));
            }
        }
    }
}
