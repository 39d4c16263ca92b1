// The scores that a step needs, computed before it changes anything.
#pragma once

#include <kvpolicy/host/cache_rows.hpp>
#include <kvpolicy/host/scorer_input.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// What phase one of a step found for one (entry, head): the scores of the newcomer and of the key that leaves.
struct step_scores {
    float arriving, leaving;
};

template <class Cache>
std::size_t step_task_bytes(const Cache& cache) {
    return aligned_size(sizeof(step_scores)) + scorer_bytes(cache);
}

/// Scores of one (entry, head), computed without writing to the cache: a stateful scorer absorbs into a copy.
template <class Cache, class T>
step_scores score_step([[maybe_unused]] isa set, const Cache& cache, std::int32_t slot, std::int32_t head,
                       [[maybe_unused]] const T* key, [[maybe_unused]] const T* value,
                       [[maybe_unused]] const float* given, [[maybe_unused]] std::byte* memory) {
    using S = typename Cache::scorer_type;
    step_scores scores{0.0f, 0.0f};
    if constexpr (!Cache::policy_type::ranked) {
        return scores;
    }
    const head_state<Cache> rows(cache, slot, head);
    const position_t q = cache.length[slot];
    const position_t u = q - rows.rule.window;
    const bool leaves = u >= rows.rule.sinks;
    const std::int32_t row = leaves ? rows.layout.recent(u) : 0;
    if constexpr (S::when == score_time::given) {
        scores.arriving = given == nullptr ? 0.0f : *given;
        scores.leaving = leaves ? rows.score(row) : 0.0f;
    } else {
        std::byte* scratch =
            memory + aligned_size(static_cast<std::size_t>(cache.state_size) * sizeof(float));
        scorer_input<S, T> input(set, cache.scorer, head, cache.dim_k, cache.dim_v, scratch);
        if constexpr (S::when == score_time::on_arrival) {
            if (q >= rows.rule.sinks && !rows.keeps(q)) {
                scores.arriving = input.score(key, value);
            }
            scores.leaving = leaves ? rows.score(row) : 0.0f;
        } else {
            auto* state = reinterpret_cast<float*>(memory);
            std::copy_n(cache.state + rows.index * cache.state_size, cache.state_size, state);
            input.absorb(state, key, value);
            if (leaves && !rows.keeps(u)) {
                scores.leaving = input.read(state, rows.k(row), rows.v(row));
            }
        }
    }
    return scores;
}

}  // namespace kvpolicy::host_backend
