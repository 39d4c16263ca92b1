// Rows of keys and values from one place to another.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Copies a row of keys or values, by a warp.
template <class T>
__device__ void copy_row(const T* from, T* to, std::int32_t dim) {
    using Piece = std::conditional_t<sizeof(T) == 2, uint4, T>;
    constexpr int each = sizeof(Piece) / sizeof(T);
    for (std::int32_t i = lane_id(); i < dim / each; i += 32) {
        reinterpret_cast<Piece*>(to)[i] = reinterpret_cast<const Piece*>(from)[i];
    }
}

/// Copies a key and its value, by a warp: one row by each half, so that both are on their way at once.
template <class T>
__device__ void copy_entry(const T* key, const T* value, T* to_key, T* to_value, std::int32_t dim_qk,
                           std::int32_t dim_vo) {
    using Piece = std::conditional_t<sizeof(T) == 2, uint4, T>;
    constexpr int each = sizeof(Piece) / sizeof(T);
    const bool of_key = lane_id() < 16;
    const auto* const from = reinterpret_cast<const Piece*>(of_key ? key : value);
    auto* const to = reinterpret_cast<Piece*>(of_key ? to_key : to_value);
    const std::int32_t pieces = (of_key ? dim_qk : dim_vo) / each;
    for (std::int32_t i = lane_id() % 16; i < pieces; i += 16) {
        to[i] = from[i];
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
