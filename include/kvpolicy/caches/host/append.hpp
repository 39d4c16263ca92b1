// Steps and chunks without attention on the host, and what an engine's attention to a chunk must know.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/host/admit.hpp>
#include <kvpolicy/caches/host/layer_call.hpp>
#include <kvpolicy/caches/host/observed_append.hpp>
#include <kvpolicy/caches/host/prefill.hpp>
#include <kvpolicy/caches/host/speculate.hpp>
#include <kvpolicy/caches/host/step.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>

namespace kvpolicy {

namespace host_backend {

/// Refuses planes that cannot take the expiries of a batch. `size`: of the chunk's tensors.
template <class Cache>
void check_expiry(const Cache& cache, const Batch& batch, const tensor_size& size,
                  const ChunkExpiry& expiry) {
    std::int32_t used = 0;
    for (std::int32_t i = 0; i < batch.count; ++i) {
        for (std::int32_t h = 0; batch.tokens(i) != 0 && h < cache.kv_heads; ++h) {
            used = std::max(used, cache.used(batch.seq(i), h));
        }
    }
    checks::check_plane("expiry.cached", expiry.cached, batch.count, cache.kv_heads, used);
    checks::check_plane("expiry.tokens", expiry.tokens, size.count, cache.kv_heads, size.rows);
}

/// The expiries of a decided chunk. `edges`: of a packed batch.
template <class Cache>
void write_expiry(const Cache& cache, const chunk_pass<Cache>& pass, const Batch& batch,
                  const ChunkExpiry& expiry, const std::int32_t* edges) {
    pass.for_each_head(batch, [&](std::int32_t i, std::int32_t h) {
        const chunk_plan plan = pass.plan(i, h);
        const std::int32_t used = cache.used(batch.seq(i), h), expirable = std::min(used, plan.expirable);
        expiry_t* const cached = expiry.cached.head(i, h);
        std::copy_n(plan.expiry, expirable, cached);
        std::fill(cached + expirable, cached + used, never);
        std::copy_n(plan.expiry + plan.expirable, batch.tokens(i),
                    entry_plane(expiry.tokens, edges, i).head(i, h));
    });
}

}  // namespace host_backend

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t append_workspace_bytes(const host& ctx, const Ref<P, T>& cache,
                                                                const CallSize& size) {
    namespace hb = host_backend;
    using Cache = Ref<P, T>;
    hb::check_on_host(cache);
    checks::check_call_size(size);
    const std::int32_t count = size.batch, tokens = std::max(size.tokens, 1);
    if constexpr (P::observed) {
        return hb::observed_workspace_bytes(ctx, cache, count, 1);
    } else {
        return hb::hidden_bytes(ctx, cache, count, tokens) + hb::admission_bytes(cache, count) +
               std::max(hb::scored_step<Cache, T>::bytes(ctx, cache, count),
                        hb::chunk_pass<Cache>::bytes_without_attention(ctx, cache, count, tokens)) +
               detail::alignment;
    }
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
            const StepOptions& options) {
    namespace hb = host_backend;
    const hb::layer_call call =
        hb::checked_single_call(cache, io, "null in append, whose entries have one token",
                                "append takes one token; append_chunk more", options, false);
    const Batch& batch = call.batch;
    checks::check_workspace(workspace, append_workspace_bytes(ctx, cache, {.batch = batch.count}));
    std::byte* const begin = detail::aligned(workspace.data);
    if constexpr (P::observed) {
        hb::append_observed(ctx, cache, batch, io.k, io.v, begin, options.status);
    } else {
        const detail::step_extras scored =
            hb::with_scores(ctx, cache, batch, call.max_tokens, call.extras, begin);
        std::byte* const pages = begin + hb::hidden_bytes(ctx, cache, batch.count, call.max_tokens);
        const hb::scored_step<Ref<P, T>, T> one(ctx, cache, batch, io.k, io.v,
                                                pages + hb::admission_bytes(cache, batch.count));
        hb::mark_appended(cache, one.run(io.q, pages, options, scored));
    }
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_chunk(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
                  const StepOptions& options) {
    static_assert(!P::observed,
                  "kvpolicy: append_chunk takes a policy whose scores do not change with every query");
    namespace hb = host_backend;
    const hb::layer_call call = hb::checked_call(cache, io, io.k.length, "the length of k", options, false);
    const std::int32_t count = call.batch.count, longest = call.max_tokens;
    checks::check_workspace(workspace,
                            append_workspace_bytes(ctx, cache, {.batch = count, .tokens = longest}));
    std::byte* const begin = detail::aligned(workspace.data);
    const detail::step_extras scored = hb::with_scores(ctx, cache, call.batch, longest, call.extras, begin);
    hb::prefill_scored(ctx, cache, call.batch, longest, io.q, io.k, io.v, io.out,
                       begin + hb::hidden_bytes(ctx, cache, count, longest), options, scored, false);
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void chunk_expiry(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, const ChunkExpiry& expiry,
                  workspace_view workspace, const StepOptions& options) {
    static_assert(!P::observed,
                  "kvpolicy: chunk_expiry takes a policy whose scores do not change with every query");
    namespace hb = host_backend;
    const auto decide = [&](const Batch& batch, std::int32_t longest, const std::int32_t* edges,
                            std::size_t before, const auto& source) {
        checks::check_workspace(
            workspace, append_workspace_bytes(ctx, cache, {.batch = batch.count, .tokens = longest}));
        const hb::chunk_pass<Ref<P, T>> pass(ctx, cache, longest, detail::aligned(workspace.data) + before);
        pass.decide(batch, source(), options);
        hb::write_expiry(cache, pass, batch, expiry, edges);
    };
    if (io.k.data == nullptr) {
        const Batch batch = checks::batch_of(io.batch, cache.max_sequences);
        const std::int32_t longest = hb::check_accepted(cache, batch);
        hb::check_expiry(cache, batch, {batch.count, longest}, expiry);
        decide(batch, longest, nullptr, 0, [&] { return hb::spare_source(cache, batch); });
        return;
    }
    const hb::layer_call call = hb::checked_call(cache, io, io.k.length, "the length of k", options, false);
    const Batch& batch = call.batch;
    const std::int32_t longest = call.max_tokens;
    hb::check_expiry(cache, batch, hb::size_of_tensors(batch, longest, io.cu_seqlens), expiry);
    decide(batch, longest, io.cu_seqlens, hb::hidden_bytes(ctx, cache, batch.count, longest), [&] {
        return hb::tensor_source(
            io.k, io.v,
            hb::with_scores(ctx, cache, batch, longest, call.extras, detail::aligned(workspace.data)),
            !hb::reads_hidden<P>);
    });
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void observe(const host& ctx, const Ref<P, T>& cache, const Batch& named, input_plane<float> masses,
             workspace_view /*workspace*/, const StepOptions& /*options*/) {
    static_assert(host_backend::observes_steps<P>,
                  "kvpolicy: observe takes a policy that ranks keys by the attention of steps (H2O, TOVA)");
    namespace hb = host_backend;
    hb::check_on_host(cache);
    const Batch batch = checks::batch_of(named, cache.max_sequences);
    checks::check_batch(batch, cache.max_sequences, 1, "one query a sequence");
    hb::check_masses(cache, batch, masses);
    hb::take_masses(ctx, cache, batch, masses);
}

}  // namespace kvpolicy
