// The pool of a DualCache on a device: slabs attached; and the pages of heads.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Slab `number` joins the pool, but for its first `spared` pages. One block.
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

/// Counts the pages of all heads of a batch: indptr and last_page_len. One block.
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

/// Writes the pages of a head: a block a head.
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
