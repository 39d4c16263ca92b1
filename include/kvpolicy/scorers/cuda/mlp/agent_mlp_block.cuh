// An MLP's scores of a few tokens of one head by one block, or by several that share its hidden numbers, in
// fp32: for new tokens of a cache.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/check.cuh>
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

/// How hidden numbers are cut into slices, each summed up on its own: by a function of `hidden` alone, so
/// that scores do not depend on the blocks that share them.
struct mlp_slices {
    static constexpr std::int32_t warps = 4;         // that share a slice
    static constexpr std::int32_t rows_of_warp = 4;  // at once
    static constexpr std::int32_t most = 8;

    std::int32_t rows, count;  // of a slice; slices

    __host__ __device__ explicit mlp_slices(std::int32_t hidden)
        : rows((hidden + most * warps * rows_of_warp - 1) / (most * warps * rows_of_warp) * warps *
               rows_of_warp),
          count((hidden + rows - 1) / rows) {}
};

/// Shared memory of a block: inputs of its tokens, and what makes them.
struct mlp_block_memory {
    static constexpr std::int32_t group = 8;  // tokens at once, where there are several

    std::int32_t inputs;
    float* frequencies;  // [head_dim_qk / 2]: of RoPE
    float* scales;       // [block_scorer_tokens, 2]: of the norms
    float* parts;        // [slices, warps of a slice, block_scorer_tokens]
    float* x;            // [padded tokens, inputs]

    __device__ mlp_block_memory(float* memory, std::int32_t inputs_, std::int32_t head_dim_qk)
        : inputs(inputs_),
          frequencies(memory),
          scales(frequencies + head_dim_qk / 2),
          parts(scales + 2 * block_scorer_tokens),
          x(memory + before_inputs(head_dim_qk)) {}

    __host__ __device__ static constexpr std::int32_t padded(std::int32_t tokens) {
        return tokens == 1 ? 1 : (tokens + group - 1) / group * group;
    }
    [[nodiscard]] static constexpr std::size_t floats(std::int32_t tokens, std::int32_t inputs,
                                                      std::int32_t head_dim_qk) {
        return static_cast<std::size_t>(before_inputs(head_dim_qk) + padded(tokens) * inputs);
    }

  private:
    /// A multiple of 4: inputs are read in fours.
    __host__ __device__ static constexpr std::int32_t before_inputs(std::int32_t head_dim_qk) {
        return (head_dim_qk / 2 + 3) / 4 * 4 +
               block_scorer_tokens * (2 + mlp_slices::most * mlp_slices::warps);
    }
};

/// Input, Act: of a BasicMlpScorer; T: of the cache.
template <class Input, class Act, class T>
class agent_mlp_block {
    static constexpr bool gate = std::is_same_v<Input, WriteGateInput>,
                          normalized = gate || std::is_same_v<Input, NormalizedInput>;
    static constexpr scorer_activation activation =
        std::is_same_v<Act, Silu> ? scorer_activation::silu : scorer_activation::gelu_erf;
    static constexpr int rows = mlp_slices::rows_of_warp, turns = 2, columns = 128 * turns;
    static constexpr int group = mlp_block_memory::group, max_groups = block_scorer_tokens / group;

  public:
    __device__ agent_mlp_block(const Input& input, const MlpParameters<const float>& weights,
                               std::int32_t hidden, std::int32_t head, block_share share,
                               std::int32_t head_dim_qk, std::int32_t head_dim_vo, float* shared)
        : input_(input),
          weights_(weights),
          memory_(shared, head_dim_qk + (gate ? head_dim_qk : head_dim_vo), head_dim_qk),
          slices_(hidden),
          hidden_(hidden),
          head_(head),
          head_dim_qk_(head_dim_qk),
          head_dim_vo_(head_dim_vo),
          first_slice_(share.count == 1 ? 0 : share.index),
          end_slice_(share.count == 1 ? slices_.count : share.index + 1),
          w1_(weights.w1 + std::int64_t{head} * hidden * memory_.inputs),
          in_fours_(rows_in_fours(w1_, memory_.inputs)) {}

    /// Before the kernels before have ended: the L2 cache is asked for the block's rows of W1.
    __device__ void prepare() const {
        const std::int32_t first = first_slice_ * slices_.rows, end = end_of(end_slice_ - 1);
        prefetch_weights(w1_ + std::int64_t{first} * memory_.inputs,
                         std::int64_t{end - first} * memory_.inputs, thread(), threads());
    }

    /// Scores of `count` tokens, or the share's part. By all threads.
    __device__ void run(const block_token<T>* tokens, std::int32_t count) {
        if (count == 1) {
            project<1>(tokens, count);
        } else {
            project<group>(tokens, count);
        }
        __syncthreads();
        if (thread() < count && tokens[thread()].key != nullptr) {
            float score = 0.0f;
            for (std::int32_t slice = first_slice_; slice < end_slice_; ++slice) {
                const float* const part = part_of(slice, 0) + thread();
                constexpr std::int32_t next = block_scorer_tokens;
                float sum = (part[0] + part[next]) + (part[2 * next] + part[3 * next]);
                if (slice == 0 && weights_.b2 != nullptr) {
                    sum += weights_.b2[head_];
                }
                score = slice == first_slice_ ? sum : score + sum;
            }
            *tokens[thread()].score = score;
        }
    }

  private:
    [[nodiscard]] __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }
    [[nodiscard]] __device__ static std::int32_t threads() { return static_cast<std::int32_t>(blockDim.x); }
    [[nodiscard]] __device__ std::int32_t end_of(std::int32_t slice) const {
        const std::int32_t end = (slice + 1) * slices_.rows;
        return end < hidden_ ? end : hidden_;
    }
    [[nodiscard]] __device__ float* part_of(std::int32_t slice, std::int32_t warp) const {
        return memory_.parts + ((slice - first_slice_) * mlp_slices::warps + warp) * block_scorer_tokens;
    }

    /// The tokens' inputs to shared memory; 0 where there is no token.
    __device__ void gather(const block_token<T>* tokens, std::int32_t count) {
        constexpr int each = is_half<T> ? 8 : 1;  // 16-bit rows are multiples of 16 bytes
        struct alignas(each * sizeof(T)) piece {
            T of[each];
        };
        const std::int32_t of_key = head_dim_qk_ / each, across = memory_.inputs / each,
                           skipped = gate ? of_key : 0;  // the key before RoPE is made of the stored one
#pragma unroll 4
        for (std::int32_t i = thread(); i < mlp_block_memory::padded(count) * across; i += threads()) {
            const std::int32_t t = i / across, c = i % across;
            const block_token<T> token = t < count ? tokens[t] : block_token<T>{};
            float* const to = memory_.x + t * memory_.inputs + c * each;
            if (token.key == nullptr || c < skipped) {
#pragma unroll
                for (int e = 0; e < each; ++e) {
                    to[e] = 0.0f;
                }
                continue;
            }
            const std::int32_t at = c - skipped;
            const piece numbers = *reinterpret_cast<const piece*>(
                at < of_key ? token.key + at * each : token.value + (at - of_key) * each);
#pragma unroll
            for (int e = 0; e < each; ++e) {
                to[e] = static_cast<float>(numbers.of[e]);
            }
        }
        if constexpr (gate) {
            const float* const given = input_.rope.frequencies;
            for (std::int32_t i = thread(); i < rotated() / 2; i += threads()) {
                memory_.frequencies[i] =
                    given != nullptr ? given[i] : rope_frequency<float>(input_.rope.base, i, rotated());
            }
        }
        __syncthreads();
        if constexpr (normalized) {
            find_scales(count);
            __syncthreads();
            if constexpr (gate) {
                make_gate_inputs(tokens, count);
            } else {
                for (std::int32_t i = thread(); i < count * memory_.inputs; i += threads()) {
                    const std::int32_t t = i / memory_.inputs, c = i % memory_.inputs;
                    memory_.x[i] *= memory_.scales[2 * t + (c < head_dim_qk_ ? 0 : 1)];
                }
            }
            __syncthreads();
        }
    }

    /// The factors of RMSNorm of both halves, a warp per token. A gate's halves have one norm.
    __device__ void find_scales(std::int32_t count) {
        for (std::int32_t t = warp_id(); t < count; t += threads() / 32) {
            const float* const row = memory_.x + t * memory_.inputs;
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
                    memory_.scales[2 * t + half] = scale;
                }
            }
        }
    }

    [[nodiscard]] __device__ std::int32_t rotated() const {
        return input_.rope.layout == rope_layout::none ? 0
               : input_.rope.dims == 0                 ? head_dim_qk_
                                                       : input_.rope.dims;
    }
    /// Both halves of a gate's input from the stored key in the second: keys before RoPE, and the norm. A
    /// thread has a pair of numbers, or one that is not rotated.
    __device__ void make_gate_inputs(const block_token<T>* tokens, std::int32_t count) {
        const std::int32_t pairs = rotated() / 2, across = pairs + head_dim_qk_ - rotated();
        const bool neighbors = input_.rope.layout == rope_layout::interleaved;
        for (std::int32_t i = thread(); i < count * across; i += threads()) {
            const std::int32_t t = i / across, p = i % across;
            float* const before = memory_.x + t * memory_.inputs;
            float* const stored = before + head_dim_qk_;
            const float scale = memory_.scales[2 * t + 1];
            if (p >= pairs) {
                const std::int32_t c = p + pairs;
                before[c] = stored[c] *= scale;
                continue;
            }
            const std::int32_t a = neighbors ? 2 * p : p, b = neighbors ? 2 * p + 1 : p + pairs;
            float sine, cosine;  // as exact as the host's, whatever the rows' type
            rope_sine<float>(rope_angle(tokens[t].position, memory_.frequencies[p]), sine, cosine);
            const float x = stored[a], y = stored[b];
            before[a] = (x * cosine + y * sine) * scale;
            before[b] = (y * cosine - x * sine) * scale;
            stored[a] = x * scale;
            stored[b] = y * scale;
        }
    }

    /// Makes the inputs, and leaves the warps' parts of the slices' sums in `parts`: a warp multiplies four
    /// rows of W1 at a time by the tokens, Most at once, and each lane has one activation.
    template <int Most>
    __device__ void project(const block_token<T>* tokens, std::int32_t count) {
        constexpr int groups = Most == 1 ? 1 : max_groups, apart = Most == 1 ? 8 : 1;
        const std::int32_t warp = warp_id() % mlp_slices::warps,
                           first = first_slice_ + warp_id() / mlp_slices::warps,
                           step = threads() / 32 / mlp_slices::warps;
        const bool one_turn = memory_.inputs <= columns;
        float4 weight[rows][turns];
        load(first * slices_.rows + rows * warp, 0, weight);  // under way while inputs are made
        gather(tokens, count);
        for (std::int32_t slice = first; slice < end_slice_; slice += step) {
            const std::int32_t begin = slice * slices_.rows + rows * warp, end = end_of(slice);
            float part[groups] = {};
            for (std::int32_t unit = begin; unit < end; unit += rows * mlp_slices::warps) {
                if (slice != first || unit != begin) {
                    load(unit, 0, weight);
                }
                const std::int32_t mine = unit + lane_id() / apart % rows;
                const bool active = mine < hidden_;
                const std::int64_t index = std::int64_t{head_} * hidden_ + mine;
                const float bias = active && weights_.b1 != nullptr ? weights_.b1[index] : 0.0f,
                            out = active ? weights_.w2[index] : 0.0f;
#pragma unroll
                for (int g = 0; g < groups; ++g) {
                    if (g * Most >= count) {
                        break;
                    }
                    float sum[rows * Most] = {};
                    for (std::int32_t column = 0; column < memory_.inputs; column += columns) {
                        if (!one_turn && (column != 0 || g != 0)) {
                            load(unit, column, weight);
                        }
                        multiply<Most>(g * Most, column, weight, sum);
                    }
                    sum_over_lanes(sum);  // lane 4 t + r: row r, token t; or lane 8 r
                    float slope;
                    float score = out * activated<false>(activation, bias + sum[0], slope);
                    score += __shfl_xor_sync(all_lanes, score, apart);
                    score += __shfl_xor_sync(all_lanes, score, 2 * apart);
                    part[g] += score;
                }
            }
            if (lane_id() % (rows * apart) == 0) {
#pragma unroll
                for (int g = 0; g < groups; ++g) {
                    part_of(slice, warp)[g * Most + (Most == 1 ? 0 : lane_id() / rows)] = part[g];
                }
            }
        }
    }

    /// A lane's numbers of rows unit .. unit + 3 of W1, from a column on; 0 beyond them.
    __device__ void load(std::int32_t unit, std::int32_t column, float4 (&weight)[rows][turns]) const {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
#pragma unroll
            for (int i = 0; i < turns; ++i) {
                weight[r][i] = unit + r < hidden_
                                   ? four_of_row(w1_ + std::int64_t{unit + r} * memory_.inputs,
                                                 column + 128 * i + 4 * lane_id(), memory_.inputs, in_fours_)
                                   : float4{};
            }
        }
    }
    /// sum[rows t + r] += a lane's part of row r times the input of token `token` + t.
    template <int Most>
    __device__ void multiply(std::int32_t token, std::int32_t column, const float4 (&weight)[rows][turns],
                             float (&sum)[rows * Most]) const {
#pragma unroll
        for (int i = 0; i < turns; ++i) {
            const std::int32_t at = column + 128 * i + 4 * lane_id();
            if (at < memory_.inputs) {
#pragma unroll
                for (int t = 0; t < Most; ++t) {
                    const auto x =
                        *reinterpret_cast<const float4*>(memory_.x + (token + t) * memory_.inputs + at);
#pragma unroll
                    for (int r = 0; r < rows; ++r) {
                        sum[rows * t + r] = add_four(weight[r][i], x, sum[rows * t + r]);
                    }
                }
            }
        }
    }

    const Input& input_;
    const MlpParameters<const float>& weights_;
    mlp_block_memory memory_;
    mlp_slices slices_;
    std::int32_t hidden_, head_, head_dim_qk_, head_dim_vo_, first_slice_, end_slice_;
    const float* w1_;
    bool in_fours_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
