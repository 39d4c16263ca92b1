// mLSTMScorer of fp16 rows on the device: rows and weights are fp16, the rest is bf16.
#include "mlstm_case.hpp"

using namespace mlstm_test;

TEST_CASE("fp16 rows") {
    Case c = sized(200, 20, 128);
    check<fp16>(c, "fp16", shaped<Plain>(c), drawing({}, true, true));
    check<fp16>(c, "fp16, 128 values", shaped<Plain>(c, 128, 128), drawing({}, false, false));
    c.head_dim_qk = c.head_dim_vo = 64;
    for (const Case& small : with_small_gradients(c)) {
        check<fp16>(small, "fp16, 64", shaped<Plain>(c), drawing({}, true, true));
    }
    check<fp16>(c, "fp16, direct", shaped<SoftmaxDirect>(c), drawing({}, false, true));
}

TEST_CASE("a captured call serves later lengths and weights") {
    Case c = sized(700, 20, 64);
    c.batch = 2;
    c.lengths = {700, 90};
    check_captured<fp16>(c, shaped<Plain>(c), drawing({}, true, true), {0, 699}, no_loss{});
}

TEST_CASE("a backward pass goes on from what the scores left") {
    Case c = sized(300, 20, 64);
    c.gradient_spread = 1e-6;
    check_num_long_range<fp16>(c, shaped<Plain>(c), drawing({}, true, true));
}
