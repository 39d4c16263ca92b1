// The memory-based scorer of KVpop: an mLSTM for each KV head, read with a delay (KVpop, 3.3,
// appendices A and E).
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/feature_map.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// Which kernels of an mLSTM a call on CUDA is compiled for: d_qk up to Features, d_v up to Values, padded to
/// them. 64 and 64, 128 and 64, or 128 and 128; all_mlstm_widths takes the smallest that fits, and as much
/// time to compile as the three.
template <std::int32_t Features, std::int32_t Values>
struct mlstm_widths {
    static_assert((Features == 64 || Features == 128) && (Values == 64 || Values == Features),
                  "kvpolicy: mlstm_widths are <64, 64>, <128, 64> and <128, 128>");
};
struct all_mlstm_widths {};

/// v~ = Wv x, by default half as wide as the values.
struct ProjectedValues {
    static constexpr bool projected = true;
    static constexpr std::int32_t default_width(std::int32_t head_dim_vo) { return head_dim_vo / 2; }
};
/// v~ = v, the cached value itself.
struct DirectValues {
    static constexpr bool projected = false;
    static constexpr std::int32_t default_width(std::int32_t head_dim_vo) { return head_dim_vo; }
};

template <class V>
concept ValuePath = std::is_same_v<V, ProjectedValues> || std::is_same_v<V, DirectValues>;

static_assert(ValuePath<ProjectedValues> && ValuePath<DirectValues>);

/// What norm_gain scales: with x_e = h_e (rms) or h_e - mean(h) (layer: xLSTM's headwise LayerNorm),
/// Norm(h)_e = gain_e x_e / sqrt(mean(x^2) + epsilon), means over the d_v values of a head.
enum class mlstm_norm : std::int32_t { rms, layer };

/// The weights of an mLSTMScorer, all row-major, with X = head_dim_qk + head_dim_vo and P the feature map's
/// projection width (d_qk for Softmax, d_qk / 2 for Hedgehog). Float is const float in a scorer, float where
/// they are filled or trained.
template <class Float>
struct mLSTMParameters {
    Float* w_q = nullptr;           // [heads, P, X]
    Float* w_k = nullptr;           // [heads, P, X]
    Float* w_v = nullptr;           // [heads, d_v, X]; not used by DirectValues
    Float* w_i = nullptr;           // [heads, X]: the input gate
    Float* b_i = nullptr;           // [heads]; null stands for 0
    Float* w_f = nullptr;           // [heads, X]: the forget gate
    Float* b_f = nullptr;           // [heads]; null stands for 0
    Float* norm_gain = nullptr;     // [heads, d_v]: gain of the norm; null leaves the norm out
    Float* readout = nullptr;       // [heads, d_v]: a
    Float* readout_bias = nullptr;  // [heads]: b; null stands for 0
    Float* skip = nullptr;          // [heads, X]: s; null leaves the skip connection out
};

/// A recurrent memory of all tokens so far, asked about one of them. For each head, with x_t = [k_t; v_t]:
///
///     q~_t = phi(Wq x_t)    k~_t = phi(Wk x_t)    v~_t = Wv x_t or v_t
///         (37)
///     log i_t = cap(w_i . x_t + b_i)    log f_t = log sigmoid(cap(w_f . x_t + b_f))
///         (40)
///     C_t = f_t C_{t-1} + i_t k~_t v~_t^T    z_t = f_t z_{t-1} + i_t k~_t
///         (38, 39)
///     h = q~_u^T C_q / (q~_u^T z_q)    r_u = a . SiLU(Norm(h)) + b [+ s . x_u]
///         (41, 42)
///
/// where u = q - w is the key that leaves the window at q, so its score has seen the w tokens after it.
/// cap(y) = c tanh(y / c) with c = gate_softcap > 0, and the identity with 0. Norm is an RMS norm or a
/// LayerNorm over d_v (`norm`) with a learned gain and epsilon 1e-6, or the identity.
///
/// **The stabilized frame.** Only (C, z) scaled by exp(-m) are stored, with
///
///     m_t = max(log f_t + m_{t-1}, log i_t),  m before the first token = -infinity
///
/// so that m_t is the logarithm of the largest weight that any token has in C_t, and that weight is 1 as
/// stored. h does not depend on the frame, save for one clamp: the divisor is max(q~^T z, 1e-30) with **z in
/// this frame**. Sums of positive numbers keep their relative precision down to the least normal float,
/// 1e-38, so the clamp acts only near the numbers that fp32 does not have, and h is eq. 41's elsewhere.
///
/// **State** per (sequence, head), state_size() numbers: C [d_qk][d_v], z [d_qk], then m as a sum of two
/// numbers (the second holds the rounding error of the first: with forget gates near 1, m changes by less
/// than a float's precision).
///
/// D is the width of keys and values, fixed at compile time; dynamic takes head_dim_qk and head_dim_vo at run
/// time. One object serves one layer; the weights are fp32, the caller's, and must outlive it. Calls on
/// different states may run at once.
template <std::int32_t D = dynamic, FeatureMap Feature = Hedgehog, ValuePath Values = ProjectedValues>
struct mLSTMScorer {
    static_assert(D == dynamic || D >= 1, "kvpolicy: mLSTMScorer<D> needs D >= 1");
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;
    template <class Float>
    using parameters = mLSTMParameters<Float>;
    using feature_map = Feature;
    using value_path = Values;
    static constexpr double clamp = 1e-30;        ///< the least divisor of a read, in the stabilized frame
    static constexpr double norm_epsilon = 1e-6;  ///< added to the mean square
    /// log f is at least this, whose exponential is 0: so a gate that is shut, a bias of -infinity, is a
    /// number that chunks can add up.
    static constexpr double least_log_forget = -1000.0;

    std::int32_t heads = 0;
    std::int32_t head_dim_qk = D == dynamic ? 0 : D;
    std::int32_t head_dim_vo = D == dynamic ? 0 : D;
    std::int32_t d_qk = 0;  ///< number of features; 0 stands for head_dim_qk
    std::int32_t d_v =
        0;  ///< width of v~; 0 stands for head_dim_vo / 2 (ProjectedValues) or head_dim_vo (DirectValues)
    float gate_softcap = 0.0f;
    mLSTMParameters<const float> weights{};
    mlstm_norm norm = mlstm_norm::rms;  ///< which norm, where weights.norm_gain is given

    [[nodiscard]] std::int32_t input_size() const { return head_dim_qk + head_dim_vo; }
    [[nodiscard]] std::int32_t features() const { return d_qk != 0 ? d_qk : head_dim_qk; }
    [[nodiscard]] std::int32_t projection() const { return Feature::projection(features()); }
    [[nodiscard]] std::int32_t value_width() const {
        return d_v != 0 ? d_v : Values::default_width(head_dim_vo);
    }

    /// Whether h is centered before its norm.
    [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool centered() const {
        return norm == mlstm_norm::layer && weights.norm_gain != nullptr;
    }

    [[nodiscard]] std::size_t state_size() const {
        return static_cast<std::size_t>(features()) * (static_cast<std::size_t>(value_width()) + 1) + 2;
    }
    [[nodiscard]] std::size_t scratch_size() const {
        return static_cast<std::size_t>(std::int64_t{input_size()} + projection() + features() +
                                        value_width());
    }

    /// The state before the first token. (It is not all zeros: m = -infinity.)
    template <class Real>
    void reset(Real* state) const;

    /// state <- the state after one more token. Real is float, or double for checks. The instruction
    /// set changes no bit.
    template <class Real>
    void absorb(std::int32_t head, Real* state, const Real* key, const Real* value, Real* scratch,
                isa set = detected_isa()) const;

    /// The score of a token, from a state that has absorbed it and the tokens after it.
    template <class Real>
    Real read(std::int32_t head, const Real* state, const Real* key, const Real* value, Real* scratch,
              isa set = detected_isa()) const;

    /// Refuses missing weights, and sizes that do not fit a layer of `kv_heads` heads with keys and
    /// values this wide.
    void check(std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim) const;
};

static_assert(StatefulScorer<mLSTMScorer<>> && StatefulScorer<mLSTMScorer<128, Softmax, DirectValues>>);
static_assert(CheckedScorer<mLSTMScorer<>> && Scorer<mLSTMScorer<128>> &&
              std::is_trivially_copyable_v<mLSTMScorer<>>);

/// Calls visit(name, pointer, count, optional) for each array of the parameters, in the order of
/// their declaration.
template <std::int32_t D, class Feature, class Values, class Float, class Visit>
void for_each_parameter(const mLSTMScorer<D, Feature, Values>& scorer, mLSTMParameters<Float>& parameters,
                        Visit&& visit) {
    const auto heads = static_cast<std::size_t>(scorer.heads);
    const auto inputs = heads * static_cast<std::size_t>(scorer.input_size());
    const auto projection = static_cast<std::size_t>(scorer.projection());
    const auto width = static_cast<std::size_t>(scorer.value_width());
    visit("w_q", parameters.w_q, inputs * projection, false);
    visit("w_k", parameters.w_k, inputs * projection, false);
    visit("w_v", parameters.w_v, Values::projected ? inputs * width : 0, !Values::projected);
    visit("w_i", parameters.w_i, inputs, false);
    visit("b_i", parameters.b_i, heads, true);
    visit("w_f", parameters.w_f, inputs, false);
    visit("b_f", parameters.b_f, heads, true);
    visit("norm_gain", parameters.norm_gain, heads * width, true);
    visit("readout", parameters.readout, heads * width, false);
    visit("readout_bias", parameters.readout_bias, heads, true);
    visit("skip", parameters.skip, inputs, true);
}

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_mlstm.hpp>
