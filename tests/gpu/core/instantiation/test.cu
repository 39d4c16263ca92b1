// The recipe of docs/cuda.md: this file sees declarations only, reaches no CUB, and links to instances.cu.
#include "policy.hpp"

#if defined(CUB_VERSION) || defined(THRUST_VERSION)
#error "masks/build.hpp must not reach CUB"
#endif

#include "../../../support/cases.hpp"
#include "../../support/device.hpp"

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <vector>

using namespace kvpolicy;

TEST_CASE("a policy instantiated elsewhere") {
    test::Plane<float> scores(1, 2, 300);
    std::mt19937 generator(1);
    test::fill_scores(scores, test::Scores::random, generator);
    const EnginePolicy policy;
    const Sequences sequences{1, 300};
    test::Plane<expiry_t> wanted(1, 2, 300);
    const host host_ctx(1);
    test::Workspace memory(build_mask_workspace_bytes(host_ctx, policy, sequences, 2));
    build_mask(host_ctx, policy, static_cast<const test::Plane<float>&>(scores).view(), sequences,
               wanted.view(), memory);

    const kvpolicy::cuda ctx{};
    const test::Device<float> device_scores(scores.data);
    const test::Device<expiry_t> expiry(wanted.data.size());
    const test::Device<unsigned char> workspace(build_mask_workspace_bytes(ctx, policy, sequences, 2));
    build_mask(ctx, policy, view_bhs<const float>(device_scores.data(), 1, 2, 300), sequences,
               view_bhs(expiry.data(), 1, 2, 300), workspace);
    CHECK(expiry.read() == wanted.data);
}
