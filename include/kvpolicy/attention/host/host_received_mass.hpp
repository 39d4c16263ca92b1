// Body of attention/received_mass.hpp on the host.
#pragma once

#include <kvpolicy/attention/host/host_future_mass.hpp>
#include <kvpolicy/attention/host/mass_pass.hpp>
#include <kvpolicy/attention/received_mass.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <limits>

namespace kvpolicy {

namespace host_backend {

/// The keys that a mask shows to query i, key t at position t.
struct sees_mask {
    const expiry_t* expiry;  // null: all live on
    const float* log_bias;   // null: none
    std::int32_t bias_from;

    [[nodiscard]] static std::int32_t count(std::int32_t i) { return i + 1; }
    template <class Real>
    Real operator()(std::int32_t i, std::int32_t t, Real logit) const {
        if (expiry != nullptr && i >= expiry[t]) {
            return -std::numeric_limits<Real>::infinity();
        }
        return log_bias != nullptr && i - t >= bias_from ? logit + static_cast<Real>(log_bias[t]) : logit;
    }
};

/// Workspace of one thread: pointers to the keys, sums, and what a pass needs.
template <Storage T>
struct mass_memory {
    const T** key;
    double* sum;
    std::byte* scratch;
    std::size_t bytes;

    mass_memory(void* data, std::int32_t dim, std::int32_t keys) {
        detail::arena memory(data);
        key = memory.take<const T*>(static_cast<std::size_t>(keys));
        sum = memory.take<double>(static_cast<std::size_t>(keys));
        scratch = memory.take<std::byte>(mass_scratch<T>(nullptr, dim, keys).bytes);
        bytes = detail::aligned_size(memory.bytes());
    }
};

}  // namespace host_backend

template <Storage T>
std::size_t received_mass_workspace_bytes(const host& ctx, rows_view<const T> q, input_rows<T> k) {
    checks::check_mass_heads(q, k);
    return static_cast<std::size_t>(ctx.threads()) *
               host_backend::mass_memory<T>(nullptr, q.dim, q.length).bytes +
           detail::alignment;
}

template <Storage T, class Dims>
void received_mass(const host& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                   const mask_view& mask, const Sequences& sequences, plane_view<float> mass,
                   workspace_view workspace, const ReceivedMassOptions& options) {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return received_mass<T, Dims>(ctx, attention, q, k, mask, repaired.sequences, mass, workspace,
                                      options);
    }
    checks::check_attention(attention);
    checks::check_mass_shapes(q, k, sequences);
    detail::require(options.queries >= 0, "queries", options.queries, "0 or more, or kvpolicy::unlimited");
    checks::check_plane("mass", mass, q.batch, k.heads, sequences.length);
    if (mask.expiry) {
        checks::check_plane("mask.expiry", mask.expiry, q.batch, k.heads, sequences.length);
    }
    if (mask.log_bias) {
        checks::check_plane("mask.log_bias", mask.log_bias, q.batch, k.heads, sequences.length);
    }
    checks::check_workspace(workspace, received_mass_workspace_bytes<T>(ctx, q, k));
    const hb::attention_shape shape = hb::valueless_shape(attention, q.dim);
    const std::int32_t group = q.heads / k.heads;
    const std::size_t each = hb::mass_memory<T>(nullptr, q.dim, q.length).bytes;
    std::byte* const memory = detail::aligned(workspace.data);
    ctx.parallel_for(std::int64_t{q.batch} * k.heads, [&](std::int64_t task, int thread) {
        const std::int64_t b = task / k.heads, h = task % k.heads;
        const std::int32_t length = sequences.length_of(b);
        const hb::mass_memory<T> mine(memory + static_cast<std::size_t>(thread) * each, q.dim, q.length);
        for (std::int32_t t = 0; t < length; ++t) {
            mine.key[t] = k.row(b, h, t);
            mine.sum[t] = 0.0;
        }
        hb::mass_queries<T> queries;
        queries.q = q.row(b, h * group, 0);
        queries.row_stride = q.row_stride;
        queries.head_stride = q.head_stride;
        queries.begin = options.queries < length ? length - options.queries : 0;
        queries.end = length;
        queries.group = group;
        const hb::sees_mask seen{mask.expiry ? mask.expiry.head(b, h) : nullptr,
                                 mask.log_bias ? mask.log_bias.head(b, h) : nullptr, mask.bias_from_of(h)};
        hb::add_mass(ctx.instructions(), shape, options.aggregate, queries, mine.key, seen, mine.sum,
                     mine.scratch, q.length);
        std::transform(mine.sum, mine.sum + length, mass.head(b, h),
                       [](double x) { return static_cast<float>(x); });
    });
}

}  // namespace kvpolicy
