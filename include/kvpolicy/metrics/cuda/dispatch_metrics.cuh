// Bodies of metrics/cuda_metrics.cuh.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/make_mask_params.cuh>
#include <kvpolicy/metrics/cuda/kernel_metrics.cuh>
#include <kvpolicy/metrics/cuda_metrics.cuh>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T>
void check_metric_call(const char* of, plane_view<const T> plane, const Sequences& sequences,
                       const char* name, const void* out) {
    check_whole_sequences(sequences, plane.batch, plane.length);
    check_shape(sequences, plane.heads);
    check_plane(of, plane, sequences.batch, plane.heads, sequences.length);
    detail::require(out != nullptr || plane.batch == 0 || plane.heads == 0, name, "null", "device memory");
}

/// Calls enqueue(batch of rules, blocks) for as many heads at a time as a launch's parameters hold.
template <class P, class Enqueue>
void for_each_head_params_batch(const P& policy, std::int32_t layer, std::int32_t batch, std::int32_t heads,
                                const Enqueue& enqueue) {
    for (std::int32_t first = 0; first < heads; first += head_params_batch::capacity) {
        head_params_batch all_params{};
        all_params.first = first;
        all_params.count = std::min(heads - first, head_params_batch::capacity);
        for (std::int32_t i = 0; i < all_params.count; ++i) {
            all_params.all_params[i] = policy.params(layer, first + i);
        }
        enqueue(all_params, std::int64_t{batch} * all_params.count);
    }
}

}  // namespace cuda_backend

template <class Expiry>
void live_keys(const cuda& ctx, plane_view<const expiry_t> expiry, const Sequences& sequences,
               plane_view<std::int32_t> live, workspace_view, const MetricOptions& options) {
    namespace cb = cuda_backend;
    cb::check_metric_call("expiry", expiry, sequences, "live",
                          sequences.length == 0 ? &sequences : static_cast<const void*>(live.data));
    cb::check_plane("live", live, sequences.batch, expiry.heads, sequences.length);
    const cb::device_scope device(ctx);
    cb::report_lengths(ctx, sequences, options.status);
    cb::launch("live_keys_kernel", cb::live_keys_kernel<Expiry>, std::int64_t{expiry.batch} * expiry.heads,
               cb::metric_threads, 0, ctx, expiry, sequences, live);
}

template <class Expiry>
void density(const cuda& ctx, plane_view<const expiry_t> expiry, const Sequences& sequences, double* out,
             workspace_view, const MetricOptions& options) {
    namespace cb = cuda_backend;
    cb::check_metric_call("expiry", expiry, sequences, "out", out);
    checks::check_not_packed(sequences);
    const cb::device_scope device(ctx);
    cb::report_lengths(ctx, sequences, options.status);
    cb::launch("density_kernel", cb::density_kernel<Expiry>, std::int64_t{expiry.batch} * expiry.heads,
               cb::metric_threads, 0, ctx, expiry, sequences, out);
}

template <AnyPolicy P>
void evict_ratio(const cuda& ctx, const P& policy, plane_view<const expiry_t> expiry,
                 const Sequences& sequences, double* out, workspace_view, const MetricOptions& options) {
    const std::int32_t layer = options.layer;
    namespace cb = cuda_backend;
    cb::check_metric_call("expiry", expiry, sequences, "out", out);
    checks::check_not_packed(sequences);
    policy.check_layer(layer, expiry.heads);
    const cb::device_scope device(ctx);
    cb::report_lengths(ctx, sequences, options.status);
    cb::for_each_head_params_batch(policy, layer, expiry.batch, expiry.heads,
                                   [&](const cb::head_params_batch& all_params, std::int64_t blocks) {
                                       cb::launch("evict_ratio_kernel", cb::evict_ratio_kernel<expiry_t>,
                                                  blocks, cb::metric_threads, 0, ctx, expiry, sequences,
                                                  all_params, out);
                                   });
}

template <AnyPolicy P>
void open_gates(const cuda& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                double* out, workspace_view, const MetricOptions& options) {
    static_assert(P::has_gate, "kvpolicy: open_gates needs a policy with a gate");
    namespace cb = cuda_backend;
    cb::check_metric_call("scores", scores, sequences, "out", out);
    policy.check_layer(options.layer, scores.heads);
    const cb::device_scope device(ctx);
    cb::report_lengths(ctx, sequences, options.status);
    const auto gate = policy.gate();
    cb::for_each_head_params_batch(policy, options.layer, scores.batch, scores.heads,
                                   [&](const cb::head_params_batch& all_params, std::int64_t blocks) {
                                       cb::launch("open_gates_kernel",
                                                  cb::open_gates_kernel<std::remove_const_t<decltype(gate)>>,
                                                  blocks, cb::metric_threads, 0, ctx, scores, sequences,
                                                  all_params, gate, options.status, out);
                                   });
}

template <AnyPolicy P>
void coverage(const cuda& ctx, const P& policy, plane_view<const expiry_t> reference,
              plane_view<const expiry_t> other, const Sequences& sequences, Coverage* out, workspace_view,
              const MetricOptions& options) {
    namespace cb = cuda_backend;
    cb::check_metric_call("reference", reference, sequences, "out", out);
    checks::check_not_packed(sequences);
    policy.check_layer(options.layer, reference.heads);
    cb::check_plane("other", other, sequences.batch, reference.heads, sequences.length);
    const cb::device_scope device(ctx);
    cb::report_lengths(ctx, sequences, options.status);
    cb::for_each_head_params_batch(policy, options.layer, reference.batch, reference.heads,
                                   [&](const cb::head_params_batch& all_params, std::int64_t blocks) {
                                       cb::launch("coverage_kernel", cb::coverage_kernel<expiry_t>, blocks,
                                                  cb::metric_threads, 0, ctx, reference, other, sequences,
                                                  all_params, out);
                                   });
}

inline std::size_t oracle_recall_workspace_bytes(const cuda&, plane_view<const expiry_t> teacher,
                                                 const Sequences& sequences) {
    cuda_backend::check_shape(sequences, teacher.heads);
    cuda_backend::workspace_parts parts(nullptr);
    static_cast<void>(
        parts.take<std::int32_t>(std::int64_t{3} * teacher.batch * teacher.heads * sequences.length));
    return parts.bytes();
}

template <AnyPolicy P>
void oracle_recall(const cuda& ctx, const P& policy, plane_view<const expiry_t> teacher,
                   plane_view<const expiry_t> student, const Sequences& sequences, Recall* out,
                   workspace_view workspace, const MetricOptions& options) {
    const std::int32_t layer = options.layer;
    namespace cb = cuda_backend;
    cb::check_metric_call("teacher", teacher, sequences, "out", out);
    checks::check_not_packed(sequences);
    policy.check_layer(layer, teacher.heads);
    cb::check_plane("student", student, sequences.batch, teacher.heads, sequences.length);
    cb::check_workspace(workspace, oracle_recall_workspace_bytes(ctx, teacher, sequences));
    const cb::device_scope device(ctx);
    cb::report_lengths(ctx, sequences, options.status);
    cb::workspace_parts parts(workspace.data);
    auto* const counts =
        parts.take<std::int32_t>(std::int64_t{3} * teacher.batch * teacher.heads * sequences.length);
    cb::for_each_head_params_batch(policy, layer, teacher.batch, teacher.heads,
                                   [&](const cb::head_params_batch& all_params, std::int64_t blocks) {
                                       cb::launch("oracle_recall_kernel", cb::oracle_recall_kernel<expiry_t>,
                                                  blocks, cb::metric_threads, 0, ctx, teacher, student,
                                                  sequences, all_params, out, counts);
                                   });
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
