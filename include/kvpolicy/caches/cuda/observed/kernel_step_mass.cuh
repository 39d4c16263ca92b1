// The kernel that makes scores of the masses of a query, with its contract: after a decode step whose policy
// ranks keys by attention, and in observe().
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/observed/agent_step_mass.cuh>
#include <kvpolicy/caches/cuda/observed/mass_source.cuh>
#include <kvpolicy/caches/cuda/observed/step_mass_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The mean over all KV heads of an entry becomes the score of each, by the block. A warp has every
/// mass_warps-th head.
template <class View, class Source, class Compute>
__device__ void average_step_mass(const step_mass_params<View, Source>& call, std::int32_t entry,
                                  std::int32_t tile, Compute (&shared)[mass_warps][mass_tile::rows]) {
    using Agent = agent_step_mass<View, Compute, Source>;
    Compute sum[Agent::each] = {};
    for (std::int32_t head = warp_id(); head < call.cache.kv_heads; head += mass_warps) {
        Compute mass[Agent::each];
        Agent(call.cache, call.source, entry, head).observe(tile, call.status, mass);
#pragma unroll
        for (int i = 0; i < Agent::each; ++i) {
            sum[i] += mass[i];
        }
    }
    __syncthreads();  // the masses of the tile before have been read
#pragma unroll
    for (int i = 0; i < Agent::each; ++i) {
        shared[warp_id()][32 * i + lane_id()] = sum[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Agent::each; ++i) {  // in the same order in every warp, so that all heads agree
        sum[i] = Compute(0);
#pragma unroll
        for (int w = 0; w < mass_warps; ++w) {
            sum[i] += shared[w][32 * i + lane_id()];
        }
        sum[i] /= static_cast<Compute>(call.cache.kv_heads);
    }
    for (std::int32_t head = warp_id(); head < call.cache.kv_heads; head += mass_warps) {
        const Agent agent(call.cache, call.source, entry, head);
        if (agent.reaches(tile)) {
            float before[Agent::each];
            agent.fetch(tile, before);
            agent.give(tile, before, sum);
        }
    }
}

/// What a step leaves beside masses: an entry that cannot be is reported, and the next step looks at records.
/// By one block per entry and `part`.
template <class Agent, class Params>
__device__ void finish_observe(const Params& call, std::int32_t entry, std::int32_t part) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (part == 0 && thread == 0) {
        active_entry(call.cache, call.source.batch, entry, 1, false).report(call.status, entry);
    }
    const std::int32_t heads = call.source.whole_layer ? call.cache.kv_heads : mass_warps;
    for (std::int32_t i = thread; i < heads; i += 32 * mass_warps) {
        if (part * heads + i < call.cache.kv_heads) {
            Agent(call.cache, call.source, entry, part * heads + i).rely_on_records();
        }
    }
}

/// Makes scores of the masses of a query: last launch of a decode step of an observed policy, and observe().
///
///     mass(t) = agg over the G query heads of 2^(logit[t, g] - largest[g]) inverse[g]   (step_logits)
///     mass(t) = the caller's                                                    (given_masses)
///     with whole_layer the mean of that over the KV heads
///     score(t) = mass(t), or with accumulate score(t) + mass(t)
///
/// for all entries t of a head after the step, its new token's too. A query head whose sum is NaN (a query or
/// key that is not finite, logits beyond fp32) gives no mass and sets status_nan_score; so does a given mass
/// that is no number of 0 or more.
///
/// Grid: count * shares * parts() blocks; each has every shares-th tile of 64 rows, which are cut as the
/// records of top-k slots. Block: mass_warps warps, each with one KV head at a time; with whole_layer they
/// share all heads of the layer. Shared memory: a mass per warp and row of a tile.
///
/// In: logits (step_logits: logit [count, Hkv, rows, stride], total [count, Hq], after [count, Hkv]), or mass
/// [count, Hkv, rows] fp32 in the order of rows, lengths, num_long_range and appended.
/// Overwrites: scores of entries [used] fp32; tile_victims [tiles of top-k slots] int32: the slot of the key
/// of the tile that is evicted first; victim, in observe(). status [count] is OR-ed. Entries that took no
/// token, or bring none to observe(), stay as they are.
///
/// Phases (the numbers stand in agent_step_mass.cuh): 1. masses of a lane's rows. 2. Scores. 3. Records.
template <class View, class Source>
__global__ void __launch_bounds__(32 * mass_warps)
    step_mass_kernel(const __grid_constant__ step_mass_params<View, Source> call) {
    using Compute = typename Source::compute;
    using Agent = agent_step_mass<View, Compute, Source>;
    constexpr bool given = std::is_same_v<Source, given_masses>;
    __shared__ Compute masses[mass_warps][mass_tile::rows];
    let_next_kernel_start();
    wait_for_kernel_before();
    const std::int32_t parts = call.parts(), block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t share = block / parts % call.shares, entry = block / parts / call.shares;
    if constexpr (given) {
        if (share == 0) {
            finish_observe<Agent>(call, entry, block % parts);
        }
    }
    if (call.source.whole_layer) {
        // All heads hold as many rows, so the first one speaks for all.
        const Agent first(call.cache, call.source, entry, 0);
        for (std::int32_t tile = share; first.reaches(tile); tile += call.shares) {
            average_step_mass(call, entry, tile, masses);
        }
        return;
    }
    const std::int32_t head = block % parts * mass_warps + warp_id();
    if (head < call.cache.kv_heads) {
        Agent(call.cache, call.source, entry, head).run(share, call.shares, call.status);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
