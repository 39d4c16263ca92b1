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

/// SiLU(y) = y * sigmoid(y): KVpop's MLP, SP-KV, LTE.
struct Silu {
    template <class Real>
    static void apply(isa set, Real* y, std::int32_t count);
};

/// GELU(y) = y * (1 + erf(y / sqrt 2)) / 2, the exact form: WG-KV.
struct GeluErf {
    template <class Real>
    static void apply(isa set, Real* y, std::int32_t count);
};

static_assert(Activation<Silu> && Activation<GeluErf>);

}  // namespace kvpolicy

#include <kvpolicy/host/scorers/activation.hpp>
