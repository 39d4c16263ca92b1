// The checks of score_hidden().
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/hidden_rows.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <algorithm>
#include <cstdint>

namespace kvpolicy::checks {

/// Refuses hidden states of another shape than the call's.
inline void check_hidden(const char* name, const HiddenRows& hidden, std::int32_t batch, std::int32_t length,
                         std::int32_t width) {
    detail::require(hidden.data != nullptr || batch == 0 || length == 0, name, "null", [&] {
        return detail::text("the tokens' hidden states, ", batch, " x 1 x at least ", length, " x ", width);
    });
    const bool fits =
        hidden.batch == batch && hidden.heads == 1 && hidden.length >= length && hidden.width == width;
    if (!fits) {
        detail::refuse(
            name, detail::text(hidden.batch, " x ", hidden.heads, " x ", hidden.length, " x ", hidden.width),
            detail::text(batch, " x 1 x at least ", length, " x ", width,
                         ", the width that the scorer reads"));
    }
}

/// Shapes and sequences of score_hidden().
template <class S, class Real>
void check_hidden_call(const S& scorer, const HiddenRows& hidden, const Sequences& sequences,
                       plane_view<const Real> scores, const char* scores_name) {
    check_sequences(sequences, hidden.batch, hidden.length);
    std::int32_t last = 0;
    for (std::int32_t b = 0; b < hidden.batch; ++b) {
        const std::int64_t start = sequences.start_of(b), end = start + sequences.length_of(b);
        detail::require(
            start >= 0 && end <= hidden.length, [&] { return detail::text("sequences.starts[", b, "]"); },
            start,
            [&] { return detail::text("0 or more, and with its length at most hidden's ", hidden.length); });
        last = std::max(last, static_cast<std::int32_t>(end));
    }
    check_hidden("hidden", hidden, hidden.batch, last, scorer.hidden_width());
    check_plane(scores_name, scores, hidden.batch, scores.heads, last);
    if constexpr (CheckedScorer<S>) {
        scorer.check(scores.heads, 0, 0);
    }
}

}  // namespace kvpolicy::checks
