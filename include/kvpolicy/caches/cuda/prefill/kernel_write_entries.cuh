// After attention: the entries that a chunk leaves. A key that stays keeps its entry, so only admitted keys
// and new tokens are copied: admitted keys first, since they may come from window entries.
#pragma once

#include <kvpolicy/caches/cuda/copy_rows.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_lifetimes.cuh>
#include <kvpolicy/caches/cuda/prefill/prefill_params.cuh>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A head that `pieces` blocks share: the block is number `piece`, its warp number `warp` of `warps`.
template <class View>
struct prefill_piece : prefill_head<View> {
    std::int32_t piece, warp, warps;

    __device__ explicit prefill_piece(const prefill_params<View>& call)
        : prefill_head<View>(call, static_cast<std::int32_t>(blockIdx.x) / call.pieces),
          piece(static_cast<std::int32_t>(blockIdx.x) % call.pieces),
          warp(piece * (prefill_threads / 32) + warp_id()),
          warps(call.pieces * (prefill_threads / 32)) {}
};

/// Writes token j of a chunk to a row, by a warp.
template <class View, class T>
__device__ void put_token(const prefill_params<View>& call, const prefill_head<View>& at, std::int32_t j,
                          T* key, T* value, position_t& position, float& score) {
    copy_entry(call.tokens.key(at.rows, at.entry, at.head, j),
               call.tokens.value(at.rows, at.entry, at.head, j), key, value, call.cache.head_dim_qk,
               call.cache.head_dim_vo);
    if (lane_id() == 0) {
        position = at.base + j;
        score = at.score(call, j);
    }
}

/// Writes the keys that top_k_update_kernel admitted into their top-k slots. It runs before
/// prefill_recent_kernel, since a key may come from a window entry that the new tokens overwrite.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads; a warp per slot.
/// In: num_long_range, holder, slot_position, slot_score; keys and values of window entries and tokens.
/// Overwrites: keys, values, positions and scores of the slots whose key is new.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_top_k_kernel(const __grid_constant__ prefill_params<View> call) {
    const prefill_piece<View> at(call);
    if (at.active.tokens == 0) {
        return;
    }
    const std::int32_t num_long_range = call.top_k.num_long_range[at.pair], capacity = at.rows.capacity();
    const View& cache = call.cache;
    const std::int32_t first = first_changing_slot(at.rows.head_params, cache.num_long_range[at.rows.index]);
    const std::int64_t top_k_slots = std::int64_t{at.pair} * call.top_k.top_k_slots - first;
    // What the next slot holds is loaded while this one's key is copied.
    struct held_key {
        std::int32_t holder;
        position_t position;
        float score;
    };
    const auto key_of_slot = [&](std::int32_t p) {
        return p < num_long_range
                   ? held_key{call.top_k.holder[top_k_slots + p], call.top_k.slot_position[top_k_slots + p],
                              call.top_k.slot_score[top_k_slots + p]}
                   : held_key{};
    };
    held_key next = key_of_slot(first + at.warp);
    for (std::int32_t p = first + at.warp; p < num_long_range; p += at.warps) {
        const held_key key = next;
        next = key_of_slot(p + at.warps);
        const std::int32_t row = at.rows.layout.slot(p);
        if (key.holder == row) {
            continue;  // it held its slot already
        }
        const bool of_ring = key.holder < capacity;
        const std::int32_t j = key.holder - capacity;
        copy_entry(of_ring ? at.rows.key(key.holder) : call.tokens.key(at.rows, at.entry, at.head, j),
                   of_ring ? at.rows.value(key.holder) : call.tokens.value(at.rows, at.entry, at.head, j),
                   at.rows.key(row), at.rows.value(row), cache.head_dim_qk, cache.head_dim_vo);
        if (lane_id() == 0) {
            at.rows.position_of(row) = key.position;
            at.rows.score_of(row) = key.score;
        }
    }
}

/// Writes the chunk's tokens into sinks and window, and the head's counters.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads; a warp per token.
/// In: the tokens, their scores; num_long_range and num_protected of top_k_update_kernel; `advanced` [count,
/// Hkv, state_size] fp32.
/// Overwrites: entries of the tokens that are still in the window or are sinks; appended, num_long_range,
/// victim, num_protected; the scorer's state from `advanced`; the count of draft tokens.
///
/// Phases: 1. Counters, by the first block of a head. 2. The scorer's state. 3. Entries.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_recent_kernel(const __grid_constant__ prefill_params<View> call) {
    const prefill_piece<View> at(call);
    const std::int32_t tokens = at.active.tokens;
    const View& cache = call.cache;
    // 1. Counters.
    if (at.piece == 0 && threadIdx.x == 0 && at.active.there) {
        if (tokens != 0) {
            cache.appended[at.rows.index] = tokens;
            cache.num_long_range[at.rows.index] = call.top_k.num_long_range[at.pair];
            cache.victim[at.rows.index] = -1;
            if constexpr (requires { cache.num_protected; }) {
                if (call.top_k.num_protected != nullptr) {
                    cache.num_protected[at.rows.index] = call.top_k.num_protected[at.pair];
                }
            }
        }
        // No tokens: an accept forgets the draft, a prefill leaves the sequence alone.
        if (at.head == 0 && (tokens != 0 || call.tokens.spare)) {
            cache.num_draft[at.active.seq] = 0;
        }
    }
    // 2. The scorer's state.
    if (call.advanced != nullptr && tokens != 0) {
        const std::int64_t size = cache.state_size;
        for (std::int64_t i = at.piece * prefill_threads + static_cast<std::int32_t>(threadIdx.x); i < size;
             i += call.pieces * prefill_threads) {
            cache.state[at.rows.index * size + i] = call.advanced[at.pair * size + i];
        }
    }
    // 3. Entries.
    const position_t sinks = at.rows.head_params.sinks - at.base,
                     recent = tokens - at.rows.head_params.window;
    const auto gap = static_cast<std::int32_t>(max(position_t{0}, min(sinks, position_t{tokens})));
    const auto left = static_cast<std::int32_t>(max(position_t{0}, recent - gap));  // have left the window
    for (std::int32_t x = at.warp; x < tokens - left; x += at.warps) {
        const std::int32_t j = x < gap ? x : x + left;
        const std::int32_t row = at.rows.layout.recent(at.base + j);
        put_token(call, at, j, at.rows.key(row), at.rows.value(row), at.rows.position_of(row),
                  at.rows.score_of(row));
    }
}

/// Writes draft tokens into the spare entries of their heads, where accept finds them.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads; a warp per token.
/// In: the tokens and their scores. Overwrites: the spare entries; the count of draft tokens per sequence.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_draft_kernel(const __grid_constant__ prefill_params<View> call) {
    const prefill_piece<View> at(call);
    const std::int32_t tokens = at.active.tokens;
    const View& cache = call.cache;
    if (at.piece == 0 && at.head == 0 && threadIdx.x == 0 && tokens != 0) {
        cache.num_draft[at.active.seq] = tokens;
    }
    for (std::int32_t j = at.warp; j < tokens; j += at.warps) {
        put_token(call, at, j, at.rows.spare_key(j), at.rows.spare_value(j), at.rows.spare_position(j),
                  at.rows.spare_score(j));
    }
}

/// The rows of a head, with the bounds of their pages.
template <class View>
__device__ auto bounded_rows(const prefill_params<View>& call, const typename View::head_type& head) {
    if constexpr (requires { head.rows; }) {
        return head.rows;
    } else {
        const std::int64_t first = head.position - call.cache.position;
        return PlainRows<typename View::value_type>{
            head.k,
            head.v,
            head.position,
            head.score,
            head.head_dim_qk,
            head.head_dim_vo,
            call.bounds + first / call.bound_rows * 2 * head.head_dim_qk,
            call.bound_rows};
    }
}

/// Recomputes the bounds (minimum and maximum of each key dim) of the pages whose entries a chunk wrote.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads; a warp per page.
/// In: the entries. Overwrites: bounds [2, Dk] of T per page, of pages that may lose a key and of pages with
/// new sequences.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_bounds_kernel(const __grid_constant__ prefill_params<View> call) {
    const prefill_piece<View> at(call);
    if (at.active.tokens == 0) {
        return;
    }
    const HeadParams& head_params = at.rows.head_params;
    const std::int32_t used =
        at.rows.layout.used(at.base + at.active.tokens, call.top_k.num_long_range[at.pair]);
    const bool updates = head_params.budget != unlimited && head_params.budget != 0;
    const std::int32_t expirable = updates ? used : at.rows.layout.slot(0);
    const std::int32_t fresh = at.rows.layout.slot(call.num_long_range_before[at.pair]);
    const auto rows = bounded_rows(call, at.rows);
    refresh_pages(rows, 0, expirable, used, at.warp, at.warps);
    if (expirable < used) {
        // A page that both ranges have is the same, whoever writes it.
        refresh_pages(rows, fresh, used, used, at.warp, at.warps);
    }
}

/// Keeps the queries of a chunk for the eviction part: those of the last `observing` tokens in a ring, or
/// with `num_draft` those of all draft tokens in the spare rows. Without `q` the ring takes the spare rows'
/// queries.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads; a warp per query row.
/// In: q [count, Hq, most, Dk] of T. Overwrites: queries [seq, Hkv, observing, group, Dk] or spare_queries
/// of T.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_queries_kernel(const __grid_constant__ prefill_params<View> call,
                           const rows_view<const typename View::value_type> q, const bool num_draft) {
    using T = typename View::value_type;
    const prefill_piece<View> at(call);
    const View& cache = call.cache;
    const std::int32_t tokens = at.active.tokens, group = cache.group;
    const std::int32_t first = num_draft || tokens < cache.observing ? 0 : tokens - cache.observing;
    for (std::int32_t x = first * group + at.warp; x < tokens * group; x += at.warps) {
        const std::int32_t j = x / group, g = x % group;
        T* const spare = cache.spare_query_row(at.rows.index, j) + std::int64_t{g} * cache.head_dim_qk;
        const T* const from =
            q.data != nullptr ? q.row(at.entry, at.head * group + g, call.tokens.packed.begin(at.entry) + j)
                              : spare;
        T* const to = num_draft
                          ? spare
                          : cache.query_row(at.rows.index, at.base + j) + std::int64_t{g} * cache.head_dim_qk;
        copy_row<T>(from, to, cache.head_dim_qk);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
