// The arguments of attention's backward pass.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <type_traits>

namespace kvpolicy {

/// The inputs of attend_backward besides those of attend(ctx, params, q, kv, sequences, out, lse):
/// its results, and the gradient of out. The shapes are those of attend.
template <class T>
struct SavedForward {
    rows_view<const T> out;       ///< [B, Hq, S, Dv], as attend wrote it
    plane_view<const float> lse;  ///< [B, Hq, S], the same
    rows_view<const T> d_out;     ///< [B, Hq, S, Dv]
};

template <class Out, class... Rest>
SavedForward(rows_view<Out>, Rest...) -> SavedForward<std::remove_const_t<Out>>;

/// Where attend_backward writes. Each is overwritten: d_q for the sequences' lengths, the others for
/// the rows that all.lengths counts, with 0 for keys that no query sees. Sums run in compute_t<T> and
/// are rounded once.
template <class T>
struct AttentionGrads {
    rows_view<T> d_q;  ///< [B, Hq, S, Dk]
    rows_view<T> d_k;  ///< [B, Hkv, Skv, Dk]
    rows_view<T> d_v;  ///< [B, Hkv, Skv, Dv]
    plane_view<compute_t<T>>
        d_log_bias{};  ///< [B, Hkv, Skv]; empty: not wanted. Needs a mask with log-biases.
};

}  // namespace kvpolicy
