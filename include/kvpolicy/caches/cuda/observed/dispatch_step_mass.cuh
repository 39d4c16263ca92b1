// Host side of scores that come from a step's own attention: parts of the workspace, and the launch after it.
#pragma once

#include <kvpolicy/caches/cuda/observed/kernel_step_mass.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Takes the parts of the workspace that a step of `count` entries leaves its logits in. `rows`: the most of
/// a head.
template <class Compute>
void lay_out_logits(step_logits<Compute>& logits, workspace_parts& parts, std::int64_t count,
                    std::int64_t kv_heads, std::int32_t group, std::int64_t rows) {
    logits.rows = rows;
    logits.stride = group + group % 2;
    logits.logit = parts.take<Compute>(count * kv_heads * rows * logits.stride);
    logits.total = parts.take<logit_total<Compute>>(count * kv_heads * group);
    logits.after = parts.take<step_rows>(count * kv_heads);
}

/// Says how logits become scores.
template <class Compute>
void observe_as(step_logits<Compute>& logits, const Observation& seen) {
    logits.accumulate = seen.accumulate;
    logits.mean = seen.aggregate == group_aggregate::mean;
    logits.whole_layer = seen.whole_layer;
}

/// Refuses an observation that kernels of a step do not make.
inline void check_step_observation(const Observation& seen) {
    detail::require(seen.pool == 1, "pooling width of a scorer that evicts at steps", seen.pool,
                    "1 on CUDA, where decode steps do not pool masses");
}

/// Enqueues what makes scores of the masses of `source`, of heads of at most `rows` rows.
template <class View, class Source>
void launch_step_mass(const cuda& ctx, const device_scope& device, const View& cache, std::int32_t count,
                      const Source& source, std::int64_t rows, std::uint32_t* status) {
    step_mass_params<View, Source> call{.cache = cache, .source = source, .status = status};
    // Enough warps to hide loads, beside a step's. A warp with several tiles asks for its head once.
    constexpr std::int64_t warps_of_sm = std::is_same_v<Source, given_masses> ? 48 : 16;
    const std::int64_t tiles = (rows + mass_tile::rows - 1) / mass_tile::rows + 1;
    const std::int64_t blocks = std::int64_t{count} * call.parts(),
                       wanted = warps_of_sm / mass_warps * device.attribute(cudaDevAttrMultiProcessorCount);
    call.shares = static_cast<std::int32_t>(
        std::clamp<std::int64_t>((wanted + blocks - 1) / std::max<std::int64_t>(blocks, 1), 1, tiles));
    constexpr auto kernel = step_mass_kernel<View, Source>;
    share_sms<kernel>(device);  // its blocks wait beside those of the step
    launch_early<kernel>("step_mass_kernel", blocks * call.shares, 32 * mass_warps, 0, device, ctx, 1, call);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
