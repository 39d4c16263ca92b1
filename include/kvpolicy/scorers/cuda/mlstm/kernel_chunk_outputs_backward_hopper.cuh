// chunk_outputs_backward on Hopper. agent_chunk_outputs_backward_hopper.cuh is the body of a block.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_backward_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// chunk_outputs_backward on Hopper: of each chunk's outputs d N_l, d g_l and d q~_l. Norm: the readout has a
/// norm.
/// Grid: SMs x mlstm_chunk_outputs_blocks<V>, or the chunks if fewer; blocks stay, and take chunks with
/// this stride. Block: 128 threads, one warpgroup. Shared memory: mlstm_chunk_outputs_backward_memory. In
/// and out: as mlstm_chunk_outputs_backward_kernel (kernel_chunk_outputs_backward.cuh), but memory in the
/// image of the tiles.
/// 1. The first chunk's loads.
/// Per chunk: 2. its numbers to shared memory; its tiles have arrived.
/// 3. The read: h_l.
/// 4. Back through readout, SiLU and norm: d N and d g.
/// 5. Products of d N with the state and with the values: w_lj G_lj.
/// 6. d q~ from the state, then from the pairs; d N and the readout's sums go to memory.
/// 7. d q~ through the feature map, to d_rows_q. Each load of the next chunk is issued as soon as its place
///    is free.
template <class T, int F, int V, bool Norm>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_warpgroup_threads),
                                  mlstm_chunk_outputs_blocks<V>)
    mlstm_chunk_outputs_backward_hopper_kernel([[maybe_unused]] const mlstm_params<T> params) {
#if KVPOLICY_HOPPER_CODE
    shared_parts parts(aligned_dynamic_shared());
    const mlstm_chunk_outputs_backward_memory<mlstm_element<T>, F, V> memory(parts);
    chunk_outputs_backward_hopper_agent<T, F, V, Norm>(params, memory).run();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
