// The qk_reduce pass by mma.sync, from compute capability 8.0 on: bf16 and fp16, head_dim up to 256.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/agent_qk_reduce_portable.cuh>
#include <kvpolicy/attention/cuda/future_mass/agent_row_reduce.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/row_result.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// qk_reduce by mma.sync. In a careful pass after a quick one, only items whose flag is set.
///
/// Grid: items = B * Hr * S / 128, one per block. Block: 128 threads, 32 rows per warp. Shared memory:
/// qk_reduce_portable_sizes<Dim>::shared (dynamic). Reads rows [B, Hr, S, D] and columns [B, Hc, S, D] in T
/// and, for a mass, lse [B, Hc, S]. Overwrites out [B, Hr, S] in fp32 and, in a quick pass, flags [items].
/// 1. Copy the rows and the first tile.
/// 2. Per tile: copy the next, multiply, reduce.
/// 3. Write 128 rows.
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
    // 1. Copy the rows and the first tile.
    totals[thread] = -INFINITY;  // 128 rows, 128 threads
    if (thread == 0) {
        *flag = 0;
    }
    const std::int32_t begin = params.packed.rows.begin(item.b);
    copy_qk_tile<sizes::rows, Dim, sizes::threads>(rows, params.rows.row(item.b, item.head, begin),
                                                   params.rows, item.first, item.length, thread);
    const std::int32_t turns = item.tiles * params.streams;
    const row_constants constants = constants_of(params.exponents);

    // Column tile `turn`, and the bias of the one after it, which waits in a register.
    float next_bias = 0.0f;
    const auto fetch_bias = [&](std::int32_t turn) {
        if constexpr (Pass::mass) {
            if (turn < turns && thread < sizes::columns) {
                const std::int32_t column =
                    qk_reduce_column<Pass, sizes::columns>(item, turn % item.tiles) + thread;
                const float* lse = params.lse_of(item.b, params.column_head(item.head, turn / item.tiles));
                next_bias = qk_reduce_bias(params, lse, column, item.length);
            }
        }
    };
    const auto fetch = [&](std::int32_t turn) {
        if (turn < turns) {
            copy_qk_tile<sizes::columns, Dim, sizes::threads>(
                columns + static_cast<std::uint32_t>(turn % 2) * sizes::column_bytes,
                params.columns.row(item.b, params.column_head(item.head, turn / item.tiles), begin),
                params.columns, qk_reduce_column<Pass, sizes::columns>(item, turn % item.tiles), item.length,
                thread);
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
    // 2. Copy the next tile, multiply and reduce this one.
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        copy_wait<0>();
        __syncthreads();  // tile `turn` is there, and nobody reads the one before
        fetch(turn + 1);
        const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, turn % item.tiles);
        if (item.any(first_row, 32, column, sizes::columns)) {
            float s[2][width];
            multiply_band_tile<T, Dim>(
                s, rows, columns + static_cast<std::uint32_t>(turn % 2) * sizes::column_bytes, warp, lane);
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
            finish_band_rows<Pass>(params, item, state, totals, 32 * warp + own, pair == 0, overflow);
        }
    }
    if constexpr (Pass::quick) {
        if (overflow) {
            *flag = 1;
        }
    }
    // 3. Write.
    copy_wait<0>();  // without tiles nobody has waited for the rows
    __syncthreads();
    write_total<Pass>(params, item, totals, thread, static_cast<std::int32_t>(blockIdx.x), flag);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
