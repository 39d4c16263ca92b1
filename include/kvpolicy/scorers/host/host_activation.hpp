// Bodies of scorers/activation.hpp on the host.
#pragma once

#include <kvpolicy/scorers/activation.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>

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

/// silu'(y) = sigmoid(y) (1 + y (1 - sigmoid(y)))
template <class Real>
void Silu::pull_back(const Real* y, Real* d, std::int32_t count) {
    for (std::int32_t i = 0; i < count; ++i) {
        const Real e = std::exp(-std::abs(y[i]));
        const Real open = (y[i] < Real(0) ? e : Real(1)) / (Real(1) + e);
        const Real closed = (y[i] < Real(0) ? Real(1) : e) / (Real(1) + e);
        d[i] *= open * (Real(1) + y[i] * closed);
    }
}

/// gelu'(y) = Phi(y) + y phi(y)
template <class Real>
void GeluErf::pull_back(const Real* y, Real* d, std::int32_t count) {
    for (std::int32_t i = 0; i < count; ++i) {
        const Real below = (Real(1) + std::erf(y[i] * Real(0.70710678118654752440))) * Real(0.5);
        d[i] *= below + y[i] * Real(0.39894228040143267794) * std::exp(Real(-0.5) * y[i] * y[i]);
    }
}

}  // namespace kvpolicy
