// Pages for what a call is about to write: all that a sequence needs, or the call leaves that sequence alone.
#pragma once

#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <limits>

namespace kvpolicy::host_backend {

/// Workspace of admit: the tokens of the entries that go on.
template <class Cache>
std::size_t admission_bytes([[maybe_unused]] const Cache& cache, [[maybe_unused]] std::int32_t count) {
    if constexpr (Cache::pooled) {
        return detail::aligned_size(static_cast<std::size_t>(count) * sizeof(std::int32_t));
    }
    return 0;
}

/// Refuses a sequence that a call would make longer than it may get.
inline void require_max_seq_len(std::int32_t seq, position_t after, position_t max_seq_len) {
    if (after > max_seq_len) {
        detail::refuse(detail::text("length of sequence ", seq, " after the call").c_str(), after,
                       detail::text("at most the cache's max_seq_len, ", max_seq_len));
    }
}

/// Refuses tokens beyond what the page tables of unbounded heads can name.
template <class Cache>
void check_max_seq_len([[maybe_unused]] const Cache& cache, [[maybe_unused]] const Batch& batch) {
    if constexpr (Cache::pooled) {
        for (std::int32_t i = 0; cache.limited && i < batch.count; ++i) {
            const std::int32_t seq = batch.seq(i);
            const position_t after = cache.length[seq] + cache.num_appended(seq, 0) + batch.tokens(i);
            if (batch.tokens(i) != 0) {
                require_max_seq_len(seq, after, cache.max_seq_len);
            }
        }
    }
}

/// Takes the pages that the batch's entries need for rows_after(entry, head) rows, entry by entry, and
/// returns the batch of those that got theirs: the others have 0 tokens in it, and status_pool_exhausted in
/// status[entry]. Where heads share a budget, pages go to the sequences' stashes (write_shared_heads).
/// Without a status array exhaustion is refused, and nothing is taken.
template <class Cache, class RowsAfter>
Batch admit([[maybe_unused]] const Cache& cache, const Batch& batch, [[maybe_unused]] std::uint32_t* status,
            [[maybe_unused]] std::byte* memory, [[maybe_unused]] RowsAfter&& rows_after) {
    if constexpr (!Cache::pooled) {
        return batch;
    } else {
        auto* const tokens = reinterpret_cast<std::int32_t*>(memory);
        std::int64_t left = cache.pool.free_pages(), needed = 0;
        for (std::int32_t i = 0; i < batch.count; ++i) {
            tokens[i] = batch.tokens(i);
            if (tokens[i] == 0) {
                continue;
            }
            std::int64_t mine = 0;
            if constexpr (Cache::policy_type::shares_budget) {
                mine = cache.shared_pages_missing(batch.seq(i),
                                                  [&](std::int32_t h) { return rows_after(i, h); });
            } else {
                for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
                    mine += cache.pages_missing(batch.seq(i), h, rows_after(i, h));
                }
            }
            needed += mine;
            if (mine > left) {
                tokens[i] = 0;
            } else {
                left -= mine;
            }
        }
        for (std::int32_t i = 0; i < batch.count; ++i) {
            if (tokens[i] == batch.tokens(i)) {
                continue;
            }
            if (status == nullptr) {
                detail::refuse(
                    "free pages of the pool", cache.pool.free_pages(),
                    detail::text(
                        "at least the ", needed,
                        " that the call needs (add_slab adds more), or the call takes a status array"));
            }
            status[i] |= status_pool_exhausted;
        }
        for (std::int32_t i = 0; i < batch.count; ++i) {
            if constexpr (Cache::policy_type::shares_budget) {
                if (tokens[i] != 0) {
                    cache.stash_pages(batch.seq(i),
                                      cache.shared_pages_missing(
                                          batch.seq(i), [&](std::int32_t h) { return rows_after(i, h); }));
                }
            } else {
                for (std::int32_t h = 0; tokens[i] != 0 && h < cache.kv_heads; ++h) {
                    cache.take_pages(batch.seq(i), h, rows_after(i, h));
                }
            }
        }
        return {.count = batch.count, .seq_ids = batch.seq_ids, .q_len = tokens, .length = batch.length};
    }
}

/// Calls write(entry, head) for each head of the admitted entries of a layer whose heads share a budget,
/// each with the pages that it needs for rows_after(entry, head) rows. Heads that give pages up come first,
/// and those that need more get them. gives_pages(entry, head) is a bool of the caller's memory.
template <class Cache, class RowsAfter, class GivesPages, class Write>
void write_shared_heads(const host& ctx, const Cache& cache, const Batch& admitted,
                        const RowsAfter& rows_after, const GivesPages& gives_pages, const Write& write) {
    const auto each = [&](const auto& visit) {
        for (std::int32_t i = 0; i < admitted.count; ++i) {
            for (std::int32_t h = 0; admitted.tokens(i) != 0 && h < cache.kv_heads; ++h) {
                visit(i, h, admitted.seq(i));
            }
        }
    };
    const auto write_all = [&](bool giving) {
        for_each_head(ctx, cache.kv_heads, admitted, [&](std::int32_t i, std::int32_t h) {
            if (gives_pages(i, h) == giving) {
                write(i, h);
            }
        });
    };
    bool some_give = false;
    each([&](std::int32_t i, std::int32_t h, std::int32_t seq) {
        const std::int64_t needed = (rows_after(i, h) + cache.page_size - 1) / cache.page_size;
        gives_pages(i, h) = needed < cache.held[cache.head_index(seq, h)];
        some_give = some_give || gives_pages(i, h);
    });
    if (some_give) {
        write_all(true);
        each([&](std::int32_t i, std::int32_t h, std::int32_t seq) {
            cache.release_pages(seq, h, rows_after(i, h));
        });
    }
    each([&](std::int32_t i, std::int32_t h, std::int32_t seq) {
        cache.take_pages(seq, h, rows_after(i, h));
    });
    write_all(false);
}

/// What an entry gets that was left alone: out 0, lse -inf.
template <class Cache, class T>
void clear_refused([[maybe_unused]] const Cache& cache, [[maybe_unused]] const Batch& all,
                   [[maybe_unused]] const Batch& admitted, [[maybe_unused]] rows_view<T> out,
                   [[maybe_unused]] plane_view<float> lse,
                   [[maybe_unused]] const std::int32_t* cu_seqlens = nullptr) {
    if constexpr (Cache::pooled) {
        for (std::int32_t i = 0; i < all.count; ++i) {
            if (admitted.tokens(i) == all.tokens(i)) {
                continue;
            }
            for (std::int32_t h = 0; h < cache.kv_heads * cache.group; ++h) {
                for (std::int32_t j = 0; j < all.tokens(i); ++j) {
                    // T{} would do, but the storage types are trivial on purpose.
                    std::fill_n(entry_rows(out, cu_seqlens, i).row(i, h, j), cache.head_dim_vo,
                                static_cast<T>(0.0f));
                    if (lse) {
                        entry_plane(lse, cu_seqlens, i).head(i, h)[j] =
                            -std::numeric_limits<float>::infinity();
                    }
                }
            }
        }
    }
}

}  // namespace kvpolicy::host_backend
