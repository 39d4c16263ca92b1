// chunk_states: the states of an mLSTM between chunks, forward (C, z) and backward (A, a). agent_chunk_states.cuh is
// the body of a block.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_states.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T, int F, int V, int FS, int VS, bool Backward, bool Ends>
__global__ void __launch_bounds__(mlstm_walk_threads<false>)
    mlstm_walk_kernel(const mlstm_problem<T> problem) {
    chunk_states_agent<T, F, V, FS, VS, Backward, Ends, false>(problem).run();
}
/// The backward pass by wgmma, for parts of 64 features and 64 values.
template <class T, int F, int V>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_walk_threads<true>), 2)
    mlstm_walk_hopper_kernel([[maybe_unused]] const mlstm_problem<T> problem) {
#if KVPOLICY_HOPPER_CODE
    chunk_states_agent<T, F, V, 64, 64, true, false, true>(problem).run();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
