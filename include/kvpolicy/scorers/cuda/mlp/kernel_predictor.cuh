// What surrounds the products of a predictor on hidden states: activations, the heads' sums, and back.
//
// Rows are a call's tokens one after the other: row r is token r % per of sequence r / per, `per` a sequence.
// y holds products of some of them, [rows, padded], without bias.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_mlp.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

struct predictor_params {
    scorer_streams streams;                 // batch, heads, length, lengths, starts; no edges
    const std::int32_t* seq_ids = nullptr;  // [batch]: below 0 where an entry is only padding; null: none is
    std::int32_t per = 0;
    std::int32_t hidden = 0, padded = 0;
    scorer_activation activation = scorer_activation::silu;
    const float* b1 = nullptr;  // [hidden] or null
    const float* w2 = nullptr;  // [heads, hidden]
    const float* b2 = nullptr;  // [heads] or null

    struct token {
        std::int32_t b, t;
        bool there;
    };
    __device__ token token_of(std::int64_t row) const {
        token of{static_cast<std::int32_t>(row / per), static_cast<std::int32_t>(row % per), false};
        const std::int32_t start = streams.start_of(of.b), length = streams.length_of(of.b);
        const bool padding = seq_ids != nullptr && seq_ids[of.b] < 0;
        of.there = !padding && of.t >= start && of.t - start < length;
        return of;
    }
};

/// Weights rounded to T, with zeros below.
/// Grid: strided. Block: 256 threads. Shared memory: none.
/// In: from [count] fp32.
/// Out: to [all] T, overwritten, 0 from `count` on.
template <class T>
__global__ void __launch_bounds__(256) cast_weights_kernel(const float* const from, const std::int64_t count,
                                                           const std::int64_t all, T* const to) {
    for (std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x; i < all;
         i += std::int64_t{gridDim.x} * 256) {
        to[i] = static_cast<T>(i < count ? from[i] : 0.0f);
    }
}

inline constexpr int predictor_rows = 4;   // of a warp
inline constexpr int predictor_heads = 8;  // at once

/// Scores of the utility predictor from its hidden products.
/// Grid: eight warps per block, a warp per predictor_rows rows. Block: 256 threads. Shared memory: none.
/// In: y [count, padded] fp32 (cuBLASLt's product), b1 [hidden], w2 [heads, hidden], b2 [heads] fp32.
/// Out: scores [B, heads, S] fp32, overwritten for rows first .. first + count - 1 that are a token's.
/// Per predictor_heads heads: 1. activations, and the lanes' sums over hidden numbers.
/// 2. Sums over the warp, to scores.
template <class Float>
__global__ void __launch_bounds__(256)
    predictor_scores_kernel(const predictor_params params, const Float* const y, const std::int64_t first,
                            const std::int32_t count, const plane_view<Float> scores) {
    const int lane = lane_id();
    const std::int32_t begin = (static_cast<std::int32_t>(blockIdx.x) * 8 + warp_id()) * predictor_rows;
    if (begin >= count) {
        return;
    }
    const Float* rows[predictor_rows];
#pragma unroll
    for (int r = 0; r < predictor_rows; ++r) {
        rows[r] = y + std::int64_t{min(begin + r, count - 1)} * params.padded;
    }
    for (std::int32_t h0 = 0; h0 < params.streams.heads; h0 += predictor_heads) {
        float sums[predictor_rows][predictor_heads] = {};
        for (std::int32_t j = lane; j < params.hidden; j += 32) {
            const float bias = params.b1 != nullptr ? params.b1[j] : 0.0f;
            float act[predictor_rows], slope;
#pragma unroll
            for (int r = 0; r < predictor_rows; ++r) {
                act[r] = activated<false>(params.activation, rows[r][j] + bias, slope);
            }
#pragma unroll
            for (int h = 0; h < predictor_heads; ++h) {
                const float w = h0 + h < params.streams.heads
                                    ? params.w2[std::int64_t{h0 + h} * params.hidden + j]
                                    : 0.0f;
#pragma unroll
                for (int r = 0; r < predictor_rows; ++r) {
                    sums[r][h] += act[r] * w;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < predictor_rows; ++r) {
            const predictor_params::token at = params.token_of(first + min(begin + r, count - 1));
#pragma unroll
            for (int h = 0; h < predictor_heads; ++h) {
                const float sum = warp_sum(sums[r][h]);
                if (lane == h && begin + r < count && at.there && h0 + h < params.streams.heads) {
                    scores.head(at.b, h0 + h)[at.t] = sum + (params.b2 != nullptr ? params.b2[h0 + h] : 0.0f);
                }
            }
        }
    }
}

inline constexpr int predictor_strip = 32;   // rows a thread holds at once
inline constexpr int predictor_block = 128;  // rows and columns of a block

/// Partial sums of a block of rows: b1 [hidden], w2 [heads, hidden], b2 [heads].
KVPOLICY_HOST_DEVICE inline std::int64_t predictor_sums(std::int32_t heads, std::int32_t hidden) {
    return (std::int64_t{heads} + 1) * hidden + heads;
}

/// What gradients are multiplied with where they are rounded to T, and what takes that out of products:
/// `product` for f a b, `sum` for += and `none` for = (cublaslt.cuh, multiply).
struct predictor_factors {
    float product, sum, none, scale;
};

/// The factors of cuBLASLt's products where gradients are scaled.
/// Grid: one block. Block: one thread. Shared memory: none.
/// In: largest [1], the bits of the largest |d score|.
/// Out: to [1], overwritten.
template <class Factors>
__global__ void __launch_bounds__(32)
    predictor_factors_kernel(const std::uint32_t* const largest, Factors* const to) {
    const float scale = gradient_scale(*largest);
    *to = {1.0f / scale, 1.0f, 0.0f, scale};
}

/// d_rows = act'(y) sum over h of d r_h w2_h, and the sums of a group of rows.
/// Grid: (groups of 128 rows) x (padded / 128); blocks of one group follow each other. Block: 128 threads, a
/// column each. Shared memory: d scores of 32 rows and 8 heads, and the rows' tokens.
/// In: y [count, padded] fp32, d_scores [B, heads, S] fp32; fp16: factors->scale.
/// Out: d_rows [count, padded] T, 0 for rows that are no token's (fp16: times factors->scale); partial
/// [groups, (heads + 1) hidden + heads] fp32 (b1, w2, b2). Both overwritten.
/// Per 32 rows: 1. their tokens.
/// 2. Per 8 heads: d scores to shared memory, d act in registers.
/// 3. d y to d_rows, and b1's sum.
/// 4. Per head: w2's sum.
template <class T>
__global__ void __launch_bounds__(predictor_block)
    predictor_backward_kernel(const predictor_params params, const float* const y, const std::int64_t first,
                              const std::int32_t count, const plane_view<const float> d_scores,
                              const predictor_factors* const factors, T* const d_rows, float* const partial) {
    __shared__ float d[predictor_strip][predictor_heads];
    __shared__ std::int32_t b_of[predictor_strip], t_of[predictor_strip];
    const std::int32_t across = (params.padded + predictor_block - 1) / predictor_block;
    const auto thread = static_cast<int>(threadIdx.x);
    const std::int32_t group = static_cast<std::int32_t>(blockIdx.x) / across;
    const std::int32_t j = static_cast<std::int32_t>(blockIdx.x) % across * predictor_block + thread;
    const std::int32_t heads = params.streams.heads, hidden = params.hidden;
    const bool column = j < hidden;
    float* const sums = partial + std::int64_t{group} * predictor_sums(heads, hidden);
    const float bias = column && params.b1 != nullptr ? params.b1[j] : 0.0f;
    const float scale = std::is_same_v<T, fp16> ? factors->scale : 1.0f;
    for (std::int32_t strip = 0; strip < predictor_block; strip += predictor_strip) {
        // 1. The rows' tokens.
        const std::int32_t begin = group * predictor_block + strip;
        const bool begun = strip > 0;  // the sums hold something already
        __syncthreads();
        if (thread < predictor_strip) {
            const predictor_params::token at = params.token_of(first + min(begin + thread, count - 1));
            b_of[thread] = at.b;
            t_of[thread] = begin + thread < count && at.there ? at.t : -1;
        }
        // The gradients of eight heads' scores of these rows; in the first block of the group they are looked
        // at and summed, too.
        const auto load = [&](std::int32_t h0, bool sum) {
            __syncthreads();
            for (int i = thread; i < predictor_strip * predictor_heads; i += predictor_block) {
                const int r = i / predictor_heads, h = i % predictor_heads;
                float x = 0.0f;
                if (t_of[r] >= 0 && h0 + h < heads) {
                    x = d_scores.head(b_of[r], h0 + h)[t_of[r]];
                    if (sum && !isfinite(x)) {
                        params.streams.report(b_of[r], status_not_finite);
                    }
                }
                d[r][h] = x;
            }
            __syncthreads();
            if (sum && thread < predictor_heads && h0 + thread < heads) {
                float of_head = 0.0f;
                for (int r = 0; r < predictor_strip; ++r) {
                    of_head += d[r][thread];
                }
                float& to = sums[(std::int64_t{heads} + 1) * hidden + h0 + thread];
                to = begun ? to + of_head : of_head;
            }
        };
        // 2. d act over all heads.
        float d_act[predictor_strip] = {};
        for (std::int32_t h0 = 0; h0 < heads; h0 += predictor_heads) {
            load(h0, j == thread);
            for (int h = 0; h < predictor_heads && h0 + h < heads; ++h) {
                const float w = column ? params.w2[std::int64_t{h0 + h} * hidden + j] : 0.0f;
#pragma unroll
                for (int r = 0; r < predictor_strip; ++r) {
                    d_act[r] += d[r][h] * w;
                }
            }
        }
        // 3. d y, and b1's sum.
        float act[predictor_strip], of_bias = 0.0f;
#pragma unroll
        for (int r = 0; r < predictor_strip; ++r) {
            float slope = 0.0f;
            act[r] = 0.0f;
            if (column && t_of[r] >= 0) {
                act[r] = activated<true>(params.activation,
                                         y[std::int64_t{begin + r} * params.padded + j] + bias, slope);
                d_act[r] *= slope;
            } else {
                d_act[r] = 0.0f;
            }
            of_bias += d_act[r];
            if (j < params.padded && begin + r < count) {
                d_rows[std::int64_t{begin + r} * params.padded + j] = static_cast<T>(d_act[r] * scale);
            }
        }
        if (column) {
            sums[j] = begun ? sums[j] + of_bias : of_bias;
        }
        // 4. w2's sums.
        for (std::int32_t h0 = 0; h0 < heads; h0 += predictor_heads) {
            if (heads > predictor_heads) {
                load(h0, false);
            }
            for (int h = 0; h < predictor_heads && h0 + h < heads; ++h) {
                float of_head = 0.0f;
#pragma unroll
                for (int r = 0; r < predictor_strip; ++r) {
                    of_head += d[r][h] * act[r];
                }
                if (column) {
                    float& to = sums[(std::int64_t{h0 + h} + 1) * hidden + j];
                    to = begun ? to + of_head : of_head;
                }
            }
        }
    }
}

/// into[i] += sum over groups of partial[group][at + i], in their order: the same bits in every run.
/// Grid: a thread per number. Block: 256 threads. Shared memory: none.
/// In: partial [groups, width].
/// Out: into [count], accumulated.
template <class Float>
__global__ void __launch_bounds__(256)
    predictor_sums_kernel(const Float* const partial, const std::int32_t groups, const std::int64_t width,
                          const std::int64_t at, const std::int64_t count, Float* const into) {
    const std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
    if (i >= count) {
        return;
    }
    Float sum = 0;
    for (std::int32_t g = 0; g < groups; ++g) {
        sum += partial[g * width + at + i];
    }
    into[i] += sum;
}

/// Hidden states of rows first .. first + count - 1, 0 for rows that are no token's; reports those that are
/// not finite.
/// Grid: strided, a block per row. Block: 256 threads. Shared memory: none.
/// In: hidden [B, S, width] T.
/// Out: to [count, width] T, overwritten; null: only checked. status_not_finite by atomic or.
template <class T>
__global__ void __launch_bounds__(256)
    read_hidden_kernel(const predictor_params params, const rows_view<const T> hidden,
                       const std::int64_t first, const std::int32_t count, T* const to) {
    for (std::int32_t row = static_cast<std::int32_t>(blockIdx.x); row < count;
         row += static_cast<std::int32_t>(gridDim.x)) {
        const predictor_params::token at = params.token_of(first + row);
        const T* const from = hidden.row(at.b, 0, at.t);
        bool finite = true;
        for (auto i = static_cast<std::int32_t>(threadIdx.x); i < hidden.dim; i += 256) {
            const T x = at.there ? from[i] : static_cast<T>(0.0f);
            finite = finite && isfinite(static_cast<float>(x));
            if (to != nullptr) {
                to[std::int64_t{row} * hidden.dim + i] = x;
            }
        }
        if (!finite) {
            params.streams.report(at.b, status_not_finite);
        }
    }
}

/// Gradients of hidden states to the rows that are a token's.
/// Grid: strided, a block per row. Block: 256 threads. Shared memory: none.
/// In: from [count, width] fp32.
/// Out: to [B, S, width], overwritten for tokens of the call.
template <class Float>
__global__ void __launch_bounds__(256)
    write_hidden_kernel(const predictor_params params, const Float* const from, const std::int64_t first,
                        const std::int32_t count, const rows_view<Float> to) {
    for (std::int32_t row = static_cast<std::int32_t>(blockIdx.x); row < count;
         row += static_cast<std::int32_t>(gridDim.x)) {
        const predictor_params::token at = params.token_of(first + row);
        for (auto i = static_cast<std::int32_t>(threadIdx.x); at.there && i < to.dim; i += 256) {
            to.row(at.b, 0, at.t)[i] = from[std::int64_t{row} * to.dim + i];
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
