// The products of decoding for AVX2: keys and values are read where they lie, once for all rows (the query
// heads of a group), and converted in registers. While one half of a block is worked on, the half that comes
// next is fetched.
#pragma once

#include <kvpolicy/core/config.hpp>

#if KVPOLICY_X86

#include <kvpolicy/attention/host/simd_avx2.hpp>
#include <kvpolicy/attention/host/types.hpp>

#include <cstdint>

namespace kvpolicy::host_backend {

template <Storage T>
struct avx2_direct {
    /// scores[rows][0..count) = q[rows][Dk] . keys; fetches the values.
    KVPOLICY_AVX2 static void direct_qk(const attention_shape& shape, const key_block<T>& keys,
                                        std::int32_t rows, const float* q, float* scores) {
        std::int64_t r = 0;
        for (; takes_four(rows - r); r += 4) {
            products<4, 2>(shape, keys, q + r * shape.head_dim_qk, scores + r * block_keys, r == 0);
        }
        for (; rows - r >= 3; r += 3) {
            products<3, 2>(shape, keys, q + r * shape.head_dim_qk, scores + r * block_keys, r == 0);
        }
        if (rows - r == 2) {
            products<2, 4>(shape, keys, q + r * shape.head_dim_qk, scores + r * block_keys, r == 0);
        }
        if (rows - r == 1) {
            products<1, 8>(shape, keys, q + r * shape.head_dim_qk, scores + r * block_keys, r == 0);
        }
    }

    /// out = decay * out + weights[rows][0..count) . values; fetches the keys that probably come next.
    KVPOLICY_AVX2 static void direct_pv(const attention_shape& shape, const key_block<T>& keys,
                                        std::int32_t rows, const float* weights, const float* decay,
                                        float* out, std::int32_t stride) {
        std::int64_t r = 0;
        for (; takes_four(rows - r); r += 4) {
            mixtures<4, 2>(shape, keys, weights + r * block_keys, decay + r, out + r * stride, stride,
                           r == 0);
        }
        for (; rows - r >= 3; r += 3) {
            mixtures<3, 3>(shape, keys, weights + r * block_keys, decay + r, out + r * stride, stride,
                           r == 0);
        }
        if (rows - r == 2) {
            mixtures<2, 4>(shape, keys, weights + r * block_keys, decay + r, out + r * stride, stride,
                           r == 0);
        }
        if (rows - r == 1) {
            mixtures<1, 8>(shape, keys, weights + r * block_keys, decay + r, out + r * stride, stride,
                           r == 0);
        }
    }

  private:
    /// Rows go in fours and threes, so that no block of one is left over from four on: 5 = 3 + 2, 6 = 3 + 3.
    static constexpr bool takes_four(std::int64_t rows) { return rows >= 4 && rows != 5 && rows != 6; }

    KVPOLICY_AVX2_INLINE static void fetch(const T* row, std::int32_t dim) {
        constexpr std::int32_t line = 64 / sizeof(T);
        for (std::int32_t c = 0; c < dim; c += line) {
            _mm_prefetch(reinterpret_cast<const char*>(row + c), _MM_HINT_T0);
        }
    }

    /// R rows of queries times all keys, K keys at a time; R * K is 8, or 6.
    template <int R, int K>
    KVPOLICY_AVX2_INLINE static void products(const attention_shape& shape, const key_block<T>& block,
                                              const float* q, float* scores, bool first) {
        for (std::int32_t j = 0; j < block.count; j += K) {
            if (first) {
                for (std::int32_t i = j; i < j + K && i < block.count; ++i) {
                    fetch(block.v[i], shape.head_dim_vo);
                }
            }
            const T* const* keys = block.k + j;
            __m256 sum[8];
            KVPOLICY_UNROLL
            for (int i = 0; i < 8; ++i) {
                sum[i] = _mm256_setzero_ps();
            }
            for (std::int32_t d = 0; d < shape.head_dim_qk; d += 8) {
                __m256 x[K];
                KVPOLICY_UNROLL
                for (int i = 0; i < K; ++i) {
                    x[i] = avx2::load8(keys[i] + d);
                }
                KVPOLICY_UNROLL
                for (std::int64_t r = 0; r < R; ++r) {
                    const __m256 y = avx2::in_register(_mm256_loadu_ps(q + r * shape.head_dim_qk + d));
                    KVPOLICY_UNROLL
                    for (int i = 0; i < K; ++i) {
                        sum[r * K + i] = _mm256_fmadd_ps(x[i], y, sum[r * K + i]);
                    }
                }
            }
            const __m256 sums = avx2::sums_of(sum);
            const __m128 low = _mm256_castps256_ps128(sums);
            const __m128 high = _mm256_extractf128_ps(sums, 1);
            float* to = scores + j;
            if constexpr (K == 8) {
                _mm256_storeu_ps(to, sums);
            } else if constexpr (K == 4) {
                _mm_storeu_ps(to, low);
                _mm_storeu_ps(to + block_keys, high);
            } else {
                _mm_storel_pi(reinterpret_cast<__m64*>(to), low);
                _mm_storeh_pi(reinterpret_cast<__m64*>(to + block_keys), low);
                _mm_storel_pi(reinterpret_cast<__m64*>(to + std::int64_t{2} * block_keys), high);
                if constexpr (R == 4) {
                    _mm_storeh_pi(reinterpret_cast<__m64*>(to + std::int64_t{3} * block_keys), high);
                }
            }
        }
    }

    /// R rows of output, V vectors of columns at a time, then what is left of the columns.
    template <int R, int V>
    KVPOLICY_AVX2_INLINE static void mixtures(const attention_shape& shape, const key_block<T>& block,
                                              const float* weights, const float* decay, float* out,
                                              std::int32_t stride, bool first) {
        const std::int32_t dim = shape.head_dim_vo;
        std::int32_t c = 0;
        for (; c + 8 * V <= dim; c += 8 * V) {
            mixture<R, V>(shape, block, weights, decay, out, stride, c, first && c == 0);
        }
        for (; V > 4 && c + 32 <= dim; c += 32) {
            mixture<R, 4>(shape, block, weights, decay, out, stride, c, first && c == 0);
        }
        for (; c + 16 <= dim; c += 16) {
            mixture<R, 2>(shape, block, weights, decay, out, stride, c, first && c == 0);
        }
        for (; c < dim; c += 8) {
            mixture<R, 1>(shape, block, weights, decay, out, stride, c, first && c == 0);
        }
    }

    template <int R, int V>
    KVPOLICY_AVX2_INLINE static void mixture(const attention_shape& shape, const key_block<T>& block,
                                             const float* weights, const float* decay, float* out,
                                             std::int32_t stride, std::int32_t column, bool first) {
        __m256 sum[R][V];
        KVPOLICY_UNROLL
        for (int r = 0; r < R; ++r) {
            KVPOLICY_UNROLL
            for (int i = 0; i < V; ++i) {
                sum[r][i] = _mm256_setzero_ps();
            }
        }
        const T* ahead = first ? block.ahead : nullptr;
        for (std::int32_t j = 0; j < block.count; ++j) {
            if (ahead != nullptr) {
                fetch(ahead, shape.head_dim_qk);
                ahead += block.ahead_stride;
            }
            const T* row = block.v[j] + column;
            __m256 x[V];
            KVPOLICY_UNROLL
            for (std::int64_t i = 0; i < V; ++i) {
                x[i] = avx2::load8(row + 8 * i);
            }
            KVPOLICY_UNROLL
            for (std::int64_t r = 0; r < R; ++r) {
                const __m256 weight = _mm256_broadcast_ss(weights + r * block_keys + j);
                KVPOLICY_UNROLL
                for (int i = 0; i < V; ++i) {
                    sum[r][i] = _mm256_fmadd_ps(weight, x[i], sum[r][i]);
                }
            }
        }
        KVPOLICY_UNROLL
        for (std::int64_t r = 0; r < R; ++r) {
            const __m256 factor = _mm256_broadcast_ss(decay + r);
            float* to = out + r * stride + column;
            KVPOLICY_UNROLL
            for (std::int64_t i = 0; i < V; ++i) {
                _mm256_storeu_ps(to + 8 * i, _mm256_fmadd_ps(factor, _mm256_loadu_ps(to + 8 * i), sum[r][i]));
            }
        }
    }
};

}  // namespace kvpolicy::host_backend

#endif  // KVPOLICY_X86
