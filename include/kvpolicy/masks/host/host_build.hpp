// Bodies of masks/build.hpp on the host.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/masks/check_cutoffs.hpp>
#include <kvpolicy/masks/host/segments.hpp>
#include <kvpolicy/masks/host/shared_expiry.hpp>
#include <kvpolicy/masks/top_k_set.hpp>

#include <algorithm>
#include <string>

namespace kvpolicy {

namespace host_backend {

/// Looks for NaN among the scores that a call reads: reports them in options.status, or refuses the first.
template <class P, class Real>
void check_scores(const P& policy, const plane_view<const Real>& scores, const Sequences& sequences,
                  const MaskOptions& options) {
    if (options.nan_ranks_last && options.status == nullptr) {
        return;
    }
    for (std::int32_t b = 0; b < sequences.batch; ++b) {
        for (std::int32_t h = 0; h < scores.heads; ++h) {
            const Real* score = scores.head(b, h);
            const HeadParams head_params = policy.params(options.layer, h);
            for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
                for_each_leaver(policy, head_params, end - begin, [&](std::int32_t at, std::int32_t) {
                    const std::int32_t t = begin + at;
                    static_cast<void>(checks::is_number("scores", b, h, t, score[t], options.status));
                });
            });
        }
    }
}

template <class P>
void check_mask_call(const P& policy, plane_view<const float> scores, const Sequences& sequences,
                     std::int32_t batch, std::int32_t heads, std::int32_t length, std::int32_t layer) {
    static_assert(!P::observed,
                  "kvpolicy: build_mask needs scores that do not change with every query; "
                  "build_observed_mask takes policies that rank keys by the attention they receive");
    policy.check_layer(layer, heads);
    checks::check_whole_sequences(sequences, batch, length);
    if constexpr (P::ranked) {
        detail::require(static_cast<bool>(scores) || length == 0, "scores.data", "null",
                        "fp32 scores, since this policy ranks keys");
        if (scores.batch != batch || scores.heads != heads || scores.length < sequences.length) {
            detail::refuse(
                "scores", detail::text(scores.batch, " x ", scores.heads, " x ", scores.length),
                detail::text(batch, " x ", heads, " x at least ", sequences.length, ", as the output"));
        }
    }
}

/// The most top-k slots that a segment of a head may use.
inline std::size_t top_k_capacity(const HeadParams& head_params, const Sequences& sequences) {
    const std::int64_t competitors =
        std::max<std::int64_t>(0, std::int64_t{sequences.length} - head_params.sinks - head_params.window);
    return head_params.budget == unlimited
               ? 0
               : static_cast<std::size_t>(detail::top_k_set::capacity(head_params, competitors));
}

/// Bytes that the top-k set of any head needs.
template <class P>
std::size_t top_k_bytes(const P& policy, const Sequences& sequences, std::int32_t heads, std::int32_t layer) {
    std::size_t most = 0;
    if constexpr (P::has_budget) {
        for (std::int32_t h = 0; h < heads; ++h) {
            const HeadParams head_params = policy.params(layer, h);
            most =
                std::max(most, detail::top_k_set::bytes(head_params, top_k_capacity(head_params, sequences)));
        }
    }
    return most;
}

/// Expiries of one segment of one head, relative to the segment.
template <class P>
void segment_expiry(const P& policy, const HeadParams& head_params, const float* score, std::int32_t length,
                    expiry_t* expiry, std::byte* memory, std::size_t top_k_slots, position_t limit) {
    for (std::int32_t t = 0; t < length; ++t) {
        bool forever = t < head_params.sinks;
        if constexpr (P::has_keep) {
            forever = forever || policy.keeps(t);
        }
        expiry[t] = forever ? never : window_expiry(t, head_params.window);
    }
    if constexpr (P::ranked) {
        detail::top_k_set slots(memory, top_k_slots, head_params, limit, 0, length);
        const auto gate = policy.gate();
        for_each_leaver(policy, head_params, length, [&](std::int32_t t, std::int32_t q) {
            if (!gate.open(score[t], head_params)) {
                return;
            }
            if (head_params.budget == unlimited) {
                expiry[t] = never;
                return;
            }
            const auto outcome = slots.update(t, score[t], t, q);
            if (outcome.kind != detail::top_k_outcome::refused) {
                expiry[t] = never;
            }
            if (outcome.kind == detail::top_k_outcome::replaced) {
                expiry[outcome.lost] = q;
            }
        });
    }
}

/// build_mask of policies whose heads do not share a budget; the arguments have been checked.
template <class P>
void build_mask_by_head(const host& ctx, const P& policy, plane_view<const float> scores,
                        const Sequences& sequences, plane_view<expiry_t> expiry, workspace_view workspace,
                        const MaskOptions& options) {
    const std::int32_t heads = expiry.heads;
    const std::size_t bytes = top_k_bytes(policy, sequences, heads, options.layer);
    std::byte* const memory = bytes == 0 ? nullptr : detail::aligned(workspace.data);
    // One task per sequence and head.
    ctx.parallel_for(std::int64_t{sequences.batch} * heads, [&](std::int64_t task) {
        const auto b = static_cast<std::int32_t>(task / heads);
        const auto h = static_cast<std::int32_t>(task % heads);
        const HeadParams head_params = policy.params(options.layer, h);
        for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
            const float* score = P::ranked ? scores.head(b, h) + begin : nullptr;
            expiry_t* out = expiry.head(b, h) + begin;
            segment_expiry(policy, head_params, score, end - begin, out,
                           memory == nullptr ? nullptr : memory + static_cast<std::size_t>(task) * bytes,
                           top_k_capacity(head_params, sequences), options.rebase_limit);
            if (sequences.cu_seqlens != nullptr) {
                for (std::int32_t t = 0; t < end - begin; ++t) {
                    out[t] = static_cast<expiry_t>(std::min<std::int64_t>(end, std::int64_t{out[t]} + begin));
                }
            }
        });
    });
}

}  // namespace host_backend

template <AnyPolicy P>
std::size_t build_mask_workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                       std::int32_t heads, const MaskOptions& options) {
    checks::check_shape(sequences, heads);
    policy.check_layer(options.layer, heads);
    if constexpr (P::shares_budget) {
        return host_backend::shared_workspace<P>(policy, sequences, heads, options.layer)
            .bytes(sequences.batch);
    } else {
        const std::size_t bytes = host_backend::top_k_bytes(policy, sequences, heads, options.layer);
        const auto tasks = static_cast<std::size_t>(sequences.batch) * static_cast<std::size_t>(heads);
        return bytes == 0 ? 0 : tasks * bytes + detail::alignment;
    }
}

template <AnyPolicy P>
void build_mask(const host& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                plane_view<expiry_t> expiry, workspace_view workspace, const MaskOptions& options) {
    static_assert(
        !P::has_eviction,
        "kvpolicy: a policy with an eviction part decides by queries, so only a cache knows its lifetimes");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return build_mask(ctx, policy, scores, repaired.sequences, expiry, workspace, options);
    }
    const std::int32_t heads = expiry.heads;
    host_backend::check_mask_call(policy, scores, sequences, expiry.batch, heads, expiry.length,
                                  options.layer);
    checks::check_plane("expiry", expiry, expiry.batch, heads, sequences.length);
    detail::require(options.rebase_limit >= 1 && options.rebase_limit <= rebase_limit, "rebase_limit",
                    options.rebase_limit, "1 to 2^29");
    if constexpr (P::ranked) {
        host_backend::check_scores(policy, scores, sequences, options);
    }
    checks::check_workspace(workspace, build_mask_workspace_bytes(ctx, policy, sequences, heads, options));
    if constexpr (P::shares_budget) {
        host_backend::build_shared_mask(ctx, policy, scores, sequences, expiry, workspace, options.layer,
                                        options.rebase_limit);
    } else {
        host_backend::build_mask_by_head(ctx, policy, scores, sequences, expiry, workspace, options);
    }
}

template <Cutoff C, AnyPolicy P>
std::size_t build_cutoffs_workspace_bytes(const host&, const P&, const Sequences& sequences,
                                          std::int32_t heads, const MaskOptions&) {
    checks::check_shape(sequences, heads);
    const auto length = static_cast<std::size_t>(sequences.length);
    const std::size_t per_head = detail::aligned_size(length * sizeof(double)) +
                                 detail::aligned_size(length * sizeof(std::int32_t)) +
                                 detail::aligned_size(C::scratch_bytes(sequences.length));
    return static_cast<std::size_t>(sequences.batch) * static_cast<std::size_t>(heads) * per_head +
           detail::alignment;
}

template <Cutoff C, AnyPolicy P>
void build_cutoffs(const host& ctx, const P& policy, plane_view<const float> scores,
                   const Sequences& sequences, plane_view<std::int32_t> rank, plane_view<std::int32_t> cutoff,
                   workspace_view workspace, const MaskOptions& options) {
    static_assert(P::has_budget && !P::shares_budget,
                  "kvpolicy: build_cutoffs needs a policy with a TopKBudget");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return build_cutoffs<C>(ctx, policy, scores, repaired.sequences, rank, cutoff, workspace, options);
    }
    const std::int32_t layer = options.layer;
    const std::int32_t heads = rank.heads;
    host_backend::check_mask_call(policy, scores, sequences, rank.batch, heads, rank.length, layer);
    checks::check_plane("rank", rank, rank.batch, heads, sequences.length);
    checks::check_plane("cutoff", cutoff, rank.batch, heads, sequences.length);
    checks::check_one_segment(sequences);
    checks::check_static_ranks(policy, sequences, heads, layer);
    host_backend::check_scores(policy, scores, sequences, options);
    checks::check_workspace(workspace, build_cutoffs_workspace_bytes<C>(ctx, policy, sequences, heads));
    const auto capacity = static_cast<std::size_t>(sequences.length);
    const std::size_t value_bytes = detail::aligned_size(capacity * sizeof(double));
    const std::size_t order_bytes = detail::aligned_size(capacity * sizeof(std::int32_t));
    const std::size_t per_head =
        value_bytes + order_bytes + detail::aligned_size(C::scratch_bytes(sequences.length));
    std::byte* memory = detail::aligned(workspace.data);
    ctx.parallel_for(std::int64_t{sequences.batch} * heads, [&](std::int64_t task) {
        const std::int64_t b = task / heads;
        const auto h = static_cast<std::int32_t>(task % heads);
        const std::int32_t length = sequences.length_of(b);
        const HeadParams head_params = policy.params(layer, h);
        const auto gate = policy.gate();
        std::byte* mine = memory + static_cast<std::size_t>(task) * per_head;
        auto* value = reinterpret_cast<double*>(mine);
        auto* order = reinterpret_cast<std::int32_t*>(mine + value_bytes);
        std::int32_t* ranks = rank.head(b, h);
        std::fill_n(ranks, length, no_rank);
        std::int32_t competing = 0;
        const float* score = scores.head(b, h);
        host_backend::for_each_leaver(policy, head_params, length, [&](std::int32_t t, std::int32_t) {
            if (!gate.open(score[t], head_params)) {
                return;
            }
            value[t] = static_priority(score[t], head_params.log_gamma, t);
            order[competing++] = t;
        });
        std::sort(order, order + competing,
                  [&](std::int32_t a, std::int32_t c) { return ranks_before(value[a], a, value[c], c); });
        for (std::int32_t i = 0; i < competing; ++i) {
            ranks[order[i]] = i;
        }
        C{}(ranks, length, head_params, cutoff.head(b, h), mine + value_bytes + order_bytes);
    });
}

template <AnyPolicy P>
std::size_t expiry_from_cutoffs_workspace_bytes(const host&, const P&, const Sequences& sequences,
                                                std::int32_t heads, const MaskOptions&) {
    checks::check_shape(sequences, heads);
    return 0;
}

template <AnyPolicy P>
void expiry_from_cutoffs(const host& ctx, const P& policy, plane_view<const std::int32_t> rank,
                         plane_view<const std::int32_t> cutoff, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace, const MaskOptions& options) {
    static_assert(!P::shares_budget, "kvpolicy: expiry_from_cutoffs takes cutoffs of single heads");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return expiry_from_cutoffs(ctx, policy, rank, cutoff, repaired.sequences, expiry, workspace, options);
    }
    const std::int32_t layer = options.layer;
    const std::int32_t heads = expiry.heads;
    policy.check_layer(layer, heads);
    checks::check_whole_sequences(sequences, expiry.batch, expiry.length);
    detail::require(sequences.cu_seqlens == nullptr, "sequences.cu_seqlens", "given",
                    "null (build_mask takes packed segments)");
    checks::check_plane("rank", rank, expiry.batch, heads, sequences.length);
    checks::check_plane("cutoff", cutoff, expiry.batch, heads, sequences.length);
    checks::check_plane("expiry", expiry, expiry.batch, heads, sequences.length);
    ctx.parallel_for(std::int64_t{sequences.batch} * heads, [&](std::int64_t task) {
        const std::int64_t b = task / heads;
        const auto h = static_cast<std::int32_t>(task % heads);
        const std::int32_t length = sequences.length_of(b);
        const HeadParams head_params = policy.params(layer, h);
        const std::int32_t* ranks = rank.head(b, h);
        const std::int32_t* cutoffs = cutoff.head(b, h);
        expiry_t* out = expiry.head(b, h);
        for (std::int32_t t = 0; t < length; ++t) {
            bool forever = t < head_params.sinks;
            if constexpr (P::has_keep) {
                forever = forever || policy.keeps(t);
            }
            out[t] = forever ? never : host_backend::window_expiry(t, head_params.window);
            if (forever || ranks[t] == no_rank) {
                continue;
            }
            // The first query, from t + w on, whose cutoff is better than this key's rank.
            const std::int32_t* first = std::partition_point(cutoffs + out[t], cutoffs + length,
                                                             [&](std::int32_t c) { return c >= ranks[t]; });
            out[t] = first == cutoffs + length ? never : static_cast<expiry_t>(first - cutoffs);
        }
    });
}

}  // namespace kvpolicy
