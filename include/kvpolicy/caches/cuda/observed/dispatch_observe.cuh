// The dispatch of observe(): the masses of a query that an engine attended with.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/decode/decode_plan.cuh>
#include <kvpolicy/caches/cuda/observed/dispatch_step_mass.cuh>
#include <kvpolicy/caches/cuda_calls.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void observe(const cuda& ctx, const Ref<P, T>& cache, const Batch& named, input_plane<float> masses,
             workspace_view /*workspace*/, const StepOptions& options) {
    namespace cb = cuda_backend;
    static_assert(cb::scored_by_steps<cb::asked_scorer<P>>,
                  "kvpolicy: observe takes a policy that ranks keys by the attention of steps (H2O, TOVA)");
    const Batch batch = checks::batch_of(named, cache.max_sequences);
    cb::check_cache_batch(cache, batch, {batch.count, 1});
    const std::int64_t rows = cb::max_rows_of(cache);
    checks::check_plane("masses", masses, batch.count, cache.kv_heads, static_cast<std::int32_t>(rows));
    const Observation seen = cache.scorer.observation();
    cb::check_step_observation(seen);
    const cb::device_scope device(ctx, cache.device);
    const cb::given_masses source{masses, batch, seen.accumulate, seen.whole_layer};
    cb::launch_step_mass(ctx, device, cb::view_of(cache), batch.count, source, rows, options.status);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
