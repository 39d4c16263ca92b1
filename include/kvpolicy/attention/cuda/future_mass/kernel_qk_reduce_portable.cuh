// The band pass by mma.sync, for any GPU from compute capability 8.0: bf16 and fp16, head_dim up to 256.
//
// A block has 128 rows in shared memory and four warps of 32 rows; column tiles come by cp.async into one of two buffers
// while the other is used.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/agent_row_reduce.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/row_result.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
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

/// Copies `Count` rows of a head, from `first` on, into a swizzled tile, by `Threads` threads. What lies beyond `length` or head_dim becomes 0.
template <int Count, int Dim, int Threads, class T>
__device__ inline void copy_qk_tile(std::uint32_t to, const rows_view<const T>& from, std::int64_t b,
                                    std::int64_t head, std::int32_t first, std::int32_t length, int thread) {
    constexpr int chunks = Dim / 8;
    static_assert(Threads % chunks == 0);
    constexpr int at_once = Threads / chunks;  // rows
    const int chunk = thread % chunks;
    const int row = thread / chunks;
    const bool inside = chunk * 8 < from.dim;
    const T* source = from.row(b, head, 0) + (inside ? chunk * 8 : 0);
#pragma unroll
    for (int i = 0; i < Count / at_once; ++i) {
        const int r = row + i * at_once;
        const std::int32_t t = first + r;
        const bool there = inside && t < length;
        copy_16(to + swizzled(Count, r, chunk), source + (there ? t : 0) * from.row_stride, there ? 16u : 0u);
    }
}

/// The bias of a column, from its lse: -inf where it must not count.
template <class T>
__device__ inline float qk_reduce_bias(const qk_reduce_params<T>& params, const float* lse,
                                       std::int32_t column, std::int32_t length) {
    if (column >= length) {
        return -INFINITY;
    }
    const float of = lse[column];
    return of == -INFINITY ? of : fmaf(of, params.exponents.of_lse, params.exponents.shift);
}

template <class T, int Dim, class Pass>
__global__ void __launch_bounds__(128, Dim <= 128 ? 3 : 1)
    qk_reduce_portable_kernel(const qk_reduce_params<T> params) {
    using sizes = qk_reduce_portable_sizes<Dim>;
    if constexpr (Pass::reduce == row_reduce::running) {
        if (params.flags != nullptr && params.flags[blockIdx.x] == 0) {
            return;
        }
    }
    const qk_reduce_item item =
        qk_reduce_item_of<Pass, sizes::rows, sizes::columns>(params, static_cast<std::int32_t>(blockIdx.x));
    if (item.first >= item.length) {
        if (Pass::quick && threadIdx.x == 0) {
            params.flags[blockIdx.x] = 0;
        }
        return;
    }
    unsigned char* const shared = dynamic_shared();
    const std::uint32_t rows = shared_address(shared);
    const std::uint32_t columns = rows + sizes::row_bytes;
    float* const bias = reinterpret_cast<float*>(shared + sizes::bias);
    float* const totals = reinterpret_cast<float*>(shared + sizes::totals);
    int* const flag = reinterpret_cast<int*>(totals + sizes::rows);

    const auto thread = static_cast<int>(threadIdx.x);
    const int lane = lane_id();
    const int warp = warp_id();
    const std::int32_t first_row = item.first + 32 * warp;
    const int own = lane / 4;  // this thread's rows: own + 8 r + 16 m
    const int pair = lane % 4;
    totals[thread] = -INFINITY;  // 128 rows, 128 threads
    if (thread == 0) {
        *flag = 0;
    }
    copy_qk_tile<sizes::rows, Dim, sizes::threads>(rows, params.rows, item.b, item.head, item.first,
                                                   item.length, thread);
    const std::int32_t turns = item.tiles * params.streams;
    const row_constants constants = constants_of(params.exponents);

    // Column tile `turn`, and the bias of the one after it, which waits in a register.
    float next_bias = 0.0f;
    const auto fetch_bias = [&](std::int32_t turn) {
        if constexpr (Pass::mass) {
            if (turn < turns && thread < sizes::columns) {
                const std::int32_t column =
                    qk_reduce_column<Pass, sizes::columns>(item, turn % item.tiles) + thread;
                const float* lse = params.lse.head(item.b, params.column_head(item.head, turn / item.tiles));
                next_bias = qk_reduce_bias(params, lse, column, item.length);
            }
        }
    };
    const auto fetch = [&](std::int32_t turn) {
        if (turn < turns) {
            copy_qk_tile<sizes::columns, Dim, sizes::threads>(
                columns + static_cast<std::uint32_t>(turn % 2) * sizes::column_bytes, params.columns, item.b,
                params.column_head(item.head, turn / item.tiles),
                qk_reduce_column<Pass, sizes::columns>(item, turn % item.tiles), item.length, thread);
            if (Pass::mass && thread < sizes::columns) {
                bias[turn % 2 * sizes::columns + thread] = next_bias;
            }
        }
        copy_commit();
        fetch_bias(turn + 1);
    };

    constexpr int width = sizes::columns / 2;  // accumulators of 16 rows
    row_state<Pass> state[2];
    state[0].clear();
    state[1].clear();
    bool overflow = false;
    fetch_bias(0);
    fetch(0);
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        copy_wait<0>();
        __syncthreads();  // tile `turn` is there, and nobody reads the one before
        fetch(turn + 1);
        const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, turn % item.tiles);
        if (item.any(first_row, 32, column, sizes::columns)) {
            float s[2][width];
#pragma unroll
            for (int i = 0; i < width; ++i) {
                s[0][i] = s[1][i] = 0.0f;
            }
            const std::uint32_t tile = columns + static_cast<std::uint32_t>(turn % 2) * sizes::column_bytes;
#pragma unroll
            for (int k = 0; k < Dim / 16; ++k) {
                std::uint32_t a[2][4];
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    load_matrices(a[m], rows + swizzled(sizes::rows, 32 * warp + 16 * m + lane % 16,
                                                        2 * k + lane / 16));
                }
#pragma unroll
                for (int n = 0; n < sizes::columns / 16; ++n) {
                    std::uint32_t b[4];
                    load_matrices(b, tile + swizzled(sizes::columns, 16 * n + lane % 8 + lane / 16 * 8,
                                                     2 * k + lane / 8 % 2));
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        mma_16x8x16<T>(*reinterpret_cast<float(*)[4]>(s[m] + 8 * n), a[m], b[0], b[1]);
                        mma_16x8x16<T>(*reinterpret_cast<float(*)[4]>(s[m] + 8 * n + 4), a[m], b[2], b[3]);
                    }
                }
            }
            const bool whole = item.full(first_row, 32, column, sizes::columns);
            const bool plain = Pass::quick && whole && constants.cap == 0.0f && (Pass::mass || column != 0);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const std::int32_t apart = column + 2 * pair - (first_row + 16 * m + own);
                const float* const of = bias + turn % 2 * sizes::columns + 2 * pair;
                const std::int32_t left = item.length - (column + 2 * pair);
                if (plain) {
                    if constexpr (Pass::quick) {
                        state[m].template absorb_part<2>(s[m], 0, width / 4, of, params.exponents.scale);
                    }
                } else if (whole) {
                    state[m].template absorb<false, 2>(s[m], of, constants, apart, left, item.low, item.span);
                } else {
                    state[m].template absorb<true, 0>(s[m], of, constants, apart, left, item.low, item.span);
                }
            }
        }
        if (turn % item.tiles == item.tiles - 1) {  // the last tile of a column head
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float result[2];
                bool over[2];
                state[m].reduce(result, over);
                overflow = overflow || over[0] || over[1];
                state[m].clear();
                if (pair == 0) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        add_to_total<Pass>(params, item, totals, 32 * warp + 16 * m + 8 * r + own, result[r]);
                    }
                }
            }
        }
    }
    if constexpr (Pass::quick) {
        if (overflow) {
            *flag = 1;
        }
    }
    copy_wait<0>();  // without tiles nobody has waited for the rows
    __syncthreads();
    write_total<Pass>(params, item, totals, thread, static_cast<std::int32_t>(blockIdx.x), flag);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
