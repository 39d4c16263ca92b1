// Scorers of which one warp scores an entry: score_sequence for all of them, from their score() alone.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_plan.cuh>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The sum of a number of each lane, in all lanes.
__device__ inline float warp_total(float x) {
#pragma unroll
    for (int step = 16; step != 0; step /= 2) {
        x += __shfl_xor_sync(all_lanes, x, step);
    }
    return x;
}

/// scores[b][h][t] = device_scorer<S>::score of k [B, Hkv, S, Dk] and v [B, Hkv, S, Dv], for the tokens of
/// the sequences' lengths. Grid: a block per chunk of scorer_chunk tokens of a plane (plane-major). Block:
/// 256 threads, a warp per token in turn. No shared memory. Overwrites scores of the tokens, nothing else.
template <class S, class T>
__global__ void __launch_bounds__(256)
    warp_scorer_kernel(const scorer_streams streams, const scorer_source<T> source, const S scorer,
                       const plane_view<float> scores) {
    const scorer_span s = streams.span(static_cast<std::int32_t>(blockIdx.x) / streams.chunks,
                                       static_cast<std::int32_t>(blockIdx.x) % streams.chunks);
    for (int r = warp_id(); r < s.count; r += 8) {
        const std::int32_t t = s.first + r;
        const float score = device_scorer<S>::score(scorer, s.h, source.k.row(s.b, s.h, t),
                                                    source.v.row(s.b, s.h, t), source.k.dim, source.v.dim);
        if (lane_id() == 0) {
            scores.head(s.b, s.h)[t] = score;
        }
    }
}

/// A call's workspace; then, unless it is only measured, its streams, and enqueue(plan) for its chunks.
template <class T, class Enqueue>
void score_chunks(const cuda& ctx, const score_sequence_params<T>& call, workspace_parts& parts, bool measure,
                  std::uint32_t* status, const Enqueue& enqueue) {
    scorer_plan<T> all(call.k, call.v, call.sequences, 0, parts);
    if (!measure) {
        all.streams.rows = std::min(all.streams.rows, call.scores.length);
        all.begin(ctx, status);
        enqueue(all);
    }
}

}  // namespace cuda_backend

/// What the device_scorer of a scorer inherits that one warp computes: it adds score().
template <class S>
struct warp_device_scorer : device_scorer_defaults {
    static constexpr bool scores_sequences = true;
    static constexpr bool by_warp = true;

    template <class Widths, class T>
    static void forward(const cuda& ctx, const S& scorer, const score_sequence_params<T>& call,
                        cuda_backend::workspace_parts& parts, bool measure, std::uint32_t* status) {
        namespace cb = cuda_backend;
        cb::score_chunks(ctx, call, parts, measure, status, [&](const cb::scorer_plan<T>& all) {
            cb::launch("warp_scorer_kernel", cb::warp_scorer_kernel<S, T>, all.chunks(), 256, 0, ctx,
                       all.streams, all.source, scorer, call.scores);
        });
    }
};

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
