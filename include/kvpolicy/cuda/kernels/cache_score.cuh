// The launch that scores tokens for a cache.
#pragma once

#include <kvpolicy/cuda/blocks/score_block.cuh>
#include <kvpolicy/cuda/blocks/score_cluster.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
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

/// cluster_blocks blocks a cluster, whose sequences score_cluster names.
template <class Sizes, class View, std::int32_t D, class Feature, class Values>
__global__ void __launch_bounds__(cluster_threads, 2) cache_score_cluster_kernel(
    const __grid_constant__ score_launch<View, mLSTMScorer<D, Feature, Values>> call) {
    if constexpr (compiled_for_clusters) {
        let_next_kernel_start();  // see cache_score_kernel
        __shared__ cluster_group<Sizes::Entries> groups[2];
        score_cluster<Sizes, View, D, Feature, Values>(call, reinterpret_cast<float*>(dynamic_shared()),
                                                       groups)
            .run();
    }
}

/// Enqueues an mLSTM's scores by clusters, if they fit: the card, the scorer's sizes. There are no more clusters than run
/// at once: a step's blocks begin when all of this launch have begun.
template <class Sizes, class View, std::int32_t D, class Feature, class Values>
bool launch_cluster(const cuda& on, const device_scope& device,
                    const score_launch<View, mLSTMScorer<D, Feature, Values>>& call) {
    constexpr auto kernel = cache_score_cluster_kernel<Sizes, View, D, Feature, Values>;
    const std::int32_t inputs = call.cache.dim_k + call.cache.dim_v;
    // Of the largest sizes that fit, so that the answer is one for all.
    constexpr auto most_shared = static_cast<std::size_t>(Sizes::most_floats()) * sizeof(float);
    if (!Sizes::fit(inputs, call.features, call.width) ||
        largest_cluster<kernel>(device, cluster_blocks, cluster_threads, most_shared) < cluster_blocks) {
        return false;
    }
    const cluster_rows rows{call.projection, Values::projected ? call.width : 0,
                            call.scorer.weights.skip != nullptr};
    const auto floats = static_cast<std::size_t>(
        cluster_memory<Sizes::Entries>::floats(inputs, rows.count(), call.features, call.width));
    const std::int64_t heads = call.cache.kv_heads;
    const std::int64_t groups = (call.batch.count + Sizes::Entries - 1) / Sizes::Entries;
    constexpr std::int64_t each = 2;  // blocks of a multiprocessor
    const std::int64_t room = each * device.attribute(cudaDevAttrMultiProcessorCount) / cluster_blocks;
    const std::int64_t turns = std::clamp<std::int64_t>(room / heads, 1, std::max<std::int64_t>(groups, 1));
    share_multiprocessors<kernel>(device);
    launch_attributes attributes;
    attributes.add_cluster(cluster_blocks);
    launch_with(attributes, "cache_score_cluster_kernel", kernel, heads * turns * cluster_blocks,
                cluster_threads, floats * sizeof(float), on, call);
    return true;
}

/// Enqueues the scores of a chunk's tokens.
template <class View, class Scorer>
void launch_scores(const cuda& on, score_launch<View, Scorer> call) {
    const device_scope device(on);
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
        // Which kernel takes a token depends on sizes and the card alone, so that no batch changes a score's last bit, nor does a
        // prefill. Alone many sequences would be faster with a block each, beside a step they are not: docs/performance.md.
        constexpr std::int32_t few = 2, together = 4;  // sequences
        if (blocks != 0) {
            const bool one = call.batch.count <= few;
            if (one ? launch_cluster<cluster_sizes<1, 2>>(on, device, call) ||
                          launch_cluster<cluster_sizes<1, 4>>(on, device, call)
                    : launch_cluster<cluster_sizes<together, 2>>(on, device, call) ||
                          launch_cluster<cluster_sizes<together / 2, 4>>(on, device, call)) {
                return;
            }
        }
        floats = static_cast<std::size_t>(
            mlstm_memory::floats(inputs, call.projection, call.features, call.width));
    }
    constexpr auto kernel = cache_score_kernel<View, Scorer>;
    if (call.tokens.most == 1) {
        share_multiprocessors<kernel>(device);  // with the step that follows
    }
    launch("cache_score_kernel", kernel, blocks, score_threads, floats * sizeof(float), on, call);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
