// How UtilityPredictor, and other BasicMlpScorers of hidden states, run in a cache on CUDA. Whole sequences
// are scored by score_hidden (scorers/cuda_predictor.cuh).
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_hidden_scores.cuh>
#include <kvpolicy/scorers/mlp.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Tokens whose hidden layers are in the workspace at once.
#if defined(KVPOLICY_TEST_HIDDEN_TOKENS)
inline constexpr std::int64_t hidden_tokens =
    KVPOLICY_TEST_HIDDEN_TOKENS;  // so that tests have several parts
#else
inline constexpr std::int64_t hidden_tokens = 2048;
#endif

template <int Tokens, int Units>
void launch_hidden_layer(const cuda& ctx, const device_scope& device, const hidden_layer_params& call) {
    constexpr auto kernel = hidden_layer_kernel<Tokens, Units>;
    constexpr std::int64_t together = agent_hidden_layer<Tokens, Units>::tokens;
    share_sms<kernel>(device);  // with what follows
    const std::int64_t pieces = (call.count + together - 1) / together;
    launch_early<kernel>("hidden_layer_kernel", pieces * ((call.predictor.hidden + Units - 1) / Units),
                         hidden_layer_threads, 0, device, ctx, 1, call);
}
/// Enqueues the hidden layer of tokens first .. first + count - 1. A template of its call, which is
/// hidden_layer_params, so that no kernel is compiled where none is called.
template <class Call>
void launch_hidden_layer(const cuda& ctx, const device_scope& device, const Call& call) {
    // Few tokens: many blocks, so that all of the memory's rate is used; and where there is one for each SM,
    // a step's blocks beside them spread evenly.
    constexpr std::int32_t few = 128;
    const bool spread = call.predictor.hidden <= 2 * device.attribute(cudaDevAttrMultiProcessorCount);
    if (call.count == 1) {
        launch_hidden_layer<1, 2>(ctx, device, call);
    } else if (call.count <= few && spread) {
        launch_hidden_layer<8, 1>(ctx, device, call);
    } else if (call.count <= few) {
        launch_hidden_layer<4, 2>(ctx, device, call);
    } else {
        launch_hidden_layer<8, 8>(ctx, device, call);
    }
}

/// What both launches need of a call; `from` without data where it is only measured.
template <class S>
hidden_layer_params hidden_layer_of(const S& scorer, scorer_activation activation,
                                    const score_hidden_params& from) {
    hidden_layer_params call;
    predictor_params& predictor = call.predictor;
    predictor.streams.batch = from.scores.batch;
    predictor.streams.heads = from.scores.heads;
    predictor.streams.length = from.lengths != nullptr ? from.scores.length : from.length;
    predictor.streams.rows = from.scores.length;
    predictor.streams.lengths = from.lengths;
    predictor.seq_ids = from.seq_ids;
    predictor.per = std::max(from.scores.length, 1);
    predictor.hidden = scorer.hidden;
    predictor.activation = activation;
    predictor.b1 = scorer.weights.b1;
    predictor.w2 = scorer.weights.w2;
    predictor.b2 = scorer.weights.b2;
    call.states = from.hidden;
    call.packed = from.packed;
    call.w1 = scorer.weights.w1;
    return call;
}

}  // namespace cuda_backend

template <class Act, std::int32_t D>
requires(std::is_same_v<Act, Silu> ||
         std::is_same_v<Act, GeluErf>) struct device_scorer<BasicMlpScorer<HiddenInput, Act, D>>
    : device_scorer_defaults {
    static constexpr bool from_hidden = true;
    static constexpr bool reads_hidden_layer = true;
    using scorer_type = BasicMlpScorer<HiddenInput, Act, D>;

    static void score_hidden(const cuda& ctx, const scorer_type& scorer, const score_hidden_params& from,
                             cuda_backend::workspace_parts& parts, bool measure) {
        namespace cb = cuda_backend;
        const plane_view<float>& scores = from.scores;
        cb::hidden_layer_params call = cb::hidden_layer_of(scorer, activation, from);
        const std::int64_t all = std::int64_t{scores.batch} * scores.length;
        call.activations = parts.take<float>(std::min(all, cb::hidden_tokens) * scorer.hidden);
        if (measure) {
            return;
        }
        const cb::device_scope device(ctx);
        constexpr auto readout = cb::hidden_readout_kernel<cb::hidden_layer_params>;
        cb::share_sms<readout>(device);
        for (call.first = 0; call.first < all; call.first += call.count) {
            call.count = static_cast<std::int32_t>(std::min(all - call.first, cb::hidden_tokens));
            cb::launch_hidden_layer(ctx, device, call);
            cb::launch_early<readout>("hidden_readout_kernel",
                                      (std::int64_t{call.count} * scores.heads + 7) / 8, 256, 0, device, ctx,
                                      1, call, scores);
        }
    }
    /// [batch * length, hidden] activations.
    static const float* hidden_layer(const cuda& ctx, const scorer_type& scorer,
                                     const score_hidden_params& from, cuda_backend::workspace_parts& parts,
                                     bool measure) {
        namespace cb = cuda_backend;
        cb::hidden_layer_params call = cb::hidden_layer_of(scorer, activation, from);
        call.count = from.scores.batch * from.scores.length;
        call.activations = parts.take<float>(std::int64_t{call.count} * scorer.hidden);
        if (!measure && call.count != 0) {
            cb::launch_hidden_layer(ctx, cb::device_scope(ctx), call);
        }
        return call.activations;
    }
    __device__ static float read_score(const scorer_type& scorer, const float* layer, std::int64_t token,
                                       std::int32_t head) {
        return cuda_backend::hidden_readout(layer + token * scorer.hidden, scorer.hidden, scorer.weights.w2,
                                            scorer.weights.b2, head);
    }

  private:
    static constexpr cuda_backend::scorer_activation activation =
        std::is_same_v<Act, Silu> ? cuda_backend::scorer_activation::silu
                                  : cuda_backend::scorer_activation::gelu_erf;
};

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
