// Bodies of losses/cuda_gates.cuh and losses/cuda_dms.cuh: from arguments to launches.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/losses/check.hpp>
#include <kvpolicy/losses/cuda/kernel_gates.cuh>
#include <kvpolicy/losses/cuda_dms.cuh>
#include <kvpolicy/losses/cuda_gates.cuh>
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

/// What all of these calls check.
template <class P>
void check_gate_loss(const cuda& on, const P& policy, plane_view<const float> scores,
                     const Sequences& sequences, std::int32_t layer, workspace_view workspace) {
    policy.check_layer(layer, scores.heads);
    check_whole_sequences(sequences, scores.batch, scores.length);
    check_plane("scores", scores, sequences.batch, scores.heads, sequences.length);
    check_workspace(workspace, gate_loss_workspace_bytes(on, policy, sequences, scores.heads));
}

template <class Controller>
void launch_controller(const cuda& on, const Controller& controller, controller_action call,
                       const double* counts) {
    controller.check();
    const device_scope device(on);
    launch("controller_kernel", controller_kernel<Controller>, (std::int64_t{controller.heads} + 127) / 128,
           128, 0, on, controller, call, counts);
}

/// Enqueues the count of keys that a loss is about, 0 where there is no key at all.
template <class Params>
void launch_gate_count(const cuda& on, const gate_memory& memory, const Params* params, gate_scope scope) {
    if (params != nullptr) {
        using Gate = std::remove_cvref_t<decltype(params->gate)>;
        using Keep = std::remove_cvref_t<decltype(params->keep)>;
        launch("gate_count_kernel", gate_count_kernel<Gate, Keep>, memory.blocks, mask_chunk, 0, on, *params,
               scope == gate_scope::all, false, memory.shares);
    }
    launch("gate_total_kernel", gate_total_kernel<long long>, 1, gate_sum_threads, 0, on,
           static_cast<const long long*>(memory.shares), memory.blocks, memory.count);
}

/// Adds a call's decisions to *sums, or writes them there.
template <class Params>
void launch_decisions(const cuda& on, const gate_memory& memory, const Params* params,
                      const CompressionLoss& loss, bool add, EvictionSums* sums) {
    launch_gate_count(on, memory, params, loss.scope);
    if (params != nullptr) {
        using Gate = std::remove_cvref_t<decltype(params->gate)>;
        using Keep = std::remove_cvref_t<decltype(params->keep)>;
        launch("decisions_kernel", decisions_kernel<Gate, Keep>, memory.blocks, mask_chunk, 0, on, *params,
               loss, memory.values);
    }
    launch("decisions_total_kernel", decisions_total_kernel<EvictionSums>, 1, gate_sum_threads, 0, on,
           static_cast<const double*>(memory.values), memory.blocks,
           static_cast<const long long*>(memory.count), add, sums);
}

}  // namespace cuda_backend

template <AnyPolicy P>
std::size_t gate_loss_workspace_bytes(const cuda&, const P&, const Sequences& sequences, std::int32_t heads) {
    cuda_backend::check_shape(sequences, heads);
    cuda_backend::workspace_parts parts(nullptr);
    static_cast<void>(cuda_backend::gate_memory(sequences, heads, parts));
    return parts.bytes();
}

template <class L, AnyPolicy P>
void gate_loss(const cuda& on, const L& loss, const P& policy, plane_view<const float> scores,
               const Sequences& sequences, plane_view<float> d_scores, LossValue* value,
               workspace_view workspace, std::uint32_t* status) {
    namespace cb = cuda_backend;
    checks::check_gate_scale(loss.scale);
    if constexpr (requires { loss.lambda; }) {
        detail::require(loss.lambda != nullptr || scores.heads == 0, "lambda", "null",
                        "an array by head in device memory");
    }
    cb::check_gate_loss(on, policy, scores, sequences, loss.layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    detail::require(value != nullptr, "value", "null", "device memory");
    const cb::device_scope device(on);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    using Params = decltype(cb::make_params(on, policy, scores, sequences, scores.heads, loss.layer,
                                            memory.small, status));
    if (memory.blocks > 0) {
        const Params params =
            cb::make_params(on, policy, scores, sequences, scores.heads, loss.layer, memory.small, status);
        using Gate = std::remove_cvref_t<decltype(params.gate)>;
        using Keep = std::remove_cvref_t<decltype(params.keep)>;
        cb::launch_gate_count(on, memory, &params, loss.scope);
        cb::launch("gate_loss_kernel", cb::gate_loss_kernel<L, Gate, Keep>, memory.blocks, cb::mask_chunk, 0,
                   on, params, loss, static_cast<const long long*>(memory.count), d_scores, memory.values);
    } else {
        cb::launch_gate_count(on, memory, static_cast<const Params*>(nullptr), loss.scope);
    }
    cb::launch("gate_value_kernel", cb::gate_value_kernel<LossValue>, 1, cb::gate_sum_threads, 0, on,
               static_cast<const double*>(memory.values), memory.blocks,
               static_cast<const long long*>(memory.count), L::mean_over_keys ? 0.0 : sequences.batch, value);
}

template <AnyPolicy P>
void compression_sums(const cuda& on, const CompressionLoss& loss, const P& policy,
                      plane_view<const float> scores, const Sequences& sequences, EvictionSums* sums,
                      workspace_view workspace, std::uint32_t* status) {
    namespace cb = cuda_backend;
    loss.gate.check();
    cb::check_gate_loss(on, policy, scores, sequences, loss.layer, workspace);
    detail::require(sums != nullptr, "sums", "null", "device memory");
    const cb::device_scope device(on);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    if (memory.blocks > 0) {
        const auto params =
            cb::make_params(on, policy, scores, sequences, scores.heads, loss.layer, memory.small, status);
        cb::launch_decisions(on, memory, &params, loss, true, sums);
    }
}

template <AnyPolicy P>
void compression_loss(const cuda& on, const CompressionLoss& loss, const P& policy,
                      plane_view<const float> scores, const Sequences& sequences, plane_view<float> d_scores,
                      LossValue* value, workspace_view workspace, const EvictionSums* total,
                      std::uint32_t* status) {
    namespace cb = cuda_backend;
    checks::check_gate_scale(loss.scale);
    detail::require(loss.target >= 0.0f && loss.target <= 1.0f, "CompressionLoss.target", loss.target,
                    "0 to 1");
    loss.gate.check();
    cb::check_gate_loss(on, policy, scores, sequences, loss.layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    detail::require(value != nullptr, "value", "null", "device memory");
    const cb::device_scope device(on);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    using Params = decltype(cb::make_params(on, policy, scores, sequences, scores.heads, loss.layer,
                                            memory.small, status));
    const EvictionSums* const all = total != nullptr || loss.total.keys != 0 ? total : memory.sums;
    if (memory.blocks > 0) {
        const Params params =
            cb::make_params(on, policy, scores, sequences, scores.heads, loss.layer, memory.small, status);
        using Gate = std::remove_cvref_t<decltype(params.gate)>;
        using Keep = std::remove_cvref_t<decltype(params.keep)>;
        cb::launch_decisions(on, memory, &params, loss, false, memory.sums);
        cb::launch("compression_kernel", cb::compression_kernel<Gate, Keep>, memory.blocks, cb::mask_chunk, 0,
                   on, params, loss, all, d_scores);
    } else {
        cb::launch_decisions(on, memory, static_cast<const Params*>(nullptr), loss, false, memory.sums);
    }
    cb::launch("compression_value_kernel", cb::compression_value_kernel<LossValue>, 1, 32, 0, on, loss, all,
               static_cast<const long long*>(memory.count), value);
}

template <AnyPolicy P, Storage T>
void straight_through_values(const cuda& on, const P& policy, plane_view<const float> scores,
                             rows_view<const T> v, std::type_identity_t<rows_view<const T>> d_v,
                             const Sequences& sequences, plane_view<float> d_scores, workspace_view workspace,
                             std::int32_t layer, std::uint32_t* status) {
    namespace cb = cuda_backend;
    cb::check_gate_loss(on, policy, scores, sequences, layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    checks::check_rows("v", v, sequences.batch, scores.heads, sequences.length, v.dim);
    checks::check_rows("d_v", d_v, sequences.batch, scores.heads, sequences.length, v.dim);
    const std::int64_t keys = std::int64_t{sequences.batch} * scores.heads * sequences.length;
    if (keys == 0) {
        return;
    }
    const cb::device_scope device(on);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    const auto params =
        cb::make_params(on, policy, scores, sequences, scores.heads, layer, memory.small, status);
    using Gate = std::remove_cvref_t<decltype(params.gate)>;
    using Keep = std::remove_cvref_t<decltype(params.keep)>;
    cb::launch("straight_through_kernel", cb::straight_through_kernel<T, Gate, Keep>, (keys + 7) / 8, 256, 0,
               on, params, v, d_v, d_scores);
}

template <AnyPolicy P>
void retention_counts(const cuda& on, const P& policy, plane_view<const float> scores,
                      const Sequences& sequences, double* counts, workspace_view workspace,
                      std::int32_t layer, std::uint32_t* status) {
    namespace cb = cuda_backend;
    cb::check_gate_loss(on, policy, scores, sequences, layer, workspace);
    detail::require(counts != nullptr || scores.heads == 0, "counts", "null", "device memory");
    const cb::device_scope device(on);
    cb::workspace_parts parts(workspace.data);
    const cb::gate_memory memory(sequences, scores.heads, parts);
    if (memory.blocks > 0) {
        const auto params =
            cb::make_params(on, policy, scores, sequences, scores.heads, layer, memory.small, status);
        using Gate = std::remove_cvref_t<decltype(params.gate)>;
        using Keep = std::remove_cvref_t<decltype(params.keep)>;
        cb::launch("gate_count_kernel", cb::gate_count_kernel<Gate, Keep>, memory.blocks, cb::mask_chunk, 0,
                   on, params, false, true, memory.shares);
    }
    cb::launch("retention_counts_kernel", cb::retention_counts_kernel<double>, scores.heads,
               cb::gate_sum_threads, 0, on, static_cast<const long long*>(memory.shares), memory.blocks,
               sequences.batch, counts);
}

template <class Controller>
requires std::is_same_v<Controller, LambdaController>
void controller_start(const cuda& on, const Controller& controller) {
    cuda_backend::launch_controller(on, controller, cuda_backend::controller_action::start, nullptr);
}
template <class Controller>
requires std::is_same_v<Controller, LambdaController>
void controller_observe(const cuda& on, const Controller& controller, const double* counts) {
    detail::require(counts != nullptr || controller.heads == 0, "counts", "null", "device memory");
    cuda_backend::launch_controller(on, controller, cuda_backend::controller_action::observe, counts);
}
template <class Controller>
requires std::is_same_v<Controller, LambdaController>
void controller_update(const cuda& on, const Controller& controller) {
    cuda_backend::launch_controller(on, controller, cuda_backend::controller_action::update, nullptr);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
