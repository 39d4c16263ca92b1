// A consumer warpgroup of a Hopper qk_reduce block: 128 rows, in two halves of 64 with an accumulator each.
// While the logits of one half are reduced, the products of the other are under way.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/agent_row_reduce.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_pipeline.cuh>
#include <kvpolicy/attention/cuda/future_mass/row_result.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if KVPOLICY_HOPPER_CODE

/// 64 rows as an operand in shared memory, where every product reads them again.
template <int Dim, bool Held>
struct qk_operand_rows {
    std::uint64_t at;

    __device__ explicit qk_operand_rows(std::uint32_t shared) : at(describe_k_major(shared)) {}
    template <class T, int N>
    __device__ void multiply(float (&s)[N], int k, std::uint64_t columns) const {
        wgmma<T, 0, 0>(s, at + static_cast<std::uint64_t>((k % 4 * 32 + k / 4 * 64 * 128) / 16), columns,
                       k != 0);
    }
};
/// 64 rows as an operand in registers, which leaves a third more of shared memory's bandwidth.
template <int Dim>
struct qk_operand_rows<Dim, true> {
    std::uint32_t part[Dim / 16][4];

    __device__ explicit qk_operand_rows(std::uint32_t shared) {
        const int lane = lane_id();
        const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < Dim / 16; ++k) {
            load_matrices(part[k], shared + swizzled(64, row, 2 * k + lane / 16));
        }
    }
    template <class T, int N>
    __device__ void multiply(float (&s)[N], int k, std::uint64_t columns) const {
        wgmma<T, 0>(s, part[k], columns, k != 0);
    }
};

/// s = 64 rows times the columns of a tile. `beside(k)` runs after the k-th of Dim / 16 products has been
/// issued.
template <class T, int Dim, bool Held, int N, class Beside>
__device__ inline void qk_products(float (&s)[N], const qk_operand_rows<Dim, Held>& rows,
                                   std::uint64_t columns, const Beside& beside) {
    constexpr int width = 2 * N;  // columns of the tile
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Dim / 16; ++k) {
        rows.template multiply<T>(
            s, k, columns + static_cast<std::uint64_t>((k % 4 * 32 + k / 4 * width * 128) / 16));
        if (k == Dim / 16 - 1) {
            wgmma_commit();
        }
        beside(k);
    }
}
template <class T, int Dim, bool Held, int N>
__device__ inline void qk_products(float (&s)[N], const qk_operand_rows<Dim, Held>& rows,
                                   std::uint64_t columns) {
    qk_products<T>(s, rows, columns, [](int) {});
}

/// `Stays`: the block takes another item afterwards, and an item's tiles pass once for every stream.
template <class T, int Dim, class Pass, bool Stays>
struct qk_reduce_consumer {
    using sizes = qk_reduce_hopper_sizes<Dim>;
    using tuning = qk_reduce_hopper_tuning<Dim, Pass>;
    static constexpr int width = sizes::columns / 2;  // logits of a thread, of two of 64 rows

    const qk_reduce_params<T>& params;
    const qk_reduce_memory<Dim>& memory;
    const int group;  // 0 or 1: which 128 rows of the item
    const int lane;
    const int pair,
        own;  // the thread has rows own and own + 8 of 64, and in them every fourth pair of columns
    const row_constants constants;
    int stage = 0;
    std::uint32_t parity = 0;
    // Of the present item.
    qk_reduce_item item;
    std::int32_t first_row;
    float* totals;  // [256]
    bool overflow;
    row_state<Pass> state0, state1;
    float s0[width], s1[width];

    __device__ __forceinline__ qk_reduce_consumer(const qk_reduce_params<T>& call,
                                                  const qk_reduce_memory<Dim>& shared, int group_, int thread)
        : params(call),
          memory(shared),
          group(group_),
          lane(thread % 32),
          pair(lane % 4),
          own(thread / 32 * 16 + lane / 4),
          constants(constants_of(call.exponents)) {}

    /// The item's rows into totals, which the caller writes after a barrier of all consumers. `turns` tiles
    /// come through the ring.
    __device__ __forceinline__ void reduce(const qk_reduce_item& its, float* its_totals, std::int32_t turns) {
        item = its;
        first_row = item.first + 128 * group;
        totals = its_totals;
        overflow = false;
        state0.clear();
        state1.clear();
        if (turns > 0) {
            reduce_tiles(turns);
        } else if constexpr (Stays) {
            warp_arrive(memory.rows_emptied, lane);
        }
    }

  private:
    __device__ __forceinline__ void reduce_tiles(std::int32_t turns) {
        const qk_operand_rows<Dim, tuning::first_held> a0(half_of_rows(0));
        const qk_operand_rows<Dim, tuning::second_held> a1(half_of_rows(1));
        if constexpr (Stays && tuning::second_held) {
            warp_arrive(memory.rows_emptied, lane);  // the next item's may come
        }
        std::int32_t inside = 0;
        barrier_wait(memory.filled + stage * 8, parity);
        qk_products<T>(s0, a0, tile_of(stage));
        wgmma_wait<0>();
        pin(s0);
        // At the head of the loop s0 is complete and no product is under way: ptxas takes products that cross
        // its edge apart.
        for (std::int32_t turn = 1; turn < turns; ++turn) {
            const std::int32_t column =
                qk_reduce_column<Pass, sizes::columns>(item, Stays ? inside : turn - 1);
            const bool last = Stays && ++inside == item.tiles;
            inside = last ? 0 : inside;
            const int next = stage + 1 == sizes::stages ? 0 : stage + 1;
            parity ^= next == 0 ? 1u : 0u;
            if (is_plain(column)) {
                reduce_plain_tile(a0, a1, next, last);
            } else {
                reduce_masked_tile(a0, a1, column, next, last);
            }
            stage = next;
        }
        reduce_last_tile(a1, qk_reduce_column<Pass, sizes::columns>(item, Stays ? inside : turns - 1));
    }

    /// Whether exponents go as they are and all pairs count, as in most tiles.
    __device__ __forceinline__ bool is_plain(std::int32_t column) const {
        return tuning::mixed && constants.cap == 0.0f && (Pass::mass || column != 0) &&
               item.full(first_row, 128, column, sizes::columns);
    }

    /// Products are issued one at a time between parts of the other half's reduction.
    template <class A0, class A1>
    __device__ __forceinline__ void reduce_plain_tile(const A0& a0, const A1& a1, int next, bool last) {
        qk_products<T>(s1, a1, tile_of(stage), [&](int k) { absorb_part(s0, state0, k); });
        wgmma_wait<0>();
        pin(s1);
        barrier_wait(memory.filled + next * 8, parity);
        qk_products<T>(s0, a0, tile_of(next), [&](int k) { absorb_part(s1, state1, k); });
        wgmma_wait<0>();
        pin(s0);
        warp_arrive(memory.emptied + stage * 8, lane);
        if (last) {
            finish(state0, first_row);
            finish(state1, first_row + 64);
        }
    }

    /// Products of one half are issued before the other half's reduction.
    template <class A0, class A1>
    __device__ __forceinline__ void reduce_masked_tile(const A0& a0, const A1& a1, std::int32_t column,
                                                       int next, bool last) {
        qk_products<T>(s1, a1, tile_of(stage));
        absorb(s0, state0, first_row, column);
        if (last) {
            finish(state0, first_row);
        }
        barrier_wait(memory.filled + next * 8, parity);
        qk_products<T>(s0, a0, tile_of(next));
        wgmma_wait<1>();
        pin(s1);
        absorb(s1, state1, first_row + 64, column);
        if (last) {
            finish(state1, first_row + 64);
        }
        warp_arrive(memory.emptied + stage * 8, lane);
        wgmma_wait<0>();
        pin(s0);
    }

    /// The item's last tile, after which no products follow.
    template <class A1>
    __device__ __forceinline__ void reduce_last_tile(const A1& a1, std::int32_t column) {
        qk_products<T>(s1, a1, tile_of(stage));
        absorb(s0, state0, first_row, column);
        finish(state0, first_row);
        wgmma_wait<0>();
        pin(s1);
        if constexpr (Stays && !tuning::second_held) {
            warp_arrive(memory.rows_emptied, lane);
        }
        absorb(s1, state1, first_row + 64, column);
        finish(state1, first_row + 64);
        if constexpr (Stays) {
            warp_arrive(memory.emptied + stage * 8, lane);
            stage = stage + 1 == sizes::stages ? 0 : stage + 1;
            parity ^= stage == 0 ? 1u : 0u;
        }
    }

    __device__ __forceinline__ std::uint32_t half_of_rows(int half) const {
        return memory.rows + static_cast<std::uint32_t>(2 * group + half) * 64 * Dim * 2;
    }
    __device__ __forceinline__ std::uint64_t tile_of(int at) const {
        return describe_k_major(memory.ring + static_cast<std::uint32_t>(at) * sizes::column_bytes);
    }

    /// Takes in the present tile for 64 rows from `first` on.
    __device__ __forceinline__ void absorb(const float (&s)[width], row_state<Pass>& state,
                                           std::int32_t first, std::int32_t column) const {
        const std::int32_t apart = column + 2 * pair - (first + own);
        const std::int32_t left = item.length - (column + 2 * pair);
        const float* const of = memory.bias + stage * sizes::columns + 2 * pair;
        if (item.full(first, 64, column, sizes::columns)) {
            state.template absorb<false, tuning::polynomial>(s, of, constants, apart, left, item.low,
                                                             item.span);
        } else if (item.any(first, 64, column, sizes::columns)) {
            state.template absorb<true, 0>(s, of, constants, apart, left, item.low, item.span);
        }
    }

    /// Takes in part k of Dim / 16 of the present tile, all of whose pairs count.
    __device__ __forceinline__ void absorb_part(const float (&s)[width], row_state<Pass>& state,
                                                int k) const {
        constexpr int steps = Dim / 16;
        if constexpr (tuning::mixed) {
            state.template absorb_part<tuning::polynomial>(
                s, k * (width / 4) / steps, (k + 1) * (width / 4) / steps,
                memory.bias + stage * sizes::columns + 2 * pair, params.exponents.scale);
        }
    }

    /// Adds what 64 rows from `first` on came to, and notes whether some row overflowed; those beyond the
    /// sequence may hold anything.
    __device__ __forceinline__ void finish(row_state<Pass>& state, std::int32_t first) {
        float result[2];
        bool over[2];
        state.reduce(result, over);
        state.clear();
        overflow =
            overflow || (over[0] && first + own < item.length) || (over[1] && first + own + 8 < item.length);
        if (pair == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                add_to_total<Pass>(params, item, totals, first - item.first + own + 8 * r, result[r]);
            }
        }
    }
};

#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
