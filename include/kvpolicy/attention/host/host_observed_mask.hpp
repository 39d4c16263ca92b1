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

}  // namespace host_backend

template <Storage T, AnyPolicy P>
std::size_t build_observed_mask_workspace_bytes(const host& on, const P&, rows_view<const T> q,
                                                input_rows<T> k) {
    checks::check_mass_heads(q, k);
    const std::int32_t keys = q.length;
    const std::size_t tasks = static_cast<std::size_t>(q.batch) * static_cast<std::size_t>(k.heads);
    return tasks * host_backend::observed_head<T>::bytes(keys) +
           static_cast<std::size_t>(on.threads()) *
               host_backend::mass_scratch<T>(nullptr, q.dim, keys).bytes +
           detail::alignment;
}

template <AnyPolicy P, Storage T>
void build_observed_mask(const host& on, const P& policy, const AttentionParams& attention,
                         rows_view<const T> q, input_rows<T> k, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace,
                         const ObservedMaskOptions& options) {
    namespace hb = host_backend;
    static_assert(P::observed,
                  "kvpolicy: build_observed_mask takes a policy whose scorer is an ObservedScorer; "
                  "build_mask takes the others");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return build_observed_mask<P, T>(on, policy, attention, q, k, repaired.sequences, expiry, workspace,
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
    hb::check_same_params(seen, heads, head_params_of);
    checks::check_workspace(workspace, build_observed_mask_workspace_bytes<T>(on, policy, q, k));
    const auto tokens = [&](std::int64_t b) { return sequences.length_of(b); };
    checks::check_finite_rows(on, "q", q, tokens);
    checks::check_finite_rows(on, "k", k, tokens);

    const hb::attention_shape shape = hb::valueless_shape(attention, q.dim);
    const std::int32_t group = q.heads / heads;
    const std::size_t each = hb::observed_head<T>::bytes(q.length);
    const std::size_t scratch_bytes = hb::mass_scratch<T>(nullptr, q.dim, q.length).bytes;
    std::byte* const memory = detail::aligned(workspace.data);
    std::byte* const scratch =
        memory + static_cast<std::size_t>(q.batch) * static_cast<std::size_t>(heads) * each;
    // Heads that are averaged go side by side, the others on their own.
    const std::int32_t together = seen.whole_layer ? heads : 1;
    on.parallel_for(std::int64_t{q.batch} * heads / together, [&](std::int64_t task, int thread) {
        const std::int64_t first = task * together, b = first / heads;
        const auto begin = static_cast<std::int32_t>(first % heads), stop = begin + together;
        const std::int32_t length = sequences.length_of(b);
        const auto one = [&](std::int32_t h) -> hb::observed_head<T>& {
            return hb::observed_head<T>::at(memory + static_cast<std::size_t>(first + h - begin) * each);
        };
        for (std::int32_t h = begin; h < stop; ++h) {
            hb::observed_head<T>::make(&one(h), q.length);
            std::fill_n(expiry.head(b, h), length, never);
        }
        for (std::int32_t a = 0, end = 0; a < length; a = end) {
            end = hb::observed_block_end(seen, a, options.prompt, length);
            const bool prompt = a < options.prompt;
            if (!P::scorer_type::evicts_at_steps && !prompt) {
                break;  // what is decoded stays
            }
            for (std::int32_t h = begin; h < stop; ++h) {
                hb::observed_list<T>& list = one(h).list;
                expiry_t* const ends = expiry.head(b, h);
                if (P::scorer_type::evicts_at_steps) {
                    list.choose(head_params_of(h), seen, a,
                                [&](std::int32_t i) { ends[list.position[i]] = a; });
                }
                list.own = list.count;
                for (std::int32_t t = a; t < end; ++t) {
                    list.add(k.row(b, h, t), t, 0.0f, a - t - 1);
                }
                hb::mass_queries<T> queries;
                queries.q = q.row(b, std::int64_t{h} * group, a);
                queries.row_stride = q.row_stride;
                queries.head_stride = q.head_stride;
                queries.end = end - a;
                queries.group = group;
                hb::observe(on.instructions(), shape, seen, head_params_of(h), queries, list,
                            scratch + static_cast<std::size_t>(thread) * scratch_bytes, q.length);
            }
            if (seen.whole_layer) {
                hb::average_masses(
                    heads, [&](std::int32_t h) -> auto& { return one(h).list; });
            }
            for (std::int32_t h = begin; h < stop; ++h) {
                hb::observed_list<T>& list = one(h).list;
                expiry_t* const ends = expiry.head(b, h);
                list.take_masses(seen);
                if (prompt) {
                    list.choose(head_params_of(h), seen, std::int64_t{end} - 1,
                                [&](std::int32_t i) { ends[list.position[i]] = end; });
                }
            }
        }
    });
}

}  // namespace kvpolicy
