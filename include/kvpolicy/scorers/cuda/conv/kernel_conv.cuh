// ConvScorer: three layers of three taps, two tokens apart, as one product a tap and layer over rows that
// overlap.
//
// A block scores up to 64 tokens of one head. With dilation 2 even and odd tokens never meet, so tiles hold
// the rows of one parity after those of the other, 40 rows each: row 40 p + i of layer l is token t0 - 6 + 2
// (l + i) + p, where t0 is the first that is scored, and needs rows 40 p + i, + 1, + 2 of the layer before.
// There are 38, 36, 34 and 32 such rows of x, y_1, y_2, y_3; what stands behind them is computed of rows of
// both parities, and not looked at. Those are five tiles of 16 rows; where a GPU's blocks have too little
// shared memory for them, three or two do the same for 32 or 16 tokens (conv_tiling).
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/random.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>
#include <kvpolicy/scorers/dropout.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int conv_reach = 6;

/// What follows from a block's `Tiles` of 16 rows.
template <int Tiles>
struct conv_tiling {
    static constexpr int rows = 16 * Tiles;
    static constexpr int parity = rows / 2;  // rows of one parity
    static constexpr int tokens = rows - 16;

    /// Rows of one parity that layer l has.
    __device__ static constexpr int rows_of(int l) { return parity - 2 - 2 * l; }
    /// The token, from the first that is scored, of row `row` of layer l.
    __device__ static std::int32_t token(int l, int row) {
        return 2 * (row % parity + l) + row / parity - conv_reach;
    }
};
/// The tiles of a block, and those where they do not fit. float's rows are twice as large.
inline constexpr int conv_max_tiles = 5;
template <class T>
inline constexpr int conv_few_tiles = std::is_same_v<T, float> ? 2 : 3;
static_assert(conv_tiling<conv_max_tiles>::tokens == scorer_chunk);

/// One layer, 1 to 3: `width` channels of `inputs`, both rounded up to 64 in the stack [heads, padded, 3,
/// padded_inputs].
template <class T>
struct conv_layer_params {
    const T* weights = nullptr;
    const float* bias = nullptr;  // [heads, width] or null
    std::int32_t width = 0, padded = 0;
    std::int32_t inputs = 0, padded_inputs = 0;
};

/// A draw of dropout: 0 or 1 / (1 - rate). Not inlined, since kernels would have it a hundred times.
__device__ __noinline__ inline float conv_drop(float rate, std::uint64_t seed, std::uint64_t stream,
                                               std::uint64_t at) {
    return random_unit(seed, stream, at) < static_cast<double>(rate) ? 0.0f : 1.0f / (1.0f - rate);
}

template <class T>
struct conv_params {
    scorer_streams streams;
    scorer_source<T> source;
    conv_layer_params<T> layer[3];
    const float* readout = nullptr;       // [heads, width of the last]
    const float* readout_bias = nullptr;  // [heads] or null
    float rate = 0.0f;                    // dropout
    std::int32_t columns = 64;            // of a slab of conv_kernel
    std::uint64_t seed = 0;
    plane_view<float> scores;

    /// What dropout multiplies channel c of layer `l` (1 to 3) at token t by; t counts from the stream's
    /// first token.
    __device__ float dropout(const scorer_span& s, int l, std::int32_t t, std::int32_t c) const {
        if (rate == 0.0f) {
            return 1.0f;
        }
        const std::uint64_t stream =
            (static_cast<std::uint64_t>(s.plane) << 30) + static_cast<std::uint64_t>(s.segment);
        const std::int64_t at = (std::int64_t{t} + conv_reach) * layer[l - 1].width + c;
        return conv_drop(rate, seed, 4 * stream + static_cast<std::uint64_t>(l),
                         static_cast<std::uint64_t>(at));
    }
};

/// to[h][n][tap][c] = weights[h][n][tap][c], 0 where there is none. By thread `thread` of `threads` of the
/// grid.
template <class T>
__device__ inline void stack_conv(const float* weights, std::int32_t heads, const conv_layer_params<T>& layer,
                                  T* to, std::int64_t thread, std::int64_t threads) {
    const std::int32_t inputs = layer.inputs, padded_inputs = layer.padded_inputs;
    const std::int64_t count = std::int64_t{heads} * layer.padded * 3 * padded_inputs;
    for (std::int64_t i = thread; i < count; i += threads) {
        const auto c = static_cast<std::int32_t>(i % padded_inputs);
        const auto tap = static_cast<std::int32_t>(i / padded_inputs % 3);
        const auto n = static_cast<std::int32_t>(i / padded_inputs / 3 % layer.padded);
        const std::int64_t h = i / padded_inputs / 3 / layer.padded;
        to[i] = static_cast<T>(
            n < layer.width && c < inputs ? weights[((h * layer.width + n) * 3 + tap) * inputs + c] : 0.0f);
    }
}

/// The weights of one layer, rounded to T and padded.
/// Grid: strided. Block: 256 threads, a number each. Shared memory: none.
/// In: weights [heads, width, 3, inputs] fp32.
/// Out: to [heads, padded, 3, padded_inputs] T, overwritten, 0 outside.
template <class T>
__global__ void __launch_bounds__(256) stack_conv_kernel(const float* const weights, const std::int32_t heads,
                                                         const conv_layer_params<T> layer, T* const to) {
    stack_conv(weights, heads, layer, to, std::int64_t{blockIdx.x} * 256 + threadIdx.x,
               std::int64_t{gridDim.x} * 256);
}

/// Columns of a product that a block of four warps makes at once, where they fit: else 64. float's tiles are
/// twice as large.
template <class T>
inline constexpr int conv_columns = std::is_same_v<T, float> ? 64 : 128;

/// Rows of gradients begin behind so many rows of zeros. Where there are few tiles it is two, and the last
/// two rows, which are no token's, have no place.
template <int Tiles>
inline constexpr int conv_lead = Tiles == conv_max_tiles ? 8 : 2;

/// Shared memory of a block: x, y_1, y_2, and two slabs of `columns` channels of weights. Tiles have rows to
/// spare, since taps reach two beyond them. Where there are few, all is as small as can be: products read
/// what stands behind a tile, and what they make of it is not looked at; y_2 takes x's place. (With five
/// tiles that took 15% longer on an H200, though as many blocks fit.)
template <class T, int Tiles, bool Backward = false>
struct conv_memory {
    static constexpr bool few = Tiles != conv_max_tiles;
    static constexpr int rows = conv_tiling<Tiles>::rows + (few ? 0 : 8 + (Backward ? conv_lead<Tiles> : 0));

    shared_tile<T> in[3];
    unsigned char* slabs;
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE conv_memory(unsigned char* memory, const conv_params<T>& params,
                                     std::int32_t columns) {
        shared_parts parts(memory);
        in[0] = parts.tile<T>(rows, params.layer[0].padded_inputs);
        in[1] = parts.tile<T>(rows, params.layer[1].padded_inputs);
        if (few) {
            in[2] = in[0];
            parts.tile<T>(2, 64);
        } else {
            in[2] = parts.tile<T>(rows, params.layer[2].padded_inputs);
        }
        slabs = parts.tile<T>(columns, 64).data;
        parts.tile<T>(columns, 64);
        bytes = parts.bytes();
    }
    /// [4][rows]: in place of the weights.
    [[nodiscard]] __device__ float* sums() const { return reinterpret_cast<float*>(slabs); }
};

/// acc[i][j] = rows 16 i of W_l over the three taps, `columns` channels from `column` on, a quarter of them a
/// warp. `in` has the layer before. Ends with a barrier.
template <int NI, int Tiles, class T>
__device__ inline void conv_product(float (&acc)[Tiles][NI][4], const conv_layer_params<T>& layer,
                                    std::int32_t head, const shared_tile<T>& in, std::int32_t column,
                                    unsigned char* slabs) {
    constexpr int columns = 32 * NI;
    const std::size_t slab = shared_tile<T>::bytes(columns, 64);
    const int across = layer.padded_inputs / 64, count = 3 * across;
    const std::int64_t stride = 3 * std::int64_t{layer.padded_inputs};
    const T* const weights = layer.weights + (std::int64_t{head} * layer.padded + column) * stride;
    const auto copy = [&](int i) {
        copy_rows(shared_tile<T>{slabs + slab * (i % 2), columns}, weights + i * 64, stride, 64, columns,
                  128);
        copy_commit();
    };
    clear(acc);
    for_each_slab(count, copy, [&](int i) {
        add_product<Tiles, NI, 64, false, false>(acc, in.from(64 * (i % across)), i / across,
                                                 shared_tile<T>{slabs + slab * (i % 2), columns},
                                                 8 * NI * warp_id());
    });
}

/// Visits what this thread has of conv_product: visit(i, j, e, row, channel).
template <int Tiles, int NI, class Visit>
__device__ inline void for_each_of_product(std::int32_t column, Visit visit) {
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                visit(i, j, e, 16 * i + lane / 4 + 8 * (e / 2),
                      column + 8 * (NI * warp_id() + j) + lane % 4 * 2 + e % 2);
            }
        }
    }
}

/// x of a chunk: what the rows lack (tokens before the stream's begin, and behind its end) is 0. `copy`
/// [rows, padded], where given, gets it too. The caller synchronizes.
template <int Tiles, class T, class Rows>
__device__ inline void load_conv_input(const scorer_source<T>& source, const Rows& rows, std::int32_t first,
                                       const shared_tile<T>& to, T* copy = nullptr) {
    using tiling = conv_tiling<Tiles>;
    // Eight columns at once; where keys are turned, those that a sine is shared with too. So the first
    // `pairs` units of a row make two.
    const bool turned = source.turns_eight();
    const std::int32_t pairs = turned ? source.rotated / 16 : 0, units = source.padded / 8 - pairs;
    const auto put = [&](int row, std::int32_t c, const float(&x)[8]) {
        to.set_eight(row, c, x);
        for (int e = 0; copy != nullptr && e < 8; ++e) {
            copy[std::int64_t{row} * source.padded + c + e] = static_cast<T>(x[e]);
        }
    };
    const int step_row = 128 / units, step_unit = 128 % units;
    int row = static_cast<int>(threadIdx.x) / units;
    std::int32_t unit = static_cast<std::int32_t>(threadIdx.x) % units;
    while (row < tiling::rows) {
        const std::int32_t t = first + tiling::token(0, row);
        const bool in = row % tiling::parity < tiling::rows_of(0) && rows.in(t);
        float x[8] = {}, y[8] = {};
        if (unit < pairs) {
            if (in) {
                source.turn_eight(rows.key(t), rows.position(t), 8 * unit, x, y);
            }
            put(row, 8 * unit, x);
            put(row, 8 * unit + source.rotated / 2, y);
        } else {
            const std::int32_t c = 8 * (unit + pairs);
            if (turned && in && c < source.size) {
                source.load_eight(c < source.k.dim ? rows.key(t) + c : rows.value(t) + (c - source.k.dim), x);
            } else if (in) {
                const T *const key = rows.key(t), *const value = rows.value(t);
                const position_t position = rows.position(t);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    x[e] = c + e < source.size ? source.turned_number(key, value, position, c + e) : 0.0f;
                }
            }
            put(row, c, x);
        }
        row += step_row;
        unit += step_unit;
        if (unit >= units) {
            unit -= units;
            ++row;
        }
    }
}

/// One layer of a chunk: y = drop(SiLU(W in + b)) into its tile, or for the last layer its weighted sums into
/// `sums`.
template <bool Last, int NI, class T, int Tiles>
__device__ inline void conv_layer_forward(const conv_params<T>& params, const scorer_span& s,
                                          std::int32_t first, int l, const conv_memory<T, Tiles>& memory,
                                          float (&sums)[Tiles][2]) {
    const conv_layer_params<T>& layer = params.layer[l - 1];
    for (std::int32_t column = 0; column < layer.padded; column += 32 * NI) {
        float acc[Tiles][NI][4];
        conv_product<NI>(acc, layer, s.h, memory.in[l - 1], column, memory.slabs);
        for_each_of_product<Tiles, NI>(column, [&](int i, int j, int e, int row, std::int32_t c) {
            float y = 0.0f;
            if (c < layer.width) {
                y = acc[i][j][e] +
                    (layer.bias != nullptr ? layer.bias[std::int64_t{s.h} * layer.width + c] : 0.0f);
                float slope;
                y = activated<false>(scorer_activation::silu, y, slope) *
                    params.dropout(s, l, first - s.begin + conv_tiling<Tiles>::token(l, row), c);
                if (Last) {
                    sums[i][e / 2] += y * params.readout[std::int64_t{s.h} * layer.width + c];
                }
            }
            acc[i][j][e] = y;
        });
        if constexpr (!Last) {
            for_each_of_product<Tiles, NI>(column, [&](int i, int j, int e, int row, std::int32_t c) {
                if (e % 2 == 0) {
                    memory.in[l].set_pair(row, c, acc[i][j][e], acc[i][j][e + 1]);
                }
            });
        }
    }
    __syncthreads();
}

/// A layer with as many columns at once as it has, and as fit into a slab.
template <bool Last, class T, int Tiles>
__device__ inline void conv_layer_forward(const conv_params<T>& params, const scorer_span& s,
                                          std::int32_t first, int l, const conv_memory<T, Tiles>& memory,
                                          float (&sums)[Tiles][2]) {
    if constexpr (conv_columns<T> == 128 && Tiles == conv_max_tiles && !Last) {
        if (params.columns == 128 && params.layer[l - 1].padded % 128 == 0) {
            conv_layer_forward<Last, 4>(params, s, first, l, memory, sums);
            return;
        }
    }
    conv_layer_forward<Last, 2>(params, s, first, l, memory, sums);
}

/// Scores of up to conv_tiling::tokens tokens from token `first` on of head s.h, by a block of 128 threads:
/// write(r, score) for token first + r in [low, high). Dropout draws for span s.
template <int Tiles, class T, class Rows, class Write>
__device__ inline void conv_block(const conv_params<T>& params, const scorer_span& s, const Rows& rows,
                                  std::int32_t first, std::int32_t low, std::int32_t high,
                                  const Write& write) {
    using tiling = conv_tiling<Tiles>;
    const conv_memory<T, Tiles> memory(aligned_dynamic_shared(), params, params.columns);
    // 1. x to its tile.
    load_conv_input<Tiles>(params.source, rows, first, memory.in[0]);
    float sums[Tiles][2] = {};
// 2. Layers 1 and 2.
#pragma unroll 1
    for (int l = 1; l <= 2; ++l) {
        conv_layer_forward<false>(params, s, first, l, memory, sums);
    }
    // 3. Layer 3, down to weighted sums.
    conv_layer_forward<true>(params, s, first, 3, memory, sums);
    // 4. The four warps' sums.
    const int lane = lane_id();
    float* const of_warps = memory.sums();
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = row_sum(sums[i][r]);
            if (lane % 4 == 0) {
                of_warps[warp_id() * tiling::rows + 16 * i + lane / 4 + 8 * r] = sum;
            }
        }
    }
    __syncthreads();
    const auto r = static_cast<std::int32_t>(threadIdx.x);
    if (r >= low && r < high) {
        const int row = r % 2 * tiling::parity + r / 2;
        float score = params.readout_bias != nullptr ? params.readout_bias[s.h] : 0.0f;
        for (int w = 0; w < 4; ++w) {
            score += of_warps[w * tiling::rows + row];
        }
        write(r, score);
    }
}

/// -infinity to a chunk's tokens that have no score, since their segment ends within streams.delay tokens. No
/// block writes a score there.
template <class T>
__device__ inline void mark_unscored(const conv_params<T>& params, const scorer_span& s) {
    float* const scores = params.scores.head(s.b, s.h);
    const std::int32_t end = s.first + s.count;
    for (std::int32_t t = max(s.first, s.end - params.streams.delay) + static_cast<std::int32_t>(threadIdx.x);
         t < end; t += static_cast<std::int32_t>(blockDim.x)) {
        scores[t] = -INFINITY;
    }
}

/// Scores of ConvScorer, portable: the tokens that leave a window of streams.delay keys while those of the
/// block come.
/// Grid: a block per chunk of conv_tiling<Tiles>::tokens tokens. Block: 128 threads. Shared memory:
/// conv_memory.
/// In: params.source (k, v), layer[3].weights [heads, padded, 3, padded_inputs] T.
/// Out: scores [B, heads, S] fp32, overwritten: of the tokens that have one, and -infinity for the chunk's
/// tokens that have none.
/// 1. x of the chunk and of the 6 tokens on either side to its tile.
/// 2. Layers 1 and 2, tile to tile.
/// 3. Layer 3, down to weighted sums.
/// 4. The sums of the four warps are added and written. (conv_block has the body.)
template <class T, int Tiles>
__global__ void __launch_bounds__(128) conv_kernel(const conv_params<T> params) {
    const scorer_streams& streams = params.streams;
    const scorer_span s = streams.span_of_block(conv_tiling<Tiles>::tokens);
    mark_unscored(params, s);
    const std::int32_t skipped = streams.first_read(s);
    if (skipped >= s.count) {
        return;
    }
    const std::int32_t first = s.first - streams.delay;
    conv_block<Tiles>(params, s, scorer_rows<T>{params.source.k, params.source.v, s}, first, skipped, s.count,
                      [&](std::int32_t r, float score) { params.scores.head(s.b, s.h)[first + r] = score; });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
