// Scores of a few tokens from their hidden states in fp32, for new tokens of a cache: the hidden layer, and
// the heads' sums.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/hidden_rows.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/packed_rows.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
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
inline constexpr int hidden_layer_tokens = 32;  // that a block reads its rows of W1 for, at most

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

/// Four numbers of hidden states of T, where rows are aligned to four; on their way as they are stored. A row
/// is given by its first number; below 0 there is none, and all numbers are 0.
template <class T>
struct aligned_states {
    struct alignas(4 * sizeof(T)) four {
        T of[4];
    };
    const T* data;

    __device__ explicit aligned_states(const HiddenRows& states) : data(static_cast<const T*>(states.data)) {}
    [[nodiscard]] __device__ const void* place(std::int64_t at) const { return data + at; }
    [[nodiscard]] __device__ four read(std::int64_t row, std::int32_t i, std::int32_t width) const {
        return row < 0 || i >= width ? four{} : *reinterpret_cast<const four*>(data + row + i);
    }
    [[nodiscard]] __device__ static float4 numbers(const four& x) {
        return {static_cast<float>(x.of[0]), static_cast<float>(x.of[1]), static_cast<float>(x.of[2]),
                static_cast<float>(x.of[3])};
    }
};
/// The same of any storage type and alignment.
struct any_states {
    using four = float4;
    const HiddenRows& states;

    __device__ explicit any_states(const HiddenRows& from) : states(from) {}
    [[nodiscard]] __device__ float number(std::int64_t at) const {
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
    [[nodiscard]] __device__ const void* place(std::int64_t at) const {
        const std::int64_t bytes = states.of == HiddenRows::type::fp64   ? 8
                                   : states.of == HiddenRows::type::fp32 ? 4
                                                                         : 2;
        return static_cast<const unsigned char*>(states.data) + at * bytes;
    }
    [[nodiscard]] __device__ static float4 numbers(float4 x) { return x; }
    [[nodiscard]] __device__ float4 read(std::int64_t row, std::int32_t i, std::int32_t width) const {
        if (row < 0) {
            return {};
        }
        return {i < width ? number(row + i) : 0.0f, i + 1 < width ? number(row + i + 1) : 0.0f,
                i + 2 < width ? number(row + i + 2) : 0.0f, i + 3 < width ? number(row + i + 3) : 0.0f};
    }
};
/// Whether aligned_states<T> can read them.
template <class T>
__device__ bool states_in_fours(const HiddenRows& states) {
    return states.width % 4 == 0 && states.row_stride % 4 == 0 && states.batch_stride % 4 == 0 &&
           reinterpret_cast<std::uintptr_t>(states.data) % (4 * sizeof(T)) == 0;
}

/// The work of a block of hidden_layer_kernel. A warp has every eighth 128 columns, a lane four of them.
/// Tokens: at once.
template <int Tokens, int Units>
class agent_hidden_layer {
    static constexpr int turns = Units == 8 ? 1 : 4;  // loads of a row of W1 under way at once
    static constexpr int sums = Units * Tokens;
    static constexpr std::int32_t stride = 128 * hidden_layer_warps;

  public:
    static constexpr int groups = Tokens == 1 ? 1 : hidden_layer_tokens / Tokens, tokens = groups * Tokens;
    struct Memory {
        float of_warps[groups][hidden_layer_warps][sums];
        std::int64_t rows[tokens];  // of the states; below 0: none
    };

    __device__ agent_hidden_layer(const hidden_layer_params& call, Memory& memory)
        : call_(call),
          memory_(memory),
          hidden_(call.predictor.hidden),
          width_(call.states.width),
          in_fours_(rows_in_fours(call.w1, call.states.width)) {
        const auto block = static_cast<std::int32_t>(blockIdx.x);
        token_ = block / across() * tokens;
        unit_ = block % across() * Units;
        count_ = call.count - token_ < tokens ? call.count - token_ : tokens;
    }
    __device__ void prefetch() const {
        const std::int32_t rows = hidden_ - unit_ < Units ? hidden_ - unit_ : Units;
        prefetch_weights(call_.w1 + std::int64_t{unit_} * width_, std::int64_t{rows} * width_, thread(),
                         hidden_layer_threads);
    }
    __device__ void run() {
        const HiddenRows& states = call_.states;
        if (states.of == HiddenRows::type::bf16 && states_in_fours<bf16>(states)) {
            run_with(aligned_states<bf16>(states));
        } else if (states.of == HiddenRows::type::fp16 && states_in_fours<fp16>(states)) {
            run_with(aligned_states<fp16>(states));
        } else {
            run_with(any_states(states));
        }
    }

  private:
    [[nodiscard]] __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }
    /// Blocks that have the same tokens.
    [[nodiscard]] __device__ std::int32_t across() const { return (hidden_ + Units - 1) / Units; }

    template <class States>
    __device__ void run_with(const States& states) {
        const std::int32_t begin = 128 * warp_id() + 4 * lane_id();
        const bool one_turn = width_ <= stride * turns;
        float4 weight[turns][Units];
        load(begin, weight);  // under way while the tokens' rows are found
        if (thread() < tokens) {
            memory_.rows[thread()] = row_of(thread());
        }
        __syncthreads();
        ask_for(states);
        for (int g = 0; g < groups && g * Tokens < count_; ++g) {
            float sum[sums] = {};
            for (std::int32_t column = begin; column < width_; column += stride * turns) {
                if (!one_turn && (column != begin || g != 0)) {
                    load(column, weight);
                }
                multiply(states, g * Tokens, column, weight, sum);
            }
            sum_over_lanes(sum);
            constexpr int each = sums >= 32 ? sums / 32 : 1, sharing = sums >= 32 ? 1 : 32 / sums;
            if (lane_id() % sharing == 0) {
#pragma unroll
                for (int i = 0; i < each; ++i) {
                    memory_.of_warps[g][warp_id()][lane_id() / sharing * each + i] = sum[i];
                }
            }
        }
        __syncthreads();
        activate();
    }
    /// Has the L2 cache read the block's share of its tokens' states. The step that follows asks the memory
    /// for much more, and states that come behind that, one after another, are late.
    template <class States>
    __device__ void ask_for(const States& states) const {
        constexpr std::int32_t numbers = sizeof(typename States::four) == 8 ? 64 : 16;  // at most 128 bytes
        const std::int32_t lines = (width_ + numbers - 1) / numbers,
                           block = unit_ / Units * hidden_layer_threads;
        for (std::int32_t i = block + thread(); i < count_ * lines; i += across() * hidden_layer_threads) {
            const std::int64_t row = memory_.rows[i / lines];
            if (row >= 0) {
                ask_for_line(states.place(row + i % lines * numbers));
            }
        }
    }
    /// Where the state of a token of the block begins, below 0 where it does not count.
    [[nodiscard]] __device__ std::int64_t row_of(std::int32_t t) const {
        if (t >= count_) {
            return -1;
        }
        const predictor_params::token at = call_.predictor.token_of(call_.first + token_ + t);
        if (!at.there) {
            return -1;
        }
        const std::int64_t row = call_.packed.begin(at.b) + std::int64_t{at.t};
        return at.b * call_.states.batch_stride + row * call_.states.row_stride;
    }
    /// A lane's numbers of the block's rows of W1, from a column on; 0 beyond them.
    __device__ void load(std::int32_t column, float4 (&weight)[turns][Units]) const {
#pragma unroll
        for (int i = 0; i < turns; ++i) {
#pragma unroll
            for (int j = 0; j < Units; ++j) {
                weight[i][j] = unit_ + j < hidden_ ? four_of_row(call_.w1 + std::int64_t{unit_ + j} * width_,
                                                                 column + stride * i, width_, in_fours_)
                                                   : float4{};
            }
        }
    }
    template <class States>
    __device__ void multiply(const States& states, int first, std::int32_t column,
                             const float4 (&weight)[turns][Units], float (&sum)[sums]) const {
#pragma unroll
        for (int t = 0; t < Tokens; ++t) {
            const std::int64_t row = memory_.rows[first + t];
            typename States::four state[turns];
#pragma unroll
            for (int i = 0; i < turns; ++i) {
                state[i] = states.read(row, column + stride * i, width_);
            }
#pragma unroll
            for (int i = 0; i < turns; ++i) {
                const float4 numbers = States::numbers(state[i]);
#pragma unroll
                for (int j = 0; j < Units; ++j) {
                    sum[t * Units + j] = add_four(weight[i][j], numbers, sum[t * Units + j]);
                }
            }
        }
    }
    /// Sums over the warps in order, and activations.
    __device__ void activate() const {
        for (std::int32_t i = thread(); i < count_ * Units; i += hidden_layer_threads) {
            const std::int32_t t = i / Units, unit = unit_ + i % Units;
            if (unit < hidden_) {
                float y = call_.predictor.b1 != nullptr ? call_.predictor.b1[unit] : 0.0f, slope;
                for (int w = 0; w < hidden_layer_warps; ++w) {
                    y += memory_.of_warps[t / Tokens][w][t % Tokens * Units + i % Units];
                }
                call_.activations[std::int64_t{token_ + t} * hidden_ + unit] =
                    activated<false>(call_.predictor.activation, y, slope);
            }
        }
    }

    const hidden_layer_params& call_;
    Memory& memory_;
    std::int32_t hidden_, width_, token_, unit_, count_;
    bool in_fours_;
};

/// The hidden layer of a few tokens: activations[i][j] = act(W1_j . x_i + b1_j), `Units` of them in a block.
/// Grid: ceil(count / agent_hidden_layer::tokens) x ceil(hidden / Units); blocks of one group of tokens
/// follow each other. Block: hidden_layer_threads. Shared memory: Memory: the warps' sums.
/// In: states [B, S, width] of any storage type, w1 [hidden, width] and b1 [hidden] fp32.
/// Out: activations [count, hidden] fp32, overwritten for tokens that count. A token's have the same bits
/// whatever Tokens and Units are and whichever tokens share the block.
///
/// 1. The L2 cache is asked for the block's rows of W1; then the kernel before must have ended.
/// 2. Each warp multiplies every eighth 128 columns of its rows, held in registers, by the tokens' states.
/// 3. Sums over lanes and warps, activations.
template <int Tokens, int Units>
__global__ void __launch_bounds__(hidden_layer_threads, Units == 8 ? 1 : 3)  // beside two blocks of a step
    hidden_layer_kernel(const __grid_constant__ hidden_layer_params call) {
    using Agent = agent_hidden_layer<Tokens, Units>;
    __shared__ typename Agent::Memory memory;
    Agent agent(call, memory);
    agent.prefetch();
    wait_for_kernel_before();
    let_next_kernel_start();  // it waits for the activations
    agent.run();
}

/// A token's score for a head from its hidden layer [hidden]: w2_h . activations + b2_h. By one warp.
__device__ inline float hidden_readout(const float* activations, std::int32_t hidden, const float* w2,
                                       const float* b2, std::int32_t head) {
    const float* const w = w2 + std::int64_t{head} * hidden;
    float sum = 0.0f;
#pragma unroll 8
    for (std::int32_t j = lane_id(); j < hidden; j += 32) {
        sum = fmaf(activations[j], w[j], sum);
    }
    return warp_total(sum) + (b2 != nullptr ? b2[head] : 0.0f);
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
    const float sum =
        at.there ? hidden_readout(call.activations + token * hidden, hidden, predictor.w2, predictor.b2, head)
                 : 0.0f;
    if (lane_id() == 0) {
        scores.head(at.b, head)[at.t] = sum;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
