// Feature maps of the mLSTM scorer: phi in q~ = phi(Wq x), k~ = phi(Wk x) (KVpop, E.3). Features are
// positive, so the read's normalizer q~ z is a weighted mean of positive numbers.
#pragma once

#include <kvpolicy/core/context.hpp>

#include <concepts>
#include <cstdint>

namespace kvpolicy {

/// A map from projection(d_qk) numbers to d_qk features: map(isa, y, d_qk, out), where out may not overlap y.
/// allows(d_qk) says which widths there are, and `allowed` says it in words.
template <class F>
concept FeatureMap = requires(isa set, const float* y, float* out, const double* y2, double* out2,
                              std::int32_t d_qk) {
    { F::projection(d_qk) } -> std::same_as<std::int32_t>;
    { F::allows(d_qk) } -> std::same_as<bool>;
    { F::allowed } -> std::convertible_to<const char*>;
    F::map(set, y, d_qk, out);
    F::map(set, y2, d_qk, out2);
};

/// A map that a gradient can go back through: pull_back(features, d_features, d_qk, d_y), from the features
/// themselves; overwrites d_y[projection(d_qk)].
template <class F>
concept DifferentiableFeatureMap = FeatureMap<F> &&
    requires(const float* x, float* d, const double* x2, double* d2, std::int32_t d_qk) {
    F::pull_back(x, x, d_qk, d);
    F::pull_back(x2, x2, d_qk, d2);
};

/// phi(y) = softmax(y).
struct Softmax {
    static constexpr const char* allowed = "1 or more";
    static constexpr std::int32_t projection(std::int32_t d_qk) { return d_qk; }
    static constexpr bool allows(std::int32_t d_qk) { return d_qk >= 1; }
    template <class Real>
    static void map(isa set, const Real* y, std::int32_t d_qk, Real* out);
    template <class Real>
    static void pull_back(const Real* features, const Real* d_features, std::int32_t d_qk, Real* d_y);
};

/// phi(y) = [softmax(y); softmax(-y)] (Zhang et al., 2024): the projection is half as wide as the features.
struct Hedgehog {
    static constexpr const char* allowed =
        "2 or more, and even: half of the features are softmax(y), half softmax(-y)";
    static constexpr std::int32_t projection(std::int32_t d_qk) { return d_qk / 2; }
    static constexpr bool allows(std::int32_t d_qk) { return d_qk >= 2 && d_qk % 2 == 0; }
    template <class Real>
    static void map(isa set, const Real* y, std::int32_t d_qk, Real* out);
    template <class Real>
    static void pull_back(const Real* features, const Real* d_features, std::int32_t d_qk, Real* d_y);
};

static_assert(DifferentiableFeatureMap<Softmax> && DifferentiableFeatureMap<Hedgehog>);

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_feature_map.hpp>
