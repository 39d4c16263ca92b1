// Around the products of the backward pass: queries packed into tiles, work items counted, sums rounded.
#pragma once

#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/attention/large_lse.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int pack_threads = 256;
inline constexpr int finish_threads = 128;

/// One packed row: where it comes from, its lse and whether it takes part.
template <class T>
struct packed_row {
    std::int32_t b, head, query;
    float lse;
    bool counts;
    bool large = false;  // its lse is

    __device__ packed_row(const backward_params<T>& p, std::int32_t list, std::int32_t m) {
        const std::int32_t kv_head = list / p.plan.supers, j = list - kv_head * p.plan.supers;
        b = kv_head / p.call.kv_heads;
        const std::int32_t local = m / p.call.group;
        head = (kv_head - b * p.call.kv_heads) * p.call.group + (m - local * p.call.group);
        query = (p.plan.first + j) * p.plan.super_q + local;
        counts = m < p.valid_rows(b, j);
        lse = counts ? p.lse.head(b, head)[query] : 0.0f;
        counts = counts && lse != -__int_as_float(0x7f800000);
        large = counts && detail::is_large_lse(lse);
    }
};

/// Packs q and d_out into tiles of 64 rows, and delta = <out, d_out>. Row m of a super-tile is query m / G,
/// head m % G.
///
/// Grid: lists * padded_rows / 64, a tile each. Block: pack_threads, Dim / 8 threads per row. Shared memory:
/// none. Reads q [B, Hq, S, Dk], out and d_out [B, Hq, S, Dv] in T, lse [B, Hq, S] in fp32. Overwrites
/// packed_q and packed_d_out [lists, padded_rows, Dim] (swizzled), lse2 and delta [lists, padded_rows] in
/// fp32. Rows that take no part become 0, with an lse2 of +inf, which makes every weight 0; so do those whose
/// lse is large, which are left to backward_large_kernel, and *large is set.
template <class T, int Dim>
__global__ void __launch_bounds__(pack_threads) backward_pack_kernel(const backward_params<T> p) {
    constexpr int chunks = Dim / 8;
    static_assert(chunks <= 32 && 32 % chunks == 0);
    const std::int32_t tiles = p.padded_rows / packed_tile;
    const auto block = static_cast<std::int64_t>(blockIdx.x);
    const auto list = static_cast<std::int32_t>(block / tiles);
    const auto tile = static_cast<std::int32_t>(block % tiles);
    const int chunk = static_cast<int>(threadIdx.x) % chunks;
    unsigned char* const q = reinterpret_cast<unsigned char*>(p.packed_q + block * packed_tile * Dim);
    unsigned char* const d = reinterpret_cast<unsigned char*>(p.packed_d_out + block * packed_tile * Dim);
    for (int r = static_cast<int>(threadIdx.x) / chunks; r < packed_tile; r += pack_threads / chunks) {
        const std::int32_t m = tile * packed_tile + r;
        packed_row<T> row(p, list, m);
        if (row.large) {
            *p.large = 1;
            row.counts = false;
        }
        uint4 q_part{}, d_part{};
        float sum = 0.0f;
        if (row.counts) {
            if (chunk * 8 < p.call.q.dim) {
                q_part =
                    *reinterpret_cast<const uint4*>(p.call.q.row(row.b, row.head, row.query) + chunk * 8);
            }
            if (chunk * 8 < p.d_out.dim) {
                d_part = *reinterpret_cast<const uint4*>(p.d_out.row(row.b, row.head, row.query) + chunk * 8);
                const uint4 o_part =
                    *reinterpret_cast<const uint4*>(p.out.row(row.b, row.head, row.query) + chunk * 8);
                const T* const a = reinterpret_cast<const T*>(&d_part);
                const T* const o = reinterpret_cast<const T*>(&o_part);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sum = fmaf(static_cast<float>(a[i]), static_cast<float>(o[i]), sum);
                }
            }
        }
#pragma unroll
        for (int step = chunks / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(all_lanes, sum, step);
        }
        const std::uint32_t at = swizzled(packed_tile, r, chunk);
        *reinterpret_cast<uint4*>(q + at) = q_part;
        *reinterpret_cast<uint4*>(d + at) = d_part;
        if (chunk == 0) {
            const std::int64_t to = static_cast<std::int64_t>(list) * p.padded_rows + m;
            // Multiplied by the very number that products are multiplied with, so that its rounding cancels.
            const double per_logit = p.call.logits_soft_cap > 0.0f
                                         ? 1.4426950408889634
                                         : static_cast<double>(p.slope) / static_cast<double>(p.call.scale);
            p.lse2[to] = row.counts ? static_cast<float>(static_cast<double>(row.lse) * per_logit)
                                    : __int_as_float(0x7f800000);
            p.delta[to] = row.counts ? sum : 0.0f;
        }
    }
}

/// Orders the entries of every list whose begin is inside the super-tile: first those with a short visible
/// interval that expire inside it (keys that are dropped when they leave the window), then the others, both
/// by rising begin. A block of mixed keys would be computed for many queries that few of its keys see.
///
/// Grid: lists. Block: pack_threads. Shared memory: one count per warp (static). Reads plan.interval, old and
/// total. Overwrites young [lists, max_young] and brief [lists].
/// 1. Count the short intervals.
/// 2. Scatter both kinds, each in its order.
template <class T>
__global__ void __launch_bounds__(pack_threads) backward_young_kernel(const backward_params<T> p) {
    constexpr int warps = pack_threads / 32;
    __shared__ std::int32_t totals[warps];
    const auto list = static_cast<std::int32_t>(blockIdx.x);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t head = list / p.plan.supers, old = p.plan.old[list];
    const row_interval* const interval =
        p.plan.interval + p.plan.offset(head, list - head * p.plan.supers) + old;
    const std::int32_t young = p.plan.total[list] - old, super_q = p.plan.super_q;
    std::int32_t* const order = p.young + static_cast<std::int64_t>(list) * p.max_young;
    const auto is_brief = [interval, young, super_q](std::int32_t i) {
        return i < young && interval[i].expiry < super_q &&
               interval[i].expiry - interval[i].begin < super_q / 8 * 3;
    };
    // 1. Count the short intervals.
    std::int32_t brief = 0;
    for (std::int32_t first = 0; first < young; first += pack_threads) {
        brief += __syncthreads_count(is_brief(first + thread) ? 1 : 0);
    }
    if (thread == 0) {
        p.brief[list] = brief;
    }
    // 2. Scatter both kinds.
    std::int32_t briefs = 0;  // so far
    for (std::int32_t first = 0; first < young; first += pack_threads) {
        const std::int32_t i = first + thread;
        const bool own = is_brief(i);
        const unsigned alike = __ballot_sync(all_lanes, own);
        if (lane_id() == 0) {
            totals[warp_id()] = __popc(alike);
        }
        __syncthreads();
        const block_sum sum = sum_of_warps<warps>(totals);
        const std::int32_t before = briefs + sum.before + __popc(alike & lanes_before(lane_id()));
        if (i < young) {
            order[own ? before : brief + i - before] = old + i;
        }
        briefs += sum.total;
        __syncthreads();
    }
}

/// items[i] = work items of the lists before position i, in blocks of `block_keys` entries. Clears taken and
/// not_finite.
///
/// Grid: one block. Block: 1024. Shared memory: one count per warp (static). Overwrites items [lists + 1] and
/// taken [supers].
template <class T>
__global__ void __launch_bounds__(1024)
    backward_items_kernel(const backward_params<T> p, const std::int32_t block_keys) {
    __shared__ std::int32_t totals[32];
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t lists = p.lists();
    std::int32_t before = 0;
    for (std::int32_t first = 0; first < lists; first += 1024) {
        std::int32_t own = 0;
        if (first + thread < lists) {
            own = list_blocks(p.list_of(p.list_at(first + thread)), block_keys).all;
        }
        const std::int32_t inclusive = warp_inclusive_sum(own);
        if (lane_id() == 31) {
            totals[warp_id()] = inclusive;
        }
        __syncthreads();
        const block_sum sum = sum_of_warps<32>(totals);
        if (first + thread < lists) {
            p.items[first + thread] = before + sum.before + inclusive - own;
        }
        before += sum.total;
        __syncthreads();
    }
    if (thread == 0) {
        p.items[lists] = before;
    }
    for (std::int32_t j = thread; j < p.plan.supers; j += 1024) {
        p.taken[j] = 0;
    }
    if (thread == 0) {
        *p.not_finite = 0;
    }
}

/// d_q = scale * sum_q, rounded to T; sets *not_finite where a sum is not finite.
///
/// Grid: lists * padded_rows / 64 * Dim / 64, a 64 x 64 tile of sums each. Block: finish_threads. Shared
/// memory: 64 rows of 144 bytes (static). Reads sum_q (fp32, packed_sum_index). Overwrites d_q [B, Hq, S,
/// Dk].
/// 1. Round into shared memory.
/// 2. Write whole rows.
template <class T, int Dim>
__global__ void __launch_bounds__(finish_threads) backward_finish_q_kernel(const backward_params<T> p) {
    constexpr int row_bytes = packed_tile * 2 + 16;
    __shared__ __align__(16) unsigned char lines[packed_tile * row_bytes];
    constexpr int blocks = Dim / 64;
    const std::int32_t tiles = p.padded_rows / packed_tile;
    const auto block = static_cast<std::int64_t>(blockIdx.x);
    const auto list = static_cast<std::int32_t>(block / (tiles * blocks));
    const auto tile = static_cast<std::int32_t>(block / blocks % tiles);
    const int column = static_cast<int>(block % blocks) * 64;
    const int thread = static_cast<int>(threadIdx.x);
    // 1. Round into shared memory.
    const float4* const sums = reinterpret_cast<const float4*>(p.sum_q + block * (packed_tile * 64));
    const int r = thread / 32 * 16 + thread % 32 / 4;
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float4 x = sums[thread / 32 * 256 + i * 32 + thread % 32];
        zero = fmaf(x.x, 0.0f, fmaf(x.y, 0.0f, fmaf(x.z, 0.0f, fmaf(x.w, 0.0f, zero))));
        unsigned char* const to = lines + r * row_bytes + (8 * i + 2 * (thread % 4)) * 2;
        *reinterpret_cast<std::uint32_t*>(to) = pack<T>(x.x * p.call.scale, x.y * p.call.scale);
        *reinterpret_cast<std::uint32_t*>(to + 8 * row_bytes) =
            pack<T>(x.z * p.call.scale, x.w * p.call.scale);
    }
    if (zero != 0.0f) {
        *p.not_finite = 1;
    }
    __syncthreads();
    // 2. Write whole rows.
    const int chunk = thread % 8;
    if (column + chunk * 8 >= p.d_q.dim) {
        return;
    }
    const std::int32_t kv_head = list / p.plan.supers, j = list - kv_head * p.plan.supers;
    const std::int32_t b = kv_head / p.call.kv_heads;
    const std::int32_t valid = p.valid_rows(b, j);
    for (int line = thread / 8; line < packed_tile; line += finish_threads / 8) {
        const std::int32_t m = tile * packed_tile + line;
        if (m < valid) {
            const packed_row<T> row(p, list, m);
            *reinterpret_cast<uint4*>(p.d_q.row(row.b, row.head, row.query) + column + chunk * 8) =
                *reinterpret_cast<const uint4*>(lines + line * row_bytes + chunk * 16);
        }
    }
}

/// d_k = scale * sum_k, d_v = sum_v, both rounded to T, and d_log_bias = sum_bias.
///
/// Grid: B * Hkv * rows * Dim / 8 / finish_threads, eight numbers of a row per thread. Block: finish_threads.
/// Shared memory: none. Reads sum_k and sum_v [B, Hkv, rows, Dim], sum_bias [B, Hkv, rows], fp32. Overwrites
/// d_k, d_v [B, Hkv, rows, D] and d_log_bias [B, Hkv, rows].
template <class T, int Dim>
__global__ void __launch_bounds__(finish_threads) backward_finish_keys_kernel(const backward_params<T> p) {
    constexpr int chunks = Dim / 8;
    const std::int32_t rows = p.call.rows.k.length;
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * finish_threads + threadIdx.x;
    const std::int64_t all = static_cast<std::int64_t>(p.heads()) * rows;
    const std::int64_t line = i / chunks;
    if (line >= all) {
        return;
    }
    const int column = static_cast<int>(i % chunks) * 8;
    const auto head = static_cast<std::int32_t>(line / rows);
    const auto row = static_cast<std::int32_t>(line % rows);
    const std::int32_t b = head / p.call.kv_heads, h = head % p.call.kv_heads;
    if (row >= p.keys_of(b)) {
        return;
    }
    const auto write = [&](T* to, const float* from, float factor) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        const float4 y = *reinterpret_cast<const float4*>(from + 4);
        const uint4 packed{pack<T>(x.x * factor, x.y * factor), pack<T>(x.z * factor, x.w * factor),
                           pack<T>(y.x * factor, y.y * factor), pack<T>(y.z * factor, y.w * factor)};
        *reinterpret_cast<uint4*>(to) = packed;
    };
    if (column < p.d_k.dim) {
        write(p.d_k.row(b, h, row) + column, p.sum_k + line * Dim + column, p.call.scale);
    }
    if (column < p.d_v.dim) {
        write(p.d_v.row(b, h, row) + column, p.sum_v + line * Dim + column, 1.0f);
    }
    if (column == 0 && p.sum_bias != nullptr) {
        p.d_log_bias.head(b, h)[row] = p.sum_bias[line];
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
