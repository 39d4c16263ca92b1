// The members of a DualCache on the host: planning, adding slabs, reserving, clearing.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/host/admit.hpp>
#include <kvpolicy/caches/host/host_cache.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

namespace kvpolicy {

template <AnyPolicy P, Storage T>
DualCache<P, T>::DualCache(const CacheShape& shape, const PoolShape& pool, const P& policy,
                           const scorer_type* scorers, const AttentionParams& attention)
    : base(shape, policy, scorers, attention), pool_(pool) {
    const CacheShape& filled = this->shape_;  // with its head_dims filled in
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    detail::require(pool.slab_pages >= 1, "slab_pages", pool.slab_pages, "1 or more");
    detail::require(pool.max_slabs >= 1, "max_slabs", pool.max_slabs, "1 or more");
    detail::require(pool.max_seq_len >= 1 && pool.max_seq_len <= most - filled.page_size, "max_seq_len",
                    pool.max_seq_len,
                    [&] { return detail::text("1 to ", most - filled.page_size, ", 2^31 - 1 less a page"); });
    detail::require(pool.spared_pages >= 0 && pool.spared_pages < pool.slab_pages, "spared_pages",
                    pool.spared_pages,
                    [&] { return detail::text("0 to ", pool.slab_pages - 1, ", less than a slab"); });
    const std::int64_t pages = std::int64_t{pool.slab_pages} * pool.max_slabs;
    detail::require(pages <= most, "slab_pages * max_slabs", pages, "below 2^31, as page ids are 32 bits");
    PageStrides& strides = pool_.strides;
    strides_given_ = strides.k_page != 0 || strides.v_page != 0 || strides.k_row != 0 || strides.v_row != 0;
    if (!strides_given_) {
        strides = {std::int64_t{filled.page_size} * filled.head_dim_qk,
                   std::int64_t{filled.page_size} * filled.head_dim_vo, filled.head_dim_qk,
                   filled.head_dim_vo};
    }
    detail::require(strides.k_row >= filled.head_dim_qk, "strides.k_row", strides.k_row, [&] {
        return detail::text("head_dim_qk = ", filled.head_dim_qk, " or more, or all strides 0");
    });
    detail::require(strides.v_row >= filled.head_dim_vo, "strides.v_row", strides.v_row, [&] {
        return detail::text("head_dim_vo = ", filled.head_dim_vo, " or more, or all strides 0");
    });
    detail::require(strides.k_page >= filled.head_dim_qk, "strides.k_page", strides.k_page, [&] {
        return detail::text("head_dim_qk = ", filled.head_dim_qk, " or more, or all strides 0");
    });
    detail::require(strides.v_page >= filled.head_dim_vo, "strides.v_page", strides.v_page, [&] {
        return detail::text("head_dim_vo = ", filled.head_dim_vo, " or more, or all strides 0");
    });
    detail::require(!P::has_selection || own_layout(), "strides", "given",
                    "0 for a policy with a selection, whose pages are parts of the pool's");
    for (std::int32_t layer = 0; layer < filled.layers; ++layer) {
        std::int64_t table = 0, tiles = 0, max_rows = 0, max_budgeted_rows = 0;
        bool limited = false;
        const std::int64_t shared_slots = this->shared_slots_of(layer);
        for (std::int32_t head = 0; head < filled.kv_heads; ++head) {
            const HeadParams& head_params = this->head_params_of(layer, head);
            const std::int64_t recent = std::int64_t{head_params.sinks} + head_params.window;
            detail::require(
                recent <= most - filled.page_size,
                [&] { return detail::text("sinks + window of layer ", layer, ", head ", head); }, recent,
                [&] { return detail::text(most - filled.page_size, " at most, 2^31 - 1 less a page"); });
            const std::int64_t budget = detail::slots_of_head<P>(head_params, shared_slots);
            const std::int64_t rows = ref_type::capacity_of(head_params, pool.max_seq_len, budget);
            limited = limited || P::has_keep || P::grows || budget == unlimited || rows < recent + budget;
            table_offset_.push_back(table);
            table += (rows + filled.page_size - 1) / filled.page_size;
            tile_offset_.push_back(tiles);
            // Keys that a keep part holds stand between those that compete.
            const std::int64_t top_k_slots =
                std::min<std::int64_t>(P::has_keep ? rows : budget, std::max<std::int64_t>(rows - recent, 0));
            const bool bounded = budget != unlimited && budget != 0;
            tiles += bounded ? detail::tiles_of_slots(static_cast<std::int32_t>(top_k_slots)) : 0;
            max_rows = std::max(max_rows, rows);
            max_budgeted_rows = std::max(max_budgeted_rows, bounded ? rows : 0);
        }
        table_offset_.push_back(table);
        tile_offset_.push_back(tiles);
        max_rows_.push_back(max_rows);
        max_budgeted_rows_.push_back(max_budgeted_rows);
        limited_.push_back(limited ? 1 : 0);
    }
    plan();
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::plan() {
    typename base::layout memory;
    const CacheShape& shape = this->shape_;
    this->plan_common(memory);
    const auto max_sequences = static_cast<std::size_t>(shape.max_sequences);
    const std::size_t heads = max_sequences * static_cast<std::size_t>(shape.kv_heads);
    const auto slabs = static_cast<std::size_t>(pool_.max_slabs);
    const std::size_t pages = slabs * static_cast<std::size_t>(pool_.slab_pages);
    const std::size_t k_row = static_cast<std::size_t>(shape.head_dim_qk) * sizeof(T);
    const std::size_t v_row = static_cast<std::size_t>(shape.head_dim_vo) * sizeof(T);
    offsets_at_ = memory.take(table_offset_.size() * sizeof(std::int64_t));
    tiles_at_ = memory.take(tile_offset_.size() * sizeof(std::int64_t));
    this->refs_at_ = memory.take(static_cast<std::size_t>(shape.layers) * sizeof(ref_type));
    answer_at_ = memory.take(sizeof(std::int64_t));
    claims_at_ = memory.take(max_sequences * sizeof(PageClaim));
    slabs_at_ = memory.take(slabs * sizeof(Slab<T>));
    free_at_ = memory.take(pages * sizeof(std::int32_t));
    count_at_ = memory.take(sizeof(std::int32_t));
    names_at_ = memory.take(pages * sizeof(std::int32_t));
    reserved_at_ = memory.take(max_sequences * sizeof(position_t));
    const std::size_t spare = detail::product_of(heads, shape.max_draft_tokens);
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
        const auto table = static_cast<std::size_t>(table_offset_[this->offset_index(layer, shape.kv_heads)]);
        layer_plan plan{};
        plan.table = memory.take(detail::product_of(max_sequences, table, sizeof(std::int32_t)));
        plan.held = memory.take(heads * sizeof(std::int32_t));
        plan.arrivals = memory.take(heads * sizeof(std::uint32_t));
        plan.tile_victims = memory.take(detail::product_of(
            max_sequences, tile_offset_[this->offset_index(layer, shape.kv_heads)], sizeof(std::int32_t)));
        plan.spare_k = memory.take(detail::product_of(spare, k_row));
        plan.spare_v = memory.take(detail::product_of(spare, v_row));
        plan.spare_position = memory.take(detail::product_of(spare, sizeof(position_t)));
        plan.spare_score = memory.take(detail::product_of(spare, sizeof(float)));
        if constexpr (P::shares_budget) {
            plan.stash_capacity = pages_per_sequence(layer);
            plan.shared_slots = shared_slots_of(layer);
            plan.is_static = this->policy_.has_static_shared_order(layer, shape.kv_heads);
            plan.stash =
                memory.take(detail::product_of(max_sequences, plan.stash_capacity, sizeof(std::int32_t)));
            plan.stashed = memory.take(max_sequences * sizeof(std::int32_t));
        }
        plan.common = this->plan_layer(memory, layer);
        plan_.push_back(plan);
        this->bytes_.keys_and_values += spare * (k_row + v_row);
    }
    this->bytes_.bookkeeping =
        memory.at + detail::alignment - this->bytes_.keys_and_values - this->bytes_.scorer_state;

    const std::size_t rows = detail::product_of(pool_.slab_pages, shape.page_size);
    typename base::layout slab{.name = "bytes of a slab"};
    slab.take(detail::product_of(rows, k_row));
    slab.take(detail::product_of(rows, v_row));
    typename base::layout notes{.name = "bytes of a slab's notes"};
    for (typename base::layout* const of : {&slab, &notes}) {
        of->take(detail::product_of(rows, sizeof(position_t)));
        of->take(detail::product_of(rows, sizeof(float)));
        of->take(bounds_bytes(rows));
    }
    slab_bytes_ = slab.at + detail::alignment;
    notes_bytes_ = notes.at + detail::alignment;
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::bind(const host&, void* buffer, std::size_t buffer_bytes) {
    this->bind_common(buffer, buffer_bytes);
    std::memcpy(this->memory_ + offsets_at_, table_offset_.data(),
                table_offset_.size() * sizeof(std::int64_t));
    std::memcpy(this->memory_ + tiles_at_, tile_offset_.data(), tile_offset_.size() * sizeof(std::int64_t));
    forget_slabs();
    *this->template at<std::int32_t>(count_at_) = 0;
    std::fill_n(this->template at<position_t>(reserved_at_), this->shape_.max_sequences, position_t{0});
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type cache = this->layer(layer);
        std::fill_n(cache.held, std::int64_t{cache.max_sequences} * cache.kv_heads, 0);
        if constexpr (P::shares_budget) {
            std::fill_n(cache.stashed, cache.max_sequences, 0);
        }
        for (std::int32_t seq = 0; seq < cache.max_sequences; ++seq) {
            this->reset(cache, seq);
        }
    }
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::require_free_slab() const {
    detail::require(slabs() < pool_.max_slabs, "slabs", slabs() + 1,
                    [&] { return detail::text("at most max_slabs = ", pool_.max_slabs); });
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::place_notes(typename base::layout& layout, std::byte* memory, Slab<T>& slab) const {
    const std::size_t rows =
        static_cast<std::size_t>(pool_.slab_pages) * static_cast<std::size_t>(this->shape_.page_size);
    slab.position = reinterpret_cast<position_t*>(memory + layout.take(rows * sizeof(position_t)));
    slab.score = reinterpret_cast<float*>(memory + layout.take(rows * sizeof(float)));
    slab.bounds = P::has_selection ? reinterpret_cast<T*>(memory + layout.take(bounds_bytes(rows))) : nullptr;
}

template <AnyPolicy P, Storage T>
Slab<T> DualCache<P, T>::slab_in(void* buffer, std::size_t buffer_bytes) const {
    detail::require(own_layout(), "slab", "memory without strides",
                    "pages by add_pages(), since the pool's strides are an engine's");
    detail::require(buffer != nullptr, "slab", "null", "memory of slab_bytes()");
    detail::require(buffer_bytes >= slab_bytes_, "bytes of the slab", buffer_bytes,
                    [&] { return detail::text("at least slab_bytes() = ", slab_bytes_); });
    require_free_slab();
    const std::size_t rows =
        static_cast<std::size_t>(pool_.slab_pages) * static_cast<std::size_t>(this->shape_.page_size);
    std::byte* const memory = detail::aligned(buffer);
    const std::size_t size = slab_bytes_ - detail::alignment;
    for (std::size_t i = 0; i < attached_.size(); ++i) {
        const auto* const other = reinterpret_cast<const std::byte*>(attached_[i].k);
        if (std::less<>{}(memory, other + size) && std::less<>{}(other, memory + size)) {
            detail::refuse("slab", detail::text("memory of slab ", i), "memory that no slab has yet");
        }
    }
    typename base::layout slab;
    Slab<T> provided;
    provided.k = reinterpret_cast<T*>(
        memory + slab.take(rows * static_cast<std::size_t>(this->shape_.head_dim_qk) * sizeof(T)));
    provided.v = reinterpret_cast<T*>(
        memory + slab.take(rows * static_cast<std::size_t>(this->shape_.head_dim_vo) * sizeof(T)));
    place_notes(slab, memory, provided);
    return provided;
}

template <AnyPolicy P, Storage T>
Slab<T> DualCache<P, T>::slab_of(T* k, T* v, void* notes, std::size_t notes_bytes) const {
    detail::require(k != nullptr, "k", "null", "an engine's pages of keys");
    detail::require(v != nullptr, "v", "null", "an engine's pages of values");
    detail::require(notes != nullptr, "notes", "null", "memory of notes_bytes()");
    detail::require(notes_bytes >= notes_bytes_, "bytes of the notes", notes_bytes,
                    [&] { return detail::text("at least notes_bytes() = ", notes_bytes_); });
    require_free_slab();
    typename base::layout layout;
    Slab<T> provided;
    provided.k = k;
    provided.v = v;
    place_notes(layout, detail::aligned(notes), provided);
    return provided;
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::attach(const Slab<T>& slab) {
    this->template at<Slab<T>>(slabs_at_)[slabs()] = slab;
    // The stack hands out low ids first.
    auto* ids = this->template at<std::int32_t>(free_at_);
    std::int32_t& count = *this->template at<std::int32_t>(count_at_);
    const std::int32_t first = slabs() * pool_.slab_pages;
    for (std::int32_t page = pool_.slab_pages - 1; page >= spared_of(slabs()); --page) {
        ids[count++] = first + page;
    }
    attached_.push_back(slab);
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::add_slab(const host&, void* buffer, std::size_t buffer_bytes) {
    this->require_bound();
    attach(slab_in(buffer, buffer_bytes));
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::add_pages(const host&, T* k, T* v, void* notes, std::size_t notes_bytes) {
    this->require_bound();
    attach(slab_of(k, v, notes, notes_bytes));
}

template <AnyPolicy P, Storage T>
std::int64_t DualCache<P, T>::free_pages() const {
    this->require_bound();
    return *this->template at<const std::int32_t>(count_at_);
}

template <AnyPolicy P, Storage T>
std::int64_t DualCache<P, T>::reserve(const host&, const Batch& batch) {
    this->require_bound();
    const Batch all = checks::batch_of(batch, this->shape_.max_sequences);
    checks::check_batch(all, this->shape_.max_sequences, std::numeric_limits<std::int32_t>::max(), "any");
    // Counted from the layer that is ahead: in the middle of a token the others take that one, too.
    std::int32_t* const num_appended = this->scratch_.data();  // [count]
    std::fill_n(num_appended, all.count, 0);
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type cache = this->layer(layer);
        for (std::int32_t i = 0; i < all.count; ++i) {
            num_appended[i] = std::max(num_appended[i], cache.num_appended(all.seq(i), 0));
        }
    }
    const auto until = [&](const ref_type& cache, std::int32_t i) {
        return cache.length[all.seq(i)] + num_appended[i] + all.tokens(i);
    };
    for (std::int32_t i = 0; i < all.count; ++i) {
        if (all.tokens(i) != 0) {
            host_backend::require_max_seq_len(all.seq(i), until(this->layer(0), i), max_seq_len());
        }
    }
    const auto rows_after = [&](const ref_type& cache, std::int32_t i, std::int32_t h) {
        return cache.rows_until(all.seq(i), h, until(cache, i));
    };
    const auto for_each_head = [&](auto&& visit) {
        for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
            const ref_type cache = this->layer(layer);
            for (std::int32_t i = 0; i < all.count; ++i) {
                for (std::int32_t h = 0; all.tokens(i) != 0 && h < cache.kv_heads; ++h) {
                    visit(cache, i, h);
                }
            }
        }
    };
    const auto missing_of = [&](const ref_type& cache, std::int32_t i, std::int32_t h) {
        if constexpr (P::shares_budget) {  // of all heads, counted once
            return h == 0 ? cache.shared_pages_ahead(all.seq(i), until(cache, i)) : 0;
        } else {
            return cache.pages_missing(all.seq(i), h, rows_after(cache, i, h));
        }
    };
    std::int64_t needed = 0;
    for_each_head(
        [&](const ref_type& cache, std::int32_t i, std::int32_t h) { needed += missing_of(cache, i, h); });
    const std::int64_t missing = needed - free_pages();
    if (missing > 0) {
        return slabs_of(missing);
    }
    for_each_head([&](const ref_type& cache, std::int32_t i, std::int32_t h) {
        if constexpr (P::shares_budget) {
            cache.stash_pages(all.seq(i), missing_of(cache, i, h));
        } else {
            cache.take_pages(all.seq(i), h, rows_after(cache, i, h));
        }
    });
    const ref_type any = this->layer(0);
    for (std::int32_t i = 0; i < all.count; ++i) {
        position_t& reserved = any.reserved[all.seq(i)];
        reserved = std::max(reserved, all.tokens(i) != 0 ? until(any, i) : 0);
    }
    return 0;
}

template <AnyPolicy P, Storage T>
DualRef<P, T> DualCache<P, T>::ref_of(std::int32_t layer) const {
    const layer_plan& plan = plan_[static_cast<std::size_t>(layer)];
    ref_type ref;
    this->fill(ref, layer, plan.common);
    ref.pool.slabs = this->template at<const Slab<T>>(slabs_at_);
    ref.pool.free_ids = this->template at<std::int32_t>(free_at_);
    ref.pool.free_count = this->template at<std::int32_t>(count_at_);
    ref.pool.names = this->template at<std::int32_t>(names_at_);
    ref.pool.slab_pages = pool_.slab_pages;
    ref.pool.page_size = this->shape_.page_size;
    ref.pool.head_dim_qk = this->shape_.head_dim_qk;
    ref.pool.head_dim_vo = this->shape_.head_dim_vo;
    ref.pool.strides = pool_.strides;
    ref.table = this->template at<std::int32_t>(plan.table);
    ref.table_offset = this->template at<const std::int64_t>(offsets_at_) +
                       static_cast<std::ptrdiff_t>(this->offset_index(layer, 0));
    ref.held = this->template at<std::int32_t>(plan.held);
    ref.reserved = this->template at<position_t>(reserved_at_);
    ref.tile_offset = this->template at<const std::int64_t>(tiles_at_) +
                      static_cast<std::ptrdiff_t>(this->offset_index(layer, 0));
    ref.arrivals = this->template at<std::uint32_t>(plan.arrivals);
    ref.tile_victims = this->template at<std::int32_t>(plan.tile_victims);
    ref.max_rows = max_rows_[static_cast<std::size_t>(layer)];
    ref.max_budgeted_rows = max_budgeted_rows_[static_cast<std::size_t>(layer)];
    ref.spare = {this->template at<T>(plan.spare_k),
                 this->template at<T>(plan.spare_v),
                 this->template at<position_t>(plan.spare_position),
                 this->template at<float>(plan.spare_score),
                 this->shape_.head_dim_qk,
                 this->shape_.head_dim_vo};
    if constexpr (P::shares_budget) {
        ref.shared_slots = plan.shared_slots;
        ref.is_static = plan.is_static;
        ref.stash = this->template at<std::int32_t>(plan.stash);
        ref.stashed = this->template at<std::int32_t>(plan.stashed);
        ref.stash_capacity = plan.stash_capacity;
    }
    ref.max_slabs = pool_.max_slabs;
    ref.limited = limited_[static_cast<std::size_t>(layer)] != 0;
    ref.max_seq_len = pool_.max_seq_len;
    return ref;
}

template <AnyPolicy P, Storage T>
std::int64_t DualCache<P, T>::pages_per_sequence(std::int32_t layer) const requires P::shares_budget {
    this->check_layer(layer);
    return detail::shared_pages_at_most<P>(&this->head_params_of(layer, 0), this->shape_.kv_heads,
                                           shared_slots_of(layer), this->shape_.page_size, pool_.max_seq_len);
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::clear(const host&, std::int32_t seq) {
    this->require_seq(seq);
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type cache = this->layer(layer);
        cache.return_pages(seq);
        this->reset(cache, seq);
    }
    this->template at<position_t>(reserved_at_)[seq] = 0;
}

}  // namespace kvpolicy
