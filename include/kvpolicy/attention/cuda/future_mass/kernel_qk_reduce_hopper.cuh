// The qk_reduce pass by wgmma (compute capability 9.0a): bf16 and fp16, head_dim up to 256.
//
// A block stays and takes one item of 256 rows after another; the next item's rows and first tiles come while
// the last tiles of an item are reduced.
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

/// Columns that a block of qk_reduce_bias_kernel makes the biases of.
inline constexpr std::int32_t bias_columns = 2048;

/// bias = shift + of_lse * lse of every column, -inf where it must not count. Also sets *next = 0.
///
/// Grid: B * Hc * bias_stride / bias_columns. Block: 256. Shared memory: none. Reads lse [B, Hc, S], fp32.
/// Overwrites bias [B, Hc, bias_stride], fp32.
template <class T>
__global__ void __launch_bounds__(256) qk_reduce_bias_kernel(const qk_reduce_params<T> params) {
    const std::int64_t blocks = (params.bias_stride + bias_columns - 1) / bias_columns;
    const std::int64_t row = blockIdx.x / blocks;
    const std::int64_t b = row / params.columns.heads;
    const std::int64_t head = row % params.columns.heads;
    const std::int64_t first = blockIdx.x % blocks * bias_columns;
    const std::int64_t end =
        first + bias_columns < params.bias_stride ? first + bias_columns : params.bias_stride;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *params.next = 0;
    }
    const std::int32_t length = params.length_of(b);
    const float* const lse = params.lse_of(b, head);
    float* const bias = params.bias + params.bias_row(b, head);
    for (std::int64_t i = first + threadIdx.x; i < end; i += blockDim.x) {
        bias[i] = qk_reduce_bias(params, lse, static_cast<std::int32_t>(i), length);
    }
}

#if KVPOLICY_HOPPER_CODE
/// Items that the producer announces, one after the other, by one of the two consumer warpgroups.
template <class T, int Dim, class Pass>
__device__ __forceinline__ void consume_items(const qk_reduce_params<T>& params,
                                              const qk_reduce_memory<Dim>& memory, int group, int thread) {
    using sizes = qk_reduce_hopper_sizes<Dim>;
    qk_reduce_consumer<T, Dim, Pass, true> consumer(params, memory, group, thread);
    for (std::uint32_t n = 0;; ++n) {
        // 1. Wait for the rows, or for the news that there are no more.
        barrier_wait(memory.rows_filled, n & 1);
        taken_item& its = memory.taken()[n & 1];
        if (its.number < 0) {
            break;
        }
        // 2. Reduce all tiles.
        float* const totals = memory.totals + (n & 1) * sizes::rows;
        consumer.reduce(its.item, totals, its.item.tiles * params.streams);
        if constexpr (Pass::quick) {
            if (consumer.overflow) {
                its.overflow = 1;
            }
        }
        // 3. Write.
        named_barrier(1, 256);
        // Consumers are the first 256 threads. What a thread resets here is used again after the next item's
        // barrier.
        const int row = static_cast<int>(threadIdx.x);
        write_total<Pass>(params, consumer.item, totals, row, its.number, &its.overflow);
        totals[row] = -INFINITY;
        if (Pass::quick && row == 0) {
            its.overflow = 0;
        }
    }
}
#endif

/// qk_reduce by wgmma and TMA: every row reduces the exponentials of its logits over its interval of columns.
///
/// Grid: as many blocks as fit; each takes items of 256 rows out of `count`. Block: 384 threads: two consumer
/// warpgroups of 128 rows, one producer. Shared memory: qk_reduce_hopper_sizes<Dim>::shared (dynamic;
/// qk_reduce_memory). Reads rows [B, Hr, S, Dim] and columns [B, Hc, S, Dim] in T through tensor maps, bias
/// (a mass), flags (a careful pass). Overwrites out [B, Hr, S] in fp32 and, in a quick pass, flags [items]:
/// whether a sum overflowed. Adds to *next.
/// Producer (agent_qk_reduce_producer.cuh):
/// 1. Take an item.
/// 2. Fetch its rows.
/// 3. Stream its tiles.
/// Consumers (agent_qk_reduce_consumer.cuh):
/// 1. Wait for the rows.
/// 2. Reduce all tiles.
/// 3. Write 256 rows.
template <class T, int Dim, class Pass>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(384), 1)
    qk_reduce_hopper_kernel(const __grid_constant__ qk_reduce_params<T> params,
                            const __grid_constant__ CUtensorMap rows_map,
                            const __grid_constant__ CUtensorMap columns, const std::int32_t count) {
#if KVPOLICY_HOPPER_CODE
    using sizes = qk_reduce_hopper_sizes<Dim>;
    if constexpr (Pass::reduce == row_reduce::running) {
        if (!some_overflowed(params, count)) {
            return;
        }
    }
    const qk_reduce_memory<Dim> memory(dynamic_shared());
    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    memory.template init<2>();
    if (group == 2) {
        give_registers<sizes::producer_registers>();
        if (thread == 0) {
            qk_reduce_producer<T, Dim, Pass>(params, rows_map, columns, memory).run(count);
        }
    } else {
        take_registers<sizes::consumer_registers>();
        consume_items<T, Dim, Pass>(params, memory, group, thread);
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
