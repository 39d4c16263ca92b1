// From the logarithms that qk_reduce writes to masses.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int dense_mass_threads = 256;
inline constexpr std::int32_t dense_mass_keys = 1024;  // of a block

/// mass = exp(mass), of the keys that there are. A template, so that including this header alone gives a
/// program no kernel.
///
/// Grid: B * Hkv * length / dense_mass_keys blocks. Block: dense_mass_threads. Shared memory: none.
/// Overwrites mass [B, Hkv, length], in place; lengths [B] or null.
template <class Number>
__global__ void __launch_bounds__(dense_mass_threads)
    dense_mass_kernel(const plane_view<Number> mass, const std::int32_t length,
                      const std::int32_t* const lengths) {
    const std::int32_t pieces = (length + dense_mass_keys - 1) / dense_mass_keys;
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t pair = block / pieces, b = pair / mass.heads;
    const std::int32_t given = lengths != nullptr ? lengths[b] : length;
    const std::int32_t own = given >= 0 && given <= length ? given : 0;
    Number* const head = mass.head(b, pair % mass.heads);
    const std::int32_t first = block % pieces * dense_mass_keys;
    const std::int32_t end = min(own, first + dense_mass_keys);
    for (std::int32_t t = first + static_cast<std::int32_t>(threadIdx.x); t < end; t += dense_mass_threads) {
        head[t] = exp(head[t]);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
