// Bodies of scorers/hidden.hpp on the host.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/scorers/check_hidden.hpp>
#include <kvpolicy/scorers/hidden.hpp>
#include <kvpolicy/scorers/host/host_mlp.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/host/rows.hpp>

#include <algorithm>
#include <cmath>

namespace kvpolicy {

namespace host_backend {

/// Numbers that one thread needs to score a block of tokens from hidden states.
template <class S>
std::size_t hidden_block_reals(const S& scorer) {
    return scorer_block * static_cast<std::size_t>(scorer.hidden_width()) + scorer.block_scratch_size();
}

/// Scores tokens first .. first + count - 1 of sequence b, all heads, in blocks. scores points to head 0 of
/// the first one.
template <class S, class Real>
void score_hidden_tokens(isa set, const S& scorer, const HiddenRows& hidden, std::int64_t b,
                         std::int64_t first, std::int64_t count, Real* scores, std::int64_t head_stride,
                         Real* memory) {
    const std::ptrdiff_t width = scorer.hidden_width();
    Real* const scratch = memory + scorer_block * width;
    for (std::int64_t at = 0; at < count; at += scorer_block) {
        const auto tokens = static_cast<std::int32_t>(std::min<std::int64_t>(scorer_block, count - at));
        for (std::int32_t t = 0; t < tokens; ++t) {
            hidden.read(b, first + at + t, memory + t * width);
        }
        scorer.score_tokens(tokens, static_cast<const Real*>(memory), scores + at, head_stride, scratch, set);
    }
}

}  // namespace host_backend

template <HiddenScorer S, class Real, class T>
std::size_t score_hidden_workspace_bytes(const host& ctx, const S& scorer, rows_view<T>, const Sequences&) {
    return static_cast<std::size_t>(ctx.threads()) *
               detail::aligned_size(host_backend::hidden_block_reals(scorer) * sizeof(Real)) +
           detail::alignment;
}

template <HiddenScorer S, class T, class Real>
void score_hidden(const host& ctx, const S& scorer, rows_view<T> hidden, const Sequences& sequences,
                  plane_view<Real> scores, workspace_view workspace, const ScoreHiddenOptions& options) {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return score_hidden(ctx, scorer, hidden, repaired.sequences, scores, workspace, options);
    }
    const HiddenRows states = hidden;
    checks::check_hidden_call<S, Real>(scorer, states, sequences, scores, "scores");
    checks::check_workspace(workspace, score_hidden_workspace_bytes<S, Real>(ctx, scorer, hidden, sequences));
    std::byte* const memory = detail::aligned(workspace.data);
    const std::size_t stride = detail::aligned_size(hb::hidden_block_reals(scorer) * sizeof(Real));
    const std::int64_t blocks = (std::int64_t{sequences.length} + scorer_block - 1) / scorer_block;
    ctx.parallel_for(blocks * states.batch, [&](std::int64_t task, int thread) {
        const std::int64_t b = task / blocks, begin = task % blocks * scorer_block;
        const std::int64_t count = std::min<std::int64_t>(scorer_block, sequences.length_of(b) - begin);
        const std::int64_t first = sequences.start_of(b) + begin;
        if (count > 0) {
            hb::score_hidden_tokens(
                ctx.instructions(), scorer, states, b, first, count, scores.head(b, 0) + first,
                scores.head_stride,
                reinterpret_cast<Real*>(memory + static_cast<std::size_t>(thread) * stride));
        }
    });
}

namespace host_backend {

template <class Real>
struct hidden_backward_memory {
    Real* x;    // [B, S, width]
    Real* d_y;  // [B, S, hidden]
    Real* act;  // [B, S, hidden]
    Real* w1;   // converted weights, where they must be
    std::size_t bytes;

    template <class S, class T>
    hidden_backward_memory(const S& scorer, const HiddenBackward<T, Real>& call, void* data) {
        detail::arena from(data);
        const auto inner = static_cast<std::size_t>(scorer.hidden_width());
        const auto hidden = static_cast<std::size_t>(scorer.hidden);
        const std::size_t rows = static_cast<std::size_t>(std::max(call.hidden.batch, 0)) *
                                 static_cast<std::size_t>(std::max(call.sequences.length, 0));
        x = from.take<Real>(rows * inner);
        d_y = from.take<Real>(rows * hidden);
        act = from.take<Real>(rows * hidden);
        w1 = from.take<Real>(std::is_same_v<Real, float> ? 0 : inner * hidden);
        bytes = from.bytes();
    }
};

}  // namespace host_backend

template <class Input, class Act, std::int32_t D, class T, class Real>
requires takes_hidden_state<Input> std::size_t score_hidden_backward_workspace_bytes(
    const host&, const BasicMlpScorer<Input, Act, D>& scorer, const HiddenBackward<T, Real>& call) {
    checks::check_shape(call.sequences, call.d_scores.heads);
    return host_backend::hidden_backward_memory<Real>(scorer, call, nullptr).bytes;
}

template <class Input, class Act, std::int32_t D, class T, class Real>
requires takes_hidden_state<Input>
void score_hidden_backward(const host& ctx, const BasicMlpScorer<Input, Act, D>& scorer,
                           const HiddenBackward<T, Real>& call, MlpParameters<Real> gradients,
                           workspace_view workspace, const ScoreHiddenOptions& options) {
    if (const checks::repaired_sequences repaired(call.sequences, options.status); repaired) {
        HiddenBackward<T, Real> again = call;
        again.sequences = repaired.sequences;
        return score_hidden_backward(ctx, scorer, again, gradients, workspace, options);
    }
    namespace hb = host_backend;
    const HiddenRows states = call.hidden;
    static_assert(DifferentiableActivation<Act>,
                  "kvpolicy: this MLP's activation has no pull_back, so it cannot be trained");
    checks::check_hidden_call<BasicMlpScorer<Input, Act, D>, Real>(scorer, call.hidden, call.sequences,
                                                                   call.d_scores, "d_scores");
    const std::int32_t batch = call.hidden.batch, heads = scorer.heads, inner = scorer.input_size(),
                       hidden = scorer.hidden;
    const std::int64_t length = call.sequences.length;
    if (call.d_hidden.data != nullptr) {
        checks::check_rows("d_hidden", call.d_hidden, batch, 1, call.hidden.length, inner);
    }
    checks::check_workspace(workspace, score_hidden_backward_workspace_bytes(ctx, scorer, call));
    const hb::hidden_backward_memory<Real> memory(scorer, call, workspace.data);
    const isa set = ctx.instructions();
    const auto row_of = [&](std::int64_t b, std::int64_t t) { return b * length + t; };
    // Looked at in the workspace, before anything of the caller's is written.
    checks::check_in_parallel(ctx, batch * length, [&](std::int64_t task, bool refuse) {
        const std::int64_t b = task / length, t = task % length;
        if (t >= call.sequences.length_of(b)) {
            return true;
        }
        const std::int64_t at = call.sequences.start_of(b) + t;
        Real* const x = memory.x + row_of(b, t) * inner;
        states.read(b, at, x);
        bool good = true;
        for (std::int32_t i = 0; i < inner; ++i) {
            good &= std::isfinite(x[i]);
        }
        good = good || checks::reported(options.status, b, status_not_finite);
        if (!good && refuse) {
            detail::refuse(detail::text("hidden[", b, "][", at, "]").c_str(), "NaN or infinite",
                           "a row of finite numbers");
        }
        for (std::int32_t h = 0; good && h < heads; ++h) {
            const Real d = call.d_scores.head(b, h)[at];
            good = std::isfinite(d) || checks::reported(options.status, b, status_not_finite);
            if (!good && refuse) {
                detail::refuse(detail::text("d_scores[", b, "][", h, "][", at, "]").c_str(), d,
                               "a finite number");
            }
        }
        return good;
    });
    const Real* w1 =
        scorer.weights.w1 == nullptr
            ? nullptr
            : hb::real_weights(scorer.weights.w1,
                               static_cast<std::size_t>(hidden) * static_cast<std::size_t>(inner), memory.w1);

    const std::int64_t blocks = (length + scorer_block - 1) / scorer_block;
    const auto count_of = [&](std::int64_t b, std::int64_t begin) {
        return static_cast<std::int32_t>(
            std::clamp<std::int64_t>(call.sequences.length_of(b) - begin, 0, scorer_block));
    };
    ctx.parallel_for(blocks * batch, [&](std::int64_t task) {
        const std::int64_t b = task / blocks, begin = task % blocks * scorer_block;
        const std::int64_t start = call.sequences.start_of(b) + begin;
        const std::int32_t count = count_of(b, begin);
        if (count == 0) {
            return;
        }
        const Real* x = memory.x + row_of(b, begin) * inner;
        Real* act = memory.act + row_of(b, begin) * hidden;
        Real* d_y = memory.d_y + row_of(b, begin) * hidden;
        hb::run_kernel<hb::project_kernel>(set, x, std::ptrdiff_t{inner}, count, scorer.weights.w1,
                                           std::ptrdiff_t{inner}, hidden, inner, scorer.weights.b1, act,
                                           std::ptrdiff_t{hidden});
        for (std::int32_t t = 0; t < count; ++t, act += hidden, d_y += hidden) {
            std::fill_n(d_y, hidden, Real(0));
            for (std::int32_t h = 0; h < heads; ++h) {
                const Real d = call.d_scores.head(b, h)[start + t];
                const float* w2 = scorer.weights.w2 + std::ptrdiff_t{h} * hidden;
                for (std::int32_t i = 0; i < hidden; ++i) {
                    d_y[i] += d * static_cast<Real>(w2[i]);
                }
            }
            Act::pull_back(act, d_y, hidden);
            Act::apply(set, act, hidden);
        }
        if (call.d_hidden.data != nullptr) {
            hb::run_kernel<hb::combine_kernel>(
                set, static_cast<const Real*>(memory.d_y + row_of(b, begin) * hidden), std::ptrdiff_t{hidden},
                std::ptrdiff_t{1}, count, hidden, w1, std::ptrdiff_t{inner}, inner,
                call.d_hidden.row(b, 0, start), call.d_hidden.row_stride, false);
        }
    });

    constexpr std::int32_t strip = 16;
    ctx.parallel_for((hidden + strip - 1) / strip, [&](std::int64_t task) {
        const auto r = static_cast<std::int32_t>(task * strip);
        const std::int32_t some = std::min(strip, hidden - r);
        for (std::int64_t b = 0; b < batch; ++b) {
            const std::int32_t tokens = call.sequences.length_of(b);
            const std::int64_t start = call.sequences.start_of(b);
            const Real* d_y = memory.d_y + row_of(b, 0) * hidden + r;
            const Real* act = memory.act + row_of(b, 0) * hidden + r;
            if (gradients.w1 != nullptr) {
                hb::run_kernel<hb::combine_kernel>(
                    set, d_y, std::ptrdiff_t{1}, std::ptrdiff_t{hidden}, some, tokens,
                    static_cast<const Real*>(memory.x + row_of(b, 0) * inner), std::ptrdiff_t{inner}, inner,
                    gradients.w1 + std::ptrdiff_t{r} * inner, std::ptrdiff_t{inner}, true);
            }
            for (std::int32_t t = 0; t < tokens; ++t, d_y += hidden, act += hidden) {
                for (std::int32_t i = 0; gradients.b1 != nullptr && i < some; ++i) {
                    gradients.b1[r + i] += d_y[i];
                }
                for (std::int32_t h = 0; h < heads; ++h) {
                    const Real d = call.d_scores.head(b, h)[start + t];
                    for (std::int32_t i = 0; gradients.w2 != nullptr && i < some; ++i) {
                        gradients.w2[std::ptrdiff_t{h} * hidden + r + i] += d * act[i];
                    }
                    if (r == 0 && gradients.b2 != nullptr) {
                        gradients.b2[h] += d;
                    }
                }
            }
        }
    });
}

}  // namespace kvpolicy
