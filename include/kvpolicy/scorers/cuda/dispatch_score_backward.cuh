// Dispatch of the scorers' backward passes: arguments are checked, and the scorer's device_scorer
// enqueues the kernels.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/check_backward.hpp>
#include <kvpolicy/scorers/cuda/common/scorer_plan.cuh>
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
    if constexpr (S::when != score_time::on_arrival) {
        detail::require(call.sequences.starts == nullptr, "sequences.starts", "given",
                        "null in a backward pass");
    }
    ScoreOptions options;
    options.dropout = call.dropout;
    check_sequence_call<T>(scorer, call.k, call.v, call.sequences, call.delay, checks::scores_of(call),
                           options);
    checks::check_row_gradients(call);
}

}  // namespace cuda_backend

template <class Widths, Scorer S, Storage T>
std::size_t score_sequence_backward_workspace_bytes(const cuda& ctx, const S& scorer,
                                                    const ScoreBackward<T>& call) {
    cuda_backend::check_scorer_types<S, T>();
    cuda_backend::check_scorer_gradients<S>();
    cuda_backend::workspace_parts parts(nullptr);
    device_scorer<S>::template backward<Widths, T>(ctx, scorer, call, {}, parts, true, nullptr);
    return parts.bytes();
}

template <class Widths, Scorer S, Storage T>
void score_sequence_backward(const cuda& ctx, const S& scorer, const ScoreBackward<T>& call,
                             typename S::template parameters<compute_t<T>> gradients,
                             workspace_view workspace, const ScoreBackwardOptions& options) {
    namespace cb = cuda_backend;
    cb::check_scorer_types<S, T>();
    cb::check_scorer_gradients<S>();
    cb::check_backward_call(scorer, call);
    cb::check_workspace(workspace, score_sequence_backward_workspace_bytes<Widths>(ctx, scorer, call));
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    device_scorer<S>::template backward<Widths, T>(ctx, scorer, call, gradients, parts, false,
                                                   options.status);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
