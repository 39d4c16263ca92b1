// The stages of a ConvScorer's calls.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/kernels/conv_backward.cuh>
#include <kvpolicy/cuda/kernels/conv_scorer.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/scorer_call.cuh>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T>
struct conv_call {
    scorer_call<T> call;
    conv_problem<T> problem{};
    T* stack[3] = {};
    const float* weights[3] = {};

    template <class S>
    conv_call(const S& scorer, rows_view<const T> k, rows_view<const T> v, const Sequences& sequences,
              std::int32_t delay, const Dropout& dropout, workspace_parts& parts)
        : call(k, v, sequences, delay, parts) {
        call.source.input = scorer_input::turned;
        call.set_rope(scorer.rope, parts);
        const float* const biases[3] = {scorer.weights.b1, scorer.weights.b2, scorer.weights.b3};
        weights[0] = scorer.weights.w1;
        weights[1] = scorer.weights.w2;
        weights[2] = scorer.weights.w3;
        const auto padded = [](std::int32_t width) { return (width + 63) / 64 * 64; };
        for (int l = 0; l < 3; ++l) {
            conv_layer_problem<T>& layer = problem.layer[l];
            layer.width = scorer.channels(l + 1);
            layer.padded = padded(layer.width);
            layer.inputs = scorer.channels(l);
            layer.padded_inputs = padded(layer.inputs);
            layer.bias = biases[l];
            stack[l] = parts.take<T>(std::int64_t{k.heads} * layer.padded * 3 * layer.padded_inputs);
            layer.weights = stack[l];
        }
        problem.readout = scorer.weights.readout;
        problem.readout_bias = scorer.weights.readout_bias;
        problem.rate = dropout.rate;
        problem.seed = dropout.seed;
    }

    void begin(const cuda& on, std::uint32_t* status) {
        call.begin(on, status);
        problem.streams = call.streams;
        problem.source = call.source;
        for (int l = 0; l < 3; ++l) {
            const conv_layer_problem<T>& layer = problem.layer[l];
            const std::int64_t count =
                std::int64_t{call.streams.heads} * layer.padded * 3 * layer.padded_inputs;
            launch("stack_conv_kernel", stack_conv_kernel<T>,
                   std::min<std::int64_t>((count + 255) / 256, 1024), 256, 0, on, weights[l],
                   call.streams.heads, layer.width, layer.padded, layer.inputs, layer.padded_inputs,
                   stack[l]);
        }
    }
    void score(const cuda& on) {
        launch("conv_kernel", conv_kernel<T>, call.chunks(), 128,
               conv_memory<T, conv_columns<T>>(nullptr, problem).bytes, on, problem);
    }
};

/// The backward pass, with its part of the workspace.
template <class T>
struct conv_backward_call {
    conv_call<T> conv;
    conv_backward_problem<T> problem{};
    std::int32_t splits[3] = {};
    float* partial = nullptr;  // of one layer after the other

    template <class S>
    conv_backward_call(const S& scorer, const ScoreBackward<T>& from, workspace_parts& parts)
        : conv(scorer, from.k, from.v, from.sequences, from.delay, from.dropout, parts) {
        detail::require(scorer.channels(3) <= 64, "ConvScorer.dim_k + dim_v", scorer.channels(0),
                        "below 520 for gradients on CUDA");
        const std::int64_t chunks = conv.call.chunks();
        std::int64_t most = 0;
        problem.sums_width = 1;
        for (int l = 0; l < 3; ++l) {
            const conv_layer_problem<T>& layer = conv.problem.layer[l];
            const std::int64_t tiles =
                std::int64_t{conv.call.streams.heads} * (layer.padded / 64) * (layer.padded_inputs / 64);
            splits[l] = static_cast<std::int32_t>(std::clamp<std::int64_t>(
                512 / std::max<std::int64_t>(tiles, 1), 1,
                std::max<std::int64_t>(std::int64_t{conv.call.streams.batch} * conv.call.streams.slots, 1)));
            most = std::max(most, splits[l] * tiles * 64 * 64 * 3);
            problem.in[l] = parts.take<T>(chunks * conv_rows * layer.padded_inputs);
            problem.d[l] = parts.take<T>(chunks * conv_rows * layer.padded);
            if (l < 2) {
                problem.slope[l] = parts.take<T>(chunks * conv_rows * layer.padded);
            }
            problem.sums_width += l < 2 ? layer.width : 2 * layer.width;
        }
        problem.sums = parts.take<float>(chunks * problem.sums_width);
        partial = parts.take<float>(most);
        if (from.d_k.data != nullptr) {
            problem.d_x = parts.take<float>(chunks * conv_rows * conv.call.source.padded);
        }
        problem.d_scores = from.d_scores;
    }

    void run(const cuda& on, const ConvParameters<float>& to, const ScoreBackward<T>& call,
             std::uint32_t* status) {
        conv.begin(on, status);
        problem.forward = conv.problem;
        const scorer_streams& streams = conv.call.streams;
        launch("conv_backward_kernel", conv_backward_kernel<T>, conv.call.chunks(), 128,
               conv_memory<T, 64, conv_rows + conv_lead + 8>(nullptr, conv.problem).bytes, on, problem);
        float* const into[3] = {to.w1, to.w2, to.w3};
        float* const biases[3] = {to.b1, to.b2, to.b3};
        chunk_sums sums;
        std::int32_t at = 0;
        for (int l = 0; l < 3; ++l) {
            const conv_layer_problem<T>& layer = conv.problem.layer[l];
            if (into[l] != nullptr) {
                shared_parts shared(nullptr);
                shared.tile<T>(conv_rows, 64);
                shared.tile<T>(conv_rows + 8, 64);
                launch("conv_weight_gradient_kernel", conv_weight_gradient_kernel<T>,
                       std::int64_t{splits[l]} * streams.heads * (layer.padded / 64) *
                           (layer.padded_inputs / 64),
                       128, shared.bytes(), on, streams, static_cast<const T*>(problem.d[l]), layer.padded,
                       static_cast<const T*>(problem.in[l]), layer.padded_inputs, splits[l], partial);
                const std::int64_t count = std::int64_t{streams.heads} * layer.width * 3 * layer.inputs;
                launch("add_conv_gradients_kernel", add_conv_gradients_kernel<float>,
                       std::min<std::int64_t>((count + 255) / 256, 4096), 256, 0, on,
                       static_cast<const float*>(partial), splits[l], streams.heads, layer.width,
                       layer.padded, layer.inputs, layer.padded_inputs, into[l]);
            }
            sums.add(problem.sums, problem.sums_width, at, layer.width, biases[l]);
            at += layer.width;
        }
        const std::int32_t last = conv.problem.layer[2].width;
        sums.add(problem.sums, problem.sums_width, at, last, to.readout);
        sums.add(problem.sums, problem.sums_width, at + last, 1, to.readout_bias);
        add_sums(on, streams, sums);
        if (problem.d_x != nullptr) {
            launch("conv_input_gradient_kernel", conv_input_gradient_kernel<T>, conv.call.chunks(), 128, 0,
                   on, problem, call.d_k, call.d_v);
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
