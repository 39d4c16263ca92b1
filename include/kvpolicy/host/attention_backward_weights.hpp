// The pointwise part of attention's backward pass: from products to weights and gradients of logits.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/host/attention_math.hpp>
#include <kvpolicy/host/attention_types.hpp>

#include <cstdint>

namespace kvpolicy::host_backend {

inline constexpr std::int32_t backward_strip = 48;  ///< rows of a strip: whole panels, and at most block_keys

/// The pointwise part of a strip: products -> weights and gradients.
struct backward_weights {
    /// For rows r and 16-lane groups of keys up to `count`: products s[r][j] = <q, k>, g[r][j] = <d_out, v> become
    /// s[r][j] = d <q, k>; p_t[j][r] = P and x_t[j][r] = d <q, k>; bias[j] gains d logit where it applies.
    template <class Real>
    struct arguments {
        attention_shape shape;
        const std::int32_t* born;
        const expiry_t* expires;
        const Real* log_bias;
        const std::int32_t* bias_start;
        const std::int32_t* position;
        const Real* lse;
        const Real* delta;
        std::int32_t rows, count;
        Real *s, *g, *p_t, *x_t, *bias;
    };

    template <isa, class Real>
    [[gnu::always_inline]] static inline void run(const arguments<Real>* all) {
        const arguments<Real>& a = *all;
        const Real scale = static_cast<Real>(a.shape.scale);
        const Real cap = static_cast<Real>(a.shape.softcap);
        const Real inverse = cap > Real(0) ? Real(1) / cap : Real(0);
        for (std::int32_t r = 0; r < a.rows; ++r) {
            const std::int32_t at = a.position[r];
            const Real lse = a.lse[r], delta = a.delta[r];
            for (std::int32_t j = 0; j < a.count; j += panel_lanes) {
                Real* s = a.s + r * block_keys + j;
                const Real* g = a.g + r * block_keys + j;
                Real x[panel_lanes], slope[panel_lanes], p[panel_lanes], d[panel_lanes];
                for (std::int32_t i = 0; i < panel_lanes; ++i) {
                    x[i] = scale * s[i];
                    slope[i] = scale;
                }
                if (cap > Real(0)) {
                    for (std::int32_t i = 0; i < panel_lanes; ++i) {
                        const Real y = tanh_of(x[i] * inverse);
                        x[i] = cap * y;
                        slope[i] = scale * (Real(1) - y * y);
                    }
                }
                for (std::int32_t i = 0; i < panel_lanes; ++i) {
                    const Real biased = x[i] + (at >= a.bias_start[j + i] ? a.log_bias[j + i] : Real(0));
                    const Real weight = exp_nonpositive(biased - lse);
                    // A choice, not a product: what a query does not see may hold anything.
                    const bool sees = a.born[j + i] <= at && at < a.expires[j + i];
                    p[i] = sees ? weight : Real(0);
                    d[i] = sees ? weight * (g[i] - delta) : Real(0);
                }
                for (std::int32_t i = 0; i < panel_lanes; ++i) {
                    a.bias[j + i] += at >= a.bias_start[j + i] ? d[i] : Real(0);
                    s[i] = d[i] * slope[i];
                }
                for (std::int32_t i = 0; i < panel_lanes; ++i) {
                    a.p_t[(j + i) * block_keys + r] = p[i];
                    a.x_t[(j + i) * block_keys + r] = s[i];
                }
            }
        }
    }
};

}  // namespace kvpolicy::host_backend
