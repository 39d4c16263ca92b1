// Matrix products of one warp on any GPU from compute capability 8.0: fragments from shared memory, mma, and
// the small arithmetic around it.
//
// Fragment layouts of mma.m16n8k16 (lane = 4 * group + pair): A is 16 x 16 row-major, registers 0..3 hold
// rows group and group + 8 of columns 2 pair, then of columns 2 pair + 8; B is 16 x 8 column-major, registers
// 0..1 hold rows 2 pair and 2 pair + 8 of column group; the accumulator is 16 x 8, values 0..1 in row group,
// 2..3 in row group + 8, columns 2 pair and 2 pair + 1.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Four 8 x 8 matrices of 16-bit elements; lane i names the shared address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}
/// The same, each matrix transposed.
__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

/// Stores four such matrices from registers. Compute capability 9.0.
template <class = void>
__device__ inline void store_matrices(std::uint32_t row, const std::uint32_t (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

/// The same, each matrix transposed.
template <class = void>
__device__ inline void store_matrices_transposed(std::uint32_t row, const std::uint32_t (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

/// An 8 x 8 matrix of 16-bit elements, two of row lane / 4 in each lane, transposed: two of column lane / 4.
__device__ inline std::uint32_t transpose_8x8(std::uint32_t rows) {
    std::uint32_t columns;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
    return columns;
}

#define KVPOLICY_MMA_16X8X16(type)                                                      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
/// sum += a b, a 16 x 16, b 16 x 8, fp32 sums. T is bf16 or fp16.
template <class T>
__device__ inline void mma_16x8x16(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                   std::uint32_t b1) {
    static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, fp16>);
    if constexpr (std::is_same_v<T, bf16>) {
        KVPOLICY_MMA_16X8X16("bf16");
    } else {
        KVPOLICY_MMA_16X8X16("f16");
    }
}
#undef KVPOLICY_MMA_16X8X16

/// Two numbers rounded to T, the first in the low half.
template <class T>
__device__ inline std::uint32_t pack(float low, float high) {
    std::uint32_t packed;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

/// 0, or NaN where some of the numbers is not finite.
template <int N>
__device__ inline float zero_if_finite(const float (&o)[N]) {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        zero = fmaf(o[i], 0.0f, zero);
    }
    return zero;
}

/// The larger of two numbers; a NaN where one of them is none, which fmaxf leaves out.
__device__ inline float larger_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

/// 1 / x by the special function unit: 1 ulp, 0 for inf.
__device__ inline float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// 2^x by the special function unit: 2 ulp, 0 for -inf.
__device__ inline float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
