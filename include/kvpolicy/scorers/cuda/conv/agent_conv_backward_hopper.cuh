// The block of kernel_conv_backward_hopper.cuh: one tile, the layers again, and back through them.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/conv/agent_conv_slopes.cuh>
#include <kvpolicy/scorers/cuda/conv/conv_backward_tile.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_hopper.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if KVPOLICY_HOPPER_CODE

/// What a block has in shared memory besides the tile.
struct conv_backward_hopper_memory {
    unsigned char *tile, *narrow, *back_narrow;
    float *constants, *frequencies, *columns, *d_score;
};

/// A block's tile. `weights` and `back` are the head's. Rows: conv_backward_tile.cuh.
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

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
