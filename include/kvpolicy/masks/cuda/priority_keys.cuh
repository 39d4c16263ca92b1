// Sort keys: ascending order of the key is the order of ranks, best first. Equal keys keep their order (older
// first), so sorts must be stable. NaN ranks behind every number, and what does not compete behind all.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr std::uint32_t idle_key = 0xffffffffu;
inline constexpr std::uint32_t nan_key = 0xfffffffeu;
inline constexpr std::uint64_t idle_code = ~std::uint64_t{0};
inline constexpr std::uint64_t nan_code = ~std::uint64_t{0} - 1;

/// Larger numbers get smaller keys; -0 and +0 the same. On bits, so that no compiler flag for denormals
/// matters.
__device__ inline std::uint32_t descending_key(float value) {
    std::uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return nan_key;
    }
    if ((bits << 1) == 0u) {
        bits = 0u;
    }
    return (bits >> 31) != 0u ? bits : ~(bits | 0x80000000u);
}

__device__ inline std::uint64_t descending_code(double value) {
    auto bits = static_cast<std::uint64_t>(__double_as_longlong(value));
    constexpr std::uint64_t sign = std::uint64_t{1} << 63;
    if ((bits & ~sign) > 0x7ff0000000000000u) {
        return nan_code;
    }
    if ((bits << 1) == 0u) {
        bits = 0u;
    }
    return (bits & sign) != 0u ? bits : ~(bits | sign);
}

/// The 32-bit sort key of a priority. Exact for gamma = 1, where the priority is the score. Otherwise the
/// priority rounded to fp32: rounding never turns two numbers around, so only runs of equal keys need the
/// 64-bit code.
__device__ inline std::uint32_t priority_key(const HeadParams& head_params, float score, std::int32_t t) {
    if (head_params.log_gamma == 0.0f) {
        return descending_key(score);
    }
    return descending_key(__double2float_rn(static_priority(score, head_params.log_gamma, t)));
}

__device__ inline std::uint64_t priority_code(const HeadParams& head_params, float score, std::int32_t t) {
    return descending_code(static_priority(score, head_params.log_gamma, t));
}

/// A sort key of `bits` bits, 32 to 61, whose order is the priorities' but for runs of equal keys: sign, the
/// exponents of fp32, and as much of the double's mantissa as there are bits for. `is_exact`: the
/// priority is the score, all of which is in the key. Cut off, not rounded: either keeps the order. All ones
/// stand for what does not compete, one less for NaN.
__device__ inline std::uint64_t priority_prefix(float score, bool is_exact, double priority, int bits) {
    const std::uint64_t half = std::uint64_t{1} << (bits - 1);
    if (score != score) {
        return 2 * half - 2;
    }
    if (is_exact) {
        return static_cast<std::uint64_t>(descending_key(score)) << (bits - 32);
    }
    constexpr std::uint64_t sign = std::uint64_t{1} << 63;
    constexpr std::uint64_t least = std::uint64_t{1023 - 127}
                                    << 52;                    // what fp32 cannot tell from 0 is one run,
    constexpr std::uint64_t most = std::uint64_t{255} << 52;  // and so is what it takes for infinity
    const auto value = static_cast<std::uint64_t>(__double_as_longlong(priority));
    std::uint64_t magnitude = value & ~sign;
    magnitude = magnitude < least ? 0 : magnitude - least < most ? magnitude - least : most;
    magnitude >>= 61 - bits;
    // Zeros of both signs are one number.
    return (value & sign) != 0 && (value & ~sign) != 0 ? half + magnitude : half - 1 - magnitude;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
