// Selection at the read on the host: bounds of pages kept up as rows are written, and the pages that a query
// reads.
#pragma once

#include <kvpolicy/attention/host/portable.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <algorithm>

namespace kvpolicy::host_backend {

/// Pages of a selection that `rows` rows take.
template <class Cache>
std::int32_t pages_of_rows(const Cache& cache, std::int64_t rows) {
    const std::int32_t page = cache.selection.page_size();
    return static_cast<std::int32_t>((rows + page - 1) / page);
}

/// Brings the bounds of the pages of rows [begin, end) up to date, of which `used` are in use.
template <class Cache, class Rows>
void refresh_bounds(const Cache& cache, const Rows& rows, std::int32_t begin, std::int32_t end,
                    std::int32_t used) {
    if constexpr (Cache::policy_type::has_selection) {
        const std::int32_t size = cache.selection.page_size();
        for (std::int32_t page = begin / size; page * size < std::min(end, used); ++page) {
            auto* const least = rows.bounds(page);
            auto* const most = least + cache.head_dim_qk;
            const std::int32_t first = page * size, last = std::min(first + size, used);
            std::copy_n(rows.k(first), cache.head_dim_qk, least);
            std::copy_n(rows.k(first), cache.head_dim_qk, most);
            for (std::int32_t r = first + 1; r < last; ++r) {
                const auto* const key = rows.k(r);
                for (std::int32_t d = 0; d < cache.head_dim_qk; ++d) {
                    least[d] = to_compute(key[d]) < to_compute(least[d]) ? key[d] : least[d];
                    most[d] = to_compute(key[d]) > to_compute(most[d]) ? key[d] : most[d];
                }
            }
        }
    } else {
        static_cast<void>(cache), static_cast<void>(rows), static_cast<void>(begin), static_cast<void>(end),
            static_cast<void>(used);
    }
}

/// A page that a query may read, and the most that its logits can be.
template <class Real>
struct page_bound {
    Real bound;
    std::int32_t page;
};

/// Workspace of one head's choice: a bound for every page it can have.
template <class Cache>
std::size_t selection_bytes([[maybe_unused]] const Cache& cache) {
    if constexpr (Cache::policy_type::has_selection) {
        std::int64_t most = 0;
        for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
            most = std::max<std::int64_t>(most, pages_of_rows(cache, cache.capacity(h)));
        }
        return detail::aligned_size(static_cast<std::size_t>(most) *
                                    sizeof(page_bound<compute_t<typename Cache::value_type>>));
    }
    return 0;
}

/// Chooses the pages of `used` rows that the group's query heads read, into `chosen`, rising; returns how
/// many. `newest` is the row of the newest token. q points to the first head's query.
template <class Cache, class Rows, class T, class Real>
std::int32_t choose_pages(const Cache& cache, const Rows& rows, std::int32_t head, std::int32_t used,
                          std::int32_t newest, Real scale, const T* q, std::int64_t head_stride,
                          page_bound<Real>* chosen) {
    const std::int32_t pages = pages_of_rows(cache, used), read = cache.selection.pages.at(cache.layer, head);
    if (pages <= read) {
        for (std::int32_t page = 0; page < pages; ++page) {
            chosen[page] = {Real(0), page};
        }
        return pages;
    }
    const std::int32_t current = newest / cache.selection.page_size();
    for (std::int32_t page = 0; page < pages; ++page) {
        const T* const least = rows.bounds(page);
        const T* const most = least + cache.head_dim_qk;
        Real joined = Real(0);
        for (std::int32_t g = 0; g < cache.group; ++g) {
            const T* const query = q + g * head_stride;
            Real bound = Real(0);
            for (std::int32_t d = 0; d < cache.head_dim_qk; ++d) {
                const Real x = scale * static_cast<Real>(to_compute(query[d]));
                bound += std::max(x * static_cast<Real>(to_compute(least[d])),
                                  x * static_cast<Real>(to_compute(most[d])));
            }
            joined = cache.selection.aggregate == group_aggregate::mean ? joined + bound
                     : g == 0                                           ? bound
                                                                        : std::max(joined, bound);
        }
        chosen[page] = {joined, page};
    }
    // The newest token's page leads whatever its bound; a NaN is last.
    const auto better = [current](const page_bound<Real>& a, const page_bound<Real>& b) {
        if (a.page == current || b.page == current) {
            return a.page == current && b.page != current;
        }
        return ranks_before(static_cast<double>(a.bound), a.page, static_cast<double>(b.bound), b.page);
    };
    std::nth_element(chosen, chosen + (read - 1), chosen + pages, better);
    std::sort(chosen, chosen + read, [](const auto& a, const auto& b) { return a.page < b.page; });
    return read;
}

}  // namespace kvpolicy::host_backend
