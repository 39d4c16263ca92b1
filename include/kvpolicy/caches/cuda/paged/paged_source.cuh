// Where a head's entries lie in a DualCache, as a warp reads them: in pages, found through a page table.
#pragma once

#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/page_pool.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rows of a head in pages of whole tiles. The lanes of a warp hold where 32 pages lie, from `first` on, so
/// that a page table is read once for all of them.
template <class T>
struct paged_source {
    static constexpr bool dense = false;
    struct row_pointers {
        const T* k;
        const T* v;
    };
    PagedRows<T> rows;
    std::int32_t pages;        // that the table names
    std::int32_t first = -32;  // none yet
    const T* k_page = nullptr;
    const T* v_page = nullptr;

    /// Row `in_tile` of a tile; the others follow at k_row() and v_row(). Tiles come in rising order.
    __device__ row_pointers rows_of(std::int32_t tile, std::int32_t in_tile) {
        const std::int32_t row = tile * stream_tile, page = row / rows.page_size;
        if (page - first >= 32) {
            first = page;
            const std::int32_t mine = page + lane_id();
            if (mine < pages) {
                const std::int32_t id = rows.table[mine];
                const Slab<T>& slab = rows.slabs[id / rows.slab_pages];
                const std::int64_t in_slab = id % rows.slab_pages;
                k_page = slab.k + in_slab * rows.strides.k_page;
                v_page = slab.v + in_slab * rows.strides.v_page;
            }
        }
        const std::int64_t in_page = row - page * rows.page_size;
        return {of_lane(k_page, page - first) + in_page * rows.strides.k_row + in_tile * rows.strides.k_row,
                of_lane(v_page, page - first) + in_page * rows.strides.v_row + in_tile * rows.strides.v_row};
    }
    [[nodiscard]] __device__ std::int32_t k_row() const { return rows.strides.k_row; }
    [[nodiscard]] __device__ std::int32_t v_row() const { return rows.strides.v_row; }
    __device__ const T* key(std::int32_t row) const { return rows.k(row); }
    __device__ const T* value(std::int32_t row) const { return rows.v(row); }

  private:
    __device__ static const T* of_lane(const T* pointer, std::int32_t lane) {
        return reinterpret_cast<const T*>(static_cast<std::uintptr_t>(__shfl_sync(
            all_lanes, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(pointer)), lane)));
    }
};

/// How the blocks of paged_decode_kernel share a head: its warps take tiles in turn.
struct paged_layout {
    template <class T>
    using source = paged_source<T>;
    static constexpr bool clusters = false;
    static constexpr int blocks = 2, kilobytes = 96;  // of one block: two per SM, where it has the memory
    static constexpr bool in_turn = true;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
