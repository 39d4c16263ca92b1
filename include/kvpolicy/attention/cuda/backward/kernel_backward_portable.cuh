// The backward pass on any GPU from compute capability 8.0: keys stationary for everything, or queries
// stationary for d_q alone, which then needs no atomic additions.
#pragma once

#include <kvpolicy/attention/cuda/backward/agent_backward_tile.cuh>
#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_prepare.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// dK, dV, d_log_bias and, where sum_q is given, dQ by mma.sync: keys are stationary, the queries that see
/// them stream by.
///
/// Grid: as many blocks as fit; each takes work items (S::keys entries of a list) of the lists at positions
/// [begin, end), handed out by taken[counter]. Block: S::threads. Shared memory: portable_memory<Dim>
/// (dynamic). Reads packed_q, packed_d_out, lse2, delta, k and v [B, Hkv, rows, D]. Adds (atomically, fp32)
/// to sum_k, sum_v [B, Hkv, rows, Dim], sum_bias [B, Hkv, rows] and sum_q. A key stands in a list once, so
/// with one super-tile per launch every sum is added to once, in launch order.
/// 1. Load the item's keys.
/// 2. Per query tile: scores and weights, dV, dK, dQ.
/// 3. Add dK, dV and the bias gradient.
template <class T, int Dim, bool Bias, bool Softcap>
__global__ void __launch_bounds__(portable_sizes<Dim>::threads, portable_sizes<Dim>::blocks)
    backward_portable_kernel(const backward_params<T> p, const std::int32_t begin, const std::int32_t end,
                             const std::int32_t counter) {
    if constexpr (!portable_code<T>) {
        return;
    }
    using S = portable_sizes<Dim>;
    using tile_type = agent_backward_tile<T, Dim, Bias, Softcap>;
    auto& memory = *reinterpret_cast<portable_memory<Dim>*>(
        dynamic_shared() + (128 - shared_address(dynamic_shared()) % 128) % 128);
    const std::int32_t first_item = p.items[begin], items = p.items[end] - first_item;
    __shared__ std::int32_t next;
    for (;;) {
        __syncthreads();  // the last item's numbers are used up
        if (threadIdx.x == 0) {
            next = atomicAdd(p.taken + counter, 1);
            if (next < items) {
                memory.item = item_at(p, first_item + next, S::keys);
            }
        }
        __syncthreads();
        if (next >= items) {
            return;
        }
        // 1. Load the keys of the item.
        const backward_item item = memory.item;
        const std::int32_t head = item.list / p.plan.supers, j = item.list - head * p.plan.supers;
        tile_type tile(p, memory);
        const block_interval interval = tile.load_keys(item);
        const std::int32_t valid = p.valid_rows(head / p.call.kv_heads, j);
        const std::int32_t stop = min(interval.last_expiry, valid);
        typename tile_type::product d_k = {};
        typename tile_type::product d_v = {};
        // 2. Scores and weights, dV, dK and dQ, per query tile.
        for (std::int32_t m = interval.first_begin / S::queries * S::queries; m < stop; m += S::queries) {
            tile.load_queries(item.list, m);
            tile.scores(m, interval);
            tile.add_values(d_v);
            tile.add_keys(d_k);
            if (p.sum_q != nullptr) {
                typename tile_type::product d_q = {};
                tile.add_queries(d_q);
                const std::int64_t line = static_cast<std::int64_t>(item.list) * p.padded_rows + m;
                float* const to = p.sum_q + line / packed_tile * (packed_tile * Dim);
                const int inside = static_cast<int>(line % packed_tile);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int n = 0; n < tile_type::product_columns; ++n) {
                        const int row = inside + tile.product_row + 16 * i + tile.lane / 4;
                        const int column = tile.product_column + 8 * n + 2 * (tile.lane % 4);
                        add_four(to + column / 64 * (packed_tile * 64) + packed_sum_index(row, column % 64),
                                 d_q[i][n][0], d_q[i][n][1], d_q[i][n][2], d_q[i][n][3]);
                    }
                }
            }
            __syncthreads();
        }
// 3. Add dK, dV and the bias gradient.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const std::int32_t row = memory.row[tile.product_row + 16 * i + 8 * r + tile.lane / 4];
                if (row < 0) {
                    continue;
                }
                const std::int64_t to = (static_cast<std::int64_t>(head) * p.call.rows.k.length + row) * Dim +
                                        tile.product_column + 2 * (tile.lane % 4);
#pragma unroll
                for (int n = 0; n < tile_type::product_columns; ++n) {
                    add_two(p.sum_k + to + 8 * n, d_k[i][n][2 * r], d_k[i][n][2 * r + 1]);
                    add_two(p.sum_v + to + 8 * n, d_v[i][n][2 * r], d_v[i][n][2 * r + 1]);
                }
            }
        }
        if (Bias && p.sum_bias != nullptr) {
            tile.add_bias(head);
        }
    }
}

/// dQ without atomic additions, so with the same bits in every run: queries are stationary, the keys of their
/// list stream by.
///
/// Grid: lists * padded_rows / S::queries, a tile of packed rows each. Block: S::threads. Shared memory:
/// portable_memory<Dim> (dynamic). Reads what backward_portable_kernel reads. Overwrites d_q [B, Hq, S, Dk]
/// in T; sets *not_finite where a sum is not finite.
/// 1. Load the queries.
/// 2. Per block of keys: scores, dQ.
/// 3. Scale, round and write dQ.
template <class T, int Dim, bool Bias, bool Softcap>
__global__ void __launch_bounds__(portable_sizes<Dim>::threads, portable_sizes<Dim>::blocks)
    backward_queries_kernel(const backward_params<T> p) {
    if constexpr (!portable_code<T> && Dim <= 128) {
        return;
    }
    using S = portable_sizes<Dim>;
    using tile_type = agent_backward_tile<T, Dim, Bias, Softcap>;
    auto& memory = *reinterpret_cast<portable_memory<Dim>*>(
        dynamic_shared() + (128 - shared_address(dynamic_shared()) % 128) % 128);
    const std::int32_t tiles = p.padded_rows / S::queries;
    const auto position = static_cast<std::int32_t>(blockIdx.x) / tiles;
    const std::int32_t list = p.list_at(position);
    const std::int32_t m = static_cast<std::int32_t>(blockIdx.x) % tiles * S::queries;
    const std::int32_t head = list / p.plan.supers, j = list - head * p.plan.supers;
    const std::int32_t valid = p.valid_rows(head / p.call.kv_heads, j);
    if (m >= valid) {
        return;
    }
    const std::int32_t begin = p.items[position], end = p.items[position + 1];
    // 1. Load the queries.
    tile_type tile(p, memory);
    tile.load_queries(list, m);
    typename tile_type::product d_q = {};
    // 2. Scores and dQ, per block of keys.
    for (std::int32_t i = begin; i < end; ++i) {
        const block_interval interval = tile.load_keys(item_at(p, i, S::keys));
        if (interval.first_begin < m + S::queries && interval.last_expiry > m) {
            tile.scores(m, interval);
            tile.add_queries(d_q);
        }
        __syncthreads();
    }
    // 3. Scale, round and write dQ.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const std::int32_t line = m + tile.product_row + 16 * i + 8 * r + tile.lane / 4;
            if (line >= valid) {
                continue;
            }
            const packed_row<T> row(p, list, line);
            T* const to = p.d_q.row(row.b, row.head, row.query);
            float zero = 0.0f;
#pragma unroll
            for (int n = 0; n < tile_type::product_columns; ++n) {
                zero = fmaf(d_q[i][n][2 * r], 0.0f, fmaf(d_q[i][n][2 * r + 1], 0.0f, zero));
                const int column = tile.product_column + 8 * n + 2 * (tile.lane % 4);
                if (column < p.d_q.dim) {
                    *reinterpret_cast<std::uint32_t*>(to + column) =
                        pack<T>(d_q[i][n][2 * r] * p.call.scale, d_q[i][n][2 * r + 1] * p.call.scale);
                }
            }
            if (zero != 0.0f) {
                *p.not_finite = 1;
            }
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
