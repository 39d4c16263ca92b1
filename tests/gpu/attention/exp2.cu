// Powers of two, of every float there is, against double.
//
// On [-1/2, 1/2] the cubic of polynomial_exp2 is the best one for the relative error: its four coefficients
// and the error E solve p(x) / 2^x = 1 +- E at the five points where the error is largest, whose signs
// alternate (Remez); E = 7.48e-5. What fp32 adds: x + magic rounds to an integer, exactly the nearest, and
// the rest is exact since both are multiples of x's last bit; three fused multiplications round by 2^-24
// each. So 7.48e-5 + 3 * 2^-24 < 7.6e-5. A weight is rounded to bf16 by up to 2^-9 = 2e-3 afterwards, and a
// logarithm of a sum of such powers is off by no more than 7.6e-5.
#include <kvpolicy/attention/cuda/future_mass/agent_row_reduce.cuh>

#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using namespace kvpolicy;
using namespace test;
namespace backend = kvpolicy::cuda_backend;

namespace {

constexpr int ways = 3;  // cut below, cut on both sides, special function unit

/// worst [ways]: the largest relative error for x in [-125, 127); the last one: how many x beyond are not cut
/// to these bounds (a NaN to the upper one).
__global__ void try_all(float* worst, std::uint32_t* strays) {
    float error[ways] = {};
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < (std::uint64_t{1} << 32);
         i += std::uint64_t{gridDim.x} * blockDim.x) {
        const float x = __uint_as_float(static_cast<std::uint32_t>(i));
        if (x >= -125.0f && x < 127.0f) {
            const float got[ways] = {backend::polynomial_exp2<false>(x), backend::polynomial_exp2<true>(x),
                                     backend::fast_exp2(x)};
            const double wanted = exp2(static_cast<double>(x));
            for (int w = 0; w < ways; ++w) {
                error[w] =
                    fmaxf(error[w], static_cast<float>(fabs(static_cast<double>(got[w]) / wanted - 1.0)));
            }
        } else if (x < -125.0f) {
            const float low = backend::polynomial_exp2<false>(x);
            if (low != backend::polynomial_exp2<true>(x) || !(low > 0.0f && low < 0x1.001p-125f)) {
                atomicAdd(strays, 1u);
            }
        } else if (!(backend::polynomial_exp2<true>(x) > 0x1.fffp126f)) {  // or not a number
            atomicAdd(strays, 1u);
        }
    }
    for (int w = 0; w < ways; ++w) {
        atomicMax(reinterpret_cast<int*>(worst + w), __float_as_int(error[w]));  // not negative
    }
}

}  // namespace

TEST_CASE("powers of two, of every float") {
    const Device<float> worst(std::vector<float>(ways, 0.0f));
    const Device<std::uint32_t> strays(std::vector<std::uint32_t>(1, 0));
    try_all<<<2048, 256>>>(worst.data(), strays.data());
    const std::vector<float> error = worst.read();
    CHECK(error[0] < 7.6e-5f);
    CHECK(error[1] < 7.6e-5f);
    CHECK(error[2] < 0x1p-22f);
    CHECK(strays.read()[0] == 0);
    MESSAGE("largest relative errors: ", error[0], ", ", error[1], "; ", error[2]);
}
