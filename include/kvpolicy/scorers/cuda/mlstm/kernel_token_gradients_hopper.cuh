// token_gradients on Hopper. agent_token_gradients_hopper.cuh is the body of a block.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_token_gradients_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// token_gradients on Hopper: of each chunk's tokens d (Wk x), d v~ and the gradients of the gates'
/// preactivations.
/// Grid: SMs x mlstm_token_gradients_blocks, or the chunks if fewer; blocks stay, and take chunks with
/// this stride. Block: 128 threads, one warpgroup. Shared memory: mlstm_token_gradients_hopper_memory.
/// In: as mlstm_token_gradients_kernel (kernel_token_gradients.cuh), but d_memory in the image of the tiles,
/// d_sums [chunks, V / 64, F], and d_across [chunks, F V / 4096] in place of the state before the chunks.
/// Out: as there.
/// 1. The first chunk's loads.
/// Per chunk: 2. its numbers to shared memory; its rows have arrived.
/// 3. Pairs of its tokens and reads.
/// 4. d v~ from the state and the pairs, d k~ from the pairs.
/// 5. d k~ from the state, and through the feature map.
/// 6. Both to shared memory, rounded.
/// 7. Gradients of the gates, and all rows to d_rows_k. Each load of the next chunk is issued as soon as its
///    place is free.
template <class T, int F, int V>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_warpgroup_threads),
                                  mlstm_token_gradients_blocks)
    mlstm_token_gradients_hopper_kernel([[maybe_unused]] const mlstm_params<T> params) {
#if KVPOLICY_HOPPER_CODE
    token_gradients_hopper_agent<T, F, V>(params).run();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
