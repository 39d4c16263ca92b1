// Eviction over all heads of a sequence (policies/eviction.hpp) in one cooperative launch: rounds over all
// layers, until the sequence is within its limit. Masses agree with the CPU backend (caches/host/evict.hpp)
// to rounding.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/agent_evict_masses.cuh>
#include <kvpolicy/caches/cuda/paged/agent_evict_rows.cuh>
#include <kvpolicy/caches/cuda/paged/agent_largest_keys.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/launch.cuh>

#include <cooperative_groups.h>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

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
