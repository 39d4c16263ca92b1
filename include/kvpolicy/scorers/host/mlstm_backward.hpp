// Bodies of scorers/backward.hpp for the mLSTM on the host: the streams of each head, then what their tokens add to weights and
// inputs. mlstm_backward_stream.hpp has the equations.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/host/mlstm_backward_stream.hpp>
#include <kvpolicy/scorers/host/rows.hpp>

#include <algorithm>

namespace kvpolicy {

template <std::int32_t D, class Feature, class Values, Storage T>
std::size_t backward_workspace_bytes(const host& on, const mLSTMScorer<D, Feature, Values>& scorer,
                                     const ScoreBackward<T>& call) {
    checks::check_shape(call.sequences, call.k.heads);
    return host_backend::mlstm_backward_memory<mLSTMScorer<D, Feature, Values>, compute_t<T>>(on, scorer,
                                                                                              call, nullptr)
        .bytes;
}

template <std::int32_t D, class Feature, class Values, Storage T>
void backward(const host& on, const mLSTMScorer<D, Feature, Values>& scorer, const ScoreBackward<T>& call,
              mLSTMParameters<compute_t<T>> gradients, workspace_view workspace) {
    namespace hb = host_backend;
    using Real = compute_t<T>;
    using Scorer = mLSTMScorer<D, Feature, Values>;
    static_assert(DifferentiableFeatureMap<Feature>,
                  "kvpolicy: this feature map has no pull_back, so its scorer cannot be trained");
    checks::check_workspace(workspace, backward_workspace_bytes(on, scorer, call));
    const hb::mlstm_backward_memory<Scorer, Real> memory(on, scorer, call, workspace.data);
    const isa set = on.instructions();
    const hb::mlstm_token_row row(scorer);
    const std::int32_t inputs = scorer.input_size(), heads = call.k.heads, batch = call.k.batch;
    const std::int32_t projection = scorer.projection(), width = scorer.value_width();
    const std::int64_t length = call.sequences.length;
    const std::ptrdiff_t readout = 2 * std::ptrdiff_t{width} + 1;
    const auto tokens_of = [&](std::int64_t b, std::int64_t h) {
        return memory.tokens + (b * heads + h) * length * row.size;
    };

    on.parallel_for(std::int64_t{batch} * heads, [&](std::int64_t task, int thread) {
        const std::int64_t b = task / heads, h = task % heads;
        std::fill_n(tokens_of(b, h), call.sequences.length_of(b) * row.size, Real(0));
        Real* sums = memory.readouts + task * readout;
        std::fill_n(sums, readout, Real(0));
        hb::mlstm_backward_head<Scorer, T> head(set, scorer, call, memory.of_thread(scorer, thread), b, h,
                                                tokens_of(b, h), sums);
        const std::int64_t segments = call.sequences.cu_seqlens == nullptr ? 1 : call.sequences.segments;
        for (std::int64_t segment = 0; segment < segments; ++segment) {
            head.run(hb::segment_of(call.sequences, b, segment));
        }
    });

    // Weights that multiply x: rows of `count` numbers at `from` in the tokens' rows.
    struct weight_rows {
        Real* into;
        const float* weights;
        std::ptrdiff_t from;
        std::int32_t count;
    };
    const weight_rows parts[] = {
        {gradients.w_q, scorer.weights.w_q, row.q, projection},
        {gradients.w_k, scorer.weights.w_k, row.k, projection},
        {gradients.w_v, Values::projected ? scorer.weights.w_v : nullptr, row.v, width},
        {gradients.w_i, scorer.weights.w_i, row.i, 1},
        {gradients.w_f, scorer.weights.w_f, row.f, 1},
        {gradients.skip, scorer.weights.skip, row.score, 1}};
    constexpr std::int64_t part_count = 6;
    const auto gather = [&](std::int64_t b, std::int64_t h, std::int64_t first, std::int32_t count, Real* x) {
        for (std::int32_t t = 0; t < count; ++t, x += inputs) {
            hb::convert_row(call.k.row(b, h, first + t), call.k.dim, x);
            hb::convert_row(call.v.row(b, h, first + t), call.v.dim, x + call.k.dim);
        }
    };
    on.parallel_for(part_count * heads, [&](std::int64_t task, int thread) {
        const weight_rows& part = parts[task % part_count];
        const std::int64_t h = task / part_count;
        if (part.into == nullptr || part.weights == nullptr) {
            return;
        }
        Real* x = memory.of_thread(scorer, thread).x;
        for (std::int64_t b = 0; b < batch; ++b) {
            hb::for_each_block(call.sequences, b, [&](std::int64_t first, std::int32_t count) {
                gather(b, h, first, count, x);
                const Real* rows = tokens_of(b, h) + first * row.size + part.from;
                hb::run_kernel<hb::combine_kernel>(set, rows, std::ptrdiff_t{1}, row.size, part.count, count,
                                                   static_cast<const Real*>(x), std::ptrdiff_t{inputs},
                                                   inputs, part.into + h * part.count * inputs,
                                                   std::ptrdiff_t{inputs}, true);
            });
        }
    });
    for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t b = 0; b < batch; ++b) {
            const Real* sums = memory.readouts + (b * heads + h) * readout;
            for (std::int32_t e = 0; e < width; ++e) {
                if (gradients.readout != nullptr) {
                    gradients.readout[h * width + e] += sums[e];
                }
                if (gradients.norm_gain != nullptr) {
                    gradients.norm_gain[h * width + e] += sums[width + e];
                }
            }
            if (gradients.readout_bias != nullptr) {
                gradients.readout_bias[h] += sums[std::ptrdiff_t{2} * width];
            }
            const Real* token = tokens_of(b, h);
            for (std::int64_t t = 0; t < call.sequences.length_of(b); ++t, token += row.size) {
                if (gradients.b_i != nullptr) {
                    gradients.b_i[h] += token[row.i];
                }
                if (gradients.b_f != nullptr) {
                    gradients.b_f[h] += token[row.f];
                }
            }
        }
    }
    if (call.d_k.data == nullptr) {
        return;
    }

    // d x = sum over those rows of weight^T (token's row), and the value itself where it is written as it is.
    const Real* weights[part_count];
    Real* buffer = memory.weights;
    for (std::int64_t i = 0; i < part_count; ++i) {
        const std::size_t count = static_cast<std::size_t>(heads) * static_cast<std::size_t>(parts[i].count) *
                                  static_cast<std::size_t>(inputs);
        weights[i] =
            parts[i].weights == nullptr ? nullptr : hb::real_weights(parts[i].weights, count, buffer);
        if (!std::is_same_v<Real, float>) {
            buffer += count;
        }
    }
    const std::int64_t blocks = (length + scorer_block - 1) / scorer_block;
    on.parallel_for(blocks * batch * heads, [&](std::int64_t task, int thread) {
        const std::int64_t b = task / blocks / heads, h = task / blocks % heads;
        const std::int64_t first = task % blocks * scorer_block;
        const auto count = static_cast<std::int32_t>(
            std::min<std::int64_t>(scorer_block, call.sequences.length_of(b) - first));
        if (count <= 0) {
            return;
        }
        Real* d_x = memory.of_thread(scorer, thread).x;
        std::fill_n(d_x, std::ptrdiff_t{count} * inputs, Real(0));
        const Real* rows = tokens_of(b, h) + first * row.size;
        for (std::int64_t i = 0; i < part_count; ++i) {
            if (weights[i] == nullptr) {
                continue;
            }
            hb::run_kernel<hb::combine_kernel>(set, rows + parts[i].from, row.size, std::ptrdiff_t{1}, count,
                                               parts[i].count, weights[i] + h * parts[i].count * inputs,
                                               std::ptrdiff_t{inputs}, inputs, d_x, std::ptrdiff_t{inputs},
                                               true);
        }
        for (std::int32_t t = 0; t < count; ++t) {
            const Real* from = d_x + std::ptrdiff_t{t} * inputs;
            std::copy_n(from, call.k.dim, call.d_k.row(b, h, first + t));
            Real* d_v = call.d_v.row(b, h, first + t);
            std::copy_n(from + call.k.dim, call.v.dim, d_v);
            if constexpr (!Values::projected) {
                for (std::int32_t e = 0; e < width; ++e) {
                    d_v[e] += rows[t * row.size + row.v + e];
                }
            }
        }
    });
}

}  // namespace kvpolicy
