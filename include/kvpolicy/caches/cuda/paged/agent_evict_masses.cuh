// The mass that entries receive from the queries that steps and chunks kept: phases 3 and 4 of
// kernel_paged_evict.cuh.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

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

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
