// One super-tile's list by one block: a stable counting sort of the keys that some query of the super-tile
// sees.
//
// The bin of a key says where it comes in the list. Keys that are older than the super-tile come first, those
// with the latest expiry in front: bins 0 .. super_q - 1, super_q - expiry. Then keys with a begin of 1 to
// super_q - 1: those that outlast the super-tile in bins super_q - 1 + begin, and behind them the others in
// bins 2 super_q - 2 + begin.
#pragma once

#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr std::int32_t plan_bins = 3;  // times super_q

/// Calls body(x, time) for this warp's share of the rows, in order, 32 at a time, with a time that is never
/// (expiry = 0) for lanes past the end. All lanes call it together. time_of(x) is the visible interval of row
/// x.
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
                time[i].expiry = 0;  // it begins after the last query
            }
        }
#pragma unroll
        for (std::int32_t i = 0; i < ahead; ++i) {
            body(static_cast<std::int32_t>(first + 32 * i + lane_id()), time[i]);
        }
    }
}

/// Shared memory of a plan block beside its counts.
template <int Warps>
struct plan_memory {
    std::int32_t totals[Warps];
    std::int32_t staying[Warps];    // keys that outlast the super-tile, and
    std::int32_t following[Warps];  // how many of them come right after another of the same 32
};

/// `Plain` where plain_frame fits. Every warp has an equal share of the keys and counters of its own for
/// every bin.
template <bool Plain, int Warps, class Frames>
struct plan_block {
    const Frames& frames;
    const attention_plan& plan;
    plan_memory<Warps>& memory;
    std::int32_t* const counts;  // [plan_bins * super_q][Warps]
    const std::int32_t head_number, b, h;
    const std::int32_t j;     // the super-tile, of this round
    const std::int64_t list;  // of [heads, supers]
    const head_frame head;
    const std::int32_t super_q;
    const std::int64_t first_query, base;  // in its sequence, and as a position
    std::int32_t queries, rows;            // of the super-tile; keys that it may see
    const plain_frame plain;
    const std::int32_t warp, thread;

    __device__ __forceinline__ plan_block(const Frames& of_frames, const attention_plan& of_plan,
                                          std::int32_t of_head, std::int32_t super_tile,
                                          std::int32_t kv_heads, plan_memory<Warps>& shared,
                                          std::int32_t* counters)
        : frames(of_frames),
          plan(of_plan),
          memory(shared),
          counts(counters),
          head_number(of_head),
          b(of_head / kv_heads),
          h(of_head % kv_heads),
          j(super_tile),
          list(std::int64_t{of_head} * of_plan.supers + super_tile),
          head(of_frames, b, h),
          super_q(of_plan.super_q),
          first_query((std::int64_t{of_plan.first} + super_tile) * super_q),
          base(head.start() + first_query),
          plain(of_frames, head, b, h, base, super_q),
          warp(warp_id()),
          thread(static_cast<std::int32_t>(threadIdx.x)) {
        const std::int64_t left = frames.queries(b) - first_query;
        queries = left <= 0 ? 0 : left < super_q ? static_cast<std::int32_t>(left) : super_q;
        rows = queries == 0 ? 0 : head.count();
        const std::int64_t needed = (plan.whole != 0 ? head.past() : 0) + first_query + super_q;
        if (plan.triangular && rows > needed) {
            rows = static_cast<std::int32_t>(needed);
        }
    }

    __device__ __forceinline__ void run() const {
        // 1. Count.
        count_bins();
        // 2. Scan.
        const std::int32_t behind = scan_bins();
        // 3. Boundaries.
        write_boundaries(behind);
        // 4. The list.
        write_list();
    }

  private:
    __device__ __forceinline__ row_time time_of(std::int32_t x) const {
        if constexpr (Plain) {
            return plain.time_of(x);
        } else {
            return head.time_of(x, base, super_q);
        }
    }
    __device__ __forceinline__ std::int32_t bin_of(const row_time& time) const {
        return time.begin == 0          ? super_q - time.expiry
               : time.expiry == super_q ? super_q - 1 + time.begin
                                        : 2 * super_q - 2 + time.begin;
    }

    /// counts[bin][warp], and whether the keys that outlast the super-tile stand in runs.
    __device__ __forceinline__ void count_bins() const {
        const std::int32_t counters = plan_bins * super_q * Warps;
        for (std::int32_t i = thread; i < counters; i += 32 * Warps) {
            counts[i] = 0;
        }
        __syncthreads();
        std::int32_t through = 0;  // of bin 0, which most keys are in
        std::int32_t stay = 0;
        std::int32_t follow = 0;
        for_rows_of_warp<Warps>([&](std::int32_t x) { return time_of(x); }, rows, queries,
                                [&](std::int32_t, const row_time& time) {
                                    const bool seen = time.begin < time.expiry;
                                    const bool lasts = seen && time.begin == 0 && time.expiry == super_q;
                                    through += __popc(__ballot_sync(all_lanes, lasts));
                                    const unsigned stays =
                                        __ballot_sync(all_lanes, seen && time.expiry == super_q);
                                    stay += __popc(stays);
                                    follow += __popc(stays & (stays << 1));
                                    if (seen && !lasts) {
                                        atomicAdd(counts + bin_of(time) * Warps + warp, 1);
                                    }
                                });
        if (lane_id() == 0) {
            counts[warp] = through;
            memory.staying[warp] = stay;
            memory.following[warp] = follow;
        }
        __syncthreads();
        if (thread == 0) {
            std::int32_t all = 0;
            std::int32_t begin = 0;
            for (int w = 0; w < Warps; ++w) {
                all += memory.staying[w];
                begin += memory.staying[w] - memory.following[w];
            }
            // A run of n keys has a first one, and one more for every 32 keys that it goes on.
            plan.runs[list] = all > 0 && begin <= all / 16 ? 1 : 0;
        }
    }

    /// Exclusive scan over (bin, warp): each warp takes a run of it. Returns the sum through this warp's run.
    __device__ __forceinline__ std::int32_t scan_bins() const {
        const std::int32_t run = plan_bins * super_q;
        std::int32_t sum = 0;
        for (std::int32_t i = lane_id(); i < run; i += 32) {
            sum += counts[warp * run + i];
        }
        sum = warp_inclusive_sum(sum);
        if (lane_id() == 31) {
            memory.totals[warp] = sum;
        }
        __syncthreads();
        std::int32_t so_far = sum_of_warps<Warps>(memory.totals).before;
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
        return so_far;
    }

    /// Where every query tile's part of the list begins and ends. `behind`: of the last warp, the length of
    /// the list.
    __device__ __forceinline__ void write_boundaries(std::int32_t behind) const {
        const std::int32_t old = counts[super_q * Warps];
        const std::int32_t behind_lasting = counts[(2 * super_q - 1) * Warps];
        for (std::int32_t i = thread; i < plan.boundaries; i += 32 * Warps) {
            const std::int32_t e = i * plan.boundary_q;
            plan.through[list * plan.boundaries + i] = e == 0 ? old : counts[(super_q - e + 1) * Warps];
            plan.known[list * plan.boundaries + i] = e == 0 ? 0 : counts[(super_q - 1 + e) * Warps] - old;
            plan.passing[list * plan.boundaries + i] =
                e == 0 ? 0 : counts[(2 * super_q - 2 + e) * Warps] - behind_lasting;
        }
        if (thread == 32 * Warps - 1) {
            plan.old[list] = old;
            plan.total[list] = behind;
            plan.lasting[list] = behind_lasting - old;
        }
        __syncthreads();
    }

    /// Every key to its place in the list, keys of one bin in their order.
    __device__ __forceinline__ void write_list() const {
        const std::int64_t offset = plan.offset(head_number, j);
        std::int32_t next_through = counts[warp];
        __syncwarp();
        for_rows_of_warp<Warps>(
            [&](std::int32_t x) { return time_of(x); }, rows, queries,
            [&](std::int32_t x, const row_time& time) { write_key(x, time, offset, next_through); });
    }
    __device__ __forceinline__ void write_key(std::int32_t x, const row_time& time, std::int64_t offset,
                                              std::int32_t& next_through) const {
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
            plan.row[offset + place] = head.row_of(x);
            plan.interval[offset + place] = {static_cast<std::uint16_t>(time.begin),
                                             static_cast<std::uint16_t>(time.expiry)};
            if (!Plain && plan.bias != nullptr) {
                std::int32_t from = 0;
                plan.bias[offset + place] = head.bias_of(x, base, super_q, from);
                plan.bias_from[offset + place] = static_cast<std::uint16_t>(from);
            }
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
