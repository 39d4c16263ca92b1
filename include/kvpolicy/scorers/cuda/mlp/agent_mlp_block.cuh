// An MLP's scores of a few tokens of one head by one block, in fp32: for new tokens of a cache.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/four_weights.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>
#include <kvpolicy/scorers/mlp.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Shared memory of a block: inputs of its tokens, and what makes them.
struct mlp_block_memory {
    std::int32_t inputs, stride;
    float* x;            // [block_scorer_tokens, stride]
    float* sums;         // [warps, block_scorer_tokens]
    float* scales;       // [block_scorer_tokens, 2]: of the norms
    float* frequencies;  // [head_dim_qk / 2]: of RoPE

    __device__ mlp_block_memory(float* memory, bool gate, std::int32_t head_dim_qk, std::int32_t head_dim_vo)
        : inputs(head_dim_qk + (gate ? head_dim_qk : head_dim_vo)),
          stride(stride_of(inputs)),
          x(memory),
          sums(x + block_scorer_tokens * stride),
          scales(sums + block_scorer_threads / 32 * block_scorer_tokens),
          frequencies(scales + 2 * block_scorer_tokens) {}

    __host__ __device__ static constexpr std::int32_t stride_of(std::int32_t inputs) {
        return (inputs + 3) / 4 * 4;
    }
    [[nodiscard]] static constexpr std::size_t floats(std::int32_t inputs, std::int32_t head_dim_qk) {
        return static_cast<std::size_t>(
            block_scorer_tokens * (stride_of(inputs) + block_scorer_threads / 32 + 2) + head_dim_qk / 2);
    }
};

/// Input, Act: of a BasicMlpScorer; Tokens: see device_scorer_defaults::by_block.
template <class Input, class Act, class Tokens>
class agent_mlp_block {
    static constexpr bool gate = std::is_same_v<Input, WriteGateInput>,
                          normalized = gate || std::is_same_v<Input, NormalizedInput>;
    static constexpr scorer_activation activation =
        std::is_same_v<Act, Silu> ? scorer_activation::silu : scorer_activation::gelu_erf;
    static constexpr int warps = block_scorer_threads / 32;

  public:
    __device__ agent_mlp_block(const Input& input, const MlpParameters<const float>& weights,
                               std::int32_t hidden, std::int32_t head, const Tokens& tokens,
                               std::int32_t head_dim_qk, std::int32_t head_dim_vo, float* shared)
        : input_(input),
          weights_(weights),
          tokens_(tokens),
          memory_(shared, gate, head_dim_qk, head_dim_vo),
          hidden_(hidden),
          head_(head),
          head_dim_qk_(head_dim_qk),
          head_dim_vo_(head_dim_vo) {}

    /// Scores of `count` tokens, the first at position `first`. By all threads.
    __device__ void run(position_t first, std::int32_t count, float* scores) {
        const std::int64_t each = std::int64_t{hidden_} * memory_.inputs;
        w1_ = weights_.w1 + head_ * each;
        prefetch_weights(w1_, each, thread(), block_scorer_threads);
        gather(first, count);
        if (count == 1) {
            project<1>(count);
        } else {
            project<block_scorer_tokens>(count);
        }
        __syncthreads();
        if (thread() < count) {
            float sum = weights_.b2 != nullptr ? weights_.b2[head_] : 0.0f;
            for (int w = 0; w < warps; ++w) {
                sum += memory_.sums[w * block_scorer_tokens + thread()];
            }
            scores[thread()] = sum;
        }
    }

  private:
    [[nodiscard]] __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }

    /// The tokens' inputs to shared memory, with 0 up to the stride.
    __device__ void gather(position_t first, std::int32_t count) {
        const std::int32_t inputs = memory_.inputs, stride = memory_.stride;
        for (std::int32_t t = 0; t < count; ++t) {
            float* const row = memory_.x + t * stride;
            const auto* const key = tokens_.key(t);
            for (std::int32_t i = thread(); i < head_dim_qk_; i += block_scorer_threads) {
                row[(gate ? head_dim_qk_ : 0) + i] = static_cast<float>(key[i]);
            }
            if constexpr (!gate) {
                const auto* const value = tokens_.value(t);
                for (std::int32_t i = thread(); i < head_dim_vo_; i += block_scorer_threads) {
                    row[head_dim_qk_ + i] = static_cast<float>(value[i]);
                }
            }
            if (thread() < stride - inputs) {
                row[inputs + thread()] = 0.0f;
            }
        }
        if constexpr (gate) {
            fill_frequencies();
        }
        __syncthreads();
        if constexpr (normalized) {
            find_scales(count);
            if constexpr (gate) {
                undo_rope(first, count);
            }
            __syncthreads();
            for (std::int32_t i = thread(); i < count * inputs; i += block_scorer_threads) {
                const std::int32_t t = i / inputs, c = i % inputs;
                memory_.x[t * stride + c] *= memory_.scales[2 * t + (c < head_dim_qk_ ? 0 : 1)];
            }
            __syncthreads();
        }
    }

    /// The factors of RMSNorm of both halves, a warp per token. A gate's halves have one norm.
    __device__ void find_scales(std::int32_t count) {
        static_assert(block_scorer_tokens <= warps);
        if (warp_id() >= count) {
            return;
        }
        const float* const row = memory_.x + warp_id() * memory_.stride;
        for (int half = gate ? 1 : 0; half < 2; ++half) {
            const std::int32_t begin = half == 0 ? 0 : head_dim_qk_,
                               dim = half == 0 ? head_dim_qk_ : memory_.inputs - head_dim_qk_;
            float squares = 0.0f;
            for (std::int32_t i = lane_id(); i < dim; i += 32) {
                squares = fmaf(row[begin + i], row[begin + i], squares);
            }
            const float scale =
                1.0f / sqrtf(warp_total(squares) / static_cast<float>(dim) + input_.norm.epsilon);
            if (lane_id() == 0) {
                memory_.scales[2 * warp_id() + half] = scale;
                if (gate) {
                    memory_.scales[2 * warp_id()] = scale;
                }
            }
        }
    }

    [[nodiscard]] __device__ std::int32_t rotated() const {
        return input_.rope.layout == rope_layout::none ? 0
               : input_.rope.dims == 0                 ? head_dim_qk_
                                                       : input_.rope.dims;
    }
    __device__ void fill_frequencies() {
        const float* const given = input_.rope.frequencies;
        for (std::int32_t i = thread(); i < rotated() / 2; i += block_scorer_threads) {
            memory_.frequencies[i] =
                given != nullptr ? given[i] : rope_frequency<float>(input_.rope.base, i, rotated());
        }
    }
    /// The first half from the second: keys before RoPE.
    __device__ void undo_rope(position_t first, std::int32_t count) {
        scorer_source<float> source;  // sines as exact as the host's, whatever the rows' type
        source.layout = input_.rope.layout;
        source.rotated = rotated();
        source.frequencies = memory_.frequencies;
        for (std::int32_t i = thread(); i < count * head_dim_qk_; i += block_scorer_threads) {
            const std::int32_t t = i / head_dim_qk_, c = i % head_dim_qk_;
            float* const row = memory_.x + t * memory_.stride;
            const float* const stored = row + head_dim_qk_;
            row[c] = source.turned(c, first + t, -1.0f, [&](std::int32_t j) { return stored[j]; });
        }
    }

    /// Each warp's part of the scores to `sums`: a warp has four rows of W1 at a time, and a lane the
    /// activations of one of them.
    template <int Most>
    __device__ void project(std::int32_t count) {
        constexpr int group = 4;                  // rows
        constexpr int rows = Most == 1 ? 4 : 2;   // at once, so that their loads overlap
        constexpr int turns = Most == 1 ? 2 : 1;  // of 128 columns, alike
        float score[Most] = {};
        for (std::int32_t unit = warp_id() * group; unit < hidden_; unit += warps * group) {
            const std::int32_t mine = unit + lane_id();
            const bool active = lane_id() < group && mine < hidden_;
            const std::int64_t index = std::int64_t{head_} * hidden_ + mine;
            const float bias = active && weights_.b1 != nullptr ? weights_.b1[index] : 0.0f,
                        out = active ? weights_.w2[index] : 0.0f;
            float y[Most];
#pragma unroll
            for (int t = 0; t < Most; ++t) {
                y[t] = bias;
            }
#pragma unroll
            for (int first = 0; first < group; first += rows) {
                float sum[rows][Most] = {};
                multiply<Most, rows, turns>(unit + first, count, sum);
#pragma unroll
                for (int t = 0; t < Most; ++t) {
#pragma unroll
                    for (int r = 0; r < rows; ++r) {
                        const float total = warp_total(sum[r][t]);
                        y[t] += lane_id() == first + r ? total : 0.0f;
                    }
                }
            }
#pragma unroll
            for (int t = 0; t < Most; ++t) {
                float slope;
                score[t] = active ? fmaf(out, activated<false>(activation, y[t], slope), score[t]) : score[t];
            }
        }
#pragma unroll
        for (int t = 0; t < Most; ++t) {
            const float total = warp_total(score[t]);
            if (lane_id() == 0) {
                memory_.sums[warp_id() * block_scorer_tokens + t] = total;
            }
        }
    }

    /// A lane's part of rows unit .. unit + Rows - 1 of W1 times the tokens' inputs.
    template <int Most, int Rows, int Turns>
    __device__ void multiply(std::int32_t unit, std::int32_t count, float (&sum)[Rows][Most]) {
        const std::int32_t inputs = memory_.inputs;
        const bool in_fours = rows_in_fours(w1_, inputs);
        for (std::int32_t begin = 4 * lane_id(); begin < inputs; begin += 128 * Turns) {
            float4 weight[Rows][Turns];
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
#pragma unroll
                for (int i = 0; i < Turns; ++i) {
                    weight[r][i] = unit + r < hidden_ ? four_of_row(w1_ + std::int64_t{unit + r} * inputs,
                                                                    begin + 128 * i, inputs, in_fours)
                                                      : float4{};
                }
            }
#pragma unroll
            for (int i = 0; i < Turns; ++i) {
#pragma unroll
                for (int t = 0; t < Most; ++t) {
                    if (t < count && begin + 128 * i < inputs) {
                        const auto x = *reinterpret_cast<const float4*>(memory_.x + t * memory_.stride +
                                                                        begin + 128 * i);
#pragma unroll
                        for (int r = 0; r < Rows; ++r) {
                            sum[r][t] = add_four(weight[r][i], x, sum[r][t]);
                        }
                    }
                }
            }
        }
    }

    const Input& input_;
    const MlpParameters<const float>& weights_;
    const Tokens& tokens_;
    mlp_block_memory memory_;
    std::int32_t hidden_, head_, head_dim_qk_, head_dim_vo_;
    const float* w1_ = nullptr;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
