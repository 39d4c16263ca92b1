// Bodies of masks/cuda_log_bias.cuh: from arguments to launches.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/kernel_log_bias.cuh>
#include <kvpolicy/masks/cuda/make_mask_params.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda_log_bias.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

template <AnyPolicy P>
std::size_t log_bias_workspace_bytes(const cuda&, const P&, const Sequences& sequences, std::int32_t heads,
                                     const MaskOptions&) {
    cuda_backend::check_shape(sequences, heads);
    cuda_backend::workspace_parts parts(nullptr);
    static_cast<void>(cuda_backend::small_numbers::take(parts, sequences, heads));
    return parts.bytes();
}

namespace cuda_backend {

/// Checks the scores, the gate and the workspace of a call, and calls enqueue(params, blocks) on the
/// context's device where there is any key.
template <class P, class G, class Enqueue>
void with_gate_params(const cuda& ctx, const P& policy, const G& gate, plane_view<const float> scores,
                      const Sequences& sequences, workspace_view workspace, const MaskOptions& options,
                      const Enqueue& enqueue) {
    static_assert(!P::has_budget, "kvpolicy: a soft gate takes a policy without a TopKBudget");
    gate.check();
    policy.check_layer(options.layer, scores.heads);
    check_whole_sequences(sequences, scores.batch, scores.length);
    check_plane("scores", scores, sequences.batch, scores.heads, sequences.length);
    check_workspace(workspace, log_bias_workspace_bytes(ctx, policy, sequences, scores.heads));
    if (sequences.batch == 0 || scores.heads == 0 || sequences.length == 0) {
        return;
    }
    const device_scope device(ctx);
    workspace_parts parts(workspace.data);
    const auto small = small_numbers::take(parts, sequences, scores.heads);
    const auto params =
        make_params(ctx, policy, scores, sequences, scores.heads, options.layer, small, options.status);
    enqueue(params, std::int64_t{params.batch} * params.heads * params.chunks);
}

}  // namespace cuda_backend

template <AnyPolicy P, TrainingGate G, class Real>
void build_log_bias(const cuda& ctx, const P& policy, const G& gate, plane_view<Real> scores,
                    const Sequences& sequences, plane_view<expiry_t> expiry, plane_view<float> log_bias,
                    workspace_view workspace, const MaskOptions& options) {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<std::remove_const_t<Real>, float>, "kvpolicy: scores on CUDA are fp32");
    cb::check_plane("expiry", expiry, scores.batch, scores.heads, sequences.length);
    cb::check_plane("log_bias", log_bias, scores.batch, scores.heads, sequences.length);
    cb::with_gate_params(
        ctx, policy, gate, scores, sequences, workspace, options,
        [&]<class Gate, class Keep>(const cb::mask_params<Gate, Keep>& params, std::int64_t blocks) {
            cb::launch("log_bias_kernel", cb::log_bias_kernel<G, Gate, Keep>, blocks, cb::mask_chunk, 0, ctx,
                       params, cb::ready_gate<G>(gate), expiry, log_bias);
        });
}

template <AnyPolicy P, TrainingGate G, class Real>
void log_bias_backward(const cuda& ctx, const P& policy, const G& gate, input_plane<Real> scores,
                       input_plane<Real> d_log_bias, const Sequences& sequences, plane_view<Real> d_scores,
                       workspace_view workspace, const MaskOptions& options) {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    cb::check_plane("d_log_bias", d_log_bias, scores.batch, scores.heads, sequences.length);
    cb::check_plane("d_scores", d_scores, scores.batch, scores.heads, sequences.length);
    cb::with_gate_params(
        ctx, policy, gate, scores, sequences, workspace, options,
        [&]<class Gate, class Keep>(const cb::mask_params<Gate, Keep>& params, std::int64_t blocks) {
            cb::launch("log_bias_backward_kernel", cb::log_bias_backward_kernel<G, Gate, Keep>, blocks,
                       cb::mask_chunk, 0, ctx, params, cb::ready_gate<G>(gate), d_log_bias, d_scores);
        });
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
