// BasicMlpScorer on CUDA: one hidden layer per head, and its gradients.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_scorer_weights.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

// ---- one hidden layer ----

/// The numbers of a hidden layer, and where its weights lie in device memory.
template <class T>
struct mlp_params {
    scorer_streams streams;
    scorer_source<T> source;
    const T* w1 = nullptr;      // [heads, width, source.padded]
    const float* b1 = nullptr;  // [heads, hidden] or null
    const float* w2 = nullptr;  // [heads, hidden]
    const float* b2 = nullptr;  // [heads] or null
    std::int32_t hidden = 0;
    std::int32_t width = 0;  // rounded up to 64
    scorer_activation activation = scorer_activation::silu;
};

/// Shared memory of a block's 64 inputs and the slabs of weights that pass by.
template <class T>
struct mlp_memory {
    shared_tile<T> x;
    unsigned char* slabs;
    float* scale_k;
    float* scale_v;
    float* d;     // d score
    float* sums;  // [4][64][2]
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE mlp_memory(unsigned char* memory, std::int32_t padded) {
        shared_parts parts(memory);
        x = parts.tile<T>(scorer_chunk, padded);
        slabs = parts.tile<T>(64, 64).data;
        parts.tile<T>(64, 64);
        scale_k = parts.take<float>(scorer_chunk);
        scale_v = parts.take<float>(scorer_chunk);
        d = parts.take<float>(scorer_chunk);
        sums = parts.take<float>(4 * 64 * 2);
        bytes = parts.bytes();
    }
    /// The inputs of a chunk's tokens; project() waits for them.
    __device__ __forceinline__ void load(const scorer_source<T>& source, const scorer_span& s) const {
        source.norms(s, s.first, 0, s.count, scale_k, scale_v);
        source.load(s, s.first, 0, s.count, scale_k, scale_v, x, 0, source.padded);
    }
};

/// acc = the hidden numbers [n, n + 64) of a chunk, before bias and activation.
template <class T>
__device__ __forceinline__ void project_hidden(float (&acc)[1][8][4], const mlp_params<T>& params,
                                               const scorer_span& s, const mlp_memory<T>& memory,
                                               std::int32_t n) {
    const std::int32_t padded = params.source.padded;
    clear(acc);
    project<8>(acc, memory.x, params.w1 + (std::int64_t{s.h} * params.width + n) * padded, padded,
               memory.slabs);
}

/// Scores of MlpScorer.
/// Grid: a block per chunk of 64 tokens. Block: 128 threads, four warps of 16 tokens. Shared memory:
/// mlp_memory.
/// In: source (k, v) T; w1 [heads, width, padded] T, b1, w2 [heads, hidden] fp32, b2 [heads] fp32.
/// Out: scores [B, heads, S] fp32, overwritten.
/// 1. The inputs of the chunk to shared memory.
/// 2. Per 64 hidden numbers: the product, activation and the readout's sum.
/// 3. Sums over the lanes of a row, to scores.
template <class T>
__global__ void __launch_bounds__(128)
    mlp_kernel(const mlp_params<T> params, const plane_view<float> scores) {
    const scorer_streams& streams = params.streams;
    const scorer_span s = streams.span_of_block();
    if (s.count == 0) {
        return;
    }
    const scorer_source<T>& source = params.source;
    const mlp_memory<T> memory(aligned_dynamic_shared(), source.padded);
    // 1. Inputs.
    memory.load(source, s);
    const std::int64_t at = std::int64_t{s.h} * params.hidden;
    const int lane = lane_id();
    float score[2] = {};
    // 2. 64 hidden numbers at a time.
    for (std::int32_t n = 0; n < params.width; n += 64) {
        float acc[1][8][4];
        project_hidden(acc, params, s, memory, n);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const std::int32_t i = n + 8 * j + lane % 4 * 2 + e % 2;
                if (i < params.hidden) {
                    const float y = acc[0][j][e] + (params.b1 != nullptr ? params.b1[at + i] : 0.0f);
                    float slope;
                    score[e / 2] += activated<false>(params.activation, y, slope) * params.w2[at + i];
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // 3. To scores.
        const float sum = row_sum(score[i]) + (params.b2 != nullptr ? params.b2[s.h] : 0.0f);
        const int r = 16 * warp_id() + lane / 4 + 8 * i;
        if (lane % 4 == 0 && r < s.count) {
            scores.head(s.b, s.h)[s.first + r] = sum;
        }
    }
}

/// d scores of a chunk's tokens, added up in their order.
__device__ __forceinline__ float sum_of_tokens(const float* d, int count) {
    float sum = 0.0f;
    for (int r = 0; r < count; ++r) {
        sum += d[r];
    }
    return sum;
}
/// Sums of 64 hidden columns from n on over the four warps: of d y to sums[0, hidden), of d r act(y) to the
/// next.
__device__ __forceinline__ void sum_hidden_columns(const float* of_warps, std::int32_t n, std::int32_t hidden,
                                                   float* sums) {
    const auto thread = static_cast<int>(threadIdx.x);
    const int kind = thread / 64, i = thread % 64;
    if (n + i < hidden) {
        float sum = 0.0f;
        for (int w = 0; w < 4; ++w) {
            sum += of_warps[(w * 64 + i) * 2 + kind];
        }
        sums[kind * hidden + n + i] = sum;
    }
}

/// Gradients of MlpScorer down to d y, the hidden numbers before their activation.
/// Grid: a block per chunk of 64 tokens. Block: 128 threads, four warps of 16 tokens. Shared memory:
/// mlp_memory.
/// In: as in mlp_kernel, d_scores [B, heads, S] fp32.
/// Out: d_rows [planes, chunks * 64, width] T; partial [planes, chunks, 2 hidden + 1] fp32: sums of d y (b1),
/// of d r act(y) (w2), of d r (b2). Both overwritten.
/// 1. d scores and the inputs to shared memory.
/// 2. Per 64 hidden numbers: the product, d y to d_rows, and the warps' sums of columns.
/// 3. The warps' sums are added.
/// 4. The sum of d r.
template <class T>
__global__ void __launch_bounds__(128)
    mlp_backward_kernel(const mlp_params<T> params, const plane_view<const float> d_scores, T* const d_rows,
                        float* const partial) {
    const scorer_streams& streams = params.streams;
    const scorer_span s = streams.span_of_block();
    const auto thread = static_cast<int>(threadIdx.x);
    const std::int32_t hidden = params.hidden;
    float* const sums =
        partial + (std::int64_t{s.plane} * streams.chunks + s.chunk_index) * (2 * std::int64_t{hidden} + 1);
    if (s.count == 0) {
        for (int i = thread; i <= 2 * hidden; i += 128) {
            sums[i] = 0.0f;
        }
        return;
    }
    const scorer_source<T>& source = params.source;
    const mlp_memory<T> memory(aligned_dynamic_shared(), source.padded);
    // 1. d scores and inputs.
    if (thread < scorer_chunk) {
        memory.d[thread] =
            thread < s.count ? gradient_of_score(streams, d_scores, s, s.first + thread) : 0.0f;
    }
    report_bad_rows(streams, source, s);
    memory.load(source, s);
    const std::int64_t at = std::int64_t{s.h} * hidden;
    const int lane = lane_id(), row = 16 * warp_id() + lane / 4;
    const float d[2] = {memory.d[row], memory.d[row + 8]};
    T* const to = d_rows + s.row(streams.chunks) * params.width;
    // 2. 64 hidden numbers at a time: d y, and sums of columns.
    for (std::int32_t n = 0; n < params.width; n += 64) {
        float acc[1][8][4];
        project_hidden(acc, params, s, memory, n);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            float d_y[2][2], of_act[2] = {}, of_y[2] = {};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const std::int32_t i = n + column + e % 2;
                d_y[e / 2][e % 2] = 0.0f;
                if (i < hidden) {
                    const float y = acc[0][j][e] + (params.b1 != nullptr ? params.b1[at + i] : 0.0f);
                    float slope;
                    of_act[e % 2] += d[e / 2] * activated<true>(params.activation, y, slope);
                    d_y[e / 2][e % 2] = d[e / 2] * params.w2[at + i] * slope;
                    of_y[e % 2] += d_y[e / 2][e % 2];
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (row + 8 * i < s.count) {
                    T* const pair = to + std::int64_t{row + 8 * i} * params.width + n + column;
                    pair[0] = static_cast<T>(d_y[i][0]);
                    pair[1] = static_cast<T>(d_y[i][1]);
                }
#pragma unroll
                for (int step = 4; step < 32; step *= 2) {
                    of_act[i] += __shfl_xor_sync(all_lanes, of_act[i], step);
                    of_y[i] += __shfl_xor_sync(all_lanes, of_y[i], step);
                }
                if (lane < 4) {
                    float* const mine = memory.sums + (warp_id() * 64 + column + i) * 2;
                    mine[0] = of_y[i];
                    mine[1] = of_act[i];
                }
            }
        }
        __syncthreads();
        // 3. The warps' sums of columns.
        sum_hidden_columns(memory.sums, n, hidden, sums);
        __syncthreads();
    }
    // 4. The sum of d r.
    if (thread == 0) {
        sums[2 * hidden] = sum_of_tokens(memory.d, s.count);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
