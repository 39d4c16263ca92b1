// Soft gates: what training adds to the logits instead of a hard threshold, and how its gradient comes back
// to the scores (SP-KV, 2.2, B and C.2; WG-KV, 3.2).
//
// A gate turns the raw logit z of a key (utility u = sigmoid(z)) into a log-bias that counts once the key is
// out of the window, or closes it: then it expires at t + w, which is what a bias of -infinity would do,
// without infinities.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/masks/build.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// A gate's answer for one key.
template <class Real>
struct gate_value {
    Real log_bias;    ///< added to the logit from age w on; 0 where closed
    Real derivative;  ///< d log_bias / d z, or what stands for it in the backward pass
    bool open;        ///< false: the key expires when it leaves the window
};

/// Which key a gate is asked about, for gates that draw: the stream is the head's (batch * heads + head).
struct gate_place {
    std::uint64_t stream = 0;
    std::uint64_t position = 0;
};

/// A gate for training: gate(z, place) for float and double. Same place, same answer, so that the backward
/// pass may ask again. check() refuses its numbers.
template <class G>
concept TrainingGate = std::is_trivially_copyable_v<G> && requires(const G& gate, gate_place place) {
    { gate(0.0f, place) } -> std::same_as<gate_value<float>>;
    { gate(0.0, place) } -> std::same_as<gate_value<double>>;
    {gate.check()};
};

/// log_bias = log u, the soft gate of SP-KV (eq. 6).
struct SoftGate {
    template <class Real>
    KVPOLICY_HOST_DEVICE gate_value<Real> operator()(Real z, gate_place = {}) const;
    void check() const {}
};

/// log_bias = log(u + epsilon), the write gate of WG-KV (3.2).
struct SoftWriteGate {
    float epsilon = 1e-6f;
    template <class Real>
    KVPOLICY_HOST_DEVICE gate_value<Real> operator()(Real z, gate_place = {}) const;
    void check() const;
};

/// log_bias = log((1 - a) u + a 1[u >= tau]) (SP-KV, eq. 7): the soft gate at a = 0, the threshold at a = 1,
/// where keys below tau expire.
struct AnnealedGate {
    float alpha = 0.0f;  ///< a, 0 to 1
    float tau = 0.5f;    ///< a probability
    template <class Real>
    gate_value<Real> operator()(Real z, gate_place = {}) const;
    /// The same with tau as a logit: for kernels, since only the host turns one into the other.
    template <class Real>
    KVPOLICY_HOST_DEVICE gate_value<Real> at(Real z, float threshold) const;
    [[nodiscard]] float threshold() const;
    void check() const;
};

/// Threshold-aware soft gating: log u where u >= tau, closed below (SP-KV, table 4).
struct ThresholdSoftGate {
    float tau = 0.5f;  ///< a probability
    template <class Real>
    gate_value<Real> operator()(Real z, gate_place = {}) const;
    /// The same with tau as a logit: for kernels, since only the host turns one into the other.
    template <class Real>
    KVPOLICY_HOST_DEVICE gate_value<Real> at(Real z, float threshold) const;
    [[nodiscard]] float threshold() const;
    void check() const;
};

/// Open with probability clip(u, p, 1 - p), else closed (SP-KV, eq. 10, 12); the derivative is that of
/// log u, straight through the draw (eq. 11). A closed key is in no query's softmax, so attention
/// hands back 0 for it.
struct BernoulliGate {
    float clip = 0.0f;  ///< p, 0 to 0.5
    std::uint64_t seed = 0;
    template <class Real>
    KVPOLICY_HOST_DEVICE gate_value<Real> operator()(Real z, gate_place place = {}) const;
    void check() const;
};

static_assert(TrainingGate<SoftGate> && TrainingGate<SoftWriteGate> && TrainingGate<AnnealedGate>);
static_assert(TrainingGate<ThresholdSoftGate> && TrainingGate<BernoulliGate>);

/// Bytes of workspace that build_log_bias and log_bias_backward need: none on the host.
template <AnyPolicy P>
std::size_t log_bias_workspace_bytes(const host& ctx, const P& policy, const Sequences& sequences,
                                     std::int32_t heads, const MaskOptions& options = {});

/// The mask of a gated policy in training: overwrites expiry [B, Hkv, S] and log_bias [B, Hkv, S] for the
/// sequences' lengths, from scores [B, Hkv, S] (raw logits). Sinks, keys kept by position and keys that never
/// leave the window live on with bias 0, and their scores are not read; the others get the gate's answer. The
/// policy gives sinks and windows; its own gate, if any, is not asked. With cu_seqlens keys expire with their
/// segment. A mask_view of both arrays also needs bias_from = the windows by head (windows_of).
///
/// A NaN score that is read closes its gate and sets status_nan_score in options.status.
///
/// Refuses, before anything is written: a gate's numbers, shapes that disagree, a NaN score that is read
/// where there is no status (see MaskOptions).
template <AnyPolicy P, TrainingGate G, class Real>
void build_log_bias(const host& ctx, const P& policy, const G& gate, plane_view<Real> scores,
                    const Sequences& sequences, plane_view<expiry_t> expiry, plane_view<float> log_bias,
                    workspace_view workspace, const MaskOptions& options = {});

/// The way back: d_scores[b][h][t] = derivative * d_log_bias[b][h][t] where the score was read, else 0, also
/// for a NaN score. Overwrites d_scores [B, Hkv, S] for the sequences' lengths. NaN scores as above.
template <AnyPolicy P, TrainingGate G, class Real>
void log_bias_backward(const host& ctx, const P& policy, const G& gate, input_plane<Real> scores,
                       input_plane<Real> d_log_bias, const Sequences& sequences, plane_view<Real> d_scores,
                       workspace_view workspace, const MaskOptions& options = {});

/// out[h] = w of head h, what a mask_view with log-biases takes as bias_from. Refuses a layer that the policy
/// does not have, null.
template <AnyPolicy P>
void windows_of(const P& policy, std::int32_t heads, std::int32_t* out, std::int32_t layer = 0) {
    policy.check_layer(layer, heads);
    detail::require(out != nullptr || heads <= 0, "out", "null", "an array by head");
    for (std::int32_t h = 0; h < heads; ++h) {
        out[h] = policy.params(layer, h).window;
    }
}

}  // namespace kvpolicy

#include <kvpolicy/masks/host/host_log_bias.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/masks/cuda_log_bias.cuh>
#endif
