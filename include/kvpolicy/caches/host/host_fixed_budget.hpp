// The owner's members on the host: planning, binding, clearing.
#pragma once

#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/caches/host/host_cache.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <cstring>

namespace kvpolicy {

template <AnyPolicy P, Storage T>
FixedBudgetCache<P, T>::FixedBudgetCache(const CacheShape& shape, const P& policy, const scorer_type* scorers,
                                         const AttentionParams& attention)
    : base(shape, policy, scorers, attention) {
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
        std::int64_t rows = 0;
        for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
            const HeadParams& head_params = this->head_params_of(layer, head);
            const auto name = [&] { return detail::text("budget k of layer ", layer, ", head ", head); };
            detail::require(head_params.budget != unlimited, name, "unlimited",
                            "a number, since a FixedBudgetCache is bounded");
            const std::int64_t needed = std::int64_t{head_params.sinks} + head_params.window +
                                        head_params.budget + shape.max_draft_tokens;
            const std::int32_t most = std::numeric_limits<std::int32_t>::max() - shape.page_size;
            detail::require(
                needed <= most, [&] { return detail::text("sinks + window + draft tokens + ", name()); },
                needed, [&] { return detail::text(most, " at most, 2^31 - 1 less a page"); });
            row_offset_.push_back(rows);
            rows += (needed + shape.page_size - 1) / shape.page_size * shape.page_size;
        }
        row_offset_.push_back(rows);
    }
    plan();
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::plan() {
    typename base::layout memory;
    this->plan_common(memory);
    offsets_at_ = memory.take(row_offset_.size() * sizeof(std::int64_t));
    this->refs_at_ = memory.take(static_cast<std::size_t>(this->shape_.layers) * sizeof(ref_type));
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const std::size_t rows = detail::product_of(this->shape_.max_sequences, this->rows(layer));
        const std::size_t k_bytes = detail::product_of(rows, this->shape_.head_dim_qk, sizeof(T));
        const std::size_t v_bytes = detail::product_of(rows, this->shape_.head_dim_vo, sizeof(T));
        layer_plan plan{};
        plan.k = memory.take(k_bytes);
        plan.v = memory.take(v_bytes);
        plan.position = memory.take(detail::product_of(rows, sizeof(position_t)));
        plan.score = memory.take(detail::product_of(rows, sizeof(float)));
        plan.bounds = memory.take(
            P::has_selection
                ? detail::product_of(rows / static_cast<std::size_t>(this->policy_.selection().page_size()),
                                     2 * static_cast<std::size_t>(this->shape_.head_dim_qk) * sizeof(T))
                : 0);
        const auto max_sequences = static_cast<std::size_t>(this->shape_.max_sequences);
        plan.arrivals = memory.take(max_sequences * static_cast<std::size_t>(this->shape_.kv_heads) *
                                    sizeof(std::uint32_t));
        plan.tile_victims = memory.take(detail::product_of(
            max_sequences, ref_type::tiles(this->rows(layer), this->shape_.kv_heads), sizeof(std::int32_t)));
        if constexpr (P::has_selection) {
            const std::size_t heads = static_cast<std::size_t>(this->shape_.kv_heads);
            plan.slab = memory.take(sizeof(Slab<T>));
            plan.table =
                memory.take(rows / static_cast<std::size_t>(this->shape_.page_size) * sizeof(std::int32_t));
            plan.held = memory.take(max_sequences * heads * sizeof(std::int32_t));
            plan.free_count = memory.take(sizeof(std::int32_t));
            plan.table_offset = memory.take((heads + 1) * sizeof(std::int64_t));
            plan.tile_offset = memory.take((heads + 1) * sizeof(std::int64_t));
        }
        plan.common = this->plan_layer(memory, layer);
        plan_.push_back(plan);
        this->bytes_.keys_and_values += k_bytes + v_bytes;
    }
    // The caller's buffer may start anywhere: bytes to align it.
    this->bytes_.bookkeeping =
        memory.at + detail::alignment - this->bytes_.keys_and_values - this->bytes_.scorer_state;
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::bind(const host& ctx, void* buffer, std::size_t buffer_bytes) {
    this->bind_common(buffer, buffer_bytes);
    std::memcpy(this->memory_ + offsets_at_, row_offset_.data(), row_offset_.size() * sizeof(std::int64_t));
    for (std::int32_t seq = 0; seq < this->shape_.max_sequences; ++seq) {
        clear(ctx, seq);
    }
}

template <AnyPolicy P, Storage T>
FixedBudgetRef<P, T> FixedBudgetCache<P, T>::ref_of(std::int32_t layer) const {
    const layer_plan& plan = plan_[static_cast<std::size_t>(layer)];
    ref_type ref;
    this->fill(ref, layer, plan.common);
    ref.row_offset = this->template at<const std::int64_t>(offsets_at_) +
                     static_cast<std::ptrdiff_t>(this->offset_index(layer, 0));
    ref.rows = rows(layer);
    ref.k = this->template at<T>(plan.k);
    ref.v = this->template at<T>(plan.v);
    ref.position = this->template at<position_t>(plan.position);
    ref.score = this->template at<float>(plan.score);
    ref.bounds = P::has_selection ? this->template at<T>(plan.bounds) : nullptr;
    for (std::int32_t head = 0; head < this->shape_.kv_heads; ++head) {
        const HeadParams& head_params = this->head_params_of(layer, head);
        ref.max_capacity = std::max(ref.max_capacity, std::int64_t{head_params.sinks} + head_params.window +
                                                          std::int64_t{head_params.budget});
    }
    ref.arrivals = this->template at<std::uint32_t>(plan.arrivals);
    ref.tile_victims = this->template at<std::int32_t>(plan.tile_victims);
    if constexpr (P::has_selection) {
        ref.placed = {this->template at<Slab<T>>(plan.slab),
                      this->template at<std::int32_t>(plan.table),
                      this->template at<std::int32_t>(plan.held),
                      this->template at<std::int32_t>(plan.free_count),
                      this->template at<std::int64_t>(plan.table_offset),
                      this->template at<std::int64_t>(plan.tile_offset)};
    }
    return ref;
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::clear(const host&, std::int32_t seq) {
    this->require_seq(seq);
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        this->reset(this->layer(layer), seq);
    }
}

}  // namespace kvpolicy
