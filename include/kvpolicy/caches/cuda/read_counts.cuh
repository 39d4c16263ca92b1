// How long a sequence of a cache in device memory is, and how full its heads are: the host waits for two
// numbers.
#pragma once

#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
position_t CacheOwner<Derived, P, T>::length(const cuda& ctx, std::int32_t seq) const {
    namespace cb = cuda_backend;
    require_memory(true);
    require_seq_number(seq, "seq");
    const cb::device_scope device(ctx, device_);
    position_t result = 0;
    cb::check(cudaMemcpyAsync(&result, at<const position_t>(length_at_) + seq, sizeof result,
                              cudaMemcpyDeviceToHost, ctx.stream),
              "cudaMemcpyAsync");
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    return result;
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
HeadUsage CacheOwner<Derived, P, T>::usage(const cuda& ctx, std::int32_t layer, std::int32_t seq,
                                           std::int32_t head) const {
    namespace cb = cuda_backend;
    require_memory(true);
    require_seq_number(seq, "seq");
    check_layer(layer);
    require_head(head);
    const cb::device_scope device(ctx, device_);
    const auto cache = self().layer(layer);
    const auto fetch = [&](std::int32_t& to, const std::int32_t* from) {
        cb::check(cudaMemcpyAsync(&to, from + cache.head_index(seq, head), sizeof to, cudaMemcpyDeviceToHost,
                                  ctx.stream),
                  "cudaMemcpyAsync");
    };
    std::int32_t num_long_range = 0, appended = 0;
    fetch(num_long_range, cache.num_long_range);
    fetch(appended, cache.appended);
    const position_t tokens = length(ctx, seq);  // which waits
    return usage_of(layer, head, tokens, detail::appended_tokens(appended), num_long_range);
}

}  // namespace kvpolicy
