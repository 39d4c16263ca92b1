// A convolution's forward products on Hopper: weights times tokens, results of a layer as [channels][tokens].
//
// Products of 64 and more channels take weights from registers: they lie in memory as a warpgroup's threads hold them, 16 bytes a thread and
// step of 16 inputs, so each thread loads its own several steps ahead, and no one waits for another. Two warpgroups share a layer: of 128
// channels each takes 64, for all tokens; of 64 each takes all, for 64 tokens. Narrower layers multiply tokens by weights that stay in
// shared memory.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/conv_weights.cuh>
#include <kvpolicy/cuda/blocks/mma.cuh>
#include <kvpolicy/cuda/blocks/wgmma.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#ifndef CONV_GROUP
#define CONV_GROUP 2
#define CONV_SLOTS 4
#endif
inline constexpr int conv_group = CONV_GROUP;  // steps of a layer's product that are waited for together
inline constexpr int conv_slots = CONV_SLOTS;  // groups whose weights a thread has room for

/// How the forward pass shares out a scorer of up to `Inputs` numbers a token.
template <int Inputs>
struct conv_forward_shape : conv_hopper_shape<Inputs> {
    using base = conv_hopper_shape<Inputs>;
    /// Whether a layer's weights go from registers into its products.
    KVPOLICY_HOST_DEVICE static constexpr bool in_registers(int layer) { return base::channels(layer) >= 64; }
    /// Tokens of a warpgroup's product.
    KVPOLICY_HOST_DEVICE static constexpr int tokens(int layer) {
        return base::channels(layer) == 128 ? conv_tile_rows : conv_tile_rows / 2;
    }
    static constexpr int first_narrow = in_registers(2) ? 3 : 2;
    /// Numbers that stay in shared memory, of the layers from first_narrow on.
    static constexpr int narrow = base::weights_before(4) - base::weights_before(first_narrow);
    /// Whether y_2 takes the place of y_1, so that two blocks fit on a multiprocessor.
    static constexpr bool overlaid = Inputs == 256;
    static constexpr int frequencies = Inputs / 2;
    static constexpr std::size_t layers_bytes = base::tile_bytes(1) + (overlaid ? 0 : base::tile_bytes(2));
    static constexpr std::size_t shared_bytes =
        base::tile_bytes(0) + layers_bytes + 2 * narrow + (base::constants + frequencies) * sizeof(float);
    static_assert(base::channels(1) <= 128);
};
static_assert(conv_forward_shape<256>::shared_bytes <= 113 * 1024, "two blocks a multiprocessor");

/// Eight weights of a layer of head `h`, the at-th eight of what pack_conv_fragments() makes of it.
template <int Layer, class Shape, class T>
__device__ inline uint4 conv_fragment(const conv_weights& from, std::uint32_t h, std::uint32_t at) {
    constexpr std::uint32_t inputs_of_tap = Shape::channels(Layer - 1), channels = Shape::channels(Layer),
                            steps = 3 * inputs_of_tap / 16;
    const float* const layer = from.layer[Layer - 1];
    const auto inputs = static_cast<std::uint32_t>(from.inputs[Layer - 1]),
               width = static_cast<std::uint32_t>(from.width[Layer - 1]);
    const bool even = inputs % 2 == 0 && reinterpret_cast<std::uintptr_t>(layer) % 8 == 0;
    const auto pair = [&](std::uint32_t n, std::uint32_t k) {
        const std::uint32_t tap = k / inputs_of_tap, c = k % inputs_of_tap;
        const float* const row = layer + (std::uint64_t{h} * width * 3 + n * 3 + tap) * inputs + c;
        float2 w = make_float2(0.0f, 0.0f);
        if (n < width && c < inputs) {
            if (even) {
                w = *reinterpret_cast<const float2*>(row);
            } else {
                w.x = row[0];
                w.y = c + 1 < inputs ? row[1] : 0.0f;
            }
        }
        return w;
    };
    float2 w[4];
    if constexpr (Shape::in_registers(Layer)) {
        const std::uint32_t lane = at % 32, n = at / 128 / steps * 64 + at / 32 % 4 * 16 + lane / 4,
                            k = at / 128 % steps * 16 + lane % 4 * 2;
        w[0] = pair(n, k);
        w[1] = pair(n + 8, k);
        w[2] = pair(n, k + 8);
        w[3] = pair(n + 8, k + 8);
    } else {
#pragma unroll
        for (std::uint32_t e = 0; e < 4; ++e) {
            w[e] = pair(at % channels, at / channels * 8 + 2 * e);
        }
    }
    return make_uint4(pack<T>(w[0].x, w[0].y), pack<T>(w[1].x, w[1].y), pack<T>(w[2].x, w[2].y),
                      pack<T>(w[3].x, w[3].y));
}

/// The weights of all heads as the forward pass takes them, to [heads][weights_before(4)]; 0 where a scorer is narrower. Layers that products take
/// from registers: [64 channels][16 of tap * inputs + c][thread of a warpgroup][8]; others as pack_conv() has them. By thread `thread` of `threads` of
/// the grid.
template <int Inputs, class T>
__device__ inline void pack_conv_fragments(const conv_weights& from, T* to, std::uint32_t thread,
                                           std::uint32_t threads) {
    using shape = conv_forward_shape<Inputs>;
    constexpr std::uint32_t each = shape::weights_before(4) / 8;
    const std::uint32_t count = static_cast<std::uint32_t>(from.heads) * each;
    for (std::uint32_t i = thread; i < count; i += threads) {
        const std::uint32_t h = i / each, at = i % each;
        const uint4 eight = at < shape::weights_before(2) / 8 ? conv_fragment<1, shape, T>(from, h, at)
                            : at < shape::weights_before(3) / 8
                                ? conv_fragment<2, shape, T>(from, h, at - shape::weights_before(2) / 8)
                                : conv_fragment<3, shape, T>(from, h, at - shape::weights_before(3) / 8);
        reinterpret_cast<uint4*>(to)[i] = eight;
    }
}

#if KVPOLICY_HOPPER_CODE

/// A thread's weights on their way into a layer's product.
template <int Layer, class Shape>
struct conv_fragments {
    static constexpr int steps = 3 * Shape::channels(Layer - 1) / 16, groups = steps / conv_group;
    static_assert(steps % conv_group == 0);

    std::uint32_t of[conv_slots][conv_group][4];
    const uint4* from;

    /// `weights`: the head's.
    template <class T>
    __device__ explicit conv_fragments(const T* weights) {
        const auto thread = static_cast<int>(threadIdx.x);
        from = reinterpret_cast<const uint4*>(weights + Shape::weights_before(Layer)) +
               (Shape::channels(Layer) == 128 ? thread / 128 * steps * 128 : 0) + thread % 128;
    }
    /// Sends for the first of them.
    __device__ void begin() {
#pragma unroll
        for (int i = 0; i + 1 < conv_slots; ++i) {
            load(i);
        }
    }
    __device__ void load(int group) {
#pragma unroll
        for (int i = 0; i < conv_group; ++i) {
            std::uint32_t(&to)[4] = of[group % conv_slots][i];
            // Not in L1, which the two warpgroups' 270 KB would only pass through.
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "l"(from + (group * conv_group + i) * 128)
                         : "memory");
        }
    }
};

/// acc [64 channels][tokens] = sum over taps of weights times rows i + 2 tap of the tile at `in`.
template <int Layer, class Shape, class T>
__device__ inline void conv_product(float (&acc)[Shape::tokens(Layer) / 2], std::uint32_t in,
                                    conv_fragments<Layer, Shape>& weights) {
    using fragments = conv_fragments<Layer, Shape>;
    constexpr int of_tap = Shape::channels(Layer - 1) / 16;
    const std::uint64_t rows = describe_columns(in, conv_pitch * 16);
#pragma unroll
    for (float& sum : acc) {
        sum = 0.0f;
    }
    pin(acc);
#pragma unroll
    for (int g = 0; g < fragments::groups; ++g) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < conv_group; ++i) {
            const int step = g * conv_group + i;
            wgmma<T, 0>(
                acc, weights.of[g % conv_slots][i],
                rows + static_cast<std::uint64_t>(2 * (step / of_tap) + step % of_tap * 2 * conv_pitch), 1);
        }
        wgmma_commit();
        if (g > 0) {
            wgmma_wait<1>();
            pin(weights.of[(g - 1) % conv_slots]);
        }
        if (g + conv_slots - 1 < fragments::groups) {
            weights.load(g + conv_slots - 1);
        }
    }
    wgmma_wait<0>();
    pin(acc);
    pin(weights.of[(fragments::groups - 1) % conv_slots]);
}

/// acc [64 tokens][channels] = sum over taps of rows i + 2 tap of the tile at `in` times weights in shared memory.
template <int Layer, class Shape, class T>
__device__ inline void conv_narrow_product(float (&acc)[Shape::channels(Layer) / 2], std::uint32_t in,
                                           std::uint32_t weights) {
    constexpr int width = Shape::channels(Layer), inputs = Shape::channels(Layer - 1);
    const std::uint64_t a = describe_columns(in, conv_pitch * 16), b = describe_columns(weights, width * 16);
#pragma unroll
    for (float& sum : acc) {
        sum = 0.0f;
    }
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 3 * inputs; k += 16) {
        wgmma<T, 0, 0>(acc, a + static_cast<std::uint64_t>(2 * (k / inputs) + k % inputs / 8 * conv_pitch),
                       b + static_cast<std::uint64_t>(k / 8 * width), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
}

#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
