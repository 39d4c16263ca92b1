// Scores of a few tokens from their hidden states in fp32, W1 being read once: for new tokens of a cache.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/hidden_rows.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/packed_rows.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/scorers/cuda/common/four_weights.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_predictor.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int hidden_layer_warps = 8;
inline constexpr int hidden_layer_threads = 32 * hidden_layer_warps;

/// Tokens first .. first + count - 1 of a call, see predictor_params::token_of, and their hidden layer.
struct hidden_layer_params {
    predictor_params predictor;
    HiddenRows states;          // [B, >= S, width]
    packed_rows packed{};       // of states
    const float* w1 = nullptr;  // [hidden, width]
    std::int64_t first = 0;
    std::int32_t count = 0;
    float* activations = nullptr;  // [count, hidden]
};

/// Number `at` of hidden states.
__device__ inline float hidden_number(const HiddenRows& states, std::int64_t at) {
    switch (states.of) {
        case HiddenRows::type::bf16:
            return static_cast<float>(static_cast<const bf16*>(states.data)[at]);
        case HiddenRows::type::fp16:
            return static_cast<float>(static_cast<const fp16*>(states.data)[at]);
        case HiddenRows::type::fp32:
            return static_cast<const float*>(states.data)[at];
        default:
            return static_cast<float>(static_cast<const double*>(states.data)[at]);
    }
}

/// Of Count numbers in each lane the sums over the lanes: lane l gets Count / 32 of them, from l Count / 32
/// on, or where there are fewer than 32 number l Count / 32. Count is a power of two. Every sum adds up the
/// lanes in one order, whatever Count is.
template <int Count>
__device__ void sum_over_lanes(float (&x)[Count]) {
    int left = Count;
#pragma unroll
    for (int step = 16; step != 0; step /= 2) {
        left /= 2;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            if (i < left) {
                const bool upper = (lane_id() & step) != 0;
                const float given = upper ? x[i] : x[i + left];
                x[i] = (upper ? x[i + left] : x[i]) + __shfl_xor_sync(all_lanes, given, step);
            }
        }
        if (left == 0) {
            x[0] += __shfl_xor_sync(all_lanes, x[0], step);
        }
    }
}

/// The hidden layer of a few tokens: activations[i][j] = act(W1_j . x_i + b1_j), `Units` of them in a block.
/// Grid: ceil(count / Tokens) x ceil(hidden / Units); blocks of one group of tokens follow each other.
/// Block: hidden_layer_threads. Shared memory: states of `slab` columns in fp32, the warps' sums.
/// In: states [B, S, width] of any storage type, w1 [hidden, width] and b1 [hidden] fp32.
/// Out: activations [count, hidden] fp32, overwritten for tokens that count. A token's have the same bits
/// whatever Tokens and Units are and whichever tokens share the block.
///
/// 1. The L2 cache is asked for the block's rows of W1; then the kernel before must have ended.
/// 2. Per slab: states to shared memory; each warp multiplies every eighth 128 columns.
/// 3. Sums over lanes and warps, activations.
template <int Tokens, int Units>
__global__ void __launch_bounds__(hidden_layer_threads)
    hidden_layer_kernel(const __grid_constant__ hidden_layer_params call) {
    constexpr int slab = 8192 / Tokens, sums = Units * Tokens;
    static_assert(slab % (128 * hidden_layer_warps) == 0);
    __shared__ __align__(16) float x[Tokens][slab];
    __shared__ float of_warps[hidden_layer_warps][sums];
    const predictor_params& predictor = call.predictor;
    const std::int32_t hidden = predictor.hidden, width = call.states.width;
    const std::int32_t across = (hidden + Units - 1) / Units;
    const auto block = static_cast<std::int32_t>(blockIdx.x), thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t token = block / across * Tokens, unit = block % across * Units;
    // 1. W1.
    const float* const w1 = call.w1 + std::int64_t{unit} * width;
    const std::int32_t rows = hidden - unit < Units ? hidden - unit : Units;
    const bool in_fours = rows_in_fours(call.w1, width);
    prefetch_weights(w1, std::int64_t{rows} * width, thread, hidden_layer_threads);
    wait_for_kernel_before();
    let_next_kernel_start();  // it waits for the activations
    // 2. Products.
    float sum[sums] = {};
    for (std::int32_t begin = 0; begin < width; begin += slab) {
        const std::int32_t columns = width - begin < slab ? width - begin : slab;
        __syncthreads();
        for (int t = 0; t < Tokens; ++t) {
            const predictor_params::token at =
                predictor.token_of(call.first + (token + t < call.count ? token + t : token));
            const bool there = at.there && token + t < call.count;
            const std::int64_t row = (there ? call.packed.begin(at.b) : 0) + std::int64_t{at.t};
            const std::int64_t from = at.b * call.states.batch_stride + row * call.states.row_stride + begin;
#pragma unroll 4
            for (std::int32_t i = thread; i < (columns + 3) / 4 * 4; i += hidden_layer_threads) {
                x[t][i] = there && i < columns ? hidden_number(call.states, from + i) : 0.0f;
            }
        }
        __syncthreads();
        for (std::int32_t i = 128 * warp_id() + 4 * lane_id(); i < columns; i += 128 * hidden_layer_warps) {
            float4 weight[Units];
#pragma unroll
            for (int j = 0; j < Units; ++j) {
                weight[j] = j < rows ? four_of_row(w1 + std::int64_t{j} * width, begin + i, width, in_fours)
                                     : float4{};
            }
#pragma unroll
            for (int t = 0; t < Tokens; ++t) {
                const auto state = *reinterpret_cast<const float4*>(&x[t][i]);
#pragma unroll
                for (int j = 0; j < Units; ++j) {
                    sum[t * Units + j] = add_four(weight[j], state, sum[t * Units + j]);
                }
            }
        }
    }
    // 3. Sums and activations.
    sum_over_lanes(sum);
    constexpr int each = sums >= 32 ? sums / 32 : 1, sharing = sums >= 32 ? 1 : 32 / sums;
    if (lane_id() % sharing == 0) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            of_warps[warp_id()][lane_id() / sharing * each + i] = sum[i];
        }
    }
    __syncthreads();
    const std::int32_t t = token + thread / Units, j = unit + thread % Units;
    if (thread < sums && t < call.count && j < hidden) {
        float y = predictor.b1 != nullptr ? predictor.b1[j] : 0.0f, slope;
        for (int w = 0; w < hidden_layer_warps; ++w) {
            y += of_warps[w][thread];
        }
        call.activations[std::int64_t{t} * hidden + j] = activated<false>(predictor.activation, y, slope);
    }
}

/// Scores of a few tokens from their hidden layer: r_h = w2_h . activations_i + b2_h.
/// Grid: a warp per token and head, eight per block. Block: 256 threads. Shared memory: none.
/// In: activations [count, hidden], w2 [heads, hidden], b2 [heads] fp32.
/// Out: scores [B, heads, S] fp32, overwritten for rows first .. first + count - 1: 0 for tokens that do not
/// count.
template <class Params>
__global__ void __launch_bounds__(256)
    hidden_readout_kernel(const __grid_constant__ Params call, const plane_view<float> scores) {
    let_next_kernel_start();
    const predictor_params& predictor = call.predictor;
    const std::int32_t heads = predictor.streams.heads, hidden = predictor.hidden;
    const std::int64_t pair = std::int64_t{blockIdx.x} * 8 + warp_id();
    const std::int64_t token = pair / heads;
    const auto head = static_cast<std::int32_t>(pair % heads);
    wait_for_kernel_before();
    if (token >= call.count) {
        return;
    }
    const predictor_params::token at = predictor.token_of(call.first + token);
    float sum = 0.0f;
    if (at.there) {
        const float* const x = call.activations + token * hidden;
        const float* const w = predictor.w2 + std::int64_t{head} * hidden;
#pragma unroll 8
        for (std::int32_t j = lane_id(); j < hidden; j += 32) {
            sum = fmaf(x[j], w[j], sum);
        }
        sum = warp_total(sum) + (predictor.b2 != nullptr ? predictor.b2[head] : 0.0f);
    }
    if (lane_id() == 0) {
        scores.head(at.b, head)[at.t] = sum;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
