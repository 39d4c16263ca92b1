// What calls on a cache refuse, whatever memory it lies in.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/step_io.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstdint>
#include <limits>

namespace kvpolicy::checks {

/// Scores that nobody would read.
template <class P>
void check_scores_wanted(const detail::step_extras& extras) {
    if constexpr (P::scorer_type::when != score_time::given) {
        detail::require(!extras.scores, "io.scores", "given",
                        "nothing, since this policy has a scorer of its own");
    }
}

/// The arrays of an export; reads no memory of the call, so that it serves every backend. `needed` pages,
/// which are what `of` says.
template <class Cache, class Pages>
void check_head_pages(const Cache& cache, const Batch& batch, const Pages& pages, std::int64_t needed,
                      const char* of) {
    detail::require(pages.indices_capacity >= needed, "pages.indices_capacity", pages.indices_capacity,
                    [&] { return detail::text("at least ", of, ", ", needed); });
    detail::require(pages.indptr != nullptr, "pages.indptr", "null", "an array of batch.count * Hkv + 1");
    detail::require(pages.indices != nullptr || needed == 0, "pages.indices", "null",
                    "an array of indices_capacity");
    detail::require(pages.last_page_len != nullptr || batch.count == 0, "pages.last_page_len", "null",
                    "an array of batch.count * Hkv");
    detail::require(cache.page_count() <= std::numeric_limits<std::int32_t>::max(), "pages of the layer",
                    cache.page_count(), "below 2^31, as indices are 32 bits");
}

}  // namespace kvpolicy::checks
