// The passes of host attention for AVX2, FMA and F16C; portable_kernels documents layouts and meanings.
#pragma once

#include <kvpolicy/core/config.hpp>

#if KVPOLICY_X86

#include <kvpolicy/attention/host/avx2_direct.hpp>
#include <kvpolicy/attention/host/collect.hpp>
#include <kvpolicy/attention/host/simd_avx2.hpp>
#include <kvpolicy/attention/host/types.hpp>

#include <cstdint>
#include <limits>

namespace kvpolicy::host_backend {

template <Storage T>
struct avx2_kernels : avx2_direct<T> {
    using real = float;

    KVPOLICY_AVX2 static seen_rows scan(const expiry_t* expiry, const std::int32_t* position,
                                        std::int64_t first, std::int32_t count, std::int32_t first_query,
                                        std::int32_t last_query) {
        const __m256i first_of_tile = _mm256_set1_epi32(first_query);
        const __m256i last_of_tile = _mm256_set1_epi32(last_query);
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        seen_rows seen;
        std::int32_t r = 0;
        for (; r + 8 <= count; r += 8) {
            const __m256i begins =
                position != nullptr
                    ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(position + r))
                    : _mm256_add_epi32(_mm256_set1_epi32(static_cast<std::int32_t>(first + r)), lane);
            const __m256i expires = expiry != nullptr
                                        ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(expiry + r))
                                        : _mm256_set1_epi32(never);
            const __m256i some =
                _mm256_andnot_si256(_mm256_cmpgt_epi32(begins, last_of_tile),
                                    _mm256_and_si256(_mm256_cmpgt_epi32(expires, first_of_tile),
                                                     _mm256_cmpgt_epi32(expires, begins)));
            const __m256i all = _mm256_andnot_si256(_mm256_cmpgt_epi32(begins, first_of_tile),
                                                    _mm256_cmpgt_epi32(expires, last_of_tile));
            seen.some |= bits_of(some) << r;
            seen.all |= bits_of(all) << r;
        }
        if (r < count) {
            const seen_rows rest = scan_rows(expiry != nullptr ? expiry + r : nullptr,
                                             position != nullptr ? position + r : nullptr, first + r,
                                             count - r, first_query, last_query);
            seen.some |= rest.some << r;
            seen.all |= rest.all << r;
        }
        return seen;
    }

    KVPOLICY_AVX2 static void pack_keys(const T* const* k, std::int32_t count, std::int32_t dim,
                                        float* panel) {
        for (std::int32_t j = 0; j < count; j += panel_lanes, panel += std::int64_t{dim} * panel_lanes) {
            for (std::int32_t half = 0; half < panel_lanes; half += 8) {
                const T* rows[8];
                for (std::int32_t lane = 0; lane < 8; ++lane) {
                    rows[lane] = k[j + half + lane];
                }
                for (std::int64_t d = 0; d < dim; d += 8) {
                    __m256 x[8];
                    KVPOLICY_UNROLL
                    for (int lane = 0; lane < 8; ++lane) {
                        x[lane] = avx2::load8(rows[lane] + d);
                    }
                    avx2::transpose(x);
                    KVPOLICY_UNROLL
                    for (int i = 0; i < 8; ++i) {
                        _mm256_storeu_ps(panel + (d + i) * panel_lanes + half, x[i]);
                    }
                }
            }
        }
    }

    KVPOLICY_AVX2 static void pack_values(const T* const* v, std::int32_t count, std::int32_t dim,
                                          float* panel) {
        for (std::int64_t j = 0; j < count; ++j) {
            float* to = panel + j * panel_lanes;
            std::int32_t c = 0;
            for (; c + panel_lanes <= dim; c += panel_lanes, to += value_panel) {
                _mm256_storeu_ps(to, avx2::load8(v[j] + c));
                _mm256_storeu_ps(to + 8, avx2::load8(v[j] + c + 8));
            }
            if (c < dim) {
                _mm256_storeu_ps(to, avx2::load8(v[j] + c));
                _mm256_storeu_ps(to + 8, _mm256_setzero_ps());
            }
        }
    }

    /// sum = 0, for a panel of rows and panel_lanes numbers each.
    KVPOLICY_AVX2_INLINE static void clear(__m256 (&sum)[panel_rows][2]) {
        KVPOLICY_UNROLL
        for (auto& row : sum) {
            row[0] = row[1] = _mm256_setzero_ps();
        }
    }

    KVPOLICY_AVX2 static void multiply_qk(const float* q, std::int32_t panels, std::int32_t dim,
                                          const float* k, std::int32_t count, float* scores) {
        for (std::int32_t j = 0; j < count; j += panel_lanes, k += std::int64_t{dim} * panel_lanes) {
            for (std::int64_t p = 0; p < panels; ++p) {
                const float* rows = q + p * dim * panel_rows;
                const float* keys = k;
                __m256 sum[panel_rows][2];
                clear(sum);
                for (std::int32_t d = 0; d < dim; ++d, rows += panel_rows, keys += panel_lanes) {
                    const __m256 k0 = _mm256_loadu_ps(keys);
                    const __m256 k1 = _mm256_loadu_ps(keys + 8);
                    KVPOLICY_UNROLL
                    for (int r = 0; r < panel_rows; ++r) {
                        const __m256 x = _mm256_broadcast_ss(rows + r);
                        sum[r][0] = _mm256_fmadd_ps(x, k0, sum[r][0]);
                        sum[r][1] = _mm256_fmadd_ps(x, k1, sum[r][1]);
                    }
                }
                float* to = scores + p * panel_rows * block_keys + j;
                KVPOLICY_UNROLL
                for (std::int64_t r = 0; r < panel_rows; ++r) {
                    _mm256_storeu_ps(to + r * block_keys, sum[r][0]);
                    _mm256_storeu_ps(to + r * block_keys + 8, sum[r][1]);
                }
            }
        }
    }

    KVPOLICY_AVX2 static void multiply_pv(const float* weights, std::int32_t panels, const float* v,
                                          std::int32_t count, const float* decay, float* out,
                                          std::int32_t stride) {
        for (std::int32_t c = 0; c < stride; c += panel_lanes, v += value_panel) {
            for (std::int64_t p = 0; p < panels; ++p) {
                const float* rows = weights + p * panel_rows * block_keys;
                const float* values = v;
                __m256 sum[panel_rows][2];
                clear(sum);
                for (std::int32_t j = 0; j < count; ++j, ++rows, values += panel_lanes) {
                    const __m256 v0 = _mm256_loadu_ps(values);
                    const __m256 v1 = _mm256_loadu_ps(values + 8);
                    KVPOLICY_UNROLL
                    for (std::int64_t r = 0; r < panel_rows; ++r) {
                        const __m256 x = _mm256_broadcast_ss(rows + r * block_keys);
                        sum[r][0] = _mm256_fmadd_ps(x, v0, sum[r][0]);
                        sum[r][1] = _mm256_fmadd_ps(x, v1, sum[r][1]);
                    }
                }
                float* to = out + p * panel_rows * stride + c;
                KVPOLICY_UNROLL
                for (int r = 0; r < panel_rows; ++r, to += stride) {
                    const __m256 factor = _mm256_broadcast_ss(decay + p * panel_rows + r);
                    _mm256_storeu_ps(to, _mm256_fmadd_ps(factor, _mm256_loadu_ps(to), sum[r][0]));
                    _mm256_storeu_ps(to + 8, _mm256_fmadd_ps(factor, _mm256_loadu_ps(to + 8), sum[r][1]));
                }
            }
        }
    }

    KVPOLICY_AVX2 static void softmax(const attention_shape& shape, const key_block<T>* mask,
                                      std::int32_t rows, std::int32_t count, const strip_state<float>& state,
                                      float* scores) {
        if (shape.logits_soft_cap > 0.0f) {
            for (std::int64_t r = 0; r < rows; ++r) {
                cap_row(shape, count, scores + r * block_keys);
            }
        }
        const float scale = shape.logits_soft_cap > 0.0f ? 1.0f : shape.scale;
        // Maxima of all rows first: a row's weights wait for its own maximum, so rows that go through both
        // at once would leave the processor little to overlap.
        float base[strip_rows + 8];
        float moved[strip_rows + 8] = {};  // by how much a maximum rises, negative
        for (std::int64_t r = 0; r < rows; ++r) {
            float* const row = scores + r * block_keys;
            const __m256 largest = mask != nullptr
                                       ? masked_logits(scale, *mask, state.position[r], count, row)
                                       : logits(scale, count, row);
            const float before = state.max[r];
            const float found = avx2::largest_of(largest);
            const float now = found > before ? found : before;
            base[r] = now == nothing ? 0.0f : now;
            moved[r] = before - base[r];
            state.max[r] = now;
        }
        for (std::int32_t r = 0; r < rows; r += 8) {
            _mm256_storeu_ps(moved + r, avx2::exp_nonpositive(_mm256_loadu_ps(moved + r)));
        }
        for (std::int64_t r = 0; r < rows; ++r) {
            const float sum = weights(base[r], count, scores + r * block_keys);
            state.sum[r] = state.sum[r] * static_cast<double>(moved[r]) + static_cast<double>(sum);
            state.decay[r] = moved[r];
        }
    }

  private:
    static constexpr float nothing = -std::numeric_limits<float>::infinity();

    KVPOLICY_AVX2_INLINE static std::uint64_t bits_of(__m256i lanes) {
        return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
    }

    /// All ones in the lanes j + lane < count.
    KVPOLICY_AVX2_INLINE static __m256 lanes_below(std::int32_t count, std::int32_t j) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - j), lane));
    }

    KVPOLICY_AVX2_INLINE static void cap_row(const attention_shape& shape, std::int32_t count,
                                             float* scores) {
        const __m256 cap = _mm256_set1_ps(shape.logits_soft_cap);
        const __m256 scale = _mm256_set1_ps(shape.scale);
        for (std::int32_t j = 0; j < count; j += 8) {
            const __m256 x = _mm256_mul_ps(scale, _mm256_loadu_ps(scores + j));
            _mm256_storeu_ps(scores + j, _mm256_mul_ps(cap, avx2::tanh_of(_mm256_div_ps(x, cap))));
        }
    }

    /// Scales a row in place, up to a multiple of 8 lanes, the ones past `count` becoming -inf; the lanes'
    /// maxima.
    KVPOLICY_AVX2_INLINE static __m256 logits(float scale, std::int32_t count, float* scores) {
        const __m256 factor = _mm256_set1_ps(scale);
        __m256 largest = _mm256_set1_ps(nothing);
        std::int32_t j = 0;
        for (; j + 8 <= count; j += 8) {
            const __m256 x = _mm256_mul_ps(factor, _mm256_loadu_ps(scores + j));
            _mm256_storeu_ps(scores + j, x);
            largest = _mm256_max_ps(x, largest);
        }
        if (j < count) {
            __m256 x = _mm256_mul_ps(factor, _mm256_loadu_ps(scores + j));
            x = _mm256_blendv_ps(_mm256_set1_ps(nothing), x, lanes_below(count, j));
            _mm256_storeu_ps(scores + j, x);
            largest = _mm256_max_ps(x, largest);
        }
        return largest;
    }

    KVPOLICY_AVX2_INLINE static __m256 masked_logits(float scale, const key_block<T>& mask,
                                                     std::int32_t position, std::int32_t count,
                                                     float* scores) {
        const __m256 factor = _mm256_set1_ps(scale);
        const __m256i p = _mm256_set1_epi32(position);
        __m256 largest = _mm256_set1_ps(nothing);
        for (std::int32_t j = 0; j < count; j += 8) {
            __m256 x = _mm256_mul_ps(factor, _mm256_loadu_ps(scores + j));
            if (mask.biased) {
                const __m256i start =
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask.bias_start + j));
                const __m256 bias = _mm256_loadu_ps(mask.bias + j);
                x = _mm256_add_ps(x,
                                  _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(start, p)), bias));
            }
            const __m256i begins = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask.begins + j));
            const __m256i expires = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask.expires + j));
            const __m256 seen = _mm256_castsi256_ps(
                _mm256_andnot_si256(_mm256_cmpgt_epi32(begins, p), _mm256_cmpgt_epi32(expires, p)));
            // A choice, not an addition: the product may be NaN where it is hidden.
            x = _mm256_blendv_ps(_mm256_set1_ps(nothing), x, _mm256_and_ps(seen, lanes_below(count, j)));
            _mm256_storeu_ps(scores + j, x);
            largest = _mm256_max_ps(x, largest);
        }
        return largest;
    }

    /// Logits become weights; their sum.
    KVPOLICY_AVX2_INLINE static float weights(float base, std::int32_t count, float* scores) {
        const __m256 subtract = _mm256_set1_ps(base);
        __m256 sum = _mm256_setzero_ps();
        for (std::int32_t j = 0; j < count; j += 8) {
            const __m256 e = avx2::exp_nonpositive(_mm256_sub_ps(_mm256_loadu_ps(scores + j), subtract));
            _mm256_storeu_ps(scores + j, e);
            sum = _mm256_add_ps(sum, e);
        }
        return avx2::sum_of(sum);
    }
};

}  // namespace kvpolicy::host_backend

#endif  // KVPOLICY_X86
