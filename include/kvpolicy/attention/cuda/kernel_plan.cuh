// The plan of an attention call: a stable counting sort of every super-tile's rows, and how much memory that takes.
#pragma once

#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Of a block, where there are few rows, and where there are many and the GPU gives a block the memory to count them.
inline constexpr int plan_warps = 8, plan_max_warps = 16;
inline constexpr std::int32_t plan_many_rows = 4096;
/// Queries a super-tile, about: lists are read by all its query tiles, and a row's visible interval takes 16 bits.
inline constexpr std::int32_t plan_queries = 1024;
/// Lists of all rows that a round may take, by KV head: 8 bytes an entry (14 with biases) make at most 256 (448) a row.
inline constexpr std::int64_t plan_full_lists = 32;

// Bins: 0 .. super_q - 1 for old rows, super_q - expires; then, begin being 1 to super_q - 1, super_q - 1 + begin for young rows that
// outlast the super-tile, and 2 super_q - 2 + begin for the others.
inline constexpr std::int32_t plan_bins = 3;  // times super_q
static_assert(plan_queries * plan_bins * plan_warps * sizeof(std::int32_t) + 1024 <= 99 * 1024,
              "a block of compute capability 8.6 and 8.9 has no more");
inline std::size_t plan_shared_bytes(const attention_plan& plan, int warps) {
    return static_cast<std::size_t>(plan.super_q) * plan_bins * static_cast<std::size_t>(warps) *
           sizeof(std::int32_t);
}

/// Calls body(x, time) for this warp's share of the rows, in order, 32 at a time, with a time that is never (expiry = 0) for
/// lanes past the end. All lanes call it together. time_of(x) says when row x is visible.
template <int Warps, class TimeOf, class Body>
__device__ inline void for_rows_of_warp(const TimeOf& time_of, std::int32_t rows, std::int32_t queries,
                                        Body body) {
    constexpr std::int32_t ahead = 8;  // loads under way at once
    constexpr std::int32_t step = 32 * ahead;
    // In 64 bits: rows may be as many as 31 bits say.
    const std::int64_t share = (std::int64_t{rows} + Warps * step - 1) / (Warps * step) * step;
    const std::int64_t begin = warp_id() * share;
    const std::int64_t end = rows < begin + share ? rows : begin + share;
    for (std::int64_t first = begin; first < end; first += step) {
        row_time time[ahead];
#pragma unroll
        for (std::int32_t i = 0; i < ahead; ++i) {
            const std::int64_t x = first + 32 * i + lane_id();
            time[i] = x < end ? time_of(static_cast<std::int32_t>(x)) : row_time{0, 0};
            if (time[i].begin >= queries) {
                time[i].expiry = 0;  // that begins after the last query
            }
        }
#pragma unroll
        for (std::int32_t i = 0; i < ahead; ++i) {
            body(static_cast<std::int32_t>(first + 32 * i + lane_id()), time[i]);
        }
    }
}

/// One block a list; the last super-tiles, which have most rows, first. `Plain` where plain_frame fits.
template <bool Plain, int Warps, class Frames>
__global__ void __launch_bounds__(32 * Warps)
    attention_plan_kernel(const __grid_constant__ Frames frames, const __grid_constant__ attention_plan plan,
                          const std::int32_t kv_heads, const std::int32_t heads) {
    __shared__ std::int32_t totals[Warps];
    __shared__ std::int32_t staying[Warps];    // rows that outlast the super-tile, and
    __shared__ std::int32_t following[Warps];  // how many of them come right after another of the same 32
    auto* const counts = reinterpret_cast<std::int32_t*>(dynamic_shared());  // [bin][warp]
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t j = plan.supers - 1 - block / heads;
    const std::int32_t head_number = block % heads;
    const std::int32_t b = head_number / kv_heads;
    const std::int64_t list = std::int64_t{head_number} * plan.supers + j;
    const head_frame head(frames, b, head_number % kv_heads);
    const std::int32_t super_q = plan.super_q;
    const std::int64_t first_query = (std::int64_t{plan.first} + j) * super_q;
    const std::int64_t base = head.start() + first_query;
    const std::int64_t left = frames.queries(b) - first_query;
    const std::int32_t queries = left <= 0 ? 0 : left < super_q ? static_cast<std::int32_t>(left) : super_q;
    std::int32_t rows = queries == 0 ? 0 : head.count();
    if (plan.triangular && rows > first_query + super_q) {
        rows = static_cast<std::int32_t>(first_query + super_q);
    }
    const plain_frame plain(frames, b, head_number % kv_heads, base, super_q);
    const auto time_of = [&](std::int32_t x) {
        if constexpr (Plain) {
            return plain.time_of(x);
        } else {
            return head.time_of(x, base, super_q);
        }
    };
    const std::int32_t warp = warp_id();
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t bins = plan_bins * super_q * Warps;
    const auto bin_of = [super_q](const row_time& time) {
        return time.begin == 0          ? super_q - time.expiry
               : time.expiry == super_q ? super_q - 1 + time.begin
                                        : 2 * super_q - 2 + time.begin;
    };

    for (std::int32_t i = thread; i < bins; i += 32 * Warps) {
        counts[i] = 0;
    }
    __syncthreads();
    std::int32_t through = 0;  // of bin 0, which most rows are in
    std::int32_t stay = 0;
    std::int32_t follow = 0;
    for_rows_of_warp<Warps>(time_of, rows, queries, [&](std::int32_t, const row_time& time) {
        const bool seen = time.begin < time.expiry;
        const bool lasts = seen && time.begin == 0 && time.expiry == super_q;
        through += __popc(__ballot_sync(all_lanes, lasts));
        const unsigned stays = __ballot_sync(all_lanes, seen && time.expiry == super_q);
        stay += __popc(stays);
        follow += __popc(stays & (stays << 1));
        if (seen && !lasts) {
            atomicAdd(counts + bin_of(time) * Warps + warp, 1);
        }
    });
    if (lane_id() == 0) {
        counts[warp] = through;
        staying[warp] = stay;
        following[warp] = follow;
    }
    __syncthreads();
    if (thread == 0) {
        std::int32_t all = 0;
        std::int32_t begin = 0;
        for (int w = 0; w < Warps; ++w) {
            all += staying[w];
            begin += staying[w] - following[w];
        }
        // A run of n rows has a first one, and one more for every 32 rows that it goes on.
        plan.runs[list] = all > 0 && begin <= all / 16 ? 1 : 0;
    }

    // Exclusive scan over (bin, warp): each warp takes a run of it.
    const std::int32_t run = plan_bins * super_q;
    std::int32_t sum = 0;
    for (std::int32_t i = lane_id(); i < run; i += 32) {
        sum += counts[warp * run + i];
    }
    sum = warp_inclusive_sum(sum);
    if (lane_id() == 31) {
        totals[warp] = sum;
    }
    __syncthreads();
    std::int32_t so_far = sum_of_warps<Warps>(totals).before;
    for (std::int32_t i = 0; i < run; i += 32) {
        const bool inside = i + lane_id() < run;
        std::int32_t* const at = counts + warp * run + i + lane_id();
        const std::int32_t own = inside ? *at : 0;
        const std::int32_t inclusive = warp_inclusive_sum(own);
        if (inside) {
            *at = so_far + inclusive - own;
        }
        so_far += __shfl_sync(all_lanes, inclusive, 31);
    }
    __syncthreads();

    const std::int32_t old = counts[super_q * Warps];
    const std::int32_t behind_lasting = counts[(2 * super_q - 1) * Warps];
    for (std::int32_t i = thread; i < plan.boundaries; i += 32 * Warps) {
        const std::int32_t e = i * plan.tile_q;
        plan.through[list * plan.boundaries + i] = e == 0 ? old : counts[(super_q - e + 1) * Warps];
        plan.known[list * plan.boundaries + i] = e == 0 ? 0 : counts[(super_q - 1 + e) * Warps] - old;
        plan.passing[list * plan.boundaries + i] =
            e == 0 ? 0 : counts[(2 * super_q - 2 + e) * Warps] - behind_lasting;
    }
    if (thread == 32 * Warps - 1) {
        plan.old[list] = old;
        plan.total[list] = so_far;  // of the last warp: everything
        plan.lasting[list] = behind_lasting - old;
    }
    __syncthreads();

    const std::int64_t offset = plan.offset(head_number, j);
    std::int32_t next_through = counts[warp];
    __syncwarp();
    for_rows_of_warp<Warps>(time_of, rows, queries, [&](std::int32_t x, const row_time& time) {
        const bool seen = time.begin < time.expiry;
        if (__ballot_sync(all_lanes, seen) == 0) {
            return;
        }
        const bool lasts = seen && time.begin == 0 && time.expiry == super_q;
        const unsigned lasting = __ballot_sync(all_lanes, lasts);
        std::int32_t place = next_through + __popc(lasting & lanes_before(lane_id()));
        next_through += __popc(lasting);
        const unsigned others = __ballot_sync(all_lanes, seen && !lasts);
        if (seen && !lasts) {
            const std::int32_t bin = bin_of(time);
            const unsigned alike = __match_any_sync(others, bin);
            std::int32_t* const next = counts + bin * Warps + warp;
            place = *next + __popc(alike & lanes_before(lane_id()));
            __syncwarp(others);
            if ((alike & lanes_before(lane_id())) == 0) {
                *next += __popc(alike);
            }
        }
        __syncwarp();  // other lanes may have the same bin next time
        if (seen) {
            plan.row[offset + place] = Plain ? x : head.row_of(x);
            plan.interval[offset + place] = {static_cast<std::uint16_t>(time.begin),
                                             static_cast<std::uint16_t>(time.expiry)};
            if (!Plain && plan.bias != nullptr) {
                std::int32_t from = 0;
                plan.bias[offset + place] = head.bias_of(x, base, super_q, from);
                plan.bias_from[offset + place] = static_cast<std::uint16_t>(from);
            }
        }
    });
}

/// A plan's sizes for `queries` queries a sequence in tiles of tile_q, without memory: all super-tiles in one round.
inline attention_plan shape_plan(std::int64_t rows, std::int32_t queries, std::int32_t tile_q,
                                 bool triangular) {
    attention_plan plan;
    plan.tile_q = tile_q;
    plan.super_q = std::max(plan_queries / tile_q, 1) * tile_q;
    plan.supers = (queries + plan.super_q - 1) / plan.super_q;
    plan.boundaries = plan.super_q / tile_q + 1;
    plan.rows = static_cast<std::int32_t>(rows);
    plan.triangular = triangular;
    return plan;
}

/// Entries that a round may take. Never less for more queries or more rows.
inline std::int64_t plan_capacity(const attention_plan& whole, std::int64_t heads) {
    return heads * std::min(whole.entries_a_head(), plan_full_lists * whole.rows);
}

/// Memory for any round of this plan (shape_plan) out of the workspace.
inline void take_plan(workspace_parts& parts, attention_plan& plan, std::int64_t heads, bool with_bias) {
    const std::int64_t entries = plan_capacity(plan, heads);
    const std::int64_t lists = heads * plan.supers;
    plan.row = parts.take<std::int32_t>(entries);
    plan.interval = parts.take<row_interval>(entries);
    plan.bias = with_bias ? parts.take<float>(entries) : nullptr;
    plan.bias_from = with_bias ? parts.take<std::uint16_t>(entries) : nullptr;
    plan.old = parts.take<std::int32_t>(lists);
    plan.total = parts.take<std::int32_t>(lists);
    plan.through = parts.take<std::int32_t>(lists * plan.boundaries);
    plan.known = parts.take<std::int32_t>(lists * plan.boundaries);
    plan.passing = parts.take<std::int32_t>(lists * plan.boundaries);
    plan.lasting = parts.take<std::int32_t>(lists);
    plan.runs = parts.take<std::int32_t>(lists);
}

/// The round that begins at super-tile `first` of `whole`: as many super-tiles as its memory holds.
inline attention_plan plan_round(const attention_plan& whole, std::int64_t heads, std::int32_t first) {
    const std::int64_t capacity = plan_capacity(whole, heads);
    attention_plan round = whole;
    round.first = first;
    round.supers = 1;  // plan_full_lists >= 1, so one list a head always fits
    // Lists without rows take no memory, but what a caller has for each list must not grow where there are fewer rows.
    const std::int64_t most = whole.rows > 0 ? whole.supers : plan_full_lists;
    while (first + round.supers < whole.supers && round.supers < most &&
           heads * round.before(round.supers + 1) <= capacity) {
        ++round.supers;
    }
    return round;
}

/// Enqueues the plan of a round.
inline void launch_plan(const cuda& on, const key_frames& frames, const attention_plan& round,
                        std::int32_t batch, std::int32_t kv_heads) {
    const std::int32_t heads = batch * kv_heads;
    const bool plain = plain_frame::fits(frames) && round.bias == nullptr;
    const device_scope device(on);
    const bool many = round.rows >= plan_many_rows &&
                      plan_shared_bytes(round, plan_max_warps) + 1024 <=
                          static_cast<std::size_t>(device.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    const auto go = [&](auto warps) {
        constexpr int Warps = decltype(warps)::value;
        launch("attention_plan_kernel",
               plain ? attention_plan_kernel<true, Warps, key_frames>
                     : attention_plan_kernel<false, Warps, key_frames>,
               std::int64_t{heads} * round.supers, 32 * Warps, plan_shared_bytes(round, Warps), on, frames,
               round, kv_heads, heads);
    };
    if (many) {
        go(std::integral_constant<int, plan_max_warps>{});
    } else {
        go(std::integral_constant<int, plan_warps>{});
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
