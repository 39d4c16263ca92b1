// The scores that a step needs, computed before it changes anything.
#pragma once

#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/host/shared_step.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/scorers/host/scorer_input.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// What phase one of a step found for one (entry, head): the scores of the new token and of the key that
/// leaves, and those of keys in the window that are scored in this step, late_from .. late_end - 1. `bad` is
/// a position whose score is NaN and became known in this step, or -1.
struct step_scores {
    float arriving, leaving;
    position_t late_from, late_end, bad;
};

/// Memory of one (entry, head): step_scores, the state after the new token, late scores.
struct step_task {
    step_scores* found;
    float* state;
    float* late;
};

template <class Cache>
std::size_t step_task_bytes(const Cache& cache) {
    std::int32_t late = 0;
    for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
        late = std::max(late, late_scores(cache, h));
    }
    return detail::aligned_size(sizeof(step_scores)) + state_bytes(cache) +
           detail::aligned_size(static_cast<std::size_t>(late) * sizeof(float));
}

/// Memory of all of them, and of the decisions of heads that share a budget.
template <class Cache>
std::size_t step_tasks_bytes(const Cache& cache, std::int32_t count) {
    std::size_t each = static_cast<std::size_t>(cache.kv_heads) * step_task_bytes(cache);
    if constexpr (Cache::policy_type::shares_budget) {
        each += shared_step<Cache>::bytes(cache);
    }
    return static_cast<std::size_t>(count) * each;
}

template <class Cache>
step_task step_task_at(const Cache& cache, std::byte* memory) {
    std::byte* const state = memory + detail::aligned_size(sizeof(step_scores));
    return {reinterpret_cast<step_scores*>(memory), reinterpret_cast<float*>(state),
            reinterpret_cast<float*>(state + state_bytes(cache))};
}

/// Scores tokens [from, end) of a head into scores, 0 for sinks and for keys that are kept for their
/// position. Returns the first whose score is NaN, or -1.
template <class Cache, class KeyAt, class ValueAt>
position_t score_late(isa set, const Cache& cache, const head_state<Cache>& rows, std::int32_t head,
                      position_t from, position_t end, KeyAt&& key_at, ValueAt&& value_at, float* scores,
                      std::byte* scratch) {
    using S = typename Cache::scorer_type;
    scorer_input<S, typename Cache::value_type> input(set, cache.scorer, head, cache.head_dim_qk,
                                                      cache.head_dim_vo, scratch);
    input.score_spans(from, end - from, key_at, value_at, scores);
    position_t bad = -1;
    for (position_t t = end - 1; t >= from; --t) {
        float& score = scores[t - from];
        if (t < rows.head_params.sinks || rows.keeps(t)) {
            score = 0.0f;
        } else if (score != score) {
            bad = t;
        }
    }
    return bad;
}

/// Scores of one (entry, head), computed without writing to the cache: a stateful scorer absorbs into a copy.
template <class Cache, class T>
void score_step([[maybe_unused]] isa set, const Cache& cache, std::int32_t seq, std::int32_t head,
                [[maybe_unused]] const T* key, [[maybe_unused]] const T* value,
                [[maybe_unused]] const float* given, const step_task& task,
                [[maybe_unused]] std::byte* scratch) {
    using S = typename Cache::scorer_type;
    step_scores& scores = *task.found;
    scores = {0.0f, 0.0f, 0, 0, -1};
    if constexpr (!Cache::policy_type::ranked) {
        return;
    }
    const head_state<Cache> rows(cache, seq, head);
    const position_t q = cache.length[seq];
    const position_t u = q - rows.head_params.window;
    const bool leaves = u >= rows.head_params.sinks;
    const std::int32_t row = leaves ? rows.layout.recent(u) : 0;
    if constexpr (scores_come_along<S>) {
        scores.arriving = given == nullptr ? 0.0f : stored_score(*given, q < rows.head_params.sinks);
        scores.leaving = leaves ? rows.score(row) : 0.0f;
    } else if constexpr (S::when == score_time::on_arrival) {
        scorer_input<S, T> input(set, cache.scorer, head, cache.head_dim_qk, cache.head_dim_vo, scratch);
        if (q >= rows.head_params.sinks && !rows.keeps(q)) {
            scores.arriving = input.score(key, value, q);
        }
        scores.leaving = leaves ? rows.score(row) : 0.0f;
    } else if constexpr (S::when == score_time::in_window) {
        scores.leaving = leaves ? rows.score(row) : 0.0f;
        scores.late_from = scored_until(cache.scorer, rows.head_params.window, q);
        scores.late_end = scored_until(cache.scorer, rows.head_params.window, q + 1);
        if (scores.late_from < scores.late_end) {
            scores.bad = score_late(
                set, cache, rows, head, scores.late_from, scores.late_end,
                [&](position_t t) { return t == q ? key : rows.k(rows.layout.recent(t)); },
                [&](position_t t) { return t == q ? value : rows.v(rows.layout.recent(t)); }, task.late,
                scratch);
        }
    } else {
        scorer_input<S, T> input(set, cache.scorer, head, cache.head_dim_qk, cache.head_dim_vo, scratch);
        std::copy_n(cache.state + rows.index * cache.state_size, cache.state_size, task.state);
        input.absorb(task.state, key, value);
        if (leaves && !rows.keeps(u)) {
            scores.leaving = input.read(task.state, rows.k(row), rows.v(row));
            scores.bad = std::isnan(scores.leaving) ? u : -1;
        }
    }
    if (std::isnan(scores.arriving)) {
        scores.bad = q;
    }
}

}  // namespace kvpolicy::host_backend
