// One decode step on the host, and what step and prefill share.
#pragma once

#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/host/check.hpp>
#include <kvpolicy/host/fixed_budget.hpp>
#include <kvpolicy/host/fixed_budget_attend.hpp>

#include <algorithm>
#include <cstring>

namespace kvpolicy {

namespace host_backend {

template <class P, class T>
void check_cache_call(const FixedBudgetRef<P, T>& cache, const Batch& batch, std::int32_t longest,
                      rows_view<const T> q, rows_view<const T> k, rows_view<const T> v, rows_view<T> out,
                      const CacheExtras& extras) {
    check_rows("q", q, batch.count, cache.kv_heads * cache.group, longest, cache.dim_k);
    check_rows("k", k, batch.count, cache.kv_heads, longest, cache.dim_k);
    check_rows("v", v, batch.count, cache.kv_heads, longest, cache.dim_v);
    check_rows("out", out, batch.count, cache.kv_heads * cache.group, longest, cache.dim_v);
    check_lse(extras.lse, batch.count, cache.kv_heads * cache.group, longest);
    if constexpr (P::ranked && P::scorer_type::when == score_time::given) {
        const plane_view<const float> scores = extras.scores;
        detail::require(static_cast<bool>(scores) || longest == 0, "extras.scores", "null",
                        "fp32 scores, since this policy's scores are given");
        const bool fits =
            scores.batch == batch.count && scores.heads == cache.kv_heads && scores.length >= longest;
        if (longest != 0 && !fits) {
            detail::refuse("extras.scores",
                           detail::text(scores.batch, " x ", scores.heads, " x ", scores.length),
                           detail::text(batch.count, " x ", cache.kv_heads, " x at least ", longest));
        }
        for (std::int32_t i = 0; i < batch.count; ++i) {
            for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
                const float* score = scores.head(i, h);
                for (std::int32_t j = 0; j < batch.tokens(i); ++j) {
                    if (score[j] != score[j]) [[unlikely]] {
                        detail::refuse(detail::text("extras.scores[", i, "][", h, "][", j, "]").c_str(),
                                       "NaN", "a number (-inf and +inf are allowed)");
                    }
                }
            }
        }
    }
}

/// A computed score that is NaN: the keys, values or weights that it was made from are not finite.
[[noreturn]] inline void refuse_computed_score(std::int32_t entry, std::int32_t head, position_t position) {
    detail::refuse(detail::text("score of entry ", entry, ", head ", head, ", position ", position).c_str(),
                   "NaN", "a number; look for NaN or infinity in its key, its value or the scorer's weights");
}

template <class T>
void convert_row(const T* row, std::int32_t dim, float* out) {
    for (std::int32_t d = 0; d < dim; ++d) {
        out[d] = static_cast<float>(row[d]);
    }
}

/// Reads rows as fp32 for a scorer: one token at a time, or blocks of them where the scorer takes blocks.
template <class S, class T>
class scorer_input {
  public:
    static std::size_t bytes(const S& scorer, std::int32_t dim_k, std::int32_t dim_v) {
        return rows_bytes(dim_k) + rows_bytes(dim_v) + aligned_size(scratch_floats(scorer) * sizeof(float));
    }
    scorer_input(const S& scorer, std::int32_t head, std::int32_t dim_k, std::int32_t dim_v,
                 std::byte* memory)
        : scorer_(scorer),
          head_(head),
          dim_k_(dim_k),
          dim_v_(dim_v),
          k_(reinterpret_cast<float*>(memory)),
          v_(reinterpret_cast<float*>(memory + rows_bytes(dim_k))),
          scratch_(reinterpret_cast<float*>(memory + rows_bytes(dim_k) + rows_bytes(dim_v))) {}

    float score(const T* k, const T* v) {
        load(k, v, 0);
        return static_cast<float>(scorer_.score(head_, k_, v_, scratch_));
    }
    /// Scores tokens [0, count) of rows `stride` apart.
    void score_all(const T* k, std::int64_t k_stride, const T* v, std::int64_t v_stride, std::int32_t count,
                   float* scores) {
        for (std::int32_t begin = 0; begin < count; begin += block) {
            const std::int32_t rows = std::min(block, count - begin);
            for (std::int32_t r = 0; r < rows; ++r) {
                load(k + (begin + r) * k_stride, v + (begin + r) * v_stride, r);
            }
            if constexpr (BlockScorer<S>) {
                scorer_.score_block(head_, rows, k_, v_, scores + begin, scratch_, detected_isa());
            } else {
                scores[begin] = static_cast<float>(scorer_.score(head_, k_, v_, scratch_));
            }
        }
    }
    void absorb(float* state, const T* k, const T* v) {
        load(k, v, 0);
        scorer_.absorb(head_, state, k_, v_, scratch_);
    }
    float read(const float* state, const T* k, const T* v) {
        load(k, v, 0);
        return static_cast<float>(scorer_.read(head_, state, k_, v_, scratch_));
    }

  private:
    static constexpr std::int32_t block = BlockScorer<S> ? scorer_block : 1;

    static std::size_t rows_bytes(std::int32_t dim) {
        return aligned_size(static_cast<std::size_t>(block) * static_cast<std::size_t>(dim) * sizeof(float));
    }
    static std::size_t scratch_floats(const S& scorer) {
        if constexpr (BlockScorer<S>) {
            return std::max<std::size_t>(scorer.scratch_size(), scorer.block_scratch_size());
        } else {
            return scorer.scratch_size();
        }
    }
    void load(const T* k, const T* v, std::int32_t r) {
        convert_row(k, dim_k_, k_ + std::int64_t{r} * dim_k_);
        convert_row(v, dim_v_, v_ + std::int64_t{r} * dim_v_);
    }
    const S& scorer_;
    std::int32_t head_, dim_k_, dim_v_;
    float* k_;
    float* v_;
    float* scratch_;
};

template <class P, class T>
std::size_t scorer_bytes(const FixedBudgetRef<P, T>& cache) {
    using S = typename P::scorer_type;
    if constexpr (!P::ranked || S::when == score_time::given) {
        return 0;
    } else {
        return scorer_input<S, T>::bytes(cache.scorer, cache.dim_k, cache.dim_v) +
               aligned_size(static_cast<std::size_t>(cache.state_size) * sizeof(float));
    }
}

template <class T>
void copy_row(const T* from, std::int32_t dim, T* to) {
    std::memcpy(to, from, static_cast<std::size_t>(dim) * sizeof(T));
}

/// One head's rows in a cache, and how they change at a step.
template <class P, class T>
struct head_rows {
    const FixedBudgetRef<P, T>& cache;
    std::int64_t first;  // row index of the head's first row
    std::int64_t index;  // slot * kv_heads + head
    HeadRule rule;
    HeadRows layout;

    head_rows(const FixedBudgetRef<P, T>& ref, std::int32_t slot, std::int32_t head)
        : cache(ref),
          first(ref.first_row(slot, head)),
          index(std::int64_t{slot} * ref.kv_heads + head),
          rule(ref.rules[head]),
          layout(ref.layout(head)) {}

    T* k(std::int32_t row) const { return cache.k + (first + row) * cache.dim_k; }
    T* v(std::int32_t row) const { return cache.v + (first + row) * cache.dim_v; }
    position_t& position(std::int32_t row) const { return cache.position[first + row]; }
    float& score(std::int32_t row) const { return cache.score[first + row]; }

    void put(std::int32_t row, const T* key, const T* value, position_t t, float s) const {
        copy_row(key, cache.dim_k, k(row));
        copy_row(value, cache.dim_v, v(row));
        position(row) = t;
        score(row) = s;
    }

    /// The worst long-range place at query q: the one found before, while ranks stand still.
    std::int32_t worst_place(position_t q) const {
        std::int32_t& known = cache.victim[index];
        if (known >= 0 && rule.decay_step == 1) {
            return known;
        }
        std::int32_t worst = 0;
        double worst_value = value_of(0, q);
        for (std::int32_t p = 1; p < cache.kept[index]; ++p) {
            const double value = value_of(p, q);
            if (ranks_before(worst_value, position(layout.place(worst)), value, position(layout.place(p)))) {
                worst = p;
                worst_value = value;
            }
        }
        return known = worst;
    }

    double value_of(std::int32_t place, position_t q) const {
        const std::int32_t row = layout.place(place);
        return rank_value(rule, score(row), position(row), q, cache.rebase_limit);
    }

    /// The key in ring row `row` leaves the window at query q with score s: it takes a free place, takes the worst place,
    /// or goes.
    void leave(std::int32_t row, float s, position_t q) const {
        if (priority_base(q, cache.rebase_limit) != priority_base(q - 1, cache.rebase_limit)) {
            cache.victim[index] = -1;  // priorities are rounded anew, which may reorder near-equal keys
        }
        if (rule.budget == 0 || !cache.gate.open(s, rule)) {
            return;
        }
        const position_t t = position(row);
        std::int32_t& kept = cache.kept[index];
        if (kept < rule.budget) {
            put(layout.place(kept), k(row), v(row), t, s);
            ++kept;
            cache.victim[index] = -1;
            return;
        }
        const std::int32_t worst = worst_place(q);
        const double value = rank_value(rule, s, t, q, cache.rebase_limit);
        if (!ranks_before(value, t, value_of(worst, q), position(layout.place(worst)))) {
            return;
        }
        put(layout.place(worst), k(row), v(row), t, s);
        cache.victim[index] = -1;
    }
};

/// What phase one of a step found for one (entry, head): the scores of the newcomer and of the key that leaves.
struct step_scores {
    float arriving, leaving;
};

template <class P, class T>
std::size_t step_task_bytes(const FixedBudgetRef<P, T>& cache) {
    return aligned_size(sizeof(step_scores)) + scorer_bytes(cache);
}

/// Scores of one (entry, head), computed without writing to the cache: a stateful scorer absorbs into a copy.
template <class P, class T>
step_scores score_step(const FixedBudgetRef<P, T>& cache, std::int32_t slot, std::int32_t head, const T* key,
                       const T* value, const float* given, std::byte* memory) {
    using S = typename P::scorer_type;
    step_scores scores{0.0f, 0.0f};
    const head_rows<P, T> rows(cache, slot, head);
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
        scorer_input<S, T> input(cache.scorer, head, cache.dim_k, cache.dim_v, scratch);
        if constexpr (S::when == score_time::on_arrival) {
            if (q >= rows.rule.sinks) {
                scores.arriving = input.score(key, value);
            }
            scores.leaving = leaves ? rows.score(row) : 0.0f;
        } else {
            auto* state = reinterpret_cast<float*>(memory);
            std::copy_n(cache.state + rows.index * cache.state_size, cache.state_size, state);
            input.absorb(state, key, value);
            if (leaves) {
                scores.leaving = input.read(state, rows.k(row), rows.v(row));
            }
        }
    }
    return scores;
}

}  // namespace host_backend

template <class P, Storage T>
void step(const host& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, rows_view<const T> q,
          rows_view<const T> k, rows_view<const T> v, rows_view<T> out, workspace_view workspace,
          std::uint32_t*, const CacheExtras& extras) {
    namespace hb = host_backend;
    const std::int32_t longest =
        hb::check_batch(batch, cache.slots, 1, "a step takes one token; prefill takes chunks");
    hb::check_cache_call(cache, batch, longest, q, k, v, out, extras);
    hb::check_workspace(workspace, cache_workspace_bytes(on, cache, batch.count, 1));
    std::byte* memory = hb::aligned(workspace.data);
    const std::int64_t tasks = std::int64_t{batch.count} * cache.kv_heads;
    const std::size_t score_bytes = hb::step_task_bytes(cache);
    const auto task_memory = [&](std::int64_t task) {
        return memory + static_cast<std::size_t>(task) * score_bytes;
    };
    const auto entry_of = [&](std::int64_t task) { return static_cast<std::int32_t>(task / cache.kv_heads); };
    const auto head_of = [&](std::int64_t task) { return static_cast<std::int32_t>(task % cache.kv_heads); };

    // Phase one only reads the cache, so that a NaN score is refused with nothing changed.
    [[maybe_unused]] const auto score_task = [&](std::int64_t task) {
        const std::int32_t i = entry_of(task), h = head_of(task);
        if (batch.tokens(i) == 0) {
            return;
        }
        const std::int32_t slot = batch.slot(i);
        const float* given = extras.scores ? extras.scores.head(i, h) : nullptr;
        std::byte* mine = task_memory(task);
        const hb::step_scores scores = hb::score_step(cache, slot, h, k.row(i, h, 0), v.row(i, h, 0), given,
                                                      mine + hb::aligned_size(sizeof(hb::step_scores)));
        *reinterpret_cast<hb::step_scores*>(mine) = scores;
    };
    constexpr bool computed = P::ranked && P::scorer_type::when != score_time::given;
    if constexpr (computed) {
        on.parallel_for(tasks, score_task);
        // Refused from here and not from a task: without exceptions a handler may jump out of the call.
        for (std::int64_t task = 0; task < tasks; ++task) {
            const std::int32_t i = entry_of(task), h = head_of(task);
            if (batch.tokens(i) == 0) {
                continue;
            }
            const auto& scores = *reinterpret_cast<const hb::step_scores*>(task_memory(task));
            const position_t position = cache.length[batch.slot(i)];
            if (scores.arriving != scores.arriving) {
                hb::refuse_computed_score(i, h, position);
            }
            if (scores.leaving != scores.leaving) {
                hb::refuse_computed_score(i, h, position - cache.rules[h].window);
            }
        }
    }

    const auto append = [&](std::int64_t task) {
        const std::int32_t i = entry_of(task), h = head_of(task);
        const std::int32_t slot = batch.slot(i);
        const hb::head_rows<P, T> rows(cache, slot, h);
        const position_t position = cache.length[slot];
        hb::step_scores scores{0.0f, 0.0f};
        if constexpr (computed) {
            scores = *reinterpret_cast<const hb::step_scores*>(task_memory(task));
            if constexpr (StatefulScorer<typename P::scorer_type>) {
                const auto* state = reinterpret_cast<const float*>(task_memory(task) +
                                                                   hb::aligned_size(sizeof(hb::step_scores)));
                std::copy_n(state, cache.state_size, cache.state + rows.index * cache.state_size);
            }
        } else if constexpr (P::ranked) {
            scores = hb::score_step(cache, slot, h, k.row(i, h, 0), v.row(i, h, 0), extras.scores.head(i, h),
                                    nullptr);
        }
        const position_t u = position - rows.rule.window;
        if constexpr (P::ranked) {
            if (u >= rows.rule.sinks) {
                rows.leave(rows.layout.recent(u), scores.leaving, position);
            }
        }
        rows.put(rows.layout.recent(position), k.row(i, h, 0), v.row(i, h, 0), position, scores.arriving);
    };

    on.parallel_for(tasks, [&](std::int64_t task) {
        if (batch.tokens(entry_of(task)) != 0) {
            append(task);
        }
    });
    hb::attend_rows(on, cache, batch, q, out, extras.lse, 1,
                    memory + static_cast<std::size_t>(tasks) * score_bytes);
}

template <class P, Storage T>
void attend(const host& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, rows_view<const T> q,
            rows_view<T> out, plane_view<float> lse, workspace_view workspace) {
    namespace hb = host_backend;
    const std::int32_t longest = hb::check_batch(batch, cache.slots, 1, "one query a sequence");
    hb::check_rows("q", q, batch.count, cache.kv_heads * cache.group, longest, cache.dim_k);
    hb::check_rows("out", out, batch.count, cache.kv_heads * cache.group, longest, cache.dim_v);
    hb::check_lse(lse, batch.count, cache.kv_heads * cache.group, longest);
    hb::check_workspace(workspace, cache_workspace_bytes(on, cache, batch.count, 1));
    hb::attend_rows(on, cache, batch, q, out, lse, 0, hb::aligned(workspace.data));
}

template <class P, Storage T>
void export_heads(const host&, const FixedBudgetRef<P, T>& cache, const Batch& batch,
                  const HeadPages& pages) {
    host_backend::check_batch(batch, cache.slots, std::numeric_limits<std::int32_t>::max(), "any");
    const std::int64_t page_rows = cache.page_rows;
    std::int64_t needed = 0;
    const auto for_each_head = [&](auto&& visit) {
        for (std::int32_t i = 0; i < batch.count; ++i) {
            for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
                visit(batch.slot(i), h);
            }
        }
    };
    for_each_head([&](std::int32_t slot, std::int32_t h) {
        needed += (cache.used(slot, h) + page_rows - 1) / page_rows;
    });
    if (needed > pages.indices_capacity) {
        detail::refuse("pages.indices_capacity", pages.indices_capacity,
                       detail::text("at least the pages in use, ", needed));
    }
    detail::require(pages.indptr != nullptr, "pages.indptr", "null", "an array of batch.count * Hkv + 1");
    detail::require(pages.indices != nullptr || needed == 0, "pages.indices", "null",
                    "an array of indices_capacity");
    detail::require(pages.last_page_rows != nullptr || batch.count == 0, "pages.last_page_rows", "null",
                    "an array of batch.count * Hkv");
    detail::require(
        std::int64_t{cache.slots} * cache.rows / page_rows <= std::numeric_limits<std::int32_t>::max(),
        "pages of the layer", std::int64_t{cache.slots} * cache.rows / page_rows,
        "below 2^31, as indices are 32 bits");
    std::int64_t at = 0;
    std::int64_t sequence = 0;
    pages.indptr[0] = 0;
    for_each_head([&](std::int32_t slot, std::int32_t h) {
        const std::int64_t used = cache.used(slot, h);
        const std::int64_t first = cache.first_row(slot, h) / page_rows;
        for (std::int64_t page = 0; page * page_rows < used; ++page) {
            pages.indices[at++] = static_cast<std::int32_t>(first + page);
        }
        pages.last_page_rows[sequence++] =
            static_cast<std::int32_t>(used == 0 ? 0 : (used - 1) % page_rows + 1);
        pages.indptr[sequence] = static_cast<std::int32_t>(at);
    });
}

}  // namespace kvpolicy

#include <kvpolicy/host/fixed_budget_prefill.hpp>
