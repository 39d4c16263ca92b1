// The rows that a tile of queries sees, from the plan's lists or by looking at every row. Both say the same
// thing:
//
//   full                          rows [0, full) are seen by every query of the tile;
//   row(call, x)                  the number of such a row
//   candidates                    rows [full, full + candidates) may be seen by some
//   candidate(call, x)            the number and the visible interval of one of them
//   bias(call, x, from)           a row's log-bias, and from which query on it counts
//   begin, end                    the tile's queries, in the frame in which is visible are given
//   runs                          whether rows that all queries see mostly follow one another
#pragma once

#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A row's visible interval in one word: begin, and expires above (or how long, in notes for softmax).
__device__ inline std::uint32_t interval_of(std::int32_t begin, std::int32_t expiry) {
    return static_cast<std::uint32_t>(begin) | (static_cast<std::uint32_t>(expiry) << 16);
}

struct candidate_row {
    std::int32_t row;
    std::uint32_t interval;
};

/// Rows from the plan's list of the super-tile: old ones and young ones that the whole tile sees, then old
/// ones that may die in it, young ones that outlast the super-tile, and those that do not.
struct listed_rows {
    std::int32_t full, candidates, begin, end;
    std::int64_t offset;
    std::int32_t full_old, before_known, before_passing;  // numbers at which the other parts begin, and
    std::int32_t to_full, to_old, to_known, to_passing;   // what to add to a number for its entry
    std::int32_t runs;

    listed_rows() = default;
    template <class T>
    __device__ listed_rows(const forward_params<T>& call, const tile_coords& coords) {
        const attention_plan& plan = call.plan;
        const std::int64_t head = std::int64_t{coords.b} * call.params.kv_heads + coords.h;
        const std::int32_t super = coords.first_query / plan.super_q;
        const std::int64_t list = head * plan.supers + (super - plan.first);
        offset = plan.offset(head, super - plan.first);
        begin = coords.first_query - super * plan.super_q;
        end = begin + coords.tile_q;
        const std::int64_t boundary = list * plan.boundaries + begin / plan.boundary_q;
        const std::int64_t next = list * plan.boundaries + end / plan.boundary_q;
        const std::int32_t old = plan.old[list];
        const std::int32_t dying = plan.through[boundary];
        const std::int32_t known = plan.known[boundary];  // by the whole tile
        full_old = plan.through[next];
        full = full_old + known;
        before_known = full + dying - full_old;
        before_passing = before_known + plan.known[next] - known;
        candidates = before_passing + plan.passing[next] - full;
        to_full = old - full_old;
        to_old = full_old - full;
        to_known = old + known - before_known;
        to_passing = old + plan.lasting[list] - before_passing;
        runs = plan.runs[list];
    }

    template <class T>
    [[nodiscard]] __device__ std::int32_t row(const forward_params<T>& call, std::int32_t x) const {
        return call.plan.row[offset + x + (x < full_old ? 0 : to_full)];
    }
    template <class T>
    [[nodiscard]] __device__ candidate_row candidate(const forward_params<T>& call, std::int32_t x) const {
        static_assert(sizeof(row_interval) == sizeof(std::uint32_t));
        const std::int64_t at = entry(x);
        return {call.plan.row[at], reinterpret_cast<const std::uint32_t*>(call.plan.interval)[at]};
    }
    template <class T>
    [[nodiscard]] __device__ float bias(const forward_params<T>& call, std::int32_t x,
                                        std::int32_t& from) const {
        const std::int64_t at = entry(x);
        if (call.plan.bias == nullptr) {
            return 0.0f;
        }
        from = call.plan.bias_from[at];
        return call.plan.bias[at];
    }

  private:
    [[nodiscard]] __device__ std::int64_t entry(std::int32_t x) const {
        return offset + x +
               (x < full_old         ? 0
                : x < full           ? to_full
                : x < before_known   ? to_old
                : x < before_passing ? to_known
                                     : to_passing);
    }
};

/// All rows of the head that are not in the future, in order. Intervals are given in the frame of the tile.
struct scanned_rows {
    std::int32_t full, candidates, begin, end;
    std::int32_t b, h, first_query;
    std::int32_t past, past_full, past_end, self_full;  // rows: of the first segment, and how far each goes
    std::int32_t runs;

    scanned_rows() = default;
    template <class T>
    __device__ scanned_rows(const forward_params<T>& call, const tile_coords& coords)
        : begin(0), end(coords.tile_q), b(coords.b), h(coords.h), first_query(coords.first_query), runs(1) {
        const head_frame head(call.frames, b, h);
        const segment_frame& first = call.frames.past;
        const std::int64_t base = head.start() + first_query;
        past = head.past();
        const std::int32_t self = head.count() - past;
        past_end = past;
        std::int32_t self_end = self;
        if (!first.position) {
            past_end = counted(base + end - first.first, past);
        }
        if (!call.frames.self.position) {
            self_end = counted(std::int64_t{first_query} + end, self);
        }
        past_full = call.causal_rows ? counted(base + 1 - first.first, past) : 0;
        self_full = call.causal_rows ? counted(std::int64_t{first_query} + 1, self) : 0;
        full = past_full + self_full;
        candidates = past_end + self_end - full;
    }

    template <class T>
    [[nodiscard]] __device__ std::int32_t row(const forward_params<T>& call, std::int32_t x) const {
        const std::int32_t i = index(x);
        return i < past ? i : call.frames.past.rows + (i - past);
    }
    template <class T>
    [[nodiscard]] __device__ candidate_row candidate(const forward_params<T>& call, std::int32_t x) const {
        const head_frame head(call.frames, b, h);
        const std::int32_t i = index(x);
        const row_time time = head.time_of(i, head.start() + first_query, end);
        return {head.row_of(i), interval_of(time.begin, time.expiry)};
    }
    template <class T>
    [[nodiscard]] __device__ float bias(const forward_params<T>& call, std::int32_t x,
                                        std::int32_t& from) const {
        const head_frame head(call.frames, b, h);
        return head.bias_of(index(x), head.start() + first_query, end, from);
    }

  private:
    [[nodiscard]] __device__ static std::int32_t counted(std::int64_t rows, std::int32_t most) {
        return rows <= 0 ? 0 : rows < most ? static_cast<std::int32_t>(rows) : most;
    }
    /// Full rows of both segments first, then the rest of both.
    [[nodiscard]] __device__ std::int32_t index(std::int32_t x) const {
        if (x < full) {
            return x < past_full ? x : past + (x - past_full);
        }
        x -= self_full;
        return x < past_end ? x : past + self_full + (x - past_end);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
