// One head's rows in a cache, and how they change when a key leaves the window: what all calls share.
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/host/select.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/finite_rows.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/policies/ranking.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/host/host_hidden.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace kvpolicy::host_backend {

/// Entry i's part of a call's tensor: of a packed one from its first token on, at batch index i either way.
template <class T>
rows_view<T> entry_rows(rows_view<T> all, const std::int32_t* cu_seqlens, std::int64_t i) {
    if (cu_seqlens != nullptr) {
        all.data += cu_seqlens[i] * all.row_stride;
        all.batch_stride = 0;
    }
    return all;
}
template <class T>
plane_view<T> entry_plane(plane_view<T> all, const std::int32_t* cu_seqlens, std::int64_t i) {
    if (cu_seqlens != nullptr && all.data != nullptr) {
        all.data += cu_seqlens[i];
        all.batch_stride = 0;
    }
    return all;
}

/// Refuses a layer whose memory the host cannot read.
template <class Cache>
void check_on_host(const Cache& cache) {
    detail::require(cache.device < 0, "cache", "bound to a device's memory",
                    "one bound to host memory, or a call with a cuda context");
}

/// visit(entry, head) or visit(entry, head, thread) for every head of the entries that bring tokens, on all
/// threads.
template <class Visit>
void for_each_head(const host& ctx, std::int32_t kv_heads, const Batch& batch, Visit&& visit) {
    ctx.parallel_for(std::int64_t{batch.count} * kv_heads, [&](std::int64_t task, int thread) {
        const auto i = static_cast<std::int32_t>(task / kv_heads);
        const auto h = static_cast<std::int32_t>(task % kv_heads);
        if (batch.tokens(i) != 0) {
            if constexpr (std::is_invocable_v<Visit&, std::int32_t, std::int32_t, int>) {
                visit(i, h, thread);
            } else {
                visit(i, h);
            }
        }
    });
}

/// Refuses edges that do not say how the batch's entries are packed. Returns the tokens of all of them.
inline std::int32_t check_packed(const Batch& batch, const std::int32_t* cu_seqlens) {
    for (std::int32_t i = 0; i < batch.count; ++i) {
        const std::int64_t tokens = std::int64_t{cu_seqlens[i + 1]} - cu_seqlens[i];
        if (i == 0 && cu_seqlens[0] != 0) {
            detail::refuse("io.cu_seqlens[0]", cu_seqlens[0], "0");
        }
        if (tokens != batch.tokens(i)) {
            detail::refuse(detail::text("io.cu_seqlens[", i + 1, "]").c_str(), cu_seqlens[i + 1],
                           detail::text("the edge before it, ", cu_seqlens[i], ", and the entry's ",
                                        batch.tokens(i), " tokens (batch.q_len or batch.length)"));
        }
    }
    return batch.count == 0 ? 0 : cu_seqlens[batch.count];
}

/// Refuses tokens for a layer that has taken some which advance() has not counted.
template <class Cache>
void check_appended(const Cache& cache, const Batch& batch) {
    for (std::int32_t i = 0; i < batch.count; ++i) {
        if (batch.tokens(i) != 0 && cache.appended[batch.seq(i)] != 0) [[unlikely]] {
            detail::refuse(detail::text("tokens of entry ", i).c_str(), batch.tokens(i),
                           detail::text("0, since layer ", cache.layer, " has taken ",
                                        cache.appended[batch.seq(i)], " of sequence ", batch.seq(i),
                                        " already: advance(batch) once, after the last layer"));
        }
    }
}
/// Remembers the tokens of a call that is done.
template <class Cache>
void mark_appended(const Cache& cache, const Batch& batch) {
    for (std::int32_t i = 0; i < batch.count; ++i) {
        if (batch.tokens(i) != 0) {
            cache.appended[batch.seq(i)] = batch.tokens(i);
        }
    }
}

/// What the tensors of a call must have: entries, and tokens of an entry.
struct tensor_size {
    std::int32_t count, rows;
};
inline tensor_size size_of_tensors(const Batch& batch, std::int32_t longest, const std::int32_t* cu_seqlens) {
    const bool packed = cu_seqlens != nullptr;
    return {packed ? 1 : batch.count, packed ? check_packed(batch, cu_seqlens) : longest};
}

/// Queries, and where attention goes.
template <class Cache, class IO>
void check_attention(const Cache& cache, const tensor_size& size, const IO& io) {
    const std::int32_t heads = cache.kv_heads * cache.group;
    checks::check_rows("q", io.q, size.count, heads, size.rows, cache.head_dim_qk);
    checks::check_rows("out", io.out, size.count, heads, size.rows, cache.head_dim_vo);
    checks::check_lse(io.lse, size.count, heads, size.rows);
}

/// Whether what a token brings reaches the scores of other tokens: by a state, or as their neighbor.
template <class P>
constexpr bool scores_depend_on_others() {
    if constexpr (P::ranked) {
        return P::scorer_type::when == score_time::on_leaving ||
               P::scorer_type::when == score_time::in_window;
    } else {
        return false;
    }
}

/// Refuses tokens whose key or value is NaN or infinite.
template <class Cache, class T>
void check_finite_tokens(const Cache& cache, const Batch& batch, rows_view<const T> k, rows_view<const T> v,
                         const std::int32_t* edges) {
    for (std::int32_t i = 0; i < batch.count; ++i) {
        const rows_view<const T> keys = entry_rows(k, edges, i), values = entry_rows(v, edges, i);
        for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
            for (std::int32_t j = 0; j < batch.tokens(i); ++j) {
                const bool key = checks::finite_row(keys.row(i, h, j), cache.head_dim_qk);
                if (!key || !checks::finite_row(values.row(i, h, j), cache.head_dim_vo)) [[unlikely]] {
                    detail::refuse(detail::text(key ? "value" : "key", " of entry ", i, ", head ", h,
                                                ", position ", cache.length[batch.seq(i)] + j)
                                       .c_str(),
                                   "NaN or infinite",
                                   "finite numbers, since the scores of other keys depend on them; "
                                   "bad_token::drop skips such a token");
                }
            }
        }
    }
}

/// Keys and values of a chunk, and what comes with them. Where the call does not refuse bad tokens they are
/// no fault of the arguments: the call reports them, as a device does.
template <class Cache, class T>
void check_chunk(const Cache& cache, const Batch& batch, const tensor_size& size, std::int32_t longest,
                 rows_view<const T> k, rows_view<const T> v, const detail::step_extras& extras,
                 const StepOptions& options) {
    using P = typename Cache::policy_type;
    const std::int32_t count = size.count, rows = size.rows;
    checks::check_rows("k", k, count, cache.kv_heads, rows, cache.head_dim_qk);
    checks::check_rows("v", v, count, cache.kv_heads, rows, cache.head_dim_vo);
    checks::check_scores_wanted<P>(extras);
    if constexpr (scores_depend_on_others<P>()) {
        if (options.refuses_bad_tokens()) {
            check_finite_tokens(cache, batch, k, v, extras.cu_seqlens);
        }
    }
    if constexpr (P::ranked && P::scorer_type::when == score_time::from_hidden) {
        if (longest != 0) {
            checks::check_hidden("io.hidden", extras.hidden, count, rows, cache.scorer.hidden_width());
        }
    }
    if constexpr (P::ranked && P::scorer_type::when == score_time::given) {
        const plane_view<const float> scores = extras.scores;
        detail::require(static_cast<bool>(scores) || longest == 0, "io.scores", "null",
                        "fp32 scores, since this policy's scores are given");
        const bool fits = scores.batch == count && scores.heads == cache.kv_heads && scores.length >= rows;
        if (longest != 0 && !fits) {
            detail::refuse("io.scores", detail::text(scores.batch, " x ", scores.heads, " x ", scores.length),
                           detail::text(count, " x ", cache.kv_heads, " x at least ", rows));
        }
        for (std::int32_t i = 0; options.refuses_bad_tokens() && i < batch.count; ++i) {
            for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
                const float* score = entry_plane(scores, extras.cu_seqlens, i).head(i, h);
                // The score of a sink, or of a key that is kept by position, is never read.
                const position_t first = cache.length[batch.seq(i)],
                                 sinks = cache.all_params[h].sinks - first;
                for (std::int32_t j = 0; j < batch.tokens(i); ++j) {
                    if (score[j] != score[j] && j >= sinks && !cache.keep.keeps(first + j)) [[unlikely]] {
                        detail::refuse(detail::text("io.scores[", i, "][", h, "][", j, "]").c_str(), "NaN",
                                       "a number (-inf and +inf are allowed)");
                    }
                }
            }
        }
    }
}

/// What is stored of a score that came with its token, as a device stores it: of a sink, whose score nothing
/// reads, 0 for a NaN; else the score itself.
inline float stored_score(float given, bool sink) { return sink && std::isnan(given) ? 0.0f : given; }

/// The key at `position` of an entry has a score that is NaN: sets status_nan_score, or
/// refuses it where the call does. A key that is kept for its position is not ranked, so its score is not
/// refused.
template <class Cache>
void report_nan_score(const Cache& cache, std::int32_t entry, std::int32_t head, position_t position,
                      const StepOptions& options) {
    if (checks::reported(options.status, entry, status_nan_score) || !options.refuses_bad_tokens() ||
        cache.keep.keeps(position)) {
        return;
    }
    constexpr bool given = Cache::policy_type::scorer_type::when == score_time::given;
    detail::refuse(
        detail::text("score of entry ", entry, ", head ", head, ", position ", position).c_str(), "NaN",
        given ? "a number where the call takes no status"
              : "a number; look for NaN or infinity in its key, its value or the scorer's weights");
}

template <class T>
void copy_row(const T* from, std::int32_t dim, T* to) {
    std::memcpy(to, from, static_cast<std::size_t>(dim) * sizeof(T));
}

/// Keeps the queries of tokens from position `first` on, all heads of KV head `head`, for an eviction part:
/// q.row(entry, query head, j) are those of token first + j.
template <class Cache, class T>
void remember_queries([[maybe_unused]] const Cache& cache, [[maybe_unused]] std::int32_t seq,
                      [[maybe_unused]] std::int32_t head, [[maybe_unused]] position_t first,
                      [[maybe_unused]] std::int32_t tokens, [[maybe_unused]] const rows_view<const T>& q,
                      [[maybe_unused]] std::int32_t entry) {
    if constexpr (Cache::policy_type::has_eviction) {
        for (std::int32_t j = std::max(0, tokens - cache.eviction.observing); j < tokens; ++j) {
            T* const to = cache.query_row(seq, head, first + j);
            for (std::int32_t g = 0; g < cache.group; ++g) {
                copy_row(q.row(entry, head * cache.group + g, j), cache.head_dim_qk,
                         to + std::int64_t{g} * cache.head_dim_qk);
            }
        }
    }
}

/// Whether a key may live on after its window: without budget, gate and keep parts none does.
template <class P>
inline constexpr bool retains = P::ranked || P::has_keep;

/// One head's rows in a cache, and how they change at a step.
template <class Cache>
struct head_state {
    using P = typename Cache::policy_type;
    using T = typename Cache::value_type;

    const Cache& cache;
    decltype(std::declval<const Cache&>().head_rows(0, 0)) rows;
    std::int64_t index;  // sequence * kv_heads + head
    HeadParams head_params;
    HeadRows layout;

    head_state(const Cache& ref, std::int32_t seq, std::int32_t head)
        : cache(ref),
          rows(ref.head_rows(seq, head)),
          index(ref.head_index(seq, head)),
          head_params(ref.all_params[head]),
          layout(ref.layout(head)) {}

    T* k(std::int32_t row) const { return rows.k(row); }
    T* v(std::int32_t row) const { return rows.v(row); }
    position_t& position(std::int32_t row) const { return rows.position(row); }
    float& score(std::int32_t row) const { return rows.score(row); }

    void put(std::int32_t row, const T* key, const T* value, position_t t, float s) const {
        copy_row(key, cache.head_dim_qk, k(row));
        copy_row(value, cache.head_dim_vo, v(row));
        position(row) = t;
        score(row) = s;
    }

    /// Whether a keep part holds position t: such a key gets a place of its own, outside gate and budget.
    bool keeps([[maybe_unused]] position_t t) const {
        if constexpr (P::has_keep) {
            return cache.keep.keeps(t);
        } else {
            return false;
        }
    }
    /// Top-k slots whose keys compete.
    std::int32_t competitors() const {
        std::int32_t count = cache.num_long_range[index];
        if constexpr (P::has_keep) {
            count -= cache.num_protected[index];
        }
        return count;
    }
    /// Whether key t, leaving the window with score s, gets a place without taking it from another.
    bool takes_new_slot(position_t t, float s) const {
        if (keeps(t)) {
            return true;
        }
        return head_params.budget != 0 && cache.gate.open(s, head_params) &&
               (head_params.budget == unlimited || competitors() < head_params.budget);
    }

    /// The worst top-k slot at query q: the one found before, while ranks stand still.
    std::int32_t worst_slot(position_t q) const {
        std::int32_t& known = cache.victim[index];
        if (known >= 0 && head_params.decay_step == 1) {
            return known;
        }
        std::int32_t worst = -1;
        double worst_value = 0.0;
        for (std::int32_t p = 0; p < cache.num_long_range[index]; ++p) {
            if (keeps(position(layout.slot(p)))) {
                continue;
            }
            const double value = value_of(p, q);
            if (worst < 0 ||
                ranks_before(worst_value, position(layout.slot(worst)), value, position(layout.slot(p)))) {
                worst = p;
                worst_value = value;
            }
        }
        return known = worst;
    }

    double value_of(std::int32_t slot, position_t q) const {
        const std::int32_t row = layout.slot(slot);
        return rank_value(head_params, score(row), position(row), q, cache.rebase_limit);
    }

    /// The key in ring row `row` leaves the window at query q with score s: it takes a free top-k slot, takes
    /// the worst slot, or goes. Returns the row that it has now, or -1.
    std::int32_t leave(std::int32_t row, float s, position_t q) const {
        if (priority_base(q, cache.rebase_limit) != priority_base(q - 1, cache.rebase_limit)) {
            cache.victim[index] = -1;  // priorities are rounded anew, which may reorder near-equal keys
        }
        const position_t t = position(row);
        if (takes_new_slot(t, s)) {
            const std::int32_t taken = layout.slot(cache.num_long_range[index]++);
            put(taken, k(row), v(row), t, s);
            if constexpr (P::has_keep) {
                if (keeps(t)) {
                    ++cache.num_protected[index];
                    return taken;
                }
            }
            cache.victim[index] = -1;
            return taken;
        }
        if (head_params.budget == 0 || !cache.gate.open(s, head_params)) {
            return -1;
        }
        const std::int32_t worst = worst_slot(q);
        const double value = rank_value(head_params, s, t, q, cache.rebase_limit);
        if (!ranks_before(value, t, value_of(worst, q), position(layout.slot(worst)))) {
            return -1;
        }
        put(layout.slot(worst), k(row), v(row), t, s);
        cache.victim[index] = -1;
        return layout.slot(worst);
    }
};

}  // namespace kvpolicy::host_backend
