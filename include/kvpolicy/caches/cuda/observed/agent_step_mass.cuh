// One warp's share of step_mass_kernel: the masses of a tile of rows of a head become scores.
#pragma once

#include <kvpolicy/caches/cuda/observed/step_mass_params.cuh>
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
    std::int32_t begin;  // may be below 0
    std::int32_t slots;  // the tile of top-k slots that it is; below 0: of rows before them

    __device__ mass_tile(std::int32_t first_slot, std::int32_t tile)
        : begin(first_slot % rows + (tile - 1) * rows), slots(tile - 1 - first_slot / rows) {}
    [[nodiscard]] __device__ std::int32_t row(int i) const { return begin + 32 * i + lane_id(); }
};

template <class Launch>
class agent_step_mass {
    using View = typename Launch::View;
    using Compute = typename Launch::Compute;
    using Head = typename View::head_type;

  public:
    static constexpr int each = mass_tile::each;

    /// Of all whole_layer: the masses of each warp's heads.
    struct Memory {
        Compute mass[mass_warps][mass_tile::rows];
    };

    __device__ agent_step_mass(const Launch& call, Memory& memory, std::int32_t entry, std::int32_t tile)
        : call_(call), memory_(memory), entry_(entry), tile_(tile) {}

    /// KV head `head`, by a warp.
    __device__ void run(std::int32_t head) const {
        if (head >= call_.cache.kv_heads) {
            return;
        }
        const step_rows after = of(head);
        Compute mass[each];
        observe(head, tile_of(head), after, mass);
        give(head, after, mass);
    }

    /// All KV heads, by the block.
    __device__ void run_layer() const {
        const std::int32_t heads = call_.cache.kv_heads;
        Compute sum[each] = {};
        for (std::int32_t head = warp_id(); head < heads; head += mass_warps) {
            Compute mass[each];
            observe(head, tile_of(head), of(head), mass);
#pragma unroll
            for (int i = 0; i < each; ++i) {
                sum[i] += mass[i];
            }
        }
#pragma unroll
        for (int i = 0; i < each; ++i) {
            memory_.mass[warp_id()][32 * i + lane_id()] = sum[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < each; ++i) {  // in the same order in every warp, so that all heads agree
            Compute all = Compute(0);
#pragma unroll
            for (int w = 0; w < mass_warps; ++w) {
                all += memory_.mass[w][32 * i + lane_id()];
            }
            sum[i] = all / static_cast<Compute>(heads);
        }
        for (std::int32_t head = warp_id(); head < heads; head += mass_warps) {
            give(head, of(head), sum);
        }
    }

  private:
    [[nodiscard]] __device__ std::int64_t pair(std::int32_t head) const {
        return std::int64_t{entry_} * call_.cache.kv_heads + head;
    }
    [[nodiscard]] __device__ step_rows of(std::int32_t head) const {
        const int4 x = *reinterpret_cast<const int4*>(call_.logits.after + pair(head));
        return {x.x, x.y, x.z, x.w};
    }
    [[nodiscard]] __device__ mass_tile tile_of(std::int32_t head) const {
        const HeadParams& head_params = call_.cache.all_params[head];
        return {HeadRows{head_params.sinks, head_params.window}.slot(0), tile_};
    }

    /// 1. The masses of the lane's rows. Rows that are not in use have any number. A query head whose sum of
    /// weights is NaN gives none.
    __device__ void observe(std::int32_t head, const mass_tile& tile, const step_rows& after,
                            Compute (&mass)[each]) const {
        const std::int32_t group = call_.cache.group, stride = call_.logits.stride;
        const Compute* const lse = call_.logits.lse + pair(head) * group;
        const Compute* const logits = call_.logits.logit + pair(head) * call_.logits.rows * stride;
        const Compute* from[each];
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);  // clamped: all loads may go before `after` has come
            from[i] = logits + (row < 0 || row >= call_.logits.rows ? 0 : row) * std::int64_t{stride};
            mass[i] = Compute(0);
        }
        bool bad = false;
#pragma unroll 4
        for (std::int32_t g = 0; g < group; g += 2) {
            const bool both = g + 1 < group;
            const Compute sums[2] = {lse[g], both ? lse[g + 1] : static_cast<Compute>(INFINITY)};
            bad |= sums[0] != sums[0] || sums[1] != sums[1];
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const auto logit = *reinterpret_cast<const logit_pair<Compute>*>(from[i] + g);
                const Compute x = weight(logit.x, sums[0]), y = both ? weight(logit.y, sums[1]) : Compute(0);
                mass[i] = call_.mean ? mass[i] + x + y : fmax(mass[i], fmax(x, y));
            }
        }
#pragma unroll
        for (int i = 0; i < each; ++i) {
            mass[i] = call_.mean ? mass[i] / static_cast<Compute>(group) : mass[i];
        }
        const bool reports = tile.begin <= 0 && tile.begin + mass_tile::rows > 0 && lane_id() == 0;
        if (bad && reports && after.used != 0 && call_.status != nullptr) {
            atomicOr(call_.status + entry_, static_cast<std::uint32_t>(status_nan_score));
        }
    }

    [[nodiscard]] __device__ static Compute weight(Compute logit, Compute lse) {
        return lse == lse ? exp2(logit - lse) : Compute(0);
    }

    /// 2. They become scores. 3. The worst of a tile of top-k slots is recorded.
    __device__ void give(std::int32_t head_number, const step_rows& after,
                         const Compute (&mass)[each]) const {
        const mass_tile tile = tile_of(head_number);
        if (tile.begin >= after.used) {
            return;
        }
        const Head head(call_.cache, after.seq, head_number);
        const std::int32_t first = head.layout.slot(0);
        detail::ranked_slot worst;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::int32_t row = tile.row(i);
            if (row < 0 || row >= after.used) {
                continue;
            }
            float& score = head.score_of(row);
            const auto before = static_cast<Compute>(call_.accumulate ? score : 0.0f);
            const auto now = static_cast<float>(before + mass[i]);
            score = now;
            if (row >= first) {
                const detail::ranked_slot one{static_cast<double>(now), head.position_of(row), row - first};
                worst = detail::gives_way(one, worst) ? one : worst;
            }
        }
        // A head without a bound evicts no key, and has no records.
        if (tile.slots < 0 || tile.slots >= detail::tiles_of_slots(after.num_long_range) ||
            head.head_params.budget == unlimited) {
            return;
        }
        worst = warp_group::worst(worst);
        if (lane_id() == 0) {
            call_.cache.record_of(head)[tile.slots] = worst.slot;
        }
    }

    const Launch& call_;
    Memory& memory_;
    std::int32_t entry_, tile_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
