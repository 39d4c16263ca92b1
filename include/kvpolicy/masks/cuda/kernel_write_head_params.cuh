// Rules by head, which arrive as kernel parameters and are written to device memory.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/policies/parameters.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rules that fit one launch's parameters: no copy from host memory that would have to outlive the call.
struct head_params_batch {
    static constexpr std::int32_t capacity = 96;
    HeadParams all_params[capacity];
    std::int32_t first = 0;
    std::int32_t count = 0;
};

/// table[batch.first + i] = batch.rules[i]: rules by head, which arrive as launch parameters. A template, so
/// that including this header alone gives a program no kernel.
///
/// Grid: one block. Block: any. Shared memory: none. Overwrites table [heads].
template <class Rule>
__global__ void write_head_params_kernel(const head_params_batch batch, Rule* const table) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < batch.count;
         i += static_cast<std::int32_t>(blockDim.x)) {
        table[batch.first + i] = batch.all_params[i];
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
