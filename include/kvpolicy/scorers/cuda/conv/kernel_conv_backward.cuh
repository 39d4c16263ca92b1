// The backward pass of ConvScorer. A block computes its chunk's layers again and goes back through them for
// its own scores, which are all that it answers for: what two chunks say about the 12 tokens that both see is
// added up afterwards. Layers' inputs and the gradients d y_l before their activations go to memory, [chunks,
// rows, channels], for the gradients of the weights.
//
// d y_{l-1}[i] = sum over taps of W_l[tap]^T d y_l[i - tap]: the product of kernel_conv.cuh with taps that go
// the other way, so tiles of d y begin with rows of zeros (conv_lead), and rows that are no token's are 0.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What the backward pass has besides the call: arrays of the workspace.
template <class T>
struct conv_backward_params {
    conv_params<T> forward;  // streams.chunks counts chunks of conv_tiling::tokens tokens
    plane_view<const float> d_scores;
    T* in[3] = {};          // chunks x rows x padded inputs of layer l + 1: x, y_1, y_2
    T* slope[2] = {};       // chunks x rows x padded of layers 1, 2: drop SiLU'
    T* d[3] = {};           // chunks x rows x padded of layers 1, 2, 3
    float* d_x = nullptr;   // chunks x rows x source.padded, or null
    float* sums = nullptr;  // chunks x (C1 + C2 + 2 C3 + 1): biases, readout, readout_bias
    std::int32_t sums_width = 0;
};

/// The sum over all rows of one column of its product, in lanes 0 to 3.
__device__ inline float conv_column_sum(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(all_lanes, x, step);
    }
    return x;
}

/// Puts what a thread has of gradients d y behind the lead; the last rows are 0 and have no place.
template <int Tiles, int NI, class T>
__device__ inline void put_conv_gradients(const shared_tile<T>& to, std::int32_t column,
                                          const float (&acc)[Tiles][NI][4]) {
    for_each_of_product<Tiles, NI>(column, [&](int i, int j, int e, int row, std::int32_t c) {
        if (e % 2 == 0 && row + conv_lead<Tiles> < conv_memory<T, Tiles, true>::rows) {
            to.set_pair(row + conv_lead<Tiles>, c, acc[i][j][e], acc[i][j][e + 1]);
        }
    });
}

/// The block of conv_backward_kernel: one chunk.
template <class T, int Tiles>
struct conv_backward_agent {
    using tiling = conv_tiling<Tiles>;
    static constexpr int NI = 2, columns = 64;
    using product_type = float[Tiles][NI][4];
    using column_sums = float[NI][2];

    const conv_backward_params<T>& params;
    const conv_params<T>& forward;
    const scorer_streams& streams;
    const scorer_span& s;
    const std::int64_t chunk;
    float* const sums;
    const int thread, lane;
    const std::int32_t skipped, first;
    // A reference: products index its tiles by layer, so it stays in local memory, and the agent must not.
    const conv_memory<T, Tiles, true>& memory;

    __device__ __forceinline__ conv_backward_agent(const conv_backward_params<T>& of, const scorer_span& span,
                                                   const conv_memory<T, Tiles, true>& shared)
        : params(of),
          forward(of.forward),
          streams(of.forward.streams),
          s(span),
          chunk(blockIdx.x),
          sums(of.sums + chunk * of.sums_width),
          thread(static_cast<int>(threadIdx.x)),
          lane(lane_id()),
          skipped(streams.first_read(span)),
          first(span.first - streams.delay),
          memory(shared) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        load_conv_input<Tiles>(forward.source, scorer_rows<T>{forward.source.k, forward.source.v, s}, first,
                               memory.in[0],
                               params.in[0] + chunk * tiling::rows * forward.source.padded);  // 1
#pragma unroll 1
        for (int l = 1; l <= 2; ++l) {  // 2
            apply_layer(l);
            __syncthreads();
        }
        through_layer_3();  // 3
#pragma unroll 1
        for (int l = 2; l >= 0; --l) {  // 4
            if (l == 0 && params.d_x == nullptr) {
                break;
            }
            back_through(l);
            __syncthreads();
        }
    }

  private:
    /// Phase 2: layer l again: y_l and its slope to memory, y_l into its tile.
    __device__ __forceinline__ void apply_layer(int l) const {
        const conv_layer_params<T>& layer = forward.layer[l - 1];
        const std::int64_t at = chunk * tiling::rows * layer.padded;
        for (std::int32_t column = 0; column < layer.padded; column += columns) {
            float acc[Tiles][NI][4];
            conv_product<NI>(acc, layer, s.h, memory.in[l - 1], column, memory.slabs);
            for_each_of_product<Tiles, NI>(column, [&](int i, int j, int e, int row, std::int32_t c) {
                float y = 0.0f, slope = 0.0f;
                if (c < layer.width && row % tiling::parity < tiling::rows_of(l)) {
                    const float drop = forward.dropout(s, l, first - s.begin + tiling::token(l, row), c);
                    y = acc[i][j][e] +
                        (layer.bias != nullptr ? layer.bias[std::int64_t{s.h} * layer.width + c] : 0.0f);
                    y = drop * activated<true>(scorer_activation::silu, y, slope);
                    slope *= drop;
                }
                params.in[l][at + std::int64_t{row} * layer.padded + c] = static_cast<T>(y);
                params.slope[l - 1][at + std::int64_t{row} * layer.padded + c] = static_cast<T>(slope);
                acc[i][j][e] = y;
            });
            for_each_of_product<Tiles, NI>(column, [&](int i, int j, int e, int row, std::int32_t c) {
                if (e % 2 == 0) {
                    memory.in[l].set_pair(row, c, acc[i][j][e], acc[i][j][e + 1]);
                }
            });
        }
    }

    /// Phase 3: the last layer, down to d y_3, which takes the place of y_2; one block of columns holds it.
    __device__ __forceinline__ void through_layer_3() const {
        const conv_layer_params<T>& layer = forward.layer[2];
        float acc[Tiles][NI][4];
        conv_product<NI>(acc, layer, s.h, memory.in[2], 0, memory.slabs);
        float of_readout[NI][2] = {}, of_bias[NI][2] = {};
        for_each_of_product<Tiles, NI>(0, [&](int i, int j, int e, int row, std::int32_t c) {
            const std::int32_t r = tiling::token(3, row);
            float d = 0.0f;
            if (c < layer.width && row % tiling::parity < tiling::rows_of(3) && r >= skipped && r < s.count) {
                const float d_score = gradient_of_score(streams, params.d_scores, s, first + r);
                const float drop = forward.dropout(s, 3, first - s.begin + r, c);
                const float y =
                    acc[i][j][e] +
                    (layer.bias != nullptr ? layer.bias[std::int64_t{s.h} * layer.width + c] : 0.0f);
                float slope;
                of_readout[j][e % 2] += d_score * drop * activated<true>(scorer_activation::silu, y, slope);
                d = d_score * forward.readout[std::int64_t{s.h} * layer.width + c] * drop * slope;
                of_bias[j][e % 2] += d;
            }
            acc[i][j][e] = d;
        });
        const shared_tile<T>& to = memory.in[2];
        put_conv_gradients<Tiles, NI>(to, 0, acc);
        for_each_of_product<Tiles, NI>(0, [&](int i, int j, int e, int row, std::int32_t c) {
            params.d[2][(chunk * tiling::rows + row) * layer.padded + c] = static_cast<T>(acc[i][j][e]);
        });
        sum_layer_3(layer, of_bias, of_readout);
    }
    __device__ __forceinline__ void sum_layer_3(const conv_layer_params<T>& layer, const column_sums& of_bias,
                                                const column_sums& of_readout) const {
        float* const to_sums = sums + forward.layer[0].width + forward.layer[1].width;
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const std::int32_t c = 8 * (NI * warp_id() + j) + lane % 4 * 2 + e;
                const float bias = conv_column_sum(of_bias[j][e]),
                            readout = conv_column_sum(of_readout[j][e]);
                if (lane < 4 && c < layer.width) {
                    to_sums[c] = bias;
                    to_sums[layer.width + c] = readout;
                }
            }
        }
        if (thread == 0) {
            float sum = 0.0f;
            for (std::int32_t r = skipped; r < s.count; ++r) {
                sum += params.d_scores.head(s.b, s.h)[first + r];
            }
            to_sums[2 * layer.width] = sum;
        }
    }

    /// Phase 4: l = 2, 1: d y_l in place of y_{l-1}, to memory, and the sums of its bias. l = 0: d x to
    /// memory.
    __device__ __forceinline__ void back_through(int l) const {
        const conv_layer_params<T>& above = forward.layer[l];
        const shared_tile<T>& from = memory.in[l];
        for (int i = thread; i < conv_lead<Tiles> * above.padded / 2; i += 128) {
            from.set_pair(i / (above.padded / 2), i % (above.padded / 2) * 2, 0.0f, 0.0f);
        }
        __syncthreads();
        const std::int32_t padded = above.padded_inputs;
        for (std::int32_t column = 0; column < padded; column += columns) {
            product_type acc;
            multiply_back(above, from, column, acc);
            if (l == 0) {
                for_each_of_product<Tiles, NI>(column, [&](int i, int j, int e, int row, std::int32_t c) {
                    params.d_x[(chunk * tiling::rows + row) * padded + c] = acc[i][j][e];
                });
                continue;
            }
            store_gradients(l, column, acc);
        }
    }
    /// acc = W_l^T d y_l of the taps, 64 columns of d y_{l-1} from `column` on.
    __device__ __forceinline__ void multiply_back(const conv_layer_params<T>& above,
                                                  const shared_tile<T>& from, std::int32_t column,
                                                  product_type& acc) const {
        const std::int32_t padded = above.padded_inputs;
        const std::size_t slab = shared_tile<T>::bytes(64, 64);
        const std::int64_t stride = 3 * std::int64_t{padded};
        const int down = above.padded / 64;
        const T* const weights = above.weights + std::int64_t{s.h} * above.padded * stride + column;
        clear(acc);
        for_each_slab(
            3 * down,
            [&](int i) {
                copy_rows(shared_tile<T>{memory.slabs + slab * (i % 2), 64},
                          weights + i % down * 64 * stride + std::int64_t{i / down} * padded, stride, 64, 64,
                          128);
                copy_commit();
            },
            [&](int i) {
                add_product<Tiles, NI, 64, false, true>(
                    acc, from.from(64 * (i % down)), conv_lead<Tiles> - i / down,
                    shared_tile<T>{memory.slabs + slab * (i % 2), 64}, 8 * NI * warp_id());
            });
    }
    __device__ __forceinline__ void store_gradients(int l, std::int32_t column, product_type& acc) const {
        const conv_layer_params<T>& layer = forward.layer[l - 1];
        const shared_tile<T>& to = memory.in[l - 1];
        float of_bias[NI][2] = {};
        for_each_of_product<Tiles, NI>(column, [&](int i, int j, int e, int row, std::int32_t c) {
            const std::int64_t at = (chunk * tiling::rows + row) * layer.padded + c;
            const float slope = static_cast<float>(params.slope[l - 1][at]);
            acc[i][j][e] = row % tiling::parity < tiling::rows_of(l) ? acc[i][j][e] * slope : 0.0f;
            of_bias[j][e % 2] += acc[i][j][e];
            params.d[l - 1][at] = static_cast<T>(acc[i][j][e]);
        });
        put_conv_gradients<Tiles, NI>(to, column, acc);
        float* const of_layer = sums + (l == 2 ? forward.layer[0].width : 0);
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const std::int32_t c = column + 8 * (NI * warp_id() + j) + lane % 4 * 2 + e;
                const float bias = conv_column_sum(of_bias[j][e]);
                if (lane < 4 && c < layer.width) {
                    of_layer[c] = bias;
                }
            }
        }
    }
};

/// The backward pass of ConvScorer, portable: the layers again and back through them, for the chunk's own
/// scores.
/// Grid: a block per chunk of conv_tiling<Tiles>::tokens tokens. Block: 128 threads. Shared memory:
/// conv_memory, backward.
/// In: params.forward as in conv_kernel, d_scores [B, heads, S] fp32. Dropout draws are those of the forward
/// pass.
/// Out, all overwritten: in[l] [chunks, rows, padded] T (x, y_1, y_2), slope[l] alike, d[l] [chunks, rows,
/// padded] T (d y_1 to d y_3), d_x [chunks, rows, source.padded] fp32 where wanted, sums [chunks, C1 + C2 + 2
/// C3 + 1] fp32. A chunk without a score writes zeros to its sums.
/// 1. x to its tile and to memory.
/// 2. Layers 1 and 2 again: y_l and its slope to memory, y_l to its tile.
/// 3. Layer 3 again, down to d y_3; sums of b3, readout, readout_bias.
/// 4. d y_2, d y_1 and d x, with the taps reversed.
template <class T, int Tiles>
__global__ void __launch_bounds__(128) conv_backward_kernel(const conv_backward_params<T> params) {
    const scorer_streams& streams = params.forward.streams;
    const scorer_span s = streams.span_of_block(conv_tiling<Tiles>::tokens);
    report_bad_rows(streams, params.forward.source, s);
    if (streams.first_read(s) >= s.count) {
        float* const sums = params.sums + std::int64_t{blockIdx.x} * params.sums_width;
        for (int i = static_cast<int>(threadIdx.x); i < params.sums_width; i += 128) {
            sums[i] = 0.0f;
        }
        return;
    }
    using agent = conv_backward_agent<T, Tiles>;
    const conv_memory<T, Tiles, true> memory(aligned_dynamic_shared(), params.forward, agent::columns);
    agent(params, s, memory).run();
}

/// Partial sums over chunks of d W_l[tap] = d y_l^T in[. + tap], portable.
/// Grid: splits x heads x (padded / 64) x (padded_inputs / 64), the inputs first. Block: 128 threads, 32 x 32
/// numbers of each tap per warp. Shared memory: a tile of `rows` rows and one of rows + 8, 64 columns each.
/// In: d [chunks, rows, padded] T, in [chunks, rows, padded_inputs] T, both of conv_backward_kernel.
/// Out: partial [splits, heads, padded, 3, padded_inputs] fp32, overwritten.
/// 1. Place of the block. 2.
/// Per chunk of its part that has scores: both tiles, then three products.
/// 3. The accumulators go to `partial`.
template <class T, int Tiles>
__global__ void __launch_bounds__(128)
    conv_weight_gradient_kernel(const scorer_streams streams, const T* const d, const std::int32_t padded,
                                const T* const in, const std::int32_t padded_inputs,
                                const std::int32_t splits, float* const partial) {
    using tiling = conv_tiling<Tiles>;
    shared_parts parts(aligned_dynamic_shared());
    const auto d_y = parts.tile<T>(tiling::rows, 64);
    const auto x = parts.tile<T>(tiling::rows + 8, 64);
    // 1. Place of the block.
    const std::int32_t across = padded_inputs / 64, down = padded / 64;
    auto item = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t column = item % across * 64;
    item /= across;
    const std::int32_t row = item % down * 64;
    item /= down;
    const std::int32_t h = item % streams.heads, split = item / streams.heads;
    const std::int32_t chunks = streams.batch * streams.chunks;
    const std::int32_t each = (chunks + splits - 1) / splits;
    const std::int32_t last = min(chunks, (split + 1) * each);
    const int m0 = warp_id() / 2 * 32, n0 = warp_id() % 2 * 32;
    float acc[3][2][4][4];
    for (auto& of_tap : acc) {
        clear(of_tap);
    }
    // 2. The chunks of its part.
    for (std::int32_t i = split * each; i < last; ++i) {
        const scorer_span s =
            streams.span(i / streams.chunks * streams.heads + h, i % streams.chunks, tiling::tokens);
        if (streams.first_read(s) >= s.count) {
            continue;
        }
        const std::int64_t chunk = std::int64_t{s.plane} * streams.chunks + s.chunk_index;
        __syncthreads();  // the tiles are free
        copy_rows(d_y, d + chunk * tiling::rows * padded + row, padded, 64, tiling::rows, 128);
        copy_rows(x, in + chunk * tiling::rows * padded_inputs + column, padded_inputs, 64, tiling::rows,
                  128);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int tap = 0; tap < 3; ++tap) {
            add_product<2, 4, tiling::rows, true, true>(acc[tap], d_y, m0, x, n0, tap);
        }
    }
    // 3. To `partial`.
    float* const to = partial + (std::int64_t{split} * streams.heads + h) * padded * 3 * padded_inputs;
    const int lane = lane_id();
#pragma unroll
    for (int tap = 0; tap < 3; ++tap) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const std::int64_t n = row + m0 + 16 * i + lane / 4 + 8 * (e / 2);
                    const int c = column + n0 + 8 * j + lane % 4 * 2 + e % 2;
                    to[(n * 3 + tap) * padded_inputs + c] = acc[tap][i][j][e];
                }
            }
        }
    }
}

/// into[h][n][tap][c] += the partial sums, in one order: the same bits in every run.
/// Grid: strided. Block: 256 threads, a number each. Shared memory: none.
/// In: partial [splits, heads, padded, 3, padded_inputs].
/// Out: into [heads, width, 3, inputs] fp32, accumulated, times the inverse of the head's scale.
template <class Float>
__global__ void __launch_bounds__(256)
    add_conv_gradients_kernel(const scorer_streams streams, const Float* const partial,
                              const std::int32_t splits, const std::int32_t width, const std::int32_t padded,
                              const std::int32_t inputs, const std::int32_t padded_inputs,
                              Float* const into) {
    const std::int32_t heads = streams.heads;
    const std::int64_t count = std::int64_t{heads} * width * 3 * inputs;
    for (std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * 256) {
        const std::int64_t c = i % inputs, tap = i / inputs % 3, n = i / inputs / 3 % width;
        const std::int64_t h = i / inputs / 3 / width;
        Float sum = 0;
        for (std::int32_t split = 0; split < splits; ++split) {
            sum += partial[(((std::int64_t{split} * heads + h) * padded + n) * 3 + tap) * padded_inputs + c];
        }
        into[i] += sum * streams.unscale(h);
    }
}

/// Gradients of keys and values of ConvScorer, portable: the chunks that see a token, added up, and RoPE
/// reversed.
/// Grid: a block per chunk. Block: 128 threads, a warp per token. Shared memory: none.
/// In: params.d_x [chunks, rows, source.padded] fp32 of conv_backward_kernel.
/// Out: d_k [B, S, heads, head_dim_qk] and d_v fp32, overwritten for the chunk's tokens.
template <class T, int Tiles>
__global__ void __launch_bounds__(128)
    conv_input_gradient_kernel(const conv_backward_params<T> params, const rows_view<float> d_k,
                               const rows_view<float> d_v) {
    using tiling = conv_tiling<Tiles>;
    constexpr std::int32_t seen = tiling::tokens + 2 * conv_reach;  // by a chunk
    const scorer_streams& streams = params.forward.streams;
    const scorer_source<T>& source = params.forward.source;
    const scorer_span s = streams.span_of_block(tiling::tokens);
    const float unscale = streams.unscale(s.h);
    const std::int64_t stream = blockIdx.x - (s.first - s.from) / tiling::tokens;  // its first chunk
    for (int r = warp_id(); r < s.count; r += 4) {
        const std::int32_t t = s.first + r;
        // Chunk j of the stream sees `seen` tokens from from + tokens j - delay - 6 on.
        const std::int32_t ahead = t - s.from + streams.delay + conv_reach;
        const auto number = [&](std::int32_t c) {
            float sum = 0.0f;
            for (std::int32_t j = max(0, (ahead - seen + tiling::tokens) / tiling::tokens);
                 j <= ahead / tiling::tokens; ++j) {
                const std::int32_t first = s.from + j * tiling::tokens, left = s.end - first;
                const std::int32_t u = ahead - j * tiling::tokens;
                if (left > 0 && max(0, s.begin + streams.delay - first) < min(left, tiling::tokens) &&
                    u < seen) {
                    sum += params.d_x[((stream + j) * tiling::rows + u % 2 * tiling::parity + u / 2) *
                                          source.padded +
                                      c];
                }
            }
            return sum * unscale;
        };
        for (std::int32_t c = lane_id(); c < source.k.dim; c += 32) {
            d_k.row(s.b, s.h, t)[c] = source.turned(c, t - s.begin, 1.0f, number);
        }
        for (std::int32_t c = lane_id(); c < source.v.dim; c += 32) {
            d_v.row(s.b, s.h, t)[c] = number(source.k.dim + c);
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
