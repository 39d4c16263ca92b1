// Bodies of scorers/backward.hpp on the host: checks, linear and MLP scorers.
//
// Tokens go in blocks of scorer_block. One pass over blocks gives what each token adds; a second one,
// parallel over the rows of the weights and in order over the tokens, adds it up, so that sums do not depend
// on the threads.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/finite_rows.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/check_backward.hpp>
#include <kvpolicy/scorers/host/host_sequence.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/host/rows.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvpolicy {

namespace host_backend {

/// Refuses a row of the named array that is not finite, or reports it where a status is given.
template <class T>
void refuse_bad_rows(const host& ctx, const char* name, const rows_view<const T>& rows,
                     const Sequences& sequences, std::uint32_t* status) {
    checks::check_in_parallel(ctx, std::int64_t{rows.batch} * rows.heads,
                              [&](std::int64_t task, bool refuse) {
                                  const std::int64_t b = task / rows.heads, h = task % rows.heads;
                                  const std::int64_t start = sequences.start_of(b);
                                  for (std::int64_t t = start; t < start + sequences.length_of(b); ++t) {
                                      if (!checks::good_row(refuse, name, rows, b, h, t) &&
                                          !checks::reported(status, b, status_not_finite)) {
                                          return false;
                                      }
                                  }
                                  return true;
                              });
}

/// Calls visit(t) for the tokens of sequence b that have a score.
template <class S, class Visit>
void for_each_scored(const Sequences& sequences, std::int64_t b, std::int32_t delay, Visit&& visit) {
    if constexpr (S::when == score_time::on_arrival) {
        for (std::int64_t t = 0; t < sequences.length_of(b); ++t) {
            visit(sequences.start_of(b) + t);
        }
    } else {
        const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
        for (std::int64_t segment = 0; segment < segments; ++segment) {
            const stream_range range = segment_of(sequences, b, segment);
            for (std::int64_t t = range.begin; t + delay < range.end; ++t) {
                visit(t);
            }
        }
    }
}

template <class S, Storage T>
void check_backward_call(const host& ctx, const S& scorer, const ScoreBackward<T>& call,
                         std::uint32_t* status) {
    using Real = compute_t<T>;
    if constexpr (S::when != score_time::on_arrival) {
        for (std::int32_t b = 0; b < call.k.batch && call.sequences.batch == call.k.batch; ++b) {
            detail::require(
                call.sequences.start_of(b) == 0, [&] { return detail::text("sequences.starts[", b, "]"); },
                call.sequences.start_of(b), "0 in a backward pass");
        }
    }
    BasicScoreOptions<Real> options;
    options.dropout = call.dropout;
    checks::check_score_call<T>(scorer, call.k, call.v, call.sequences, call.delay, checks::scores_of(call),
                                options);
    checks::check_row_gradients(call);
    refuse_bad_rows(ctx, "k", call.k, call.sequences, status);
    refuse_bad_rows(ctx, "v", call.v, call.sequences, status);
    for (std::int32_t b = 0; b < call.k.batch; ++b) {
        for (std::int32_t h = 0; h < call.k.heads; ++h) {
            for_each_scored<S>(call.sequences, b, call.delay, [&](std::int64_t t) {
                const Real d = call.d_scores.head(b, h)[t];
                if (std::abs(d) <= std::numeric_limits<Real>::max() ||
                    checks::reported(status, b, status_not_finite)) [[likely]] {
                    return;
                }
                detail::refuse(detail::text("d_scores[", b, "][", h, "][", t, "]").c_str(), d,
                               "a finite number");
            });
        }
    }
}

/// Blocks of tokens of a call: body(b, first, count) for those of one sequence, in order.
template <class Body>
void for_each_block(const Sequences& sequences, std::int64_t b, Body&& body) {
    const std::int64_t end = std::int64_t{sequences.start_of(b)} + sequences.length_of(b);
    for (std::int64_t first = sequences.start_of(b); first < end; first += scorer_block) {
        body(first, static_cast<std::int32_t>(std::min<std::int64_t>(scorer_block, end - first)));
    }
}

/// What an MLP's backward pass needs.
template <class Real>
struct mlp_backward_memory {
    Real* workers;            // a thread's x [block, X], d_x [block, X], rows [block, Dk + Dv]
    Real* tokens;             // [B, Hkv, S, 2 hidden]: d y, then act(y)
    Real* w1;                 // converted weights, where they must be
    std::size_t worker_size;  // numbers of one thread
    std::size_t bytes;

    template <class S, Storage T>
    mlp_backward_memory(const host& ctx, const S& scorer, const ScoreBackward<T>& call, void* data) {
        detail::arena from(data);
        const auto inner = static_cast<std::size_t>(scorer.input_size());
        const auto width =
            static_cast<std::size_t>(scorer.head_dim_qk) + static_cast<std::size_t>(scorer.head_dim_vo);
        const auto heads = static_cast<std::size_t>(call.k.batch) * static_cast<std::size_t>(call.k.heads);
        worker_size = detail::aligned_size(scorer_block * (2 * inner + width) * sizeof(Real)) / sizeof(Real);
        workers = from.take<Real>(worker_size * static_cast<std::size_t>(ctx.threads()));
        tokens = from.take<Real>(heads * static_cast<std::size_t>(call.sequences.length) * 2 *
                                 static_cast<std::size_t>(scorer.hidden));
        const bool convert = !std::is_same_v<Real, float>;
        w1 = from.take<Real>(convert ? inner * static_cast<std::size_t>(scorer.hidden * scorer.heads) : 0);
        bytes = from.bytes();
    }
};

}  // namespace host_backend

template <std::int32_t D, Storage T>
std::size_t backward_workspace_bytes(const host& ctx, const LinearScorer<D>&, const ScoreBackward<T>& call) {
    checks::check_shape(call.sequences, call.k.heads);
    return static_cast<std::size_t>(ctx.threads()) *
               detail::aligned_size(static_cast<std::size_t>(call.k.dim + call.v.dim) *
                                    sizeof(compute_t<T>)) +
           detail::alignment;
}

template <std::int32_t D, Storage T>
void backward(const host& ctx, const LinearScorer<D>& scorer, const ScoreBackward<T>& call,
              LinearParameters<compute_t<T>> gradients, workspace_view workspace) {
    namespace hb = host_backend;
    using Real = compute_t<T>;
    checks::check_workspace(workspace, backward_workspace_bytes(ctx, scorer, call));
    const std::int32_t head_dim_qk = call.k.dim, head_dim_vo = call.v.dim, inner = head_dim_qk + head_dim_vo;
    std::byte* memory = detail::aligned(workspace.data);
    const std::size_t stride = detail::aligned_size(static_cast<std::size_t>(inner) * sizeof(Real));
    ctx.parallel_for(call.k.heads, [&](std::int64_t h, int thread) {
        Real* x = reinterpret_cast<Real*>(memory + static_cast<std::size_t>(thread) * stride);
        Real* into = gradients.weight == nullptr ? nullptr : gradients.weight + h * inner;
        const float* w = scorer.weights.weight + h * inner;
        for (std::int64_t b = 0; b < call.k.batch; ++b) {
            const std::int64_t start = call.sequences.start_of(b);
            for (std::int64_t t = start; t < start + call.sequences.length_of(b); ++t) {
                const Real d = call.d_scores.head(b, h)[t];
                if (gradients.bias != nullptr) {
                    gradients.bias[h] += d;
                }
                if (into != nullptr) {
                    hb::convert_row(call.k.row(b, h, t), head_dim_qk, x);
                    hb::convert_row(call.v.row(b, h, t), head_dim_vo, x + head_dim_qk);
                    for (std::int32_t i = 0; i < inner; ++i) {
                        into[i] += d * x[i];
                    }
                }
                if (call.d_k.data == nullptr) {
                    continue;
                }
                Real* d_k = call.d_k.row(b, h, t);
                Real* d_v = call.d_v.row(b, h, t);
                for (std::int32_t i = 0; i < head_dim_qk; ++i) {
                    d_k[i] = d * static_cast<Real>(w[i]);
                }
                for (std::int32_t i = 0; i < head_dim_vo; ++i) {
                    d_v[i] = d * static_cast<Real>(w[head_dim_qk + i]);
                }
            }
        }
    });
}

template <class Input, class Act, std::int32_t D, Storage T>
std::size_t backward_workspace_bytes(const host& ctx, const BasicMlpScorer<Input, Act, D>& scorer,
                                     const ScoreBackward<T>& call) {
    checks::check_shape(call.sequences, call.k.heads);
    return host_backend::mlp_backward_memory<compute_t<T>>(ctx, scorer, call, nullptr).bytes;
}

template <class Input, class Act, std::int32_t D, Storage T>
void backward(const host& ctx, const BasicMlpScorer<Input, Act, D>& scorer, const ScoreBackward<T>& call,
              MlpParameters<compute_t<T>> gradients, workspace_view workspace) {
    namespace hb = host_backend;
    using Real = compute_t<T>;
    static_assert(DifferentiableInput<Input>,
                  "kvpolicy: this MLP's input has no pull_back, so it cannot be trained");
    static_assert(DifferentiableActivation<Act>,
                  "kvpolicy: this MLP's activation has no pull_back, so it cannot be trained");
    checks::check_workspace(workspace, backward_workspace_bytes(ctx, scorer, call));
    const hb::mlp_backward_memory<Real> memory(ctx, scorer, call, workspace.data);
    const isa set = ctx.instructions();
    const std::int32_t inner = scorer.input_size(), hidden = scorer.hidden, heads = call.k.heads;
    const std::int64_t length = call.sequences.length;
    const std::ptrdiff_t token = 2 * std::ptrdiff_t{hidden};
    const auto tokens_of = [&](std::int64_t b, std::int64_t h) {
        return memory.tokens + (b * heads + h) * length * token;
    };
    const auto layers = static_cast<std::size_t>(Input::per_head ? heads : 1);
    const Real* w1 = hb::real_weights(
        scorer.weights.w1, layers * static_cast<std::size_t>(hidden) * static_cast<std::size_t>(inner),
        memory.w1);
    // x of `count` tokens; keys and values stay in `rows` for a pull_back.
    struct rows_of_block {
        const Real* keys;
        const Real* values;
    };
    const auto gather = [&](std::int64_t b, std::int64_t h, std::int64_t first, std::int32_t count, Real* x,
                            Real* rows) {
        const rows_of_block from{hb::dense_rows(call.k, b, h, first, count, rows),
                                 hb::dense_rows(call.v, b, h, first, count,
                                                rows + std::ptrdiff_t{scorer_block} * scorer.head_dim_qk)};
        for (std::int32_t t = 0; t < count; ++t) {
            const std::int64_t position = first + t - hb::origin_of(call.sequences, first + t);
            hb::input_at(scorer.input, position)
                .gather(set, static_cast<std::int32_t>(h), from.keys + std::ptrdiff_t{t} * scorer.head_dim_qk,
                        from.values + std::ptrdiff_t{t} * scorer.head_dim_vo, scorer.head_dim_qk,
                        scorer.head_dim_vo, x + std::ptrdiff_t{t} * inner);
        }
        return from;
    };

    const std::int64_t blocks = (length + scorer_block - 1) / scorer_block;
    ctx.parallel_for(blocks * call.k.batch * heads, [&](std::int64_t task, int thread) {
        const std::int64_t b = task / blocks / heads, h = task / blocks % heads;
        const std::int64_t begin = task % blocks * scorer_block;
        const auto count = static_cast<std::int32_t>(
            std::min<std::int64_t>(scorer_block, call.sequences.length_of(b) - begin));
        if (count <= 0) {
            return;
        }
        const std::int64_t first = call.sequences.start_of(b) + begin;
        const std::ptrdiff_t layer = Input::per_head ? h : 0;
        Real* x = memory.workers + static_cast<std::size_t>(thread) * memory.worker_size;
        Real* d_x = x + std::ptrdiff_t{scorer_block} * inner;
        const rows_of_block from = gather(b, h, first, count, x, d_x + std::ptrdiff_t{scorer_block} * inner);
        Real* d_y = tokens_of(b, h) + begin * token;
        Real* act = d_y + hidden;
        hb::run_kernel<hb::project_kernel>(
            set, static_cast<const Real*>(x), std::ptrdiff_t{inner}, count,
            scorer.weights.w1 + layer * hidden * inner, std::ptrdiff_t{inner}, hidden, inner,
            scorer.weights.b1 == nullptr ? scorer.weights.b1 : scorer.weights.b1 + layer * hidden, act,
            token);
        const float* w2 = scorer.weights.w2 + h * hidden;
        for (std::int32_t t = 0; t < count; ++t) {
            Real* y = act + t * token;
            Real* d = d_y + t * token;
            const Real d_score = call.d_scores.head(b, h)[first + t];
            for (std::int32_t i = 0; i < hidden; ++i) {
                d[i] = d_score * static_cast<Real>(w2[i]);
            }
            Act::pull_back(y, d, hidden);
            Act::apply(set, y, hidden);
        }
        if (call.d_k.data == nullptr) {
            return;
        }
        hb::run_kernel<hb::combine_kernel>(set, static_cast<const Real*>(d_y), token, std::ptrdiff_t{1},
                                           count, hidden, w1 + layer * hidden * inner, std::ptrdiff_t{inner},
                                           inner, d_x, std::ptrdiff_t{inner}, false);
        for (std::int32_t t = 0; t < count; ++t) {
            const std::int64_t position = first + t - hb::origin_of(call.sequences, first + t);
            hb::input_at(scorer.input, position)
                .pull_back(set, static_cast<std::int32_t>(h),
                           from.keys + std::ptrdiff_t{t} * scorer.head_dim_qk,
                           from.values + std::ptrdiff_t{t} * scorer.head_dim_vo, scorer.head_dim_qk,
                           scorer.head_dim_vo, static_cast<const Real*>(d_x + std::ptrdiff_t{t} * inner),
                           call.d_k.row(b, h, first + t), call.d_v.row(b, h, first + t));
        }
    });

    constexpr std::int32_t rows = 16;
    const std::int64_t parts = (hidden + rows - 1) / rows;
    ctx.parallel_for(static_cast<std::int64_t>(layers) * parts, [&](std::int64_t task, int thread) {
        const std::int64_t layer = task / parts;
        const auto r = static_cast<std::int32_t>(task % parts * rows);
        const std::int32_t some = std::min(rows, hidden - r);
        Real* x = memory.workers + static_cast<std::size_t>(thread) * memory.worker_size;
        Real* buffer = x + 2 * std::ptrdiff_t{scorer_block} * inner;
        for (std::int64_t h = Input::per_head ? layer : 0; h < (Input::per_head ? layer + 1 : heads); ++h) {
            for (std::int64_t b = 0; b < call.k.batch; ++b) {
                const std::int64_t start = call.sequences.start_of(b);
                hb::for_each_block(call.sequences, b, [&](std::int64_t first, std::int32_t count) {
                    const Real* d_y = tokens_of(b, h) + (first - start) * token + r;
                    if (gradients.w1 != nullptr) {
                        gather(b, h, first, count, x, buffer);
                        hb::run_kernel<hb::combine_kernel>(set, d_y, std::ptrdiff_t{1}, token, some, count,
                                                           static_cast<const Real*>(x), std::ptrdiff_t{inner},
                                                           inner, gradients.w1 + (layer * hidden + r) * inner,
                                                           std::ptrdiff_t{inner}, true);
                    }
                    for (std::int32_t t = 0; t < count; ++t, d_y += token) {
                        const Real d_score = call.d_scores.head(b, h)[first + t];
                        for (std::int32_t i = 0; i < some; ++i) {
                            if (gradients.b1 != nullptr) {
                                gradients.b1[layer * hidden + r + i] += d_y[i];
                            }
                            if (gradients.w2 != nullptr) {
                                gradients.w2[h * hidden + r + i] += d_score * d_y[hidden + i];
                            }
                        }
                        if (r == 0 && gradients.b2 != nullptr) {
                            gradients.b2[h] += d_score;
                        }
                    }
                });
            }
        }
    });
}

template <class Widths, Scorer S, Storage T>
requires DifferentiableScorer<S> std::size_t score_sequence_backward_workspace_bytes(
    const host& ctx, const S& scorer, const ScoreBackward<T>& call) {
    return backward_workspace_bytes(ctx, scorer, call);
}

template <class Widths, Scorer S, Storage T>
requires DifferentiableScorer<S>
void score_sequence_backward(const host& ctx, const S& scorer, const ScoreBackward<T>& call,
                             typename S::template parameters<compute_t<T>> gradients,
                             workspace_view workspace, const ScoreBackwardOptions& options) {
    if (const checks::repaired_sequences repaired(call.sequences, options.status); repaired) {
        ScoreBackward<T> again = call;
        again.sequences = repaired.sequences;
        return score_sequence_backward<Widths>(ctx, scorer, again, gradients, workspace, options);
    }
    host_backend::check_backward_call(ctx, scorer, call, options.status);
    checks::check_workspace(workspace, backward_workspace_bytes(ctx, scorer, call));
    backward(ctx, scorer, call, gradients, workspace);
}

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/conv_backward.hpp>
#include <kvpolicy/scorers/host/mlstm_backward.hpp>
