// Checks of the losses' own numbers.
#pragma once

#include <kvpolicy/core/error.hpp>

#include <cmath>
#include <cstdint>

namespace kvpolicy::checks {

/// The numbers of a BoundaryLoss.
template <class Loss>
void check_boundary(const Loss& loss) {
    using detail::require;
    require(loss.temperature > 0.0f && std::isfinite(loss.temperature), "temperature", loss.temperature,
            "above 0 and finite");
    require(loss.margin.omega_min >= 0.0f && loss.margin.omega_min <= 1.0f, "margin.omega_min",
            loss.margin.omega_min, "0 to 1");
    require(loss.margin.temperature > 0.0f && std::isfinite(loss.margin.temperature), "margin.temperature",
            loss.margin.temperature, "above 0 and finite");
    require(loss.balance.least > 0.0f && std::isfinite(loss.balance.least), "balance.least",
            loss.balance.least, "above 0 and finite");
    require(loss.balance.most >= loss.balance.least, "balance.most", loss.balance.most,
            "balance.least or more");
    require(loss.sampler.count >= 0, "sampler.count", loss.sampler.count, "0 or more");
    require(loss.sampler.late >= 0.0f && loss.sampler.late <= 1.0f, "sampler.late", loss.sampler.late,
            "0 to 1");
    require(std::isfinite(loss.scale), "scale", loss.scale, "finite");
}

/// How many layers' heads a call of BoundaryLoss has.
inline void check_boundary_layers(std::int32_t layers, std::int32_t heads) {
    detail::require(layers >= 1 && heads % layers == 0, "options.layers", layers,
                    [&] { return detail::text("1 or more, and a divisor of the ", heads, " heads"); });
}

/// Where a loss writes its value.
template <class Value>
void check_value(const Value* value) {
    detail::require(value != nullptr, "value", "null", "memory for the loss's value (device memory on CUDA)");
}

inline void check_temperature(float temperature, float scale) {
    detail::require(temperature > 0.0f && std::isfinite(temperature), "temperature", temperature,
                    "above 0 and finite");
    detail::require(std::isfinite(scale), "scale", scale, "finite");
}

/// Over what TopDistillation's student has its softmax: a student_softmax, as a number.
inline void check_student_softmax(std::int32_t over, bool reverse) {
    detail::require(over == 0 || over == 1, "over", over, "student_softmax::top (0) or ::all (1)");
    detail::require(!reverse || over == 0, "reverse", "true",
                    "false where the student's softmax is over all logits, for which the teacher has none");
}

inline void check_gate_scale(float scale) { detail::require(std::isfinite(scale), "scale", scale, "finite"); }

/// The numbers of a BasicGateLoss.
template <class Loss>
void check_gate_loss(const Loss& loss, std::int32_t heads) {
    check_gate_scale(loss.scale);
    if constexpr (requires { loss.term.lambda; }) {
        detail::require(loss.term.lambda != nullptr || heads == 0, "lambda", "null",
                        "an array by head (device memory on CUDA)");
    }
}

}  // namespace kvpolicy::checks
