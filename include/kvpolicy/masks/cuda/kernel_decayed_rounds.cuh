// Expiries where the order of keys depends on the query (decay steps n > 1), in rounds of several thousand
// keys.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/agent_decayed_round.cuh>
#include <kvpolicy/masks/cuda/decay_classes.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The keys of a round, by their tokens.
struct mask_round_keys {
    const float* scores;
    const std::int32_t* tokens;
    std::int32_t first;  // the first candidate's token

    __device__ float score(int v) const { return scores[tokens[v]]; }
    __device__ std::int32_t token(int v) const { return tokens[v] - first; }
};

/// Scratch of decayed_rounds_kernel: two lists of tokens per segment.
struct decayed_round_lists {
    std::int32_t* tokens = nullptr;  // [planes, 2, length]
    std::int64_t length = 0;         // of a list; the whole plane's for packed segments

    static std::int64_t length_of(std::int64_t tokens, bool packed) {
        return packed || tokens < decayed_round_keys ? tokens : decayed_round_keys;
    }
};

/// One segment by one block.
template <class Gate, class Keep>
struct decayed_rounds_block {
    static constexpr int threads = decayed_round_threads, warps = threads / 32;
    using shared = decayed_round_memory<threads, decayed_round_items>;

    const mask_params<Gate, Keep>& params;
    shared& memory;
    const segment_range segment;
    const HeadParams head_params;
    const float* const scores;
    expiry_t* const expiry;
    std::int32_t* tokens;  // V
    std::int32_t* spare;
    const int thread = static_cast<int>(threadIdx.x), lane = lane_id();
    int turn = 0;  // of memory.total
    bool nan = false;

    __device__ __forceinline__ decayed_rounds_block(const mask_params<Gate, Keep>& call,
                                                    const plane_view<expiry_t>& out, std::int64_t plane,
                                                    const segment_range& range, const HeadParams& of_head,
                                                    shared& block_memory, const decayed_round_lists& lists)
        : params(call),
          memory(block_memory),
          segment(range),
          head_params(of_head),
          scores(call.scores.head(call.sequence_of(plane), call.head_of(plane)) + range.begin),
          expiry(out.head(call.sequence_of(plane), call.head_of(plane)) + range.begin),
          tokens(lists.tokens + 2 * plane * lists.length + range.begin),
          spare(tokens + lists.length) {}

    __device__ __forceinline__ void run() {
        const decay_clock clock(head_params, segment.length());
        int held = 0;
        for (std::int32_t next = 0; next < segment.length();) {
            const int candidates = gather(next, held);  // 1
            if (held + candidates <= head_params.budget) {
                held += candidates;
                continue;
            }
            const mask_round_keys keys{scores, tokens, tokens[held]};
            agent_decayed_round<threads, decayed_round_items, shared, mask_round_keys> round(
                memory, keys, clock, head_params, held, candidates, head_params.budget);
            round.run();                          // 2
            write_evictions(held, candidates);    // 3
            keep_held(round, held + candidates);  // 4
            held = head_params.budget;
        }
        for (int v = thread; v < held; v += threads) {  // 5
            expire(tokens[v], never);
        }
    }

  private:
    __device__ __forceinline__ void expire(std::int32_t token, expiry_t value) const {
        expiry[token] = in_sequence(value, segment, params.edges != nullptr);
    }
    /// The sum of `mine` over the threads before, and over all. One barrier.
    __device__ __forceinline__ block_sum scan(bool mine) {
        const unsigned lanes = __ballot_sync(all_lanes, mine);
        if (lane == 0) {
            memory.total[turn][thread / 32] = __popc(lanes);
        }
        __syncthreads();
        const block_sum sums = sum_of_warps<warps>(memory.total[turn]);
        turn ^= 1;
        return {sums.before + __popc(lanes & lanes_before(lane)), sums.total};
    }

    /// Lists the candidates from token `next` on behind the `held` keys, as many as fit, and advances it.
    /// Writes the expiries of keys that do not compete. Returns how many candidates there are.
    __device__ __forceinline__ int gather(std::int32_t& next, int held) {
        int candidates = 0;
        for (; next < segment.length(); next += threads) {
            const std::int32_t t = next + thread;
            const bool leaves = params.leaves(head_params, t, segment.length());
            const float score = leaves ? scores[t] : 0.0f;
            const bool competes = leaves && params.gate.open(score, head_params);
            const block_sum sums = scan(competes);
            if (held + candidates + sums.total > decayed_round_keys) {
                break;
            }
            nan = nan || score != score;
            if (competes) {
                tokens[held + candidates + sums.before] = t;
            } else if (t < segment.length()) {
                expire(t, params.forever(head_params, t) ? never : window_expiry(t, head_params.window));
            }
            candidates += sums.total;
        }
        __syncthreads();
        return candidates;
    }

    /// Evicted keys expire at the query of the candidate that evicts them, rejected ones at their own.
    __device__ __forceinline__ void write_evictions(int held, int candidates) const {
        for (int v = held + thread; v < held + candidates; v += threads) {
            const int evicted = memory.rank[v];
            if (evicted != v || v >= head_params.budget) {
                expire(tokens[evicted], static_cast<expiry_t>(tokens[v] + head_params.window));
            }
        }
    }

    /// Lists the keys that hold the slots after a round of `count` keys.
    template <class Round>
    __device__ __forceinline__ void keep_held(const Round& round, int count) {
        int held = 0;
        for (int first = 0; first < count; first += threads) {
            const int r = first + thread;
            const bool is = r < count && round.holds(r);
            const block_sum sums = scan(is);
            if (is) {
                spare[held + sums.before] = tokens[memory.order[r]];
            }
            held += sums.total;
        }
        __syncthreads();
        std::int32_t* const listed = spare;
        spare = tokens;
        tokens = listed;
    }
};

/// Expiries of heads whose keys are ranked by class (decay_classes.cuh).
///
/// Grid: planes * segments. Block: decayed_round_threads. Shared memory: decayed_round_memory (dynamic).
/// Reads scores [B, Hkv, S], fp32. Overwrites out [B, Hkv, S], int32. Scratch: decayed_round_lists. Reports
/// status_bad_length and status_nan_score.
/// In rounds of up to decayed_round_keys keys:
/// 1. Gather the candidates; keys that do not compete expire. While top-k slots are free for all, the round
///    is over.
/// 2. Sort by class; updates (agent_decayed_round.cuh).
/// 3. Expiries of evicted keys.
/// 4. List the keys that hold slots.
/// At the end:
/// 5. Those do not expire.
template <class Gate, class Keep>
__global__ void __launch_bounds__(decayed_round_threads)
    decayed_rounds_kernel(const mask_params<Gate, Keep> params, const plane_view<expiry_t> out,
                          const decayed_round_lists lists) {
    using block = decayed_rounds_block<Gate, Keep>;
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(params.segments);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(params.segments));
    const auto b = params.sequence_of(plane);
    const auto h = params.head_of(plane);
    if (threadIdx.x == 0 && index == 0 && h == 0) {
        params.check_length(b);
    }
    const segment_range segment = params.segment(b, index);
    const HeadParams head_params = params.all_params.of(h);
    if (segment.length() == 0 || !params.by_decayed_rounds(head_params)) {
        return;
    }
    block rounds(params, out, plane, segment, head_params,
                 *reinterpret_cast<typename block::shared*>(dynamic_shared()), lists);
    rounds.run();
    if (rounds.nan) {
        params.report(b, status_nan_score);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
