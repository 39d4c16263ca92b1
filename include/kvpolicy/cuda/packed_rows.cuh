// Where a batch's entries begin in tensors that have their tokens one after another.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

/// The entries of tensors of one sequence, [1, H, total, D]: token t of entry b is row begin(b) + t. Views of
/// such tensors name all entries and have a batch stride of 0, so view.row(b, h, begin(b) + t) is that token
/// whether or not entries are packed.
struct packed_rows {
    /// [B + 1], device memory; read for entries with tokens alone. Null: every entry has a sequence of its
    /// own, from row 0.
    const std::int32_t* edges = nullptr;

    [[nodiscard]] __device__ std::int32_t begin(std::int64_t b) const {
        return edges != nullptr ? edges[b] : 0;
    }
    /// The sequence of entry b in a tensor map of packed_entries::whole().
    [[nodiscard]] __device__ std::int32_t sequence(std::int32_t b) const { return edges != nullptr ? 0 : b; }
};

/// The entries, with what only the host asks: how many rows the tensors have.
struct packed_entries {
    packed_rows rows;
    std::int32_t total = 0;

    /// A view of all of them, for a tensor map: one sequence where entries are packed.
    template <class View>
    [[nodiscard]] View whole(View view) const {
        if (rows.edges != nullptr) {
            view.batch = 1;
            view.length = total;
        }
        return view;
    }
};

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
