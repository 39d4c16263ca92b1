// What future_mass() and received_mass() refuse.
#pragma once

#include <kvpolicy/attention/head_dim.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cmath>
#include <cstdint>

namespace kvpolicy::checks {

/// Heads and widths of a pass over one sequence; reads no memory of the call, so that it
/// serves every backend.
template <class T>
void check_mass_heads(const rows_view<const T>& q, const rows_view<const T>& k) {
    check_extents("q", q);
    detail::require(k.batch == q.batch, "k.batch", k.batch,
                    [&] { return detail::text("q.batch = ", q.batch); });
    detail::require(k.heads >= 1 && q.heads >= 1 && q.heads % k.heads == 0, "q.heads", q.heads,
                    [&] { return detail::text("1 or more, and a multiple of k.heads = ", k.heads); });
    detail::require(q.dim == k.dim && head_dim_supported(q.dim), "head_dim", q.dim, [&] {
        return detail::text("that of k (", k.dim, "), a multiple of 8 up to ", max_head_dim);
    });
}

/// The queries and keys of a pass over one sequence.
template <class T>
void check_mass_shapes(rows_view<const T> q, rows_view<const T> k, const Sequences& sequences) {
    check_whole_sequences(sequences, q.batch, q.length);
    detail::require(sequences.cu_seqlens == nullptr, "sequences.cu_seqlens", "given", "null");
    check_mass_heads(q, k);
    detail::require(k.length >= sequences.length, "k.length", k.length,
                    [&] { return detail::text("at least sequences.length = ", sequences.length); });
    check_rows("q", q, q.batch, q.heads, sequences.length, q.dim);
    check_rows("k", k, q.batch, k.heads, sequences.length, k.dim);
}

template <class T>
void check_mass_call(rows_view<const T> q, rows_view<const T> k, plane_view<const float> lse,
                     const Sequences& sequences) {
    check_mass_shapes(q, k, sequences);
    check_plane("lse", lse, q.batch, q.heads, sequences.length);
}

/// The numbers of a target; reads no memory of the call, so that it serves every backend.
template <class Options>
void check_mass_options(const Options& options, std::int32_t kv_heads) {
    detail::require(options.beta >= 1.0f, "beta", options.beta, "1 to infinity");
    detail::require(options.epsilon >= 0.0f && std::isfinite(options.epsilon), "epsilon", options.epsilon,
                    "0 or more, and finite");
    detail::require(options.look_ahead >= 0, "look_ahead", options.look_ahead,
                    "0 or more, or kvpolicy::unlimited");
    detail::require(options.layer >= 0 && options.layer < never, "layer", options.layer,
                    "0 or more, and below 2^31 - 1");
    options.window.check("array of windows", options.layer + 1, kv_heads);
    for (std::int32_t h = 0; h < kv_heads; ++h) {
        const std::int32_t window = options.window.at(options.layer, h);
        detail::require(window >= 1, "window", window, "1 or more");
    }
}

}  // namespace kvpolicy::checks
