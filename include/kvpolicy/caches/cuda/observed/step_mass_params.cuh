// What step_mass_kernel is given.
#pragma once

#include <kvpolicy/caches/cuda/observed/step_logits.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Warps of a block. Each has a KV head at a time, and of that a tile of rows.
inline constexpr int mass_warps = 8;

/// View: the cache. Compute: the numbers of attention.
template <class View, class Compute>
struct step_mass_params {
    View cache;
    step_logits<Compute> logits{};
    std::uint32_t* status = nullptr;  // [count]
    std::int32_t shares = 1;          // blocks that share the tiles of a head

    /// Blocks that share the KV heads of an entry's tile.
    [[nodiscard]] __host__ __device__ std::int32_t parts() const {
        return logits.whole_layer ? 1 : (cache.kv_heads + mass_warps - 1) / mass_warps;
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
