// Parts of a tile of kernel_conv_backward_hopper.cuh, from accumulators to shared memory and from there to
// memory: results of a layer with their slopes, gradients, sums of columns.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/conv/conv_backward_tile.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if KVPOLICY_HOPPER_CODE

/// SiLU and its slope, for 16-bit results.
__device__ inline float conv_silu(float y, float& slope) {
    const float open = fast_reciprocal(1.0f + fast_exp2(-1.4426950408889634f * y));
    slope = open * (1.0f + y * (1.0f - open));
    return y * open;
}

/// Whether two packed numbers have an exponent.
template <class T>
__device__ inline bool finite_pair(std::uint32_t pair) {
    constexpr std::uint32_t exponent = std::is_same_v<T, bf16> ? 0x7f80u : 0x7c00u;
    return (pair & exponent) != exponent && (pair >> 16 & exponent) != exponent;
}

/// The block's sums of columns: of_thread(j, e) is a thread's own sum of column 8 j + 2 (lane % 4) + e;
/// into(c, sum). Begins and ends with a barrier of the consumers.
template <int Width, class Of, class Into>
__device__ inline void sum_conv_columns(float* memory, int thread, const Of& of_thread, const Into& into) {
    named_barrier(1, conv_consumers);
#pragma unroll
    for (int j = 0; j < Width / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sum = of_thread(j, e);
            sum += __shfl_xor_sync(all_lanes, sum, 4);
            sum += __shfl_xor_sync(all_lanes, sum, 8);
            sum += __shfl_xor_sync(all_lanes, sum, 16);
            if (thread % 32 < 4) {
                memory[thread / 32 * Width + 8 * j + thread % 4 * 2 + e] = sum;
            }
        }
    }
    named_barrier(1, conv_consumers);
    if (thread < Width) {
        float sum = 0.0f;
        for (int w = 0; w < conv_consumers / 32; ++w) {
            sum += memory[w * Width + thread];
        }
        into(thread, sum);
    }
}

/// Rows first .. first + Rows - 1 of a tile's channels as an image; 0 for those outside of [begin, end).
template <int Channels, int Rows, class T>
__device__ inline void copy_conv_image(unsigned char* tile, int first, T* image, int begin, int end,
                                       int thread) {
    for (int i = thread; i < Channels / 8 * Rows; i += conv_consumers) {
        const int row = i % Rows;
        uint4 of = make_uint4(0, 0, 0, 0);
        if (row >= begin && row < end) {
            of = conv_eight(tile, first + row, i / Rows * 8);
        }
        reinterpret_cast<uint4*>(image)[i] = of;
    }
}

/// A layer again: y_l and its slope into tiles, from results [64 tokens][channels].
template <int Width, class T>
__device__ inline void store_conv_slopes(float (&acc)[Width / 2], const float* bias, unsigned char* to,
                                         unsigned char* slopes, int thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4;
#pragma unroll
    for (int j = 0; j < Width / 8; ++j) {
        const float2 b = *reinterpret_cast<const float2*>(bias + 8 * j + 2 * pair);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float first, second;
            const float y0 = conv_silu(acc[4 * j + 2 * r] + b.x, first),
                        y1 = conv_silu(acc[4 * j + 2 * r + 1] + b.y, second);
            const std::uint32_t offset = conv_offset(row + 8 * r, 8 * j) + 4 * pair;
            *reinterpret_cast<std::uint32_t*>(to + offset) = pack<T>(y0, y1);
            *reinterpret_cast<std::uint32_t*>(slopes + offset) = pack<T>(first, second);
        }
    }
}
/// The same from [64 channels][tokens].
template <class T, int N>
__device__ inline void store_conv_slopes_transposed(float (&acc)[N], const float* bias, unsigned char* to,
                                                    unsigned char* slopes, int thread, int channel, int row) {
    const int lane = thread % 32;
    channel += thread / 32 % 4 * 16;
    const float b[2] = {bias[channel + lane / 4], bias[channel + lane / 4 + 8]};
    const std::uint32_t at = conv_offset(row + lane / 16 * 8 + lane % 8, channel + lane / 8 % 2 * 8),
                        y = shared_address(to) + at, slope = shared_address(slopes) + at;
#pragma unroll
    for (int j = 0; j < N / 4; j += 2) {
        std::uint32_t of[4], slope_of[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int from = 4 * (j + i / 2) + i % 2 * 2;
            float first, second;
            const float y0 = conv_silu(acc[from] + b[i % 2], first),
                        y1 = conv_silu(acc[from + 1] + b[i % 2], second);
            of[i] = pack<T>(y0, y1);
            slope_of[i] = pack<T>(first, second);
        }
        store_matrices_transposed(y + static_cast<std::uint32_t>(j * 128), of);
        store_matrices_transposed(slope + static_cast<std::uint32_t>(j * 128), slope_of);
    }
}

/// Gradients of layer l after the product [64 tokens][channels]: times the slopes of rows + `shift`, 0 from
/// row `valid` on, into the tile `to`. acc becomes those of rows [begin, end), for the sums of the biases.
template <int Width, class T>
__device__ inline void store_conv_gradients(float (&acc)[Width / 2], const unsigned char* slopes, int shift,
                                            int valid, unsigned char* to, int thread, int begin, int end) {
    const int row = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        const bool there = i < valid, owned = there && i >= begin && i < end;
#pragma unroll
        for (int j = 0; j < Width / 8; ++j) {
            float first = 0.0f, second = 0.0f;
            if (there) {
                shared_tile<T>::load_pair(slopes + conv_offset(i + shift, 8 * j) + 4 * pair, first, second);
                first *= acc[4 * j + 2 * r];
                second *= acc[4 * j + 2 * r + 1];
            }
            *reinterpret_cast<std::uint32_t*>(to + conv_offset(i, 8 * j) + 4 * pair) = pack<T>(first, second);
            acc[4 * j + 2 * r] = owned ? first : 0.0f;
            acc[4 * j + 2 * r + 1] = owned ? second : 0.0f;
        }
    }
}
/// The same of [64 channels][tokens]; of_rows(c, sum) gets the sum of the warpgroup's rows in [begin, end)
/// for each of its channels.
template <class T, int N, class OfRows>
__device__ inline void store_conv_gradients_transposed(const float (&acc)[N], unsigned char* slopes,
                                                       int shift, int valid, unsigned char* to, int thread,
                                                       int channel, int row, int begin, int end,
                                                       const OfRows& of_rows) {
    const int lane = thread % 32, first = row + lane % 4 * 2;
    channel += thread / 32 % 4 * 16;
    row += lane / 16 * 8 + lane % 8;
    const int c = channel + lane / 8 % 2 * 8;
    const std::uint32_t slope = shared_address(slopes) + conv_offset(row + shift, c),
                        d = shared_address(to) + conv_offset(row, c);
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < N / 4; j += 2) {
        std::uint32_t of[4];
        load_matrices_transposed(of, slope + static_cast<std::uint32_t>(j * 128));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int from = 4 * (j + i / 2) + i % 2 * 2, token = first + 8 * (j + i / 2);
            float x, y;
            shared_tile<T>::load_pair(reinterpret_cast<const unsigned char*>(&of[i]), x, y);
            x = token < valid ? x * acc[from] : 0.0f;
            y = token + 1 < valid ? y * acc[from + 1] : 0.0f;
            sums[i % 2] += (token >= begin && token < end ? x : 0.0f) +
                           (token + 1 >= begin && token + 1 < end ? y : 0.0f);
            of[i] = pack<T>(x, y);
        }
        store_matrices_transposed(d + static_cast<std::uint32_t>(j * 128), of);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sums[r] = row_sum(sums[r]);
        if (lane % 4 == 0) {
            of_rows(channel + lane / 4 + 8 * r, sums[r]);
        }
    }
}

#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
