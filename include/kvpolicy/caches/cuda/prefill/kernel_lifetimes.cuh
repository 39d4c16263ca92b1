// Before the top-k updates of a chunk: how many tokens count, visible intervals as if no key were admitted,
// and copies of what the updates need.
#pragma once

#include <kvpolicy/caches/cuda/prefill/prefill_params.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The tokens of packed entries by their edges, to `appended`: -1 where the edges are beyond the tensors, or
/// differ from a q_len that is given, and for all entries from the first that an edge falls in, or where the
/// first edge is not 0. By the whole block; a thread writes what it reads later.
template <class View>
__device__ void count_packed_tokens(const prefill_params<View>& call) {
    __shared__ std::int32_t in_order;  // entries before the first edge that falls
    const std::int32_t count = call.batch.count, *const edges = call.tokens.packed.edges;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (thread == 0) {
        in_order = edges[0] == 0 ? count : 0;
    }
    __syncthreads();
    for (std::int32_t i = thread; i < count; i += prefill_threads) {
        if (edges[i + 1] < edges[i]) {
            atomicMin(&in_order, i);
        }
    }
    __syncthreads();
    for (std::int32_t i = thread; i < count; i += prefill_threads) {
        const bool sound = i < in_order && edges[i + 1] <= call.packed_total;
        const std::int32_t tokens = sound ? edges[i + 1] - edges[i] : -1;
        call.appended[i] = call.batch.q_len == nullptr || call.batch.q_len[i] == tokens ? tokens : -1;
    }
}

/// Finds how many tokens of the chunk each entry of the batch brings: at most `most`; from the draft tokens
/// at most as many as were appended to the sequence.
///
/// Grid: 1 block. Block: prefill_threads.
/// In: batch, edges of packed entries, the sequences' lengths, counters and draft positions. Out: appended
/// [count]; status [count] is OR-ed.
///
/// Phases: 1. Tokens of packed entries. 2. Tokens that count.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    prefill_begin_kernel(const __grid_constant__ prefill_params<View> call) {
    // 1. Packed entries.
    Batch batch = call.batch;
    if (call.tokens.packed.edges != nullptr) {
        count_packed_tokens(call);
        batch.q_len = call.appended;
    }
    // 2. Tokens that count.
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < batch.count; i += prefill_threads) {
        active_entry active = active_entry(call.cache, batch, i, call.tokens.most).once(call.cache);
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
__device__ inline std::int32_t first_changing_slot(const HeadParams& head_params,
                                                   std::int32_t num_long_range) {
    return head_params.budget == unlimited || head_params.budget == 0 ? num_long_range : 0;
}

/// One block's share of a head: every pieces * prefill_threads-th row, token and slot.
template <class View, class Gate>
struct lifetimes_block {
    const prefill_params<View>& call;
    const Gate& gate;
    const prefill_head<View> at;
    const HeadParams& head_params;
    const std::int32_t tokens;
    const std::int32_t num_long_range;
    const std::int32_t first;  // of the thread's
    const std::int32_t stride;

    __device__ lifetimes_block(const prefill_params<View>& of, const Gate& its_gate, std::int32_t pair,
                               std::int32_t piece)
        : call(of),
          gate(its_gate),
          at(of, pair),
          head_params(at.rows.head_params),
          tokens(at.active.tokens),
          num_long_range(tokens != 0 ? of.cache.num_long_range[at.rows.index] : 0),
          first(piece * prefill_threads + static_cast<std::int32_t>(threadIdx.x)),
          stride(of.pieces * prefill_threads) {}

    __device__ void run() const {
        if (first == 0) {
            write_head();  // 1
        }
        fill_past();   // 2
        fill_chunk();  // 3
        if (call.top_k.slot_score != nullptr) {
            copy_slots();  // 4
        }
    }

  private:
    /// What the top-k updates need to know of the head, and its slots if they change nothing.
    __device__ void write_head() const {
        std::int32_t num_protected = 0;
        if constexpr (detail::holds_keys<Gate>) {
            num_protected = tokens != 0 ? call.cache.num_protected[at.rows.index] : 0;
            call.top_k.num_protected[at.pair] = num_protected;
        }
        call.top_k.num_long_range[at.pair] = num_long_range;
        if (call.num_long_range_before != nullptr) {
            call.num_long_range_before[at.pair] = num_long_range;
        }
        if (call.heads != nullptr) {
            const position_t leaves = position_t{head_params.sinks} + head_params.window - at.base;
            const std::int32_t first_leaving = leaves <= 0       ? 0
                                               : leaves < tokens ? static_cast<std::int32_t>(leaves)
                                                                 : tokens;
            top_k_head& head = call.heads[at.pair];
            head.head_params = head_params;
            head.base = at.base;
            head.tokens = tokens;
            head.first_leaving = first_leaving;
            head.num_long_range = num_long_range;
            head.num_protected = num_protected;
            head.first_slot = first_changing_slot(head_params, num_long_range);
            head.capacity = at.rows.capacity();
        }
        if constexpr (std::is_same_v<View, contiguous_view<typename View::value_type>>) {
            call.first_row[at.pair] = at.active.seq * call.cache.rows + call.cache.row_offset[at.head];
        } else {
            call.first_row[at.pair] = at.rows.table - call.cache.table;
        }
    }

    /// Expiries of all rows as they are before the chunk.
    __device__ void fill_past() const {
        const std::int64_t plane = std::int64_t{at.pair} * call.top_k.max_entries;
        const std::int32_t used = tokens != 0 ? at.rows.layout.used(at.base, num_long_range) : 0;
        if (first == 0) {
            call.past_rows[at.pair] = used;
        }
        for (std::int32_t r = first; r < used; r += stride) {
            const bool recent = r >= head_params.sinks && r < at.rows.layout.slot(0);
            const position_t leaves = at.rows.position_of(r) - at.base + head_params.window;
            call.top_k.past_expiry[plane + r] =
                recent && leaves < never ? static_cast<expiry_t>(leaves) : never;
        }
    }

    /// Whether `computed` [j] is the score of a key that is held for its position, which has none.
    [[nodiscard]] __device__ bool has_no_score(std::int32_t j) const {
        return call.computed != nullptr &&
               detail::holds(gate, at.base + j - (call.on_leaving ? head_params.window : 0));
    }
    /// prefill_head::leaving_score, before or after another block has dropped such scores.
    [[nodiscard]] __device__ float leaving_score(std::int32_t j) const {
        const std::int32_t from = call.on_leaving ? j : j - head_params.window;
        return from >= 0 && has_no_score(from) ? 0.0f : at.leaving_score(call, j);
    }

    /// Expiries of the tokens as if no top-k slot took them; of the key that leaves with each its score and
    /// what becomes of it. Scores that are NaN set a status.
    __device__ void fill_chunk() const {
        const std::int64_t plane = std::int64_t{at.pair} * call.tokens.most;
        for (std::int32_t j = first; j < tokens; j += stride) {
            const std::int64_t leaves = std::int64_t{j} + head_params.window;
            call.top_k.chunk_expiry[plane + j] =
                at.base + j < head_params.sinks || leaves > never ? never : static_cast<expiry_t>(leaves);
            const position_t u = at.base + j - head_params.window;
            const bool leaver = u >= head_params.sinks;
            const float of_leaver = leaver ? leaving_score(j) : 0.0f;
            const bool scoreless = has_no_score(j);
            const float score = scoreless && !call.on_leaving ? 0.0f : at.score(call, j);
            if (scoreless) {
                call.computed[plane + j] = 0.0f;
            }
            if (call.top_k.leaving_kind != nullptr && leaver) {
                call.top_k.leaving_score[plane + j] = of_leaver;
                call.top_k.leaving_kind[plane + j] =
                    detail::holds(gate, u)                                         ? leaving_kind_protected
                    : head_params.budget != 0 && gate.open(of_leaver, head_params) ? leaving_kind_competes
                                                                                   : leaving_kind_evicted;
            }
            if (call.status != nullptr && (score != score || (call.on_leaving && of_leaver != of_leaver))) {
                atomicOr(call.status + at.entry, static_cast<std::uint32_t>(status_nan_score));
            }
        }
    }

    /// Slots whose key may change; slots before those are not read.
    __device__ void copy_slots() const {
        const std::int32_t first_slot = first_changing_slot(head_params, num_long_range);
        const std::int64_t of_head = std::int64_t{at.pair} * call.top_k.top_k_slots - first_slot;
        for (std::int32_t p = first_slot + first; p < num_long_range; p += stride) {
            const std::int32_t row = at.rows.layout.slot(p);
            const position_t t = at.rows.position_of(row);
            call.top_k.slot_score[of_head + p] = at.rows.score_of(row);
            call.top_k.slot_position[of_head + p] = t;
            call.top_k.holder[of_head + p] = row;
            if constexpr (detail::holds_keys<Gate>) {
                call.top_k.slot_protected[of_head + p] = gate.keeps(t) ? 1 : 0;
            }
        }
    }
};

/// What a chunk would do to the entries of a head if no key were admitted to a top-k slot, and what the
/// top-k updates need: visible intervals of all entries and tokens, scores of the keys that leave the window,
/// copies of the slots. Nothing of the cache is written.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads. Shared memory: none.
/// In: lengths, num_long_range, positions and scores of the entries; scores of the tokens.
/// Out: past_rows [count, Hkv] int32; past_expiry [count, Hkv, max_entries] int32 of those rows, relative to
/// the chunk's first token; chunk_expiry [count, Hkv, most] int32; leaving_score fp32 and leaving_kind uint8
/// [count, Hkv, most]; slot_score fp32, slot_position int64, holder int32 and slot_protected uint8 [count,
/// Hkv, top_k_slots]; heads, num_long_range, num_protected and num_long_range_before [count, Hkv]; first_row
/// [count, Hkv];
/// status [count] is OR-ed.
/// Overwrites: `computed` of keys that are held for their position, with 0.
///
/// Phases: 1. The head's numbers. 2. Entries. 3. Tokens. 4. Slots.
template <class View, class Gate>
__global__ void __launch_bounds__(prefill_threads)
    prefill_lifetimes_kernel(const __grid_constant__ prefill_params<View> call, const Gate gate) {
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    lifetimes_block<View, Gate>(call, gate, block / call.pieces, block % call.pieces).run();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
