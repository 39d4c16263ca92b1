// The dispatch of chunks into a cache: prefill, append_draft, accept.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/decode/decode_plan.cuh>
#include <kvpolicy/caches/cuda/prefill/prefill_plan.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The most tokens that an entry of a call may bring.
inline std::int32_t max_tokens(const Batch& batch, std::int32_t length) {
    return batch.q_len != nullptr ? length : std::min(length, std::max(batch.length_or_one(), 0));
}

/// The most tokens that an entry of a packed call may bring, whose edges the device alone knows. `draft`: to
/// append_draft.
template <class Cache, class T>
std::int32_t max_packed_tokens(const Cache& cache, const StepIO<T>& io, bool draft) {
    const std::int32_t total = std::max(io.q.length, 0), length = io.batch.length;
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

template <class Dims, class Cache>
std::size_t chunk_workspace_bytes(const cuda& ctx, const Cache& cache, const CallSize& size) {
    check_on_device(cache);
    checks::check_call_size(size);
    const std::int32_t count = size.batch, tokens = size.tokens;
    const std::size_t step = step_workspace_bytes<Dims>(ctx, cache, count);
    return std::max(step, prefill_plan<Cache, Dims>(ctx, cache, count, tokens).lay_out(nullptr));
}

/// prefill; with `draft` append_draft.
template <class Dims, class Cache, class T>
void attend_chunk(bool draft, const cuda& ctx, const Cache& cache, const StepIO<T>& io,
                  workspace_view workspace, const StepOptions& options) {
    Batch batch = checks::batch_of(io);
    const bool packed = io.cu_seqlens != nullptr;
    const std::int32_t tokens = packed ? max_packed_tokens(cache, io, draft) : max_tokens(batch, io.q.length);
    if (packed) {
        batch.length = tokens;
    }
    detail::require(!draft || tokens <= cache.max_draft_tokens, "q.length", tokens, [&] {
        return detail::text("at most the cache's max_draft_tokens, ", cache.max_draft_tokens,
                            " (CacheShape::draft tokens)");
    });
    const CallSize rows = packed ? CallSize{1, io.q.length} : CallSize{batch.count, tokens};
    check_cache_call(cache, batch, rows, io.q, io.k, io.v, io.out, detail::extras_of(io));
    check_chunk_keys<T>(batch.count, tokens, io.k, io.v);
    prefill_plan<Cache, Dims>(ctx, cache, batch.count, tokens)
        .attend_chunk(draft, batch, by_entry(io, batch.count), workspace, options.status);
}

template <class Dims, class Cache>
void accept_chunk(const cuda& ctx, const Cache& cache, const Batch& named, workspace_view workspace,
                  const StepOptions& options) {
    check_on_device(cache);
    const Batch batch = checks::batch_of(named, cache.max_sequences);
    checks::check_count("batch.count", batch.count, cache.max_sequences);
    detail::require(batch.q_len != nullptr ||
                        (batch.length_or_one() >= 0 && batch.length_or_one() <= cache.max_draft_tokens),
                    "batch.length", batch.length_or_one(), [&] {
                        return detail::text("0 to the cache's max_draft_tokens, ", cache.max_draft_tokens);
                    });
    prefill_plan<Cache, Dims>(ctx, cache, batch.count, max_tokens(batch, cache.max_draft_tokens))
        .accept(batch, workspace, options.status);
}

}  // namespace cuda_backend

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
    cuda_backend::attend_chunk<Dims, Ref<P, T>, T>(true, ctx, cache, io, workspace, options);
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void accept(const cuda& ctx, const Ref<P, T>& cache, const Batch& batch, workspace_view workspace,
            const StepOptions& options) {
    cuda_backend::accept_chunk<Dims>(ctx, cache, batch, workspace, options);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
