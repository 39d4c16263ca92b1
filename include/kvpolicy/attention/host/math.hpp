// exp and tanh for the softmax of the host backend: short polynomials of our own, the same in the scalar and
// the AVX2 bodies, without branches so that a compiler can vectorize them.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <cmath>
#include <cstdint>

namespace kvpolicy::host_backend {

/// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2) / 2; exp(r) is 1 + r + r^2 p(r) with p minimax of
/// degree 4 (relative error 3.1e-9 before rounding, 1.1 ulp with it, over [-87, 0]). ln 2 is split so that n
/// * ln2_high is exact.
struct exp_constants {
    static constexpr float lowest = -87.0f;  ///< below it the result, under 1.7e-38, is 0
    static constexpr float log2_e = 1.44269504088896341f;
    static constexpr float ln2_high = 0.693359375f;
    static constexpr float ln2_low = -2.12194440054690583e-4f;
    static constexpr float p0 = 0.4999999403953552f;
    static constexpr float p1 = 0.1666651964187622f;
    static constexpr float p2 = 0.041668400168418884f;
    static constexpr float p3 = 0.00836885068565607f;
    static constexpr float p4 = 0.0013814320554956794f;
};

/// tanh(y) for |y| < limit is y + y^3 t(y^2), t minimax of degree 4 (relative error 1e-9); beyond, (1 - e) /
/// (1 + e) with e = exp(-2|y|).
struct tanh_constants {
    static constexpr float limit = 0.55f;
    static constexpr float t0 = -0.33333316445350647f;
    static constexpr float t1 = 0.13332585990428925f;
    static constexpr float t2 = -0.05385230854153633f;
    static constexpr float t3 = 0.021071674302220345f;
    static constexpr float t4 = -0.00627423170953989f;
};

/// exp(x) for x <= 0, -inf included. NaN stays NaN.
inline float exp_nonpositive(float x) {
    using c = exp_constants;
    constexpr float round_bias =
        12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which then sits in the low bits
    const float clamped = x < c::lowest ? c::lowest : x;
    const float shifted = clamped * c::log2_e + round_bias;
    const float n = shifted - round_bias;
    const float r = (clamped - n * c::ln2_high) - n * c::ln2_low;
    float p = c::p4;
    p = p * r + c::p3;
    p = p * r + c::p2;
    p = p * r + c::p1;
    p = p * r + c::p0;
    const float mantissa = (p * (r * r) + r) + 1.0f;
    const std::uint32_t bits =
        __builtin_bit_cast(std::uint32_t, mantissa) + (__builtin_bit_cast(std::uint32_t, shifted) << 23);
    return x >= c::lowest ? __builtin_bit_cast(float, bits) : (x < c::lowest ? 0.0f : x);
}
inline double exp_nonpositive(double x) { return std::exp(x); }

/// tanh, for the logit soft cap.
inline float tanh_of(float y) {
    using c = tanh_constants;
    const float magnitude = y < 0.0f ? -y : y;
    const float e = exp_nonpositive(-2.0f * magnitude);
    const float large = (1.0f - e) / (1.0f + e);
    const float square = y * y;
    float t = c::t4;
    t = t * square + c::t3;
    t = t * square + c::t2;
    t = t * square + c::t1;
    t = t * square + c::t0;
    const float small = y + y * (square * t);
    return magnitude < c::limit ? small : (y < 0.0f ? -large : large);
}
inline double tanh_of(double y) { return std::tanh(y); }

}  // namespace kvpolicy::host_backend
