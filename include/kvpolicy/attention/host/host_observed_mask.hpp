// Body of attention/observed_mask.hpp on the host.
#pragma once

#include <kvpolicy/attention/host/host_future_mass.hpp>
#include <kvpolicy/attention/host/observed_list.hpp>
#include <kvpolicy/attention/observed_mask.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/finite_rows.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>

namespace kvpolicy {

namespace host_backend {

/// The block that begins with token a: chunks within the prompt, single tokens behind it.
inline std::int32_t observed_block_end(const Observation& seen, std::int32_t a, std::int32_t prompt,
                                       std::int32_t length) {
    if (a >= prompt) {
        return a + 1;
    }
    const std::int32_t whole = std::min(prompt, length);
    return seen.chunk == Observation::whole_call || whole - a < seen.chunk ? whole : a + seen.chunk;
}

/// Heads [begin, end) of one sequence, block by block: observe() each head, average where a layer's heads go
/// together, then end_block() each.
template <class P, class T>
struct observed_mask_task {
    isa set;
    const P& policy;
    const ObservedMaskOptions& options;
    attention_shape shape;
    rows_view<const T> q, k;
    plane_view<expiry_t> expiry;
    std::int64_t b;
    std::int32_t begin, end;
    std::byte* lists;    // [heads of the task] of observed_head
    std::byte* scratch;  // mass_scratch of this thread

    void run(std::int32_t length) const {
        const Observation seen = policy.scorer().observation();
        for (std::int32_t h = begin; h < end; ++h) {
            observed_head<T>::make(&head(h), q.length);
            std::fill_n(expiry.head(b, h), length, never);
        }
        for (std::int32_t first = 0, last = 0; first < length; first = last) {
            last = observed_block_end(seen, first, options.prompt, length);
            const bool prompt = first < options.prompt;
            if (!P::scorer_type::evicts_at_steps && !prompt) {
                break;  // what is decoded stays
            }
            for (std::int32_t h = begin; h < end; ++h) {
                observe_block(seen, h, first, last);
            }
            if (seen.whole_layer) {
                average_masses(
                    end - begin, [&](std::int32_t h) -> auto& { return head(h).list; });
            }
            for (std::int32_t h = begin; h < end; ++h) {
                end_block(seen, h, last, prompt);
            }
        }
    }

  private:
    [[nodiscard]] observed_head<T>& head(std::int32_t h) const {
        return observed_head<T>::at(lists +
                                    static_cast<std::size_t>(h - begin) * observed_head<T>::bytes(q.length));
    }
    [[nodiscard]] HeadParams params(std::int32_t h) const { return policy.params(options.layer, h); }

    /// Tokens [first, last) join the list of head h, and the mass that their queries give is measured.
    void observe_block(const Observation& seen, std::int32_t h, std::int32_t first, std::int32_t last) const {
        observed_list<T>& list = head(h).list;
        if (P::scorer_type::evicts_at_steps) {
            evict(seen, h, first, first);
        }
        list.own = list.count;
        for (std::int32_t t = first; t < last; ++t) {
            list.add(k.row(b, h, t), t, 0.0f, first - t - 1);
        }
        const std::int64_t group = q.heads / k.heads;
        mass_queries<T> queries;
        queries.q = q.row(b, h * group, first);
        queries.row_stride = q.row_stride;
        queries.head_stride = q.head_stride;
        queries.end = last - first;
        queries.group = static_cast<std::int32_t>(group);
        observe(set, shape, seen, params(h), queries, list, scratch, q.length);
    }

    /// Takes the block's masses into the scores; a block of the prompt evicts by them.
    void end_block(const Observation& seen, std::int32_t h, std::int32_t last, bool prompt) const {
        head(h).list.take_masses(seen);
        if (prompt) {
            evict(seen, h, std::int64_t{last} - 1, last);
        }
    }

    /// Keys that query `at` evicts are invisible from query `from` on.
    void evict(const Observation& seen, std::int32_t h, position_t at, std::int32_t from) const {
        observed_list<T>& list = head(h).list;
        expiry_t* const ends = expiry.head(b, h);
        list.choose(params(h), seen, at, [&](std::int32_t i) { ends[list.position[i]] = from; });
    }
};

}  // namespace host_backend

template <Storage T, AnyPolicy P>
std::size_t build_observed_mask_workspace_bytes(const host& ctx, const P&, rows_view<const T> q,
                                                input_rows<T> k) {
    checks::check_mass_heads(q, k);
    const std::int32_t keys = q.length;
    const std::size_t tasks = static_cast<std::size_t>(q.batch) * static_cast<std::size_t>(k.heads);
    return tasks * host_backend::observed_head<T>::bytes(keys) +
           static_cast<std::size_t>(ctx.threads()) *
               host_backend::mass_scratch<T>(nullptr, q.dim, keys).bytes +
           detail::alignment;
}

template <AnyPolicy P, Storage T>
void build_observed_mask(const host& ctx, const P& policy, const AttentionParams& attention,
                         rows_view<const T> q, input_rows<T> k, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace,
                         const ObservedMaskOptions& options) {
    namespace hb = host_backend;
    static_assert(P::observed,
                  "kvpolicy: build_observed_mask takes a policy whose scorer is an ObservedScorer; "
                  "build_mask takes the others");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return build_observed_mask<P, T>(ctx, policy, attention, q, k, repaired.sequences, expiry, workspace,
                                         options);
    }
    const Observation seen = policy.scorer().observation();
    const std::int32_t heads = k.heads;
    checks::check_attention(attention);
    checks::check_mass_shapes(q, k, sequences);
    detail::require(options.prompt >= 0, "prompt", options.prompt, "0 or more, or kvpolicy::unlimited");
    policy.check_layer(options.layer, heads);
    policy.scorer().check(heads, k.dim, k.dim);
    checks::check_plane("expiry", expiry, q.batch, heads, sequences.length);
    const auto head_params_of = [&](std::int32_t h) { return policy.params(options.layer, h); };
    detail::check_same_params(seen, heads, head_params_of);
    checks::check_workspace(workspace, build_observed_mask_workspace_bytes<T>(ctx, policy, q, k));
    const auto tokens = [&](std::int64_t b) { return sequences.length_of(b); };
    checks::check_finite_rows(ctx, "q", q, tokens);
    checks::check_finite_rows(ctx, "k", k, tokens);

    const std::size_t each = hb::observed_head<T>::bytes(q.length);
    const std::size_t scratch_bytes = hb::mass_scratch<T>(nullptr, q.dim, q.length).bytes;
    std::byte* const memory = detail::aligned(workspace.data);
    std::byte* const scratch =
        memory + static_cast<std::size_t>(q.batch) * static_cast<std::size_t>(heads) * each;
    // Heads that are averaged go side by side, the others on their own.
    const std::int32_t together = seen.whole_layer ? heads : 1;
    ctx.parallel_for(std::int64_t{q.batch} * heads / together, [&](std::int64_t task, int thread) {
        const std::int64_t first = task * together, b = first / heads;
        const auto begin = static_cast<std::int32_t>(first % heads);
        const hb::observed_mask_task<P, T> heads_of{
            ctx.instructions(),
            policy,
            options,
            hb::valueless_shape(attention, q.dim),
            q,
            k,
            expiry,
            b,
            begin,
            begin + together,
            memory + static_cast<std::size_t>(first) * each,
            scratch + static_cast<std::size_t>(thread) * scratch_bytes};
        heads_of.run(sequences.length_of(b));
    });
}

}  // namespace kvpolicy
