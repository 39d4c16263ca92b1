// How ConvScorer runs on CUDA.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/conv/dispatch_conv.cuh>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
template <std::int32_t D>
struct device_scorer<ConvScorer<D>> : device_scorer_defaults {
    static constexpr bool scores_sequences = true;
    static constexpr bool has_gradients = true;
    static constexpr bool in_window = true;
    using scorer_type = ConvScorer<D>;

    template <class Widths, class T>
    static void forward(const cuda& ctx, const scorer_type& scorer, const score_sequence_params<T>& call,
                        cuda_backend::workspace_parts& parts, bool measure, std::uint32_t* status) {
        namespace cb = cuda_backend;
        cb::conv_plan<T> conv(scorer, call.k, call.v, call.sequences, call.delay, call.options.dropout,
                              parts);
        if (measure) {
            return;
        }
        conv.call.streams.rows = std::min(conv.call.streams.rows, call.scores.length);
        conv.params.scores = call.scores;
        conv.run(ctx, cb::device_scope(ctx), status);
    }
    template <class Widths, class T>
    static void backward(const cuda& ctx, const scorer_type& scorer, const ScoreBackward<T>& call,
                         const ConvParameters<float>& gradients, cuda_backend::workspace_parts& parts,
                         bool measure, std::uint32_t* status) {
        const cuda_backend::device_scope device(ctx);
        cuda_backend::conv_backward_plan<T> plan(device, scorer, call, parts);
        if (measure) {
            return;
        }
        auto& all = plan.conv.call;
        all.streams.rows = std::min(all.streams.rows, call.d_scores.length);
        if (all.chunks() == 0) {
            all.begin(ctx, status);
            return;
        }
        plan.run(ctx, gradients, call, status);
    }
};

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
