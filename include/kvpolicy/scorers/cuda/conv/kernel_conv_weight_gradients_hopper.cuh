// ConvScorer's gradients of weights on Hopper, from the layers' results and gradients that the tiles of
// kernel_conv_backward_hopper.cuh leave in memory: products over tokens, d W_l[tap] = y_{l-1}[. + tap]^T d
// y_l. There tokens are k, so a tap is again the same tile begun further on.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/conv/conv_backward_tile.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int conv_gradient_stages = 3;
template <int Width>
inline constexpr std::uint32_t conv_gradient_bytes = 64 * conv_back_inputs * 2 + Width* conv_back_rows * 2;
template <int Width>
inline constexpr std::size_t conv_gradient_shared = conv_gradient_stages*(conv_gradient_bytes<Width> +
                                                                          2 * sizeof(std::uint64_t));

/// Partial sums over tiles of d W[tap] = in[. + shift + 2 tap]^T d on Hopper.
/// Grid: splits x heads x ceil(inputs / 64), the inputs first. Block: three warpgroups, one per tap, and a
/// warp that loads. Shared memory: conv_gradient_shared<Width>, 3 stages.
/// In: d [tiles, Width / 8, 112, 8] T, in [tiles, inputs / 8, 120, 8] T, both of conv_backward_hopper_kernel.
/// Out: partial [splits, heads, padded, 3, padded_inputs] fp32, overwritten.
/// 1. Barriers.
/// 2. The loading warp copies the tiles of the block's part, three ahead.
/// 3. Each warpgroup multiplies its tap, accumulated in fp32.
/// 4. The accumulators go to `partial`.
template <class T, int Width>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(3 * 128 + 32))
    conv_weight_gradients_hopper_kernel([[maybe_unused]] const scorer_streams streams,
                                        [[maybe_unused]] const T* const d, [[maybe_unused]] const T* const in,
                                        [[maybe_unused]] const std::int32_t inputs,
                                        [[maybe_unused]] const std::int32_t shift,
                                        [[maybe_unused]] const std::int32_t splits,
                                        [[maybe_unused]] const std::int32_t padded,
                                        [[maybe_unused]] const std::int32_t padded_inputs,
                                        [[maybe_unused]] float* const partial) {
#if KVPOLICY_HOPPER_CODE
    constexpr std::uint32_t in_bytes = 64 * conv_back_inputs * 2, d_bytes = Width * conv_back_rows * 2;
    const std::uint32_t data = shared_address(dynamic_shared()),
                        barriers = data + conv_gradient_stages * conv_gradient_bytes<Width>;
    const auto full = [&](int i) { return barriers + static_cast<std::uint32_t>(8 * i); };
    const auto empty = [&](int i) {
        return barriers + static_cast<std::uint32_t>(8 * (conv_gradient_stages + i));
    };
    // 1. Barriers, and the place of the block.
    if (threadIdx.x == 0) {
        for (int i = 0; i < conv_gradient_stages; ++i) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), 12 * arrivals_of_warp);
        }
        barrier_init_fence();
    }
    __syncthreads();
    auto item = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t parts = (inputs + 63) / 64, part = item % parts;
    item /= parts;
    const std::int32_t h = item % streams.heads, split = item / streams.heads;
    const std::int32_t tiles = streams.batch * streams.chunks, each = (tiles + splits - 1) / splits,
                       last = min(tiles, (split + 1) * each);
    int stage = 0;
    std::uint32_t parity = 0;
    const auto for_each_tile = [&](const auto& visit) {
        for (std::int32_t i = split * each; i < last; ++i) {
            const std::int64_t tile =
                (std::int64_t{i / streams.chunks} * streams.heads + h) * streams.chunks + i % streams.chunks;
            if (conv_backward_span(streams, tile).any) {
                visit(tile);
                if (++stage == conv_gradient_stages) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
    };
    const auto warpgroup = static_cast<int>(threadIdx.x) / 128;
    // 2. The loading warp.
    if (warpgroup == 3) {
        if (threadIdx.x == 3 * 128) {
            // Channels that the inputs lack stay as they are in shared memory: their sums are never read.
            const auto there = static_cast<std::uint32_t>(min(64, inputs - part * 64) * conv_back_inputs * 2);
            for_each_tile([&](std::int64_t tile) {
                const std::uint32_t to =
                    data + static_cast<std::uint32_t>(stage) * conv_gradient_bytes<Width>;
                barrier_wait(empty(stage), parity ^ 1);
                barrier_expect(full(stage), there + d_bytes);
                copy_bulk(to, in + (tile * inputs + part * 64) * conv_back_inputs, there, full(stage));
                copy_bulk(to + in_bytes, d + tile * Width * conv_back_rows, d_bytes, full(stage));
            });
        }
        return;
    }
    // 3. A tap per warpgroup.
    float acc[Width / 2];
#pragma unroll
    for (float& sum : acc) {
        sum = 0.0f;
    }
    pin(acc);
    int before = -1;
    for_each_tile([&](std::int64_t) {
        const std::uint32_t from = data + static_cast<std::uint32_t>(stage) * conv_gradient_bytes<Width>;
        barrier_wait(full(stage), parity);
        const std::uint64_t x = describe_rows(from + static_cast<std::uint32_t>((shift + 2 * warpgroup) * 16),
                                              conv_back_inputs * 16),
                            d_y = describe_rows(from + in_bytes, conv_back_rows * 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < conv_back_rows; k += 16) {
            wgmma<T, 1, 1>(acc, x + static_cast<std::uint64_t>(k), d_y + static_cast<std::uint64_t>(k), 1);
        }
        wgmma_commit();
        if (before >= 0) {
            wgmma_wait<1>();
            warp_arrive(empty(before), lane_id());
        }
        before = stage;
    });
    wgmma_wait<0>();
    pin(acc);
    // Row m of the sums is channel 64 part + m of the inputs, column n of the results.
    // 4. To `partial`.
    float* const to = partial + (std::int64_t{split} * streams.heads + h) * padded * 3 * padded_inputs;
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < Width / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const std::int32_t n = 8 * j + lane % 4 * 2 + e % 2,
                               c = part * 64 + warp_id() % 4 * 16 + lane / 4 + 8 * (e / 2);
            if (n < padded && c < padded_inputs) {
                to[(std::int64_t{n} * 3 + warpgroup) * padded_inputs + c] = acc[4 * j + e];
            }
        }
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
