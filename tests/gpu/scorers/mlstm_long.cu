// mLSTMScorer of bf16 rows over 128k tokens: what sums and states lose on the way, with forget gates near 0
// and near 1 and input gates of +-30; and how many of the keys that a budget would keep are the host's.
#include "mlstm_case.hpp"

using namespace mlstm_test;

namespace {

Case of_128k(std::int32_t delay) {
    Case c = sized(1 << 17, delay, 64);
    c.heads = 1;
    return c;
}

}  // namespace

TEST_CASE("128k tokens, forget gates near 0") {
    const Case c = of_128k(256);
    check<bf16>(c, "forgets at once", shaped<Plain>(c), drawing({0.0, 0.1, -12.0, 0.1}, true, false));
}

TEST_CASE("128k tokens, forget gates near 1") {
    Case c = of_128k(256);
    // d b_f is a sum over reads, whose d score have either sign. With this seed eighths of the reads have
    // 0.39 in the root of the sum of squares and add up to 0.017, so 2% is of the former: what rounding
    // leaves of states does not cancel as the sum does.
    c.parts = 8;
    check<bf16>(c, "forgets nothing", shaped<Plain>(c), drawing({0.0, 0.1, 14.0, 0.05}, true, false));
    c.parts = 0;
    c.delay = 1;
    check<bf16>(c, "forgets little", shaped<SoftmaxDirect>(c), drawing({0.0, 0.3, 8.0, 0.3}, false, true));
}

TEST_CASE("128k tokens, input gates of +-30") {
    const Case c = of_128k(63);
    check<bf16>(c, "inputs of +-30", shaped<Plain>(c), drawing({0.0, 1.3, 3.0, 0.05}, true, false));
}

TEST_CASE("the keys that a tenth of the rows keeps") {
    Case c = sized(1 << 14, 256, 128);
    c.kept = 0.97;  // errors of 1% move one key in a hundred of those near the tenth's edge
    c.name = "mLSTM, 16k";
    check_scores<bf16>(c, Weights<Plain>(shaped<Plain>(c), drawing({}, false, true), c.seed),
                       tolerance<bf16>());
}
