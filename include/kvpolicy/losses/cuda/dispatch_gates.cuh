// The gate losses, CompressionLoss, and bodies of losses/cuda_gates.cuh: from arguments to launches.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/losses/check.hpp>
#include <kvpolicy/losses/cuda/kernel_gates.cuh>
#include <kvpolicy/losses/cuda_gates.cuh>
#include <kvpolicy/losses/dms.hpp>
#include <kvpolicy/losses/gates.hpp>
#include <kvpolicy/masks/cuda/make_mask_params.cuh>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The arrays of a call.
struct gate_memory {
    small_numbers small;
    std::int64_t blocks;
    long long *shares, *count;
    double* values;
    EvictionSums* sums;

    gate_memory(const Sequences& sequences, std::int32_t heads, workspace_parts& parts)
        : small(small_numbers::take(parts, sequences, heads)),
          blocks(chunks_of(sequences) * sequences.batch * heads),
          shares(parts.take<long long>(blocks)),
          count(parts.take<long long>(1)),
          values(parts.take<double>(blocks)),
          sums(parts.take<EvictionSums>(1)) {}
};

inline std::size_t gate_workspace_bytes(const Sequences& sequences, std::int32_t heads) {
    check_shape(sequences, heads);
    workspace_parts parts(nullptr);
    static_cast<void>(gate_memory(sequences, heads, parts));
    return parts.bytes();
}

/// What all of these calls check.
template <class P>
void check_gate_loss(const P& policy, plane_view<const float> scores, const Sequences& sequences,
                     std::int32_t layer, workspace_view workspace) {
    policy.check_layer(layer, scores.heads);
    check_whole_sequences(sequences, scores.batch, scores.length);
    check_plane("scores", scores, sequences.batch, scores.heads, sequences.length);
    check_workspace(workspace, gate_workspace_bytes(sequences, scores.heads));
}

template <class Controller>
void launch_controller(const cuda& ctx, const Controller& controller, controller_action call,
                       const double* counts) {
    controller.check();
    const device_scope device(ctx);
    launch("controller_kernel", controller_kernel<Controller>, (std::int64_t{controller.heads} + 127) / 128,
           128, 0, ctx, controller, call, counts);
}

/// Enqueues the count of keys that a loss is about, 0 where there is no key at all.
template <class Params>
void launch_gate_count(const cuda& ctx, const gate_memory& memory, const Params* params, gate_scope scope) {
    if (params != nullptr) {
        using Gate = std::remove_cvref_t<decltype(params->gate)>;
        using Keep = std::remove_cvref_t<decltype(params->keep)>;
        launch("gate_count_kernel", gate_count_kernel<Gate, Keep>, memory.blocks, mask_chunk, 0, ctx, *params,
               scope == gate_scope::all, false, memory.shares);
    }
    launch("gate_total_kernel", gate_total_kernel<long long>, 1, gate_sum_threads, 0, ctx,
           static_cast<const long long*>(memory.shares), memory.blocks, memory.count);
}

/// Adds a call's decisions to *sums, or writes them there.
template <class Params>
void launch_decisions(const cuda& ctx, const gate_memory& memory, const Params* params,
                      const CompressionLoss& loss, bool add, EvictionSums* sums) {
    launch_gate_count(ctx, memory, params, loss.scope);
    if (params != nullptr) {
        using Gate = std::remove_cvref_t<decltype(params->gate)>;
        using Keep = std::remove_cvref_t<decltype(params->keep)>;
        launch("decisions_kernel", decisions_kernel<Gate, Keep>, memory.blocks, mask_chunk, 0, ctx, *params,
               loss, memory.values);
    }
    launch("decisions_total_kernel", decisions_total_kernel<EvictionSums>, 1, gate_sum_threads, 0, ctx,
           static_cast<const double*>(memory.values), memory.blocks,
           static_cast<const long long*>(memory.count), add, sums);
}

/// GateSparsity, GateDensity or RetentionPenalty.
template <class L, AnyPolicy P>
void gate_loss(const cuda& ctx, const L& loss, const P& policy, plane_view<const float> scores,
               const Sequences& sequences, plane_view<float> d_scores, LossValue* value,
               workspace_view workspace, std::uint32_t* status) {
    namespace cb = cuda_backend;
    checks::check_gate_scale(loss.scale);
    if constexpr (requires { loss.lambda; }) {
        detail::require(loss.lambda != nullptr || scores.heads == 0, "lambda", "null",
                        "an array by head in device memory");
    }
    cb::check_gate_loss(policy, scores, sequences, loss.layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    checks::check_value(value);
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    using Params = decltype(cb::make_params(ctx, policy, scores, sequences, scores.heads, loss.layer,
                                            memory.small, status));
    if (memory.blocks > 0) {
        const Params params =
            cb::make_params(ctx, policy, scores, sequences, scores.heads, loss.layer, memory.small, status);
        using Gate = std::remove_cvref_t<decltype(params.gate)>;
        using Keep = std::remove_cvref_t<decltype(params.keep)>;
        cb::launch_gate_count(ctx, memory, &params, loss.scope);
        cb::launch("gate_loss_kernel", cb::gate_loss_kernel<L, Gate, Keep>, memory.blocks, cb::mask_chunk, 0,
                   ctx, params, loss, static_cast<const long long*>(memory.count), d_scores, memory.values);
    } else {
        cb::launch_gate_count(ctx, memory, static_cast<const Params*>(nullptr), loss.scope);
    }
    cb::launch("gate_value_kernel", cb::gate_value_kernel<LossValue>, 1, cb::gate_sum_threads, 0, ctx,
               static_cast<const double*>(memory.values), memory.blocks,
               static_cast<const long long*>(memory.count), L::mean_over_keys ? 0.0 : sequences.batch, value);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, class Build>
std::size_t GateSparsity::workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                          std::int32_t heads) const {
    return cuda_backend::gate_workspace_bytes(sequences, heads);
}
template <AnyPolicy P, class Real, class Build>
void GateSparsity::operator()(const cuda& ctx, const P& policy,
                              std::type_identity_t<plane_view<const Real>> scores, const Sequences& sequences,
                              plane_view<Real> d_scores, LossValue* value, workspace_view workspace,
                              const LossOptions& options) const {
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    cuda_backend::gate_loss(ctx, *this, policy, scores, sequences, d_scores, value, workspace,
                            options.status);
}

template <AnyPolicy P, class Build>
std::size_t GateDensity::workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                         std::int32_t heads) const {
    return cuda_backend::gate_workspace_bytes(sequences, heads);
}
template <AnyPolicy P, class Real, class Build>
void GateDensity::operator()(const cuda& ctx, const P& policy,
                             std::type_identity_t<plane_view<const Real>> scores, const Sequences& sequences,
                             plane_view<Real> d_scores, LossValue* value, workspace_view workspace,
                             const LossOptions& options) const {
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    cuda_backend::gate_loss(ctx, *this, policy, scores, sequences, d_scores, value, workspace,
                            options.status);
}

template <AnyPolicy P, class Build>
std::size_t RetentionPenalty::workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                              std::int32_t heads) const {
    return cuda_backend::gate_workspace_bytes(sequences, heads);
}
template <AnyPolicy P, class Real, class Build>
void RetentionPenalty::operator()(const cuda& ctx, const P& policy,
                                  std::type_identity_t<plane_view<const Real>> scores,
                                  const Sequences& sequences, plane_view<Real> d_scores, LossValue* value,
                                  workspace_view workspace, const LossOptions& options) const {
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    cuda_backend::gate_loss(ctx, *this, policy, scores, sequences, d_scores, value, workspace,
                            options.status);
}

template <AnyPolicy P, class Build>
std::size_t CompressionLoss::workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                             std::int32_t heads) const {
    return cuda_backend::gate_workspace_bytes(sequences, heads);
}

template <AnyPolicy P, class Real, class Build>
void CompressionLoss::sums(const cuda& ctx, const P& policy, plane_view<Real> scores,
                           const Sequences& sequences, EvictionSums* sums, workspace_view workspace,
                           const CompressionOptions& options) const {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<std::remove_const_t<Real>, float>, "kvpolicy: scores on CUDA are fp32");
    const CompressionLoss& loss = *this;
    std::uint32_t* const status = options.status;
    loss.gate.check();
    cb::check_gate_loss(policy, scores, sequences, loss.layer, workspace);
    detail::require(sums != nullptr, "sums", "null", "device memory");
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    if (memory.blocks > 0) {
        const auto params =
            cb::make_params(ctx, policy, scores, sequences, scores.heads, loss.layer, memory.small, status);
        cb::launch_decisions(ctx, memory, &params, loss, true, sums);
    }
}

template <AnyPolicy P, class Real, class Build>
void CompressionLoss::operator()(const cuda& ctx, const P& policy,
                                 std::type_identity_t<plane_view<const Real>> scores,
                                 const Sequences& sequences, plane_view<Real> d_scores, LossValue* value,
                                 workspace_view workspace, const CompressionOptions& options) const {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    const CompressionLoss& loss = *this;
    std::uint32_t* const status = options.status;
    const EvictionSums* const total = options.total;
    checks::check_gate_scale(loss.scale);
    detail::require(loss.target >= 0.0f && loss.target <= 1.0f, "CompressionLoss.target", loss.target,
                    "0 to 1");
    loss.gate.check();
    cb::check_gate_loss(policy, scores, sequences, loss.layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    checks::check_value(value);
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    using Params = decltype(cb::make_params(ctx, policy, scores, sequences, scores.heads, loss.layer,
                                            memory.small, status));
    const EvictionSums* const all = total != nullptr || loss.total.keys != 0 ? total : memory.sums;
    if (memory.blocks > 0) {
        const Params params =
            cb::make_params(ctx, policy, scores, sequences, scores.heads, loss.layer, memory.small, status);
        using Gate = std::remove_cvref_t<decltype(params.gate)>;
        using Keep = std::remove_cvref_t<decltype(params.keep)>;
        cb::launch_decisions(ctx, memory, &params, loss, false, memory.sums);
        cb::launch("compression_kernel", cb::compression_kernel<Gate, Keep>, memory.blocks, cb::mask_chunk, 0,
                   ctx, params, loss, all, d_scores);
    } else {
        cb::launch_decisions(ctx, memory, static_cast<const Params*>(nullptr), loss, false, memory.sums);
    }
    cb::launch("compression_value_kernel", cb::compression_value_kernel<LossValue>, 1, 32, 0, ctx, loss, all,
               static_cast<const long long*>(memory.count), value);
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

template <AnyPolicy P>
std::size_t straight_through_values_workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                                    std::int32_t heads) {
    return cuda_backend::gate_workspace_bytes(sequences, heads);
}

template <AnyPolicy P>
std::size_t retention_counts_workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                             std::int32_t heads) {
    return cuda_backend::gate_workspace_bytes(sequences, heads);
}

template <AnyPolicy P, class V>
void straight_through_values(const cuda& ctx, const P& policy,
                             std::type_identity_t<plane_view<const compute_t<std::remove_const_t<V>>>> scores,
                             rows_view<V> given_v, input_rows<std::remove_const_t<V>> d_v,
                             const Sequences& sequences,
                             plane_view<compute_t<std::remove_const_t<V>>> d_scores, workspace_view workspace,
                             const GateOptions& options) {
    namespace cb = cuda_backend;
    using T = std::remove_const_t<V>;
    static_assert(!std::is_same_v<T, double>, "kvpolicy: values on CUDA are fp32, bf16 or fp16");
    const rows_view<const T> v = given_v;
    const std::int32_t layer = options.layer;
    std::uint32_t* const status = options.status;
    cb::check_gate_loss(policy, scores, sequences, layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    checks::check_rows("v", v, sequences.batch, scores.heads, sequences.length, v.dim);
    checks::check_rows("d_v", d_v, sequences.batch, scores.heads, sequences.length, v.dim);
    const std::int64_t keys = std::int64_t{sequences.batch} * scores.heads * sequences.length;
    if (keys == 0) {
        return;
    }
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    const auto params =
        cb::make_params(ctx, policy, scores, sequences, scores.heads, layer, memory.small, status);
    using Gate = std::remove_cvref_t<decltype(params.gate)>;
    using Keep = std::remove_cvref_t<decltype(params.keep)>;
    cb::launch("straight_through_kernel", cb::straight_through_kernel<T, Gate, Keep>, (keys + 7) / 8, 256, 0,
               ctx, params, v, d_v, d_scores);
}

template <AnyPolicy P, class Real>
void retention_counts(const cuda& ctx, const P& policy, plane_view<Real> scores, const Sequences& sequences,
                      double* counts, workspace_view workspace, const GateOptions& options) {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<std::remove_const_t<Real>, float>, "kvpolicy: scores on CUDA are fp32");
    const std::int32_t layer = options.layer;
    std::uint32_t* const status = options.status;
    cb::check_gate_loss(policy, scores, sequences, layer, workspace);
    detail::require(counts != nullptr || scores.heads == 0, "counts", "null", "device memory");
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    if (memory.blocks > 0) {
        const auto params =
            cb::make_params(ctx, policy, scores, sequences, scores.heads, layer, memory.small, status);
        using Gate = std::remove_cvref_t<decltype(params.gate)>;
        using Keep = std::remove_cvref_t<decltype(params.keep)>;
        cb::launch("gate_count_kernel", cb::gate_count_kernel<Gate, Keep>, memory.blocks, cb::mask_chunk, 0,
                   ctx, params, false, true, memory.shares);
    }
    cb::launch("retention_counts_kernel", cb::retention_counts_kernel<double>, scores.heads,
               cb::gate_sum_threads, 0, ctx, static_cast<const long long*>(memory.shares), memory.blocks,
               sequences.batch, counts);
}

}  // namespace KVPOLICY_HIDDEN

template <class Build>
void LambdaController::start(const cuda& ctx) const {
    cuda_backend::launch_controller(ctx, *this, cuda_backend::controller_action::start, nullptr);
}
template <class Build>
void LambdaController::observe(const cuda& ctx, const double* counts) const {
    detail::require(counts != nullptr || heads == 0, "counts", "null", "device memory");
    cuda_backend::launch_controller(ctx, *this, cuda_backend::controller_action::observe, counts);
}
template <class Build>
void LambdaController::update(const cuda& ctx) const {
    cuda_backend::launch_controller(ctx, *this, cuda_backend::controller_action::update, nullptr);
}

}  // namespace kvpolicy
