// One warp's share of the scores that a query gives: the masses of tiles of rows of a head become scores.
#pragma once

#include <kvpolicy/caches/cuda/observed/mass_source.cuh>
#include <kvpolicy/caches/cuda/observed/step_logits.cuh>
#include <kvpolicy/caches/cuda/warp_group.cuh>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Scores as integers of the same order: NaN first, -0 is 0.
__device__ inline std::uint32_t score_order(float score) {
    const std::uint32_t bits = __float_as_uint(score + 0.0f);
    return score != score ? 0u : bits ^ ((bits & 0x80000000u) != 0 ? 0xffffffffu : 0x80000000u);
}

/// KV head `head` of entry `entry`. View: the cache; Compute: the numbers of attention; Source: where masses
/// come from (mass_source.cuh). Few instructions matter: with many sequences they take more time than the
/// memory does.
template <class View, class Compute, class Source = step_logits<Compute>>
class agent_step_mass {
    using Head = typename View::head_type;

  public:
    static constexpr int each = mass_tile::each;

    __device__ agent_step_mass(const View& cache, const Source& source, std::int32_t entry, std::int32_t head)
        : cache_(cache),
          source_(source),
          entry_(entry),
          after_(rows_of(source, cache, entry, head)),
          head_(cache, after_.seq, head),
          first_slot_(head_.layout.slot(0)),
          masses_(source, cache, entry, head) {}

    /// Whether the entry took a token, and the head has rows in the tile.
    [[nodiscard]] __device__ bool reaches(std::int32_t tile) const {
        return mass_tile(first_slot_, tile).begin < after_.used;
    }

    /// 1. The masses of the lane's rows. Rows that are not in use have any number. What is no mass counts as
    /// 0, and is reported.
    __device__ void observe(std::int32_t tile_number, std::uint32_t* status, Compute (&mass)[each]) const {
        const mass_tile tile(first_slot_, tile_number);
        if (masses_.read(tile, after_.used, mass) && after_.used != 0 && status != nullptr) {
            atomicOr(status + entry_, static_cast<std::uint32_t>(status_nan_score));
        }
    }

    /// What the lane's rows had received before, if that counts.
    __device__ void fetch(std::int32_t tile_number, float (&before)[each]) const {
        const mass_tile tile(first_slot_, tile_number);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            before[i] = source_.accumulate && there(tile.row(i)) ? head_.score_of(tile.row(i)) : 0.0f;
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

    /// Says that all tiles have records: where a step has not said so. By one thread.
    __device__ void rely_on_records() const {
        if (after_.used != 0) {
            cache_.victim[head_.index] = victim_in_records;
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
    const Source& source_;
    std::int32_t entry_;
    step_rows after_;
    Head head_;
    std::int32_t first_slot_;
    head_masses<Source> masses_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
