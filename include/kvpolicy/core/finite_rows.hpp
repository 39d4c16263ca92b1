// Tensors whose numbers must be finite, because decisions hang on them.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/types.hpp>

#include <cmath>
#include <cstdint>
#include <limits>

namespace kvpolicy::checks {

template <class T>
bool finite_row(const T* row, std::int32_t dim) {
    bool good = true;
    for (std::int32_t c = 0; c < dim; ++c) {
        good &= std::abs(static_cast<compute_t<T>>(row[c])) <= std::numeric_limits<compute_t<T>>::max();
    }
    return good;
}

/// Whether a row is finite; refuses it by name where `refuse` says so.
template <class T>
bool good_row(bool refuse, const char* name, const rows_view<const T>& rows, std::int64_t b, std::int64_t h,
              std::int64_t t) {
    if (finite_row(rows.row(b, h, t), rows.dim)) [[likely]] {
        return true;
    }
    if (refuse) {
        detail::refuse(detail::text(name, "[", b, "][", h, "][", t, "]").c_str(), "NaN or infinite",
                       "a row of finite numbers");
    }
    return false;
}

/// Refuses a number of rows [b][h][t], t < tokens(b), that is not finite.
template <class T, class Tokens>
void check_finite_rows(const host& ctx, const char* name, const rows_view<const T>& rows,
                       const Tokens& tokens) {
    check_in_parallel(ctx, std::int64_t{rows.batch} * rows.heads, [&](std::int64_t task, bool refuse) {
        const std::int64_t b = task / rows.heads, h = task % rows.heads;
        for (std::int32_t t = 0; t < tokens(b); ++t) {
            const T* row = rows.row(b, h, t);
            for (std::int32_t d = 0; d < rows.dim; ++d) {
                const auto x = static_cast<compute_t<T>>(row[d]);
                if (std::isfinite(x)) [[likely]] {
                    continue;
                }
                if (refuse) {
                    detail::refuse(
                        detail::text(name, "[", b, "][", h, "][", t, "]").c_str(), x,
                        "finite numbers, since this policy decides by the attention that keys receive");
                }
                return false;
            }
        }
        return true;
    });
}

}  // namespace kvpolicy::checks
