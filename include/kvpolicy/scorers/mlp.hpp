// Scorers with one hidden layer. One MLP with an input policy and an activation: KVpop's (KVpop, 3.3 and E.2)
// is MlpScorer, WG-KV's WriteGateScorer (WG-KV, 3.2), SP-KV's UtilityPredictor (SP-KV, 2.1 and listing 1).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/activation.hpp>
#include <kvpolicy/scorers/rope.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace kvpolicy {

/// The input of an MLP, per token: size(head_dim_qk, head_dim_vo) numbers, which gather(isa, head, key,
/// value, head_dim_qk, head_dim_vo, x) writes. per_head says whether each KV head has a hidden layer of its
/// own or all share one. An input may hold values (norm gains, say); it is copied with the scorer. An input
/// that depends on the token's position has at(t), which returns the input for that position; one that can be
/// wrong has check(name of the scorer, head_dim_qk).
template <class I>
concept MlpInput = std::is_trivially_copyable_v<I> &&
    requires(const I& input, isa set, std::int32_t head, const float* key, const float* value,
             std::int32_t dim, float* x) {
    { I::per_head } -> std::convertible_to<bool>;
    { input.size(dim, dim) } -> std::same_as<std::int32_t>;
    {input.gather(set, head, key, value, dim, dim, x)};
};

/// x = [k; v], key and value as they are cached (KVpop, eq. 35).
struct KeyValueInput {
    static constexpr bool per_head = true;

    [[nodiscard]] constexpr std::int32_t size(std::int32_t head_dim_qk, std::int32_t head_dim_vo) const {
        return head_dim_qk + head_dim_vo;
    }

    template <class Real>
    constexpr void gather(isa, std::int32_t /*head*/, const Real* key, const Real* value,
                          std::int32_t head_dim_qk, std::int32_t head_dim_vo, Real* x) const {
        std::copy_n(key, head_dim_qk, x);
        std::copy_n(value, head_dim_vo, x + head_dim_qk);
    }

    template <class Real>
    constexpr void pull_back(isa, std::int32_t /*head*/, const Real* /*key*/, const Real* /*value*/,
                             std::int32_t head_dim_qk, std::int32_t head_dim_vo, const Real* d_x, Real* d_key,
                             Real* d_value) const {
        std::copy_n(d_x, head_dim_qk, d_key);
        std::copy_n(d_x + head_dim_qk, head_dim_vo, d_value);
    }
};

/// RMSNorm without gains: y / sqrt(mean(y^2) + epsilon).
struct RootMeanSquare {
    float epsilon = 1e-6f;  ///< added to the mean square

    template <class Real>
    void normalize(const Real* y, std::int32_t dim, Real* x) const {
        const Real scale = inverse(y, dim);
        for (std::int32_t i = 0; i < dim; ++i) {
            x[i] = y[i] * scale;
        }
    }
    /// d y = scale (d x - x mean(d x . x)), x = y scale
    template <class Real>
    void pull_back(const Real* y, std::int32_t dim, const Real* d_x, Real* d_y) const {
        const Real scale = inverse(y, dim);
        Real along = Real(0);
        for (std::int32_t i = 0; i < dim; ++i) {
            along += d_x[i] * y[i] * scale;
        }
        along /= static_cast<Real>(dim);
        for (std::int32_t i = 0; i < dim; ++i) {
            d_y[i] = scale * (d_x[i] - y[i] * scale * along);
        }
    }

  private:
    template <class Real>
    Real inverse(const Real* y, std::int32_t dim) const {
        Real sum = Real(0);
        for (std::int32_t i = 0; i < dim; ++i) {
            sum += y[i] * y[i];
        }
        return Real(1) / std::sqrt(sum / static_cast<Real>(dim) + static_cast<Real>(epsilon));
    }
};

/// x = [RMSNorm(key); RMSNorm(value)], without gains (W1 has them): WG-KV's input where a training run
/// gives the keys after RoPE as keys and those before it as values (WG-KV, 3.2). WriteGateInput makes both
/// of the stored key.
struct NormalizedInput {
    static constexpr bool per_head = true;
    RootMeanSquare norm;

    [[nodiscard]] constexpr std::int32_t size(std::int32_t head_dim_qk, std::int32_t head_dim_vo) const {
        return head_dim_qk + head_dim_vo;
    }

    template <class Real>
    void gather(isa, std::int32_t /*head*/, const Real* key, const Real* value, std::int32_t head_dim_qk,
                std::int32_t head_dim_vo, Real* x) const {
        norm.normalize(key, head_dim_qk, x);
        norm.normalize(value, head_dim_vo, x + head_dim_qk);
    }

    template <class Real>
    void pull_back(isa, std::int32_t /*head*/, const Real* key, const Real* value, std::int32_t head_dim_qk,
                   std::int32_t head_dim_vo, const Real* d_x, Real* d_key, Real* d_value) const {
        norm.pull_back(key, head_dim_qk, d_x, d_key);
        norm.pull_back(value, head_dim_vo, d_x + head_dim_qk, d_value);
    }
};

/// WG-KV's input, from the stored key alone: x = [RMSNorm(k before RoPE); RMSNorm(k after RoPE)], where RoPE
/// is undone in fp32 for the key's position, which counts from the sequence's (or packed segment's) first
/// token. Without gains: W1 has them. The value is not looked at. Frequencies that are given save a power for
/// every pair and token.
struct WriteGateInput {
    static constexpr bool per_head = true;
    Rope rope{};
    RootMeanSquare norm;
    position_t position = 0;

    [[nodiscard]] constexpr WriteGateInput at(position_t t) const { return {rope, norm, t}; }
    [[nodiscard]] constexpr std::int32_t size(std::int32_t head_dim_qk, std::int32_t /*head_dim_vo*/) const {
        return 2 * head_dim_qk;
    }
    void check(const std::string& of, std::int32_t head_dim_qk) const {
        detail::require(
            rope.layout != rope_layout::none, [&] { return of + ".input.rope.layout"; }, "none",
            "how keys are rotated, since the gate reads them before and after RoPE");
        rope.check((of + ".input").c_str(), head_dim_qk);
    }

    template <class Real>
    void gather(isa, std::int32_t /*head*/, const Real* key, const Real* /*value*/, std::int32_t head_dim_qk,
                std::int32_t /*head_dim_vo*/, Real* x) const {
        before(key, head_dim_qk, x);
        norm.normalize(x, head_dim_qk, x);
        norm.normalize(key, head_dim_qk, x + head_dim_qk);
    }

    /// d value is 0.
    template <class Real>
    void pull_back(isa, std::int32_t /*head*/, const Real* key, const Real* /*value*/,
                   std::int32_t head_dim_qk, std::int32_t head_dim_vo, const Real* d_x, Real* d_key,
                   Real* d_value) const {
        // Rotations keep lengths, so RMSNorm(k before RoPE) is RMSNorm(k) rotated back.
        std::copy_n(d_x, head_dim_qk, d_key);
        rope.apply(position, head_dim_qk, nullptr, d_key);
        for (std::int32_t i = 0; i < head_dim_qk; ++i) {
            d_key[i] += d_x[head_dim_qk + i];
        }
        norm.pull_back(key, head_dim_qk, d_key, d_key);
        std::fill_n(d_value, head_dim_vo, Real(0));
    }

  private:
    template <class Real>
    void before(const Real* key, std::int32_t head_dim_qk, Real* x) const {
        std::copy_n(key, head_dim_qk, x);
        rope.undo(position, head_dim_qk, nullptr, x);
    }
};

/// SP-KV's input: the hidden state of the token, of `width` numbers, with one hidden layer for all heads. It
/// comes with the token (StepIO::hidden, score_hidden), since no cache has it.
struct HiddenInput {
    static constexpr bool per_head = false;
    static constexpr bool hidden_state = true;
    static constexpr float start_bias = 5.0f;  // gates start open (SP-KV, C.2)
    std::int32_t width = 0;

    [[nodiscard]] constexpr std::int32_t size(std::int32_t, std::int32_t) const { return width; }
    template <class Real>
    constexpr void gather(isa, std::int32_t, const Real* state, const Real*, std::int32_t, std::int32_t,
                          Real* x) const {
        std::copy_n(state, width, x);
    }
};

/// Whether an input is the hidden state, which scores all heads of a token at once.
template <class I>
inline constexpr bool takes_hidden_state = requires {
    requires I::hidden_state;
};

/// An input that a gradient can go back through: pull_back(isa, head, key, value, head_dim_qk, head_dim_vo,
/// d_x, d_key, d_value) overwrites d_key[head_dim_qk] and d_value[head_dim_vo].
template <class I>
concept DifferentiableInput = MlpInput<I> &&
    requires(const I& input, isa set, std::int32_t head, const float* row, std::int32_t dim, float* d) {
    {input.pull_back(set, head, row, row, dim, dim, row, d, d)};
};

static_assert(DifferentiableInput<KeyValueInput> && DifferentiableInput<NormalizedInput> &&
              DifferentiableInput<WriteGateInput> && MlpInput<HiddenInput>);

/// The weights of an MLP, with X = input.size(head_dim_qk, head_dim_vo) and layers = heads where the input is
/// per head, else 1.
template <class Float>
struct MlpParameters {
    Float* w1 = nullptr;  // [layers, hidden, X]
    Float* b1 = nullptr;  // [layers, hidden]; null stands for 0
    Float* w2 = nullptr;  // [heads, hidden]
    Float* b2 = nullptr;  // [heads]; null stands for 0
};

/// r = w2 . act(W1 x + b1) + b2, x from Input.
///
/// D is the width of keys and values, fixed at compile time, or dynamic: head_dim_qk and head_dim_vo at run
/// time. One object serves one layer; the weights are fp32, the caller's, and must outlive it. score() may be
/// called from several threads at once.
template <MlpInput Input, Activation Act, std::int32_t D = dynamic>
struct BasicMlpScorer {
    static_assert(D == dynamic || D >= 1, "kvpolicy: BasicMlpScorer<Input, Activation, D> needs D >= 1");
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when =
        takes_hidden_state<Input> ? score_time::from_hidden : score_time::on_arrival;
    template <class Float>
    using parameters = MlpParameters<Float>;
    /// What messages call it: the name of its alias, where it has one.
    static constexpr const char* name =
        std::is_same_v<Input, KeyValueInput> && std::is_same_v<Act, Silu>       ? "MlpScorer"
        : std::is_same_v<Input, WriteGateInput> && std::is_same_v<Act, GeluErf> ? "WriteGateScorer"
        : std::is_same_v<Input, HiddenInput> && std::is_same_v<Act, Silu>       ? "UtilityPredictor"
                                                                                : "BasicMlpScorer";

    std::int32_t heads = 0;
    std::int32_t head_dim_qk = D == dynamic ? 0 : D;
    std::int32_t head_dim_vo = D == dynamic ? 0 : D;
    std::int32_t hidden = 0;
    MlpParameters<const float> weights{};
    Input input{};

    [[nodiscard]] std::int32_t input_size() const { return input.size(head_dim_qk, head_dim_vo); }

    /// Real is float, or double for checks; `scratch` is scratch_size() of them. The instruction set changes
    /// no bit. The position matters to inputs that have at(t).
    template <class Real>
    Real score(std::int32_t head, const Real* key, const Real* value, Real* scratch, isa set = detected_isa(),
               position_t position = 0) const requires(!takes_hidden_state<Input>);
    [[nodiscard]] std::size_t scratch_size() const {
        return static_cast<std::size_t>(input_size()) + static_cast<std::size_t>(hidden);
    }

    /// score() of `count` <= scorer_block tokens, of which the first has position `first`; see BlockScorer.
    template <class Real>
    void score_block(std::int32_t head, std::int32_t count, const Real* keys, const Real* values,
                     Real* scores, Real* scratch, isa set = detected_isa(), position_t first = 0) const
        requires(!takes_hidden_state<Input>);
    [[nodiscard]] std::size_t block_scratch_size() const {
        return scorer_block *
               (scratch_size() + (takes_hidden_state<Input> ? static_cast<std::size_t>(heads) : 0));
    }

    /// All heads of `count` <= scorer_block tokens from their hidden states [count, width], without gaps:
    /// head h of token t goes to scores[h * head_stride + t]. The hidden layer is computed once. See
    /// HiddenScorer; scratch has block_scratch_size().
    template <class Real>
    void score_tokens(std::int32_t count, const Real* states, Real* scores, std::int64_t head_stride,
                      Real* scratch, isa set = detected_isa()) const requires(takes_hidden_state<Input>);
    [[nodiscard]] std::int32_t hidden_width() const requires(takes_hidden_state<Input>) {
        return input_size();
    }

    /// Refuses missing weights, and sizes that do not fit a layer of `kv_heads` heads with keys and
    /// values this wide.
    void check(std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim) const;
};

/// KVpop-mlp: r = w2 . SiLU(W1 [k; v] + b1) + b2, two layers, headwise.
template <std::int32_t D = dynamic>
using MlpScorer = BasicMlpScorer<KeyValueInput, Silu, D>;

/// WG-KV's write gate: g = sigmoid(r), r = w2 . GELU(W1 [RMSNorm(k before RoPE); RMSNorm(k after RoPE)] +
/// b1) + b2, headwise.
template <std::int32_t D = dynamic>
using WriteGateScorer = BasicMlpScorer<WriteGateInput, GeluErf, D>;

/// SP-KV's utility predictor: u = sigmoid(r), r_h = w2_h . SiLU(W1 x + b1) + b2_h of the hidden state x, with
/// one hidden layer for all heads. input.width is the model's; head_dim_qk and head_dim_vo are not used.
using UtilityPredictor = BasicMlpScorer<HiddenInput, Silu>;

static_assert(BlockScorer<WriteGateScorer<>> && HiddenScorer<UtilityPredictor> && Scorer<UtilityPredictor>);
static_assert(StatelessScorer<MlpScorer<>> && BlockScorer<MlpScorer<64>> && CheckedScorer<MlpScorer<64>>);
static_assert(Scorer<BasicMlpScorer<KeyValueInput, GeluErf>> && std::is_trivially_copyable_v<MlpScorer<>>);

/// Calls visit(name, pointer, count, optional) for each array of the parameters, in the order of
/// their declaration.
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

#include <kvpolicy/scorers/host/host_mlp.hpp>
