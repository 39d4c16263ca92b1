// Prompts of float and fp16 rows, and of bf16 rows whose values are not projected, into caches with an
// mLSTMScorer; and GPUs whose blocks have less shared memory.
#define KVPOLICY_TEST_GPU
#include "../support/lesser_gpu.hpp"
#include "mlstm_prefill_case.hpp"

using namespace kvpolicy;
using namespace mlstm_test;

TEST_CASE("few calls") {
    check_lengths<FixedBudgetCache, float>(shaped<Plain>(prompts_of({1})), {65});
    check_lengths<FixedBudgetCache, bf16>(shaped<SoftmaxDirect>(prompts_of({1})), {65});
}

TEST_CASE("float") {
    const Plain shape = shaped<Plain>(prompts_of({1}));
    check_lengths<FixedBudgetCache, float>(shape, {1, 33, 63, 64, 65, 127, 128, 129, 1000, 5000});
    check_lengths<DualCache, float>(shape, {64, 129, 1000});
    check_ragged<FixedBudgetCache, float>(shape);
    check_lengths<FixedBudgetCache, float>(shaped<Plain>(prompts_of({1}), 128, 64), {129, 1000});
}

TEST_CASE("fp16") {
    const Plain shape = shaped<Plain>(prompts_of({1}));
    check_lengths<FixedBudgetCache, fp16>(shape, {33, 64, 129, 1000});
    check_ragged<FixedBudgetCache, fp16>(shape);
}

TEST_CASE("values as they are") {
    const SoftmaxDirect shape = shaped<SoftmaxDirect>(prompts_of({1}));
    check_lengths<FixedBudgetCache, bf16>(shape, {33, 64, 129, 1000});
    check_ragged<FixedBudgetCache, bf16>(shape);
    check_lengths<FixedBudgetCache, bf16>(shaped<SoftmaxDirect>(prompts_of({1}), 70), {100});
}

// Without Hopper's kernels: fused ones, and where a block has too little for those, states in memory.
TEST_CASE("GPUs with less shared memory") {
    for (const int gpu : {test::small_gpu, test::middle_gpu}) {
        const test::LesserGpu as(gpu);
        CAPTURE(gpu);
        check_lengths<FixedBudgetCache, bf16>(shaped<SoftmaxDirect>(prompts_of({1})), {129, 1000});
        check_lengths<FixedBudgetCache, bf16>(shaped<SoftmaxDirect>(prompts_of({1}), 128), {129, 1000});
        check_lengths<FixedBudgetCache, float>(shaped<Plain>(prompts_of({1})), {129, 1000});
    }
}
