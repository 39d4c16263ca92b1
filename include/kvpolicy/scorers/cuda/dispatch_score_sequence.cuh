// Dispatch of the scorers: arguments are checked, the workspace is cut into parts, kernels are enqueued.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/check_score.hpp>
#include <kvpolicy/scorers/cuda/common/scorer_call.cuh>
#include <kvpolicy/scorers/cuda/conv/dispatch_conv.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_mlp.cuh>
#include <kvpolicy/scorers/cuda/mlstm/dispatch_mlstm.cuh>
#include <kvpolicy/scorers/cuda_sequence.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// An MLP's problem with its workspace, forward and backward.
template <class T>
struct mlp_call {
    scorer_call<T> call;
    mlp_problem<T> problem{};
    weight_stack stack;
    T* w1 = nullptr;

    template <class Input, class Act, std::int32_t D>
    mlp_call(const BasicMlpScorer<Input, Act, D>& scorer, rows_view<const T> k, rows_view<const T> v,
             const Sequences& sequences, float* d_w1, workspace_parts& parts)
        : call(k, v, sequences, 0, parts) {
        call.set_input(scorer.input, parts);
        stack.add(scorer.weights.w1, d_w1, scorer.hidden);
        w1 = take_stack<T>(parts, stack, k.heads, call.source.padded);
        problem.w1 = w1;
        problem.b1 = scorer.weights.b1;
        problem.w2 = scorer.weights.w2;
        problem.b2 = scorer.weights.b2;
        problem.hidden = scorer.hidden;
        problem.width = stack.rows;
        problem.activation =
            std::is_same_v<Act, Silu> ? scorer_activation::silu : scorer_activation::gelu_erf;
    }
    void begin(const cuda& on, std::uint32_t* status) {
        call.begin(on, status);
        fill_stack(on, stack, call, w1);
        problem.streams = call.streams;
        problem.source = call.source;
    }
    [[nodiscard]] std::size_t shared() const { return mlp_memory<T>(nullptr, call.source.padded).bytes; }
    void check_room(const cuda& on) const {
        check_input_room(on, call.source, "this scorer",
                         [](std::int32_t padded) { return mlp_memory<T>(nullptr, padded).bytes; });
    }
};

template <class T, class S>
void check_sequence_call(const S& scorer, rows_view<const T> k, rows_view<const T> v,
                         const Sequences& sequences, std::int32_t delay, plane_view<float> scores,
                         const ScoreOptions& options) {
    host_backend::check_score_call<T>(scorer, k, v, without_device_memory(sequences), delay, scores, options);
    detail::require(sequences.cu_seqlens == nullptr || sequences.segments >= 1, "sequences.segments",
                    sequences.segments, "1 or more where cu_seqlens is given");
    detail::require(sequences.starts == nullptr || sequences.cu_seqlens == nullptr, "sequences.starts",
                    "given", "null where cu_seqlens is given");
    check_scorer_rows("k", k);
    check_scorer_rows("v", v);
    if constexpr (S::when == score_time::on_leaving) {
        detail::require(sequences.starts == nullptr || options.states != nullptr, "sequences.starts", "given",
                        "null without options.states, which holds what the scorer knows of earlier tokens");
        detail::require(options.how != form::recurrent, "options.how", "form::recurrent",
                        "form::chunkwise or form::fastest on CUDA");
    }
}

}  // namespace cuda_backend

template <class Widths, Scorer S, class K, class V>
std::size_t score_sequence_workspace_bytes(
    [[maybe_unused]] const cuda& on, const S& scorer, rows_view<K> k, rows_view<V> v,
    const Sequences& sequences,
    [[maybe_unused]] const BasicScoreOptions<compute_t<std::remove_const_t<K>>>& options) {
    namespace cb = cuda_backend;
    using T = std::remove_const_t<K>;
    cb::check_scorer_types<S, T>();
    cb::workspace_parts parts(nullptr);
    if constexpr (cb::is_linear<S>) {
        const cb::scorer_call<T> call(k, v, sequences, 0, parts);
    } else if constexpr (cb::is_mlstm<S>) {
        cb::check_mlstm<Widths, T>(scorer, options.for_backward);
        const mLSTMParameters<float> shape{};
        const cb::mlstm_call<Widths, T, cb::is_hedgehog<S>> call(
            scorer, k, v, sequences, 0, options.for_backward ? &shape : nullptr, parts);
    } else if constexpr (cb::is_conv<S>) {
        const cb::conv_call<T> call(scorer, k, v, sequences, 0, options.dropout, parts);
    } else {
        const cb::mlp_call<T> call(scorer, k, v, sequences, nullptr, parts);
        call.check_room(on);
    }
    return parts.bytes();
}

template <class Widths, Scorer S, class K, class V>
void score_sequence(const cuda& on, const S& scorer, rows_view<K> k, rows_view<V> v,
                    const Sequences& sequences, std::int32_t delay,
                    plane_view<compute_t<std::remove_const_t<K>>> scores, workspace_view workspace,
                    const BasicScoreOptions<compute_t<std::remove_const_t<K>>>& options,
                    std::uint32_t* status) {
    namespace cb = cuda_backend;
    using T = std::remove_const_t<K>;
    static_assert(std::is_same_v<T, std::remove_const_t<V>>,
                  "kvpolicy: score_sequence needs k and v of one type");
    cb::check_scorer_types<S, T>();
    cb::check_sequence_call<T>(scorer, k, v, sequences, delay, scores, options);
    cb::check_workspace(workspace,
                        score_sequence_workspace_bytes<Widths>(on, scorer, k, v, sequences, options));
    const cb::device_scope device(on);
    cb::workspace_parts parts(workspace.data);
    if constexpr (cb::is_linear<S>) {
        cb::scorer_call<T> call(k, v, sequences, 0, parts);
        call.streams.rows = std::min(call.streams.rows, scores.length);
        call.begin(on, status);
        cb::launch("linear_kernel", cb::linear_kernel<T>, call.chunks(), 256, 0, on, call.streams,
                   call.source, scorer.weights.weight, scorer.weights.bias, scores);
    } else if constexpr (cb::is_mlstm<S>) {
        const mLSTMParameters<float> shape{};
        cb::mlstm_call<Widths, T, cb::is_hedgehog<S>> mlstm(scorer, k, v, sequences, delay,
                                                            options.for_backward ? &shape : nullptr, parts);
        mlstm.check_room(device, options.for_backward, false);
        mlstm.call.streams.rows = std::min(mlstm.call.streams.rows, scores.length);
        mlstm.problem.scores = scores;
        mlstm.problem.states = options.states;
        mlstm.project(on, status);
        mlstm.scores(on, options.for_backward);
    } else if constexpr (cb::is_conv<S>) {
        cb::conv_call<T> conv(scorer, k, v, sequences, delay, options.dropout, parts);
        conv.call.streams.rows = std::min(conv.call.streams.rows, scores.length);
        conv.problem.scores = scores;
        conv.run(on, device, status);
    } else {
        cb::mlp_call<T> mlp(scorer, k, v, sequences, nullptr, parts);
        mlp.call.streams.rows = std::min(mlp.call.streams.rows, scores.length);
        if (mlp.call.chunks() == 0) {
            mlp.call.begin(on, status);
            return;
        }
        mlp.begin(on, status);
        cb::launch("mlp_kernel", cb::mlp_kernel<T>, mlp.call.chunks(), 128, mlp.shared(), on, mlp.problem,
                   scores);
    }
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
