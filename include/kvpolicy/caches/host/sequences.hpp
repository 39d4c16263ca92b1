// Sequences of a cache copied, exchanged and dropped: fork and reorder.
#pragma once

#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/caches/host/host_cache.hpp>
#include <kvpolicy/caches/host/select.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/status.hpp>

#include <algorithm>
#include <utility>

namespace kvpolicy {

namespace host_backend {

/// Pages that a copy of a sequence of one layer takes from the pool.
template <class Cache>
std::int64_t pages_of_copy([[maybe_unused]] const Cache& cache, [[maybe_unused]] std::int32_t seq) {
    std::int64_t pages = 0;
    if constexpr (Cache::pooled) {
        for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
            for (std::int64_t page = 0; page * cache.page_size < cache.used(seq, head); ++page) {
                pages += cache.is_shareable(head, cache.used(seq, head), page) ? 0 : 1;
            }
        }
    }
    return pages;
}

/// Copies rows [begin, end) of a head, a run at a time.
template <class From, class To>
void copy_rows(const From& from, const To& to, std::int32_t begin, std::int32_t end, std::int32_t head_dim_qk,
               std::int32_t head_dim_vo) {
    for (std::int32_t row = begin; row < end;) {
        const std::int32_t stop = std::min(from.run_end(row, end), to.run_end(row, end));
        const std::int64_t count = stop - row;
        std::copy_n(from.k(row), count * head_dim_qk, to.k(row));
        std::copy_n(from.v(row), count * head_dim_vo, to.v(row));
        std::copy_n(&from.position(row), count, &to.position(row));
        std::copy_n(&from.score(row), count, &to.score(row));
        row = stop;
    }
}

/// Calls visit(array, per_head) for each of the arrays [max_sequences, kv_heads, per_head] of a layer.
template <class Cache, class Visit>
void for_each_counter(const Cache& cache, Visit&& visit) {
    visit(cache.num_long_range, std::int64_t{1});
    visit(cache.victim, std::int64_t{1});
    if constexpr (Cache::policy_type::has_keep) {
        visit(cache.num_protected, std::int64_t{1});
    }
    visit(cache.state, cache.state_size);
    if constexpr (Cache::policy_type::has_eviction) {
        visit(cache.queries, std::int64_t{cache.eviction.observing} * cache.group * cache.head_dim_qk);
    }
}

/// One layer of a sequence, copied to a sequence that names no pages. The pool must have what it takes.
template <class Cache>
void copy_sequence(const Cache& cache, std::int32_t from, std::int32_t to) {
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const std::int32_t used = cache.used(from, head);
        const auto rows = cache.head_rows(from, head), copy = cache.head_rows(to, head);
        if constexpr (Cache::pooled) {
            std::int32_t& held = cache.held[cache.head_index(to, head)];
            for (std::int64_t page = 0; page * cache.page_size < used; ++page) {
                if (cache.is_shareable(head, used, page)) {
                    const std::int32_t id = cache.pages(from, head)[page];
                    cache.pool.share(id);
                    cache.pages(to, head)[held++] = id;
                    continue;
                }
                cache.pages(to, head)[held++] = cache.pool.take();
                const auto first = static_cast<std::int32_t>(page * cache.page_size);
                const std::int32_t last = std::min(used, first + cache.page_size);
                copy_rows(rows, copy, first, last, cache.head_dim_qk, cache.head_dim_vo);
                refresh_bounds(cache, copy, first, last, used);  // a shared page has its bounds
            }
        } else {
            copy_rows(rows, copy, 0, used, cache.head_dim_qk, cache.head_dim_vo);
            refresh_bounds(cache, copy, 0, used, used);
        }
    }
    for_each_counter(cache, [&](auto* array, std::int64_t each) {
        const std::int64_t count = cache.kv_heads * each;
        std::copy_n(array + from * count, count, array + to * count);
    });
    cache.appended[to] = cache.appended[from];
    if constexpr (Cache::pooled) {
        cache.reserved[to] = 0;
    }
}

/// One layer of two sequences, exchanged. Lengths are the caller's.
template <class Cache>
void swap_sequences(const Cache& cache, std::int32_t a, std::int32_t b) {
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        if constexpr (Cache::pooled) {
            std::int32_t &held_a = cache.held[cache.head_index(a, head)],
                         &held_b = cache.held[cache.head_index(b, head)];
            std::swap_ranges(cache.pages(a, head), cache.pages(a, head) + std::max(held_a, held_b),
                             cache.pages(b, head));
            std::swap(held_a, held_b);
        } else {
            const std::int64_t count = std::max(cache.used(a, head), cache.used(b, head));
            const auto x = cache.head_rows(a, head), y = cache.head_rows(b, head);
            std::swap_ranges(x.k(0), x.k(count), y.k(0));
            std::swap_ranges(x.v(0), x.v(count), y.v(0));
            std::swap_ranges(x.position_data, x.position_data + count, y.position_data);
            std::swap_ranges(x.score_data, x.score_data + count, y.score_data);
            if constexpr (Cache::policy_type::has_selection) {
                std::swap_ranges(x.bounds(0), x.bounds(pages_of_rows(cache, count)), y.bounds(0));
            }
        }
    }
    for_each_counter(cache, [&](auto* array, std::int64_t each) {
        const std::int64_t count = cache.kv_heads * each;
        std::swap_ranges(array + a * count, array + (a + 1) * count, array + b * count);
    });
    std::swap(cache.appended[a], cache.appended[b]);
    if constexpr (Cache::policy_type::shares_budget) {
        const std::int32_t most = std::max(cache.stashed[a], cache.stashed[b]);
        std::swap_ranges(cache.stash_of(a), cache.stash_of(a) + most, cache.stash_of(b));
        std::swap(cache.stashed[a], cache.stashed[b]);
    }
}

/// Which sequences of a reorder inherit their source's entries themselves: per source one sequence, the
/// source if it stays, or the first that names it. The others get copies.
struct reorder_plan {
    const std::int32_t* sources;
    std::int32_t count, seq_ids;
    std::int32_t*
        heir;  // [max_sequences]: the sequence that inherits; -1: none, or a sequence that does not move
    std::int32_t* where;    // [max_sequences]: the sequence that holds now what each sequence held
    std::int32_t* dropped;  // [max_sequences]: sequences whose entries no sequence asks for
    std::int32_t dropped_count = 0;

    reorder_plan(const std::int32_t* from, std::int32_t moved, std::int32_t all, std::int32_t* memory)
        : sources(from), count(moved), seq_ids(all), heir(memory), where(memory + all), dropped(where + all) {
        std::fill_n(heir, seq_ids, -1);
        for (std::int32_t i = count - 1; i >= 0; --i) {
            if (sources[i] < count && heir[sources[i]] != sources[i]) {
                heir[sources[i]] = i;
            }
        }
        for (std::int32_t i = 0; i < count; ++i) {
            if (sources[i] == i) {
                heir[i] = i;
            }
        }
        for (std::int32_t seq = 0; seq < seq_ids; ++seq) {
            where[seq] = seq;
            if (seq < count && heir[seq] < 0) {
                dropped[dropped_count++] = seq;
            }
        }
    }
    [[nodiscard]] bool inherits(std::int32_t i) const { return sources[i] < count && heir[sources[i]] == i; }
    /// Sequence i has its inheritance, and sequence `at_present`, which held it, what sequence i held.
    void swapped(std::int32_t i, std::int32_t at_present) const {
        *std::find(where, where + seq_ids, i) = at_present;
        where[sources[i]] = i;
    }
};

}  // namespace host_backend

/// Lets the named sequences go of their pages, if the pool then has `needed()` of them. Otherwise nothing has
/// changed, and it is refused, or returns false with *status set.
template <class Derived, AnyPolicy P, Storage T>
template <class PagesNeeded>
bool CacheOwner<Derived, P, T>::drop([[maybe_unused]] const std::int32_t* seq_ids,
                                     [[maybe_unused]] std::int32_t count,
                                     [[maybe_unused]] PagesNeeded&& needed,
                                     [[maybe_unused]] std::uint32_t* status) const {
    if constexpr (Derived::ref_type::pooled) {
        const auto for_each_page = [&](auto&& visit) {
            for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
                const auto cache = self().layer(layer);
                for (std::int32_t i = 0; i < count; ++i) {
                    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
                        const std::int32_t held = cache.held[cache.head_index(seq_ids[i], head)];
                        for (std::int32_t page = 0; page < held; ++page) {
                            visit(cache.pages(seq_ids[i], head)[page]);
                        }
                    }
                    if constexpr (P::shares_budget) {
                        for (std::int32_t page = 0; page < cache.stashed[seq_ids[i]]; ++page) {
                            visit(cache.stash_of(seq_ids[i])[page]);
                        }
                    }
                }
            }
        };
        const auto pool = self().layer(0).pool;
        const std::int32_t before = pool.free_pages();
        const std::int64_t wanted = needed();
        for_each_page([&](std::int32_t id) { pool.give(id); });
        if (pool.free_pages() < wanted) {
            // Freed ids lie above what was free before; none has been taken.
            const std::int32_t available = pool.free_pages();
            for_each_page([&](std::int32_t id) { pool.share(id); });
            *pool.free_count = before;
            if (status == nullptr) {
                detail::refuse(
                    "free pages of the pool", available,
                    detail::text("at least the ", wanted, " that the call needs (add_slab adds more)"));
            }
            *status |= status_pool_exhausted;
            return false;
        }
        for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
            const auto cache = self().layer(layer);
            for (std::int32_t i = 0; i < count; ++i) {
                std::fill_n(cache.held + cache.head_index(seq_ids[i], 0), cache.kv_heads, 0);
                if constexpr (P::shares_budget) {
                    cache.stashed[seq_ids[i]] = 0;
                }
            }
        }
    }
    return true;
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::fork(const host&, std::int32_t from, std::int32_t to,
                                     const StepOptions& options) {
    require_seq(from, "from");
    require_seq(to, "to");
    if (from == to) {
        return;
    }
    const auto needed = [&] {
        std::int64_t pages = 0;
        for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
            pages += host_backend::pages_of_copy(self().layer(layer), from);
        }
        return pages;
    };
    if (!drop(&to, 1, needed, options.status)) {
        return;
    }
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto cache = self().layer(layer);
        host_backend::copy_sequence(cache, from, to);
        cache.num_draft[to] = 0;
    }
    auto* length = at<position_t>(length_at_);
    length[to] = length[from];
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::reorder(const host&, const std::int32_t* sources, std::int32_t count,
                                        const StepOptions& options) {
    require_bound();
    checks::check_count("count", count, shape_.max_sequences);
    detail::require(sources != nullptr || count == 0, "sources", "null", "an array of count sequences");
    for (std::int32_t i = 0; i < count; ++i) {
        detail::require(
            sources[i] >= 0 && sources[i] < shape_.max_sequences,
            [&] { return detail::text("sources[", i, "]"); }, sources[i],
            [&] { return detail::text("0 to ", shape_.max_sequences - 1); });
    }
    host_backend::reorder_plan plan(sources, count, shape_.max_sequences, scratch_.data());
    const auto needed = [&] {
        std::int64_t pages = 0;
        for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
            const auto cache = self().layer(layer);
            for (std::int32_t i = 0; i < count; ++i) {
                pages += plan.inherits(i) ? 0 : host_backend::pages_of_copy(cache, sources[i]);
            }
        }
        return pages;
    };
    if (!drop(plan.dropped, plan.dropped_count, needed, options.status)) {
        return;
    }
    auto* length = at<position_t>(length_at_);
    for (std::int32_t i = 0; i < count; ++i) {
        const std::int32_t at_present = plan.inherits(i) ? plan.where[sources[i]] : i;
        if (at_present == i) {
            continue;
        }
        for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
            host_backend::swap_sequences(self().layer(layer), i, at_present);
        }
        std::swap(length[i], length[at_present]);
        if constexpr (Derived::ref_type::pooled) {
            auto* const reserved = self().layer(0).reserved;
            std::swap(reserved[i], reserved[at_present]);
        }
        plan.swapped(i, at_present);
    }
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto cache = self().layer(layer);
        std::fill_n(cache.num_draft, count, 0);
    }
    for (std::int32_t i = 0; i < count; ++i) {
        if (plan.inherits(i)) {
            continue;
        }
        const std::int32_t from = plan.where[sources[i]];
        for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
            host_backend::copy_sequence(self().layer(layer), from, i);
        }
        length[i] = length[from];
    }
}

}  // namespace kvpolicy

#include <kvpolicy/caches/host/snapshot.hpp>
