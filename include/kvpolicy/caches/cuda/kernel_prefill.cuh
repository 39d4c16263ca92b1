// Kernels of a chunk of tokens: which keys stay, and after attention the entries.
//
// One warp runs the top-k updates of a head on copies in the workspace. They yield the visible interval of
// every entry, which attention needs, and the key of every top-k slot, which the last kernels write. A key
// that stays keeps its entry, so only admitted keys and new tokens are copied: admitted keys first, since
// they may come from window entries.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int prefill_threads = 128;
inline constexpr std::int32_t chunk_pieces = 8;  // blocks that share the copies of a head

/// What the kernels of a chunk share.
template <class View_>
struct prefill_params {
    using View = View_;
    using T = typename View::value_type;

    View cache;
    Batch batch{};  // q_len: `appended`, once prefill_begin_kernel has run
    prefill_tokens<T> tokens{};
    plane_view<const float> scores{};  // of the new tokens, where they come with them
    float* computed = nullptr;         // [count, Hkv, most]: see score_params; null: none
    bool on_leaving = false;           // `computed` are those of the keys that leave
    const float* late =
        nullptr;  // [count, Hkv, most]: of the new tokens, where those are of the keys that leave
    std::uint32_t* status = nullptr;  // [count]
    std::int32_t max_entries = 0;     // the most rows of a head
    std::int32_t top_k_slots =
        0;  // the most of a head that a chunk may write: those of the top-k update, else the new ones
    std::int32_t tiles = 0;        // of all its slots
    bool top_k_in_shared = false;  // slots and records fit into shared memory
    std::int32_t together = 1;     // entries whose rows are brought together at once, of a DualCache
    // Made by prefill_begin_kernel and prefill_decide_kernel.
    std::int32_t* appended = nullptr;        // [count]: tokens that count
    std::int64_t* first_row = nullptr;       // [count, Hkv]
    std::int32_t* position = nullptr;        // [count, Hkv, max_entries], from the chunk's first token on
    expiry_t* past_expiry = nullptr;         // [count, Hkv, max_entries]
    expiry_t* chunk_expiry = nullptr;        // [count, Hkv, most]
    float* slot_score = nullptr;             // [count, Hkv, top_k_slots], from first_contested on
    position_t* slot_position = nullptr;     // [count, Hkv, top_k_slots], the same
    std::int32_t* holder = nullptr;          // [count, Hkv, top_k_slots], the same: see detail::chunk_slots
    std::int32_t* record = nullptr;          // [count, Hkv, tiles]
    std::int32_t* num_long_range = nullptr;  // [count, Hkv]: slots in use after the chunk
    std::int32_t* num_protected =
        nullptr;  // [count, Hkv], with a keep part: of these, keys that do not compete
    std::int32_t* num_long_range_before = nullptr;  // [count, Hkv], with a selection
    const float* advanced =
        nullptr;          // [count, Hkv, state_size]: the scorer's states after it, if not in the cache
    T* bounds = nullptr;  // [max_sequences, rows / bound_rows, 2, head_dim_qk], of a FixedBudgetCache
                          // with a selection
    std::int32_t bound_rows = 1;
};

/// Shared memory of a head's top-k updates: positions, scores, records.
inline std::size_t top_k_bytes(std::int64_t top_k_slots, std::int64_t tiles) {
    return static_cast<std::size_t>(top_k_slots) * (sizeof(position_t) + sizeof(float)) +
           static_cast<std::size_t>(tiles) * sizeof(std::int32_t);
}

/// One head of an entry.
template <class View>
struct prefill_head {
    std::int32_t pair, entry, head;
    active_entry active;
    typename View::head_type rows;
    position_t base;

    __device__ prefill_head(const prefill_params<View>& call, std::int32_t number)
        : pair(number),
          entry(number / call.cache.kv_heads),
          head(number % call.cache.kv_heads),
          active(call.cache, call.batch, entry, call.tokens.most),
          rows(call.cache, active.seq, head),
          base(active.there ? call.cache.length[active.seq] : 0) {}

    /// The score of token j, as its row will keep it.
    __device__ float score(const prefill_params<View>& call, std::int32_t j) const {
        float score = 0.0f;
        if (call.computed != nullptr) {
            const float* const from = call.on_leaving ? call.late : call.computed;
            score = from == nullptr ? 0.0f : from[std::int64_t{pair} * call.tokens.most + j];
        } else if (call.tokens.spare) {
            score = rows.spare_score(j);
        } else if (call.scores) {
            score = call.scores.head(entry, head)[j];
        }
        const bool counts = base + j >= rows.head_params.sinks;
        return counts ? score : call.computed == nullptr && score == score ? score : 0.0f;
    }
    /// The score of the key that leaves the window when token j comes.
    __device__ float leaving_score(const prefill_params<View>& call, std::int32_t j) const {
        const position_t u = base + j - rows.head_params.window;
        if (call.on_leaving && call.computed != nullptr) {
            return call.computed[std::int64_t{pair} * call.tokens.most + j];
        }
        return u < base ? rows.score_of(rows.layout.recent(u))
                        : score(call, static_cast<std::int32_t>(u - base));
    }
    /// The name of key u, which leaves the window: see detail::chunk_slots.
    __device__ std::int32_t name(position_t u) const {
        return u < base ? rows.layout.recent(u) : rows.capacity() + static_cast<std::int32_t>(u - base);
    }
};

/// Finds how many tokens of the chunk each entry of the batch brings: at most `most`; from the draft tokens
/// at most as many as were appended to the sequence.
///
/// Grid: 1 block. Block: prefill_threads.
/// In: batch, the sequences' lengths, counters and draft positions. Out: taken [count]; status [count] is
/// OR-ed.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_begin_kernel(const __grid_constant__ prefill_params<View> call) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.batch.count; i += prefill_threads) {
        active_entry active = active_entry(call.cache, call.batch, i, call.tokens.most).once(call.cache);
        if (call.tokens.spare && active.tokens != 0) {
            const typename View::head_type head(call.cache, active.seq, 0);
            if (active.tokens > call.cache.num_draft[active.seq] ||
                head.spare_position(0) != call.cache.length[active.seq]) {
                active.refuse(status_bad_length);
            }
        }
        call.appended[i] = active.tokens;
        active.report(call.status, i);
    }
}

/// The first of `num_long_range` slots whose key may change: without a budget a key keeps its slot for good,
/// and so does one that has it for its position.
__device__ inline std::int32_t first_contested(const HeadParams& head_params, std::int32_t num_long_range) {
    return head_params.budget == unlimited || head_params.budget == 0 ? num_long_range : 0;
}

/// Positions and expiries of all rows as they are before the chunk. By the whole block.
template <class View>
__device__ void fill_past_lifetimes(const prefill_params<View>& call, const prefill_head<View>& at,
                                    std::int32_t num_long_range) {
    const HeadParams& head_params = at.rows.head_params;
    const std::int64_t plane = std::int64_t{at.pair} * call.max_entries;
    const std::int32_t used = at.active.tokens != 0 ? at.rows.layout.used(at.base, num_long_range) : 0;
    constexpr expiry_t dead = -never - 1;
    for (auto r = static_cast<std::int32_t>(threadIdx.x); r < call.max_entries; r += prefill_threads) {
        std::int32_t position = 0;
        expiry_t expiry = dead;
        if (r < used) {
            // What lies further back than 31 bits reach is just as visible there.
            const position_t t = at.rows.position_of(r), distance = t - at.base,
                             least = -(position_t{1} << 30);
            position = static_cast<std::int32_t>(distance > least ? distance : least);
            const bool recent = r >= head_params.sinks && r < at.rows.layout.slot(0);
            const position_t leaves = distance + head_params.window;
            expiry = recent && leaves < never ? static_cast<expiry_t>(leaves) : never;
        }
        call.position[plane + r] = position;
        call.past_expiry[plane + r] = expiry;
    }
}

/// Expiries of the chunk's tokens if no top-k slot takes them, and a status for scores that are NaN. By the
/// whole block.
template <class View>
__device__ void fill_chunk_lifetimes(const prefill_params<View>& call, const prefill_head<View>& at) {
    const HeadParams& head_params = at.rows.head_params;
    for (auto j = static_cast<std::int32_t>(threadIdx.x); j < at.active.tokens; j += prefill_threads) {
        const std::int64_t leaves = std::int64_t{j} + head_params.window;
        call.chunk_expiry[std::int64_t{at.pair} * call.tokens.most + j] =
            at.base + j < head_params.sinks || leaves > never ? never : static_cast<expiry_t>(leaves);
        const float score = at.score(call, j);
        const bool leaver = at.base + j - head_params.window >= head_params.sinks;
        const float of_leaver = call.on_leaving && leaver ? at.leaving_score(call, j) : 0.0f;
        if (call.status != nullptr && (score != score || of_leaver != of_leaver)) {
            atomicOr(call.status + at.entry, static_cast<std::uint32_t>(status_nan_score));
        }
    }
}

/// Decides what a chunk does to the entries of one head, without writing the cache: visible intervals of all
/// entries and tokens, and the top-k updates of the keys that leave the window.
///
/// Grid: count * Hkv blocks. Block: prefill_threads; phase 5 is one warp's.
/// Shared memory: dynamic top_k_bytes() where `top_k_in_shared`: position and score per top-k slot, a
/// record per tile.
///
/// In: lengths, num_long_range, positions and scores of the entries; scores of the tokens that come or leave.
/// Out: position and past_expiry [count, Hkv, max_entries] int32, relative to the chunk's first token;
/// chunk_expiry [count, Hkv, most] int32; slot_score fp32, slot_position int64 and holder int32 [count,
/// Hkv, top_k_slots]; num_long_range, num_protected and num_long_range_before [count, Hkv]; first_row [count,
/// Hkv] of a contiguous cache; status [count] is OR-ed.
/// Overwrites: `computed` of keys that are held for their position.
///
/// Phases:
/// 1. Keys that are held for their position get the score 0.
/// 2. Positions and expiries of the entries.
/// 3. Expiries of the tokens, if no top-k slot takes them; NaN scores set status_nan_score.
/// 4. Scores and positions of the top-k slots are copied to where the updates run.
/// 5. The top-k updates, 32 candidates at a time. A candidate that does not beat the minimum is rejected by
///    one warp vote; the minimum is monotone.
/// 6. Slots that were updated in shared memory are copied to the workspace.
template <class View, class Gate>
__global__ void __launch_bounds__(prefill_threads)
    prefill_decide_kernel(const __grid_constant__ prefill_params<View> call, const Gate gate) {
    const prefill_head<View> at(call, static_cast<std::int32_t>(blockIdx.x));
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const HeadParams& head_params = at.rows.head_params;
    const std::int32_t tokens = at.active.tokens;
    const std::int32_t num_long_range = tokens != 0 ? call.cache.num_long_range[at.rows.index] : 0;
    if constexpr (detail::holds_keys<Gate>) {
        // 1. Keys that are held for their position have no score.
        for (std::int32_t j = thread; call.computed != nullptr && j < tokens; j += prefill_threads) {
            if (gate.keeps(at.base + j - (call.on_leaving ? head_params.window : 0))) {
                call.computed[std::int64_t{at.pair} * call.tokens.most + j] = 0.0f;
            }
        }
        __syncthreads();
    }
    // 2 and 3. Visible intervals.
    fill_past_lifetimes(call, at, num_long_range);
    fill_chunk_lifetimes(call, at);
    // 4. Indexed by slot; slots before `competing` are not read.
    const std::int32_t competing = first_contested(head_params, num_long_range);
    const std::int64_t top_k_slots = std::int64_t{at.pair} * call.top_k_slots - competing;
    float* const of_score = call.slot_score + top_k_slots;
    position_t* const of_position = call.slot_position + top_k_slots;
    detail::chunk_slots chunk{{head_params, call.cache.rebase_limit, of_score, of_position},
                              call.holder + top_k_slots,
                              call.record + std::int64_t{at.pair} * call.tiles,
                              call.past_expiry + std::int64_t{at.pair} * call.max_entries,
                              call.chunk_expiry + std::int64_t{at.pair} * call.tokens.most};
    if (call.top_k_in_shared) {
        auto* const in_shared = reinterpret_cast<position_t*>(dynamic_shared());
        auto* const score_in_shared = reinterpret_cast<float*>(in_shared + call.top_k_slots);
        chunk.of.position = in_shared - competing;
        chunk.of.score = score_in_shared - competing;
        chunk.record = reinterpret_cast<std::int32_t*>(score_in_shared + call.top_k_slots);
    }
    for (std::int32_t p = competing + thread; p < num_long_range; p += prefill_threads) {
        const std::int32_t row = at.rows.layout.slot(p);
        chunk.of.score[p] = at.rows.score_of(row);
        chunk.of.position[p] = at.rows.position_of(row);
        chunk.holder[p] = row;
    }
    if constexpr (std::is_same_v<View, contiguous_view<typename View::value_type>>) {
        if (thread == 0) {
            call.first_row[at.pair] = at.active.seq * call.cache.rows + call.cache.row_offset[at.head];
        }
    }
    __syncthreads();
    // 5. The top-k updates, by one warp.
    if (warp_id() == 0) {
        std::int32_t num_protected = 0;
        if constexpr (detail::holds_keys<Gate>) {
            num_protected = tokens != 0 ? call.cache.num_protected[at.rows.index] : 0;
        }
        const std::int32_t after = detail::update_top_k(
            warp_group{}, chunk, gate, at.base, tokens, num_long_range,
            [&](std::int32_t j) { return at.leaving_score(call, j); },
            [&](position_t u) { return at.name(u); }, at.rows.capacity(), &num_protected);
        if (lane_id() == 0) {
            call.num_long_range[at.pair] = after;
            if (call.num_protected != nullptr) {
                call.num_protected[at.pair] = num_protected;
            }
            if (call.num_long_range_before != nullptr) {
                call.num_long_range_before[at.pair] = num_long_range;
            }
        }
    }
    // 6. From shared memory to the workspace.
    if (call.top_k_in_shared) {
        __syncthreads();
        const std::int32_t after = call.num_long_range[at.pair];
        for (std::int32_t p = competing + thread; p < after; p += prefill_threads) {
            of_score[p] = chunk.of.score[p];
            of_position[p] = chunk.of.position[p];
        }
    }
}

/// Copies a row of keys or values, by a warp.
template <class T>
__device__ void copy_row(const T* from, T* to, std::int32_t dim) {
    using Piece = std::conditional_t<sizeof(T) == 2, uint4, T>;
    constexpr int each = sizeof(Piece) / sizeof(T);
    for (std::int32_t i = lane_id(); i < dim / each; i += 32) {
        reinterpret_cast<Piece*>(to)[i] = reinterpret_cast<const Piece*>(from)[i];
    }
}

/// Writes token j of a chunk to a row, by a warp.
template <class View, class T>
__device__ void put_token(const prefill_params<View>& call, const prefill_head<View>& at, std::int32_t j,
                          T* key, T* value, position_t& position, float& score) {
    copy_row(call.tokens.key(at.rows, at.entry, at.head, j), key, call.cache.head_dim_qk);
    copy_row(call.tokens.value(at.rows, at.entry, at.head, j), value, call.cache.head_dim_vo);
    if (lane_id() == 0) {
        position = at.base + j;
        score = at.score(call, j);
    }
}

/// Writes the keys that prefill_decide_kernel admitted into their top-k slots. It runs before
/// prefill_recent_kernel, since a key may come from a window entry that the new tokens overwrite.
///
/// Grid: count * Hkv * chunk_pieces blocks. Block: prefill_threads; a warp per sequence.
/// In: kept, holder, slot_position, slot_score; keys and values of window entries and tokens.
/// Overwrites: keys, values, positions and scores of the sequences whose key is new.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_top_k_kernel(const __grid_constant__ prefill_params<View> call) {
    const prefill_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    if (at.active.tokens == 0) {
        return;
    }
    constexpr std::int32_t warps = prefill_threads / 32;
    const std::int32_t piece = static_cast<std::int32_t>(blockIdx.x) % chunk_pieces;
    const std::int32_t num_long_range = call.num_long_range[at.pair], capacity = at.rows.capacity();
    const View& cache = call.cache;
    const std::int32_t first = first_contested(at.rows.head_params, cache.num_long_range[at.rows.index]);
    const std::int64_t top_k_slots = std::int64_t{at.pair} * call.top_k_slots - first;
    for (std::int32_t p = first + piece * warps + warp_id(); p < num_long_range; p += chunk_pieces * warps) {
        const std::int32_t holder = call.holder[top_k_slots + p];
        const std::int32_t row = at.rows.layout.slot(p);
        if (holder == row) {
            continue;  // it held its slot already
        }
        const bool of_ring = holder < capacity;
        const std::int32_t j = holder - capacity;
        copy_row(of_ring ? at.rows.key(holder) : call.tokens.key(at.rows, at.entry, at.head, j),
                 at.rows.key(row), cache.head_dim_qk);
        copy_row(of_ring ? at.rows.value(holder) : call.tokens.value(at.rows, at.entry, at.head, j),
                 at.rows.value(row), cache.head_dim_vo);
        if (lane_id() == 0) {
            at.rows.position_of(row) = call.slot_position[top_k_slots + p];
            at.rows.score_of(row) = call.slot_score[top_k_slots + p];
        }
    }
}

/// Writes the chunk's tokens into sinks and window, and the head's counters.
///
/// Grid: count * Hkv * chunk_pieces blocks. Block: prefill_threads; a warp per token.
/// In: the tokens, their scores; kept and pinned of prefill_decide_kernel; `advanced` [count, Hkv,
/// state_size] fp32.
/// Overwrites: entries of the tokens that are still in the window or are sinks; taken, kept, victim, pinned;
/// the scorer's state from `advanced`; the count of draft tokens.
///
/// Phases: 1. Counters, by the first block of a head. 2. The scorer's state. 3. Entries.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_recent_kernel(const __grid_constant__ prefill_params<View> call) {
    const prefill_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    const std::int32_t piece = static_cast<std::int32_t>(blockIdx.x) % chunk_pieces;
    const std::int32_t tokens = at.active.tokens;
    const View& cache = call.cache;
    // 1. Counters.
    if (piece == 0 && threadIdx.x == 0 && at.active.there) {
        if (tokens != 0) {
            cache.appended[at.rows.index] = tokens;
            cache.num_long_range[at.rows.index] = call.num_long_range[at.pair];
            cache.victim[at.rows.index] = -1;
            if constexpr (requires { cache.num_protected; }) {
                if (call.num_protected != nullptr) {
                    cache.num_protected[at.rows.index] = call.num_protected[at.pair];
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
        for (std::int64_t i = piece * prefill_threads + static_cast<std::int32_t>(threadIdx.x); i < size;
             i += chunk_pieces * prefill_threads) {
            cache.state[at.rows.index * size + i] = call.advanced[at.pair * size + i];
        }
    }
    // 3. Entries.
    constexpr std::int32_t warps = prefill_threads / 32;
    for (std::int32_t j = piece * warps + warp_id(); j < tokens; j += chunk_pieces * warps) {
        const position_t t = at.base + j;
        if (t >= at.rows.head_params.sinks && j + std::int64_t{at.rows.head_params.window} < tokens) {
            continue;  // it has left the window
        }
        const std::int32_t row = at.rows.layout.recent(t);
        put_token(call, at, j, at.rows.key(row), at.rows.value(row), at.rows.position_of(row),
                  at.rows.score_of(row));
    }
}

/// Writes draft tokens into the spare entries of their heads, where accept finds them.
///
/// Grid: count * Hkv * chunk_pieces blocks. Block: prefill_threads; a warp per token.
/// In: the tokens and their scores. Overwrites: the spare entries; the count of draft tokens per sequence.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_draft_kernel(const __grid_constant__ prefill_params<View> call) {
    const prefill_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    const std::int32_t piece = static_cast<std::int32_t>(blockIdx.x) % chunk_pieces;
    const std::int32_t tokens = at.active.tokens;
    const View& cache = call.cache;
    if (piece == 0 && at.head == 0 && threadIdx.x == 0 && tokens != 0) {
        cache.num_draft[at.active.seq] = tokens;
    }
    constexpr std::int32_t warps = prefill_threads / 32;
    for (std::int32_t j = piece * warps + warp_id(); j < tokens; j += chunk_pieces * warps) {
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
/// Grid: count * Hkv * chunk_pieces blocks. Block: prefill_threads; a warp per page.
/// In: the entries. Overwrites: bounds [2, Dk] of T per page, of pages that may lose a key and of pages with
/// new sequences.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_bounds_kernel(const __grid_constant__ prefill_params<View> call) {
    const prefill_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    if (at.active.tokens == 0) {
        return;
    }
    constexpr std::int32_t warps = prefill_threads / 32;
    const std::int32_t warp = static_cast<std::int32_t>(blockIdx.x) % chunk_pieces * warps + warp_id();
    const HeadParams& head_params = at.rows.head_params;
    const std::int32_t used = at.rows.layout.used(at.base + at.active.tokens, call.num_long_range[at.pair]);
    const bool updates = head_params.budget != unlimited && head_params.budget != 0;
    const std::int32_t expirable = updates ? used : at.rows.layout.slot(0);
    const std::int32_t fresh = at.rows.layout.slot(call.num_long_range_before[at.pair]);
    const auto rows = bounded_rows(call, at.rows);
    refresh_pages(rows, 0, expirable, used, warp, chunk_pieces * warps);
    if (expirable < used) {
        // A page that both ranges have is the same, whoever writes it.
        refresh_pages(rows, fresh, used, used, warp, chunk_pieces * warps);
    }
}

/// Keeps the queries of a chunk for the eviction part: those of the last `observing` tokens in a ring, or
/// with `num_draft` those of all draft tokens in the spare rows. Without `q` the ring takes the spare rows'
/// queries.
///
/// Grid: count * Hkv * chunk_pieces blocks. Block: prefill_threads; a warp per query row.
/// In: q [count, Hq, most, Dk] of T. Overwrites: queries [seq, Hkv, observing, group, Dk] or spare_queries
/// of T.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_queries_kernel(const __grid_constant__ prefill_params<View> call,
                           const rows_view<const typename View::value_type> q, const bool num_draft) {
    using T = typename View::value_type;
    const prefill_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    const View& cache = call.cache;
    constexpr std::int32_t warps = prefill_threads / 32;
    const std::int32_t tokens = at.active.tokens, group = cache.group;
    const std::int32_t first = num_draft || tokens < cache.observing ? 0 : tokens - cache.observing;
    for (std::int32_t x =
             first * group + static_cast<std::int32_t>(blockIdx.x) % chunk_pieces * warps + warp_id();
         x < tokens * group; x += chunk_pieces * warps) {
        const std::int32_t j = x / group, g = x % group;
        T* const spare = cache.spare_query_row(at.rows.index, j) + std::int64_t{g} * cache.head_dim_qk;
        const T* const from = q.data != nullptr ? q.row(at.entry, at.head * group + g, j) : spare;
        T* const to = num_draft
                          ? spare
                          : cache.query_row(at.rows.index, at.base + j) + std::int64_t{g} * cache.head_dim_qk;
        copy_row<T>(from, to, cache.head_dim_qk);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
