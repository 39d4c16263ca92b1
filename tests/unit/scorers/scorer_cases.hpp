// Scorers with drawn weights, and the cases of tests/vectors/scorers.kvpv (see tests/reference/scorers.py).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "../../support/draw.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace test {

/// The place of an array in a case's streams (NAMES of the reference).
enum class array : std::uint64_t {
    k,
    v,
    w_q,
    w_k,
    w_v,
    w_i,
    b_i,
    w_f,
    b_f,
    norm_gain,
    readout,
    readout_bias,
    skip,
    w1,
    b1,
    w2,
    b2,
    w3,
    b3
};
inline std::vector<float> draw(std::int32_t seed, array name, std::int64_t count, float scale) {
    return draw(static_cast<std::uint64_t>(seed) * 32 + static_cast<std::uint64_t>(name),
                static_cast<std::size_t>(count), scale);
}

/// One mLSTM case: structure, sizes and how its weights are drawn.
struct mlstm_case {
    bool hedgehog = true, projected = true;
    std::int32_t head_dim_qk = 16, head_dim_vo = 16, d_qk = 16, d_v = 8, heads = 2, length = 150, delay = 10;
    std::int32_t norm = 0;  // 1: an RMS norm, 2: a LayerNorm
    bool skip = false, biases = true;
    std::int32_t seed = 1;
    float gate_softcap = 0.0f, weight_scale = 1.0f, input_scale = 0.5f, input_bias = 0.0f,
          forget_scale = 0.5f, forget_bias = 3.0f, value_scale = 1.0f;
    std::vector<std::int32_t> cu;

    [[nodiscard]] std::int64_t keys() const { return std::int64_t{heads} * length * head_dim_qk; }
    [[nodiscard]] std::int64_t values() const { return std::int64_t{heads} * length * head_dim_vo; }
    [[nodiscard]] kvpolicy::Sequences sequences() const {
        kvpolicy::Sequences all{1, length, nullptr, nullptr, nullptr, 0};
        if (!cu.empty()) {
            all.cu_seqlens = cu.data();
            all.segments = static_cast<std::int32_t>(cu.size()) - 1;
        }
        return all;
    }
    [[nodiscard]] std::string name() const {
        return std::string(hedgehog ? "hedgehog" : "softmax") + (projected ? " projected" : " direct") +
               " seed " + std::to_string(seed) + " length " + std::to_string(length) + " delay " +
               std::to_string(delay);
    }
};

/// The weights of a case; scorer<...>() views them.
struct mlstm_weights {
    mlstm_case c;
    std::vector<float> w_q, w_k, w_v, w_i, b_i, w_f, b_f, norm_gain, readout, readout_bias, skip;

    explicit mlstm_weights(const mlstm_case& one) : c(one) {
        const std::int64_t inputs = c.head_dim_qk + c.head_dim_vo;
        const std::int64_t rows = std::int64_t{c.heads} * (c.hedgehog ? c.d_qk / 2 : c.d_qk);
        const std::int64_t wide = std::int64_t{c.heads} * c.d_v;
        w_q = draw(c.seed, array::w_q, rows * inputs, c.weight_scale);
        w_k = draw(c.seed, array::w_k, rows * inputs, c.weight_scale);
        w_v = draw(c.seed, array::w_v, wide * inputs, 0.5f);
        w_i = draw(c.seed, array::w_i, c.heads * inputs, c.input_scale);
        w_f = draw(c.seed, array::w_f, c.heads * inputs, c.forget_scale);
        b_i.assign(static_cast<std::size_t>(c.heads), c.input_bias);
        b_f.assign(static_cast<std::size_t>(c.heads), c.forget_bias);
        norm_gain = draw(c.seed, array::norm_gain, wide, 0.5f);
        for (float& gain : norm_gain) {
            gain = static_cast<float>(1.0 + static_cast<double>(gain));
        }
        readout = draw(c.seed, array::readout, wide, 1.0f);
        readout_bias = draw(c.seed, array::readout_bias, c.heads, 1.0f);
        skip = draw(c.seed, array::skip, c.heads * inputs, 0.25f);
    }

    template <class Scorer>
    [[nodiscard]] Scorer scorer() const {
        Scorer s;
        s.heads = c.heads;
        s.head_dim_qk = c.head_dim_qk;
        s.head_dim_vo = c.head_dim_vo;
        s.d_qk = c.d_qk;
        s.d_v = c.d_v;
        s.gate_softcap = c.gate_softcap;
        s.weights.w_q = w_q.data();
        s.weights.w_k = w_k.data();
        s.weights.w_v = c.projected ? w_v.data() : nullptr;
        s.weights.w_i = w_i.data();
        s.weights.w_f = w_f.data();
        s.weights.readout = readout.data();
        if (c.biases) {
            s.weights.b_i = b_i.data();
            s.weights.b_f = b_f.data();
            s.weights.readout_bias = readout_bias.data();
        }
        if (c.norm != 0) {
            s.weights.norm_gain = norm_gain.data();
        }
        s.norm = c.norm == 2 ? kvpolicy::mlstm_norm::layer : kvpolicy::mlstm_norm::rms;
        if (c.skip) {
            s.weights.skip = skip.data();
        }
        return s;
    }
};

/// Calls visit(scorer) with the type that the case's structure asks for.
template <class Visit>
void with_mlstm(const mlstm_weights& weights, Visit&& visit) {
    using namespace kvpolicy;
    const mlstm_case& c = weights.c;
    if (c.hedgehog && c.projected) {
        visit(weights.scorer<mLSTMScorer<dynamic, Hedgehog, ProjectedValues>>());
    }
    if (c.hedgehog && !c.projected) {
        visit(weights.scorer<mLSTMScorer<dynamic, Hedgehog, DirectValues>>());
    }
    if (!c.hedgehog && c.projected) {
        visit(weights.scorer<mLSTMScorer<dynamic, Softmax, ProjectedValues>>());
    }
    if (!c.hedgehog && !c.projected) {
        visit(weights.scorer<mLSTMScorer<dynamic, Softmax, DirectValues>>());
    }
}

/// The place of [i][j] in rows of `width`, as an index into a vector.
inline std::size_t at(std::int64_t i, std::int64_t width, std::int64_t j) {
    return static_cast<std::size_t>(i * width + j);
}

template <class T>
std::vector<T> converted(const std::vector<float>& from) {
    std::vector<T> out(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
        out[i] = static_cast<T>(from[i]);
    }
    return out;
}

/// score_sequence with a workspace of exactly the bytes it asks for, onto scores that hold a mark. The
/// address sanitizer sees what the workspace does not.
template <class S, class K>
std::vector<kvpolicy::compute_t<K>> score_all(const kvpolicy::host& ctx, const S& scorer,
                                              kvpolicy::rows_view<const K> k, kvpolicy::rows_view<const K> v,
                                              const kvpolicy::Sequences& sequences, std::int32_t delay,
                                              kvpolicy::form how, kvpolicy::compute_t<K> mark,
                                              kvpolicy::compute_t<K>* states = nullptr) {
    using Real = kvpolicy::compute_t<K>;
    const kvpolicy::BasicScoreOptions<Real> options{how, states};
    std::vector<Real> scores(static_cast<std::size_t>(k.batch) * static_cast<std::size_t>(k.heads) *
                                 static_cast<std::size_t>(k.length),
                             mark);
    std::vector<std::byte> memory(score_sequence_workspace_bytes(ctx, scorer, k, v, sequences, options),
                                  std::byte{0xff});
    kvpolicy::score_sequence(ctx, scorer, k, v, sequences, delay,
                             kvpolicy::view_bhs(scores.data(), k.batch, k.heads, k.length),
                             {memory.data(), memory.size()}, options);
    return scores;
}

template <class Real>
bool same_bits(const std::vector<Real>& a, const std::vector<Real>& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Real)) == 0);
}

/// The library's definition of stepping: absorb token q, then read token q - delay, segment by segment.
template <class S, class Real>
std::vector<Real> step_all(const S& scorer, kvpolicy::rows_view<const Real> k,
                           kvpolicy::rows_view<const Real> v, const kvpolicy::Sequences& sequences,
                           std::int32_t delay, Real mark) {
    const std::int64_t length = k.length;
    std::vector<Real> scores(static_cast<std::size_t>(k.batch * k.heads) * static_cast<std::size_t>(length),
                             mark);
    std::vector<Real> state(scorer.state_size());
    std::vector<Real> scratch(scorer.scratch_size());
    for (std::int64_t b = 0; b < k.batch; ++b) {
        for (std::int32_t h = 0; h < k.heads; ++h) {
            std::int64_t begin = 0;
            scorer.reset(state.data());
            for (std::int64_t q = 0; q < sequences.length_of(b); ++q) {
                for (std::int32_t i = 0; i < sequences.segments; ++i) {
                    if (sequences.cu_seqlens[i] == q) {
                        begin = q;
                        scorer.reset(state.data());
                    }
                }
                scorer.absorb(h, state.data(), k.row(b, h, q), v.row(b, h, q), scratch.data());
                const std::int64_t t = q - delay;
                if (t >= begin) {
                    const Real* same = state.data();
                    scores[static_cast<std::size_t>((b * k.heads + h) * length + t)] =
                        scorer.read(h, same, k.row(b, h, t), v.row(b, h, t), scratch.data());
                }
            }
        }
    }
    return scores;
}

}  // namespace test
