// The arguments of a scorer's backward pass.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/scorers/dropout.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// What a backward pass is given: the arrays of the score_sequence call, and the gradient of its scores. Nothing else is
/// kept from the forward pass; hidden layers and states are computed again. Real numbers are compute_t<T>.
template <Storage T>
struct ScoreBackward {
    rows_view<const T> k;  ///< [B, Hkv, S, Dk]
    rows_view<const T> v;  ///< [B, Hkv, S, Dv]
    Sequences sequences;
    std::int32_t delay = 0;                   ///< as in score_sequence
    plane_view<const compute_t<T>> d_scores;  ///< [B, Hkv, S]; not read where no score is written
    rows_view<compute_t<T>> d_k{};  ///< [B, Hkv, S, Dk], overwritten for the lengths; empty: not wanted
    rows_view<compute_t<T>> d_v{};  ///< [B, Hkv, S, Dv], the same; both or neither
    Dropout dropout{};              ///< that of the forward call
    /// The workspace is as score_sequence with `for_backward` left it, for the same scorer, weights, k, v, sequences and delay (and rows of
    /// scores as many as d_scores has), so that this pass need not make again what that call made. Once a forward call.
    bool kept = false;
};

/// What score_sequence_backward takes besides the usual.
struct ScoreBackwardOptions {
    /// [B], OR-ed into: status_not_finite, for a NaN or infinity in k, v or d_scores (the gradients then mean
    /// nothing), and status_bad_length. Null: not wanted; the host then refuses both.
    std::uint32_t* status = nullptr;
};

template <class K, class... Rest>
ScoreBackward(rows_view<K>, Rest...) -> ScoreBackward<std::remove_const_t<K>>;

}  // namespace kvpolicy
