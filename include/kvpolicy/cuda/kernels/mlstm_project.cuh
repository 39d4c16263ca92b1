// From keys and values to an mLSTM's features, values and gates.
#pragma once

#include <kvpolicy/cuda/blocks/mlstm_problem.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/kernels/scorer_weights.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Shared memory of the projections: 64 inputs, two slabs of weights, and the gates.
template <class T>
struct mlstm_project_memory {
    shared_tile<T> x;
    unsigned char* slabs;
    double* log_input;
    double* log_forget;
    float* no_scale;
    std::int32_t* bad;
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE mlstm_project_memory(unsigned char* memory, std::int32_t padded,
                                              std::int32_t slab_rows) {
        shared_parts parts(memory);
        x = parts.tile<T>(scorer_chunk, padded);
        slabs = parts.tile<T>(slab_rows, 64).data;
        parts.tile<T>(slab_rows, 64);
        log_input = parts.take<double>(scorer_chunk);
        log_forget = parts.take<double>(scorer_chunk);
        no_scale = parts.take<float>(scorer_chunk);
        bad = parts.take<std::int32_t>(scorer_chunk);
        bytes = parts.bytes();
    }
};

/// softmax over the first `count` columns of a warp's rows, of sign * y; other columns become 0.
template <int NI>
__device__ inline void softmax_rows(const float (&y)[1][NI][4], float (&p)[1][NI][4], float sign,
                                    std::int32_t count) {
    const int lane = lane_id();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float most = -INFINITY;
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * j + lane % 4 * 2 + e < count) {
                    most = fmaxf(most, sign * y[0][j][2 * r + e]);
                }
            }
        }
        most = row_max(most);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool in = 8 * j + lane % 4 * 2 + e < count;
                p[0][j][2 * r + e] = in ? expf(sign * y[0][j][2 * r + e] - most) : 0.0f;
                sum += p[0][j][2 * r + e];
            }
        }
        const float scale = 1.0f / row_sum(sum);
#pragma unroll
        for (int j = 0; j < NI; ++j) {
            p[0][j][2 * r] *= scale;
            p[0][j][2 * r + 1] *= scale;
        }
    }
}

/// A warp's 16 rows of an accumulator to rows of `stride` elements from column `column` on.
template <int NI, class E>
__device__ inline void store_rows(E* to, std::int64_t stride, int column, const float (&acc)[1][NI][4]) {
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < NI; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            store_pair(to + (16 * warp_id() + lane / 4 + 8 * r) * stride + column + 8 * j + lane % 4 * 2,
                       acc[0][j][2 * r], acc[0][j][2 * r + 1]);
        }
    }
}

/// phi(W x) of 64 inputs into rows of F elements.
template <int F, bool Hedgehog, class T, class E>
__device__ inline void project_features(const shared_tile<T>& x, const T* weights, std::int32_t padded,
                                        unsigned char* slabs, std::int32_t projection, E* to) {
    constexpr int NI = (Hedgehog ? F / 2 : F) / 8;
    float y[1][NI][4], p[1][NI][4];
    clear(y);
    project<NI>(y, x, weights, padded, slabs);
    softmax_rows(y, p, 1.0f, projection);
    store_rows(to, F, 0, p);
    if constexpr (Hedgehog) {
        softmax_rows(y, p, -1.0f, projection);
        store_rows(to, F, F / 2, p);
    }
}

/// The gates of a chunk's tokens, one warp a row: logarithms into shared memory, slopes where a backward pass wants them. A row
/// that is not finite is marked, and counts as a token with open gates.
template <class T>
__device__ inline void compute_gates(const mlstm_problem<T>& problem, const scorer_span& s,
                                     const mlstm_project_memory<T>& memory) {
    const scorer_source<T>& source = problem.source;
    const float* const w_i = problem.w_i + std::int64_t{s.h} * source.size;
    const float* const w_f = problem.w_f + std::int64_t{s.h} * source.size;
    for (int r = warp_id(); r < scorer_chunk; r += 4) {
        float input = 0.0f, forget = 0.0f;
        bool good = true;
        if (r < s.count) {
            const T* const key = source.k.row(s.b, s.h, s.first + r);
            const T* const value = source.v.row(s.b, s.h, s.first + r);
            for (std::int32_t c = lane_id(); c < source.size; c += 32) {
                const auto x = static_cast<float>(c < source.k.dim ? key[c] : value[c - source.k.dim]);
                good = good && fabsf(x) <= 3.402823466e38f;
                input += x * w_i[c];
                forget += x * w_f[c];
            }
            good = __all_sync(all_lanes, good ? 1 : 0) != 0;
            input = warp_sum(input);
            forget = warp_sum(forget);
        }
        if (lane_id() != 0) {
            continue;
        }
        double log_input = -INFINITY, log_forget = 0.0;
        if (r < s.count && good) {
            input += problem.b_i != nullptr ? problem.b_i[s.h] : 0.0f;
            forget += problem.b_f != nullptr ? problem.b_f[s.h] : 0.0f;
            float slope_i = 1.0f, slope_f = 1.0f;
            if (problem.softcap > 0.0f) {
                const float of_input = tanhf(input / problem.softcap);
                const float of_forget = tanhf(forget / problem.softcap);
                slope_i = 1.0f - of_input * of_input;
                slope_f = 1.0f - of_forget * of_forget;
                input = problem.softcap * of_input;
                forget = problem.softcap * of_forget;
            }
            const float e = expf(-fabsf(forget));
            log_input = static_cast<double>(input);
            log_forget = static_cast<double>((forget < 0.0f ? forget : 0.0f) - log1pf(e));
            if (problem.slope_i != nullptr) {
                problem.slope_i[s.row(problem.streams.slots) + r] = slope_i;
                problem.slope_f[s.row(problem.streams.slots) + r] =
                    slope_f * ((forget < 0.0f ? 1.0f : e) / (1.0f + e));  // 1 - sigmoid
            }
        } else if (r < s.count) {
            log_input = 0.0;
            if (problem.slope_i != nullptr) {
                problem.slope_i[s.row(problem.streams.slots) + r] = NAN;
                problem.slope_f[s.row(problem.streams.slots) + r] = NAN;
            }
        }
        memory.log_input[r] = log_input;
        memory.log_forget[r] = log_forget;
        memory.bad[r] = good ? 0 : 1;
    }
}

/// s_j, top_l and the chunk's frame from its gates, by one warp; each lane has two tokens.
template <class T>
__device__ inline void scan_gates(const mlstm_problem<T>& problem, const scorer_span& s,
                                  const double* log_input, const double* log_forget,
                                  const std::int32_t* bad) {
    const int lane = lane_id(), at = 2 * lane;
    const double first = log_forget[at];
    double sum = first + log_forget[at + 1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(all_lanes, sum, static_cast<unsigned>(step));
        sum += lane >= step ? other : 0.0;
    }
    const double before = sum - log_forget[at + 1];  // b of the first of the two
    const double source[2] = {log_input[at] - before, log_input[at + 1] - sum};
    double most = source[0] > source[1] ? source[0] : source[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(all_lanes, most, static_cast<unsigned>(step));
        most = lane >= step && other > most ? other : most;
    }
    const double earlier = __shfl_up_sync(all_lanes, most, 1u);
    const double first_top = lane > 0 && earlier > source[0] ? earlier : source[0];
    const double top = __shfl_sync(all_lanes, most, 31);
    const std::int64_t row = s.row(problem.streams.slots) + at;
    float weights = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        problem.log_source[row + i] = source[i];
        problem.log_top[row + i] = i == 0 ? first_top : most;
        const float weight = expf(static_cast<float>(source[i] - top));
        problem.weight[row + i] = weight;
        weights += weight;
    }
    weights = warp_sum(weights);
    const unsigned even = __ballot_sync(all_lanes, bad[at]);
    const unsigned odd = __ballot_sync(all_lanes, bad[at + 1]);
    const unsigned tops = __ballot_sync(all_lanes, source[0] == top || source[1] == top ? 1 : 0);
    const int lane_of_top = tops != 0u ? __ffs(static_cast<int>(tops)) - 1 : 0;
    const int second = __shfl_sync(all_lanes, source[0] == top ? 0 : 1, lane_of_top);
    const double forgotten = __shfl_sync(all_lanes, sum, 31);
    if (lane == 0) {
        const int first_even = even != 0u ? 2 * (__ffs(static_cast<int>(even)) - 1) : scorer_chunk;
        const int first_odd = odd != 0u ? 2 * (__ffs(static_cast<int>(odd)) - 1) + 1 : scorer_chunk;
        mlstm_frame& frame = problem.frames[problem.chunk(s)];
        frame.top = top;
        frame.forgotten = forgotten;
        frame.weights = weights;
        frame.heavy = 2 * lane_of_top + second;
        frame.bad = first_even < first_odd ? first_even : first_odd;
    }
}

/// One block for a chunk's tokens (k~, v~, gates), one for its queries. Rows without a token are made of inputs that are 0.
template <class T, int F, int V, bool Hedgehog>
__global__ void __launch_bounds__(128) mlstm_project_kernel(const mlstm_problem<T> problem) {
    constexpr int slab_rows = (Hedgehog ? F / 2 : F) > V ? (Hedgehog ? F / 2 : F) : V;
    const scorer_streams& streams = problem.streams;
    const std::int32_t chunks = streams.batch * streams.heads * streams.slots;
    const bool queries = static_cast<std::int32_t>(blockIdx.x) >= chunks;
    const std::int32_t chunk = static_cast<std::int32_t>(blockIdx.x) - (queries ? chunks : 0);
    const scorer_span s = streams.span(chunk / streams.slots, chunk % streams.slots);
    const std::int32_t skipped = queries ? max(0, s.begin + streams.delay - s.first) : 0;
    if (skipped >= s.count) {
        return;
    }
    const scorer_source<T>& source = problem.source;
    const mlstm_project_memory<T> memory(aligned_dynamic_shared(), source.padded, slab_rows);
    const std::int32_t first = s.first - (queries ? streams.delay : 0);
    const std::int64_t row = s.row(streams.slots);
    source.norms(s, first, skipped, s.count, memory.no_scale, memory.no_scale);  // an mLSTM's input has none
    source.load(s, first, skipped, s.count, memory.no_scale, memory.no_scale, memory.x, 0, source.padded);
    if (queries) {
        if (problem.skip != nullptr) {
            const float* const w = problem.skip + std::int64_t{s.h} * source.size;
            for (int r = skipped + warp_id(); r < s.count; r += 4) {
                float sum = 0.0f;
                for (std::int32_t c = lane_id(); c < source.size; c += 32) {
                    sum += source.number(s, first + r, c, 1.0f, 1.0f) * w[c];
                }
                sum = warp_sum(sum);
                if (lane_id() == 0) {
                    problem.skipped[row + r] = sum;
                }
            }
        }
        project_features<F, Hedgehog>(memory.x,
                                      problem.stack_q + std::int64_t{s.h} * problem.rows_q * source.padded,
                                      source.padded, memory.slabs, problem.projection, problem.q + row * F);
        return;
    }
    compute_gates(problem, s, memory);
    copy_wait<0>();
    __syncthreads();
    if (warp_id() == 0) {
        scan_gates(problem, s, memory.log_input, memory.log_forget, memory.bad);
    }
    // What is not finite must not reach the reads before it, not even multiplied by 0.
    for (int r = warp_id(); r < s.count; r += 4) {
        if (memory.bad[r] != 0) {
            for (int c = 2 * lane_id(); c < source.padded; c += 64) {
                memory.x.set_pair(r, c, 0.0f, 0.0f);
            }
        }
    }
    __syncthreads();
    const T* const weights = problem.stack_k + std::int64_t{s.h} * problem.rows_k * source.padded;
    project_features<F, Hedgehog>(memory.x, weights, source.padded, memory.slabs, problem.projection,
                                  problem.k + row * F);
    float y[1][V / 8][4];
    clear(y);
    project<V / 8>(y, memory.x, weights + std::int64_t{problem.at_v} * source.padded, source.padded,
                   memory.slabs);
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < V / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (8 * j + lane % 4 * 2 + e % 2 >= problem.width) {
                y[0][j][e] = 0.0f;  // the stack's next rows
            }
        }
    }
    store_rows(problem.v + row * V, V, 0, y);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
