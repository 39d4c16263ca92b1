// The pointwise part of attention's backward pass: from products to weights and gradients of logits.
#pragma once

#include <kvpolicy/attention/host/math.hpp>
#include <kvpolicy/attention/host/types.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/lanes.hpp>

#include <cstdint>
#include <cstring>
#include <limits>

namespace kvpolicy::host_backend {

inline constexpr std::int32_t backward_strip = 48;  ///< rows of a strip: whole panels, and at most block_keys

/// The pointwise part of a strip: products -> weights and gradients.
struct backward_weights {
    /// For rows r and 16-lane groups of keys up to `count`: products s[r][j] = <q, k>, g[r][j] = <d_out, v>
    /// become s[r][j] = d <q, k>; p_t[j][r] = P and x_t[j][r] = d <q, k>; bias[j] gains d logit where it
    /// applies.
    template <class Real>
    struct arguments {
        attention_shape shape;
        const std::int32_t* begins;
        const expiry_t* expires;
        const Real* log_bias;
        const std::int32_t* bias_start;
        const std::int32_t* position;
        const Real* lse;
        const Real* factor;  // of weights: 1, but of a row whose `lse` is its largest logit
        const Real* delta;
        std::int32_t rows, count;
        Real *s, *g, *p_t, *x_t, *bias;
    };

    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void run(const arguments<Real>* all) {
        const arguments<Real>& a = *all;
        const Real scale = static_cast<Real>(a.shape.scale);
        const Real cap = static_cast<Real>(a.shape.logits_soft_cap);
        for (std::int32_t r = 0; r < a.rows; ++r) {
            for (std::int32_t j = 0; j < a.count; j += panel_lanes) {
                group<Set>(a, scale, cap, r, j);
            }
        }
    }

  private:
    // Loops over local arrays of a constant length and without branches, which compilers turn into vectors.
    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void group(const arguments<Real>& a, Real scale, Real cap,
                                                    std::int32_t r, std::int32_t j) {
        constexpr std::int32_t n = panel_lanes;
        constexpr Real nothing = -std::numeric_limits<Real>::infinity();
        const std::int32_t at = a.position[r];
        const Real lse = a.lse[r], delta = a.delta[r], factor = a.factor[r];
        Real x[n], slope[n], p[n], g[n], d[n], log_bias[n], bias[n], applies[n];
        std::int32_t begins[n], expires[n], start[n];
        std::memcpy(x, a.s + r * block_keys + j, sizeof x);
        std::memcpy(g, a.g + r * block_keys + j, sizeof g);
        std::memcpy(log_bias, a.log_bias + j, sizeof log_bias);
        std::memcpy(bias, a.bias + j, sizeof bias);
        std::memcpy(begins, a.begins + j, sizeof begins);
        std::memcpy(expires, a.expires + j, sizeof expires);
        std::memcpy(start, a.bias_start + j, sizeof start);
        for (std::int32_t i = 0; i < n; ++i) {
            x[i] *= scale;
        }
        for (std::int32_t i = 0; i < n; ++i) {
            slope[i] = scale;
        }
        if (cap > Real(0)) {
            for (std::int32_t i = 0; i < n; ++i) {
                const Real y = tanh_of(x[i] / cap);
                x[i] = cap * y;
                slope[i] = scale * (Real(1) - y * y);
            }
        }
        if (factor != Real(1)) [[unlikely]] {
            // Such logits are those that the largest was found among, rounded: not to be fused with what
            // follows.
            __asm__ volatile("" : : "r"(x) : "memory");
        }
        // A factor for biases, which are finite; a choice for what a query does not see, which may hold
        // anything.
        for (std::int32_t i = 0; i < n; ++i) {
            applies[i] = at >= start[i] ? Real(1) : Real(0);
        }
        for (std::int32_t i = 0; i < n; ++i) {
            x[i] = (x[i] + applies[i] * log_bias[i]) - lse;
        }
        for (std::int32_t i = 0; i < n; ++i) {
            x[i] = begins[i] <= at ? x[i] : nothing;
        }
        for (std::int32_t i = 0; i < n; ++i) {
            x[i] = expires[i] > at ? x[i] : nothing;
        }
        for (std::int32_t i = 0; i < n; i += lanes<Real, Set>::width) {
            lanes<Real, Set> weights;
            weights.load(x + i);
            weights.exponentiate();
            weights.store(p + i);
        }
        for (std::int32_t i = 0; i < n; ++i) {
            p[i] *= factor;
        }
        for (std::int32_t i = 0; i < n; ++i) {
            d[i] = p[i] * (g[i] - delta);
        }
        for (std::int32_t i = 0; i < n; ++i) {
            d[i] = begins[i] <= at ? d[i] : Real(0);
        }
        for (std::int32_t i = 0; i < n; ++i) {
            d[i] = expires[i] > at ? d[i] : Real(0);
        }
        for (std::int32_t i = 0; i < n; ++i) {
            bias[i] += applies[i] * d[i];
        }
        for (std::int32_t i = 0; i < n; ++i) {
            d[i] *= slope[i];
        }
        std::memcpy(a.bias + j, bias, sizeof bias);
        std::memcpy(a.s + r * block_keys + j, d, sizeof d);
        for (std::int32_t i = 0; i < n; ++i) {
            a.p_t[(j + i) * block_keys + r] = p[i];
            a.x_t[(j + i) * block_keys + r] = d[i];
        }
    }
};

}  // namespace kvpolicy::host_backend
