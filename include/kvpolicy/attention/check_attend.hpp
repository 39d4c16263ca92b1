// What attend() refuses.
#pragma once

#include <kvpolicy/attention/head_dim.hpp>
#include <kvpolicy/attention/kv_view.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/error.hpp>

#include <cmath>
#include <cstdint>
#include <string>

namespace kvpolicy::checks {

/// Positions stay within this of 0, and lengths as well, so that the sum of a position and a
/// length fits 32 bits.
inline constexpr std::int32_t position_limit = 1 << 30;

template <class Name, class View>
void require_shape(const Name& name, const View& view, std::int32_t batch, std::int32_t heads,
                   std::int32_t length) {
    const auto text = [](std::int32_t b, std::int32_t h, std::int32_t s) {
        return detail::text("[", b, ", ", h, ", ", s, "]");
    };
    const bool agrees = view.batch == batch && view.heads == heads && view.length == length;
    if (!agrees) [[unlikely]] {
        detail::refuse(detail::text_of(name).c_str(), text(view.batch, view.heads, view.length),
                       detail::text("of shape ", text(batch, heads, length), ", as the other views have it"));
    }
    const bool empty = batch == 0 || heads == 0 || length == 0;
    if (view.data == nullptr && !empty) [[unlikely]] {
        detail::refuse(detail::text_of(name).c_str(), "null", "a view of memory");
    }
    check_strides(name, view);
}

inline void require_head_dim(const char* name, std::int32_t dim) {
    detail::require(head_dim_supported(dim), name, dim, [] {
        return detail::text("a head_dim that is a multiple of 8 from 8 to ", max_head_dim);
    });
}

template <class T>
void check_keys(const char* name, const rows_view<const T>& q, const kv_view<T>& all) {
    const rows_view<const T>& k = all.k;
    const auto named = [name](const char* part) { return [=] { return std::string(name) + part; }; };
    const auto indexed = [name](const char* part, std::int32_t i) {
        return [=] { return detail::text(name, part, "[", i, "]"); };
    };
    detail::require(k.heads >= 1 && q.heads % k.heads == 0, "q.heads", q.heads,
                    [&] { return detail::text("a multiple of the KV heads, ", k.heads); });
    require_shape(named(".k"), k, q.batch, k.heads, k.length);
    require_shape(named(".v"), all.v, q.batch, k.heads, k.length);
    detail::require(k.length <= position_limit, named(".k.length"), k.length, "at most 2^30 rows");
    detail::require(k.dim == q.dim, named(".k.dim (head_dim)"), k.dim,
                    [&] { return detail::text("the head_dim of q, ", q.dim); });
    const auto check_plane = [&](const char* part, const auto& plane) {
        if (plane) {
            require_shape(named(part), plane, q.batch, k.heads, k.length);
        }
    };
    check_plane(".mask.expiry", all.mask.expiry);
    check_plane(".mask.log_bias", all.mask.log_bias);
    check_plane(".position", all.position);
    if (all.mask.log_bias && all.mask.bias_from != nullptr) {
        for (std::int32_t h = 0; h < k.heads; ++h) {
            detail::require(all.mask.bias_from[h] >= 0, indexed(".mask.bias_from", h), all.mask.bias_from[h],
                            "0 or more");
        }
    }
    detail::require(all.first >= -position_limit && all.first <= position_limit, named(".first"), all.first,
                    "a position within 2^30 of 0");
    for (std::int32_t b = 0; all.lengths != nullptr && b < q.batch; ++b) {
        detail::require(all.lengths[b] >= 0 && all.lengths[b] <= k.length, indexed(".lengths", b),
                        all.lengths[b],
                        [&] { return detail::text("0 to the rows of the view, ", k.length); });
    }
}

template <class T>
void check_queries(const AttentionParams& attention, const rows_view<const T>& q, std::int32_t head_dim_vo,
                   const Sequences& sequences) {
    check_sequences(sequences, q.batch, q.length);
    detail::require(sequences.length <= position_limit, "sequences.length", sequences.length,
                    "at most 2^30 queries");
    require_head_dim("q.dim", q.dim);
    require_head_dim("v.dim", head_dim_vo);
    detail::require(q.heads >= 1, "q.heads", q.heads, "1 or more");
    require_shape("q", q, q.batch, q.heads, q.length);
    check_attention(attention);
    for (std::int32_t b = 0; sequences.starts != nullptr && b < q.batch; ++b) {
        detail::require(
            sequences.starts[b] >= -position_limit && sequences.starts[b] <= position_limit,
            [&] { return detail::text("sequences.starts[", b, "]"); }, sequences.starts[b],
            "a position within 2^30 of 0");
    }
}

template <class T>
void check_results(const rows_view<const T>& q, std::int32_t head_dim_vo, const rows_view<T>& out,
                   const plane_view<float>& lse) {
    require_shape("out", out, q.batch, q.heads, q.length);
    detail::require(out.dim == head_dim_vo, "out.dim", out.dim,
                    [&] { return detail::text("the head_dim of v, ", head_dim_vo); });
    if (lse) {
        require_shape("lse", lse, q.batch, q.heads, q.length);
    }
}

/// What packed segments exclude.
template <class T>
void check_packed(const kv_view<T>& past, const kv_view<T>* self, const Sequences& sequences) {
    if (sequences.cu_seqlens != nullptr) {
        detail::require(self == nullptr, "sequences.cu_seqlens", "given",
                        "null where there are two segments of keys");
        detail::require(sequences.starts == nullptr, "sequences.starts", "given",
                        "null where cu_seqlens is given");
        detail::require(!past.position, "keys.position", "given", "empty where cu_seqlens is given");
        detail::require(past.first == 0, "keys.first", past.first, "0 where cu_seqlens is given");
        detail::require(past.lengths == nullptr, "keys.lengths", "given", "null where cu_seqlens is given");
        detail::require(past.k.length >= sequences.length, "keys.k.length", past.k.length,
                        "sequences.length or more where cu_seqlens is given");
    }
}

template <class T>
void check_attend(const AttentionParams& attention, const rows_view<const T>& q, const kv_view<T>& past,
                  const kv_view<T>* self, const Sequences& sequences) {
    check_queries(attention, q, past.v.dim, sequences);
    check_keys(self != nullptr ? "past" : "keys", q, past);
    if (self != nullptr) {
        check_keys("self", q, *self);
        detail::require(self->k.heads == past.k.heads, "self.k.heads", self->k.heads,
                        [&] { return detail::text("that of past, ", past.k.heads); });
        detail::require(self->v.dim == past.v.dim, "self.v.dim", self->v.dim,
                        [&] { return detail::text("that of past, ", past.v.dim); });
        detail::require(self->k.length == q.length, "self.k.length", self->k.length,
                        [&] { return detail::text("the length of q, ", q.length); });
        detail::require(self->first == 0, "self.first", self->first,
                        "0, since sequences.starts says where a chunk sits");
        detail::require(self->lengths == nullptr, "self.lengths", "given",
                        "null, since sequences.lengths says it");
    }
    check_packed(past, self, sequences);
}

}  // namespace kvpolicy::checks
