// Bodies of scorers/feature_map.hpp on the host.
#pragma once

#include <kvpolicy/host/scorers/kernels.hpp>
#include <kvpolicy/scorers/feature_map.hpp>

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

}  // namespace kvpolicy
