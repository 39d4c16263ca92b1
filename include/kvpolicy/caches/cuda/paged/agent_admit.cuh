// Pages for the entries that a call writes, by one block. A sequence gets all pages that it needs, or the
// call leaves it unchanged. Sequences are served in the order of the batch, as in the CPU backend, so both
// reject the same ones.
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/primitives/running_sums.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int admit_threads = 256;

using admit_memory = sums_memory<admit_threads>;

/// A sum over the block's threads.
__device__ inline int block_total(admit_memory& memory, int mine) {
    const int through = warp_inclusive_sum(mine);
    __syncthreads();  // the totals of a call before have been read
    if (lane_id() == 31) {
        memory.totals[0][warp_id()] = through;
    }
    __syncthreads();
    return sum_of_warps<admit_threads / 32>(memory.totals[0]).total;
}

/// What an admission works with.
struct admission {
    std::int32_t most = 1;  // tokens that an entry may bring
    std::int32_t* appended =
        nullptr;                      // [count]: tokens of the entries that go on; -1 for those without pages
    std::int32_t* missing = nullptr;  // [count, Hkv]: scratch
    std::uint32_t* status = nullptr;  // [count]
};

/// Takes the pages for rows_after(pair, sequence, head) rows of every head of the entries that bring tokens.
/// Returns whether some entry was refused for want of pages.
template <class T, class RowsAfter>
__device__ bool agent_admit(const paged_view<T>& cache, const Batch& batch, const admission& call,
                            admit_memory& memory, const RowsAfter& rows_after) {
    const std::int32_t pairs = batch.count * cache.kv_heads;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t free = *cache.pool.free_count;
    int mine = 0;
    for (std::int32_t pair = thread; pair < pairs; pair += admit_threads) {
        const std::int32_t entry = pair / cache.kv_heads, head = pair % cache.kv_heads;
        const active_entry active = active_entry(cache, batch, entry, call.most).once(cache);
        std::int32_t pages = 0;
        if (active.tokens != 0) {
            pages = cache.pages_of(rows_after(pair, active.seq, head)) -
                    cache.held[std::int64_t{active.seq} * cache.kv_heads + head];
            pages = pages < 0 ? 0 : pages;
        }
        call.missing[pair] = pages;
        mine += pages;
        if (head == 0) {
            call.appended[entry] = active.tokens;
            active.report(call.status, entry);
        }
    }
    const int needed = block_total(memory, mine);
    const bool refuses = needed > free;
    if (refuses) {
        if (thread == 0) {
            std::int32_t left = free;
            for (std::int32_t entry = 0; entry < batch.count; ++entry) {
                std::int32_t* const pages = call.missing + std::int64_t{entry} * cache.kv_heads;
                std::int64_t of_entry = 0;
                for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
                    of_entry += pages[head];
                }
                if (of_entry <= left) {
                    left -= static_cast<std::int32_t>(of_entry);
                    continue;
                }
                for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
                    pages[head] = 0;
                    cache.appended[std::int64_t{batch.seq(entry)} * cache.kv_heads + head] = -1;
                }
                call.appended[entry] = -1;
                if (call.status != nullptr) {
                    atomicOr(call.status + entry, static_cast<std::uint32_t>(status_pool_exhausted));
                }
            }
        }
        __syncthreads();
    }
    if (needed != 0) {
        const int appended = running_sums(
            memory, pairs, [&](std::int32_t pair) { return call.missing[pair]; },
            [&](std::int32_t pair, int before) {
                const std::int32_t pages = call.missing[pair];
                if (pages == 0) {
                    return;
                }
                const paged_head<T> head(cache, batch.seq(pair / cache.kv_heads), pair % cache.kv_heads);
                const std::int32_t have = cache.held[head.index];
                for (std::int32_t page = 0; page < pages; ++page) {
                    const std::int32_t id = cache.pool.free_ids[free - 1 - before - page];
                    cache.pool.names[id] = 1;
                    head.table[have + page] = id;
                }
                cache.held[head.index] = have + pages;
            });
        if (thread == 0) {
            *cache.pool.free_count = free - appended;
        }
    }
    return refuses;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
