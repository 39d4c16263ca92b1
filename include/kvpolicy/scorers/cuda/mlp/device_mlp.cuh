// How BasicMlpScorers of keys and values (MlpScorer, WriteGateScorer) run on CUDA.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_plan.cuh>
#include <kvpolicy/scorers/cuda/mlp/agent_mlp_block.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_mlp.cuh>
#include <kvpolicy/scorers/mlp.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class Input>
inline constexpr bool is_known_input =
    std::is_same_v<Input, KeyValueInput> || std::is_same_v<Input, NormalizedInput> ||
    std::is_same_v<Input, WriteGateInput>;

template <class T, class Input>
void set_input(scorer_plan<T>& call, const Input& input, workspace_parts& parts) {
    if constexpr (std::is_same_v<Input, NormalizedInput>) {
        call.source.input = scorer_input::normalized;
        call.source.epsilon = input.norm.epsilon;
    } else if constexpr (std::is_same_v<Input, WriteGateInput>) {
        call.source.input = scorer_input::write_gate;
        call.source.epsilon = input.norm.epsilon;
        call.set_rope(input.rope, parts);
        call.set_size(2 * call.source.k.dim);
    }
}

/// An MLP's params with its workspace, forward and backward.
template <class T>
struct mlp_plan {
    scorer_plan<T> call;
    mlp_params<T> params{};
    weight_stack stack;
    T* w1 = nullptr;
    const char* name = "";  // the scorer's, in messages

    template <class Input, class Act, std::int32_t D>
    mlp_plan(const BasicMlpScorer<Input, Act, D>& scorer, rows_view<const T> k, rows_view<const T> v,
             const Sequences& sequences, float* d_w1, workspace_parts& parts)
        : call(k, v, sequences, 0, parts) {
        set_input(call, scorer.input, parts);
        stack.add(scorer.weights.w1, d_w1, scorer.hidden);
        w1 = take_stack<T>(parts, stack, k.heads, call.source.padded);
        params.w1 = w1;
        params.b1 = scorer.weights.b1;
        params.w2 = scorer.weights.w2;
        params.b2 = scorer.weights.b2;
        name = scorer.name;
        params.hidden = scorer.hidden;
        params.width = stack.rows;
        params.activation = std::is_same_v<Act, Silu> ? scorer_activation::silu : scorer_activation::gelu_erf;
    }
    /// The streams of a call of `length` tokens at most, and the weights as kernels take them. False where it
    /// has no chunks.
    bool begin(const cuda& ctx, std::int32_t length, std::uint32_t* status) {
        call.streams.rows = std::min(call.streams.rows, length);
        call.begin(ctx, status);
        if (call.chunks() == 0) {
            return false;
        }
        fill_stack(ctx, stack, call, w1);
        params.streams = call.streams;
        params.source = call.source;
        return true;
    }
    [[nodiscard]] std::size_t shared() const { return mlp_memory<T>(nullptr, call.source.padded).bytes; }
    void check_shared_memory(const cuda& ctx) const {
        check_input_shared_memory(ctx, call.source, name,
                                  [](std::int32_t padded) { return mlp_memory<T>(nullptr, padded).bytes; });
    }
};

/// BasicMlpScorer, or with no memory only its workspace.
template <class T, class S>
void mlp_backward(const cuda& ctx, const S& scorer, const ScoreBackward<T>& call,
                  MlpParameters<float> gradients, workspace_parts& parts, bool measure,
                  std::uint32_t* status) {
    mlp_plan<T> mlp(scorer, call.k, call.v, call.sequences, gradients.w1, parts);
    mlp.check_shared_memory(ctx);
    if (call.d_k.data != nullptr) {
        check_input_shared_memory(
            ctx, mlp.call.source, "gradients of keys and values",
            [&](std::int32_t padded) { return input_gradient_shared<T>(mlp.call.source.input, padded); });
    }
    score_gradients<T> d_scores;
    d_scores.take(mlp.call, parts);
    const std::int32_t hidden = scorer.hidden, width = 2 * hidden + 1;
    auto* const d_rows = parts.take<T>(mlp.call.rows() * mlp.stack.rows);
    auto* const sums = parts.take<float>(mlp.call.chunks() * width);
    auto* const partial = take_gradient_parts(parts, mlp.call, mlp.stack);
    if (measure) {
        return;
    }
    if (!mlp.begin(ctx, call.d_scores.length, status)) {
        return;
    }
    launch("mlp_backward_kernel", mlp_backward_kernel<T>, mlp.call.chunks(), 128, mlp.shared(), ctx,
           mlp.params, d_scores.of(ctx, mlp.call, call.d_scores), d_rows, sums);
    if (gradients.w1 != nullptr) {
        add_weight_gradients(ctx, mlp.call, mlp.stack, static_cast<const T*>(d_rows), 0, partial);
    }
    chunk_sums all_sums;
    all_sums.add(sums, width, 0, hidden, gradients.b1);
    all_sums.add(sums, width, hidden, hidden, gradients.w2);
    all_sums.add(sums, width, 2 * hidden, 1, gradients.b2);
    add_sums(ctx, mlp.call.streams, all_sums);
    if (call.d_k.data != nullptr) {
        launch_input_gradients(ctx, mlp.call,
                               gradient_rows<T>{d_rows, mlp.w1, mlp.stack.rows, mlp.stack.used, 0},
                               gradient_rows<T>{}, call);
    }
}

}  // namespace cuda_backend

template <class Input, class Act, std::int32_t D>
requires(cuda_backend::is_known_input<Input> &&
         (std::is_same_v<Act, Silu> ||
          std::is_same_v<Act, GeluErf>)) struct device_scorer<BasicMlpScorer<Input, Act, D>>
    : device_scorer_defaults {
    static constexpr bool scores_sequences = true;
    static constexpr bool has_gradients = true;
    static constexpr bool by_block = true;
    using scorer_type = BasicMlpScorer<Input, Act, D>;

    template <class Widths, class T>
    static void forward(const cuda& ctx, const scorer_type& scorer, const score_sequence_params<T>& call,
                        cuda_backend::workspace_parts& parts, bool measure, std::uint32_t* status) {
        namespace cb = cuda_backend;
        cb::mlp_plan<T> mlp(scorer, call.k, call.v, call.sequences, nullptr, parts);
        if (measure) {
            mlp.check_shared_memory(ctx);
            return;
        }
        if (mlp.begin(ctx, call.scores.length, status)) {
            cb::launch("mlp_kernel", cb::mlp_kernel<T>, mlp.call.chunks(), 128, mlp.shared(), ctx, mlp.params,
                       call.scores);
        }
    }
    template <class Widths, class T>
    static void backward(const cuda& ctx, const scorer_type& scorer, const ScoreBackward<T>& call,
                         const MlpParameters<float>& gradients, cuda_backend::workspace_parts& parts,
                         bool measure, std::uint32_t* status) {
        cuda_backend::mlp_backward<T>(ctx, scorer, call, gradients, parts, measure, status);
    }
    static std::int32_t block_shares(const scorer_type& scorer) {
        return cuda_backend::mlp_slices(scorer.hidden).count;
    }
    static std::size_t block_floats(const scorer_type& scorer, std::int32_t tokens, std::int32_t head_dim_qk,
                                    std::int32_t head_dim_vo) {
        return cuda_backend::mlp_block_memory::floats(tokens, scorer.input.size(head_dim_qk, head_dim_vo),
                                                      head_dim_qk);
    }
    __device__ static void prepare_block(const scorer_type& scorer, std::int32_t head, block_share share,
                                         std::int32_t head_dim_qk, std::int32_t head_dim_vo, float* shared) {
        cuda_backend::agent_mlp_block<Input, Act, float>(scorer.input, scorer.weights, scorer.hidden, head,
                                                         share, head_dim_qk, head_dim_vo, shared)
            .prepare();
    }
    template <class T>
    __device__ static void score_by_block(const scorer_type& scorer, std::int32_t head,
                                          const block_token<T>* tokens, std::int32_t count, block_share share,
                                          std::int32_t head_dim_qk, std::int32_t head_dim_vo, float* shared) {
        cuda_backend::agent_mlp_block<Input, Act, T>(scorer.input, scorer.weights, scorer.hidden, head, share,
                                                     head_dim_qk, head_dim_vo, shared)
            .run(tokens, count);
    }
};

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
