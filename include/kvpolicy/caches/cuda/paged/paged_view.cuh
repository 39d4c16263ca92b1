// A layer of a DualCache as kernels see it: as contiguous_view for a FixedBudgetCache, with entries in pages.
#pragma once

#include <kvpolicy/caches/cuda/cache_view.cuh>
#include <kvpolicy/caches/cuda/paged/paged_source.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/page_pool.hpp>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T>
struct paged_head;

template <class T>
struct paged_view : cache_view {
    using value_type = T;
    using head_type = paged_head<T>;
    static constexpr bool paged = true;

    const std::int64_t* table_offset = nullptr;  // [kv_heads + 1]
    const std::int64_t* tile_offset = nullptr;   // [kv_heads + 1]
    std::int32_t* table = nullptr;               // [max_sequences, table_offset[kv_heads]]
    std::int32_t* held = nullptr;                // [max_sequences, kv_heads]
    std::int32_t* num_protected = nullptr;       // [max_sequences, kv_heads], with a keep part
    T* queries = nullptr;  // [max_sequences, kv_heads, observing, group, head_dim_qk], with an eviction part
    T* spare_queries = nullptr;  // [max_sequences, kv_heads, max_draft_tokens, group, head_dim_qk]
    const std::int32_t* read_pages = nullptr;  // [kv_heads], with a selection: pages of bound_rows rows
    PagePool<T> pool;
    PlainRows<T> spare;          // [max_sequences, kv_heads, max_draft_tokens]
    position_t max_seq_len = 0;  // of a sequence; where some head's rows are bounded by nothing else
    std::int32_t observing = 1;
    std::int32_t bound_rows = 1;
    bool limited = false;
    bool unbounded = false;   // no head has a bound but max_seq_len
    bool mean_bound = false;  // of a group's query heads; else the largest

    template <class P>
    __host__ __device__ explicit paged_view(const DualRef<P, T>& ref)
        : paged_view(ref, {ref.table_offset, ref.tile_offset, ref.table, ref.held}, ref.max_seq_len) {
        num_protected = ref.num_protected;
        queries = ref.queries;
        spare_queries = ref.spare_queries;
        pool = ref.pool;
        spare = ref.spare;
        limited = ref.limited;
        unbounded = P::has_keep || P::grows;
        if constexpr (P::has_eviction) {
            observing = ref.eviction.observing;
        }
    }
    /// A FixedBudgetCache with a selection: its pages are all there, each in its place.
    template <class P>
    __host__ __device__ explicit paged_view(const FixedBudgetRef<P, T>& ref)
        : paged_view(ref,
                     {ref.placed.table_offset, ref.placed.tile_offset, ref.placed.table, ref.placed.held},
                     ref.max_capacity) {
        max_draft_tokens = 0;  // they have no pages
        pool.slabs = ref.placed.slab;
        pool.free_count = ref.placed.free_count;
        pool.slab_pages = static_cast<std::int32_t>(ref.page_count());
        pool.page_size = ref.page_size;
        pool.head_dim_qk = ref.head_dim_qk;
        pool.head_dim_vo = ref.head_dim_vo;
        pool.strides = {std::int64_t{ref.page_size} * ref.head_dim_qk,
                        std::int64_t{ref.page_size} * ref.head_dim_vo, ref.head_dim_qk, ref.head_dim_vo};
    }
    /// Where the queries of the token at position t are remembered, and those of draft token j.
    [[nodiscard]] __device__ T* query_row(std::int64_t index, position_t t) const {
        return queries + (index * observing + t % observing) * group * head_dim_qk;
    }
    [[nodiscard]] __device__ T* spare_query_row(std::int64_t index, std::int64_t j) const {
        return spare_queries + (index * max_draft_tokens + j) * group * head_dim_qk;
    }

    /// Whether a sequence may become so much longer: its page tables can name no more.
    [[nodiscard]] __device__ bool takes(std::int32_t seq, std::int32_t tokens) const {
        return !limited || length[seq] + tokens <= max_seq_len;
    }
    /// How many rows of a head a query reads, and where they are: all that it has.
    [[nodiscard]] __device__ std::int32_t rows_read(const paged_head<T>& head, std::int32_t /*pair*/,
                                                    position_t queries, std::int32_t top_k_slots) const {
        return head.layout.used(queries, top_k_slots);
    }
    [[nodiscard]] __device__ paged_source<T> source(const paged_head<T>& head, std::int32_t /*pair*/,
                                                    std::int32_t used) const {
        return head.source(used);
    }
    /// Pages for so many rows.
    [[nodiscard]] __device__ std::int32_t pages_of(std::int32_t rows) const {
        return rows / pool.page_size + (rows % pool.page_size != 0 ? 1 : 0);
    }

  private:
    struct page_tables {
        const std::int64_t* table_offset;
        const std::int64_t* tile_offset;
        std::int32_t* table;
        std::int32_t* held;
    };
    /// What refs of both kinds have.
    template <class Ref>
    __host__ __device__ paged_view(const Ref& ref, const page_tables& tables, position_t max_entries)
        : cache_view(ref),
          table_offset(tables.table_offset),
          tile_offset(tables.tile_offset),
          table(tables.table),
          held(tables.held),
          read_pages(ref.read_pages),
          max_seq_len(max_entries),
          bound_rows(ref.selection.page_size()) {
        if constexpr (Ref::policy_type::has_selection) {
            mean_bound = ref.selection.aggregate == group_aggregate::mean;
        }
    }
};

template <class P, class T>
paged_view<T> view_of(const DualRef<P, T>& cache) {
    return paged_view<T>(cache);
}

/// Top-k slots of a head whose rows lie in pages: see detail::head_slots.
template <class T>
struct paged_top_k_slots {
    HeadParams head_params;
    position_t rebase_limit;
    PagedRows<T> rows;
    std::int32_t first;  // the row of place 0

    __device__ detail::ranked_slot rank(float s, position_t t, std::int32_t slot, position_t q) const {
        return {rank_value(head_params, s, t, q, rebase_limit), t, slot};
    }
    __device__ detail::ranked_slot at(std::int32_t slot, position_t q) const {
        return rank(rows.score(first + slot), rows.position(first + slot), slot, q);
    }
};

/// The same element of every key, or of every value.
template <class T>
struct paged_column {
    PagedRows<T> rows;
    bool of_key;
    std::int32_t i;

    [[nodiscard]] __device__ T* at(std::int32_t row) const {
        return (of_key ? rows.k(row) : rows.v(row)) + i;
    }
};

/// One head of one sequence: see contiguous_head.
template <class T>
struct paged_head {
    HeadParams head_params;
    HeadRows layout;
    std::int64_t index;    // sequence * kv_heads + head
    std::int32_t* record;  // the worst slots of its tiles, where it has a budget
    std::int32_t* table;
    PagedRows<T> rows;
    const paged_view<T>* cache;

    __device__ paged_head(const paged_view<T>& of, std::int32_t seq, std::int32_t head)
        : head_params(of.all_params[head]), layout{head_params.sinks, head_params.window}, cache(&of) {
        index = std::int64_t{seq} * of.kv_heads + head;
        record = of.tile_victims + seq * of.tile_offset[of.kv_heads] + of.tile_offset[head];
        table = of.table + seq * of.table_offset[of.kv_heads] + of.table_offset[head];
        rows = {table,          of.pool.slabs,  of.pool.slab_pages, of.pool.page_size,
                of.head_dim_qk, of.head_dim_vo, of.bound_rows,      of.pool.strides};
    }
    [[nodiscard]] __device__ T* key(std::int32_t row) const { return rows.k(row); }
    [[nodiscard]] __device__ T* value(std::int32_t row) const { return rows.v(row); }
    [[nodiscard]] __device__ paged_column<T> key_column(std::int32_t i) const { return {rows, true, i}; }
    [[nodiscard]] __device__ paged_column<T> value_column(std::int32_t i) const { return {rows, false, i}; }
    [[nodiscard]] __device__ position_t& position_of(std::int32_t row) const { return rows.position(row); }
    [[nodiscard]] __device__ float& score_of(std::int32_t row) const { return rows.score(row); }
    [[nodiscard]] __device__ paged_source<T> source(std::int32_t used) const {
        return {rows, cache->pages_of(used)};
    }
    [[nodiscard]] __device__ T* spare_key(std::int32_t j) const { return cache->spare.k(spare_row(j)); }
    [[nodiscard]] __device__ T* spare_value(std::int32_t j) const { return cache->spare.v(spare_row(j)); }
    [[nodiscard]] __device__ position_t& spare_position(std::int32_t j) const {
        return cache->spare.position_data[spare_row(j)];
    }
    [[nodiscard]] __device__ float& spare_score(std::int32_t j) const {
        return cache->spare.score_data[spare_row(j)];
    }
    /// The most rows that the head can have in use: see DualRef::capacity_of.
    [[nodiscard]] __device__ std::int32_t capacity() const {
        const std::int64_t bound = std::int64_t{head_params.sinks} + head_params.window + head_params.budget;
        return static_cast<std::int32_t>(cache->unbounded || head_params.budget == unlimited ||
                                                 bound > cache->max_seq_len
                                             ? cache->max_seq_len
                                             : bound);
    }
    [[nodiscard]] __device__ paged_top_k_slots<T> top_k_slots(position_t rebase_limit) const {
        return {head_params, rebase_limit, rows, layout.slot(0)};
    }

  private:
    [[nodiscard]] __device__ std::int64_t spare_row(std::int32_t j) const {
        return index * cache->max_draft_tokens + j;
    }
};

/// The same, where a query reads chosen pages of a head: those become the page table of a head of fewer rows.
template <class T>
struct chosen_view : paged_view<T> {
    const std::int32_t* chosen = nullptr;       // [pairs, most]: pages of bound_rows rows, rising
    const std::int32_t* chosen_rows = nullptr;  // [pairs]: rows in them
    std::int64_t most = 0;

    using paged_view<T>::paged_view;

    /// Pages of bound_rows rows in a page of the cache.
    [[nodiscard]] __host__ __device__ std::int32_t parts() const {
        return this->pool.page_size / this->bound_rows;
    }
    [[nodiscard]] __device__ std::int32_t rows_read(const paged_head<T>& /*head*/, std::int32_t pair,
                                                    position_t /*queries*/, std::int32_t /*places*/) const {
        return chosen_rows[pair];
    }
    [[nodiscard]] __device__ paged_source<T> source(const paged_head<T>& /*head*/, std::int32_t pair,
                                                    std::int32_t used) const {
        return {{chosen + pair * most,
                 this->pool.slabs,
                 this->pool.slab_pages * parts(),
                 this->bound_rows,
                 this->head_dim_qk,
                 this->head_dim_vo,
                 this->bound_rows,
                 {std::int64_t{this->bound_rows} * this->head_dim_qk,
                  std::int64_t{this->bound_rows} * this->head_dim_vo, this->head_dim_qk, this->head_dim_vo}},
                (used + this->bound_rows - 1) / this->bound_rows};
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
