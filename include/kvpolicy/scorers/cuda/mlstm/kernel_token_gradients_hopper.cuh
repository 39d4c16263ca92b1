// token_gradients on Hopper. agent_token_gradients_hopper.cuh is the body of a block.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_token_gradients_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T, int F, int V>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_warpgroup_threads), mlstm_tokens_blocks)
    mlstm_tokens_hopper_kernel([[maybe_unused]] const mlstm_problem<T> problem) {
#if KVPOLICY_HOPPER_CODE
    token_gradients_hopper_agent<T, F, V>(problem).run();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
