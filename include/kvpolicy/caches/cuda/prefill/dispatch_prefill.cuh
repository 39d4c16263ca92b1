// The dispatch of chunks into a cache: prefill, append_draft, accept, append_chunk, chunk_expiry.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/decode/decode_plan.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_append.cuh>
#include <kvpolicy/caches/cuda/prefill/observed_prefill_plan.cuh>
#include <kvpolicy/caches/cuda/prefill/prefill_plan.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The most tokens that an entry of a call may bring.
inline std::int32_t max_tokens(const Batch& batch, std::int32_t length) {
    return batch.q_len != nullptr ? length : std::min(length, std::max(batch.length_or_one(), 0));
}

/// The most tokens that an entry of a packed call may bring, whose edges the device alone knows. `draft`: to
/// append_draft. `rows`: of the call's tensors.
template <class Cache>
std::int32_t max_packed_tokens(const Cache& cache, const Batch& named, std::int32_t rows, bool draft) {
    const std::int32_t total = std::max(rows, 0), length = named.length;
    const std::int32_t allowed = draft ? cache.max_draft_tokens : std::numeric_limits<std::int32_t>::max();
    if (length == Batch::not_set) {
        return std::min(total, allowed);
    }
    detail::require(length >= 0 && length <= allowed, "batch.length", length, [&] {
        return draft ? detail::text("0 to the cache's max_draft_tokens, ", allowed)
                     : std::string("0 or more: the most tokens of a packed entry");
    });
    return std::min(total, length);
}

/// A call's tensors as views that name all entries: those of packed entries have a batch stride of 0, as
/// packed_rows has them.
template <class T>
StepIO<T> by_entry(StepIO<T> io, std::int32_t count) {
    if (io.cu_seqlens != nullptr) {
        const auto name_all = [count](auto& view) {
            view.batch = count;
            view.batch_stride = 0;
        };
        name_all(io.q);
        name_all(io.k);
        name_all(io.v);
        name_all(io.out);
        name_all(io.scores);
        name_all(io.hidden);
        name_all(io.lse);
    }
    return io;
}

/// The size of a call's tensors, and the most tokens of an entry, which `batch` then has, too.
struct chunk_size {
    CallSize rows;
    std::int32_t tokens = 0;
};
template <class Cache, class T>
chunk_size size_of_chunk(const Cache& cache, const StepIO<T>& io, std::int32_t length, bool draft,
                         Batch& batch) {
    if (io.cu_seqlens == nullptr) {
        const std::int32_t tokens = max_tokens(batch, length);
        return {{batch.count, tokens}, tokens};
    }
    batch.length = max_packed_tokens(cache, io.batch, length, draft);
    return {{1, length}, batch.length};
}

/// Whether the caller can attend to a chunk that is decided before it is written.
template <class P>
constexpr void require_standing_scores() {
    static_assert(!P::observed,
                  "kvpolicy: append_chunk and chunk_expiry take a policy whose scores do not "
                  "change with every query");
}
template <class P>
constexpr void require_drafts() {
    static_assert(
        !P::observed,
        "kvpolicy: append_draft and accept take a policy whose scores do not change with every query");
}

/// What attention would refuse of a chunk's keys and values: here, under the caller's names and before
/// anything is enqueued, since a scorer's states would have absorbed the chunk by then. (Its other checks are
/// of sizes, which lay_out() makes, too.)
template <class T>
void check_chunk_keys(std::int32_t count, std::int32_t tokens, rows_view<const T> k, rows_view<const T> v) {
    if (count != 0) {
        k.length = v.length = tokens;
        check_key_rows("k", k);
        check_key_rows("v", v);
    }
}

/// The plan of a chunk: policies that rank keys by attention have their own.
template <class Cache, class Dims>
using chunk_plan = std::conditional_t<Cache::policy_type::observed, observed_prefill_plan<Cache, Dims>,
                                      prefill_plan<Cache, Dims>>;

template <class Dims, class Cache>
std::size_t chunk_workspace_bytes(const cuda& ctx, const Cache& cache, const CallSize& size) {
    check_on_device(cache);
    checks::check_call_size(size);
    const std::int32_t count = size.batch, tokens = size.tokens;
    const std::size_t step = step_workspace_bytes<Dims>(ctx, cache, count);
    return std::max(step, chunk_plan<Cache, Dims>(ctx, cache, count, tokens).lay_out(nullptr));
}

/// prefill; with `draft` append_draft.
template <class Dims, class Cache, class T>
void attend_chunk(bool draft, const cuda& ctx, const Cache& cache, const StepIO<T>& io,
                  workspace_view workspace, const StepOptions& options) {
    const bool attends = !draft || io.out.data != nullptr;
    Batch batch = attends ? checks::batch_of(io) : checks::batch_of(io, io.k, "k.batch");
    const chunk_size size = size_of_chunk(cache, io, attends ? io.q.length : io.k.length, draft, batch);
    const std::int32_t tokens = size.tokens;
    detail::require(!draft || tokens <= cache.max_draft_tokens, "q.length", tokens, [&] {
        return detail::text("at most the cache's max_draft_tokens, ", cache.max_draft_tokens,
                            " (CacheShape::draft tokens)");
    });
    if (attends) {
        check_cache_call(cache, batch, size.rows, io.q, io.k, io.v, io.out, detail::extras_of(io));
    } else if constexpr (!Cache::policy_type::observed) {
        check_append_call(cache, batch, size.rows, io);
    }
    check_chunk_keys<T>(batch.count, tokens, io.k, io.v);
    chunk_plan<Cache, Dims> plan(ctx, cache, batch.count, tokens);
    if constexpr (Cache::policy_type::observed) {
        plan.run(batch, by_entry(io, batch.count), workspace, options.status);
    } else {
        plan.attend_chunk(draft, batch, by_entry(io, batch.count), workspace, options.status);
    }
}

/// The batch of a call on draft tokens.
template <class Cache>
Batch check_accepted(const Cache& cache, const Batch& named) {
    check_on_device(cache);
    const Batch batch = checks::batch_of(named, cache.max_sequences);
    checks::check_count("batch.count", batch.count, cache.max_sequences);
    detail::require(batch.q_len != nullptr ||
                        (batch.length_or_one() >= 0 && batch.length_or_one() <= cache.max_draft_tokens),
                    "batch.length", batch.length_or_one(), [&] {
                        return detail::text("0 to the cache's max_draft_tokens, ", cache.max_draft_tokens);
                    });
    return batch;
}

template <class Dims, class Cache>
void accept_chunk(const cuda& ctx, const Cache& cache, const Batch& named, workspace_view workspace,
                  const StepOptions& options) {
    const Batch batch = check_accepted(cache, named);
    prefill_plan<Cache, Dims>(ctx, cache, batch.count, max_tokens(batch, cache.max_draft_tokens))
        .accept(batch, workspace, options.status);
}

/// Checks a call without attention with io's chunk. Returns its size, and the batch.
template <class Cache, class T>
chunk_size check_brought_chunk(const Cache& cache, const StepIO<T>& io, Batch& batch) {
    batch = checks::batch_of(io, io.k, "k.batch");
    const chunk_size size = size_of_chunk(cache, io, io.k.length, false, batch);
    check_append_call(cache, batch, size.rows, io);
    check_chunk_keys<T>(batch.count, size.tokens, io.k, io.v);
    return size;
}

}  // namespace cuda_backend

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t append_workspace_bytes(const cuda& ctx, const Ref<P, T>& cache,
                                                                const CallSize& size) {
    namespace cb = cuda_backend;
    cb::require_device_policy<P>();
    cb::check_on_device(cache);
    checks::check_call_size(size);
    const cb::device_scope device(ctx, cache.device);
    const std::size_t bytes = cb::append_plan<Ref<P, T>>(ctx, device, cache, size.batch).lay_out(nullptr);
    if constexpr (!P::observed) {  // which takes no chunk without attention
        if (size.tokens > 1) {
            return std::max(
                bytes,
                cb::prefill_plan<Ref<P, T>, void>(ctx, cache, size.batch, size.tokens).lay_out(nullptr));
        }
    }
    return bytes;
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_chunk(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
                  const StepOptions& options) {
    namespace cb = cuda_backend;
    cb::require_standing_scores<P>();
    Batch batch;
    const std::int32_t tokens = cb::check_brought_chunk(cache, io, batch).tokens;
    cb::prefill_plan<Ref<P, T>, void>(ctx, cache, batch.count, tokens)
        .append_chunk(batch, cb::by_entry(io, batch.count), workspace, options.status);
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void chunk_expiry(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, const ChunkExpiry& expiry,
                  workspace_view workspace, const StepOptions& options) {
    namespace cb = cuda_backend;
    cb::require_standing_scores<P>();
    Batch batch;
    cb::chunk_size size;
    if (io.k.data != nullptr) {
        size = cb::check_brought_chunk(cache, io, batch);
    } else {
        batch = cb::check_accepted(cache, io.batch);
        size.tokens = cb::max_tokens(batch, cache.max_draft_tokens);
        size.rows = {batch.count, size.tokens};
    }
    checks::check_plane("expiry.cached", expiry.cached, batch.count, cache.kv_heads,
                        static_cast<std::int32_t>(cb::max_rows_of(cache)));
    checks::check_plane("expiry.tokens", expiry.tokens, size.rows.batch, cache.kv_heads, size.rows.tokens);
    cb::prefill_plan<Ref<P, T>, void>(ctx, cache, batch.count, size.tokens)
        .chunk_expiry(batch, cb::by_entry(io, batch.count), expiry, workspace, options.status);
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t workspace_bytes(const cuda& ctx, const Ref<P, T>& cache,
                                                         const CallSize& size) {
    return cuda_backend::chunk_workspace_bytes<Dims>(ctx, cache, size);
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void prefill(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
             const StepOptions& options) {
    cuda_backend::attend_chunk<Dims, Ref<P, T>, T>(false, ctx, cache, io, workspace, options);
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_draft(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
                  const StepOptions& options) {
    cuda_backend::require_drafts<P>();
    cuda_backend::attend_chunk<Dims, Ref<P, T>, T>(true, ctx, cache, io, workspace, options);
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void accept(const cuda& ctx, const Ref<P, T>& cache, const Batch& batch, workspace_view workspace,
            const StepOptions& options) {
    cuda_backend::require_drafts<P>();
    cuda_backend::accept_chunk<Dims>(ctx, cache, batch, workspace, options);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
