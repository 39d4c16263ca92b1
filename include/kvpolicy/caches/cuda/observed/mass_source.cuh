// Where the masses of a query come from, which become scores: from the logits that a step has left
// (step_logits), or from the caller of observe() (given_masses).
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/observed/step_logits.cuh>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cmath>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rows of a tile, two of each lane. The tiles of a head begin where those of its top-k slots do, so that a
/// record of these is one warp's work.
struct mass_tile {
    static constexpr std::int32_t rows = detail::slot_tile;
    static constexpr int each = rows / 32;
    std::int32_t begin;   // may be below 0
    std::int32_t record;  // number of the tile of top-k slots that it is; below 0: of rows before them

    __device__ mass_tile(std::int32_t first_slot, std::int32_t tile)
        : begin(first_slot % rows + (tile - 1) * rows), record(tile - 1 - first_slot / rows) {}
    [[nodiscard]] __device__ std::int32_t row(int i) const { return begin + 32 * i + lane_id(); }
};

/// 2^x. A float below the smallest normal one becomes 0.
__device__ inline float step_weight(float x) { return fast_exp2(x); }
__device__ inline double step_weight(double x) { return exp2(x); }

/// What observe() is given, beside the numbers of step_logits that say how masses become scores.
struct given_masses {
    using compute = double;
    plane_view<const float> mass{};  // [count, Hkv, rows]
    Batch batch{};
    bool accumulate = true;
    bool whole_layer = false;
};

/// What a step did to a head.
template <class View, class Compute>
__device__ step_rows rows_of(const step_logits<Compute>& logits, const View& cache, std::int32_t entry,
                             std::int32_t head) {
    const int4 x = *reinterpret_cast<const int4*>(logits.after + std::int64_t{entry} * cache.kv_heads + head);
    return {x.x, x.y, x.z, x.w};
}
/// The rows that a head has now.
template <class View>
__device__ step_rows rows_of(const given_masses& given, const View& cache, std::int32_t entry,
                             std::int32_t head) {
    const active_entry active(cache, given.batch, entry, 1, false);
    if (active.tokens == 0) {
        return {};
    }
    const typename View::head_type rows(cache, active.seq, head);
    return {rows_now(cache, rows, active.seq), cache.num_long_range[rows.index], active.seq, 0};
}

/// The masses of one head of an entry, from a source.
template <class Source>
struct head_masses;

template <class Compute>
struct head_masses<step_logits<Compute>> {
    using Pair = logit_pair<Compute>;
    const logit_total<Compute>* total;  // [G]
    const Compute* logit;               // [rows, stride]
    std::int32_t stride, group;
    bool mean;

    template <class View>
    __device__ head_masses(const step_logits<Compute>& logits, const View& cache, std::int32_t entry,
                           std::int32_t head)
        : stride(logits.stride), group(cache.group), mean(logits.mean) {
        const std::int64_t pair = std::int64_t{entry} * cache.kv_heads + head;
        total = logits.total + pair * group;
        logit = logits.logit + pair * logits.rows * stride;
    }

    /// The masses of the lane's rows. A query head whose sum of weights is NaN gives none. Returns whether
    /// the lane is to report that.
    __device__ bool read(const mass_tile& tile, std::int32_t used, Compute (&mass)[mass_tile::each]) const {
        constexpr int each = mass_tile::each;
        const Compute* from[each];
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);
            from[i] = logit + (row < 0 || row >= used ? 0 : row) * std::int64_t{stride};
            mass[i] = Compute(0);
        }
        bool bad = false;
#pragma unroll 2
        for (std::int32_t g = 0; g < group; g += 2) {
            const bool both = g + 1 < group;
            const logit_total<Compute> x_all = total[g], y_all = total[both ? g + 1 : g];
            const bool x_counts = x_all.inverse == x_all.inverse,
                       y_counts = both && y_all.inverse == y_all.inverse;
            bad |= !x_counts || (both && !y_counts);
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const Pair pair = *reinterpret_cast<const Pair*>(from[i] + g);
                const Compute x = x_counts ? step_weight(pair.x - x_all.largest) * x_all.inverse : Compute(0),
                              y = y_counts ? step_weight(pair.y - y_all.largest) * y_all.inverse : Compute(0);
                mass[i] = mean ? mass[i] + x + y : fmax(mass[i], fmax(x, y));
            }
        }
        const Compute share = mean ? Compute(1) / static_cast<Compute>(group) : Compute(1);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            mass[i] *= share;
        }
        return bad && tile.begin <= 0 && tile.begin + mass_tile::rows > 0 && lane_id() == 0;
    }
};

template <>
struct head_masses<given_masses> {
    const float* of_head;  // [rows]

    template <class View>
    __device__ head_masses(const given_masses& given, const View& /*cache*/, std::int32_t entry,
                           std::int32_t head)
        : of_head(given.mass.head(entry, head)) {}

    /// The masses of the lane's rows, 0 for what is no number of 0 or more. Returns whether there is such.
    __device__ bool read(const mass_tile& tile, std::int32_t used, double (&mass)[mass_tile::each]) const {
        bool bad = false;
#pragma unroll
        for (int i = 0; i < mass_tile::each; ++i) {
            const std::int32_t row = tile.row(i);
            const float x = row < 0 || row >= used ? 0.0f : of_head[row];
            const bool counts = x >= 0.0f && x < INFINITY;
            bad |= !counts;
            mass[i] = counts ? static_cast<double>(x) : 0.0;
        }
        return bad;
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
