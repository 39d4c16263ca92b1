// The chunkwise form of the mLSTM scorer on the host: matrix products over chunks of L = scorer_block tokens.
//
// Within a chunk that follows a state (C, z, m), with b_l the running sum of log f up to its token l,
// included:
//
//     s_j = log i_j - b_j,  M_l = max(m, max_{j <= l} s_j),  m_l = b_l + M_l       (m_l as in the recurrence)
//     q~^T C_l = exp(m - M_l) q~^T C + sum_{j <= l} exp(s_j - M_l) (q~ . k~_j) v~_j     z alike, v~ being 1
//
// Exponents are differences of doubles and at most 0. Chunks come in rounds of a few per thread. Each round
// is three passes: what each chunk adds to a state, relative to its own largest s_j (parallel over chunks);
// the states before each chunk (a scan over chunks, parallel over the elements of the state); the reads
// (parallel over chunks, whose query rows stand `delay` earlier). Which tokens form a chunk depends on the
// sequence alone, so scores do not depend on the threads.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/host/host_mlstm.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/host/rows.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvpolicy::host_backend {

/// A chunk: `count` tokens of one stream, absorbed from `first` on.
struct mlstm_chunk {
    std::int64_t batch, head, begin, first;
    std::int32_t count;
    bool empty_before;            ///< the stream's state is empty before it
    bool taken_up;                ///< the state before it is options.states'
    bool left;                    ///< the state after it goes to options.states
    double keep, add;             ///< the scan's step: state <- keep * state + add * delta
    double m;                     ///< stabilizer before it
    double source[scorer_block];  ///< s_j
    double top[scorer_block];     ///< max_{j <= l} s_j
    double forgotten;             ///< b at its last token
};

/// The numbers that one chunk needs, in units of Real.
struct mlstm_chunk_layout {
    std::ptrdiff_t state, x, y, k, v, q, s, h, weights, total;

    template <class Scorer>
    explicit mlstm_chunk_layout(const Scorer& scorer) {
        constexpr std::ptrdiff_t rows = scorer_block;
        const std::ptrdiff_t features = scorer.features();
        std::ptrdiff_t at = 0;
        const auto take = [&](std::ptrdiff_t count) {
            const std::ptrdiff_t here = at;
            at += (count + 15) / 16 * 16;
            return here;
        };
        state = take(features * (scorer.value_width() + 1));
        x = take(rows * scorer.input_size());
        y = take(rows * scorer.projection());
        k = take(rows * features);
        v = take(rows * scorer.value_width());
        q = take(rows * features);
        s = take(rows * rows);
        h = take(rows * scorer.value_width());
        weights = take(3 * rows);
        total = at;
    }
};

/// Chunks in a round.
inline std::int64_t mlstm_round(const host& ctx, const Sequences& sequences, std::int32_t heads) {
    const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
    const std::int64_t all = std::int64_t{sequences.batch} * heads *
                             (sequences.length / scorer_block + segments);  // at least as many
    return std::min<std::int64_t>(all, std::int64_t{4} * ctx.threads());
}

template <class Real, class Scorer>
std::size_t mlstm_chunkwise_bytes(const host& ctx, const Scorer& scorer, const Sequences& sequences,
                                  std::int32_t heads) {
    const auto round = static_cast<std::size_t>(mlstm_round(ctx, sequences, heads));
    const mlstm_chunk_layout layout(scorer);
    return detail::aligned_size(round * sizeof(mlstm_chunk)) +
           detail::aligned_size(scorer.state_size() * sizeof(Real)) +
           round * detail::aligned_size(static_cast<std::size_t>(layout.total) * sizeof(Real));
}

template <class Scorer, class T, class Real>
class mlstm_chunkwise {
  public:
    mlstm_chunkwise(const host& ctx, const Scorer& scorer, rows_view<const T> k, rows_view<const T> v,
                    const Sequences& sequences, std::int64_t delay, plane_view<Real> scores, Real* states,
                    std::byte* memory)
        : ctx_(ctx),
          set_(ctx.instructions()),
          scorer_(scorer),
          k_(k),
          v_(v),
          sequences_(sequences),
          delay_(delay),
          scores_(scores),
          states_(states),
          layout_(scorer),
          round_(mlstm_round(ctx, sequences, k.heads)) {
        chunks_ = reinterpret_cast<mlstm_chunk*>(memory);
        memory += detail::aligned_size(static_cast<std::size_t>(round_) * sizeof(mlstm_chunk));
        running_ = reinterpret_cast<Real*>(memory);
        memory += detail::aligned_size(scorer.state_size() * sizeof(Real));
        buffers_ = reinterpret_cast<Real*>(memory);
        stride_ = static_cast<std::ptrdiff_t>(
            detail::aligned_size(static_cast<std::size_t>(layout_.total) * sizeof(Real)) / sizeof(Real));
    }

    void run() {
        std::int64_t filled = 0;
        for_each_chunk([&](const mlstm_chunk& chunk) {
            chunks_[filled++] = chunk;
            if (filled == round_) {
                run_round(filled);
                filled = 0;
            }
        });
        if (filled > 0) {
            run_round(filled);
        }
    }

  private:
    template <class Visit>
    void for_each_chunk(Visit&& visit) const {
        const std::int64_t segments = sequences_.cu_seqlens == nullptr ? 1 : sequences_.segments;
        for (std::int64_t b = 0; b < k_.batch; ++b) {
            for (std::int64_t h = 0; h < k_.heads; ++h) {
                for (std::int64_t segment = 0; segment < segments; ++segment) {
                    const stream_range range = segment_of(sequences_, b, segment);
                    for (std::int64_t first = range.first; first < range.end; first += scorer_block) {
                        mlstm_chunk chunk;
                        chunk.batch = b;
                        chunk.head = h;
                        chunk.begin = range.begin;
                        chunk.first = first;
                        chunk.count = static_cast<std::int32_t>(
                            std::min<std::int64_t>(scorer_block, range.end - first));
                        chunk.empty_before = first == range.begin;
                        chunk.taken_up = first == range.first && first > range.begin;
                        chunk.left = range.last && first + chunk.count == range.end && states_ != nullptr;
                        visit(chunk);
                    }
                }
            }
        }
    }

    void run_round(std::int64_t count) {
        ctx_.parallel_for(count, [&](std::int64_t i) { write(chunks_[i], buffers_ + i * stride_); });
        scan(count);
        ctx_.parallel_for(count, [&](std::int64_t i) { read(chunks_[i], buffers_ + i * stride_); });
    }

    Real* states_of(const mlstm_chunk& chunk) const {
        return states_ +
               (chunk.batch * k_.heads + chunk.head) * static_cast<std::int64_t>(scorer_.state_size());
    }

    /// x_t = [k_t; v_t] for `count` rows from t on.
    void gather(const mlstm_chunk& chunk, std::int64_t t, std::int32_t count, Real* x) const {
        for (std::int32_t i = 0; i < count; ++i) {
            Real* row = x + static_cast<std::ptrdiff_t>(i) * (k_.dim + v_.dim);
            convert_row(k_.row(chunk.batch, chunk.head, t + i), k_.dim, row);
            convert_row(v_.row(chunk.batch, chunk.head, t + i), v_.dim, row + k_.dim);
        }
    }

    template <class Head>
    void map(const Head& of, const float* w, const Real* x, std::int32_t count, Real* y,
             Real* features) const {
        of.project(set_, x, count, w, of.projection, y);
        for (std::int32_t i = 0; i < count; ++i) {
            const std::ptrdiff_t row = i;
            Scorer::feature_map::map(set_, y + row * of.projection, of.features,
                                     features + row * of.features);
        }
    }

    /// k~, v~ and gates of a chunk, and what it adds to a state relative to exp(top of its last token).
    void write(mlstm_chunk& chunk, Real* buffer) const {
        const mlstm_head<Scorer> of(scorer_, static_cast<std::int32_t>(chunk.head));
        Real* x = buffer + layout_.x;
        Real* k = buffer + layout_.k;
        Real* v = buffer + layout_.v;
        gather(chunk, chunk.first, chunk.count, x);
        map(of, of.w_k(), x, chunk.count, buffer + layout_.y, k);
        if constexpr (Scorer::value_path::projected) {
            of.project(set_, x, chunk.count, of.w_v(), of.width, v);
        } else {
            for (std::ptrdiff_t i = 0; i < chunk.count; ++i) {
                std::copy_n(x + i * of.inputs + k_.dim, of.width, v + i * of.width);
            }
        }

        double forgotten = 0.0;
        double top = -std::numeric_limits<double>::infinity();
        for (std::int32_t i = 0; i < chunk.count; ++i) {
            const Real* row = x + static_cast<std::ptrdiff_t>(i) * of.inputs;
            const mlstm_gates gates = mlstm_gates_of(
                static_cast<double>(dot(set_, row, of.w_i(), of.inputs, of.b_i())),
                static_cast<double>(dot(set_, row, of.w_f(), of.inputs, of.b_f())), scorer_.gate_softcap);
            forgotten += gates.log_forget;
            chunk.source[i] = gates.log_input - forgotten;
            top = mlstm_max(top, chunk.source[i]);
            chunk.top[i] = top;
        }
        chunk.forgotten = forgotten;

        Real* weights = buffer + layout_.weights;
        for (std::int32_t i = 0; i < chunk.count; ++i) {
            weights[i] = static_cast<Real>(chunk.source[i] - top);
        }
        run_kernel<exp_kernel>(set_, weights, chunk.count);
        Real* weighted = buffer + layout_.q;
        for (std::int32_t i = 0; i < chunk.count; ++i) {
            const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(i) * of.features;
            for (std::int32_t d = 0; d < of.features; ++d) {
                weighted[row + d] = weights[i] * k[row + d];
            }
        }
        Real* c = buffer + layout_.state;
        Real* z = c + static_cast<std::ptrdiff_t>(of.features) * of.width;
        run_kernel<combine_kernel>(set_, static_cast<const Real*>(weighted), std::ptrdiff_t{1},
                                   std::ptrdiff_t{of.features}, of.features, chunk.count,
                                   static_cast<const Real*>(v), std::ptrdiff_t{of.width}, of.width, c,
                                   std::ptrdiff_t{of.width}, false);
        run_kernel<combine_kernel>(set_, static_cast<const Real*>(weights), std::ptrdiff_t{0},
                                   std::ptrdiff_t{1}, 1, chunk.count, static_cast<const Real*>(k),
                                   std::ptrdiff_t{of.features}, of.features, z, std::ptrdiff_t{0}, false);
    }

    /// Turns what each chunk of the round adds into the state before it.
    void scan(std::int64_t count) {
        const std::ptrdiff_t size = static_cast<std::ptrdiff_t>(scorer_.state_size()) - 2;
        for (std::int64_t i = 0; i < count; ++i) {
            mlstm_chunk& chunk = chunks_[i];
            if (chunk.empty_before) {
                m_ = -std::numeric_limits<double>::infinity();
            }
            if (chunk.taken_up) {
                m_ = load_stabilizer(states_of(chunk) + size);
            }
            chunk.m = m_;
            const double top = chunk.top[chunk.count - 1];
            const double most = mlstm_max(m_, top);
            chunk.keep = std::exp(m_ - most);
            chunk.add = std::exp(top - most);
            m_ = chunk.forgotten + most;
            if (chunk.left) {
                store_stabilizer(m_, states_of(chunk) + size);
            }
        }
        constexpr std::ptrdiff_t least = 1024;
        const std::ptrdiff_t parts = std::clamp<std::ptrdiff_t>(size / least, 1, ctx_.threads());
        const std::ptrdiff_t part = (size / parts + 15) / 16 * 16;
        ctx_.parallel_for((size + part - 1) / part, [&](std::int64_t p) {
            const std::ptrdiff_t from = p * part;
            const auto width = static_cast<int>(std::min(part, size - from));
            Real* running = running_ + from;
            for (std::int64_t i = 0; i < count; ++i) {
                const mlstm_chunk& chunk = chunks_[i];
                if (chunk.empty_before) {
                    std::fill_n(running, width, Real(0));
                }
                if (chunk.taken_up) {
                    std::copy_n(states_of(chunk) + from, width, running);
                }
                run_kernel<scan_kernel>(set_, static_cast<Real>(chunk.keep), static_cast<Real>(chunk.add),
                                        buffers_ + i * stride_ + layout_.state + from, running, width);
                if (chunk.left) {
                    std::copy_n(running, width, states_of(chunk) + from);
                }
            }
        });
    }

    /// The scores of the tokens that leave the window while the chunk is absorbed.
    void read(const mlstm_chunk& chunk, Real* buffer) const {
        // Right after token first + l the token first + l - delay is read, where the stream has it.
        const std::int64_t skipped = chunk.begin + delay_ - chunk.first;
        if (skipped >= chunk.count) {
            return;
        }
        const std::int32_t begin = skipped > 0 ? static_cast<std::int32_t>(skipped) : 0;
        const std::int32_t count = chunk.count - begin;
        const std::int64_t first = chunk.first + begin - delay_;
        const mlstm_head<Scorer> of(scorer_, static_cast<std::int32_t>(chunk.head));
        const Real* c = buffer + layout_.state;
        const Real* z = c + static_cast<std::ptrdiff_t>(of.features) * of.width;
        Real* x = buffer + layout_.x;
        Real* q = buffer + layout_.q;
        Real* h = buffer + layout_.h;
        Real* old = buffer + layout_.weights;  // exp(m - M_l)
        Real* divisors = old + scorer_block;
        gather(chunk, first, count, x);
        map(of, of.w_q(), x, count, buffer + layout_.y, q);

        const Real* queries = q;
        run_kernel<combine_kernel>(set_, queries, std::ptrdiff_t{of.features}, std::ptrdiff_t{1}, count,
                                   of.features, c, std::ptrdiff_t{of.width}, of.width, h,
                                   std::ptrdiff_t{of.width}, false);
        const float* no_bias = nullptr;
        run_kernel<project_kernel>(set_, queries, std::ptrdiff_t{of.features}, count, z, std::ptrdiff_t{0}, 1,
                                   of.features, no_bias, divisors, std::ptrdiff_t{1});
        for (std::int32_t i = 0; i < count; ++i) {
            const double most = mlstm_max(chunk.m, chunk.top[begin + i]);
            old[i] = static_cast<Real>(std::exp(chunk.m - most));
            divisors[i] *= old[i];
            Real* row = h + static_cast<std::ptrdiff_t>(i) * of.width;
            for (std::int32_t e = 0; e < of.width; ++e) {
                row[e] *= old[i];
            }
        }
        add_chunk_keys(of, chunk, buffer, begin, count);
        Real* scores = scores_.head(chunk.batch, chunk.head) + first;
        for (std::int32_t i = 0; i < count; ++i) {
            Real* row = h + static_cast<std::ptrdiff_t>(i) * of.width;
            of.divide(row, divisors[i]);
            scores[i] = of.finish(set_, row, x + static_cast<std::ptrdiff_t>(i) * of.inputs);
        }
    }

    /// Adds the own keys of the chunk to numerators and divisors of its queries, `count` of them from token
    /// `begin` on.
    void add_chunk_keys(const mlstm_head<Scorer>& of, const mlstm_chunk& chunk, Real* buffer,
                        std::int32_t begin, std::int32_t count) const {
        const Real* k = buffer + layout_.k;
        const Real* v = buffer + layout_.v;
        const Real* queries = buffer + layout_.q;
        Real* s = buffer + layout_.s;
        Real* h = buffer + layout_.h;
        Real* divisors = buffer + layout_.weights + scorer_block;
        Real* weights = divisors + scorer_block;  // exp(s_j - M_l) of one l
        constexpr std::int32_t block = 4;  // queries that share the products of the keys that all of them see
        const float* no_bias = nullptr;
        // q~ . k~_j for the j <= l that each block of queries needs.
        for (std::int32_t i = 0; i < count; i += block) {
            const std::int32_t rows = std::min(block, count - i);
            run_kernel<project_kernel>(set_, queries + static_cast<std::ptrdiff_t>(i) * of.features,
                                       std::ptrdiff_t{of.features}, rows, k, std::ptrdiff_t{of.features},
                                       begin + i + rows, of.features, no_bias,
                                       s + std::ptrdiff_t{i} * scorer_block, std::ptrdiff_t{scorer_block});
        }
        for (std::int32_t i = 0; i < count; ++i) {
            const double most = mlstm_max(chunk.m, chunk.top[begin + i]);
            const std::int32_t seen = begin + i + 1;
            for (std::int32_t j = 0; j < seen; ++j) {
                weights[j] = static_cast<Real>(chunk.source[j] - most);
            }
            run_kernel<exp_kernel>(set_, weights, seen);
            Real* row = s + std::ptrdiff_t{i} * scorer_block;
            Real sums[4] = {Real(0), Real(0), Real(0), Real(0)};
            for (std::int32_t j = 0; j < seen; ++j) {
                row[j] *= weights[j];
                sums[j % 4] += row[j];
            }
            divisors[i] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
        // Blocks of queries share the keys that all of them see; the last few are each query's own, since a
        // key after the query must not even be multiplied by 0 (it may be NaN).
        for (std::int32_t i = 0; i < count; i += block) {
            const std::int32_t rows = std::min(block, count - i);
            const std::int32_t shared = begin + i + 1;
            const Real* own = s + std::ptrdiff_t{i} * scorer_block;
            Real* out = h + static_cast<std::ptrdiff_t>(i) * of.width;
            run_kernel<combine_kernel>(set_, own, std::ptrdiff_t{scorer_block}, std::ptrdiff_t{1}, rows,
                                       shared, v, std::ptrdiff_t{of.width}, of.width, out,
                                       std::ptrdiff_t{of.width}, true);
            for (std::int32_t r = 1; r < rows; ++r) {
                run_kernel<combine_kernel>(
                    set_, own + std::ptrdiff_t{r} * scorer_block + shared, std::ptrdiff_t{0},
                    std::ptrdiff_t{1}, 1, r, v + static_cast<std::ptrdiff_t>(shared) * of.width,
                    std::ptrdiff_t{of.width}, of.width, out + static_cast<std::ptrdiff_t>(r) * of.width,
                    std::ptrdiff_t{0}, true);
            }
        }
    }

    const host& ctx_;
    isa set_;
    const Scorer& scorer_;
    rows_view<const T> k_, v_;
    const Sequences& sequences_;
    std::int64_t delay_;
    plane_view<Real> scores_;
    Real* states_;
    mlstm_chunk_layout layout_;
    std::int64_t round_;
    mlstm_chunk* chunks_ = nullptr;
    Real* running_ = nullptr;
    Real* buffers_ = nullptr;
    std::ptrdiff_t stride_ = 0;
    double m_ = -std::numeric_limits<double>::infinity();
};

template <class Scorer, class T, class Real>
void score_chunkwise(const host& ctx, const Scorer& scorer, rows_view<const T> k, rows_view<const T> v,
                     const Sequences& sequences, std::int32_t delay, plane_view<Real> scores, Real* states,
                     std::byte* memory) {
    mlstm_chunkwise<Scorer, T, Real>(ctx, scorer, k, v, sequences, delay, scores, states, memory).run();
}

}  // namespace kvpolicy::host_backend
