// chunk_stabilizers: the scan over the chunks of each plane that comes before all other passes over them.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int mlstm_chunk_stabilizers_threads = 256;

/// chunk_stabilizers: what the states' kernels must know of each chunk before they go through the chunks.
/// Grid: a block per plane. Block: 256 threads, a chunk per thread and round. Shared memory: 256 bytes,
/// static.
/// In: chunk_stats [planes, chunks], with what mlstm_project_kernel left of each chunk (top, forgotten,
/// weights, ref_token, bad).
/// Out: chunk_stats, completed in place: m, keep, add, first_output, count, fresh, before and ref_weight.
/// Continued sequences: the caller's m, overwritten; partial_states gets the caller's sums. m' = forgotten +
/// max(m, top) is max(m + a, b), and such maps compose, so the scan is parallel.
/// 1. The caller's m and sums.
/// Per 256 chunks: 2. each chunk's map (a, b), scanned over the warp, then over the warps.
/// 3. m before the chunk, keep and add.
/// 4. The weights of all tokens, scanned alike: ref_weight.
/// 5. chunk_stats are written.
/// 6. The caller's m.
template <class T>
__global__ void __launch_bounds__(mlstm_chunk_stabilizers_threads)
    mlstm_chunk_stabilizers_kernel(const mlstm_params<T> params) {
    const scorer_streams& streams = params.streams;
    const auto plane = static_cast<std::int32_t>(blockIdx.x);
    constexpr int threads = mlstm_chunk_stabilizers_threads, warps = threads / 32;
    // What a warp's chunks do to a stabilizer, and to the weights of the tokens before them.
    __shared__ double of_a[warps], of_b[warps];
    __shared__ std::int32_t of_ref_token[warps];
    __shared__ float of_keep[warps], of_add[warps];
    const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), warp = warp_id();
    // 1. The caller's m and sums.
    const float* const state = params.state_before(plane);
    double m = -INFINITY;
    if (state != nullptr) {
        const float* const stabilizer = state + params.state_size() - 2;
        m = static_cast<double>(stabilizer[0]) + static_cast<double>(stabilizer[1]);
        // The sums that chunk_states in one segment begins with: several of its blocks do, and one leaves new
        // ones, perhaps before others begin.
        const float* const sums = stabilizer - params.features;
        for (std::int32_t i = thread; i < params.features; i += threads) {
            params.partial_states[std::int64_t{plane} * params.features + i] = sums[i];
        }
    }
    float weights =
        1.0f;  // of all tokens before the next chunks, from m on; of the caller's state nothing is known
    std::int32_t ref_token = -1;
    mlstm_chunk_stats next{};
    if (thread < streams.chunks) {
        next = params.chunk_stats[std::int64_t{plane} * streams.chunks + thread];
    }
    for (std::int32_t first = 0; first < streams.chunks; first += threads) {
        const std::int32_t chunk_index = first + thread;
        scorer_span s{};
        if (chunk_index < streams.chunks) {
            s = streams.span(plane, chunk_index);
        }
        mlstm_chunk_stats stats = next;
        if (chunk_index + threads < streams.chunks) {
            next = params.chunk_stats[std::int64_t{plane} * streams.chunks + chunk_index + threads];
        }
        const bool there = s.count > 0;
        const bool fresh = there && s.first == s.begin && params.cached_states == nullptr;
        // 2. The chunk's map, scanned over the warp, then over the warps.
        double a = 0.0, b = -INFINITY;
        std::int32_t own_ref_token = -1;  // what b is of
        if (there) {
            a = fresh ? -INFINITY : stats.forgotten;
            b = stats.forgotten + stats.top;
            own_ref_token = chunk_index * scorer_chunk + stats.ref_token;
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const double before_a = __shfl_up_sync(all_lanes, a, static_cast<unsigned>(step));
            const double before_b = __shfl_up_sync(all_lanes, b, static_cast<unsigned>(step));
            const std::int32_t other = __shfl_up_sync(all_lanes, own_ref_token, static_cast<unsigned>(step));
            if (lane >= step) {
                const double moved = before_b + a;
                own_ref_token = moved > b ? other : own_ref_token;
                b = moved > b ? moved : b;
                a += before_a;
            }
        }
        if (lane == 31) {
            of_a[warp] = a;
            of_b[warp] = b;
            of_ref_token[warp] = own_ref_token;
        }
        __syncthreads();
        double begin = m;  // before the warp's chunks
        std::int32_t begin_ref_token = ref_token;
#pragma unroll
        for (int i = 0; i < warps; ++i) {
            if (i == warp) {
                begin = m;
                begin_ref_token = ref_token;
            }
            const double moved = m + of_a[i];
            ref_token = moved > of_b[i] ? ref_token : of_ref_token[i];
            m = moved > of_b[i] ? moved : of_b[i];
        }
        // 3. m before the chunk, keep and add.
        const double moved = begin + a;
        const double after = moved > b ? moved : b;
        const std::int32_t ref_token_after = moved > b ? begin_ref_token : own_ref_token;
        const double before = __shfl_up_sync(all_lanes, after, 1u);
        const std::int32_t ref_token_before = __shfl_up_sync(all_lanes, ref_token_after, 1u);
        const double own = fresh ? -INFINITY : lane == 0 ? begin : before;
        stats.keep = 1.0f;
        float add = 0.0f;
        if (there) {
            const double most = own > stats.top ? own : stats.top;
            stats.m = own;
            stats.keep = expf(static_cast<float>(own - most));
            add = expf(static_cast<float>(stats.top - most));
        }
        // 4. The weights of all tokens, scanned alike.
        // weights' = keep weights + add the chunk's
        float keep_all = stats.keep, add_all = there ? add * stats.weights : 0.0f;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float before_keep = __shfl_up_sync(all_lanes, keep_all, static_cast<unsigned>(step));
            const float before_add = __shfl_up_sync(all_lanes, add_all, static_cast<unsigned>(step));
            if (lane >= step) {
                add_all += keep_all * before_add;
                keep_all *= before_keep;
            }
        }
        if (lane == 31) {
            of_keep[warp] = keep_all;
            of_add[warp] = add_all;
        }
        __syncthreads();
        float begin_weights = weights;
#pragma unroll
        for (int i = 0; i < warps; ++i) {
            begin_weights = i == warp ? weights : begin_weights;
            weights = of_keep[i] * weights + of_add[i];
        }
        const float weights_after = keep_all * begin_weights + add_all;
        const float weights_before = __shfl_up_sync(all_lanes, weights_after, 1u);
        // 5. chunk_stats.
        stats.count = s.count;
        stats.fresh = fresh ? 1 : 0;
        stats.first_output = scorer_chunk;
        if (there) {
            // A token that is not finite makes all later states NaN.
            stats.add = stats.bad < s.count ? NAN : add;
            const std::int32_t skipped = params.first_output(s);
            stats.first_output = skipped < s.count ? skipped : scorer_chunk;
            stats.before = fresh ? -1 : lane == 0 ? begin_ref_token : ref_token_before;
            const float all = lane == 0 ? begin_weights : weights_before;
            stats.ref_weight = stats.before >= 0 && all >= 0.5f ? 1.0f / all : 0.0f;
        } else {
            stats.before = -1;
            stats.ref_weight = 0.0f;
        }
        if (chunk_index < streams.chunks) {
            params.chunk_stats[std::int64_t{plane} * streams.chunks + chunk_index] = stats;
        }
    }
    // 6. The caller's m.
    float* const after = params.state_after(plane);
    if (thread == 0 && after != nullptr) {
        float* const stabilizer = after + params.state_size() - 2;
        const auto high = static_cast<float>(m);
        stabilizer[0] = high;
        stabilizer[1] = fabs(m) <= 3.402823466e38 ? static_cast<float>(m - static_cast<double>(high)) : 0.0f;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
