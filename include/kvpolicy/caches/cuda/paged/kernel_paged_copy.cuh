// fork and reorder of a paged cache, as in the CPU backend (caches/host/sequences.hpp). Per source one target
// inherits the pages: the source itself if it stays, else the first target. The other targets share the pages
// that can no longer change, and copy the rest. Sequences that are no target's source are dropped, and their
// pages serve the copies.
#pragma once

#include <kvpolicy/caches/cuda/copy_rows.cuh>
#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// All moves, in shared memory.
struct paged_moves {
    std::int32_t source[max_reordered];  // of move i
    std::int32_t heir[max_reordered];    // of sequence i, if it is a target too; -1: none
    std::int32_t count;
    const std::int32_t* sources;  // null: one move, which copies
    std::int32_t to;

    [[nodiscard]] __device__ std::int32_t target(std::int32_t i) const { return sources != nullptr ? i : to; }
    [[nodiscard]] __device__ bool inherits(std::int32_t i) const {
        return sources != nullptr && source[i] < count && heir[source[i]] == i;
    }
    /// Whether move i is a copy, and of which sequence once heirs have their pages.
    [[nodiscard]] __device__ bool copies(std::int32_t i) const {
        return !inherits(i) && source[i] != target(i);
    }
    [[nodiscard]] __device__ std::int32_t holder(std::int32_t i) const {
        return sources != nullptr && source[i] < count ? heir[source[i]] : source[i];
    }
    /// Whether target i is no target's source, so that its pages are dropped.
    [[nodiscard]] __device__ bool dropped(std::int32_t i) const { return sources == nullptr || heir[i] < 0; }
};

__device__ inline void load_moves(paged_moves& all, const sequence_moves& moves, std::int32_t max_sequences) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x),
               threads = static_cast<std::int32_t>(blockDim.x);
    if (thread == 0) {
        all.count = moves.count;
        all.sources = moves.sources;
        all.to = moves.to;
    }
    for (std::int32_t i = thread; i < moves.count; i += threads) {
        all.source[i] = moves.source(i, max_sequences);
        all.heir[i] = -1;
    }
    __syncthreads();
    for (std::int32_t seq = thread; seq < moves.count; seq += threads) {
        std::int32_t heir = -1;
        for (std::int32_t i = moves.count - 1; i >= 0; --i) {
            heir = all.source[i] == seq ? i : heir;
        }
        all.heir[seq] = all.source[seq] == seq ? seq : heir;
    }
    __syncthreads();
}

/// Rows of a head that is being copied to `to`, which has the counters of sequence `source` already;
/// lengths move last.
template <class Ref>
__device__ std::int32_t rows_of_copy(const Ref& cache, std::int32_t head, std::int32_t source,
                                     std::int32_t to) {
    return cache.layout(head).used(cache.length[source] + cache.num_appended(to, head),
                                   cache.num_long_range[cache.head_index(to, head)]);
}

/// Pages of a head that a copy takes from the pool.
template <class Ref>
__device__ std::int32_t pages_of_copy(const Ref& cache, std::int32_t head, std::int32_t used) {
    std::int32_t pages = 0;
    for (std::int32_t page = 0; page * std::int64_t{cache.page_size} < used; ++page) {
        pages += cache.is_shareable(head, used, page) ? 0 : 1;
    }
    return pages;
}

/// fork and reorder, launch 1: drops the sequences that are no target's source, if the pool then has the
/// pages that copies take. Otherwise the cache stays as it is and `refused` is 1.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: paged_moves.
/// In: moves, page tables. Out: refused [1] int64; status [1] is OR-ed. Overwrites: refcounts, the stack of
/// free pages, held.
///
/// Phases: 1. Count the pages that copies take. 2. Free the pages of dropped sequences. 3. Undo that where
/// they do not suffice.
template <class P, class T>
__global__ void __launch_bounds__(admit_threads)
    paged_drop_kernel(const DualRef<P, T>* const refs, const std::int32_t layers, const sequence_moves moves,
                      std::int64_t* const refused, std::uint32_t* const status) {
    __shared__ paged_moves all;
    __shared__ unsigned long long needed;
    const DualRef<P, T>& any = refs[0];
    load_moves(all, moves, any.max_sequences);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t each = layers * any.kv_heads;
    const std::int32_t before = *any.pool.free_count;
    if (thread == 0) {
        needed = 0;
    }
    __syncthreads();
    const auto for_each_dropped_page = [&](const auto& visit) {
        for (std::int32_t x = thread / 32; x < all.count * each; x += admit_threads / 32) {
            if (!all.dropped(x / each)) {
                continue;
            }
            const DualRef<P, T>& cache = refs[x % each / any.kv_heads];
            const std::int32_t seq = all.target(x / each), head = x % any.kv_heads;
            const std::int32_t held = cache.held[cache.head_index(seq, head)];
            for (std::int32_t page = lane_id(); page < held; page += 32) {
                visit(cache.pages(seq, head)[page]);
            }
        }
    };
    // 1. Count the pages that copies take.
    unsigned long long mine = 0;
    for (std::int32_t x = thread; x < all.count * each; x += admit_threads) {
        if (all.copies(x / each)) {
            const DualRef<P, T>& cache = refs[x % each / any.kv_heads];
            const std::int32_t head = x % any.kv_heads;
            mine += static_cast<unsigned long long>(
                pages_of_copy(cache, head, cache.used(all.source[x / each], head)));
        }
    }
    atomicAdd(&needed, mine);
    // 2. A fork to where it came from drops nothing.
    const bool moves_at_all = moves.sources != nullptr || moves.from != moves.to;
    if (moves_at_all) {
        for_each_dropped_page([&](std::int32_t id) {
            if (atomicSub(any.pool.names + id, 1) == 1) {
                any.pool.free_ids[atomicAdd(any.pool.free_count, 1)] = id;
            }
        });
    }
    __syncthreads();
    // 3. Do they suffice?
    const bool refuses =
        static_cast<std::int64_t>(needed) > *static_cast<volatile std::int32_t*>(any.pool.free_count);
    __syncthreads();
    if (refuses) {
        // What lies above `before` on the stack was free for a moment only.
        for_each_dropped_page([&](std::int32_t id) { atomicAdd(any.pool.names + id, 1); });
        if (thread == 0) {
            *any.pool.free_count = before;
        }
    } else {
        for (std::int32_t x = thread; x < all.count * each; x += admit_threads) {
            if (all.dropped(x / each)) {
                const DualRef<P, T>& cache = refs[x % each / any.kv_heads];
                cache.held[cache.head_index(all.target(x / each), x % any.kv_heads)] = 0;
            }
        }
    }
    if (thread == 0) {
        *refused = refuses ? 1 : 0;
        if (refuses && status != nullptr) {
            atomicOr(status, static_cast<std::uint32_t>(status_pool_exhausted));
        }
    }
    for (std::int32_t i = thread; i < all.count && moves.sources != nullptr; i += admit_threads) {
        if (moves.sources[i] != all.source[i] && status != nullptr) {
            atomicOr(status, static_cast<std::uint32_t>(status_bad_length));
        }
    }
}

/// fork and reorder, launch 2: per source one target inherits its page table; all targets get counters and
/// scorer states.
///
/// Grid: layers * Hkv blocks. Block: sequence_threads.
/// Shared memory: paged_moves; dynamic: two sequence_move arrays, then a word per thread and move.
/// In: moves, refused. Overwrites: page tables, held, kept, taken, pinned, victim, draft counts, states,
/// reservations of targets.
template <class P, class T>
__global__ void __launch_bounds__(sequence_threads)
    paged_inherit_kernel(const DualRef<P, T>* const refs, const sequence_moves moves,
                         const std::int64_t* const refused) {
    __shared__ paged_moves all;
    if (*refused != 0) {
        return;
    }
    auto* const inherited = reinterpret_cast<sequence_move*>(dynamic_shared());
    auto* const copied = inherited + max_reordered;
    void* const scratch = copied + max_reordered;
    const DualRef<P, T>& cache = refs[blockIdx.x / static_cast<unsigned>(refs[0].kv_heads)];
    const auto head = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(cache.kv_heads));
    load_moves(all, moves, cache.max_sequences);
    const auto thread = static_cast<std::int32_t>(threadIdx.x),
               threads = static_cast<std::int32_t>(blockDim.x);
    for (std::int32_t i = thread; i < all.count; i += threads) {
        const std::int32_t from = all.source[i], to = all.target(i);
        inherited[i] = {all.inherits(i) ? from : to, to, cache.held[cache.head_index(from, head)]};
        copied[i] = {from, to, 0};
    }
    __syncthreads();
    move_words<std::uint32_t, std::uint32_t>(
        inherited, all.count, scratch, thread, threads,
        cache.table_offset[head + 1] - cache.table_offset[head],
        [&](std::int32_t seq) { return cache.pages(seq, head); },
        [](const sequence_move& move) { return std::int64_t{move.used}; });
    // Dropped sequences hold nothing any more, so that a target that is not an heir has 0 already,
    // or stays as it is.
    for (std::int32_t i = thread; i < all.count; i += threads) {
        if (inherited[i].from != inherited[i].to) {
            cache.held[cache.head_index(inherited[i].to, head)] = inherited[i].used;
        } else if (all.copies(i)) {
            cache.held[cache.head_index(inherited[i].to, head)] = 0;
        }
    }
    const auto one = [](const sequence_move&) { return std::int64_t{1}; };
    move_words<std::uint32_t, std::uint32_t>(
        copied, all.count, scratch, thread, threads, 1,
        [&](std::int32_t seq) { return cache.num_long_range + cache.head_index(seq, head); }, one);
    move_words<std::uint32_t, std::uint32_t>(
        copied, all.count, scratch, thread, threads, 1,
        [&](std::int32_t seq) { return cache.appended + cache.head_index(seq, head); }, one);
    if constexpr (P::has_keep) {
        move_words<std::uint32_t, std::uint32_t>(
            copied, all.count, scratch, thread, threads, 1,
            [&](std::int32_t seq) { return cache.num_protected + cache.head_index(seq, head); }, one);
    }
    move_words<std::uint32_t, std::uint32_t>(
        copied, all.count, scratch, thread, threads, cache.state_size,
        [&](std::int32_t seq) { return cache.state + cache.head_index(seq, head) * cache.state_size; },
        [&](const sequence_move&) { return cache.state_size; });
    if (blockIdx.x == 0) {  // reservations go with the pages
        move_words<std::uint32_t, std::uint32_t>(
            inherited, all.count, scratch, thread, threads, 2,
            [&](std::int32_t seq) { return cache.reserved + seq; },
            [](const sequence_move&) { return std::int64_t{2}; });
        __syncthreads();
    }
    for (std::int32_t i = thread; i < all.count; i += threads) {
        if (blockIdx.x == 0 && all.copies(i)) {
            cache.reserved[all.target(i)] = 0;
        }
        cache.victim[cache.head_index(all.target(i), head)] = -1;
        if (head == 0) {
            cache.num_draft[all.target(i)] = 0;
        }
    }
}

/// fork and reorder, launch 3: page tables of the copies. A page that is full and can no longer change is
/// shared by refcount; the others get pages of their own.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: paged_moves, admit_memory.
/// Overwrites: page tables and held of the copies, refcounts, the stack of free pages.
template <class P, class T>
__global__ void __launch_bounds__(admit_threads)
    paged_share_kernel(const DualRef<P, T>* const refs, const std::int32_t layers, const sequence_moves moves,
                       const std::int64_t* const refused) {
    __shared__ paged_moves all;
    __shared__ admit_memory memory;
    if (*refused != 0) {
        return;
    }
    const DualRef<P, T>& any = refs[0];
    load_moves(all, moves, any.max_sequences);
    const std::int32_t each = layers * any.kv_heads, free = *any.pool.free_count;
    const auto used_of = [&](std::int32_t x) {
        return rows_of_copy(refs[x % each / any.kv_heads], x % any.kv_heads, all.source[x / each],
                            all.target(x / each));
    };
    const int appended = running_sums(
        memory, all.count * each,
        [&](std::int32_t x) {
            return all.copies(x / each)
                       ? pages_of_copy(refs[x % each / any.kv_heads], x % any.kv_heads, used_of(x))
                       : 0;
        },
        [&](std::int32_t x, int before) {
            if (!all.copies(x / each)) {
                return;
            }
            const DualRef<P, T>& cache = refs[x % each / any.kv_heads];
            const std::int32_t head = x % any.kv_heads, used = used_of(x), to = all.target(x / each);
            const std::int32_t* const of_source = cache.pages(all.holder(x / each), head);
            std::int32_t* const of_copy = cache.pages(to, head);
            std::int32_t page = 0, next = free - 1 - before;
            for (; page * std::int64_t{cache.page_size} < used; ++page) {
                if (cache.is_shareable(head, used, page)) {
                    of_copy[page] = of_source[page];
                    atomicAdd(any.pool.names + of_source[page], 1);
                } else {
                    const std::int32_t id = any.pool.free_ids[next--];
                    any.pool.names[id] = 1;
                    of_copy[page] = id;
                }
            }
            cache.held[cache.head_index(to, head)] = page;
        });
    if (threadIdx.x == 0) {
        *any.pool.free_count = free - appended;
    }
}

/// fork and reorder with an eviction part: the queries that it keeps.
///
/// Grid: layers * Hkv * pieces blocks. Block: sequence_threads. Shared memory: dynamic, as move_rows_kernel.
/// Overwrites: queries [observing, group, Dk] of T per head of the targets.
template <class P, class T>
__global__ void __launch_bounds__(sequence_threads)
    paged_queries_kernel(const DualRef<P, T>* const refs, const sequence_moves moves,
                         const std::int32_t pieces, const std::int64_t* const refused) {
    if (*refused != 0) {
        return;
    }
    auto* const all = reinterpret_cast<sequence_move*>(dynamic_shared());
    void* const scratch = all + max_reordered;
    const std::int32_t piece = static_cast<std::int32_t>(blockIdx.x) % pieces;
    const std::int32_t rest = static_cast<std::int32_t>(blockIdx.x) / pieces;
    const DualRef<P, T>& cache = refs[rest / refs[0].kv_heads];
    const std::int32_t head = rest % cache.kv_heads;
    const auto thread = static_cast<std::int32_t>(threadIdx.x),
               threads = static_cast<std::int32_t>(blockDim.x);
    for (std::int32_t i = thread; i < moves.count; i += threads) {
        all[i] = {moves.source(i, cache.max_sequences), moves.target(i), 0};
    }
    __syncthreads();
    const std::int64_t words = std::int64_t{cache.eviction.observing} * cache.group * cache.head_dim_qk *
                               static_cast<std::int64_t>(sizeof(T)) / 4;
    move_words<std::uint32_t, std::uint32_t>(
        all, moves.count, scratch, std::int64_t{piece} * threads + thread, std::int64_t{pieces} * threads,
        words, [&](std::int32_t seq) { return cache.query_row(seq, head, 0); },
        [&](const sequence_move&) { return words; });
}

/// fork and reorder, launch 4: the entries of pages that copies do not share, and the bounds of such pages.
///
/// Grid: layers * Hkv * pieces blocks. Block: sequence_threads; a warp per entry. Shared memory: paged_moves.
/// In: page tables of source and copy. Overwrites: keys, values, positions, scores and bounds in the copies'
/// own pages.
template <class P, class T>
__global__ void __launch_bounds__(sequence_threads)
    paged_copy_kernel(const DualRef<P, T>* const refs, const sequence_moves moves, const std::int32_t pieces,
                      const std::int64_t* const refused) {
    __shared__ paged_moves all;
    if (*refused != 0) {
        return;
    }
    const auto piece = static_cast<std::int32_t>(blockIdx.x) % pieces;
    const std::int32_t rest = static_cast<std::int32_t>(blockIdx.x) / pieces;
    const DualRef<P, T>& cache = refs[rest / refs[0].kv_heads];
    const std::int32_t head = rest % cache.kv_heads;
    load_moves(all, moves, cache.max_sequences);
    constexpr std::int32_t warps = sequence_threads / 32;
    for (std::int32_t i = 0; i < all.count; ++i) {
        if (!all.copies(i)) {
            continue;
        }
        const std::int32_t from = all.holder(i), to = all.target(i);
        const std::int32_t used = rows_of_copy(cache, head, all.source[i], to);
        const auto rows = cache.head_rows(from, head), copy = cache.head_rows(to, head);
        for (std::int32_t r = piece * warps + warp_id(); r < used; r += pieces * warps) {
            if (cache.is_shareable(head, used, r / cache.page_size)) {
                continue;
            }
            copy_row<T>(rows.k(r), copy.k(r), cache.head_dim_qk);
            copy_row<T>(rows.v(r), copy.v(r), cache.head_dim_vo);
            if (lane_id() == 0) {
                copy.position(r) = rows.position(r);
                copy.score(r) = rows.score(r);
            }
        }
        if constexpr (P::has_selection) {  // of rows that stand in both: a page of the cache has whole ones
            const std::int32_t size = rows.bound_rows;
            for (std::int32_t page = piece * warps + warp_id(); page * size < used; page += pieces * warps) {
                if (!cache.is_shareable(head, used, page * size / cache.page_size)) {
                    copy_row<T>(rows.bounds(page), copy.bounds(page), 2 * cache.head_dim_qk);
                }
            }
        }
    }
}

/// fork and reorder, launch 5: lengths of the targets, after the other launches have read the old ones.
///
/// Grid: 1 block. Block: sequence_threads. Shared memory: dynamic, as move_rows_kernel. Overwrites:
/// length [seq] int64.
template <class Length>
__global__ void __launch_bounds__(sequence_threads)
    paged_lengths_kernel(Length* const length, const std::int32_t max_sequences, const sequence_moves moves,
                         const std::int64_t* const refused) {
    if (*refused != 0) {
        return;
    }
    auto* const all = reinterpret_cast<sequence_move*>(dynamic_shared());
    void* const scratch = all + max_reordered;
    const auto thread = static_cast<std::int32_t>(threadIdx.x),
               threads = static_cast<std::int32_t>(blockDim.x);
    for (std::int32_t i = thread; i < moves.count; i += threads) {
        all[i] = {moves.source(i, max_sequences), moves.target(i), 0};
    }
    __syncthreads();
    move_words<std::uint32_t, std::uint32_t>(
        all, moves.count, scratch, thread, threads, 2, [&](std::int32_t seq) { return length + seq; },
        [](const sequence_move&) { return std::int64_t{2}; });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
