// How long a sequence of a cache in device memory is, and how full its heads are: the host waits for two
// numbers.
#pragma once

#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
position_t CacheOwner<Derived, P, T>::length(const cuda& on, std::int32_t slot) const {
    namespace cb = cuda_backend;
    require_memory(true);
    require_slot_number(slot, "slot");
    const cb::device_scope device(on, device_);
    position_t result = 0;
    cb::check(cudaMemcpyAsync(&result, at<const position_t>(length_at_) + slot, sizeof result,
                              cudaMemcpyDeviceToHost, on.stream),
              "cudaMemcpyAsync");
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    return result;
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
Occupancy CacheOwner<Derived, P, T>::occupancy(const cuda& on, std::int32_t layer, std::int32_t slot,
                                               std::int32_t head) const {
    namespace cb = cuda_backend;
    require_memory(true);
    require_slot_number(slot, "slot");
    check_layer(layer);
    require_head(head);
    const cb::device_scope device(on, device_);
    const auto cache = self().ref(layer);
    const auto fetch = [&](std::int32_t& to, const std::int32_t* from) {
        cb::check(cudaMemcpyAsync(&to, from + cache.head_index(slot, head), sizeof to, cudaMemcpyDeviceToHost,
                                  on.stream),
                  "cudaMemcpyAsync");
    };
    std::int32_t kept = 0, taken = 0;
    fetch(kept, cache.kept);
    fetch(taken, cache.taken);
    const position_t tokens = length(on, slot);  // which waits
    return occupancy_of(layer, head, tokens, detail::pending_tokens(taken), kept);
}

}  // namespace kvpolicy
