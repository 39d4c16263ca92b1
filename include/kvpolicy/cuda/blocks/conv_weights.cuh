// A convolution's tiles on Hopper: how wide layers are and how rows lie in shared memory; and the ring through which weights come to products tokens
// x weights, by which gradients of inputs are made (conv_inputs_hopper.cuh). Other products take theirs from registers (conv_fragments.cuh).
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/mma.cuh>
#include <kvpolicy/cuda/blocks/wgmma.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int conv_tile = 120;        // tokens of a tile that begins anew; others have conv_tile_rows
inline constexpr int conv_tile_rows = 128;   // rows of a layer
inline constexpr int conv_input_rows = 132;  // rows of x: those of a layer, and two taps' reach
inline constexpr int conv_pitch = 132;       // rows of a tile, that is
inline constexpr int conv_consumers = 256;   // threads
inline constexpr int conv_ring = 5;          // stages of weights
inline constexpr int conv_stage = 8192;      // bytes

/// Padded widths of a scorer of up to `Inputs` numbers a token (128 or 256): layer l takes channels(l - 1) and gives channels(l).
template <int Inputs>
struct conv_hopper_shape {
    KVPOLICY_HOST_DEVICE static constexpr int channels(int layer) { return Inputs >> layer; }
    /// Where a layer's weights begin in a head's, and with layer 4 how many there are.
    KVPOLICY_HOST_DEVICE static constexpr int weights_before(int layer) {
        int before = 0;
        for (int l = 1; l < layer; ++l) {
            before += 3 * channels(l - 1) * channels(l);
        }
        return before;
    }
    KVPOLICY_HOST_DEVICE static constexpr std::size_t tile_bytes(int layer) {
        return std::size_t{conv_pitch} * static_cast<std::size_t>(2 * channels(layer));
    }
    /// Biases of the three layers, then the readout.
    static constexpr int constants = channels(1) + channels(2) + 2 * channels(3);

    static_assert(tile_bytes(0) % 16 == 0 && tile_bytes(1) % 16 == 0);
};

/// A scorer's weights, [heads, width, 3, inputs] a layer.
struct conv_weights {
    const float* layer[3];
    std::int32_t width[3], inputs[3];
    std::int32_t heads;
};
#if KVPOLICY_HOPPER_CODE

/// A block's part of shared memory for weights: stages, and what says that one is full or free.
struct conv_weight_ring {
    std::uint32_t data, full, empty;

    __device__ std::uint32_t stage(int i) const { return data + static_cast<std::uint32_t>(i * conv_stage); }
    __device__ std::uint32_t full_of(int i) const { return full + static_cast<std::uint32_t>(i * 8); }
    __device__ std::uint32_t empty_of(int i) const { return empty + static_cast<std::uint32_t>(i * 8); }
};
/// Which stage is next, and the parity of its phase.
struct conv_turn {
    int stage = 0;
    std::uint32_t parity = 0;

    __device__ void next() {
        if (++stage == conv_ring) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/// Byte offset of eight columns (c, a multiple of 8) of a row of a tile.
__device__ inline std::uint32_t conv_offset(int row, int c) {
    return static_cast<std::uint32_t>((c / 8 * conv_pitch + row) * 16);
}

/// `stages` stages of weights through the ring, in the order in which they are taken; by one thread.
template <class T>
__device__ inline void bring_conv_weights(const T*& from, int stages, std::uint32_t bytes,
                                          const conv_weight_ring& ring, conv_turn& turn) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
        barrier_wait(ring.empty_of(turn.stage), turn.parity ^ 1);
        barrier_expect(ring.full_of(turn.stage), bytes);
        copy_bulk(ring.stage(turn.stage), from, bytes, ring.full_of(turn.stage));
        from += bytes / 2;
        turn.next();
    }
}
/// Barriers of a ring, by the whole block.
__device__ inline void begin_conv_ring(const conv_weight_ring& ring) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < conv_ring; ++i) {
            barrier_init(ring.full_of(i), 1);
            barrier_init(ring.empty_of(i), conv_consumers / 32 * arrivals_of_warp);
        }
        barrier_init_fence();
    }
    __syncthreads();
}

/// acc = sum over taps of rows i + 2 tap of `in`, from the warpgroup's first row on, times what the ring brings: weights of Width results and Inputs inputs
/// a tap, Depth of them a stage.
template <int Width, int Inputs, int Depth, class T>
__device__ inline void conv_taps_product(float (&acc)[Width / 2], std::uint32_t in,
                                         const conv_weight_ring& ring, conv_turn& turn) {
    constexpr int across = Inputs / Depth;
    // Zeros, though a product could overwrite: what is read without a value would be alive between tiles, and take registers there.
#pragma unroll
    for (float& sum : acc) {
        sum = 0.0f;
    }
    pin(acc);
    int before = 0;
#pragma unroll 1
    for (int i = 0; i < 3 * across; ++i) {
        barrier_wait(ring.full_of(turn.stage), turn.parity);
        const std::uint64_t a =
            describe_columns(in + conv_offset(2 * (i / across), i % across * Depth), conv_pitch * 16);
        const std::uint64_t b = describe_columns(ring.stage(turn.stage), Width * 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Depth; k += 16) {
            wgmma<T, 0, 0>(acc, a + static_cast<std::uint64_t>(k / 8 * conv_pitch),
                           b + static_cast<std::uint64_t>(k / 8 * Width), 1);
        }
        wgmma_commit();
        if (i > 0) {
            wgmma_wait<1>();
            warp_arrive(ring.empty_of(before), lane_id());
        }
        before = turn.stage;
        turn.next();
    }
    wgmma_wait<0>();
    pin(acc);
    warp_arrive(ring.empty_of(before), lane_id());
}
#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
