// Which saved log-sum-exps say too little of their row's weights, on both backends.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <limits>

namespace kvpolicy::detail {

/// An lse in fp32 is off by up to 2^-12 here, and so is the exponent of every weight exp(logit - lse) of its
/// row.
inline constexpr float max_saved_lse = 4096.0f;
inline constexpr float largest_float = std::numeric_limits<float>::max();  // nvcc: no call on a device

/// Whether an lse is finite and beyond max_saved_lse: a backward pass finds the sum of such a row's weights
/// again. False for NaN.
KVPOLICY_HOST_DEVICE constexpr bool is_large_lse(float lse) {
    const float size = lse < 0.0f ? -lse : lse;
    return size > max_saved_lse && size <= largest_float;
}

}  // namespace kvpolicy::detail
