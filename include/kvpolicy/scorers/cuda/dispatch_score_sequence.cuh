// Dispatch of the scorers: arguments are checked, and the scorer's device_scorer enqueues the kernels.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/check_score.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_plan.cuh>
#include <kvpolicy/scorers/cuda_sequence.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T, class S>
void check_sequence_call(const S& scorer, rows_view<const T> k, rows_view<const T> v,
                         const Sequences& sequences, std::int32_t delay, plane_view<float> scores,
                         const ScoreOptions& options) {
    checks::check_score_call<T>(scorer, k, v, without_device_memory(sequences), delay, scores, options);
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
std::size_t score_sequence_workspace_bytes(const cuda& ctx, const S& scorer, rows_view<K> k, rows_view<V> v,
                                           const Sequences& sequences,
                                           const BasicScoreOptions<real_of<K>>& options) {
    namespace cb = cuda_backend;
    using T = std::remove_const_t<K>;
    cb::check_scorer_types<S, T>();
    cb::workspace_parts parts(nullptr);
    const score_sequence_params<T> call{k, v, sequences, 0, {}, options};
    device_scorer<S>::template forward<Widths>(ctx, scorer, call, parts, true, nullptr);
    return parts.bytes();
}

template <class Widths, Scorer S, class K, class V>
void score_sequence(const cuda& ctx, const S& scorer, rows_view<K> k, rows_view<V> v,
                    const Sequences& sequences, std::int32_t delay, plane_view<real_of<K>> scores,
                    workspace_view workspace, const BasicScoreOptions<real_of<K>>& options) {
    namespace cb = cuda_backend;
    using T = std::remove_const_t<K>;
    static_assert(std::is_same_v<T, std::remove_const_t<V>>,
                  "kvpolicy: score_sequence needs k and v of one type");
    cb::check_scorer_types<S, T>();
    cb::check_sequence_call<T>(scorer, k, v, sequences, delay, scores, options);
    cb::check_workspace(workspace,
                        score_sequence_workspace_bytes<Widths>(ctx, scorer, k, v, sequences, options));
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    const score_sequence_params<T> call{k, v, sequences, delay, scores, options};
    device_scorer<S>::template forward<Widths>(ctx, scorer, call, parts, false, options.status);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
