// What a call's kernels read besides its tensors: rules by head, which arrive as kernel parameters, and checked edges.
#pragma once

#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/policies/parameters.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rules that fit one launch's parameters: no copy from host memory that would have to outlive the call.
struct rule_batch {
    static constexpr std::int32_t capacity = 128;
    HeadRule rules[capacity];
    std::int32_t first = 0;
    std::int32_t count = 0;
};

/// A template, so that including this header alone gives a program no kernel.
template <class Rule>
__global__ void write_rules_kernel(const rule_batch batch, Rule* const table) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < batch.count;
         i += static_cast<std::int32_t>(blockDim.x)) {
        table[batch.first + i] = batch.rules[i];
    }
}

/// Copies cu_seqlens to edges. Edges that do not rise from 0 to the length all become 0 (every segment is empty), and
/// every sequence's status says so. One block.
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
