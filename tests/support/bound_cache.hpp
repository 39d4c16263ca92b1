// A FixedBudgetCache with the memory that it is bound to (exactly as much as it asks for, poisoned), and
// calls that bring workspaces of exactly the size asked for, poisoned too.
#pragma once

#include <kvpolicy/caches/fixed_budget.hpp>

#include "support/cases.hpp"
#include "support/step_io.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace test {

/// Every byte 0xff: NaN in every floating-point type, -1 in every integer.
inline constexpr unsigned char poison_byte = 0xff;

/// For tests that bring scores for every policy: without them where the policy has a scorer of its own,
/// which refuses them.
template <class P>
test::Extras wanted_by(test::Extras extras) {
    if constexpr (P::scorer_type::when != kvpolicy::score_time::given) {
        extras.scores = {};
    }
    return extras;
}

template <class P, class T>
struct BoundCache {
    kvpolicy::FixedBudgetCache<P, T> cache;
    std::vector<unsigned char> memory;

    BoundCache(const kvpolicy::host& ctx, const kvpolicy::CacheShape& shape, const P& policy = P{},
               const typename P::scorer_type* scorers = nullptr,
               const kvpolicy::AttentionParams& attention = {},
               kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit)
        : cache(shape, policy, scorers, attention), memory(cache.bytes().total(), poison_byte) {
        cache.rebase_limit(rebase_limit);
        cache.bind(ctx, memory.data(), memory.size());
    }
    BoundCache(const BoundCache&) = delete;

    [[nodiscard]] std::vector<kvpolicy::position_t> positions(std::int32_t layer, std::int32_t seq,
                                                              std::int32_t head) const {
        std::vector<kvpolicy::position_t> held(
            static_cast<std::size_t>(cache.usage(layer, seq, head).size()));
        cache.retained(layer, seq, head, held.data());
        return held;
    }
    /// The positions held, oldest first.
    [[nodiscard]] std::vector<kvpolicy::position_t> sorted(std::int32_t layer, std::int32_t seq,
                                                           std::int32_t head) const {
        std::vector<kvpolicy::position_t> held = positions(layer, seq, head);
        std::sort(held.begin(), held.end());
        return held;
    }

    /// What belongs to one sequence of one layer: keys, values, positions, scores, counts,
    /// state. Byte for byte.
    [[nodiscard]] std::vector<unsigned char> slot_bytes(std::int32_t layer, std::int32_t seq) const {
        const auto ref = cache.layer(layer);
        std::vector<unsigned char> bytes;
        const auto add = [&](const auto* data, std::int64_t each) {
            const auto* from = reinterpret_cast<const unsigned char*>(data + seq * each);
            bytes.insert(bytes.end(), from, from + static_cast<std::size_t>(each) * sizeof *data);
        };
        add(ref.k, ref.rows * ref.head_dim_qk);
        add(ref.v, ref.rows * ref.head_dim_vo);
        add(ref.position, ref.rows);
        add(ref.score, ref.rows);
        add(ref.num_long_range, ref.kv_heads);
        add(ref.victim, ref.kv_heads);
        add(ref.state, ref.kv_heads * ref.state_size);
        add(ref.length, 1);
        return bytes;
    }
    /// The same without what differs between stepping and chunks, or means nothing: rows that are not in use,
    /// and the remembered victim.
    [[nodiscard]] std::vector<unsigned char> content(std::int32_t layer, std::int32_t seq) const {
        const auto ref = cache.layer(layer);
        std::vector<unsigned char> bytes;
        const auto add = [&](const auto* data, std::int64_t first, std::int64_t count) {
            const auto* from = reinterpret_cast<const unsigned char*>(data + first);
            bytes.insert(bytes.end(), from, from + static_cast<std::size_t>(count) * sizeof *data);
        };
        for (std::int32_t head = 0; head < ref.kv_heads; ++head) {
            const std::int64_t first = ref.first_row(seq, head);
            const std::int64_t used = ref.used(seq, head);
            add(ref.k, first * ref.head_dim_qk, used * ref.head_dim_qk);
            add(ref.v, first * ref.head_dim_vo, used * ref.head_dim_vo);
            add(ref.position, first, used);
            add(ref.score, first, used);
        }
        add(ref.num_long_range, std::int64_t{seq} * ref.kv_heads, ref.kv_heads);
        add(ref.state, std::int64_t{seq} * ref.kv_heads * ref.state_size, ref.kv_heads * ref.state_size);
        add(ref.length, seq, 1);
        return bytes;
    }
};

/// One call of one layer; `steps` through step, else through prefill. Does not advance.
template <class P, class T, class Bound>
void call(const kvpolicy::host& ctx, const Bound& under_test, std::int32_t layer,
          const kvpolicy::Batch& batch, kvpolicy::rows_view<const T> q, kvpolicy::rows_view<const T> k,
          kvpolicy::rows_view<const T> v, kvpolicy::rows_view<T> out, const test::Extras& extras,
          bool steps) {
    const auto ref = under_test.cache.layer(layer);
    std::int32_t max_seq_len = 1;
    for (std::int32_t i = 0; i < batch.count; ++i) {
        max_seq_len = std::max(max_seq_len, batch.tokens(i));
    }
    Workspace workspace(kvpolicy::workspace_bytes(ctx, ref, {.batch = batch.count, .tokens = max_seq_len}));
    if (steps) {
        kvpolicy::step(ctx, ref, test::step_io(batch, q, k, v, out, wanted_by<P>(extras)), workspace);
    } else {
        kvpolicy::prefill(ctx, ref, test::step_io(batch, q, k, v, out, wanted_by<P>(extras)), workspace);
    }
}

/// Cuts `length` into chunks: 0 in `sizes` stands for the rest, and the last size repeats.
inline std::vector<std::int32_t> chunks_of(std::int32_t length, const std::vector<std::int32_t>& sizes) {
    std::vector<std::int32_t> chunks;
    std::int32_t at = 0;
    for (std::size_t i = 0; at < length; ++i) {
        std::int32_t size = sizes[std::min(i, sizes.size() - 1)];
        if (size == 0 || size > length - at) {
            size = length - at;
        }
        chunks.push_back(size);
        at += size;
    }
    return chunks;
}

}  // namespace test
