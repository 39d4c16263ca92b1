// Caches of observed policies under test: what they are fed, and how.
#pragma once

#include "baseline_cases.hpp"
#include "bound_cache.hpp"
#include "bound_dual.hpp"

#include <algorithm>

namespace test {

using namespace kvpolicy;

template <class T>
Tensor<T> tensor(const BaselineCase& one, std::uint64_t array) {
    Tensor<T> made(1, array == 0 ? one.heads() : one.kv_heads, one.length, one.dim);
    made.data = one.drawn<T>(array);
    return made;
}

inline CacheShape shape_of(const BaselineCase& one, std::int32_t max_sequences = 1) {
    return {.max_sequences = max_sequences,
            .query_heads = one.heads(),
            .kv_heads = one.kv_heads,
            .head_dim_qk = one.dim,
            .head_dim_vo = one.dim,
            .page_size = 4};
}

inline constexpr PoolShape pool{.slab_pages = 3, .max_slabs = 400, .max_seq_len = 200};

inline BaselineCase random_case(std::int32_t seed, std::int32_t kv_heads, std::int32_t group,
                                std::int32_t length) {
    BaselineCase one{};
    one.seed = seed, one.kv_heads = kv_heads, one.group = group, one.length = length, one.dim = 16;
    return one;
}

/// Tokens [from, to) of `one` into sequence `seq`.
template <class P, class Bound>
Tensor<float> feed(const host& ctx, const BaselineCase& one, Bound& bound, std::int32_t seq,
                   std::int32_t from, std::int32_t to, bool steps) {
    constexpr bool pooled = requires { bound.reserve(ctx, Batch{}); };
    const Tensor<float> q = tensor<float>(one, 0), k = tensor<float>(one, 1), v = tensor<float>(one, 2);
    Tensor<float> out(1, one.heads(), one.length, one.dim);
    for (std::int32_t at = from; at < to;) {
        const std::int32_t count = steps ? 1 : to - from;
        const Batch batch{.count = 1, .seq_ids = &seq, .length = count};
        if constexpr (pooled) {
            bound.reserve(ctx, batch);
        }
        call_ref<P, float>(ctx, bound.cache.layer(0), batch, q.tokens(at, count), k.tokens(at, count),
                           v.tokens(at, count), out.tokens(at, count), {}, steps);
        bound.cache.advance(ctx, batch);
        at += count;
    }
    return out;
}

template <class Bound>
std::vector<unsigned char> content(const Bound& bound, std::int32_t seq) {
    return content_of(bound.cache.layer(0), seq);
}

}  // namespace test
