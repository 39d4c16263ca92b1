// The head dimensions that attention takes.
#pragma once

#include <cstdint>

namespace kvpolicy::checks {

/// The head dimensions that the host backend has bodies for: multiples of 8 (a vector of fp32) up to this.
inline constexpr std::int32_t max_head_dim = 1024;
constexpr bool head_dim_supported(std::int32_t dim) {
    return dim >= 8 && dim <= max_head_dim && dim % 8 == 0;
}

}  // namespace kvpolicy::checks
