// The page pool of a paged cache: adding slabs, and page export.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Adds slab `number` to the pool, without its first `spared` pages.
///
/// Grid: 1 block. Block: admit_threads.
/// Overwrites: slabs[number]; pushes slab_pages - spared page ids on the stack of free pages, the lowest on
/// top.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    attach_slab_kernel(const PagePool<T> pool, Slab<T>* const slabs, const std::int32_t number,
                       const std::int32_t spared, const Slab<T> provided) {
    const std::int32_t count = *pool.free_count, pages = pool.slab_pages - spared;
    for (auto page = static_cast<std::int32_t>(threadIdx.x); page < pages; page += admit_threads) {
        // The stack hands out low ids first.
        pool.free_ids[count + page] = number * pool.slab_pages + (pool.slab_pages - 1 - page);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        slabs[number] = provided;
        *pool.free_count = count + pages;
    }
}

/// export_heads of a paged cache: how many pages each head of a batch has.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory.
/// In: lengths, kept. Out: indptr [count * Hkv + 1] and last_page_len [count * Hkv], int32.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    count_paged_pages_kernel(const __grid_constant__ paged_view<T> cache, const Batch batch,
                             const HeadPages pages) {
    __shared__ admit_memory memory;
    const std::int32_t heads = batch.count * cache.kv_heads;
    const auto used_of = [&](std::int32_t x) -> std::int32_t {
        const std::int32_t seq = batch.seq(x / cache.kv_heads);
        if (seq < 0 || seq >= cache.max_sequences) {
            return 0;
        }
        const paged_head<T> head(cache, seq, x % cache.kv_heads);
        return rows_now(cache, head, seq);
    };
    const int total = running_sums(
        memory, heads, [&](std::int32_t x) { return cache.pages_of(used_of(x)); },
        [&](std::int32_t x, int before) {
            const std::int32_t used = used_of(x);
            pages.indptr[x] = before;
            pages.last_page_len[x] = used == 0 ? 0 : (used - 1) % cache.pool.page_size + 1;
        });
    if (threadIdx.x == 0) {
        pages.indptr[heads] = total;
    }
}

/// export_heads of a paged cache: a head's page ids.
///
/// Grid: count * Hkv blocks. Block: admit_threads.
/// In: indptr, page tables. Out: indices [indices_capacity] int32; ids beyond the capacity are left out.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    fill_paged_pages_kernel(const __grid_constant__ paged_view<T> cache, const Batch batch,
                            const HeadPages pages) {
    const auto x = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t begin = pages.indptr[x], count = pages.indptr[x + 1] - begin;
    if (count == 0) {
        return;
    }
    const paged_head<T> head(cache, batch.seq(x / cache.kv_heads), x % cache.kv_heads);
    for (auto page = static_cast<std::int32_t>(threadIdx.x); page < count; page += admit_threads) {
        if (begin + page <
            pages.indices_capacity) {  // forks share pages, so that tables may name more than there are
            pages.indices[begin + page] = head.table[page];
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
