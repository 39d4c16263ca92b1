// Gradients of keys and values of a ConvScorer on Hopper, from those of the first layer's results that
// conv_backward_hopper_kernel left in memory.
//
// y_1 of token u is made of tokens u - 2, u and u + 2, so d x of token t is what W_1 makes of d y_1 of t + 2,
// t and t - 2: the product of kernel_conv_hopper.cuh once more, with weights transposed and taps the other
// way. A block has 128 tokens of one head. Rows of d y_1 come from the images of the tiles that answer for
// them (conv_backward_span), two or three of them.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/conv/agent_conv_products.cuh>
#include <kvpolicy/scorers/cuda/conv/conv_backward_tile.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int conv_input_width = 128;  // numbers of a token that a product gives

template <int Inputs>
struct conv_input_shape : conv_backward_hopper_shape<Inputs> {
    using base = conv_backward_hopper_shape<Inputs>;
    static constexpr int c1 = base::channels(1), products = Inputs / conv_input_width;
    static constexpr int each = 3 * c1 * conv_input_width;  // weights of a product
    static constexpr int weights = products * each;         // of a head
    static constexpr int pitch = conv_input_width + 4;
    static constexpr std::size_t shared_bytes = base::tile_bytes(1) + sizeof(float) * conv_tile_rows * pitch;
    static_assert(base::tile_bytes(1) % 16 == 0 && shared_bytes <= 113 * 1024);
};

/// W_1 of all heads, transposed and with the taps reversed, in the order in which threads load it.
/// Grid: strided. Block: 256 threads, eight numbers each. Shared memory: none.
/// In: from (fp32 weights of all heads).
/// Out: to [heads, conv_input_shape::weights] T, overwritten.
template <class T, int Inputs>
__global__ void __launch_bounds__(256) pack_conv_inputs_kernel(const conv_weights from, T* const to) {
    using shape = conv_input_shape<Inputs>;
    constexpr std::uint32_t each = shape::weights / 8;
    const std::uint32_t count = static_cast<std::uint32_t>(from.heads) * each;
    for (std::uint32_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
        reinterpret_cast<uint4*>(to)[i] = conv_backward_weights<1, shape, T>(from, i / each, i % each);
    }
}

#if KVPOLICY_HOPPER_CODE
/// Where d y_1 of tokens stands: the images of a stream's tiles.
struct conv_input_images {
    scorer_span s;
    std::int64_t begin;  // the stream's first tile
    std::int32_t delay, count, lowest, highest;

    __device__ conv_input_images(const scorer_streams& tiles, const scorer_span& span)
        : s(span),
          begin(std::int64_t{span.plane} * tiles.chunks +
                tiles.first_chunk(span.segment, conv_backward_tile_rows)),
          delay(tiles.delay),
          count(span.end - span.from),
          lowest(max(span.begin, span.from - tiles.delay)),
          highest(span.end - tiles.delay) {}
    /// The tile and the row of token u; false: it has no gradient.
    __device__ bool find(std::int32_t u, std::int64_t& tile, std::int32_t& row) const {
        const std::int32_t at = u + delay - s.from;
        if (at < -4 || at >= count + 4 || lowest >= highest) {
            return false;
        }
        const std::int32_t number = min(max(at, 0), count - 1) / conv_backward_tile_rows,
                           first = number * conv_backward_tile_rows;
        tile = begin + number;
        row = at - first + (number == 0 ? 4 : 0);
        // A tile without a score near it has left nothing.
        return s.from - delay + first + min(conv_backward_tile_rows, count - first) + 4 > lowest;
    }
};
#endif

/// Gradients of keys and values of ConvScorer on Hopper. Keys have at most 128 numbers.
/// Grid: a block per 128 tokens; streams.chunks counts these parts of a plane. Block: conv_consumers threads,
/// two warpgroups; two blocks per SM. Shared memory: conv_input_shape<Inputs>::shared_bytes.
/// In: d_y, d y_1 of conv_backward_hopper_kernel's tiles (`tiles`); weights of pack_conv_inputs_kernel.
/// Out: d_k [B, S, heads, head_dim_qk] and d_v fp32, overwritten.
/// 1. d y_1 of the block's tokens, from two or three tiles, to shared memory.
/// Per 128 numbers of a token: 2. the product;
/// 3. RoPE reversed, and the rows to d_k and d_v.
template <class T, int Inputs>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(conv_consumers), 2)
    conv_input_gradients_hopper_kernel([[maybe_unused]] const scorer_streams streams,
                                       [[maybe_unused]] const scorer_streams tiles,
                                       [[maybe_unused]] const scorer_source<T> source,
                                       [[maybe_unused]] const T* const d_y,
                                       [[maybe_unused]] const T* const weights,
                                       [[maybe_unused]] const rows_view<float> d_k,
                                       [[maybe_unused]] const rows_view<float> d_v) {
#if KVPOLICY_HOPPER_CODE
    using shape = conv_input_shape<Inputs>;
    constexpr int c1 = shape::c1;
    const scorer_span s = streams.span_of_block(conv_tile_rows);
    if (s.count == 0) {
        return;
    }
    unsigned char* const tile = dynamic_shared();
    auto* const results = reinterpret_cast<float*>(tile + shape::tile_bytes(1));
    const auto thread = static_cast<int>(threadIdx.x);
    // Row i is token s.first - 2 + i of y_1, for token s.first + i of x that of tap 2.
    // 1. d y_1 of the block's tokens.
    const conv_input_images images(tiles, s);
    const float unscale = tiles.unscale(s.h);
    for (int i = thread; i < c1 / 8 * conv_input_rows; i += conv_consumers) {
        const int row = i % conv_input_rows, c = i / conv_input_rows;
        std::int64_t number = 0;
        std::int32_t at = 0;
        const bool there = images.find(s.first - 2 + row, number, at);
        copy_16(shared_address(tile) + conv_offset(row, 8 * c),
                d_y + (there ? ((number * (c1 / 8) + c) * conv_back_rows + at) * 8 : 0), there ? 16 : 0);
    }
    copy_commit();
    copy_wait<0>();
    fence_async_proxy();
    named_barrier(1, conv_consumers);
    for (int product = 0; product < shape::products; ++product) {
        // 2. The product.
        conv_fragments<conv_input_width, c1, 4> of_product(weights + std::int64_t{s.h} * shape::weights +
                                                           product * shape::each);
        of_product.begin();
        float acc[of_product.tokens / 2];
        conv_product<T>(acc, shared_address(tile), of_product);
        float* const to = results + thread / 32 * 16 + thread % 32 / 4 + thread % 4 * 2 * shape::pitch;
#pragma unroll
        for (int j = 0; j < conv_tile_rows / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                to[(8 * j + e % 2) * shape::pitch + e / 2 * 8] = acc[4 * j + e];
            }
        }
        named_barrier(1, conv_consumers);
        // 3. RoPE reversed, to d_k and d_v.
        const std::int32_t from = product * conv_input_width,
                           columns = min(conv_input_width, source.size - from);
        for (int i = thread / 32; i < s.count; i += conv_consumers / 32) {
            const std::int32_t t = s.first + i;
            const float* const of = results + i * shape::pitch;
            for (std::int32_t c = thread % 32; c < columns; c += 32) {
                if (from + c < source.k.dim) {
                    d_k.row(s.b, s.h, t)[from + c] =
                        source.turned(from + c, t - s.begin, 1.0f,
                                      [&](std::int32_t other) { return of[other - from] * unscale; });
                } else {
                    d_v.row(s.b, s.h, t)[from + c - source.k.dim] = of[c] * unscale;
                }
            }
        }
        named_barrier(1, conv_consumers);  // the next results may come
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
