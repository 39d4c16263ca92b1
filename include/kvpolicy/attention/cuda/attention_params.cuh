// An attention call as its kernels see it, and the plan that turns expiries into index lists.
//
// Attention kernels need no positions, packed segments, lengths or policies: the plan has resolved them. For
// every super-tile (super_q consecutive queries of one KV head of one sequence) it lists the rows that some
// query of it sees, each with its visible interval relative to the super-tile. A row's number counts through
// both key segments of the call: rows of `past` come first, then rows of `self`.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/packed_rows.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Where rows of the first segment are that lie in pages: row r of a head in the page with id
/// table[first_page[b, h] + r / page_size], which is page id % slab_pages of slab id / slab_pages.
template <class T>
struct key_pages {
    const std::int32_t* table = nullptr;       // ids; null: strides say where rows are
    const std::int64_t* first_page = nullptr;  // [B, Hkv]
    const T* const* k = nullptr;               // a slab's pages, slab_step pointers apart
    const T* const* v = nullptr;
    std::int32_t slab_step = 1;
    std::int32_t slab_pages = 1;
    std::int32_t page_size = 1;
    std::int64_t k_page = 0, k_row = 0, v_page = 0, v_row = 0;  // strides, in elements

    /// The ids of a head.
    __device__ const std::int32_t* of_head(std::int64_t b, std::int64_t h, std::int32_t heads) const {
        return table + first_page[b * heads + h];
    }
    __device__ const T* key(const std::int32_t* ids, std::int32_t row) const {
        const in_slab at(*this, ids, row);
        return k[at.slab] + at.page * k_page + at.row * k_row;
    }
    __device__ const T* value(const std::int32_t* ids, std::int32_t row) const {
        const in_slab at(*this, ids, row);
        return v[at.slab] + at.page * v_page + at.row * v_row;
    }

  private:
    struct in_slab {
        std::int64_t slab, page, row;
        __device__ in_slab(const key_pages& pages, const std::int32_t* ids, std::int32_t of) {
            const auto number = static_cast<std::uint32_t>(of);
            const auto size = static_cast<std::uint32_t>(pages.page_size);
            const auto id = static_cast<std::uint32_t>(ids[number / size]);
            const auto of_slab = static_cast<std::uint32_t>(pages.slab_pages);
            slab = std::int64_t{id / of_slab} * pages.slab_step;
            page = id % of_slab;
            row = number % size;
        }
    };
};

/// Keys and values of a call, by row number.
template <class T>
struct key_rows {
    rows_view<const T> k;  // [B, Hkv, past, Dk]; in pages: sizes alone
    rows_view<const T> v;  // [B, Hkv, past, Dv]
    key_pages<T> pages;
    rows_view<const T> self_k;  // [B, Hkv, S, Dk]; data null: one segment
    rows_view<const T> self_v;  // [B, Hkv, S, Dv]
    // [B, Hkv], where a head's rows of the first segment begin, in rows from k.data and v.data; null: as
    // strides say
    const std::int64_t* first_row = nullptr;
    packed_rows packed;  // of self_k and self_v, q and the results

    /// Row 0 of a head of the first segment, `view` being k or v.
    __device__ const T* past(const rows_view<const T>& view, std::int64_t b, std::int64_t h) const {
        return first_row != nullptr ? view.data + first_row[b * view.heads + h] * view.row_stride
                                    : view.row(b, h, 0);
    }
    __device__ const T* key(std::int64_t b, std::int64_t h, std::int32_t row) const {
        return row >= k.length          ? self_k.row(b, h, packed.begin(b) + row - k.length)
               : pages.table != nullptr ? pages.key(pages.of_head(b, h, k.heads), row)
                                        : past(k, b, h) + row * k.row_stride;
    }
    __device__ const T* value(std::int64_t b, std::int64_t h, std::int32_t row) const {
        return row >= v.length          ? self_v.row(b, h, packed.begin(b) + row - v.length)
               : pages.table != nullptr ? pages.value(pages.of_head(b, h, v.heads), row)
                                        : past(v, b, h) + row * v.row_stride;
    }
};

/// The numbers of a call.
template <class T>
struct attention_params {
    rows_view<const T> q;  // [B, Hq, S, Dk]
    key_rows<T> rows;
    std::int32_t batch = 0;
    std::int32_t kv_heads = 0;
    std::int32_t group = 1;                 // query heads per KV head
    std::int32_t length = 0;                // queries per sequence, at most
    const std::int32_t* lengths = nullptr;  // [B], device memory; null: length
    float scale = 0.0f;                     // resolved: never 0 for "default"
    float logits_soft_cap = 0.0f;           // 0: none

    /// The row of a query of entry b in q and in the results.
    __device__ std::int32_t query_row(std::int64_t b, std::int32_t query) const {
        return rows.packed.begin(b) + query;
    }
    __device__ std::int32_t length_of(std::int64_t b) const {
        // A length that no view holds counts as an empty sequence, as everywhere on a device.
        const std::int32_t own = lengths != nullptr ? lengths[b] : length;
        return own >= 0 && own <= length ? own : 0;
    }
};

/// The visible interval of a row among the queries of a super-tile: query i of it (0 <= i < super_q) sees
/// the row iff begin <= i < expiry (begin and expiry). Both are clamped to [0, super_q]; begin < expiry for
/// every row of a list.
struct alignas(4) row_interval {
    std::uint16_t begin;
    std::uint16_t expiry;
};

/// The index lists of a round: super-tiles [first, first + supers) of every KV head. Memory holds so many
/// lists at a time; a call with more of them goes in several rounds of plan and attention.
///
/// List L = head * supers + j, head = b * kv_heads + h, is for queries [(first + j) super_q, (first + j + 1)
/// super_q) of the sequence; its entries stand at offset(head, j). With the interval of an entry written
/// [begin, expiry), relative to the super-tile, their order is:
///
/// 1. old[L] entries older than the super-tile (begin 0), latest expiry first. Rows that outlast it come
/// first.
/// 2. lasting[L] entries that begin inside it and outlast it, by rising begin.
/// 3. Up to total[L], entries that begin and expire inside it, by rising begin.
///
/// Ties go by row number. Lists are the same in every run.
///
/// A query tile begins and ends at multiples of boundary_q (super_q is one of them). For boundaries
/// e = i boundary_q, i = 0 .. super_q / boundary_q:
///   through[L * boundaries + i] = old entries with an expiry >= e: a prefix of the list, visible before e;
///   known[L * boundaries + i]   = entries of the second kind with a begin < e;
///   passing[L * boundaries + i] = entries of the third kind with a begin < e.
///
/// So of the old entries a tile [a, e) sees the first through[e] in full; those from there to through[a]
/// may expire inside it. Of the second kind it sees the first known[a] in full, and only those up to known[e]
/// matter. Of the third kind the first passing[e] matter, less those with an expiry <= a. An expiry of
/// super_q says that a row outlasts the super-tile, or the sequence. runs[L] says whether rows that outlast
/// the super-tile mostly follow one another, in runs of 32 or more on average.
struct attention_plan {
    std::int32_t super_q = 0;
    std::int32_t boundary_q = 0;
    std::int32_t first = 0;              // the round's first super-tile
    std::int32_t supers = 0;             // super-tiles of the round
    std::int32_t boundaries = 0;         // super_q / boundary_q + 1
    std::int32_t rows = 0;               // rows of both segments
    std::int32_t whole = 0;              // of the first segment, if there are two and `triangular`
    bool triangular = false;             // of the rows behind, super-tile i needs the first (i + 1) super_q
    std::int32_t* row = nullptr;         // entries: row numbers
    row_interval* interval = nullptr;    // entries
    float* bias = nullptr;               // entries: log-bias, natural log; null where the mask has none
    std::uint16_t* bias_from = nullptr;  // entries: the bias counts for queries i >= this; in [0, super_q]
    std::int32_t* old = nullptr;         // [lists]
    std::int32_t* total = nullptr;       // [lists]
    std::int32_t* through = nullptr;     // [lists][boundaries]
    std::int32_t* lasting = nullptr;     // [lists]
    std::int32_t* known = nullptr;       // [lists][boundaries]
    std::int32_t* passing = nullptr;     // [lists][boundaries]
    std::int32_t* runs = nullptr;        // [lists]

    /// Entries that the lists before super-tile first + j of one head may take.
    __host__ __device__ std::int64_t before(std::int64_t j) const {
        if (!triangular) {
            return j * rows;
        }
        // whole + min(behind, (first + i + 1) super_q), summed over i < j
        const std::int64_t behind = rows - whole;
        const std::int64_t full = behind / super_q - first;  // i < full: (first + i + 1) super_q <= behind
        const std::int64_t ramp = j < full ? j : full > 0 ? full : 0;
        return j * whole + ramp * (2 * std::int64_t{first} + ramp + 1) / 2 * super_q + (j - ramp) * behind;
    }
    __host__ __device__ std::int64_t entries_a_head() const { return before(supers); }
    __device__ std::int64_t offset(std::int64_t head, std::int32_t j) const {  // head = b * kv_heads + h
        return head * entries_a_head() + before(j);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
