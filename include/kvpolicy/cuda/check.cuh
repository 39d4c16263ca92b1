// What the dispatches of several operations share: argument checks that need no device memory, and the edges
// of packed segments.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/kernel_check_edges.cuh>
#include <kvpolicy/cuda/kernel_report_lengths.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/tuning.cuh>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Storage types that the tensor cores take.
template <class T>
inline constexpr bool is_half = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;

// These checks run in every call, so they build no text unless they refuse.

/// The parts of the host's checks that need no device memory.
inline void check_sequences(const Sequences& sequences, std::int32_t batch, std::int32_t length) {
    detail::require(sequences.batch == batch, "sequences.batch", sequences.batch,
                    [&] { return detail::text("the views' batch, ", batch); });
    detail::require(
        sequences.length >= 0 && sequences.length <= length, "sequences.length", sequences.length, [&] {
            return detail::text("0 to the views' length, ", length,
                                sequences.length == Sequences{}.length ? " (it was not set)" : "");
        });
    detail::require(sequences.cu_seqlens == nullptr || sequences.segments >= 1, "sequences.segments",
                    sequences.segments, "1 or more where cu_seqlens is given");
}
inline void check_whole_sequences(const Sequences& sequences, std::int32_t batch, std::int32_t length) {
    checks::check_no_starts(sequences);
    check_sequences(sequences, batch, length);
}

/// The longest sequence that kernels take: token indices of the last block stay below 2^31.
inline constexpr std::int32_t longest_sequence = 0x7f000000;

/// Slots of a plane (mask_params::first_chunk).
inline std::int64_t chunks_of(const Sequences& sequences) {
    return sequences.cu_seqlens == nullptr ? (std::int64_t{sequences.length} + mask_chunk - 1) / mask_chunk
                                           : std::int64_t{sequences.length} / mask_chunk + sequences.segments;
}

/// Shapes that a workspace can be asked for, and grids that fit: before anything is computed from them.
inline void check_shape(const Sequences& sequences, std::int32_t heads) {
    detail::require(sequences.batch >= 0, "sequences.batch", sequences.batch, "0 or more");
    detail::require(sequences.length >= 0 && sequences.length <= longest_sequence, "sequences.length",
                    sequences.length, "0 to 2^31 - 2^24");
    detail::require(heads >= 0, "heads", heads, "0 or more");
    detail::require(sequences.cu_seqlens == nullptr || sequences.segments >= 1, "sequences.segments",
                    sequences.segments, "1 or more where cu_seqlens is given");
    const std::int64_t planes = std::int64_t{sequences.batch} * heads;
    const std::int64_t chunks = std::max<std::int64_t>(1, chunks_of(sequences));
    detail::require(
        planes <= 0x7fffffff / chunks, "batch x heads x chunks",
        [&] { return detail::text(sequences.batch, " x ", heads, " x ", chunks); },
        "below 2^31 (a chunk: 512 tokens of a segment): split the batch");
}

inline void check_workspace(workspace_view workspace, std::size_t needed) {
    detail::require(workspace.bytes >= needed, "workspace.bytes", workspace.bytes, [&] {
        return detail::text("at least ", needed, " (what the call's ..._workspace_bytes says)");
    });
    detail::require(needed == 0 || workspace.data != nullptr, "workspace.data", "null",
                    "device memory of workspace.bytes");
}

template <class T>
void check_plane(const char* name, const plane_view<T>& plane, std::int32_t batch, std::int32_t heads,
                 std::int32_t length) {
    detail::require(
        plane.batch == batch && plane.heads == heads && plane.length >= length, name,
        [&] { return detail::text(plane.batch, " x ", plane.heads, " x ", plane.length); },
        [&] { return detail::text(batch, " x ", heads, " x at least ", length); });
    detail::require(plane.data != nullptr || batch == 0 || heads == 0 || length == 0, name, "null",
                    "device memory");
    checks::check_strides(name, plane);
}

/// Rows of 16-bit elements are copied 16 bytes at a time.
template <class T>
void check_aligned(const char* name, const rows_view<T>& view) {
    if constexpr (is_half<std::remove_const_t<T>>) {
        const auto even = [](std::int64_t stride, std::int32_t count) {
            return count <= 1 || stride % 8 == 0;
        };
        const bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
                             even(view.batch_stride, view.batch) && even(view.head_stride, view.heads) &&
                             even(view.row_stride, view.length);
        detail::require(aligned, name, "a view whose rows are not aligned",
                        "aligned to 16 bytes, with strides that are multiples of 8 elements");
    }
}

/// For calls whose kernels count a length out of range as 0 and do not say so: reports it, where a status is
/// given.
inline void report_lengths(const cuda& on, const Sequences& sequences, std::uint32_t* status) {
    if (status != nullptr && sequences.lengths != nullptr && sequences.batch > 0) {
        const device_scope device(on);
        launch("report_lengths_kernel", report_lengths_kernel<std::int32_t>, 1, 256, 0, on, sequences.lengths,
               sequences.batch, sequences.length, status);
    }
}

/// Device memory for the checked edges of packed segments.
inline std::int64_t edges_needed(const Sequences& sequences) {
    return sequences.cu_seqlens != nullptr ? std::int64_t{sequences.segments} + 1 : 0;
}
inline void launch_edges(const cuda& on, const Sequences& sequences, std::int32_t* edges,
                         std::uint32_t* status) {
    if (sequences.cu_seqlens != nullptr) {
        launch("check_edges_kernel", check_edges_kernel<std::int32_t>, 1, 256, 0, on, sequences.cu_seqlens,
               sequences.segments, sequences.length, edges, status, sequences.batch);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
