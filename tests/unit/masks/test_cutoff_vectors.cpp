// build_cutoffs and expiry_from_cutoffs against the running cutoff rank of an independent reference
// (tests/reference/cutoff.py). Ranks are compared among the keys that compete in the sequence.
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/masks/build.hpp>

#include "support/lifetime_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

using namespace kvpolicy;
using kvpolicy_test::for_each_case;
using kvpolicy_test::LifetimeCase;
using kvpolicy_test::vectors;
using kvpolicy_test::with_policy;

TEST_CASE_TEMPLATE("ranks, cutoffs and what they imply equal the reference's", C, FenwickCutoff,
                   LinkedCutoff) {
    const vectors file = vectors::load("cutoff.kvpv");
    const host ctx(1);
    for_each_case(file, [&](const LifetimeCase& c, std::int64_t index) {
        CAPTURE(index);
        const auto begin = file.get<std::int32_t>("offsets")[index];
        const std::int32_t* wanted_rank = file.get<std::int32_t>("competing_rank").data() + begin;
        const std::int32_t* wanted_cutoff = file.get<std::int32_t>("competing_cutoff").data() + begin;
        const auto scores = view_bhs(file.get<float>("scores").row(c.pattern), 1, 1, c.length);
        const Sequences sequences{.batch = 1, .length = c.length};
        with_policy(c, [&](const auto& policy) {
            if constexpr (std::decay_t<decltype(policy)>::has_budget) {
                std::vector<std::int32_t> rank(static_cast<std::size_t>(c.length) + 1);
                std::vector<std::int32_t> cutoff(rank.size());
                const std::size_t bytes = build_cutoffs_workspace_bytes<C>(ctx, policy, sequences, 1);
                std::vector<std::max_align_t> workspace(bytes / sizeof(std::max_align_t) + 1);
                build_cutoffs<C>(ctx, policy, scores, sequences, view_bhs(rank.data(), 1, 1, c.length),
                                 view_bhs(cutoff.data(), 1, 1, c.length),
                                 workspace_view{workspace.data(), bytes});
                bool ranks_agree = true;
                for (std::int32_t t = 0; t < c.length; ++t) {
                    const std::int32_t wanted = wanted_rank[t] == INT32_MAX ? no_rank : wanted_rank[t];
                    ranks_agree = ranks_agree && rank[static_cast<std::size_t>(t)] == wanted;
                }
                CHECK(ranks_agree);
                CHECK(std::equal(wanted_cutoff, wanted_cutoff + c.length, cutoff.begin()));

                std::vector<expiry_t> expiry(rank.size());
                std::vector<expiry_t> direct(rank.size());
                expiry_from_cutoffs(ctx, policy, view_bhs(std::as_const(rank).data(), 1, 1, c.length),
                                    view_bhs(std::as_const(cutoff).data(), 1, 1, c.length), sequences,
                                    view_bhs(expiry.data(), 1, 1, c.length), {});
                const std::size_t mask_bytes = build_mask_workspace_bytes(ctx, policy, sequences, 1);
                std::vector<std::max_align_t> mask_workspace(mask_bytes / sizeof(std::max_align_t) + 1);
                build_mask(ctx, policy, scores, sequences, view_bhs(direct.data(), 1, 1, c.length),
                           workspace_view{mask_workspace.data(), mask_bytes});
                bool masks_agree = true;
                for (std::int32_t t = 0; t < c.length; ++t) {
                    const auto at = static_cast<std::size_t>(t);
                    masks_agree =
                        masks_agree && std::min(expiry[at], c.length) == std::min(direct[at], c.length);
                }
                CHECK(masks_agree);
            }
        });
    });
}

namespace {

/// By the definition: among the keys t <= q - w that compete, the rank of the k-th best.
std::int32_t cutoff_at(const std::vector<std::int32_t>& rank, std::int32_t q, const HeadParams& head_params) {
    if (head_params.budget == 0) {
        return -1;
    }
    std::vector<std::int32_t> eligible;
    for (std::int64_t t = 0; t <= std::int64_t{q} - head_params.window; ++t) {
        if (rank[static_cast<std::size_t>(t)] != no_rank) {
            eligible.push_back(rank[static_cast<std::size_t>(t)]);
        }
    }
    if (static_cast<std::int64_t>(eligible.size()) < head_params.budget) {
        return open_cutoff;
    }
    std::nth_element(eligible.begin(), eligible.begin() + head_params.budget - 1, eligible.end());
    return eligible[static_cast<std::size_t>(head_params.budget - 1)];
}

}  // namespace

TEST_CASE_TEMPLATE("the running cutoff of any ranks, memory exactly as asked for", C, FenwickCutoff,
                   LinkedCutoff) {
    std::mt19937 generator(1);
    int wrong = 0;
    for (int round = 0; round < 400; ++round) {
        const auto length = static_cast<std::int32_t>(generator() % 40);
        HeadParams head_params;
        head_params.window = static_cast<std::int32_t>(1 + generator() % 9);
        head_params.budget = round % 10 == 0 ? unlimited : static_cast<std::int32_t>(generator() % 12);
        // Some keys compete; their ranks are a permutation.
        std::vector<std::int32_t> rank(static_cast<std::size_t>(length), no_rank), competing;
        for (std::int32_t t = 0; t + head_params.window < length; ++t) {
            if (generator() % 3 != 0) {
                competing.push_back(t);
            }
        }
        std::shuffle(competing.begin(), competing.end(), generator);
        for (std::size_t i = 0; i < competing.size(); ++i) {
            rank[static_cast<std::size_t>(competing[i])] = static_cast<std::int32_t>(i);
        }
        std::vector<std::int32_t> cutoff(static_cast<std::size_t>(length), -9);
        std::vector<std::int32_t> scratch(C::scratch_bytes(length) / sizeof(std::int32_t), -123456);
        C{}(rank.data(), length, head_params, cutoff.data(), scratch.data());
        for (std::int32_t q = 0; q < length; ++q) {
            wrong += cutoff[static_cast<std::size_t>(q)] == cutoff_at(rank, q, head_params) ? 0 : 1;
        }
    }
    CHECK(wrong == 0);
}
