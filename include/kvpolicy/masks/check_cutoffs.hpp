// What build_cutoffs() refuses on both contexts.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

namespace kvpolicy::checks {

/// Packed segments.
inline void check_one_segment(const Sequences& sequences) {
    detail::require(sequences.cu_seqlens == nullptr, "sequences.cu_seqlens", "given",
                    "null (build_mask takes packed segments)");
}

/// Sequences and policies whose ranks change with the query.
template <class P>
void check_static_ranks(const P& policy, const Sequences& sequences, std::int32_t heads, std::int32_t layer) {
    detail::require(sequences.length < rebase_limit, "sequences.length", sequences.length, "below 2^29");
    for (std::int32_t h = 0; h < heads; ++h) {
        const std::int32_t step = policy.params(layer, h).decay_step;
        detail::require(step == 1, "decay step n", step, "1, since ranks are static only then");
    }
}

}  // namespace kvpolicy::checks
