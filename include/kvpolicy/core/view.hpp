// Views of tensors: a pointer, a shape and strides. A view owns no memory. Strides count elements, in 64
// bits, so NHD, HND, fused QKV rows and [N, 2, block, H, D] pools are all just strides. They are aggregates
// with the same layout under every compiler and go to kernels by value.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvpolicy {

/// Rows of vectors, [batch, heads, length, dim]; the elements of one row are contiguous.
template <class T>
struct rows_view {
    T* data = nullptr;
    std::int32_t batch = 0;
    std::int32_t heads = 0;
    std::int32_t length = 0;
    std::int32_t dim = 0;
    std::int64_t batch_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t row_stride = 0;

    /// The row of token t of head h of sequence b.
    KVPOLICY_HOST_DEVICE constexpr T* row(std::int64_t b, std::int64_t h, std::int64_t t) const {
        return data + b * batch_stride + h * head_stride + t * row_stride;
    }

    // A template, since nvcc warns about a plain conversion to one's own type even where a
    // constraint rules it out.
    template <class Const>
    requires(!std::is_const_v<T> && std::is_same_v<Const, const T>) KVPOLICY_HOST_DEVICE constexpr
    operator rows_view<Const>() const {
        return {data, batch, heads, length, dim, batch_stride, head_stride, row_stride};
    }
};

/// One number per token, [batch, heads, length]; the numbers of one head are contiguous.
template <class T>
struct plane_view {
    T* data = nullptr;
    std::int32_t batch = 0;
    std::int32_t heads = 0;
    std::int32_t length = 0;
    std::int64_t batch_stride = 0;
    std::int64_t head_stride = 0;

    /// The numbers of head h of sequence b.
    KVPOLICY_HOST_DEVICE constexpr T* head(std::int64_t b, std::int64_t h) const {
        return data + b * batch_stride + h * head_stride;
    }

    template <class Const>
    requires(!std::is_const_v<T> && std::is_same_v<Const, const T>) KVPOLICY_HOST_DEVICE constexpr
    operator plane_view<Const>() const {
        return {data, batch, heads, length, batch_stride, head_stride};
    }

    KVPOLICY_HOST_DEVICE constexpr explicit operator bool() const { return data != nullptr; }
};

/// A contiguous [batch, heads, length, dim] tensor (HND).
template <class T>
KVPOLICY_HOST_DEVICE constexpr rows_view<T> view_bhsd(T* data, std::int32_t batch, std::int32_t heads,
                                                      std::int32_t length, std::int32_t dim) {
    const std::int64_t row = dim;
    return {data, batch, heads, length, dim, row * length * heads, row * length, row};
}

/// A contiguous [batch, length, heads, dim] tensor (NHD), the layout that projections write.
template <class T>
KVPOLICY_HOST_DEVICE constexpr rows_view<T> view_bshd(T* data, std::int32_t batch, std::int32_t length,
                                                      std::int32_t heads, std::int32_t dim) {
    const std::int64_t row = static_cast<std::int64_t>(heads) * dim;
    return {data, batch, heads, length, dim, row * length, dim, row};
}

/// A contiguous [batch, heads, length] plane.
template <class T>
KVPOLICY_HOST_DEVICE constexpr plane_view<T> view_bhs(T* data, std::int32_t batch, std::int32_t heads,
                                                      std::int32_t length) {
    return {data, batch, heads, length, static_cast<std::int64_t>(heads) * length, length};
}

/// Views as parameters from which no type is deduced, so that a view of mutable numbers converts to
/// one of const numbers.
template <class T>
using input_rows = std::type_identity_t<rows_view<const T>>;
template <class T>
using input_plane = std::type_identity_t<plane_view<const T>>;
template <class T>
using output_rows = std::type_identity_t<rows_view<T>>;

/// Memory that the caller provides for one call. The matching ..._workspace_bytes says how much a call needs;
/// too little is refused before anything is written. The contents before a call do not matter.
struct workspace_view {
    void* data = nullptr;
    std::size_t bytes = 0;
};

/// The sequences of one call: `batch` of `length` tokens each, both to be given. `lengths[b]`, where given,
/// says how many tokens of sequence b count; the rest is neither read nor written. `starts[b]`, where given,
/// is the position of sequence b's first query in the frame of the mask (chunked prefill); calls about whole
/// sequences (masks, targets, losses of scores, metrics) refuse it, also where all are 0; losses of rows,
/// which have no positions, ignore it. `segments` > 0 packs several samples into each sequence:
/// cu_seqlens[0..segments] are their edges, and sinks, window, budget and scorer state start anew at each.
/// Leaving cu_seqlens null keeps attention across packed samples (KVpop's training).
struct Sequences {
    std::int32_t batch = 0;
    std::int32_t length = -1;                  // refused until it is set
    const std::int32_t* lengths = nullptr;     // [batch]
    const std::int32_t* starts = nullptr;      // [batch]
    const std::int32_t* cu_seqlens = nullptr;  // [segments + 1], rising, cu_seqlens[0] = 0
    std::int32_t segments = 0;

    KVPOLICY_HOST_DEVICE constexpr std::int32_t length_of(std::int64_t b) const {
        return lengths ? lengths[b] : length;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int32_t start_of(std::int64_t b) const {
        return starts ? starts[b] : 0;
    }
};

/// The active sequences of one call on a cache. Entry i of q, k, v and out belongs to cache sequence
/// seq_ids[i] (default: i) and brings q_len[i] tokens (default: `length`); 0 leaves that sequence untouched.
/// Sequences that no entry names are untouched.
///
/// All members have defaults: without `count` the entries are all of q's, or in a call without tensors all of
/// the cache's sequences; with neither q_len nor length every entry brings the tokens that q has, or in a
/// call without tensors one.
struct Batch {
    static constexpr std::int32_t not_set = std::numeric_limits<std::int32_t>::min();
    /// On a device, the sequence of an entry that is only padding (as in vLLM's slot_mapping): it brings no
    /// token, whatever q_len says. A host's batch leaves such entries out.
    static constexpr std::int32_t no_seq = -1;

    std::int32_t count = not_set;
    const std::int32_t* seq_ids = nullptr;  // [count], all different
    const std::int32_t* q_len = nullptr;    // [count], 0 to the views' length
    std::int32_t length = not_set;

    KVPOLICY_HOST_DEVICE constexpr std::int32_t seq(std::int64_t i) const {
        return seq_ids ? seq_ids[i] : static_cast<std::int32_t>(i);
    }
    KVPOLICY_HOST_DEVICE constexpr std::int32_t tokens(std::int64_t i) const {
        return q_len ? q_len[i] : length_or_one();
    }
    KVPOLICY_HOST_DEVICE constexpr std::int32_t length_or_one() const {
        return length == not_set ? 1 : length;
    }
};

/// The numbers of an attention call. logit = sm_scale * <q, k>, then logits_soft_cap * tanh(logit /
/// logits_soft_cap) where logits_soft_cap > 0. sm_scale = 0 stands for 1 / sqrt(head_dim of the keys). (The
/// tensor cores' kernels on CUDA compute tanh by an exponential, with an error of about 2^-21 of the cap. A
/// cap of several thousand bounds no logit and loses digits: use 0, no cap.)
struct AttentionParams {
    float sm_scale = 0.0f;
    float logits_soft_cap = 0.0f;
};

}  // namespace kvpolicy
