// Every kernel of the forward pass at a size for compute-sanitizer, and compiled for few head_dims: a tool
// must patch what is there, and slows a kernel down a hundred times and more.
#include "../attend/attend_case.hpp"

#include <doctest/doctest.h>

#include <cmath>

using namespace test;

namespace {

AttendCase small(std::int32_t group, std::int32_t length) {
    AttendCase c;
    c.what = "small";
    c.group = group;
    c.queries = c.past.rows = length;
    c.past.expiry = policy_lifetimes(1, length, 20, 4, 60, 3);
    return c;
}

void run(const AttendCase& c, const AttendWay& way) {
    const AttendTensors<bf16> tensors = random_tensors<bf16>(c, 1);
    static_cast<void>(attend_on_device(c, tensors, way));
}

}  // namespace

TEST_CASE("hopper forward, lists") {
    AttendCase c = small(3, 290);  // a full block of rows alone, and tiles behind each other on one SM
    c.spoilt = 100;
    c.past.expiry.assign(290, never);
    run(c, {.gather = true});
}
TEST_CASE("hopper forward, logits that outgrow the first block's") {
    AttendCase c = small(3, 290);
    c.scale_q = 60.0f;
    c.past.expiry.assign(290, never);
    run(c, {.scan = true});
}
TEST_CASE("hopper forward, scans, one row at a time") { run(small(2, 70), {.scan = true, .boxes = false}); }
TEST_CASE("hopper forward, biases and logits_soft_cap, packed") {
    AttendCase c = small(2, 130);
    c.edges = {0, 40, 130};
    c.attention.logits_soft_cap = 20.0f;
    c.past.log_bias.assign(130, -1.0f);
    c.past.log_bias[3] = -INFINITY;
    c.bias_from = {5};
    run(c, {.gather = true});
}
TEST_CASE("portable forward, lists") { run(small(3, 130), {.gather = true, .portable = true}); }
TEST_CASE("portable forward, scans") { run(small(3, 130), {.scan = true, .portable = true}); }
TEST_CASE("plain forward") {
    AttendCase c = small(2, 30);
    c.head_dim_qk = c.head_dim_vo = 24;
    const AttendTensors<float> tensors = random_tensors<float>(c, 1);
    static_cast<void>(attend_on_device(c, tensors, {}));
}
