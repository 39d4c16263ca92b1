// What owners of caches do on the host: check, plan, look.
#pragma once

#include <kvpolicy/attention/host/types.hpp>
#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/status.hpp>
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

/// The shape with head_dim_qk and head_dim_vo filled in from head_dim; refuses a contradiction.
inline CacheShape with_head_dims(CacheShape shape) {
    const auto fill = [&](const char* name, std::int32_t& dim) {
        detail::require(shape.head_dim == 0 || dim == 0 || dim == shape.head_dim, name, dim,
                        [&] { return detail::text("head_dim = ", shape.head_dim, ", or not set"); });
        dim = dim == 0 ? shape.head_dim : dim;
    };
    fill("head_dim_qk", shape.head_dim_qk);
    fill("head_dim_vo", shape.head_dim_vo);
    return shape;
}

/// Pages that a head lacks for `tokens` further tokens: of the first head that lacks some.
template <class Cache>
std::int64_t pages_lacking([[maybe_unused]] const Cache& cache, [[maybe_unused]] std::int32_t seq,
                           [[maybe_unused]] std::int32_t tokens) {
    if constexpr (Cache::pooled) {
        const auto rows_of = [&](std::int32_t head) {
            return cache.layout(head).used(cache.length[seq] + tokens,
                                           cache.num_long_range[cache.head_index(seq, head)]);
        };
        if constexpr (Cache::policy_type::shares_budget) {
            return tokens == 0 ? 0 : cache.shared_pages_missing(seq, rows_of);
        }
        for (std::int32_t head = 0; tokens != 0 && head < cache.kv_heads; ++head) {
            const std::int32_t rows = rows_of(head);
            if (const std::int64_t missing = cache.pages_missing(seq, head, rows); missing != 0) {
                return missing;
            }
        }
    }
    return 0;
}

inline void check_shape(const CacheShape& shape) {
    const auto dims = [] { return detail::text("a multiple of 8 up to ", checks::max_head_dim); };
    detail::require(shape.layers >= 1, "layers", shape.layers, "1 or more");
    detail::require(shape.max_sequences >= 1, "max_sequences", shape.max_sequences, "1 or more");
    detail::require(shape.kv_heads >= 1, "kv_heads", shape.kv_heads, "1 or more");
    detail::require(shape.query_heads >= 1 && shape.query_heads % shape.kv_heads == 0, "query_heads",
                    shape.query_heads,
                    [&] { return detail::text("a multiple of kv_heads = ", shape.kv_heads); });
    detail::require(checks::head_dim_supported(shape.head_dim_qk), "head_dim of keys", shape.head_dim_qk,
                    dims);
    detail::require(checks::head_dim_supported(shape.head_dim_vo), "head_dim of values", shape.head_dim_vo,
                    dims);
    detail::require(shape.page_size >= 1, "page_size", shape.page_size, "1 or more");
    detail::require(shape.max_draft_tokens >= 0, "max_draft_tokens", shape.max_draft_tokens, "0 or more");
}

}  // namespace host_backend

template <class Derived, AnyPolicy P, Storage T>
CacheOwner<Derived, P, T>::CacheOwner(const CacheShape& shape, const P& policy, const scorer_type* scorers,
                                      const AttentionParams& attention)
    : shape_(host_backend::with_head_dims(shape)), policy_(policy), scorers_(scorers), attention_(attention) {
    host_backend::check_shape(shape_);
    checks::check_attention(attention);
    policy.check(shape.layers, shape.kv_heads);
    if constexpr (P::has_selection) {
        const std::int32_t page = policy.selection().page_size();
        detail::require(page >= 1, "rows of a selection's page", page, "1 or more");
        detail::require(shape.page_size % page == 0, "page_size", shape.page_size, [&] {
            return detail::text("a multiple of the ", page,
                                " rows of a page that the policy's selection reads");
        });
    }
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
        for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
            all_params_.push_back(policy.params(layer, head));
            if constexpr (P::has_selection) {
                read_pages_.push_back(policy.selection().pages.at(layer, head));
            }
        }
        if constexpr (P::ranked && CheckedScorer<scorer_type>) {
            scorer_of(layer).check(shape_.kv_heads, shape_.head_dim_qk, shape_.head_dim_vo);
        }
    }
}

template <class Derived, AnyPolicy P, Storage T>
std::size_t CacheOwner<Derived, P, T>::layout::take(std::size_t bytes) {
    const std::size_t here = at;
    detail::require(here <= detail::max_bytes && bytes <= detail::max_bytes - here, name, "2^62 or more",
                    "less: layers, sequences, heads, rows and head_dim multiply");
    at += detail::aligned_size(bytes);
    return here;
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::plan_common(layout& memory) {
    all_params_at_ = memory.take(all_params_.size() * sizeof(HeadParams));
    read_pages_at_ = memory.take(read_pages_.size() * sizeof(std::int32_t));
    length_at_ = memory.take(static_cast<std::size_t>(shape_.max_sequences) * sizeof(position_t));
    appended_at_ = memory.take(
        detail::product_of(shape_.layers, shape_.max_sequences, shape_.kv_heads, sizeof(std::int32_t)));
}

template <class Derived, AnyPolicy P, Storage T>
typename CacheOwner<Derived, P, T>::common_plan CacheOwner<Derived, P, T>::plan_layer(layout& memory,
                                                                                      std::int32_t layer) {
    const auto max_sequences = static_cast<std::size_t>(shape_.max_sequences);
    const std::size_t heads = max_sequences * static_cast<std::size_t>(shape_.kv_heads);
    const std::size_t state_bytes =
        detail::product_of(heads, host_backend::state_floats<P>(scorer_of(layer)), sizeof(float));
    common_plan plan{};
    plan.state = memory.take(state_bytes);
    plan.num_long_range = memory.take(heads * sizeof(std::int32_t));
    plan.num_protected = memory.take(P::has_keep ? heads * sizeof(std::int32_t) : 0);
    plan.victim = memory.take(heads * sizeof(std::int32_t));
    plan.num_draft = memory.take(max_sequences * sizeof(std::int32_t));
    if constexpr (P::has_eviction) {
        const std::size_t query =
            detail::product_of(shape_.query_heads / shape_.kv_heads, shape_.head_dim_qk, sizeof(T));
        plan.queries = memory.take(detail::product_of(heads, policy_.eviction().observing, query));
        plan.spare_queries = memory.take(detail::product_of(heads, shape_.max_draft_tokens, query));
    }
    bytes_.scorer_state += state_bytes;
    return plan;
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::fill(LayerRef<P, T>& ref, std::int32_t layer, const common_plan& plan) const {
    ref.layer = layer;
    ref.max_sequences = shape_.max_sequences;
    ref.kv_heads = shape_.kv_heads;
    ref.group = shape_.query_heads / shape_.kv_heads;
    ref.head_dim_qk = shape_.head_dim_qk;
    ref.head_dim_vo = shape_.head_dim_vo;
    ref.page_size = shape_.page_size;
    ref.max_draft_tokens = shape_.max_draft_tokens;
    ref.device = device_;
    ref.attention = attention_;
    ref.rebase_limit = rebase_limit_;
    ref.all_params = at<const HeadParams>(all_params_at_) + std::int64_t{layer} * shape_.kv_heads;
    ref.length = at<position_t>(length_at_);
    ref.num_long_range = at<std::int32_t>(plan.num_long_range);
    ref.num_protected = P::has_keep ? at<std::int32_t>(plan.num_protected) : nullptr;
    ref.victim = at<std::int32_t>(plan.victim);
    ref.num_draft = at<std::int32_t>(plan.num_draft);
    ref.appended =
        at<std::int32_t>(appended_at_) + std::int64_t{layer} * shape_.max_sequences * shape_.kv_heads;
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
    detail::require(!all_params_.empty(), "cache", "moved from", "one that still has its policy");
    detail::require(buffer != nullptr, "buffer", "null", "memory of bytes().total()");
    detail::require(buffer_bytes >= bytes_.total(), "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least bytes().total() = ", bytes_.total()); });
    // Not before: who only asks for bytes() may ask about any number of sequences.
    scratch_.resize(3 * static_cast<std::size_t>(shape_.max_sequences));
    memory_ = detail::aligned(buffer);
    device_ = -1;
    std::memcpy(memory_ + all_params_at_, all_params_.data(), all_params_.size() * sizeof(HeadParams));
    if (!read_pages_.empty()) {
        std::memcpy(memory_ + read_pages_at_, read_pages_.data(), read_pages_.size() * sizeof(std::int32_t));
    }
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::reset(const LayerRef<P, T>& ref, std::int32_t seq) {
    ref.length[seq] = 0;
    ref.num_draft[seq] = 0;
    ref.appended[seq] = 0;
    for (std::int32_t head = 0; head < ref.kv_heads; ++head) {
        const std::int64_t index = ref.head_index(seq, head);
        ref.num_long_range[index] = 0;
        if constexpr (P::has_keep) {
            ref.num_protected[index] = 0;
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
void CacheOwner<Derived, P, T>::require_seq(std::int32_t seq, const char* name) const {
    require_bound();
    require_seq_number(seq, name);
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_seq_number(std::int32_t seq, const char* name) const {
    detail::require(seq >= 0 && seq < shape_.max_sequences, name, seq,
                    [&] { return detail::text("0 to ", shape_.max_sequences - 1); });
}

template <class Derived, AnyPolicy P, Storage T>
bool CacheOwner<Derived, P, T>::between_tokens(std::int32_t seq) const {
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        if (appended_by(layer)[seq] != 0) {
            return false;
        }
    }
    return true;
}

template <class Derived, AnyPolicy P, Storage T>
template <class Name>
void CacheOwner<Derived, P, T>::require_between_tokens(std::int32_t seq, const Name& name) const {
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        detail::require(self().layer(layer).num_appended(seq, 0) == 0, name, seq, [&] {
            return detail::text("a sequence between two tokens: layer ", layer,
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
    detail::require(!all_params_.empty(), "cache", "moved from", "one that still has its policy");
    detail::require(layer >= 0 && layer < shape_.layers, "layer", layer,
                    [&] { return detail::text("0 to ", shape_.layers - 1); });
}

template <class Derived, AnyPolicy P, Storage T>
std::uint32_t CacheOwner<Derived, P, T>::advance_status(std::int32_t seq, std::int32_t tokens) const {
    bool skipped = false;
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        if (appended_by(layer)[seq] != tokens) {
            if (host_backend::pages_lacking(self().layer(layer), seq, tokens) != 0) {
                return status_pool_exhausted;
            }
            skipped = true;
        }
    }
    return skipped ? status_layer_skipped : status_ok;
}

/// Refuses what advance_status() reports. A sequence without a page for a row would be read from
/// pages of others.
template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_appended(const Batch& batch, const std::int32_t* tokens_of) const {
    for (std::int32_t layer = 0; Derived::ref_type::pooled && layer < shape_.layers; ++layer) {
        const auto cache = self().layer(layer);
        for (std::int32_t i = 0; i < batch.count; ++i) {
            const std::int64_t missing = host_backend::pages_lacking(cache, batch.seq(i), tokens_of[i]);
            detail::require(
                missing == 0, [&] { return detail::text("tokens of entry ", i); }, tokens_of[i],
                [&] {
                    return detail::text("0 until layer ", layer, " has taken them: it lacks ", missing,
                                        missing == 1 ? " page" : " pages",
                                        " (add_slab adds more; then that layer's call again)");
                });
        }
    }
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        for (std::int32_t i = 0; i < batch.count; ++i) {
            const std::int32_t appended = appended_by(layer)[batch.seq(i)];
            if (appended != tokens_of[i]) [[unlikely]] {
                detail::refuse(
                    detail::text("tokens of entry ", i).c_str(), tokens_of[i],
                    detail::text("the ", appended, " that layer ", layer,
                                 " has taken: advance() takes the same Batch as the layers, and every "
                                 "layer takes a token once"));
            }
        }
    }
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::advance(const host&, const Batch& batch, const StepOptions& options) {
    require_bound();
    const Batch all = checks::batch_of(batch, shape_.max_sequences);
    checks::check_batch(all, shape_.max_sequences, std::numeric_limits<std::int32_t>::max(), "any");
    const bool says_tokens = all.q_len != nullptr || all.length != Batch::not_set;
    const std::int32_t least = batch.count == Batch::not_set ? 0 : 1;
    std::int32_t* const tokens_of = scratch_.data();  // [count]
    for (std::int32_t i = 0; i < all.count; ++i) {
        tokens_of[i] = says_tokens ? all.tokens(i) : least;
    }
    for (std::int32_t layer = 0; !says_tokens && layer < shape_.layers; ++layer) {
        for (std::int32_t i = 0; i < all.count; ++i) {
            tokens_of[i] = std::max(tokens_of[i], appended_by(layer)[all.seq(i)]);
        }
    }
    if (options.status == nullptr) {
        require_appended(all, tokens_of);
    }
    auto* length = at<position_t>(length_at_);
    for (std::int32_t i = 0; i < all.count; ++i) {
        const std::int32_t seq = all.seq(i), tokens = tokens_of[i];
        if (options.status != nullptr) {
            if (const std::uint32_t status = advance_status(seq, tokens); status != status_ok) {
                options.status[i] |= status;
                continue;
            }
        }
        for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
            appended_by(layer)[seq] = 0;
        }
        length[seq] += tokens;
    }
}

template <class Derived, AnyPolicy P, Storage T>
position_t CacheOwner<Derived, P, T>::length(std::int32_t seq) const {
    require_seq(seq);
    return at<const position_t>(length_at_)[seq];
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::require_head(std::int32_t head) const {
    detail::require(head >= 0 && head < shape_.kv_heads, "head", head,
                    [&] { return detail::text("0 to ", shape_.kv_heads - 1); });
}

template <class Derived, AnyPolicy P, Storage T>
HeadUsage CacheOwner<Derived, P, T>::usage_of(std::int32_t layer, std::int32_t head, position_t length,
                                              std::int32_t num_appended, std::int32_t num_long_range) const {
    auto cache = self().layer(layer);
    cache.all_params = &head_params_of(layer, 0);  // the host's copy, wherever the cache is
    const HeadParams& head_params = cache.all_params[head];
    HeadUsage result;
    result.length = length;
    const position_t appended = length + num_appended;
    result.sinks = static_cast<std::int32_t>(std::min<position_t>(appended, head_params.sinks));
    result.window =
        static_cast<std::int32_t>(std::min<position_t>(appended - result.sinks, head_params.window));
    result.long_range = num_long_range;
    result.capacity = static_cast<std::int32_t>(cache.capacity(head));
    return result;
}

template <class Derived, AnyPolicy P, Storage T>
HeadUsage CacheOwner<Derived, P, T>::usage(std::int32_t layer, std::int32_t seq, std::int32_t head) const {
    require_seq(seq);
    require_head(head);
    const auto cache = self().layer(layer);
    return usage_of(layer, head, cache.length[seq], cache.num_appended(seq, head),
                    cache.num_long_range[cache.head_index(seq, head)]);
}

template <class Derived, AnyPolicy P, Storage T>
std::int32_t CacheOwner<Derived, P, T>::retained(std::int32_t layer, std::int32_t seq, std::int32_t head,
                                                 position_t* out) const {
    detail::require(memory_ == nullptr || device_ < 0, "cache", "bound to a device's memory",
                    "bound to host memory (on a device export_heads says what a head's rows are)");
    const std::int32_t count = usage(layer, seq, head).size();
    detail::require(out != nullptr || count == 0, "out", "null", "capacity for usage(...).size() positions");
    const auto rows = self().layer(layer).head_rows(seq, head);
    for (std::int32_t r = 0; r < count; ++r) {
        out[r] = rows.position(r);
    }
    return count;
}

}  // namespace kvpolicy

#include <kvpolicy/caches/host/sequences.hpp>
