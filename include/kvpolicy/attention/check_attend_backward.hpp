// What attend_backward() refuses besides what attend() does.
#pragma once

#include <kvpolicy/attention/check_attend.hpp>
#include <kvpolicy/attention/gradients.hpp>
#include <kvpolicy/attention/kv_view.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/finite_rows.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace kvpolicy::checks {

inline bool good_number(bool good, bool refuse, const char* name, std::int64_t b, std::int64_t h,
                        std::int64_t t, float value, const char* allowed) {
    if (!good && refuse) {
        detail::refuse(detail::text(name, "[", b, "][", h, "][", t, "]").c_str(), value, allowed);
    }
    return good;
}

/// Numbers that take part must be finite; what no query sees may hold anything. Others set status_not_finite,
/// or are refused without a status.
template <class T>
void check_gradient_numbers(const host& ctx, const rows_view<const T>& q, const kv_view<T>& all,
                            const Sequences& sequences, const SavedForward<T>& saved, std::uint32_t* status) {
    constexpr float infinite = std::numeric_limits<float>::infinity();
    check_in_parallel(ctx, std::int64_t{q.batch} * q.heads, [&](std::int64_t task, bool refuse) {
        const std::int64_t b = task / q.heads, h = task % q.heads;
        bool good = true;
        for (std::int32_t i = 0; good && i < sequences.length_of(b); ++i) {
            const float lse = saved.lse.head(b, h)[i];
            good = good_row(refuse, "q", q, b, h, i) && good_row(refuse, "out", saved.out, b, h, i) &&
                   good_row(refuse, "d_out", saved.d_out, b, h, i) &&
                   good_number(lse < infinite, refuse, "lse", b, h, i, lse, "a number, or -inf");
        }
        return good || reported(status, b, status_not_finite);
    });
    check_in_parallel(ctx, std::int64_t{q.batch} * all.k.heads, [&](std::int64_t task, bool refuse) {
        const auto b = static_cast<std::int32_t>(task / all.k.heads),
                   h = static_cast<std::int32_t>(task % all.k.heads);
        const std::int32_t count = all.lengths != nullptr ? all.lengths[b] : all.k.length;
        const std::int64_t start = sequences.start_of(b), end = start + sequences.length_of(b);
        bool good = true;
        for (std::int32_t t = 0; good && t < count; ++t) {
            const std::int64_t begins =
                all.position ? all.position.head(b, h)[t] : std::int64_t{all.first} + t;
            std::int64_t expires = all.mask.expiry ? all.mask.expiry.head(b, h)[t] : never;
            if (all.mask.log_bias) {
                const std::int64_t biased = begins + all.mask.bias_from_of(h);
                const float bias = all.mask.log_bias.head(b, h)[t];
                const bool counts = std::max(biased, start) < std::min(expires, end);
                if (bias == -infinite) {
                    expires = std::min(expires, biased);
                }
                good = good_number(!counts || bias < infinite, refuse, "log_bias", b, h, t, bias,
                                   "a number, or -inf");
            }
            if (!good || std::max(begins, start) >= std::min(expires, end)) {
                continue;
            }
            good = good_row(refuse, "k", all.k, b, h, t) && good_row(refuse, "v", all.v, b, h, t);
        }
        return good || reported(status, b, status_not_finite);
    });
}

template <class T>
void check_backward_shapes(const rows_view<const T>& q, const kv_view<T>& all, const SavedForward<T>& saved,
                           const AttentionGrads<T>& grads) {
    const rows_view<const T>& k = all.k;
    const auto rows = [](const char* name, const auto& view, std::int32_t batch, std::int32_t heads,
                         std::int32_t length, std::int32_t dim) {
        require_shape(name, view, batch, heads, length);
        detail::require(
            view.dim == dim, [&] { return detail::text(name, ".dim"); }, view.dim,
            [&] { return detail::text("a head_dim of ", dim); });
    };
    rows("out", saved.out, q.batch, q.heads, q.length, all.v.dim);
    rows("d_out", saved.d_out, q.batch, q.heads, q.length, all.v.dim);
    require_shape("lse", saved.lse, q.batch, q.heads, q.length);
    rows("d_q", grads.d_q, q.batch, q.heads, q.length, q.dim);
    rows("d_k", grads.d_k, q.batch, k.heads, k.length, k.dim);
    rows("d_v", grads.d_v, q.batch, k.heads, k.length, all.v.dim);
    detail::require(k.row_stride != 0 || k.length <= 1, "keys.k.row_stride", k.row_stride,
                    "other than 0, since every key has a gradient of its own");
    if (grads.d_log_bias) {
        require_shape("d_log_bias", grads.d_log_bias, q.batch, k.heads, k.length);
        detail::require(static_cast<bool>(all.mask.log_bias), "d_log_bias", "given",
                        "empty where the mask has no log_bias");
    }
}

}  // namespace kvpolicy::checks
