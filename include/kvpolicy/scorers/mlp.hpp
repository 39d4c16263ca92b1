// Scorers with one hidden layer (kvpop.txt, 3.3 and E.2). One MLP with an input policy and an activation: KVpop-mlp is
// MlpScorer; other systems name another input and activation.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/scorers/activation.hpp>
#include <kvpolicy/scorers/concept.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// What an MLP sees of a token: size(dim_k, dim_v) numbers, which gather(isa, head, key, value, dim_k, dim_v, x) writes.
/// per_head says whether each KV head has a hidden layer of its own or all share one. An input may hold values (norm
/// gains, say); it is copied with the scorer.
template <class I>
concept MlpInput = std::is_trivially_copyable_v<I> &&
    requires(const I& input, isa set, std::int32_t head, const float* key, const float* value,
             std::int32_t dim, float* x) {
    { I::per_head } -> std::convertible_to<bool>;
    { input.size(dim, dim) } -> std::same_as<std::int32_t>;
    {input.gather(set, head, key, value, dim, dim, x)};
};

/// x = [k; v], key and value as they are cached (kvpop.txt, eq. 35).
struct KeyValueInput {
    static constexpr bool per_head = true;

    [[nodiscard]] constexpr std::int32_t size(std::int32_t dim_k, std::int32_t dim_v) const {
        return dim_k + dim_v;
    }

    template <class Real>
    constexpr void gather(isa, std::int32_t /*head*/, const Real* key, const Real* value, std::int32_t dim_k,
                          std::int32_t dim_v, Real* x) const {
        std::copy_n(key, dim_k, x);
        std::copy_n(value, dim_v, x + dim_k);
    }

    template <class Real>
    constexpr void pull_back(isa, std::int32_t /*head*/, const Real* /*key*/, const Real* /*value*/,
                             std::int32_t dim_k, std::int32_t dim_v, const Real* d_x, Real* d_key,
                             Real* d_value) const {
        std::copy_n(d_x, dim_k, d_key);
        std::copy_n(d_x + dim_k, dim_v, d_value);
    }
};

/// x = [RMSNorm(key); RMSNorm(value)], without gains (W1 has them): WG-KV's input, where a training run gives the keys
/// after RoPE as keys and those before it as values (wgkv.txt, 3.2).
struct NormalizedInput {
    static constexpr bool per_head = true;
    float epsilon = 1e-6f;  ///< added to the mean square

    [[nodiscard]] constexpr std::int32_t size(std::int32_t dim_k, std::int32_t dim_v) const {
        return dim_k + dim_v;
    }

    template <class Real>
    void gather(isa, std::int32_t /*head*/, const Real* key, const Real* value, std::int32_t dim_k,
                std::int32_t dim_v, Real* x) const {
        normalize(key, dim_k, x);
        normalize(value, dim_v, x + dim_k);
    }

    template <class Real>
    void pull_back(isa, std::int32_t /*head*/, const Real* key, const Real* value, std::int32_t dim_k,
                   std::int32_t dim_v, const Real* d_x, Real* d_key, Real* d_value) const {
        pull_back_half(key, dim_k, d_x, d_key);
        pull_back_half(value, dim_v, d_x + dim_k, d_value);
    }

  private:
    template <class Real>
    Real inverse_rms(const Real* y, std::int32_t dim) const {
        Real sum = Real(0);
        for (std::int32_t i = 0; i < dim; ++i) {
            sum += y[i] * y[i];
        }
        return Real(1) / std::sqrt(sum / static_cast<Real>(dim) + static_cast<Real>(epsilon));
    }
    template <class Real>
    void normalize(const Real* y, std::int32_t dim, Real* x) const {
        const Real scale = inverse_rms(y, dim);
        for (std::int32_t i = 0; i < dim; ++i) {
            x[i] = y[i] * scale;
        }
    }
    /// d y = scale (d x - x mean(d x . x)), x = y scale
    template <class Real>
    void pull_back_half(const Real* y, std::int32_t dim, const Real* d_x, Real* d_y) const {
        const Real scale = inverse_rms(y, dim);
        Real along = Real(0);
        for (std::int32_t i = 0; i < dim; ++i) {
            along += d_x[i] * y[i] * scale;
        }
        along /= static_cast<Real>(dim);
        for (std::int32_t i = 0; i < dim; ++i) {
            d_y[i] = scale * (d_x[i] - y[i] * scale * along);
        }
    }
};

/// An input that a gradient can go back through: pull_back(isa, head, key, value, dim_k, dim_v, d_x, d_key, d_value)
/// overwrites d_key[dim_k] and d_value[dim_v].
template <class I>
concept DifferentiableInput = MlpInput<I> &&
    requires(const I& input, isa set, std::int32_t head, const float* row, std::int32_t dim, float* d) {
    {input.pull_back(set, head, row, row, dim, dim, row, d, d)};
};

static_assert(DifferentiableInput<KeyValueInput> && DifferentiableInput<NormalizedInput>);

/// What an MLP learns, with X = input.size(dim_k, dim_v) and layers = heads where the input is per head, else 1.
template <class Float>
struct MlpParameters {
    Float* w1 = nullptr;  // [layers, hidden, X]
    Float* b1 = nullptr;  // [layers, hidden]; null stands for 0
    Float* w2 = nullptr;  // [heads, hidden]
    Float* b2 = nullptr;  // [heads]; null stands for 0
};

/// r = w2 . act(W1 x + b1) + b2, x from Input.
///
/// D is the width of keys and values, fixed at compile time, or dynamic: dim_k and dim_v at run time. One object serves
/// one layer; the weights are fp32, the caller's, and must outlive it. score() may be called from several threads at
/// once.
template <MlpInput Input, Activation Act, std::int32_t D = dynamic>
struct BasicMlpScorer {
    static_assert(D == dynamic || D >= 1, "kvpolicy: BasicMlpScorer<Input, Activation, D> needs D >= 1");
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_arrival;
    template <class Float>
    using parameters = MlpParameters<Float>;

    std::int32_t heads = 0;
    std::int32_t dim_k = D == dynamic ? 0 : D;
    std::int32_t dim_v = D == dynamic ? 0 : D;
    std::int32_t hidden = 0;
    MlpParameters<const float> weights;
    Input input;

    [[nodiscard]] std::int32_t input_size() const { return input.size(dim_k, dim_v); }

    /// Real is float, or double for checks; `scratch` is scratch_size() of them. The instruction set changes no bit.
    template <class Real>
    Real score(std::int32_t head, const Real* key, const Real* value, Real* scratch,
               isa set = detected_isa()) const;
    [[nodiscard]] std::size_t scratch_size() const {
        return static_cast<std::size_t>(input_size()) + static_cast<std::size_t>(hidden);
    }

    /// score() of `count` <= scorer_block tokens; see BlockScorer.
    template <class Real>
    void score_block(std::int32_t head, std::int32_t count, const Real* keys, const Real* values,
                     Real* scores, Real* scratch, isa set = detected_isa()) const;
    [[nodiscard]] std::size_t block_scratch_size() const { return scorer_block * scratch_size(); }

    /// Refuses missing weights, and sizes that do not fit a layer of `kv_heads` heads with keys and values this wide.
    void check(std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim) const;
};

/// KVpop-mlp: r = w2 . SiLU(W1 [k; v] + b1) + b2, two layers, headwise.
template <std::int32_t D = dynamic>
using MlpScorer = BasicMlpScorer<KeyValueInput, Silu, D>;

static_assert(StatelessScorer<MlpScorer<>> && BlockScorer<MlpScorer<64>> && CheckedScorer<MlpScorer<64>>);
static_assert(Scorer<BasicMlpScorer<KeyValueInput, GeluErf>> && std::is_trivially_copyable_v<MlpScorer<>>);

/// Calls visit(name, pointer, count, optional) for each array of the parameters, in the order of their declaration.
template <class Input, class Act, std::int32_t D, class Float, class Visit>
void for_each_parameter(const BasicMlpScorer<Input, Act, D>& scorer, MlpParameters<Float>& parameters,
                        Visit&& visit) {
    const auto heads = static_cast<std::size_t>(scorer.heads);
    const auto hidden = static_cast<std::size_t>(scorer.hidden);
    const std::size_t layers = Input::per_head ? heads : 1;
    visit("w1", parameters.w1, layers * hidden * static_cast<std::size_t>(scorer.input_size()), false);
    visit("b1", parameters.b1, layers * hidden, true);
    visit("w2", parameters.w2, heads * hidden, false);
    visit("b2", parameters.b2, heads, true);
}

}  // namespace kvpolicy

#include <kvpolicy/host/scorers/mlp.hpp>
