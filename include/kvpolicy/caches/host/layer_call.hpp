// What a call brings to a layer of a cache, and whether the layer takes it.
#pragma once

#include <kvpolicy/caches/host/admit.hpp>
#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/step_io.hpp>
#include <kvpolicy/core/check.hpp>

#include <cstdint>

namespace kvpolicy::host_backend {

/// What a call brings to a layer.
struct layer_call {
    Batch batch;
    detail::step_extras extras;
    std::int32_t max_tokens;  // of an entry
};

/// Checks it all; where a call does not attend, not io.out and io.lse, and io.q only if the policy keeps
/// queries. An entry may bring at most `most` tokens, which `max_name` names. `options` are the call's.
template <class Cache, class IO>
layer_call checked_call(const Cache& cache, const IO& io, std::int32_t most, const char* max_name,
                        const StepOptions& options, bool attends = true) {
    check_on_host(cache);
    layer_call call{attends ? checks::batch_of(io) : checks::batch_of(io, io.k, "k.batch"),
                    detail::extras_of(io), 0};
    call.max_tokens = checks::check_batch(call.batch, cache.max_sequences, most, max_name);
    const tensor_size size = size_of_tensors(call.batch, call.max_tokens, io.cu_seqlens);
    if (attends) {
        check_attention(cache, size, io);
    } else if (Cache::policy_type::has_eviction) {  // keeps queries
        checks::check_rows("q", io.q, size.count, cache.kv_heads * cache.group, size.rows, cache.head_dim_qk);
    }
    check_chunk(cache, call.batch, size, call.max_tokens, io.k, io.v, call.extras, options);
    check_appended(cache, call.batch);
    check_max_seq_len(cache, call.batch);
    return call;
}

/// The same of a call whose entries bring one token each, and so no edges: `why` says so.
template <class Cache, class IO>
layer_call checked_single_call(const Cache& cache, const IO& io, const char* why, const char* max_name,
                               const StepOptions& options, bool attends = true) {
    detail::require(io.cu_seqlens == nullptr, "io.cu_seqlens", "given", why);
    return checked_call(cache, io, 1, max_name, options, attends);
}

}  // namespace kvpolicy::host_backend
