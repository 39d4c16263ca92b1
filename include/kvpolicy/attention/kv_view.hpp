// The keys and values of an attention call.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/masks/expiry.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// The keys of an attention call: views and a frame of positions, nothing owned. Start with kv_view{k, v}
/// (dense causal) or kv_view{k, v, mask}.
template <class T>
struct kv_view {
    rows_view<const T> k;  ///< [B, Hkv, Skv, Dk]
    rows_view<const T> v;  ///< [B, Hkv, Skv, Dv]
    /// Lifetimes and log-biases, [B, Hkv, Skv]; empty: every key lives on.
    mask_view mask{};
    /// [B, Hkv, Skv], the position of each row in the frame of the mask, in any order (the rows of a cache),
    /// and several may have the same; empty: row t has the position first + t. The head stride may be 0
    /// where heads share it.
    plane_view<const std::int32_t> position{};
    std::int32_t first = 0;
    /// [B], how many rows of each sequence count (the rest is never read); null: all Skv.
    const std::int32_t* lengths = nullptr;
};

template <class K, class V, class... Rest>
kv_view(rows_view<K>, rows_view<V>, Rest...) -> kv_view<std::remove_const_t<K>>;

}  // namespace kvpolicy
