// Activations of the scorers' hidden layers.
#pragma once

#include <kvpolicy/core/context.hpp>

#include <concepts>
#include <cstdint>

namespace kvpolicy {

/// Applied in place to `count` numbers, each on its own: apply(isa, Real*, count), Real = float or double.
template <class A>
concept Activation = requires(isa set, float* single, double* both, std::int32_t count) {
    A::apply(set, single, count);
    A::apply(set, both, count);
};

/// An activation with a derivative: pull_back(y, d, count) turns d, the gradient of act(y), into
/// that of y, in place.
template <class A>
concept DifferentiableActivation = Activation<A> &&
    requires(const float* y, float* d, const double* y2, double* d2, std::int32_t count) {
    A::pull_back(y, d, count);
    A::pull_back(y2, d2, count);
};

/// SiLU(y) = y * sigmoid(y): KVpop's MLP, SP-KV, LTE.
struct Silu {
    template <class Real>
    static void apply(isa set, Real* y, std::int32_t count);
    template <class Real>
    static void pull_back(const Real* y, Real* d, std::int32_t count);
};

/// GELU(y) = y * (1 + erf(y / sqrt 2)) / 2, the exact form: WG-KV.
struct GeluErf {
    template <class Real>
    static void apply(isa set, Real* y, std::int32_t count);
    template <class Real>
    static void pull_back(const Real* y, Real* d, std::int32_t count);
};

static_assert(DifferentiableActivation<Silu> && DifferentiableActivation<GeluErf>);

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_activation.hpp>
