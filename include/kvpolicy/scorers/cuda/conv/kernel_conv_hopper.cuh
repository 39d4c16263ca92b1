// ConvScorer's scores on Hopper: the three layers of a tile of tokens in one block, as implicit matrix
// products by wgmma.
//
// Row i of x is token first - 6 + i, of layer l token first - 6 + 2 l + i, so a layer's row i needs rows i, i
// + 2, i + 4 of the one before, one for each tap: all taps are products with the same tile, begun two rows
// further on, and their sums stay in registers. For that tiles are not swizzled: eight columns of all rows,
// then the next eight (describe_columns), where a product may begin at any row. Rows behind the 128 of a
// layer hold anything, and reach none of the 120 that are looked at. A block goes through a range of tokens,
// and keeps the last four rows of x and of each layer: so all tiles but the first have 128 tokens, whose rows
// stand behind those four.
//
// A layer is weights times tokens, with weights from registers (agent_conv_products.cuh). x of the next tile
// is copied when layer 1 has read this one's, and its RoPE is undone in place. Two blocks fit on a
// SM, of which one turns keys or applies SiLU while the other multiplies.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>
#include <kvpolicy/scorers/cuda/conv/agent_conv_products.cuh>
#include <kvpolicy/scorers/cuda/conv/agent_conv_rows.cuh>
#include <kvpolicy/scorers/cuda/conv/conv_weights.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Weights of all layers in the order in which threads load them, and the frequencies of a Rope that gives a
/// base.
/// Grid: strided. Block: 256 threads. Shared memory: none. The next kernel may start at once
/// (let_next_kernel_start).
/// In: from (fp32 weights of all heads), base, rotated.
/// Out: to [heads, conv_forward_shape::weights_before(4)] T; frequencies [rotated / 2] fp32 where not null.
/// Overwritten.
template <class T, int Inputs>
__global__ void __launch_bounds__(256, 8)  // leaves registers for the next kernel's block
    pack_conv_kernel(const conv_weights from, T* const to, const float base, const std::int32_t rotated,
                     float* const frequencies) {
    let_next_kernel_start();
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (frequencies != nullptr && blockIdx.x == 0) {
        for (std::int32_t i = thread; i < rotated / 2; i += 256) {
            frequencies[i] = rope_frequency<float>(base, i, rotated);
        }
    }
    pack_conv<Inputs>(from, to, blockIdx.x * 256 + threadIdx.x, gridDim.x * 256);
}

#if KVPOLICY_HOPPER_CODE

/// y sigmoid(y) = y / 2 + y / 2 tanh(y / 2) of y = sum + bias, for results in T: for bf16 by the special
/// function unit's tanh, to 5e-4 of y / 2.
template <class T>
__device__ inline float conv_silu(float sum, float bias) {
    if constexpr (std::is_same_v<T, bf16>) {
        const float half = fmaf(0.5f, sum, 0.5f * bias);
        float tanh;
        asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(half));
        return fmaf(half, tanh, half);
    } else {
        const float y = sum + bias;
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
                pack<T>(conv_silu<T>(acc[4 * j + 2 * r], b.x), conv_silu<T>(acc[4 * j + 2 * r + 1], b.y));
        }
    }
}

/// Sends for biases and readout, 0 where a scorer is narrower. `somewhere` is any address that can be read.
template <int Inputs, class T>
__device__ inline void copy_conv_constants(const conv_params<T>& params, std::int32_t head, float* constants,
                                           const void* somewhere, int thread) {
    using shape = conv_hopper_shape<Inputs>;
    constexpr int c1 = shape::channels(1), c2 = shape::channels(2), c3 = shape::channels(3);
    for (int i = thread; i < shape::constants; i += conv_consumers) {
        const int l = i < c1 ? 0 : i < c1 + c2 ? 1 : 2;
        const bool read = i >= c1 + c2 + c3;
        const int c = read ? i - c1 - c2 - c3 : i - (l == 0 ? 0 : l == 1 ? c1 : c1 + c2);
        const float* const from = read ? params.readout : params.layer[l].bias;
        const std::int32_t width = params.layer[l].width;
        const bool there = from != nullptr && c < width;
        copy_4(shared_address(constants + i),
               there ? static_cast<const void*>(from + std::int64_t{head} * width + c) : somewhere,
               there ? 4 : 0);
    }
    copy_commit();
}

/// Sends for `count` weights (a multiple of 8) that stay in shared memory.
template <class T>
__device__ inline void copy_conv_weights(const T* from, int count, unsigned char* to, int thread) {
    for (int i = thread; i < count / 8; i += conv_consumers) {
        copy_16(shared_address(to) + static_cast<std::uint32_t>(16 * i), from + 8 * i);
    }
    copy_commit();
}

/// Eight channels of a row of a tile.
__device__ inline uint4& conv_eight(unsigned char* tile, int row, int c) {
    return *reinterpret_cast<uint4*>(tile + conv_offset(row, c));
}

/// The last layer's results times the readout: write(row of the tile, score).
template <int Inputs, class T, int N, class Write>
__device__ inline void write_conv_scores(const conv_params<T>& params, std::int32_t head,
                                         const float (&acc)[N], const float* constants, int thread,
                                         const Write& write) {
    using shape = conv_hopper_shape<Inputs>;
    constexpr int c3 = shape::channels(3), before = shape::channels(1) + shape::channels(2);
    static_assert(N == c3 / 2);
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < c3 / 8; ++j) {
        const int c = 8 * j + thread % 4 * 2;
        const float2 bias = *reinterpret_cast<const float2*>(constants + before + c),
                     readout = *reinterpret_cast<const float2*>(constants + before + c3 + c);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sums[r] += conv_silu<T>(acc[4 * j + 2 * r], bias.x) * readout.x +
                       conv_silu<T>(acc[4 * j + 2 * r + 1], bias.y) * readout.y;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum =
            row_sum(sums[r]) + (params.readout_bias != nullptr ? params.readout_bias[head] : 0.0f);
        if (thread % 4 == 0) {
            write(thread / 32 * 16 + thread % 32 / 4 + 8 * r, sum);
        }
    }
}

/// The same of results [64 channels][tokens] from `row` of the next tile and from `channel` on.
template <int Tokens, class T>
__device__ inline void store_conv_layer_transposed(float (&acc)[Tokens / 2], const float* bias,
                                                   unsigned char* to, int thread, int channel, int row) {
    const int lane = thread % 32;
    channel += thread / 32 % 4 * 16;
    const float2 b = make_float2(bias[channel + lane / 4], bias[channel + lane / 4 + 8]);
    const std::uint32_t at =
        shared_address(to) + conv_offset(row + lane / 16 * 8 + lane % 8, channel + lane / 8 % 2 * 8);
#pragma unroll
    for (int j = 0; j < Tokens / 8; j += 2) {
        std::uint32_t of[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int from = 4 * (j + i / 2) + i % 2 * 2;
            const float c = i % 2 == 0 ? b.x : b.y;
            of[i] = pack<T>(conv_silu<T>(acc[from], c), conv_silu<T>(acc[from + 1], c));
        }
        store_matrices_transposed(at + static_cast<std::uint32_t>(j * 128), of);
    }
}

/// The whole of a block, for tiles of one head, tiles.count of them: scores of tokens tiles.first(i) + r, r
/// in [0, tiles.high(i)), go to tiles.write(i, r, score). Where tiles.follows(i), tile i - 1 is the one that
/// ends where it begins. Weights are read after ready(), as is all of a source that does not turns_eight();
/// one that does has frequencies by `base`, or of its own where that is 0.
template <int Inputs, class T, class Tiles, class Ready>
__device__ inline void conv_hopper_block(const conv_params<T>& params, const T* weights, std::int32_t head,
                                         const Tiles& tiles, float base, const Ready& ready) {
    using shape = conv_forward_shape<Inputs>;
    constexpr int c0 = shape::channels(0), c1 = shape::channels(1), c2 = shape::channels(2),
                  c3 = shape::channels(3);
    unsigned char *const x = dynamic_shared(), *const y_1 = x + shape::tile_bytes(0),
                         *const y_2 = y_1 + (shape::overlaid ? 0 : shape::tile_bytes(1)),
                         *const narrow = y_1 + shape::layers_bytes;
    auto* const constants = reinterpret_cast<float*>(narrow + 2 * shape::narrow);
    float* const frequencies = constants + shape::constants;
    const scorer_source<T>& source = params.source;
    weights += std::int64_t{head} * shape::weights_before(4);
    auto thread = static_cast<int>(threadIdx.x);

    // The first rows come while others make the weights.
    copy_conv_constants<Inputs>(params, head, constants, source.k.data, thread);
    const auto origin = [&](int i) { return tiles.first(i) + (tiles.follows(i) ? 2 : -conv_reach); };
    bool early = source.turns_eight();
    if (early) {
        begin_conv_rows<Inputs>(source, tiles.rows(), origin(0), 0, x, thread);
        for (std::int32_t i = thread; i < source.rotated / 2; i += conv_consumers) {
            frequencies[i] =
                base > 0.0f ? rope_frequency<float>(base, i, source.rotated) : source.frequencies[i];
        }
        early = turns_conv_rows(source, frequencies, tiles.rows(), origin(0),
                                origin(tiles.count - 1) + conv_input_rows, thread);
    }
    const auto take_weights = [&] {
        ready();
        copy_conv_weights(weights + shape::weights_before(shape::first_narrow), shape::narrow, narrow,
                          thread);
    };
    if (!early) {
        copy_wait<0>();
        named_barrier(1, conv_consumers);  // all copies have arrived
        take_weights();
    }
    uint4 last_rows = make_uint4(0, 0, 0, 0);  // of the last rows of y_1 and y_2
#pragma unroll 1
    for (int tile = 0; tile < tiles.count; ++tile) {
        // Made anew for every tile: addresses that outlive one would fill the registers.
        asm volatile("" : "+r"(thread));
        thread &= conv_consumers - 1;
        const bool follows = tiles.follows(tile), keeps_1 = thread < c1 / 2,
                   keeps_2 = !keeps_1 && thread < c1 / 2 + c2 / 2;
        // One number for a warp, so that descriptors are made by its uniform registers.
        const int shift = follows ? 4 : 0, half = __shfl_sync(all_lanes, thread / 128, 0) * 64;
        // 1. x to its tile.
        conv_fragments<c1, c0> weights_1(weights);
        const bool waits = early && tile == 0;
        if (!waits) {
            weights_1.begin();
        }
        if (early) {
            finish_conv_rows(source, frequencies, tiles.rows(), origin(tile), shift, x, thread);
        } else {
            load_conv_rows<Inputs>(source, tiles.rows(), origin(tile), shift, x, thread);
        }
        if (waits) {
            take_weights();
            weights_1.begin();
        }
        copy_wait<0>();
        fence_async_proxy();
        named_barrier(1, conv_consumers);

        // 2. Layer 1.
        float acc[weights_1.tokens / 2];
        constexpr bool all_tokens = weights_1.tokens == conv_tile_rows;
        conv_product<T>(acc, shared_address(x) + conv_offset(all_tokens ? 0 : half, 0), weights_1);
        uint4 last = make_uint4(0, 0, 0, 0);
        if (thread < c0 / 2) {
            last = conv_eight(x, conv_tile_rows + thread % 4, thread / 4 * 8);
        }
        named_barrier(1, conv_consumers);  // x is free
        if (tile + 1 < tiles.count) {
            const bool next = tiles.follows(tile + 1);
            if (next && thread < c0 / 2) {
                conv_eight(x, thread % 4, thread / 4 * 8) = last;
            }
            if (early) {
                begin_conv_rows<Inputs>(source, tiles.rows(), origin(tile + 1), next ? 4 : 0, x, thread);
            }
        }
        if (follows && keeps_1) {
            conv_eight(y_1, thread % 4, thread / 4 * 8) = last_rows;
        }
        const auto stored_first = [&] {
            fence_async_proxy();
            named_barrier(1, conv_consumers);
            if (keeps_1) {
                last_rows = conv_eight(y_1, conv_tile_rows - 4 + shift + thread % 4, thread / 4 * 8);
            }
        };
        const auto multiplied_second = [&] {
            if constexpr (shape::overlaid) {
                named_barrier(1, conv_consumers);  // y_1 is free
            }
            if (follows && keeps_2) {
                conv_eight(y_2, thread % 4, (thread - c1 / 2) / 4 * 8) = last_rows;
            }
        };
        // 3. Layer 2, after y_1 is stored.
        const std::uint32_t second = shared_address(y_1) + conv_offset(half, 0);
        if constexpr (shape::in_registers(2)) {
            conv_fragments<c2, c1> weights_2(weights + shape::weights_before(2));
            weights_2.begin();
            store_conv_layer_transposed<weights_1.tokens, T>(acc, constants, y_1, thread, half, shift);
            stored_first();
            float sums[weights_2.tokens / 2];
            conv_product<T>(sums, second, weights_2);
            multiplied_second();
            store_conv_layer_transposed<weights_2.tokens, T>(sums, constants + c1, y_2, thread, 0,
                                                             half + shift);
        } else {
            store_conv_layer_transposed<weights_1.tokens, T>(acc, constants, y_1, thread, 0, half + shift);
            stored_first();
            float sums[c2 / 2];
            conv_narrow_product<T, c2, c1>(sums, second, shared_address(narrow));
            multiplied_second();
            store_conv_layer<c2, T>(sums, constants + c1, y_2, thread, shift);
        }
        fence_async_proxy();
        named_barrier(1, conv_consumers);
        if (keeps_2) {
            last_rows = conv_eight(y_2, (follows ? conv_tile_rows : conv_tile) + thread % 4,
                                   (thread - c1 / 2) / 4 * 8);
        }

        // 4. Layer 3 and the readout.
        float sums[c3 / 2];
        conv_narrow_product<T, c3, c2>(
            sums, shared_address(y_2) + conv_offset(half, 0),
            shared_address(narrow) +
                2 * (shape::weights_before(3) - shape::weights_before(shape::first_narrow)));
        write_conv_scores<Inputs>(params, head, sums, constants, thread, [&](std::int32_t row, float score) {
            if (row < tiles.high(tile)) {
                tiles.write(tile, row, score);
            }
        });
    }
}

/// Tokens of a range that tile i and those before it have.
__device__ inline std::int32_t conv_tokens(int tiles) {
    return tiles == 0 ? 0 : conv_tile + (tiles - 1) * conv_tile_rows;
}

/// The tiles of a range of a stream, whose scores are those of tokens from .. from + scores - 1.
template <class T>
struct conv_stream_tiles {
    const conv_params<T>& params;
    scorer_span s;
    std::int32_t from, scores;
    int count;

    __device__ conv_stream_tiles(const conv_params<T>& of, const scorer_span& span, std::int32_t skipped)
        : params(of), s(span), from(span.first - of.streams.delay + skipped), scores(span.count - skipped) {
        count = scores <= conv_tile ? 1 : 1 + (scores - conv_tile + conv_tile_rows - 1) / conv_tile_rows;
    }
    __device__ scorer_rows<T> rows() const { return {params.source.k, params.source.v, s}; }
    __device__ std::int32_t first(int tile) const { return from + conv_tokens(tile); }
    __device__ std::int32_t high(int tile) const {
        return min(scores - conv_tokens(tile), tile == 0 ? conv_tile : conv_tile_rows);
    }
    __device__ bool follows(int tile) const { return tile > 0; }
    __device__ void write(int tile, std::int32_t row, float score) const {
        params.scores.head(s.b, s.h)[first(tile) + row] = score;
    }
};

#endif

/// Scores of ConvScorer on Hopper: the tokens that leave a window of streams.delay keys while those of a
/// range come. No dropout.
/// Grid: a block per range of `tokens` tokens; streams.chunks counts the ranges of a plane. Block:
/// conv_consumers threads, two warpgroups; two blocks per SM. Shared memory: conv_forward_shape.
/// In: params.source (k, v) T, weights of pack_conv_kernel, which is the kernel before; base: of the
/// frequencies, or 0.
/// Out: scores [B, heads, S] fp32, overwritten: of the tokens that have one, and -infinity for the range's
/// tokens that have none.
/// Per tile of 128 rows:
/// 1. x to its tile (RoPE reversed on the way).
/// 2. Layer 1.
/// 3. Layer 2.
/// 4. Layer 3 and the readout, to scores. The last four rows of x, y_1 and y_2 stay for the next tile.
///    (conv_hopper_block has the body.)
template <class T, int Inputs>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(conv_consumers), 2)
    conv_hopper_kernel([[maybe_unused]] const __grid_constant__ conv_params<T> params,
                       [[maybe_unused]] const std::int32_t tokens, [[maybe_unused]] const float base,
                       [[maybe_unused]] const T* const weights) {
#if KVPOLICY_HOPPER_CODE
    const scorer_streams& streams = params.streams;
    const scorer_span s = streams.span_of_block(tokens);
    mark_unscored(params, s);
    const std::int32_t skipped = streams.first_read(s);
    if (skipped >= s.count) {
        wait_for_kernel_before();
        return;
    }
    // The kernel before makes the weights, and the frequencies of a Rope that gives a base. All else was
    // there when that one began.
    conv_hopper_block<Inputs>(params, weights, s.h, conv_stream_tiles<T>(params, s, skipped), base,
                              [] { wait_for_kernel_before(); });
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
