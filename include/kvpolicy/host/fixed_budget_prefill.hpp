// A chunk of tokens into a cache on the host: decide, attend, write back.
#pragma once

#include <kvpolicy/host/fixed_budget_step.hpp>
#include <kvpolicy/masks/contest.hpp>

#include <algorithm>

namespace kvpolicy {

namespace host_backend {

/// Arrays of one (entry, head) of a chunk of n tokens, in the caller's workspace. Keys have names: row r of the cache is r,
/// token j of the chunk is row_count + j. Expiries and positions are relative to the chunk's first token.
struct chunk_plan {
    std::int32_t* position;       // [row_count]
    expiry_t* expiry;             // [row_count + n]
    float* score;                 // [n]: scores of the chunk's tokens, where known on arrival
    detail::contestant* keepers;  // survivors after the chunk
    std::int32_t* keeper_count;
    position_t* bad;    // the first position whose score is NaN, or -1
    std::byte* scorer;  // the state copy, then the scorer's scratch
    std::size_t bytes;

    chunk_plan(std::byte* memory, std::int64_t rows, std::int32_t tokens, std::int64_t places,
               std::size_t scorer_bytes) {
        std::size_t at = 0;
        const auto take = [&](std::size_t count, std::size_t size) {
            std::byte* here = memory + at;
            at += aligned_size(count * size);
            return here;
        };
        const auto r = static_cast<std::size_t>(rows);
        const auto n = static_cast<std::size_t>(tokens);
        position = reinterpret_cast<std::int32_t*>(take(r, sizeof(std::int32_t)));
        expiry = reinterpret_cast<expiry_t*>(take(r + n, sizeof(expiry_t)));
        score = reinterpret_cast<float*>(take(n, sizeof(float)));
        keepers = reinterpret_cast<detail::contestant*>(
            take(static_cast<std::size_t>(places), sizeof(detail::contestant)));
        keeper_count = reinterpret_cast<std::int32_t*>(take(1, sizeof(std::int32_t)));
        bad = reinterpret_cast<position_t*>(take(1, sizeof(position_t)));
        scorer = take(scorer_bytes, 1);
        bytes = at;
    }
};

template <class P, class T>
chunk_plan plan_of(const FixedBudgetRef<P, T>& cache, std::int32_t head, std::int32_t tokens,
                   std::byte* memory) {
    const HeadRule& rule = cache.rules[head];
    const std::int64_t rows = std::int64_t{rule.sinks} + rule.window + rule.budget;
    return chunk_plan(memory, rows, tokens, rule.budget, scorer_bytes(cache));
}

/// Bytes of the plans of one entry, all heads.
template <class P, class T>
std::size_t chunk_bytes(const FixedBudgetRef<P, T>& cache, std::int32_t tokens) {
    std::size_t bytes = 0;
    for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
        bytes += plan_of(cache, h, tokens, nullptr).bytes;
    }
    return bytes;
}

/// Relative to a chunk's first position; what lies further back than an int32 reaches is just as visible there.
inline std::int32_t relative(position_t t, position_t base) {
    return static_cast<std::int32_t>(std::max<position_t>(t - base, -(position_t{1} << 30)));
}

/// Runs the chunk's contests without touching the cache. Returns the first position whose score is NaN, or -1.
template <class P, class T>
position_t decide_chunk(const FixedBudgetRef<P, T>& cache, std::int32_t slot, std::int32_t head,
                        std::int32_t tokens, rows_view<const T> k, rows_view<const T> v, std::int32_t entry,
                        const float* given, const chunk_plan& plan) {
    using S = typename P::scorer_type;
    const head_rows<P, T> rows(cache, slot, head);
    const HeadRule& rule = rows.rule;
    const position_t base = cache.length[slot];
    const std::int32_t kept = cache.kept[rows.index];
    const std::int32_t used = rows.layout.used(base, kept);
    const std::int32_t row_count = rule.sinks + rule.window + rule.budget;

    detail::long_range_set places(plan.keepers, rule, cache.rebase_limit);
    for (std::int32_t r = 0; r < used; ++r) {
        const position_t t = rows.position(r);
        const bool recent = r >= rule.sinks && r < rule.sinks + rule.window;
        plan.position[r] = relative(t, base);
        plan.expiry[r] =
            recent ? static_cast<expiry_t>(std::min<position_t>(t + rule.window - base, never)) : never;
        if (r >= rows.layout.place(0)) {
            places.restore(t, rows.score(r), r, r - rows.layout.place(0));
        }
    }
    for (std::int32_t j = 0; j < tokens; ++j) {
        const bool sink = base + j < rule.sinks;
        plan.expiry[row_count + j] =
            sink ? never
                 : static_cast<expiry_t>(std::min<std::int64_t>(std::int64_t{j} + rule.window, never));
    }
    if constexpr (P::ranked) {
        [[maybe_unused]] auto* state = reinterpret_cast<float*>(plan.scorer);
        [[maybe_unused]] std::byte* scratch =
            plan.scorer + aligned_size(static_cast<std::size_t>(cache.state_size) * sizeof(float));
        if constexpr (S::when == score_time::on_leaving) {
            std::copy_n(cache.state + rows.index * cache.state_size, cache.state_size, state);
        }
        const auto key_at = [&](position_t u) {
            return u < base ? rows.k(rows.layout.recent(u)) : k.row(entry, head, u - base);
        };
        const auto value_at = [&](position_t u) {
            return u < base ? rows.v(rows.layout.recent(u)) : v.row(entry, head, u - base);
        };
        if constexpr (S::when == score_time::given) {
            std::copy_n(given, tokens, plan.score);
        } else {
            std::fill_n(plan.score, tokens, 0.0f);
        }
        if constexpr (S::when == score_time::on_arrival) {
            // A sink is never scored.
            const auto from = static_cast<std::int32_t>(std::clamp<position_t>(rule.sinks - base, 0, tokens));
            scorer_input<S, T> input(cache.scorer, head, cache.dim_k, cache.dim_v, scratch);
            input.score_all(k.row(entry, head, from), k.row_stride, v.row(entry, head, from), v.row_stride,
                            tokens - from, plan.score + from);
            for (std::int32_t j = from; j < tokens; ++j) {
                if (plan.score[j] != plan.score[j]) {
                    return base + j;
                }
            }
        }
        for (std::int32_t j = 0; j < tokens; ++j) {
            const position_t q = base + j;
            if constexpr (S::when == score_time::on_leaving) {
                scorer_input<S, T> input(cache.scorer, head, cache.dim_k, cache.dim_v, scratch);
                input.absorb(state, k.row(entry, head, j), v.row(entry, head, j));
            }
            const position_t u = q - rule.window;
            if (u < rule.sinks) {
                continue;
            }
            const std::int32_t name =
                u < base ? rows.layout.recent(u) : row_count + static_cast<std::int32_t>(u - base);
            float score = 0.0f;
            if constexpr (S::when == score_time::on_leaving) {
                scorer_input<S, T> input(cache.scorer, head, cache.dim_k, cache.dim_v, scratch);
                score = input.read(state, key_at(u), value_at(u));
                if (score != score) {
                    return u;
                }
            } else {
                score = u < base ? rows.score(name) : plan.score[u - base];
            }
            if (rule.budget == 0 || !cache.gate.open(score, rule)) {
                continue;
            }
            const detail::contest_outcome outcome = places.contest(u, score, name, q);
            if (outcome.kind != detail::contest_outcome::refused) {
                plan.expiry[name] = never;
            }
            if (outcome.kind == detail::contest_outcome::replaced) {
                plan.expiry[outcome.lost] = j;
            }
        }
    }
    *plan.keeper_count = places.size();
    return -1;
}

/// Writes what the chunk leaves behind: new long-range rows first (they may come from ring rows), then sinks and ring.
template <class P, class T>
void commit_chunk(const FixedBudgetRef<P, T>& cache, std::int32_t slot, std::int32_t head,
                  std::int32_t tokens, rows_view<const T> k, rows_view<const T> v, std::int32_t entry,
                  const chunk_plan& plan) {
    const head_rows<P, T> rows(cache, slot, head);
    const HeadRule& rule = rows.rule;
    const position_t base = cache.length[slot];
    const std::int32_t row_count = rule.sinks + rule.window + rule.budget;
    for (std::int32_t i = 0; i < *plan.keeper_count; ++i) {
        const detail::contestant& keeper = plan.keepers[i];
        const std::int32_t row = rows.layout.place(keeper.place);
        if (keeper.key == row) {
            continue;
        }
        if (keeper.key < row_count) {
            rows.put(row, rows.k(keeper.key), rows.v(keeper.key), keeper.position, keeper.score);
        } else {
            const std::int32_t j = keeper.key - row_count;
            rows.put(row, k.row(entry, head, j), v.row(entry, head, j), keeper.position, keeper.score);
        }
    }
    for (std::int32_t j = 0; j < tokens; ++j) {
        const position_t t = base + j;
        if (t < rule.sinks || t > base + tokens - 1 - rule.window) {
            rows.put(rows.layout.recent(t), k.row(entry, head, j), v.row(entry, head, j), t,
                     P::ranked ? plan.score[j] : 0.0f);
        }
    }
    cache.kept[rows.index] = *plan.keeper_count;
    cache.victim[rows.index] = -1;
    if constexpr (P::ranked && StatefulScorer<typename P::scorer_type>) {
        std::copy_n(reinterpret_cast<const float*>(plan.scorer), cache.state_size,
                    cache.state + rows.index * cache.state_size);
    }
}

/// The two segments that a chunk's queries see: the rows of the cache, and the chunk itself.
template <class P, class T>
void chunk_segments(const FixedBudgetRef<P, T>& cache, std::int32_t slot, std::int32_t head,
                    std::int32_t tokens, rows_view<const T> k, rows_view<const T> v, std::int32_t entry,
                    const chunk_plan& plan, key_segment<T> (&segments)[2]) {
    const head_rows<P, T> rows(cache, slot, head);
    const std::int32_t row_count = rows.rule.sinks + rows.rule.window + rows.rule.budget;
    segments[0] = {};
    segments[0].k = rows.k(0);
    segments[0].k_stride = cache.dim_k;
    segments[0].v = rows.v(0);
    segments[0].v_stride = cache.dim_v;
    segments[0].count = cache.used(slot, head);
    segments[0].position = plan.position;
    segments[0].expiry = plan.expiry;
    segments[1] = {};
    segments[1].k = k.row(entry, head, 0);
    segments[1].k_stride = k.row_stride;
    segments[1].v = v.row(entry, head, 0);
    segments[1].v_stride = v.row_stride;
    segments[1].count = tokens;
    segments[1].expiry = plan.expiry + row_count;
}

}  // namespace host_backend

template <class P, Storage T>
std::size_t cache_workspace_bytes(const host& on, const FixedBudgetRef<P, T>& cache, std::int32_t count,
                                  std::int32_t tokens) {
    namespace hb = host_backend;
    const std::size_t heads = static_cast<std::size_t>(count) * static_cast<std::size_t>(cache.kv_heads);
    const std::size_t step_bytes = heads * hb::step_task_bytes(cache) + hb::decode_bytes(on, cache, count);
    const std::size_t prefill_bytes = static_cast<std::size_t>(count) * hb::chunk_bytes(cache, tokens) +
                                      hb::chunk_attention_bytes(on, cache);
    return std::max(step_bytes, prefill_bytes) + hb::alignment;
}

template <class P, Storage T>
void prefill(const host& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, rows_view<const T> q,
             rows_view<const T> k, rows_view<const T> v, rows_view<T> out, workspace_view workspace,
             std::uint32_t*, const CacheExtras& extras) {
    namespace hb = host_backend;
    const std::int32_t longest = hb::check_batch(batch, cache.slots, q.length, "the length of q");
    hb::check_cache_call(cache, batch, longest, q, k, v, out, extras);
    hb::check_workspace(workspace, cache_workspace_bytes(on, cache, batch.count, longest));
    std::byte* memory = hb::aligned(workspace.data);
    const std::size_t entry_bytes = hb::chunk_bytes(cache, longest);
    const auto plan_for = [&](std::int32_t i, std::int32_t h) {
        std::byte* at = memory + static_cast<std::size_t>(i) * entry_bytes;
        for (std::int32_t before = 0; before < h; ++before) {
            at += hb::plan_of(cache, before, longest, nullptr).bytes;
        }
        return hb::plan_of(cache, h, longest, at);
    };
    const std::int64_t tasks = std::int64_t{batch.count} * cache.kv_heads;
    const auto for_each_head = [&](auto&& visit) {
        on.parallel_for(tasks, [&](std::int64_t task) {
            const auto i = static_cast<std::int32_t>(task / cache.kv_heads);
            const auto h = static_cast<std::int32_t>(task % cache.kv_heads);
            if (batch.tokens(i) != 0) {
                visit(i, h);
            }
        });
    };
    for_each_head([&](std::int32_t i, std::int32_t h) {
        const float* given = extras.scores ? extras.scores.head(i, h) : nullptr;
        const hb::chunk_plan plan = plan_for(i, h);
        *plan.bad = hb::decide_chunk(cache, batch.slot(i), h, batch.tokens(i), k, v, i, given, plan);
    });
    // Refused from here and not from a task: without exceptions a handler may jump out of the call.
    for (std::int64_t task = 0; task < tasks; ++task) {
        const auto i = static_cast<std::int32_t>(task / cache.kv_heads);
        const auto h = static_cast<std::int32_t>(task % cache.kv_heads);
        if (batch.tokens(i) == 0) {
            continue;
        }
        const position_t bad = *plan_for(i, h).bad;
        if (bad >= 0) {
            hb::refuse_computed_score(i, h, bad);
        }
    }
    hb::attend_chunk(on, cache, batch, q, out, extras.lse, longest,
                     memory + static_cast<std::size_t>(batch.count) * entry_bytes,
                     [&](std::int32_t i, std::int32_t h, hb::key_segment<T>(&segments)[2]) {
                         hb::chunk_segments(cache, batch.slot(i), h, batch.tokens(i), k, v, i, plan_for(i, h),
                                            segments);
                     });
    for_each_head([&](std::int32_t i, std::int32_t h) {
        hb::commit_chunk(cache, batch.slot(i), h, batch.tokens(i), k, v, i, plan_for(i, h));
    });
}

}  // namespace kvpolicy
