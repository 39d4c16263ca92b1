// Tokens that are attended to before it is known whether they stay: prefill in two halves.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/host/layer_call.hpp>
#include <kvpolicy/caches/host/prefill.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <cstring>

namespace kvpolicy {

namespace host_backend {

/// Refuses more tokens than were drafted, or another length.
template <class Cache>
void check_draft(const Cache& cache, const Batch& batch) {
    for (std::int32_t i = 0; i < batch.count; ++i) {
        const std::int32_t seq = batch.seq(i), waiting = cache.num_draft[seq];
        if (batch.tokens(i) == 0) {
            continue;
        }
        if (batch.tokens(i) > waiting) {
            detail::refuse(detail::text("batch tokens[", i, "]").c_str(), batch.tokens(i),
                           detail::text("0 to the ", waiting, " that sequence ", seq, " has drafted"));
        }
        const position_t made_at = cache.spare_rows(seq, 0).position(0);
        if (made_at != cache.length[seq]) {
            detail::refuse(detail::text("length of sequence ", seq).c_str(), cache.length[seq],
                           detail::text("what it was when the tokens were drafted, ", made_at));
        }
    }
}

/// Refuses a batch that draft tokens do not serve. Returns the largest token count.
template <class Cache>
std::int32_t check_accepted(const Cache& cache, const Batch& batch) {
    check_on_host(cache);
    const std::int32_t longest =
        checks::check_batch(batch, cache.max_sequences, cache.max_draft_tokens,
                            "the cache's max_draft_tokens, CacheShape::draft tokens");
    check_draft(cache, batch);
    check_appended(cache, batch);
    return longest;
}

/// The spare rows as a source.
template <class Cache>
auto spare_source(const Cache& cache, const Batch& batch) {
    using T = typename Cache::value_type;
    return [&cache, &batch](std::int32_t i, std::int32_t h) {
        const PlainRows<T> rows = cache.spare_rows(batch.seq(i), h);
        // One (entry, head) at a time, so those strides are 0.
        return chunk_source<T>{{rows.k_data, batch.count, cache.kv_heads, cache.max_draft_tokens,
                                cache.head_dim_qk, 0, 0, cache.head_dim_qk},
                               {rows.v_data, batch.count, cache.kv_heads, cache.max_draft_tokens,
                                cache.head_dim_vo, 0, 0, cache.head_dim_vo},
                               rows.score_data};
    };
}

}  // namespace host_backend

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_draft(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
                  const StepOptions& options) {
    static_assert(!P::observed,
                  "kvpolicy: append_draft takes a policy whose scores do not change with every query");
    namespace hb = host_backend;
    const bool attends = io.out.data != nullptr;
    const hb::layer_call call =
        hb::checked_call(cache, io, cache.max_draft_tokens,
                         "the cache's max_draft_tokens, CacheShape::draft tokens", options, attends);
    const Batch& batch = call.batch;
    checks::check_workspace(workspace,
                            workspace_bytes(ctx, cache, {.batch = batch.count, .tokens = call.max_tokens}));
    std::byte* const begin = detail::aligned(workspace.data);
    const detail::step_extras scored =
        hb::with_scores(ctx, cache, batch, call.max_tokens, call.extras, begin);
    const hb::chunk_pass<Ref<P, T>> pass(ctx, cache, call.max_tokens,
                                         begin + hb::hidden_bytes(ctx, cache, batch.count, call.max_tokens));
    const auto source = hb::tensor_source(io.k, io.v, scored, !hb::reads_hidden<P>);
    pass.decide(batch, source, options);
    if (attends) {
        pass.attend(batch, io.q, source, io.out, scored);
    }
    pass.for_each_head(batch, [&](std::int32_t i, std::int32_t h) {
        const std::int32_t seq = batch.seq(i);
        const PlainRows<T> spare = cache.spare_rows(seq, h);
        const hb::chunk_source<T> from = source(i, h);
        for (std::int32_t j = 0; j < batch.tokens(i); ++j) {
            hb::copy_row(from.k.row(i, h, j), cache.head_dim_qk, spare.k(j));
            hb::copy_row(from.v.row(i, h, j), cache.head_dim_vo, spare.v(j));
            spare.position(j) = cache.length[seq] + j;
            // An output plane that is not given has not been checked.
            spare.score(j) = P::ranked && scores_come_along<typename P::scorer_type> ? from.scores[j] : 0.0f;
            if constexpr (P::has_eviction) {
                for (std::int32_t g = 0; g < cache.group; ++g) {
                    hb::copy_row(
                        hb::entry_rows(io.q, call.extras.cu_seqlens, i).row(i, h * cache.group + g, j),
                        cache.head_dim_qk,
                        cache.spare_query_row(seq, h, j) + std::int64_t{g} * cache.head_dim_qk);
                }
            }
        }
        if (h == 0) {
            cache.num_draft[seq] = batch.tokens(i);
        }
    });
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void accept(const host& ctx, const Ref<P, T>& cache, const Batch& batch, workspace_view workspace,
            const StepOptions& options) {
    namespace hb = host_backend;
    static_assert(!P::observed,
                  "kvpolicy: accept takes a policy whose scores do not change with every query");
    const Batch all = checks::batch_of(batch, cache.max_sequences);
    const std::int32_t longest = hb::check_accepted(cache, all);
    checks::check_workspace(workspace, workspace_bytes(ctx, cache, {.batch = all.count, .tokens = longest}));
    std::byte* const start = detail::aligned(workspace.data);
    const hb::chunk_pass<Ref<P, T>> pass(ctx, cache, longest, start + hb::admission_bytes(cache, all.count));
    const auto source = hb::spare_source(cache, all);
    pass.decide(all, source, options);
    const Batch admitted = hb::admit(cache, all, options.status, start, [&](std::int32_t i, std::int32_t h) {
        return pass.rows_after(all, i, h);
    });
    pass.accept(admitted, source);
    hb::mark_appended(cache, admitted);
    if constexpr (P::has_eviction) {
        pass.for_each_head(admitted, [&](std::int32_t i, std::int32_t h) {
            const std::int32_t seq = all.seq(i);
            const std::int64_t width = std::int64_t{cache.group} * cache.head_dim_qk;
            for (std::int32_t j = std::max(0, all.tokens(i) - cache.eviction.observing); j < all.tokens(i);
                 ++j) {
                std::copy_n(cache.spare_query_row(seq, h, j), width,
                            cache.query_row(seq, h, cache.length[seq] + j));
            }
        });
    }
    for (std::int32_t i = 0; i < all.count; ++i) {
        if (all.tokens(i) == 0) {
            cache.num_draft[all.seq(i)] = 0;
        }
    }
}

}  // namespace kvpolicy
