// chunk_states: the states of an mLSTM between chunks, forward (C, z) and backward (A, a).
// agent_chunk_states.cuh is the body of a block.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_states.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// chunk_states, portable: the state before each chunk (Backward: after it). Ends: only what each segment
/// adds and keeps.
/// Grid: planes x segments x (F / FS) x (V / VS), the parts of a state first; Ends: all segments but the
/// last. Block: 256 threads, eight warps. Shared memory: mlstm_chunk_states_memory<E, FS, VS, false>, 5
/// stages. In: chunk_stats; forward rows k, v E and weight fp32; backward rows q, d_n E, state_decay and d_g
/// fp32. Partial_states and partial_keeps of segment_scan where there are several segments; the caller's
/// states. Out, overwritten: forward memory [chunks, F, V] E (C - z ref_value^T) and sums [chunks, F] fp32
/// (z); backward d_memory [chunks, F, V] E (A) and d_sums [chunks, sum_parts, F] fp32. Ends: partial_states
/// [planes, segments, F (V + 1)] and partial_keeps [planes, segments] fp32. The last segment of a forward
/// pass overwrites the caller's states.
/// 1. The first stages of the ring.
/// 2. The state that the segment begins with.
/// Per chunk: 3. the sums before it, and decay.
/// 4. (Hopper only.) 5. The state before it, rounded, to memory; decay.
/// 6. The chunk's outer products.
/// 7. Partial sums, or the caller's state.
template <class T, int F, int V, int FS, int VS, bool Backward, bool SegmentStates>
__global__ void __launch_bounds__(mlstm_chunk_states_threads<false>)
    mlstm_chunk_states_kernel([[maybe_unused]] const mlstm_params<T> params) {
    if constexpr (portable_code<T>) {
        chunk_states_agent<T, F, V, FS, VS, Backward, SegmentStates, false>(params).run();
    }
}

/// chunk_states on Hopper, backward: the state after each chunk, for parts of 64 features and 64 values, by
/// wgmma.
/// Grid: planes x segments x (F / 64) x (V / 64). Block: 128 threads, one warpgroup; two blocks per
/// SM. Shared memory: mlstm_chunk_states_memory<E, 64, 64, true>, 4 stages.
/// In: chunk_stats; rows q, d_n E, state_decay and d_g fp32; memory and sums, the states before the chunks;
/// partial_states and partial_keeps of segment_scan.
/// Out, overwritten: d_memory [chunks, F V] E in the image of the tiles, d_sums [chunks, V / 64, F] fp32,
/// d_across [chunks, F V / 4096] fp32: parts of the sum of pairs across each chunk.
/// Phases 1 to 7 as mlstm_chunk_states_kernel; 4. the pairs across the chunk. Stores and loads run while the
/// tensor cores multiply.
template <class T, int F, int V>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_chunk_states_threads<true>), 2)
    mlstm_chunk_states_hopper_kernel([[maybe_unused]] const mlstm_params<T> params) {
#if KVPOLICY_HOPPER_CODE
    chunk_states_agent<T, F, V, 64, 64, true, false, true>(params).run();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
