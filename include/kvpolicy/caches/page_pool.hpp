// A pool of pages that many sequences, heads and layers share. It grows by slabs of pages; a slab never
// moves, and kernels find it through a table, so growing moves no page and invalidates no ref.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// Numbers of T from a page's first row to the next page's, and from a row to the next. All 0: pages and rows
/// follow one another.
struct PageStrides {
    std::int64_t k_page = 0;
    std::int64_t v_page = 0;
    std::int32_t k_row = 0;
    std::int32_t v_row = 0;
};

/// How a DualCache's memory comes in.
struct PoolShape {
    std::int32_t slab_pages = 0;  ///< pages of a slab; a page is CacheShape::page_size rows of one head
    std::int32_t max_slabs = 1;   ///< the most slabs that can be added
    /// Tokens of the longest sequence. It bounds the page tables (4 bytes per page), and lengths where a head
    /// has no limit of its own.
    position_t max_seq_len = 0;
    /// Pages 0 .. spared_pages - 1 of the first slab are never handed out and never written: an engine's own,
    /// as SGLang's sequence 0 is. Of every slab where strides are given, since page p of each is then a
    /// head's part of the engine's page p.
    std::int32_t spared_pages = 0;
    /// Others than 0 for pages of an engine's own pool, which come by add_pages().
    PageStrides strides{};
};

/// The arrays of one slab, as the caller provided it. Page p of the slab starts at row p * page_size of each;
/// of k and v, at p page strides.
template <Storage T>
struct Slab {
    T* k = nullptr;                  // [slab_pages * page_size, head_dim_qk]
    T* v = nullptr;                  // [slab_pages * page_size, head_dim_vo]
    position_t* position = nullptr;  // [slab_pages * page_size]
    float* score = nullptr;          // [slab_pages * page_size]
    T* bounds =
        nullptr;  // [slab_pages * page_size / bound_rows, 2, head_dim_qk], for selection; null without
};

/// Views of the pool's bookkeeping. Page id = slab * slab_pages + page of the slab. A page may be named by
/// several page tables (forked sequences); it is free again when the last lets go.
template <Storage T>
struct PagePool {
    const Slab<T>* slabs = nullptr;      // [max_slabs]
    std::int32_t* free_ids = nullptr;    // [max_slabs * slab_pages], a stack
    std::int32_t* free_count = nullptr;  // [1]
    std::int32_t* names = nullptr;       // [max_slabs * slab_pages]: page tables that name the page
    std::int32_t slab_pages = 1;
    std::int32_t page_size = 1;
    std::int32_t head_dim_qk = 0;
    std::int32_t head_dim_vo = 0;
    PageStrides strides{};

    [[nodiscard]] std::int32_t free_pages() const { return *free_count; }
    /// A free page, named once. There must be one.
    [[nodiscard]] std::int32_t take() const {
        const std::int32_t id = free_ids[--*free_count];
        names[id] = 1;
        return id;
    }
    /// One more page table names the page.
    void share(std::int32_t id) const { ++names[id]; }
    /// One page table fewer names the page.
    void give(std::int32_t id) const {
        if (--names[id] == 0) {
            free_ids[(*free_count)++] = id;
        }
    }
};

/// Rows of one head that lie in pages.
template <Storage T>
struct PagedRows {
    const std::int32_t* table = nullptr;  // page ids
    const Slab<T>* slabs = nullptr;
    std::int32_t slab_pages = 1;
    std::int32_t page_size = 1;
    std::int32_t head_dim_qk = 0;
    std::int32_t head_dim_vo = 0;
    std::int32_t bound_rows = 1;  // divides page_size
    PageStrides strides{};

    /// As PlainRows::bounds.
    KVPOLICY_HOST_DEVICE constexpr T* bounds(std::int64_t page) const {
        const auto row = static_cast<std::int32_t>(page * bound_rows);
        return slab(row).bounds + slab_row(row) / bound_rows * 2 * head_dim_qk;
    }
    KVPOLICY_HOST_DEVICE constexpr T* k(std::int32_t row) const {
        return slab(row).k + slab_page(row) * strides.k_page + std::int64_t{row % page_size} * strides.k_row;
    }
    KVPOLICY_HOST_DEVICE constexpr T* v(std::int32_t row) const {
        return slab(row).v + slab_page(row) * strides.v_page + std::int64_t{row % page_size} * strides.v_row;
    }
    KVPOLICY_HOST_DEVICE constexpr position_t& position(std::int32_t row) const {
        return slab(row).position[slab_row(row)];
    }
    KVPOLICY_HOST_DEVICE constexpr float& score(std::int32_t row) const {
        return slab(row).score[slab_row(row)];
    }
    /// The first row after `row` that does not follow on its predecessor in memory; at most `end`.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t run_end(std::int32_t row, std::int32_t end) const {
        if (strides.k_row != head_dim_qk || strides.v_row != head_dim_vo) {
            return end - row < 1 ? end : row + 1;
        }
        const std::int32_t rest = page_size - row % page_size;
        return end - row < rest ? end : row + rest;
    }

  private:
    KVPOLICY_HOST_DEVICE constexpr const Slab<T>& slab(std::int32_t row) const {
        return slabs[table[row / page_size] / slab_pages];
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t slab_page(std::int32_t row) const {
        return table[row / page_size] % slab_pages;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t slab_row(std::int32_t row) const {
        return slab_page(row) * page_size + row % page_size;
    }
};

}  // namespace kvpolicy
