// The plan of an attention call: a stable counting sort of every super-tile's rows, and how much memory that
// takes.
#pragma once

#include <kvpolicy/attention/cuda/agent_plan.cuh>
#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Of a block, where there are few rows, and where there are many and the GPU gives a block the memory to
/// count them.
inline constexpr int plan_warps = 8, plan_max_warps = 16;
inline constexpr std::int32_t plan_many_rows = 4096;
/// Queries a super-tile, about: lists are read by all its query tiles, and a row's visible
/// interval takes 16 bits.
inline constexpr std::int32_t plan_queries = 1024;
/// The same for forward calls with few queries: shorter lists take more memory, but blocks make them at once,
/// and have fewer counters to clear and sum.
inline constexpr std::int32_t plan_few_queries = 4096, plan_queries_of_few = 400;
/// Lists of all rows that a round may take, by KV head: 8 bytes per entry (14 with biases) make at most 256
/// (448) a row.
inline constexpr std::int64_t plan_full_lists = 32;

static_assert(plan_queries * plan_bins * plan_warps * sizeof(std::int32_t) + 1024 <= 99 * 1024,
              "a block of compute capability 8.6 and 8.9 has no more");
inline std::size_t plan_shared_bytes(const attention_plan& plan, int warps) {
    return static_cast<std::size_t>(plan.super_q) * plan_bins * static_cast<std::size_t>(warps) *
           sizeof(std::int32_t);
}

/// Makes the index lists of a round: for every super-tile (super_q consecutive queries of one KV head of one
/// sequence) the keys that some query of it sees, each with its visible interval. Order:
/// attention_params.cuh.
///
/// Grid: lists = B * Hkv * supers, the last super-tiles, which have most keys, first. Block: 32 * Warps
/// threads. Shared memory: 3 * super_q * Warps counters (dynamic), plan_memory (static). Reads frames
/// (expiry, positions, starts, lengths, packed edges, biases). `Plain`: plain_frame fits, and no biases.
/// Overwrites plan.row, interval and bias [entries], old, total, lasting and runs [lists], through, known and
/// passing [lists, boundaries].
/// 1. Count the keys of every bin, per warp.
/// 2. Scan the counts.
/// 3. Write the boundaries of query tiles.
/// 4. Write every key to its place: the keys are read a second time.
template <bool Plain, int Warps, class Frames>
__global__ void __launch_bounds__(32 * Warps)
    attention_plan_kernel(const __grid_constant__ Frames frames, const __grid_constant__ attention_plan plan,
                          const std::int32_t kv_heads, const std::int32_t heads) {
    __shared__ plan_memory<Warps> memory;
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const plan_block<Plain, Warps, Frames> agent(frames, plan, block % heads, plan.supers - 1 - block / heads,
                                                 kv_heads, memory,
                                                 reinterpret_cast<std::int32_t*>(dynamic_shared()));
    agent.run();
}

/// A plan's sizes for `queries` queries per sequence in tiles of tile_q, without memory: all super-tiles in
/// one round. `triangular`: rows behind the first `whole` ones have the queries' positions, in order. A tile
/// may also end at multiples of boundary_q, which divides tile_q; 0: at those of tile_q alone. `about`:
/// queries per super-tile.
inline attention_plan shape_plan(std::int64_t rows, std::int32_t queries, std::int32_t tile_q,
                                 bool triangular, std::int32_t whole = 0, std::int32_t boundary_q = 0,
                                 std::int32_t about = plan_queries) {
    attention_plan plan;
    plan.boundary_q = boundary_q > 0 ? boundary_q : tile_q;
    plan.super_q = std::max(about / tile_q, 1) * tile_q;
    plan.supers = (queries + plan.super_q - 1) / plan.super_q;
    plan.boundaries = plan.super_q / plan.boundary_q + 1;
    plan.rows = static_cast<std::int32_t>(rows);
    plan.triangular = triangular;
    plan.whole = whole;
    return plan;
}

/// Entries that a round may take. Never less for more queries or more rows, where super_q is the same.
inline std::int64_t plan_capacity(const attention_plan& whole, std::int64_t heads) {
    return heads * std::min(whole.entries_a_head(), plan_full_lists * whole.rows);
}

/// Lists of a forward call with at most `queries` queries, about.
inline std::int64_t max_plan_lists(std::int64_t queries) {
    return std::max(queries / plan_queries,
                    std::min<std::int64_t>(queries, plan_few_queries) * 13 / 12 / plan_queries_of_few) +
           1;
}

/// Memory for any round of this plan (shape_plan) out of the workspace; at least as much as `other` takes.
inline void take_plan(workspace_parts& parts, attention_plan& plan, const attention_plan& other,
                      std::int64_t heads, bool with_bias) {
    const std::int64_t entries = std::max(plan_capacity(plan, heads), plan_capacity(other, heads));
    const std::int64_t lists = heads * std::max(plan.supers, other.supers);
    const std::int64_t boundaries = heads * std::max(std::int64_t{plan.supers} * plan.boundaries,
                                                     std::int64_t{other.supers} * other.boundaries);
    plan.row = parts.take<std::int32_t>(entries);
    plan.interval = parts.take<row_interval>(entries);
    plan.bias = with_bias ? parts.take<float>(entries) : nullptr;
    plan.bias_from = with_bias ? parts.take<std::uint16_t>(entries) : nullptr;
    plan.old = parts.take<std::int32_t>(lists);
    plan.total = parts.take<std::int32_t>(lists);
    plan.through = parts.take<std::int32_t>(boundaries);
    plan.known = parts.take<std::int32_t>(boundaries);
    plan.passing = parts.take<std::int32_t>(boundaries);
    plan.lasting = parts.take<std::int32_t>(lists);
    plan.runs = parts.take<std::int32_t>(lists);
}
inline void take_plan(workspace_parts& parts, attention_plan& plan, std::int64_t heads, bool with_bias) {
    take_plan(parts, plan, plan, heads, with_bias);
}

/// The round that begins at super-tile `first` of `whole`: as many super-tiles as its memory holds.
inline attention_plan plan_round(const attention_plan& whole, std::int64_t heads, std::int32_t first) {
    const std::int64_t capacity = plan_capacity(whole, heads);
    attention_plan round = whole;
    round.first = first;
    round.supers = 1;  // plan_full_lists >= 1, so one list a head always fits
    // Lists without rows take no memory, but what a caller has for each list must not grow where there are
    // fewer rows.
    const std::int64_t most = whole.rows > 0 ? whole.supers : plan_full_lists;
    while (first + round.supers < whole.supers && round.supers < most &&
           heads * round.before(round.supers + 1) <= capacity) {
        ++round.supers;
    }
    return round;
}

/// Enqueues the plan of a round.
template <class Frames>
void launch_plan(const cuda& ctx, const Frames& frames, const attention_plan& round, std::int32_t batch,
                 std::int32_t kv_heads) {
    const std::int32_t heads = batch * kv_heads;
    const bool plain = plain_frame::fits(frames) && round.bias == nullptr;
    const device_scope device(ctx);
    const bool many = round.rows >= plan_many_rows &&
                      plan_shared_bytes(round, plan_max_warps) + 1024 <=
                          static_cast<std::size_t>(device.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    const auto go = [&](auto warps) {
        constexpr int Warps = decltype(warps)::value;
        launch(
            "attention_plan_kernel",
            plain ? attention_plan_kernel<true, Warps, Frames> : attention_plan_kernel<false, Warps, Frames>,
            std::int64_t{heads} * round.supers, 32 * Warps, plan_shared_bytes(round, Warps), ctx, frames,
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
