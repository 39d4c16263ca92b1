// The pool of a DualCache on a device: slabs lent, pages reserved; slots advanced; and the pages of heads.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/blocks/admit_block.cuh>
#include <kvpolicy/cuda/blocks/dual_view.cuh>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Slab `number` joins the pool, but for its first `spared` pages. One block.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    lend_slab_kernel(const PagePool<T> pool, Slab<T>* const slabs, const std::int32_t number,
                     const std::int32_t spared, const Slab<T> lent) {
    const std::int32_t count = *pool.free_count, pages = pool.slab_pages - spared;
    for (auto page = static_cast<std::int32_t>(threadIdx.x); page < pages; page += admit_threads) {
        // The stack hands out low ids first.
        pool.free_ids[count + page] = number * pool.slab_pages + (pool.slab_pages - 1 - page);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        slabs[number] = lent;
        *pool.free_count = count + pages;
    }
}

/// Pages for batch.tokens(i) more tokens of every entry in all layers, if the pool has them all; else nothing changes. `answer`: how
/// many it lacks. One block.
template <class P, class T>
__global__ void __launch_bounds__(admit_threads)
    reserve_pages_kernel(const DualRef<P, T>* const refs, const std::int32_t layers, const Batch batch,
                         std::int64_t* const answer) {
    __shared__ admit_memory memory;
    __shared__ unsigned long long needed;
    const DualRef<P, T>& any = refs[0];
    const std::int32_t each = batch.count * any.kv_heads;
    // The length up to which an entry has its pages, from the layer that is ahead: in the middle of a token the others take that one, too.
    const auto until = [&](const active_entry& active) {
        std::int32_t pending = 0;
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            pending = max(pending, refs[layer].pending(active.slot, 0));
        }
        return any.length[active.slot] + pending + active.tokens;
    };
    const auto missing = [&](std::int32_t x) -> std::int32_t {
        const std::int32_t entry = x % each / any.kv_heads, h = x % any.kv_heads;
        const dual_view<T> cache(refs[x / each]);
        const active_entry active(cache, batch, entry, never);
        if (active.tokens == 0) {
            return 0;
        }
        const DualRef<P, T>& ref = refs[x / each];
        const std::int32_t pages =
            cache.pages_of(static_cast<std::int32_t>(ref.rows_until(active.slot, h, until(active)))) -
            ref.held[ref.head_index(active.slot, h)];
        return pages < 0 ? 0 : pages;
    };
    if (threadIdx.x == 0) {
        needed = 0;
    }
    __syncthreads();
    unsigned long long mine = 0;
    for (auto x = static_cast<std::int32_t>(threadIdx.x); x < layers * each; x += admit_threads) {
        mine += static_cast<unsigned long long>(missing(x));
    }
    atomicAdd(&needed, mine);
    const std::int32_t free = *any.pool.free_count;
    __syncthreads();
    const auto lacks = static_cast<std::int64_t>(needed) - free;
    if (threadIdx.x == 0) {
        *answer = lacks < 0 ? 0 : lacks;
    }
    if (lacks > 0) {
        return;
    }
    const int taken = running_sums(memory, layers * each, missing, [&](std::int32_t x, int before) {
        const std::int32_t pages = missing(x);
        if (pages == 0) {
            return;
        }
        const DualRef<P, T>& ref = refs[x / each];
        const std::int32_t slot = batch.slot(x % each / any.kv_heads), h = x % any.kv_heads;
        std::int32_t& held = ref.held[ref.head_index(slot, h)];
        for (std::int32_t page = 0; page < pages; ++page) {
            const std::int32_t id = any.pool.free_ids[free - 1 - before - page];
            any.pool.names[id] = 1;
            ref.pages(slot, h)[held + page] = id;
        }
        held += pages;
    });
    if (threadIdx.x == 0) {
        *any.pool.free_count = free - taken;
    }
    const dual_view<T> view(any);
    for (auto entry = static_cast<std::int32_t>(threadIdx.x); entry < batch.count; entry += admit_threads) {
        const active_entry active(view, batch, entry, never);
        if (active.tokens != 0) {
            any.reserved[active.slot] = max(any.reserved[active.slot], until(active));
        }
    }
}

/// Counts the pages of all heads of a batch: indptr and last_page_rows. One block.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    count_dual_pages_kernel(const __grid_constant__ dual_view<T> cache, const Batch batch,
                            const HeadPages pages) {
    __shared__ admit_memory memory;
    const std::int32_t heads = batch.count * cache.kv_heads;
    const auto used_of = [&](std::int32_t x) -> std::int32_t {
        const std::int32_t slot = batch.slot(x / cache.kv_heads);
        if (slot < 0 || slot >= cache.slots) {
            return 0;
        }
        const dual_head<T> head(cache, slot, x % cache.kv_heads);
        return rows_now(cache, head, slot);
    };
    const int total = running_sums(
        memory, heads, [&](std::int32_t x) { return cache.pages_of(used_of(x)); },
        [&](std::int32_t x, int before) {
            const std::int32_t used = used_of(x);
            pages.indptr[x] = before;
            pages.last_page_rows[x] = used == 0 ? 0 : (used - 1) % cache.pool.page_rows + 1;
        });
    if (threadIdx.x == 0) {
        pages.indptr[heads] = total;
    }
}

/// Writes the pages of a head: a block a head.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    fill_dual_pages_kernel(const __grid_constant__ dual_view<T> cache, const Batch batch,
                           const HeadPages pages) {
    const auto x = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t begin = pages.indptr[x], count = pages.indptr[x + 1] - begin;
    if (count == 0) {
        return;
    }
    const dual_head<T> head(cache, batch.slot(x / cache.kv_heads), x % cache.kv_heads);
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
