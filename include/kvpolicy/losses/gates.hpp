// Losses and gradients of learned gates: WG-KV's sparsity, SP-KV's density, LTE's penalty, straight-through values and
// lambda controller. Scores are raw logits z; u = g = r = sigmoid(z).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/losses/concept.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/window.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// Which keys a gate loss is about.
enum class gate_scope : std::uint8_t {
    decided,  ///< keys whose gate is asked: out of the window before the end, no sink, not kept by position
    all,      ///< every key, as the papers' sums have it; a gate that nobody asks gets a gradient too
};

/// What one key adds to a gate loss, and the slope of that for its logit.
struct GateTerm {
    double value, slope;
};

/// WG-KV's sparsity term (3.3): scale * mean over heads and keys of g + g (1 - g).
struct GateSparsity {
    float scale = 1.0f;  ///< lambda, over the number of layers
    gate_scope scope = gate_scope::all;
    std::int32_t layer = 0;

    static constexpr bool mean_over_keys = true;
    [[nodiscard]] KVPOLICY_HOST_DEVICE GateTerm term(std::int32_t head, double z) const;

    /// scores and d_scores [B, Hkv, S]; overwrites d_scores for the sequences' lengths. Refuses a NaN score that is read.
    template <AnyPolicy P, class Real>
    LossValue operator()(const host& on, const P& policy, std::type_identity_t<plane_view<const Real>> scores,
                         const Sequences& sequences, plane_view<Real> d_scores) const;
};

/// SP-KV's density regularizer (eq. 13): -scale * mean of u, as the paper has the sign: minimizing it raises density. A
/// negative scale lowers it.
struct GateDensity {
    float scale = 1.0f;  ///< lambda_aux, over the number of layers
    gate_scope scope = gate_scope::all;
    std::int32_t layer = 0;

    static constexpr bool mean_over_keys = true;
    [[nodiscard]] KVPOLICY_HOST_DEVICE GateTerm term(std::int32_t head, double z) const;

    template <AnyPolicy P, class Real>
    LossValue operator()(const host& on, const P& policy, std::type_identity_t<plane_view<const Real>> scores,
                         const Sequences& sequences, plane_view<Real> d_scores) const;
};

/// LTE's penalty (eq. 7): sum over heads of lambda_h times the sum over keys of relu(r - 0.5), averaged over sequences.
struct RetentionPenalty {
    const float* lambda = nullptr;  ///< [Hkv], as the controller has them
    float scale = 1.0f;
    gate_scope scope = gate_scope::all;
    std::int32_t layer = 0;

    static constexpr bool mean_over_keys = false;  // over sequences
    [[nodiscard]] KVPOLICY_HOST_DEVICE GateTerm term(std::int32_t head, double z) const;

    template <AnyPolicy P, class Real>
    LossValue operator()(const host& on, const P& policy, std::type_identity_t<plane_view<const Real>> scores,
                         const Sequences& sequences, plane_view<Real> d_scores) const;
};

/// LTE's straight-through gradient (eq. 6): d r[t] = <v_t, dv_t>, times r (1 - r) for the logit. v and d_v [B, Hkv, S, Dv]
/// (what attend_backward gives); overwrites d_scores [B, Hkv, S] for the sequences' lengths, with 0 for keys whose gate
/// is not asked (gate_scope::decided). Refuses a NaN in v or d_v at a key that counts.
template <AnyPolicy P, Storage T>
void straight_through_values(const host& on, const P& policy,
                             std::type_identity_t<plane_view<const compute_t<T>>> scores,
                             rows_view<const T> v, input_rows<T> d_v, const Sequences& sequences,
                             plane_view<compute_t<T>> d_scores, std::int32_t layer = 0);

/// The same of values that may be written.
template <AnyPolicy P, Storage T>
void straight_through_values(const host& on, const P& policy,
                             std::type_identity_t<plane_view<const compute_t<T>>> scores, rows_view<T> v,
                             input_rows<T> d_v, const Sequences& sequences, plane_view<compute_t<T>> d_scores,
                             std::int32_t layer = 0) {
    straight_through_values(on, policy, scores, input_rows<T>(v), d_v, sequences, d_scores, layer);
}

/// counts[h] = how many keys of head h are out of the window, no sinks, and have r > 0.5 (z > 0): mean over sequences.
/// Overwrites counts [Hkv].
template <AnyPolicy P, class Real>
void retention_counts(const host& on, const P& policy, plane_view<const Real> scores,
                      const Sequences& sequences, double* counts, std::int32_t layer = 0);
/// The same of scores that may be written.
template <AnyPolicy P, class Real>
requires(!std::is_const_v<Real>) void retention_counts(const host& on, const P& policy,
                                                       plane_view<Real> scores, const Sequences& sequences,
                                                       double* counts, std::int32_t layer = 0) {
    retention_counts(on, policy, plane_view<const Real>(scores), sequences, counts, layer);
}

/// LTE's controller of lambda by head (algorithm 1): arrays are the caller's, `heads` of them over all layers. Each step
/// observe(counts); where due(step), after the caller has averaged `average` over its devices, update().
///
///     c <- (1 - a) c + a count,  a = 2 / (1 + every / 2)         (the paper's line 6 has the weights the other way round)
///     lambda <- min(lambda factor^s, 1),  s = [c > cap] - [c < slack cap];  below `least` it becomes 0;
///     0 becomes `least` again where c > cap
struct LambdaController {
    std::int32_t heads = 0;
    float* lambda = nullptr;    ///< [heads]; start() fills it
    double* average = nullptr;  ///< [heads]: c; negative until the first observation, which it starts from
    double cap = 512.0;         ///< b, in keys
    double slack = 0.95;
    float factor = 1.2f;  ///< the paper leaves its alpha open
    float least = 1e-9f;
    std::int32_t every = 32;  ///< u, steps from update to update

    void start() const;
    void observe(const double* counts) const;
    [[nodiscard]] bool due(std::int64_t step) const;
    void update() const;
    void check() const;

    // One head of these, which is also what a device runs.
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
