// RoPE's angles on the device against the host's in double: positions that fp32 tells apart, and others.
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>

#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

/// Sine and cosine of position i's turn by frequency j: out [positions, frequencies, 2].
template <class T>
__global__ void sines_kernel(const position_t* positions, int count, const float* frequencies, int pairs,
                             float* out) {
    const int x = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (x < count * pairs) {
        cuda_backend::rope_sine<T>(cuda_backend::rope_angle(positions[x / pairs], frequencies[x % pairs]),
                                   out[2 * x], out[2 * x + 1]);
    }
}

/// The furthest from the angle of Rope's contract, in double.
template <class T>
double furthest(const std::vector<position_t>& positions) {
    const Rope rope{rope_layout::half_split, 10000.0f};
    std::vector<float> frequencies(64);
    rope.fill_frequencies(128, frequencies.data());
    const auto count = static_cast<int>(positions.size());
    const Device<position_t> at(positions);
    const Device<float> f(frequencies), out(positions.size() * 128);
    sines_kernel<T><<<static_cast<unsigned>(count), 64>>>(at.data(), count, f.data(), 64, out.data());
    const std::vector<float> found = out.read();
    double worst = 0.0;
    for (std::size_t x = 0; x < positions.size() * 64; ++x) {
        const position_t t = positions[x / 64];
        const float by = frequencies[x % 64];
        const double angle = t <= position_t{1} << 24 ? static_cast<double>(static_cast<float>(t) * by)
                                                      : static_cast<double>(t) * static_cast<double>(by);
        const double off = std::max(std::abs(static_cast<double>(found[2 * x]) - std::sin(angle)),
                                    std::abs(static_cast<double>(found[2 * x + 1]) - std::cos(angle)));
        worst = off <= worst ? worst : std::isnan(off) ? 1e30 : off;
    }
    return worst;
}

}  // namespace

TEST_CASE("sines of RoPE's angles at every size of position") {
    std::vector<position_t> near, far;
    for (const position_t base : {position_t{3}, position_t{1} << 12, (position_t{1} << 24) - 9}) {
        for (position_t i = 0; i < 10; ++i) {
            near.push_back(base + i);
        }
    }
    for (const int bits : {24, 29, 30, 31, 32, 40, 50}) {
        for (position_t i = 1; i < 10; ++i) {
            far.push_back((position_t{1} << bits) + i);
        }
    }
    // The unit's sine is off by 2^-21.4 in [-pi, pi]; the angle that is left after whole turns is rounded
    // to fp32, 2^-23 of up to pi, and its sine by 2 units in the last place.
    CHECK(furthest<float>(near) <= 2 * 0x1p-24);
    CHECK(furthest<float>(far) <= 0x1p-22 + 2 * 0x1p-24);
    CHECK(furthest<bf16>(near) <= 1e-6);
    CHECK(furthest<bf16>(far) <= 1e-6);
}
