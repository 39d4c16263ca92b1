// The kernel of a decode step of a FixedBudgetCache, with its contract.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/agent_contiguous_decode.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One decode step of a FixedBudgetCache for one layer: attention of one query per sequence, and the top-k
/// update that the new token causes. With `writes` false it is attention alone.
///
///     out[b, h] = softmax(sm_scale q k^T) v    over the KV entries that are left after the update
///
/// Grid: count * Hkv * parts * (splits + leader blocks) blocks; with `clustered` the blocks of one head are a
/// cluster. Block: Rows::threads, Rows::warps warps.
/// Shared memory: Memory; dynamic: one region of Rows::shared_bytes() per warp, and in a cluster one state
/// per block.
///
/// In: q [count, Hq, 1, Dk], k [count, Hkv, 1, Dk] and v [count, Hkv, 1, Dv] of T; `scores` or `computed`
/// [count, Hkv], fp32; the entries and counters of the batch's sequences.
/// Out: out [count, Hq, 1, Dv] of T, lse [count, Hq] fp32 where given; status [count] is OR-ed.
/// Overwrites, with `writes`: per head the entry of the key that leaves the window (the new token takes it)
/// and at most one top-k slot; num_long_range, victim, tile_victims, appended. `states` and `notes` are
/// scratch; `arrivals` ends at 0, as it began. `observed` (step_logits), where scores come from attention:
/// logits and lse of the step's query, for step_mass_kernel or phase 7, which writes what that does.
///
/// Phases (the numbers stand in agent_contiguous_decode.cuh):
/// 1. Each warp starts the copies of its tiles and loads the queries.
/// 2. Every block finds the two entries that may lose their key: the one that leaves the window, and the
///    top-k slot that is evicted before all others.
/// 3. The leader block compares them and decides which one stays.
/// 4. Each warp attends to its tiles without these two; the leader adds the one that stays, and the new
///    token.
/// 5. The blocks of a head merge their softmax states.
/// 6. The leader of a cluster, else the last block to arrive, writes outputs, entries and counters.
/// 7. With observed.in_step the blocks of a cluster make scores of the query's weights, as step_mass_kernel.
template <class Rows, class Gate, class Scorer>
__global__ void __launch_bounds__(Rows::threads, Rows::blocks)
    contiguous_decode_kernel(const __grid_constant__ contiguous_params<Rows, Gate, Scorer> call) {
    __shared__ typename agent_contiguous_decode<Rows, Gate, Scorer>::Memory memory;
    // The launch of an mLSTM beside clusters, which leave most of the GPU free. Other launches must not have
    // places before this one has ended: a step behind them then takes up to a tenth longer.
    bool early = decides_late<Scorer> && call.clustered;
    if constexpr (scored_by_steps<Scorer>) {
        early = !call.observed.in_step;  // step_mass_kernel
    }
    if (early) {
        let_next_kernel_start();  // its blocks wait for the end of this kernel
    }
    agent_contiguous_decode<Rows, Gate, Scorer>(call, memory, dynamic_shared()).run();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
