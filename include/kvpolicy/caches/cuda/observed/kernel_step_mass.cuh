// The kernel that follows a decode step whose policy ranks keys by attention, with its contract.
#pragma once

#include <kvpolicy/caches/cuda/observed/agent_step_mass.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Last launch of a decode step of an observed policy: the weights of the step's query become scores.
///
///     mass(t) = agg over the G query heads of 2^(logit[t, g] - lse[g]),
///               with whole_layer the mean of that over the KV heads
///     score(t) = mass(t), or with accumulate score(t) + mass(t)
///
/// for all entries t of a head after the step, its new token's too. A query head whose lse is NaN (a query or
/// key that is not finite, logits beyond fp32) gives no mass and sets status_nan_score.
///
/// Grid: count * tiles * parts() blocks; a tile is 64 rows, from the first top-k slot on as the records of
/// slots are cut. Block: mass_warps warps, each with one KV head at a time; with whole_layer they share all
/// heads of the layer. Shared memory: Memory.
///
/// In: logits (step_logits: logit [count, Hkv, rows, stride], lse [count, Hq], after [count, Hkv]).
/// Overwrites: scores of entries [used] fp32; tile_victims [tiles of top-k slots] int32: the slot of the key
/// of the tile that is evicted first. status [count] is OR-ed. Entries that took no token stay as they are.
template <class View, class Compute>
__global__ void __launch_bounds__(32 * mass_warps)
    step_mass_kernel(const __grid_constant__ step_mass_params<View, Compute> call) {
    using Agent = agent_step_mass<step_mass_params<View, Compute>>;
    __shared__ typename Agent::Memory memory;
    let_next_kernel_start();
    wait_for_kernel_before();
    const std::int32_t parts = call.parts(), block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t tile = block / parts % call.tiles, entry = block / parts / call.tiles;
    const Agent agent(call, memory, entry, tile);
    if (call.whole_layer) {
        agent.run_layer();
    } else {
        agent.run(block % parts * mass_warps + warp_id());
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
