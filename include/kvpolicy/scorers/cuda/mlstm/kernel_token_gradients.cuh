// token_gradients: the backward pass of an mLSTM, second part: the tokens of each chunk
// (kernel_chunk_outputs_backward.cuh has the first part, and says what a pair is). agent_token_gradients.cuh
// is the body of a block.
#pragma once

#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_token_gradients.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// token_gradients, portable: of a chunk's tokens d (Wk x), d v~ and the gradients of the gates'
/// preactivations.
/// Grid: a block per chunk. Block: 256 threads, eight warps; 16-bit rows: two blocks per SM.
/// Shared memory: mlstm_token_gradients_memory<E, F, V, Small>. Small: for GPUs that give a block less.
/// In: rows q, k, v, d_n E, d_g, cross_chunk, slope_i, slope_f fp32, log_source, log_top fp64; d_memory
/// [chunks, F, V] E and d_sums [chunks, sum_parts, F] fp32 (the state after the chunks); memory and sums (the
/// state before them); chunk_stats. Out, overwritten: d_rows_k [planes, chunks * 64, rows_k] T, d_gates
/// [chunks, 2] fp32 (sums of b_i and b_f).
/// 1. Rows, state and numbers to shared memory.
/// 2. Pairs of the chunk's tokens and reads: w_lj (q~_l . k~_j), w_lj G_lj.
/// 3. d v~ from the state, then from the pairs.
/// 4. d k~ from the state, then from the pairs, and through the feature map.
/// 5. Pairs across the whole chunk.
/// 6. Gradients of the gates, and all rows to d_rows_k.
template <class T, int F, int V, bool Small>
__global__ void __launch_bounds__(mlstm_threads, mlstm_blocks<T>)
    mlstm_token_gradients_kernel(const mlstm_params<T> params) {
    if constexpr (!portable_code<T>) {
        return;
    }
    const scorer_span s = params.streams.span_of_block();
    if (s.count == 0) {
        if (threadIdx.x < 2) {
            params.d_gates[params.chunk(s) * 2 + threadIdx.x] = 0.0f;
        }
        return;
    }
    token_gradients_agent<T, F, V, Small>(params, s).run();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
