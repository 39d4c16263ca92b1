// Masses of keys as kernels see the call: which keys and queries there are, who sees whom, and what counts.
#pragma once

#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/packed_rows.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/masks/expiry.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A query and a key of a product; `there`: both exist.
struct mass_pair {
    std::int32_t query, key;
    bool there;
};

/// The queries of a block, numbered from 0, and the keys of each head, numbered from 0: first `before` keys
/// that all queries see, then, where `own` is set, one key per query. Query i sees key j iff
///
///     j <= i + before  (always where `own` is not set)   and   i < expiry[j]  (where there is a mask)
template <class T>
struct received_mass_params {
    using compute = compute_t<T>;

    rows_view<const T> q;                // [B, Hq, n, Dk]
    key_rows<T> rows;                    // key j is row j, or row list[j]
    const std::int32_t* list = nullptr;  // [B, Hkv, list_stride]
    std::int64_t list_stride = 0;
    std::int32_t batch = 0;
    std::int32_t kv_heads = 0;
    std::int32_t group = 1;                 // query heads per KV head
    std::int32_t queries = 0;               // n: of a sequence, at most
    const std::int32_t* lengths = nullptr;  // [B], queries of each sequence; null: n
    const std::int32_t* before = nullptr;   // [B, Hkv]; null: 0
    bool own = true;
    packed_rows packed;         // of q, lse and the queries' own keys; then there is no list
    std::int32_t max_keys = 0;  // of a head
    std::int32_t counted = 0;   // the last so many queries count; below 0: as many as the head's window
    const HeadParams* all_params = nullptr;    // [Hkv], for those windows
    mask_view mask;                            // of keys by number; bias_from in queries
    qk_reduce_exponents<compute_t<T>> logits;  // base 2
    plane_view<float> lse;                     // [B, Hq, n], natural logarithm
    plane_view<float> mass;                    // [B, Hkv, max_keys]

    __device__ std::int32_t length_of(std::int64_t b) const {
        // A length that no view holds counts as an empty sequence, as everywhere on a device.
        const std::int32_t length = lengths != nullptr ? lengths[b] : queries;
        return length >= 0 && length <= queries ? length : 0;
    }
    __device__ std::int32_t before_of(std::int64_t b, std::int64_t h) const {
        return before != nullptr ? before[b * kv_heads + h] : 0;
    }
    /// The first query that counts.
    __device__ std::int32_t first_counted(std::int64_t h, std::int32_t length) const {
        const std::int32_t most = counted >= 0 ? counted : all_params[h].window;
        return most < length ? length - most : 0;
    }
    __device__ const T* key(std::int64_t b, std::int64_t h, std::int32_t j) const {
        return rows.key(b, h,
                        list != nullptr ? list[(b * kv_heads + h) * list_stride + j]
                        : own           ? packed.begin(b) + j
                                        : j);
    }
    __device__ bool plain_logits() const {
        return logits.cap == compute(0) && !mask.expiry && !mask.log_bias;
    }
    /// Products of a tile become exponents of 2, of soft-capped and masked logits: -inf where the mask hides
    /// the key. place(m, i) names the query and the key of s[m][i], and whether there are such.
    template <int N, class Place>
    __device__ void make_exponents(compute (&s)[2][N], std::int64_t b, std::int64_t h,
                                   const Place& place) const {
        const compute cap = logits.cap;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                s[m][i] = logits.scale * (cap > compute(0) ? cap * tanh_of_exponent(s[m][i]) : s[m][i]);
            }
        }
        const expiry_t* const expiry = mask.expiry ? mask.expiry.head(b, h) : nullptr;
        const float* const bias = mask.log_bias ? mask.log_bias.head(b, h) : nullptr;
        const std::int32_t bias_from = bias != nullptr ? mask.bias_from_of(h) : 0;
        if (expiry == nullptr && bias == nullptr) {
            return;
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const mass_pair at = place(m, i);
                if (!at.there) {
                    continue;
                }
                if (expiry != nullptr && at.query >= expiry[at.key]) {
                    s[m][i] = -static_cast<compute>(INFINITY);
                } else if (bias != nullptr && std::int64_t{at.query} - at.key >= bias_from) {
                    s[m][i] = fma(static_cast<compute>(1.4426950408889634),
                                  static_cast<compute>(bias[at.key]), s[m][i]);
                }
            }
        }
    }

  private:
    /// tanh of a product times logits.inner: 1 - 2 / (exp(2 y) + 1).
    __device__ compute tanh_of_exponent(compute dot) const {
        if constexpr (sizeof(compute) == 4) {
            const float y = dot * (logits.inner * 2.8853900817779268f);
            return 1.0f - __fdividef(2.0f, fast_exp2(y) + 1.0f);
        } else {
            return tanh(dot * logits.inner);
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
