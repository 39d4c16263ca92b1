// How scores age: the per-head decay of KVpop, eq. 5, 18 and 21.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/concept.hpp>

#include <cmath>

namespace kvpolicy {

/// The effective score of key t at query q is r_t + floor((q - t) / n) * log(gamma_h), 0 < gamma_h
/// <= 1. A policy without Decay has gamma = 1. Decay<1> is ranked by a static priority; any other step
/// ranks at each query.
template <std::int32_t Step = 1>
struct Decay {
    static_assert(Step >= 1, "kvpolicy: Decay<n> needs a step n >= 1");
    static constexpr part_kind kind = part_kind::decay;
    static constexpr bool static_order = Step == 1;
    PerHead<float> log_gamma;

    constexpr Decay() = default;
    /// `log_gamma_values` are natural logs, <= 0, by layer and head or one for all.
    constexpr explicit Decay(PerHead<float> log_gamma_values) : log_gamma(log_gamma_values) {}

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.decay_step = Step;
        head_params.log_gamma = log_gamma.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        log_gamma.check("array of log gammas", layers, heads);
    }
};

/// A decay whose step n is a run-time value too.
template <>
struct Decay<dynamic> {
    static constexpr part_kind kind = part_kind::decay;
    PerHead<float> log_gamma;
    PerHead<std::int32_t> step{dynamic};

    constexpr Decay() = default;
    constexpr Decay(PerHead<float> log_gamma_values, PerHead<std::int32_t> steps)
        : log_gamma(log_gamma_values), step(steps) {}

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.decay_step = step.at(layer, head);
        head_params.log_gamma = log_gamma.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        step.check_set("decay step n",
                       "a number or an array by layer and head: Decay<dynamic>{log_gamma, n}");
        log_gamma.check("array of log gammas", layers, heads);
        step.check("array of decay steps", layers, heads);
    }
};

static_assert(RulePart<Decay<1>> && RulePart<Decay<64>> && RulePart<Decay<dynamic>>);

/// log(gamma) from the unconstrained parameter alpha (eq. 21):
/// log(gamma_min) + sigmoid(alpha) * (log(gamma_max) - log(gamma_min)), in double, rounded once to fp32.
/// Needs 0 < gamma_min <= gamma_max <= 1.
inline float log_gamma_of(double alpha, double gamma_min, double gamma_max) {
    detail::require(alpha == alpha, "alpha", alpha, "a number");
    detail::require(gamma_min > 0.0 && gamma_min <= 1.0, "gamma_min", gamma_min, "above 0 and at most 1");
    detail::require(gamma_max >= gamma_min && gamma_max <= 1.0, "gamma_max", gamma_max, "gamma_min to 1");
    const double low = std::log(gamma_min);
    const double high = std::log(gamma_max);
    return static_cast<float>(low + (high - low) / (1.0 + std::exp(-alpha)));
}

/// d log(gamma) / d alpha of log_gamma_of, sigmoid'(alpha) (log(gamma_max) - log(gamma_min)): what turns the
/// d_log_gamma of a loss into the gradient of alpha.
inline double log_gamma_slope(double alpha, double gamma_min, double gamma_max) {
    static_cast<void>(log_gamma_of(alpha, gamma_min, gamma_max));  // refuses what it refuses
    const double e = std::exp(-std::abs(alpha));
    return e / ((1.0 + e) * (1.0 + e)) * (std::log(gamma_max) - std::log(gamma_min));
}

}  // namespace kvpolicy
