// export_heads of a cache of either kind: the pages of the heads of a batch.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Page `page` of a head.
template <class T>
__device__ std::int32_t page_id(const contiguous_view<T>& cache, std::int32_t seq, std::int32_t head,
                                std::int32_t page, std::int32_t page_size) {
    return static_cast<std::int32_t>((seq * cache.rows + cache.row_offset[head]) / page_size + page);
}
template <class T>
__device__ std::int32_t page_id(const paged_view<T>& cache, std::int32_t seq, std::int32_t head,
                                std::int32_t page, std::int32_t /*page_size*/) {
    return paged_head<T>(cache, seq, head).table[page];
}

/// How many pages each head of a batch has.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory.
/// In: lengths, num_long_range, appended. Out: indptr [count * Hkv + 1] and last_page_len [count * Hkv],
/// int32.
template <class View>
__global__ void __launch_bounds__(admit_threads)
    count_pages_kernel(const __grid_constant__ View cache, const Batch batch, const std::int32_t page_size,
                       const HeadPages pages) {
    __shared__ admit_memory memory;
    const std::int32_t heads = batch.count * cache.kv_heads;
    const auto used_of = [&](std::int32_t x) -> std::int32_t {
        const std::int32_t seq = batch.seq(x / cache.kv_heads);
        if (seq < 0 || seq >= cache.max_sequences) {
            return 0;
        }
        const typename View::head_type head(cache, seq, x % cache.kv_heads);
        return rows_now(cache, head, seq);
    };
    const int total = running_sums(
        memory, heads, [&](std::int32_t x) { return (used_of(x) + page_size - 1) / page_size; },
        [&](std::int32_t x, int before) {
            const std::int32_t used = used_of(x);
            pages.indptr[x] = before;
            pages.last_page_len[x] = used == 0 ? 0 : (used - 1) % page_size + 1;
        });
    if (threadIdx.x == 0) {
        pages.indptr[heads] = total;
    }
}

/// The page ids of a head.
///
/// Grid: count * Hkv blocks. Block: admit_threads.
/// In: indptr, page tables. Out: indices [indices_capacity] int32; ids beyond the capacity are left out,
/// since forks share pages, so that tables may name more than there are.
template <class View>
__global__ void __launch_bounds__(admit_threads)
    fill_pages_kernel(const __grid_constant__ View cache, const Batch batch, const std::int32_t page_size,
                      const HeadPages pages) {
    const auto x = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t begin = pages.indptr[x], count = pages.indptr[x + 1] - begin;
    const std::int32_t seq = batch.seq(x / cache.kv_heads), head = x % cache.kv_heads;
    for (auto page = static_cast<std::int32_t>(threadIdx.x); page < count; page += admit_threads) {
        if (begin + page < pages.indices_capacity) {
            pages.indices[begin + page] = page_id(cache, seq, head, page, page_size);
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
