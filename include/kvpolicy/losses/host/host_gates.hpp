// Bodies of losses/gates.hpp on the host.
#pragma once

#include <kvpolicy/core/sigmoid.hpp>
#include <kvpolicy/losses/check.hpp>
#include <kvpolicy/losses/gates.hpp>
#include <kvpolicy/masks/host/host_build.hpp>
#include <kvpolicy/masks/host/host_log_bias.hpp>

#include <algorithm>
#include <cmath>

namespace kvpolicy {

namespace host_backend {

/// Calls visit(t) for the keys of one (sequence, head) that a gate loss is about.
template <class P, class Visit>
void for_each_in_scope(const P& policy, gate_scope scope, const HeadParams& head_params,
                       const Sequences& sequences, std::int32_t b, Visit&& visit) {
    for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
        if (scope == gate_scope::all) {
            for (std::int32_t t = begin; t < end; ++t) {
                visit(t);
            }
        } else {
            for_each_leaver(policy, head_params, end - begin,
                            [&](std::int32_t t, std::int32_t) { visit(begin + t); });
        }
    });
}

/// Calls visit(t, by_position) for the keys of one (sequence, head) that a count of retained keys is over.
/// by_position: a sink, or kept by a keep part.
template <class P, class Visit>
void for_each_retainable(const P& policy, gate_scope scope, const HeadParams& head_params,
                         const Sequences& sequences, std::int32_t b, Visit&& visit) {
    for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
        const std::int64_t inside = scope == gate_scope::all ? 0 : head_params.window;
        for (std::int32_t t = 0; t + inside < end - begin; ++t) {
            bool by_position = t < head_params.sinks;
            if constexpr (P::has_keep) {
                by_position = by_position || policy.keeps(t);
            }
            visit(begin + t, by_position);
        }
    });
}

/// Names the first number of a row that is not finite.
template <class T>
void refuse_not_finite(const char* name, std::int64_t b, std::int64_t h, std::int64_t t,
                       const rows_view<const T>& rows) {
    for (std::int32_t i = 0; i < rows.dim; ++i) {
        const auto x = static_cast<compute_t<T>>(rows.row(b, h, t)[i]);
        if (std::isfinite(x)) {
            continue;
        }
        detail::refuse(detail::text(name, "[", b, "][", h, "][", t, "]").c_str(), x, "finite numbers");
    }
}

/// Gates need no workspace here; the shapes are checked all the same.
template <class P>
std::size_t gate_workspace_bytes(const P& policy, const Sequences& sequences, std::int32_t heads,
                                 std::int32_t layer) {
    checks::check_shape(sequences, heads);
    policy.check_layer(layer, heads);
    return 0;
}

}  // namespace host_backend

KVPOLICY_HOST_DEVICE inline GateTerm SparsityTerm::operator()(double scale, std::int32_t, double z) const {
    const double g = detail::sigmoid(z), closed = detail::sigmoid(-z);
    return {scale * (g + g * closed), scale * 2.0 * closed * closed * g};
}
KVPOLICY_HOST_DEVICE inline GateTerm DensityTerm::operator()(double scale, std::int32_t, double z) const {
    const double u = detail::sigmoid(z), factor = -scale;
    return {factor * u, factor * u * detail::sigmoid(-z)};
}
KVPOLICY_HOST_DEVICE inline GateTerm RetentionTerm::operator()(double scale, std::int32_t head,
                                                               double z) const {
    if (!(z > 0.0)) {
        return {0.0, 0.0};
    }
    const double r = detail::sigmoid(z);
    const double factor = scale * static_cast<double>(lambda[head]);
    return {factor * (r - 0.5), factor * r * detail::sigmoid(-z)};
}

template <class Term>
template <AnyPolicy P>
std::size_t BasicGateLoss<Term>::workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                                 std::int32_t heads) const {
    return host_backend::gate_workspace_bytes(policy, sequences, heads, layer);
}

template <class Term>
template <AnyPolicy P, class Real>
void BasicGateLoss<Term>::operator()(const host& ctx, const P& policy, input_plane<Real> scores,
                                     const Sequences& sequences, plane_view<Real> d_scores, LossValue* value,
                                     workspace_view workspace, const LossOptions& options) const {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, policy, scores, repaired.sequences, d_scores, value, workspace, options);
    }
    const std::int32_t heads = d_scores.heads, batch = d_scores.batch;
    checks::check_value(value);
    checks::check_gate_loss(*this, heads);
    policy.check_layer(layer, heads);
    checks::check_whole_sequences(sequences, batch, d_scores.length);
    checks::check_plane("d_scores", d_scores, batch, heads, sequences.length);
    checks::check_plane("scores", scores, batch, heads, sequences.length);
    // First the keys that count, and the scores that nothing can be made of; then values and gradients.
    LossValue result;
    const auto for_each_key = [&](std::int32_t b, std::int32_t h, const auto& visit) {
        hb::for_each_in_scope(policy, scope, policy.params(layer, h), sequences, b, visit);
    };
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            for_each_key(b, h, [&](std::int32_t t) {
                static_cast<void>(checks::is_number("scores", b, h, t, scores.head(b, h)[t], options.status));
                ++result.count;
            });
        }
    }
    const double mean =
        result.count == 0 ? 0.0 : 1.0 / static_cast<double>(Term::mean_over_keys ? result.count : batch);
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            const Real* z = scores.head(b, h);
            Real* d = d_scores.head(b, h);
            std::fill_n(d, sequences.length_of(b), Real(0));
            double sum = 0.0;
            for_each_key(b, h, [&](std::int32_t t) {
                if (!std::isnan(z[t])) {
                    const GateTerm one = term(static_cast<double>(scale), h, static_cast<double>(z[t]));
                    sum += one.value;
                    d[t] = static_cast<Real>(mean * one.slope);
                }
            });
            result.value += mean * sum;
        }
    }
    *value = result;
}

template <AnyPolicy P>
std::size_t straight_through_values_workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                                    std::int32_t heads) {
    return host_backend::gate_workspace_bytes(policy, sequences, heads, 0);
}

template <AnyPolicy P>
std::size_t retention_counts_workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                             std::int32_t heads) {
    return host_backend::gate_workspace_bytes(policy, sequences, heads, 0);
}

template <AnyPolicy P, class V>
void straight_through_values(const host& ctx, const P& policy, input_plane<real_of<V>> scores,
                             rows_view<V> given_v, input_rows<V> d_v, const Sequences& sequences,
                             plane_view<real_of<V>> d_scores, workspace_view workspace,
                             const GateOptions& options) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return straight_through_values(ctx, policy, scores, given_v, d_v, repaired.sequences, d_scores,
                                       workspace, options);
    }
    namespace hb = host_backend;
    using T = std::remove_const_t<V>;
    using Real = compute_t<T>;
    const rows_view<const T> v = given_v;
    const std::int32_t layer = options.layer;
    const std::int32_t heads = d_scores.heads, batch = d_scores.batch;
    policy.check_layer(layer, heads);
    checks::check_whole_sequences(sequences, batch, d_scores.length);
    checks::check_plane("d_scores", d_scores, batch, heads, sequences.length);
    checks::check_plane("scores", scores, batch, heads, sequences.length);
    checks::check_rows("v", v, batch, heads, sequences.length, v.dim);
    checks::check_rows("d_v", d_v, batch, heads, sequences.length, v.dim);
    const auto dot = [&](std::int64_t b, std::int64_t h, std::int64_t t) {
        double sum = 0.0;
        for (std::int32_t i = 0; i < v.dim; ++i) {
            sum += static_cast<double>(static_cast<Real>(v.row(b, h, t)[i])) *
                   static_cast<double>(static_cast<Real>(d_v.row(b, h, t)[i]));
        }
        return sum;
    };
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            hb::for_each_in_scope(
                policy, options.scope, policy.params(layer, h), sequences, b, [&](std::int32_t t) {
                    static_cast<void>(
                        checks::is_number("scores", b, h, t, scores.head(b, h)[t], options.status));
                    if (std::isfinite(dot(b, h, t)) ||
                        checks::reported(options.status, b, status_not_finite)) {
                        return;
                    }
                    hb::refuse_not_finite("v", b, h, t, v);
                    hb::refuse_not_finite("d_v", b, h, t, d_v);
                });
        }
    }
    ctx.parallel_for(std::int64_t{batch} * heads, [&](std::int64_t task) {
        const auto b = static_cast<std::int32_t>(task / heads);
        const auto h = static_cast<std::int32_t>(task % heads);
        Real* d = d_scores.head(b, h);
        std::fill_n(d, sequences.length_of(b), Real(0));
        hb::for_each_in_scope(
            policy, options.scope, policy.params(layer, h), sequences, b, [&](std::int32_t t) {
                const double z = static_cast<double>(scores.head(b, h)[t]);
                d[t] = std::isnan(z)
                           ? Real(0)
                           : static_cast<Real>(dot(b, h, t) * detail::sigmoid(z) * detail::sigmoid(-z));
            });
    });
}

template <AnyPolicy P, class Real>
void retention_counts(const host& ctx, const P& policy, plane_view<Real> scores, const Sequences& sequences,
                      double* counts, workspace_view workspace, const GateOptions& options) {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return retention_counts(ctx, policy, scores, repaired.sequences, counts, workspace, options);
    }
    const std::int32_t layer = options.layer;
    policy.check_layer(layer, scores.heads);
    checks::check_whole_sequences(sequences, scores.batch, scores.length);
    checks::check_plane("scores", scores, scores.batch, scores.heads, sequences.length);
    checks::check_metric("counts", counts, 1, scores.heads);
    for (std::int32_t h = 0; h < scores.heads; ++h) {
        std::int64_t count = 0;
        for (std::int32_t b = 0; b < scores.batch; ++b) {
            hb::for_each_retainable(
                policy, options.scope, policy.params(layer, h), sequences, b,
                [&](std::int32_t t, bool by_position) {
                    const Real z = by_position ? Real(1) : scores.head(b, h)[t];
                    count += z > Real(0) ? 1 : 0;
                    if (std::isnan(z)) {
                        static_cast<void>(checks::reported(options.status, b, status_nan_score));
                    }
                });
        }
        counts[h] = scores.batch > 0 ? static_cast<double>(count) / static_cast<double>(scores.batch) : 0.0;
    }
}

inline void LambdaController::check() const {
    detail::require(heads >= 0, "heads", heads, "0 or more");
    detail::require(lambda != nullptr || heads == 0, "lambda", "null", "an array by head");
    detail::require(average != nullptr || heads == 0, "average", "null", "an array by head");
    detail::require(cap > 0.0, "cap", cap, "above 0");
    detail::require(slack > 0.0 && slack <= 1.0, "slack", slack, "above 0 and at most 1");
    detail::require(factor > 1.0f && std::isfinite(factor), "factor", factor, "above 1 and finite");
    detail::require(least > 0.0f && least <= 1.0f, "least", least, "above 0 and at most 1");
    detail::require(every >= 1, "every", every, "1 or more");
}
KVPOLICY_HOST_DEVICE inline void LambdaController::start_head(std::int32_t head) const {
    lambda[head] = least;
    average[head] = -1.0;
}
KVPOLICY_HOST_DEVICE inline void LambdaController::observe_head(std::int32_t head, double count) const {
    // With every = 1 or 2 the paper's coefficient reaches 1: the average is the last count.
    const double a = every < 2 ? 1.0 : 2.0 / (1.0 + 0.5 * every);
    average[head] = average[head] < 0.0 ? count : (1.0 - a) * average[head] + a * count;
}
KVPOLICY_HOST_DEVICE inline void LambdaController::update_head(std::int32_t head) const {
    const double c = average[head];
    float weight = lambda[head];
    if (c > cap) {
        weight *= factor;
    }
    if (c < slack * cap) {
        weight /= factor;
    }
    weight = weight < 1.0f ? weight : 1.0f;
    if (weight < least) {
        // Rounded steps may end beside `least` where exact ones reach it.
        const double half = 2.0 / (1.0 + static_cast<double>(factor)), near = 1.0 - 0x1p-12;
        const double lowest = static_cast<double>(least) * (half > near ? half : near);
        weight = static_cast<double>(weight) >= lowest || c > cap ? least : 0.0f;
    }
    lambda[head] = weight;
}
inline bool LambdaController::due(std::int64_t step) const {
    detail::require(every >= 1, "every", every, "1 or more");
    return step % every == 0;
}
inline void LambdaController::start(const host&) const {
    check();
    for (std::int32_t h = 0; h < heads; ++h) {
        start_head(h);
    }
}
inline void LambdaController::observe(const host&, const double* counts) const {
    check();
    detail::require(counts != nullptr || heads == 0, "counts", "null", "an array by head");
    for (std::int32_t h = 0; h < heads; ++h) {
        detail::require(
            counts[h] >= 0.0, [&] { return detail::text("counts[", h, "]"); }, counts[h], "0 or more");
        observe_head(h, counts[h]);
    }
}
inline void LambdaController::update(const host&) const {
    check();
    for (std::int32_t h = 0; h < heads; ++h) {
        update_head(h);
    }
}

}  // namespace kvpolicy
