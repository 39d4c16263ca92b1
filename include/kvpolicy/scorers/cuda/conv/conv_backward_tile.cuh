// What the kernels of ConvScorer's backward pass on Hopper share: sizes and tokens of a tile, what tiles
// leave in memory, and transposed weights.
//
// A tile answers for 104 tokens' scores, and for what the layers' results at these tokens (and up to 4 more
// at a stream's ends, which no other tile answers for) have as gradients.
//
// Row i is, from the first token a whose y_1 the tile answers for, token a - 10 + i of x, a - 8 + i of y_1, a
// - 6 + i of y_2, a - 4 + i of y_3 and d y_3, a - 2 + i of d y_2, a + i of d y_1: so back, too, a row needs
// rows i, i + 2, i + 4, with weights transposed and taps the other way.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_hopper.cuh>

#include <cstddef>
#include <cstdint>

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

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
