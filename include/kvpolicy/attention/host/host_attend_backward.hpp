// Bodies of attend_backward on the host: checks, tasks, and sums of keys over tasks.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/check_attend.hpp>
#include <kvpolicy/attention/check_attend_backward.hpp>
#include <kvpolicy/attention/host/backward_tile.hpp>
#include <kvpolicy/attention/host/host_attend.hpp>
#include <kvpolicy/attention/host/kernel.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>

namespace kvpolicy {

namespace host_backend {

/// How a call is cut: every KV head's tiles of queries are dealt out to `splits` tasks, each with sums of the
/// keys of its own, which are then added up in order. Sizes decide, never the number of threads.
template <Storage T>
struct backward_plan {
    using real = compute_t<T>;
    std::int32_t tile, tiles, splits, rows, columns_k, columns_v, group;
    std::int64_t heads;
    std::size_t scratch;

    backward_plan(const attention_shape& shape, const rows_view<const T>& q, const kv_view<T>& all,
                  const Sequences& sequences) {
        constexpr std::int64_t enough = 16;
        group = q.heads / all.k.heads;
        tile = std::min(attend_tile<T>(shape, group), std::max(sequences.length, 1));
        tiles = (sequences.length + tile - 1) / tile;
        heads = std::int64_t{q.batch} * all.k.heads;
        const std::int64_t wanted = heads > 0 ? (enough + heads - 1) / heads : 1;
        splits = static_cast<std::int32_t>(std::clamp<std::int64_t>(wanted, 1, std::max(tiles, 1)));
        rows = all.k.length;
        columns_k = static_cast<std::int32_t>(rounded_up(shape.head_dim_qk, panel_lanes));
        columns_v = static_cast<std::int32_t>(rounded_up(shape.head_dim_vo, panel_lanes));
        scratch = backward_tile<portable_kernels<T>, T>::scratch_bytes(shape, group, tile);
    }

    struct memory {
        std::byte* scratch;
        real *k, *v, *bias;
        std::size_t bytes;
    };
    memory lay_out(void* data, int threads) const {
        detail::arena from(data);
        const auto sums = static_cast<std::size_t>(heads * splits) * static_cast<std::size_t>(rows);
        memory all{};
        all.scratch = from.take<std::byte>(detail::aligned_size(scratch) * static_cast<std::size_t>(threads));
        all.k = from.take<real>(sums * static_cast<std::size_t>(columns_k));
        all.v = from.take<real>(sums * static_cast<std::size_t>(columns_v));
        all.bias = from.take<real>(sums);
        all.bytes = from.bytes();
        return all;
    }
};

/// A checked call.
template <Storage T>
class backward_call {
  public:
    using real = compute_t<T>;

    backward_call(const host& ctx, const attention_shape& shape, const rows_view<const T>& q,
                  const kv_view<T>& all, const Sequences& sequences, const SavedForward<T>& saved,
                  const AttentionGrads<T>& grads, const backward_plan<T>& plan, void* data)
        : ctx_(ctx),
          shape_(shape),
          q_(q),
          all_(all),
          sequences_(sequences),
          saved_(saved),
          grads_(grads),
          plan_(plan),
          memory_(plan.lay_out(data, ctx.threads())) {}

    void run() {
        ctx_.parallel_for(plan_.heads * plan_.splits, [this](std::int64_t i, int thread) {
            task(i / plan_.splits, static_cast<std::int32_t>(i % plan_.splits),
                 memory_.scratch + static_cast<std::size_t>(thread) * detail::aligned_size(plan_.scratch));
        });
        ctx_.parallel_for(plan_.heads, [this](std::int64_t head) { add_up(head); });
    }

  private:
    key_sums<real> sums_of(std::int64_t head, std::int32_t split) const {
        const std::int64_t row = (head * plan_.splits + split) * plan_.rows;
        return {memory_.k + row * plan_.columns_k, memory_.v + row * plan_.columns_v, memory_.bias + row};
    }

    void task(std::int64_t head, std::int32_t split, void* scratch) const {
        const auto b = static_cast<std::int32_t>(head / all_.k.heads),
                   h = static_cast<std::int32_t>(head % all_.k.heads);
        const std::int64_t first = std::int64_t{h} * plan_.group;
        const key_sums<real> sums = sums_of(head, split);
        std::fill_n(sums.k, std::int64_t{plan_.rows} * plan_.columns_k, real(0));
        std::fill_n(sums.v, std::int64_t{plan_.rows} * plan_.columns_v, real(0));
        std::fill_n(sums.bias, plan_.rows, real(0));
        query_block<T> block;
        block.q = q_.row(b, first, 0);
        block.row_stride = q_.row_stride;
        block.head_stride = q_.head_stride;
        block.count = sequences_.length_of(b);
        block.group = plan_.group;
        block.first = sequences_.start_of(b);
        const gradient_block<T> gradients{
            saved_.out.row(b, first, 0),   saved_.out.row_stride,   saved_.out.head_stride,
            saved_.d_out.row(b, first, 0), saved_.d_out.row_stride, saved_.d_out.head_stride,
            saved_.lse.head(b, first),     saved_.lse.head_stride,  grads_.d_q.row(b, first, 0),
            grads_.d_q.row_stride,         grads_.d_q.head_stride};
        const key_segment<T> keys =
            segment_of(all_, b, h, all_.first, all_.lengths != nullptr ? all_.lengths[b] : all_.k.length);
        // Dealt out in turn: with causal keys, late tiles cost more.
        for (std::int32_t i = split; i < plan_.tiles; i += plan_.splits) {
            const std::int32_t end = std::min((i + 1) * plan_.tile, block.count);
            std::int32_t begin = i * plan_.tile;
            if (sequences_.cu_seqlens == nullptr) {
                tile(block, gradients, begin, end, keys, sums, scratch);
                continue;
            }
            const std::int32_t* edges = sequences_.cu_seqlens;
            for (const std::int32_t* edge =
                     std::upper_bound(edges, edges + sequences_.segments + 1, begin) - 1;
                 begin < end; ++edge) {
                const std::int32_t stop = std::min(end, edge[1]);
                if (begin == stop) {
                    continue;
                }
                const key_sums<real> own{sums.k + std::int64_t{*edge} * plan_.columns_k,
                                         sums.v + std::int64_t{*edge} * plan_.columns_v, sums.bias + *edge};
                tile(block, gradients, begin, stop, part_of(keys, *edge, std::min(edge[1], keys.count)), own,
                     scratch);
                begin = stop;
            }
        }
    }

    void tile(const query_block<T>& block, const gradient_block<T>& gradients, std::int32_t begin,
              std::int32_t end, const key_segment<T>& keys, const key_sums<real>& sums, void* scratch) const {
        if (begin >= end) {
            return;
        }
        with_kernels<T>(ctx_.instructions(), [&](auto kernels) {
            backward_tile<decltype(kernels), T>(ctx_.instructions(), shape_, block, gradients, begin, end,
                                                keys, sums, scratch)
                .run();
        });
    }

    void add_up(std::int64_t head) const {
        const std::int64_t b = head / all_.k.heads, h = head % all_.k.heads;
        const std::int32_t count = all_.lengths != nullptr ? all_.lengths[b] : all_.k.length;
        const key_sums<real> total = sums_of(head, 0);
        const auto add = [](real* to, const real* from, std::int64_t numbers) {
            for (std::int64_t i = 0; i < numbers; ++i) {
                to[i] += from[i];
            }
        };
        for (std::int32_t split = 1; split < plan_.splits; ++split) {
            const key_sums<real> part = sums_of(head, split);
            add(total.k, part.k, std::int64_t{count} * plan_.columns_k);
            add(total.v, part.v, std::int64_t{count} * plan_.columns_v);
            add(total.bias, part.bias, count);
        }
        for (std::int64_t t = 0; t < count; ++t) {
            for (std::int32_t c = 0; c < shape_.head_dim_qk; ++c) {
                grads_.d_k.row(b, h, t)[c] = static_cast<T>(total.k[t * plan_.columns_k + c]);
            }
            for (std::int32_t c = 0; c < shape_.head_dim_vo; ++c) {
                grads_.d_v.row(b, h, t)[c] = static_cast<T>(total.v[t * plan_.columns_v + c]);
            }
            if (grads_.d_log_bias) {
                grads_.d_log_bias.head(b, h)[t] = total.bias[t];
            }
        }
    }

    const host& ctx_;
    attention_shape shape_;
    rows_view<const T> q_;
    const kv_view<T>& all_;
    const Sequences& sequences_;
    const SavedForward<T>& saved_;
    const AttentionGrads<T>& grads_;
    backward_plan<T> plan_;
    typename backward_plan<T>::memory memory_;
};

}  // namespace host_backend

template <Storage T, class Dims>
std::size_t attend_backward_workspace_bytes(const host& ctx, const AttentionParams& attention,
                                            input_rows<T> q, const kv_view<T>& all,
                                            const Sequences& sequences, const BackwardOptions&) {
    namespace hb = host_backend;
    checks::check_attend<T>(attention, q, all, nullptr, sequences);
    return hb::backward_plan<T>(hb::resolve(attention, q, all), q, all, sequences)
        .lay_out(nullptr, ctx.threads())
        .bytes;
}

template <Storage T, class Dims>
void attend_backward(const host& ctx, const AttentionParams& attention, input_rows<T> q,
                     const kv_view<T>& all, const Sequences& sequences, const SavedForward<T>& saved,
                     const AttentionGrads<T>& grads, workspace_view workspace,
                     const BackwardOptions& options) {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return attend_backward<T, Dims>(ctx, attention, q, all, repaired.sequences, saved, grads, workspace,
                                        options);
    }
    namespace hb = host_backend;
    const std::size_t needed = attend_backward_workspace_bytes<T, Dims>(ctx, attention, q, all, sequences);
    checks::check_backward_shapes(q, all, saved, grads);
    checks::check_workspace(workspace, needed);
    checks::check_gradient_numbers(ctx, q, all, sequences, saved, options.status);
    const hb::attention_shape shape = hb::resolve(attention, q, all);
    const hb::backward_plan<T> plan(shape, q, all, sequences);
    hb::backward_call<T>(ctx, shape, q, all, sequences, saved, grads, plan, workspace.data).run();
}

}  // namespace kvpolicy
