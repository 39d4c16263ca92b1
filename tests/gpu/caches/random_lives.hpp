// Random lives of caches (support/cache_life.hpp) on a device.
#pragma once

#include <kvpolicy/cuda.cuh>

#include "../../support/cache_life_policies.hpp"
#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <exception>
#include <string>

namespace test {

/// Memory and context of a GPU. A call per sequence: masses may depend on what else is in a batch.
struct CudaSide {
    static constexpr bool device = true;
    static constexpr bool fixed_caches = false;
    static constexpr bool appends = false;
    using dims = kvpolicy::head_dims<64>;
    kvpolicy::cuda ctx{};

    template <class X>
    using array = Device<X>;
};

/// Lives of one policy with so many seeds. Pages have 16 entries; heads have up to five of them in a window,
/// and as many in a budget.
template <life::Which which>
void live_on_device(std::uint32_t seeds, std::int32_t operations) {
    for (std::uint32_t seed = 1; seed <= seeds; ++seed) {
        std::string error;
        try {
            life::run<CudaSide, which>(seed, 8, 16, operations);
        } catch (const std::exception& found) {
            error = found.what();
        }
        CAPTURE(seed);
        REQUIRE_MESSAGE(error.empty(), error);
    }
}

}  // namespace test
