// What the dispatches of attention calls share: checks, and a call's numbers as kernels take them.
#pragma once

#include <kvpolicy/attention/check_attend.hpp>
#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/attention/kv_view.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The same keys without what only the device may read.
template <class T>
kv_view<T> without_device_memory(kv_view<T> all) {
    all.lengths = nullptr;
    all.mask.bias_from = nullptr;
    return all;
}

/// What the host's attend refuses, as far as no device memory must be read.
template <class T>
void check_attend(const AttentionParams& attention, const rows_view<const T>& q, const kv_view<T>& past,
                  const kv_view<T>* self, const Sequences& sequences) {
    Sequences plain = sequences;
    plain.lengths = nullptr;
    plain.starts = nullptr;
    plain.cu_seqlens = nullptr;
    const kv_view<T> bare_past = without_device_memory(past);
    const kv_view<T> bare_self = self != nullptr ? without_device_memory(*self) : kv_view<T>{};
    checks::check_attend(attention, q, bare_past, self != nullptr ? &bare_self : nullptr, plain);
    if (self != nullptr) {
        detail::require(self->lengths == nullptr, "self.lengths", "given",
                        "null, since sequences.lengths says it");
    }
    if (sequences.cu_seqlens != nullptr) {
        detail::require(sequences.segments >= 1, "sequences.segments", sequences.segments,
                        "1 or more where cu_seqlens is given");
    }
    checks::check_packed(past, self, sequences);
}

/// A head's rows of keys and of values are named by 31 bits, in units of 16 bytes.
template <class T>
void check_key_rows(const char* name, const rows_view<const T>& view) {
    check_aligned(name, view);
    if constexpr (is_half<T>) {
        const std::int64_t last = std::int64_t{view.length} * (view.row_stride / 8);
        detail::require(
            view.length <= 1 || (view.row_stride >= 0 && view.row_stride < (std::int64_t{1} << 31) &&
                                 last < (std::int64_t{1} << 31) - 1),
            name, "a view with a row stride of " + std::to_string(view.row_stride),
            "0 or more, with all rows of a head within 32 GB");
    }
}
template <class T>
void check_key_rows(const char* k_name, const char* v_name, const kv_view<T>& all) {
    check_key_rows(k_name, all.k);
    check_key_rows(v_name, all.v);
}

template <class T>
segment_frame frame_of(const kv_view<T>& all) {
    segment_frame frame;
    frame.position = all.position;
    frame.expiry = all.mask.expiry;
    frame.log_bias = all.mask.log_bias;
    frame.bias_from = all.mask.bias_from;
    frame.lengths = all.lengths;
    frame.rows = all.k.length;
    frame.heads = all.k.heads;
    frame.first = all.first;
    return frame;
}

/// `edges`: device memory for checked edges where the call is packed (edges_needed), filled by launch_edges.
template <class T>
key_frames frames_of(const kv_view<T>& past, const kv_view<T>* self, const Sequences& sequences,
                     std::int32_t* edges) {
    key_frames frames;
    frames.past = frame_of(past);
    if (self != nullptr) {
        frames.self = frame_of(*self);
    }
    frames.lengths = sequences.lengths;
    frames.starts = sequences.starts;
    frames.length = sequences.length;
    if (sequences.cu_seqlens != nullptr) {
        frames.edges = edges;
        frames.segments = sequences.segments;
    }
    return frames;
}

/// Row numbers are positions: no positions, no starts, one segment that begins at 0. So a super-tile needs no
/// row beyond its last query.
template <class T>
bool is_plain_frame(const kv_view<T>& past, const kv_view<T>* self, const Sequences& sequences) {
    return self == nullptr && !past.position && past.first == 0 && sequences.starts == nullptr;
}

/// The same for a chunk's own rows, behind those of the first segment.
template <class T>
bool is_plain_chunk(const kv_view<T>* self, const Sequences& sequences) {
    return self != nullptr && !self->position && sequences.cu_seqlens == nullptr;
}

template <class T>
attention_params<T> params_of(const AttentionParams& attention, const rows_view<const T>& q,
                              const kv_view<T>& past, const kv_view<T>* self, const Sequences& sequences) {
    attention_params<T> params;
    params.q = q;
    params.rows.k = past.k;
    params.rows.v = past.v;
    if (self != nullptr) {
        params.rows.self_k = self->k;
        params.rows.self_v = self->v;
    }
    params.batch = q.batch;
    params.kv_heads = past.k.heads;
    params.group = q.heads / past.k.heads;
    params.length = sequences.length;
    params.lengths = sequences.lengths;
    params.scale =
        attention.sm_scale != 0.0f ? attention.sm_scale : 1.0f / std::sqrt(static_cast<float>(q.dim));
    params.logits_soft_cap = attention.logits_soft_cap;
    return params;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
