// DMS's compression loss (Lancucki et al., 2025): as many decisions to evict as the target asks for, over all
// layers and heads.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/losses/concept.hpp>
#include <kvpolicy/losses/gates.hpp>
#include <kvpolicy/masks/dms_gate.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// Decisions of one call, to be added up over layers and devices before the loss is taken.
struct EvictionSums {
    double evicted = 0.0;  ///< sum of alpha
    std::int64_t keys = 0;
};

/// Options of CompressionLoss.
struct CompressionOptions {
    /// The sums over the model, in place of loss.total; on CUDA in device memory. A device takes a total of
    /// fewer keys than the call's as it is; the host refuses it.
    const EvictionSums* total = nullptr;
    std::uint32_t* status = nullptr;  ///< as in LossOptions
};

/// scale * max(0, target - mean alpha), with alpha the relaxed decisions of `gate` (noise and all: the same
/// ones as the mask's) and the mean over layers, heads and keys: the paper's max(target L H T - sum alpha, 0)
/// over L H T. It is one-sided: evicting more than the target has cost 0.
///
/// The mean is over everything, so a model of several layers takes two passes: sums() for each layer,
/// which add up, into `total` or CompressionOptions::total (and over devices), then the loss for each
/// layer's gradient. Every layer's value is the whole loss then: count it once. Without `total` (keys = 0)
/// a call is on its own.
struct CompressionLoss {
    float target = 0.0f;  ///< the share of keys to evict, 0 to 1: 1 - 1 / compression ratio (eviction_target)
    float scale = 1.0f;
    DmsGate gate{};
    EvictionSums total{};
    /// Count decisions (alpha > 0.5) instead of alphas, with the gradient of alpha, as the authors' code
    /// does.
    bool straight_through = false;
    gate_scope scope = gate_scope::all;
    std::int32_t layer = 0;

    /// Bytes of workspace for sums, and for a call with these sequences and `heads` KV heads:
    /// none on the host.
    template <AnyPolicy P>
    [[nodiscard]] std::size_t workspace_bytes(const host& ctx, const P& policy, const Sequences& sequences,
                                              std::int32_t heads) const;

    /// Adds the decisions on scores [B, Hkv, S] to *sums, so that the layers of a model add up. A NaN score
    /// that is read is a key with alpha 0 and gradient 0, and sets status_nan_score; without a status the
    /// host refuses it. On CUDA (memory as in losses/gates.hpp) the same decisions: draws, and what
    /// `straight_through` counts but for alphas within rounding of 0.5.
    template <AnyPolicy P, class Real>
    void sums(const host& ctx, const P& policy, plane_view<Real> scores, const Sequences& sequences,
              EvictionSums* sums, workspace_view workspace, const CompressionOptions& options = {}) const;

    /// d_scores [B, Hkv, S]: overwritten for the sequences' lengths with d value / d z = -scale alpha (1 -
    /// alpha) / (temperature keys) where the mean is below the target, else 0. Refuses a target outside [0,
    /// 1], a NaN score that is read as in sums(), and a total of fewer keys than the call's.
    template <AnyPolicy P, class Real>
    void operator()(const host& ctx, const P& policy, input_plane<Real> scores, const Sequences& sequences,
                    plane_view<Real> d_scores, LossValue* value, workspace_view workspace,
                    const CompressionOptions& options = {}) const;

#if defined(__CUDACC__)
    template <AnyPolicy P, class Build = cuda_build>
    [[nodiscard]] std::size_t workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                              std::int32_t heads) const;
    template <AnyPolicy P, class Real, class Build = cuda_build>
    void sums(const cuda& ctx, const P& policy, plane_view<Real> scores, const Sequences& sequences,
              EvictionSums* sums, workspace_view workspace, const CompressionOptions& options = {}) const;
    template <AnyPolicy P, class Real, class Build = cuda_build>
    void operator()(const cuda& ctx, const P& policy, input_plane<Real> scores, const Sequences& sequences,
                    plane_view<Real> d_scores, LossValue* value, workspace_view workspace,
                    const CompressionOptions& options = {}) const;
#endif
};

/// The schedule: the compression ratio grows by 1 every `steps_per_unit` steps, from 1 up to `compression`;
/// the target is 1 - 1 / ratio. Refuses step < 0, compression < 1, steps_per_unit < 1.
inline float eviction_target(std::int64_t step, double compression, std::int64_t steps_per_unit = 100) {
    detail::require(step >= 0, "step", step, "0 or more");
    detail::require(compression >= 1.0, "compression", compression, "1 or more");
    detail::require(steps_per_unit >= 1, "steps_per_unit", steps_per_unit, "1 or more");
    const double ratio = 1.0 + static_cast<double>(step) / static_cast<double>(steps_per_unit);
    return static_cast<float>(1.0 - 1.0 / (ratio < compression ? ratio : compression));
}

}  // namespace kvpolicy

#include <kvpolicy/losses/host/host_dms.hpp>

namespace kvpolicy {
static_assert(GateLoss<CompressionLoss, Policy<Window<8>>>);
}  // namespace kvpolicy
