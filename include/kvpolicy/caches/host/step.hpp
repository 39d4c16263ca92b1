// One decode step of a cache on the host, and the calls that only look.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/host/admit.hpp>
#include <kvpolicy/caches/host/attend_entries.hpp>
#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/host/hidden_scores.hpp>
#include <kvpolicy/caches/host/layer_call.hpp>
#include <kvpolicy/caches/host/observed_step.hpp>
#include <kvpolicy/caches/host/score_step.hpp>
#include <kvpolicy/caches/host/shared_step.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <limits>

namespace kvpolicy {

namespace host_backend {

/// The body of step and append for policies whose scores stand when a key competes, but attention: run().
/// Phase one, score(), only reads the cache: a NaN score that is refused, or a step that finds no pages and
/// gives none up, changes no state. Phase two, append(), writes it.
template <class Cache, class T>
class scored_step {
  public:
    using P = typename Cache::policy_type;

    /// `memory` has bytes().
    scored_step(const host& ctx, const Cache& cache, const Batch& batch, rows_view<const T> k,
                rows_view<const T> v, std::byte* memory)
        : ctx_(ctx), cache_(cache), batch_(batch), k_(k), v_(v), memory_(memory) {}
    static std::size_t bytes(const host& ctx, const Cache& cache, std::int32_t count) {
        return step_tasks_bytes(cache, count) +
               static_cast<std::size_t>(ctx.threads()) * scorer_thread_bytes(cache);
    }

    /// Returns the entries that found their pages; `pages` is the memory of admit().
    Batch run(rows_view<const T> q, std::byte* pages, const StepOptions& options,
              const detail::step_extras& extras) const {
        if constexpr (P::ranked) {
            score(extras);
            if (options.status == nullptr) {
                report_nan(batch_, options);
            }
        }
        if constexpr (P::shares_budget) {
            decide_shared();
        }
        const auto rows_of = [&](std::int32_t i, std::int32_t h) { return rows_after(i, h); };
        const Batch admitted = admit(cache_, batch_, options.status, pages, rows_of);
        if constexpr (P::ranked) {
            if (options.status != nullptr) {  // an entry that is left alone has no score yet
                report_nan(admitted, options);
            }
        }
        const auto append_head = [&](std::int32_t i, std::int32_t h) { append(admitted.seq(i), i, h, q); };
        if constexpr (P::shares_budget) {
            write_shared_heads(
                ctx_, cache_, admitted, rows_of,
                [&](std::int32_t i, std::int32_t h) -> bool& { return shared(i).gives_pages(h); },
                append_head);
        } else {
            for_each_head(ctx_, cache_.kv_heads, admitted, append_head);
        }
        return admitted;
    }

    /// Memory behind the tasks' own.
    [[nodiscard]] std::byte* rest() const { return memory_ + step_tasks_bytes(cache_, batch_.count); }

  private:
    /// Scores of the keys that arrive and leave.
    void score(const detail::step_extras& extras) const {
        const std::size_t thread_bytes = scorer_thread_bytes(cache_);
        std::byte* const scratch = rest();
        for_each_head(ctx_, cache_.kv_heads, batch_, [&](std::int32_t i, std::int32_t h, int thread) {
            const float* given = extras.scores ? extras.scores.head(i, h) : nullptr;
            score_step(ctx_.instructions(), cache_, batch_.seq(i), h, k_.row(i, h, 0), v_.row(i, h, 0), given,
                       task(i, h), scratch + static_cast<std::size_t>(thread) * thread_bytes);
        });
    }

    /// Which pairs of an entry are admitted and evicted.
    [[nodiscard]] shared_step<Cache> shared(std::int32_t i) const requires P::shares_budget {
        std::byte* const steps = memory_ + static_cast<std::size_t>(batch_.count) *
                                               static_cast<std::size_t>(cache_.kv_heads) * task_bytes_;
        return {cache_, batch_.seq(i),
                steps + static_cast<std::size_t>(i) * shared_step<Cache>::bytes(cache_)};
    }
    void decide_shared() const requires P::shares_budget {
        for_each_head(ctx_, cache_.kv_heads, batch_,
                      [&](std::int32_t i, std::int32_t h) { shared(i).look(h, task(i, h).found->leaving); });
        ctx_.parallel_for(batch_.count, [&](std::int64_t i) {
            if (const auto entry = static_cast<std::int32_t>(i); batch_.tokens(entry) != 0) {
                shared(entry).decide();
            }
        });
    }

    /// Reports NaN scores of the entries of `batch` that bring tokens, or refuses them without a status: from
    /// here and not from a task, since without exceptions a handler may jump out of the call.
    void report_nan(const Batch& batch, const StepOptions& options) const {
        for (std::int32_t i = 0; i < batch.count; ++i) {
            for (std::int32_t h = 0; batch.tokens(i) != 0 && h < cache_.kv_heads; ++h) {
                if (const position_t bad = task(i, h).found->bad; bad >= 0) {
                    report_nan_score(cache_, i, h, bad, options);
                }
            }
        }
    }

    /// Entries of a head after the step.
    [[nodiscard]] std::int32_t rows_after(std::int32_t i, std::int32_t h) const {
        if constexpr (P::shares_budget) {
            return shared(i).rows_after(h);
        }
        const std::int32_t seq = batch_.seq(i);
        const head_state<Cache> rows(cache_, seq, h);
        bool grows = false;
        if constexpr (retains<P>) {
            const position_t u = cache_.length[seq] - rows.head_params.window;
            const float leaving = P::ranked ? task(i, h).found->leaving : 0.0f;
            grows = u >= rows.head_params.sinks && rows.takes_new_slot(u, leaving);
        }
        return rows.layout.used(cache_.length[seq] + 1, cache_.num_long_range[rows.index] + (grows ? 1 : 0));
    }

    /// Scorer state, top-k update and new key of one head of an admitted entry.
    void append(std::int32_t seq, std::int32_t i, std::int32_t h, rows_view<const T> q) const {
        const head_state<Cache> rows(cache_, seq, h);
        const position_t position = cache_.length[seq];
        step_scores scores{};
        if constexpr (P::ranked) {
            const step_task mine = task(i, h);
            scores = *mine.found;
            if constexpr (StatefulScorer<typename P::scorer_type>) {
                std::copy_n(mine.state, cache_.state_size, cache_.state + rows.index * cache_.state_size);
            }
            for (position_t t = std::max<position_t>(scores.late_from, rows.head_params.sinks);
                 t < scores.late_end; ++t) {
                rows.score(rows.layout.recent(t)) = mine.late[t - scores.late_from];
            }
        }
        const position_t u = position - rows.head_params.window;
        std::int32_t promoted = -1;
        [[maybe_unused]] const std::int32_t used_after = P::shares_budget ? rows_after(i, h) : 0;
        if constexpr (P::shares_budget) {
            shared(i).apply(h, scores.leaving, [&](std::int32_t row) {
                refresh_bounds(cache_, rows.rows, row, row + 1, used_after);
            });
        } else if constexpr (retains<P>) {
            if (u >= rows.head_params.sinks) {
                promoted = rows.leave(rows.layout.recent(u), scores.leaving, position);
            }
        }
        const std::int32_t newest = rows.layout.recent(position);
        rows.put(newest, k_.row(i, h, 0), v_.row(i, h, 0), position, scores.arriving);
        const std::int32_t used = rows.layout.used(position + 1, cache_.num_long_range[rows.index]);
        refresh_bounds(cache_, rows.rows, newest, newest + 1, used);
        if (promoted >= 0) {
            refresh_bounds(cache_, rows.rows, promoted, promoted + 1, used);
        }
        remember_queries(cache_, seq, h, position, 1, q, i);
        if (h == 0) {
            cache_.num_draft[seq] = 0;
        }
    }

    [[nodiscard]] step_task task(std::int32_t i, std::int32_t h) const {
        return step_task_at(
            cache_, memory_ + static_cast<std::size_t>(std::int64_t{i} * cache_.kv_heads + h) * task_bytes_);
    }

    const host& ctx_;
    const Cache& cache_;
    const Batch& batch_;
    rows_view<const T> k_, v_;
    std::byte* memory_;
    std::size_t task_bytes_ = step_task_bytes(cache_);
};

template <class Cache, class T>
void step_scored(const host& ctx, const Cache& cache, const Batch& batch, rows_view<const T> q,
                 rows_view<const T> k, rows_view<const T> v, rows_view<T> out, std::byte* start,
                 const StepOptions& options, const detail::step_extras& extras) {
    const scored_step<Cache, T> one(ctx, cache, batch, k, v, start + admission_bytes(cache, batch.count));
    const Batch admitted = one.run(q, start, options, extras);
    attend_rows(ctx, cache, admitted, q, out, extras.lse, 1, one.rest());
    mark_appended(cache, admitted);
    clear_refused(cache, batch, admitted, out, extras.lse);
}

}  // namespace host_backend

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void step(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
          const StepOptions& options) {
    namespace hb = host_backend;
    const auto call = hb::checked_single_call(cache, io, "null in a step, whose entries have one token",
                                              "a step takes one token; prefill takes chunks", options);
    const auto& batch = call.batch;
    const auto& extras = call.extras;
    const auto longest = call.max_tokens;
    checks::check_workspace(workspace, step_workspace_bytes(ctx, cache, batch.count));
    std::byte* const begin = detail::aligned(workspace.data);
    if constexpr (P::observed) {
        hb::observed_tokens(ctx, cache, batch, longest, false, {io.q, io.k, io.v, io.out, io.lse}, begin,
                            options.status);
    } else {
        const detail::step_extras scored = hb::with_scores(ctx, cache, batch, longest, extras, begin);
        hb::step_scored(ctx, cache, batch, io.q, io.k, io.v, io.out,
                        begin + hb::hidden_bytes(ctx, cache, batch.count, longest), options, scored);
    }
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void attend(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
            const StepOptions& /*options*/) {
    namespace hb = host_backend;
    hb::check_on_host(cache);
    const Batch batch = checks::single_batch_of(io, "null in attend, whose entries have one query");
    const std::int32_t longest = checks::check_batch(batch, cache.max_sequences, 1, "one query a sequence");
    checks::check_rows("q", io.q, batch.count, cache.kv_heads * cache.group, longest, cache.head_dim_qk);
    checks::check_rows("out", io.out, batch.count, cache.kv_heads * cache.group, longest, cache.head_dim_vo);
    checks::check_lse(io.lse, batch.count, cache.kv_heads * cache.group, longest);
    checks::check_workspace(workspace, step_workspace_bytes(ctx, cache, batch.count));
    hb::attend_rows(ctx, cache, batch, io.q, io.out, io.lse, 0, detail::aligned(workspace.data));
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void export_heads(const host&, const Ref<P, T>& cache, const Batch& batch, const HeadPages& pages,
                  workspace_view /*workspace*/, const StepOptions& /*options*/) {
    host_backend::check_on_host(cache);
    const Batch all = checks::batch_of(batch, cache.max_sequences);
    checks::check_batch(all, cache.max_sequences, std::numeric_limits<std::int32_t>::max(), "any");
    const std::int64_t page_size = cache.page_size;
    std::int64_t needed = 0;
    const auto for_each_head = [&](auto&& visit) {
        for (std::int32_t i = 0; i < all.count; ++i) {
            for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
                visit(all.seq(i), h);
            }
        }
    };
    for_each_head([&](std::int32_t seq, std::int32_t h) {
        needed += (cache.used(seq, h) + page_size - 1) / page_size;
    });
    checks::check_head_pages(cache, all, pages, needed, "the pages in use");
    std::int64_t at = 0;
    std::int64_t sequence = 0;
    pages.indptr[0] = 0;
    for_each_head([&](std::int32_t seq, std::int32_t h) {
        const std::int64_t used = cache.used(seq, h);
        for (std::int64_t page = 0; page * page_size < used; ++page) {
            pages.indices[at++] = static_cast<std::int32_t>(cache.page_id(seq, h, page));
        }
        pages.last_page_len[sequence++] =
            static_cast<std::int32_t>(used == 0 ? 0 : (used - 1) % page_size + 1);
        pages.indptr[sequence] = static_cast<std::int32_t>(at);
    });
}

}  // namespace kvpolicy
