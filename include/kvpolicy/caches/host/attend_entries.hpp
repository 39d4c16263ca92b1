// Attention of a cache's calls on the host: one query per sequence over the rows in use, or a chunk over two
// segments.
#pragma once

#include <kvpolicy/attention/host/kernel.hpp>
#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/host/select.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <cmath>

namespace kvpolicy::host_backend {

template <class Cache>
attention_shape shape_of(const Cache& cache) {
    attention_shape shape;
    shape.head_dim_qk = cache.head_dim_qk;
    shape.head_dim_vo = cache.head_dim_vo;
    shape.scale = cache.attention.sm_scale != 0.0f ? cache.attention.sm_scale
                                                   : 1.0f / std::sqrt(static_cast<float>(cache.head_dim_qk));
    shape.logits_soft_cap = cache.attention.logits_soft_cap;
    return shape;
}

/// The query heads of one entry and KV head, and where their results go.
template <class Cache, class T>
query_block<T> block_of(const Cache& cache, std::int32_t entry, std::int32_t head, std::int32_t tokens,
                        rows_view<const T> q, rows_view<T> out, plane_view<float> lse) {
    query_block<T> block;
    const std::int32_t first_head = head * cache.group;
    block.q = q.row(entry, first_head, 0);
    block.row_stride = q.row_stride;
    block.head_stride = q.head_stride;
    block.out = out.row(entry, first_head, 0);
    block.out_row_stride = out.row_stride;
    block.out_head_stride = out.head_stride;
    if (lse) {
        block.lse = lse.head(entry, first_head);
        block.lse_row_stride = 1;
        block.lse_head_stride = lse.head_stride;
    }
    block.count = tokens;
    block.group = cache.group;
    return block;
}

/// Memory of one part of a decode: a partial result, then scratch.
template <class T>
struct decode_part {
    std::size_t out, lse, scratch;
    decode_part(const attention_shape& shape, std::int32_t group)
        : out(detail::aligned_size(static_cast<std::size_t>(group) *
                                   static_cast<std::size_t>(shape.head_dim_vo) * sizeof(compute_t<T>))),
          lse(detail::aligned_size(static_cast<std::size_t>(group) * sizeof(float))),
          scratch(detail::aligned_size(attend_scratch_bytes<T>(shape, group, 1))) {}
};

/// What a query of one head reads: the first `pages` of its chosen pages, `rows` rows in all.
struct page_choice {
    std::int32_t pages, rows;
};

inline constexpr std::int32_t max_decode_parts = 32;  // attend_splits never makes more than this many in all

template <class Cache>
std::size_t decode_bytes(const host& on, const Cache& cache, std::int32_t count) {
    const decode_part<typename Cache::value_type> part(shape_of(cache), cache.group);
    const std::size_t tasks = static_cast<std::size_t>(count) * static_cast<std::size_t>(cache.kv_heads);
    return std::max<std::size_t>(tasks, max_decode_parts) * (part.out + part.lse) +
           static_cast<std::size_t>(on.threads()) * part.scratch +
           tasks * (selection_bytes(cache) + detail::aligned_size(sizeof(page_choice)));
}

/// Hands rows [begin, end) of a head to visit(segment, first_row), a segment for each run of rows that lie
/// together. Every row lies before the query at 0; the caller may say otherwise in the segment.
template <class Rows, class Visit>
void visit_rows(const Rows& rows, std::int32_t begin, std::int32_t end, std::int32_t head_dim_qk,
                std::int32_t head_dim_vo, Visit&& visit) {
    for (std::int32_t row = begin; row < end;) {
        const std::int32_t stop = rows.run_end(row, end);
        key_segment<std::remove_pointer_t<decltype(rows.k(0))>> segment;
        segment.k = rows.k(row);
        segment.k_stride = head_dim_qk;
        segment.v = rows.v(row);
        segment.v_stride = head_dim_vo;
        segment.count = stop - row;
        segment.first = -segment.count;
        visit(segment, row);
        row = stop;
    }
}

/// One query per sequence over the entries in use: choose_pages() where the policy selects, then attend() of
/// each split of each (sequence, KV head), then merge(). A task is one (entry of the batch, KV head).
template <class Cache, class T>
class decode_attention {
  public:
    using real = compute_t<T>;

    /// `added`: tokens of the present call whose rows are in already, but which the layer has not marked as
    /// appended yet.
    decode_attention(const host& on, const Cache& cache, const Batch& batch, rows_view<const T> q,
                     rows_view<T> out, plane_view<float> lse, std::int32_t added, std::byte* memory)
        : on_(on),
          cache_(cache),
          batch_(batch),
          q_(q),
          out_(out),
          lse_(lse),
          added_(added),
          shape_(shape_of(cache)),
          part_(shape_, cache.group),
          tasks_(std::int64_t{batch.count} * cache.kv_heads),
          choices_(memory),
          chosen_bytes_(selection_bytes(cache)) {
        parts_ = memory + static_cast<std::size_t>(tasks_) * (chosen_bytes_ + choice_bytes);
    }

    void run() {
        if constexpr (selects) {
            on_.parallel_for(tasks_, [&](std::int64_t task) { choose(task); });
        }
        std::int64_t longest = 0;
        for (std::int64_t task = 0; task < tasks_; ++task) {
            longest = std::max<std::int64_t>(longest, used(task));
        }
        splits_ = attend_splits(tasks_, longest);
        scratch_ = parts_ + static_cast<std::size_t>(tasks_ * splits_) * (part_.out + part_.lse);
        on_.parallel_for(tasks_ * splits_, [&](std::int64_t i, int thread) {
            const std::int64_t task = i / splits_;
            if (batch_.tokens(entry_of(task)) != 0) {
                attend(task, i % splits_, scratch_ + static_cast<std::size_t>(thread) * part_.scratch);
            }
        });
        for (std::int64_t task = 0; splits_ != 1 && task < tasks_; ++task) {
            if (batch_.tokens(entry_of(task)) != 0) {
                merge_splits(shape_, block(task), 0, 1, static_cast<std::int32_t>(splits_), out_of(task),
                             lse_of(task));
            }
        }
    }

  private:
    static constexpr bool selects = Cache::policy_type::has_selection;
    static constexpr std::size_t choice_bytes = detail::aligned_size(sizeof(page_choice));

    [[nodiscard]] std::int32_t entry_of(std::int64_t task) const {
        return static_cast<std::int32_t>(task / cache_.kv_heads);
    }
    [[nodiscard]] std::int32_t head_of(std::int64_t task) const {
        return static_cast<std::int32_t>(task % cache_.kv_heads);
    }
    /// KV entries of the head.
    [[nodiscard]] std::int32_t held(std::int64_t task) const {
        const std::int32_t seq = batch_.seq(entry_of(task)), head = head_of(task);
        return cache_.layout(head).used(cache_.length[seq] + cache_.num_appended(seq, head) + added_,
                                        cache_.num_long_range[cache_.head_index(seq, head)]);
    }
    /// KV entries that the query reads.
    [[nodiscard]] std::int32_t used(std::int64_t task) const {
        if constexpr (selects) {
            return choice_of(task).rows;
        } else {
            return held(task);
        }
    }
    [[nodiscard]] page_choice& choice_of(std::int64_t task) const {
        return *reinterpret_cast<page_choice*>(choices_ + static_cast<std::size_t>(task) *
                                                              (chosen_bytes_ + choice_bytes));
    }
    [[nodiscard]] page_bound<real>* chosen_of(std::int64_t task) const {
        return reinterpret_cast<page_bound<real>*>(reinterpret_cast<std::byte*>(&choice_of(task)) +
                                                   choice_bytes);
    }

    void choose(std::int64_t task) const {
        const std::int32_t i = entry_of(task), h = head_of(task), rows = held(task);
        page_choice& choice = choice_of(task) = {0, 0};
        if (batch_.tokens(i) == 0 || rows == 0) {
            return;
        }
        const std::int32_t seq = batch_.seq(i);
        const std::int32_t newest =
            cache_.layout(h).recent(cache_.length[seq] + cache_.num_appended(seq, h) + added_ - 1);
        choice.pages =
            choose_pages(cache_, cache_.head_rows(seq, h), h, rows, newest, static_cast<real>(shape_.scale),
                         q_.row(i, h * cache_.group, 0), q_.head_stride, chosen_of(task));
        const std::int32_t size = cache_.selection.page_size();
        const std::int32_t last = chosen_of(task)[choice.pages - 1].page;
        choice.rows = (choice.pages - 1) * size + std::min(size, rows - last * size);
    }

    /// Hands the segments that the query reads to a visitor.
    [[nodiscard]] auto segments_of(std::int64_t task) const {
        return [this, task, rows = cache_.head_rows(batch_.seq(entry_of(task)), head_of(task)),
                count = held(task)](auto&& visit) {
            const auto pass = [&](std::int32_t begin, std::int32_t end) {
                visit_rows(rows, begin, end, cache_.head_dim_qk, cache_.head_dim_vo,
                           [&](const key_segment<T>& segment, std::int32_t) { visit(segment); });
            };
            if constexpr (selects) {
                // Pages that follow one another are read as one.
                const page_bound<real>* const chosen = chosen_of(task);
                const std::int32_t size = cache_.selection.page_size(), pages = choice_of(task).pages;
                for (std::int32_t i = 0; i < pages;) {
                    std::int32_t next = i + 1;
                    for (; next < pages && chosen[next].page == chosen[next - 1].page + 1; ++next) {
                    }
                    pass(chosen[i].page * size, std::min((chosen[next - 1].page + 1) * size, count));
                    i = next;
                }
            } else {
                static_cast<void>(task);
                pass(0, count);
            }
        };
    }
    [[nodiscard]] query_block<T> block(std::int64_t task) const {
        return block_of(cache_, entry_of(task), head_of(task), 1, q_, out_, lse_);
    }
    // [tasks][splits] outputs, then [tasks][splits] sums, each part of its own cache lines.
    [[nodiscard]] real* out_of(std::int64_t task) const {
        return reinterpret_cast<real*>(parts_ + static_cast<std::size_t>(task * splits_) * part_.out);
    }
    [[nodiscard]] float* lse_of(std::int64_t task) const {
        return reinterpret_cast<float*>(parts_ + static_cast<std::size_t>(tasks_ * splits_) * part_.out +
                                        static_cast<std::size_t>(task * splits_) * part_.lse);
    }

    void attend(std::int64_t task, std::int64_t split, std::byte* scratch) const {
        if (splits_ == 1) {
            attend_head<T>(on_.instructions(), shape_, segments_of(task), block(task), 0, 1, scratch);
            return;
        }
        const std::int64_t count = used(task);
        const std::int64_t step = (count + splits_ - 1) / splits_;
        attend_head_split<T>(on_.instructions(), shape_, segments_of(task), block(task), 0, 1, split * step,
                             std::min((split + 1) * step, count),
                             out_of(task) + split * cache_.group * cache_.head_dim_vo,
                             lse_of(task) + split * cache_.group, scratch);
    }

    const host& on_;
    const Cache& cache_;
    const Batch& batch_;
    rows_view<const T> q_;
    rows_view<T> out_;
    plane_view<float> lse_;
    std::int32_t added_;
    attention_shape shape_;
    decode_part<T> part_;
    std::int64_t tasks_, splits_ = 1;
    std::byte *choices_, *parts_ = nullptr, *scratch_ = nullptr;
    std::size_t chosen_bytes_;
};

/// Attention of one query per sequence over the entries in use.
template <class Cache, class T>
void attend_rows(const host& on, const Cache& cache, const Batch& batch, rows_view<const T> q,
                 rows_view<T> out, plane_view<float> lse, std::int32_t added, std::byte* memory) {
    decode_attention<Cache, T>(on, cache, batch, q, out, lse, added, memory).run();
}

template <class Cache>
std::size_t chunk_attention_bytes(const host& on, const Cache& cache) {
    using T = typename Cache::value_type;
    const attention_shape shape = shape_of(cache);
    return static_cast<std::size_t>(on.threads()) *
           detail::aligned_size(
               attend_scratch_bytes<T>(shape, cache.group, attend_tile<T>(shape, cache.group)));
}

/// A chunk's queries over the segments that segments_of(entry, head, visit) hands to visit.
template <class Cache, class T, class SegmentsOf>
void attend_chunk(const host& on, const Cache& cache, const Batch& batch, rows_view<const T> q,
                  rows_view<T> out, plane_view<float> lse, std::int32_t longest, std::byte* memory,
                  SegmentsOf&& segments_of, const std::int32_t* cu_seqlens = nullptr) {
    const attention_shape shape = shape_of(cache);
    const std::int32_t tile = attend_tile<T>(shape, cache.group);
    const std::int64_t tiles = (longest + tile - 1) / tile;
    const std::int64_t heads = std::int64_t{batch.count} * cache.kv_heads;
    const std::size_t scratch = detail::aligned_size(attend_scratch_bytes<T>(shape, cache.group, tile));
    on.parallel_for(tiles * heads, [&](std::int64_t task, int thread) {
        // Late tiles see the most keys: they go first, so that no thread is left with a long one at the end.
        const auto begin = static_cast<std::int32_t>((tiles - 1 - task / heads) * tile);
        const auto i = static_cast<std::int32_t>(task % heads / cache.kv_heads);
        const auto h = static_cast<std::int32_t>(task % cache.kv_heads);
        const std::int32_t tokens = batch.tokens(i);
        if (begin >= tokens) {
            return;
        }
        attend_head<T>(
            on.instructions(), shape, [&](auto&& visit) { segments_of(i, h, visit); },
            block_of(cache, i, h, tokens, entry_rows(q, cu_seqlens, i), entry_rows(out, cu_seqlens, i),
                     entry_plane(lse, cu_seqlens, i)),
            begin, std::min(tokens, begin + tile), memory + static_cast<std::size_t>(thread) * scratch);
    });
}

}  // namespace kvpolicy::host_backend
