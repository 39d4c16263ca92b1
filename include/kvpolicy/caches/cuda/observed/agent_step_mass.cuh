// One warp's share of the scores that a step's query gives: the masses of tiles of rows of a head become
// scores.
#pragma once

#include <kvpolicy/caches/cuda/observed/step_logits.cuh>
#include <kvpolicy/caches/cuda/warp_group.cuh>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

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

/// Scores as integers of the same order: NaN first, -0 is 0.
__device__ inline std::uint32_t score_order(float score) {
    const std::uint32_t bits = __float_as_uint(score + 0.0f);
    return score != score ? 0u : bits ^ ((bits & 0x80000000u) != 0 ? 0xffffffffu : 0x80000000u);
}

/// KV head `head` of entry `entry`. View: the cache; Compute: the numbers of attention. Few instructions
/// matter: with many sequences they take more time than the memory does.
template <class View, class Compute>
class agent_step_mass {
    using Head = typename View::head_type;
    using Pair = logit_pair<Compute>;

  public:
    static constexpr int each = mass_tile::each;

    __device__ agent_step_mass(const View& cache, const step_logits<Compute>& logits, std::int32_t entry,
                               std::int32_t head)
        : cache_(cache),
          logits_(logits),
          entry_(entry),
          after_(load(logits, cache, entry, head)),
          head_(cache, after_.seq, head),
          first_slot_(head_.layout.slot(0)) {
        const std::int64_t pair = std::int64_t{entry} * cache.kv_heads + head;
        lse_ = logits.lse + pair * cache.group;
        logit_ = logits.logit + pair * logits.rows * logits.stride;
    }

    /// Whether the entry took a token, and the head has rows in the tile.
    [[nodiscard]] __device__ bool reaches(std::int32_t tile) const {
        return mass_tile(first_slot_, tile).begin < after_.used;
    }

    /// 1. The masses of the lane's rows. Rows that are not in use have any number. A query head whose sum of
    /// weights is NaN gives none, and is reported.
    __device__ void observe(std::int32_t tile_number, std::uint32_t* status, Compute (&mass)[each]) const {
        const mass_tile tile(first_slot_, tile_number);
        const std::int32_t group = cache_.group;
        const Compute* from[each];
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);
            from[i] = logit_ + (row < 0 || row >= after_.used ? 0 : row) * std::int64_t{logits_.stride};
            mass[i] = Compute(0);
        }
        bool bad = false;
#pragma unroll 2
        for (std::int32_t g = 0; g < group; g += 2) {
            const bool both = g + 1 < group;
            const Compute x_lse = lse_[g], y_lse = lse_[both ? g + 1 : g];
            const bool x_counts = x_lse == x_lse, y_counts = both && y_lse == y_lse;
            bad |= !x_counts || (both && !y_counts);
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const Pair logit = *reinterpret_cast<const Pair*>(from[i] + g);
                const Compute x = x_counts ? step_weight(logit.x - x_lse) : Compute(0),
                              y = y_counts ? step_weight(logit.y - y_lse) : Compute(0);
                mass[i] = logits_.mean ? mass[i] + x + y : fmax(mass[i], fmax(x, y));
            }
        }
        const Compute share = logits_.mean ? Compute(1) / static_cast<Compute>(group) : Compute(1);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            mass[i] *= share;
        }
        if (bad && tile.begin <= 0 && tile.begin + mass_tile::rows > 0 && after_.used != 0 &&
            lane_id() == 0 && status != nullptr) {
            atomicOr(status + entry_, static_cast<std::uint32_t>(status_nan_score));
        }
    }

    /// What the lane's rows had received before, if that counts.
    __device__ void fetch(std::int32_t tile_number, float (&before)[each]) const {
        const mass_tile tile(first_slot_, tile_number);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            before[i] = logits_.accumulate && there(tile.row(i)) ? head_.score_of(tile.row(i)) : 0.0f;
        }
    }

    /// 2. Masses become scores. 3. The worst of a tile of top-k slots is recorded.
    __device__ void give(std::int32_t tile_number, const float (&before)[each],
                         const Compute (&mass)[each]) const {
        constexpr std::uint32_t none = 0xffffffffu;  // no score's order
        const mass_tile tile(first_slot_, tile_number);
        std::uint32_t order[each];
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);
            const auto score = static_cast<float>(static_cast<Compute>(before[i]) + mass[i]);
            if (there(row)) {
                head_.score_of(row) = score;
            }
            order[i] = there(row) ? score_order(score) : none;
        }
        // A head without a bound evicts no key, and has no records.
        if (tile.record < 0 || tile.record >= detail::tiles_of_slots(after_.num_long_range) ||
            head_.head_params.budget == unlimited) {
            return;
        }
        const std::uint32_t least = __reduce_min_sync(all_lanes, order[0] < order[1] ? order[0] : order[1]);
        const unsigned first = __ballot_sync(all_lanes, order[0] == least),
                       second = __ballot_sync(all_lanes, order[1] == least);
        std::int32_t slot =
            tile.record * mass_tile::rows +
            (first != 0 ? __ffs(static_cast<int>(first)) - 1 : 31 + __ffs(static_cast<int>(second)));
        if (__popc(first) + __popc(second) > 1) {
            slot = youngest(tile, order, least);
        }
        if (lane_id() == 0) {
            cache_.record_of(head_)[tile.record] = slot;
        }
    }

    /// All of it for tiles first, first + stride, .... Two tiles are on their way at once.
    __device__ void run(std::int32_t first, std::int32_t stride, std::uint32_t* status) const {
        for (std::int32_t tile = first; reaches(tile); tile += 2 * stride) {
            const bool both = reaches(tile + stride);
            float before[2][each] = {};
            Compute mass[2][each];
            fetch(tile, before[0]);
            if (both) {
                fetch(tile + stride, before[1]);
                observe(tile + stride, status, mass[1]);
            }
            observe(tile, status, mass[0]);
            give(tile, before[0], mass[0]);
            if (both) {
                give(tile + stride, before[1], mass[1]);
            }
        }
    }

  private:
    static_assert(each == 2);
    __device__ static step_rows load(const step_logits<Compute>& logits, const View& cache,
                                     std::int32_t entry, std::int32_t head) {
        const int4 x =
            *reinterpret_cast<const int4*>(logits.after + std::int64_t{entry} * cache.kv_heads + head);
        return {x.x, x.y, x.z, x.w};
    }
    [[nodiscard]] __device__ bool there(std::int32_t row) const { return row >= 0 && row < after_.used; }

    /// The slot of the youngest of the keys whose score is the least: the older ones stay.
    [[nodiscard]] __device__ std::int32_t youngest(const mass_tile& tile, const std::uint32_t (&order)[each],
                                                   std::uint32_t least) const {
        detail::ranked_slot mine;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);
            if (order[i] == least) {
                const detail::ranked_slot one{0.0, head_.position_of(row), row - first_slot_};
                mine = detail::gives_way(one, mine) ? one : mine;
            }
        }
        return warp_group::worst(mine).slot;
    }

    const View& cache_;
    const step_logits<Compute>& logits_;
    std::int32_t entry_;
    step_rows after_;
    Head head_;
    std::int32_t first_slot_;
    const Compute* lse_;    // [G]
    const Compute* logit_;  // [rows, stride]
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
