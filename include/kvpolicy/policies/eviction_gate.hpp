// A gate of opposite sign: the score says that a key is to go (DMS).
#pragma once

#include <kvpolicy/policies/threshold_gate.hpp>

namespace kvpolicy {

/// Closed where alpha = sigmoid(score) > tau: such a key expires when it leaves the window, t + w; the
/// others never do. The threshold is a logit on raw scores; probability(0.5) converts once on the host. A
/// NaN score is closed.
struct EvictionGate : detail::gate_threshold {
    constexpr EvictionGate() = default;
    /// `logits` are thresholds on raw scores, by layer and head or one for all.
    constexpr explicit EvictionGate(PerHead<float> logits) : gate_threshold{logits} {}
    /// The gate for a threshold on sigmoid(score).
    static EvictionGate probability(double tau) { return EvictionGate(PerHead<float>(logit_of(tau))); }

    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const HeadParams& head_params) const {
        return score <= head_params.threshold;
    }
};

static_assert(Gate<EvictionGate>);

}  // namespace kvpolicy
