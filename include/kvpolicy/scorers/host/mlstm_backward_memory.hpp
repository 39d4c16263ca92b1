// The workspace of the mLSTM scorer's backward pass.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/score_backward.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy::host_backend {

/// What one token adds: rows [d Wq x | d Wk x | d v~ | d gates' preactivations | d score].
struct mlstm_token_row {
    std::ptrdiff_t q, k, v, i, f, score, size;
    template <class Scorer>
    explicit mlstm_token_row(const Scorer& scorer) {
        q = 0;
        k = q + scorer.projection();
        v = k + scorer.projection();
        i = v + scorer.value_width();
        f = i + 1;
        score = f + 1;
        size = score + 1;
    }
};

/// The memory of the pass.
template <class Scorer, class Real>
struct mlstm_backward_memory {
    Real* tokens;    // [B, Hkv, S][row]
    Real* readouts;  // [B, Hkv][2 d_v + 1]: d readout, d norm_gain, d readout_bias
    Real* weights;   // converted weights, where they must be: Wq, Wk, Wv, w_i, w_f, skip of every head
    std::byte* workers;
    std::size_t worker_size, bytes;
    std::int64_t chunks;  // of the longest stream

    // One thread's part.
    struct scratch {
        Real *states, *stack, *x, *y, *k, *v, *q, *xq, *s, *u, *h, *n, *dq, *dk, *dv, *dz;
        double* stabilizers;
        explicit scratch(detail::arena& from, const Scorer& scorer, std::int64_t chunks) {
            constexpr std::size_t rows = scorer_block;
            const auto inputs = static_cast<std::size_t>(scorer.input_size());
            const auto features = static_cast<std::size_t>(scorer.features());
            const auto width = static_cast<std::size_t>(scorer.value_width());
            const auto projection = static_cast<std::size_t>(scorer.projection());
            states = from.take<Real>(static_cast<std::size_t>(chunks) * features * (width + 1));
            stabilizers = from.take<double>(static_cast<std::size_t>(chunks));
            stack = from.take<Real>(features * (width + 1));  // (A, a)
            const auto take_each = [&](std::size_t columns, auto*&... arrays) {
                ((arrays = from.take<Real>(rows * columns)), ...);
            };
            take_each(inputs, x, xq);
            take_each(projection, y);
            take_each(features, q, k, dq, dk);
            take_each(width, v, h, n, dv);
            take_each(rows, s, u);
            take_each(1, dz);
        }
    };

    template <Storage T>
    mlstm_backward_memory(const host& ctx, const Scorer& scorer, const ScoreBackward<T>& call, void* data) {
        detail::arena from(data);
        const auto heads = static_cast<std::size_t>(call.k.batch) * static_cast<std::size_t>(call.k.heads);
        const mlstm_token_row row(scorer);
        tokens = from.take<Real>(heads * static_cast<std::size_t>(call.sequences.length) *
                                 static_cast<std::size_t>(row.size));
        readouts = from.take<Real>(heads * (2 * static_cast<std::size_t>(scorer.value_width()) + 1));
        weights =
            from.take<Real>(std::is_same_v<Real, float> ? 0
                                                        : static_cast<std::size_t>(scorer.heads) *
                                                              static_cast<std::size_t>(row.size) *
                                                              static_cast<std::size_t>(scorer.input_size()));
        chunks = (call.sequences.length + scorer_block - 1) / scorer_block;
        detail::arena counter(nullptr);
        scratch(counter, scorer, chunks);
        worker_size = counter.bytes();
        workers = from.take<std::byte>(worker_size * static_cast<std::size_t>(ctx.threads()));
        bytes = from.bytes();
    }
    scratch of_thread(const Scorer& scorer, int thread) const {
        detail::arena from(workers + static_cast<std::size_t>(thread) * worker_size);
        return scratch(from, scorer, chunks);
    }
};

}  // namespace kvpolicy::host_backend
