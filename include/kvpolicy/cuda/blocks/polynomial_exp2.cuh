// 2^x without the special function unit, which does 16 a cycle where the tensor cores may need more.
#pragma once

#include <kvpolicy/cuda/config.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// 2^x on the arithmetic units, for a share of the exponents where the special function unit is the bottleneck. x is cut to
/// [-125, 127]. The cubic is the minimax one for the relative error on [-1/2, 1/2]: 7.5e-5.
template <bool CutAbove>
__device__ inline float polynomial_exp2(float x) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    x = fmaxf(x, -125.0f);
    if constexpr (CutAbove) {
        x = fminf(x, 127.0f);
    }
    const float rounded = x + magic;
    const float rest = x - (rounded - magic);
    float y = fmaf(0.0551716691f, rest, 0.2426111222f);
    y = fmaf(y, rest, 0.6932609855f);
    y = fmaf(y, rest, 0.9999280735f);
    return __int_as_float(__float_as_int(y) + (__float_as_int(rounded) << 23));
}

/// Whether exponent i of a tile goes the polynomial way, for `Share` of every 8.
template <int Share>
__device__ constexpr bool by_polynomial(int i) {
    return (i & 7) * Share % 8 + Share >= 8;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
