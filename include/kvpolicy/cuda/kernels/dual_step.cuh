// Entry points of a DualCache's step.
#pragma once

#include <kvpolicy/cuda/blocks/dual_step.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One block.
template <class Rows, class Gate, class Scorer>
__global__ void __launch_bounds__(admit_threads)
    dual_plan_kernel(const __grid_constant__ dual_step_launch<Rows, Gate, Scorer> call) {
    __shared__ admit_memory memory;
    plan_dual_step(call, memory);
}

/// work.blocks blocks.
template <class Rows, class Gate, class Scorer>
__global__ void __launch_bounds__(Rows::threads, 2)
    dual_step_kernel(const __grid_constant__ dual_step_launch<Rows, Gate, Scorer> call) {
    __shared__ typename ragged::step_head<dual_step_launch<Rows, Gate, Scorer>>::Memory memory;
    run_dual_step(call, memory, dynamic_shared());
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
