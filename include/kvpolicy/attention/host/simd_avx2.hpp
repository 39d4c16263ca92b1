// What the AVX2 bodies of the host backend share: the target attribute, conversions in registers, exp and
// tanh.
//
// The library is compiled without machine flags, so every function that uses AVX2 carries its target, and
// context.hpp decides at run time whether it may be called. Lambdas do not inherit a target: there are none
// in these bodies.
#pragma once

#include <kvpolicy/core/config.hpp>

#if KVPOLICY_X86

#include <kvpolicy/attention/host/math.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/unroll.hpp>

#include <immintrin.h>

#include <cstdint>

#define KVPOLICY_AVX2 __attribute__((target("avx2,fma,f16c")))
#define KVPOLICY_AVX2_INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) inline

namespace kvpolicy::host_backend::avx2 {

/// Eight numbers as fp32.
KVPOLICY_AVX2_INLINE __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
KVPOLICY_AVX2_INLINE __m256 load8(const fp16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
KVPOLICY_AVX2_INLINE __m256 load8(const bf16* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

KVPOLICY_AVX2_INLINE float largest_of(__m256 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

KVPOLICY_AVX2_INLINE float sum_of(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/// The same vector, which a compiler may not load anew for every use: g++ folds a load into each of its uses,
/// and the loads are then what limits a product.
KVPOLICY_AVX2_INLINE __m256 in_register(__m256 x) {
    __asm__("" : "+x"(x));
    return x;
}

/// Per half: the two halves of a, summed, then those of b.
KVPOLICY_AVX2_INLINE __m256 fold_pairs(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}
/// Even plus odd lanes, a's and b's alternating.
KVPOLICY_AVX2_INLINE __m256 fold_lanes(__m256 a, __m256 b) {
    const __m256 swapped = _mm256_permute_ps(_mm256_blend_ps(a, b, 0x55), 0xb1);
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xaa), swapped);
}
/// The sums of eight vectors, in order. Blends instead of horizontal additions: they need no shuffle unit.
KVPOLICY_AVX2_INLINE __m256 sums_of(const __m256 (&x)[8]) {
    const __m256 low = fold_lanes(fold_pairs(x[0], x[2]), fold_pairs(x[1], x[3]));
    const __m256 high = fold_lanes(fold_pairs(x[4], x[6]), fold_pairs(x[5], x[7]));
    return _mm256_add_ps(_mm256_blend_ps(low, high, 0xf0), _mm256_permute2f128_ps(low, high, 0x21));
}

/// Rows become columns.
KVPOLICY_AVX2_INLINE void transpose(__m256 (&x)[8]) {
    const __m256 a0 = _mm256_unpacklo_ps(x[0], x[1]);
    const __m256 a1 = _mm256_unpackhi_ps(x[0], x[1]);
    const __m256 a2 = _mm256_unpacklo_ps(x[2], x[3]);
    const __m256 a3 = _mm256_unpackhi_ps(x[2], x[3]);
    const __m256 a4 = _mm256_unpacklo_ps(x[4], x[5]);
    const __m256 a5 = _mm256_unpackhi_ps(x[4], x[5]);
    const __m256 a6 = _mm256_unpacklo_ps(x[6], x[7]);
    const __m256 a7 = _mm256_unpackhi_ps(x[6], x[7]);
    const __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44);
    const __m256 b1 = _mm256_shuffle_ps(a0, a2, 0xee);
    const __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44);
    const __m256 b3 = _mm256_shuffle_ps(a1, a3, 0xee);
    const __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44);
    const __m256 b5 = _mm256_shuffle_ps(a4, a6, 0xee);
    const __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44);
    const __m256 b7 = _mm256_shuffle_ps(a5, a7, 0xee);
    x[0] = _mm256_permute2f128_ps(b0, b4, 0x20);
    x[1] = _mm256_permute2f128_ps(b1, b5, 0x20);
    x[2] = _mm256_permute2f128_ps(b2, b6, 0x20);
    x[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
    x[4] = _mm256_permute2f128_ps(b0, b4, 0x31);
    x[5] = _mm256_permute2f128_ps(b1, b5, 0x31);
    x[6] = _mm256_permute2f128_ps(b2, b6, 0x31);
    x[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
}

/// exp_nonpositive of eight numbers.
KVPOLICY_AVX2_INLINE __m256 exp_nonpositive(__m256 x) {
    using c = exp_constants;
    const __m256 lowest = _mm256_set1_ps(c::lowest);
    // max takes its second operand where the first is NaN, and so does a comparison that is false for NaN:
    // NaN stays.
    const __m256 clamped = _mm256_max_ps(lowest, x);
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(c::log2_e)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(c::ln2_high), clamped);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(c::ln2_low), r);
    __m256 p = _mm256_set1_ps(c::p4);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c::p3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c::p2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c::p1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c::p0));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256 result = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, lowest, _CMP_LT_OQ), result);
}

/// tanh_of of eight numbers.
KVPOLICY_AVX2_INLINE __m256 tanh_of(__m256 y) {
    using c = tanh_constants;
    const __m256 sign = _mm256_and_ps(y, _mm256_set1_ps(-0.0f));
    const __m256 magnitude = _mm256_xor_ps(y, sign);
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 e = exp_nonpositive(_mm256_mul_ps(magnitude, _mm256_set1_ps(-2.0f)));
    const __m256 large = _mm256_or_ps(_mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e)), sign);
    const __m256 square = _mm256_mul_ps(y, y);
    __m256 t = _mm256_set1_ps(c::t4);
    t = _mm256_fmadd_ps(t, square, _mm256_set1_ps(c::t3));
    t = _mm256_fmadd_ps(t, square, _mm256_set1_ps(c::t2));
    t = _mm256_fmadd_ps(t, square, _mm256_set1_ps(c::t1));
    t = _mm256_fmadd_ps(t, square, _mm256_set1_ps(c::t0));
    const __m256 small = _mm256_fmadd_ps(_mm256_mul_ps(square, t), y, y);
    return _mm256_blendv_ps(large, small, _mm256_cmp_ps(magnitude, _mm256_set1_ps(c::limit), _CMP_LT_OQ));
}

}  // namespace kvpolicy::host_backend::avx2

#endif  // KVPOLICY_X86
