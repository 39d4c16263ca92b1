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
#include <utility>

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
void check_gate_call(const P& policy, plane_view<const float> scores, const Sequences& sequences,
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

/// A checked call on its device: its arrays in workspace, and what kernels of a thread per key take.
template <class P>
class gate_plan {
  public:
    using Gate = typename P::gate_type;
    using Keep = decltype(std::declval<const P&>().keep());

    gate_plan(const cuda& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
              std::int32_t layer, workspace_view workspace, std::uint32_t* status)
        : ctx_(ctx), device_(ctx), parts_(workspace.data), memory_(sequences, scores.heads, parts_) {
        if (memory_.blocks > 0) {
            params_ = make_params(ctx, policy, scores, sequences, scores.heads, layer, memory_.small, status);
        }
    }

    /// Enqueues a kernel of a thread per key, where there is any key.
    template <class... Parameters, class... Arguments>
    void launch_keys(const char* name, void (*kernel)(mask_params<Gate, Keep>, Parameters...),
                     const Arguments&... arguments) const {
        launch(name, kernel, memory_.blocks, mask_chunk, 0, ctx_, params_, arguments...);
    }

    /// Enqueues the count of keys that a loss is about, to *memory().count.
    void count_keys(gate_scope scope) const {
        launch_keys("gate_count_kernel", gate_count_kernel<Gate, Keep>, scope == gate_scope::all,
                    memory_.shares);
        launch("gate_total_kernel", gate_total_kernel<long long>, 1, gate_sum_threads, 0, ctx_,
               static_cast<const long long*>(memory_.shares), memory_.blocks, memory_.count);
    }

    /// Adds the call's decisions to *sums, or writes them there.
    void sum_decisions(const CompressionLoss& loss, bool add, EvictionSums* sums) const {
        count_keys(loss.scope);
        launch_keys("decisions_kernel", decisions_kernel<Gate, Keep>, loss, memory_.values);
        launch("decisions_total_kernel", decisions_total_kernel<EvictionSums>, 1, gate_sum_threads, 0, ctx_,
               static_cast<const double*>(memory_.values), memory_.blocks,
               static_cast<const long long*>(memory_.count), add, sums);
    }

    [[nodiscard]] const gate_memory& memory() const { return memory_; }
    [[nodiscard]] const mask_params<Gate, Keep>& params() const { return params_; }

  private:
    const cuda& ctx_;
    device_scope device_;
    workspace_parts parts_;
    gate_memory memory_;
    mask_params<Gate, Keep> params_{};
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <class Term>
template <AnyPolicy P, class Build>
std::size_t BasicGateLoss<Term>::workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                                 std::int32_t heads) const {
    return cuda_backend::gate_workspace_bytes(sequences, heads);
}
template <class Term>
template <AnyPolicy P, class Real, class Build>
void BasicGateLoss<Term>::operator()(const cuda& ctx, const P& policy, input_plane<Real> scores,
                                     const Sequences& sequences, plane_view<Real> d_scores, LossValue* value,
                                     workspace_view workspace, const LossOptions& options) const {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    checks::check_gate_loss(*this, scores.heads);
    cb::check_gate_call(policy, scores, sequences, layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    checks::check_value(value);
    using Plan = cb::gate_plan<P>;
    const Plan plan(ctx, policy, scores, sequences, layer, workspace, options.status);
    const cb::gate_memory& memory = plan.memory();
    const long long* const count = memory.count;
    plan.count_keys(scope);
    plan.launch_keys("gate_loss_kernel",
                     cb::gate_loss_kernel<BasicGateLoss, typename Plan::Gate, typename Plan::Keep>, *this,
                     count, d_scores, memory.values);
    cb::launch("gate_value_kernel", cb::gate_value_kernel<LossValue>, 1, cb::gate_sum_threads, 0, ctx,
               static_cast<const double*>(memory.values), memory.blocks, count,
               Term::mean_over_keys ? 0.0 : sequences.batch, value);
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
    gate.check();
    cb::check_gate_call(policy, scores, sequences, layer, workspace);
    detail::require(sums != nullptr, "sums", "null", "device memory");
    const cb::gate_plan<P> plan(ctx, policy, scores, sequences, layer, workspace, options.status);
    if (plan.memory().blocks > 0) {
        plan.sum_decisions(*this, true, sums);
    }
}

template <AnyPolicy P, class Real, class Build>
void CompressionLoss::operator()(const cuda& ctx, const P& policy, input_plane<Real> scores,
                                 const Sequences& sequences, plane_view<Real> d_scores, LossValue* value,
                                 workspace_view workspace, const CompressionOptions& options) const {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    checks::check_gate_scale(scale);
    detail::require(target >= 0.0f && target <= 1.0f, "CompressionLoss.target", target, "0 to 1");
    gate.check();
    cb::check_gate_call(policy, scores, sequences, layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    checks::check_value(value);
    using Plan = cb::gate_plan<P>;
    const Plan plan(ctx, policy, scores, sequences, layer, workspace, options.status);
    plan.sum_decisions(*this, false, plan.memory().sums);
    const EvictionSums* const all =
        options.total != nullptr || total.keys != 0 ? options.total : plan.memory().sums;
    plan.launch_keys("compression_kernel", cb::compression_kernel<typename Plan::Gate, typename Plan::Keep>,
                     *this, all, d_scores);
    cb::launch("compression_value_kernel", cb::compression_value_kernel<LossValue>, 1, 32, 0, ctx, *this, all,
               static_cast<const long long*>(plan.memory().count), value);
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
void straight_through_values(const cuda& ctx, const P& policy, input_plane<real_of<V>> scores,
                             rows_view<V> given_v, input_rows<V> d_v, const Sequences& sequences,
                             plane_view<real_of<V>> d_scores, workspace_view workspace,
                             const GateOptions& options) {
    namespace cb = cuda_backend;
    using T = std::remove_const_t<V>;
    static_assert(!std::is_same_v<T, double>, "kvpolicy: values on CUDA are fp32, bf16 or fp16");
    const rows_view<const T> v = given_v;
    cb::check_gate_call(policy, scores, sequences, options.layer, workspace);
    cb::check_plane("d_scores", d_scores, sequences.batch, scores.heads, sequences.length);
    checks::check_rows("v", v, sequences.batch, scores.heads, sequences.length, v.dim);
    checks::check_rows("d_v", d_v, sequences.batch, scores.heads, sequences.length, v.dim);
    const std::int64_t keys = std::int64_t{sequences.batch} * scores.heads * sequences.length;
    if (keys == 0) {
        return;
    }
    using Plan = cb::gate_plan<P>;
    const Plan plan(ctx, policy, scores, sequences, options.layer, workspace, options.status);
    cb::launch("straight_through_kernel",
               cb::straight_through_kernel<T, typename Plan::Gate, typename Plan::Keep>, (keys + 7) / 8, 256,
               0, ctx, plan.params(), options.scope == gate_scope::all, v, d_v, d_scores);
}

template <AnyPolicy P, class Real>
void retention_counts(const cuda& ctx, const P& policy, plane_view<Real> scores, const Sequences& sequences,
                      double* counts, workspace_view workspace, const GateOptions& options) {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<std::remove_const_t<Real>, float>, "kvpolicy: scores on CUDA are fp32");
    cb::check_gate_call(policy, scores, sequences, options.layer, workspace);
    detail::require(counts != nullptr || scores.heads == 0, "counts", "null", "device memory");
    using Plan = cb::gate_plan<P>;
    const Plan plan(ctx, policy, scores, sequences, options.layer, workspace, options.status);
    plan.launch_keys("retained_count_kernel",
                     cb::retained_count_kernel<typename Plan::Gate, typename Plan::Keep>,
                     options.scope == gate_scope::all, plan.memory().shares);
    cb::launch("retention_counts_kernel", cb::retention_counts_kernel<double>, scores.heads,
               cb::gate_sum_threads, 0, ctx, static_cast<const long long*>(plan.memory().shares),
               plan.memory().blocks, sequences.batch, counts);
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
