// A layer of a DualCache as kernels see it: as cache_view for a FixedBudgetCache, with entries in pages.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_paged_stream.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/page_pool.hpp>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T>
struct dual_head;

template <class T>
struct dual_view {
    using value_type = T;
    using head_type = dual_head<T>;

    const HeadRule* rules = nullptr;             // [kv_heads]
    const std::int64_t* table_offset = nullptr;  // [kv_heads + 1]
    const std::int64_t* tile_offset = nullptr;   // [kv_heads + 1]
    position_t* length = nullptr;                // [slots]
    std::int32_t* kept = nullptr;                // [slots, kv_heads]
    std::int32_t* victim = nullptr;              // [slots, kv_heads]
    std::int32_t* proposed = nullptr;            // [slots]
    std::int32_t* taken = nullptr;               // [slots, kv_heads]
    std::int32_t* table = nullptr;               // [slots, table_offset[kv_heads]]
    std::int32_t* held = nullptr;                // [slots, kv_heads]
    std::uint32_t* arrivals = nullptr;           // [slots, kv_heads]
    std::int32_t* tile_victims = nullptr;        // [slots, tile_offset[kv_heads]]
    float* state = nullptr;                      // [slots, kv_heads, state_size]
    std::int32_t* pinned = nullptr;              // [slots, kv_heads], with a keep part
    T* queries = nullptr;        // [slots, kv_heads, observing, group, dim_k], with an eviction part
    T* spare_queries = nullptr;  // [slots, kv_heads, proposals, group, dim_k]
    const std::int32_t* read_pages = nullptr;  // [kv_heads], with a selection: pages of bound_rows rows
    PagePool<T> pool;
    PlainRows<T> spare;  // [slots, kv_heads, proposals]
    std::int64_t state_size = 0;
    position_t longest = 0;  // of a slot; where some head's rows are bounded by nothing else
    position_t rebase_limit = kvpolicy::rebase_limit;
    std::int32_t slots = 0;
    std::int32_t kv_heads = 0;
    std::int32_t group = 1;
    std::int32_t dim_k = 0;
    std::int32_t dim_v = 0;
    std::int32_t proposals = 0;
    std::int32_t observing = 1;
    std::int32_t bound_rows = 1;
    bool limited = false;
    bool unbounded = false;   // no head has a bound but `longest`
    bool mean_bound = false;  // of a group's query heads; else the largest

    template <class P>
    __host__ __device__ explicit dual_view(const DualRef<P, T>& ref)
        : dual_view(ref, {ref.table_offset, ref.tile_offset, ref.table, ref.held}) {
        pinned = ref.pinned;
        queries = ref.queries;
        spare_queries = ref.spare_queries;
        pool = ref.pool;
        spare = ref.spare;
        proposals = ref.proposals;
        limited = ref.limited;
        unbounded = P::has_keep || P::grows;
        if constexpr (P::has_eviction) {
            observing = ref.eviction.observing;
        }
    }
    /// A FixedBudgetCache with a selection: its pages are all there, each in its place.
    template <class P>
    __host__ __device__ explicit dual_view(const FixedBudgetRef<P, T>& ref)
        : dual_view(ref,
                    {ref.placed.table_offset, ref.placed.tile_offset, ref.placed.table, ref.placed.held}) {
        pool.slabs = ref.placed.slab;
        pool.free_count = ref.placed.free_count;
        pool.slab_pages = static_cast<std::int32_t>(ref.page_count());
        pool.page_rows = ref.page_rows;
        pool.dim_k = ref.dim_k;
        pool.dim_v = ref.dim_v;
        pool.strides = {std::int64_t{ref.page_rows} * ref.dim_k, std::int64_t{ref.page_rows} * ref.dim_v,
                        ref.dim_k, ref.dim_v};
    }
    /// Where the queries of the token at position t are remembered, and those of proposed token j.
    [[nodiscard]] __device__ T* query_row(std::int64_t index, position_t t) const {
        return queries + (index * observing + t % observing) * group * dim_k;
    }
    [[nodiscard]] __device__ T* spare_query_row(std::int64_t index, std::int64_t j) const {
        return spare_queries + (index * proposals + j) * group * dim_k;
    }

    /// Whether a slot may become so much longer: its page tables can name no more.
    [[nodiscard]] __device__ bool takes(std::int32_t slot, std::int32_t tokens) const {
        return !limited || length[slot] + tokens <= longest;
    }
    /// How many rows of a head a query reads, and where they are: all that it has.
    [[nodiscard]] __device__ std::int32_t rows_read(const dual_head<T>& head, std::int32_t /*pair*/,
                                                    position_t queries, std::int32_t places) const {
        return head.layout.used(queries, places);
    }
    [[nodiscard]] __device__ ragged::paged_source<T> source(const dual_head<T>& head, std::int32_t /*pair*/,
                                                            std::int32_t used) const {
        return head.source(used);
    }
    /// Pages for so many rows.
    [[nodiscard]] __device__ std::int32_t pages_of(std::int32_t rows) const {
        return rows / pool.page_rows + (rows % pool.page_rows != 0 ? 1 : 0);
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
    __host__ __device__ dual_view(const Ref& ref, const page_tables& tables)
        : rules(ref.rules),
          table_offset(tables.table_offset),
          tile_offset(tables.tile_offset),
          length(ref.length),
          kept(ref.kept),
          victim(ref.victim),
          proposed(ref.proposed),
          taken(ref.taken),
          table(tables.table),
          held(tables.held),
          arrivals(ref.arrivals),
          tile_victims(ref.tile_victims),
          state(ref.state),
          read_pages(ref.read_pages),
          state_size(ref.state_size),
          longest(ref.longest),
          rebase_limit(ref.rebase_limit),
          slots(ref.slots),
          kv_heads(ref.kv_heads),
          group(ref.group),
          dim_k(ref.dim_k),
          dim_v(ref.dim_v),
          bound_rows(ref.selection.page_rows()) {
        if constexpr (Ref::policy_type::has_selection) {
            mean_bound = ref.selection.aggregate == group_aggregate::mean;
        }
    }
};

/// Long-range places of a head whose rows lie in pages: see detail::head_places.
template <class T>
struct paged_places {
    HeadRule rule;
    position_t rebase_limit;
    PagedRows<T> rows;
    std::int32_t first;  // the row of place 0

    __device__ detail::ranked_place rank(float s, position_t t, std::int32_t place, position_t q) const {
        return {rank_value(rule, s, t, q, rebase_limit), t, place};
    }
    __device__ detail::ranked_place at(std::int32_t place, position_t q) const {
        return rank(rows.score(first + place), rows.position(first + place), place, q);
    }
};

/// One head of one slot: see head_view.
template <class T>
struct dual_head {
    HeadRule rule;
    HeadRows layout;
    std::int64_t index;    // slot * kv_heads + head
    std::int32_t* record;  // the worst slots of its tiles, where it has a budget
    std::int32_t* table;
    PagedRows<T> rows;
    const dual_view<T>* cache;

    __device__ dual_head(const dual_view<T>& of, std::int32_t slot, std::int32_t head)
        : rule(of.rules[head]), layout{rule.sinks, rule.window}, cache(&of) {
        index = std::int64_t{slot} * of.kv_heads + head;
        record = of.tile_victims + slot * of.tile_offset[of.kv_heads] + of.tile_offset[head];
        table = of.table + slot * of.table_offset[of.kv_heads] + of.table_offset[head];
        rows = {table,    of.pool.slabs, of.pool.slab_pages, of.pool.page_rows,
                of.dim_k, of.dim_v,      of.bound_rows,      of.pool.strides};
    }
    [[nodiscard]] __device__ T* key(std::int32_t row) const { return rows.k(row); }
    [[nodiscard]] __device__ T* value(std::int32_t row) const { return rows.v(row); }
    [[nodiscard]] __device__ position_t& position_of(std::int32_t row) const { return rows.position(row); }
    [[nodiscard]] __device__ float& score_of(std::int32_t row) const { return rows.score(row); }
    [[nodiscard]] __device__ ragged::paged_source<T> source(std::int32_t used) const {
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
        const std::int64_t bound = std::int64_t{rule.sinks} + rule.window + rule.budget;
        return static_cast<std::int32_t>(
            cache->unbounded || rule.budget == unlimited || bound > cache->longest ? cache->longest : bound);
    }
    [[nodiscard]] __device__ paged_places<T> places(position_t rebase_limit) const {
        return {rule, rebase_limit, rows, layout.place(0)};
    }

  private:
    [[nodiscard]] __device__ std::int64_t spare_row(std::int32_t j) const {
        return index * cache->proposals + j;
    }
};

/// The same, where a query reads chosen pages of a head: those become the page table of a head of fewer rows.
template <class T>
struct chosen_view : dual_view<T> {
    const std::int32_t* chosen = nullptr;       // [pairs, most]: pages of bound_rows rows, rising
    const std::int32_t* chosen_rows = nullptr;  // [pairs]: rows in them
    std::int64_t most = 0;

    using dual_view<T>::dual_view;

    /// Pages of bound_rows rows in a page of the cache.
    [[nodiscard]] __host__ __device__ std::int32_t parts() const {
        return this->pool.page_rows / this->bound_rows;
    }
    [[nodiscard]] __device__ std::int32_t rows_read(const dual_head<T>& /*head*/, std::int32_t pair,
                                                    position_t /*queries*/, std::int32_t /*places*/) const {
        return chosen_rows[pair];
    }
    [[nodiscard]] __device__ ragged::paged_source<T> source(const dual_head<T>& /*head*/, std::int32_t pair,
                                                            std::int32_t used) const {
        return {{chosen + pair * most,
                 this->pool.slabs,
                 this->pool.slab_pages * parts(),
                 this->bound_rows,
                 this->dim_k,
                 this->dim_v,
                 this->bound_rows,
                 {std::int64_t{this->bound_rows} * this->dim_k, std::int64_t{this->bound_rows} * this->dim_v,
                  this->dim_k, this->dim_v}},
                (used + this->bound_rows - 1) / this->bound_rows};
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
