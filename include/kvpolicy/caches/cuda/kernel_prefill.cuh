// A chunk of tokens into a cache on a device: who leaves and who stays, and, after attention, the rows.
//
// The contests of a head run in one warp, on copies in the workspace; they give attention the lifetimes of all rows, and the
// kernels at the end the key of every place. A surviving row stays where it is, so only newcomers are copied: to places
// first, since they may come from the ring, then to the ring.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int chunk_threads = 128;
inline constexpr std::int32_t chunk_pieces = 8;  // blocks that share the copies of a head

/// What the kernels of a chunk share.
template <class View_>
struct chunk_launch {
    using View = View_;
    using T = typename View::value_type;

    View cache;
    Batch batch{};  // q_len: `taken`, once chunk_begin_kernel has run
    chunk_tokens<T> tokens{};
    plane_view<const float> scores{};  // of the new tokens, where they come with them
    float* computed = nullptr;         // [count, Hkv, most]: see score_launch; null: none
    bool on_leaving = false;           // `computed` are those of the keys that leave
    const float* late =
        nullptr;  // [count, Hkv, most]: of the new tokens, where those are of the keys that leave
    std::uint32_t* status = nullptr;  // [count]
    std::int32_t longest = 0;         // the most rows of a head
    std::int32_t places = 0;  // the most of a head that a chunk may write: those contested, else the new ones
    std::int32_t tiles = 0;   // of all its places
    bool contest_in_shared = false;  // places and records fit into shared memory
    std::int32_t together = 1;       // entries whose rows are brought together at once, of a DualCache
    // Made by chunk_begin_kernel and chunk_decide_kernel.
    std::int32_t* taken = nullptr;         // [count]: tokens that count
    std::int64_t* first_row = nullptr;     // [count, Hkv]
    std::int32_t* position = nullptr;      // [count, Hkv, longest], from the chunk's first token on
    expiry_t* past_expiry = nullptr;       // [count, Hkv, longest]
    expiry_t* chunk_expiry = nullptr;      // [count, Hkv, most]
    float* place_score = nullptr;          // [count, Hkv, places], from first_contested on
    position_t* place_position = nullptr;  // [count, Hkv, places], the same
    std::int32_t* holder = nullptr;        // [count, Hkv, places], the same: see detail::chunk_places
    std::int32_t* record = nullptr;        // [count, Hkv, tiles]
    std::int32_t* kept = nullptr;          // [count, Hkv]: places in use after the chunk
    std::int32_t* pinned = nullptr;  // [count, Hkv], with a keep part: of these, keys that do not compete
    std::int32_t* kept_before = nullptr;  // [count, Hkv], with a selection
    const float* advanced =
        nullptr;          // [count, Hkv, state_size]: the scorer's states after it, if not in the cache
    T* bounds = nullptr;  // [slots, rows / bound_rows, 2, dim_k], of a FixedBudgetCache with a selection
    std::int32_t bound_rows = 1;
};

/// Shared memory of a head's contests: positions, scores, records.
inline std::size_t contest_bytes(std::int64_t places, std::int64_t tiles) {
    return static_cast<std::size_t>(places) * (sizeof(position_t) + sizeof(float)) +
           static_cast<std::size_t>(tiles) * sizeof(std::int32_t);
}

/// One head of an entry.
template <class View>
struct chunk_head {
    std::int32_t pair, entry, head;
    active_entry active;
    typename View::head_type rows;
    position_t base;

    __device__ chunk_head(const chunk_launch<View>& call, std::int32_t number)
        : pair(number),
          entry(number / call.cache.kv_heads),
          head(number % call.cache.kv_heads),
          active(call.cache, call.batch, entry, call.tokens.most),
          rows(call.cache, active.slot, head),
          base(active.there ? call.cache.length[active.slot] : 0) {}

    /// The score of token j, as its row will keep it.
    __device__ float score(const chunk_launch<View>& call, std::int32_t j) const {
        float score = 0.0f;
        if (call.computed != nullptr) {
            const float* const from = call.on_leaving ? call.late : call.computed;
            score = from == nullptr ? 0.0f : from[std::int64_t{pair} * call.tokens.most + j];
        } else if (call.tokens.spare) {
            score = rows.spare_score(j);
        } else if (call.scores) {
            score = call.scores.head(entry, head)[j];
        }
        const bool counts = base + j >= rows.rule.sinks;
        return counts ? score : call.computed == nullptr && score == score ? score : 0.0f;
    }
    /// The score of the key that leaves the window when token j comes.
    __device__ float leaving_score(const chunk_launch<View>& call, std::int32_t j) const {
        const position_t u = base + j - rows.rule.window;
        if (call.on_leaving && call.computed != nullptr) {
            return call.computed[std::int64_t{pair} * call.tokens.most + j];
        }
        return u < base ? rows.score_of(rows.layout.recent(u))
                        : score(call, static_cast<std::int32_t>(u - base));
    }
    /// The name of key u, which leaves the window: see detail::chunk_places.
    __device__ std::int32_t name(position_t u) const {
        return u < base ? rows.layout.recent(u) : rows.capacity() + static_cast<std::int32_t>(u - base);
    }
};

/// Which entries take how many tokens: at most `most`; from the spare rows, at most as many as were proposed here. One block.
template <class View>
__global__ void __launch_bounds__(chunk_threads)
    chunk_begin_kernel(const __grid_constant__ chunk_launch<View> call) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.batch.count; i += chunk_threads) {
        active_entry active = active_entry(call.cache, call.batch, i, call.tokens.most).once(call.cache);
        if (call.tokens.spare && active.tokens != 0) {
            const typename View::head_type head(call.cache, active.slot, 0);
            if (active.tokens > call.cache.proposed[active.slot] ||
                head.spare_position(0) != call.cache.length[active.slot]) {
                active.refuse(status_bad_length);
            }
        }
        call.taken[i] = active.tokens;
        active.report(call.status, i);
    }
}

/// The first of `kept` places that may change hands: without a budget a key keeps its place for good, and so does one that has it
/// for its position.
__device__ inline std::int32_t first_contested(const HeadRule& rule, std::int32_t kept) {
    return rule.budget == unlimited || rule.budget == 0 ? kept : 0;
}

/// Lifetimes of all rows and tokens, and the contests. A block a head.
template <class View, class Gate>
__global__ void __launch_bounds__(chunk_threads)
    chunk_decide_kernel(const __grid_constant__ chunk_launch<View> call, const Gate gate) {
    const chunk_head<View> at(call, static_cast<std::int32_t>(blockIdx.x));
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const HeadRule& rule = at.rows.rule;
    const std::int32_t tokens = at.active.tokens;
    const std::int64_t plane = std::int64_t{at.pair} * call.longest;
    const std::int32_t kept = tokens != 0 ? call.cache.kept[at.rows.index] : 0;
    const std::int32_t used = tokens != 0 ? at.rows.layout.used(at.base, kept) : 0;
    constexpr expiry_t dead = -never - 1;
    if constexpr (detail::holds_keys<Gate>) {
        // Keys that are held for their position have no score.
        for (std::int32_t j = thread; call.computed != nullptr && j < tokens; j += chunk_threads) {
            if (gate.keeps(at.base + j - (call.on_leaving ? rule.window : 0))) {
                call.computed[std::int64_t{at.pair} * call.tokens.most + j] = 0.0f;
            }
        }
        __syncthreads();
    }
    for (std::int32_t r = thread; r < call.longest; r += chunk_threads) {
        std::int32_t position = 0;
        expiry_t expiry = dead;
        if (r < used) {
            // What lies further back than 31 bits reach is just as visible there.
            const position_t t = at.rows.position_of(r), distance = t - at.base,
                             least = -(position_t{1} << 30);
            position = static_cast<std::int32_t>(distance > least ? distance : least);
            const bool recent = r >= rule.sinks && r < at.rows.layout.place(0);
            const position_t leaves = distance + rule.window;
            expiry = recent && leaves < never ? static_cast<expiry_t>(leaves) : never;
        }
        call.position[plane + r] = position;
        call.past_expiry[plane + r] = expiry;
    }
    for (std::int32_t j = thread; j < tokens; j += chunk_threads) {
        const std::int64_t leaves = std::int64_t{j} + rule.window;
        call.chunk_expiry[std::int64_t{at.pair} * call.tokens.most + j] =
            at.base + j < rule.sinks || leaves > never ? never : static_cast<expiry_t>(leaves);
        const float score = at.score(call, j);
        const bool leaver = at.base + j - rule.window >= rule.sinks;
        const float of_leaver = call.on_leaving && leaver ? at.leaving_score(call, j) : 0.0f;
        if (call.status != nullptr && (score != score || of_leaver != of_leaver)) {
            atomicOr(call.status + at.entry, static_cast<std::uint32_t>(status_nan_score));
        }
    }
    // Named by place, of which those before `contested` are never looked at.
    const std::int32_t contested = first_contested(rule, kept);
    const std::int64_t places = std::int64_t{at.pair} * call.places - contested;
    float* const of_score = call.place_score + places;
    position_t* const of_position = call.place_position + places;
    detail::chunk_places chunk{{rule, call.cache.rebase_limit, of_score, of_position},
                               call.holder + places,
                               call.record + std::int64_t{at.pair} * call.tiles,
                               call.past_expiry + plane,
                               call.chunk_expiry + std::int64_t{at.pair} * call.tokens.most};
    if (call.contest_in_shared) {
        auto* const in_shared = reinterpret_cast<position_t*>(dynamic_shared());
        auto* const score_in_shared = reinterpret_cast<float*>(in_shared + call.places);
        chunk.of.position = in_shared - contested;
        chunk.of.score = score_in_shared - contested;
        chunk.record = reinterpret_cast<std::int32_t*>(score_in_shared + call.places);
    }
    for (std::int32_t p = contested + thread; p < kept; p += chunk_threads) {
        const std::int32_t row = at.rows.layout.place(p);
        chunk.of.score[p] = at.rows.score_of(row);
        chunk.of.position[p] = at.rows.position_of(row);
        chunk.holder[p] = row;
    }
    if constexpr (std::is_same_v<View, cache_view<typename View::value_type>>) {
        if (thread == 0) {
            call.first_row[at.pair] = at.active.slot * call.cache.rows + call.cache.row_offset[at.head];
        }
    }
    __syncthreads();
    if (warp_id() == 0) {
        std::int32_t pinned = 0;
        if constexpr (detail::holds_keys<Gate>) {
            pinned = tokens != 0 ? call.cache.pinned[at.rows.index] : 0;
        }
        const std::int32_t after = detail::contest_chunk(
            warp_group{}, chunk, gate, at.base, tokens, kept,
            [&](std::int32_t j) { return at.leaving_score(call, j); },
            [&](position_t u) { return at.name(u); }, at.rows.capacity(), &pinned);
        if (lane_id() == 0) {
            call.kept[at.pair] = after;
            if (call.pinned != nullptr) {
                call.pinned[at.pair] = pinned;
            }
            if (call.kept_before != nullptr) {
                call.kept_before[at.pair] = kept;
            }
        }
    }
    if (call.contest_in_shared) {
        __syncthreads();
        const std::int32_t after = call.kept[at.pair];
        for (std::int32_t p = contested + thread; p < after; p += chunk_threads) {
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
__device__ void put_token(const chunk_launch<View>& call, const chunk_head<View>& at, std::int32_t j, T* key,
                          T* value, position_t& position, float& score) {
    copy_row(call.tokens.key(at.rows, at.entry, at.head, j), key, call.cache.dim_k);
    copy_row(call.tokens.value(at.rows, at.entry, at.head, j), value, call.cache.dim_v);
    if (lane_id() == 0) {
        position = at.base + j;
        score = at.score(call, j);
    }
}

/// Newcomers to long-range places. chunk_pieces blocks a head, a warp a place.
template <class View>
__global__ void __launch_bounds__(chunk_threads)
    chunk_places_kernel(const __grid_constant__ chunk_launch<View> call) {
    const chunk_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    if (at.active.tokens == 0) {
        return;
    }
    constexpr std::int32_t warps = chunk_threads / 32;
    const std::int32_t piece = static_cast<std::int32_t>(blockIdx.x) % chunk_pieces;
    const std::int32_t kept = call.kept[at.pair], capacity = at.rows.capacity();
    const View& cache = call.cache;
    const std::int32_t first = first_contested(at.rows.rule, cache.kept[at.rows.index]);
    const std::int64_t places = std::int64_t{at.pair} * call.places - first;
    for (std::int32_t p = first + piece * warps + warp_id(); p < kept; p += chunk_pieces * warps) {
        const std::int32_t holder = call.holder[places + p];
        const std::int32_t row = at.rows.layout.place(p);
        if (holder == row) {
            continue;  // it held its place already
        }
        const bool of_ring = holder < capacity;
        const std::int32_t j = holder - capacity;
        copy_row(of_ring ? at.rows.key(holder) : call.tokens.key(at.rows, at.entry, at.head, j),
                 at.rows.key(row), cache.dim_k);
        copy_row(of_ring ? at.rows.value(holder) : call.tokens.value(at.rows, at.entry, at.head, j),
                 at.rows.value(row), cache.dim_v);
        if (lane_id() == 0) {
            at.rows.position_of(row) = call.place_position[places + p];
            at.rows.score_of(row) = call.place_score[places + p];
        }
    }
}

/// Sinks, ring and counters, after the places. chunk_pieces blocks a head, a warp a token.
template <class View>
__global__ void __launch_bounds__(chunk_threads)
    chunk_recent_kernel(const __grid_constant__ chunk_launch<View> call) {
    const chunk_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    const std::int32_t piece = static_cast<std::int32_t>(blockIdx.x) % chunk_pieces;
    const std::int32_t tokens = at.active.tokens;
    const View& cache = call.cache;
    if (piece == 0 && threadIdx.x == 0 && at.active.there) {
        if (tokens != 0) {
            cache.taken[at.rows.index] = tokens;
            cache.kept[at.rows.index] = call.kept[at.pair];
            cache.victim[at.rows.index] = -1;
            if constexpr (requires { cache.pinned; }) {
                if (call.pinned != nullptr) {
                    cache.pinned[at.rows.index] = call.pinned[at.pair];
                }
            }
        }
        // No tokens: a commit forgets what was proposed, a prefill leaves the slot alone.
        if (at.head == 0 && (tokens != 0 || call.tokens.spare)) {
            cache.proposed[at.active.slot] = 0;
        }
    }
    if (call.advanced != nullptr && tokens != 0) {
        const std::int64_t size = cache.state_size;
        for (std::int64_t i = piece * chunk_threads + static_cast<std::int32_t>(threadIdx.x); i < size;
             i += chunk_pieces * chunk_threads) {
            cache.state[at.rows.index * size + i] = call.advanced[at.pair * size + i];
        }
    }
    constexpr std::int32_t warps = chunk_threads / 32;
    for (std::int32_t j = piece * warps + warp_id(); j < tokens; j += chunk_pieces * warps) {
        const position_t t = at.base + j;
        if (t >= at.rows.rule.sinks && j + std::int64_t{at.rows.rule.window} < tokens) {
            continue;  // it has left the window
        }
        const std::int32_t row = at.rows.layout.recent(t);
        put_token(call, at, j, at.rows.key(row), at.rows.value(row), at.rows.position_of(row),
                  at.rows.score_of(row));
    }
}

/// Proposed tokens into the spare rows. chunk_pieces blocks a head, a warp a token.
template <class View>
__global__ void __launch_bounds__(chunk_threads)
    chunk_propose_kernel(const __grid_constant__ chunk_launch<View> call) {
    const chunk_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    const std::int32_t piece = static_cast<std::int32_t>(blockIdx.x) % chunk_pieces;
    const std::int32_t tokens = at.active.tokens;
    const View& cache = call.cache;
    if (piece == 0 && at.head == 0 && threadIdx.x == 0 && tokens != 0) {
        cache.proposed[at.active.slot] = tokens;
    }
    constexpr std::int32_t warps = chunk_threads / 32;
    for (std::int32_t j = piece * warps + warp_id(); j < tokens; j += chunk_pieces * warps) {
        put_token(call, at, j, at.rows.spare_key(j), at.rows.spare_value(j), at.rows.spare_position(j),
                  at.rows.spare_score(j));
    }
}

/// The rows of a head, with the bounds of their pages.
template <class View>
__device__ auto bounded_rows(const chunk_launch<View>& call, const typename View::head_type& head) {
    if constexpr (requires { head.rows; }) {
        return head.rows;
    } else {
        const std::int64_t first = head.position - call.cache.position;
        return PlainRows<typename View::value_type>{head.k,
                                                    head.v,
                                                    head.position,
                                                    head.score,
                                                    head.dim_k,
                                                    head.dim_v,
                                                    call.bounds + first / call.bound_rows * 2 * head.dim_k,
                                                    call.bound_rows};
    }
}

/// Bounds of the pages of rows that a chunk wrote: those that may change hands, and new places. chunk_pieces blocks a head, a warp a
/// page.
template <class View>
__global__ void __launch_bounds__(chunk_threads)
    chunk_bounds_kernel(const __grid_constant__ chunk_launch<View> call) {
    const chunk_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    if (at.active.tokens == 0) {
        return;
    }
    constexpr std::int32_t warps = chunk_threads / 32;
    const std::int32_t warp = static_cast<std::int32_t>(blockIdx.x) % chunk_pieces * warps + warp_id();
    const HeadRule& rule = at.rows.rule;
    const std::int32_t used = at.rows.layout.used(at.base + at.active.tokens, call.kept[at.pair]);
    const bool contests = rule.budget != unlimited && rule.budget != 0;
    const std::int32_t mortal = contests ? used : at.rows.layout.place(0);
    const std::int32_t fresh = at.rows.layout.place(call.kept_before[at.pair]);
    const auto rows = bounded_rows(call, at.rows);
    refresh_pages(rows, 0, mortal, used, warp, chunk_pieces * warps);
    if (mortal < used) {
        // A page that both ranges have is the same, whoever writes it.
        refresh_pages(rows, fresh, used, used, warp, chunk_pieces * warps);
    }
}

/// Queries of a chunk's tokens for an eviction part: of the last `observing` into the ring, where there are none in `q` from the
/// proposed ones; of all into the spare rows, where they are `proposed`. chunk_pieces blocks a head, a warp a row.
template <class View>
__global__ void __launch_bounds__(chunk_threads)
    chunk_queries_kernel(const __grid_constant__ chunk_launch<View> call,
                         const rows_view<const typename View::value_type> q, const bool proposed) {
    using T = typename View::value_type;
    const chunk_head<View> at(call, static_cast<std::int32_t>(blockIdx.x) / chunk_pieces);
    const View& cache = call.cache;
    constexpr std::int32_t warps = chunk_threads / 32;
    const std::int32_t tokens = at.active.tokens, group = cache.group;
    const std::int32_t first = proposed || tokens < cache.observing ? 0 : tokens - cache.observing;
    for (std::int32_t x =
             first * group + static_cast<std::int32_t>(blockIdx.x) % chunk_pieces * warps + warp_id();
         x < tokens * group; x += chunk_pieces * warps) {
        const std::int32_t j = x / group, g = x % group;
        T* const spare = cache.spare_query_row(at.rows.index, j) + std::int64_t{g} * cache.dim_k;
        const T* const from = q.data != nullptr ? q.row(at.entry, at.head * group + g, j) : spare;
        T* const to =
            proposed ? spare : cache.query_row(at.rows.index, at.base + j) + std::int64_t{g} * cache.dim_k;
        copy_row<T>(from, to, cache.dim_k);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
