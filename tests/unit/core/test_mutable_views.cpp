// Calls read views of rows that may be written as they read others: results of the model's last layer go into
// the next call as they are.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/attention/observed_mask.hpp>
#include <kvpolicy/attention/received_mass.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/losses/distill.hpp>
#include <kvpolicy/losses/dms.hpp>
#include <kvpolicy/losses/gates.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/masks/log_bias.hpp>
#include <kvpolicy/metrics/density.hpp>
#include <kvpolicy/metrics/recall.hpp>
#include <kvpolicy/metrics/retention.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/hidden.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "support/cases.hpp"
#include "support/normal.hpp"

#include <doctest/doctest.h>

#include <random>
#include <type_traits>
#include <vector>

using namespace kvpolicy;

namespace {

using Budget = Policy<Sink<1>, Window<3>, TopKBudget<4>>;
using Gated = Policy<Sink<1>, Window<3>, ThresholdGate<at_least>>;
using Observed = H2O<4, 3>;
using Cache = FixedBudgetCache<Budget, float>;

/// Whether every public call that reads rows or planes takes `Rows` and `Plane`, of const numbers or not.
template <class Rows, class Plane, class Words>
constexpr bool takes = requires(const host& ctx, const AttentionParams& attention, Rows rows, Plane plane,
                                Words words, const Sequences& sequences, rows_view<float> out,
                                plane_view<float> written, plane_view<std::int32_t> integers,
                                workspace_view workspace, double* doubles, Recall* recalls,
                                const Budget& budget, const Gated& gated, const Observed& observed,
                                const Cache::ref_type& cache, const Batch& batch,
                                const LinearScorer<8>& linear, const UtilityPredictor& predictor,
                                LinearParameters<float> linear_gradients, rows_view<std::int32_t> indices,
                                BoundaryValue* boundary, LossValue* value, EvictionSums* sums) {
    attend_workspace_bytes(ctx, attention, rows, kv_view{rows, rows}, sequences);
    attend(ctx, attention, rows, kv_view{rows, rows, mask_view{words, plane}}, sequences, out, written,
           workspace);
    attend_backward(ctx, attention, rows, kv_view{rows, rows}, sequences, SavedForward{rows, plane, rows},
                    AttentionGrads<float>{out, out, out}, workspace);
    future_mass_workspace_bytes(ctx, rows, rows);
    causal_lse(ctx, attention, rows, rows, sequences, written, workspace);
    future_mass(ctx, attention, rows, rows, plane, sequences, written, workspace, FutureMassOptions{});
    received_mass_workspace_bytes(ctx, rows, rows);
    received_mass(ctx, attention, rows, rows, mask_view{words}, sequences, written, workspace,
                  ReceivedMassOptions{});
    build_mask(ctx, budget, plane, sequences, integers, workspace);
    build_cutoffs(ctx, budget, plane, sequences, integers, integers, workspace);
    expiry_from_cutoffs(ctx, budget, words, words, sequences, integers, {});
    build_observed_mask_workspace_bytes(ctx, observed, rows, rows);
    build_observed_mask(ctx, observed, attention, rows, rows, sequences, integers, workspace);
    build_log_bias(ctx, gated, SoftGate{}, plane, sequences, integers, written, {});
    log_bias_backward(ctx, gated, SoftGate{}, plane, plane, sequences, written, {});
    BoundaryLoss{}(ctx, budget, plane, plane, sequences, written, doubles, boundary, workspace);
    TopDistillation{}.workspace_bytes(ctx, rows, sequences);
    TopDistillation{}(ctx, rows, rows, sequences, out, value, workspace);
    TopDistillation{}(ctx, rows, indices, rows, sequences, out, value, {});
    CrossEntropy{}(ctx, words, rows, sequences, out, value, {});
    L2Distillation{}(ctx, rows, rows, sequences, out, value, {});
    GateSparsity{}(ctx, gated, plane, sequences, written, value, {});
    GateDensity{}(ctx, gated, plane, sequences, written, value, {});
    RetentionPenalty{}(ctx, gated, plane, sequences, written, value, {});
    straight_through_values(ctx, gated, plane, rows, rows, sequences, written, {});
    retention_counts(ctx, gated, plane, sequences, doubles, {});
    CompressionLoss{}.sums(ctx, gated, plane, sequences, sums, {});
    CompressionLoss{}(ctx, gated, plane, sequences, written, value, {});
    live_keys(ctx, words, sequences, integers);
    density(ctx, words, sequences, doubles);
    evict_ratio(ctx, budget, words, sequences, doubles);
    oracle_recall_workspace_bytes(ctx, words, sequences);
    oracle_recall(ctx, budget, words, words, sequences, recalls, workspace);
    score_sequence_workspace_bytes(ctx, linear, rows, rows, sequences);
    score_sequence(ctx, linear, rows, rows, sequences, 0, written, workspace);
    score_sequence_backward(ctx, linear, ScoreBackward{rows, rows, sequences, 0, plane}, linear_gradients,
                            workspace);
    score_hidden(ctx, predictor, rows, sequences, written, workspace);
    step(ctx, cache, {.q = rows, .k = rows, .v = rows, .out = out, .batch = batch, .scores = plane},
         workspace);
    prefill(ctx, cache, {.q = rows, .k = rows, .v = rows, .out = out, .batch = batch, .scores = plane},
            workspace);
    append(ctx, cache, {.k = rows, .v = rows, .batch = batch, .scores = plane}, workspace);
    append_chunk(ctx, cache, {.k = rows, .v = rows, .batch = batch, .scores = plane}, workspace);
    append_draft(ctx, cache, {.q = rows, .k = rows, .v = rows, .out = out, .batch = batch, .scores = plane},
                 workspace);
    attend(ctx, cache, {.q = rows, .out = out, .batch = batch, .lse = written}, workspace);
};
static_assert(takes<rows_view<const float>, plane_view<const float>, plane_view<const std::int32_t>>);
static_assert(takes<rows_view<float>, plane_view<float>, plane_view<std::int32_t>>);
// Some of which may be written, some not.
static_assert(
    std::is_same_v<decltype(kv_view{rows_view<float>{}, rows_view<const float>{}}), kv_view<float>>);
static_assert(
    std::is_same_v<decltype(kv_view{rows_view<const float>{}, rows_view<float>{}}), kv_view<float>>);
static_assert(requires(const host& ctx, rows_view<float> may, rows_view<const float> may_not,
                       const Sequences& sequences, plane_view<float> written, workspace_view workspace) {
    causal_lse(ctx, {}, may, may_not, sequences, written, workspace);
    causal_lse(ctx, {}, may_not, may, sequences, written, workspace);
    causal_lse<float>(ctx, {}, may, may, sequences, written, workspace);
});

/// Both write the same.
template <class Call>
void same(const Call& call) {
    std::vector<double> wanted, got;
    call(true, wanted);
    call(false, got);
    CHECK(!wanted.empty());
    CHECK(got == wanted);
}

}  // namespace

TEST_CASE("what may be written is read like the rest") {
    constexpr std::int32_t batch = 2, heads = 2, length = 20, dim = 8;
    const host ctx(1);
    std::mt19937 generator(3);
    test::Tensor<float> q(batch, 2 * heads, length, dim), k(batch, heads, length, dim),
        v(batch, heads, length, dim);
    test::Plane<float> scores(batch, heads, length);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    for (float& x : scores.data) {
        x = test::Normal<float>{}(generator);
    }
    const Sequences sequences{batch, length};
    const auto constant = [](auto view) {
        if constexpr (requires { view.dim; }) {
            return input_rows<std::remove_const_t<std::remove_pointer_t<decltype(view.data)>>>(view);
        } else {
            return plane_view<const float>(view);
        }
    };
    const auto add = [](std::vector<double>& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
    };
    const auto rows = [&](test::Tensor<float>& of) {
        return view_bhsd(of.data.data(), of.batch, of.heads, of.length, of.dim);
    };
    const auto plane = [&](test::Plane<float>& of) {
        return view_bhs(of.data.data(), batch, of.heads, length);
    };
    const auto by = [&](bool first, const auto& call) {
        if (first) {
            call(constant(rows(q)), constant(rows(k)), constant(rows(v)), constant(plane(scores)));
        } else {
            call(rows(q), rows(k), rows(v), plane(scores));
        }
    };
    test::Plane<float> lse(batch, 2 * heads, length);
    const auto checked = [&](const auto& call) {
        same([&](bool first, std::vector<double>& results) {
            by(first, [&](auto... views) { call(results, views...); });
        });
    };
    checked([&](auto& to, auto a, auto b, auto, auto) {
        test::Workspace scratch(future_mass_workspace_bytes(ctx, a, b));
        causal_lse(ctx, {}, a, b, sequences, lse.view(), scratch);
        add(to, lse.data);
        test::Plane<float> target(batch, heads, length);
        future_mass(ctx, {}, a, b, lse.view(), sequences, target.view(), scratch, {.window = 3});
        add(to, target.data);
    });
    checked([&](auto& to, auto a, auto b, auto, auto) {
        test::Workspace scratch(received_mass_workspace_bytes(ctx, a, b));
        test::Plane<float> received(batch, heads, length);
        received_mass(ctx, {}, a, b, {}, sequences, received.view(), scratch);
        add(to, received.data);
    });
    checked([&](auto& to, auto a, auto b, auto, auto) {
        const Observed policy{};
        test::Workspace scratch(build_observed_mask_workspace_bytes(ctx, policy, a, b));
        test::Plane<expiry_t> expiry(batch, heads, length);
        build_observed_mask(ctx, policy, {}, a, b, sequences, expiry.view(), scratch);
        add(to, expiry.data);
    });
    const Gated gated{{}, {}, ThresholdGate<at_least>{0.0f}};
    checked([&](auto& to, auto, auto b, auto c, auto z) {
        test::Plane<expiry_t> expiry(batch, heads, length);
        test::Plane<float> bias(batch, heads, length), slope(batch, heads, length);
        build_log_bias(ctx, gated, SoftGate{}, z, sequences, expiry.view(), bias.view(), {});
        log_bias_backward(ctx, gated, SoftGate{}, z, z, sequences, slope.view(), {});
        add(to, expiry.data);
        add(to, bias.data);
        add(to, slope.data);
        straight_through_values(ctx, gated, z, b, c, sequences, slope.view(), {});
        add(to, slope.data);
        std::vector<double> counts(heads);
        retention_counts(ctx, gated, z, sequences, counts.data(), {});
        add(to, counts);
        EvictionSums sums;
        CompressionLoss{}.sums(ctx, gated, z, sequences, &sums, {});
        to.push_back(sums.evicted);
        to.push_back(static_cast<double>(sums.keys));
    });
}
