// Losses and gradients of learned gates: WG-KV's sparsity, SP-KV's density, LTE's penalty, straight-through
// values and lambda controller. Scores are raw logits z; u = g = r = sigmoid(z).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/losses/concept.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/window.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// Which keys a gate's loss, straight-through gradient or count is about. A key without a score (-infinity:
/// score_sequence(ConvScorer)) has r = 0: it adds 0 to a penalty and to a count, and its gradient is 0.
enum class gate_scope : std::uint8_t {
    decided,  ///< keys whose gate is asked: out of the window before the end, no sink, not kept by position
    all,      ///< every key, as the papers' sums have it; a gate that is not asked gets a gradient too
};

/// The term of one key in a gate loss, and its slope in the key's logit.
struct GateTerm {
    double value, slope;
};

/// WG-KV's sparsity term (3.3): scale (g + g (1 - g)); the loss is its mean over heads and keys.
struct SparsityTerm {
    static constexpr bool mean_over_keys = true;
    KVPOLICY_HOST_DEVICE GateTerm operator()(double scale, std::int32_t head, double z) const;
};

/// SP-KV's density regularizer (eq. 13): -scale u, as the paper has the sign: minimizing its mean over heads
/// and keys raises density. A negative scale lowers it.
struct DensityTerm {
    static constexpr bool mean_over_keys = true;
    KVPOLICY_HOST_DEVICE GateTerm operator()(double scale, std::int32_t head, double z) const;
};

/// LTE's penalty (eq. 7): scale lambda_h relu(r - 0.5); the loss is its sum over heads and keys, averaged
/// over sequences.
struct RetentionTerm {
    static constexpr bool mean_over_keys = false;
    /// [Hkv], as the controller has them; on CUDA device memory, read when the work runs.
    const float* lambda = nullptr;
    KVPOLICY_HOST_DEVICE GateTerm operator()(double scale, std::int32_t head, double z) const;
};

/// A loss on gates that adds up a term per key: over the keys of all heads and sequences, divided by the
/// number of keys where Term::mean_over_keys, else by the number of sequences.
template <class Term>
struct BasicGateLoss {
    float scale = 1.0f;  ///< lambda or lambda_aux, over the number of layers
    gate_scope scope = gate_scope::all;
    std::int32_t layer = 0;  ///< the layer whose rules hold
    Term term{};

    /// Bytes of workspace for a call with these sequences and `heads` KV heads: none on the host.
    template <AnyPolicy P>
    [[nodiscard]] std::size_t workspace_bytes(const host& ctx, const P& policy, const Sequences& sequences,
                                              std::int32_t heads) const;

    /// scores and d_scores [B, Hkv, S]; overwrites d_scores for the sequences' lengths, and *value. A NaN
    /// score that is read adds 0, has gradient 0 and sets status_nan_score in options.status; without a
    /// status the host refuses it, before anything is written. On CUDA: tensors, *value, status and the
    /// arrays of `sequences` are device memory, scores fp32; value and gradients are the host's to rounding,
    /// the same bits in every run.
    template <AnyPolicy P, class Real>
    void operator()(const host& ctx, const P& policy, input_plane<Real> scores, const Sequences& sequences,
                    plane_view<Real> d_scores, LossValue* value, workspace_view workspace,
                    const LossOptions& options = {}) const;

#if defined(__CUDACC__)
    template <AnyPolicy P, class Build = cuda_build>
    [[nodiscard]] std::size_t workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                              std::int32_t heads) const;
    template <AnyPolicy P, class Real, class Build = cuda_build>
    void operator()(const cuda& ctx, const P& policy, input_plane<Real> scores, const Sequences& sequences,
                    plane_view<Real> d_scores, LossValue* value, workspace_view workspace,
                    const LossOptions& options = {}) const;
#endif
};

using GateSparsity = BasicGateLoss<SparsityTerm>;
using GateDensity = BasicGateLoss<DensityTerm>;
using RetentionPenalty = BasicGateLoss<RetentionTerm>;

/// Options of straight_through_values and retention_counts.
struct GateOptions {
    std::int32_t layer = 0;              ///< the layer whose rules hold
    gate_scope scope = gate_scope::all;  ///< the penalty's, so that all three are about the same keys
    /// [B], OR-ed into: status_bad_length, for a length that then counts as 0; status_nan_score, for a NaN
    /// score that is read; status_not_finite, for a sum <v_t, dv_t> that is NaN or infinite. Null: not
    /// wanted; the host then refuses all three (retention_counts: lengths alone).
    std::uint32_t* status = nullptr;
};

/// Bytes of workspace that straight_through_values needs for `heads` KV heads: none on the host.
template <AnyPolicy P>
std::size_t straight_through_values_workspace_bytes(const host& ctx, const P& policy,
                                                    const Sequences& sequences, std::int32_t heads);

/// LTE's straight-through gradient (eq. 6): d r[t] = <v_t, dv_t>, times r (1 - r) for the logit. v and d_v
/// [B, Hkv, S, Dv] (from attend_backward); overwrites d_scores [B, Hkv, S] for the sequences' lengths, with 0
/// for keys outside options.scope and for a NaN score. Refuses, where there is no status: a NaN score, and a
/// NaN or infinity in v or d_v, at a key in the scope.
template <AnyPolicy P, class V>
void straight_through_values(const host& ctx, const P& policy, input_plane<real_of<V>> scores, rows_view<V> v,
                             input_rows<V> d_v, const Sequences& sequences, plane_view<real_of<V>> d_scores,
                             workspace_view workspace, const GateOptions& options = {});

/// Bytes of workspace that retention_counts needs for `heads` KV heads: none on the host.
template <AnyPolicy P>
std::size_t retention_counts_workspace_bytes(const host& ctx, const P& policy, const Sequences& sequences,
                                             std::int32_t heads);

/// LTE's c_h (3.1.2): counts[h] = how many keys of head h are retained, mean over sequences. A key is
/// retained if r > 0.5 (z > 0), and a sink or a key kept by position whatever its r (eq. 5), as the cap b of
/// LTE<s, w, b> counts them. gate_scope::all counts over every key, as the paper's sum does;
/// gate_scope::decided over the keys out of the window before the end, which are those that a cache holds
/// beside its window. Overwrites counts [Hkv]. A NaN score is not above 0, and sets status_nan_score; scores
/// of keys kept by position are not read.
template <AnyPolicy P, class Real>
void retention_counts(const host& ctx, const P& policy, plane_view<Real> scores, const Sequences& sequences,
                      double* counts, workspace_view workspace, const GateOptions& options = {});

/// LTE's controller of lambda by head (algorithm 1): arrays are the caller's, `heads` of them over all
/// layers. Each step observe(ctx, counts); where due(step), after the caller has averaged `average` over its
/// devices, update(ctx).
///
///     c <- (1 - a) c + a count,  a = 2 / (1 + every / 2)         (the paper's line 6 has the weights the
///         other way round)
///     lambda <- min(lambda factor^s, 1),  s = [c > cap] - [c < slack cap];  below `least` it becomes 0;
///     0 becomes `least` again where c > cap
///
/// fp32 rounds lambda at each step, so a weight within 2^-12 of `least` (less than half a step) is `least`.
struct LambdaController {
    std::int32_t heads = 0;
    float* lambda = nullptr;    ///< [heads]; start() fills it
    double* average = nullptr;  ///< [heads]: c; negative until the first observation, which it starts from
    double cap = 512.0;         ///< b in keys, sinks included: that of LTE<s, w, b>
    double slack = 0.95;
    float factor = 1.2f;  ///< the paper leaves its alpha open
    float least = 1e-9f;
    std::int32_t every = 32;  ///< u, steps from update to update

    void start(const host& ctx) const;
    void observe(const host& ctx, const double* counts) const;
    [[nodiscard]] bool due(std::int64_t step) const;
    void update(const host& ctx) const;
    void check() const;

#if defined(__CUDACC__)
    // With lambda, average and counts in device memory, so that the penalty's weights never leave the device.
    // A negative count is taken as it is.
    template <class Build = cuda_build>
    void start(const cuda& ctx) const;
    template <class Build = cuda_build>
    void observe(const cuda& ctx, const double* counts) const;
    template <class Build = cuda_build>
    void update(const cuda& ctx) const;
#endif

    // One head of these; a device runs the same code.
    KVPOLICY_HOST_DEVICE void start_head(std::int32_t head) const;
    KVPOLICY_HOST_DEVICE void observe_head(std::int32_t head, double count) const;
    KVPOLICY_HOST_DEVICE void update_head(std::int32_t head) const;
};

}  // namespace kvpolicy

#include <kvpolicy/losses/host/host_gates.hpp>

namespace kvpolicy {
static_assert(GateLoss<GateSparsity, Policy<Window<8>>> && GateLoss<GateDensity, Policy<Window<8>>>);
static_assert(GateLoss<RetentionPenalty, Policy<Window<8>>>);
}  // namespace kvpolicy
#if defined(__CUDACC__)
#include <kvpolicy/losses/cuda_gates.cuh>
#endif
