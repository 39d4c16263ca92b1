// Bounds of a selection's pages on a device: the smallest and largest number of every dimension of their
// keys.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Brings the bounds of page `page` up to date, of whose head `used` rows are in use: by threads `rank` of
/// `size`, a dimension each. Rows come in their order, so that of equal numbers (-0 and 0) the host's stays,
/// and a NaN is where the host has one.
template <class Rows>
__device__ void refresh_page(const Rows& rows, std::int32_t page, std::int32_t used, std::int32_t rank,
                             std::int32_t size) {
    const std::int32_t first = page * rows.bound_rows;
    const std::int32_t count = used - first < rows.bound_rows ? used - first : rows.bound_rows;
    const auto* const key = rows.k(first);  // the others follow: the page lies in one of the cache's
    auto* const least = rows.bounds(page);
    using T = std::remove_pointer_t<decltype(least)>;
    using Real = compute_t<T>;
    for (std::int32_t d = rank; d < rows.head_dim_qk; d += size) {
        T low = key[d], high = low;
        for (std::int32_t r = 1; r < count; ++r) {
            const T x = key[std::int64_t{r} * rows.head_dim_qk + d];
            low = static_cast<Real>(x) < static_cast<Real>(low) ? x : low;
            high = static_cast<Real>(x) > static_cast<Real>(high) ? x : high;
        }
        least[d] = low;
        least[rows.head_dim_qk + d] = high;
    }
}

/// The bounds of all pages of rows [begin, end): by warps `warp` of `warps`, a page each.
template <class Rows>
__device__ void refresh_pages(const Rows& rows, std::int32_t begin, std::int32_t end, std::int32_t used,
                              std::int32_t warp, std::int32_t warps) {
    const std::int32_t size = rows.bound_rows, stop = end < used ? end : used;
    for (std::int32_t page = begin / size + warp; page * size < stop; page += warps) {
        refresh_page(rows, page, used, static_cast<std::int32_t>(threadIdx.x % 32), 32);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
