// Bodies of attention/attend.hpp on the host: tasks, and the parts of the workspace.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/check_attend.hpp>
#include <kvpolicy/attention/host/kernel.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <cmath>

namespace kvpolicy {

namespace host_backend {

template <class T>
attention_shape resolve(const AttentionParams& attention, const rows_view<const T>& q,
                        const kv_view<T>& all) {
    attention_shape shape;
    shape.head_dim_qk = q.dim;
    shape.head_dim_vo = all.v.dim;
    shape.scale =
        attention.sm_scale != 0.0f ? attention.sm_scale : 1.0f / std::sqrt(static_cast<float>(q.dim));
    shape.logits_soft_cap = attention.logits_soft_cap;
    return shape;
}

/// How a call is cut into tasks: one per (sequence, KV head, tile of queries, part of the keys). Sizes
/// decide, never the number of threads.
template <Storage T>
struct attend_plan {
    std::int32_t tile, tiles, splits;
    std::int64_t heads, rows;
    std::size_t scratch, out, lse;  // bytes: one thread's scratch, one tile's partial results
    std::size_t partial = 0;        // the most bytes of partial results of this call and of shorter ones

    attend_plan(const attention_shape& shape, std::int32_t batch, std::int32_t kv_heads, std::int32_t group,
                std::int32_t queries, std::int64_t key_rows, bool may_split) {
        const auto out_bytes = [&](std::int64_t parts) {
            return detail::aligned_size(static_cast<std::size_t>(parts * rows * shape.head_dim_vo) *
                                        sizeof(compute_t<T>));
        };
        const auto lse_bytes = [&](std::int64_t parts) {
            return detail::aligned_size(static_cast<std::size_t>(parts * rows) * sizeof(float));
        };
        tile = std::min(attend_tile<T>(shape, group), std::max(queries, 1));
        tiles = (queries + tile - 1) / tile;
        heads = std::int64_t{batch} * kv_heads;
        splits = may_split ? attend_splits(heads * tiles, key_rows) : 1;
        rows = std::int64_t{tile} * group;
        scratch = detail::aligned_size(attend_scratch_bytes<T>(shape, group, tile, key_rows));
        out = out_bytes(splits);
        lse = lse_bytes(splits);
        // With fewer tiles each is split into more parts, so a shorter call may need more than this one.
        // Fewer keys, or fewer queries in the same number of tiles, never do. Beyond so many tiles nothing is
        // split.
        for (std::int64_t few = 1; may_split && few <= tiles && heads * few < enough_attend_tasks; ++few) {
            const std::int64_t parts = attend_splits(heads * few, key_rows);
            const std::size_t needed =
                static_cast<std::size_t>(heads * few) * (out_bytes(parts) + lse_bytes(parts));
            partial = parts > 1 ? std::max(partial, needed) : partial;
        }
    }

    /// For this call and all shorter ones.
    std::size_t bytes(int threads) const {
        return static_cast<std::size_t>(threads) * scratch + partial + detail::alignment;
    }
};

template <class T>
attend_plan<T> plan_of(const attention_shape& shape, const rows_view<const T>& q, const kv_view<T>& past,
                       const kv_view<T>* self, const Sequences& sequences) {
    const std::int64_t key_rows = std::int64_t{past.k.length} + (self != nullptr ? self->k.length : 0);
    return {shape,
            q.batch,
            past.k.heads,
            q.heads / past.k.heads,
            sequences.length,
            key_rows,
            sequences.cu_seqlens == nullptr};
}

/// The keys of one KV head of one sequence. `first` is the position of row 0 where none are given.
template <class T>
key_segment<T> segment_of(const kv_view<T>& all, std::int32_t b, std::int32_t h, std::int32_t first,
                          std::int32_t count) {
    key_segment<T> segment;
    segment.k = all.k.row(b, h, 0);
    segment.k_stride = all.k.row_stride;
    segment.v = all.v.row(b, h, 0);
    segment.v_stride = all.v.row_stride;
    segment.count = count;
    segment.first = first;
    if (all.position) {
        segment.position = all.position.head(b, h);
    }
    if (all.mask.expiry) {
        segment.expiry = all.mask.expiry.head(b, h);
    }
    if (all.mask.log_bias) {
        segment.log_bias = all.mask.log_bias.head(b, h);
        segment.bias_from = all.mask.bias_from_of(h);
    }
    return segment;
}

/// Rows [begin, end) of a segment.
template <class T>
key_segment<T> part_of(key_segment<T> segment, std::int32_t begin, std::int32_t end) {
    segment.k += begin * segment.k_stride;
    segment.v += begin * segment.v_stride;
    segment.first += begin;
    segment.count = end - begin;
    if (segment.position != nullptr) {
        segment.position += begin;
    }
    if (segment.expiry != nullptr) {
        segment.expiry += begin;
    }
    if (segment.log_bias != nullptr) {
        segment.log_bias += begin;
    }
    return segment;
}

/// A checked call.
template <Storage T>
class attend_call {
  public:
    attend_call(const host& ctx, const attention_shape& shape, const rows_view<const T>& q,
                const kv_view<T>& past, const kv_view<T>* self, const Sequences& sequences,
                const rows_view<T>& out, const plane_view<float>& lse, const attend_plan<T>& plan,
                void* memory)
        : ctx_(ctx),
          shape_(shape),
          q_(q),
          past_(past),
          self_(self),
          sequences_(sequences),
          out_(out),
          lse_(lse),
          plan_(plan),
          group_(q.heads / past.k.heads),
          scratch_(detail::aligned(memory)),
          partials_(scratch_ + static_cast<std::size_t>(ctx.threads()) * plan.scratch) {}

    void run() {
        const std::int64_t tiles = plan_.heads * plan_.tiles;
        ctx_.parallel_for(tiles * plan_.splits, [this](std::int64_t i, int thread) {
            task(i / plan_.splits, static_cast<std::int32_t>(i % plan_.splits),
                 scratch_ + static_cast<std::size_t>(thread) * plan_.scratch);
        });
        if (plan_.splits == 1) {
            return;
        }
        ctx_.parallel_for(tiles, [this](std::int64_t i) {
            const place at = place_of(i);
            if (at.begin < at.end) {
                merge_splits<T>(shape_, block_of(at), at.begin, at.end, plan_.splits, partial_out(i),
                                partial_lse(i));
            }
        });
    }

  private:
    struct place {
        std::int32_t b, h, begin, end;  // queries [begin, end)
    };

    /// Late tiles first: causal ones are the longest, and a long task must not be the last to start.
    place place_of(std::int64_t i) const {
        const auto tile = static_cast<std::int32_t>(plan_.tiles - 1 - i / plan_.heads);
        const auto b = static_cast<std::int32_t>(i % plan_.heads / past_.k.heads);
        const auto h = static_cast<std::int32_t>(i % past_.k.heads);
        const std::int32_t begin = tile * plan_.tile;
        return {b, h, begin, std::min(begin + plan_.tile, sequences_.length_of(b))};
    }

    query_block<T> block_of(const place& at) const {
        query_block<T> block;
        block.q = q_.row(at.b, std::int64_t{at.h} * group_, 0);
        block.row_stride = q_.row_stride;
        block.head_stride = q_.head_stride;
        block.out = out_.row(at.b, std::int64_t{at.h} * group_, 0);
        block.out_row_stride = out_.row_stride;
        block.out_head_stride = out_.head_stride;
        if (lse_) {
            block.lse = lse_.head(at.b, std::int64_t{at.h} * group_);
            block.lse_row_stride = 1;
            block.lse_head_stride = lse_.head_stride;
        }
        block.count = sequences_.length_of(at.b);
        block.group = group_;
        block.first = sequences_.start_of(at.b);
        return block;
    }

    compute_t<T>* partial_out(std::int64_t i) const {
        return reinterpret_cast<compute_t<T>*>(partials_ +
                                               static_cast<std::size_t>(i) * (plan_.out + plan_.lse));
    }
    float* partial_lse(std::int64_t i) const {
        return reinterpret_cast<float*>(partials_ + static_cast<std::size_t>(i) * (plan_.out + plan_.lse) +
                                        plan_.out);
    }

    void task(std::int64_t i, std::int32_t split, void* scratch) const {
        const place at = place_of(i);
        if (at.begin >= at.end) {
            return;
        }
        const query_block<T> block = block_of(at);
        key_segment<T> segments[2];
        segments[0] = segment_of(past_, at.b, at.h, past_.first,
                                 past_.lengths != nullptr ? past_.lengths[at.b] : past_.k.length);
        if (self_ != nullptr) {
            segments[1] = segment_of(*self_, at.b, at.h, block.first, block.count);
        }
        const int count = self_ != nullptr ? 2 : 1;
        if (sequences_.cu_seqlens != nullptr) {
            packed(at, block, segments[0], scratch);
        } else if (plan_.splits == 1) {
            attend_head<T>(ctx_.instructions(), shape_, segments, count, block, at.begin, at.end, scratch);
        } else {
            const std::int64_t rows = std::int64_t{segments[0].count} + segments[1].count;
            const std::int64_t step = (rows + plan_.splits - 1) / plan_.splits;
            const std::int64_t first_row = split * std::int64_t{at.end - at.begin} * group_;
            attend_head_split<T>(ctx_.instructions(), shape_, segments, count, block, at.begin, at.end,
                                 split * step, (split + 1) * step,
                                 partial_out(i) + first_row * shape_.head_dim_vo, partial_lse(i) + first_row,
                                 scratch);
        }
    }

    /// Queries that fall into several packed segments go segment by segment.
    void packed(const place& at, const query_block<T>& block, const key_segment<T>& segment,
                void* scratch) const {
        const std::int32_t* edges = sequences_.cu_seqlens;
        const std::int32_t* edge = std::upper_bound(edges, edges + sequences_.segments + 1, at.begin) - 1;
        for (std::int32_t begin = at.begin; begin < at.end; ++edge) {
            const std::int32_t end = std::min(at.end, edge[1]);
            if (begin == end) {
                continue;
            }
            const key_segment<T> own = part_of(segment, *edge, std::min(edge[1], segment.count));
            attend_head<T>(ctx_.instructions(), shape_, &own, 1, block, begin, end, scratch);
            begin = end;
        }
    }

    const host& ctx_;
    attention_shape shape_;
    rows_view<const T> q_;
    const kv_view<T>& past_;
    const kv_view<T>* self_;
    const Sequences& sequences_;
    rows_view<T> out_;
    plane_view<float> lse_;
    attend_plan<T> plan_;
    std::int32_t group_;
    std::byte* scratch_;
    std::byte* partials_;
};

template <class T>
attend_plan<T> checked_plan(const AttentionParams& attention, const rows_view<const T>& q,
                            const kv_view<T>& past, const kv_view<T>* self, const Sequences& sequences) {
    checks::check_attend(attention, q, past, self, sequences);
    return plan_of(resolve(attention, q, past), q, past, self, sequences);
}

template <class T>
void attend(const host& ctx, const AttentionParams& attention, const rows_view<const T>& q,
            const kv_view<T>& past, const kv_view<T>* self, const Sequences& sequences,
            const rows_view<T>& out, const plane_view<float>& lse, workspace_view workspace) {
    const attend_plan<T> plan = checked_plan(attention, q, past, self, sequences);
    checks::check_results(q, past.v.dim, out, lse);
    checks::check_workspace(workspace, plan.bytes(ctx.threads()));
    if (plan.heads * plan.tiles == 0) {
        return;
    }
    attend_call<T>(ctx, resolve(attention, q, past), q, past, self, sequences, out, lse, plan, workspace.data)
        .run();
}

}  // namespace host_backend

template <Storage T, class Dims>
std::size_t attend_workspace_bytes(const host& ctx, const AttentionParams& attention, input_rows<T> q,
                                   const kv_view<T>& all, const Sequences& sequences, const AttendOptions&) {
    return host_backend::checked_plan<T>(attention, q, all, nullptr, sequences).bytes(ctx.threads());
}

template <Storage T, class Dims>
std::size_t attend_workspace_bytes(const host& ctx, const AttentionParams& attention, input_rows<T> q,
                                   const kv_view<T>& past, const kv_view<T>& self, const Sequences& sequences,
                                   const AttendOptions&) {
    return host_backend::checked_plan<T>(attention, q, past, &self, sequences).bytes(ctx.threads());
}

template <Storage T, class Dims>
void attend(const host& ctx, const AttentionParams& attention, input_rows<T> q, const kv_view<T>& all,
            const Sequences& sequences, output_rows<T> out, plane_view<float> lse, workspace_view workspace,
            const AttendOptions& options) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return host_backend::attend<T>(ctx, attention, q, all, nullptr, repaired.sequences, out, lse,
                                       workspace);
    }
    host_backend::attend<T>(ctx, attention, q, all, nullptr, sequences, out, lse, workspace);
}

template <Storage T, class Dims>
void attend(const host& ctx, const AttentionParams& attention, input_rows<T> q, const kv_view<T>& past,
            const kv_view<T>& self, const Sequences& sequences, output_rows<T> out, plane_view<float> lse,
            workspace_view workspace, const AttendOptions& options) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return host_backend::attend<T>(ctx, attention, q, past, &self, repaired.sequences, out, lse,
                                       workspace);
    }
    host_backend::attend<T>(ctx, attention, q, past, &self, sequences, out, lse, workspace);
}

}  // namespace kvpolicy

#include <kvpolicy/attention/host/host_attend_backward.hpp>
