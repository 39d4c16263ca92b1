// The inputs of a convolution's tile on Hopper: keys and values as they lie in memory are copied into the tile while something else is
// computed, and RoPE is undone there.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/conv_weights.cuh>
#include <kvpolicy/cuda/blocks/mma.cuh>
#include <kvpolicy/cuda/blocks/scorer_problem.cuh>
#include <kvpolicy/cuda/blocks/scorer_tile.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if KVPOLICY_HOPPER_CODE

/// Undoes RoPE of two columns and those that their sines are shared with.
template <class T, bool Quick>
__device__ inline void turn_conv_pair(std::uint32_t& low, std::uint32_t& high, float position, float first,
                                      float second) {
    float x0, x1, y0, y1, sine, cosine;
    shared_tile<T>::load_pair(reinterpret_cast<const unsigned char*>(&low), x0, x1);
    shared_tile<T>::load_pair(reinterpret_cast<const unsigned char*>(&high), y0, y1);
    const auto sines = [&](float frequency) {
        if constexpr (Quick) {
            rope_sine_quick(position * frequency, sine, cosine);
        } else {
            rope_sine<T>(position * frequency, sine, cosine);
        }
    };
    sines(first);
    const float low0 = x0 * cosine + y0 * sine, high0 = y0 * cosine - x0 * sine;
    sines(second);
    low = pack<T>(low0, x1 * cosine + y1 * sine);
    high = pack<T>(high0, y1 * cosine - x1 * sine);
}

/// Sends for rows [begin, 132) of x of a tile whose row 0 is token t0, as they lie in memory, where the source turns_eight(): what the rows
/// lack (tokens before the stream's begin, and behind its end) becomes 0. finish_conv_rows() waits.
template <int Inputs, class T, class Rows>
__device__ inline void begin_conv_rows(const scorer_source<T>& source, const Rows& rows, std::int32_t t0,
                                       int begin, unsigned char* to, int thread) {
    // Eight neighbours take two columns of four rows: whole sectors of memory, and all banks of the tile.
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

/// x of such a tile, all of it where the source does not turns_eight(); else what begin_conv_rows() has sent for, before RoPE. `frequencies` are
/// source.frequencies, wherever they are. The block waits at a barrier before it reads the tile.
template <int Inputs, class T, class Rows>
__device__ inline void finish_conv_rows(const scorer_source<T>& source, const float* frequencies,
                                        const Rows& rows, std::int32_t t0, int begin, unsigned char* to,
                                        int thread) {
    copy_wait<0>();
    if (!source.turns_eight()) {
        for (int i = thread + begin * (Inputs / 8); i < conv_input_rows * (Inputs / 8); i += conv_consumers) {
            const int row = i / (Inputs / 8), c = i % (Inputs / 8) * 8;
            float x[8] = {};
            if (rows.in(t0 + row)) {
                const T *const key = rows.key(t0 + row), *const value = rows.value(t0 + row);
                const float position = rows.position(t0 + row);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    x[e] = c + e < source.size ? source.turned_number(key, value, position, c + e) : 0.0f;
                }
            }
            *reinterpret_cast<uint4*>(to + conv_offset(row, c)) = make_uint4(
                pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
        }
        return;
    }
    if (source.rotated == 0) {
        return;
    }
    named_barrier(1, conv_consumers);  // others have copied what this thread turns
    // A warp turns eight columns, and those that a sine is shared with, a row a lane.
    for (int c = thread / 32 * 8; c < source.rotated / 2; c += conv_consumers / 32 * 8) {
        float frequency[8], largest = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            frequency[e] = frequencies[c + e];
            largest = fmaxf(largest, fabsf(frequency[e]));
        }
#pragma unroll 2
        for (int row = begin + thread % 32; row < conv_input_rows; row += 32) {
            auto *const low = reinterpret_cast<uint4*>(to + conv_offset(row, c)),
                        *const high = reinterpret_cast<uint4*>(to + conv_offset(row, c + source.rotated / 2));
            const float position = rows.position(t0 + row);
            if (fabsf(position) * largest <= most_quick_angle) {
                uint4 x = *low, y = *high;
                turn_conv_pair<T, true>(x.x, y.x, position, frequency[0], frequency[1]);
                turn_conv_pair<T, true>(x.y, y.y, position, frequency[2], frequency[3]);
                turn_conv_pair<T, true>(x.z, y.z, position, frequency[4], frequency[5]);
                turn_conv_pair<T, true>(x.w, y.w, position, frequency[6], frequency[7]);
                *low = x;
                *high = y;
            } else {
#pragma unroll 1
                for (int e = 0; e < 8; e += 2) {
                    turn_conv_pair<T, false>(reinterpret_cast<std::uint32_t*>(low)[e / 2],
                                             reinterpret_cast<std::uint32_t*>(high)[e / 2], position,
                                             frequencies[c + e], frequencies[c + e + 1]);
                }
            }
        }
    }
}

/// Both at once.
template <int Inputs, class T, class Rows>
__device__ inline void load_conv_rows(const scorer_source<T>& source, const float* frequencies,
                                      const Rows& rows, std::int32_t t0, int begin, unsigned char* to,
                                      int thread) {
    if (source.turns_eight()) {
        begin_conv_rows<Inputs>(source, rows, t0, begin, to, thread);
    }
    finish_conv_rows<Inputs>(source, frequencies, rows, t0, begin, to, thread);
}

#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
