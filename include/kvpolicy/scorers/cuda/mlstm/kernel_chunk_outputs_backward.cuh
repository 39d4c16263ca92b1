// The backward pass of an mLSTM scorer (scorers/host/mlstm_backward_stream.hpp has the equations): the
// outputs of each chunk, which give d N, d g and d q~; then, with the state A that runs backwards
// (kernel_chunk_states.cuh), the tokens it absorbed.
//
// A pair is a token j and an output l from it on; its share of the gradient is T_lj = w_lj (q~_l . k~_j)
// G_lj. d log i_j is the sum of its pairs, d log f_t that of all pairs with j < t <= l. Both are summed as
// they are, pairs that leave the chunk through the states, so that what is small because few pairs count is
// not a difference of large sums: with d g_l = -d N_l . h_l of d N_l as it is rounded, G_lj = d N_l . (v~_j -
// h_l) cancels where it should.
#pragma once

#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_backward.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// chunk_outputs_backward, portable: of a chunk's outputs d N_l, d g_l and d q~_l.
/// Grid: a block per chunk. Block: 256 threads, eight warps; 16-bit rows: two blocks per SM.
/// Shared memory: mlstm_chunk_outputs_memory<E, F, V, true, Small>. Small: for GPUs that give a block less.
/// In: as chunk_outputs (kernel_chunk_outputs.cuh), and d_scores [B, heads, S] fp32.
/// Out, all overwritten: rows d_n [.., V] E, d_g, state_decay, cross_chunk [..] fp32; d_rows_q [.., rows_q] T
/// (d (Wq x) and d score); d_readout [chunks, 2 width + 1] fp32. A chunk without outputs writes zeros to
/// d_rows_q and d_readout.
/// 1. The chunk is read again: h_l.
/// 2. Back through readout, SiLU and gain: d h, and the sums of their gradients.
/// 3. Back through the norm: d N, rounded, d g and d N . ref_value + d g.
/// 4. w_lj G_lj in place of the weights.
/// 5. d q~ from the state, then from the pairs.
/// 6. d q~ through the feature map, to d_rows_q.
template <class T, int F, int V, bool Small>
__global__ void __launch_bounds__(mlstm_threads, mlstm_blocks<T>)
    mlstm_chunk_outputs_backward_kernel(const mlstm_params<T> params) {
    if constexpr (!portable_code<T>) {
        return;
    }
    const scorer_streams& streams = params.streams;
    const scorer_span s = streams.span_of_block();
    const std::int32_t skipped = params.first_output(s);
    if (skipped >= s.count) {
        float* const sums = params.d_readout + params.chunk(s) * (2 * params.width + 1);
        for (int i = static_cast<int>(threadIdx.x); i <= 2 * params.width; i += mlstm_threads) {
            sums[i] = 0.0f;
        }
        write_rows(params.d_rows_q + s.row(streams.chunks) * params.rows_q, params.rows_q, s.count,
                   [](int, int, float(&)[8]) {});
        return;
    }
    chunk_outputs_backward_agent<T, F, V, Small>(params, s, skipped).run();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
