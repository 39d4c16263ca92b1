// ConvScorer's gradients of weights on Hopper. A block has the tile of kernel_conv_hopper.cuh: the layers
// again, and back through them. It answers for 104 tokens' scores, and for what the layers' results at these
// tokens (and up to 4 more at a stream's ends, which no other tile answers for) have as gradients: all that
// these need, scores of the neighbors too, it computes itself, so that every gradient is there once and
// whole.
//
// Row i is, from the first token a whose y_1 the tile answers for, token a - 10 + i of x, a - 8 + i of y_1, a
// - 6 + i of y_2, a - 4 + i of y_3 and d y_3, a - 2 + i of d y_2, a + i of d y_1: so back, too, a row needs
// rows i, i + 2, i + 4, with weights transposed and taps the other way.
//
// x, y_1, y_2 and the gradients before activations go to memory, a tile after the other, in the layout of the
// tiles in shared memory. Gradients of weights are products over tokens of these
// (kernel_conv_weight_gradients_hopper.cuh).
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_hopper.cuh>

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int conv_backward_tile_rows = 104;  // tokens of a block
inline constexpr int conv_back_rows =
    112;  // rows of gradients in memory: at most these have one that the tile answers for
inline constexpr int conv_back_inputs = 120;  // rows of layers' results in memory

/// Sizes beyond conv_forward_shape's.
template <int Inputs>
struct conv_backward_hopper_shape : conv_forward_shape<Inputs> {
    using base = conv_forward_shape<Inputs>;
    /// Transposed weights of a head, layer 3 before layer 2: those of layer 3, and all.
    static constexpr int third = 3 * base::channels(3) * base::channels(2),
                         weights = third + 3 * base::channels(2) * base::channels(1);
    /// Those of layer 3 that stay in shared memory.
    static constexpr int back_narrow = base::in_registers(2) ? 0 : third;
    /// For sums of columns: a warp's of narrow results, or a warpgroup's.
    static constexpr int columns = 8 * base::channels(base::first_narrow);
    static_assert(columns >= 2 * 64);
    static constexpr std::size_t shared_bytes =
        base::tile_bytes(0) + 2 * (base::narrow + back_narrow) +
        (base::constants + base::frequencies + columns + conv_tile_rows) * sizeof(float);
    static_assert(2 * base::tile_bytes(1) <= base::tile_bytes(0) &&
                  2 * base::tile_bytes(2) <= base::tile_bytes(1));
};
static_assert(conv_backward_hopper_shape<256>::shared_bytes <= 113 * 1024, "two blocks a SM");

/// What the tiles leave in memory: numbers of a tile are channels / 8 x rows x 8.
template <class T>
struct conv_backward_hopper_params {
    conv_params<T> forward;  // streams.chunks counts tiles of conv_backward_tile_rows tokens
    plane_view<const float> d_scores;
    T* in[3] = {};          // x, y_1, y_2: [tiles, channels / 8, 120, 8]
    T* d[3] = {};           // d y_1, d y_2, d y_3: [tiles, channels / 8, 112, 8]
    float* sums = nullptr;  // [tiles, sums_width]: b1, b2, b3, readout, readout_bias
    std::int32_t sums_width = 0;
};

/// Which tokens a tile answers for.
struct conv_backward_span {
    scorer_span s;
    std::int32_t first;            // token of the first score
    std::int32_t low, high;        // scores first + low .. first + high - 1 are there
    std::int32_t ahead, behind;    // 1 at a stream's beginning and end
    std::int32_t lowest, highest;  // scores of the stream: [lowest, highest)
    bool any;

    __device__ conv_backward_span(const scorer_streams& streams, std::int64_t tile)
        : s(streams.span(static_cast<std::int32_t>(tile / streams.chunks),
                         static_cast<std::int32_t>(tile % streams.chunks), conv_backward_tile_rows)) {
        first = s.first - streams.delay;
        low = streams.first_read(s);
        high = s.count;
        ahead = s.first == s.from ? 1 : 0;
        behind = s.first + s.count == s.end ? 1 : 0;
        lowest = max(s.begin, s.from - streams.delay);
        highest = s.end - streams.delay;
        // Tokens before the first score have gradients, too.
        any = s.count > 0 && first + s.count + 4 > lowest && lowest < highest;
    }
    /// The first token whose y_1 is the tile's.
    __device__ std::int32_t origin() const { return first - 4 * ahead; }
    /// The rows of gradients of layer l that the tile answers for, [begin_of(l), end_of(l)).
    __device__ std::int32_t begin_of(int l) const {
        return l == 3 ? 4 * ahead + 4 : l == 2 ? 2 * ahead + 2 : 0;
    }
    __device__ std::int32_t end_of(int l) const {
        return 4 * ahead + s.count + (l == 3 ? 4 : l == 2 ? 2 + 2 * behind : 4 * behind);
    }
};

/// Transposed weights of layer `Layer` of head `h`, taps the other way (conv_eight_weights).
template <int Layer, class Shape, class T>
__device__ inline uint4 conv_backward_weights(const conv_weights& from, std::uint32_t h, std::uint32_t at) {
    constexpr std::uint32_t of_tap = Shape::channels(Layer);
    const auto inputs = static_cast<std::uint32_t>(from.inputs[Layer - 1]),
               width = static_cast<std::uint32_t>(from.width[Layer - 1]);
    return conv_eight_weights<Shape::channels(Layer - 1), Shape::channels(Layer), T>(
        at, [&](std::uint32_t c, std::uint32_t k) {
            const std::uint32_t tap = 2 - k / of_tap, n = k % of_tap;
            const float* const column =
                from.layer[Layer - 1] + (std::uint64_t{h} * width * 3 + n * 3 + tap) * inputs + c;
            return make_float2(c < inputs && n < width ? column[0] : 0.0f,
                               c < inputs && n + 1 < width ? column[std::uint64_t{3} * inputs] : 0.0f);
        });
}

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

/// What a block has in shared memory besides the tile.
struct conv_backward_hopper_memory {
    unsigned char *tile, *narrow, *back_narrow;
    float *constants, *frequencies, *columns, *d_score;
};

/// A block's tile. `weights` and `back` are the head's. Rows of all tiles are those of the file's head.
template <int Inputs, class T>
struct conv_backward_hopper_agent {
    using shape = conv_backward_hopper_shape<Inputs>;
    static constexpr int c1 = shape::channels(1), c2 = shape::channels(2), c3 = shape::channels(3);
    static constexpr bool wide = shape::in_registers(2);
    using weights_1_type = conv_fragments<c1, Inputs, 2>;
    using back_2_type = conv_fragments<c1, c2, 2>;

    const conv_backward_hopper_params<T>& params;
    const conv_backward_span& span;
    const std::int64_t number;
    const T *const weights, *const back;
    const conv_backward_hopper_memory& memory;
    const conv_params<T>& forward;
    unsigned char *const tile, *const slopes1, *const slopes2;
    const float* const constants;
    float *const d_score, *const sums;
    const int thread;
    const std::int32_t a, w1, w2, w3;
    int half, channel_1, row_1;
    std::uint32_t all, rows;

    __device__ __forceinline__ conv_backward_hopper_agent(const conv_backward_hopper_params<T>& of,
                                                          const conv_backward_span& tokens,
                                                          std::int64_t tile_number, const T* of_head,
                                                          const T* back_of_head,
                                                          const conv_backward_hopper_memory& shared)
        : params(of),
          span(tokens),
          number(tile_number),
          weights(of_head),
          back(back_of_head),
          memory(shared),
          forward(of.forward),
          tile(shared.tile),
          slopes1(tile + shape::tile_bytes(1)),
          slopes2(tile + shape::tile_bytes(2)),
          constants(shared.constants),
          d_score(shared.d_score),
          sums(of.sums + tile_number * of.sums_width),
          thread(static_cast<int>(threadIdx.x)),
          a(tokens.origin()),
          w1(of.forward.layer[0].width),
          w2(of.forward.layer[1].width),
          w3(of.forward.layer[2].width) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        weights_1_type weights_1(weights);
        weights_1.begin();
        load_scores();  // 1
        load_inputs();
        sync();
        save_inputs();
        place_warpgroup();
        apply_layer_1(weights_1);  // 2
        sync();
        apply_layer_2();  // 3
        sync();
        through_layer_3();  // 4
        sync();
        back_through_layer_3();  // 5
        back_2_type back_2(back + shape::third);
        back_2.begin();
        sync();
        back_through_layer_2(back_2);  // 6
    }

  private:
    __device__ __forceinline__ static void sync() {
        fence_async_proxy();
        named_barrier(1, conv_consumers);
    }
    __device__ __forceinline__ T* image(T* of, int channels, int of_rows) const {
        return of + number * channels * of_rows;
    }
    /// What two warpgroups see of a channel, each its rows of it, and where the sum goes.
    __device__ __forceinline__ void of_half(int c, float sum) const { memory.columns[half + c] = sum; }
    __device__ __forceinline__ void add_halves(float* to, std::int32_t width) const {
        if (thread < 64 && thread < width) {
            to[thread] = memory.columns[thread] + memory.columns[64 + thread];
        }
    }
    /// One number for a warp, so that descriptors are made by its uniform registers. Of 128 channels it is
    /// the warpgroup's first channel, else its first row.
    __device__ __forceinline__ void place_warpgroup() {
        half = __shfl_sync(all_lanes, thread / 128, 0) * 64;
        channel_1 = c1 == 128 ? half : 0;
        row_1 = c1 == 128 ? 0 : half;
        all = shared_address(tile);
        rows = all + conv_offset(half, 0);
    }

    /// Phase 1: d score of the tile's rows; x into the tile, and from there to memory.
    __device__ __forceinline__ void load_scores() const {
        for (int i = thread; i < conv_tile_rows; i += conv_consumers) {
            const std::int32_t t = a - 4 + i;
            const bool there = t >= span.lowest && t < span.highest;
            const float d = there ? params.d_scores.head(span.s.b, span.s.h)[t] : 0.0f;
            if (there && i >= span.begin_of(3) && i < span.end_of(3) && !isfinite(d)) {
                forward.streams.report(span.s.b, status_not_finite);
            }
            d_score[i] = d;
        }
    }
    __device__ __forceinline__ void load_inputs() const {
        const scorer_source<T>& source = forward.source;
        const scorer_rows<T> x{source.k, source.v, span.s};
        bool early = source.turns_eight();
        if (early) {
            begin_conv_rows<Inputs>(source, x, a - 10, 0, tile, thread);
            for (std::int32_t i = thread; i < source.rotated / 2; i += conv_consumers) {
                memory.frequencies[i] = source.frequencies[i];
            }
            early = turns_conv_rows(source, memory.frequencies, x, a - 10, a - 10 + conv_input_rows, thread);
        }
        if (early) {
            finish_conv_rows(source, memory.frequencies, x, a - 10, 0, tile, thread);
        } else {
            copy_wait<0>();
            named_barrier(1, conv_consumers);  // all copies have arrived
            load_conv_rows<Inputs>(source, x, a - 10, 0, tile, thread);
        }
    }
    __device__ __forceinline__ void save_inputs() const {
        T* const x = image(params.in[0], Inputs, conv_back_inputs);
        bool finite = true;
        for (int i = thread; i < Inputs / 8 * conv_back_inputs; i += conv_consumers) {
            const uint4 of = conv_eight(tile, i % conv_back_inputs + 8, i / conv_back_inputs * 8);
            reinterpret_cast<uint4*>(x)[i] = of;
            finite = finite && finite_pair<T>(of.x) && finite_pair<T>(of.y) && finite_pair<T>(of.z) &&
                     finite_pair<T>(of.w);
        }
        if (!finite) {
            forward.streams.report(span.s.b, status_not_finite);
        }
    }

    /// Phase 2: y_1 and its slope, in place of x.
    __device__ __forceinline__ void apply_layer_1(weights_1_type& weights_1) const {
        float acc[weights_1.tokens / 2];
        conv_product<T>(acc, all + conv_offset(row_1, 0), weights_1);
        named_barrier(1, conv_consumers);  // x is free
        store_conv_slopes_transposed<T>(acc, constants, tile, slopes1, thread, channel_1, row_1);
    }

    /// Phase 3: y_1 to memory; y_2 and its slope, in place of y_1.
    __device__ __forceinline__ void apply_layer_2() const {
        T* const y_1 = image(params.in[1], c1, conv_back_inputs);
        float acc[c2 / 2];
        if constexpr (wide) {
            conv_fragments<c2, c1, 2> weights_2(weights + shape::weights_before(2));
            weights_2.begin();
            copy_conv_image<c1, conv_back_inputs>(tile, 0, y_1, 0, conv_back_inputs, thread);
            conv_product<T>(acc, rows, weights_2);
            named_barrier(1, conv_consumers);  // y_1 is free
            store_conv_slopes_transposed<T>(acc, constants + c1, tile, slopes2, thread, 0, half);
        } else {
            copy_conv_image<c1, conv_back_inputs>(tile, 0, y_1, 0, conv_back_inputs, thread);
            conv_narrow_product<T, c2, c1>(acc, rows, shared_address(memory.narrow));
            named_barrier(1, conv_consumers);
            store_conv_slopes<c2, T>(acc, constants + c1, tile, slopes2, thread);
        }
    }

    /// Phase 4: y_2 to memory; the last layer, and back to d y_3, in place of y_2. Sums of b3, readout,
    /// readout_bias.
    __device__ __forceinline__ void through_layer_3() const {
        copy_conv_image<c2, conv_back_inputs>(tile, 0, image(params.in[2], c2, conv_back_inputs), 0,
                                              conv_back_inputs, thread);

        const int row = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4;
        const std::int32_t begin3 = span.begin_of(3), end3 = span.end_of(3);
        float acc[c3 / 2];
        conv_narrow_product<T, c3, c2>(
            acc, rows,
            shared_address(memory.narrow) +
                2 * (shape::weights_before(3) - shape::weights_before(shape::first_narrow)));
        named_barrier(1, conv_consumers);  // y_2 is free
        float of_readout[c3 / 4] = {}, of_bias[c3 / 4] = {};
#pragma unroll
        for (int j = 0; j < c3 / 8; ++j) {
            const int c = 8 * j + 2 * pair;
            const float2 bias = *reinterpret_cast<const float2*>(constants + c1 + c2 + c),
                         readout = *reinterpret_cast<const float2*>(constants + c1 + c2 + c3 + c);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = row + 8 * r;
                const float d_r = i < conv_input_rows - 12 ? d_score[i] : 0.0f;
                const bool owned = i >= begin3 && i < end3;
                float d[2] = {};
                if (d_r != 0.0f) {
                    float slope;
                    const float y0 = conv_silu(acc[4 * j + 2 * r] + bias.x, slope);
                    d[0] = d_r * readout.x * slope;
                    const float y1 = conv_silu(acc[4 * j + 2 * r + 1] + bias.y, slope);
                    d[1] = d_r * readout.y * slope;
                    if (owned) {
                        of_readout[2 * j] += d_r * y0;
                        of_readout[2 * j + 1] += d_r * y1;
                        of_bias[2 * j] += d[0];
                        of_bias[2 * j + 1] += d[1];
                    }
                }
                *reinterpret_cast<std::uint32_t*>(tile + conv_offset(i, 8 * j) + 4 * pair) =
                    pack<T>(d[0], d[1]);
            }
        }
        sum_layer_3(of_readout, of_bias);
    }
    __device__ __forceinline__ void sum_layer_3(const float (&of_readout)[c3 / 4],
                                                const float (&of_bias)[c3 / 4]) const {
        const std::int32_t begin3 = span.begin_of(3), end3 = span.end_of(3);
        sum_conv_columns<c3>(
            memory.columns, thread, [&](int j, int e) { return of_bias[2 * j + e]; },
            [&](int c, float sum) {
                if (c < w3) {
                    sums[w1 + w2 + c] = sum;
                }
            });
        sum_conv_columns<c3>(
            memory.columns, thread, [&](int j, int e) { return of_readout[2 * j + e]; },
            [&](int c, float sum) {
                if (c < w3) {
                    sums[w1 + w2 + w3 + c] = sum;
                }
            });
        if (thread == 0) {
            float sum = 0.0f;
            for (int i = 0; i < conv_back_rows; ++i) {
                sum += i >= begin3 && i < end3 ? d_score[i] : 0.0f;
            }
            sums[w1 + w2 + 2 * w3] = sum;
        }
    }

    /// Phase 5: d y_3 to memory; d y_2 in place of d y_3, and the sums of b2.
    __device__ __forceinline__ void back_through_layer_3() const {
        copy_conv_image<c3, conv_back_rows>(tile, 0, image(params.d[2], c3, conv_back_rows), span.begin_of(3),
                                            span.end_of(3), thread);

        float acc[c2 / 2];
        if constexpr (wide) {
            conv_fragments<c2, c3, 2> back_3(back);
            back_3.begin();
            conv_product<T>(acc, rows, back_3);
            named_barrier(1, conv_consumers);  // d y_3 is free
            store_conv_gradients_transposed<T>(acc, slopes2, 4, 116, tile, thread, 0, half, span.begin_of(2),
                                               span.end_of(2), [&](int c, float sum) { of_half(c, sum); });
        } else {
            conv_narrow_product<T, c2, c3>(acc, rows, shared_address(memory.back_narrow));
            named_barrier(1, conv_consumers);
            store_conv_gradients<c2, T>(acc, slopes2, 4, 116, tile, thread, span.begin_of(2), span.end_of(2));
            sum_conv_columns<c2>(
                memory.columns, thread, [&](int j, int e) { return acc[4 * j + e] + acc[4 * j + 2 + e]; },
                [&](int c, float sum) {
                    if (c < w2) {
                        sums[w1 + c] = sum;
                    }
                });
        }
    }

    /// Phase 6: d y_2 to memory; d y_1 in place of d y_2, then to memory, and the sums of b1.
    __device__ __forceinline__ void back_through_layer_2(back_2_type& back_2) const {
        if constexpr (wide) {
            add_halves(sums + w1, w2);
        }
        copy_conv_image<c2, conv_back_rows>(tile, 0, image(params.d[1], c2, conv_back_rows), span.begin_of(2),
                                            span.end_of(2), thread);
        float acc[back_2.tokens / 2];
        conv_product<T>(acc, all + conv_offset(row_1, 0), back_2);
        named_barrier(1, conv_consumers);  // d y_2 is free
        store_conv_gradients_transposed<T>(acc, slopes1, 8, conv_back_rows, tile, thread, channel_1, row_1, 0,
                                           span.end_of(1), [&](int c, float sum) {
                                               if constexpr (c1 == 128) {
                                                   if (c < w1) {
                                                       sums[c] = sum;
                                                   }
                                               } else {
                                                   of_half(c, sum);
                                               }
                                           });
        named_barrier(1, conv_consumers);
        if constexpr (c1 == 64) {
            add_halves(sums, w1);
        }
        copy_conv_image<c1, conv_back_rows>(tile, 0, image(params.d[0], c1, conv_back_rows), 0,
                                            span.end_of(1), thread);
    }
};

#endif

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
