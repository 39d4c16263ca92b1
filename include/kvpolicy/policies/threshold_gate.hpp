// Admission by a threshold: a key is kept for good when it leaves the window with its gate open
// (SP-KV, WG-KV, LTE).
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/concept.hpp>

#include <cmath>

namespace kvpolicy {

/// ThresholdGate<at_least>: open where u >= tau (SP-KV, WG-KV).
struct at_least {};
/// ThresholdGate<above>: open where u > tau (LTE).
struct above {};

/// The logit of a probability threshold, in double, rounded once to fp32: tau = 0.5 is 0, 0 is
/// -inf, 1 is +inf.
inline float logit_of(double probability) {
    detail::require(probability >= 0.0 && probability <= 1.0, "tau", probability, "a probability in [0, 1]");
    return static_cast<float>(std::log(probability) - std::log1p(-probability));
}

namespace detail {

/// The threshold of a gate: a logit on raw scores, by layer and head.
struct gate_threshold {
    static constexpr part_kind kind = part_kind::gate;
    PerHead<float> threshold;

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.threshold = threshold.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        threshold.check("array of thresholds", layers, heads);
    }
};

}  // namespace detail

/// expiry = never where the gate is open, t + w where it is closed. Scores are raw logits, and so is the
/// threshold: ThresholdGate<at_least>::probability(0.5) converts once on the host. A NaN score is closed.
template <class Comparison = at_least>
struct ThresholdGate : detail::gate_threshold {
    static_assert(std::is_same_v<Comparison, at_least> || std::is_same_v<Comparison, above>,
                  "kvpolicy: ThresholdGate<c> needs c = at_least or above");

    constexpr ThresholdGate() = default;
    /// `logits` are thresholds on raw scores, by layer and head or one for all.
    constexpr explicit ThresholdGate(PerHead<float> logits) : gate_threshold{logits} {}
    /// The gate for a threshold on sigmoid(score).
    static ThresholdGate probability(double tau) { return ThresholdGate(PerHead<float>(logit_of(tau))); }

    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const HeadParams& head_params) const {
        if constexpr (std::is_same_v<Comparison, at_least>) {
            return score >= head_params.threshold;
        } else {
            return score > head_params.threshold;
        }
    }
};

static_assert(Gate<ThresholdGate<at_least>> && Gate<ThresholdGate<above>>);

}  // namespace kvpolicy
