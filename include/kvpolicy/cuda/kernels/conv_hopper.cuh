// ConvScorer's scores on Hopper: the three layers of a tile of tokens in one block, as implicit matrix products by wgmma.
//
// A block scores up to 120 tokens of one head, two warpgroups of 64 rows each. Row i of x is token first - 6 + i, of layer l token
// first - 6 + 2 l + i, so a layer's row i needs rows i, i + 2, i + 4 of the one before, one for each tap: all taps are products with the same
// tile, begun two rows further on, and their sums stay in registers. For that tiles are not swizzled: eight columns of all rows, then the
// next eight (describe_columns), where a product may begin at any row. Rows behind the 128 of a layer hold anything, and reach none of
// the 120 that are looked at. A block goes through a range of tokens, and keeps the last four rows of x and of each layer: so all tiles but the first have
// 128 tokens, whose rows stand behind those four.
//
// Weights lie in the workspace as products read them, [tap * inputs + c][width][8 of c], and come through a ring of bulk copies that one warp
// issues. x is read once; layer 1 takes its place in shared memory, so that two blocks fit on a multiprocessor: one loads, undoes RoPE or
// applies SiLU while the other multiplies.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/conv_weights.cuh>
#include <kvpolicy/cuda/blocks/mma.cuh>
#include <kvpolicy/cuda/blocks/scorer_problem.cuh>
#include <kvpolicy/cuda/blocks/scorer_tile.cuh>
#include <kvpolicy/cuda/blocks/wgmma.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/kernels/conv_scorer.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// pack_conv(), and the frequencies of a Rope that gives a base, where there is room for them.
template <class T, int Inputs>
__global__ void __launch_bounds__(256)
    pack_conv_kernel(const conv_weights from, T* const to, const float base, const std::int32_t rotated,
                     float* const frequencies) {
    let_next_kernel_start();
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (frequencies != nullptr && blockIdx.x == 0) {
        for (std::int32_t i = thread; i < rotated / 2; i += 256) {
            frequencies[i] = rope_frequency<float>(base, i, rotated);
        }
    }
    pack_conv<Inputs>(from, to, std::int64_t{blockIdx.x} * 256 + thread, std::int64_t{gridDim.x} * 256);
}

#if KVPOLICY_HOPPER_CODE

/// y sigmoid(y) = y / 2 + y / 2 tanh(y / 2), for results in T: for bf16 by the special function unit's tanh, to 5e-4 of y / 2.
template <class T>
__device__ inline float conv_silu(float y) {
    if constexpr (std::is_same_v<T, bf16>) {
        const float half = 0.5f * y;
        float tanh;
        asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(half));
        return fmaf(half, tanh, half);
    } else {
        return y * fast_reciprocal(1.0f + fast_exp2(-1.4426950408889634f * y));
    }
}

/// A layer's results, rounded, into the tile of the next one's inputs, `shift` rows further.
template <int Width, class T>
__device__ inline void store_conv_layer(float (&acc)[Width / 2], const float* bias, unsigned char* to,
                                        int thread, int shift) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + shift, pair = thread % 4;
#pragma unroll
    for (int j = 0; j < Width / 8; ++j) {
        const float2 b = *reinterpret_cast<const float2*>(bias + 8 * j + 2 * pair);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            *reinterpret_cast<std::uint32_t*>(to + conv_offset(row + 8 * r, 8 * j) + 4 * pair) =
                pack<T>(conv_silu<T>(acc[4 * j + 2 * r] + b.x), conv_silu<T>(acc[4 * j + 2 * r + 1] + b.y));
        }
    }
}

/// Undoes RoPE of eight pairs of columns.
template <class T, bool Quick>
__device__ inline void turn_conv_eight(uint4& low, uint4& high, float position, const float (&frequency)[8]) {
    const auto turn = [&](std::uint32_t& x, std::uint32_t& y, int e) {
        float x0, x1, y0, y1, sine, cosine;
        shared_tile<T>::load_pair(reinterpret_cast<const unsigned char*>(&x), x0, x1);
        shared_tile<T>::load_pair(reinterpret_cast<const unsigned char*>(&y), y0, y1);
        const auto sines = [&](int at) {
            if constexpr (Quick) {
                rope_sine_quick(position * frequency[at], sine, cosine);
            } else {
                rope_sine<T>(position * frequency[at], sine, cosine);
            }
        };
        sines(e);
        const float low0 = x0 * cosine + y0 * sine, high0 = y0 * cosine - x0 * sine;
        sines(e + 1);
        x = pack<T>(low0, x1 * cosine + y1 * sine);
        y = pack<T>(high0, y1 * cosine - x1 * sine);
    };
    turn(low.x, high.x, 0);
    turn(low.y, high.y, 2);
    turn(low.z, high.z, 4);
    turn(low.w, high.w, 6);
}

/// x of a tile, whose row 0 is token t0, from row `begin` on: what the rows lack (tokens before the stream's begin, and behind its end) is 0.
/// `frequencies` are source.frequencies, wherever they are, where it turns_eight().
template <int Inputs, class T, class Rows>
__device__ inline void load_conv_rows(const scorer_source<T>& source, const float* frequencies,
                                      const Rows& rows, std::int32_t t0, int begin, unsigned char* to,
                                      int thread) {
    const auto in = [&](int row) { return rows.in(t0 + row); };
    if (!source.turns_eight()) {
        for (int i = thread + begin * (Inputs / 8); i < conv_input_rows * (Inputs / 8); i += conv_consumers) {
            const int row = i / (Inputs / 8), c = i % (Inputs / 8) * 8;
            float x[8] = {};
            if (in(row)) {
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
    // What is not turned is copied as it is, beside the rest.
    const int turned = source.rotated / 8, plain = Inputs / 8 - turned;
    {
        const std::uint32_t data = shared_address(to);
        const int step_row = conv_consumers / plain, step_unit = conv_consumers % plain;
        int row = begin + thread / plain, unit = thread % plain;
        while (row < conv_input_rows) {
            const int c = 8 * (turned + unit);
            const bool there = in(row) && c < source.size;
            // Nothing is read where nothing is there, but the address must be one.
            const T* const from = !there             ? source.k.data
                                  : c < source.k.dim ? rows.key(t0 + row) + c
                                                     : rows.value(t0 + row) + (c - source.k.dim);
            copy_16(data + conv_offset(row, c), from, there ? 16 : 0);
            row += step_row;
            unit += step_unit;
            if (unit >= plain) {
                unit -= plain;
                ++row;
            }
        }
        copy_commit();
    }
    // A thread turns the same columns of several rows: eight, and those that a sine is shared with.
    const int pairs = turned / 2;
    if (pairs > 0) {
        constexpr int together = 4;
        const int step = conv_consumers / pairs, c = 8 * (thread % pairs);
        if (thread < step * pairs) {
            float frequency[8], largest = 0.0f;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                frequency[e] = frequencies[c + e];
                largest = fmaxf(largest, fabsf(frequency[e]));
            }
            for (int from = begin + thread / pairs; from < conv_input_rows; from += together * step) {
                uint4 low[together], high[together];
#pragma unroll
                for (int i = 0; i < together; ++i) {
                    const int row = from + i * step;
                    low[i] = high[i] = make_uint4(0, 0, 0, 0);
                    if (row < conv_input_rows && in(row)) {
                        const T* const key = rows.key(t0 + row) + c;
                        low[i] = *reinterpret_cast<const uint4*>(key);
                        high[i] = *reinterpret_cast<const uint4*>(key + source.rotated / 2);
                    }
                }
#pragma unroll
                for (int i = 0; i < together; ++i) {
                    const int row = from + i * step;
                    if (row >= conv_input_rows) {
                        break;
                    }
                    const float position = rows.position(t0 + row);
                    if (fabsf(position) * largest <= most_quick_angle) {
                        turn_conv_eight<T, true>(low[i], high[i], position, frequency);
                    } else {
                        turn_conv_eight<T, false>(low[i], high[i], position, frequency);
                    }
                    *reinterpret_cast<uint4*>(to + conv_offset(row, c)) = low[i];
                    *reinterpret_cast<uint4*>(to + conv_offset(row, c + source.rotated / 2)) = high[i];
                }
            }
        }
    }
    copy_wait<0>();
}

/// Biases and readout, 0 where a scorer is narrower, by the consumers; who reads them waits at a barrier first.
template <int Inputs, class T>
__device__ inline void load_conv_constants(const conv_problem<T>& problem, std::int32_t head,
                                           float* constants) {
    using shape = conv_hopper_shape<Inputs>;
    constexpr int c1 = shape::channels(1), c2 = shape::channels(2), c3 = shape::channels(3);
    for (int i = static_cast<int>(threadIdx.x); i < shape::constants; i += conv_consumers) {
        const int l = i < c1 ? 0 : i < c1 + c2 ? 1 : 2;
        const bool read = i >= c1 + c2 + c3;
        const int c = read ? i - c1 - c2 - c3 : i - (l == 0 ? 0 : l == 1 ? c1 : c1 + c2);
        const float* const from = read ? problem.readout : problem.layer[l].bias;
        const std::int32_t width = problem.layer[l].width;
        constants[i] = from != nullptr && c < width ? from[std::int64_t{head} * width + c] : 0.0f;
    }
}

/// Four rows of `Channels` channels, from row `row` of a tile on, to what a block keeps, or back to its first rows.
template <int Channels>
__device__ inline void keep_conv_rows(const unsigned char* tile, int row, uint4* kept, int thread) {
    if (thread < Channels / 2) {
        kept[thread] = *reinterpret_cast<const uint4*>(tile + conv_offset(row + thread % 4, thread / 4 * 8));
    }
}
template <int Channels>
__device__ inline void take_conv_rows(unsigned char* tile, const uint4* kept, int thread) {
    if (thread < Channels / 2) {
        *reinterpret_cast<uint4*>(tile + conv_offset(thread % 4, thread / 4 * 8)) = kept[thread];
    }
}

/// What a block has in shared memory besides the ring.
struct conv_hopper_memory {
    unsigned char* tile;
    float *constants, *frequencies;
    uint4* kept;
};

/// Layers 1 to 3 of a tile and its scores, by the consumers: write(r, score) for token first + r in [low, high). `follows`: the tile before is the
/// one that ends where it begins, and its last rows were kept.
template <int Inputs, class T, class Rows, class Write>
__device__ inline void score_conv_tile(const conv_problem<T>& problem, std::int32_t head, const Rows& rows,
                                       std::int32_t first, std::int32_t low, std::int32_t high, bool follows,
                                       const conv_hopper_memory& memory, const conv_weight_ring& ring,
                                       conv_turn& turn, const Write& write) {
    using shape = conv_hopper_shape<Inputs>;
    constexpr int c0 = shape::channels(0), c1 = shape::channels(1), c2 = shape::channels(2),
                  c3 = shape::channels(3);
    auto thread = static_cast<int>(threadIdx.x);
    asm volatile(
        ""
        : "+r"(thread));  // made anew for every tile: addresses that outlive one would fill the registers
    unsigned char *const tile = memory.tile, *const second = tile + shape::tile_bytes(1);
    const float* const constants = memory.constants;
    uint4 *const kept_x = memory.kept, *const kept_1 = kept_x + c0 / 2, *const kept_2 = kept_1 + c1 / 2;
    const int shift = follows ? 4 : 0;
    if (follows) {
        take_conv_rows<c0>(tile, kept_x, thread);
    }
    load_conv_rows<Inputs>(problem.source, memory.frequencies, rows, first + (follows ? 2 : -conv_reach),
                           shift, tile, thread);
    fence_async_proxy();
    named_barrier(1, conv_consumers);
    keep_conv_rows<c0>(tile, conv_tile_rows, kept_x, thread);

    const int first_row = thread / 128 * 64;
    {
        float acc[c1 / 2];
        conv_hopper_product<1, shape, T>(acc, shared_address(tile) + conv_offset(first_row, 0), ring, turn);
        named_barrier(1, conv_consumers);  // nobody reads x any more
        if (follows) {
            take_conv_rows<c1>(tile, kept_1, thread);
        }
        store_conv_layer<c1, T>(acc, constants, tile, thread, shift);
    }
    fence_async_proxy();
    named_barrier(1, conv_consumers);
    keep_conv_rows<c1>(tile, conv_tile_rows - 4 + shift, kept_1, thread);
    {
        float acc[c2 / 2];
        conv_hopper_product<2, shape, T>(acc, shared_address(tile) + conv_offset(first_row, 0), ring, turn);
        if (follows) {
            take_conv_rows<c2>(second, kept_2, thread);
        }
        store_conv_layer<c2, T>(acc, constants + c1, second, thread, shift);
    }
    fence_async_proxy();
    named_barrier(1, conv_consumers);
    keep_conv_rows<c2>(second, follows ? conv_tile_rows : conv_tile, kept_2, thread);
    float acc[c3 / 2];
    conv_hopper_product<3, shape, T>(acc, shared_address(second) + conv_offset(first_row, 0), ring, turn);
    const int lane = lane_id();
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < c3 / 8; ++j) {
        const int c = 8 * j + lane % 4 * 2;
        const float2 bias = *reinterpret_cast<const float2*>(constants + c1 + c2 + c),
                     readout = *reinterpret_cast<const float2*>(constants + c1 + c2 + c3 + c);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sums[r] += conv_silu<T>(acc[4 * j + 2 * r] + bias.x) * readout.x +
                       conv_silu<T>(acc[4 * j + 2 * r + 1] + bias.y) * readout.y;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum =
            row_sum(sums[r]) + (problem.readout_bias != nullptr ? problem.readout_bias[head] : 0.0f);
        const std::int32_t row = 16 * warp_id() + lane / 4 + 8 * r;
        if (lane % 4 == 0 && row >= low && row < high) {
            write(row, sum);
        }
    }
}

/// The whole of a block, for tiles of one head: barriers, the warp that brings weights, and the consumers. tiles.count of them;
/// tiles(i, body) calls body(rows, first, low, high, follows, write) for one (score_conv_tile). Weights are read after ready(), as is all of a source that does not turns_eight(); one that does has frequencies by `base`,
/// or of its own where that is 0.
template <int Inputs, class T, class Tiles, class Ready>
__device__ inline void conv_hopper_block(const conv_problem<T>& problem, const T* weights, std::int32_t head,
                                         const Tiles& tiles, float base, const Ready& ready) {
    using shape = conv_hopper_shape<Inputs>;
    conv_hopper_memory memory{};
    memory.tile = dynamic_shared();
    unsigned char* const stages = memory.tile + shape::tile_bytes(0);
    memory.kept = reinterpret_cast<uint4*>(stages + conv_ring * conv_stage);
    memory.constants =
        reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(memory.kept) + shape::kept_bytes);
    memory.frequencies = memory.constants + shape::constants;
    const std::uint32_t barriers = shared_address(memory.frequencies + shape::frequencies);
    const conv_weight_ring ring{shared_address(stages), barriers, barriers + 8 * conv_ring};
    begin_conv_ring(ring);
    conv_turn turn;
    if (threadIdx.x >= conv_consumers) {
        ready();
        for (int i = 0; threadIdx.x == conv_consumers && i < tiles.count; ++i) {
            bring_conv_layers<shape>(weights + std::int64_t{head} * shape::weights_before(4), ring, turn);
        }
        return;
    }
    load_conv_constants<Inputs>(problem, head, memory.constants);
    if (problem.source.turns_eight()) {  // the first rows come while others make the weights
        for (auto i = static_cast<std::int32_t>(threadIdx.x); i < problem.source.rotated / 2;
             i += conv_consumers) {
            memory.frequencies[i] = base > 0.0f ? rope_frequency<float>(base, i, problem.source.rotated)
                                                : problem.source.frequencies[i];
        }
        named_barrier(1, conv_consumers);
    } else {
        ready();
    }
    for (int i = 0; i < tiles.count; ++i) {
        if (i > 0) {
            named_barrier(1, conv_consumers);  // nobody reads the last tile any more
        }
        tiles(i, [&](const auto& rows, std::int32_t first, std::int32_t low, std::int32_t high, bool follows,
                     const auto& write) {
            score_conv_tile<Inputs>(problem, head, rows, first, low, high, follows, memory, ring, turn,
                                    write);
        });
    }
}

/// Tokens of a range that tile i and those before it have.
__device__ inline std::int32_t conv_tokens(int tiles) {
    return tiles == 0 ? 0 : conv_tile + (tiles - 1) * conv_tile_rows;
}

/// The tiles of a range of a stream's scores, first + low .. first + high - 1.
template <class T>
struct conv_stream_tiles {
    const conv_problem<T>& problem;
    scorer_span s;
    std::int32_t first, low, high;
    int count;

    __device__ conv_stream_tiles(const conv_problem<T>& of, const scorer_span& span, std::int32_t skipped)
        : problem(of),
          s(span),
          first(span.first - of.streams.delay + skipped),
          low(0),
          high(span.count - skipped) {
        count = high <= conv_tile ? 1 : 1 + (high - conv_tile + conv_tile_rows - 1) / conv_tile_rows;
    }
    template <class Body>
    __device__ void operator()(int tile, const Body& body) const {
        const std::int32_t begin = conv_tokens(tile), t = first + begin;
        // The next tile's rows, while this one is computed.
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        const std::int32_t ahead = first + conv_tokens(tile + 1) + conv_reach + thread % conv_tile_rows;
        if (tile + 1 < count && ahead < s.end) {
            const rows_view<const T>& view = thread < conv_tile_rows ? problem.source.k : problem.source.v;
            prefetch_to_l2(view.row(s.b, s.h, ahead), static_cast<std::uint32_t>(view.dim) * sizeof(T));
        }
        body(scorer_rows<T>{problem.source.k, problem.source.v, s}, t, 0,
             min(high - begin, tile == 0 ? conv_tile : conv_tile_rows), tile > 0,
             [&](std::int32_t r, float score) { problem.scores.head(s.b, s.h)[t + r] = score; });
    }
};

/// Asks the L2 cache for the rows of a range's first tile.
template <class T>
__device__ inline void ask_for_conv_rows(const conv_problem<T>& problem, const scorer_span& s,
                                         std::int32_t first) {
    constexpr int threads = (conv_consumers + 32) / 2;
    static_assert(threads >= conv_input_rows);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t row = thread % threads, t = first - conv_reach + row;
    if (row < conv_input_rows && t >= s.begin && t < s.end) {
        const rows_view<const T>& view = thread < threads ? problem.source.k : problem.source.v;
        prefetch_to_l2(view.row(s.b, s.h, t), static_cast<std::uint32_t>(view.dim) * sizeof(T));
    }
}

#endif

/// Scores of the tokens that leave a window of streams.delay keys while those of a range of `tokens` come, of which streams.slots counts the
/// ranges of a plane. No dropout. `weights` is what pack_conv made.
template <class T, int Inputs>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(conv_consumers + 32), 2)
    conv_hopper_kernel([[maybe_unused]] const __grid_constant__ conv_problem<T> problem,
                       [[maybe_unused]] const std::int32_t tokens, [[maybe_unused]] const float base,
                       [[maybe_unused]] const T* const weights) {
#if KVPOLICY_HOPPER_CODE
    const scorer_streams& streams = problem.streams;
    const scorer_span s = streams.span(static_cast<std::int32_t>(blockIdx.x) / streams.slots,
                                       static_cast<std::int32_t>(blockIdx.x) % streams.slots, tokens);
    const std::int32_t skipped = max(0, s.begin + streams.delay - s.first);
    if (skipped >= s.count) {
        wait_for_kernel_before();
        return;
    }
    ask_for_conv_rows(problem, s, s.first - streams.delay + skipped);
    // The kernel before makes the weights, and the frequencies of a Rope that gives a base. All else was there when that one began.
    conv_hopper_block<Inputs>(problem, weights, s.h, conv_stream_tiles<T>(problem, s, skipped), base,
                              [] { wait_for_kernel_before(); });
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
