// A DualCache with the memory that it is bound to and the slabs that it was given: exactly as much as it
// asks for, poisoned.
#pragma once

#include <kvpolicy/caches/dual.hpp>

#include "support/bound_cache.hpp"
#include "support/cases.hpp"
#include "support/step_io.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace test {

template <class P, class T>
struct BoundDual {
    kvpolicy::DualCache<P, T> cache;
    std::vector<unsigned char> memory;
    std::vector<std::unique_ptr<std::vector<unsigned char>>> slabs;

    BoundDual(const kvpolicy::host& ctx, const kvpolicy::CacheShape& shape, const kvpolicy::PoolShape& pool,
              const P& policy = P{}, const typename P::scorer_type* scorers = nullptr,
              kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit,
              const kvpolicy::AttentionParams& attention = {})
        : cache(shape, pool, policy, scorers, attention), memory(cache.bytes().total(), poison_byte) {
        cache.rebase_limit(rebase_limit);
        cache.bind(ctx, memory.data(), memory.size());
    }
    BoundDual(const BoundDual&) = delete;

    void add_slab(const kvpolicy::host& ctx) {
        slabs.push_back(std::make_unique<std::vector<unsigned char>>(cache.slab_bytes(), poison_byte));
        cache.add_slab(ctx, slabs.back()->data(), slabs.back()->size());
    }
    void reserve(const kvpolicy::host& ctx, const kvpolicy::Batch& batch) {
        while (cache.reserve(ctx, batch) > 0) {
            add_slab(ctx);
        }
    }

    /// All memory that was attached, byte for byte.
    [[nodiscard]] std::vector<unsigned char> everything() const {
        std::vector<unsigned char> bytes = memory;
        for (const auto& slab : slabs) {
            bytes.insert(bytes.end(), slab->begin(), slab->end());
        }
        return bytes;
    }
    [[nodiscard]] std::vector<kvpolicy::position_t> sorted(std::int32_t layer, std::int32_t seq,
                                                           std::int32_t head) const {
        std::vector<kvpolicy::position_t> held(
            static_cast<std::size_t>(cache.usage(layer, seq, head).size()));
        cache.retained(layer, seq, head, held.data());
        std::sort(held.begin(), held.end());
        return held;
    }
};

/// What one sequence of one layer holds, row by row, wherever the rows lie; for caches of any kind. With a
/// selection's bounds behind a head's rows where `bounds` says so.
template <class Ref>
std::vector<unsigned char> content_of(const Ref& ref, std::int32_t seq, bool bounds = false) {
    std::vector<unsigned char> bytes;
    const auto add = [&](const auto* data, std::int64_t count) {
        const auto* from = reinterpret_cast<const unsigned char*>(data);
        bytes.insert(bytes.end(), from, from + static_cast<std::size_t>(count) * sizeof *data);
    };
    for (std::int32_t head = 0; head < ref.kv_heads; ++head) {
        const auto rows = ref.head_rows(seq, head);
        for (std::int32_t r = 0; r < ref.used(seq, head); ++r) {
            add(rows.k(r), ref.head_dim_qk);
            add(rows.v(r), ref.head_dim_vo);
            add(&rows.position(r), 1);
            add(&rows.score(r), 1);
        }
        const std::int32_t size = ref.selection.page_size();
        for (std::int32_t page = 0; bounds && page * size < ref.used(seq, head); ++page) {
            add(rows.bounds(page), 2 * std::int64_t{ref.head_dim_qk});
        }
    }
    add(ref.num_long_range + std::int64_t{seq} * ref.kv_heads, ref.kv_heads);
    add(ref.state + std::int64_t{seq} * ref.kv_heads * ref.state_size, ref.kv_heads * ref.state_size);
    add(ref.length + seq, 1);
    return bytes;
}

/// One call on any cache's layer, with a workspace of exactly the size asked for. Does not advance.
template <class P, class T, class Ref>
void call_ref(const kvpolicy::host& ctx, const Ref& ref, const kvpolicy::Batch& batch,
              kvpolicy::rows_view<const T> q, kvpolicy::rows_view<const T> k, kvpolicy::rows_view<const T> v,
              kvpolicy::rows_view<T> out, const test::Extras& extras, bool steps,
              std::uint32_t* status = nullptr) {
    std::int32_t max_seq_len = 1;
    for (std::int32_t i = 0; i < batch.count; ++i) {
        max_seq_len = std::max(max_seq_len, batch.tokens(i));
    }
    Workspace workspace(kvpolicy::workspace_bytes(ctx, ref, {.batch = batch.count, .tokens = max_seq_len}));
    if (steps) {
        kvpolicy::step(ctx, ref, test::step_io(batch, q, k, v, out, wanted_by<P>(extras)), workspace,
                       {.status = status});
    } else {
        kvpolicy::prefill(ctx, ref, test::step_io(batch, q, k, v, out, wanted_by<P>(extras)), workspace,
                          {.status = status});
    }
}

}  // namespace test
