// The delayed reads of a chunk: h = N / max(g, clamp), then scores, or the gradients of what the reads depend on.
#pragma once

#include <kvpolicy/cuda/blocks/mlstm_problem.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Shared memory of a block that reads.
template <class E, int F, int V, bool Backward>
struct mlstm_read_memory {
    shared_tile<E> q, k, v, c, weights, d_n;
    float* z;
    float* qz;
    mlstm_exponents exponents;
    float* columns;  // [4][V][2]: sums of a warp's rows
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_read_memory(unsigned char* memory) {
        shared_parts parts(memory);
        q = parts.tile<E>(scorer_chunk, F);
        k = parts.tile<E>(scorer_chunk, F);
        v = parts.tile<E>(scorer_chunk, V);
        c = parts.tile<E>(F, V);
        weights = parts.tile<E>(scorer_chunk, scorer_chunk);
        d_n = parts.tile<E>(Backward ? scorer_chunk : 0, V);
        z = parts.take<float>(F);
        qz = parts.take<float>(scorer_chunk);
        exponents.source = parts.take<double>(scorer_chunk);
        exponents.most = parts.take<double>(scorer_chunk);
        columns = parts.take<float>(Backward ? 4 * V * 2 : 0);
        bytes = parts.bytes();
    }
};

/// What a warp's reads give: h of its 16 rows, the divisors, and what is left of the state before the chunk.
template <int V>
struct mlstm_reads {
    float h[1][V / 8][4];
    float divisor[2];
    float kept[2];  // exp(m - M_l)
};

/// Loads a chunk and reads it. Four warps of 16 reads each. w_lj (q~_l . k~_j) stays in memory.weights, each warp's rows its own;
/// divisors are sums of the weights as rounded there, so that h is a mean of values with the very weights that multiply them.
template <int F, int V, class T, class Memory>
__device__ inline void read_chunk(const mlstm_problem<T>& problem, const scorer_span& s, const Memory& memory,
                                  double m, mlstm_reads<V>& reads) {
    const std::int64_t row = s.row(problem.streams.slots), chunk = problem.chunk(s);
    copy_rows(memory.q, problem.q + row * F, F, F, scorer_chunk, 128);
    copy_rows(memory.k, problem.k + row * F, F, F, scorer_chunk, 128);
    copy_rows(memory.v, problem.v + row * V, V, V, scorer_chunk, 128);
    copy_rows(memory.c, problem.memory + chunk * F * V, V, V, F, 128);
    copy_commit();
    const auto thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < F; i += 128) {
        memory.z[i] = problem.sums[chunk * F + i];
    }
    memory.exponents.load(problem.log_source + row, problem.log_top + row, m);
    copy_wait<0>();
    __syncthreads();
    {  // q~ . z: two threads a row
        const int r = thread / 2, from = thread % 2 * (F / 2);
        float sum = 0.0f;
        for (int c = from; c < from + F / 2; c += 8) {
            float x[8];
            memory.q.get_eight(r, c, x);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                sum += x[e] * memory.z[c + e];
            }
        }
        sum += __shfl_xor_sync(all_lanes, sum, 1);
        if (thread % 2 == 0) {
            memory.qz[r] = sum;
        }
    }
    __syncwarp();  // rows 16 warp .. 16 warp + 15 are this warp's own
    const int m0 = 16 * warp_id(), lane = lane_id();
    clear(reads.h);
    add_product<1, V / 8, F, false, true>(reads.h, memory.q, m0, memory.c, 0);
    float products[1][8][4];
    clear(products);
    add_product<1, 8, F, false, false>(products, memory.q, m0, memory.k, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        reads.kept[r] = expf(static_cast<float>(m - memory.exponents.most[l]));
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            float of[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                of[e] = products[0][j][2 * r + e] * memory.exponents.weight(l, column + e);
            }
            memory.weights.set_pair(l, column, of[0], of[1]);
            sum += memory.weights.get(l, column) + memory.weights.get(l, column + 1);
        }
        reads.divisor[r] = reads.kept[r] * memory.qz[l] + row_sum(sum);
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
            reads.h[0][j][2 * r] *= reads.kept[r];
            reads.h[0][j][2 * r + 1] *= reads.kept[r];
        }
    }
    __syncwarp();
    add_product<1, V / 8, scorer_chunk, false, true>(reads.h, memory.weights, m0, memory.v, 0);
}

inline constexpr float mlstm_clamp = 1e-6f;
inline constexpr float mlstm_norm_epsilon = 1e-6f;

/// Scores of the tokens that a chunk reads.
template <class T, int F, int V>
__global__ void __launch_bounds__(128) mlstm_read_kernel(const mlstm_problem<T> problem) {
    using E = mlstm_element<T>;
    const scorer_streams& streams = problem.streams;
    const scorer_span s = streams.span(static_cast<std::int32_t>(blockIdx.x) / streams.slots,
                                       static_cast<std::int32_t>(blockIdx.x) % streams.slots);
    const std::int32_t skipped = max(0, s.begin + streams.delay - s.first);
    if (skipped >= s.count) {
        return;
    }
    const mlstm_read_memory<E, F, V, false> memory(aligned_dynamic_shared());
    const mlstm_frame& frame = problem.frames[problem.chunk(s)];
    mlstm_reads<V> reads;
    read_chunk<F, V>(problem, s, memory, frame.m, reads);
    const int lane = lane_id();
    const std::int64_t at = std::int64_t{s.h} * problem.width;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = 16 * warp_id() + lane / 4 + 8 * r;
        const float inverse = 1.0f / (reads.divisor[r] < mlstm_clamp ? mlstm_clamp : reads.divisor[r]);
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                reads.h[0][j][e] *= inverse;
                square += reads.h[0][j][e] * reads.h[0][j][e];
            }
        }
        float scale = 1.0f;
        if (problem.norm_gain != nullptr) {
            scale = 1.0f / sqrtf(row_sum(square) / static_cast<float>(problem.width) + mlstm_norm_epsilon);
        }
        float score = 0.0f;
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const std::int32_t i = 8 * j + lane % 4 * 2 + e;
                if (i < problem.width) {
                    float x = reads.h[0][j][2 * r + e] * scale;
                    x *= problem.norm_gain != nullptr ? problem.norm_gain[at + i] : 1.0f;
                    score += x / (1.0f + expf(-x)) * problem.readout[at + i];
                }
            }
        }
        score = row_sum(score);
        if (lane % 4 == 0 && l >= skipped && l < s.count) {
            score += problem.readout_bias != nullptr ? problem.readout_bias[s.h] : 0.0f;
            score += problem.skip != nullptr ? problem.skipped[s.row(streams.slots) + l] : 0.0f;
            problem.scores.head(s.b, s.h)[s.first + l - streams.delay] = l < frame.bad ? score : NAN;
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
