// Evicts the entries of a head with the lowest mass: phase 5 of kernel_paged_evict.cuh.
#pragma once

#include <kvpolicy/caches/cuda/copy_rows.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/agent_evict_masses.cuh>
#include <kvpolicy/caches/cuda/paged/agent_largest_keys.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/share.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

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
    const auto share = static_cast<std::int32_t>(count_of_share(cache.eviction.share, used));
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

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
