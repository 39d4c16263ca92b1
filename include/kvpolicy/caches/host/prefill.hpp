// A chunk of tokens into a cache on the host: decide, attend, write back.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/host/admit.hpp>
#include <kvpolicy/caches/host/attend_entries.hpp>
#include <kvpolicy/caches/host/chunk_plan.hpp>
#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/host/hidden_scores.hpp>
#include <kvpolicy/caches/host/layer_call.hpp>
#include <kvpolicy/caches/host/observed_step.hpp>
#include <kvpolicy/caches/host/score_step.hpp>
#include <kvpolicy/caches/host/shared_chunk.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/top_k_set.hpp>
#include <kvpolicy/scorers/host/scorer_input.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

namespace host_backend {

/// Relative to a chunk's first position; what lies further back than an int32 reaches is just as visible
/// there.
inline std::int32_t relative(position_t t, position_t base) {
    return static_cast<std::int32_t>(std::max<position_t>(t - base, -(position_t{1} << 30)));
}

/// Fills one head's plan with what a chunk does to it: run() reads the cache and writes only the plan.
template <class Cache, class T>
class chunk_decision {
  public:
    using P = typename Cache::policy_type;
    using S = typename P::scorer_type;

    chunk_decision(isa set, const Cache& cache, std::int32_t seq, std::int32_t head, std::int32_t tokens,
                   rows_view<const T> k, rows_view<const T> v, std::int32_t entry, const chunk_plan& plan,
                   std::byte* scratch)
        : set_(set),
          cache_(cache),
          rows_(cache, seq, head),
          head_params_(rows_.head_params),
          base_(cache.length[seq]),
          head_(head),
          tokens_(tokens),
          used_(std::min(cache.used(seq, head), plan.expirable)),
          k_(k),
          v_(v),
          entry_(entry),
          plan_(plan),
          counts_(*plan.counts),
          scratch_(scratch),
          places_(plan.keepers, plan.top_k_slots, head_params_, cache.rebase_limit, base_, tokens) {}

    void run([[maybe_unused]] const float* given) {
        counts_ = {-1, 0, 0, 0, cache_.num_long_range[rows_.index], base_, base_ + tokens_, false};
        take_present();
        if constexpr (retains<P>) {
            score_tokens(given);
            for (std::int32_t j = 0; j < tokens_; ++j) {
                if constexpr (P::ranked && S::when == score_time::on_leaving) {
                    input().absorb(plan_.state, k_.row(entry_, head_, j), v_.row(entry_, head_, j));
                }
                const position_t u = base_ + j - head_params_.window;
                if (u >= head_params_.sinks) {
                    leave(u, j);
                } else if constexpr (P::shares_budget) {
                    plan_.leaving[j] = {leaving_key::evicted, 0.0f};
                }
            }
        }
        counts_.keepers = places_.size();
    }

  private:
    /// Positions and expiries as they are before a key leaves; the top-k set as it is.
    void take_present() {
        for (std::int32_t r = 0; r < used_; ++r) {
            const position_t t = rows_.position(r);
            const bool recent = r >= head_params_.sinks && r < head_params_.sinks + head_params_.window;
            plan_.position[r] = relative(t, base_);
            plan_.expiry[r] =
                recent ? static_cast<expiry_t>(std::min<position_t>(t + head_params_.window - base_, never))
                       : never;
            if (!P::shares_budget && r >= rows_.layout.slot(0) && !rows_.keeps(t)) {
                places_.restore(t, rows_.score(r), r, r - rows_.layout.slot(0));
            }
        }
        for (std::int32_t j = 0; j < tokens_; ++j) {
            const bool sink = base_ + j < head_params_.sinks;
            plan_.expiry[plan_.expirable + j] = sink ? never
                                                     : static_cast<expiry_t>(std::min<std::int64_t>(
                                                           std::int64_t{j} + head_params_.window, never));
        }
    }

    /// Notes a position whose score is NaN: the first, or the first that no keep part holds.
    void note_nan(position_t t) {
        if (counts_.bad < 0 || (rows_.keeps(counts_.bad) && !rows_.keeps(t))) {
            counts_.bad = t;
        }
    }

    /// Scores that are known before keys leave.
    void score_tokens([[maybe_unused]] const float* given) {
        if constexpr (S::when == score_time::on_leaving) {
            std::copy_n(cache_.state + rows_.index * cache_.state_size, cache_.state_size, plan_.state);
        }
        if constexpr (P::ranked && scores_come_along<S>) {
            for (std::int32_t j = 0; j < tokens_; ++j) {
                plan_.score[j] = stored_score(given[j], base_ + j < head_params_.sinks);
                if (std::isnan(plan_.score[j])) {
                    note_nan(base_ + j);
                }
            }
        } else {
            std::fill_n(plan_.score, tokens_, 0.0f);
        }
        if constexpr (P::ranked && S::when == score_time::on_arrival) {
            // A sink is never scored, and neither is a key that is kept for its position.
            const auto from =
                static_cast<std::int32_t>(std::clamp<position_t>(head_params_.sinks - base_, 0, tokens_));
            input().score_all(k_.row(entry_, head_, from), k_.row_stride, v_.row(entry_, head_, from),
                              v_.row_stride, tokens_ - from, base_ + from, plan_.score + from);
            for (std::int32_t j = from; j < tokens_; ++j) {
                if (rows_.keeps(base_ + j)) {
                    plan_.score[j] = 0.0f;
                } else if (std::isnan(plan_.score[j])) {
                    note_nan(base_ + j);
                }
            }
        }
        if constexpr (scores_late<P>) {
            counts_.scored_from = scored_until(cache_.scorer, head_params_.window, base_);
            counts_.scored_end = scored_until(cache_.scorer, head_params_.window, base_ + tokens_);
            counts_.bad = score_late(
                set_, cache_, rows_, head_, counts_.scored_from, counts_.scored_end,
                [&](position_t u) { return key(u); }, [&](position_t u) { return value(u); }, plan_.score,
                scratch_);
        }
    }

    /// Key u leaves the window at token j: its top-k update.
    void leave(position_t u, std::int32_t j) {
        const std::int32_t name =
            u < base_ ? rows_.layout.recent(u) : plan_.expirable + static_cast<std::int32_t>(u - base_);
        const bool num_protected = rows_.keeps(u);
        float score = 0.0f;
        if constexpr (P::ranked && S::when == score_time::on_leaving) {
            if (!num_protected) {
                score = input().read(plan_.state, key(u), value(u));
            }
            if (std::isnan(score)) {
                note_nan(u);
            }
        } else {
            score = u < counts_.scored_from ? rows_.score(name) : plan_.score[u - counts_.scored_from];
        }
        if constexpr (P::shares_budget) {
            plan_.leaving[j] = {num_protected                           ? leaving_key::is_protected
                                : cache_.gate.open(score, head_params_) ? leaving_key::competes
                                                                        : leaving_key::evicted,
                                score};
            return;
        }
        if (!num_protected && (head_params_.budget == 0 || !cache_.gate.open(score, head_params_))) {
            return;
        }
        if constexpr (Cache::pooled) {
            if (num_protected || head_params_.budget == unlimited) {
                plan_.promoted[counts_.promoted++] = {0.0, u, score, name, counts_.num_long_range++};
                counts_.num_protected += num_protected ? 1 : 0;
                plan_.expiry[name] = never;
                return;
            }
        }
        const detail::top_k_outcome outcome =
            places_.update(u, score, name, base_ + j, counts_.num_long_range);
        if (outcome.kind != detail::top_k_outcome::refused) {
            plan_.expiry[name] = never;
        }
        if (outcome.kind == detail::top_k_outcome::replaced) {
            plan_.expiry[outcome.lost] = j;
        }
        if (outcome.kind == detail::top_k_outcome::took_free_slot) {
            ++counts_.num_long_range;
        }
    }

    [[nodiscard]] scorer_input<S, T> input() const {
        return {set_, cache_.scorer, head_, cache_.head_dim_qk, cache_.head_dim_vo, scratch_};
    }
    [[nodiscard]] auto key(position_t u) const {
        return u < base_ ? rows_.k(rows_.layout.recent(u)) : k_.row(entry_, head_, u - base_);
    }
    [[nodiscard]] auto value(position_t u) const {
        return u < base_ ? rows_.v(rows_.layout.recent(u)) : v_.row(entry_, head_, u - base_);
    }

    [[maybe_unused]] isa set_;
    const Cache& cache_;
    head_state<Cache> rows_;
    const HeadParams& head_params_;
    position_t base_;
    std::int32_t head_, tokens_, used_;
    rows_view<const T> k_, v_;
    std::int32_t entry_;
    const chunk_plan& plan_;
    chunk_counts& counts_;
    std::byte* scratch_;
    detail::top_k_set places_;
};

/// Writes what the chunk leaves behind: new top-k entries first (they may come from ring rows), then sinks
/// and ring.
template <class Cache, class T>
void accept_chunk(const Cache& cache, std::int32_t seq, std::int32_t head, std::int32_t tokens,
                  rows_view<const T> k, rows_view<const T> v, std::int32_t entry, const chunk_plan& plan) {
    using P = typename Cache::policy_type;
    const head_state<Cache> rows(cache, seq, head);
    const HeadParams& head_params = rows.head_params;
    const position_t base = cache.length[seq];
    [[maybe_unused]] const std::int32_t num_long_range_before = cache.num_long_range[rows.index];
    const chunk_counts& counts = *plan.counts;
    const auto put = [&](const detail::top_k_entry& keeper) {
        const std::int32_t row = rows.layout.slot(keeper.slot);
        if (keeper.key < plan.expirable) {
            if (keeper.key == row) {
                return;
            }  // held its place already
            rows.put(row, rows.k(keeper.key), rows.v(keeper.key), keeper.position, keeper.score);
        } else {
            const std::int32_t j = keeper.key - plan.expirable;
            rows.put(row, k.row(entry, head, j), v.row(entry, head, j), keeper.position, keeper.score);
        }
    };
    std::for_each_n(detail::top_k_set::entries(plan.keepers), counts.keepers, put);
    std::for_each_n(plan.promoted, counts.promoted, put);
    if constexpr (P::shares_budget) {
        // A key moves to lower slots only, so no row is overwritten before it is read.
        for (std::int32_t slot = 0; slot < counts.num_long_range; ++slot) {
            const shared_holder& one = plan.holders[slot];
            put({0.0, one.position, one.score, one.key, slot});
        }
    }
    for (std::int32_t j = 0; j < tokens; ++j) {
        const position_t t = base + j;
        if (t < head_params.sinks || t > base + tokens - 1 - head_params.window) {
            const bool known = P::ranked && t < counts.scored_end;
            rows.put(rows.layout.recent(t), k.row(entry, head, j), v.row(entry, head, j), t,
                     known ? plan.score[t - counts.scored_from] : 0.0f);
        }
    }
    if constexpr (scores_late<P>) {
        // Keys that were in the window before the chunk, and still are.
        const position_t from =
            std::max({counts.scored_from, base + tokens - head_params.window, position_t{head_params.sinks}});
        for (position_t t = from; t < std::min(base, counts.scored_end); ++t) {
            rows.score(rows.layout.recent(t)) = plan.score[t - counts.scored_from];
        }
    }
    cache.num_long_range[rows.index] = counts.num_long_range;
    if constexpr (P::has_keep) {
        cache.num_protected[rows.index] += counts.num_protected;
    }
    if constexpr (P::has_selection) {
        const std::int32_t used = rows.layout.used(base + tokens, counts.num_long_range);
        if constexpr (P::shares_budget) {
            // The plan is of the rows that were in use; the ring may have grown.
            refresh_bounds(cache, rows.rows, 0, used, used);
        } else {
            refresh_bounds(cache, rows.rows, 0, plan.expirable, used);
            refresh_bounds(cache, rows.rows,
                           std::max(plan.expirable, rows.layout.slot(num_long_range_before)), used, used);
        }
    }
    cache.victim[rows.index] = -1;
    if constexpr (P::ranked && StatefulScorer<typename P::scorer_type>) {
        std::copy_n(plan.state, cache.state_size, cache.state + rows.index * cache.state_size);
    }
}

/// What a chunk's queries see: the rows of the cache, and the chunk itself.
template <class Cache, class T, class Visit>
void chunk_segments(const Cache& cache, std::int32_t seq, std::int32_t head, std::int32_t tokens,
                    rows_view<const T> k, rows_view<const T> v, std::int32_t entry, const chunk_plan& plan,
                    Visit&& visit) {
    const auto rows = cache.head_rows(seq, head);
    const std::int32_t used = cache.used(seq, head), expirable = std::min(used, plan.expirable);
    visit_rows(rows, 0, expirable, cache.head_dim_qk, cache.head_dim_vo,
               [&](key_segment<T>& segment, std::int32_t row) {
                   segment.position = plan.position + row;
                   segment.expiry = plan.expiry + row;
                   visit(segment);
               });
    visit_rows(rows, expirable, used, cache.head_dim_qk, cache.head_dim_vo,
               [&](const key_segment<T>& segment, std::int32_t) { visit(segment); });
    key_segment<T> self;
    self.k = k.row(entry, head, 0);
    self.k_stride = k.row_stride;
    self.v = v.row(entry, head, 0);
    self.v_stride = v.row_stride;
    self.count = tokens;
    self.expiry = plan.expiry + plan.expirable;
    visit(self);
}

/// Where the tokens of one (entry, head) of a chunk are: k.row(entry, head, j), and scores[j] where they are
/// given.
template <class T>
struct chunk_source {
    rows_view<const T> k;
    rows_view<const T> v;
    const float* scores;
};

/// A call's own tensors as a source.
template <class T>
auto tensor_source(rows_view<const T> k, rows_view<const T> v, const detail::step_extras& extras,
                   bool scores_packed) {
    return [=, scores = extras.scores, edges = extras.cu_seqlens](std::int32_t i, std::int32_t h) {
        const plane_view<const float> mine = entry_plane(scores, scores_packed ? edges : nullptr, i);
        return chunk_source<T>{entry_rows(k, edges, i), entry_rows(v, edges, i),
                               mine ? mine.head(i, h) : nullptr};
    };
}

/// A chunk of a batch on its way through a cache: decide, then attend and write back. What prefill,
/// append_draft and accept share. `memory` has bytes(): plans, then what attention needs.
template <class Cache>
class chunk_pass {
    using P = typename Cache::policy_type;
    using T = typename Cache::value_type;

  public:
    chunk_pass(const host& ctx, const Cache& cache, std::int32_t longest, std::byte* memory)
        : ctx_(ctx),
          cache_(cache),
          longest_(longest),
          entry_bytes_(chunk_bytes(cache, longest)),
          thread_bytes_(thread_bytes(cache)),
          scratch_(memory),
          memory_(memory + static_cast<std::size_t>(ctx.threads()) * thread_bytes_) {}

    static std::size_t bytes(const host& ctx, const Cache& cache, std::int32_t count, std::int32_t tokens) {
        return bytes_without_attention(ctx, cache, count, tokens) + chunk_attention_bytes(ctx, cache);
    }
    static std::size_t bytes_without_attention(const host& ctx, const Cache& cache, std::int32_t count,
                                               std::int32_t tokens) {
        return static_cast<std::size_t>(ctx.threads()) * thread_bytes(cache) +
               static_cast<std::size_t>(count) * chunk_bytes(cache, tokens);
    }

    chunk_plan plan(std::int32_t i, std::int32_t h) const {
        std::byte* at = memory_ + static_cast<std::size_t>(i) * entry_bytes_;
        if constexpr (P::shares_budget) {
            const std::int64_t* const used = used_of(i);
            at += detail::aligned_size(static_cast<std::size_t>(cache_.kv_heads) * sizeof(std::int64_t));
            for (std::int32_t before = 0; before < h; ++before) {
                at += plan_of(cache_, before, longest_, nullptr, used[before]).bytes;
            }
            return plan_of(cache_, h, longest_, at, used[h]);
        } else {
            for (std::int32_t before = 0; before < h; ++before) {
                at += plan_of(cache_, before, longest_, nullptr).bytes;
            }
            return plan_of(cache_, h, longest_, at);
        }
    }

    template <class Visit>
    void for_each_head(const Batch& batch, Visit&& visit) const {
        host_backend::for_each_head(ctx_, cache_.kv_heads, batch, visit);
    }

    /// Fills the plans of all heads; reports NaN scores, or refuses them where the call does.
    /// source(i, h) says where the tokens of a head are.
    template <class Source>
    void decide(const Batch& batch, const Source& source, const StepOptions& options) const {
        if constexpr (P::shares_budget) {
            for (std::int32_t i = 0; i < batch.count; ++i) {
                for (std::int32_t h = 0; h < cache_.kv_heads; ++h) {
                    used_of(i)[h] = cache_.used(batch.seq(i), h);
                }
            }
        }
        for_each_head(batch, [&](std::int32_t i, std::int32_t h, int thread) {
            const chunk_source<T> from = source(i, h);
            const chunk_plan mine = plan(i, h);
            chunk_decision<Cache, T>(ctx_.instructions(), cache_, batch.seq(i), h, batch.tokens(i), from.k,
                                     from.v, i, mine,
                                     scratch_ + static_cast<std::size_t>(thread) * thread_bytes_)
                .run(from.scores);
        });
        if constexpr (P::shares_budget) {
            ctx_.parallel_for(batch.count, [&](std::int64_t at, int thread) {
                const auto i = static_cast<std::int32_t>(at);
                if (batch.tokens(i) != 0) {
                    shared_chunk<Cache>(
                        cache_, batch.seq(i), batch.tokens(i), [&](std::int32_t h) { return plan(i, h); },
                        scratch_ + static_cast<std::size_t>(thread) * thread_bytes_)
                        .run();
                }
            });
        }
        report_nan(batch, options);
    }

    /// Refused from here and not from a task: without exceptions a handler may jump out of the call.
    void report_nan(const Batch& batch, const StepOptions& options) const {
        for (std::int32_t i = 0; i < batch.count; ++i) {
            for (std::int32_t h = 0; batch.tokens(i) != 0 && h < cache_.kv_heads; ++h) {
                const position_t bad = plan(i, h).counts->bad;
                if (bad >= 0) {
                    report_nan_score(cache_, i, h, bad, options);
                }
            }
        }
    }

    /// Rows that a decided entry will have in use.
    std::int32_t rows_after(const Batch& batch, std::int32_t i, std::int32_t h) const {
        return cache_.layout(h).used(cache_.length[batch.seq(i)] + batch.tokens(i),
                                     plan(i, h).counts->num_long_range);
    }

    template <class Source>
    void attend(const Batch& batch, rows_view<const T> q, const Source& source, rows_view<T> out,
                const detail::step_extras& extras) const {
        attend_chunk(
            ctx_, cache_, batch, q, out, extras.lse, longest_,
            memory_ + static_cast<std::size_t>(batch.count) * entry_bytes_,
            [&](std::int32_t i, std::int32_t h, auto&& visit) {
                const chunk_source<T> from = source(i, h);
                chunk_segments(cache_, batch.seq(i), h, batch.tokens(i), from.k, from.v, i, plan(i, h),
                               visit);
            },
            extras.cu_seqlens);
    }

    template <class Source>
    void accept(const Batch& batch, const Source& source) const {
        const auto write = [&](std::int32_t i, std::int32_t h) {
            const chunk_source<T> from = source(i, h);
            accept_chunk(cache_, batch.seq(i), h, batch.tokens(i), from.k, from.v, i, plan(i, h));
            if (h == 0) {
                cache_.num_draft[batch.seq(i)] = 0;
            }
        };
        if constexpr (P::shares_budget) {
            write_shared_heads(
                ctx_, cache_, batch, [&](std::int32_t i, std::int32_t h) { return rows_after(batch, i, h); },
                [&](std::int32_t i, std::int32_t h) -> bool& { return plan(i, h).counts->gives_pages; },
                write);
        } else {
            for_each_head(batch, write);
        }
    }

  private:
    /// Memory of a thread: scorers', and that of the decision of heads that share a budget.
    static std::size_t thread_bytes(const Cache& cache) {
        std::size_t bytes = scorer_thread_bytes(cache);
        if constexpr (P::shares_budget) {
            bytes = std::max(bytes, shared_chunk<Cache>::bytes(cache));
        }
        return bytes;
    }
    /// Rows in use of an entry's heads when the chunk came, [kv_heads].
    [[nodiscard]] std::int64_t* used_of(std::int32_t i) const requires P::shares_budget {
        return reinterpret_cast<std::int64_t*>(memory_ + static_cast<std::size_t>(i) * entry_bytes_);
    }

    const host& ctx_;
    const Cache& cache_;
    std::int32_t longest_;
    std::size_t entry_bytes_;
    std::size_t thread_bytes_;
    std::byte* scratch_;  // [threads]
    std::byte* memory_;   // plans of all entries, then attention's
};

}  // namespace host_backend

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t workspace_bytes(const host& ctx, const Ref<P, T>& cache,
                                                         const CallSize& size) {
    namespace hb = host_backend;
    hb::check_on_host(cache);
    checks::check_call_size(size);
    const std::int32_t count = size.batch, tokens = size.tokens;
    if constexpr (P::observed) {
        return hb::observed_workspace_bytes(ctx, cache, count, tokens);
    } else {
        const std::size_t step_bytes =
            hb::step_tasks_bytes(cache, count) +
            std::max(static_cast<std::size_t>(ctx.threads()) * hb::scorer_thread_bytes(cache),
                     hb::decode_bytes(ctx, cache, count));
        const std::size_t chunk_bytes = hb::chunk_pass<Ref<P, T>>::bytes(ctx, cache, count, tokens);
        return hb::hidden_bytes(ctx, cache, count, std::max(tokens, 1)) + hb::admission_bytes(cache, count) +
               std::max(step_bytes, chunk_bytes) + detail::alignment;
    }
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t step_workspace_bytes(const host& ctx, const Ref<P, T>& cache,
                                                              std::int32_t batch) {
    return workspace_bytes(ctx, cache, {.batch = batch, .tokens = 1});
}

namespace host_backend {

/// The body of prefill, or without attention of append_chunk, for policies whose scores stand when a key
/// competes.
template <class Cache, class T>
void prefill_scored(const host& ctx, const Cache& cache, const Batch& batch, std::int32_t longest,
                    rows_view<const T> q, rows_view<const T> k, rows_view<const T> v, rows_view<T> out,
                    std::byte* start, const StepOptions& options, const detail::step_extras& extras,
                    bool attends = true) {
    const chunk_pass<Cache> pass(ctx, cache, longest, start + admission_bytes(cache, batch.count));
    const auto source = tensor_source(k, v, extras, !reads_hidden<typename Cache::policy_type>);
    pass.decide(batch, source, options);
    const Batch admitted = admit(cache, batch, options.status, start, [&](std::int32_t i, std::int32_t h) {
        return pass.rows_after(batch, i, h);
    });
    if (attends) {
        pass.attend(admitted, q, source, out, extras);
    }
    pass.accept(admitted, source);
    if constexpr (Cache::policy_type::has_eviction) {
        pass.for_each_head(admitted, [&](std::int32_t i, std::int32_t h) {
            const std::int32_t seq = batch.seq(i);
            remember_queries(cache, seq, h, cache.length[seq], batch.tokens(i),
                             entry_rows(q, extras.cu_seqlens, i), i);
        });
    }
    mark_appended(cache, admitted);
    if (attends) {
        clear_refused(cache, batch, admitted, out, extras.lse, extras.cu_seqlens);
    }
}

}  // namespace host_backend

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void prefill(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
             const StepOptions& options) {
    namespace hb = host_backend;
    const hb::layer_call call = hb::checked_call(cache, io, io.q.length, "the length of q", options);
    const Batch& batch = call.batch;
    const detail::step_extras& extras = call.extras;
    const std::int32_t longest = call.max_tokens;
    checks::check_workspace(workspace,
                            workspace_bytes(ctx, cache, {.batch = batch.count, .tokens = longest}));
    std::byte* const begin = detail::aligned(workspace.data);
    if constexpr (P::observed) {
        hb::observed_tokens(ctx, cache, batch, longest, true,
                            {io.q, io.k, io.v, io.out, io.lse, io.cu_seqlens}, begin, options.status);
    } else {
        const detail::step_extras scored = hb::with_scores(ctx, cache, batch, longest, extras, begin);
        hb::prefill_scored(ctx, cache, batch, longest, io.q, io.k, io.v, io.out,
                           begin + hb::hidden_bytes(ctx, cache, batch.count, longest), options, scored);
    }
}

}  // namespace kvpolicy

#include <kvpolicy/caches/host/speculate.hpp>
