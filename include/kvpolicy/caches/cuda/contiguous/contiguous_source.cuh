// Where a head's entries lie in a FixedBudgetCache, as a warp reads them: one after another.
#pragma once

#include <kvpolicy/caches/cuda/decode/warp_softmax.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rows of a head one after another.
template <class T>
struct contiguous_source {
    static constexpr bool dense = true;
    struct row_pointers {
        const T* k;
        const T* v;
    };
    const T* k;  // [used, head_dim_qk]
    const T* v;  // [used, head_dim_vo]
    std::int32_t head_dim_qk;
    std::int32_t head_dim_vo;

    /// Row `first` of a tile; the others follow at k_row() and v_row().
    [[nodiscard]] __device__ row_pointers rows_of(std::int32_t tile, std::int32_t first) const {
        const std::int32_t row = tile * stream_tile + first;
        return {key(row), value(row)};
    }
    [[nodiscard]] __device__ std::int32_t k_row() const { return head_dim_qk; }
    [[nodiscard]] __device__ std::int32_t v_row() const { return head_dim_vo; }
    [[nodiscard]] __device__ const T* key(std::int32_t row) const {
        return k + std::int64_t{row} * head_dim_qk;
    }
    [[nodiscard]] __device__ const T* value(std::int32_t row) const {
        return v + std::int64_t{row} * head_dim_vo;
    }
};

/// How the blocks of contiguous_decode_kernel share a head: each has a stretch of it, whose tiles its warps
/// take in turn.
struct contiguous_layout {
    template <class T>
    using source = contiguous_source<T>;
    static constexpr bool clusters = true;
    // The instructions of a tile wait for each other, so it is warps that hide this, not copies under way:
    // three blocks an SM, where it has the memory.
    static constexpr int blocks = 3, kilobytes = 64;
    static constexpr bool in_turn = true;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
