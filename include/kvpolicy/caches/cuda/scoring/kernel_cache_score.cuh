// Kernels that score tokens for a cache, with their contracts, and their launches.
#pragma once

#include <kvpolicy/caches/cuda/scoring/agent_mlstm_batched.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_cluster.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_score.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Scores of a chunk's tokens (on arrival), or of the keys that leave the window when the tokens come (on
/// leaving), by blocks that share nothing: decode_scorer() of agent_score.cuh per scorer.
///
/// Grid: count * Hkv * ceil(most / score_batch) blocks; mLSTM: count * Hkv, the tokens one after another;
/// by block: ceil(count * most / each) * Hkv * shares, those that share tokens next to each other.
/// Block: score_threads; by block: block_scorer_threads in a step, else block_scorer_max_threads.
/// Shared memory: dynamic, mlstm_memory::floats() or device_scorer::block_floats() floats; by block: the
/// tokens.
/// In: tokens' k [count, Hkv, most, Dk] and v [count, Hkv, most, Dv] of T, weights fp32, window entries.
/// Out: scores [count, Hkv, most] fp32; 0 where no key leaves; in a step by block
/// [shares, count, Hkv, 1], parts.
/// Overwrites: state [.., state_size] fp32 of the cache, or with `state` a copy.
template <class View, class Scorer>
__global__ void __launch_bounds__(score_threads)
    decode_scorer_kernel(const __grid_constant__ score_params<View, Scorer> call) {
    auto* const shared = reinterpret_cast<float*>(dynamic_shared());
    prepare_scorer(call, shared);
    wait_for_kernel_before();
    let_next_kernel_start();  // it may stream rows meanwhile, and waits for scores where it needs them
    decode_scorer(call, shared);
}

/// mLSTM scores by clusters, for compute capability 9.0 and few sequences: cluster_blocks blocks share one
/// head's weights and the states of Sizes::Entries sequences, which stay in registers over a chunk.
///
/// Grid: Hkv * turns clusters of cluster_blocks blocks, no more than run at once. Block: cluster_threads, at
/// most cluster_registers registers, so that a block of the decode step fits beside it.
/// Shared memory: dynamic cluster_memory::bytes().
/// In, out and overwrites: as decode_scorer_kernel for the mLSTM. Sums have one order, so scores are
/// batch-invariant.
///
/// Phases: 1. ask_early: weights and states on their way to the L2 cache. 2. Wait for the kernel before. 3.
/// Let the next kernel start. 4. run: projections, features and gates, state update, readout.
template <class Sizes, class View, std::int32_t D, class Feature, class Values>
__global__ void __maxnreg__(cluster_registers) mlstm_decode_cluster_kernel(
    const __grid_constant__ score_params<View, mLSTMScorer<D, Feature, Values>> call) {
    if constexpr (compiled_for_clusters) {
        // 1 to 4, as above.
        agent_mlstm_cluster<Sizes, View, D, Feature, Values> score(call, dynamic_shared());
        score.ask_early();
        wait_for_kernel_before();
        // As in decode_scorer_kernel; only now, since the next kernel does not wait for the kernels before.
        let_next_kernel_start();
        score.run();
    }
}

/// Sequences of a block beside a step, at least: its blocks need most of the GPU meanwhile.
constexpr std::int64_t batched_beside(std::int64_t count) {
    constexpr std::int64_t of_more = 8;
    return count <= batched_tokens ? std::min<std::int64_t>(count, batched_entries) : of_more;
}

/// mLSTM scores of a decode step with many sequences, for compute capability 9.0: states stream through a
/// ring in shared memory; the two blocks of a cluster share one head's weights.
///
/// Grid: ceil(count / (together * batched_blocks)) * Hkv clusters of batched_blocks blocks. Block:
/// batched_threads: workers, a warp that copies states, warps that read scores out.
/// Shared memory: dynamic mlstm_batched_memory::bytes() with `slots` stages of the ring.
/// In, out and overwrites: as decode_scorer_kernel for the mLSTM, bit for bit as mlstm_decode_cluster_kernel.
///
/// Phases: as mlstm_decode_cluster_kernel.
template <class View, std::int32_t D, class Feature, class Values>
__global__ void __launch_bounds__(batched_threads, 1) mlstm_decode_batched_kernel(
    const __grid_constant__ score_params<View, mLSTMScorer<D, Feature, Values>> call) {
    if constexpr (compiled_for_clusters) {  // for those that share its order of sums
        agent_mlstm_batched<View, D, Feature, Values> score(call, dynamic_shared());
        score.ask_early();
        wait_for_kernel_before();
        let_next_kernel_start();
        score.run();
    }
}

/// Whether weights can be read in fours of numbers.
template <class Weights>
bool in_fours(const Weights& weights) {
    return ((reinterpret_cast<std::uintptr_t>(weights.w_k) | reinterpret_cast<std::uintptr_t>(weights.w_q) |
             reinterpret_cast<std::uintptr_t>(weights.w_v) | reinterpret_cast<std::uintptr_t>(weights.w_i) |
             reinterpret_cast<std::uintptr_t>(weights.w_f) | reinterpret_cast<std::uintptr_t>(weights.skip)) %
            sizeof(float4)) == 0;
}

/// Enqueues a step's mLSTM scores of many sequences; launch_cluster serves their scorer, too.
template <class View, std::int32_t D, class Feature, class Values>
bool launch_batched(const cuda& ctx, const device_scope& device,
                    score_params<View, mLSTMScorer<D, Feature, Values>> call, const mlstm_rows& rows) {
    using Memory = mlstm_batched_memory<typename View::value_type>;
    constexpr auto kernel = mlstm_decode_batched_kernel<View, D, Feature, Values>;
    const std::int32_t inputs = call.cache.head_dim_qk + call.cache.head_dim_vo;
    if (call.tokens.most != 1 || !batched_fits(inputs, call.features, call.width)) {
        return false;
    }
    const std::size_t most =
        shared_capacity(device, "mlstm_decode_batched_kernel", reinterpret_cast<const void*>(kernel));
    const auto bytes_with = [&](std::int32_t stages) {
        return static_cast<std::size_t>(Memory::bytes(rows.count(), call.features, call.width,
                                                      call.cache.state_size, stages, Values::projected));
    };
    call.stages = batched_stages;
    while (call.stages >= batched_min_stages && bytes_with(call.stages) > most) {
        --call.stages;
    }
    const std::int64_t clusters = clusters_at_once<kernel>(device, batched_blocks, batched_threads, most),
                       heads = call.cache.kv_heads, count = call.batch.count;
    if (call.stages < batched_min_stages || clusters == 0) {
        return false;
    }
    // Alone it takes the whole GPU.
    const std::int64_t capacity = std::max<std::int64_t>(clusters / heads, 1) * batched_blocks,
                       least = call.beside ? batched_beside(count) : 1,
                       together = std::clamp<std::int64_t>((count + capacity - 1) / capacity, least,
                                                           batched_entries),
                       each = together * batched_blocks;
    call.together = static_cast<std::int32_t>(together);
    share_sms<kernel>(device);
    launch_early<kernel>("mlstm_decode_batched_kernel", (count + each - 1) / each * heads * batched_blocks,
                         batched_threads, bytes_with(call.stages), device, ctx, batched_blocks, call);
    return true;
}

/// Enqueues an mLSTM's scores by clusters, if they fit: the GPU, the scorer's sizes. There are no more
/// clusters than run at once: a step's blocks begin when all of this launch have begun.
template <class Sizes, class View, std::int32_t D, class Feature, class Values>
bool launch_cluster(const cuda& ctx, const device_scope& device,
                    score_params<View, mLSTMScorer<D, Feature, Values>> call) {
    using Memory = cluster_memory<Sizes, typename View::value_type>;
    constexpr auto kernel = mlstm_decode_cluster_kernel<Sizes, View, D, Feature, Values>;
    const std::int32_t inputs = call.cache.head_dim_qk + call.cache.head_dim_vo;
    const mlstm_rows rows{call.projection, Values::projected ? call.width : 0,
                          call.scorer.weights.skip != nullptr};
    // Of the largest sizes that fit, so that the answer is one for all.
    constexpr mlstm_rows max_rows{max_mlstm_features, max_mlstm_width, true};
    constexpr auto max_shared = static_cast<std::size_t>(
        Memory::bytes(max_mlstm_inputs, max_rows.count(), max_mlstm_features, max_mlstm_width));
    if (!Sizes::fit(inputs, call.features, call.width) || !in_fours(call.scorer.weights) ||
        largest_cluster<kernel>(device, cluster_blocks, cluster_threads, max_shared) < cluster_blocks) {
        return false;
    }
    const std::int64_t heads = call.cache.kv_heads, count = call.batch.count;
    constexpr std::int64_t few = 16;  // sequences that clusters are quicker for
    if (count > few && launch_batched(ctx, device, call, rows)) {
        return true;
    }
    call.together = static_cast<std::int32_t>(std::clamp<std::int64_t>(count, 1, Sizes::Entries));
    const std::int64_t groups = (count + call.together - 1) / call.together;
    constexpr std::int64_t each = 1;  // blocks per SM
    const std::int64_t capacity = each * device.attribute(cudaDevAttrMultiProcessorCount) / cluster_blocks;
    const std::int64_t turns =
        std::clamp<std::int64_t>(capacity / heads, 1, std::max<std::int64_t>(groups, 1));
    share_sms<kernel>(device);
    launch_early<kernel>(
        "mlstm_decode_cluster_kernel", heads * turns * cluster_blocks, cluster_threads,
        static_cast<std::size_t>(Memory::bytes(inputs, rows.count(), call.features, call.width)), device, ctx,
        cluster_blocks, call);
    return true;
}

/// Enqueues the scores of the tokens of a step or a chunk by blocks. Those of a step are shared, so that the
/// weights of a head are read by several SMs, and once for the tokens of several sequences.
template <class View, class Scorer>
requires scores_by_block<Scorer>
void launch_scores(const cuda& ctx, score_params<View, Scorer> call) {
    const device_scope device(ctx);
    const std::int64_t tokens = std::int64_t{call.batch.count} * call.tokens.most,
                       pieces = (tokens + block_scorer_tokens - 1) / block_scorer_tokens;
    if (tokens == 0) {
        return;
    }
    constexpr auto kernel = decode_scorer_kernel<View, Scorer>;
    call.shares = call.step ? score_parts_of(call.scorer) : 1;
    call.each = static_cast<std::int32_t>((tokens + pieces - 1) / pieces);
    const std::size_t floats = device_scorer<Scorer>::block_floats(
        call.scorer, call.each, call.cache.head_dim_qk, call.cache.head_dim_vo);
    if (call.step) {
        share_sms<kernel>(device);  // with the step that follows
    }
    launch_early<kernel>("decode_scorer_kernel", pieces * call.cache.kv_heads * call.shares,
                         call.step ? block_scorer_threads : block_scorer_max_threads, floats * sizeof(float),
                         device, ctx, 1, call);
}

/// Enqueues the scores of a chunk's tokens.
template <class View, class Scorer>
void launch_scores(const cuda& ctx, score_params<View, Scorer> call) {
    const device_scope device(ctx);
    const std::int64_t heads = std::int64_t{call.batch.count} * call.cache.kv_heads;
    const std::int64_t pieces = (std::int64_t{call.tokens.most} + score_batch - 1) / score_batch;
    std::int64_t blocks = heads * pieces;
    std::size_t floats = 0;
    if constexpr (Scorer::when == score_time::on_leaving) {
        const std::int32_t inputs = call.cache.head_dim_qk + call.cache.head_dim_vo;
        call.projection = call.scorer.projection();
        call.features = call.scorer.features();
        call.width = call.scorer.value_width();
        blocks = heads;
        // Whether clusters take a token, or blocks whose sums have the same order, depends on sizes and the
        // GPU alone, so that no batch changes a score's last bit, nor does a short chunk or a draft. Long
        // chunks: dispatch_chunk_scores.cuh.
        if (blocks != 0 && (launch_cluster<cluster_sizes<8, 2>>(ctx, device, call) ||
                            launch_cluster<cluster_sizes<2, 2>>(ctx, device, call))) {
            return;
        }
        floats = static_cast<std::size_t>(
            mlstm_memory::floats(inputs, call.projection, call.features, call.width));
    }
    constexpr auto kernel = decode_scorer_kernel<View, Scorer>;
    if (call.step) {
        share_sms<kernel>(device);  // with the step that follows
    }
    launch_early<kernel>("decode_scorer_kernel", blocks, score_threads, floats * sizeof(float), device, ctx,
                         1, call);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
