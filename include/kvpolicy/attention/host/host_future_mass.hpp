// Bodies of attention/future_mass.hpp on the host: the tiles of kernel.hpp without values.
#pragma once

#include <kvpolicy/attention/check_future_mass.hpp>
#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/attention/host/kernel.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace kvpolicy {

namespace host_backend {

/// The numbers of a pass without values.
inline attention_shape valueless_shape(const AttentionParams& attention, std::int32_t head_dim_qk) {
    attention_shape shape;
    shape.head_dim_qk = head_dim_qk;
    shape.head_dim_vo = 0;
    shape.scale =
        attention.sm_scale != 0.0f ? attention.sm_scale : 1.0f / std::sqrt(static_cast<float>(head_dim_qk));
    shape.logits_soft_cap = attention.logits_soft_cap;
    return shape;
}

template <class T>
std::size_t mass_scratch_bytes(const attention_shape& shape) {
    return detail::aligned_size(attend_scratch_bytes<T>(shape, 1, attend_tile<T>(shape, 1)));
}

/// Log-sums of one query head for keys [begin, end): out[t - begin] = log sum_d exp(beta (logit - lse_d)), or
/// the largest exponent for beta = infinity. `bias` is -beta lse, the last query first.
template <class T>
void mass_tile(isa set, const attention_shape& shape, const T* q_last, std::int64_t q_stride, const T* k,
               std::int64_t k_stride, const float* bias, const expiry_t* expiry, std::int32_t length,
               std::int32_t window, bool largest, std::int32_t begin, std::int32_t end, float* out,
               void* scratch) {
    // Query d is a "key" at position -d, so key t at position -(t + w) sees it iff d >= t + w; going through
    // the queries backwards keeps positions rising. The look-ahead ends it: visible while -(t + w) < -d + L +
    // 1.
    key_segment<T> queries;
    queries.k = q_last;
    queries.k_stride = -q_stride;
    queries.count = length;
    queries.first = -(length - 1);
    queries.expiry = expiry;
    queries.log_bias = bias;
    queries.bias_from = 0;  // at once
    // Key t of the tile is row (end - 1 - t), so that its position rises with the row.
    query_block<T> keys;
    keys.q = k + (std::int64_t{end} - 1) * k_stride;
    keys.row_stride = -k_stride;
    keys.count = end - begin;
    keys.first = -(end - 1 + window);
    const std::int32_t tile = attend_tile<T>(shape, 1);
    with_kernels<T>(set, [&](auto kernels) {
        for (std::int32_t row = 0; row < keys.count; row += tile) {
            const std::int32_t rows = std::min(tile, keys.count - row);
            tile_pass<decltype(kernels), T> pass(shape, keys, row, row + rows, scratch);
            pass.run(segments_in(&queries, 1), 0, length);
            for (std::int32_t r = 0; r < rows; ++r) {
                out[end - 1 - begin - (row + r)] = largest ? pass.largest(r) : pass.log_sum(r);
            }
        }
    });
}

/// The target of one KV head from the log-sums of its query heads: [group] rows that lie `stride` apart.
inline void aggregate_mass(const FutureMassOptions& options, std::int32_t length, std::int32_t h,
                           std::int32_t group, const float* log_sums, std::size_t stride, float* out) {
    const bool largest = std::isinf(options.beta);
    const float beta = largest ? 1.0f : options.beta;
    const std::int64_t window = options.window.at(options.layer, h);
    for (std::int64_t t = 0; t < length; ++t) {
        std::int64_t count = std::max<std::int64_t>(1, length - (t + window));
        if (options.look_ahead != unlimited) {
            count = std::min<std::int64_t>(count, std::int64_t{options.look_ahead} + 1);
        }
        const double log_count = options.normalize && !largest ? std::log(static_cast<double>(count)) : 0.0;
        const auto log_mass = [&](std::int64_t g) {
            const float one = log_sums[static_cast<std::size_t>(g) * stride + static_cast<std::size_t>(t)];
            return (static_cast<double>(one) - log_count) / static_cast<double>(beta);
        };
        // In logarithms: masses of keys that an lse does not count may leave the range of numbers.
        double best = -std::numeric_limits<double>::infinity();
        for (std::int64_t g = 0; g < group; ++g) {
            best = std::max(best, log_mass(g));
        }
        double log_all = best;
        if (options.aggregate == group_aggregate::mean) {
            const double from = std::isfinite(best) ? best : 0.0;
            double sum = 0.0;
            for (std::int64_t g = 0; g < group; ++g) {
                sum += std::exp(log_mass(g) - from);
            }
            log_all = from + std::log(sum / static_cast<double>(group));
        }
        const auto epsilon = static_cast<double>(options.epsilon);
        out[t] = static_cast<float>(log_all > 0.0 ? log_all + std::log1p(epsilon * std::exp(-log_all))
                                                  : std::log(epsilon + std::exp(log_all)));
    }
}

}  // namespace host_backend

template <Storage T>
std::size_t future_mass_workspace_bytes(const host& ctx, rows_view<const T> q, input_rows<T> k) {
    namespace hb = host_backend;
    checks::check_mass_heads(q, k);
    const hb::attention_shape shape = hb::valueless_shape({}, q.dim);
    const auto length = static_cast<std::size_t>(q.length);
    const std::size_t heads = static_cast<std::size_t>(q.batch) * static_cast<std::size_t>(q.heads);
    const std::size_t arrays =
        2 * heads * detail::aligned_size(length * sizeof(float)) +  // biases, log-sums
        detail::aligned_size(length * sizeof(expiry_t)) * static_cast<std::size_t>(q.batch);
    return arrays + static_cast<std::size_t>(ctx.threads()) * hb::mass_scratch_bytes<T>(shape) +
           detail::alignment;
}

template <Storage T, class Dims>
void causal_lse(const host& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                const Sequences& sequences, plane_view<float> lse, workspace_view workspace,
                const CausalLseOptions& options) {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return causal_lse<T, Dims>(ctx, attention, q, k, repaired.sequences, lse, workspace, options);
    }
    checks::check_attention(attention);
    checks::check_mass_call(q, k, plane_view<const float>(lse), sequences);
    checks::check_workspace(workspace, future_mass_workspace_bytes<T>(ctx, q, k));
    const hb::attention_shape shape = hb::valueless_shape(attention, q.dim);
    const std::int32_t group = q.heads / k.heads;
    const std::int32_t tile = hb::attend_tile<T>(shape, 1);
    const std::int64_t tiles = (sequences.length + tile - 1) / tile;
    const std::int64_t heads = std::int64_t{q.batch} * q.heads;
    std::byte* memory = detail::aligned(workspace.data);
    ctx.parallel_for(tiles * heads, [&](std::int64_t task, int thread) {
        const auto begin = static_cast<std::int32_t>((tiles - 1 - task / heads) * tile);
        const std::int64_t b = task % heads / q.heads, h = task % q.heads;
        const std::int32_t length = sequences.length_of(b);
        if (begin >= length) {
            return;
        }
        hb::key_segment<T> keys;
        keys.k = k.row(b, h / group, 0);
        keys.k_stride = k.row_stride;
        keys.count = length;
        hb::query_block<T> block;
        block.q = q.row(b, h, 0);
        block.row_stride = q.row_stride;
        block.lse = lse.head(b, h);
        block.lse_row_stride = 1;
        block.count = length;
        hb::attend_head(ctx.instructions(), shape, &keys, 1, block, begin, std::min(length, begin + tile),
                        memory + static_cast<std::size_t>(thread) * hb::mass_scratch_bytes<T>(shape));
    });
}

template <Storage T, class Dims>
void future_mass(const host& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                 plane_view<const float> lse, const Sequences& sequences, plane_view<float> target,
                 workspace_view workspace, const FutureMassOptions& options) {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return future_mass<T, Dims>(ctx, attention, q, k, lse, repaired.sequences, target, workspace,
                                    options);
    }
    checks::check_attention(attention);
    checks::check_mass_call(q, k, lse, sequences);
    checks::check_plane("target", target, q.batch, k.heads, sequences.length);
    checks::check_mass_options(options, k.heads);
    checks::check_workspace(workspace, future_mass_workspace_bytes<T>(ctx, q, k));

    const bool largest = std::isinf(options.beta);
    const float beta = largest ? 1.0f : options.beta;
    hb::attention_shape shape = hb::valueless_shape(attention, q.dim);
    shape.scale *= beta;
    shape.logits_soft_cap *= beta;  // beta cap tanh(x / cap) = (beta cap) tanh(beta x / (beta cap))

    const std::int64_t heads = std::int64_t{q.batch} * q.heads;
    const std::size_t row = detail::aligned_size(static_cast<std::size_t>(q.length) * sizeof(float));
    std::byte* memory = detail::aligned(workspace.data);
    const auto bias_of = [&](std::int64_t head) {
        return reinterpret_cast<float*>(memory + static_cast<std::size_t>(head) * row);
    };
    const auto sums_of = [&](std::int64_t head) { return bias_of(heads + head); };
    const auto expiry_of = [&](std::int64_t b) {
        return reinterpret_cast<expiry_t*>(bias_of(2 * heads + b));
    };
    std::byte* scratch = memory + static_cast<std::size_t>(2 * heads + q.batch) * row;

    ctx.parallel_for(heads, [&](std::int64_t head) {
        const std::int64_t b = head / q.heads;
        const std::int32_t length = sequences.length_of(b);
        const float* of_queries = lse.head(b, head % q.heads);
        float* bias = bias_of(head);
        for (std::int32_t r = 0; r < length; ++r) {
            const float one = of_queries[length - 1 - r];
            bias[r] = std::isinf(one) && one < 0.0f ? one : -beta * one;
        }
        if (head % q.heads == 0 && options.look_ahead != unlimited) {
            for (std::int32_t r = 0; r < length; ++r) {
                const std::int64_t end = std::int64_t{r} - (length - 1) + options.look_ahead + 1;
                expiry_of(b)[r] = static_cast<expiry_t>(std::min<std::int64_t>(end, never));
            }
        }
    });

    const std::int32_t group = q.heads / k.heads;
    const std::int32_t tile = hb::attend_tile<T>(shape, 1);
    const std::int64_t tiles = (sequences.length + tile - 1) / tile;
    ctx.parallel_for(tiles * heads, [&](std::int64_t task, int thread) {
        const auto begin =
            static_cast<std::int32_t>(task / heads * tile);  // early keys have the most queries
        const std::int64_t head = task % heads, b = head / q.heads, h = head % q.heads;
        const std::int32_t length = sequences.length_of(b);
        if (begin >= length) {
            return;
        }
        // A window beyond the sequence hides all of it; how far beyond does not matter, and does not fit in
        // 32 bits.
        const std::int32_t window =
            std::min(options.window.at(options.layer, static_cast<std::int32_t>(h / group)), length);
        hb::mass_tile(ctx.instructions(), shape, q.row(b, h, length - 1), q.row_stride,
                      k.row(b, h / group, 0), k.row_stride, bias_of(head),
                      options.look_ahead == unlimited ? nullptr : expiry_of(b), length, window, largest,
                      begin, std::min(length, begin + tile), sums_of(head) + begin,
                      scratch + static_cast<std::size_t>(thread) * hb::mass_scratch_bytes<T>(shape));
    });

    ctx.parallel_for(std::int64_t{q.batch} * k.heads, [&](std::int64_t kv) {
        const std::int64_t b = kv / k.heads, h = kv % k.heads;
        hb::aggregate_mass(options, sequences.length_of(b), static_cast<std::int32_t>(h), group,
                           sums_of(b * q.heads + h * group), row / sizeof(float), target.head(b, h));
    });
}

}  // namespace kvpolicy
