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

/// A loss that is the sum over keys of its terms, divided by the number of keys or of sequences.
template <class L, class P, class Real>
LossValue gate_loss(const L& loss, const P& policy, const plane_view<const Real>& scores,
                    const Sequences& sequences, const plane_view<Real>& d_scores) {
    const std::int32_t heads = d_scores.heads, batch = d_scores.batch;
    policy.check_layer(loss.layer, heads);
    checks::check_whole_sequences(sequences, batch, d_scores.length);
    checks::check_plane("d_scores", d_scores, batch, heads, sequences.length);
    checks::check_plane("scores", scores, batch, heads, sequences.length);
    LossValue result;
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            for_each_in_scope(policy, loss.scope, policy.params(loss.layer, h), sequences, b,
                              [&](std::int32_t t) {
                                  refuse_nan("scores", b, h, t, scores.head(b, h)[t]);
                                  ++result.count;
                              });
        }
    }
    const double mean =
        result.count == 0 ? 0.0 : 1.0 / static_cast<double>(L::mean_over_keys ? result.count : batch);
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            const Real* z = scores.head(b, h);
            Real* d = d_scores.head(b, h);
            std::fill_n(d, sequences.length_of(b), Real(0));
            double sum = 0.0;
            for_each_in_scope(policy, loss.scope, policy.params(loss.layer, h), sequences, b,
                              [&](std::int32_t t) {
                                  const GateTerm one = loss.term(h, static_cast<double>(z[t]));
                                  sum += one.value;
                                  d[t] = static_cast<Real>(mean * one.slope);
                              });
            result.value += mean * sum;
        }
    }
    return result;
}

}  // namespace host_backend

KVPOLICY_HOST_DEVICE inline GateTerm GateSparsity::term(std::int32_t, double z) const {
    const double g = detail::sigmoid(z), closed = detail::sigmoid(-z);
    const auto factor = static_cast<double>(scale);
    return {factor * (g + g * closed), factor * 2.0 * closed * closed * g};
}
KVPOLICY_HOST_DEVICE inline GateTerm GateDensity::term(std::int32_t, double z) const {
    const double u = detail::sigmoid(z), factor = -static_cast<double>(scale);
    return {factor * u, factor * u * detail::sigmoid(-z)};
}
KVPOLICY_HOST_DEVICE inline GateTerm RetentionPenalty::term(std::int32_t head, double z) const {
    if (!(z > 0.0)) {
        return {0.0, 0.0};
    }
    const double r = detail::sigmoid(z);
    const double factor = static_cast<double>(scale) * static_cast<double>(lambda[head]);
    return {factor * (r - 0.5), factor * r * detail::sigmoid(-z)};
}

template <AnyPolicy P>
std::size_t GateSparsity::workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                          std::int32_t heads) const {
    return host_backend::gate_workspace_bytes(policy, sequences, heads, layer);
}
template <AnyPolicy P, class Real>
void GateSparsity::operator()(const host& ctx, const P& policy,
                              std::type_identity_t<plane_view<const Real>> scores, const Sequences& sequences,
                              plane_view<Real> d_scores, LossValue* value, workspace_view workspace,
                              const LossOptions& options) const {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, policy, scores, repaired.sequences, d_scores, value, workspace, options);
    }
    checks::check_value(value);
    checks::check_gate_scale(scale);
    *value = host_backend::gate_loss(*this, policy, scores, sequences, d_scores);
}

template <AnyPolicy P>
std::size_t GateDensity::workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                         std::int32_t heads) const {
    return host_backend::gate_workspace_bytes(policy, sequences, heads, layer);
}
template <AnyPolicy P, class Real>
void GateDensity::operator()(const host& ctx, const P& policy,
                             std::type_identity_t<plane_view<const Real>> scores, const Sequences& sequences,
                             plane_view<Real> d_scores, LossValue* value, workspace_view workspace,
                             const LossOptions& options) const {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, policy, scores, repaired.sequences, d_scores, value, workspace, options);
    }
    checks::check_value(value);
    checks::check_gate_scale(scale);
    *value = host_backend::gate_loss(*this, policy, scores, sequences, d_scores);
}

template <AnyPolicy P>
std::size_t RetentionPenalty::workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                              std::int32_t heads) const {
    return host_backend::gate_workspace_bytes(policy, sequences, heads, layer);
}
template <AnyPolicy P, class Real>
void RetentionPenalty::operator()(const host& ctx, const P& policy,
                                  std::type_identity_t<plane_view<const Real>> scores,
                                  const Sequences& sequences, plane_view<Real> d_scores, LossValue* value,
                                  workspace_view workspace, const LossOptions& options) const {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, policy, scores, repaired.sequences, d_scores, value, workspace, options);
    }
    checks::check_value(value);
    checks::check_gate_scale(scale);
    detail::require(lambda != nullptr || d_scores.heads == 0, "lambda", "null", "an array by head");
    *value = host_backend::gate_loss(*this, policy, scores, sequences, d_scores);
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
void straight_through_values(const host& ctx, const P& policy,
                             std::type_identity_t<plane_view<const compute_t<std::remove_const_t<V>>>> scores,
                             rows_view<V> given_v, input_rows<std::remove_const_t<V>> d_v,
                             const Sequences& sequences,
                             plane_view<compute_t<std::remove_const_t<V>>> d_scores, workspace_view workspace,
                             const GateOptions& options) {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return straight_through_values(ctx, policy, scores, given_v, d_v, repaired.sequences, d_scores,
                                       workspace, options);
    }
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
            hb::for_each_in_scope(policy, gate_scope::decided, policy.params(layer, h), sequences, b,
                                  [&](std::int32_t t) {
                                      hb::refuse_nan("scores", b, h, t, scores.head(b, h)[t]);
                                      if (std::isfinite(dot(b, h, t))) [[likely]] {
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
            policy, gate_scope::decided, policy.params(layer, h), sequences, b, [&](std::int32_t t) {
                const double z = static_cast<double>(scores.head(b, h)[t]);
                d[t] = static_cast<Real>(dot(b, h, t) * detail::sigmoid(z) * detail::sigmoid(-z));
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
            hb::for_each_in_scope(policy, gate_scope::decided, policy.params(layer, h), sequences, b,
                                  [&](std::int32_t t) { count += scores.head(b, h)[t] > Real(0) ? 1 : 0; });
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
        weight = c > cap ? least : 0.0f;
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
