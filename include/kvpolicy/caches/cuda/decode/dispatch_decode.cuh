// The dispatch of a decode step, and of attention over a cache, of either kind.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous_decode.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged_decode.cuh>
#include <kvpolicy/caches/cuda_calls.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Calls body(plan) with the plan that serves the cache, on its device.
template <class Dims, class Cache, class Body>
void with_decode_plan(const cuda& ctx, const Cache& cache, std::int32_t count, const Body& body) {
    using P = typename Cache::policy_type;
    require_device_policy<P>();
    check_on_device(cache);
    const device_scope device(ctx, cache.device);
    if constexpr (Cache::pooled || P::has_selection) {
        with_paged_decode_plan<Dims>(ctx, device, cache, count, body);
    } else {
        with_contiguous_decode_plan<Dims>(ctx, device, cache, count, body);
    }
}

}  // namespace cuda_backend

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t step_workspace_bytes(const cuda& ctx, const Ref<P, T>& cache,
                                                              std::int32_t batch) {
    checks::check_count("batch", batch, cache.max_sequences);
    std::size_t bytes = 0;
    const auto measure = [&](auto& plan) { bytes = std::max(bytes, plan.lay_out(nullptr)); };
    cuda_backend::with_decode_plan<Dims>(ctx, cache, batch, measure);
    if constexpr (!Ref<P, T>::pooled && !P::has_selection) {
        // A batch of fewer entries may need more: its heads are cut among more blocks, each with a state.
        for (std::int32_t fewer = 1; fewer < batch; ++fewer) {
            cuda_backend::with_decode_plan<Dims>(ctx, cache, fewer, measure);
        }
    }
    return bytes;
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void step(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
          const StepOptions& options) {
    const Batch batch = checks::single_batch_of(io, "null in a step, whose entries have one token");
    cuda_backend::check_cache_call(cache, batch, {batch.count, 1}, io.q, io.k, io.v, io.out,
                                   detail::extras_of(io));
    cuda_backend::with_decode_plan<Dims>(
        ctx, cache, batch.count, [&](auto& plan) { plan.step(batch, io, workspace, options.status); });
}

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void attend(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
            const StepOptions& options) {
    const Batch batch = checks::single_batch_of(io, "null in attend, whose entries have one query");
    cuda_backend::check_cache_call(cache, batch, {batch.count, 1}, io.q, io.out, io.lse);
    cuda_backend::with_decode_plan<Dims>(
        ctx, cache, batch.count, [&](auto& plan) { plan.attend(batch, io, workspace, options.status); });
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
