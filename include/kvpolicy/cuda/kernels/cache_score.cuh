// The launch that scores tokens for a cache.
#pragma once

#include <kvpolicy/cuda/blocks/score_block.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class View, class Scorer>
__global__ void __launch_bounds__(score_threads)
    cache_score_kernel(const __grid_constant__ score_launch<View, Scorer> call) {
    let_next_kernel_start();  // it may stream rows meanwhile, and waits for scores where it needs them
    score_block(call, reinterpret_cast<float*>(dynamic_shared()));
}

/// Enqueues the scores of a chunk's tokens.
template <class View, class Scorer>
void launch_scores(const cuda& on, score_launch<View, Scorer> call) {
    const std::int64_t heads = std::int64_t{call.batch.count} * call.cache.kv_heads;
    const std::int32_t inputs = call.cache.dim_k + call.cache.dim_v;
    const std::int64_t pieces = (std::int64_t{call.tokens.most} + score_batch - 1) / score_batch;
    std::int64_t blocks = heads * pieces;
    std::size_t floats = std::size_t{score_batch} * static_cast<std::size_t>(inputs + score_warps);
    if constexpr (Scorer::when == score_time::on_leaving) {
        call.projection = call.scorer.projection();
        call.features = call.scorer.features();
        call.width = call.scorer.value_width();
        blocks = heads;
        floats = static_cast<std::size_t>(
            mlstm_memory::floats(inputs, call.projection, call.features, call.width));
    }
    launch("cache_score_kernel", cache_score_kernel<View, Scorer>, blocks, score_threads,
           floats * sizeof(float), on, call);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
