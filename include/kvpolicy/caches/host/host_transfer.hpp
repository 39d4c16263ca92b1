// Bodies of caches/transfer.hpp on the host.
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/host/select.hpp>
#include <kvpolicy/caches/host/snapshot.hpp>
#include <kvpolicy/caches/transfer.hpp>
#include <kvpolicy/core/check.hpp>

#include <algorithm>
#include <cstring>

namespace kvpolicy {

namespace checks {

/// Arguments that both contexts check.
template <class Ref>
void check_transfer(const Ref& cache, std::int32_t seq, const void* buffer, std::size_t bytes) {
    detail::require(seq >= 0 && seq < cache.max_sequences, "seq", seq,
                    [&] { return detail::text("0 to ", cache.max_sequences - 1); });
    detail::require(buffer != nullptr, "buffer", "null", "memory of layer_bytes()");
    detail::require(reinterpret_cast<std::uintptr_t>(buffer) % 16 == 0, "buffer", "unaligned",
                    "at a multiple of 16 bytes");
    detail::require(bytes >= sizeof(detail::layer_header), "bytes", bytes, "those of layer_bytes()");
}

}  // namespace checks

namespace host_backend {

/// Calls move(numbers in the cache, numbers in the bytes, count) for all that a layer of a sequence holds.
template <class Ref, class Byte, class Move>
void for_each_part(const Ref& cache, std::int32_t seq, Byte* bytes, std::int64_t entries, const Move& move) {
    using T = typename Ref::value_type;
    const detail::layer_layout at(cache, entries);
    const auto part = [&]<class Number>(Number* mine, std::int64_t begin, std::int64_t first,
                                        std::int64_t count) {
        using Other = std::conditional_t<std::is_const_v<Byte>, const Number, Number>;
        move(mine, reinterpret_cast<Other*>(bytes + begin) + first, count);
    };
    std::int64_t first = 0;
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const std::int64_t index = cache.head_index(seq, head);
        const auto rows = cache.head_rows(seq, head);
        const std::int32_t used = cache.used(seq, head);
        part(cache.state + index * cache.state_size, at.state, head * cache.state_size, cache.state_size);
        if constexpr (Ref::policy_type::has_eviction) {
            const std::int64_t numbers = detail::layer_layout::query_numbers(cache);
            part(cache.query_row(seq, head, 0), at.queries, head * numbers, numbers);
        }
        for (std::int32_t r = 0; r < used; ++r, ++first) {
            part(&rows.position(r), at.position, first, 1);
            part(&rows.score(r), at.score, first, 1);
            part(static_cast<T*>(rows.k(r)), at.k, first * cache.head_dim_qk, cache.head_dim_qk);
            part(static_cast<T*>(rows.v(r)), at.v, first * cache.head_dim_vo, cache.head_dim_vo);
        }
    }
}

/// Whether the rows of each head of a saved layer are of positions that the head may hold there.
template <class Ref, class HeadOf>
bool positions_fit(const Ref& cache, const std::byte* bytes, const detail::layer_header& header,
                   const HeadOf& head_of) {
    const std::byte* at = bytes + detail::layer_layout(cache, header.entries).position;
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const HeadRows layout = cache.layout(head);
        const detail::layer_head saved = head_of(head);
        const std::int32_t used = layout.used(header.length, saved.num_long_range);
        std::int32_t num_protected = 0;
        for (std::int32_t r = 0; r < used; ++r, at += sizeof(position_t)) {
            position_t t = 0;
            std::memcpy(&t, at, sizeof t);
            if (!row_may_hold(layout, r, t, header.length)) {
                return false;
            }
            num_protected += r >= layout.slot(0) && cache.keep.keeps(t) ? 1 : 0;
        }
        if (num_protected != saved.num_protected) {
            return false;
        }
    }
    return true;
}

}  // namespace host_backend

template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t layer_bytes(const Ref<P, T>& cache, std::int64_t entries) {
    detail::require(entries >= 0, "entries", entries, "0 or more");
    return static_cast<std::size_t>(detail::layer_layout(cache, entries).bytes);
}

template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void save_layer(const host& /*ctx*/, const Ref<P, T>& cache, std::int32_t seq, void* buffer,
                std::size_t bytes, const StepOptions& /*options*/) {
    namespace hb = host_backend;
    hb::check_on_host(cache);
    checks::check_transfer(cache, seq, buffer, bytes);
    detail::require(cache.num_appended(seq, 0) == 0, "seq", seq, "a sequence between two tokens");
    std::int64_t entries = 0;
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        entries += cache.used(seq, head);
    }
    const detail::layer_layout at(cache, entries);
    detail::require(static_cast<std::int64_t>(bytes) >= at.bytes, "bytes", bytes,
                    [&] { return detail::text("at least layer_bytes() = ", at.bytes); });
    auto* const to = static_cast<std::byte*>(buffer);
    const detail::layer_header header = detail::header_of(cache, cache.length[seq], entries);
    std::memcpy(to, &header, sizeof header);
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const std::int64_t index = cache.head_index(seq, head);
        const HeadRows layout = cache.layout(head);
        detail::layer_head saved{layout.sinks, layout.window, cache.num_long_range[index], 0};
        if constexpr (P::has_keep) {
            saved.num_protected = cache.num_protected[index];
        }
        std::memcpy(to + at.heads + head * std::int64_t{sizeof saved}, &saved, sizeof saved);
    }
    hb::for_each_part(cache, seq, to, entries, [](const auto* mine, auto* theirs, std::int64_t count) {
        std::memcpy(theirs, mine, static_cast<std::size_t>(count) * sizeof *mine);
    });
}

template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void load_layer(const host& /*ctx*/, const Ref<P, T>& cache, std::int32_t seq, const void* buffer,
                std::size_t bytes, const StepOptions& options) {
    namespace hb = host_backend;
    hb::check_on_host(cache);
    checks::check_transfer(cache, seq, buffer, bytes);
    const auto* const from = static_cast<const std::byte*>(buffer);
    detail::layer_header header;
    std::memcpy(&header, from, sizeof header);
    bool fits = detail::header_fits(cache, header, static_cast<std::int64_t>(bytes));
    const auto head_of = [&](std::int32_t head) {
        detail::layer_head saved;
        std::memcpy(&saved, from + sizeof header + static_cast<std::size_t>(head) * sizeof saved,
                    sizeof saved);
        return saved;
    };
    std::int64_t entries = 0, pages = 0, held = 0;
    [[maybe_unused]] std::int64_t competitors = 0;  // of all heads
    for (std::int32_t head = 0; fits && head < cache.kv_heads; ++head) {
        const std::int64_t used = detail::entries_of(cache, head, header.length, head_of(head));
        fits = used >= 0;
        entries += used;
        competitors += head_of(head).num_long_range - head_of(head).num_protected;
        pages += (used + cache.page_size - 1) / cache.page_size;
        if constexpr (Ref<P, T>::pooled) {
            const std::int64_t index = cache.head_index(seq, head);
            for (std::int32_t page = 0; page < cache.held[index]; ++page) {
                held += cache.pool.names[cache.pages(seq, head)[page]] == 1 ? 1 : 0;
            }
        }
    }
    if constexpr (P::shares_budget) {
        fits = fits && competitors <= cache.shared_slots;
        held += cache.stashed[seq];
    }
    fits = fits && entries == header.entries && hb::positions_fit(cache, from, header, head_of);
    detail::require(fits, "buffer", "of another policy, shape or format",
                    "what save_layer() wrote of this layer");
    if constexpr (Ref<P, T>::pooled) {
        const std::int64_t free = cache.pool.free_pages() + held;
        if (pages > free) {
            if (!checks::reported(options.status, 0, status_pool_exhausted)) {
                detail::refuse("pages that the pool lacks", pages - free, "0 (add_slab adds more)");
            }
            return;
        }
        cache.return_pages(seq);
        cache.reserved[seq] = 0;
    }
    cache.length[seq] = header.length;
    cache.num_draft[seq] = 0;
    cache.appended[seq] = 0;
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const std::int64_t index = cache.head_index(seq, head);
        const detail::layer_head saved = head_of(head);
        cache.num_long_range[index] = saved.num_long_range;
        cache.victim[index] = -1;
        if constexpr (P::has_keep) {
            cache.num_protected[index] = saved.num_protected;
        }
        if constexpr (Ref<P, T>::pooled) {
            cache.take_pages(seq, head, cache.used(seq, head));
        }
    }
    hb::for_each_part(cache, seq, from, entries, [](auto* mine, const auto* theirs, std::int64_t count) {
        std::memcpy(mine, theirs, static_cast<std::size_t>(count) * sizeof *mine);
    });
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const std::int32_t used = cache.used(seq, head);
        hb::refresh_bounds(cache, cache.head_rows(seq, head), 0, used, used);
    }
}

}  // namespace kvpolicy
