// A thread's part of two rows: logits of a tile become exponents, and exponents one number a row.
//
// The layout is that of mma and wgmma accumulators: value i of s belongs to row (i / 2) % 2 of the thread's
// two rows (8 apart) and to column 8 (i / 4) + i % 2 from the thread's first, which is 2 pair, pair being its
// lane % 4. Rows never meet across threads before the end, so that a row's four threads may have different
// largest exponents meanwhile.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Lower than every exponent of a finite logit, and finite, so that no infinity is taken from another.
inline constexpr float no_exponent = -1e30f;

/// 2^x on the arithmetic units, for a share of the exponents where the special function unit is the
/// bottleneck. x is cut to [-125, 127]. The cubic is the minimax one for the relative error on [-1/2, 1/2]:
/// 7.5e-5. A NaN becomes about 2^127 or more, which a quick pass takes for an overflow.
template <bool CutAbove>
__device__ inline float polynomial_exp2(float x) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    x = larger_or_nan(x, -125.0f);
    if constexpr (CutAbove) {
        x = fminf(x, 127.0f);
    }
    const float rounded = x + magic;
    const float rest = x - (rounded - magic);
    float y = fmaf(0.0551716691f, rest, 0.2426111222f);
    y = fmaf(y, rest, 0.6932609855f);
    y = fmaf(y, rest, 0.9999280735f);
    return __int_as_float(__float_as_int(y) + (__float_as_int(rounded) << 23));
}

/// Whether exponent i of a tile goes the polynomial way, for `Share` of every 8.
template <int Share>
__device__ constexpr bool by_polynomial(int i) {
    return (i & 7) * Share % 8 + Share >= 8;
}

/// The numbers of a pass that absorb() needs, in registers.
struct row_constants {
    float scale;  // not negative: a negative one is turned around by prepare()
    float cap;    // soft cap, or 0
    float inner;  // 2 log2(e) logit scale / soft cap
    bool negate;
};

inline __device__ row_constants constants_of(const qk_reduce_exponents<float>& exponents) {
    row_constants c;
    c.scale = fabsf(exponents.scale);
    c.negate = exponents.scale < 0.0f;
    c.cap = exponents.cap;
    c.inner = exponents.inner * 2.8853900817779268f;
    return c;
}

/// Softcap and sign, where there are any. cap tanh(y) = cap - 2 cap / (exp(2 y) + 1): no more error than cap
/// times fp32's.
template <int N>
__device__ inline void prepare(float (&s)[N], const row_constants& c) {
    if (c.cap > 0.0f) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = c.cap - __fdividef(2.0f * c.cap, fast_exp2(s[i] * c.inner) + 1.0f);
        }
    }
    if (c.negate) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = -s[i];
        }
    }
}

/// visit(i, bias of logit i's column) for the N logits of a thread.
template <int N, class Visit>
__device__ inline void for_each_bias(const float* bias, const Visit& visit) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float2 of = *reinterpret_cast<const float2*>(bias + 8 * j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            visit(4 * j + e, e % 2 == 0 ? of.x : of.y);
        }
    }
}

/// What two rows have reduced so far.
template <class Pass>
struct row_state {
    float top[2];  // largest exponent: relative (of the first tile), running and largest
    float sum[2];  // of exponentials, relative to `top` where there is one

    __device__ void clear() {
        const float lowest = Pass::reduce == row_reduce::largest ? -INFINITY : no_exponent;
        top[0] = top[1] = lowest;
        sum[0] = sum[1] = 0.0f;
    }

    /// Reduces a tile in. `bias` [columns], shared memory, at the thread's first column (a mass's); `first`
    /// is that column less the thread's first row, `left` how many columns there are from it on. Share: of 8
    /// exponents, how many by polynomial. The logits are left alone: ptxas makes wgmmas wait for each other
    /// where other instructions write registers that are accumulators.
    template <bool Masked, int Share, int N>
    __device__ void absorb(const float (&logits)[N], const float* bias, const row_constants& c,
                           std::int32_t first, std::int32_t left, std::int32_t low, std::uint32_t span) {
        float s[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = logits[i];
        }
        prepare(s, c);
        const auto seen = [&](int i) {
            const std::int32_t apart = first + 8 * (i / 4) + i % 2 - 8 * (i / 2 % 2);
            return static_cast<std::uint32_t>(apart - low) <= span && 8 * (i / 4) + i % 2 < left;
        };
        if constexpr (!Pass::mass) {
            absorb_logits<Masked, Share>(s, c.scale, seen);
        } else if constexpr (Pass::reduce == row_reduce::sum) {
            float part[2] = {0.0f, 0.0f};
            for_each_bias<N>(bias, [&](int i, float one) {
                float x = fmaf(s[i], c.scale, one);
                if constexpr (Masked) {
                    x = seen(i) ? x : -INFINITY;
                }
                // A masked exponent is exactly 0, so these take the unit that makes it so.
                part[i / 2 % 2] +=
                    !Masked && by_polynomial<Share>(i) ? polynomial_exp2<true>(x) : fast_exp2(x);
            });
            sum[0] += part[0];
            sum[1] += part[1];
        } else {
            float most[2] = {top[0], top[1]};
            for_each_bias<N>(bias, [&](int i, float one) {
                s[i] = fmaf(s[i], c.scale, one);
                if constexpr (Masked) {
                    s[i] = seen(i) ? s[i] : -INFINITY;
                }
                most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[i]);
            });
            if constexpr (Pass::reduce == row_reduce::running) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    sum[r] *= fast_exp2(top[r] - most[r]);
                }
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    sum[i / 2 % 2] += fast_exp2(s[i] - most[i / 2 % 2]);
                }
            }
            top[0] = most[0];
            top[1] = most[1];
        }
    }

    /// Reduces a part of a tile in whose pairs all count: values [4 begin, 4 end) of every row, in a quick
    /// pass and without a soft cap. `bias` and Share as above, `scale` with its sign. A relative pass has
    /// had its first tile by absorb() before.
    template <int Share, int N>
    __device__ void absorb_part(const float (&s)[N], int begin, int end, const float* bias, float scale) {
        static_assert(Pass::quick);
        float part[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
            if (j < begin || j >= end) {
                continue;
            }
            const float2 of =
                Pass::mass ? *reinterpret_cast<const float2*>(bias + 8 * j) : make_float2(0.0f, 0.0f);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = 4 * j + e;
                const float one = !Pass::mass ? -top[e / 2] : e % 2 == 0 ? of.x : of.y;
                const float x = fmaf(s[i], scale, one);
                part[e / 2] += by_polynomial<Share>(i) ? polynomial_exp2<true>(x) : fast_exp2(x);
            }
        }
        sum[0] += part[0];
        sum[1] += part[1];
    }

    /// The two rows' results, the same in all four threads of a row: the base-2 logarithm of the sum, or the
    /// largest exponent. `overflow` says where a sum has left the range in which it can be trusted.
    __device__ void reduce(float (&result)[2], bool (&overflow)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            overflow[r] = false;
            float most = top[r];
            if constexpr (Pass::reduce != row_reduce::sum) {
                most = fmaxf(most, __shfl_xor_sync(all_lanes, most, 1));
                most = fmaxf(most, __shfl_xor_sync(all_lanes, most, 2));
            }
            if constexpr (Pass::reduce == row_reduce::largest) {
                result[r] = most;
            } else {
                float total = sum[r];
                if constexpr (Pass::reduce == row_reduce::relative) {
                    // The thread of the largest reference has a sum of 1 or more: what the others lose below
                    // is less than 2^-26.
                    overflow[r] = !(total < 0x1p100f);
                }
                if constexpr (!Pass::mass || Pass::reduce == row_reduce::running) {
                    total *= fast_exp2(top[r] - most);
                }
                total += __shfl_xor_sync(all_lanes, total, 1);
                total += __shfl_xor_sync(all_lanes, total, 2);
                if constexpr (Pass::reduce == row_reduce::sum) {
                    overflow[r] = !(total < 0x1p126f);
                    result[r] = log2f(total);
                } else {
                    result[r] = total == 0.0f ? -INFINITY : most + log2f(total);  // a NaN stays one
                }
            }
        }
    }

  private:
    template <bool Masked, int Share, int N, class Seen>
    __device__ void absorb_logits(float (&s)[N], float scale, const Seen& seen) {
        float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (Masked) {
                s[i] = seen(i) ? s[i] : -INFINITY;
            }
            most[i / 2 % 2] = larger_or_nan(most[i / 2 % 2], s[i]);
        }
        float part[2] = {0.0f, 0.0f};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // A NaN stays in `top`, and so in the sum, whatever way its own exponential goes.
            most[r] = larger_or_nan(top[r], most[r] * scale);
            sum[r] *= fast_exp2(top[r] - most[r]);
            top[r] = most[r];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float x = fmaf(s[i], scale, -top[i / 2 % 2]);
            part[i / 2 % 2] += !Masked && by_polynomial<Share>(i) ? polynomial_exp2<false>(x) : fast_exp2(x);
        }
        sum[0] += part[0];
        sum[1] += part[1];
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
