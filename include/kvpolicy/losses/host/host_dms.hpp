// Bodies of losses/dms.hpp on the host.
#pragma once

#include <kvpolicy/losses/dms.hpp>
#include <kvpolicy/losses/host/host_gates.hpp>

#include <algorithm>
#include <limits>

namespace kvpolicy {

namespace host_backend {

/// Calls visit(b, h, t, x) for the keys that the loss is about, in order: alpha = sigmoid(x), which is 0 for
/// a NaN score. That is reported, or refused.
template <class P, class Real, class Visit>
void for_each_decision(const CompressionLoss& loss, const P& policy, const plane_view<const Real>& scores,
                       const Sequences& sequences, std::uint32_t* status, Visit&& visit) {
    for (std::int32_t b = 0; b < scores.batch; ++b) {
        for (std::int32_t h = 0; h < scores.heads; ++h) {
            const auto stream = static_cast<std::uint64_t>(std::int64_t{b} * scores.heads + h);
            for_each_in_scope(policy, loss.scope, policy.params(loss.layer, h), sequences, b,
                              [&](std::int32_t t) {
                                  const Real z = scores.head(b, h)[t];
                                  const gate_place place{stream, static_cast<std::uint64_t>(t)};
                                  visit(b, h, t,
                                        checks::is_number("scores", b, h, t, z, status)
                                            ? loss.gate.relaxed(static_cast<double>(z), place)
                                            : -std::numeric_limits<double>::infinity());
                              });
        }
    }
}

}  // namespace host_backend

template <AnyPolicy P>
std::size_t CompressionLoss::workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                             std::int32_t heads) const {
    return host_backend::gate_workspace_bytes(policy, sequences, heads, layer);
}

template <AnyPolicy P, class Real>
void CompressionLoss::sums(const host& ctx, const P& policy, plane_view<Real> given_scores,
                           const Sequences& sequences, EvictionSums* sums, workspace_view workspace,
                           const CompressionOptions& options) const {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return this->sums(ctx, policy, given_scores, repaired.sequences, sums, workspace, options);
    }
    detail::require(sums != nullptr, "sums", "null", "memory for the sums (device memory on CUDA)");
    const plane_view<const std::remove_const_t<Real>> scores = given_scores;
    gate.check();
    policy.check_layer(layer, scores.heads);
    checks::check_whole_sequences(sequences, scores.batch, scores.length);
    checks::check_plane("scores", scores, scores.batch, scores.heads, sequences.length);
    EvictionSums sum;
    hb::for_each_decision(*this, policy, scores, sequences, options.status,
                          [&](std::int32_t, std::int32_t, std::int32_t, double x) {
                              sum.evicted += !straight_through ? detail::sigmoid(x) : x > 0.0 ? 1.0 : 0.0;
                              ++sum.keys;
                          });
    sums->evicted += sum.evicted;
    sums->keys += sum.keys;
}

template <AnyPolicy P, class Real>
void CompressionLoss::operator()(const host& ctx, const P& policy, input_plane<Real> scores,
                                 const Sequences& sequences, plane_view<Real> d_scores, LossValue* value,
                                 workspace_view workspace, const CompressionOptions& options) const {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, policy, scores, repaired.sequences, d_scores, value, workspace, options);
    }
    checks::check_value(value);
    checks::check_gate_scale(scale);
    detail::require(target >= 0.0f && target <= 1.0f, "CompressionLoss.target", target, "0 to 1");
    EvictionSums mine;
    sums(ctx, policy, scores, sequences, &mine, workspace, options);
    checks::check_plane("d_scores", d_scores, scores.batch, scores.heads, sequences.length);
    const EvictionSums given = options.total != nullptr ? *options.total : total;
    const EvictionSums all = given.keys == 0 ? mine : given;
    detail::require(all.keys >= mine.keys, "CompressionLoss.total.keys", all.keys,
                    [&] { return detail::text("0 (this call alone), or at least this call's ", mine.keys); });
    for (std::int32_t b = 0; b < scores.batch; ++b) {
        for (std::int32_t h = 0; h < scores.heads; ++h) {
            std::fill_n(d_scores.head(b, h), sequences.length_of(b), Real(0));
        }
    }
    *value = {0.0, mine.keys};
    if (all.keys == 0) {
        return;
    }
    const double keys = static_cast<double>(all.keys);
    const double missing = static_cast<double>(target) - all.evicted / keys;
    if (missing <= 0.0) {
        return;
    }
    value->value = static_cast<double>(scale) * missing;
    const double slope = -static_cast<double>(scale) / (keys * static_cast<double>(gate.temperature));
    hb::for_each_decision(*this, policy, scores, sequences, options.status,
                          [&](std::int32_t b, std::int32_t h, std::int32_t t, double x) {
                              d_scores.head(b, h)[t] =
                                  static_cast<Real>(slope * detail::sigmoid(x) * detail::sigmoid(-x));
                          });
}

}  // namespace kvpolicy
