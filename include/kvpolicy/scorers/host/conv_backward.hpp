// Gradients of ConvScorer. Every parity of every segment is a dense sequence (scorers/host/host_conv.hpp).
// Pass one recomputes it layer by layer and pulls gradients back to its inputs. Pass two adds the weights'
// gradients, parallel over the weights' rows and in order over the sequences, so sums do not depend on the
// threads.
#pragma once

#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/host/host_conv.hpp>
#include <kvpolicy/scorers/host/host_sequence.hpp>
#include <kvpolicy/scorers/host/rows.hpp>

#include <algorithm>

namespace kvpolicy {

namespace host_backend {

/// One parity of one segment of a sequence: outputs are tokens first, first + 2, ... (`rows` of them),
/// counted from the segment's first token, which is token `begin` of the call. Its rows of x start at row
/// `at` of the sequence's arrays, which have conv_stream_rows() rows.
struct conv_stream {
    std::int64_t segment, begin, at;
    position_t first;
    std::int32_t rows;
};

/// Rows that the two streams of a segment may have beyond its tokens: their outputs are the tokens less
/// `delay`, and each has 6 rows of x more.
inline std::int64_t conv_extra_rows(std::int32_t delay) {
    return std::max<std::int64_t>(0, 2 * std::int64_t{ConvScorer<>::reach} - delay);
}
/// Rows of a sequence's arrays.
inline std::int64_t conv_stream_rows(const Sequences& sequences, std::int32_t delay) {
    const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
    return std::max<std::int64_t>(sequences.length, 0) + segments * conv_extra_rows(delay);
}

/// Calls visit(stream) for the streams of sequence b, in order.
template <class Visit>
void for_each_conv_stream(const Sequences& sequences, std::int64_t b, std::int32_t delay, Visit&& visit) {
    for_each_leaving(sequences, b, 0, sequences.length_of(b), delay,
                     [&](std::int64_t segment, std::int64_t begin, std::int64_t first, std::int64_t end) {
                         std::int64_t at = begin + segment * conv_extra_rows(delay);
                         for (std::int32_t parity = 0; parity < 2; ++parity) {
                             const auto rows = static_cast<std::int32_t>((end - first - parity + 1) / 2);
                             if (rows > 0) {
                                 visit(conv_stream{segment, begin, at, first - begin + parity, rows});
                             }
                             at += rows + 6;
                         }
                     });
}

/// Arrays [B, Hkv, rows, Cl] of x and the layers: y before the activation, then a = drop(SiLU(y)), then d y.
template <class Real>
struct conv_backward_memory {
    Real* x;
    Real* y[4];
    Real* a[4];
    Real* d[4];
    Real* d_x;
    Real* w[4];          // converted weights, where they must be
    float* frequencies;  // of the RoPE
    std::size_t bytes;

    template <class S, Storage T>
    conv_backward_memory(const S& scorer, const ScoreBackward<T>& call, void* data) {
        detail::arena from(data);
        const std::size_t rows = static_cast<std::size_t>(call.k.batch) *
                                 static_cast<std::size_t>(call.k.heads) *
                                 static_cast<std::size_t>(conv_stream_rows(call.sequences, call.delay));
        const auto width = [&](std::int32_t layer) {
            return static_cast<std::size_t>(scorer.channels(layer));
        };
        x = from.take<Real>(rows * width(0));
        d_x = from.take<Real>(call.d_k.data != nullptr ? rows * width(0) : 0);
        for (std::int32_t layer = 1; layer <= 3; ++layer) {
            for (Real** array : {&y[layer], &a[layer], &d[layer]}) {
                *array = from.take<Real>(rows * width(layer));
            }
            const bool convert = !std::is_same_v<Real, float>;
            w[layer] = from.take<Real>(
                convert ? static_cast<std::size_t>(scorer.heads) * width(layer) * 3 * width(layer - 1) : 0);
        }
        frequencies = from.take<float>(static_cast<std::size_t>(scorer.head_dim_qk));
        bytes = from.bytes();
    }
};

/// One backward pass: recompute() and pull_back() of each (sequence, head), then add_weight_gradients() of
/// each strip of weight rows.
template <std::int32_t D, Storage T>
struct conv_backward_pass {
    using Real = compute_t<T>;
    using stream = conv_stream;
    static constexpr std::int32_t strip = 16;  // rows of a layer's weights per task

    isa set;
    const ConvScorer<D>& scorer;
    const ScoreBackward<T>& call;
    const conv_backward_memory<Real>& memory;
    const Real* weights[4] = {};

    conv_backward_pass(isa instructions, const ConvScorer<D>& of, const ScoreBackward<T>& backward_call,
                       const conv_backward_memory<Real>& arrays)
        : set(instructions), scorer(of), call(backward_call), memory(arrays) {
        for (std::int32_t layer = 1; layer <= 3; ++layer) {
            const auto all = conv_layer_of(scorer, scorer.weights, layer, 0);
            weights[layer] = real_weights(
                all.w, static_cast<std::size_t>(call.k.heads * width(layer) * 3 * width(layer - 1)),
                memory.w[layer]);
        }
        scorer.rope.fill_frequencies(scorer.head_dim_qk, memory.frequencies);
    }

    [[nodiscard]] std::ptrdiff_t width(std::int32_t layer) const {
        return std::ptrdiff_t{scorer.channels(layer)};
    }
    [[nodiscard]] bool inputs() const { return call.d_k.data != nullptr; }
    // Row i of layer l is token first - 2 (3 - l) + 2 i, of x token first - 6 + 2 i.
    static std::int32_t rows_in(std::int32_t layer, const stream& s) { return s.rows + 2 * (3 - layer); }
    [[nodiscard]] Real* rows_of(Real* array, std::int32_t layer, std::int64_t b, std::int64_t h,
                                const stream& s) const {
        const std::int64_t rows = conv_stream_rows(call.sequences, call.delay);
        return array + ((b * call.k.heads + h) * rows + s.at) * width(layer);
    }
    [[nodiscard]] Real d_score(std::int64_t b, std::int64_t h, const stream& s, std::int32_t i) const {
        return call.d_scores.head(b, h)[s.begin + s.first + std::int64_t{2} * i];
    }

    /// All that one (sequence, head) adds to its layers' outputs and to its inputs.
    void run_head(std::int64_t b, std::int64_t h) const {
        if (inputs()) {
            for (std::int64_t t = 0; t < call.sequences.length_of(b); ++t) {
                std::fill_n(call.d_k.row(b, h, t), scorer.head_dim_qk, Real(0));
                std::fill_n(call.d_v.row(b, h, t), scorer.head_dim_vo, Real(0));
            }
        }
        for_each_conv_stream(call.sequences, b, call.delay, [&](const stream& s) {
            const DropoutStream dropout{call.dropout, dropout_stream(b, h, call.k.heads, s.segment)};
            load_inputs(b, h, s);
            recompute(b, h, s, dropout);
            for (std::int32_t layer = 3; layer >= 1; --layer) {
                pull_back(b, h, s, layer, dropout);
            }
            if (inputs()) {
                add_layer_above(b, h, s, 0, rows_of(memory.d_x, 0, b, h, s));
                store_inputs(b, h, s);
            }
        });
    }

    /// x: the keys before RoPE and the values of a stream, with zeros before the segment's first token.
    void load_inputs(std::int64_t b, std::int64_t h, const stream& s) const {
        Real* const x = rows_of(memory.x, 0, b, h, s);
        for (std::int32_t i = 0; i < s.rows + 6; ++i) {
            const position_t t = s.first - scorer.reach + 2 * i;
            Real* row = x + i * width(0);
            if (t < 0) {
                std::fill_n(row, width(0), Real(0));
                continue;
            }
            convert_row(call.k.row(b, h, s.begin + t), scorer.head_dim_qk, row);
            scorer.rope.undo(t, scorer.head_dim_qk, memory.frequencies, row);
            convert_row(call.v.row(b, h, s.begin + t), scorer.head_dim_vo, row + scorer.head_dim_qk);
        }
    }

    /// y and a of the three layers.
    void recompute(std::int64_t b, std::int64_t h, const stream& s, const DropoutStream& dropout) const {
        const Real* in = rows_of(memory.x, 0, b, h, s);
        for (std::int32_t layer = 1; layer <= 3; ++layer) {
            const std::int32_t rows = rows_in(layer, s);
            Real* y = rows_of(memory.y[layer], layer, b, h, s);
            Real* a = rows_of(memory.a[layer], layer, b, h, s);
            conv_project(set, scorer, layer, static_cast<std::int32_t>(h), in, rows, y);
            std::copy_n(y, rows * width(layer), a);
            conv_activate(set, scorer, layer, s.first - std::int64_t{2} * (3 - layer), rows, dropout, a);
            in = a;
        }
    }

    /// d y of one layer, from the scores or from the layer above.
    void pull_back(std::int64_t b, std::int64_t h, const stream& s, std::int32_t layer,
                   const DropoutStream& dropout) const {
        Real* d = rows_of(memory.d[layer], layer, b, h, s);
        const std::int32_t rows = rows_in(layer, s);
        if (layer == 3) {
            const float* readout = scorer.weights.readout + h * width(3);
            for (std::int32_t i = 0; i < rows; ++i) {
                const Real d_out = d_score(b, h, s, i);
                for (std::ptrdiff_t c = 0; c < width(3); ++c) {
                    d[i * width(3) + c] = d_out * static_cast<Real>(readout[c]);
                }
            }
        } else {
            add_layer_above(b, h, s, layer, d);
        }
        const Real* y = rows_of(memory.y[layer], layer, b, h, s);
        for (std::int32_t i = 0; i < rows; ++i) {
            const position_t t = s.first - std::int64_t{2} * (3 - layer) + std::int64_t{2} * i;
            dropout.apply(static_cast<std::uint64_t>(layer), t + scorer.reach, scorer.channels(layer),
                          d + i * width(layer));
            Silu::pull_back(y + i * width(layer), d + i * width(layer), scorer.channels(layer));
        }
    }

    /// d of a layer's outputs from d y of the layer above, tap by tap: rows overlap between taps only.
    void add_layer_above(std::int64_t b, std::int64_t h, const stream& s, std::int32_t layer, Real* d) const {
        const std::int32_t rows = rows_in(layer, s);
        std::fill_n(d, rows * width(layer), Real(0));
        const Real* above = rows_of(memory.d[layer + 1], layer + 1, b, h, s);
        const std::ptrdiff_t wide = width(layer + 1);
        for (std::int32_t tap = 0; tap < 3; ++tap) {
            run_kernel<combine_kernel>(set, above, wide, std::ptrdiff_t{1}, rows - 2, static_cast<int>(wide),
                                       weights[layer + 1] + (h * wide * 3 + tap) * width(layer),
                                       3 * width(layer), static_cast<int>(width(layer)),
                                       d + tap * width(layer), width(layer), true);
        }
    }

    /// d k and d v of a stream's tokens; each token is in one stream.
    void store_inputs(std::int64_t b, std::int64_t h, const stream& s) const {
        for (std::int32_t i = 0; i < s.rows + 6; ++i) {
            const position_t t = s.first - scorer.reach + 2 * i;
            if (t < 0) {
                continue;
            }
            const Real* d_x = rows_of(memory.d_x, 0, b, h, s) + i * width(0);
            Real* d_k = call.d_k.row(b, h, s.begin + t);
            std::copy_n(d_x, scorer.head_dim_qk, d_k);
            scorer.rope.apply(t, scorer.head_dim_qk, memory.frequencies, d_k);
            std::copy_n(d_x + scorer.head_dim_qk, scorer.head_dim_vo, call.d_v.row(b, h, s.begin + t));
        }
    }

    /// What all sequences add to rows [from, from + strip) of one layer's weights of one head, in their
    /// order.
    void add_weight_gradients(const ConvParameters<Real>& gradients, std::int64_t h, std::int32_t layer,
                              std::ptrdiff_t from) const {
        const auto some = static_cast<int>(std::min<std::ptrdiff_t>(strip, width(layer) - from));
        const auto into = conv_layer_of(scorer, gradients, layer, h);
        for (std::int64_t b = 0; b < call.k.batch; ++b) {
            for_each_conv_stream(call.sequences, b, call.delay, [&](const stream& s) {
                const std::int32_t rows = rows_in(layer, s);
                const Real* d = rows_of(memory.d[layer], layer, b, h, s) + from;
                const Real* in = layer == 1 ? rows_of(memory.x, 0, b, h, s)
                                            : rows_of(memory.a[layer - 1], layer - 1, b, h, s);
                const std::ptrdiff_t taps = 3 * width(layer - 1);
                if (into.w != nullptr) {
                    run_kernel<combine_kernel>(set, d, std::ptrdiff_t{1}, width(layer), some, rows, in,
                                               width(layer - 1), static_cast<int>(taps), into.w + from * taps,
                                               taps, true);
                }
                for (std::int32_t i = 0; into.b != nullptr && i < rows; ++i) {
                    for (int c = 0; c < some; ++c) {
                        into.b[from + c] += d[i * width(layer) + c];
                    }
                }
                if (layer == 3) {
                    add_readout_gradients(gradients, b, h, s, from, some);
                }
            });
        }
    }

    /// What one stream adds to elements [from, from + count) of the readout of one head, and to its bias.
    void add_readout_gradients(const ConvParameters<Real>& gradients, std::int64_t b, std::int64_t h,
                               const stream& s, std::ptrdiff_t from, int count) const {
        const Real* a = rows_of(memory.a[3], 3, b, h, s) + from;
        for (std::int32_t i = 0; i < s.rows; ++i) {
            const Real d_out = d_score(b, h, s, i);
            for (int c = 0; gradients.readout != nullptr && c < count; ++c) {
                gradients.readout[h * width(3) + from + c] += d_out * a[i * width(3) + c];
            }
            if (from == 0 && gradients.readout_bias != nullptr) {
                gradients.readout_bias[h] += d_out;
            }
        }
    }
};

}  // namespace host_backend

template <std::int32_t D, Storage T>
std::size_t backward_workspace_bytes(const host&, const ConvScorer<D>& scorer, const ScoreBackward<T>& call) {
    checks::check_shape(call.sequences, call.k.heads);
    return host_backend::conv_backward_memory<compute_t<T>>(scorer, call, nullptr).bytes;
}

template <std::int32_t D, Storage T>
void backward(const host& ctx, const ConvScorer<D>& scorer, const ScoreBackward<T>& call,
              ConvParameters<compute_t<T>> gradients, workspace_view workspace) {
    namespace hb = host_backend;
    checks::check_workspace(workspace, backward_workspace_bytes(ctx, scorer, call));
    const hb::conv_backward_memory<compute_t<T>> memory(scorer, call, workspace.data);
    const hb::conv_backward_pass<D, T> pass(ctx.instructions(), scorer, call, memory);
    const std::int64_t heads = call.k.heads;
    ctx.parallel_for(call.k.batch * heads,
                     [&](std::int64_t task) { pass.run_head(task / heads, task % heads); });

    // A task is some rows of the weights of one layer of one head; the score head goes with the last layer's.
    std::int64_t strips[4] = {};
    for (std::int32_t layer = 1; layer <= 3; ++layer) {
        strips[layer] = (pass.width(layer) + pass.strip - 1) / pass.strip;
    }
    const std::int64_t each = strips[1] + strips[2] + strips[3];
    ctx.parallel_for(each * heads, [&](std::int64_t task) {
        std::int64_t part = task % each;
        std::int32_t layer = 1;
        for (; part >= strips[layer]; ++layer) {
            part -= strips[layer];
        }
        pass.add_weight_gradients(gradients, task / each, layer, part * pass.strip);
    });
}

}  // namespace kvpolicy
