// LTE's scorer: a small convolution over a key's neighbors (LTE, 3.1.1 and appendix A).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/dropout.hpp>
#include <kvpolicy/scorers/rope.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// The weights of a ConvScorer, with the widths C0 = head_dim_qk + head_dim_vo and Cl = C(l-1) / 2, rounded
/// down. A layer's weight [heads, Cl, 3, C(l-1)] has the three taps t - 2, t, t + 2 before the channels: a
/// Conv1d weight of one group with its last two dimensions exchanged.
template <class Float>
struct ConvParameters {
    Float* w1 = nullptr;            // [heads, C1, 3, C0]
    Float* b1 = nullptr;            // [heads, C1]; null stands for 0, as for all biases
    Float* w2 = nullptr;            // [heads, C2, 3, C1]
    Float* b2 = nullptr;            // [heads, C2]
    Float* w3 = nullptr;            // [heads, C3, 3, C2]
    Float* b3 = nullptr;            // [heads, C3]
    Float* readout = nullptr;       // [heads, C3]
    Float* readout_bias = nullptr;  // [heads]
};

/// Per head, over x_t = [k_t before RoPE; v_t], with y0 = x and for l = 1, 2, 3:
///
///     y_l[t] = drop(SiLU(b_l + sum over j = -1, 0, 1 of W_l[j] y_{l-1}[t + 2 j])),      r_t = readout .
///         y_3[t] + bias
///
/// so that r_t sees tokens t - 6 .. t + 6, of which dilation 2 uses every other one. Before a sequence's
/// first token x is 0 (only the raw input is padded: the layers compute y_1 and y_2 there from it). The
/// right side is not padded. r is a raw logit; LTE's sigmoid and its threshold of 0.5 are
/// ThresholdGate<above> at 0.
///
/// The keys are read as they are stored, on every path, and `rope` is undone in fp32, with positions that
/// count from the sequence's first token (of the packed segment's, where cu_seqlens resets).
///
/// score_sequence with a delay of 6 scores every key that has 6 keys after it: those of LTE's sums over all
/// keys (eq. 6, 7; the paper does not pad on the right either). The last `delay` keys have no score: their
/// entry is -infinity, r = 0.
///
/// In a cache the score of key t is known from query t + 6 on and can be computed until query t + w - 7,
/// while its left context is stored, so w >= 13. Within that `batch` tokens are scored at once: tokens m L ..
/// (m + 1) L - 1 when token (m + 1) L + 5 comes, L = min(batch, w - 12); 0 stands for w - 12, as late as
/// possible, which costs least (3.1.3, lazy scoring), 1 scores every token as soon as it can be. The
/// scores are the same bits.
///
/// D is the width of keys and values, fixed at compile time, or dynamic: head_dim_qk and head_dim_vo at run
/// time. One object serves one layer; the weights are fp32, the caller's, and must outlive it. May be called
/// from several threads at once.
template <std::int32_t D = dynamic>
struct ConvScorer {
    static_assert(D == dynamic || D >= 4, "kvpolicy: ConvScorer<D> needs D >= 4, to halve 2 D three times");
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::in_window;
    static constexpr std::int32_t reach = 6;
    static constexpr float start_bias = 1.0f;  ///< of the readout: gates start open
    template <class Float>
    using parameters = ConvParameters<Float>;

    std::int32_t heads = 0;
    std::int32_t head_dim_qk = D == dynamic ? 0 : D;
    std::int32_t head_dim_vo = D == dynamic ? 0 : D;
    ConvParameters<const float> weights{};
    Rope rope{};
    std::int32_t batch = 0;

    /// C0 .. C3.
    [[nodiscard]] constexpr std::int32_t channels(std::int32_t layer) const {
        return (head_dim_qk + head_dim_vo) >> layer;
    }

    [[nodiscard]] constexpr std::int32_t tokens_at_once(std::int32_t window) const {
        const std::int32_t most = window - 2 * reach;
        return batch == 0 || batch > most ? most : batch;
    }

    /// Scores tokens first .. first + count - 1 of a sequence, count <= scorer_block. keys [count + 12, Dk]
    /// and values [count + 12, Dv], without gaps, are those of tokens first - 6 .. first + count + 5; rows
    /// before token 0 are not read. Real is float, or double for checks; scratch has span_scratch_size() of
    /// them. The instruction set changes no bit, and neither does how a range is cut.
    template <class Real>
    void score_span(std::int32_t head, position_t first, std::int32_t count, const Real* keys,
                    const Real* values, Real* scores, Real* scratch, isa set = detected_isa(),
                    const DropoutStream& dropout = {}) const;
    [[nodiscard]] std::size_t span_scratch_size() const;

    /// Refuses missing weights, sizes that do not fit a layer of `kv_heads` heads with keys and values this
    /// wide, a batch below 0, a RoPE that does not fit.
    void check(std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim) const;

    /// A snapshot must agree in this, besides the window: which keys have their score already.
    [[nodiscard]] std::uint64_t fingerprint() const { return static_cast<std::uint64_t>(batch); }
};

static_assert(ContextScorer<ConvScorer<>> && CheckedScorer<ConvScorer<64>> && Scorer<ConvScorer<128>>);
static_assert(std::is_trivially_copyable_v<ConvScorer<>>);

/// Calls visit(name, pointer, count, optional) for each array of the parameters, in the order of
/// their declaration.
template <std::int32_t D, class Float, class Visit>
void for_each_parameter(const ConvScorer<D>& scorer, ConvParameters<Float>& parameters, Visit&& visit) {
    const auto heads = static_cast<std::size_t>(scorer.heads);
    const auto width = [&](std::int32_t layer) { return static_cast<std::size_t>(scorer.channels(layer)); };
    visit("w1", parameters.w1, heads * width(1) * 3 * width(0), false);
    visit("b1", parameters.b1, heads * width(1), true);
    visit("w2", parameters.w2, heads * width(2) * 3 * width(1), false);
    visit("b2", parameters.b2, heads * width(2), true);
    visit("w3", parameters.w3, heads * width(3) * 3 * width(2), false);
    visit("b3", parameters.b3, heads * width(3), true);
    visit("readout", parameters.readout, heads * width(3), false);
    visit("readout_bias", parameters.readout_bias, heads, true);
}

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_conv.hpp>
