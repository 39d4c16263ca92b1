// Bodies of scorers/linear.hpp on the host.
#pragma once

#include <kvpolicy/scorers/check.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/linear.hpp>

namespace kvpolicy {

template <std::int32_t D>
template <class Real>
Real LinearScorer<D>::score(std::int32_t head, const Real* key, const Real* value, Real* /*scratch*/,
                            isa set) const {
    Real result, of_value;  // a block of one, so that both give the same bits
    score_block(head, 1, key, value, &result, &of_value, set);
    return result;
}

template <std::int32_t D>
template <class Real>
void LinearScorer<D>::score_block(std::int32_t head, std::int32_t count, const Real* keys, const Real* values,
                                  Real* scores, Real* scratch, isa set) const {
    using namespace host_backend;
    const std::int32_t k_dim = D == dynamic ? head_dim_qk : D;
    const std::int32_t v_dim = D == dynamic ? head_dim_vo : D;
    const float* a = weights.weight + static_cast<std::ptrdiff_t>(head) * (k_dim + v_dim);
    const float* none = nullptr;
    run_kernel<project_kernel>(set, keys, std::ptrdiff_t{k_dim}, count, a, std::ptrdiff_t{0}, 1, k_dim, none,
                               scores, std::ptrdiff_t{1});
    run_kernel<project_kernel>(set, values, std::ptrdiff_t{v_dim}, count, a + k_dim, std::ptrdiff_t{0}, 1,
                               v_dim, weights.bias == nullptr ? none : weights.bias + head, scratch,
                               std::ptrdiff_t{1});
    for (std::int32_t t = 0; t < count; ++t) {
        scores[t] += scratch[t];
    }
}

template <std::int32_t D>
void LinearScorer<D>::check(std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim) const {
    checks::check_scorer_shape("LinearScorer", D, *this, kv_heads, key_dim, value_dim);
    checks::check_parameters("LinearScorer", *this, weights);
}

}  // namespace kvpolicy
