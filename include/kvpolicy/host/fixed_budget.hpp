// The owner's members on the host: planning, binding, clearing, looking.
#pragma once

#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/host/attention_types.hpp>
#include <kvpolicy/host/check.hpp>

#include <algorithm>
#include <cstring>

namespace kvpolicy {

namespace host_backend {

/// The state floats of a scorer, 0 for a stateless one.
template <class S>
std::int64_t state_floats(const S& scorer) {
    if constexpr (StatefulScorer<S>) {
        return static_cast<std::int64_t>(scorer.state_size());
    } else {
        return 0;
    }
}

inline void check_shape(const CacheShape& shape) {
    detail::require(shape.layers >= 1, "layers", shape.layers, "1 or more");
    detail::require(shape.slots >= 1, "slots", shape.slots, "1 or more");
    detail::require(shape.kv_heads >= 1, "kv_heads", shape.kv_heads, "1 or more");
    detail::require(shape.query_heads >= 1 && shape.query_heads % shape.kv_heads == 0, "query_heads",
                    shape.query_heads, detail::text("a multiple of kv_heads = ", shape.kv_heads));
    detail::require(head_dim_supported(shape.dim_k), "head_dim of keys", shape.dim_k,
                    detail::text("a multiple of 8 up to ", max_head_dim));
    detail::require(head_dim_supported(shape.dim_v), "head_dim of values", shape.dim_v,
                    detail::text("a multiple of 8 up to ", max_head_dim));
    detail::require(shape.page_rows >= 1, "page_rows", shape.page_rows, "1 or more");
}

}  // namespace host_backend

template <AnyPolicy P, Storage T>
FixedBudgetCache<P, T>::FixedBudgetCache(const CacheShape& shape, const P& policy, const scorer_type* scorers,
                                         const Attention& attention)
    : shape_(shape), policy_(policy), scorers_(scorers), attention_(attention) {
    host_backend::check_shape(shape);
    host_backend::check_attention(attention);
    policy.check(shape.layers, shape.kv_heads);
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
        std::int64_t rows = 0;
        for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
            const HeadRule rule = policy.rule(layer, head);
            const std::string name = detail::text("budget k of layer ", layer, ", head ", head);
            detail::require(rule.budget != unlimited, name.c_str(), "unlimited",
                            "a number, since a FixedBudgetCache is bounded");
            const std::int64_t needed = std::int64_t{rule.sinks} + rule.window + rule.budget;
            detail::require(needed <= std::numeric_limits<std::int32_t>::max() - shape.page_rows,
                            detail::text("sinks + window + ", name).c_str(), needed, "below 2^31");
            rules_.push_back(rule);
            row_offset_.push_back(rows);
            rows += (needed + shape.page_rows - 1) / shape.page_rows * shape.page_rows;
        }
        row_offset_.push_back(rows);
        if constexpr (P::ranked && CheckedScorer<scorer_type>) {
            const scorer_type scorer = scorers != nullptr ? scorers[layer] : policy.scorer();
            scorer.check(shape.kv_heads, shape.dim_k, shape.dim_v);
        }
    }
    plan();
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::plan() {
    std::size_t at = 0;
    const auto take = [&](std::size_t bytes) {
        const std::size_t here = at;
        at += host_backend::aligned_size(bytes);
        return here;
    };
    const auto slots = static_cast<std::size_t>(shape_.slots);
    const auto heads = static_cast<std::size_t>(shape_.kv_heads);
    rules_at_ = take(rules_.size() * sizeof(HeadRule));
    offsets_at_ = take(row_offset_.size() * sizeof(std::int64_t));
    length_at_ = take(slots * sizeof(position_t));
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const std::size_t rows = slots * static_cast<std::size_t>(this->rows(layer));
        const std::size_t k_bytes = rows * static_cast<std::size_t>(shape_.dim_k) * sizeof(T);
        const std::size_t v_bytes = rows * static_cast<std::size_t>(shape_.dim_v) * sizeof(T);
        const scorer_type scorer = scorers_ != nullptr ? scorers_[layer] : policy_.scorer();
        const std::size_t state_bytes =
            slots * heads * static_cast<std::size_t>(host_backend::state_floats(scorer)) * sizeof(float);
        layer_plan plan{};
        plan.k = take(k_bytes);
        plan.v = take(v_bytes);
        plan.state = take(state_bytes);
        plan.position = take(rows * sizeof(position_t));
        plan.score = take(rows * sizeof(float));
        plan.kept = take(slots * heads * sizeof(std::int32_t));
        plan.victim = take(slots * heads * sizeof(std::int32_t));
        plan_.push_back(plan);
        bytes_.keys_and_values += k_bytes + v_bytes;
        bytes_.scorer_state += state_bytes;
    }
    // The caller's buffer may start anywhere: room to align it.
    bytes_.bookkeeping = at + host_backend::alignment - bytes_.keys_and_values - bytes_.scorer_state;
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::bind(const host& on, void* buffer, std::size_t buffer_bytes) {
    detail::require(buffer != nullptr, "buffer", "null", "memory of bytes().total()");
    detail::require(buffer_bytes >= bytes_.total(), "buffer_bytes", buffer_bytes,
                    detail::text("at least bytes().total() = ", bytes_.total()));
    memory_ = host_backend::aligned(buffer);
    std::memcpy(memory_ + rules_at_, rules_.data(), rules_.size() * sizeof(HeadRule));
    std::memcpy(memory_ + offsets_at_, row_offset_.data(), row_offset_.size() * sizeof(std::int64_t));
    for (std::int32_t slot = 0; slot < shape_.slots; ++slot) {
        clear(on, slot);
    }
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::require_bound() const {
    detail::require(memory_ != nullptr, "cache", "unbound", "bound to memory by bind() first");
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::require_slot(std::int32_t slot) const {
    require_bound();
    detail::require(slot >= 0 && slot < shape_.slots, "slot", slot, detail::text("0 to ", shape_.slots - 1));
}

template <AnyPolicy P, Storage T>
FixedBudgetRef<P, T> FixedBudgetCache<P, T>::ref(std::int32_t layer) const {
    require_bound();
    detail::require(layer >= 0 && layer < shape_.layers, "layer", layer,
                    detail::text("0 to ", shape_.layers - 1));
    const layer_plan& plan = plan_[static_cast<std::size_t>(layer)];
    ref_type ref;
    ref.layer = layer;
    ref.slots = shape_.slots;
    ref.kv_heads = shape_.kv_heads;
    ref.group = shape_.query_heads / shape_.kv_heads;
    ref.dim_k = shape_.dim_k;
    ref.dim_v = shape_.dim_v;
    ref.page_rows = shape_.page_rows;
    ref.attention = attention_;
    ref.rebase_limit = rebase_limit_;
    ref.rules =
        reinterpret_cast<const HeadRule*>(memory_ + rules_at_) + std::int64_t{layer} * shape_.kv_heads;
    ref.row_offset = reinterpret_cast<const std::int64_t*>(memory_ + offsets_at_) +
                     static_cast<std::ptrdiff_t>(offset_index(layer, 0));
    ref.rows = rows(layer);
    ref.k = reinterpret_cast<T*>(memory_ + plan.k);
    ref.v = reinterpret_cast<T*>(memory_ + plan.v);
    ref.position = reinterpret_cast<position_t*>(memory_ + plan.position);
    ref.score = reinterpret_cast<float*>(memory_ + plan.score);
    ref.length = reinterpret_cast<position_t*>(memory_ + length_at_);
    ref.kept = reinterpret_cast<std::int32_t*>(memory_ + plan.kept);
    ref.victim = reinterpret_cast<std::int32_t*>(memory_ + plan.victim);
    ref.state = reinterpret_cast<float*>(memory_ + plan.state);
    ref.scorer = scorers_ != nullptr ? scorers_[layer] : policy_.scorer();
    ref.state_size = host_backend::state_floats(ref.scorer);
    ref.gate = policy_.gate();
    return ref;
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::clear(const host&, std::int32_t slot) {
    require_slot(slot);
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const ref_type cache = ref(layer);
        cache.length[slot] = 0;
        for (std::int32_t head = 0; head < shape_.kv_heads; ++head) {
            const std::int64_t at = std::int64_t{slot} * shape_.kv_heads + head;
            cache.kept[at] = 0;
            cache.victim[at] = -1;
            if constexpr (StatefulScorer<scorer_type>) {
                cache.scorer.reset(cache.state + at * cache.state_size);
            }
        }
    }
}

template <AnyPolicy P, Storage T>
void FixedBudgetCache<P, T>::advance(const host&, const Batch& batch) {
    require_bound();
    host_backend::check_batch(batch, shape_.slots, std::numeric_limits<std::int32_t>::max(), "any");
    auto* length = reinterpret_cast<position_t*>(memory_ + length_at_);
    for (std::int32_t i = 0; i < batch.count; ++i) {
        length[batch.slot(i)] += batch.tokens(i);
    }
}

template <AnyPolicy P, Storage T>
position_t FixedBudgetCache<P, T>::length(std::int32_t slot) const {
    require_slot(slot);
    return reinterpret_cast<const position_t*>(memory_ + length_at_)[slot];
}

template <AnyPolicy P, Storage T>
Occupancy FixedBudgetCache<P, T>::occupancy(std::int32_t layer, std::int32_t slot, std::int32_t head) const {
    require_slot(slot);
    detail::require(head >= 0 && head < shape_.kv_heads, "head", head,
                    detail::text("0 to ", shape_.kv_heads - 1));
    const ref_type cache = ref(layer);
    const HeadRule& rule = cache.rules[head];
    Occupancy result;
    result.length = cache.length[slot];
    result.sinks = static_cast<std::int32_t>(std::min<position_t>(result.length, rule.sinks));
    result.window =
        static_cast<std::int32_t>(std::min<position_t>(result.length - result.sinks, rule.window));
    result.long_range = cache.kept[std::int64_t{slot} * shape_.kv_heads + head];
    result.capacity = rule.sinks + rule.window + rule.budget;
    return result;
}

template <AnyPolicy P, Storage T>
std::int32_t FixedBudgetCache<P, T>::retained(std::int32_t layer, std::int32_t slot, std::int32_t head,
                                              position_t* out) const {
    const std::int32_t rows = occupancy(layer, slot, head).rows();
    const ref_type cache = ref(layer);
    detail::require(out != nullptr || rows == 0, "out", "null", "room for occupancy(...).rows() positions");
    const position_t* first = cache.position + cache.first_row(slot, head);
    for (std::int32_t r = 0; r < rows; ++r) {
        out[r] = first[r];
    }
    return rows;
}

}  // namespace kvpolicy
