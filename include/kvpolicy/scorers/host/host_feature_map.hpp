// Bodies of scorers/feature_map.hpp on the host.
#pragma once

#include <kvpolicy/scorers/feature_map.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>

namespace kvpolicy {

template <class Real>
void Softmax::map(isa set, const Real* y, std::int32_t d_qk, Real* out) {
    host_backend::run_kernel<host_backend::softmax_kernel>(set, y, d_qk, false, out);
}

template <class Real>
void Hedgehog::map(isa set, const Real* y, std::int32_t d_qk, Real* out) {
    const std::int32_t half = d_qk / 2;
    host_backend::run_kernel<host_backend::softmax_kernel>(set, y, half, false, out);
    host_backend::run_kernel<host_backend::softmax_kernel>(set, y, half, true, out + half);
}

/// d y = p (d p - p . d p)
template <class Real>
void Softmax::pull_back(const Real* features, const Real* d_features, std::int32_t d_qk, Real* d_y) {
    Real along = Real(0);
    for (std::int32_t i = 0; i < d_qk; ++i) {
        along += features[i] * d_features[i];
    }
    for (std::int32_t i = 0; i < d_qk; ++i) {
        d_y[i] = features[i] * (d_features[i] - along);
    }
}

template <class Real>
void Hedgehog::pull_back(const Real* features, const Real* d_features, std::int32_t d_qk, Real* d_y) {
    const std::int32_t half = d_qk / 2;
    Softmax::pull_back(features, d_features, half, d_y);
    Real along = Real(0);
    for (std::int32_t i = half; i < d_qk; ++i) {
        along += features[i] * d_features[i];
    }
    for (std::int32_t i = 0; i < half; ++i) {
        d_y[i] -= features[half + i] * (d_features[half + i] - along);
    }
}

}  // namespace kvpolicy
