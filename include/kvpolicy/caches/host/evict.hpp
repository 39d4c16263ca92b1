// Eviction over all heads of a sequence (policies/eviction.hpp) on the host: score, choose, close the gaps.
#pragma once

#include <kvpolicy/attention/host/mass_pass.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/host/attend_entries.hpp>
#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/core/share.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <numeric>

namespace kvpolicy {

namespace host_backend {

/// The keys of a head in logical order, and how many of them a query at each position of the ring sees.
struct sees_until {
    const std::int32_t* seen;
    [[nodiscard]] std::int32_t count(std::int32_t i) const { return seen[i]; }
    template <class Real>
    Real operator()(std::int32_t, std::int32_t, Real logit) const {
        return logit;
    }
};

/// Memory of one head's eviction.
template <Storage T>
struct eviction_memory {
    std::int32_t* row = nullptr;    // [rows], in logical order
    const T** key = nullptr;        // [rows]
    double* mass = nullptr;         // [rows]
    double* score = nullptr;        // [rows], pooled
    std::int32_t* order = nullptr;  // [rows], candidates
    unsigned char* lost = nullptr;  // [rows], by row
    std::int32_t* seen = nullptr;   // [observing], by ring row
    std::byte* pass = nullptr;
    std::size_t bytes = 0;

    eviction_memory(void* data, std::int32_t dim, std::int64_t rows, std::int32_t observing) {
        detail::arena memory(data);
        const auto n = static_cast<std::size_t>(rows);
        row = memory.take<std::int32_t>(n);
        key = memory.take<const T*>(n);
        mass = memory.take<double>(n);
        score = memory.take<double>(n);
        order = memory.take<std::int32_t>(n);
        lost = memory.take<unsigned char>(n);
        seen = memory.take<std::int32_t>(static_cast<std::size_t>(observing));
        pass = memory.take<std::byte>(mass_scratch<T>(nullptr, dim, rows).bytes);
        bytes = detail::aligned_size(memory.bytes());
    }
};

/// One round of one head: drops its lowest rows and returns how many. `keys` is the most rows that the memory
/// is for.
template <class Cache>
std::int32_t evict_lowest(isa set, const Cache& cache, std::int32_t seq, std::int32_t head, std::byte* data,
                          std::int64_t keys) {
    using T = typename Cache::value_type;
    const auto& head_params = cache.eviction;
    const head_state<Cache> rows(cache, seq, head);
    const std::int32_t used = cache.used(seq, head), long_range = rows.layout.slot(0);
    if (used <= long_range) {
        return 0;
    }
    const position_t length = cache.length[seq];
    const eviction_memory<T> memory(data, cache.head_dim_qk, keys, head_params.observing);
    std::iota(memory.row, memory.row + used, 0);
    std::sort(memory.row, memory.row + used,
              [&](std::int32_t a, std::int32_t b) { return rows.position(a) < rows.position(b); });
    for (std::int32_t j = 0; j < used; ++j) {
        memory.key[j] = rows.k(memory.row[j]);
        memory.mass[j] = 0.0;
    }
    // The ring of queries: that of position t in row t mod observing.
    const auto queries = static_cast<std::int32_t>(std::min<position_t>(length, head_params.observing));
    for (position_t t = length - queries; t < length; ++t) {
        const auto* const after =
            std::upper_bound(memory.row, memory.row + used, t,
                             [&](position_t at, std::int32_t r) { return at < rows.position(r); });
        memory.seen[t % head_params.observing] = static_cast<std::int32_t>(after - memory.row);
    }
    const std::int64_t width = std::int64_t{cache.group} * cache.head_dim_qk;
    add_mass(
        set, shape_of(cache), head_params.aggregate,
        mass_queries<T>{cache.query_row(seq, head, 0), width, cache.head_dim_qk, 0, queries, cache.group},
        memory.key, sees_until{memory.seen}, memory.mass, memory.pass, keys);

    const std::int32_t reach = head_params.pool / 2;
    std::int32_t candidates = 0;
    for (std::int32_t j = 0; j < used; ++j) {
        const std::int32_t begin = std::max(j - reach, 0);
        const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(std::int64_t{j} + reach + 1, used));
        memory.score[j] = *std::max_element(memory.mass + begin, memory.mass + end);
        if (memory.row[j] >= long_range && !rows.keeps(rows.position(memory.row[j]))) {
            memory.order[candidates++] = j;
        }
    }
    const auto wanted = static_cast<std::int32_t>(count_of_share(head_params.share, used));
    const std::int32_t drop = std::min(candidates, std::max(1, wanted));
    if (drop == 0) {
        return 0;
    }
    // The lowest first; of equal ones the newer.
    std::nth_element(memory.order, memory.order + (drop - 1), memory.order + candidates,
                     [&](std::int32_t a, std::int32_t b) {
                         return memory.score[a] != memory.score[b] ? memory.score[a] < memory.score[b]
                                                                   : a > b;
                     });
    std::fill_n(memory.lost, used, static_cast<unsigned char>(0));
    for (std::int32_t i = 0; i < drop; ++i) {
        memory.lost[memory.row[memory.order[i]]] = 1;
    }
    std::int32_t to = long_range, first = -1;
    for (std::int32_t r = long_range; r < used; ++r) {
        if (memory.lost[r] != 0) {
            first = first < 0 ? r : first;
            continue;
        }
        if (to != r) {
            rows.put(to, rows.k(r), rows.v(r), rows.position(r), rows.score(r));
        }
        ++to;
    }
    cache.num_long_range[rows.index] -= drop;
    cache.victim[rows.index] = -1;
    refresh_bounds(cache, rows.rows, first, used - drop, used - drop);
    return drop;
}

}  // namespace host_backend

template <AnyPolicy P, Storage T>
std::size_t DualCache<P, T>::evict_workspace_bytes(const host& ctx) const requires P::has_eviction {
    this->require_bound();
    const auto heads =
        static_cast<std::size_t>(this->shape_.layers) * static_cast<std::size_t>(this->shape_.kv_heads);
    return static_cast<std::size_t>(ctx.threads()) *
               host_backend::eviction_memory<T>(nullptr, this->shape_.head_dim_qk, max_rows(),
                                                this->policy_.eviction().observing)
                   .bytes +
           detail::aligned_size(heads * sizeof(std::int32_t)) + detail::alignment;
}

template <AnyPolicy P, Storage T>
std::int64_t DualCache<P, T>::max_rows() const {
    return std::min<std::int64_t>(attached_pages() * this->shape_.page_size, pool_.max_seq_len);
}

template <AnyPolicy P, Storage T>
void DualCache<P, T>::evict(const host& ctx, const Batch& batch, workspace_view workspace,
                            const EvictOptions& options) requires P::has_eviction {
    namespace hb = host_backend;
    this->require_bound();
    const Batch all = checks::batch_of(batch, this->shape_.max_sequences);
    checks::check_batch(all, this->shape_.max_sequences, std::numeric_limits<std::int32_t>::max(), "any");
    checks::check_workspace(workspace, evict_workspace_bytes(ctx));
    for (std::int32_t i = 0; i < all.count; ++i) {
        if (all.tokens(i) != 0 && options.status == nullptr) {
            // A token's key and query have taken the places of older ones, which its length does not say yet.
            this->require_between_tokens(all.seq(i), [&] { return detail::text("sequence of entry ", i); });
        }
    }
    const std::int32_t layers = this->shape_.layers, kv_heads = this->shape_.kv_heads;
    const std::int64_t heads = std::int64_t{layers} * kv_heads, keys = max_rows();
    std::byte* const memory = detail::aligned(workspace.data);
    auto* const dropped = reinterpret_cast<std::int32_t*>(memory);  // [layers, kv_heads]
    std::byte* const scratch =
        memory + detail::aligned_size(static_cast<std::size_t>(heads) * sizeof(std::int32_t));
    const std::size_t each =
        hb::eviction_memory<T>(nullptr, this->shape_.head_dim_qk, keys, this->policy_.eviction().observing)
            .bytes;
    for (std::int32_t i = 0; i < all.count; ++i) {
        EvictionReport report;
        const std::int32_t seq = all.seq(i);
        const bool between = options.status == nullptr || this->between_tokens(seq);
        if (all.tokens(i) != 0 && !between) {
            options.status[i] |= status_layer_skipped;
        }
        while (all.tokens(i) != 0 && between) {
            std::int64_t rows = 0;
            for (std::int32_t layer = 0; layer < layers; ++layer) {
                const ref_type cache = this->layer(layer);
                for (std::int32_t h = 0; h < kv_heads; ++h) {
                    rows += cache.used(seq, h);
                }
            }
            report.rows = rows;
            if ((rows + heads - 1) / heads <=
                this->policy_.eviction().average) {  // any average, without overflow
                break;
            }
            ctx.parallel_for(heads, [&](std::int64_t task, int thread) {
                const ref_type cache = this->layer(static_cast<std::int32_t>(task / kv_heads));
                dropped[task] = hb::evict_lowest(ctx.instructions(), cache, seq,
                                                 static_cast<std::int32_t>(task % kv_heads),
                                                 scratch + static_cast<std::size_t>(thread) * each, keys);
            });
            std::int64_t all = 0;
            for (std::int64_t task = 0; task < heads; ++task) {
                // A head that dropped rows gives back what neither rows nor the rest of a reservation need.
                const ref_type cache = this->layer(static_cast<std::int32_t>(task / kv_heads));
                const auto h = static_cast<std::int32_t>(task % kv_heads);
                const std::int64_t wanted = cache.pages_wanted(seq, h);
                std::int32_t& held = cache.held[cache.head_index(seq, h)];
                while (dropped[task] != 0 && held > wanted) {
                    cache.pool.give(cache.pages(seq, h)[--held]);
                }
                all += dropped[task];
            }
            if (all == 0) {
                break;
            }
            report.dropped += all;
            ++report.rounds;
        }
        if (options.reports != nullptr) {
            options.reports[i] = report;
        }
    }
}

}  // namespace kvpolicy
