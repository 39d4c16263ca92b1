// Oracle recall: how many of a teacher's long-range keys a student keeps (KVpop, 4.3 and figure 7).
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/metrics/each_head.hpp>
#include <kvpolicy/metrics/options.hpp>
#include <kvpolicy/policies/compose.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// Recall of one head. With T(q) and U(q) the long-range keys (those in E(q)) visible at q under teacher and
/// student: recall(q) = |T & U| / |T| (1 where T is empty), chance(q) = |U| / |E(q)| (1 where E is empty).
struct Recall {
    std::int64_t queries = 0;  ///< queries q >= s + w + k, over which the means are taken; 0: the means are 1
    double mean = 1.0;
    double chance_mean = 1.0;
    double last = 1.0;  ///< the last query alone
    double chance_last = 1.0;
};

/// Bytes of workspace that oracle_recall needs.
inline std::size_t oracle_recall_workspace_bytes(const host& ctx, plane_view<const expiry_t> teacher,
                                                 const Sequences& sequences) {
    static_cast<void>(ctx);
    checks::check_shape(sequences, teacher.heads);
    const std::size_t row =
        detail::aligned_size(static_cast<std::size_t>(sequences.length) * 3 * sizeof(std::int32_t));
    return static_cast<std::size_t>(teacher.batch) * static_cast<std::size_t>(teacher.heads) * row +
           detail::alignment;
}

/// out[b * Hkv + h] from two masks [B, Hkv, S] of the same policy (sinks, windows and budgets of `layer`), of
/// whole sequences that are not packed. Overwrites. Synchronous, O(S) a head.
template <AnyPolicy P>
void oracle_recall(const host& ctx, const P& policy, plane_view<const expiry_t> teacher,
                   plane_view<const expiry_t> student, const Sequences& sequences, Recall* out,
                   workspace_view workspace, const MetricOptions& options = {}) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return oracle_recall(ctx, policy, teacher, student, repaired.sequences, out, workspace, options);
    }
    const std::int32_t layer = options.layer;
    checks::check_whole_sequences(sequences, teacher.batch, teacher.length);
    checks::check_not_packed(sequences);
    policy.check_layer(layer, teacher.heads);
    checks::check_plane("teacher", teacher, teacher.batch, teacher.heads, sequences.length);
    checks::check_plane("student", student, teacher.batch, teacher.heads, sequences.length);
    checks::check_metric("out", out, teacher.batch, 1);
    checks::check_workspace(workspace, oracle_recall_workspace_bytes(ctx, teacher, sequences));
    const std::size_t row =
        detail::aligned_size(static_cast<std::size_t>(sequences.length) * 3 * sizeof(std::int32_t));
    std::byte* memory = detail::aligned(workspace.data);
    host_backend::for_each_head(ctx, teacher, [&](std::int64_t b, std::int32_t h, std::int64_t task) {
        const std::int64_t length = sequences.length_of(b);
        const HeadParams head_params = policy.params(layer, h);
        const expiry_t* of_teacher = teacher.head(b, h);
        const expiry_t* of_student = student.head(b, h);
        auto* both = reinterpret_cast<std::int32_t*>(memory + static_cast<std::size_t>(task) * row);
        std::int32_t* kept = both + length;   // by the teacher
        std::int32_t* tried = kept + length;  // by the student
        std::fill_n(both, 3 * length, 0);
        const auto count = [&](std::int32_t* live, std::int64_t from, std::int64_t to) {
            if (from >= std::min(to, length)) {
                return;
            }
            ++live[from];
            if (to < length) {
                --live[to];
            }
        };
        for (std::int64_t t = head_params.sinks; t + head_params.window < length; ++t) {
            const std::int64_t from = t + head_params.window;
            count(both, from, std::min(of_teacher[t], of_student[t]));
            count(kept, from, of_teacher[t]);
            count(tried, from, of_student[t]);
        }
        const std::int64_t first = std::int64_t{head_params.sinks} + head_params.window + head_params.budget;
        Recall result;
        double recall_sum = 0.0, chance_sum = 0.0;
        for (std::int64_t q = 0; q < length; ++q) {
            if (q > 0) {
                both[q] += both[q - 1];
                kept[q] += kept[q - 1];
                tried[q] += tried[q - 1];
            }
            const std::int64_t eligible =
                std::max<std::int64_t>(0, q - head_params.window + 1 - head_params.sinks);
            result.last = kept[q] == 0 ? 1.0 : static_cast<double>(both[q]) / kept[q];
            result.chance_last =
                eligible == 0 ? 1.0 : static_cast<double>(tried[q]) / static_cast<double>(eligible);
            if (q >= first) {
                ++result.queries;
                recall_sum += result.last;
                chance_sum += result.chance_last;
            }
        }
        if (result.queries > 0) {
            result.mean = recall_sum / static_cast<double>(result.queries);
            result.chance_mean = chance_sum / static_cast<double>(result.queries);
        }
        out[task] = result;
    });
}

}  // namespace kvpolicy

#if defined(__CUDACC__)
#include <kvpolicy/metrics/cuda_metrics.cuh>
#endif
