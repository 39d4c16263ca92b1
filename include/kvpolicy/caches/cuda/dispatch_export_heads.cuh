// The dispatch of export_heads.
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/kernel_export_pages.cuh>
#include <kvpolicy/caches/cuda_calls.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void export_heads(const cuda& ctx, const Ref<P, T>& cache, const Batch& named, const HeadPages& pages,
                  workspace_view /*workspace*/, const StepOptions& /*options*/) {
    namespace cb = cuda_backend;
    cb::check_on_device(cache);
    const Batch batch = checks::batch_of(named, cache.max_sequences);
    checks::check_count("batch.count", batch.count, cache.max_sequences);
    if constexpr (Ref<P, T>::pooled) {
        checks::check_head_pages(cache, batch, pages, cache.page_count(), "the pages that the pool can have");
    } else {
        const std::int64_t most = batch.count * (cache.rows / cache.page_size);
        checks::check_head_pages(cache, batch, pages, most, "the pages that the batch's sequences can have");
    }
    const cb::device_scope device(ctx, cache.device);
    const auto view = cb::view_of(cache);
    using View = decltype(cb::view_of(cache));
    cb::launch("count_pages_kernel", cb::count_pages_kernel<View>, 1, cb::admit_threads, 0, ctx, view, batch,
               cache.page_size, pages);
    cb::launch("fill_pages_kernel", cb::fill_pages_kernel<View>, std::int64_t{batch.count} * cache.kv_heads,
               cb::admit_threads, 0, ctx, view, batch, cache.page_size, pages);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
