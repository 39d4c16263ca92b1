// Gates of admission as SP-KV measures them: the share of open gates (eq. 8), and how many of a reference's
// long-range keys another mask has, too (its density coverage, figure 4). Sequences are whole.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/metrics/each_head.hpp>
#include <kvpolicy/metrics/options.hpp>
#include <kvpolicy/policies/compose.hpp>

#include <cmath>
#include <cstdint>

namespace kvpolicy {

/// out[b * Hkv + h]: the share of a sequence's keys whose gate is open, those in the window at its end among
/// them; 0 for S = 0. Its mean over layers and heads is SP-KV's rho (eq. 8), which does not know the window:
/// density() is the share of visible pairs. scores [B, Hkv, S]: raw logits, thresholds those of the policy's
/// gate. Overwrites. A NaN score is not open; it is refused, or sets status_nan_score. Synchronous, O(S) per
/// head.
template <AnyPolicy P>
void open_gates(const host& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                double* out, workspace_view workspace = {}, const MetricOptions& options = {}) {
    static_assert(P::has_gate, "kvpolicy: open_gates needs a policy with a gate");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return open_gates(ctx, policy, scores, repaired.sequences, out, workspace, options);
    }
    checks::check_whole_sequences(sequences, scores.batch, scores.length);
    policy.check_layer(options.layer, scores.heads);
    checks::check_plane("scores", scores, scores.batch, scores.heads, sequences.length);
    checks::check_metric("out", out, scores.batch, scores.heads);
    checks::check_in_parallel(
        ctx, std::int64_t{scores.batch} * scores.heads, [&](std::int64_t task, bool refuse) {
            const std::int64_t b = task / scores.heads, h = task % scores.heads;
            const float* const row = scores.head(b, h);
            for (std::int32_t t = 0; t < sequences.length_of(b); ++t) {
                if (std::isnan(row[t]) && !checks::reported(options.status, b, status_nan_score)) {
                    return !refuse ? false : checks::is_number("scores", b, h, t, row[t], nullptr);
                }
            }
            return true;
        });
    const auto gate = policy.gate();
    host_backend::for_each_head(ctx, scores, [&](std::int64_t b, std::int32_t h, std::int64_t task) {
        const std::int32_t length = sequences.length_of(b);
        const HeadParams head_params = policy.params(options.layer, h);
        const float* const row = scores.head(b, h);
        std::int64_t open = 0;
        for (std::int32_t t = 0; t < length; ++t) {
            open += gate.open(row[t], head_params) ? 1 : 0;
        }
        out[task] = length == 0 ? 0.0 : static_cast<double>(open) / static_cast<double>(length);
    });
}

/// Coverage of one head: long-range keys are those visible to a query that they have left the window of, no
/// sinks. covered / keys is the head's coverage; over several heads, the quotient of the sums.
struct Coverage {
    std::int64_t keys = 0;     ///< long-range keys of the reference
    std::int64_t covered = 0;  ///< those of them that are long-range keys of the other mask, too
};

/// out[b * Hkv + h] from two masks [B, Hkv, S], with sinks and windows of the policy's `layer`: say of
/// trained gates, and of a layout where some heads keep all keys and the rest only their window. Overwrites.
/// Synchronous, O(S) per head.
template <AnyPolicy P>
void coverage(const host& ctx, const P& policy, plane_view<const expiry_t> reference,
              plane_view<const expiry_t> other, const Sequences& sequences, Coverage* out,
              workspace_view workspace = {}, const MetricOptions& options = {}) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return coverage(ctx, policy, reference, other, repaired.sequences, out, workspace, options);
    }
    checks::check_whole_sequences(sequences, reference.batch, reference.length);
    checks::check_not_packed(sequences);
    policy.check_layer(options.layer, reference.heads);
    checks::check_plane("reference", reference, reference.batch, reference.heads, sequences.length);
    checks::check_plane("other", other, reference.batch, reference.heads, sequences.length);
    checks::check_metric("out", out, reference.batch, reference.heads);
    host_backend::for_each_head(ctx, reference, [&](std::int64_t b, std::int32_t h, std::int64_t task) {
        const std::int64_t length = sequences.length_of(b);
        const HeadParams head_params = policy.params(options.layer, h);
        const expiry_t *of_reference = reference.head(b, h), *of_other = other.head(b, h);
        Coverage sum;
        for (std::int64_t t = head_params.sinks; t + head_params.window < length; ++t) {
            const std::int64_t eligible = t + head_params.window;
            sum.keys += of_reference[t] > eligible ? 1 : 0;
            sum.covered += of_reference[t] > eligible && of_other[t] > eligible ? 1 : 0;
        }
        out[task] = sum;
    });
}

}  // namespace kvpolicy

#if defined(__CUDACC__)
#include <kvpolicy/metrics/cuda_metrics.cuh>
#endif
