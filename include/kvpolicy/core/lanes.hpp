// Vectors of 32 bytes for the host's scorers: 8 floats or 4 doubles, in one register under AVX2 and
// in two otherwise.
//
// Every operation is lane by lane, sums are folded in one fixed order, and every product that is added goes
// through multiply_add, which is never fused or always: a kernel written with lanes gives the same bits on
// every instruction set that a translation unit chooses from at run time, and under every blocking.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/context.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#if KVPOLICY_X86 && defined(__FMA__)
#include <immintrin.h>
#endif

namespace kvpolicy::host_backend {

/// body(0), ..., body(N - 1) with the index as a type. At -O2 g++ leaves loops over a few vectors rolled, and
/// a rolled loop keeps its accumulators in memory. Every body must be always_inline: one that stays a call is
/// compiled for the baseline, and takes its vectors through memory.
template <class Body, int... I>
[[gnu::always_inline]] inline void unroll_over(Body& body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
[[gnu::always_inline]] inline void unroll(Body&& body) {
    unroll_over(body, std::make_integer_sequence<int, N>{});
}

template <class Real, int Bytes>
struct vector_of;
#define KVPOLICY_VECTOR_OF(Real, Mask, Bytes)                                                         \
    template <>                                                                                       \
    struct vector_of<Real, Bytes> {                                                                   \
        using type [[gnu::vector_size(Bytes)]] = Real;                                                \
        using memory [[gnu::vector_size(Bytes), gnu::aligned(alignof(Real)), gnu::may_alias]] = Real; \
        using mask [[gnu::vector_size(Bytes)]] = Mask;                                                \
    }
KVPOLICY_VECTOR_OF(float, std::int32_t, 16);
KVPOLICY_VECTOR_OF(float, std::int32_t, 32);
KVPOLICY_VECTOR_OF(double, std::int64_t, 16);
KVPOLICY_VECTOR_OF(double, std::int64_t, 32);
#undef KVPOLICY_VECTOR_OF

/// sum += a * b, for numbers and vectors. Left to itself g++ fuses products and sums across statements where
/// a translation unit may use FMA (under -march=native), in some loops and not in others; so such units fuse
/// by intrinsics, all others never. (clang++ fuses within one expression only, so not here.)
#if KVPOLICY_X86 && defined(__FMA__)
#define KVPOLICY_MULTIPLY_ADD(X, fused)                                               \
    [[gnu::always_inline]] inline void multiply_add(X& sum, const X& a, const X& b) { \
        sum = fused(a, b, sum);                                                       \
    }
KVPOLICY_MULTIPLY_ADD(float, __builtin_fmaf)
KVPOLICY_MULTIPLY_ADD(double, __builtin_fma)
KVPOLICY_MULTIPLY_ADD(__m128, _mm_fmadd_ps)
KVPOLICY_MULTIPLY_ADD(__m256, _mm256_fmadd_ps)
KVPOLICY_MULTIPLY_ADD(__m128d, _mm_fmadd_pd)
KVPOLICY_MULTIPLY_ADD(__m256d, _mm256_fmadd_pd)
#undef KVPOLICY_MULTIPLY_ADD
#elif !KVPOLICY_X86 && !defined(__CUDACC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
template <class X>
[[gnu::always_inline]] inline void multiply_add(X& sum, const X& a, const X& b) {
    sum += __builtin_assoc_barrier(a * b);
}
#else
template <class X>
[[gnu::always_inline]] inline void multiply_add(X& sum, const X& a, const X& b) {
    sum += a * b;
}
#endif

/// Arguments and results go by reference: a vector that is passed by value has another ABI on each
/// instruction set.
template <class Real, isa Set>
struct lanes {
    static constexpr int bytes = Set == isa::avx2 ? 32 : 16;
    static constexpr int parts = 32 / bytes;
    static constexpr int width = 32 / static_cast<int>(sizeof(Real));
    static constexpr int part_width = width / parts;
    using part = typename vector_of<Real, bytes>::type;
    using memory = typename vector_of<Real, bytes>::memory;  // anywhere in an array
    using mask = typename vector_of<Real, bytes>::mask;

    part p[parts];

    [[gnu::always_inline]] inline void fill(Real value) {
        for_parts([&](auto i) __attribute__((always_inline)) {
            p[i] = value - part{};
        });  // value - 0 keeps the sign of -0
    }
    [[gnu::always_inline]] inline void load(const Real* from) {
        for_parts([&](auto i) __attribute__((always_inline)) {
            p[i] = *reinterpret_cast<const memory*>(from + i * part_width);
        });
    }
    [[gnu::always_inline]] inline void store(Real* to) const {
        for_parts([&](auto i) __attribute__((always_inline)) {
            *reinterpret_cast<memory*>(to + i * part_width) = p[i];
        });
    }
    /// Loads `count` < width numbers; the other lanes hold `rest`.
    [[gnu::always_inline]] inline void load_some(const Real* from, int count, Real rest) {
        Real all[width];
        for (int i = 0; i < width; ++i) {
            all[i] = i < count ? from[i] : rest;
        }
        load(all);
    }
    [[gnu::always_inline]] inline void store_some(Real* to, int count) const {
        Real all[width];
        store(all);
        for (int i = 0; i < count; ++i) {
            to[i] = all[i];
        }
    }
    /// Weights are fp32 in every computation.
    [[gnu::always_inline]] inline void load_weights(const float* from) {
        if constexpr (sizeof(Real) == sizeof(float)) {
            load(from);
        } else {
            Real all[width];
            for (int i = 0; i < width; ++i) {
                all[i] = static_cast<Real>(from[i]);
            }
            load(all);
        }
    }
    [[gnu::always_inline]] inline void load_weights(const double* from) requires(sizeof(Real) ==
                                                                                 sizeof(double)) {
        load(from);
    }

    /// this += a * b
    [[gnu::always_inline]] inline void add_product(const lanes& a, const lanes& b) {
        for_parts([&](auto i) __attribute__((always_inline)) { multiply_add(p[i], a.p[i], b.p[i]); });
    }
    [[gnu::always_inline]] inline void add_product(Real a, const lanes& b) {
        for_parts([&](auto i) __attribute__((always_inline)) { multiply_add(p[i], a - part{}, b.p[i]); });
    }
    [[gnu::always_inline]] inline void add(const lanes& a) {
        for_parts([&](auto i) __attribute__((always_inline)) { p[i] += a.p[i]; });
    }
    [[gnu::always_inline]] inline void multiply(Real a) {
        for_parts([&](auto i) __attribute__((always_inline)) { p[i] *= a; });
    }
    [[gnu::always_inline]] inline void negate() {
        for_parts([&](auto i) __attribute__((always_inline)) { p[i] = -p[i]; });
    }
    /// Lane by lane, the larger; a NaN in `a` is skipped.
    [[gnu::always_inline]] inline void raise_to(const lanes& a) {
        for_parts([&](auto i) __attribute__((always_inline)) { pick(p[i], a.p[i] > p[i], a.p[i], p[i]); });
    }

    /// The sum of all lanes, in the same order for every instruction set: lane i with lane i +
    /// width / 2, and so on.
    [[gnu::always_inline]] inline Real sum() const {
        using half_type = typename vector_of<Real, 16>::type;
        using half_memory = typename vector_of<Real, 16>::memory;
        constexpr int half = width / 2;
        Real all[width];
        store(all);
        const half_type folded =
            *reinterpret_cast<const half_memory*>(all) + *reinterpret_cast<const half_memory*>(all + half);
        *reinterpret_cast<half_memory*>(all) = folded;
        if constexpr (half == 2) {
            return all[0] + all[1];
        } else {
            return (all[0] + all[2]) + (all[1] + all[3]);
        }
    }
    [[gnu::always_inline]] inline Real largest() const {
        Real all[width];
        store(all);
        Real most = all[0];
        for (int i = 1; i < width; ++i) {
            most = all[i] > most ? all[i] : most;
        }
        return most;
    }

    /// e to this, within 2 ulp in fp32: 0 below -87.3, infinity above 88.3, NaN where it is NaN.
    [[gnu::always_inline]] inline void exponentiate() {
        if constexpr (sizeof(Real) == sizeof(float)) {
            for_parts([&](auto i) __attribute__((always_inline)) {
                // x = n log 2 + r with |r| <= log(2) / 2. Adding 1.5 * 2^23 leaves round(x / log 2)
                // in the low bits.
                constexpr float shift = 12582912.0f;
                const part x = p[i];
                part inside;
                pick(inside, x > 88.3f, part{} + 88.0f, x);
                pick(inside, inside < -87.3f, part{} - 87.0f, inside);
                part shifted = part{} + shift;
                multiply_add(shifted, inside, part{} + 1.44269504088896341f);
                const part n = shifted - shift;
                part r = inside;
                multiply_add(r, n, part{} - 0.693359375f);
                multiply_add(r, n, part{} + 2.12194440e-4f);
                part e = part{} + 1.9875691500e-4f;
                const auto horner = [&](float coefficient) __attribute__((always_inline)) {
                    part next = part{} + coefficient;
                    multiply_add(next, e, r);
                    e = next;
                };
                horner(1.3981999507e-3f);
                horner(8.3334519073e-3f);
                horner(4.1665795894e-2f);
                horner(1.6666665459e-1f);
                horner(5.0000001201e-1f);
                horner(1.0f);
                horner(1.0f);
                const mask exponent = (((mask)shifted) + (127 - 0x4b400000)) << 23;
                e *= (part)exponent;
                pick(e, x > 88.3f, part{} + std::numeric_limits<float>::infinity(), e);
                pick(p[i], x < -87.3f, part{}, e);
            });
        } else {
            Real all[width];
            store(all);
            for (int i = 0; i < width; ++i) {
                all[i] = std::exp(all[i]);
            }
            load(all);
        }
    }

  private:
    template <class Body>
    [[gnu::always_inline]] static inline void for_parts(Body&& body) {
        unroll<parts>(body);
    }

    /// out = where ? a : b
    [[gnu::always_inline]] static inline void pick(part& out, const mask& where, const part& a,
                                                   const part& b) {
        out = (part)((where & (mask)a) | (~where & (mask)b));
    }
};

#if KVPOLICY_X86
// AVX2 without FMA: see the top of this file. flatten, since a kernel that stays a call would be compiled
// for the baseline.
template <class Kernel, class... Arguments>
[[gnu::target("avx2"), gnu::flatten]] void run_avx2(Arguments... arguments) {
    Kernel::template run<isa::avx2>(arguments...);
}
#endif

/// Runs a kernel, a struct with `template <isa> static void run(arguments)`, on an instruction set that
/// the machine has.
template <class Kernel, class... Arguments>
void run_kernel(isa set, Arguments... arguments) {
#if KVPOLICY_X86
    if (set == isa::avx2) {
        run_avx2<Kernel>(arguments...);
        return;
    }
#endif
    static_cast<void>(set);
    Kernel::template run<isa::portable>(arguments...);
}

}  // namespace kvpolicy::host_backend
