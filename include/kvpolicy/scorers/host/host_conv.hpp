// Bodies of scorers/conv.hpp on the host.
//
// With dilation 2 in every layer, even and odd tokens never meet: each parity is a sequence of its own under
// a convolution without dilation, whose three taps lie side by side in memory, so a layer is one product of
// overlapping rows.
#pragma once

#include <kvpolicy/scorers/check.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>

#include <algorithm>

namespace kvpolicy {

namespace host_backend {

/// The weights of one layer of one head. Layers count from 1.
template <class Float>
struct conv_layer {
    Float* w;
    Float* b;
};
template <std::int32_t D, class Float>
conv_layer<Float> conv_layer_of(const ConvScorer<D>& scorer, const ConvParameters<Float>& all,
                                std::int32_t layer, std::int64_t head) {
    const std::int64_t out = scorer.channels(layer), in = scorer.channels(layer - 1);
    Float* const w = layer == 1 ? all.w1 : layer == 2 ? all.w2 : all.w3;
    Float* const b = layer == 1 ? all.b1 : layer == 2 ? all.b2 : all.b3;
    return {w == nullptr ? w : w + head * out * 3 * in, b == nullptr ? b : b + head * out};
}

/// One row of the raw input: [k before RoPE; v] of token t, or 0 before the sequence begins.
template <std::int32_t D, class Real>
void conv_input(const ConvScorer<D>& scorer, position_t t, const Real* key, const Real* value,
                const float* frequencies, Real* x) {
    if (t < 0) {
        std::fill_n(x, scorer.channels(0), Real(0));
        return;
    }
    std::copy_n(key, scorer.head_dim_qk, x);
    scorer.rope.undo(t, scorer.head_dim_qk, frequencies, x);
    std::copy_n(value, scorer.head_dim_vo, x + scorer.head_dim_qk);
}

/// One layer over one parity: out [rows, Cl] before the activation, from in [rows + 2, C(l-1)].
template <std::int32_t D, class Real>
void conv_project(isa set, const ConvScorer<D>& scorer, std::int32_t layer, std::int32_t head, const Real* in,
                  std::int32_t rows, Real* out) {
    const std::ptrdiff_t width = scorer.channels(layer - 1), wide = scorer.channels(layer);
    const auto weights = conv_layer_of(scorer, scorer.weights, layer, head);
    run_kernel<project_kernel>(set, in, width, rows, weights.w, 3 * width, static_cast<int>(wide),
                               static_cast<int>(3 * width), weights.b, out, wide);
}

/// Activation and dropout of the rows of a layer. Row i is token first + 2 i.
template <std::int32_t D, class Real>
void conv_activate(isa set, const ConvScorer<D>& scorer, std::int32_t layer, position_t first,
                   std::int32_t rows, const DropoutStream& dropout, Real* y) {
    const std::int32_t width = scorer.channels(layer);
    for (std::int32_t i = 0; i < rows; ++i, y += width) {
        run_kernel<silu_kernel>(set, y, width);
        // Tokens count from -4, where the first layer begins.
        dropout.apply(static_cast<std::uint64_t>(layer), first + 2 * std::int64_t{i} + scorer.reach, width,
                      y);
    }
}

}  // namespace host_backend

template <std::int32_t D>
std::size_t ConvScorer<D>::span_scratch_size() const {
    constexpr std::size_t half = (scorer_block + 1) / 2;
    const auto width = [&](std::int32_t layer) { return static_cast<std::size_t>(channels(layer)); };
    return (half + 6) * width(0) + (half + 4) * width(1) + (half + 2) * width(2) + half * (width(3) + 1) +
           static_cast<std::size_t>(head_dim_qk);
}

template <std::int32_t D>
template <class Real>
void ConvScorer<D>::score_span(std::int32_t head, position_t first, std::int32_t count, const Real* keys,
                               const Real* values, Real* scores, Real* scratch, isa set,
                               const DropoutStream& dropout) const {
    using namespace host_backend;
    constexpr std::int32_t half = (scorer_block + 1) / 2;
    Real* const x = scratch;
    Real* const y1 = x + std::ptrdiff_t{half + 6} * channels(0);
    Real* const y2 = y1 + std::ptrdiff_t{half + 4} * channels(1);
    Real* const y3 = y2 + std::ptrdiff_t{half + 2} * channels(2);
    Real* const found = y3 + std::ptrdiff_t{half} * channels(3);
    auto* const frequencies = reinterpret_cast<float*>(found + half);
    rope.fill_frequencies(head_dim_qk, frequencies);
    for (std::int32_t parity = 0; parity < 2; ++parity) {
        const std::int32_t rows = (count - parity + 1) / 2;
        const position_t start = first + parity;  // row i of the output is token start + 2 i
        if (rows <= 0) {
            continue;
        }
        for (std::int32_t i = 0; i < rows + 6; ++i) {
            const std::ptrdiff_t row = 2 * std::ptrdiff_t{i} + parity;
            conv_input(*this, start - reach + 2 * position_t{i}, keys + row * head_dim_qk,
                       values + row * head_dim_vo, frequencies, x + std::ptrdiff_t{i} * channels(0));
        }
        conv_project(set, *this, 1, head, x, rows + 4, y1);
        conv_activate(set, *this, 1, start - 4, rows + 4, dropout, y1);
        conv_project(set, *this, 2, head, y1, rows + 2, y2);
        conv_activate(set, *this, 2, start - 2, rows + 2, dropout, y2);
        conv_project(set, *this, 3, head, y2, rows, y3);
        conv_activate(set, *this, 3, start, rows, dropout, y3);
        run_kernel<project_kernel>(
            set, y3, std::ptrdiff_t{channels(3)}, rows, weights.readout + std::ptrdiff_t{head} * channels(3),
            std::ptrdiff_t{0}, 1, channels(3),
            weights.readout_bias == nullptr ? weights.readout_bias : weights.readout_bias + head, found,
            std::ptrdiff_t{1});
        for (std::int32_t i = 0; i < rows; ++i) {
            scores[2 * i + parity] = found[i];
        }
    }
}

template <std::int32_t D>
void ConvScorer<D>::check(std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim) const {
    checks::check_scorer_shape("ConvScorer", D, *this, kv_heads, key_dim, value_dim);
    detail::require(channels(0) >= 8, "ConvScorer.head_dim_qk + head_dim_vo", channels(0),
                    "8 or more, since every layer halves the channels");
    detail::require(batch >= 0, "ConvScorer.batch", batch, "0 (as late as the window allows) or more");
    rope.check("ConvScorer", head_dim_qk);
    checks::check_parameters("ConvScorer", *this, weights);
}

}  // namespace kvpolicy
