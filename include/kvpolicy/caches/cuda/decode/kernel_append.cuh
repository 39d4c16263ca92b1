// The kernel of a step without attention, with its contract.
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/decode/agent_append_head.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// An entry that may append. Of a paged cache the admission has the last word; of another, a token that the
/// layer has appended already is refused here: counted per head, so that a block of another head cannot mark
/// the token as appended too early.
template <class Launch>
__device__ active_entry appending_entry(const Launch& call, std::int32_t entry, std::int32_t head) {
    active_entry active(call.cache, call.batch, entry, 1, !Launch::View::paged);
    if constexpr (!Launch::View::paged) {
        if (active.tokens != 0 &&
            call.cache.appended[std::int64_t{active.seq} * call.cache.kv_heads + head] > 0) {
            active.refuse(status_layer_repeated);
        }
        if (head == 0 && threadIdx.x == 0) {
            active.report(call.status, entry);
        }
    }
    return active;
}

/// The top-k update and the writes of one token per sequence for one layer, without attention: of append, and
/// of a step with a selection, which writes before it reads, since pages are chosen by their bounds.
///
/// Grid: count * Hkv blocks. Block: Rows::threads. Shared memory: Memory.
///
/// In: k [count, Hkv, 1, Dk] and v [count, Hkv, 1, Dv] of T; `scores` or `computed` [count, Hkv], fp32; with
/// an eviction part q [count, Hq, 1, Dk] of T; the entries and counters of the batch's sequences; of a paged
/// cache work.appended [count] of the admission.
/// Out: status [count] is OR-ed.
/// Overwrites: per head the entry of the key that leaves the window (the new token takes it) and at most one
/// top-k slot; num_long_range, victim, tile_victims, num_protected, appended; queries, with an eviction part;
/// with a selection bounds [2, Dk] of T of one or two pages.
///
/// Of a paged cache it begins beside the admission, whose launch comes right before it and after all else: it
/// decides meanwhile, and then waits for the pages.
///
/// Phases (the numbers stand in agent_append_head.cuh):
/// 1. The rows that may move are loaded, and one warp finds the slots that may be evicted next.
/// 2. The key that leaves the window is compared with the top-k slot that is evicted first, which the step
///    before has recorded.
/// 3. Entries and counters are written.
template <class Launch>
__global__ void __launch_bounds__(Launch::Rows::threads) append_kernel(const __grid_constant__ Launch call) {
    __shared__ typename agent_append_head<Launch>::Memory memory;
    let_next_kernel_start();  // it waits for what it reads
    if constexpr (!Launch::View::paged) {
        wait_for_kernel_before();
    }
    const auto pair = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t entry = pair / call.cache.kv_heads;
    const active_entry active = appending_entry(call, entry, pair % call.cache.kv_heads);
    if (active.tokens != 0) {
        agent_append_head<Launch>(call, memory, pair, active.seq).run();
    } else {
        wait_for_kernel_before();  // so that what comes after this kernel comes after the one before it, too
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
