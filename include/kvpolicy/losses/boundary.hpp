// The boundary loss of KVpop: trains a scorer on the comparison that decides which key a cache evicts (KVpop,
// 3.1, B.4-B.6).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/losses/concept.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

struct CUevent_st;  // what cudaEvent_t points to

namespace kvpolicy {

/// B.4: omega = omega_min + (1 - omega_min) sigmoid(Delta / temperature), Delta >= 0 the teacher's margin; so
/// the least weight is (1 + omega_min) / 2. omega_min = 1 turns it off.
struct MarginWeights {
    float omega_min = 0.0f;    ///< 0 to 1
    float temperature = 1.0f;  ///< tau_omega > 0
};

/// B.5: keeps weigh clip(1 / (2 rho), least, most), drops clip(1 / (2 (1 - rho)), least, most), rho being the
/// head's share of keeps among its examples; divided by their mean over the head's examples. Where a head's
/// labels are all equal its weights are 1.
struct BalanceWeights {
    bool enabled = true;
    float least = 0.25f;  ///< c_min > 0
    float most = 4.0f;    ///< c_max >= c_min
};

/// B.6: `count` query positions q >= s + w + k of each (sequence, head), drawn with replacement: a share
/// `late` of them (nearest_count_of_share) is the later of two uniform draws (density rising linearly), the
/// rest uniform. The same seed, layer and shapes draw the same positions. A count of all valid positions or
/// more, as by default, takes each of them once.
struct BoundarySampler {
    std::int32_t count = unlimited;  ///< 0 or more
    float late = 0.5f;               ///< 0 to 1
    std::uint64_t seed = 0;
};

/// The result of one call.
struct BoundaryValue : LossValue {
    std::int64_t sampled = 0;  ///< positions drawn; count has those with t_bnd != t_new
    std::int64_t kept = 0;     ///< examples whose new key the teacher keeps
    std::int64_t agreed = 0;  ///< examples that the student decides as the teacher (ties go to the older key)
};

/// Options of a call of BoundaryLoss.
struct BoundaryOptions {
    /// Layers whose heads stand one after another: planes are [B, layers * Hkv, S] and d_log_gamma [layers *
    /// Hkv], those of layer loss.layer first. Each layer is a loss of its own, with its own draws and mean,
    /// as in a call for it alone; value and counts are sums over the layers. The policy is asked for the
    /// rules of heads 0 to layers * Hkv - 1 of loss.layer.
    std::int32_t layers = 1;
    /// [layers * Hkv], in place of the policy's log gamma; on CUDA in device memory, read when the work runs,
    /// so that a decay that is learned stays on the device. Must be <= 0.
    const float* log_gamma = nullptr;
    /// CUDA alone, a cudaEvent_t: recorded where `scores` are ready, when another stream makes them. Only
    /// what needs them waits for it, so that ranking the target, which a few SMs do, runs beside the scorer's
    /// forward pass. Null: they are ready.
    CUevent_st* scores_ready = nullptr;
    /// [B], OR-ed into: status_bad_length, for a length that then counts as 0; status_nan_score, for a NaN
    /// target, which ranks last; status_not_finite, for a score of an example that is NaN or infinite (the
    /// results are then invalid). Null: not wanted; the host then refuses all three.
    std::uint32_t* status = nullptr;
};

/// Eq. 7 on effective scores. At a sampled query q, per head, with t_new = q - w, t_bnd the worst of the k
/// keys that the teacher holds after q's top-k update, y = +1 where it holds t_new and else -1:
///
///     delta = r_{t_new}(q) - r_{t_bnd}(q),   r_t(q) = r_t + floor((q - t) / n) log gamma
///         (student, eq. 5)
///     loss  = scale * mean over examples of omega_margin omega_balance softplus(-y delta / temperature)
///
/// Teacher and student share gamma; labels and weights are constants, as if detached. Where t_bnd = t_new the
/// two sides of the comparison are one key: the position does not count. The teacher's set is the policy's
/// own running top-k update on the target (masks/top_k_set.hpp), so labels are the decisions of a cache with
/// the target's scores, for any decay step and with the same tie rule. The paper says the decay cancels in
/// delta; it does so only for keys of the same age, and what remains, floor((q - t_new) / n) - floor((q -
/// t_bnd) / n), is the gradient of log gamma: so the decay is learned.
struct BoundaryLoss {
    using value_type = BoundaryValue;

    float temperature = 1.0f;  ///< tau > 0
    MarginWeights margin{};
    BalanceWeights balance{};
    BoundarySampler sampler{};
    std::int32_t layer = 0;  ///< the layer whose rules hold
    float scale = 1.0f;      ///< multiplies value and gradients: 1 / L averages over L layers

    /// Bytes of workspace for a call with these sequences and `heads` KV heads, over all layers of the call.
    template <AnyPolicy P>
    [[nodiscard]] std::size_t workspace_bytes(const host& ctx, const P& policy, const Sequences& sequences,
                                              std::int32_t heads) const;

    /// scores [B, Hkv, S] raw logits of the student, target [B, Hkv, S] of the teacher (future_mass).
    /// Overwrites d_scores [B, Hkv, S] for the sequences' lengths, and *value; adds to d_log_gamma [Hkv]
    /// where that is not null (log_gamma_slope makes d alpha of it). Real is float, or double for checks;
    /// sums run in double, in an order that does not depend on the threads. Sequences with S <= s + w + k
    /// have no valid position: value 0, zero gradient, count 0. With cu_seqlens each segment counts for
    /// itself, with a share of `count` by its valid positions. Synchronous; O(S log k) per head.
    ///
    /// Refuses, before anything is written: numbers out of range, shapes that disagree, too little workspace,
    /// and without a status a NaN target or a score that is not finite at a key that leaves the window.
    template <AnyPolicy P, class Real>
    void operator()(const host& ctx, const P& policy, input_plane<Real> scores,
                    plane_view<const float> target, const Sequences& sequences, plane_view<Real> d_scores,
                    double* d_log_gamma, BoundaryValue* value, workspace_view workspace,
                    const BoundaryOptions& options = {}) const;

#if defined(__CUDACC__)
    // Planes, d_log_gamma, *value and the arrays lengths and cu_seqlens of the sequences are device memory;
    // loss, policy and its numbers by head are host memory, read during the call. Nothing is allocated,
    // nothing waited for.

    template <AnyPolicy P, class Build = cuda_build>
    [[nodiscard]] std::size_t workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                              std::int32_t heads) const;

    /// The same examples and draws, value and gradients to rounding, the same bits in every run. Scores are
    /// fp32. Labels come from ranks and cutoffs of the target, so decay steps are 1. Edges in cu_seqlens that
    /// do not rise from 0 to the length leave no sequence a token, and set status_bad_length for all.
    /// Refuses, before anything is enqueued, the rest of what the host refuses, and heads that options.layers
    /// does not divide.
    template <AnyPolicy P, class Real, class Build = cuda_build>
    void operator()(const cuda& ctx, const P& policy, input_plane<Real> scores,
                    plane_view<const float> target, const Sequences& sequences, plane_view<Real> d_scores,
                    double* d_log_gamma, BoundaryValue* value, workspace_view workspace,
                    const BoundaryOptions& options = {}) const;
#endif
};

}  // namespace kvpolicy

#include <kvpolicy/losses/host/host_boundary.hpp>

namespace kvpolicy {
static_assert(ScoreLoss<BoundaryLoss, Policy<Sink<4>, Window<8>, TopKBudget<16>>>);
}  // namespace kvpolicy
