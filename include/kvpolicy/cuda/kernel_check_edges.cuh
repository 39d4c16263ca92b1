// The edges of packed segments, checked on the device.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Copies cu_seqlens to edges. Edges that do not rise from 0 to the length all become 0 (every segment is
/// empty), and every sequence's status gets status_bad_length.
///
/// Grid: one block. Block: any. Shared memory: none. Reads cu_seqlens [segments + 1], int32. Overwrites edges
/// [segments + 1]. Adds bits to status [B], where it is given.
template <class Edge>
__global__ void check_edges_kernel(const Edge* const cu_seqlens, const std::int32_t segments,
                                   const std::int32_t length, Edge* const edges, std::uint32_t* const status,
                                   const std::int32_t batch) {
    bool bad = false;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i <= segments;
         i += static_cast<std::int32_t>(blockDim.x)) {
        bad = bad || (i == 0 ? cu_seqlens[0] != 0 : cu_seqlens[i] < cu_seqlens[i - 1]);
        bad = bad || (i == segments && cu_seqlens[i] != length);
    }
    bad = __syncthreads_or(bad ? 1 : 0) != 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i <= segments;
         i += static_cast<std::int32_t>(blockDim.x)) {
        edges[i] = bad ? 0 : cu_seqlens[i];
    }
    for (auto b = static_cast<std::int32_t>(threadIdx.x); bad && status != nullptr && b < batch;
         b += static_cast<std::int32_t>(blockDim.x)) {
        atomicOr(status + b, static_cast<std::uint32_t>(status_bad_length));
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
