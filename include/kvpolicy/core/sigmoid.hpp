// The logistic function, for gates on every backend.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <cmath>

namespace kvpolicy::detail {

/// sigmoid, exact in relative terms at both ends.
template <class Real>
KVPOLICY_HOST_DEVICE Real sigmoid(Real z) {
    const Real e = std::exp(-std::abs(z));
    return (z < Real(0) ? e : Real(1)) / (Real(1) + e);
}

}  // namespace kvpolicy::detail
