// A convolution's forward products on Hopper: weights times tokens, results of a layer as [channels][tokens].
//
// Products of 64 and more channels take weights from registers: they lie in memory as a warpgroup's threads
// hold them, 16 bytes a thread and step of 16 inputs, so each thread loads its own several steps ahead, and
// no one waits for another. Two warpgroups share a layer: of 128 channels each takes 64, for all tokens; of
// 64 each takes all, for 64 tokens. Narrower layers multiply tokens by weights that stay in shared memory.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/conv/conv_weights.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int conv_group = 2;  // steps of a layer's product that are waited for together

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
    /// Whether y_2 takes the place of y_1, so that two blocks fit on an SM.
    static constexpr bool overlaid = Inputs == 256;
    static constexpr int frequencies = Inputs / 2;
    static constexpr std::size_t layers_bytes = base::tile_bytes(1) + (overlaid ? 0 : base::tile_bytes(2));
    static constexpr std::size_t shared_bytes =
        base::tile_bytes(0) + layers_bytes + 2 * narrow + (base::constants + frequencies) * sizeof(float);
    static_assert(base::channels(1) <= 128);
};
static_assert(conv_forward_shape<256>::shared_bytes <= 113 * 1024, "two blocks a SM");

/// The at-th eight weights of a product as it takes them; pair(n, k) are those of result n and of numbers k
/// and k + 1 of the three taps. From registers: [64 results][16 numbers][thread of a warpgroup][8]; from
/// shared memory: [8 numbers][result][8].
template <int Results, int Inputs, class T, class Pair>
__device__ inline uint4 conv_eight_weights(std::uint32_t at, const Pair& pair) {
    float2 w[4];
    if constexpr (Results >= 64) {
        constexpr std::uint32_t steps = 3 * Inputs / 16;
        const std::uint32_t lane = at % 32, n = at / 128 / steps * 64 + at / 32 % 4 * 16 + lane / 4,
                            k = at / 128 % steps * 16 + lane % 4 * 2;
        w[0] = pair(n, k);
        w[1] = pair(n + 8, k);
        w[2] = pair(n, k + 8);
        w[3] = pair(n + 8, k + 8);
    } else {
#pragma unroll
        for (std::uint32_t e = 0; e < 4; ++e) {
            w[e] = pair(at % Results, at / Results * 8 + 2 * e);
        }
    }
    return make_uint4(pack<T>(w[0].x, w[0].y), pack<T>(w[1].x, w[1].y), pack<T>(w[2].x, w[2].y),
                      pack<T>(w[3].x, w[3].y));
}
/// The same of a layer of head `h`; 0 where a scorer is narrower.
template <int Layer, class Shape, class T>
__device__ inline uint4 conv_layer_weights(const conv_weights& from, std::uint32_t h, std::uint32_t at) {
    constexpr std::uint32_t of_tap = Shape::channels(Layer - 1);
    const float* const layer = from.layer[Layer - 1];
    const auto inputs = static_cast<std::uint32_t>(from.inputs[Layer - 1]),
               width = static_cast<std::uint32_t>(from.width[Layer - 1]);
    const bool even = inputs % 2 == 0 && reinterpret_cast<std::uintptr_t>(layer) % 8 == 0;
    return conv_eight_weights<Shape::channels(Layer), Shape::channels(Layer - 1), T>(
        at, [&](std::uint32_t n, std::uint32_t k) {
            const std::uint32_t c = k % of_tap;
            const float* const row = layer + (std::uint64_t{h} * width * 3 + n * 3 + k / of_tap) * inputs + c;
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
        });
}

/// The weights of all heads as products of the three layers take them, to [heads][weights_before(4)]. By
/// thread `thread` of `threads` of the grid.
template <int Inputs, class T>
__device__ inline void pack_conv(const conv_weights& from, T* to, std::uint32_t thread,
                                 std::uint32_t threads) {
    using shape = conv_forward_shape<Inputs>;
    constexpr std::uint32_t each = shape::weights_before(4) / 8;
    const std::uint32_t count = static_cast<std::uint32_t>(from.heads) * each;
    for (std::uint32_t i = thread; i < count; i += threads) {
        const std::uint32_t h = i / each, at = i % each;
        reinterpret_cast<uint4*>(to)[i] =
            at < shape::weights_before(2) / 8 ? conv_layer_weights<1, shape, T>(from, h, at)
            : at < shape::weights_before(3) / 8
                ? conv_layer_weights<2, shape, T>(from, h, at - shape::weights_before(2) / 8)
                : conv_layer_weights<3, shape, T>(from, h, at - shape::weights_before(3) / 8);
    }
}

#if KVPOLICY_HOPPER_CODE

/// A thread's weights on their way into a product of `Results` channels, 64 or 128, of three taps of `Inputs`
/// numbers; space for `Chunks` groups of steps.
template <int Results, int Inputs, int Chunks = 4>
struct conv_fragments {
    static constexpr int steps = 3 * Inputs / 16, groups = steps / conv_group,
                         tokens = Results == 128 ? conv_tile_rows : conv_tile_rows / 2;
    static_assert(steps % conv_group == 0 && groups >= Chunks - 1);

    std::uint32_t of[Chunks][conv_group][4];
    const uint4* from;

    /// `weights`: the product's.
    template <class T>
    __device__ explicit conv_fragments(const T* weights) {
        const auto thread = static_cast<int>(threadIdx.x) % conv_consumers;
        from = reinterpret_cast<const uint4*>(weights) + (Results == 128 ? thread / 128 * steps * 128 : 0) +
               thread % 128;
    }
    /// Sends for the first of them.
    __device__ void begin() {
#pragma unroll
        for (int i = 0; i + 1 < Chunks; ++i) {
            load(i);
        }
    }
    __device__ void load(int group) {
#pragma unroll
        for (int i = 0; i < conv_group; ++i) {
            std::uint32_t(&to)[4] = of[group % Chunks][i];
            const uint4* const at = from + (group * conv_group + i) * 128;
            // Two warpgroups share the weights of 64 channels; others would only pass through L1.
            if constexpr (Results == 64) {
                asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                             : "l"(at)
                             : "memory");
            } else {
                asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                             : "l"(at)
                             : "memory");
            }
        }
    }
};

/// acc [64 channels][tokens] = sum over taps of weights times rows i + 2 tap of the tile at `in`. After
/// begin().
template <class T, int Results, int Inputs, int Chunks, int N>
__device__ inline void conv_product(float (&acc)[N], std::uint32_t in,
                                    conv_fragments<Results, Inputs, Chunks>& weights) {
    using fragments = conv_fragments<Results, Inputs, Chunks>;
    static_assert(N == fragments::tokens / 2);
    constexpr int of_tap = Inputs / 16;
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
                acc, weights.of[g % Chunks][i],
                rows + static_cast<std::uint64_t>(2 * (step / of_tap) + step % of_tap * 2 * conv_pitch), 1);
        }
        wgmma_commit();
        if (g > 0) {
            wgmma_wait<1>();
            pin(weights.of[(g - 1) % Chunks]);
        }
        if (g + Chunks - 1 < fragments::groups) {
            weights.load(g + Chunks - 1);
        }
    }
    wgmma_wait<0>();
    pin(acc);
    pin(weights.of[(fragments::groups - 1) % Chunks]);
}

/// acc [64 tokens][Results] = sum over taps of rows i + 2 tap of the tile at `in` times weights in shared
/// memory.
template <class T, int Results, int Inputs>
__device__ inline void conv_narrow_product(float (&acc)[Results / 2], std::uint32_t in,
                                           std::uint32_t weights) {
    const std::uint64_t a = describe_columns(in, conv_pitch * 16),
                        b = describe_columns(weights, Results * 16);
#pragma unroll
    for (float& sum : acc) {
        sum = 0.0f;
    }
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 3 * Inputs; k += 16) {
        wgmma<T, 0, 0>(acc, a + static_cast<std::uint64_t>(2 * (k / Inputs) + k % Inputs / 8 * conv_pitch),
                       b + static_cast<std::uint64_t>(k / 8 * Results), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
}
#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
