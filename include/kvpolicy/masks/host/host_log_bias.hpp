// Bodies of masks/log_bias.hpp on the host.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/random.hpp>
#include <kvpolicy/core/sigmoid.hpp>
#include <kvpolicy/masks/host/host_build.hpp>
#include <kvpolicy/masks/log_bias.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>

#include <algorithm>
#include <cmath>

namespace kvpolicy {

namespace host_backend {

/// log sigmoid, the same.
template <class Real>
KVPOLICY_HOST_DEVICE Real log_sigmoid_of(Real z) {
    return (z < Real(0) ? z : Real(0)) - std::log1p(std::exp(-std::abs(z)));
}

/// A gate's answer in double, rounded: log(u + epsilon) near 0 would lose most of its bits in fp32, and every
/// backend would lose others.
template <class Real>
KVPOLICY_HOST_DEVICE gate_value<Real> rounded(const gate_value<double>& value) {
    return {static_cast<Real>(value.log_bias), static_cast<Real>(value.derivative), value.open};
}

inline void check_probability(const char* name, float value, float most) {
    detail::require(value >= 0.0f && value <= most, name, value,
                    [&] { return detail::text("a probability in [0, ", most, "]"); });
}

/// Shapes of a gated call, and the scores that it reads.
template <class P, class G, class Real>
void check_gate_call(const P& policy, const G& gate, const plane_view<const Real>& scores,
                     const Sequences& sequences, const MaskOptions& options) {
    static_assert(!P::has_budget, "kvpolicy: a soft gate takes a policy without a TopKBudget");
    gate.check();
    policy.check_layer(options.layer, scores.heads);
    checks::check_whole_sequences(sequences, scores.batch, scores.length);
    checks::check_plane("scores", scores, scores.batch, scores.heads, sequences.length);
    check_scores(policy, scores, sequences, options);
}

/// Per head, in parallel: clear(b, h), then visit(b, h, t, q, value) for every key t that the gate decides,
/// where q is the query at which the key leaves the window. A NaN score closes its gate.
template <class P, class G, class Real, class Clear, class Visit>
void for_each_gated(const host& ctx, const P& policy, const G& gate, const plane_view<const Real>& scores,
                    const Sequences& sequences, std::int32_t layer, const Clear& clear, const Visit& visit) {
    const std::int32_t heads = scores.heads;
    ctx.parallel_for(std::int64_t{scores.batch} * heads, [&](std::int64_t task) {
        const auto b = static_cast<std::int32_t>(task / heads), h = static_cast<std::int32_t>(task % heads);
        const auto stream = static_cast<std::uint64_t>(task);
        clear(b, h);
        for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
            for_each_leaver(
                policy, policy.params(layer, h), end - begin, [&](std::int32_t at, std::int32_t q) {
                    const std::int32_t t = begin + at;
                    const Real z = scores.head(b, h)[t];
                    visit(b, h, t, begin + q,
                          std::isnan(z) ? gate_value<Real>{Real(0), Real(0), false}
                                        : gate(z, gate_place{stream, static_cast<std::uint64_t>(t)}));
                });
        });
    });
}

}  // namespace host_backend

template <class Real>
KVPOLICY_HOST_DEVICE gate_value<Real> SoftGate::operator()(Real z, gate_place) const {
    const double x = z;
    return host_backend::rounded<Real>({host_backend::log_sigmoid_of(x), detail::sigmoid(-x), true});
}

template <class Real>
KVPOLICY_HOST_DEVICE gate_value<Real> SoftWriteGate::operator()(Real z, gate_place) const {
    // Without epsilon, u / total is 1 even where both underflow.
    if (epsilon == 0.0f) {
        return SoftGate{}(z);
    }
    const double x = z;
    const double u = detail::sigmoid(x);
    const double total = u + static_cast<double>(epsilon);
    return host_backend::rounded<Real>({std::log(total), u * detail::sigmoid(-x) / total, true});
}
inline void SoftWriteGate::check() const {
    detail::require(epsilon >= 0.0f && epsilon <= 1.0f, "SoftWriteGate.epsilon", epsilon, "0 to 1");
}

template <class Real>
KVPOLICY_HOST_DEVICE gate_value<Real> AnnealedGate::at(Real z, float threshold) const {
    const double x = z;
    const double a = alpha;
    const double rest = 1.0 - a;
    if (x >= static_cast<double>(threshold)) {
        if (alpha == 0.0f) {
            return SoftGate{}(z);
        }
        const double u = detail::sigmoid(x);
        const double mixed = rest * u + a;
        return host_backend::rounded<Real>({std::log(mixed), rest * u * detail::sigmoid(-x) / mixed, true});
    }
    if (alpha == 1.0f) {
        return {Real(0), Real(0), false};
    }
    return host_backend::rounded<Real>(
        {std::log1p(-a) + host_backend::log_sigmoid_of(x), detail::sigmoid(-x), true});
}
template <class Real>
gate_value<Real> AnnealedGate::operator()(Real z, gate_place) const {
    return at(z, threshold());
}
inline float AnnealedGate::threshold() const { return logit_of(static_cast<double>(tau)); }
inline void AnnealedGate::check() const {
    host_backend::check_probability("AnnealedGate.alpha", alpha, 1.0f);
    host_backend::check_probability("AnnealedGate.tau", tau, 1.0f);
}

template <class Real>
KVPOLICY_HOST_DEVICE gate_value<Real> ThresholdSoftGate::at(Real z, float threshold) const {
    if (static_cast<double>(z) >= static_cast<double>(threshold)) {
        return SoftGate{}(z);
    }
    return {Real(0), Real(0), false};
}
template <class Real>
gate_value<Real> ThresholdSoftGate::operator()(Real z, gate_place) const {
    return at(z, threshold());
}
inline float ThresholdSoftGate::threshold() const { return logit_of(static_cast<double>(tau)); }
inline void ThresholdSoftGate::check() const {
    host_backend::check_probability("ThresholdSoftGate.tau", tau, 1.0f);
}

template <class Real>
KVPOLICY_HOST_DEVICE gate_value<Real> BernoulliGate::operator()(Real z, gate_place place) const {
    const double x = z;
    const double u = detail::sigmoid(x);
    const double p = clip;
    const double chance = u < p ? p : 1.0 - p < u ? 1.0 - p : u;
    const bool open = random_unit(seed, place.stream, place.position) < chance;
    return host_backend::rounded<Real>({0.0, detail::sigmoid(-x), open});
}
inline void BernoulliGate::check() const {
    host_backend::check_probability("BernoulliGate.clip", clip, 0.5f);
}

template <AnyPolicy P>
std::size_t log_bias_workspace_bytes(const host&, const P&, const Sequences& sequences, std::int32_t heads,
                                     const MaskOptions&) {
    checks::check_shape(sequences, heads);
    return 0;
}

template <AnyPolicy P, TrainingGate G, class Real>
void build_log_bias(const host& ctx, const P& policy, const G& gate, plane_view<Real> given_scores,
                    const Sequences& sequences, plane_view<expiry_t> expiry, plane_view<float> log_bias,
                    workspace_view workspace, const MaskOptions& options) {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return build_log_bias(ctx, policy, gate, given_scores, repaired.sequences, expiry, log_bias,
                              workspace, options);
    }
    using Number = std::remove_const_t<Real>;
    const plane_view<const Number> scores = given_scores;
    hb::check_gate_call(policy, gate, scores, sequences, options);
    checks::check_plane("expiry", expiry, scores.batch, scores.heads, sequences.length);
    checks::check_plane("log_bias", log_bias, scores.batch, scores.heads, sequences.length);
    hb::for_each_gated(
        ctx, policy, gate, scores, sequences, options.layer,
        [&](std::int32_t b, std::int32_t h) {
            hb::for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
                std::fill(expiry.head(b, h) + begin, expiry.head(b, h) + end,
                          sequences.cu_seqlens == nullptr ? never : end);
                std::fill(log_bias.head(b, h) + begin, log_bias.head(b, h) + end, 0.0f);
            });
        },
        [&](std::int32_t b, std::int32_t h, std::int32_t t, std::int32_t leaves,
            const gate_value<Number>& value) {
            if (!value.open) {
                expiry.head(b, h)[t] = leaves;
            }
            log_bias.head(b, h)[t] = static_cast<float>(value.log_bias);
        });
}

template <AnyPolicy P, TrainingGate G, class Real>
void log_bias_backward(const host& ctx, const P& policy, const G& gate, input_plane<Real> scores,
                       input_plane<Real> d_log_bias, const Sequences& sequences, plane_view<Real> d_scores,
                       workspace_view workspace, const MaskOptions& options) {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return log_bias_backward(ctx, policy, gate, scores, d_log_bias, repaired.sequences, d_scores,
                                 workspace, options);
    }
    hb::check_gate_call(policy, gate, scores, sequences, options);
    checks::check_plane("d_log_bias", d_log_bias, scores.batch, scores.heads, sequences.length);
    checks::check_plane("d_scores", d_scores, scores.batch, scores.heads, sequences.length);
    hb::for_each_gated(
        ctx, policy, gate, scores, sequences, options.layer,
        [&](std::int32_t b, std::int32_t h) {
            std::fill_n(d_scores.head(b, h), sequences.length_of(b), Real(0));
        },
        [&](std::int32_t b, std::int32_t h, std::int32_t t, std::int32_t, const gate_value<Real>& value) {
            if (!std::isnan(scores.head(b, h)[t])) {
                d_scores.head(b, h)[t] = value.derivative * d_log_bias.head(b, h)[t];
            }
        });
}

}  // namespace kvpolicy
