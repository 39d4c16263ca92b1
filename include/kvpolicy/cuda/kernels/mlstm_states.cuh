// An mLSTM's states between chunks: what each chunk adds, and the scans over chunks, forwards (C, z) and backwards (A, a).
#pragma once

#include <kvpolicy/cuda/blocks/mlstm_problem.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Shared memory of mlstm_add_kernel.
template <class E, int F, int V>
struct mlstm_add_memory {
    shared_tile<E> a, b;
    float* scale;
    float* ratio;
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_add_memory(unsigned char* memory) {
        shared_parts parts(memory);
        a = parts.tile<E>(scorer_chunk, F);
        b = parts.tile<E>(scorer_chunk, V);
        scale = parts.take<float>(scorer_chunk);
        ratio = parts.take<float>(scorer_chunk);
        bytes = parts.bytes();
    }
};

/// What a chunk adds to a state: memory = sum of scale_r a_r b_r^T over its rows, sums = sum of scale_r ratio_r a_r. Forwards a is
/// k~, b v~, and scale the tokens' weights; backwards a is q~, b d N, scale exp(m - M_l), and ratio d g_l / 1 (null: 1).
/// Eight warps, four across the features. Chunks without reads add nothing backwards, and are passed over.
template <class T, int F, int V, bool Backward>
__global__ void __launch_bounds__(256) mlstm_add_kernel(const mlstm_problem<T> problem) {
    using E = mlstm_element<T>;
    constexpr int MI = F / 64, NI = V / 16;
    const scorer_streams& streams = problem.streams;
    const scorer_span s = streams.span(static_cast<std::int32_t>(blockIdx.x) / streams.slots,
                                       static_cast<std::int32_t>(blockIdx.x) % streams.slots);
    const std::int32_t skipped = Backward ? max(0, s.begin + streams.delay - s.first) : 0;
    if (skipped >= s.count) {
        return;
    }
    const mlstm_add_memory<E, F, V> memory(aligned_dynamic_shared());
    const std::int64_t row = s.row(streams.slots), chunk = problem.chunk(s);
    copy_rows(memory.a, (Backward ? problem.q : problem.k) + row * F, F, F, scorer_chunk, 256);
    copy_rows(memory.b, (Backward ? problem.d_n : problem.v) + row * V, V, V, scorer_chunk, 256);
    copy_commit();
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < scorer_chunk) {
        memory.scale[thread] = (Backward ? problem.kept : problem.weight)[row + thread];
        memory.ratio[thread] = Backward ? problem.d_g[row + thread] : 1.0f;
    }
    copy_wait<0>();
    __syncthreads();
    for (int i = thread; i < scorer_chunk * F / 8; i += 256) {
        const int r = i / (F / 8), c = i % (F / 8) * 8;
        float x[8];
        memory.a.get_eight(r, c, x);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[e] *= memory.scale[r];
        }
        memory.a.set_eight(r, c, x);
    }
    __syncthreads();
    if (thread < F) {
        float sum = 0.0f;
        for (int r = 0; r < scorer_chunk; ++r) {
            sum += memory.ratio[r] * memory.a.get(r, thread);
        }
        (Backward ? problem.d_sums : problem.sums)[chunk * F + thread] = sum;
    }
    float acc[MI][NI][4];
    clear(acc);
    const int m0 = warp_id() % 4 * (F / 4), n0 = warp_id() / 4 * (V / 2);
    add_product<MI, NI, scorer_chunk, true, true>(acc, memory.a, m0, memory.b, n0);
    E* const to = (Backward ? problem.d_memory : problem.memory) + chunk * F * V;
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                store_pair(to + (m0 + 16 * i + lane / 4 + 8 * r) * V + n0 + 8 * j + lane % 4 * 2,
                           acc[i][j][2 * r], acc[i][j][2 * r + 1]);
            }
        }
    }
}

/// Stabilisers before each chunk, and the scan's steps: one warp a plane, a chunk a lane. m' = forgotten + max(m, top) is
/// max(m + a, b), and such maps compose. Continued sequences take up and leave the caller's m.
template <class T>
__global__ void __launch_bounds__(32) mlstm_frames_kernel(const mlstm_problem<T> problem) {
    const scorer_streams& streams = problem.streams;
    const auto plane = static_cast<std::int32_t>(blockIdx.x);
    const int lane = lane_id();
    const std::int64_t state = std::int64_t{problem.features} * (problem.width + 1) + 2;
    float* const stabiliser = problem.states == nullptr ? nullptr : problem.states + (plane + 1) * state - 2;
    const std::int32_t start = streams.start_of(plane / streams.heads);
    double m = -INFINITY;
    if (start > 0 && stabiliser != nullptr) {
        m = static_cast<double>(stabiliser[0]) + static_cast<double>(stabiliser[1]);
    }
    bool any = false;
    for (std::int32_t first = 0; first < streams.slots; first += 32) {
        const std::int32_t slot = first + lane;
        scorer_span s{};
        if (slot < streams.slots) {
            s = streams.span(plane, slot);
        }
        mlstm_frame& frame =
            problem.frames[std::int64_t{plane} * streams.slots + (slot < streams.slots ? slot : 0)];
        const bool there = s.count > 0;
        const bool fresh = there && s.first == s.begin;
        double a = 0.0, b = -INFINITY;
        if (there) {
            a = fresh ? -INFINITY : frame.forgotten;
            b = frame.forgotten + frame.top;
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const double before_a = __shfl_up_sync(all_lanes, a, static_cast<unsigned>(step));
            const double before_b = __shfl_up_sync(all_lanes, b, static_cast<unsigned>(step));
            if (lane >= step) {
                const double moved = before_b + a;
                b = moved > b ? moved : b;
                a += before_a;
            }
        }
        const double moved = m + a;
        const double after = moved > b ? moved : b;
        const double before = __shfl_up_sync(all_lanes, after, 1u);
        const double own = fresh ? -INFINITY : lane == 0 ? m : before;
        if (slot < streams.slots) {
            frame.count = s.count;
            frame.fresh = fresh ? 1 : 0;
            frame.reads = scorer_chunk;
        }
        if (there) {
            const double most = own > frame.top ? own : frame.top;
            frame.m = own;
            frame.keep = expf(static_cast<float>(own - most));
            // A token that is not finite makes all later states NaN.
            frame.add = frame.bad < s.count ? NAN : expf(static_cast<float>(frame.top - most));
            const std::int32_t skipped = max(0, s.begin + streams.delay - s.first);
            frame.reads = skipped < s.count ? skipped : scorer_chunk;
        }
        any = any || __any_sync(all_lanes, there ? 1 : 0) != 0;
        m = __shfl_sync(all_lanes, after, 31);
    }
    if (lane == 0 && stabiliser != nullptr && (any || start == 0)) {
        const auto high = static_cast<float>(m);
        stabiliser[0] = high;
        stabiliser[1] = fabs(m) <= 3.402823466e38 ? static_cast<float>(m - static_cast<double>(high)) : 0.0f;
    }
}

/// A chunk's part in a scan.
struct mlstm_step {
    float keep, add;
    bool there, adds, fresh;
};

/// The scan of N neighbouring elements of a plane's states by one thread; all threads of a block go together. What chunks add is
/// loaded `ahead` chunks before it is needed. Returns whether there was a chunk.
template <int N, bool Backward, class E>
__device__ inline bool scan_chunks(const mlstm_frame* frames, std::int32_t slots, mlstm_step* steps,
                                   bool active, E* memory, std::int64_t stride, float (&running)[N]) {
    constexpr int ahead = 8, tile = 64;
    struct alignas(N * sizeof(E)) group {
        E of[N];
    };
    bool any = false;
    for (std::int32_t base = 0; base < slots; base += tile) {
        __syncthreads();
        const std::int32_t mine = base + static_cast<std::int32_t>(threadIdx.x);
        if (threadIdx.x < tile && mine < slots) {
            const mlstm_frame& frame = frames[Backward ? slots - 1 - mine : mine];
            const bool there = frame.count > 0;
            steps[threadIdx.x] = {frame.keep, Backward ? 1.0f : frame.add, there,
                                  Backward ? there && frame.reads < scorer_chunk : there, frame.fresh != 0};
        }
        __syncthreads();
        for (int first = 0; active && first < tile && base + first < slots; first += ahead) {
            group delta[ahead];
#pragma unroll
            for (int n = 0; n < ahead; ++n) {
                const std::int32_t at = base + first + n;
                const std::int32_t slot = Backward ? slots - 1 - at : at;
#pragma unroll
                for (int e = 0; e < N; ++e) {
                    delta[n].of[e] = static_cast<E>(0.0f);
                }
                if (at < slots && steps[first + n].adds) {
                    delta[n] = *reinterpret_cast<const group*>(memory + slot * stride);
                }
            }
#pragma unroll
            for (int n = 0; n < ahead; ++n) {
                const std::int32_t at = base + first + n;
                const std::int32_t slot = Backward ? slots - 1 - at : at;
                if (at >= slots || !steps[first + n].there) {
                    continue;
                }
                any = true;
                const mlstm_step step = steps[first + n];
                group out;
#pragma unroll
                for (int e = 0; e < N; ++e) {
                    // Streams begin without a state, and nothing goes back beyond their first token.
                    const float before = !Backward && step.fresh ? 0.0f : running[e];
                    out.of[e] = static_cast<E>(before);
                    running[e] = step.keep * before + step.add * static_cast<float>(delta[n].of[e]);
                    if (Backward && step.fresh) {
                        running[e] = 0.0f;
                    }
                }
                *reinterpret_cast<group*>(memory + slot * stride) = out;
            }
        }
    }
    return any;
}

/// Turns what chunks add into the states before them; backwards into those after them. A thread has eight neighbouring
/// elements of a plane's state; in a plane's last block one of its sums. Continued sequences take up and leave the caller's
/// states, features (width + 1) + 2 numbers in the features' own order.
template <class T, int F, int V, bool Backward>
__global__ void __launch_bounds__(128) mlstm_scan_kernel(const mlstm_problem<T> problem) {
    using E = mlstm_element<T>;
    constexpr int threads = 128;
    constexpr int blocks = F * V / 8 / threads;
    static_assert(blocks * threads * 8 == F * V && threads >= F);
    __shared__ mlstm_step steps[64];
    const scorer_streams& streams = problem.streams;
    const std::int32_t plane = static_cast<std::int32_t>(blockIdx.x) / (blocks + 1);
    const std::int32_t part = static_cast<std::int32_t>(blockIdx.x) % (blocks + 1);
    const auto thread = static_cast<int>(threadIdx.x);
    const std::int64_t first = std::int64_t{plane} * streams.slots;
    const mlstm_frame* const frames = problem.frames + first;
    const std::int64_t size = std::int64_t{problem.features} * (problem.width + 1) + 2;
    float* const state = Backward || problem.states == nullptr ? nullptr : problem.states + plane * size;
    const std::int32_t start = streams.start_of(plane / streams.heads);
    if (part == blocks) {
        const std::int32_t feature = thread < F ? problem.feature_of(thread, F) : -1;
        float* const lasting = state == nullptr || feature < 0
                                   ? nullptr
                                   : state + std::int64_t{problem.features} * problem.width + feature;
        float running[1] = {lasting != nullptr && start > 0 ? *lasting : 0.0f};
        float* const sums = (Backward ? problem.d_sums : problem.sums) + first * F + thread;
        const bool any = scan_chunks<1, Backward>(frames, streams.slots, steps, thread < F, sums, F, running);
        if (lasting != nullptr && (any || start == 0)) {
            *lasting = running[0];
        }
        return;
    }
    const int at = (part * threads + thread) * 8, column = at % V;
    const std::int32_t feature = problem.feature_of(at / V, F);
    float* const lasting =
        state == nullptr || feature < 0 ? nullptr : state + std::int64_t{feature} * problem.width + column;
    float running[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        running[e] = lasting != nullptr && start > 0 && column + e < problem.width ? lasting[e] : 0.0f;
    }
    E* const memory = (Backward ? problem.d_memory : problem.memory) + first * F * V + at;
    const bool any =
        scan_chunks<8, Backward>(frames, streams.slots, steps, true, memory, std::int64_t{F} * V, running);
    if (lasting != nullptr && (any || start == 0)) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (column + e < problem.width) {
                lasting[e] = running[e];
            }
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
