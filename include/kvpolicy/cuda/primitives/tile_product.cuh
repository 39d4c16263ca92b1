// The product of two swizzled tiles (cuda/primitives/wgmma.cuh) by one warp, on any GPU from compute
// capability 8.0.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// acc[i][j] += a[m0 + 16 i ..][..] b[..][n0 + 8 j ..] over `Depth`, for one warp. A is stored [m][k],
/// transposed [k][m]; B [n][k], transposed [k][n], from its row b_from on; a_rows and b_rows are the stored
/// rows of their matrices.
template <class T, int MI, int NI, int Depth, bool TransA, bool TransB>
__device__ inline void tile_product(float (&acc)[MI][NI][4], std::uint32_t a, int a_rows, int m0,
                                    std::uint32_t b, int b_rows, int n0, int b_from = 0) {
    static_assert(NI % 2 == 0);
    int lane = lane_id();
    asm volatile(""
                 : "+r"(lane));  // addresses are made anew in every call: kept, they would fill the registers
    const int half = lane / 16, eighth = lane / 8 % 2, line = lane % 8;
#pragma unroll 2
    for (int k = 0; k < Depth; k += 16) {
        std::uint32_t fa[MI][4];
#pragma unroll
        for (int i = 0; i < MI; ++i) {
            const int m = m0 + 16 * i;
            if constexpr (TransA) {
                load_matrices_transposed(fa[i], a + swizzled(a_rows, k + half * 8 + line, m / 8 + eighth));
            } else {
                load_matrices(fa[i], a + swizzled(a_rows, m + lane % 16, k / 8 + half));
            }
        }
#pragma unroll
        for (int j = 0; j < NI; j += 2) {
            const int n = n0 + 8 * j;
            std::uint32_t fb[4];
            if constexpr (TransB) {
                load_matrices_transposed(fb,
                                         b + swizzled(b_rows, b_from + k + eighth * 8 + line, n / 8 + half));
            } else {
                load_matrices(fb, b + swizzled(b_rows, n + half * 8 + line, k / 8 + eighth));
            }
#pragma unroll
            for (int i = 0; i < MI; ++i) {
                mma_16x8x16<T>(acc[i][j], fa[i], fb[0], fb[1]);
                mma_16x8x16<T>(acc[i][j + 1], fa[i], fb[2], fb[3]);
            }
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
