// The segments of a call, and the keys of each that compete.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <algorithm>
#include <cstdint>

namespace kvpolicy::host_backend {

/// t + w, or never where that does not fit.
inline expiry_t window_expiry(std::int32_t t, std::int32_t window) {
    const std::int64_t end = std::int64_t{t} + window;
    return end < never ? static_cast<expiry_t>(end) : never;
}

template <class P, class Visit>
void for_each_segment(const Sequences& sequences, std::int32_t b, Visit&& visit) {
    const std::int32_t length = sequences.length_of(b);
    if (sequences.cu_seqlens == nullptr) {
        visit(0, length);
        return;
    }
    for (std::int32_t i = 0; i < sequences.segments; ++i) {
        const std::int32_t begin = sequences.cu_seqlens[i];
        const std::int32_t end = std::min(sequences.cu_seqlens[i + 1], length);
        if (begin < end) {
            visit(begin, end);
        }
    }
}

/// Calls visit(t, q) for every key t (relative to its segment) that leaves the window and competes unless its
/// gate is closed: no sink, not kept by position. q = t + w is the query at which it leaves.
template <class P, class Visit>
void for_each_leaver(const P& policy, const HeadParams& head_params, std::int32_t length, Visit&& visit) {
    for (std::int64_t q = std::int64_t{head_params.sinks} + head_params.window; q < length; ++q) {
        const auto t = static_cast<std::int32_t>(q - head_params.window);
        if constexpr (P::has_keep) {
            if (policy.keeps(t)) {
                continue;
            }
        }
        visit(t, static_cast<std::int32_t>(q));
    }
}

}  // namespace kvpolicy::host_backend
