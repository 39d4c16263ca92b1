// How mLSTMScorer runs on CUDA.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/mlstm/dispatch_mlstm.cuh>
#include <kvpolicy/scorers/mlstm.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// mLSTMScorer, or with no memory only its workspace.
template <class Widths, class T, class S>
void mlstm_backward(const cuda& ctx, const S& scorer, const ScoreBackward<T>& call,
                    const mLSTMParameters<float>& gradients, workspace_parts& parts, bool measure,
                    std::uint32_t* status) {
    check_mlstm<Widths, T>(scorer, true);
    mlstm_plan<Widths, T, is_hedgehog<S>> mlstm(scorer, call.k, call.v, call.sequences, call.delay,
                                                &gradients, parts);
    if (measure) {
        return;
    }
    mlstm.check_shared_memory(device_scope(ctx), false, true);
    mlstm.call.streams.rows = std::min(mlstm.call.streams.rows, call.d_scores.length);
    if (mlstm.call.chunks() == 0) {
        mlstm.call.begin(ctx, status);
        return;
    }
    if (call.kept) {
        mlstm.resume(ctx, status);
    } else {
        mlstm.project(ctx, status);
        mlstm.states(ctx);
    }
    mlstm.params.d_scores = mlstm.d_scores.of(ctx, mlstm.call, call.d_scores);
    mlstm.tokens_backward(ctx);
    mlstm.weights_backward(ctx, gradients);
    if (call.d_k.data != nullptr) {
        mlstm.inputs_backward(ctx, call);
    }
}

/// score_chunk of an mLSTMScorer: the kernels of score_sequence, which go on from a cache's states.
template <class T, class S>
bool mlstm_score_chunk(const cuda& ctx, const S& scorer, const score_chunk_params<T>& call,
                       workspace_parts& parts, bool measure) {
    using Widths = all_mlstm_widths;
    using Plan = mlstm_plan<Widths, T, is_hedgehog<S>>;
    const std::int32_t features = scorer.features(), width = scorer.value_width();
    if (!mlstm_width_choice<Widths>::fits(features, width) ||
        (is_half<T> && (call.k.dim % 8 != 0 || call.v.dim % 8 != 0))) {
        return false;
    }
    const device_scope device(ctx);
    Sequences sequences;
    sequences.batch = call.k.batch;
    sequences.length = call.k.length;
    sequences.lengths = call.lengths;
    Plan mlstm(scorer, call.k, call.v, sequences, 0, nullptr, parts, !Plan::fuses(device, features, width),
               true);
    if (!mlstm.fits_shared_memory(device)) {
        return false;
    }
    if (!measure) {
        mlstm.params.leaving = call.leaving;
        mlstm.params.packed = call.packed;
        mlstm.params.first_leaving = call.first_leaving;
        mlstm.params.cached_states = call.states;
        mlstm.params.scores = view_bhs(call.scores, call.k.batch, call.k.heads, call.k.length);
        mlstm.project(ctx, nullptr);
        mlstm.scores(ctx);
    }
    return true;
}

}  // namespace cuda_backend

template <std::int32_t D, class Feature, class Values>
struct device_scorer<mLSTMScorer<D, Feature, Values>> : device_scorer_defaults {
    static constexpr bool scores_sequences =
        std::is_same_v<Feature, Softmax> || std::is_same_v<Feature, Hedgehog>;
    static constexpr bool has_gradients = scores_sequences;
    static constexpr bool before_step = true;
    static constexpr bool scores_chunks = scores_sequences;
    // From about 15 tokens on the launches of these kernels take less time than the tokens in a row. Up to
    // 32 tokens a prefill has the bits of steps.
    static constexpr std::int32_t min_chunk = 33;
    using scorer_type = mLSTMScorer<D, Feature, Values>;

    template <class Widths, class T>
    static void forward(const cuda& ctx, const scorer_type& scorer, const score_sequence_params<T>& call,
                        cuda_backend::workspace_parts& parts, bool measure, std::uint32_t* status) {
        namespace cb = cuda_backend;
        const bool for_backward = call.options.for_backward;
        if (measure) {
            cb::check_mlstm<Widths, T>(scorer, for_backward);
        }
        const mLSTMParameters<float> shape{};
        cb::mlstm_plan<Widths, T, cb::is_hedgehog<scorer_type>> mlstm(
            scorer, call.k, call.v, call.sequences, call.delay, for_backward ? &shape : nullptr, parts);
        if (measure) {
            return;
        }
        mlstm.check_shared_memory(cb::device_scope(ctx), for_backward, false);
        mlstm.call.streams.rows = std::min(mlstm.call.streams.rows, call.scores.length);
        mlstm.params.scores = call.scores;
        mlstm.params.states = call.options.states;
        mlstm.project(ctx, status);
        mlstm.scores(ctx, for_backward);
    }
    template <class Widths, class T>
    static void backward(const cuda& ctx, const scorer_type& scorer, const ScoreBackward<T>& call,
                         const mLSTMParameters<float>& gradients, cuda_backend::workspace_parts& parts,
                         bool measure, std::uint32_t* status) {
        cuda_backend::mlstm_backward<Widths, T>(ctx, scorer, call, gradients, parts, measure, status);
    }
    template <class T>
    static bool score_chunk(const cuda& ctx, const scorer_type& scorer, const score_chunk_params<T>& call,
                            cuda_backend::workspace_parts& parts, bool measure) {
        return cuda_backend::mlstm_score_chunk(ctx, scorer, call, parts, measure);
    }
};

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
