// Every kernel of build_mask and its kin once, at sizes for compute-sanitizer, which slows a kernel down
// a hundred times.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../support/cutoff_check.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;

Budget budget(std::int32_t k, float log_gamma, std::int32_t step = 1) {
    return Budget(Sink<>{2}, Window<>{20}, TopKBudget<>{k}, Decay<dynamic>{log_gamma, step});
}

MaskCase case_of(std::int32_t batch, std::int32_t heads, std::int32_t length) {
    MaskCase input{Plane<float>(batch, heads, length), {}, {}, {}};
    std::mt19937 generator(static_cast<unsigned>(length));
    fill_scores(input.scores, Scores::random, generator);
    return input;
}

/// One way of ranking only, where the other has its own case.
template <class P>
void check_way(const P& policy, MaskCase& input, std::size_t way, const std::string& what) {
    same(device_mask(policy, input, all_tunings()[way]).expiry, host_mask(policy, input).expiry,
         input.scores.length, what);
}

}  // namespace

// rank_kernel in its three sizes, with runs of equal keys both short (repaired) and long (sorted
// again); expire_kernel.
TEST_CASE("ranks by block") {
    std::mt19937 generator(4);
    for (const std::int32_t length : {1500, 3000, 5000}) {
        MaskCase input = case_of(1, 1, length);
        for (const HardScores kind : {HardScores::level, HardScores::nearly_level, HardScores::nan}) {
            fill_scores(input.scores, kind, -1e-3f, generator);
            check_way(budget(300, -1e-3f), input, 0, name(kind) + ", length " + std::to_string(length));
        }
    }
}

// make_sort_keys_kernel, fix_ties_kernel, sort_long_ties_kernel (the whole grid for runs of several tiles,
// single blocks for shorter ones), invert_and_count_kernel, cutoff_checkpoints_kernel, expire_kernel.
TEST_CASE("ranks over the device") {
    std::mt19937 generator(4);
    for (const std::int32_t length : {3000, 12000}) {
        MaskCase input = case_of(1, 1, length);
        fill_scores(input.scores, HardScores::level, -1e-3f, generator);
        check_way(budget(300, -1e-3f), input, 1, "level, length " + std::to_string(length));
    }
    MaskCase input = case_of(1, 2, 3000);
    fill_scores(input.scores, HardScores::nearly_level, -1e-3f, generator);
    check_way(budget(300, -1e-3f), input, 1, "nearly level");
    check_way(budget(300, 0.0f), input, 1, "without decay");
}

// check_edges_kernel, write_head_params_kernel, and every kernel above with segments.
TEST_CASE("packed segments, lengths, numbers by head") {
    const std::vector<std::int32_t> budgets{100, 0, unlimited}, steps{1, 4, 1};
    const std::vector<float> decays{-0.01f, -0.01f, 0.0f};
    const Budget policy(Sink<>{2}, Window<>{20}, TopKBudget<>{per_head(budgets.data(), 1, 3)},
                        Decay<dynamic>(per_head(decays.data(), 1, 3), per_head(steps.data(), 1, 3)));
    MaskCase input = case_of(2, 3, 1700);
    input.lengths = {1700, 900};
    input.cu_seqlens = {0, 0, 1, 40, 513, 1300, 1700};
    check_mask(policy, input, "packed");
}

// decayed_top_k_kernel with 128 and 512 threads' registers, and with memory.
TEST_CASE("decayed top-k") {
    for (const std::int32_t k : {50, 1200, 4200}) {
        MaskCase input = case_of(1, 1, k + 200);
        check_way(budget(k, -0.05f, 1500), input, 0, "k " + std::to_string(k));
    }
}

// decayed_rounds_kernel: one class per lane, and several.
TEST_CASE("decayed rounds") {
    std::mt19937 generator(5);
    for (const std::int32_t step : {3, 70}) {
        MaskCase input = case_of(1, 1, 900);
        check_way(budget(50, -0.05f, step), input, 0, "step " + std::to_string(step));
        fill_scores(input.scores, HardScores::nan, -0.05f, generator);
        check_way(budget(50, -0.05f, step), input, 0, "NaN, step " + std::to_string(step));
    }
    MaskCase input = case_of(1, 1, 6600);
    check_way(budget(300, -0.05f, 3), input, 0, "two rounds");
}

// make_shared_sort_keys_kernel and the kernels behind it, with and without repair of equal keys;
// shared_top_k_kernel.
TEST_CASE("a budget that heads share") {
    using Shared = Policy<Sink<>, Window<>, SharedBudget<>, Decay<dynamic>>;
    const std::vector<std::int32_t> windows{20, 1, 90};
    const auto shared = [&](float log_gamma, std::int32_t step, SharedLimits limits) {
        return Shared{Sink<>{2}, Window<>{per_head(windows.data(), 1, 3)}, SharedBudget<>{40, limits},
                      Decay<dynamic>{log_gamma, step}};
    };
    std::mt19937 generator(6);
    MaskCase input = case_of(2, 3, 700);
    input.lengths = {700, 300};
    for (const HardScores kind : {HardScores::nan, HardScores::level}) {
        fill_scores(input.scores, kind, -1e-3f, generator);
        for (const bool packed : {false, true}) {
            input.cu_seqlens =
                packed ? std::vector<std::int32_t>{0, 0, 1, 200, 700} : std::vector<std::int32_t>{};
            check_way(shared(0.0f, 1, {}), input, 0, name(kind));
            check_way(shared(-1e-3f, 1, {}), input, 0, "decay, " + name(kind));
            check_way(shared(0.0f, 1, {.floor = 3, .cap = 60, .score_offset = 0.5f}), input, 0, "limits");
            check_way(shared(-0.05f, 3, {}), input, 0, "step 3");
        }
    }
}

// expire_alone_kernel, whether scores are read or not.
TEST_CASE("no budget") {
    MaskCase input = case_of(2, 2, 700);
    input.lengths = {700, 513};
    check_way(Policy<Sink<>, Window<>>(Sink<>{2}, Window<>{20}), input, 0, "window");
    check_way(Policy<Window<>, ThresholdGate<above>>(Window<>{20}, ThresholdGate<above>(0.2f)), input, 0,
              "gate");
}

// sequential_cutoffs_kernel, expiry_from_cutoffs_kernel, expire_kernel writing ranks and cutoffs.
TEST_CASE("ranks and cutoffs") {
    MaskCase input = case_of(2, 2, 1100);
    input.lengths = {1100, 550};
    check_cutoffs(budget(60, -0.004f), input, "k 60");
}
