// Checks that several host operations share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/view.hpp>

namespace kvpolicy::host_backend {

/// Lengths and packed edges of a call, against the views' batch and length.
inline void check_sequences(const Sequences& sequences, std::int32_t batch, std::int32_t length) {
    detail::require(sequences.batch == batch, "sequences.batch", sequences.batch,
                    "the views' batch, " + std::to_string(batch));
    detail::require(sequences.length >= 0 && sequences.length <= length, "sequences.length", sequences.length,
                    "0 to the views' length, " + std::to_string(length));
    if (sequences.lengths != nullptr) {
        for (std::int32_t b = 0; b < batch; ++b) {
            const std::string name = "sequences.lengths[" + std::to_string(b) + "]";
            detail::require(sequences.lengths[b] >= 0 && sequences.lengths[b] <= sequences.length, name.c_str(),
                            sequences.lengths[b], "0 to sequences.length = " + std::to_string(sequences.length));
        }
    }
    if (sequences.cu_seqlens != nullptr) {
        detail::require(sequences.segments >= 1, "sequences.segments", sequences.segments,
                        "1 or more where cu_seqlens is given");
        detail::require(sequences.cu_seqlens[0] == 0, "sequences.cu_seqlens[0]", sequences.cu_seqlens[0], "0");
        for (std::int32_t i = 0; i < sequences.segments; ++i) {
            const std::string name = "sequences.cu_seqlens[" + std::to_string(i + 1) + "]";
            detail::require(sequences.cu_seqlens[i + 1] >= sequences.cu_seqlens[i], name.c_str(),
                            sequences.cu_seqlens[i + 1], "no less than the edge before it");
        }
        detail::require(sequences.cu_seqlens[sequences.segments] == sequences.length, "sequences.cu_seqlens's last edge",
                        sequences.cu_seqlens[sequences.segments],
                        "sequences.length = " + std::to_string(sequences.length));
    }
}

/// The lent memory of a call.
inline void check_workspace(workspace_view workspace, std::size_t needed) {
    detail::require(workspace.bytes >= needed, "workspace.bytes", workspace.bytes,
                    "at least " + std::to_string(needed) + " (what the call's ..._workspace_bytes says)");
    detail::require(needed == 0 || workspace.data != nullptr, "workspace.data", "null", "memory of workspace.bytes");
}

/// The first address at or after `data` that is aligned to 64 bytes, and how many bytes the alignment may cost.
inline constexpr std::size_t alignment = 64;
inline std::byte* aligned(void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return static_cast<std::byte*>(data) + (alignment - address % alignment) % alignment;
}
constexpr std::size_t aligned_size(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace kvpolicy::host_backend
