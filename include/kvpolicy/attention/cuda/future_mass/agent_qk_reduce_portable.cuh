// The block of the portable qk_reduce pass: 128 rows in shared memory and four warps of 32 rows. Tiles of
// columns come by cp.async into one of two buffers while the other is used.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/agent_row_reduce.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/row_result.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes for head_dim up to Dim. GPUs of 8.6 give a block 99 KB.
template <int Dim>
struct qk_reduce_portable_sizes {
    static constexpr int threads = 128;
    static constexpr int rows = 128;
    static constexpr int columns = Dim <= 128 ? 64 : 32;
    static constexpr int row_bytes = rows * Dim * 2;
    static constexpr int column_bytes = columns * Dim * 2;
    static constexpr int bias = row_bytes + 2 * column_bytes;  // offsets in shared memory
    static constexpr int totals = bias + 2 * columns * 4;
    static constexpr int shared = totals + rows * 4 + 16;
};

/// Copies `Count` rows of a head, which begins at `origin`, from row `first` on, into a swizzled tile, by
/// `Threads` threads. What lies beyond `length` or head_dim becomes 0.
template <int Count, int Dim, int Threads, class T>
__device__ inline void copy_qk_tile(std::uint32_t to, const T* origin, const rows_view<const T>& from,
                                    std::int32_t first, std::int32_t length, int thread) {
    constexpr int chunks = Dim / 8;
    static_assert(Threads % chunks == 0);
    constexpr int at_once = Threads / chunks;  // rows
    const int chunk = thread % chunks;
    const int row = thread / chunks;
    const bool inside = chunk * 8 < from.dim;
    const T* source = origin + (inside ? chunk * 8 : 0);
#pragma unroll
    for (int i = 0; i < Count / at_once; ++i) {
        const int r = row + i * at_once;
        const std::int32_t t = first + r;
        const bool there = inside && t < length;
        copy_16(to + swizzled(Count, r, chunk), source + (there ? t : 0) * from.row_stride, there ? 16u : 0u);
    }
}

/// s = a warp's 32 rows times the columns of a tile, 16 rows in each of s[0] and s[1].
template <class T, int Dim, int N>
__device__ __forceinline__ void multiply_band_tile(float (&s)[2][N], std::uint32_t rows, std::uint32_t tile,
                                                   int warp, int lane) {
    using sizes = qk_reduce_portable_sizes<Dim>;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        s[0][i] = s[1][i] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < Dim / 16; ++k) {
        std::uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            load_matrices(a[m],
                          rows + swizzled(sizes::rows, 32 * warp + 16 * m + lane % 16, 2 * k + lane / 16));
        }
#pragma unroll
        for (int n = 0; n < sizes::columns / 16; ++n) {
            std::uint32_t b[4];
            load_matrices(
                b, tile + swizzled(sizes::columns, 16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                mma_16x8x16<T>(*reinterpret_cast<float(*)[4]>(s[m] + 8 * n), a[m], b[0], b[1]);
                mma_16x8x16<T>(*reinterpret_cast<float(*)[4]>(s[m] + 8 * n + 4), a[m], b[2], b[3]);
            }
        }
    }
}

/// Adds what a warp's rows came to over one column head. `row`: the thread's first row of the item; its rows
/// are row + 8 r + 16 m.
template <class Pass, class T>
__device__ __forceinline__ void finish_band_rows(const qk_reduce_params<T>& params,
                                                 const qk_reduce_item& item, row_state<Pass> (&state)[2],
                                                 float* totals, int row, bool writes, bool& overflow) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        float result[2];
        bool over[2];
        state[m].reduce(result, over);
        overflow = overflow || over[0] || over[1];
        state[m].clear();
        if (writes) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                add_to_total<Pass>(params, item, totals, row + 16 * m + 8 * r, result[r]);
            }
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
