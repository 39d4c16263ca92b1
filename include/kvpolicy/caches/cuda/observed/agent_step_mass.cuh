// One warp's share of the scores that a step's query gives: the masses of tiles of rows of a head become
// scores.
#pragma once

#include <kvpolicy/caches/cuda/observed/step_logits.cuh>
#include <kvpolicy/caches/cuda/warp_group.cuh>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
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

/// KV head `head` of entry `entry`. View: the cache; Compute: the numbers of attention.
template <class View, class Compute>
class agent_step_mass {
    using Head = typename View::head_type;

  public:
    static constexpr int each = mass_tile::each;

    /// Of a lane's rows of a tile.
    struct lane_rows {
        Compute mass[each];
        float before[each];
        position_t position[each];
    };

    __device__ agent_step_mass(const View& cache, const step_logits<Compute>& logits, std::int32_t entry,
                               std::int32_t head)
        : cache_(cache),
          logits_(logits),
          pair_(std::int64_t{entry} * cache.kv_heads + head),
          head_(head),
          entry_(entry),
          after_(after(logits.after + pair_)),
          first_slot_(first_slot_of(cache.all_params[head])) {}

    /// Whether the entry took a token, and the head has rows in the tile.
    [[nodiscard]] __device__ bool reaches(std::int32_t tile) const {
        return mass_tile(first_slot_, tile).begin < after_.used;
    }

    /// 1. The masses of the lane's rows. Rows that are not in use have any number. A query head whose sum of
    /// weights is NaN gives none, and is reported.
    __device__ void observe(std::int32_t tile_number, std::uint32_t* status, Compute (&mass)[each]) const {
        const mass_tile tile(first_slot_, tile_number);
        const std::int32_t group = cache_.group, stride = logits_.stride;
        const Compute* const lse = logits_.lse + pair_ * group;
        const Compute* const logits = logits_.logit + pair_ * logits_.rows * stride;
        const Compute* from[each];
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);  // clamped: the loads do not wait to learn what is in use
            from[i] = logits + (row < 0 || row >= logits_.rows ? 0 : row) * std::int64_t{stride};
            mass[i] = Compute(0);
        }
        bool bad = false;
#pragma unroll 4
        for (std::int32_t g = 0; g < group; g += 2) {
            const bool both = g + 1 < group;
            const Compute x_lse = load(lse + g),
                          y_lse = both ? load(lse + g + 1) : static_cast<Compute>(INFINITY);
            bad |= x_lse != x_lse || y_lse != y_lse;
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const logit_pair<Compute> logit = load_pair(from[i] + g);
                const Compute x = weight(logit.x, x_lse), y = both ? weight(logit.y, y_lse) : Compute(0);
                mass[i] = logits_.mean ? mass[i] + x + y : fmax(mass[i], fmax(x, y));
            }
        }
#pragma unroll
        for (int i = 0; i < each; ++i) {
            mass[i] = logits_.mean ? mass[i] / static_cast<Compute>(group) : mass[i];
        }
        const bool reports = tile.begin <= 0 && tile.begin + mass_tile::rows > 0 && lane_id() == 0;
        if (bad && reports && after_.used != 0 && status != nullptr) {
            atomicOr(status + entry_, static_cast<std::uint32_t>(status_nan_score));
        }
    }

    /// Starts the loads of what give() needs beside masses.
    __device__ void fetch(std::int32_t tile_number, lane_rows& rows) const {
        const mass_tile tile(first_slot_, tile_number);
        const Head head(cache_, after_.seq, head_);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);
            const bool there = row >= 0 && row < after_.used;
            rows.before[i] = there && logits_.accumulate ? head.score_of(row) : 0.0f;
            rows.position[i] = there && row >= first_slot_ ? head.position_of(row) : 0;
        }
    }

    /// 2. Masses become scores. 3. The worst of a tile of top-k slots is recorded.
    __device__ void give(std::int32_t tile_number, const lane_rows& rows) const {
        const mass_tile tile(first_slot_, tile_number);
        const Head head(cache_, after_.seq, head_);
        detail::ranked_slot worst;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);
            if (row < 0 || row >= after_.used) {
                continue;
            }
            const auto score = static_cast<float>(static_cast<Compute>(rows.before[i]) + rows.mass[i]);
            head.score_of(row) = score;
            if (row >= first_slot_) {
                const detail::ranked_slot one{static_cast<double>(score), rows.position[i],
                                              row - first_slot_};
                worst = detail::gives_way(one, worst) ? one : worst;
            }
        }
        // A head without a bound evicts no key, and has no records.
        if (tile.record < 0 || tile.record >= detail::tiles_of_slots(after_.num_long_range) ||
            head.head_params.budget == unlimited) {
            return;
        }
        worst = warp_group::worst(worst);
        if (lane_id() == 0) {
            cache_.record_of(head)[tile.record] = worst.slot;
        }
    }

    /// All of it for tiles first, first + stride, .... Two tiles are on their way at once.
    __device__ void run(std::int32_t first, std::int32_t stride, std::uint32_t* status) const {
        for (std::int32_t tile = first; reaches(tile); tile += 2 * stride) {
            const bool both = reaches(tile + stride);
            lane_rows rows[2];
            fetch(tile, rows[0]);
            if (both) {
                fetch(tile + stride, rows[1]);
            }
            observe(tile, status, rows[0].mass);
            if (both) {
                observe(tile + stride, status, rows[1].mass);
            }
            give(tile, rows[0]);
            if (both) {
                give(tile + stride, rows[1]);
            }
        }
    }

  private:
    __device__ static std::int32_t first_slot_of(const HeadParams& head_params) {
        return HeadRows{head_params.sinks, head_params.window}.slot(0);
    }
    // Other blocks wrote these, perhaps of the same kernel: past the L1 cache.
    __device__ static step_rows after(const step_rows* from) {
        const int4 x = __ldcg(reinterpret_cast<const int4*>(from));
        return {x.x, x.y, x.z, x.w};
    }
    __device__ static Compute load(const Compute* from) { return __ldcg(from); }
    __device__ static logit_pair<float> load_pair(const float* from) {
        const float2 x = __ldcg(reinterpret_cast<const float2*>(from));
        return {x.x, x.y};
    }
    __device__ static logit_pair<double> load_pair(const double* from) {
        const double2 x = __ldcg(reinterpret_cast<const double2*>(from));
        return {x.x, x.y};
    }
    __device__ static Compute weight(Compute logit, Compute lse) {
        return lse == lse ? exp2(logit - lse) : Compute(0);
    }

    const View& cache_;
    const step_logits<Compute>& logits_;
    std::int64_t pair_;
    std::int32_t head_, entry_;
    step_rows after_;
    std::int32_t first_slot_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
