// The inputs of a convolution's tile on Hopper: keys and values as they lie in memory are copied into the
// tile while something else is computed, and RoPE is undone there.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>
#include <kvpolicy/scorers/cuda/conv/conv_weights.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if KVPOLICY_HOPPER_CODE

/// Undoes RoPE of two columns and those that their sines are shared with, by angles of up to
/// max_quick_angle.
template <class T>
__device__ inline void turn_conv_pair(std::uint32_t& low, std::uint32_t& high, float position, float first,
                                      float second) {
    float x0, x1, y0, y1, sine, cosine;
    shared_tile<T>::load_pair(reinterpret_cast<const unsigned char*>(&low), x0, x1);
    shared_tile<T>::load_pair(reinterpret_cast<const unsigned char*>(&high), y0, y1);
    rope_sine_quick(position * first, sine, cosine);
    const float low0 = x0 * cosine + y0 * sine, high0 = y0 * cosine - x0 * sine;
    rope_sine_quick(position * second, sine, cosine);
    low = pack<T>(low0, x1 * cosine + y1 * sine);
    high = pack<T>(high0, y1 * cosine - x1 * sine);
}

/// Whether rows may come by begin_conv_rows(): the source turns_eight(), angles of tokens first to last are
/// products in fp32, and none is beyond max_quick_angle. By the whole block of conv_consumers threads.
template <class T, class Rows>
__device__ inline bool turns_conv_rows(const scorer_source<T>& source, const float* frequencies,
                                       const Rows& rows, std::int32_t first, std::int32_t last, int thread) {
    const position_t farthest = max(llabs(rows.position(first)), llabs(rows.position(last)));
    bool far = farthest > max_fp32_position;
    for (int i = thread; i < source.rotated / 2; i += conv_consumers) {
        far = far || !(static_cast<float>(farthest) * fabsf(frequencies[i]) <= max_quick_angle);
    }
    return source.turns_eight() && __syncthreads_or(far ? 1 : 0) == 0;
}

/// Sends for rows [begin, 132) of x of a tile whose row 0 is token t0, as they lie in memory
/// (turns_conv_rows): what the rows lack (tokens before the stream's begin, and behind its end) becomes 0.
/// finish_conv_rows() waits.
template <int Inputs, class T, class Rows>
__device__ inline void begin_conv_rows(const scorer_source<T>& source, const Rows& rows, std::int32_t t0,
                                       int begin, unsigned char* to, int thread) {
    // Eight neighbors take two columns of four rows: whole sectors of memory, and all banks of the tile.
    constexpr int across = Inputs / 16, step = conv_consumers / (Inputs / 8);
    const int c = (thread % 2 + thread / 8 % across * 2) * 8,
              first = begin + thread / 2 % 4 + thread / (8 * across) * 4;
    const bool there = c < source.size, of_key = c < source.k.dim;
    const std::int32_t column = of_key ? c : c - source.k.dim;
    auto path = rows.path_from(of_key, t0 + first, step);
    std::uint32_t data = shared_address(to) + conv_offset(first, c);
    for (int row = first; row < conv_input_rows; row += step, data += 16 * step) {
        const bool in = there && rows.in(t0 + row);
        const T* const from = path(t0 + row, in);
        // Nothing is read where nothing is there, but the address must be one.
        copy_16(data, in ? from + column : source.k.data, in ? 16 : 0);
    }
    copy_commit();
}

/// Undoes RoPE of columns c to c + 7 of a row, and of those that a sine is shared with, where
/// begin_conv_rows() has brought them. `frequencies` are source.frequencies, wherever they are, at a multiple
/// of 16 bytes.
template <class T>
__device__ inline void turn_conv_row(const scorer_source<T>& source, const float* frequencies, float position,
                                     int row, int c, unsigned char* tile) {
    auto *const low = reinterpret_cast<uint4*>(tile + conv_offset(row, c)),
                *const high = reinterpret_cast<uint4*>(tile + conv_offset(row, c + source.rotated / 2));
    const float4 slow = *reinterpret_cast<const float4*>(frequencies + c),
                 fast = *reinterpret_cast<const float4*>(frequencies + c + 4);
    uint4 x = *low, y = *high;
    turn_conv_pair<T>(x.x, y.x, position, slow.x, slow.y);
    turn_conv_pair<T>(x.y, y.y, position, slow.z, slow.w);
    turn_conv_pair<T>(x.z, y.z, position, fast.x, fast.y);
    turn_conv_pair<T>(x.w, y.w, position, fast.z, fast.w);
    *low = x;
    *high = y;
}

/// x of such a tile, all of it, number by number. Not inlined: it would take registers from products.
template <int Inputs, class T, class Rows>
__device__ __noinline__ void load_conv_rows(const scorer_source<T>& source, const Rows& rows, std::int32_t t0,
                                            int begin, unsigned char* to, int thread) {
    for (int i = thread + begin * (Inputs / 8); i < conv_input_rows * (Inputs / 8); i += conv_consumers) {
        const int row = i / (Inputs / 8), c = i % (Inputs / 8) * 8;
        float x[8] = {};
        if (rows.in(t0 + row)) {
            const T *const key = rows.key(t0 + row), *const value = rows.value(t0 + row);
            const position_t position = rows.position(t0 + row);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                x[e] = c + e < source.size ? source.turned_number(key, value, position, c + e) : 0.0f;
            }
        }
        *reinterpret_cast<uint4*>(to + conv_offset(row, c)) =
            make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
    }
}

/// What begin_conv_rows() has sent for, before RoPE: a warp turns eight columns of 32 rows at once. The block
/// waits at a barrier before it reads the tile.
template <class T, class Rows>
__device__ inline void finish_conv_rows(const scorer_source<T>& source, const float* frequencies,
                                        const Rows& rows, std::int32_t t0, int begin, unsigned char* to,
                                        int thread) {
    copy_wait<0>();
    if (source.rotated == 0) {
        return;
    }
    named_barrier(1, conv_consumers);  // others have copied what this thread turns
    for (int c = thread / 32 * 8; c < source.rotated / 2; c += conv_consumers / 32 * 8) {
#pragma unroll 2
        for (int row = begin + thread % 32; row < conv_input_rows; row += 32) {
            turn_conv_row(source, frequencies, rows.position_in_fp32(t0 + row), row, c, to);
        }
    }
}

#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
