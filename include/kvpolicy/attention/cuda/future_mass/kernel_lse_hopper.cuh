// The lse's quick pass by wgmma (compute capability 9.0a), a block per item. It shares its agents with
// qk_reduce_hopper_kernel, whose blocks stay. Where items are long and rows are wide it is 3 to 5% faster.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/agent_qk_reduce_consumer.cuh>
#include <kvpolicy/attention/cuda/future_mass/agent_qk_reduce_producer.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_pipeline.cuh>
#include <kvpolicy/attention/cuda/future_mass/row_result.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/tensor_map.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// lse of every query over its causal keys, quick pass: exponents relative to the largest of the row's first
/// tile.
///
/// Grid: items = B * Hq * S / 256, one per block. Block: 384 threads: two consumer warpgroups of 128 rows,
/// one producer. Shared memory: qk_reduce_hopper_sizes<Dim>::shared (dynamic). Reads q [B, Hq, S, Dim] and
/// k [B, Hkv, S, Dim] in T through tensor maps. Overwrites out [B, Hq, S] in fp32 and flags [items]:
/// whether a sum overflowed.
/// 1. Fetch or wait for the rows.
/// 2. Stream or reduce all tiles.
/// 3. Write 256 rows.
template <class T, int Dim>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(384), 1)
    lse_hopper_kernel(const __grid_constant__ qk_reduce_params<T> params,
                      const __grid_constant__ CUtensorMap rows_map,
                      const __grid_constant__ CUtensorMap columns) {
#if KVPOLICY_HOPPER_CODE
    using Pass = lse_pass;
    using sizes = qk_reduce_hopper_sizes<Dim>;
    const qk_reduce_item item =
        qk_reduce_item_of<Pass, sizes::rows, sizes::columns>(params, static_cast<std::int32_t>(blockIdx.x));
    if (item.first >= item.length) {
        if (threadIdx.x == 0) {
            params.flags[blockIdx.x] = 0;
        }
        return;
    }
    const qk_reduce_memory<Dim> memory(dynamic_shared());
    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    memory.template init<1>();
    if (group == 2) {
        give_registers<sizes::alone_producer_registers>();
        if (thread == 0) {
            qk_reduce_producer<T, Dim, Pass>(params, rows_map, columns, memory).run_one(item);
        }
    } else {
        take_registers<sizes::alone_consumer_registers>();
        qk_reduce_consumer<T, Dim, Pass, false> consumer(params, memory, group, thread);
        // 1. Wait for the rows.
        if (item.tiles > 0) {
            barrier_wait(memory.rows_filled, 0);
        }
        // 2. Reduce all tiles.
        consumer.reduce(item, memory.totals, item.tiles);
        if (consumer.overflow) {
            *memory.flag() = 1;
        }
        // 3. Write.
        named_barrier(1, 256);
        // Consumers are the first 256 threads.
        write_total<Pass>(params, item, memory.totals, static_cast<int>(threadIdx.x),
                          static_cast<std::int32_t>(blockIdx.x), memory.flag());
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
