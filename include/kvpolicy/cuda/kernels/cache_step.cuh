// Entry points of a cache's step.
#pragma once

#include <kvpolicy/cuda/blocks/step_block.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// `splits` * `parts` blocks a head of an entry.
template <class Rows, class Gate, class Scorer>
__global__ void __launch_bounds__(Rows::threads, 2)
    cache_step_kernel(const __grid_constant__ fixed_step_launch<Rows, Gate, Scorer> call) {
    using Launch = fixed_step_launch<Rows, Gate, Scorer>;
    __shared__ typename step_head<Launch>::Memory memory;
    fixed_step(call, memory, dynamic_shared());
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
