// Bodies of scorers/activation.hpp on the host.
#pragma once

#include <kvpolicy/host/scorers/kernels.hpp>
#include <kvpolicy/scorers/activation.hpp>

#include <cmath>

namespace kvpolicy {

template <class Real>
void Silu::apply(isa set, Real* y, std::int32_t count) {
    host_backend::run_kernel<host_backend::silu_kernel>(set, y, count);
}

template <class Real>
void GeluErf::apply(isa, Real* y, std::int32_t count) {
    for (std::int32_t i = 0; i < count; ++i) {
        y[i] = y[i] * (Real(1) + std::erf(y[i] * Real(0.70710678118654752440))) * Real(0.5);
    }
}

}  // namespace kvpolicy
