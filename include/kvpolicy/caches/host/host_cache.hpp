// What owners of caches do on the host: check, plan, look.
#pragma once

#include <kvpolicy/attention/host/types.hpp>
#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <cstring>

namespace kvpolicy {

namespace host_backend {

/// The state floats of a policy's scorer: 0 for a stateless one, and for one that nothing asks.
template <AnyPolicy P>
std::int64_t state_floats([[maybe_unused]] const typename P::scorer_type& scorer) {
    if constexpr (P::ranked && StatefulScorer<typename P::scorer_type>) {
        return static_cast<std::int64_t>(scorer.state_size());
    } else {
        return 0;
    }
}

inline void check_shape(const CacheShape& shape) {
    const auto dims = [] { return detail::text("a multiple of 8 up to ", max_head_dim); };
    detail::require(shape.layers >= 1, "layers", shape.layers, "1 or more");
    detail::require(shape.slots >= 1, "slots", shape.slots, "1 or more");
    detail::require(shape.kv_heads >= 1, "kv_heads", shape.kv_heads, "1 or more");
    detail::require(shape.query_heads >= 1 && shape.query_heads % shape.kv_heads == 0, "query_heads",
                    shape.query_heads,
                    [&] { return detail::text("a multiple of kv_heads = ", shape.kv_heads); });
    detail::require(head_dim_supported(shape.dim_k), "head_dim of keys", shape.dim_k, dims);
    detail::require(head_dim_supported(shape.dim_v), "head_dim of values", shape.dim_v, dims);
    detail::require(shape.page_rows >= 1, "page_rows", shape.page_rows, "1 or more");
    detail::require(shape.proposals >= 0, "proposals", shape.proposals, "0 or more");
}

}  // namespace host_backend

template <class Derived, AnyPolicy P, Storage T>
CacheOwner<Derived, P, T>::CacheOwner(const CacheShape& shape, const P& policy, const scorer_type* scorers,
                                      const Attention& attention)
    : shape_(shape), policy_(policy), scorers_(scorers), attention_(attention) {
    host_backend::check_shape(shape);
    host_backend::check_attention(attention);
    policy.check(shape.layers, shape.kv_heads);
    if constexpr (P::has_selection) {
        const std::int32_t page = policy.selection().page_rows();
        detail::require(page >= 1, "rows of a selection's page", page, "1 or more");
        detail::require(shape.page_rows % page == 0, "page_rows", shape.page_rows, [&] {
            return detail::text("a multiple of the ", page,
                                " rows of a page that the policy's selection reads");
        });
    }
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
        for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
            rules_.push_back(policy.rule(layer, head));
            if constexpr (P::has_selection) {
                read_pages_.push_back(policy.selection().pages.at(layer, head));
            }
        }
        if constexpr (P::ranked && CheckedScorer<scorer_type>) {
            scorer_of(layer).check(shape.kv_heads, shape.dim_k, shape.dim_v);
        }
    }
}

template <class Derived, AnyPolicy P, Storage T>
std::size_t CacheOwner<Derived, P, T>::layout::take(std::size_t bytes) {
    const std::size_t here = at;
    detail::require(here <= host_backend::most_bytes && bytes <= host_backend::most_bytes - here, name,
                    "2^62 or more", "less: layers, slots, heads, rows and head_dim multiply");
    at += host_backend::aligned_size(bytes);
    return here;
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::plan_common(layout& memory) {
    rules_at_ = memory.take(rules_.size() * sizeof(HeadRule));
    read_pages_at_ = memory.take(read_pages_.size() * sizeof(std::int32_t));
    length_at_ = memory.take(static_cast<std::size_t>(shape_.slots) * sizeof(position_t));
    taken_at_ = memory.take(
        host_backend::product_of(shape_.layers, shape_.slots, shape_.kv_heads, sizeof(std::int32_t)));
}

template <class Derived, AnyPolicy P, Storage T>
typename CacheOwner<Derived, P, T>::common_plan CacheOwner<Derived, P, T>::plan_layer(layout& memory,
                                                                                      std::int32_t layer) {
    const auto slots = static_cast<std::size_t>(shape_.slots);
    const std::size_t heads = slots * static_cast<std::size_t>(shape_.kv_heads);
    const std::size_t state_bytes =
        host_backend::product_of(heads, host_backend::state_floats<P>(scorer_of(layer)), sizeof(float));
    common_plan plan{};
    plan.state = memory.take(state_bytes);
    plan.kept = memory.take(heads * sizeof(std::int32_t));
    plan.pinned = memory.take(P::has_keep ? heads * sizeof(std::int32_t) : 0);
    plan.victim = memory.take(heads * sizeof(std::int32_t));
    plan.proposed = memory.take(slots * sizeof(std::int32_t));
    if constexpr (P::has_eviction) {
        const std::size_t query =
            host_backend::product_of(shape_.query_heads / shape_.kv_heads, shape_.dim_k, sizeof(T));
        plan.queries = memory.take(host_backend::product_of(heads, policy_.eviction().observing, query));
        plan.spare_queries = memory.take(host_backend::product_of(heads, shape_.proposals, query));
    }
    bytes_.scorer_state += state_bytes;
    return plan;
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::fill(LayerRef<P, T>& ref, std::int32_t layer, const common_plan& plan) const {
    ref.layer = layer;
    ref.slots = shape_.slots;
    ref.kv_heads = shape_.kv_heads;
    ref.group = shape_.query_heads / shape_.kv_heads;
    ref.dim_k = shape_.dim_k;
    ref.dim_v = shape_.dim_v;
    ref.page_rows = shape_.page_rows;
    ref.proposals = shape_.proposals;
    ref.device = device_;
    ref.attention = attention_;
    ref.rebase_limit = rebase_limit_;
    ref.rules = at<const HeadRule>(rules_at_) + std::int64_t{layer} * shape_.kv_heads;
    ref.length = at<position_t>(length_at_);
    ref.kept = at<std::int32_t>(plan.kept);
    ref.pinned = P::has_keep ? at<std::int32_t>(plan.pinned) : nullptr;
    ref.victim = at<std::int32_t>(plan.victim);
    ref.proposed = at<std::int32_t>(plan.proposed);
    ref.taken = at<std::int32_t>(taken_at_) + std::int64_t{layer} * shape_.slots * shape_.kv_heads;
    ref.state = at<float>(plan.state);
    ref.scorer = scorer_of(layer);
    ref.state_size = host_backend::state_floats<P>(ref.scorer);
    ref.gate = policy_.gate();
    ref.keep = policy_.keep();
    ref.selection = policy_.selection();
    ref.read_pages = P::has_selection
                         ? at<const std::int32_t>(read_pages_at_) + std::int64_t{layer} * shape_.kv_heads
                         : nullptr;
    ref.eviction = policy_.eviction();
    if constexpr (P::has_eviction) {
        ref.queries = at<T>(plan.queries);
        ref.spare_queries = at<T>(plan.spare_queries);
    }
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::bind_common(void* buffer, std::size_t buffer_bytes) {
    detail::require(!rules_.empty(), "cache", "moved from", "one that still has its policy");
    detail::require(buffer != nullptr, "buffer", "null", "memory of bytes().total()");
    detail::require(buffer_bytes >= bytes_.total(), "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least bytes().total() = ", bytes_.total()); });
    // Not before: who only asks for bytes() may ask about any number of slots.
    scratch_.resize(3 * static_cast<std::size_t>(shape_.slots));
    memory_ = host_backend::aligned(buffer);
    device_ = -1;
    std::memcpy(memory_ + rules_at_, rules_.data(), rules_.size() * sizeof(HeadRule));
    if (!read_pages_.empty()) {
        std::memcpy(memory_ + read_pages_at_, read_pages_.data(), read_pages_.size() * sizeof(std::int32_t));
    }
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::reset(const LayerRef<P, T>& ref, std::int32_t slot) {
    ref.length[slot] = 0;
    ref.proposed[slot] = 0;
    ref.taken[slot] = 0;
    for (std::int32_t head = 0; head < ref.kv_heads; ++head) {
        const std::int64_t index = ref.head_index(slot, head);
        ref.kept[index] = 0;
        if constexpr (P::has_keep) {
            ref.pinned[index] = 0;
        }
        ref.victim[index] = -1;
        if constexpr (P::ranked && StatefulScorer<scorer_type>) {
            ref.scorer.reset(ref.state + index * ref.state_size);
        }
    }
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_memory(bool on_device) const {
    detail::require(memory_ != nullptr, "cache", "unbound", "bound to memory by bind() first");
    const bool here = device_ >= 0;
    detail::require(here == on_device, "cache", here ? "bound to a device's memory" : "bound to host memory",
                    here ? "a call with a cuda context" : "a call with a host context");
}

/// For what the host does: it may not look at a device's memory.
template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_bound() const {
    require_memory(false);
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_slot(std::int32_t slot, const char* name) const {
    require_bound();
    require_slot_number(slot, name);
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_slot_number(std::int32_t slot, const char* name) const {
    detail::require(slot >= 0 && slot < shape_.slots, name, slot,
                    [&] { return detail::text("0 to ", shape_.slots - 1); });
}

template <class Derived, AnyPolicy P, Storage T>
template <class Name>
void CacheOwner<Derived, P, T>::require_between_tokens(std::int32_t slot, const Name& name) const {
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        detail::require(self().ref(layer).pending(slot, 0) == 0, name, slot, [&] {
            return detail::text("a slot between two tokens: layer ", layer,
                                " has taken some that advance() has not counted");
        });
    }
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_layer(std::int32_t layer) const {
    require_memory(device_ >= 0);
    check_layer(layer);
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::check_layer(std::int32_t layer) const {
    detail::require(!rules_.empty(), "cache", "moved from", "one that still has its policy");
    detail::require(layer >= 0 && layer < shape_.layers, "layer", layer,
                    [&] { return detail::text("0 to ", shape_.layers - 1); });
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::advance(const host&, const Batch& batch) {
    require_bound();
    host_backend::check_batch(batch, shape_.slots, std::numeric_limits<std::int32_t>::max(), "any");
    auto* length = at<position_t>(length_at_);
    // A row without a page would be read from pages of others.
    if constexpr (requires(typename Derived::ref_type cache) { cache.pages_missing(0, 0, 0); }) {
        for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
            const auto cache = self().ref(layer);
            for (std::int32_t i = 0; i < batch.count; ++i) {
                const std::int32_t slot = batch.slot(i);
                for (std::int32_t head = 0; batch.tokens(i) != 0 && head < shape_.kv_heads; ++head) {
                    const std::int32_t rows = cache.layout(head).used(
                        length[slot] + batch.tokens(i), cache.kept[cache.head_index(slot, head)]);
                    const std::int64_t missing = cache.pages_missing(slot, head, rows);
                    detail::require(
                        missing == 0, [&] { return detail::text("tokens of entry ", i); }, batch.tokens(i),
                        [&] {
                            return detail::text("0 until layer ", layer, " has taken them: it lacks ",
                                                missing, missing == 1 ? " page" : " pages",
                                                " (add_slab lends more; then that layer's call again)");
                        });
                }
            }
        }
    }
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const std::int32_t* const taken = self().ref(layer).taken;
        for (std::int32_t i = 0; i < batch.count; ++i) {
            if (taken[batch.slot(i)] != batch.tokens(i)) [[unlikely]] {
                detail::refuse(
                    detail::text("tokens of entry ", i).c_str(), batch.tokens(i),
                    detail::text("the ", taken[batch.slot(i)], " that layer ", layer,
                                 " has taken: advance() takes the same Batch as the layers, and every "
                                 "layer takes a token once"));
            }
        }
    }
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        std::int32_t* const taken = self().ref(layer).taken;
        for (std::int32_t i = 0; i < batch.count; ++i) {
            taken[batch.slot(i)] = 0;
        }
    }
    for (std::int32_t i = 0; i < batch.count; ++i) {
        length[batch.slot(i)] += batch.tokens(i);
    }
}

template <class Derived, AnyPolicy P, Storage T>
position_t CacheOwner<Derived, P, T>::length(std::int32_t slot) const {
    require_slot(slot);
    return at<const position_t>(length_at_)[slot];
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_head(std::int32_t head) const {
    detail::require(head >= 0 && head < shape_.kv_heads, "head", head,
                    [&] { return detail::text("0 to ", shape_.kv_heads - 1); });
}

template <class Derived, AnyPolicy P, Storage T>
Occupancy CacheOwner<Derived, P, T>::occupancy_of(std::int32_t layer, std::int32_t head, position_t length,
                                                  std::int32_t pending, std::int32_t kept) const {
    auto cache = self().ref(layer);
    cache.rules = &rule_of(layer, 0);  // the host's copy, wherever the cache is
    const HeadRule& rule = cache.rules[head];
    Occupancy result;
    result.length = length;
    const position_t taken = length + pending;
    result.sinks = static_cast<std::int32_t>(std::min<position_t>(taken, rule.sinks));
    result.window = static_cast<std::int32_t>(std::min<position_t>(taken - result.sinks, rule.window));
    result.long_range = kept;
    result.capacity = static_cast<std::int32_t>(cache.capacity(head));
    return result;
}

template <class Derived, AnyPolicy P, Storage T>
Occupancy CacheOwner<Derived, P, T>::occupancy(std::int32_t layer, std::int32_t slot,
                                               std::int32_t head) const {
    require_slot(slot);
    require_head(head);
    const auto cache = self().ref(layer);
    return occupancy_of(layer, head, cache.length[slot], cache.pending(slot, head),
                        cache.kept[cache.head_index(slot, head)]);
}

template <class Derived, AnyPolicy P, Storage T>
std::int32_t CacheOwner<Derived, P, T>::retained(std::int32_t layer, std::int32_t slot, std::int32_t head,
                                                 position_t* out) const {
    detail::require(memory_ == nullptr || device_ < 0, "cache", "bound to a device's memory",
                    "bound to host memory (on a device export_heads says what a head's rows are)");
    const std::int32_t count = occupancy(layer, slot, head).rows();
    detail::require(out != nullptr || count == 0, "out", "null", "room for occupancy(...).rows() positions");
    const auto rows = self().ref(layer).head_rows(slot, head);
    for (std::int32_t r = 0; r < count; ++r) {
        out[r] = rows.position(r);
    }
    return count;
}

}  // namespace kvpolicy

#include <kvpolicy/caches/host/sequences.hpp>
