// A convolution on Hopper: how wide layers are, what weights they are made of, and how rows of a tile lie in
// shared memory.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
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

/// Padded widths of a scorer of up to `Inputs` numbers a token (128 or 256): layer l takes channels(l - 1)
/// and gives channels(l).
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
/// Byte offset of eight columns (c, a multiple of 8) of a row of a tile.
__device__ inline std::uint32_t conv_offset(int row, int c) {
    return static_cast<std::uint32_t>((c / 8 * conv_pitch + row) * 16);
}
#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
