// What step_mass_kernel is given.
#pragma once

#include <kvpolicy/caches/cuda/observed/mass_source.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Warps of a block. Each has a KV head at a time, and of that a tile of rows.
inline constexpr int mass_warps = 8;

/// View: the cache. Source: step_logits or given_masses.
template <class View, class Source>
struct step_mass_params {
    View cache;
    Source source{};
    std::uint32_t* status = nullptr;  // [count]
    std::int32_t shares = 1;          // blocks that share the tiles of a head

    /// Blocks that share the KV heads of an entry's tile.
    [[nodiscard]] __host__ __device__ std::int32_t parts() const {
        return source.whole_layer ? 1 : (cache.kv_heads + mass_warps - 1) / mass_warps;
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
