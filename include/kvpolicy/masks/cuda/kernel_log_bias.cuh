#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/log_bias.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A gate as kernels take it: tau, where it has one, as a logit.
template <class G>
struct ready_gate {
    G gate;
    float threshold;

    explicit ready_gate(const G& from) : gate(from), threshold(0.0f) {
        if constexpr (has_threshold) {
            threshold = from.threshold();
        }
    }
    __device__ gate_value<float> operator()(float z, const gate_place& place) const {
        if constexpr (has_threshold) {
            return gate.at(z, threshold);
        } else {
            return gate(z, place);
        }
    }

  private:
    static constexpr bool has_threshold = requires(const G& g) { g.at(0.0f, g.threshold()); };
};

/// Which key a thread has, and whether the gate decides it: it leaves the window before the end (`outside`),
/// and is not kept by its position.
struct gated_key {
    std::int32_t b, h, t;  // t from the sequence's begin
    bool inside, outside, by_position, decided;
    expiry_t open_expiry, closed_expiry;
    gate_place place;
};

/// One thread per key, one block per chunk of a plane.
template <class Gate, class Keep>
__device__ inline gated_key key_of_thread(const mask_params<Gate, Keep>& params) {
    const auto planes = static_cast<unsigned>(params.planes());
    const auto chunk_index = static_cast<std::int32_t>(blockIdx.x / planes);
    const std::int64_t plane = blockIdx.x % planes;
    gated_key key{};
    key.b = params.sequence_of(plane);
    key.h = params.head_of(plane);
    const segment_range segment = params.segment(key.b, params.segment_of_chunk(chunk_index));
    const std::int32_t n = segment.length();
    const std::int32_t t = (chunk_index - params.first_chunk(segment.index)) * mask_chunk +
                           static_cast<std::int32_t>(threadIdx.x);
    key.inside = t < n;
    if (!key.inside) {
        return key;
    }
    const HeadParams head_params = params.all_params.of(key.h);
    const bool packed = params.edges != nullptr;
    key.t = segment.begin + t;
    key.outside = t < n - head_params.window;
    key.by_position = params.forever(head_params, t);
    key.decided = key.outside && !key.by_position;
    key.open_expiry = in_sequence(never, segment, packed);
    key.closed_expiry = in_sequence(window_expiry(t, head_params.window), segment, packed);
    key.place = {static_cast<std::uint64_t>(plane), static_cast<std::uint64_t>(key.t)};
    return key;
}

/// Expiry and log-bias of every key from a training gate.
///
/// Grid: planes * chunks. Block: mask_chunk threads, a key each. Shared memory: none. Reads scores [B, Hkv,
/// S], fp32. Overwrites expiry (int32) and log_bias (fp32) [B, Hkv, S]. A NaN score is closed, and sets
/// status_nan_score.
template <class G, class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    log_bias_kernel(const mask_params<Gate, Keep> params, const ready_gate<G> gate,
                    const plane_view<expiry_t> expiry, const plane_view<float> log_bias) {
    const gated_key key = key_of_thread(params);
    if (blockIdx.x < static_cast<unsigned>(params.planes()) && threadIdx.x == 0 && key.h == 0) {
        params.check_length(key.b);
    }
    if (!key.inside) {
        return;
    }
    bool open = true;
    float bias = 0.0f;
    if (key.decided) {
        const float score = params.scores.head(key.b, key.h)[key.t];
        if (score != score) {
            params.report(key.b, status_nan_score);
            open = false;
        } else {
            const gate_value<float> value = gate(score, key.place);
            open = value.open;
            bias = value.log_bias;
        }
    }
    expiry.head(key.b, key.h)[key.t] = open ? key.open_expiry : key.closed_expiry;
    log_bias.head(key.b, key.h)[key.t] = bias;
}

/// d_scores = d log_bias / d score * d_log_bias; 0 for keys that the gate does not decide.
///
/// Grid: planes * chunks. Block: mask_chunk threads, a key each. Shared memory: none. Reads scores and
/// d_log_bias [B, Hkv, S], fp32. Overwrites d_scores [B, Hkv, S], fp32.
template <class G, class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    log_bias_backward_kernel(const mask_params<Gate, Keep> params, const ready_gate<G> gate,
                             const plane_view<const float> d_log_bias, const plane_view<float> d_scores) {
    const gated_key key = key_of_thread(params);
    if (!key.inside) {
        return;
    }
    float slope = 0.0f;
    if (key.decided) {
        const float score = params.scores.head(key.b, key.h)[key.t];
        if (score == score) {
            slope = gate(score, key.place).derivative * d_log_bias.head(key.b, key.h)[key.t];
        }
    }
    d_scores.head(key.b, key.h)[key.t] = slope;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
