// From a row's reductions, one a query head of the group, to the number that a call writes.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// log(e^a + e^b), infinities included.
template <class C>
__device__ inline C log_add(C a, C b) {
    const C high = a > b ? a : b;
    const C low = a > b ? b : a;
    return low == static_cast<C>(-INFINITY) ? high : high + log1p(exp(low - high));
}

/// The masses of a key's group: their largest, or the logarithm of their sum. Never leaves the logarithmic
/// domain, so that a sparse lse, with which a mass may exceed what fp32 holds, does no harm.
template <class C>
struct mass_total {
    C log_mass;

    __device__ void clear() { log_mass = static_cast<C>(-INFINITY); }
    __device__ void add(C one, bool mean) {
        log_mass = mean ? log_add(log_mass, one) : one > log_mass ? one : log_mass;
    }
};

template <class C>
inline constexpr C ln_2 = static_cast<C>(0.693147180559945309417232121458);

/// log M_g of row t (eq. 2, 16) from its reduction's result in base 2.
template <class T, class C>
__device__ inline C log_mass_of(const qk_reduce_params<T, C>& params, const qk_reduce_item& item,
                                std::int32_t t, C result) {
    C log_mass = (result - params.exponents.shift) * ln_2<C>;
    if (params.mass.normalize) {
        std::int64_t count = std::int64_t{item.length} - (std::int64_t{t} + item.low);
        count = count < 1 ? 1 : count;
        const std::int64_t most = std::int64_t{params.look_ahead} + 1;
        count = count < most ? count : most;
        log_mass -= log(static_cast<C>(count));
    }
    return log_mass * params.mass.over_beta;
}

/// log(eps + M) of a key (eq. 3, 14, 15).
template <class T, class C>
__device__ inline C target_of(const qk_reduce_params<T, C>& params, const mass_total<C>& total) {
    const C group = params.mass.mean ? log(static_cast<C>(params.streams)) : static_cast<C>(0);
    return log_add(params.mass.log_epsilon, total.log_mass - group);
}

/// A reduction's result into the total of its row, row `row` of the item.
template <class Pass, class T>
__device__ inline void add_to_total(const qk_reduce_params<T>& params, const qk_reduce_item& item,
                                    float* totals, int row, float result) {
    if constexpr (Pass::mass) {
        mass_total<float> total{totals[row]};
        total.add(log_mass_of(params, item, item.first + row, result), params.mass.mean);
        totals[row] = total.log_mass;
    } else {
        totals[row] = result * ln_2<float>;
    }
}

/// Writes row `row` of the item, number `number` of all, one a thread, and the flag of a quick pass.
template <class Pass, class T>
__device__ inline void write_total(const qk_reduce_params<T>& params, const qk_reduce_item& item,
                                   const float* totals, int row, std::int32_t number, const int* flag) {
    if (item.first + row < item.length) {
        float* const out = params.out.head(item.b, item.head) + item.first + row;
        if constexpr (Pass::mass) {
            *out = target_of(params, mass_total<float>{totals[row]});
        } else {
            *out = totals[row];
        }
    }
    if constexpr (Pass::quick) {
        if (row == 0) {
            params.flags[number] = *flag;
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
