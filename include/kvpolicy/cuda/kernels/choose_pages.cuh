// The pages that a query reads of every head: bounds of all pages first, then the best of them, as the host chooses
// (host/cache_select.hpp), with the same operations in the same order, so that both choose the same.
#pragma once

#include <kvpolicy/cuda/blocks/admit_block.cuh>
#include <kvpolicy/cuda/blocks/dual_view.cuh>
#include <kvpolicy/cuda/blocks/largest_keys.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int bound_threads = 128;

/// What the kernels share.
template <class T>
struct choose_launch {
    using Real = compute_t<T>;
    using Key = std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>;

    dual_view<T> cache;
    Batch batch{};
    rows_view<const T> q{};               // [count, Hq, 1, Dk]
    const std::int32_t* taken = nullptr;  // [count]: entries above 0 take part
    std::int32_t added = 0;               // 1: the newest token is in its row, but not in `length`
    Real scale{};
    Key* keys = nullptr;                  // [count, Hkv, most_pages]: bounds as numbers of the same order
    std::int32_t* chosen = nullptr;       // [count, Hkv, most_chosen]: see chosen_view
    std::int32_t* chosen_rows = nullptr;  // [count, Hkv]
    std::int64_t most_pages = 0;
    std::int64_t most_chosen = 0;
};

/// One head of an entry, with its pages of bound_rows rows.
template <class T>
struct page_head {
    std::int32_t pair, entry, head, slot;
    dual_head<T> rows;
    std::int32_t used, pages, read;

    __device__ page_head(const choose_launch<T>& call, std::int32_t number)
        : pair(number),
          entry(number / call.cache.kv_heads),
          head(number % call.cache.kv_heads),
          slot(call.batch.slot(entry)),
          rows(call.cache, slot, head),
          used(rows.layout.used(call.cache.length[slot] + call.added, call.cache.kept[rows.index])),
          pages((used + call.cache.bound_rows - 1) / call.cache.bound_rows),
          read(call.cache.read_pages[head]) {}
};

/// A product that is rounded before anything is added to it.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

/// Bounds of all pages of the heads that have more than they read: `pieces` blocks a head, a thread a page.
template <class T>
__global__ void __launch_bounds__(bound_threads)
    bound_pages_kernel(const __grid_constant__ choose_launch<T> call, const std::int32_t pieces) {
    using Real = typename choose_launch<T>::Real;
    const std::int32_t pair = static_cast<std::int32_t>(blockIdx.x) / pieces;
    if (call.taken[pair / call.cache.kv_heads] <= 0) {
        return;
    }
    const page_head<T> at(call, pair);
    if (at.pages <= at.read) {
        return;
    }
    const std::int32_t dim = call.cache.dim_k, group = call.cache.group;
    auto* const query = reinterpret_cast<Real*>(dynamic_shared());  // [group, dim]
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < group * dim; i += bound_threads) {
        query[i] =
            call.scale * static_cast<Real>(call.q.row(at.entry, at.head * group + i / dim, 0)[i % dim]);
    }
    __syncthreads();
    const std::int32_t newest = at.rows.layout.recent(call.cache.length[at.slot] + call.added - 1);
    constexpr int each = sizeof(T) == 2 ? 8 : 1;  // numbers of a load
    for (std::int32_t page = static_cast<std::int32_t>(blockIdx.x) % pieces * bound_threads +
                             static_cast<std::int32_t>(threadIdx.x);
         page < at.pages; page += pieces * bound_threads) {
        const T* const least = at.rows.rows.bounds(page);
        const T* const most = least + dim;
        Real joined = Real(0);
        for (std::int32_t g = 0; g < group; ++g) {
            const Real* const x = query + g * dim;
            Real bound = Real(0);
            for (std::int32_t d = 0; d < dim; d += each) {
                struct alignas(each * sizeof(T)) numbers {
                    T at[each];
                };
                const numbers low = *reinterpret_cast<const numbers*>(least + d),
                              high = *reinterpret_cast<const numbers*>(most + d);
#pragma unroll
                for (int i = 0; i < each; ++i) {
                    const Real a = rounded_product(x[d + i], static_cast<Real>(low.at[i])),
                               b = rounded_product(x[d + i], static_cast<Real>(high.at[i]));
                    bound += a < b ? b : a;
                }
            }
            joined = call.cache.mean_bound ? joined + bound
                     : g == 0              ? bound
                     : joined < bound      ? bound
                                           : joined;
        }
        using Key = typename choose_launch<T>::Key;
        // The newest token's page leads whatever its bound; a NaN is last.
        call.keys[at.pair * call.most_pages + page] =
            page == newest / call.cache.bound_rows ? ~Key(0) : key_of_rank(joined);
    }
}

/// Chooses: a block a head.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    choose_pages_kernel(const __grid_constant__ choose_launch<T> call) {
    using Key = typename choose_launch<T>::Key;
    __shared__ admit_memory memory;
    __shared__ largest_memory<Key> largest;
    const auto pair = static_cast<std::int32_t>(blockIdx.x);
    if (call.taken[pair / call.cache.kv_heads] <= 0) {
        return;
    }
    const page_head<T> at(call, pair);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t size = call.cache.bound_rows, parts = call.cache.pool.page_rows / size;
    std::int32_t* const chosen = call.chosen + at.pair * call.most_chosen;
    const auto id_of = [&](std::int32_t page) { return at.rows.table[page / parts] * parts + page % parts; };
    if (at.pages <= at.read) {
        for (std::int32_t page = thread; page < at.pages; page += admit_threads) {
            chosen[page] = id_of(page);
        }
        if (thread == 0) {
            call.chosen_rows[at.pair] = at.used;
        }
        return;
    }
    Key* const keys = call.keys + at.pair * call.most_pages;
    mark_largest(largest, memory, keys, at.pages, at.read);
    running_sums(
        memory, at.pages, [&](std::int32_t page) { return keys[page] == ~Key(0) ? 1 : 0; },
        [&](std::int32_t page, std::int32_t before) {
            if (keys[page] != ~Key(0)) {
                return;
            }
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
