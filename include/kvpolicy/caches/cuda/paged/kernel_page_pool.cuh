// The page pool of a paged cache: adding slabs.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>

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

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
