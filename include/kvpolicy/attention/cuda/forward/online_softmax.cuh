// Softmax over blocks of keys for two rows per thread, in the layout that mma and wgmma accumulators share:
// value i of a thread belongs to row (i / 2) % 2 of its two and to column 8 (i / 4) + 2 (lane % 4) + i % 2;
// the four lanes of a quad share both rows.
#pragma once

#include <kvpolicy/attention/cuda/forward/row_stream.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Scores become logits in units of log 2: soft cap, bias. `query` are the two rows' queries in the frame of
/// the notes.
template <int N, int Keys, bool Biased>
__device__ inline void to_logits(float (&s)[N], float slope, float cap, const key_notes<Keys, Biased>& notes,
                                 const std::uint32_t (&query)[2]) {
    static_assert(N == Keys / 2);
    if (cap != 0.0f) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = cap - __fdividef(2.0f * cap, 1.0f + fast_exp2(s[i] * slope));
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] *= slope;
        }
    }
    if constexpr (Biased) {
        const int column = 2 * (lane_id() % 4);
#pragma unroll
        for (int n = 0; n < Keys / 8; ++n) {
            const float2 bias = *reinterpret_cast<const float2*>(notes.bias + 8 * n + column);
            const uint2 from = *reinterpret_cast<const uint2*>(notes.bias_from + 8 * n + column);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                s[4 * n + 2 * r] += query[r] >= from.x ? bias.x : 0.0f;
                s[4 * n + 2 * r + 1] += query[r] >= from.y ? bias.y : 0.0f;
            }
        }
    }
}

/// -inf where a query does not see a key.
template <int N, int Keys, bool Biased>
__device__ inline void hide(float (&s)[N], const key_notes<Keys, Biased>& notes,
                            const std::uint32_t (&query)[2]) {
    static_assert(N == Keys / 2);
    const int column = 2 * (lane_id() % 4);
    if (notes.masked == masked_by_begins) {
#pragma unroll
        for (int n = 0; n < Keys / 8; ++n) {
            const uint2 begin = *reinterpret_cast<const uint2*>(notes.interval + 8 * n + column);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                s[4 * n + 2 * r] = query[r] >= begin.x ? s[4 * n + 2 * r] : minus_infinity();
                s[4 * n + 2 * r + 1] = query[r] >= begin.y ? s[4 * n + 2 * r + 1] : minus_infinity();
            }
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n) {
        const uint2 interval = *reinterpret_cast<const uint2*>(notes.interval + 8 * n + column);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            s[4 * n + 2 * r] =
                query[r] - (interval.x & 0xffffu) < interval.x >> 16 ? s[4 * n + 2 * r] : minus_infinity();
            s[4 * n + 2 * r + 1] = query[r] - (interval.y & 0xffffu) < interval.y >> 16 ? s[4 * n + 2 * r + 1]
                                                                                        : minus_infinity();
        }
    }
}

/// The running softmax of two rows. The sums are this lane's share until finish(). `max` is what weights are
/// relative to.
///
/// A weight is 2^(s slope - max slope), in one fused operation, whose second term is rounded: by up to half a
/// unit in its last place, which is a factor of the weight. Beyond max_reference `max` is subtracted before
/// the product with slope, so that the largest weight is 1 for every finite logit.
struct online_softmax {
    static constexpr float slack = 8.0f;             // in units of log 2
    static constexpr float max_reference = 0x1p13f;  // of units of log 2: a factor of up to 1 +- 2^-12

    float max[2] = {minus_infinity(), minus_infinity()};
    float sum[2] = {0.0f, 0.0f};
    bool has_reference = false;  // both rows of all the warp's lanes have a reference that is near 0

    /// As take() where all rows have a reference, without looking for a larger logit: weights are relative to
    /// the `max` that is there. False where some would be so large that fp16 might not hold it, or not a
    /// number; then only s has changed. All lanes get the same.
    template <int N>
    __device__ bool take_relative(float (&s)[N], float slope) {
        constexpr float most = 0x1p14f;
        const float reference[2] = {max[0] * slope, max[1] * slope};
        float part[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = fast_exp2(fmaf(s[i], slope, -reference[(i / 2) % 2]));
            part[(i / 2) % 2] += s[i];
        }
        if (__all_sync(all_lanes, part[0] < most && part[1] < most) == 0) {
            return false;
        }
        sum[0] += part[0];
        sum[1] += part[1];
        return true;
    }

    /// Logits slope * s (slope > 0) become weights relative to `max`, the largest so far. What has been
    /// summed must then be multiplied by `decay` where true is returned, to all lanes of the warp. Lazy:
    /// `max` moves only where some logit of the warp's rows exceeds it by more than `slack`; weights are at
    /// most 2^slack then, as good as ones, and it hardly ever does.
    template <bool Lazy, int N>
    __device__ bool take(float (&s)[N], float slope, float (&decay)[2]) {
        float largest[2];
        bool above = !Lazy;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = max[r];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if ((i / 2) % 2 == r) {
                    largest[r] = fmaxf(largest[r], s[i]);
                }
            }
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(all_lanes, largest[r], 1));
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(all_lanes, largest[r], 2));
            above = above || (largest[r] - max[r]) * slope > slack;  // -inf less -inf is not
            decay[r] = 1.0f;
        }
        const bool moves = !Lazy || __any_sync(all_lanes, above) != 0;
        if (moves) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // Where nothing has been seen yet -inf must not be subtracted from -inf.
                const float finite = largest[r] == minus_infinity() ? 0.0f : largest[r];
                decay[r] = fast_exp2((max[r] - finite) * slope);
                max[r] = largest[r];
                sum[r] *= decay[r];
            }
        }
        float reference[2] = {max[0] == minus_infinity() ? 0.0f : max[0] * slope,
                              max[1] == minus_infinity() ? 0.0f : max[1] * slope};
        const bool near = fabsf(reference[0]) < max_reference && fabsf(reference[1]) < max_reference;
        if (!has_reference) {
            has_reference =
                __all_sync(all_lanes, near && max[0] > minus_infinity() && max[1] > minus_infinity()) != 0;
        }
        if (!near) {
            subtract_max(s, reference);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = fast_exp2(fmaf(s[i], slope, -reference[(i / 2) % 2]));
            sum[(i / 2) % 2] += s[i];
        }
        return moves;
    }

    /// s - max, for rows that have seen something; weights are relative to 0 then.
    template <int N>
    __device__ void subtract_max(float (&s)[N], float (&reference)[2]) const {
        const float from[2] = {max[0] == minus_infinity() ? 0.0f : max[0],
                               max[1] == minus_infinity() ? 0.0f : max[1]};
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] -= from[(i / 2) % 2];
        }
        reference[0] = reference[1] = 0.0f;
    }

    /// After the last block: what the rows' outputs are multiplied by, and their log-sum-exps (natural).
    __device__ void finish(float slope, float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(all_lanes, sum[r], 1);
            sum[r] += __shfl_xor_sync(all_lanes, sum[r], 2);
            const bool nothing = sum[r] == 0.0f;
            inverse[r] = nothing ? 0.0f : 1.0f / sum[r];
            lse[r] = nothing ? minus_infinity() : fmaf(max[r] * slope, 0.69314718055994530942f, logf(sum[r]));
        }
    }
};

/// Weights as an A fragment of mma or wgmma: 16 keys per step.
template <class T, int N>
__device__ inline void to_fragments(std::uint32_t (&p)[N / 8][4], const float (&s)[N]) {
#pragma unroll
    for (int k = 0; k < N / 8; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            p[k][j] = pack<T>(s[8 * k + 2 * j], s[8 * k + 2 * j + 1]);
        }
    }
}

/// Where row `row` of a tile writes its output, null where it has none. Its lse is written here, by one lane
/// of the quad.
template <class T>
__device__ inline T* row_to_store(const forward_params<T>& call, const tile_coords& coords, int row,
                                  float lse) {
    const int query = row / call.heads;
    const int head = row % call.heads;
    if (query >= coords.queries || head >= coords.heads) {
        return nullptr;
    }
    const std::int64_t of_q = std::int64_t{coords.h} * call.params.group + coords.first_head + head;
    const std::int32_t at = call.params.query_row(coords.b, coords.first_query + query);
    if (call.lse && lane_id() % 4 == 0) {
        call.lse.head(coords.b, of_q)[at] = lse;
    }
    return call.out.row(coords.b, of_q, at);
}

/// Writes two rows' outputs, N / 2 columns per row of which `dim` count, times `inverse`. Null rows are left
/// out. Each lane of a quad ends with 8 columns of its own, so that 16 bytes go at once.
template <class T, int N>
__device__ inline void store_rows(const float (&o)[N], const float (&inverse)[2], T* const (&row)[2],
                                  std::int32_t first, std::int32_t dim) {
    const int quad_lane = lane_id() % 4;
#pragma unroll
    for (int group = 0; group < N / 16; ++group) {  // 32 columns
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            std::uint32_t w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = 16 * group + 4 * j + 2 * r;
                w[j] = pack<T>(o[i] * inverse[r], o[i + 1] * inverse[r]);
            }
            // A 4 x 4 transpose over the quad.
            const bool odd = (quad_lane & 1) != 0;
            const std::uint32_t a = __shfl_xor_sync(all_lanes, odd ? w[0] : w[1], 1);
            const std::uint32_t b = __shfl_xor_sync(all_lanes, odd ? w[2] : w[3], 1);
            (odd ? w[0] : w[1]) = a;
            (odd ? w[2] : w[3]) = b;
            const bool high = (quad_lane & 2) != 0;
            const std::uint32_t c = __shfl_xor_sync(all_lanes, high ? w[0] : w[2], 2);
            const std::uint32_t d = __shfl_xor_sync(all_lanes, high ? w[1] : w[3], 2);
            (high ? w[0] : w[2]) = c;
            (high ? w[1] : w[3]) = d;
            const std::int32_t column = first + 32 * group + 8 * quad_lane;
            if (row[r] != nullptr && column < dim) {
                *reinterpret_cast<uint4*>(row[r] + column) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
