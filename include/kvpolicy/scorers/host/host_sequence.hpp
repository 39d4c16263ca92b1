// Bodies of scorers/sequence.hpp on the host.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/scorers/check_score.hpp>
#include <kvpolicy/scorers/host/mlstm_chunkwise.hpp>
#include <kvpolicy/scorers/host/rows.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>

namespace kvpolicy {

namespace host_backend {

template <class S, class Real>
concept computes_in = requires(const S& scorer, const Real* row, Real* state, Real* scratch) {
    requires(S::when == score_time::on_arrival && requires { scorer.score(0, row, row, scratch); }) ||
        (S::when == score_time::in_window &&
         requires { scorer.score_span(0, position_t{0}, 1, row, row, scratch, scratch, isa::portable); }) ||
        (S::when == score_time::on_leaving && requires { scorer.absorb(0, state, row, row, scratch); });
};

/// The library's scorers take the context's instruction set; a user's need not.
template <class S, class Real>
Real score_one(isa set, const S& scorer, std::int32_t head, const Real* key, const Real* value, Real* scratch,
               [[maybe_unused]] position_t t) {
    if constexpr (requires { scorer.score(head, key, value, scratch, set, t); }) {
        return scorer.score(head, key, value, scratch, set, t);
    } else if constexpr (requires { scorer.score(head, key, value, scratch, set); }) {
        return scorer.score(head, key, value, scratch, set);
    } else {
        return static_cast<Real>(scorer.score(head, key, value, scratch));
    }
}
template <class S, class Real>
void absorb_one(isa set, const S& scorer, std::int32_t head, Real* state, const Real* key, const Real* value,
                Real* scratch) {
    if constexpr (requires { scorer.absorb(head, state, key, value, scratch, set); }) {
        scorer.absorb(head, state, key, value, scratch, set);
    } else {
        scorer.absorb(head, state, key, value, scratch);
    }
}
template <class S, class Real>
Real read_one(isa set, const S& scorer, std::int32_t head, const Real* state, const Real* key,
              const Real* value, Real* scratch) {
    if constexpr (requires { scorer.read(head, state, key, value, scratch, set); }) {
        return scorer.read(head, state, key, value, scratch, set);
    } else {
        return static_cast<Real>(scorer.read(head, state, key, value, scratch));
    }
}

template <class S>
std::size_t block_scratch(const S& scorer) {
    if constexpr (BlockScorer<S>) {
        return scorer.block_scratch_size();
    } else {
        return scorer.scratch_size();
    }
}

/// Work items are taken by as many workers as there are threads, each with memory of its own; results
/// depend on neither.
template <class Body>
void for_each_by_worker(const host& ctx, std::int64_t count, std::int64_t workers, Body&& body) {
    std::atomic<std::int64_t> next{0};
    ctx.parallel_for(workers, [&](std::int64_t worker) {
        for (std::int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
            body(worker, item);
        }
    });
}

template <class Real, class S>
std::size_t worker_reals(const S& scorer, std::int32_t head_dim_qk, std::int32_t head_dim_vo) {
    std::size_t rows = static_cast<std::size_t>(head_dim_qk) + static_cast<std::size_t>(head_dim_vo);
    std::size_t reals;
    if constexpr (S::when == score_time::on_arrival) {
        reals = (BlockScorer<S> ? scorer_block : 1) * rows + block_scratch(scorer);
    } else if constexpr (S::when == score_time::in_window) {
        reals = (scorer_block + 2 * S::reach) * rows + scorer.span_scratch_size();
    } else {
        reals = rows + scorer.scratch_size() + scorer.state_size();
    }
    return detail::aligned_size(reals * sizeof(Real)) / sizeof(Real);
}

/// The first token of the packed segment that token t of a sequence is in; 0 without segments.
inline std::int64_t origin_of(const Sequences& sequences, std::int64_t t) {
    if (sequences.cu_seqlens == nullptr) {
        return 0;
    }
    const std::int32_t* const end = sequences.cu_seqlens + sequences.segments;
    return *(std::upper_bound(sequences.cu_seqlens, end, t) - 1);
}

/// Cuts tokens [first, first + count) where packed segments do: visit(first, count, position of the first).
template <class Visit>
void for_each_position_range(const Sequences& sequences, std::int64_t first, std::int32_t count,
                             Visit&& visit) {
    for (std::int64_t t = first, end = first + count; t < end;) {
        std::int64_t stop = end;
        if (sequences.cu_seqlens != nullptr) {
            const std::int32_t* const last = sequences.cu_seqlens + sequences.segments;
            const std::int32_t* const edge = std::upper_bound(sequences.cu_seqlens, last, t);
            stop = std::min<std::int64_t>(end, edge == last ? end : *edge);
        }
        visit(t, static_cast<std::int32_t>(stop - t), t - origin_of(sequences, t));
        t = stop;
    }
}

inline std::int64_t stateless_blocks(const Sequences& sequences) {
    return (std::int64_t{sequences.length} + scorer_block - 1) / scorer_block;
}

/// Calls visit(memory of the slot, b, h, block) for the blocks of scorer_block tokens of all sequences and
/// heads.
template <class S, class T, class Real, class Visit>
void for_each_scorer_block(const host& ctx, const S& scorer, const rows_view<const T>& k,
                           const rows_view<const T>& v, const Sequences& sequences, Real* memory,
                           Visit&& visit) {
    const std::int64_t blocks = stateless_blocks(sequences);
    const std::int64_t count = blocks * k.batch * k.heads;
    const std::int64_t workers = std::min<std::int64_t>(count, ctx.threads());
    const auto stride = static_cast<std::ptrdiff_t>(worker_reals<Real>(scorer, k.dim, v.dim));
    for_each_by_worker(ctx, count, workers, [&](std::int64_t worker, std::int64_t item) {
        const auto h = static_cast<std::int32_t>(item / blocks % k.heads);
        visit(memory + worker * stride, item / blocks / k.heads, h, item % blocks);
    });
}

template <class S, class T, class Real>
void score_stateless(const host& ctx, const S& scorer, rows_view<const T> k, rows_view<const T> v,
                     const Sequences& sequences, plane_view<Real> scores, Real* memory) {
    for_each_scorer_block(
        ctx, scorer, k, v, sequences, memory,
        [&](Real* keys, std::int64_t b, std::int32_t h, std::int64_t block) {
            const std::int64_t begin = block * scorer_block;
            const auto tokens = static_cast<std::int32_t>(
                std::min<std::int64_t>(scorer_block, sequences.length_of(b) - begin));
            if (tokens <= 0) {
                return;
            }
            const std::int64_t first = sequences.start_of(b) + begin;
            constexpr std::ptrdiff_t capacity = BlockScorer<S> ? scorer_block : 1;
            Real* values = keys + capacity * k.dim;
            Real* scratch = values + capacity * v.dim;
            Real* out = scores.head(b, h);
            if constexpr (requires {
                              scorer.score_block(h, 1, keys, values, out, scratch, isa::portable,
                                                 position_t{});
                          }) {
                for_each_position_range(sequences, first, tokens,
                                        [&](std::int64_t t, std::int32_t some, position_t position) {
                                            scorer.score_block(h, some, dense_rows(k, b, h, t, some, keys),
                                                               dense_rows(v, b, h, t, some, values), out + t,
                                                               scratch, ctx.instructions(), position);
                                        });
            } else if constexpr (BlockScorer<S>) {
                scorer.score_block(h, tokens, dense_rows(k, b, h, first, tokens, keys),
                                   dense_rows(v, b, h, first, tokens, values), out + first, scratch,
                                   ctx.instructions());
            } else {
                for (std::int64_t t = first; t < first + tokens; ++t) {
                    out[t] =
                        score_one(ctx.instructions(), scorer, h, dense_rows(k, b, h, t, 1, keys),
                                  dense_rows(v, b, h, t, 1, values), scratch, t - origin_of(sequences, t));
                }
            }
        });
}

template <class S, class T, class Real>
void score_recurrent(const host& ctx, const S& scorer, rows_view<const T> k, rows_view<const T> v,
                     const Sequences& sequences, std::int32_t delay, plane_view<Real> scores, Real* states,
                     Real* memory) {
    const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
    const std::int64_t count = segments * k.batch * k.heads;
    const std::int64_t workers = std::min<std::int64_t>(count, ctx.threads());
    const auto stride = static_cast<std::ptrdiff_t>(worker_reals<Real>(scorer, k.dim, v.dim));
    const std::size_t size = scorer.state_size();
    for_each_by_worker(ctx, count, workers, [&](std::int64_t worker, std::int64_t item) {
        const auto h = static_cast<std::int32_t>(item / segments % k.heads);
        const std::int64_t b = item / segments / k.heads;
        const stream_range range = segment_of(sequences, b, item % segments);
        const bool last = range.last;
        Real* state = memory + worker * stride;
        Real* key = state + size;
        Real* value = key + k.dim;
        Real* scratch = value + v.dim;
        Real* lasting =
            states == nullptr ? nullptr : states + (b * k.heads + h) * static_cast<std::int64_t>(size);
        if (range.first > range.begin) {
            std::copy_n(lasting, size, state);
        } else {
            scorer.reset(state);
        }
        Real* out = scores.head(b, h);
        for (std::int64_t q = range.first; q < range.end; ++q) {
            absorb_one(ctx.instructions(), scorer, h, state, dense_rows(k, b, h, q, 1, key),
                       dense_rows(v, b, h, q, 1, value), scratch);
            const std::int64_t t = q - delay;
            if (t >= range.begin) {
                const Real* same = state;
                out[t] = read_one(ctx.instructions(), scorer, h, same, dense_rows(k, b, h, t, 1, key),
                                  dense_rows(v, b, h, t, 1, value), scratch);
            }
        }
        if (last && lasting != nullptr) {
            std::copy_n(static_cast<const Real*>(state), size, lasting);
        }
    });
}

/// The rows of tokens first - reach .. first + count - 1 + reach, without gaps, of which those before `begin`
/// hold anything.
template <class T, class Real>
const Real* rows_around(const rows_view<const T>& rows, std::int64_t b, std::int64_t h, std::int64_t begin,
                        std::int64_t first, std::int32_t count, std::int32_t reach, Real* buffer) {
    const std::int64_t from = first - reach;
    if (from >= begin) {
        return dense_rows(rows, b, h, from, count + 2 * reach, buffer);
    }
    for (std::int64_t t = begin; t < first + count + reach; ++t) {
        convert_row(rows.row(b, h, t), rows.dim, buffer + (t - from) * rows.dim);
    }
    return buffer;
}

/// The stream of dropout of one head's sequence or packed segment.
inline std::uint64_t dropout_stream(std::int64_t b, std::int64_t h, std::int32_t heads,
                                    std::int64_t segment) {
    return (static_cast<std::uint64_t>(b * heads + h) << 30) + static_cast<std::uint64_t>(segment);
}

/// Tokens [begin, end) of a range that leave a window of `delay` keys in this call, by segments:
/// visit(segment, begin of the segment, first, end).
template <class Visit>
void for_each_leaving(const Sequences& sequences, std::int64_t b, std::int64_t begin, std::int64_t end,
                      std::int32_t delay, Visit&& visit) {
    const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
    for (std::int64_t i = 0; i < segments; ++i) {
        const stream_range range = segment_of(sequences, b, i);
        const std::int64_t first = std::max({begin, range.begin, range.first - delay});
        const std::int64_t last = std::min(end, range.end - delay);
        if (first < last) {
            visit(i, range.begin, first, last);
        }
    }
}

/// Calls visit(b, begin, end) for the tokens of a call that get no score, since their segment ends within
/// `delay` tokens. Those of earlier calls were visited there.
template <class Visit>
void for_each_unscored(const Sequences& sequences, std::int32_t delay, Visit&& visit) {
    const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
    for (std::int64_t b = 0; b < sequences.batch; ++b) {
        for (std::int64_t i = 0; i < segments; ++i) {
            const stream_range range = segment_of(sequences, b, i);
            const std::int64_t begin = std::max(range.first, range.end - delay);
            if (begin < range.end) {
                visit(b, begin, range.end);
            }
        }
    }
}

template <class S, class T, class Real>
void score_in_window(const host& ctx, const S& scorer, rows_view<const T> k, rows_view<const T> v,
                     const Sequences& sequences, std::int32_t delay, plane_view<Real> scores,
                     [[maybe_unused]] const Dropout& dropout, Real* memory) {
    for_each_unscored(sequences, delay, [&](std::int64_t b, std::int64_t begin, std::int64_t end) {
        for (std::int64_t h = 0; h < k.heads; ++h) {
            std::fill(scores.head(b, h) + begin, scores.head(b, h) + end,
                      -std::numeric_limits<Real>::infinity());
        }
    });
    for_each_scorer_block(
        ctx, scorer, k, v, sequences, memory,
        [&](Real* keys, std::int64_t b, std::int32_t h, std::int64_t block) {
            // The tokens that leave in this call are as many as it brings.
            const std::int64_t begin =
                std::max<std::int64_t>(0, std::int64_t{sequences.start_of(b)} - delay) + block * scorer_block;
            constexpr std::ptrdiff_t capacity = scorer_block + 2 * S::reach;
            Real* values = keys + capacity * k.dim;
            Real* scratch = values + capacity * v.dim;
            for_each_leaving(
                sequences, b, begin, begin + scorer_block, delay,
                [&](std::int64_t segment, std::int64_t origin, std::int64_t first, std::int64_t end) {
                    const auto tokens = static_cast<std::int32_t>(end - first);
                    const Real* key = rows_around(k, b, h, origin, first, tokens, S::reach, keys);
                    const Real* value = rows_around(v, b, h, origin, first, tokens, S::reach, values);
                    Real* out = scores.head(b, h) + first;
                    if constexpr (checks::has_dropout<S>) {
                        scorer.score_span(h, first - origin, tokens, key, value, out, scratch,
                                          ctx.instructions(),
                                          {dropout, dropout_stream(b, h, k.heads, segment)});
                    } else {
                        static_cast<void>(segment);
                        scorer.score_span(h, first - origin, tokens, key, value, out, scratch,
                                          ctx.instructions());
                    }
                });
        });
}

template <class S>
bool takes_chunks(const S&, form how) {
    return checks::has_chunkwise<S> && how != form::recurrent;
}

template <class Real, class S>
std::size_t score_sequence_bytes(const host& ctx, const S& scorer, std::int32_t heads,
                                 std::int32_t head_dim_qk, std::int32_t head_dim_vo,
                                 const Sequences& sequences, form how) {
    const std::int64_t pairs = std::int64_t{sequences.batch} * heads;
    if (pairs <= 0 || sequences.length <= 0) {
        return 0;
    }
    const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
    std::int64_t items = 1;
    if constexpr (S::when == score_time::on_arrival || S::when == score_time::in_window) {
        items = pairs * stateless_blocks(sequences);
    } else if constexpr (checks::has_chunkwise<S>) {
        if (takes_chunks(scorer, how)) {
            return mlstm_chunkwise_bytes<Real>(ctx, scorer, sequences, heads) + detail::alignment;
        }
        items = pairs * segments;
    } else {
        items = pairs * segments;
    }
    const auto workers = static_cast<std::size_t>(std::min<std::int64_t>(items, ctx.threads()));
    return workers * worker_reals<Real>(scorer, head_dim_qk, head_dim_vo) * sizeof(Real) + detail::alignment;
}

}  // namespace host_backend

template <class Widths, Scorer S, class K, class V>
std::size_t score_sequence_workspace_bytes(const host& ctx, const S& scorer, rows_view<K> k, rows_view<V> v,
                                           const Sequences& sequences,
                                           const BasicScoreOptions<real_of<K>>& options) {
    using Real = real_of<K>;
    checks::check_shape(sequences, k.heads);
    return host_backend::score_sequence_bytes<Real>(ctx, scorer, k.heads, k.dim, v.dim, sequences,
                                                    options.how);
}

template <class Widths, Scorer S, class K, class V>
void score_sequence(const host& ctx, const S& scorer, rows_view<K> k, rows_view<V> v,
                    const Sequences& sequences, std::int32_t delay, plane_view<real_of<K>> scores,
                    workspace_view workspace, const BasicScoreOptions<real_of<K>>& options) {
    using T = std::remove_const_t<K>;
    using Real = compute_t<T>;
    static_assert(std::is_same_v<T, std::remove_const_t<V>>,
                  "kvpolicy: score_sequence needs k and v of one type");
    static_assert(
        S::when != score_time::given,
        "kvpolicy: score_sequence needs a scorer of keys and values; GivenScores has its scores already");
    static_assert(S::when != score_time::from_hidden,
                  "kvpolicy: score_sequence needs a scorer of keys and values; score_hidden takes one of "
                  "hidden states");
    static_assert(
        scores_come_along<S> || host_backend::computes_in<S, Real>,
        "kvpolicy: this scorer computes in float only; double rows need members that are templates on Real");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return score_sequence<Widths>(ctx, scorer, k, v, repaired.sequences, delay, scores, workspace,
                                      options);
    }
    const rows_view<const T> keys = k;
    const rows_view<const T> values = v;
    checks::check_score_call<T>(scorer, keys, values, sequences, delay, scores, options);
    const std::size_t needed =
        host_backend::score_sequence_bytes<Real>(ctx, scorer, k.heads, k.dim, v.dim, sequences, options.how);
    checks::check_workspace(workspace, needed);
    Real* states = options.states;
    if constexpr (S::when == score_time::on_leaving) {
        // A sequence that has not begun leaves the state of one that has not begun.
        for (std::int64_t b = 0; b < k.batch && states != nullptr; ++b) {
            if (sequences.length_of(b) > 0 || sequences.start_of(b) > 0) {
                continue;
            }
            for (std::int64_t h = 0; h < k.heads; ++h) {
                scorer.reset(states + (b * k.heads + h) * static_cast<std::int64_t>(scorer.state_size()));
            }
        }
    }
    if (needed == 0) {
        return;
    }
    Real* memory = reinterpret_cast<Real*>(detail::aligned(workspace.data));
    if constexpr (S::when == score_time::on_arrival) {
        host_backend::score_stateless(ctx, scorer, keys, values, sequences, scores, memory);
    } else if constexpr (S::when == score_time::in_window) {
        host_backend::score_in_window(ctx, scorer, keys, values, sequences, delay, scores, options.dropout,
                                      memory);
    } else {
        if constexpr (checks::has_chunkwise<S>) {
            if (host_backend::takes_chunks(scorer, options.how)) {
                host_backend::score_chunkwise(ctx, scorer, keys, values, sequences, delay, scores, states,
                                              reinterpret_cast<std::byte*>(memory));
                return;
            }
        }
        host_backend::score_recurrent(ctx, scorer, keys, values, sequences, delay, scores, states, memory);
    }
}

inline std::int32_t budget_matching_state(std::int32_t budget, std::size_t state_bytes,
                                          std::size_t row_bytes) {
    detail::require(budget >= 0, "budget", budget, "0 or more");
    detail::require(row_bytes >= 1, "row_bytes", row_bytes, "1 or more");
    if (budget == unlimited) {
        return unlimited;
    }
    const std::size_t rows = state_bytes / row_bytes + (state_bytes % row_bytes != 0 ? 1 : 0);
    detail::require(
        rows <= static_cast<std::size_t>(budget), "budget", budget,
        detail::text("at least ", rows, ", since the scorer's state takes the memory of so many rows"));
    return budget - static_cast<std::int32_t>(rows);
}

}  // namespace kvpolicy
