// bf16 and fp16: every bit pattern, and rounding against an independent computation.
#include <kvpolicy/core/types.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>

using namespace kvpolicy;

namespace {

template <class T>
struct format;
template <>
struct format<bf16> {
    static constexpr int precision = 8, exponent_bits = 8;
};
template <>
struct format<fp16> {
    static constexpr int precision = 11, exponent_bits = 5;
};

/// What a 16-bit pattern stands for, from the definition of IEEE formats. NaN for NaN.
template <class T>
double meaning(std::uint16_t bits) {
    constexpr int fraction_bits = format<T>::precision - 1;
    constexpr int top = (1 << format<T>::exponent_bits) - 1, bias = top / 2;
    const int exponent = bits >> fraction_bits & top;
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = bits >> 15 != 0 ? -1.0 : 1.0;
    if (exponent == top) {
        return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                             : sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) {
        return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
    }
    return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

/// A finite number rounded to nearest even: as an integer multiple of the unit in its last place.
template <class T>
double rounded(double value) {
    constexpr int bias = (1 << (format<T>::exponent_bits - 1)) - 1;
    if (value == 0.0 || std::isinf(value)) {
        return value;
    }
    const int exponent = std::max(std::ilogb(value), 1 - bias);
    const int unit = exponent - (format<T>::precision - 1);
    const double result = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
    return std::abs(result) >= std::ldexp(1.0, bias + 1)
               ? std::copysign(std::numeric_limits<double>::infinity(), value)
               : result;
}

template <class T>
bool converts_right(float value) {
    const T got(value);
    if (std::isnan(value)) {
        return std::isnan(meaning<T>(got.bits)) && (got.bits >> 15 != 0) == std::signbit(value);
    }
    const double wanted = rounded<T>(value);
    return meaning<T>(got.bits) == wanted && (got.bits >> 15 != 0) == std::signbit(value);
}

}  // namespace

TEST_CASE_TEMPLATE("every 16-bit pattern means what the format says and comes back", T, bf16, fp16) {
    int wrong = 0;
    for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
        T x;
        x.bits = static_cast<std::uint16_t>(pattern);
        const float value = static_cast<float>(x);
        const double wanted = meaning<T>(x.bits);
        const bool is_nan = std::isnan(wanted);
        const bool means = is_nan ? std::isnan(value) : static_cast<double>(value) == wanted;
        const bool sign = std::signbit(value) == (pattern >> 15 != 0);
        const T back(value);
        const bool returns = is_nan ? std::isnan(static_cast<float>(back)) : back.bits == x.bits;
        wrong += means && sign && returns ? 0 : 1;
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("float rounds to nearest even, at and beside every midpoint", T, bf16, fp16) {
    int wrong = 0;
    for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
        const auto bits = static_cast<std::uint16_t>(pattern);
        const double low = meaning<T>(bits);
        if (!std::isfinite(low)) {
            continue;
        }
        // The next number away from zero; beyond the largest, what it would be with more exponents.
        const double next = meaning<T>(static_cast<std::uint16_t>(bits + 1));
        const double before = bits % 0x8000 == 0 ? 0.0 : meaning<T>(static_cast<std::uint16_t>(bits - 1));
        const double high = std::isfinite(next) ? next : low + (low - before);
        const auto middle = static_cast<float>((low + high) / 2.0);
        for (const float x : {static_cast<float>(low), middle, std::nextafter(middle, 0.0f),
                              std::nextafter(middle, static_cast<float>(high)),
                              std::nextafter(static_cast<float>(low), static_cast<float>(high))}) {
            wrong += converts_right<T>(x) ? 0 : 1;
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("float rounds to nearest even, on random bits and at the edges", T, bf16, fp16) {
    constexpr float edges[] = {0.0f,
                               -0.0f,
                               1.0f,
                               65504.0f,
                               65519.996f,
                               65520.0f,
                               -65520.0f,
                               65536.0f,
                               0x1p-14f,
                               0x1p-24f,
                               0x1p-25f,
                               0x1.8p-25f,
                               0x1.000002p-25f,
                               0x1p-26f,
                               0x1.ffcp-15f,
                               0x1.ffep-15f,
                               0x1.fffffep-15f,
                               0x1p-126f,
                               0x1p-133f,
                               0x1p-134f,
                               0x1p-149f,
                               3.3895314e38f,
                               3.396e38f,
                               3.4028235e38f};
    int wrong = 0;
    for (const float x : edges) {
        wrong += converts_right<T>(x) && converts_right<T>(-x) ? 0 : 1;
    }
    for (const float x : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                          std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu),
                          std::bit_cast<float>(0x7f80ffffu)}) {
        wrong += converts_right<T>(x) ? 0 : 1;
    }
    std::mt19937 generator(1);
    for (int i = 0; i < 300000; ++i) {
        wrong += converts_right<T>(std::bit_cast<float>(static_cast<std::uint32_t>(generator()))) ? 0 : 1;
        // Where fp16 has its numbers.
        const std::uint32_t near = (static_cast<std::uint32_t>(generator()) & 0x81ffffffu) + 0x32000000u;
        wrong += converts_right<T>(std::bit_cast<float>(near)) ? 0 : 1;
    }
    CHECK(wrong == 0);
}

TEST_CASE("conversions are constant expressions, and the types are what kernels expect") {
    static_assert(bf16(1.0f).bits == 0x3f80 && static_cast<float>(bf16(-2.5f)) == -2.5f);
    static_assert(fp16(1.0f).bits == 0x3c00 && static_cast<float>(fp16(0x1p-24f)) == 0x1p-24f);
    static_assert(sizeof(bf16) == 2 && sizeof(fp16) == 2);
    static_assert(std::is_trivial_v<bf16> && std::is_trivial_v<fp16>);
    static_assert(std::is_standard_layout_v<bf16> && std::is_standard_layout_v<fp16>);
    // NOLINTNEXTLINE(misc-redundant-expression): two aliases that happen to name one type
    static_assert(std::is_same_v<compute_t<bf16>, float> && std::is_same_v<compute_t<fp16>, float> &&
                  std::is_same_v<compute_t<float>, float> && std::is_same_v<compute_t<double>, double>);
    static_assert(!Storage<int> && !Storage<long double>);
    CHECK(true);
}
