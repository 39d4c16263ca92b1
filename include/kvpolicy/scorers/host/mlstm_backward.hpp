// Bodies of scorers/backward.hpp for the mLSTM on the host: the streams of each head, then what their tokens
// add to weights and inputs. mlstm_backward_stream.hpp has the equations.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/host/mlstm_backward_stream.hpp>
#include <kvpolicy/scorers/host/rows.hpp>

#include <algorithm>

namespace kvpolicy {

namespace host_backend {

/// One backward pass: run_head() of each (sequence, head), then the weights' gradients, then the inputs'.
template <class Scorer, Storage T>
struct mlstm_backward_pass {
    using Real = compute_t<T>;
    using parameters = mLSTMParameters<Real>;

    /// Weights [Hkv, count, inputs] that multiply x; their gradient's rows are at `from` in the tokens' rows.
    struct weight_rows {
        Real* into;
        const float* weights;
        std::ptrdiff_t from;
        std::int32_t count;
    };
    static constexpr std::int64_t part_count = 6;

    const host& ctx;
    const Scorer& scorer;
    const ScoreBackward<T>& call;
    const mlstm_backward_memory<Scorer, Real>& memory;
    const parameters& gradients;
    isa set = ctx.instructions();
    mlstm_token_row row{scorer};
    std::int32_t inputs = scorer.input_size();
    std::int64_t heads = call.k.heads;
    std::ptrdiff_t readout_size = 2 * std::ptrdiff_t{scorer.value_width()} + 1;
    weight_rows parts[part_count] = {
        {gradients.w_q, scorer.weights.w_q, row.q, scorer.projection()},
        {gradients.w_k, scorer.weights.w_k, row.k, scorer.projection()},
        {gradients.w_v, Scorer::value_path::projected ? scorer.weights.w_v : nullptr, row.v,
         scorer.value_width()},
        {gradients.w_i, scorer.weights.w_i, row.i, 1},
        {gradients.w_f, scorer.weights.w_f, row.f, 1},
        {gradients.skip, scorer.weights.skip, row.score, 1}};

    [[nodiscard]] Real* tokens_of(std::int64_t b, std::int64_t h) const {
        return memory.tokens + (b * heads + h) * call.sequences.length * row.size;
    }
    [[nodiscard]] Real* readout_of(std::int64_t b, std::int64_t h) const {
        return memory.readouts + (b * heads + h) * readout_size;
    }

    /// The streams of one (sequence, head): the tokens' rows, and the sums of the readout.
    void run_head(std::int64_t b, std::int64_t h, int thread) const {
        std::fill_n(tokens_of(b, h), call.sequences.length_of(b) * row.size, Real(0));
        std::fill_n(readout_of(b, h), readout_size, Real(0));
        mlstm_backward_head<Scorer, T> head(set, scorer, call, memory.of_thread(scorer, thread), b, h,
                                            tokens_of(b, h), readout_of(b, h));
        const std::int64_t segments = call.sequences.cu_seqlens == nullptr ? 1 : call.sequences.segments;
        for (std::int64_t segment = 0; segment < segments; ++segment) {
            head.run(segment_of(call.sequences, b, segment));
        }
    }

    /// x of tokens [first, first + count).
    void gather(std::int64_t b, std::int64_t h, std::int64_t first, std::int32_t count, Real* x) const {
        for (std::int32_t t = 0; t < count; ++t, x += inputs) {
            convert_row(call.k.row(b, h, first + t), call.k.dim, x);
            convert_row(call.v.row(b, h, first + t), call.v.dim, x + call.k.dim);
        }
    }

    /// The gradient of one part's weights of one head, over all sequences in order.
    void add_weight_gradients(const weight_rows& part, std::int64_t h, int thread) const {
        if (part.into == nullptr || part.weights == nullptr) {
            return;
        }
        Real* x = memory.of_thread(scorer, thread).x;
        for (std::int64_t b = 0; b < call.k.batch; ++b) {
            for_each_block(call.sequences, b, [&](std::int64_t first, std::int32_t count) {
                gather(b, h, first, count, x);
                const Real* rows = tokens_of(b, h) + first * row.size + part.from;
                run_kernel<combine_kernel>(set, rows, std::ptrdiff_t{1}, row.size, part.count, count,
                                           static_cast<const Real*>(x), std::ptrdiff_t{inputs}, inputs,
                                           part.into + h * part.count * inputs, std::ptrdiff_t{inputs}, true);
            });
        }
    }

    /// The gradients that are sums: readout, norm_gain and the biases, of one sequence and head.
    void add_sums(std::int64_t b, std::int64_t h) const {
        const std::int32_t width = scorer.value_width();
        const Real* sums = readout_of(b, h);
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

    /// The parts' weights in the type that is computed in; null where a part has none.
    struct real_parts {
        const Real* weights[part_count];
    };
    [[nodiscard]] real_parts convert_weights() const {
        real_parts converted;
        Real* buffer = memory.weights;
        for (std::int64_t i = 0; i < part_count; ++i) {
            const std::size_t count = static_cast<std::size_t>(heads) *
                                      static_cast<std::size_t>(parts[i].count) *
                                      static_cast<std::size_t>(inputs);
            converted.weights[i] =
                parts[i].weights == nullptr ? nullptr : real_weights(parts[i].weights, count, buffer);
            if (!std::is_same_v<Real, float>) {
                buffer += count;
            }
        }
        return converted;
    }

    /// d x of a block of tokens: the sum over the parts of weight^T (token's row), and the value itself where
    /// it is written as it is.
    void add_input_gradients(const real_parts& converted, std::int64_t b, std::int64_t h, std::int64_t first,
                             std::int32_t count, int thread) const {
        Real* d_x = memory.of_thread(scorer, thread).x;
        std::fill_n(d_x, std::ptrdiff_t{count} * inputs, Real(0));
        const Real* rows = tokens_of(b, h) + first * row.size;
        for (std::int64_t i = 0; i < part_count; ++i) {
            if (converted.weights[i] == nullptr) {
                continue;
            }
            run_kernel<combine_kernel>(set, rows + parts[i].from, row.size, std::ptrdiff_t{1}, count,
                                       parts[i].count, converted.weights[i] + h * parts[i].count * inputs,
                                       std::ptrdiff_t{inputs}, inputs, d_x, std::ptrdiff_t{inputs}, true);
        }
        for (std::int32_t t = 0; t < count; ++t) {
            const Real* from = d_x + std::ptrdiff_t{t} * inputs;
            std::copy_n(from, call.k.dim, call.d_k.row(b, h, first + t));
            Real* d_v = call.d_v.row(b, h, first + t);
            std::copy_n(from + call.k.dim, call.v.dim, d_v);
            if constexpr (!Scorer::value_path::projected) {
                for (std::int32_t e = 0; e < scorer.value_width(); ++e) {
                    d_v[e] += rows[t * row.size + row.v + e];
                }
            }
        }
    }
};

}  // namespace host_backend

template <std::int32_t D, class Feature, class Values, Storage T>
std::size_t backward_workspace_bytes(const host& ctx, const mLSTMScorer<D, Feature, Values>& scorer,
                                     const ScoreBackward<T>& call) {
    checks::check_shape(call.sequences, call.k.heads);
    return host_backend::mlstm_backward_memory<mLSTMScorer<D, Feature, Values>, compute_t<T>>(ctx, scorer,
                                                                                              call, nullptr)
        .bytes;
}

template <std::int32_t D, class Feature, class Values, Storage T>
void backward(const host& ctx, const mLSTMScorer<D, Feature, Values>& scorer, const ScoreBackward<T>& call,
              mLSTMParameters<compute_t<T>> gradients, workspace_view workspace) {
    namespace hb = host_backend;
    using Scorer = mLSTMScorer<D, Feature, Values>;
    static_assert(DifferentiableFeatureMap<Feature>,
                  "kvpolicy: this feature map has no pull_back, so its scorer cannot be trained");
    checks::check_workspace(workspace, backward_workspace_bytes(ctx, scorer, call));
    const hb::mlstm_backward_memory<Scorer, compute_t<T>> memory(ctx, scorer, call, workspace.data);
    const hb::mlstm_backward_pass<Scorer, T> pass{ctx, scorer, call, memory, gradients};
    const std::int64_t heads = call.k.heads, batch = call.k.batch;
    ctx.parallel_for(batch * heads, [&](std::int64_t task, int thread) {
        pass.run_head(task / heads, task % heads, thread);
    });
    ctx.parallel_for(pass.part_count * heads, [&](std::int64_t task, int thread) {
        pass.add_weight_gradients(pass.parts[task % pass.part_count], task / pass.part_count, thread);
    });
    for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t b = 0; b < batch; ++b) {
            pass.add_sums(b, h);
        }
    }
    if (call.d_k.data == nullptr) {
        return;
    }
    const auto converted = pass.convert_weights();
    const std::int64_t blocks = (call.sequences.length + scorer_block - 1) / scorer_block;
    ctx.parallel_for(blocks * batch * heads, [&](std::int64_t task, int thread) {
        const std::int64_t b = task / blocks / heads, h = task / blocks % heads;
        const std::int64_t first = task % blocks * scorer_block;
        const std::int64_t rest = call.sequences.length_of(b) - first;
        if (rest > 0) {
            pass.add_input_gradients(converted, b, h, first,
                                     static_cast<std::int32_t>(std::min<std::int64_t>(scorer_block, rest)),
                                     thread);
        }
    });
}

}  // namespace kvpolicy
