// mLSTMScorer of fp16 rows on the device: rows and weights are fp16, the rest is bf16.
#include "mlstm_case.hpp"

using namespace mlstm_test;

TEST_CASE("fp16 rows") {
    Case c = sized(200, 20, 128);
    check<fp16>(c, "fp16", shaped<Plain>(c), drawing({}, true, true));
    check<fp16>(c, "fp16, 128 values", shaped<Plain>(c, 128, 128), drawing({}, false, false));
    c.dim_k = c.dim_v = 64;
    check<fp16>(c, "fp16, direct", shaped<SoftmaxDirect>(c), drawing({}, false, true));
}
