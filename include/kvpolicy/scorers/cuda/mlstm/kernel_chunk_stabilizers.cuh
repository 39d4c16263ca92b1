// chunk_stabilizers: the scan over the chunks of each plane that comes before all other passes over them.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int mlstm_frames_threads = 256;

/// chunk_stabilizers: what the states' kernels must know of each chunk before they go through the chunks.
/// Grid: a block per plane. Block: 256 threads, a chunk per thread and round. Shared memory: 256 bytes,
/// static.
/// In: frames [planes, slots], with what mlstm_project_kernel left of each chunk (top, forgotten, weights,
/// heavy, bad).
/// Out: frames, completed in place: m, keep, add, reads, count, fresh, before (ref_token) and share
/// (ref_weight). Continued sequences: the caller's m, overwritten; partial_states gets the caller's sums. m'
/// = forgotten + max(m, top) is max(m + a, b), and such maps compose, so the scan is parallel.
/// 1. The caller's m and sums.
/// Per 256 chunks: 2. each chunk's map (a, b), scanned over the warp, then over the warps.
/// 3. m before the chunk, keep and add.
/// 4. The weights of all tokens, scanned alike: ref_weight.
/// 5. The frame is written.
/// 6. The caller's m.
template <class T>
__global__ void __launch_bounds__(mlstm_frames_threads) mlstm_frames_kernel(const mlstm_problem<T> problem) {
    const scorer_streams& streams = problem.streams;
    const auto plane = static_cast<std::int32_t>(blockIdx.x);
    constexpr int threads = mlstm_frames_threads, warps = threads / 32;
    // What a warp's chunks do to a stabilizer, and to the weights of the tokens before them.
    __shared__ double of_a[warps], of_b[warps];
    __shared__ std::int32_t of_heavy[warps];
    __shared__ float of_keep[warps], of_add[warps];
    const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), warp = warp_id();
    const std::int64_t state = std::int64_t{problem.features} * (problem.width + 1) + 2;
    float* const stabiliser = problem.states == nullptr ? nullptr : problem.states + (plane + 1) * state - 2;
    // 1. The caller's m and sums.
    const std::int32_t start = streams.start_of(plane / streams.heads);
    double m = -INFINITY;
    if (start > 0 && stabiliser != nullptr) {
        m = static_cast<double>(stabiliser[0]) + static_cast<double>(stabiliser[1]);
        // The sums that chunk_states in one segment begins with: several of its blocks do, and one leaves new
        // ones, perhaps before others begin.
        const float* const sums = stabiliser - problem.features;
        for (std::int32_t i = thread; i < problem.features; i += threads) {
            problem.partial_states[std::int64_t{plane} * problem.features + i] = sums[i];
        }
    }
    bool any = false;
    float weights =
        1.0f;  // of all tokens before the next chunks, from m on; of the caller's state nothing is known
    std::int32_t heavy = -1;
    mlstm_frame next{};
    if (thread < streams.slots) {
        next = problem.frames[std::int64_t{plane} * streams.slots + thread];
    }
    for (std::int32_t first = 0; first < streams.slots; first += threads) {
        const std::int32_t slot = first + thread;
        scorer_span s{};
        if (slot < streams.slots) {
            s = streams.span(plane, slot);
        }
        mlstm_frame frame = next;
        if (slot + threads < streams.slots) {
            next = problem.frames[std::int64_t{plane} * streams.slots + slot + threads];
        }
        const bool there = s.count > 0;
        const bool fresh = there && s.first == s.begin;
        // 2. The chunk's map, scanned over the warp, then over the warps.
        double a = 0.0, b = -INFINITY;
        std::int32_t own_heavy = -1;  // what b is of
        if (there) {
            a = fresh ? -INFINITY : frame.forgotten;
            b = frame.forgotten + frame.top;
            own_heavy = slot * scorer_chunk + frame.heavy;
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const double before_a = __shfl_up_sync(all_lanes, a, static_cast<unsigned>(step));
            const double before_b = __shfl_up_sync(all_lanes, b, static_cast<unsigned>(step));
            const std::int32_t other = __shfl_up_sync(all_lanes, own_heavy, static_cast<unsigned>(step));
            if (lane >= step) {
                const double moved = before_b + a;
                own_heavy = moved > b ? other : own_heavy;
                b = moved > b ? moved : b;
                a += before_a;
            }
        }
        if (lane == 31) {
            of_a[warp] = a;
            of_b[warp] = b;
            of_heavy[warp] = own_heavy;
        }
        any = __syncthreads_or(there ? 1 : 0) != 0 || any;
        double begin = m;  // before the warp's chunks
        std::int32_t begin_heavy = heavy;
#pragma unroll
        for (int i = 0; i < warps; ++i) {
            if (i == warp) {
                begin = m;
                begin_heavy = heavy;
            }
            const double moved = m + of_a[i];
            heavy = moved > of_b[i] ? heavy : of_heavy[i];
            m = moved > of_b[i] ? moved : of_b[i];
        }
        // 3. m before the chunk, keep and add.
        const double moved = begin + a;
        const double after = moved > b ? moved : b;
        const std::int32_t heavy_after = moved > b ? begin_heavy : own_heavy;
        const double before = __shfl_up_sync(all_lanes, after, 1u);
        const std::int32_t heavy_before = __shfl_up_sync(all_lanes, heavy_after, 1u);
        const double own = fresh ? -INFINITY : lane == 0 ? begin : before;
        frame.keep = 1.0f;
        float add = 0.0f;
        if (there) {
            const double most = own > frame.top ? own : frame.top;
            frame.m = own;
            frame.keep = expf(static_cast<float>(own - most));
            add = expf(static_cast<float>(frame.top - most));
        }
        // 4. The weights of all tokens, scanned alike.
        // weights' = keep weights + add the chunk's
        float keep_all = frame.keep, add_all = there ? add * frame.weights : 0.0f;
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
        // 5. The frame.
        frame.count = s.count;
        frame.fresh = fresh ? 1 : 0;
        frame.reads = scorer_chunk;
        if (there) {
            // A token that is not finite makes all later states NaN.
            frame.add = frame.bad < s.count ? NAN : add;
            const std::int32_t skipped = streams.first_read(s);
            frame.reads = skipped < s.count ? skipped : scorer_chunk;
            frame.before = fresh ? -1 : lane == 0 ? begin_heavy : heavy_before;
            const float all = lane == 0 ? begin_weights : weights_before;
            frame.share = frame.before >= 0 && all >= 0.5f ? 1.0f / all : 0.0f;
        } else {
            frame.before = -1;
            frame.share = 0.0f;
        }
        if (slot < streams.slots) {
            problem.frames[std::int64_t{plane} * streams.slots + slot] = frame;
        }
    }
    // 6. The caller's m.
    if (thread == 0 && stabiliser != nullptr && (any || start == 0) && streams.sound(plane / streams.heads)) {
        const auto high = static_cast<float>(m);
        stabiliser[0] = high;
        stabiliser[1] = fabs(m) <= 3.402823466e38 ? static_cast<float>(m - static_cast<double>(high)) : 0.0f;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
