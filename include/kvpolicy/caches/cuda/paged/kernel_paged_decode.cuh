// Kernels of a decode step of a paged cache, with their contracts.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_paged_schedule.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// First launch of a decode step of a paged cache: pages for the entries that the step writes, and an even
/// share of all heads' tiles for every block of the second launch.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory.
/// In: batch, lengths, kept, scores of the keys that leave the window; the pool's stack.
/// Out (paged_decode_work): taken [count] (-1: no pages), first_tile [count * Hkv + 1], first_pair [blocks],
/// share [1], int32. A sequence without pages gets out 0, lse -inf and status_pool_exhausted. Overwrites:
/// page tables, held, refcounts, the stack.
///
/// Phases: 1. admit_paged_decode: pages. 2. share_paged_decode: shares.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(admit_threads)
    paged_plan_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    __shared__ admit_memory memory;
    let_next_kernel_start();  // its blocks wait for the shares
    admit_paged_decode(call, memory);
    share_paged_decode(call, memory);
}

/// Second launch of a decode step of a paged cache: attention of one query per sequence, and the top-k
/// update of the new token. Every block knows what the step does to a head, so the new token stands in for
/// the entry that the step frees.
///
///     out[b, h] = softmax(sm_scale q k^T) v    over the KV entries of head h after the step
///
/// Grid: work.blocks blocks, each with the same number of tiles of 16 entries, wherever heads begin and end.
/// Block: Rows::threads. Shared memory: Memory; dynamic: one region of Rows::shared_bytes() per warp.
///
/// In: q [count, Hq, 1, Dk], k [count, Hkv, 1, Dk], v [count, Hkv, 1, Dv] of T; scores [count, Hkv] fp32;
/// pages and page tables.
/// Out: out [count, Hq, 1, Dv] of T, lse [count, Hq] fp32 where given.
/// Overwrites, with `writes`: per head the entries of the new token and of the admitted key; num_long_range,
/// victim, tile_victims, num_protected, appended. `states` and `notes` are scratch; `arrivals` ends at 0.
///
/// Phases, per head of the block's share (the numbers stand in agent_paged_head.cuh):
/// 1. Each warp starts the copies of its tiles; it reads 32 entries of the page table at once.
/// 2. Every block decides what the step does; the block with the head's first tile leaves a note.
/// 3. Each warp attends to its tiles.
/// 4. The blocks of a head merge their softmax states in the workspace.
/// 5. The last block to arrive writes outputs, entries and counters.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(Rows::threads, Rows::blocks)
    paged_decode_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    __shared__ typename agent_paged_head<paged_decode_params<Rows, Gate, Scorer, View>>::Memory memory;
    wait_for_kernel_before();
    run_paged_decode(call, memory, dynamic_shared());
}

// Where pages are chosen, a step writes before it reads.

/// With a selection, launch 1: pages for the entries that the step writes. As phase 1 of paged_plan_kernel.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(admit_threads)
    paged_admit_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    __shared__ admit_memory memory;
    admit_paged_decode(call, memory);
}

/// With a selection, launch 2: the top-k update, the new token's entry, and the bounds of the pages that
/// changed. The step writes before it reads, since pages are chosen by their bounds.
///
/// Grid: count * Hkv blocks. Block: Rows::threads. Shared memory: Memory.
/// In: k, v, scores. Overwrites: as phase 5 of paged_decode_kernel, and bounds [2, Dk] of T of one or two
/// pages.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(Rows::threads)
    paged_write_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    using Step = agent_paged_head<paged_decode_params<Rows, Gate, Scorer, View>>;
    __shared__ typename Step::Memory memory;
    const auto pair = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t entry = pair / call.cache.kv_heads;
    if (call.work.appended[entry] > 0) {
        Step(call, memory, nullptr, pair, 0, call.batch.seq(entry)).write();
    }
}

/// With a selection, the launch after choose_pages_kernel: shares of the chosen pages' tiles. As phase 2 of
/// paged_plan_kernel.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(admit_threads)
    paged_share_rows_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    __shared__ admit_memory memory;
    let_next_kernel_start();
    share_paged_decode(call, memory);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
