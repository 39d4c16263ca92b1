#pragma once

#include <kvpolicy/caches/cuda/prefill/agent_decayed_update.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// As top_k_update_kernel, for the heads that it leaves out: their keys rank by the query.
///
/// Grid: pairs (entries * Hkv). Block: decayed_round_threads. Shared memory: decayed_update_memory (dynamic).
/// In, overwrites, scratch: as top_k_update_kernel; members [pairs, 3, max_members] for rounds of
/// decayed_round_keys keys.
///
/// Few tokens, large decay steps and budgets, keys far apart: one candidate after another, all slots each.
/// Else in rounds (agent_decayed_update::run_round):
/// 1. Gather the candidates. Where slots are free for all, write them; the round is over.
/// 2. List the old keys that compete.
/// 3. Sort by class; updates (masks/cuda/agent_decayed_round.cuh).
/// 4. Expiries of the evicted keys.
/// 5. The slot of every candidate, by pointer doubling.
/// 6. Write the candidates that hold slots in the end.
template <class Params>
__global__ void __launch_bounds__(decayed_round_threads)
    decayed_update_kernel(const __grid_constant__ Params params) {
    const top_k_head head = params.heads[blockIdx.x];
    if (head.first_leaving >= head.tokens || !ranks_by_query(head.head_params)) {
        return;
    }
    agent_decayed_update update(params, head, static_cast<std::int64_t>(blockIdx.x),
                                *reinterpret_cast<decayed_update_memory*>(dynamic_shared()));
    update.run();
    update.write_counts(static_cast<std::int64_t>(blockIdx.x));
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
