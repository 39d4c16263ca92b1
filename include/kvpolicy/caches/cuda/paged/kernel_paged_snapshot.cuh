// One sequence of a paged cache as contiguous rows, and back. Snapshots go through a CPU cache of one
// sequence.
#pragma once

#include <kvpolicy/caches/cuda/copy_rows.cuh>
#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The rows of all heads of all layers of one sequence, one head after another.
template <class T>
struct slot_rows {
    const std::int64_t* first = nullptr;  // [layers * kv_heads + 1]
    T* k = nullptr;                       // [rows, head_dim_qk]
    T* v = nullptr;                       // [rows, head_dim_vo]
    position_t* position = nullptr;       // [rows]
    float* score = nullptr;               // [rows]
};

/// snapshot and restore: the entries of one sequence, between their pages and contiguous rows.
///
/// Grid: layers * Hkv * pieces blocks. Block: sequence_threads; a warp per entry.
/// In and out, by `into_cache`: rows.k [rows, Dk], rows.v [rows, Dv] of T, position int64, score fp32;
/// rows.first [layers * Hkv + 1].
template <class P, class T>
__global__ void __launch_bounds__(sequence_threads)
    paged_sequence_rows_kernel(const DualRef<P, T>* const refs, const std::int32_t seq,
                               const slot_rows<T> rows, const std::int32_t pieces, const bool into_cache) {
    const std::int32_t x = static_cast<std::int32_t>(blockIdx.x) / pieces;
    const DualRef<P, T>& cache = refs[x / refs[0].kv_heads];
    const auto of_head = cache.head_rows(seq, x % cache.kv_heads);
    constexpr std::int32_t warps = sequence_threads / 32;
    const std::int64_t first = rows.first[x];
    const auto used = static_cast<std::int32_t>(rows.first[x + 1] - first);
    for (std::int32_t r = static_cast<std::int32_t>(blockIdx.x) % pieces * warps + warp_id(); r < used;
         r += pieces * warps) {
        T* const k = rows.k + (first + r) * cache.head_dim_qk;
        T* const v = rows.v + (first + r) * cache.head_dim_vo;
        copy_row<T>(into_cache ? k : of_head.k(r), into_cache ? of_head.k(r) : k, cache.head_dim_qk);
        copy_row<T>(into_cache ? v : of_head.v(r), into_cache ? of_head.v(r) : v, cache.head_dim_vo);
        if (lane_id() == 0) {
            if (into_cache) {
                of_head.position(r) = rows.position[first + r];
                of_head.score(r) = rows.score[first + r];
            } else {
                rows.position[first + r] = of_head.position(r);
                rows.score[first + r] = of_head.score(r);
            }
        }
    }
}

/// restore with a selection: bounds of all pages of one sequence, from its entries.
///
/// Grid: layers * Hkv * pieces blocks. Block: sequence_threads; a warp per page. Overwrites: bounds [2,
/// Dk] of T per page.
template <class P, class T>
__global__ void __launch_bounds__(sequence_threads)
    paged_sequence_bounds_kernel(const DualRef<P, T>* const refs, const std::int32_t seq,
                                 const std::int64_t* const first, const std::int32_t pieces) {
    const std::int32_t x = static_cast<std::int32_t>(blockIdx.x) / pieces;
    const DualRef<P, T>& cache = refs[x / refs[0].kv_heads];
    constexpr std::int32_t warps = sequence_threads / 32;
    const auto used = static_cast<std::int32_t>(first[x + 1] - first[x]);
    refresh_pages(cache.head_rows(seq, x % cache.kv_heads), 0, used, used,
                  static_cast<std::int32_t>(blockIdx.x) % pieces * warps + warp_id(), pieces * warps);
}

/// Pages for first[x + 1] - first[x] entries of head x of some layers of a sequence, in place of those that
/// it had, by all threads of a block. Returns the pages that the pool lacks; where there are such, the cache
/// stays as it is.
///
/// Phases: 1. Count. 2. Free the old pages. 3. Undo that where they do not suffice. 4. Take the new ones.
template <class P, class T>
__device__ std::int64_t refill_pages(admit_memory& memory, const DualRef<P, T>* const refs,
                                     const std::int32_t layers, const std::int32_t seq,
                                     const std::int64_t* const first) {
    const DualRef<P, T>& any = refs[0];
    const std::int32_t heads = layers * any.kv_heads, before = *any.pool.free_count;
    const auto pages_of = [&](std::int32_t x) {
        return static_cast<std::int32_t>((first[x + 1] - first[x] + any.page_size - 1) / any.page_size);
    };
    const auto for_each_page = [&](const auto& visit) {
        for (std::int32_t x = warp_id(); x < heads; x += admit_threads / 32) {
            const DualRef<P, T>& cache = refs[x / any.kv_heads];
            const std::int32_t held = cache.held[cache.head_index(seq, x % any.kv_heads)];
            for (std::int32_t page = lane_id(); page < held; page += 32) {
                visit(cache.pages(seq, x % any.kv_heads)[page]);
            }
        }
    };
    // 1. Count.
    int mine = 0;
    for (auto x = static_cast<std::int32_t>(threadIdx.x); x < heads; x += admit_threads) {
        mine += pages_of(x);
    }
    const int needed = block_total(memory, mine);  // no more than a host cache held
    // 2. Free the old pages.
    for_each_page([&](std::int32_t id) {
        if (atomicSub(any.pool.names + id, 1) == 1) {
            any.pool.free_ids[atomicAdd(any.pool.free_count, 1)] = id;
        }
    });
    __syncthreads();
    const std::int32_t free = *static_cast<volatile std::int32_t*>(any.pool.free_count);
    __syncthreads();
    // 3. Undo that where the pool lacks pages.
    if (needed > free) {
        // What lies above `before` on the stack was free for a moment only.
        for_each_page([&](std::int32_t id) { atomicAdd(any.pool.names + id, 1); });
        if (threadIdx.x == 0) {
            *any.pool.free_count = before;
        }
        return std::int64_t{needed} - free;
    }
    // 4. Take the new pages.
    running_sums(memory, heads, pages_of, [&](std::int32_t x, int taken) {
        const DualRef<P, T>& cache = refs[x / any.kv_heads];
        const std::int32_t head = x % any.kv_heads, pages = pages_of(x);
        for (std::int32_t page = 0; page < pages; ++page) {
            const std::int32_t id = any.pool.free_ids[free - 1 - taken - page];
            any.pool.names[id] = 1;
            cache.pages(seq, head)[page] = id;
        }
        cache.held[cache.head_index(seq, head)] = pages;
    });
    if (threadIdx.x == 0) {
        *any.pool.free_count = free - needed;
    }
    return 0;
}

/// restore: refill_pages() for all layers of a sequence.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory.
/// Out: answer [1] int64, the pages that the pool lacks. Overwrites: page tables, held, refcounts, the stack
/// of free pages.
template <class P, class T>
__global__ void __launch_bounds__(admit_threads)
    paged_refill_kernel(const DualRef<P, T>* const refs, const std::int32_t layers, const std::int32_t seq,
                        const std::int64_t* const first, std::int64_t* const answer) {
    __shared__ admit_memory memory;
    const std::int64_t lacking = refill_pages(memory, refs, layers, seq, first);
    if (threadIdx.x == 0) {
        *answer = lacking;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
