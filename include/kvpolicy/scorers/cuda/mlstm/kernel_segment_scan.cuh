// From what the segments of an mLSTM's planes add and keep to the states that they begin with: between the
// kernel that adds them up (kernel_chunk_states.cuh, kernel_segment_states_hopper.cuh) and the one that goes
// through them.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// segment_scan: from what segments add and keep, the states that they begin with.
/// Grid: a thread per four numbers of a plane's state. Block: 256 threads. Shared memory: none.
/// In: partial_states [planes, segments * cuts, F (V + 1)] and partial_keeps of segment_states.
/// Out: partial_states, in place: number i becomes the state that segment i begins with.
template <class T, int F, int V>
__global__ void __launch_bounds__(256)
    mlstm_segment_scan_kernel(const mlstm_params<T> params, const bool backward) {
    constexpr int size = F * (V + 1) / 4;
    const std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
    const auto plane = static_cast<std::int32_t>(i / size);
    const auto column = static_cast<std::int32_t>(i % size);
    const scorer_streams& streams = params.streams;
    if (plane >= streams.batch * streams.heads) {
        return;
    }
    const std::int64_t first = std::int64_t{plane} * params.segments * params.cuts;
    const std::int32_t last = (params.segments - 1) * params.cuts;
    float4* const states = reinterpret_cast<float4*>(params.partial_states) + first * size + column;
    float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!backward && params.state_before(plane) != nullptr) {
        all = states[0];
    }
    constexpr int together = 8;  // loads that are under way at once
    for (std::int32_t from = 1; from <= last; from += together) {
        float4 added[together];
        float keeps[together];
#pragma unroll
        for (int x = 0; x < together; ++x) {
            if (from + x <= last) {
                added[x] = states[std::int64_t{from + x} * size];
                keeps[x] = params.partial_keeps[first + from + x - 1];
            }
        }
#pragma unroll
        for (int x = 0; x < together; ++x) {
            if (from + x <= last) {
                const float keep = keeps[x];
                const bool none = keep < 0.0f;  // not even what is not finite
                all.x = (none ? 0.0f : keep * all.x) + added[x].x;
                all.y = (none ? 0.0f : keep * all.y) + added[x].y;
                all.z = (none ? 0.0f : keep * all.z) + added[x].z;
                all.w = (none ? 0.0f : keep * all.w) + added[x].w;
                states[std::int64_t{from + x} * size] = all;
            }
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
