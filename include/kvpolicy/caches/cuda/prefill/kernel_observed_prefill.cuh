// Prompts of caches whose policy ranks keys by the attention they receive: before and after the attention of
// a block of tokens.
#pragma once

#include <kvpolicy/attention/cuda/received_mass/agent_choose_best.cuh>
#include <kvpolicy/caches/cuda/copy_rows.cuh>
#include <kvpolicy/caches/cuda/prefill/agent_observed_end.cuh>
#include <kvpolicy/caches/cuda/prefill/observed_prefill_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// tokens[i] = those of entry i that are in the block: all[i] less `done`, 0 to `most`.
///
/// Grid: 1 block. Block: prefill_threads. Out: tokens [count].
template <class Count>
__global__ void __launch_bounds__(prefill_threads)
    observed_tokens_kernel(const Count* const all, Count* const tokens, const std::int32_t count,
                           const std::int32_t done, const std::int32_t most) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += prefill_threads) {
        tokens[i] = max(0, min(all[i] - done, most));
    }
}

/// How many top-k slots of a head a call leaves in use, which depends on counts alone.
///
/// Grid: count * Hkv / prefill_threads blocks. Block: prefill_threads; a thread per head. In: the call's
/// tokens per entry, lengths and counters. Out: top_k.num_long_range [pairs].
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    observed_slots_after_kernel(const __grid_constant__ prefill_params<View> call) {
    const std::int32_t pair =
        static_cast<std::int32_t>(blockIdx.x) * prefill_threads + static_cast<std::int32_t>(threadIdx.x);
    if (pair >= call.batch.count * call.cache.kv_heads) {
        return;
    }
    const prefill_head<View> at(call, pair);
    std::int32_t after = 0;
    if (at.active.tokens != 0) {
        const HeadParams& head_params = at.rows.head_params;
        const position_t recent = position_t{head_params.sinks} + head_params.window;
        const position_t left_before = max(position_t{0}, at.base - recent);
        const position_t left_after = max(position_t{0}, at.base + at.active.tokens - recent);
        after =
            static_cast<std::int32_t>(min(call.cache.num_long_range[at.rows.index] + left_after - left_before,
                                          position_t{head_params.budget}));
    }
    call.top_k.num_long_range[pair] = after;
}

/// Keys of a head that compete when a block begins.
template <class View>
struct observed_rows_before {
    const observed_prefill_head<View>& at;

    __device__ bool competes(std::int32_t row) const {
        const position_t t = at.rows.position_of(row);
        return t >= at.rows.head_params.sinks && t <= at.base - at.rows.head_params.window;
    }
    __device__ float value(std::int32_t row) const { return at.rows.score_of(row); }
    __device__ position_t position(std::int32_t row) const { return at.rows.position_of(row); }
};

/// The beginning of a block: the key that leaves where decoded tokens evict (the keys up to the block's first
/// token - w compete with the scores that they have), and visible intervals for attention.
///
/// Grid: count * Hkv blocks. Block: choice_threads. Shared memory: choice_memory (static).
/// In: lengths, num_long_range, positions and scores of the entries. Out: past_rows, first_row [pairs];
/// past_expiry [pairs, max_entries] of those rows, 0 for a key that leaves, else never; chunk_expiry [pairs,
/// most], never.
template <class View>
__global__ void __launch_bounds__(choice_threads)
    observed_past_kernel(const __grid_constant__ observed_prefill_params<View> params) {
    __shared__ choice_memory memory;
    const observed_prefill_head<View> at(params, static_cast<std::int32_t>(blockIdx.x));
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const prefill_params<View>& call = params.call;
    const std::int32_t used =
        at.tokens != 0 ? at.rows.layout.used(at.base, call.cache.num_long_range[at.rows.index]) : 0;
    if (thread == 0) {
        call.past_rows[at.pair] = used;
        if constexpr (View::paged) {
            call.first_row[at.pair] = at.rows.table - call.cache.table;
        } else {
            call.first_row[at.pair] = at.active.seq * call.cache.rows + call.cache.row_offset[at.head];
        }
    }
    for (std::int32_t j = thread; j < at.tokens; j += choice_threads) {
        call.top_k.chunk_expiry[at.chunk_plane() + j] = never;
    }
    const observed_rows_before<View> keys{at};
    chosen_keys chosen;
    if (params.evicts_at_steps && used != 0) {
        chosen = choose_best(memory, used, at.rows.head_params.budget, keys);
    }
    for (std::int32_t r = thread; r < used; r += choice_threads) {
        const bool stays =
            chosen.all || !keys.competes(r) || chosen.keeps(choice_number(keys.value(r)), keys.position(r));
        call.top_k.past_expiry[at.past_plane() + r] = stays ? never : 0;
    }
}

/// The rows that compete at the end of a block, by position: order[rank] = row.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads; a thread per row, which compares it with all.
/// Shared memory: none. In: positions; past_expiry. Out: order [pairs, max_entries]. O(rows^2).
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    observed_order_kernel(const __grid_constant__ observed_prefill_params<View> params) {
    const std::int32_t pieces = params.call.pieces;
    const observed_prefill_head<View> at(params, static_cast<std::int32_t>(blockIdx.x) / pieces);
    if (at.tokens == 0) {
        return;
    }
    const std::int32_t used = params.call.past_rows[at.pair];
    const auto competes = [&](std::int32_t row, position_t t) {
        return at.behind_window(t) && !at.excluded(row);
    };
    const auto first = static_cast<std::int32_t>(blockIdx.x) % pieces * prefill_threads;
    for (std::int32_t r = first + static_cast<std::int32_t>(threadIdx.x); r < used;
         r += pieces * prefill_threads) {
        const position_t mine = at.rows.position_of(r);
        if (!competes(r, mine)) {
            continue;
        }
        std::int32_t rank = 0;
        for (std::int32_t other = 0; other < used; ++other) {
            const position_t its = at.rows.position_of(other);
            rank += its < mine && competes(other, its) ? 1 : 0;
        }
        params.order[at.past_plane() + rank] = r;
    }
}

/// The end of a block.
///
/// Grid: count * Hkv blocks. Block: choice_threads. Shared memory: choice_memory (static).
/// In: past_mass and chunk_mass, of the block's queries; past_rows, past_expiry; order, with pooling;
/// positions and scores of the entries. Out: moved [pairs, max_entries] of the slots in use, num_long_range
/// [pairs]. Overwrites: past_mass and chunk_mass with the new scores; scores of rows whose key stays in them.
/// 1. Scores take the masses: they are added, or replace what was there.
/// 2. The keys behind the window of the block's last token compete.
/// 3. Slots.
/// 4. Scores of rows.
template <class View>
__global__ void __launch_bounds__(choice_threads)
    observed_end_block_kernel(const __grid_constant__ observed_prefill_params<View> params) {
    __shared__ choice_memory memory;
    agent_observed_end<View>(params, memory).run();
}

/// A head that `pieces` blocks share.
template <class View>
struct observed_prefill_piece : observed_prefill_head<View> {
    std::int32_t piece, warp, warps;

    __device__ explicit observed_prefill_piece(const observed_prefill_params<View>& of)
        : observed_prefill_head<View>(of, static_cast<std::int32_t>(blockIdx.x) / of.call.pieces),
          piece(static_cast<std::int32_t>(blockIdx.x) % of.call.pieces),
          warp(piece * (prefill_threads / 32) + warp_id()),
          warps(of.call.pieces * (prefill_threads / 32)) {}

    /// Writes token j of the block to a row, by a warp.
    __device__ void put_token(std::int32_t j, std::int32_t row) const {
        const prefill_params<View>& call = this->params.call;
        copy_entry(call.tokens.key(this->rows, this->entry, this->head, j),
                   call.tokens.value(this->rows, this->entry, this->head, j), this->rows.key(row),
                   this->rows.value(row), call.cache.head_dim_qk, call.cache.head_dim_vo);
        if (lane_id() == 0) {
            this->rows.position_of(row) = this->base + j;
            this->rows.score_of(row) = this->params.chunk_mass[this->chunk_plane() + j];
        }
    }
};

/// Writes the keys that come to top-k slots: from other rows, which no block of this kernel overwrites, and
/// from the block's tokens. It runs before observed_recent_kernel, since a key may come from a window entry
/// that the new tokens overwrite.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads; a warp per slot.
/// In: moved, num_long_range, past_mass and chunk_mass (scores). Overwrites: keys, values, positions and
/// scores of the slots whose key is new.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    observed_slots_kernel(const __grid_constant__ observed_prefill_params<View> params) {
    const observed_prefill_piece<View> at(params);
    if (at.tokens == 0) {
        return;
    }
    const View& cache = params.call.cache;
    const std::int32_t max_entries = params.call.top_k.max_entries;
    for (std::int32_t p = at.warp; p < params.num_long_range[at.pair]; p += at.warps) {
        const std::int32_t from = params.moved[at.past_plane() + p], row = at.rows.layout.slot(p);
        if (from < 0) {
            continue;
        }
        if (from >= max_entries) {
            at.put_token(from - max_entries, row);
            continue;
        }
        copy_entry(at.rows.key(from), at.rows.value(from), at.rows.key(row), at.rows.value(row),
                   cache.head_dim_qk, cache.head_dim_vo);
        if (lane_id() == 0) {
            at.rows.position_of(row) = at.rows.position_of(from);
            at.rows.score_of(row) = params.past_mass[at.past_plane() + from];
        }
    }
}

/// Writes the block's tokens into sinks and window, and the head's counters.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads; a warp per token.
/// In: the tokens, chunk_mass (scores), num_long_range. Overwrites: entries of the tokens that are sinks or
/// in the window of the block's last one; appended, num_long_range, victim; the count of draft tokens.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    observed_recent_kernel(const __grid_constant__ observed_prefill_params<View> params) {
    const View& cache = params.call.cache;
    const observed_prefill_piece<View> at(params);
    if (at.tokens != 0 && at.piece == 0 && threadIdx.x == 0) {
        cache.appended[at.rows.index] = params.done + at.tokens;
        cache.num_long_range[at.rows.index] = params.num_long_range[at.pair];
        cache.victim[at.rows.index] = -1;
        if (at.head == 0) {
            cache.num_draft[at.active.seq] = 0;
        }
    }
    for (std::int32_t j = at.warp; j < at.tokens; j += at.warps) {
        if (!at.behind_window(at.base + j)) {
            at.put_token(j, at.rows.layout.recent(at.base + j));
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
