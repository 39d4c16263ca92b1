// token_gradients: the backward pass of an mLSTM, second part: the tokens of each chunk (kernel_chunk_outputs_backward.cuh
// has the first part, and says what a pair is). agent_token_gradients.cuh is the body of a block.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_token_gradients.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T, int F, int V, bool Small>
__global__ void __launch_bounds__(mlstm_threads, mlstm_blocks<T>)
    mlstm_tokens_backward_kernel(const mlstm_problem<T> problem) {
    const scorer_span s = problem.streams.span_of_block();
    if (s.count == 0) {
        if (threadIdx.x < 2) {
            problem.d_gates[problem.chunk(s) * 2 + threadIdx.x] = 0.0f;
        }
        return;
    }
    token_gradients_agent<T, F, V, Small>(problem, s).run();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
