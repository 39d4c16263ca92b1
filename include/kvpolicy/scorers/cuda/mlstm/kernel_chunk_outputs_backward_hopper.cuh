// chunk_outputs_backward on Hopper. agent_chunk_outputs_backward_hopper.cuh is the body of a block.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_backward_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Norm: the readout has a norm.
template <class T, int F, int V, bool Norm>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_warpgroup_threads), mlstm_reads_blocks<V>)
    mlstm_reads_hopper_kernel([[maybe_unused]] const mlstm_problem<T> problem) {
#if KVPOLICY_HOPPER_CODE
    shared_parts parts(aligned_dynamic_shared());
    const mlstm_reads_memory<mlstm_element<T>, F, V> memory(parts);
    chunk_outputs_backward_hopper_agent<T, F, V, Norm>(problem, memory).run();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
