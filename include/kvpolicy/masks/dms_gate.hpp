// DMS's gate in training: a relaxed decision to evict, with noise (Lancucki et al., 2025).
#pragma once

#include <kvpolicy/core/random.hpp>
#include <kvpolicy/core/sigmoid.hpp>
#include <kvpolicy/masks/log_bias.hpp>

#include <cstdint>

namespace kvpolicy {

/// alpha = sigmoid((z + n) / temperature) is the decision to evict, in [0, 1]; log_bias = log(1 - alpha) =
/// logsigmoid(-(z + n) / temperature), added once the key is out of the window. With noise (Gumbel-sigmoid)
/// n = log u - log(1 - u), u uniform, drawn by the key's place (seed, gate_place), so that the backward pass
/// draws the same; without it n = 0. Scores start far below 0 (a bias of -5, say), where nothing is evicted.
/// Every key stays open: it is the bias that takes it away.
struct DmsGate {
    float temperature = 1.0f;  ///< above 0; the lower, the closer to a decision
    bool noise = true;
    std::uint64_t seed = 0;

    template <class Real>
    KVPOLICY_HOST_DEVICE gate_value<Real> operator()(Real z, gate_place place = {}) const {
        const double x = relaxed(static_cast<double>(z), place);
        return host_backend::rounded<Real>(
            {host_backend::log_sigmoid_of(-x), -detail::sigmoid(x) / static_cast<double>(temperature), true});
    }
    /// (z + n) / temperature, the logit of the relaxed decision: alpha = sigmoid of it.
    [[nodiscard]] KVPOLICY_HOST_DEVICE double relaxed(double z, gate_place place = {}) const {
        double n = 0.0;
        if (noise) {
            const double u = random_unit(seed, place.stream, place.position);
            n = std::log(u) - std::log1p(-u);
        }
        return (z + n) / static_cast<double>(temperature);
    }
    void check() const {
        detail::require(temperature > 0.0f && std::isfinite(temperature), "DmsGate.temperature", temperature,
                        "finite and above 0");
    }
};

static_assert(TrainingGate<DmsGate>);

}  // namespace kvpolicy
