// Expiries under a budget that the heads of a layer share, on the host.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/host/segments.hpp>
#include <kvpolicy/masks/shared_top_k_set.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// Everything that a call keeps in its workspace: the numbers of the heads, and a set per sequence.
template <class P>
struct shared_workspace {
    detail::shared_sizes sizes;
    std::size_t params_bytes, set_bytes;

    shared_workspace(const P& policy, const Sequences& sequences, std::int32_t heads, std::int32_t layer) {
        for (std::int32_t h = 0; h < heads; ++h) {
            sizes.add(policy.params(layer, h), sequences.length);
        }
        params_bytes = detail::aligned_size(static_cast<std::size_t>(heads) * sizeof(HeadParams));
        set_bytes = detail::shared_top_k_set::bytes(sizes);
    }
    [[nodiscard]] std::size_t bytes(std::int32_t batch) const {
        return params_bytes + static_cast<std::size_t>(batch) * set_bytes + detail::alignment;
    }
};

/// Expiries of one segment of all heads of sequence b, relative to the segment of tokens [begin, end).
template <class P>
void shared_segment_expiry(const P& policy, const detail::shared_layer& layer, detail::shared_top_k_set& held,
                           plane_view<const float> scores, plane_view<expiry_t> expiry, std::int64_t b,
                           std::int32_t begin, std::int32_t end) {
    const std::int32_t length = end - begin;
    for (std::int32_t h = 0; h < layer.heads; ++h) {
        const HeadParams& head_params = layer.all_params[h];
        expiry_t* const out = expiry.head(b, h) + begin;
        for (std::int32_t t = 0; t < length; ++t) {
            const bool forever = t < head_params.sinks || policy.keeps(t);
            out[t] = forever ? never : window_expiry(t, head_params.window);
        }
    }
    const auto gate = policy.gate();
    detail::shared_entry evicted{};
    for (std::int32_t q = 1; q < length; ++q) {
        for (std::int32_t h = 0; h < layer.heads; ++h) {
            const HeadParams& head_params = layer.all_params[h];
            const std::int64_t t = std::int64_t{q} - head_params.window;
            if (t < head_params.sinks || policy.keeps(t)) {
                continue;
            }
            const float score = scores.head(b, h)[begin + t];
            if (!gate.open(score, head_params)) {
                continue;
            }
            expiry.head(b, h)[begin + t] = never;
            if (held.update({t, score, h, 0}, q, evicted)) {
                expiry.head(b, evicted.head)[begin + evicted.position] = q;
            }
        }
    }
}

/// build_mask, whose arguments have been checked.
template <class P>
void build_shared_mask(const host& ctx, const P& policy, plane_view<const float> scores,
                       const Sequences& sequences, plane_view<expiry_t> expiry, workspace_view workspace,
                       std::int32_t of_layer, position_t limit) {
    const std::int32_t heads = expiry.heads;
    const shared_workspace<P> parts(policy, sequences, heads, of_layer);
    std::byte* const memory = detail::aligned(workspace.data);
    auto* const all_params = reinterpret_cast<HeadParams*>(memory);
    for (std::int32_t h = 0; h < heads; ++h) {
        all_params[h] = policy.params(of_layer, h);
    }
    const detail::shared_layer layer{all_params, heads, parts.sizes.top_k_slots,
                                     heads == 0 || policy.has_static_shared_order(of_layer, heads)};
    ctx.parallel_for(sequences.batch, [&](std::int64_t b) {
        std::byte* const mine = memory + parts.params_bytes + static_cast<std::size_t>(b) * parts.set_bytes;
        for_each_segment<P>(
            sequences, static_cast<std::int32_t>(b), [&](std::int32_t begin, std::int32_t end) {
                detail::shared_top_k_set held(mine, parts.sizes, layer, limit, 0, end - begin);
                shared_segment_expiry(policy, layer, held, scores, expiry, b, begin, end);
                for (std::int32_t h = 0; sequences.cu_seqlens != nullptr && h < heads; ++h) {
                    expiry_t* const out = expiry.head(b, h) + begin;
                    for (std::int32_t t = 0; t < end - begin; ++t) {
                        out[t] =
                            static_cast<expiry_t>(std::min<std::int64_t>(end, std::int64_t{out[t]} + begin));
                    }
                }
            });
    });
}

}  // namespace kvpolicy::host_backend
