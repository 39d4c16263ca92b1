// The lse's quick pass by wgmma (compute capability 9.0a), a block an item: as qk_reduce_hopper_kernel, whose blocks stay. Where items are
// long, and rows are wide, it is 3 to 5% faster.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/agent_row_reduce.cuh>
#include <kvpolicy/attention/cuda/future_mass/kernel_qk_reduce_hopper.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/row_result.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/cuda/tensor_map.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One block an item.
template <class T, int Dim>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(384), 1)
    lse_hopper_kernel(const __grid_constant__ qk_reduce_params<T> params,
                      const __grid_constant__ CUtensorMap rows_map,
                      const __grid_constant__ CUtensorMap columns) {
#if KVPOLICY_HOPPER_CODE
    using Pass = lse_pass;
    using sizes = qk_reduce_hopper_sizes<Dim>;
    using tuning = qk_reduce_hopper_tuning<Dim, Pass>;
    const qk_reduce_item item =
        qk_reduce_item_of<Pass, sizes::rows, sizes::columns>(params, static_cast<std::int32_t>(blockIdx.x));
    if (item.first >= item.length) {
        if (threadIdx.x == 0) {
            params.flags[blockIdx.x] = 0;
        }
        return;
    }
    unsigned char* shared = dynamic_shared();
    shared += (1024 - shared_address(shared) % 1024) % 1024;
    const std::uint32_t rows = shared_address(shared);
    const std::uint32_t ring = rows + sizes::row_bytes;
    float* const totals = reinterpret_cast<float*>(shared + sizes::totals);
    const std::uint32_t filled = rows + sizes::barriers;
    const std::uint32_t emptied = filled + sizes::stages * 8;
    const std::uint32_t rows_filled = emptied + sizes::stages * 8;
    int* const flag = reinterpret_cast<int*>(shared + sizes::taken);

    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < sizes::stages; ++i) {
            barrier_init(filled + i * 8, 1);
            barrier_init(emptied + i * 8, 8 * arrivals_of_warp);
        }
        barrier_init(rows_filled, 1);
        *flag = 0;
        barrier_init_fence();
    }
    if (threadIdx.x < sizes::rows) {
        totals[threadIdx.x] = -INFINITY;
    }
    __syncthreads();

    const std::int32_t turns = item.tiles;
    if (group == 2) {  // the producer
        give_registers<sizes::alone_producer_registers>();
        if (thread == 0) {
            const std::int32_t head = params.column_head(item.head, 0);
            int stage = 0;
            std::uint32_t parity = 1;
            if (turns > 0) {
                barrier_expect(rows_filled, sizes::row_bytes);
                fetch_row_tiles<Dim>(rows, rows_map, item, rows_filled);
            }
            for (std::int32_t turn = 0; turn < turns; ++turn) {
                const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, turn);
                const std::uint32_t full = filled + static_cast<std::uint32_t>(stage) * 8;
                barrier_wait(emptied + static_cast<std::uint32_t>(stage) * 8, parity);
                barrier_expect(full, sizes::column_bytes);
                fetch_column_tiles<Dim>(ring + static_cast<std::uint32_t>(stage) * sizes::column_bytes,
                                        columns, column, head, item.b, full);
                if (++stage == sizes::stages) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
    } else {
        take_registers<sizes::alone_consumer_registers>();
        const int lane = thread % 32;
        const qk_reduce_thread place{lane % 4, thread / 32 * 16 + lane / 4};
        const row_constants constants = constants_of(params.exponents);
        const std::int32_t first_row = item.first + 128 * group;
        const qk_operand_rows<Dim, false> a0(rows + static_cast<std::uint32_t>(2 * group) * 64 * Dim * 2);
        const qk_operand_rows<Dim, false> a1(rows + static_cast<std::uint32_t>(2 * group + 1) * 64 * Dim * 2);
        constexpr int width = sizes::columns / 2;
        float s0[width], s1[width];
        row_state<Pass> state0, state1;
        state0.clear();
        state1.clear();
        bool overflow = false;

        const auto tile_of = [&](int stage) {
            return describe_k_major(ring + static_cast<std::uint32_t>(stage) * sizes::column_bytes);
        };
        const auto reduce = [&](const float(&s)[width], row_state<Pass>& state, std::int32_t first,
                                std::int32_t column) {
            reduce_tile<Dim>(s, state, item, place, constants, first, column, nullptr, 0);
        };
        // Most tiles: exponents go as they are, and all pairs count. `next` is multiplied beside the reduction of s.
        const auto is_plain = [&](std::int32_t column) {
            return constants.cap == 0.0f && column != 0 && item.full(first_row, 128, column, sizes::columns);
        };
        const auto reduce_beside = [&](const float(&s)[width], row_state<Pass>& state, float(&next)[width],
                                       const qk_operand_rows<Dim, false>& a, std::uint64_t b) {
            constexpr int steps = Dim / 16;
            qk_products<T>(next, a, b, [&](int k) {
                state.template absorb_part<tuning::polynomial>(s, k * (width / 4) / steps,
                                                               (k + 1) * (width / 4) / steps, nullptr,
                                                               params.exponents.scale);
            });
            wgmma_wait<0>();
            pin(next);
        };
        const auto finish = [&](row_state<Pass>& state, std::int32_t first) {
            finish_rows<Pass>(params, item, place, state, first, totals, overflow);
        };

        int stage = 0;
        std::uint32_t parity = 0;
        if (turns > 0) {
            barrier_wait(rows_filled, 0);
            barrier_wait(filled, 0);
            qk_products<T>(s0, a0, tile_of(0));
            wgmma_wait<0>();
            pin(s0);
            // At the head of the loop s0 is done and nothing is under way: ptxas takes products that cross its edge apart.
            for (std::int32_t turn = 1; turn < turns; ++turn) {
                const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, turn - 1);
                const int next = stage + 1 == sizes::stages ? 0 : stage + 1;
                parity ^= next == 0 ? 1u : 0u;
                if (is_plain(column)) {
                    reduce_beside(s0, state0, s1, a1, tile_of(stage));
                    barrier_wait(filled + next * 8, parity);
                    reduce_beside(s1, state1, s0, a0, tile_of(next));
                    warp_arrive(emptied + stage * 8, lane);
                    stage = next;
                    continue;
                }
                qk_products<T>(s1, a1, tile_of(stage));
                reduce(s0, state0, first_row, column);
                barrier_wait(filled + next * 8, parity);
                qk_products<T>(s0, a0, tile_of(next));
                wgmma_wait<1>();
                pin(s1);
                reduce(s1, state1, first_row + 64, column);
                warp_arrive(emptied + stage * 8, lane);
                wgmma_wait<0>();
                pin(s0);
                stage = next;
            }
            const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, turns - 1);
            qk_products<T>(s1, a1, tile_of(stage));
            reduce(s0, state0, first_row, column);
            finish(state0, first_row);
            wgmma_wait<0>();
            pin(s1);
            reduce(s1, state1, first_row + 64, column);
            finish(state1, first_row + 64);
        }
        if (overflow) {
            *flag = 1;
        }
        named_barrier(1, 256);
        // Consumers are the first 256 threads.
        write_total<Pass>(params, item, totals, static_cast<int>(threadIdx.x),
                          static_cast<std::int32_t>(blockIdx.x), flag);
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
