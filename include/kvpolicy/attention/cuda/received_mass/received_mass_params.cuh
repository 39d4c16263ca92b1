// Masses of keys as kernels see the call: which keys and queries there are, who sees whom, and what counts.
#pragma once

#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/masks/expiry.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

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
        return rows.key(b, h, list != nullptr ? list[(b * kv_heads + h) * list_stride + j] : j);
    }
    __device__ bool plain_logits() const {
        return logits.cap == compute(0) && !mask.expiry && !mask.log_bias;
    }
    /// A product as an exponent of 2.
    __device__ compute exponent(compute dot) const {
        return logits.scale * (logits.cap > compute(0) ? logits.cap * tanh(dot * logits.inner) : dot);
    }
    /// What the mask adds to the exponent of key j at query i; -inf where it hides the key.
    __device__ compute masked(std::int64_t b, std::int64_t h, std::int32_t i, std::int32_t j) const {
        if (mask.expiry && i >= mask.expiry.head(b, h)[j]) {
            return -static_cast<compute>(INFINITY);
        }
        constexpr double log2_e = 1.4426950408889634;
        return mask.log_bias && std::int64_t{i} - j >= mask.bias_from_of(h)
                   ? static_cast<compute>(log2_e) * static_cast<compute>(mask.log_bias.head(b, h)[j])
                   : compute(0);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
