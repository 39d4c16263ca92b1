#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/policies/cutoff.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int plane_threads = 32;

/// Cutoffs by a Cutoff model that takes one query after another.
///
/// Grid: planes / plane_threads, a thread per plane. Block: plane_threads. Shared memory: none. Reads rank
/// [B, Hkv, S], int32. Overwrites cutoff [B, Hkv, S], int32. Scratch: scratch_of_plane bytes per plane.
template <class C, class Gate, class Keep>
__global__ void __launch_bounds__(plane_threads)
    sequential_cutoffs_kernel(const mask_params<Gate, Keep> params, const plane_view<const std::int32_t> rank,
                              const plane_view<std::int32_t> cutoff, unsigned char* const scratch,
                              const std::size_t scratch_of_plane) {
    const std::int64_t plane =
        std::int64_t{blockIdx.x} * plane_threads + static_cast<std::int64_t>(threadIdx.x);
    if (plane >= params.planes()) {
        return;
    }
    const auto b = params.sequence_of(plane);
    const auto h = params.head_of(plane);
    C{}(rank.head(b, h), params.length_of(b), params.all_params.of(h), cutoff.head(b, h),
        scratch + static_cast<std::size_t>(plane) * scratch_of_plane);
}

/// expiry[t] = the first query from t + w on whose cutoff is better than the rank of t, by binary search.
///
/// Grid: planes * S / mask_chunk. Block: mask_chunk threads, a key each. Shared memory: none. Reads rank and
/// cutoff [B, Hkv, S], int32. Overwrites expiry [B, Hkv, S], int32.
template <class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    expiry_from_cutoffs_kernel(const mask_params<Gate, Keep> params,
                               const plane_view<const std::int32_t> rank,
                               const plane_view<const std::int32_t> cutoff,
                               const plane_view<expiry_t> expiry) {
    const auto planes = static_cast<unsigned>(params.planes());
    const std::int64_t plane = blockIdx.x % planes;
    const auto b = params.sequence_of(plane);
    const auto h = params.head_of(plane);
    const std::int32_t n = params.length_of(b);
    const std::int64_t at =
        std::int64_t{blockIdx.x / planes} * mask_chunk + static_cast<std::int64_t>(threadIdx.x);
    if (at >= n) {
        return;
    }
    const auto t = static_cast<std::int32_t>(at);
    const HeadParams head_params = params.all_params.of(h);
    const std::int32_t mine = rank.head(b, h)[t];
    expiry_t result = params.forever(head_params, t) ? never : window_expiry(t, head_params.window);
    if (result < n && mine != no_rank) {
        // The first query, from t + w on, whose cutoff is better than this key's rank.
        const std::int32_t* const cutoffs = cutoff.head(b, h);
        std::int32_t low = result;
        std::int32_t high = n;
        while (low < high) {
            const std::int32_t middle = low + (high - low) / 2;
            if (cutoffs[middle] >= mine) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        result = low == n ? never : low;
    }
    expiry.head(b, h)[t] = result;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
