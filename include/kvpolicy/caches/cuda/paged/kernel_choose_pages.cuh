// A selection's pages per head: bounds of all pages first, then the pages with the largest bounds. Operations
// and their order are those of the CPU backend (caches/host/select.hpp), so both choose the same pages.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_bound_stream.cuh>
#include <kvpolicy/caches/cuda/paged/agent_largest_keys.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/block_find_largest.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int bound_threads = 128, choose_threads = 512;

/// What the kernels share.
template <class T>
struct choose_params {
    using Real = compute_t<T>;
    using Key = std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>;

    paged_view<T> cache;
    Batch batch{};
    rows_view<const T> q{};                  // [count, Hq, 1, Dk]
    const std::int32_t* appended = nullptr;  // [count]: entries above 0 take part
    Real scale{};
    Key* keys = nullptr;                  // [count, Hkv, max_pages]: bounds as numbers of the same order
    std::int32_t* chosen = nullptr;       // [count, Hkv, max_chosen]: see chosen_view
    std::int32_t* chosen_rows = nullptr;  // [count, Hkv]
    std::int64_t max_pages = 0;
    std::int64_t max_chosen = 0;
};

/// One head of an entry, with its pages of bound_rows rows.
template <class T>
struct page_head {
    std::int32_t pair, entry, head, seq;
    paged_head<T> rows;
    std::int32_t used, pages, read;

    __device__ page_head(const choose_params<T>& call, std::int32_t number)
        : pair(number),
          entry(number / call.cache.kv_heads),
          head(number % call.cache.kv_heads),
          seq(call.batch.seq(entry)),
          rows(call.cache, seq, head),
          used(rows_now(call.cache, rows, seq)),
          pages((used + call.cache.bound_rows - 1) / call.cache.bound_rows),
          read(call.cache.read_pages[head]) {}
};

/// Where a head's keys go.
template <class T>
struct page_keys {
    typename choose_params<T>::Key* keys;
    std::int32_t newest;  // the page of the newest token, which leads whatever its bound

    __device__ page_keys(const choose_params<T>& call, const page_head<T>& at)
        : keys(call.keys + at.pair * call.max_pages),
          newest(at.rows.layout.recent(call.cache.length[at.seq] +
                                       num_appended_of(call.cache, at.rows.index) - 1) /
                 call.cache.bound_rows) {}
    __device__ void operator()(std::int32_t page, typename choose_params<T>::Real bound) const {
        keys[page] = page == newest ? ~typename choose_params<T>::Key(0) : key_of_rank(bound);
    }
};

/// Shared memory of the blocks that find bounds, of so many warps.
template <class T>
__host__ __device__ constexpr std::size_t bound_shared_bytes(int warps, std::int32_t group,
                                                             std::int32_t dim) {
    if constexpr (sizeof(T) == 2) {
        return static_cast<std::size_t>(warps) * std::size_t{bound_stages::warp_bytes} +
               static_cast<std::size_t>(bound_stream<T>::query_numbers(group, dim)) * sizeof(float);
    } else {
        return static_cast<std::size_t>(group) * static_cast<std::size_t>(dim) * sizeof(compute_t<T>);
    }
}

/// Upper bounds of q . k over the keys of each page, for heads with more pages than a query reads.
///
///     bound(page) = agg over the group of sum_d max(sm_scale q_d min_d, sm_scale q_d max_d)
///
/// where agg is the maximum or the mean.
///
/// Grid: count * Hkv * pieces blocks. Block: at most bound_threads threads.
/// Shared memory: dynamic bound_shared_bytes(): the scaled queries, and for 16-bit types each warp's stages
/// of bounds.
/// In: q [count, Hq, 1, Dk] of T; bounds [2, Dk] of T per page. Out: keys [count, Hkv, max_pages],
/// unsigned, in the bounds' order; the page of the newest token has the largest.
template <class T>
__global__ void __launch_bounds__(bound_threads)
    bound_pages_kernel(const __grid_constant__ choose_params<T> call, const std::int32_t pieces) {
    using Real = typename choose_params<T>::Real;
    const std::int32_t pair = static_cast<std::int32_t>(blockIdx.x) / pieces,
                       piece = static_cast<std::int32_t>(blockIdx.x) % pieces;
    if (call.appended[pair / call.cache.kv_heads] <= 0) {
        return;
    }
    const page_head<T> at(call, pair);
    if (at.pages <= at.read) {
        return;
    }
    const std::int32_t dim = call.cache.head_dim_qk, group = call.cache.group,
                       threads = static_cast<std::int32_t>(blockDim.x);
    const page_keys<T> keys(call, at);
    const auto scaled = [&](std::int32_t g, std::int32_t d) {
        return call.scale * static_cast<Real>(call.q.row(at.entry, at.head * group + g, 0)[d]);
    };
    if constexpr (sizeof(T) == 2) {
        const std::int32_t warps = threads / 32;
        unsigned char* const stages = dynamic_shared();
        auto* const query = reinterpret_cast<float*>(stages + warps * bound_stages::warp_bytes);
        const std::int32_t numbers = bound_stream<T>::query_numbers(group, dim);
        for (auto i = static_cast<std::int32_t>(threadIdx.x); i < numbers; i += threads) {
            query[i] = bound_stream<T>::query_number(i, group, dim, scaled);
        }
        __syncthreads();
        bound_stream<T>(query, stages + warp_id() * bound_stages::warp_bytes, dim, group)
            .run(at.rows.rows, at.pages, piece * warps + warp_id(), pieces * warps, call.cache.mean_bound,
                 keys);
    } else {  // types to check others with: one thread per page
        auto* const query = reinterpret_cast<Real*>(dynamic_shared());  // [group, dim]
        for (auto i = static_cast<std::int32_t>(threadIdx.x); i < group * dim; i += threads) {
            query[i] = scaled(i / dim, i % dim);
        }
        __syncthreads();
        for (std::int32_t page = piece * threads + static_cast<std::int32_t>(threadIdx.x); page < at.pages;
             page += pieces * threads) {
            Real joined = Real(0);
            for (std::int32_t g = 0; g < group; ++g) {
                const Real bound = bound_of_page<Real>([&](std::int32_t d) { return query[g * dim + d]; },
                                                       at.rows.rows.bounds(page), dim);
                joined = call.cache.mean_bound ? joined + bound : g == 0 || joined < bound ? bound : joined;
            }
            keys(page, joined);
        }
    }
}

/// Chooses the read_pages[h] pages with the largest keys, by radix selection. Of equal keys the lower page
/// number wins.
///
/// Grid: count * Hkv blocks. Block: choose_threads. Shared memory: find_memory.
/// In: keys of bound_pages_kernel. Out: chosen [count, Hkv, max_chosen] int32 page ids, chosen_rows [count,
/// Hkv] int32.
template <class T>
__global__ void __launch_bounds__(choose_threads)
    choose_pages_kernel(const __grid_constant__ choose_params<T> call) {
    using Key = typename choose_params<T>::Key;
    __shared__ find_memory<Key, choose_threads> memory;
    const auto pair = static_cast<std::int32_t>(blockIdx.x);
    if (call.appended[pair / call.cache.kv_heads] <= 0) {
        return;
    }
    const page_head<T> at(call, pair);
    const std::int32_t size = call.cache.bound_rows, parts = call.cache.pool.page_size / size;
    std::int32_t* const chosen = call.chosen + at.pair * call.max_chosen;
    const auto id_of = [&](std::int32_t page) { return at.rows.table[page / parts] * parts + page % parts; };
    if (at.pages <= at.read) {
        for (auto page = static_cast<std::int32_t>(threadIdx.x); page < at.pages; page += choose_threads) {
            chosen[page] = id_of(page);
        }
        if (threadIdx.x == 0) {
            call.chosen_rows[at.pair] = at.used;
        }
        return;
    }
    find_largest(memory, call.keys + at.pair * call.max_pages, at.pages, at.read,
                 [&](std::int32_t page, std::int32_t before) {
                     chosen[before] = id_of(page);
                     if (before == at.read - 1) {
                         const std::int32_t rest = at.used - page * size;
                         call.chosen_rows[at.pair] = before * size + (rest < size ? rest : size);
                     }
                 });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
