// Checks that every scorer on CUDA shares: lengths and starts, rows that are not finite, and a
// Rope's frequencies.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Reports sequences whose length or start is out of range.
/// Grid: one block. Block: 256 threads, a sequence each. Shared memory: none.
/// Out: status_bad_length in streams.status, by atomic or.
template <class Streams>
__global__ void __launch_bounds__(256) check_streams_kernel(const Streams streams) {
    for (auto b = static_cast<std::int32_t>(threadIdx.x); b < streams.batch; b += 256) {
        if (!streams.fits(b)) {
            streams.report(b, status_bad_length);
        }
    }
}

/// Frequency i of a Rope that gives a base: base^(-2 i / rotated), rounded once.
template <class Float>
__device__ inline Float rope_frequency(float base, std::int32_t i, std::int32_t rotated) {
    return static_cast<Float>(pow(static_cast<double>(base), -2.0 * i / rotated));
}

/// The frequencies of a Rope that gives a base.
/// Grid: one block. Block: 256 threads. Shared memory: none.
/// Out: frequencies [rotated / 2], overwritten.
template <class Float>
__global__ void __launch_bounds__(256)
    frequencies_kernel(const float base, const std::int32_t rotated, Float* const frequencies) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < rotated / 2; i += 256) {
        frequencies[i] = rope_frequency<Float>(base, i, rotated);
    }
}

/// Reports a chunk's tokens that are not finite, all threads of a block together.
template <class T>
__device__ inline void report_bad_rows(const scorer_streams& streams, const scorer_source<T>& source,
                                       const scorer_span& s) {
    constexpr int each = shared_tile<T>::plain ? 1 : 8;  // 16-bit rows are multiples of 16 bytes
    struct alignas(each * sizeof(T)) group {
        T of[each];
    };
    float finite = 0.0f;  // or NaN
    for (const rows_view<const T>& rows : {source.k, source.v}) {
        const std::int32_t across = rows.dim / each;
        for (auto i = static_cast<std::int32_t>(threadIdx.x); i < s.count * across;
             i += static_cast<std::int32_t>(blockDim.x)) {
            const group all =
                *reinterpret_cast<const group*>(rows.row(s.b, s.h, s.first + i / across) + i % across * each);
#pragma unroll
            for (int e = 0; e < each; ++e) {
                finite += static_cast<float>(all.of[e]) * 0.0f;
            }
        }
    }
    if (finite != 0.0f) {
        streams.report(s.b, status_not_finite);
    }
}

/// d loss / d score of token `t`; reported where it is not finite.
__device__ inline float gradient_of_score(const scorer_streams& streams,
                                          const plane_view<const float>& d_scores, const scorer_span& s,
                                          std::int32_t t) {
    const float d = d_scores.head(s.b, s.h)[t];
    if (!(fabsf(d) <= 3.402823466e38f)) {
        streams.report(s.b, status_not_finite);
    }
    return d;
}

enum class scorer_activation : std::uint8_t { silu, gelu_erf };

/// act(y), and act'(y) where it is asked for.
template <bool Slope>
__device__ inline float activated(scorer_activation kind, float y, float& slope) {
    if (kind == scorer_activation::silu) {
        const float e = expf(-fabsf(y));
        const float open = (y < 0.0f ? e : 1.0f) / (1.0f + e);
        if (Slope) {
            slope = open * (1.0f + y * ((y < 0.0f ? 1.0f : e) / (1.0f + e)));
        }
        return y * open;
    }
    const float below = (1.0f + erff(y * 0.70710678118654752440f)) * 0.5f;
    if (Slope) {
        slope = below + y * 0.39894228040143267794f * expf(-0.5f * y * y);
    }
    return y * below;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
