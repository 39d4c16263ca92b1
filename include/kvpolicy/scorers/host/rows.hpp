// Rows as the scorers read them, and the streams of tokens that a call is made of.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace kvpolicy::host_backend {

/// One row in the type that is computed in.
template <class T, class Real>
void convert_row(const T* from, std::int32_t dim, Real* to) {
    if constexpr (std::is_same_v<T, Real>) {
        std::copy_n(from, dim, to);
    } else {
        for (std::int32_t i = 0; i < dim; ++i) {
            to[i] = static_cast<Real>(from[i]);
        }
    }
}

/// `count` rows from row t on, in the type that is computed in and without gaps: the view's own memory where
/// it is so, else `buffer`.
template <class T, class Real>
const Real* dense_rows(const rows_view<const T>& rows, std::int64_t b, std::int64_t h, std::int64_t t,
                       std::int32_t count, Real* buffer) {
    if constexpr (std::is_same_v<T, Real>) {
        if (count == 1 || rows.row_stride == rows.dim) {
            return rows.row(b, h, t);
        }
    }
    for (std::int32_t i = 0; i < count; ++i) {
        convert_row(rows.row(b, h, t + i), rows.dim, buffer + static_cast<std::ptrdiff_t>(i) * rows.dim);
    }
    return buffer;
}

/// Weights in the type that is computed in: themselves, or converted into `buffer`.
template <class Real>
const Real* real_weights(const float* weights, std::size_t count, Real* buffer) {
    if constexpr (std::is_same_v<Real, float>) {
        return weights;
    } else {
        for (std::size_t i = 0; i < count; ++i) {
            buffer[i] = static_cast<Real>(weights[i]);
        }
        return buffer;
    }
}

/// Tokens [first, end) of a sequence, absorbed by one state. begin <= first is where the state was empty; the
/// tokens between were absorbed by earlier calls. `last` marks the part of a sequence that no other follows.
struct stream_range {
    std::int64_t begin, first, end;
    bool last;
};

inline stream_range segment_of(const Sequences& sequences, std::int64_t b, std::int64_t segment) {
    const std::int64_t start = sequences.start_of(b);
    const std::int64_t end = start + sequences.length_of(b);
    if (sequences.cu_seqlens == nullptr) {
        return {0, start, end, start < end};
    }
    const std::int64_t begin = std::min<std::int64_t>(sequences.cu_seqlens[segment], end);
    const std::int64_t stop = std::min<std::int64_t>(sequences.cu_seqlens[segment + 1], end);
    return {begin, begin, stop, begin < stop && stop == end};
}

}  // namespace kvpolicy::host_backend
