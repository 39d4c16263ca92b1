// What the scorers' backward passes refuse on both contexts.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/scorers/score_backward.hpp>

namespace kvpolicy::checks {

/// The scores of the forward call: they have the shape of d_scores.
template <Storage T>
plane_view<compute_t<T>> scores_of(const ScoreBackward<T>& call) {
    const auto& d = call.d_scores;
    return {const_cast<compute_t<T>*>(d.data), d.batch, d.heads, d.length, d.batch_stride, d.head_stride};
}

/// d_k and d_v: both or none, of the shapes of k and v.
template <Storage T>
void check_row_gradients(const ScoreBackward<T>& call) {
    const bool wanted = call.d_k.data != nullptr;
    detail::require(wanted == (call.d_v.data != nullptr), "d_v.data", wanted ? "null" : "given",
                    "given with d_k, or null with it");
    if (wanted) {
        check_rows("d_k", call.d_k, call.k.batch, call.k.heads, call.k.length, call.k.dim);
        check_rows("d_v", call.d_v, call.k.batch, call.k.heads, call.v.length, call.v.dim);
    }
}

}  // namespace kvpolicy::checks
