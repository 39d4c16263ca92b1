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

/// Checks it all. An entry may bring at most `most` tokens, which `max_name` names. `status` is the call's.
template <class Cache, class IO>
layer_call checked_call(const Cache& cache, const IO& io, std::int32_t most, const char* max_name,
                        const std::uint32_t* status) {
    check_on_host(cache);
    layer_call call{checks::batch_of(io), detail::extras_of(io), 0};
    call.max_tokens = checks::check_batch(call.batch, cache.max_sequences, most, max_name);
    check_cache_call(cache, call.batch, call.max_tokens, io.q, io.k, io.v, io.out, call.extras, status);
    check_appended(cache, call.batch);
    check_max_seq_len(cache, call.batch);
    return call;
}

}  // namespace kvpolicy::host_backend
