// Eviction over all heads of a sequence (policies/eviction.hpp) in one cooperative launch: rounds over all
// layers, until the sequence is within its limit. Masses agree with the CPU backend (caches/host/evict.hpp)
// to rounding.
#pragma once

#include <kvpolicy/caches/cuda/copy_rows.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/agent_largest_keys.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cooperative_groups.h>
#include <cuda/std/limits>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Queries that a thread's key meets at once: a query head at a position is one.
inline constexpr std::int32_t evict_tile = 16;

/// What a layer's heads need while they are looked at.
template <class T>
struct evict_memory {
    using Real = compute_t<T>;
    std::int32_t* order = nullptr;  // [kv_heads, rows]: rows in logical order
    double* mass = nullptr;         // [kv_heads, rows], by row; below 0: the row goes
    std::uint64_t* keys = nullptr;  // [kv_heads, rows], the newest key first: what goes has the largest
    Real* top = nullptr;            // [kv_heads, observing, group]: the largest logit of a query
    double* weight = nullptr;       // [kv_heads, observing, group]: what a weight of 1 at that logit is
    unsigned long long* dropped = nullptr;  // [3]: rows of a round, in turn
    std::int64_t rows = 0;                  // the most of a head
    std::int32_t staged = 0;                // rows that move at once
};

/// One head of a layer: what every phase must know of it.
template <class P, class T>
struct evicted_head {
    const DualRef<P, T>& cache;
    std::int32_t seq, head;
    std::int64_t index;
    PagedRows<T> rows;
    HeadRows layout;
    position_t length;
    std::int32_t long_range, used;

    __device__ evicted_head(const DualRef<P, T>& of, std::int32_t of_seq, std::int32_t of_head)
        : cache(of),
          seq(of_seq),
          head(of_head),
          index(of.head_index(of_seq, of_head)),
          rows(of.head_rows(of_seq, of_head)),
          layout(of.layout(of_head)),
          length(of.length[of_seq]),
          long_range(layout.slot(0)),
          used(of.used(of_seq, of_head)) {}
    /// Sinks and the window are exempt.
    [[nodiscard]] __device__ bool takes_part() const { return used > long_range; }
    [[nodiscard]] __device__ std::int32_t queries() const {
        const std::int32_t most = cache.eviction.observing;
        return (length < most ? static_cast<std::int32_t>(length) : most) * cache.group;
    }
    /// The position of the token whose queries are in row i of the ring.
    [[nodiscard]] __device__ position_t position_of_query(std::int32_t i) const {
        const position_t last = length - 1;
        return last - (last - i) % cache.eviction.observing;
    }
    /// The row of a top-k key or another, number j in logical order; only called for heads that take part,
    /// whose sinks and ring are full. `rank`: whether places stand in any order.
    [[nodiscard]] __device__ std::int32_t ring_row(std::int32_t j) const {
        const std::int32_t top_k_slots = used - long_range;
        return j < layout.sinks ? j
                                : layout.recent(length - layout.window + (j - layout.sinks - top_k_slots));
    }
};

/// The logits of a key against a tile of queries, which lie in shared memory as [dim][evict_tile].
template <class T, class Real>
__device__ void evict_logits(const T* key, const Real* queries, const AttentionParams& attention,
                             std::int32_t dim, Real (&logit)[evict_tile]) {
    constexpr int each = sizeof(T) == 2 ? 8 : 1;
    struct alignas(each * sizeof(T)) numbers {
        T at[each];
    };
#pragma unroll
    for (int i = 0; i < evict_tile; ++i) {
        logit[i] = Real(0);
    }
#pragma unroll 1
    for (std::int32_t d = 0; d < dim; d += each) {
        const numbers k = *reinterpret_cast<const numbers*>(key + d);
#pragma unroll
        for (int e = 0; e < each; ++e) {
            const Real x = static_cast<Real>(k.at[e]);
            const Real* const q = queries + (d + e) * evict_tile;
#pragma unroll
            for (int i = 0; i < evict_tile; ++i) {
                logit[i] += q[i] * x;
            }
        }
    }
    const Real scale =
        attention.sm_scale != 0.0f ? attention.sm_scale : 1.0f / sqrtf(static_cast<float>(dim));
    const Real cap = attention.logits_soft_cap;
    constexpr Real most = ::cuda::std::numeric_limits<Real>::max();
#pragma unroll
    for (int i = 0; i < evict_tile; ++i) {
        Real x = scale * logit[i];
        if (cap > Real(0)) {
            x = cap * tanh(x / cap);
        }
        logit[i] = x > most ? most : x;
    }
}

/// A tile of a head's queries into shared memory; 0 beyond the last. By the whole block.
template <class P, class T, class Real>
__device__ void load_evict_queries(const evicted_head<P, T>& at, std::int32_t first, Real* to) {
    const std::int32_t dim = at.cache.head_dim_qk, left = at.queries() - first;
    const T* const from = at.cache.query_row(at.seq, at.head, 0) + std::int64_t{first} * dim;
    __syncthreads();  // the tile before has been read
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < evict_tile * dim; i += admit_threads) {
        to[i % dim * evict_tile + i / dim] = i / dim < left ? static_cast<Real>(from[i]) : Real(0);
    }
    __syncthreads();
}

/// Rows in logical order. By all blocks.
template <class P, class T>
__device__ void evict_order(const evicted_head<P, T>& at, std::int32_t* order) {
    const std::int32_t budget = at.cache.all_params[at.head].budget, sinks = at.layout.sinks;
    const std::int32_t top_k_slots = at.used - at.long_range;
    const auto step = static_cast<std::int32_t>(gridDim.x * admit_threads);
    for (auto j = static_cast<std::int32_t>(blockIdx.x * admit_threads + threadIdx.x); j < at.used;
         j += step) {
        if (j < sinks || j >= sinks + top_k_slots) {
            order[j] = at.ring_row(j);
            continue;
        }
        const std::int32_t mine = at.layout.slot(j - sinks);
        std::int32_t rank = j - sinks;  // without a top-k update keys take their places in order
        if (budget != unlimited && budget != 0) {
            const position_t t = at.rows.position(mine);
            rank = 0;
            for (std::int32_t p = 0; p < top_k_slots; ++p) {
                const position_t other = at.rows.position(at.layout.slot(p));
                rank += other < t || (other == t && p < j - sinks) ? 1 : 0;
            }
        }
        order[sinks + rank] = mine;
    }
}

/// The largest logit and the sum of weights of one tile of queries. By one block.
template <class P, class T>
__device__ void evict_sums(const evicted_head<P, T>& at, const evict_memory<T>& memory, std::int32_t first,
                           compute_t<T>* queries) {
    using Real = compute_t<T>;
    constexpr Real nothing = -::cuda::std::numeric_limits<Real>::infinity();
    __shared__ Real tops[admit_threads / 32][evict_tile];
    __shared__ double sums[admit_threads / 32][evict_tile];
    load_evict_queries(at, first, queries);
    Real top[evict_tile], sum[evict_tile];
#pragma unroll
    for (int i = 0; i < evict_tile; ++i) {
        top[i] = nothing;
        sum[i] = Real(0);
    }
    position_t seen[evict_tile];
#pragma unroll
    for (int i = 0; i < evict_tile; ++i) {
        seen[i] = first + i < at.queries() ? at.position_of_query((first + i) / at.cache.group) : -1;
    }
    for (auto r = static_cast<std::int32_t>(threadIdx.x); r < at.used; r += admit_threads) {
        const position_t t = at.rows.position(r);
        Real logit[evict_tile];
        evict_logits(at.rows.k(r), queries, at.cache.attention, at.cache.head_dim_qk, logit);
#pragma unroll
        for (int i = 0; i < evict_tile; ++i) {
            if (t <= seen[i]) {
                const Real x = logit[i], before = top[i];
                top[i] = x > before ? x : before;
                if (top[i] != nothing) {
                    // Without a logit before, the sum is 0, or no number.
                    sum[i] = (before == nothing ? sum[i] : sum[i] * exp(before - top[i])) + exp(x - top[i]);
                } else if (x != x) {
                    sum[i] = x;  // no number: the query counts for nothing
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < evict_tile; ++i) {
        Real largest = top[i];
        for (int lanes = 16; lanes != 0; lanes /= 2) {
            const Real other = __shfl_xor_sync(all_lanes, largest, lanes);
            largest = other > largest ? other : largest;
        }
        double mine = top[i] == nothing && sum[i] == Real(0)
                          ? 0.0
                          : static_cast<double>(sum[i]) *
                                (top[i] == nothing ? 1.0 : static_cast<double>(exp(top[i] - largest)));
        for (int lanes = 16; lanes != 0; lanes /= 2) {
            mine += __shfl_xor_sync(all_lanes, mine, lanes);
        }
        if (lane_id() == 0) {
            tops[warp_id()][i] = largest;
            sums[warp_id()][i] = mine;
        }
    }
    __syncthreads();
    const auto i = static_cast<std::int32_t>(threadIdx.x);
    if (i < evict_tile && first + i < at.queries()) {
        Real largest = nothing;
        for (int w = 0; w < admit_threads / 32; ++w) {
            largest = tops[w][i] > largest ? tops[w][i] : largest;
        }
        double all = 0.0;
        for (int w = 0; w < admit_threads / 32; ++w) {
            all += tops[w][i] == nothing ? sums[w][i]
                                         : sums[w][i] * static_cast<double>(exp(tops[w][i] - largest));
        }
        const std::int64_t to =
            std::int64_t{at.head} * at.cache.eviction.observing * at.cache.group + first + i;
        memory.top[to] = largest;
        memory.weight[to] = all > 0.0 ? 1.0 / all : 0.0;
    }
}

/// The mass of a block's keys, one thread per key: rows from `first` on. By one block.
template <class P, class T>
__device__ void evict_masses(const evicted_head<P, T>& at, const evict_memory<T>& memory, std::int32_t first,
                             compute_t<T>* queries) {
    using Real = compute_t<T>;
    const std::int32_t row = first + static_cast<std::int32_t>(threadIdx.x), group = at.cache.group;
    const bool there = row < at.used;
    const T* const key = at.rows.k(there ? row : first);
    const position_t t = there ? at.rows.position(row) : 0;
    const bool mean = at.cache.eviction.aggregate == group_aggregate::mean || group == 1;
    const std::int64_t plane = std::int64_t{at.head} * at.cache.eviction.observing * group;
    double mass = 0.0;
    Real best = Real(0);
    const std::int32_t count = at.queries();
    for (std::int32_t tile = 0; tile < count; tile += evict_tile) {
        load_evict_queries(at, tile, queries);
        Real logit[evict_tile];
        evict_logits(key, queries, at.cache.attention, at.cache.head_dim_qk, logit);
#pragma unroll
        for (int i = 0; i < evict_tile; ++i) {
            const std::int32_t x = tile + i;
            if (x < count) {
                const std::int32_t g = x % group;
                const double weight = memory.weight[plane + x];
                const bool counts = weight > 0.0 && t <= at.position_of_query(x / group);
                const Real p = counts ? exp(logit[i] - memory.top[plane + x]) : Real(0);
                if (mean) {
                    mass += static_cast<double>(p) * (weight / group);
                } else {
                    const Real now = static_cast<Real>(static_cast<double>(p) * weight);
                    best = g == 0 || now > best ? now : best;
                    if (g == group - 1) {
                        mass += static_cast<double>(best);
                    }
                }
            }
        }
    }
    if (there) {
        memory.mass[at.head * memory.rows + row] = mass;
    }
}

/// Marks the lowest entries of a head by a negative mass; returns how many. By one block.
template <class P, class T>
__device__ std::int32_t mark_lowest(const evicted_head<P, T>& at, const evict_memory<T>& memory,
                                    admit_memory& sums, largest_memory<std::uint64_t>& largest) {
    const DualRef<P, T>& cache = at.cache;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t used = at.used, reach = cache.eviction.pool / 2;
    const std::int32_t* const order = memory.order + at.head * memory.rows;
    double* const mass = memory.mass + at.head * memory.rows;
    std::uint64_t* const keys = memory.keys + at.head * memory.rows;
    int mine = 0;
    for (std::int32_t j = thread; j < used; j += admit_threads) {
        const std::int32_t row = order[j], begin = j - reach < 0 ? 0 : j - reach,
                           end = used - j <= reach ? used : j + reach + 1;
        double score = mass[order[begin]];
        for (std::int32_t other = begin + 1; other < end; ++other) {
            const double near = mass[order[other]];
            score = near > score ? near : score;
        }
        const bool candidate = row >= at.long_range && !cache.keep.keeps(at.rows.position(row));
        mine += candidate ? 1 : 0;
        // Larger for a lower score, and never ~0; what is exempt has the least. Of equal ones the newer goes,
        // so it stands first.
        const auto bits = static_cast<std::uint64_t>(__double_as_longlong(score));
        keys[used - 1 - j] = candidate ? ~(bits + 1) : 0;
    }
    const std::int32_t candidates = block_total(sums, mine);
    const auto share = static_cast<std::int32_t>(static_cast<double>(cache.eviction.share) * used);
    const std::int32_t wanted = share < 1 ? 1 : share, drop = candidates < wanted ? candidates : wanted;
    if (drop == 0) {
        return 0;
    }
    __syncthreads();
    mark_largest(largest, sums, keys, used, drop);
    for (std::int32_t x = thread; x < used; x += admit_threads) {
        if (keys[x] == ~std::uint64_t{0}) {
            mass[order[used - 1 - x]] = -1.0;
        }
    }
    __syncthreads();
    return drop;
}

/// The first top-k entry of a head that moved or went, and the entries that are left.
struct closed_gaps {
    std::int32_t from, used;
};

/// Moves entries towards the front over those that mark_lowest() marked; a few are read before as many are
/// written. By one block.
template <class P, class T>
__device__ closed_gaps close_gaps(const evicted_head<P, T>& at, const evict_memory<T>& memory,
                                  unsigned char* staging) {
    const DualRef<P, T>& cache = at.cache;
    const double* const mass = memory.mass + at.head * memory.rows;
    T* const staged = reinterpret_cast<T*>(staging);
    const std::int32_t width = cache.head_dim_qk + cache.head_dim_vo, lane = lane_id(), used = at.used;
    std::int32_t to = at.long_range, moved_from = -1;
    for (std::int32_t first = at.long_range; first < used; first += memory.staged) {
        const std::int32_t count = used - first < memory.staged ? used - first : memory.staged;
        const bool stays = lane < count && !(mass[first + lane] < 0.0);  // those marked go, and no others
        const unsigned votes = __ballot_sync(all_lanes, stays);
        const std::int32_t target = to + __popc(votes & lanes_before(lane));
        if (moved_from < 0) {
            if (__popc(votes) == count) {
                to += count;
                continue;
            }
            moved_from = first;
        }
        position_t position = 0;
        float score = 0.0f;
        if (warp_id() == 0 && stays) {
            position = at.rows.position(first + lane);
            score = at.rows.score(first + lane);
        }
        for (std::int32_t i = warp_id(); i < count; i += admit_threads / 32) {
            if ((votes >> i & 1u) != 0) {
                copy_row<T>(at.rows.k(first + i), staged + std::int64_t{i} * width, cache.head_dim_qk);
                copy_row<T>(at.rows.v(first + i), staged + std::int64_t{i} * width + cache.head_dim_qk,
                            cache.head_dim_vo);
            }
        }
        __syncthreads();
        for (std::int32_t i = warp_id(); i < count; i += admit_threads / 32) {
            if ((votes >> i & 1u) != 0) {
                const std::int32_t row = to + __popc(votes & lanes_before(i));
                copy_row<T>(staged + std::int64_t{i} * width, at.rows.k(row), cache.head_dim_qk);
                copy_row<T>(staged + std::int64_t{i} * width + cache.head_dim_qk, at.rows.v(row),
                            cache.head_dim_vo);
            }
        }
        if (warp_id() == 0 && stays) {
            at.rows.position(target) = position;
            at.rows.score(target) = score;
        }
        __syncthreads();
        to += __popc(votes);
    }
    return {moved_from, to};
}

/// Drops the lowest entries of a head, closes their gaps and returns pages that no entry needs. By one block.
template <class P, class T>
__device__ void evict_rows(const evicted_head<P, T>& at, const evict_memory<T>& memory, admit_memory& sums,
                           largest_memory<std::uint64_t>& largest, unsigned char* staging,
                           unsigned long long* dropped) {
    const DualRef<P, T>& cache = at.cache;
    const std::int32_t drop = mark_lowest(at, memory, sums, largest);
    if (drop == 0) {
        return;
    }
    [[maybe_unused]] const closed_gaps closed = close_gaps(at, memory, staging);
    if constexpr (P::has_selection) {
        refresh_pages(at.rows, closed.from, closed.used, closed.used, warp_id(), admit_threads / 32);
    }
    if (threadIdx.x == 0) {
        cache.num_long_range[at.index] -= drop;
        cache.victim[at.index] = -1;
        // What neither rows nor the rest of a reservation need; no fork shares it.
        const std::int64_t wanted = cache.pages_wanted(at.seq, at.head);
        for (std::int32_t& held = cache.held[at.index]; held > wanted;) {
            const std::int32_t id = cache.pages(at.seq, at.head)[--held];
            if (atomicSub(cache.pool.names + id, 1) == 1) {
                cache.pool.free_ids[atomicAdd(cache.pool.free_count, 1)] = id;
            }
        }
        atomicAdd(dropped, static_cast<unsigned long long>(drop));
    }
}

/// What the blocks of an eviction share, and what one block has of its own.
template <class P, class T>
struct evict_grid {
    const DualRef<P, T>* refs;
    std::int32_t layers;
    const evict_memory<T>& memory;
    std::uint32_t* status;
    admit_memory& sums;
    largest_memory<std::uint64_t>& largest;
    unsigned long long& total;
    bool& beyond;

    [[nodiscard]] __device__ std::int32_t kv_heads() const { return refs[0].kv_heads; }
    [[nodiscard]] __device__ std::int64_t heads() const { return std::int64_t{layers} * kv_heads(); }
    [[nodiscard]] __device__ static bool leads() { return blockIdx.x == 0 && threadIdx.x == 0; }
    __device__ void report(std::int32_t entry, std::uint32_t bits) const {
        if (leads() && status != nullptr) {
            atomicOr(status + entry, bits);
        }
    }

    /// Whether an entry is left alone: padding, a bad one, or one in the middle of a token, when a key and
    /// queries have taken the places of older ones, which the length does not say yet. The same in all
    /// blocks.
    [[nodiscard]] __device__ bool passes_over(const Batch& batch, std::int32_t entry,
                                              std::int32_t seq) const {
        const std::int32_t tokens = batch.tokens(entry);
        const bool padding = seq == Batch::no_seq,
                   bad = !padding && (seq < 0 || seq >= refs[0].max_sequences || tokens < 0);
        if (bad) {
            report(entry, static_cast<std::uint32_t>(status_bad_length));
        }
        if (bad || padding || tokens == 0) {
            return true;
        }
        bool amid = false;
        for (auto x = static_cast<std::int64_t>(threadIdx.x); x < heads(); x += admit_threads) {
            amid |= refs[x / kv_heads()].num_appended(seq, static_cast<std::int32_t>(x % kv_heads())) != 0;
        }
        const bool waits = __syncthreads_or(amid ? 1 : 0) != 0;
        if (waits) {
            report(entry, static_cast<std::uint32_t>(status_layer_skipped));
        }
        return waits;
    }

    /// Entries of all heads of a sequence, in `total`; `beyond`: one head has more than the workspace takes.
    __device__ void count_rows(std::int32_t seq) const {
        __syncthreads();  // all have read the total before
        if (threadIdx.x == 0) {
            total = 0;
            beyond = false;
        }
        __syncthreads();
        unsigned long long mine = 0;
        for (auto x = static_cast<std::int64_t>(threadIdx.x); x < heads(); x += admit_threads) {
            const std::int32_t used =
                refs[x / kv_heads()].used(seq, static_cast<std::int32_t>(x % kv_heads()));
            mine += static_cast<unsigned long long>(used);
            if (used > memory.rows) {
                beyond = true;
            }
        }
        atomicAdd(&total, mine);
        __syncthreads();
    }

    /// One layer's part of a round.
    template <class Grid>
    __device__ void evict_layer(const Grid& grid, const DualRef<P, T>& cache, std::int32_t seq,
                                unsigned long long* dropped) const {
        auto* const queries = reinterpret_cast<compute_t<T>*>(dynamic_shared());
        const std::int32_t kv_heads = cache.kv_heads;
        const auto head_of = [&](std::int32_t h) { return evicted_head<P, T>(cache, seq, h); };
        // 3. Logical order, and the sums per query.
        for (std::int32_t h = 0; h < kv_heads; ++h) {
            if (const auto at = head_of(h); at.takes_part()) {
                evict_order(at, memory.order + h * memory.rows);
            }
        }
        // Items of all heads go around the blocks.
        const auto share = [&](const auto& size, std::int32_t each, const auto& body) {
            std::int32_t before = 0;
            for (std::int32_t h = 0; h < kv_heads; ++h) {
                const auto at = head_of(h);
                const std::int32_t items = at.takes_part() ? (size(at) + each - 1) / each : 0;
                const auto blocks = static_cast<std::int32_t>(gridDim.x);
                std::int32_t item = static_cast<std::int32_t>(blockIdx.x) - before % blocks;
                for (item += item < 0 ? blocks : 0; item < items; item += blocks) {
                    body(at, item * each);
                }
                before += items;
            }
        };
        share([](const auto& at) { return at.queries(); }, evict_tile,
              [&](const auto& at, std::int32_t first) { evict_sums(at, memory, first, queries); });
        grid.sync();
        // 4. Masses.
        share([](const auto& at) { return at.used; }, admit_threads,
              [&](const auto& at, std::int32_t first) { evict_masses(at, memory, first, queries); });
        grid.sync();
        // 5. The lowest entries go.
        for (auto h = static_cast<std::int32_t>(blockIdx.x); h < kv_heads;
             h += static_cast<std::int32_t>(gridDim.x)) {
            if (const auto at = head_of(h); at.takes_part()) {
                evict_rows(at, memory, sums, largest, dynamic_shared(), dropped);
            }
            __syncthreads();
        }
        grid.sync();
    }
};

/// Eviction over all heads of each sequence (policies/eviction.hpp), in rounds, until the average number of
/// entries per head is within the limit. One cooperative launch; the sequences of the batch come one after
/// another.
///
///     mass(t) = sum over the kept queries of agg over the group of softmax(t)
///
/// A round drops the `share` of a head's entries with the lowest mass, max-pooled over `pool` neighbors in
/// logical order. Sinks, window and held keys are exempt.
///
/// Grid: as many blocks as run at once. Block: admit_threads.
/// Shared memory: sums, largest, total; dynamic: evict_tile queries [Dk][evict_tile] of compute_t<T>, or the
/// entries that move at once.
/// In: refs [layers], the queries that steps and chunks kept, all entries. Out: reports [count]; status
/// [count] is OR-ed.
/// Overwrites: entries (gaps are closed in place), kept, victim, bounds, page tables, refcounts, the stack
/// of free pages; `memory` is scratch. Masses agree with the CPU backend to rounding.
///
/// Phases, per round (grid.sync() after 3, 4 and 5 of every layer):
/// 1. passes_over: sequences that are left alone. 2. count_rows: whether the sequence exceeds its limit.
/// 3. evict_order and evict_sums: entries in logical order; largest logit and sum of weights per query.
/// 4. evict_masses: the mass of each entry. 5. evict_rows: the lowest entries go, the gaps close, pages are
///    freed.
template <class P, class T>
__global__ void __launch_bounds__(admit_threads)
    paged_evict_kernel(const DualRef<P, T>* const refs, const std::int32_t layers, const Batch batch,
                       const evict_memory<T> memory, EvictionReport* const reports,
                       std::uint32_t* const status) {
    __shared__ admit_memory sums;
    __shared__ largest_memory<std::uint64_t> largest;
    __shared__ unsigned long long total;
    __shared__ bool beyond;
    const auto grid = cooperative_groups::this_grid();
    const evict_grid<P, T> all{refs, layers, memory, status, sums, largest, total, beyond};
    if (all.leads()) {
        memory.dropped[0] = memory.dropped[1] = 0;
    }
    grid.sync();
    std::int32_t turn = 0;
    for (std::int32_t entry = 0; entry < batch.count; ++entry) {
        EvictionReport report;
        const std::int32_t seq = batch.seq(entry);
        // 1. Sequences that are left alone.
        const bool runs = !all.passes_over(batch, entry, seq);
        while (runs) {
            // 2. Does the sequence exceed its limit?
            all.count_rows(seq);
            report.rows = static_cast<std::int64_t>(total);
            if ((report.rows + all.heads() - 1) / all.heads() <= refs[0].eviction.average) {
                break;
            }
            // A graph captured before slabs were added has a workspace for fewer rows.
            if (beyond) {
                all.report(entry, static_cast<std::uint32_t>(status_small_workspace));
                break;
            }
            if (all.leads()) {
                memory.dropped[(turn + 1) % 3] = 0;  // of the next round
            }
            for (std::int32_t layer = 0; layer < layers; ++layer) {
                all.evict_layer(grid, refs[layer], seq, memory.dropped + turn % 3);
            }
            const auto dropped = static_cast<std::int64_t>(
                *static_cast<volatile unsigned long long*>(memory.dropped + turn % 3));
            ++turn;
            if (dropped == 0) {
                break;
            }
            report.dropped += dropped;
            ++report.rounds;
        }
        if (all.leads() && reports != nullptr) {
            reports[entry] = report;
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
