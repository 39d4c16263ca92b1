// Every kernel of the backward pass at a size for compute-sanitizer: one call a case, and nothing compared.
// What is right is what gpu.attention.backward tests.
#include "../backward_case.hpp"

using namespace backward_test;

namespace {

Case small(std::int32_t queries, std::int32_t dim) {
    Case c;
    c.name = "small";
    c.queries = c.rows = queries;
    c.group = 2;
    c.head_dim_qk = c.head_dim_vo = dim;
    c.draw_expiry(20, 60);
    return c;
}

template <class T, class Dims>
void run(const Case& c, const BackwardOptions& options) {
    Inputs<T> in(c);
    static_cast<void>(expected(c, in));
    spoil(c, in);
    const OnDevice<T, Dims> call(c, in);
    const Device<unsigned char> workspace(call.bytes(options));
    call.run({}, options, workspace);
    test::ok(cudaDeviceSynchronize());
}

}  // namespace

TEST_CASE("hopper backward, head_dim 64") {
    Case c = small(70, 64);
    c.spoilt.resize(c.planes());
    c.spoilt[30] = 1;
    run<bf16, head_dims<64>>(c, {});
}
TEST_CASE("hopper backward, head_dim 64, biases, deterministic") {
    Case c = small(70, 64);
    c.draw_bias(5);
    run<bf16, head_dims<64>>(c, {.deterministic = true});
}
TEST_CASE("hopper backward, head_dim 128, dense") {
    Case c = small(70, 128);
    c.expiry.clear();
    run<bf16, head_dims<128>>(c, {});
}
TEST_CASE("hopper backward, head_dim 256") { run<bf16, head_dims<256>>(small(70, 256), {}); }
TEST_CASE("hopper backward, head_dim 256, biases, logits_soft_cap") {
    Case c = small(70, 256);
    c.draw_bias(5);
    c.attention.logits_soft_cap = 10.0f;
    run<bf16, head_dims<256>>(c, {});
}
TEST_CASE("portable backward") { run<bf16, head_dims<64>>(small(40, 64), {.portable = true}); }
TEST_CASE("portable backward, deterministic") {
    run<bf16, head_dims<64>>(small(40, 64), {.deterministic = true, .portable = true});
}
TEST_CASE("plain backward") { run<float, head_dims<64>>(small(30, 24), {}); }
