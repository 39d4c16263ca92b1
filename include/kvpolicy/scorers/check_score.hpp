// The checks of score_sequence().
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/dropout.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

namespace kvpolicy::checks {

template <class S>
inline constexpr bool has_chunkwise = false;
template <std::int32_t D, class Feature, class Values>
inline constexpr bool has_chunkwise<mLSTMScorer<D, Feature, Values>> = true;

/// A scorer that has dropout.
template <class S>
concept has_dropout = requires(const S& scorer, const float* row, float* to, isa set,
                               const DropoutStream& dropout) {
    scorer.score_span(0, position_t{0}, 1, row, row, to, to, set, dropout);
};

template <class T>
std::string shape_text(const rows_view<T>& rows) {
    return detail::text("[", rows.batch, ", ", rows.heads, ", ", rows.length, ", ", rows.dim, "]");
}

/// Shapes, sequences and options of score_sequence().
template <class T, class S, class Real, class Options>
void check_score_call(const S& scorer, rows_view<const T> k, rows_view<const T> v, const Sequences& sequences,
                      std::int32_t delay, plane_view<Real> scores, const Options& options) {
    using detail::require;
    using form = std::remove_cvref_t<decltype(options.how)>;
    require(k.batch >= 0 && k.heads >= 1 && k.length >= 0 && k.dim >= 1, "k", shape_text(k),
            "[batch >= 0, heads >= 1, length >= 0, dim >= 1]");
    require(v.batch == k.batch && v.heads == k.heads && v.length >= 0 && v.dim >= 1, "v", shape_text(v),
            detail::text("a view of the batch and heads of k, ", shape_text(k)));
    check_sequences(sequences, k.batch, std::min(k.length, v.length));
    bool any = false;
    for (std::int32_t b = 0; b < k.batch; ++b) {
        const std::int32_t length = sequences.length_of(b);
        const std::int64_t start = sequences.start_of(b);
        any = any || length > 0;
        if (sequences.starts == nullptr) {
            continue;
        }
        const std::string name = detail::text("sequences.starts[", b, "]");
        require(start >= 0 && start + length <= std::min(k.length, v.length), name.c_str(), start,
                detail::text("0 or more, and with the length ", length, " at most the rows of k and v, ",
                             std::min(k.length, v.length)));
        require(start == 0 || sequences.cu_seqlens == nullptr, name.c_str(), start,
                "0 where cu_seqlens is given");
        if constexpr (S::when == score_time::on_leaving) {
            require(start == 0 || options.states != nullptr, name.c_str(), start,
                    "0 without options.states, which holds what the scorer knows of earlier tokens");
        }
    }
    std::int64_t last = 0;
    for (std::int32_t b = 0; b < k.batch; ++b) {
        last = std::max<std::int64_t>(last, std::int64_t{sequences.start_of(b)} + sequences.length_of(b));
    }
    require(scores.batch == k.batch && scores.heads == k.heads && scores.length >= last, "scores",
            detail::text(scores.batch, " x ", scores.heads, " x ", scores.length),
            detail::text(k.batch, " x ", k.heads, " x at least ", last, ", as k and the sequences"));
    if (any) {
        require(k.data != nullptr, "k.data", "null", "the keys");
        require(v.data != nullptr, "v.data", "null", "the values");
        require(scores.data != nullptr, "scores.data", "null", "memory for the scores");
        check_strides("scores", scores);
    }
    require(delay >= 0, "delay", delay, "0 or more");
    if constexpr (S::when == score_time::in_window) {
        require(delay >= S::reach, "delay", delay, [] {
            return detail::text(S::reach, " or more, since a score reads ", S::reach, " later keys");
        });
    }
    options.dropout.check();
    require(has_dropout<S> || options.dropout.rate == 0.0f, "dropout.rate", options.dropout.rate,
            "0, since this scorer has no dropout");
    require(options.how <= form::chunkwise, "options.how", static_cast<int>(options.how), "a form");
    require(has_chunkwise<S> || options.how != form::chunkwise, "options.how", "form::chunkwise",
            "form::recurrent or form::fastest: only mLSTMScorer has a chunkwise form");
    if constexpr (CheckedScorer<S>) {
        scorer.check(k.heads, k.dim, v.dim);
    }
}

}  // namespace kvpolicy::checks
