// Dispatch of the scorers' backward passes.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_call.cuh>
#include <kvpolicy/scorers/cuda/dispatch_score_sequence.cuh>
#include <kvpolicy/scorers/cuda_sequence.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What the host's check_backward_call refuses, as far as no device memory must be read.
template <class S, class T>
void check_backward_call(const S& scorer, const ScoreBackward<T>& call) {
    const plane_view<float> as_scores{const_cast<float*>(call.d_scores.data),
                                      call.d_scores.batch,
                                      call.d_scores.heads,
                                      call.d_scores.length,
                                      call.d_scores.batch_stride,
                                      call.d_scores.head_stride};
    if constexpr (S::when != score_time::on_arrival) {
        detail::require(call.sequences.starts == nullptr, "sequences.starts", "given",
                        "null in a backward pass");
    }
    ScoreOptions options;
    options.dropout = call.dropout;
    check_sequence_call<T>(scorer, call.k, call.v, call.sequences, call.delay, as_scores, options);
    const bool wanted = call.d_k.data != nullptr;
    detail::require(wanted == (call.d_v.data != nullptr), "d_v.data", wanted ? "null" : "given",
                    "given with d_k, or null with it");
    if (wanted) {
        host_backend::check_rows("d_k", call.d_k, call.k.batch, call.k.heads, call.k.length, call.k.dim);
        host_backend::check_rows("d_v", call.d_v, call.k.batch, call.k.heads, call.v.length, call.v.dim);
    }
}

/// LinearScorer, or with no memory only its workspace.
template <class T, class S>
void linear_backward(const cuda& on, const S& scorer, const ScoreBackward<T>& call,
                     LinearParameters<float> gradients, workspace_parts& parts, bool measure,
                     std::uint32_t* status) {
    scorer_call<T> all(call.k, call.v, call.sequences, 0, parts);
    const std::int32_t width = all.source.size + 1;
    auto* const sums = parts.take<float>(all.chunks() * width);
    if (measure) {
        return;
    }
    all.streams.rows = std::min(all.streams.rows, call.d_scores.length);
    all.begin(on, status);
    if (all.chunks() == 0) {
        return;
    }
    launch("linear_backward_kernel", linear_backward_kernel<T>, all.chunks(), 256, 0, on, all.streams,
           all.source, call.d_scores, scorer.weights.weight, call.d_k, call.d_v, sums);
    chunk_sums all_sums;
    all_sums.add(sums, width, 0, all.source.size, gradients.weight);
    all_sums.add(sums, width, all.source.size, 1, gradients.bias);
    add_sums(on, all.streams, all_sums);
}

/// BasicMlpScorer, or with no memory only its workspace.
template <class T, class S>
void mlp_backward(const cuda& on, const S& scorer, const ScoreBackward<T>& call,
                  MlpParameters<float> gradients, workspace_parts& parts, bool measure,
                  std::uint32_t* status) {
    mlp_call<T> mlp(scorer, call.k, call.v, call.sequences, gradients.w1, parts);
    mlp.check_room(on);
    if (call.d_k.data != nullptr) {
        check_input_room(on, mlp.call.source, "gradients of keys and values", [&](std::int32_t padded) {
            return input_gradient_shared<T>(mlp.call.source.input, padded);
        });
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
    mlp.call.streams.rows = std::min(mlp.call.streams.rows, call.d_scores.length);
    if (mlp.call.chunks() == 0) {
        mlp.call.begin(on, status);
        return;
    }
    mlp.begin(on, status);
    launch("mlp_backward_kernel", mlp_backward_kernel<T>, mlp.call.chunks(), 128, mlp.shared(), on,
           mlp.problem, d_scores.of(on, mlp.call, call.d_scores), d_rows, sums);
    if (gradients.w1 != nullptr) {
        add_weight_gradients(on, mlp.call, mlp.stack, static_cast<const T*>(d_rows), 0, partial);
    }
    chunk_sums all_sums;
    all_sums.add(sums, width, 0, hidden, gradients.b1);
    all_sums.add(sums, width, hidden, hidden, gradients.w2);
    all_sums.add(sums, width, 2 * hidden, 1, gradients.b2);
    add_sums(on, mlp.call.streams, all_sums);
    if (call.d_k.data != nullptr) {
        launch_input_gradients(on, mlp.call,
                               gradient_rows<T>{d_rows, mlp.w1, mlp.stack.rows, mlp.stack.used, 0},
                               gradient_rows<T>{}, call);
    }
}

/// mLSTMScorer, or with no memory only its workspace.
template <class Widths, class T, class S>
void mlstm_backward(const cuda& on, const S& scorer, const ScoreBackward<T>& call,
                    const mLSTMParameters<float>& gradients, workspace_parts& parts, bool measure,
                    std::uint32_t* status) {
    check_mlstm<Widths, T>(scorer, true);
    mlstm_call<Widths, T, is_hedgehog<S>> mlstm(scorer, call.k, call.v, call.sequences, call.delay,
                                                &gradients, parts);
    if (measure) {
        return;
    }
    mlstm.check_room(device_scope(on), false, true);
    mlstm.call.streams.rows = std::min(mlstm.call.streams.rows, call.d_scores.length);
    if (mlstm.call.chunks() == 0) {
        mlstm.call.begin(on, status);
        return;
    }
    if (call.kept) {
        mlstm.resume(on, status);
    } else {
        mlstm.project(on, status);
        mlstm.states(on);
    }
    mlstm.problem.d_scores = mlstm.d_scores.of(on, mlstm.call, call.d_scores);
    mlstm.tokens_backward(on);
    mlstm.weights_backward(on, gradients);
    if (call.d_k.data != nullptr) {
        mlstm.inputs_backward(on, call);
    }
}

/// ConvScorer, or with no memory only its workspace.
template <class T, class S>
void conv_backward(const cuda& on, const S& scorer, const ScoreBackward<T>& call,
                   const ConvParameters<float>& gradients, workspace_parts& parts, bool measure,
                   std::uint32_t* status) {
    const device_scope device(on);
    conv_backward_call<T> conv(device, scorer, call, parts);
    if (measure) {
        return;
    }
    conv.conv.call.streams.rows = std::min(conv.conv.call.streams.rows, call.d_scores.length);
    if (conv.conv.call.chunks() == 0) {
        conv.conv.call.begin(on, status);
        return;
    }
    conv.run(on, gradients, call, status);
}

template <class Widths, class S, class T>
void run_backward(const cuda& on, const S& scorer, const ScoreBackward<T>& call,
                  typename S::template parameters<float> gradients, workspace_parts& parts, bool measure,
                  std::uint32_t* status) {
    if constexpr (is_linear<S>) {
        linear_backward<T>(on, scorer, call, gradients, parts, measure, status);
    } else if constexpr (is_mlstm<S>) {
        mlstm_backward<Widths, T>(on, scorer, call, gradients, parts, measure, status);
    } else if constexpr (is_conv<S>) {
        conv_backward<T>(on, scorer, call, gradients, parts, measure, status);
    } else {
        mlp_backward<T>(on, scorer, call, gradients, parts, measure, status);
    }
}

}  // namespace cuda_backend

template <class Widths, Scorer S, Storage T>
std::size_t backward_workspace_bytes(const cuda& on, const S& scorer, const ScoreBackward<T>& call) {
    cuda_backend::check_scorer_types<S, T>();
    cuda_backend::workspace_parts parts(nullptr);
    cuda_backend::run_backward<Widths>(on, scorer, call, {}, parts, true, nullptr);
    return parts.bytes();
}

template <class Widths, Scorer S, Storage T>
void score_sequence_backward(const cuda& on, const S& scorer, const ScoreBackward<T>& call,
                             typename S::template parameters<compute_t<T>> gradients,
                             workspace_view workspace, std::uint32_t* status) {
    namespace cb = cuda_backend;
    cb::check_scorer_types<S, T>();
    cb::check_backward_call(scorer, call);
    cb::check_workspace(workspace, backward_workspace_bytes<Widths>(on, scorer, call));
    const cb::device_scope device(on);
    cb::workspace_parts parts(workspace.data);
    cb::run_backward<Widths>(on, scorer, call, gradients, parts, false, status);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
