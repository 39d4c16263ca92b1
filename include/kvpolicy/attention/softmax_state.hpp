// Partial softmax results that merge: what split decoding, two key segments and blocks of one
// pass have in common.
//
// Attention over a set of keys is a pair (out, lse): the weighted mean of the values, and the natural
// logarithm of the sum of exp(logit). Two disjoint sets merge exactly. A set that nobody sees is (0, -inf),
// the neutral element; merging never makes a NaN of it, since -inf is never subtracted from -inf.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <cmath>
#include <cstdint>
#include <limits>

namespace kvpolicy {

/// The running form: the sum is relative to the maximum, sum = sum_t exp(logit_t - max). {} has seen nothing.
template <class Real>
struct softmax_state {
    /// The log-sum-exp of nothing. A constant, since kernels may not call std::numeric_limits.
    static constexpr Real nothing = -std::numeric_limits<Real>::infinity();

    Real max = nothing;
    Real sum = Real(0);
};

/// What a merge multiplies the two unnormalized (running form) or normalized (lse form) outputs by.
template <class Real>
struct merge_weights {
    Real a = Real(0);
    Real b = Real(0);
};

/// log2 of what the library reports in natural logarithms; kernels of other libraries expect either.
template <class Real>
KVPOLICY_HOST_DEVICE constexpr Real lse_to_log2(Real lse) {
    return lse * Real(1.44269504088896340736);
}
template <class Real>
KVPOLICY_HOST_DEVICE constexpr Real lse_from_log2(Real lse2) {
    return lse2 * Real(0.69314718055994530942);
}

/// The log-sum-exp of a state; -inf where nothing was seen.
template <class Real>
KVPOLICY_HOST_DEVICE inline Real lse_of(const softmax_state<Real>& state) {
    return state.sum == Real(0) ? softmax_state<Real>::nothing : state.max + std::log(state.sum);
}

/// Merges two states of disjoint keys. The merged unnormalized output is weights.a * out_a + weights.b *
/// out_b, where a weight of 0 stands for "leave it out" (its output may be anything).
template <class Real>
KVPOLICY_HOST_DEVICE inline softmax_state<Real> merge(const softmax_state<Real>& a,
                                                      const softmax_state<Real>& b,
                                                      merge_weights<Real>& weights) {
    const bool a_empty = a.sum == Real(0);
    const bool b_empty = b.sum == Real(0);
    weights = {a_empty ? Real(0) : Real(1), b_empty ? Real(0) : Real(1)};
    if (b_empty) {
        return a;
    }
    if (a_empty) {
        return b;
    }
    // The larger keeps weight 1 exactly, so equal maxima (+inf and NaN apart) never meet an inf - inf.
    if (a.max >= b.max) {
        weights.b = a.max == b.max ? Real(1) : std::exp(b.max - a.max);
        return {a.max, a.sum + weights.b * b.sum};
    }
    weights.a = std::exp(a.max - b.max);
    return {b.max, weights.a * a.sum + b.sum};
}

/// Merges two log-sum-exps. The merged normalized output is weights.a * out_a + weights.b * out_b; the
/// weights add up to 1, or are both 0 where neither has seen a key.
template <class Real>
KVPOLICY_HOST_DEVICE inline Real merge_lse(Real lse_a, Real lse_b, merge_weights<Real>& weights) {
    constexpr Real nothing = softmax_state<Real>::nothing;
    weights = {lse_a == nothing ? Real(0) : Real(1), lse_b == nothing ? Real(0) : Real(1)};
    if (lse_b == nothing) {
        return lse_a;
    }
    if (lse_a == nothing) {
        return lse_b;
    }
    const bool a_larger = lse_a >= lse_b;
    const Real larger = a_larger ? lse_a : lse_b;
    const Real ratio = lse_a == lse_b ? Real(1) : std::exp((a_larger ? lse_b : lse_a) - larger);
    const Real one = Real(1) / (Real(1) + ratio);
    weights = a_larger ? merge_weights<Real>{one, ratio * one} : merge_weights<Real>{ratio * one, one};
    return larger + std::log1p(ratio);
}

/// Merges (out_b, lse_b) into (out_a, lse_a), rows of `dim` numbers. A side whose lse is -inf is not read.
template <class Real>
KVPOLICY_HOST_DEVICE inline void merge_output(Real* out_a, Real& lse_a, const Real* out_b, Real lse_b,
                                              std::int32_t dim) {
    merge_weights<Real> weights;
    lse_a = merge_lse(lse_a, lse_b, weights);
    if (weights.b == Real(0)) {
        return;
    }
    for (std::int32_t c = 0; c < dim; ++c) {
        out_a[c] = weights.a == Real(0) ? out_b[c] : weights.a * out_a[c] + weights.b * out_b[c];
    }
}

}  // namespace kvpolicy
