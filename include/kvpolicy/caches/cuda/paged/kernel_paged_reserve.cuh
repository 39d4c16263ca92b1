// Pages for future tokens, in all layers of a paged cache: counted by one block per entry of the batch,
// granted or rejected by one block, taken by one block per entry.
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/block_reduce.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class P, class T>
struct reserve_params {
    const DualRef<P, T>* refs = nullptr;  // [layers]
    std::int32_t layers = 0;
    std::int32_t max_sequences = 0;
    position_t max_seq_len = 0;  // of a sequence, where some layer has such a limit
    Batch batch{};
    PageClaim* claims = nullptr;     // [count]
    std::int64_t* answer = nullptr;  // [1]: how many pages the pool lacks

    /// Tokens beyond `longest` are found where those of the layers are known.
    [[nodiscard]] __device__ static constexpr bool takes(std::int32_t /*sequence*/, std::int32_t /*tokens*/) {
        return true;
    }
    /// Pages that head x of all layers lacks until its sequence has the length `until`.
    [[nodiscard]] __device__ std::int32_t missing(std::int32_t seq, std::int32_t x, position_t until) const {
        const DualRef<P, T>& cache = refs[x / refs[0].kv_heads];
        const std::int32_t head = x % cache.kv_heads;
        return static_cast<std::int32_t>(cache.pages_missing(seq, head, cache.rows_until(seq, head, until)));
    }
};

/// reserve, launch 1: the pages that each entry of the batch lacks in all layers. Tokens that one layer has
/// appended since the last advance() count for all layers.
///
/// Grid: count blocks. Block: admit_threads. Shared memory: two arrays of warp results.
/// Out: claims [count]: the length to reserve for, and pages.
template <class P, class T>
__global__ void __launch_bounds__(admit_threads)
    count_reserved_kernel(const __grid_constant__ reserve_params<P, T> call) {
    __shared__ std::int32_t largest[admit_threads / 32];
    __shared__ std::int64_t sums[admit_threads / 32];
    const auto i = static_cast<std::int32_t>(blockIdx.x), thread = static_cast<std::int32_t>(threadIdx.x);
    const DualRef<P, T>& any = call.refs[0];
    const active_entry active(call, call.batch, i, never);
    std::int32_t num_appended = 0;
    for (std::int32_t layer = thread; layer < call.layers; layer += admit_threads) {
        num_appended = max(num_appended, call.refs[layer].num_appended(active.seq, 0));
    }
    num_appended = max_over_block<admit_threads>(num_appended, largest);
    const position_t until = any.length[active.seq] + num_appended + active.tokens;
    const bool counts = active.tokens != 0 && until <= call.max_seq_len;
    std::int64_t pages = 0;
    for (std::int32_t x = thread; counts && x < call.layers * any.kv_heads; x += admit_threads) {
        pages += call.missing(active.seq, x, until);
    }
    pages = sum_over_block<admit_threads>(pages, sums);
    if (thread == 0) {
        call.claims[i] = {counts ? until : 0, pages};
    }
}

/// reserve, launch 2: grants all claims or none. Granted claims learn where on the stack their pages begin.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory, warp sums.
/// Out: answer [1] int64, the pages that the pool lacks. Overwrites: claims, reserved [seq], the count of
/// free pages.
template <class P, class T>
__global__ void __launch_bounds__(admit_threads)
    grant_reserved_kernel(const __grid_constant__ reserve_params<P, T> call) {
    __shared__ admit_memory memory;
    __shared__ std::int64_t sums[admit_threads / 32];
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const DualRef<P, T>& any = call.refs[0];
    std::int64_t needed = 0;
    for (std::int32_t i = thread; i < call.batch.count; i += admit_threads) {
        needed += call.claims[i].pages;
    }
    needed = sum_over_block<admit_threads>(needed, sums);
    const std::int32_t free = *any.pool.free_count;
    const bool granted = needed <= free;
    __syncthreads();  // all have read how many are free
    if (thread == 0) {
        *call.answer = granted ? 0 : needed - free;
        if (granted) {
            *any.pool.free_count = free - static_cast<std::int32_t>(needed);
        }
    }
    if (!granted) {
        for (std::int32_t i = thread; i < call.batch.count; i += admit_threads) {
            call.claims[i].until = 0;
        }
        return;
    }
    running_sums(
        memory, call.batch.count,
        [&](std::int32_t i) { return static_cast<std::int32_t>(call.claims[i].pages); },
        [&](std::int32_t i, int before) {
            PageClaim& claim = call.claims[i];
            claim.pages = free - before;
            if (claim.until != 0) {
                position_t& reserved = any.reserved[call.batch.seq(i)];
                reserved = max(reserved, claim.until);
            }
        });
}

/// reserve, launch 3: takes the granted pages.
///
/// Grid: count blocks. Block: admit_threads. Shared memory: admit_memory.
/// Overwrites: page tables and held of the entry's heads in all layers, refcounts.
template <class P, class T>
__global__ void __launch_bounds__(admit_threads)
    take_reserved_kernel(const __grid_constant__ reserve_params<P, T> call) {
    __shared__ admit_memory memory;
    const PageClaim claim = call.claims[blockIdx.x];
    if (claim.until == 0) {
        return;
    }
    const DualRef<P, T>& any = call.refs[0];
    const std::int32_t seq = call.batch.seq(static_cast<std::int32_t>(blockIdx.x));
    const auto missing = [&](std::int32_t x) { return call.missing(seq, x, claim.until); };
    running_sums(memory, call.layers * any.kv_heads, missing, [&](std::int32_t x, int before) {
        const DualRef<P, T>& cache = call.refs[x / any.kv_heads];
        const std::int32_t head = x % any.kv_heads, pages = missing(x);
        if (pages == 0) {
            return;
        }
        std::int32_t& held = cache.held[cache.head_index(seq, head)];
        for (std::int32_t page = 0; page < pages; ++page) {
            const std::int32_t id = any.pool.free_ids[claim.pages - 1 - before - page];
            any.pool.names[id] = 1;
            cache.pages(seq, head)[held + page] = id;
        }
        held += pages;
    });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
