// A chunk of an mLSTM as one warpgroup has it, in code for compute capability 9.0a: a thread has whole rows'
// share of a matrix of 64 rows, which are tokens or outputs, so that sums along rows stay in four lanes and
// no two warps wait for each other over a row. Products are wgmma's, tiles are shared_tile's.
//
// Of N columns a thread has d[4 j + 2 r + e]: row 16 (warp) + lane / 4 + 8 r, column 8 j + lane % 4 * 2 + e.
// The same numbers rounded are fragments [N / 16][4], number 2 (j % 2) + r of fragment j / 2 for a pair of
// columns: what wgmma takes in registers, what ldmatrix loads and what stmatrix stores.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if KVPOLICY_HOPPER_CODE
/// A tile as the right side of products over `k` steps of 16: [n][k], or transposed [k][n].
template <bool Transposed, class E>
__device__ inline std::uint64_t describe_right(const shared_tile<E>& b) {
    const std::uint32_t at = shared_address(b.data);
    return Transposed ? describe_mn_major(at, static_cast<std::uint32_t>(b.rows) * 128)
                      : describe_k_major(at);
}
/// How much further step k of a tile of `rows` rows is.
template <bool Transposed>
__device__ inline std::uint64_t along_k(int k, int rows) {
    return Transposed ? static_cast<std::uint64_t>(k) * (2048 / 16)
                      : static_cast<std::uint64_t>(k / 4 * rows * 128 + k % 4 * 32) / 16;
}

/// d = a b^T over Depth columns of a, both tiles in shared memory; b transposed: [k][n]. Starts; the caller
/// has fenced, and commits.
template <int Depth, bool Transposed, int N, class E>
__device__ inline void start_product(float (&d)[N], const shared_tile<E>& a, const shared_tile<E>& b) {
    const std::uint64_t left = describe_k_major(shared_address(a.data)),
                        right = describe_right<Transposed>(b);
#pragma unroll
    for (int k = 0; k < Depth / 16; ++k) {
        if constexpr (N == 4) {
            wgmma_narrow(d, left + along_k<false>(k, a.rows), right + along_k<false>(k, b.rows), k != 0);
        } else {
            wgmma<E, 0, Transposed ? 1 : 0>(d, left + along_k<false>(k, a.rows),
                                            right + along_k<Transposed>(k, b.rows), k != 0);
        }
    }
}
/// d (+)= a b^T with a in registers.
template <bool Transposed, int N, int K, class E>
__device__ inline void start_held_product(float (&d)[N], const std::uint32_t (&a)[K][4],
                                          const shared_tile<E>& b, bool add) {
    const std::uint64_t right = describe_right<Transposed>(b);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        wgmma<E, Transposed ? 1 : 0>(d, a[k], right + along_k<Transposed>(k, b.rows), add || k != 0);
    }
}

/// Where this lane's row of the warp's 16 rows of a tile of 16-bit elements begins, for ldmatrix and
/// stmatrix; the lane's 16 bytes of columns [16 k, 16 k + 16) follow from it by an exclusive or, since tiles
/// begin at multiples of 1024 bytes.
template <class E>
__device__ inline std::uint32_t own_rows(const shared_tile<E>& tile) {
    return shared_address(tile.data) + swizzled(tile.rows, 16 * warp_id() + lane_id() % 16, lane_id() / 16);
}
__device__ inline std::uint32_t own_columns(std::uint32_t own, int rows, int k) {
    return (own ^ static_cast<std::uint32_t>(k % 4 * 32)) + static_cast<std::uint32_t>(k / 4 * rows * 128);
}
template <class E>
__device__ inline void load_rows(std::uint32_t (&to)[4], const shared_tile<E>& from, int k) {
    load_matrices(to, own_columns(own_rows(from), from.rows, k));
}
template <class E>
__device__ inline void store_rows_of(const shared_tile<E>& to, int k, const std::uint32_t (&from)[4]) {
    store_matrices(own_columns(own_rows(to), to.rows, k), from);
}

/// Gradients of features d[F / 2] through the feature map, in place: d y = p (d - p . d) for a softmax, and
/// Hedgehog's second half with the other sign. `along`: p . d of each row, of the first half of the columns
/// and of the second.
template <int F, class T, class E>
__device__ inline void through_feature_map(const mlstm_params<T>& params, float (&d)[F / 2],
                                           const shared_tile<E>& features, const float (&along)[2][2]) {
    float of[2][2];  // [half][r]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        of[0][r] = params.hedgehog ? along[0][r] : along[0][r] + along[1][r];
        of[1][r] = params.hedgehog ? along[1][r] : of[0][r];
    }
#pragma unroll
    for (int k = 0; k < F / 32; ++k) {
        std::uint32_t p[2][4];
        load_rows(p[0], features, k);
        load_rows(p[1], features, k + F / 32);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int r = i / 2 % 2, at = 8 * k + i, other = at + F / 4;
            const float low = __uint_as_float(i % 2 == 0 ? p[0][i / 2] << 16 : p[0][i / 2] & 0xffff0000u);
            const float high = __uint_as_float(i % 2 == 0 ? p[1][i / 2] << 16 : p[1][i / 2] & 0xffff0000u);
            d[at] = low * (d[at] - of[0][r]);
            d[other] = high * (d[other] - of[1][r]);
        }
    }
    if (params.hedgehog) {
        asm volatile("" ::: "memory");  // a branch: no selection of every number
#pragma unroll
        for (int i = 0; i < F / 4; ++i) {
            d[i] -= d[i + F / 4];
            d[i + F / 4] = 0.0f;
        }
    }
    // Columns that the features do not fill have p = 0 there, and so no gradient.
}

/// Adds features times gradients of each row, of the first half of the columns and of the second, over this
/// lane's columns.
template <int F, class E>
__device__ inline void add_along(float (&along)[2][2], const float (&d)[F / 2],
                                 const shared_tile<E>& features) {
#pragma unroll
    for (int k = 0; k < F / 16; ++k) {
        std::uint32_t p[4];
        load_rows(p, features, k);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = __uint_as_float(i % 2 == 0 ? p[i / 2] << 16 : p[i / 2] & 0xffff0000u);
            float& sum = along[k / (F / 32)][i / 2 % 2];
            sum = fmaf(d[8 * k + i], x, sum);
        }
    }
}

/// Rounds them to rows of a tile.
template <class T, int N>
__device__ inline void store_rounded(const shared_tile<T>& to, const float (&d)[N]) {
#pragma unroll
    for (int k = 0; k < N / 8; ++k) {
        std::uint32_t rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            rows[i] = pack<T>(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
        }
        store_rows_of(to, k, rows);
    }
}

/// Rows [0, count) of a chunk's tile to rows of `width` elements, columns [0, Columns) of them, by `Threads`
/// threads: some rows at once, so that threads wait for shared memory once per four rows.
template <int Columns, int Threads, class T>
__device__ inline void write_columns_of(T* rows, std::int32_t width, const shared_tile<T>& tile, int count,
                                        int thread) {
    constexpr int across = Columns / 8, step = Threads / across, turns = (scorer_chunk + step - 1) / step;
    static_assert(Threads % across == 0);
    asm volatile("" : "+r"(thread));  // addresses are made anew for every chunk: registers are few
    const int first = thread / across, c = thread % across * 8;
    T* to = rows + std::int64_t{first} * width + c;
    const std::int64_t pitch = std::int64_t{step} * width;
#pragma unroll
    for (int from = 0; from < turns; from += 4) {
        uint4 of_row[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = first + (from + i) * step;
            if (from + i < turns && (scorer_chunk % step == 0 || r < scorer_chunk)) {
                of_row[i] = *reinterpret_cast<const uint4*>(tile.data + tile.offset(r, c));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (from + i < turns) {
                if (first + (from + i) * step < count) {
                    *reinterpret_cast<uint4*>(to) = of_row[i];
                }
                to += pitch;
            }
        }
    }
}
/// Columns [from, to), multiples of 8, of which every eighth is get(row, column) and the others are 0.
template <int Threads, class T, class Get>
__device__ inline void write_eighths(T* rows, std::int32_t width, std::int32_t from, std::int32_t to,
                                     int count, int thread, const Get& get) {
    const auto write = [&](int r, int c) {
        *reinterpret_cast<uint4*>(rows + std::int64_t{r} * width + c) =
            make_uint4(pack<T>(get(r, c), 0.0f), 0u, 0u, 0u);
    };
    if (to - from == 16) {  // as where the others are a multiple of 16
        static_assert(Threads == 2 * scorer_chunk);
        if (thread / 2 < count) {
            write(thread / 2, from + thread % 2 * 8);
        }
        return;
    }
    const int across = (to - from) / 8;
    for (int i = thread; i < across * count; i += Threads) {
        write(i / across, from + i % across * 8);
    }
}
/// As write_columns_of for any number of columns.
template <int Threads, class T>
__device__ inline void write_tile(T* rows, std::int32_t width, const shared_tile<T>& tile, int columns,
                                  int count, int thread) {
    if (columns == 128) {
        write_columns_of<128, Threads>(rows, width, tile, count, thread);
        return;
    }
    if (columns == 64) {
        write_columns_of<64, Threads>(rows, width, tile, count, thread);
        return;
    }
    constexpr int threads = Threads;
    const int across = columns / 8, step_r = threads / across, step_c = threads % across;
    int r = thread / across, c = thread % across;
    while (r < count) {
        *reinterpret_cast<uint4*>(rows + std::int64_t{r} * width + 8 * c) =
            *reinterpret_cast<const uint4*>(tile.data + tile.offset(r, 8 * c));
        r += step_r;
        c += step_c;
        if (c >= across) {
            c -= across;
            ++r;
        }
    }
}
#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
