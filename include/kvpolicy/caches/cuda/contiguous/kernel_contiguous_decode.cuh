// Entry points of a cache's step.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/agent_contiguous_decode.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// `splits` * `parts` blocks a head of an entry.
template <class Rows, class Gate, class Scorer>
__global__ void __launch_bounds__(Rows::threads, Rows::blocks)
    contiguous_decode_kernel(const __grid_constant__ contiguous_params<Rows, Gate, Scorer> call) {
    __shared__ typename agent_contiguous_decode<Rows, Gate, Scorer>::Memory memory;
    agent_contiguous_decode<Rows, Gate, Scorer>(call, memory, dynamic_shared()).run();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
