// What attend_backward on CUDA refuses.
#pragma once

#include <kvpolicy/attention/sparse_backward.cuh>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/dispatch.cuh>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The compiled head_dim that holds these.
constexpr std::int32_t tile_of(std::int32_t dim_k, std::int32_t dim_v) {
    const std::int32_t dim = dim_k > dim_v ? dim_k : dim_v;
    return dim <= 64 ? 64 : (dim <= 128 ? 128 : 256);
}

template <int... Tiles>
constexpr bool has_tile(head_dims<Tiles...>, std::int32_t tile) {
    static_assert(((Tiles == 64 || Tiles == 128 || Tiles == 256) && ...),
                  "head_dims of attention kernels are 64, 128 and 256; others are padded to these");
    return ((Tiles == tile) || ...);
}

template <class View>
void check_view(const char* name, const View& view, std::int32_t batch, std::int32_t heads, std::int32_t length) {
    const bool agrees = view.batch == batch && view.heads == heads && view.length == length;
    if (!agrees) {
        detail::refuse(name, detail::text("[", view.batch, ", ", view.heads, ", ", view.length, "]"),
                       detail::text("of shape [", batch, ", ", heads, ", ", length, "], as the other views have it"));
    }
    if (view.data == nullptr && batch != 0 && heads != 0 && length != 0) {
        detail::refuse(name, "null", "a view of device memory");
    }
}

/// Rows go in pieces of 16 bytes where T has 16 bits.
template <class T>
void check_rows(const char* name, const rows_view<T>& view, std::int32_t batch, std::int32_t heads,
                std::int32_t length, std::int32_t dim) {
    check_view(name, view, batch, heads, length);
    detail::require(
        view.dim == dim, [&] { return detail::text(name, ".dim"); }, view.dim,
        [&] { return detail::text("a head_dim of ", dim); });
    if constexpr (sizeof(T) == 2) {
        const bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.batch_stride % 8 == 0 &&
                             view.head_stride % 8 == 0 && view.row_stride % 8 == 0;
        if (!aligned) {
            detail::refuse(name, detail::text("a view with strides ", view.batch_stride, ", ", view.head_stride, ", ",
                                              view.row_stride),
                           "rows that begin at multiples of 16 bytes: an aligned pointer, strides that are multiples of 8");
        }
    }
}

template <class Dims, class T>
void check_backward_call(const Attention& attention, const rows_view<const T>& q, const keys<T>& all,
                         const Sequences& sequences) {
    const rows_view<const T>&k = all.k, &v = all.v;
    check_sequences(sequences, q.batch, q.length);
    detail::require(k.heads >= 1 && q.heads >= 1 && q.heads % k.heads == 0, "q.heads", q.heads,
                    [&] { return detail::text("a multiple of the KV heads, ", k.heads); });
    const auto check_dim = [](const char* name, std::int32_t dim) {
        detail::require(dim >= 8 && dim <= 256 && dim % 8 == 0, name, dim,
                        "a head_dim that is a multiple of 8 from 8 to 256");
    };
    check_dim("q.dim", q.dim);
    check_dim("v.dim", v.dim);
    if constexpr (sizeof(T) == 2) {
        detail::require(has_tile(Dims{}, tile_of(q.dim, v.dim)), "q.dim and v.dim", std::max(q.dim, v.dim), [&] {
            return detail::text("covered by a head_dim that this call is compiled for; head_dims<",
                                tile_of(q.dim, v.dim), "> would do");
        });
    }
    check_rows("q", q, q.batch, q.heads, q.length, q.dim);
    check_rows("keys.k", k, q.batch, k.heads, k.length, q.dim);
    check_rows("keys.v", v, q.batch, k.heads, k.length, v.dim);
    if (all.mask.expiry) {
        check_view("keys.mask.expiry", all.mask.expiry, q.batch, k.heads, k.length);
    }
    if (all.mask.log_bias) {
        check_view("keys.mask.log_bias", all.mask.log_bias, q.batch, k.heads, k.length);
    }
    if (all.position) {
        check_view("keys.position", all.position, q.batch, k.heads, k.length);
    }
    detail::require(std::isfinite(attention.scale), "attention.scale", attention.scale,
                    "a finite number, 0 for 1 / sqrt(head_dim)");
    detail::require(attention.softcap >= 0.0f && std::isfinite(attention.softcap), "attention.softcap",
                    attention.softcap, "0 (none) or more");
    constexpr std::int32_t limit = 1 << 30;
    detail::require(all.first >= -limit && all.first <= limit, "keys.first", all.first, "a position within 2^30 of 0");
    if (sequences.cu_seqlens != nullptr) {
        detail::require(sequences.starts == nullptr && !all.position && all.first == 0 && all.lengths == nullptr,
                        "sequences.cu_seqlens", "given", "null where starts, positions, first or key lengths are given");
        detail::require(k.length >= sequences.length, "keys.k.length", k.length,
                        "sequences.length or more where cu_seqlens is given");
    }
}

template <class T>
void check_backward_views(const rows_view<const T>& q, const keys<T>& all, const AttendGradient<T>& given,
                          const AttendGradients<T>& into) {
    const rows_view<const T>& k = all.k;
    check_rows("out", given.out, q.batch, q.heads, q.length, all.v.dim);
    check_rows("d_out", given.d_out, q.batch, q.heads, q.length, all.v.dim);
    check_view("lse", given.lse, q.batch, q.heads, q.length);
    check_rows("d_q", into.d_q, q.batch, q.heads, q.length, q.dim);
    check_rows("d_k", into.d_k, q.batch, k.heads, k.length, k.dim);
    check_rows("d_v", into.d_v, q.batch, k.heads, k.length, all.v.dim);
    if (into.d_log_bias) {
        check_view("d_log_bias", into.d_log_bias, q.batch, k.heads, k.length);
        detail::require(static_cast<bool>(all.mask.log_bias), "d_log_bias", "given",
                        "empty where the mask has no log_bias");
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
