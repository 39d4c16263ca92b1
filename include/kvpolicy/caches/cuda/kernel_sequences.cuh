// Sequence operations of a cache on CUDA: clear and advance; fork and reorder of a FixedBudgetCache.
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cmath>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int sequence_threads = 128;
inline constexpr int advance_threads = 512;
inline constexpr std::int32_t max_reordered = 512;
inline constexpr std::int32_t row_pieces = 16;  // blocks that share the rows of a head

/// Empties `count` sequences from `first` on. Pages go back to the pool; `fresh` memory names none.
///
/// Grid: layers * count * Hkv blocks. Block: sequence_threads.
/// Overwrites: counters and scorer state [state_size] fp32 per head; length, reservation and draft count per
/// sequence; refcounts and the stack of free pages.
template <class Ref>
__global__ void __launch_bounds__(sequence_threads)
    clear_sequences_kernel(const Ref* const refs, const std::int32_t kv_heads, const std::int32_t first,
                           const std::int32_t count, const bool fresh) {
    const auto head = static_cast<std::int32_t>(blockIdx.x) % kv_heads;
    const std::int32_t rest = static_cast<std::int32_t>(blockIdx.x) / kv_heads;
    const std::int32_t seq = first + rest % count, layer = rest / count;
    const Ref& cache = refs[layer];
    const std::int64_t index = cache.head_index(seq, head);
    if constexpr (Ref::pooled) {
        const std::int32_t held = fresh ? 0 : cache.held[index];
        for (auto page = static_cast<std::int32_t>(threadIdx.x); page < held; page += sequence_threads) {
            const std::int32_t id = cache.pages(seq, head)[page];
            if (atomicSub(cache.pool.names + id, 1) == 1) {
                cache.pool.free_ids[atomicAdd(cache.pool.free_count, 1)] = id;
            }
        }
        __syncthreads();  // all have read `held`
        if (threadIdx.x == 0) {
            cache.held[index] = 0;
        }
    }
    float* const state = cache.state + index * cache.state_size;
    for (std::int64_t i = threadIdx.x; i < cache.state_size; i += sequence_threads) {
        // The only scorer with a state is the mLSTM, whose stabilizer is -inf at first, in the last number
        // but one.
        state[i] = i == cache.state_size - 2 ? -INFINITY : 0.0f;
    }
    if (threadIdx.x != 0) {
        return;
    }
    cache.num_long_range[index] = 0;
    if constexpr (Ref::policy_type::has_keep) {
        cache.num_protected[index] = 0;
    }
    cache.victim[index] = -1;
    cache.appended[index] = 0;
    cache.arrivals[index] = 0;
    if (head == 0) {
        cache.num_draft[seq] = 0;
        if (layer == 0) {
            cache.length[seq] = 0;
            if constexpr (Ref::pooled) {
                cache.reserved[seq] = 0;
            }
        }
    }
}

/// What advance() needs of a cache: all in few reads, since nothing else runs meanwhile.
struct advance_params {
    position_t* length = nullptr;      // [max_sequences]
    std::int32_t* appended = nullptr;  // [layers, max_sequences, kv_heads]
    std::int32_t layers = 0;
    std::int32_t max_sequences = 0;
    std::int32_t kv_heads = 0;
    position_t max_seq_len = 0;  // of a sequence
    Batch batch{};
    std::uint32_t* status = nullptr;  // [count]
    bool says_tokens = true;  // whether the batch does; else an entry moves by what layer 0 has appended,
    std::int32_t least = 1;   // and by so many at least

    /// Tokens beyond `longest` no layer has taken.
    [[nodiscard]] __device__ bool takes(std::int32_t /*sequence*/, std::int32_t /*tokens*/) const {
        return true;
    }
};

/// Adds the appended tokens to the lengths of sequences, if every head of every layer has appended them.
/// Call: advance_params.
///
/// Grid: count blocks. Block: advance_threads.
/// In: taken [layers, seq, Hkv] int32 (-1: the head found no page). Out: length [seq] int64, taken back at
/// 0; status [count] is OR-ed: status_bad_length, status_pool_exhausted, or status_layer_skipped where a
/// layer was skipped.
///
/// Phases: 1. Compare all heads' counts with the batch's. 2. Where one differs, report and stop. 3. Reset
/// the counts, add the tokens.
template <class Call>
__global__ void __launch_bounds__(advance_threads) advance_kernel(const __grid_constant__ Call call) {
    const auto i = static_cast<std::int32_t>(blockIdx.x);
    const active_entry active(call, call.batch, i, never);
    if (!active.there) {
        if (threadIdx.x == 0) {
            active.report(call.status, i);
        }
        return;
    }
    const std::int32_t heads = call.layers * call.kv_heads;
    const auto appended_by = [&](std::int32_t x) -> std::int32_t& {
        return call
            .appended[(std::int64_t{x / call.kv_heads} * call.max_sequences + active.seq) * call.kv_heads +
                      x % call.kv_heads];
    };
    const std::int32_t first = appended_by(0);  // -1: it found no pages for at least one
    const std::int32_t tokens = call.says_tokens ? active.tokens : first < 0 ? 1 : max(first, call.least);
    const position_t before = call.length[active.seq];
    // 1. Compare all heads' counts.
    bool differs = false, lacks = false;
    for (auto x = static_cast<std::int32_t>(threadIdx.x); x < heads; x += advance_threads) {
        const std::int32_t appended = appended_by(x);  // -1: it found no pages
        differs |= tokens != 0 ? appended != tokens : appended > 0;
        lacks |= tokens != 0 && appended < 0;
    }
    // 2. One differs: report it and stop.
    if (__syncthreads_or(differs ? 1 : 0) != 0) {
        const bool exhausted = __syncthreads_or(lacks ? 1 : 0) != 0;
        if (threadIdx.x == 0 && call.status != nullptr) {
            const status_bits why = before + tokens > call.max_seq_len ? status_bad_length
                                    : exhausted                        ? status_pool_exhausted
                                                                       : status_layer_skipped;
            atomicOr(call.status + i, static_cast<std::uint32_t>(why));
        }
        return;
    }
    // 3. Reset the counts, add the tokens.
    for (auto x = static_cast<std::int32_t>(threadIdx.x); x < heads; x += advance_threads) {
        appended_by(x) = 0;
    }
    if (threadIdx.x == 0) {
        call.length[active.seq] = before + tokens;
    }
}

/// Which sequences become what others were: sequence i what sources[i] was for i < count, or with null
/// sources sequence `to` what sequence `from` was.
struct sequence_moves {
    const std::int32_t* sources = nullptr;
    std::int32_t count = 1;
    std::int32_t from = 0;
    std::int32_t to = 0;

    __device__ std::int32_t target(std::int32_t i) const { return sources != nullptr ? i : to; }
    /// A source that there is not leaves the sequence as it is.
    __device__ std::int32_t source(std::int32_t i, std::int32_t max_sequences) const {
        const std::int32_t seq = sources != nullptr ? sources[i] : from;
        return seq >= 0 && seq < max_sequences ? seq : target(i);
    }
};

/// A move as a block sees it, in shared memory.
struct sequence_move {
    std::int32_t from, to;  // alike: nothing to do
    std::int32_t used;      // rows of `from`
};

/// Moves words x = first, first + stride, ... of an array: at(seq) is a sequence's, count(move) how many of
/// them move. All sequences' words are read before any is written, each by the thread that writes it, so that
/// no thread waits for another. A thread's words wait in its own `Room`s, one a move, in `scratch`: the same
/// ones whatever the word, since a neighbor may be a call ahead.
template <class Word, class Room, class At, class Count>
__device__ void move_words(const sequence_move* moves, std::int32_t number, void* scratch, std::int64_t first,
                           std::int64_t stride, std::int64_t most, const At& at, const Count& count) {
    static_assert(sizeof(Word) <= sizeof(Room));
    const auto threads = static_cast<std::int32_t>(blockDim.x);
    const auto mine = [&](std::int32_t i) -> Word& {
        return *reinterpret_cast<Word*>(static_cast<Room*>(scratch) +
                                        (i * threads + static_cast<std::int32_t>(threadIdx.x)));
    };
    for (std::int64_t x = first; x < most; x += stride) {
#pragma unroll 4
        for (std::int32_t i = 0; i < number; ++i) {
            if (moves[i].from != moves[i].to && x < count(moves[i])) {
                mine(i) = reinterpret_cast<const Word*>(at(moves[i].from))[x];
            }
        }
        for (std::int32_t i = 0; i < number; ++i) {
            if (moves[i].from != moves[i].to && x < count(moves[i])) {
                reinterpret_cast<Word*>(at(moves[i].to))[x] = mine(i);
            }
        }
    }
}

/// Room for the moves, before a word for every thread and move.
inline constexpr std::size_t moves_bytes = max_reordered * sizeof(sequence_move);
static_assert(moves_bytes % 16 == 0);

/// fork and reorder of a FixedBudgetCache: entries, page bounds and scorer states of all targets become
/// those of their sources. A thread reads its word of all sources before it writes any target, so moves may
/// form cycles.
///
/// Grid: layers * Hkv * pieces blocks. Block: 32 or sequence_threads.
/// Shared memory: dynamic moves_bytes, then a Word per thread and move.
/// In: moves. Overwrites: keys, values, positions, scores, bounds and states of the targets.
template <class Word, class P, class T>
__global__ void __launch_bounds__(sequence_threads)
    move_rows_kernel(const FixedBudgetRef<P, T>* const refs, const sequence_moves moves,
                     const std::int32_t pieces) {
    auto* const all = reinterpret_cast<sequence_move*>(dynamic_shared());
    void* const scratch = dynamic_shared() + moves_bytes;
    const std::int32_t piece = static_cast<std::int32_t>(blockIdx.x) % pieces;
    const std::int32_t rest = static_cast<std::int32_t>(blockIdx.x) / pieces;
    const std::int32_t kv_heads = refs[0].kv_heads, head = rest % kv_heads;
    const FixedBudgetRef<P, T> cache = refs[rest / kv_heads];
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < moves.count;
         i += static_cast<std::int32_t>(blockDim.x)) {
        const std::int32_t from = moves.source(i, cache.max_sequences);
        all[i] = {from, moves.target(i), cache.used(from, head)};
    }
    __syncthreads();
    const std::int64_t first = std::int64_t{piece} * blockDim.x + threadIdx.x;
    const std::int64_t stride = std::int64_t{pieces} * blockDim.x;
    const auto rows = [&]<class Unit>(Unit, auto* array, std::int64_t each) {
        const std::int64_t words =
            each * static_cast<std::int64_t>(sizeof *array) / static_cast<std::int64_t>(sizeof(Unit));
        move_words<Unit, Word>(
            all, moves.count, scratch, first, stride, cache.capacity(head) * words,
            [&](std::int32_t seq) { return array + cache.first_row(seq, head) * each; },
            [&](const sequence_move& move) { return move.used * words; });
    };
    rows(Word{}, cache.k, cache.head_dim_qk);
    rows(Word{}, cache.v, cache.head_dim_vo);
    rows(std::uint32_t{}, cache.position, 1);
    rows(std::uint32_t{}, cache.score, 1);
    if constexpr (P::has_selection) {
        const std::int32_t size = cache.selection.page_size();
        const auto pages = [&](std::int64_t of) { return (of + size - 1) / size; };
        const std::int64_t words = 2 * cache.head_dim_qk * static_cast<std::int64_t>(sizeof(T)) /
                                   static_cast<std::int64_t>(sizeof(Word));
        move_words<Word, Word>(
            all, moves.count, scratch, first, stride, pages(cache.capacity(head)) * words,
            [&](std::int32_t seq) {
                return cache.bounds + cache.first_row(seq, head) / size * 2 * cache.head_dim_qk;
            },
            [&](const sequence_move& move) { return pages(move.used) * words; });
    }
    move_words<std::uint32_t, Word>(
        all, moves.count, scratch, first, stride, cache.state_size,
        [&](std::int32_t seq) { return cache.state + cache.head_index(seq, head) * cache.state_size; },
        [&](const sequence_move&) { return cache.state_size; });
}

/// Writes the page tables of a FixedBudgetCache with a selection: page i is table entry i, and one slab has
/// them all.
///
/// Grid: layers blocks. Block: sequence_threads.
/// Overwrites: table, table_offset, tile_offset, held, slab, free_count of PlacedPages.
template <class P, class T>
__global__ void __launch_bounds__(sequence_threads)
    lay_out_pages_kernel(const FixedBudgetRef<P, T>* const refs) {
    const FixedBudgetRef<P, T>& cache = refs[blockIdx.x];
    const PlacedPages<T>& pages = cache.placed;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int64_t count = cache.page_count();
    for (std::int64_t page = thread; page < count; page += sequence_threads) {
        pages.table[page] = static_cast<std::int32_t>(page);
    }
    for (std::int32_t head = thread; head <= cache.kv_heads; head += sequence_threads) {
        pages.table_offset[head] = cache.row_offset[head] / cache.page_size;
        pages.tile_offset[head] =
            head < cache.kv_heads ? cache.first_tile(0, head) : cache.tiles(cache.rows, cache.kv_heads);
    }
    for (std::int32_t x = thread; x < cache.max_sequences * cache.kv_heads; x += sequence_threads) {
        const std::int32_t head = x % cache.kv_heads;
        pages.held[x] = static_cast<std::int32_t>((cache.row_offset[head + 1] - cache.row_offset[head]) /
                                                  cache.page_size);
    }
    if (thread == 0) {
        *pages.slab = {cache.k, cache.v, cache.position, cache.score, cache.bounds};
        *pages.free_count = 0;
    }
}

/// fork and reorder of a FixedBudgetCache: counters and lengths, after move_rows_kernel has read the old
/// ones.
///
/// Grid: layers blocks. Block: that of move_rows_kernel. Shared memory: as there.
/// Overwrites: kept, taken, victim and draft counts of the targets; the first block also their lengths;
/// status [1] is OR-ed.
template <class P, class T>
__global__ void __launch_bounds__(sequence_threads)
    move_counters_kernel(const FixedBudgetRef<P, T>* const refs, const sequence_moves moves,
                         std::uint32_t* const status) {
    auto* const all = reinterpret_cast<sequence_move*>(dynamic_shared());
    void* const scratch = dynamic_shared() + moves_bytes;
    const FixedBudgetRef<P, T>& cache = refs[blockIdx.x];
    const auto thread = static_cast<std::int32_t>(threadIdx.x),
               threads = static_cast<std::int32_t>(blockDim.x);
    for (std::int32_t i = thread; i < moves.count; i += threads) {
        all[i] = {moves.source(i, cache.max_sequences), moves.target(i), 0};
        for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
            cache.victim[cache.head_index(all[i].to, head)] = -1;
        }
        cache.num_draft[all[i].to] = 0;
        const bool bad = moves.sources != nullptr && moves.sources[i] != all[i].from;
        if (bad && status != nullptr && blockIdx.x == 0) {
            atomicOr(status, static_cast<std::uint32_t>(status_bad_length));
        }
    }
    __syncthreads();
    move_words<std::uint32_t, std::uint32_t>(
        all, moves.count, scratch, thread, threads, cache.kv_heads,
        [&](std::int32_t seq) { return cache.num_long_range + cache.head_index(seq, 0); },
        [&](const sequence_move&) { return std::int64_t{cache.kv_heads}; });
    move_words<std::uint32_t, std::uint32_t>(
        all, moves.count, scratch, thread, threads, cache.kv_heads,
        [&](std::int32_t seq) { return cache.appended + cache.head_index(seq, 0); },
        [&](const sequence_move&) { return std::int64_t{cache.kv_heads}; });
    if (blockIdx.x == 0) {
        move_words<std::uint32_t, std::uint32_t>(
            all, moves.count, scratch, thread, threads, 2,
            [&](std::int32_t seq) { return cache.length + seq; },
            [](const sequence_move&) { return std::int64_t{2}; });
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
