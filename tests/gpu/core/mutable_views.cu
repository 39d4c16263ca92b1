// As tests/unit/core/test_mutable_views.cpp, of the calls on a device: whether they take views of rows
// that may be written.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/cuda_attend_backward.cuh>
#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/losses/distill.hpp>
#include <kvpolicy/losses/dms.hpp>
#include <kvpolicy/losses/gates.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/masks/log_bias.hpp>
#include <kvpolicy/metrics/cuda_metrics.cuh>
#include <kvpolicy/metrics/density.hpp>
#include <kvpolicy/metrics/recall.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include <doctest/doctest.h>

#include <type_traits>

using namespace kvpolicy;

namespace {

using Budget = Policy<Sink<1>, Window<3>, TopKBudget<4>>;
using Gated = Policy<Sink<1>, Window<3>, ThresholdGate<at_least>>;

template <class Cache, class Rows, class Plane>
constexpr bool cache_takes = requires(const kvpolicy::cuda& ctx, Rows rows, Plane plane, rows_view<bf16> out,
                                      plane_view<float> written, workspace_view workspace,
                                      const typename Cache::ref_type& cache, const Batch& batch) {
    step(ctx, cache,
         StepIO<bf16>{.q = rows, .k = rows, .v = rows, .out = out, .batch = batch, .scores = plane},
         workspace);
    prefill(ctx, cache,
            StepIO<bf16>{.q = rows, .k = rows, .v = rows, .out = out, .batch = batch, .scores = plane},
            workspace);
    append_draft(ctx, cache,
                 StepIO<bf16>{.q = rows, .k = rows, .v = rows, .out = out, .batch = batch, .scores = plane},
                 workspace);
    attend(ctx, cache, StepIO<bf16>{.q = rows, .out = out, .batch = batch, .lse = written}, workspace);
};

/// Whether every public call on a device that reads rows or planes takes these.
template <class Rows, class Plane, class Words>
constexpr bool takes = requires(const kvpolicy::cuda& ctx, const AttentionParams& attention, Rows rows,
                                Plane plane, Words words, const Sequences& sequences, rows_view<bf16> out,
                                plane_view<float> written, plane_view<std::int32_t> integers,
                                workspace_view workspace, double* doubles, Recall* recalls, LossValue* value,
                                BoundaryValue* boundary, EvictionSums* sums, const Budget& budget,
                                const Gated& gated, const LinearScorer<8>& linear,
                                LinearParameters<float> linear_gradients, rows_view<std::int32_t> indices) {
    attend_workspace_bytes(ctx, attention, rows, kv_view{rows, rows}, sequences);
    attend(ctx, attention, rows, kv_view{rows, rows, mask_view{words, plane}}, sequences, out, written,
           workspace);
    attend_backward_workspace_bytes(ctx, attention, rows, kv_view{rows, rows}, sequences);
    attend_backward(ctx, attention, rows, kv_view{rows, rows}, sequences, SavedForward{rows, plane, rows},
                    AttentionGrads<bf16>{out, out, out}, workspace);
    future_mass_workspace_bytes(ctx, rows, rows);
    causal_lse(ctx, attention, rows, rows, sequences, written, workspace);
    future_mass(ctx, attention, rows, rows, plane, sequences, written, workspace, FutureMassOptions{});
    build_mask(ctx, budget, plane, sequences, integers, workspace);
    build_cutoffs(ctx, budget, plane, sequences, integers, integers, workspace);
    expiry_from_cutoffs(ctx, budget, words, words, sequences, integers, workspace);
    build_log_bias(ctx, gated, SoftGate{}, plane, sequences, integers, written, workspace);
    log_bias_backward(ctx, gated, SoftGate{}, plane, plane, sequences, written, workspace);
    BoundaryLoss{}(ctx, budget, plane, plane, sequences, written, doubles, boundary, workspace);
    top_logits(ctx, rows, sequences, out, indices, {});
    TopDistillation{}.workspace_bytes(ctx, rows, sequences);
    TopDistillation{}(ctx, rows, rows, sequences, out, value, workspace);
    TopDistillation{}(ctx, rows, indices, rows, sequences, out, value, workspace);
    CrossEntropy{}(ctx, words, rows, sequences, out, value, workspace);
    L2Distillation{}(ctx, rows, rows, sequences, out, value, workspace);
    GateSparsity{}(ctx, gated, plane, sequences, written, value, workspace);
    straight_through_values(ctx, gated, plane, rows, rows, sequences, written, workspace);
    retention_counts(ctx, gated, plane, sequences, doubles, workspace);
    CompressionLoss{}.sums(ctx, gated, plane, sequences, sums, workspace);
    CompressionLoss{}(ctx, gated, plane, sequences, written, value, workspace);
    live_keys(ctx, words, sequences, integers);
    density(ctx, words, sequences, doubles);
    evict_ratio(ctx, budget, words, sequences, doubles);
    oracle_recall_workspace_bytes(ctx, words, sequences);
    oracle_recall(ctx, budget, words, words, sequences, recalls, workspace);
    score_sequence_workspace_bytes(ctx, linear, rows, rows, sequences);
    score_sequence(ctx, linear, rows, rows, sequences, 0, written, workspace);
    score_sequence_backward(ctx, linear, ScoreBackward{rows, rows, sequences, 0, plane}, linear_gradients,
                            workspace);
    requires cache_takes<FixedBudgetCache<Budget, bf16>, Rows, Plane>;
    requires cache_takes<DualCache<Gated, bf16>, Rows, Plane>;
};
static_assert(takes<rows_view<const bf16>, plane_view<const float>, plane_view<const std::int32_t>>);
static_assert(takes<rows_view<bf16>, plane_view<float>, plane_view<std::int32_t>>);
// As they are compiled for head_dims that are named.
static_assert(requires(const kvpolicy::cuda& ctx, rows_view<bf16> may, rows_view<const bf16> may_not,
                       plane_view<float> plane, const Sequences& sequences, workspace_view workspace) {
    causal_lse<bf16, head_dims<64>>(ctx, {}, may, may_not, sequences, plane, workspace);
    causal_lse<bf16, head_dims<64>>(ctx, {}, may_not, may, sequences, plane, workspace);
    future_mass<bf16, head_dims<64>>(ctx, {}, may, may, plane, sequences, plane, workspace);
});

}  // namespace

TEST_CASE("compiled") {}
