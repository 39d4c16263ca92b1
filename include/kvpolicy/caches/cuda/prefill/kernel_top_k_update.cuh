#pragma once

#include <kvpolicy/caches/cuda/prefill/agent_top_k_update.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The top-k updates of a chunk: which keys that leave the window are admitted, which keys they evict, when,
/// and in which slots admitted keys are in the end. For heads with static priorities.
///
/// Grid: pairs (entries * Hkv). Block: Threads. Shared memory: agent_top_k_update::shared (dynamic).
/// In: heads [pairs]; leaving_score fp32 and leaving_kind uint8 [pairs, most]; of the slots in use before,
/// slot_score fp32, slot_position int64, holder int32 and slot_protected uint8 [pairs, top_k_slots].
/// Overwrites: the four slot arrays, of slots whose key is new; past_expiry [pairs, max_entries] and
/// chunk_expiry [pairs, most] int32, of keys that are admitted or evicted; num_long_range and num_protected
/// [pairs], of heads whose window a key leaves. Scratch: members [pairs, 3, max_members] int32.
///
/// Phases, in rounds of up to Threads * Items keys (agent_top_k_update::run):
/// 1. The base of priorities, free slots, and the key that is evicted first.
/// 2. Gather the candidates. Where slots are free for all, write them; the round is over.
/// 3. Choose the old keys that can be evicted.
/// 4. Rank old keys and candidates.
/// 5. Cutoffs at the begin of every warp's share of the candidates.
/// 6. Evictions, share by share.
/// 7. Expiries of the evicted keys.
/// 8. The slot of every candidate, by pointer doubling.
/// 9. Write the candidates that hold slots in the end.
template <int Threads, int Items>
__global__ void __launch_bounds__(Threads)
    top_k_update_kernel(const __grid_constant__ top_k_update_params params) {
    using agent = agent_top_k_update<Threads, Items>;
    const top_k_head head = params.heads[blockIdx.x];
    if (head.first_leaving >= head.tokens || ranks_by_query(head.head_params)) {
        return;
    }
    agent update(params, head, static_cast<std::int64_t>(blockIdx.x),
                 *reinterpret_cast<typename agent::shared*>(dynamic_shared()));
    update.run();
    update.write_counts(static_cast<std::int64_t>(blockIdx.x));
}

/// Enqueues it for `heads` pairs: a function template, so that one translation unit of a program can
/// instantiate it for all.
template <int Threads, int Items>
void launch_top_k_update(const cuda& ctx, std::int64_t heads, const top_k_update_params& params) {
    launch("top_k_update_kernel", top_k_update_kernel<Threads, Items>, heads, Threads,
           sizeof(typename agent_top_k_update<Threads, Items>::shared), ctx, params);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
