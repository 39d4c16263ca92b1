// The scalar types of the library: storage formats of keys and values, positions, expiries.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvpolicy {

/// A token's logical place in its sequence, 0-based. It never comes from the count of rows kept.
using position_t = std::int64_t;

/// The first query position, relative to a mask's base, from which a key is no longer visible.
using expiry_t = std::int32_t;

/// The expiry of a key that is never evicted.
inline constexpr expiry_t never = std::numeric_limits<expiry_t>::max();

/// A budget without a limit (k = infinity).
inline constexpr std::int32_t unlimited = std::numeric_limits<std::int32_t>::max();

/// A parameter that is a run-time value: Sink<>{s} is Sink<dynamic>{s}. Not -1, which somebody may
/// mean as a number.
inline constexpr std::int32_t dynamic = std::numeric_limits<std::int32_t>::min();

// __builtin_bit_cast and not std::bit_cast: the conversions run in kernels too, and nvcc takes a std
// constexpr function there only under a flag that users need not set.

/// Brain float: the upper half of an IEEE float, rounded to nearest even. Same layout as __nv_bfloat16.
struct bf16 {
    std::uint16_t bits;

    bf16() = default;
    KVPOLICY_HOST_DEVICE explicit constexpr bf16(float value) : bits(round(value)) {}
    KVPOLICY_HOST_DEVICE constexpr explicit operator float() const {
        return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
    }

  private:
    KVPOLICY_HOST_DEVICE static constexpr std::uint16_t round(float value) {
        const std::uint32_t u = __builtin_bit_cast(std::uint32_t, value);
        if ((u & 0x7fffffffu) > 0x7f800000u) {
            return static_cast<std::uint16_t>((u >> 16) | 0x40u);
        }  // keep NaN a NaN
        return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
};

/// IEEE half precision, rounded to nearest even. Same layout as __half. A device converts by one instruction,
/// whose NaNs have other bits.
struct fp16 {
    std::uint16_t bits;

    fp16() = default;
    KVPOLICY_HOST_DEVICE explicit constexpr fp16(float value) : bits(round(value)) {}
    KVPOLICY_HOST_DEVICE constexpr explicit operator float() const {
#if defined(__CUDA_ARCH__)
        if (!__builtin_is_constant_evaluated()) {
            float value;
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
            return value;
        }
#endif
        const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
        const std::uint32_t exponent = (bits >> 10) & 0x1fu;
        std::uint32_t mantissa = bits & 0x3ffu;
        if (exponent == 31u) {
            return __builtin_bit_cast(float, sign | 0x7f800000u | (mantissa << 13));
        }
        if (exponent != 0u) {
            return __builtin_bit_cast(float, sign | ((exponent + 112u) << 23) | (mantissa << 13));
        }
        // A subnormal half is mantissa * 2^-24, which a float holds exactly.
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, magnitude) | sign);
    }

  private:
    KVPOLICY_HOST_DEVICE static constexpr std::uint16_t round(float value) {
#if defined(__CUDA_ARCH__)
        if (!__builtin_is_constant_evaluated()) {
            std::uint16_t half;
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
            return half;
        }
#endif
        const std::uint32_t u = __builtin_bit_cast(std::uint32_t, value);
        const std::uint32_t sign = (u >> 16) & 0x8000u;
        const std::uint32_t magnitude = u & 0x7fffffffu;
        if (magnitude > 0x7f800000u) {
            return static_cast<std::uint16_t>(sign | 0x7e00u);
        }
        if (magnitude >= 0x477ff000u) {
            return static_cast<std::uint16_t>(sign | 0x7c00u);
        }  // rounds past 65504
        if (magnitude < 0x38800000u) {
            // Below 2^-14: adding 0.5 puts the half's unit in the last place (2^-24) at the float's.
            const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
            return static_cast<std::uint16_t>(sign |
                                              (__builtin_bit_cast(std::uint32_t, shifted) - 0x3f000000u));
        }
        const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
        return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
    }
};

/// A storage type of keys and values: bf16, fp16, float, and double for checks.
template <class T>
concept Storage = std::is_same_v<T, bf16> || std::is_same_v<T, fp16> || std::is_same_v<T, float> ||
    std::is_same_v<T, double>;

static_assert(Storage<bf16> && Storage<fp16> && Storage<float> && Storage<double>);

/// What a storage type is computed in: fp32, and double for double (which exists for checks
/// against references).
template <Storage T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// The same for the elements of a view, which may be const.
template <class T>
requires Storage<std::remove_const_t<T>>
using real_of = compute_t<std::remove_const_t<T>>;

}  // namespace kvpolicy
