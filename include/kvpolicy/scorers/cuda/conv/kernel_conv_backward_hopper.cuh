// ConvScorer's gradients of weights on Hopper. A block has the tile of kernel_conv_hopper.cuh: the layers
// again, and back through them (agent_conv_backward_hopper.cuh). All that the gradients of a tile need,
// scores of the neighbors too, it computes itself, so that every gradient is there once and whole
// (conv_backward_tile.cuh).
//
// x, y_1, y_2 and the gradients before activations go to memory, a tile after the other, in the layout of the
// tiles in shared memory. Gradients of weights are products over tokens of these
// (kernel_conv_weight_gradients_hopper.cuh).
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/conv/agent_conv_backward_hopper.cuh>
#include <kvpolicy/scorers/cuda/conv/conv_backward_tile.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_hopper.cuh>

#include <cstddef>
#include <cstdint>
#include <new>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Weights of layers 3 and 2, transposed and with the taps reversed, in the order in which threads load them.
/// Grid: strided. Block: 256 threads, eight numbers each. Shared memory: none.
/// In: from (fp32 weights of all heads).
/// Out: to [heads, conv_backward_hopper_shape::weights] T (W_3, then W_2), overwritten.
template <class T, int Inputs>
__global__ void __launch_bounds__(256) pack_conv_backward_kernel(const conv_weights from, T* const to) {
    using shape = conv_backward_hopper_shape<Inputs>;
    constexpr std::uint32_t third = shape::third / 8, each = shape::weights / 8;
    const std::uint32_t count = static_cast<std::uint32_t>(from.heads) * each;
    for (std::uint32_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
        const std::uint32_t h = i / each, at = i % each;
        reinterpret_cast<uint4*>(to)[i] = at < third
                                              ? conv_backward_weights<3, shape, T>(from, h, at)
                                              : conv_backward_weights<2, shape, T>(from, h, at - third);
    }
}

/// Reports tokens that are not finite and that no score reads; the other tokens are checked where they are
/// read.
/// Grid: a block per tile of conv_backward_tile_rows tokens. Block: 128 threads. Shared memory: none.
/// Out: status_not_finite in streams.status, by atomic or.
template <class T>
__global__ void __launch_bounds__(128) conv_unread_kernel(const conv_params<T> params) {
    const conv_backward_span span(params.streams, blockIdx.x);
    scorer_span s = span.s;
    const std::int32_t end = s.first + s.count;
    s.first = max(s.first, max(s.begin, span.highest));
    s.count = end - s.first;
    report_bad_rows(params.streams, params.source, s);
}

/// The backward pass of ConvScorer on Hopper: the layers of a tile again and back through them. No dropout.
/// Grid: a block per tile of conv_backward_tile_rows tokens. Block: conv_consumers threads, two warpgroups;
/// two blocks per SM. Shared memory: conv_backward_hopper_shape<Inputs>::shared_bytes.
/// In: params.forward, d_scores [B, heads, S] fp32; weights [heads] of pack_conv_kernel, back of
/// pack_conv_backward_kernel.
/// Out, all overwritten: in[3] (x, y_1, y_2) [tiles, channels / 8, 120, 8] T, d[3] (d y_1 to d y_3) [tiles,
/// channels / 8, 112, 8] T, sums [tiles, sums_width] fp32. A tile without a score writes zeros to its sums.
/// 1. d score and x of the tile; x goes to memory.
/// 2. Layer 1: y_1 and its slope.
/// 3. Layer 2: y_2 and its slope; y_1 goes to memory.
/// 4. Layer 3, down to d y_3; y_2 goes to memory.
/// 5. d y_2; d y_3 goes to memory.
/// 6. d y_1; d y_2 and d y_1 go to memory. Each result takes the place of the one before in the tile.
template <class T, int Inputs>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(conv_consumers), 2) conv_backward_hopper_kernel(
    [[maybe_unused]] const __grid_constant__ conv_backward_hopper_params<T> params,
    [[maybe_unused]] const T* const weights, [[maybe_unused]] const T* const back) {
#if KVPOLICY_HOPPER_CODE
    using shape = conv_backward_hopper_shape<Inputs>;
    const std::int64_t number = blockIdx.x;
    // In shared memory: in registers it would leave too few for the products.
    __shared__ alignas(conv_backward_span) unsigned char span_memory[sizeof(conv_backward_span)];
    if (threadIdx.x == 0) {
        new (static_cast<void*>(span_memory)) conv_backward_span(params.forward.streams, number);
    }
    __syncthreads();
    const auto& span = *reinterpret_cast<const conv_backward_span*>(span_memory);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (!span.any) {
        for (std::int32_t i = thread; i < params.sums_width; i += conv_consumers) {
            params.sums[number * params.sums_width + i] = 0.0f;
        }
        return;
    }
    conv_backward_hopper_memory memory{};
    memory.tile = dynamic_shared();
    memory.narrow = memory.tile + shape::tile_bytes(0);
    memory.back_narrow = memory.narrow + 2 * shape::narrow;
    memory.constants = reinterpret_cast<float*>(memory.back_narrow + 2 * shape::back_narrow);
    memory.frequencies = memory.constants + shape::constants;
    memory.columns = memory.frequencies + shape::frequencies;
    memory.d_score = memory.columns + shape::columns;
    const T *const of_head = weights + std::int64_t{span.s.h} * shape::weights_before(4),
                   *const back_of_head = back + std::int64_t{span.s.h} * shape::weights;
    copy_conv_weights(of_head + shape::weights_before(shape::first_narrow), shape::narrow, memory.narrow,
                      thread);
    copy_conv_weights(back_of_head, shape::back_narrow, memory.back_narrow, thread);
    copy_conv_constants<Inputs>(params.forward, span.s.h, memory.constants, weights, thread);
    conv_backward_hopper_agent<Inputs, T>(params, span, number, of_head, back_of_head, memory).run();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
