// Bodies of scorers/mlstm.hpp on the host: the recurrent form, and what it shares with the chunkwise one.
#pragma once

#include <kvpolicy/scorers/check.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace kvpolicy {

namespace host_backend {

/// Gates as logarithms, in double: log f near 0 must survive being added to a large stabilizer.
struct mlstm_gates {
    double log_input;
    double log_forget;
};

/// The larger, or NaN where b is NaN.
inline double mlstm_max(double a, double b) { return a > b ? a : b; }

inline mlstm_gates mlstm_gates_of(double input, double forget, double gate_softcap) {
    if (gate_softcap > 0.0) {
        input = gate_softcap * std::tanh(input / gate_softcap);
        forget = gate_softcap * std::tanh(forget / gate_softcap);
    }
    return {input, mlstm_max(mLSTMScorer<>::least_log_forget, log_sigmoid(forget))};
}

/// One head's weights, and the sizes that every loop needs.
template <class Scorer>
struct mlstm_head {
    const Scorer& scorer;
    std::int32_t inputs, projection, features, width;
    std::ptrdiff_t head;

    mlstm_head(const Scorer& scorer_, std::int32_t head_)
        : scorer(scorer_),
          inputs(scorer_.input_size()),
          projection(scorer_.projection()),
          features(scorer_.features()),
          width(scorer_.value_width()),
          head(head_) {}

    const float* w_q() const { return scorer.weights.w_q + head * projection * inputs; }
    const float* w_k() const { return scorer.weights.w_k + head * projection * inputs; }
    const float* w_v() const { return scorer.weights.w_v + head * width * inputs; }
    const float* w_i() const { return scorer.weights.w_i + head * inputs; }
    const float* w_f() const { return scorer.weights.w_f + head * inputs; }
    const float* b_i() const { return scorer.weights.b_i ? scorer.weights.b_i + head : nullptr; }
    const float* b_f() const { return scorer.weights.b_f ? scorer.weights.b_f + head : nullptr; }

    /// out[t][e] = W x_t, for `count` rows.
    template <class Real>
    void project(isa set, const Real* x, std::int32_t count, const float* w, std::int32_t rows,
                 Real* out) const {
        const float* no_bias = nullptr;
        run_kernel<project_kernel>(set, x, std::ptrdiff_t{inputs}, count, w, std::ptrdiff_t{inputs}, rows,
                                   inputs, no_bias, out, std::ptrdiff_t{rows});
    }

    /// x = [key; value] of one token, and its features of W x; y is scratch.
    template <class Real>
    void map_token(isa set, const Real* key, const Real* value, const float* w, Real* x, Real* y,
                   Real* mapped) const {
        std::copy_n(key, scorer.head_dim_qk, x);
        std::copy_n(value, scorer.head_dim_vo, x + scorer.head_dim_qk);
        project(set, x, 1, w, projection, y);
        Scorer::feature_map::map(set, y, features, mapped);
    }

    /// map_token into `scratch`, which the rest of the token's numbers may use from `free` on.
    template <class Real>
    struct mapped_token {
        Real *x, *features, *free;
    };
    template <class Real>
    mapped_token<Real> map_token(isa set, const Real* key, const Real* value, const float* w,
                                 Real* scratch) const {
        Real* const y = scratch + inputs;
        Real* const mapped = y + projection;
        map_token(set, key, value, w, scratch, y, mapped);
        return {scratch, mapped, mapped + features};
    }

    /// The score from h in place of a read's quotient (eq. 42); overwrites h. x is [k; v] of the token that
    /// is scored.
    template <class Real>
    Real finish(isa set, Real* h, const Real* x) const {
        const auto& weights = scorer.weights;
        if (weights.norm_gain != nullptr) {
            const float* gain = weights.norm_gain + head * width;
            center(h);
            const Real mean_square = dot(set, h, h, width) / static_cast<Real>(width);
            const Real scale = Real(1) / std::sqrt(mean_square + static_cast<Real>(Scorer::norm_epsilon));
            for (std::int32_t e = 0; e < width; ++e) {
                h[e] *= scale * static_cast<Real>(gain[e]);
            }
        }
        run_kernel<silu_kernel>(set, h, width);
        const float* bias = weights.readout_bias;
        Real score = dot(set, h, weights.readout + head * width, width, bias ? bias + head : nullptr);
        if (weights.skip != nullptr) {
            score += dot(set, x, weights.skip + head * inputs, inputs);
        }
        return score;
    }

    /// Takes the mean of h from h where the norm is a LayerNorm, and returns it; 0 elsewhere.
    template <class Real>
    Real center(Real* h) const {
        Real mean = Real(0);
        if (scorer.centered()) {
            for (std::int32_t e = 0; e < width; ++e) {
                mean += h[e];
            }
            mean /= static_cast<Real>(width);
            for (std::int32_t e = 0; e < width; ++e) {
                h[e] -= mean;
            }
        }
        return mean;
    }

    /// h = numerator / max(q~ z, clamp), in place. A NaN divisor stays one.
    template <class Real>
    void divide(Real* h, Real divisor) const {
        constexpr Real least = static_cast<Real>(Scorer::clamp);
        const Real scale = Real(1) / (divisor < least ? least : divisor);
        for (std::int32_t e = 0; e < width; ++e) {
            h[e] *= scale;
        }
    }
};

template <class Real>
double load_stabilizer(const Real* m) {
    return static_cast<double>(m[0]) + static_cast<double>(m[1]);
}

template <class Real>
void store_stabilizer(double m, Real* to) {
    to[0] = static_cast<Real>(m);
    to[1] = std::isfinite(m) ? static_cast<Real>(m - static_cast<double>(to[0])) : Real(0);
}

}  // namespace host_backend

template <std::int32_t D, FeatureMap Feature, ValuePath Values>
template <class Real>
void mLSTMScorer<D, Feature, Values>::reset(Real* state) const {
    const std::size_t size = state_size();
    std::fill_n(state, size, Real(0));
    state[size - 2] = -std::numeric_limits<Real>::infinity();
}

template <std::int32_t D, FeatureMap Feature, ValuePath Values>
template <class Real>
void mLSTMScorer<D, Feature, Values>::absorb(std::int32_t head, Real* state, const Real* key,
                                             const Real* value, Real* scratch, isa set) const {
    using namespace host_backend;
    const mlstm_head<mLSTMScorer> of(*this, head);
    const auto [x, k, v] = of.map_token(set, key, value, of.w_k(), scratch);
    const Real* written = value;
    if constexpr (Values::projected) {
        of.project(set, x, 1, of.w_v(), of.width, v);
        written = v;
    }
    const mlstm_gates gates =
        mlstm_gates_of(static_cast<double>(dot(set, x, of.w_i(), of.inputs, of.b_i())),
                       static_cast<double>(dot(set, x, of.w_f(), of.inputs, of.b_f())), gate_softcap);

    Real* z = state + static_cast<std::ptrdiff_t>(of.features) * of.width;
    Real* stabilizer = z + of.features;
    const double log_decay = gates.log_forget + load_stabilizer(stabilizer);
    const double m = mlstm_max(log_decay, gates.log_input);
    run_kernel<update_kernel>(set, static_cast<Real>(std::exp(log_decay - m)),
                              static_cast<Real>(std::exp(gates.log_input - m)), static_cast<const Real*>(k),
                              of.features, written, of.width, state, z);
    store_stabilizer(m, stabilizer);
}

template <std::int32_t D, FeatureMap Feature, ValuePath Values>
template <class Real>
Real mLSTMScorer<D, Feature, Values>::read(std::int32_t head, const Real* state, const Real* key,
                                           const Real* value, Real* scratch, isa set) const {
    using namespace host_backend;
    const mlstm_head<mLSTMScorer> of(*this, head);
    const auto [x, q, h] = of.map_token(set, key, value, of.w_q(), scratch);
    const Real* z = state + static_cast<std::ptrdiff_t>(of.features) * of.width;
    run_kernel<combine_kernel>(set, static_cast<const Real*>(q), std::ptrdiff_t{0}, std::ptrdiff_t{1}, 1,
                               of.features, state, std::ptrdiff_t{of.width}, of.width, h, std::ptrdiff_t{0},
                               false);
    of.divide(h, dot(set, q, z, of.features));
    return of.finish(set, h, x);
}

template <std::int32_t D, FeatureMap Feature, ValuePath Values>
void mLSTMScorer<D, Feature, Values>::check(std::int32_t kv_heads, std::int32_t key_dim,
                                            std::int32_t value_dim) const {
    checks::check_scorer_shape("mLSTMScorer", D, *this, kv_heads, key_dim, value_dim);
    detail::require(d_qk >= 0 && Feature::allows(features()), "mLSTMScorer.d_qk", features(),
                    Feature::allowed);
    detail::require(d_v >= 0 && value_width() >= 1, "mLSTMScorer.d_v", value_width(), "1 or more");
    detail::require(Values::projected || value_width() == head_dim_vo, "mLSTMScorer.d_v", value_width(),
                    detail::text("the width of the values, ", head_dim_vo,
                                 ", since DirectValues writes them as they are"));
    detail::require(gate_softcap >= 0.0f && std::isfinite(gate_softcap), "mLSTMScorer.gate_softcap",
                    gate_softcap, "a finite number above 0, or 0 for none");
    detail::require(norm == mlstm_norm::rms || norm == mlstm_norm::layer, "mLSTMScorer.norm",
                    static_cast<std::int32_t>(norm), "mlstm_norm::rms (0) or mlstm_norm::layer (1)");
    checks::check_parameters("mLSTMScorer", *this, weights);
}

}  // namespace kvpolicy
