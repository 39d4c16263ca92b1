// Top-k updates whose order depends on the query, where rounds (kernel_decayed_rounds.cuh) do not take them:
// large decay steps or budgets, and priorities whose base moves (rebase_limit). One block per segment holds
// the top-k chunks, each thread the same few of them from the first update to the last, and takes one
// candidate after another. Exact and serial: O(S k / threads) per head, where static ranks take a sort. Up to
// place_registers chunks per thread stay in registers, with the present values of their keys: a value changes
// once in n queries.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A key that holds an entry.
struct top_k_entry {
    float score;
    std::int32_t token;
};

/// How bad a key is: the larger code loses, then the younger key. No key at all (token -1) is better than
/// any.
struct eviction_order {
    std::uint64_t code = 0;
    std::int32_t token = -1;

    __device__ bool worse_than(const eviction_order& other) const {
        return code != other.code ? code > other.code : token > other.token;
    }
};

/// The worst of a warp's, in every lane.
__device__ inline eviction_order worst_of_warp(const eviction_order& mine) {
    const auto mine_high = static_cast<std::uint32_t>(mine.code >> 32);
    const std::uint32_t high = __reduce_max_sync(all_lanes, mine_high);
    const std::uint32_t mine_low = mine_high == high ? static_cast<std::uint32_t>(mine.code) : 0u;
    const std::uint32_t low = __reduce_max_sync(all_lanes, mine_low);
    const bool level = mine_high == high && mine_low == low;
    const std::int32_t token = __reduce_max_sync(all_lanes, level ? mine.token : -1);
    return {static_cast<std::uint64_t>(high) << 32 | low, token};
}

/// rank_value as a code, and the first query at which it is another.
struct present_value {
    std::uint64_t code;
    std::int64_t until;
};
__device__ inline present_value value_at(const HeadParams& head_params, const top_k_entry& key, position_t q,
                                         position_t limit) {
    if (head_params.decay_step == 1) {
        return {descending_code(rank_value(head_params, key.score, key.token, q, limit)),
                priority_base(q, limit) + limit};
    }
    // effective_score with a 32-bit division. Its product is exact or its fma explicit, so one fma is both.
    const std::uint32_t age =
        static_cast<std::uint32_t>(q - key.token) / static_cast<std::uint32_t>(head_params.decay_step);
    const double value = __fma_rn(static_cast<double>(age), static_cast<double>(head_params.log_gamma),
                                  static_cast<double>(key.score));
    return {descending_code(value), key.token + (std::int64_t{age} + 1) * head_params.decay_step};
}

/// A thread's entries in registers: entries thread, thread + Threads, ... of a head, `capacity` at most.
template <int Threads>
struct register_entries {
    static constexpr int each = 8;
    static constexpr std::int64_t capacity = std::int64_t{each} * Threads;

    std::uint64_t codes[each];
    std::int32_t until[each];
    float scores[each];
    std::int32_t tokens[each];

    __device__ explicit register_entries(top_k_entry*) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            codes[i] = 0;
            until[i] = never;
            scores[i] = 0.0f;
            tokens[i] = -1;
        }
    }

    /// Overwrites entry i where `hit`. Selects, not branches: what is stored by a branch ends up in memory.
    __device__ void set(int i, bool hit, const top_k_entry& key) {
        // Its value is asked for at the next update.
        until[i] = hit ? -1 : until[i];
        scores[i] = hit ? key.score : scores[i];
        tokens[i] = hit ? key.token : tokens[i];
    }

    __device__ void put(std::int32_t entry, const top_k_entry& key) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            set(i, i == entry / Threads, key);
        }
    }

    /// The thread's worst at query q.
    __device__ eviction_order worst(const HeadParams& head_params, position_t q, position_t limit,
                                    std::int32_t) {
        eviction_order result;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (q >= until[i]) {
                const present_value now = value_at(head_params, {scores[i], tokens[i]}, q, limit);
                codes[i] = now.code;
                until[i] = now.until < never ? static_cast<std::int32_t>(now.until) : never;
            }
            const eviction_order its{codes[i], tokens[i]};
            if (its.worse_than(result)) {
                result = its;
            }
        }
        return result;
    }

    /// Gives the entry of key `token`, if it is this thread's, to another. False if it is not.
    __device__ bool replace(std::int32_t token, const top_k_entry& by) {
        bool found = false;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const bool hit = tokens[i] == token;
            found = found || hit;
            set(i, hit, by);
        }
        return found;
    }
};

/// The same for any number of entries, in memory.
template <int Threads>
struct memory_entries {
    top_k_entry* entries;
    std::int32_t worst_entry = -1;  // at the last query asked

    __device__ explicit memory_entries(top_k_entry* memory) : entries(memory) {}

    __device__ void put(std::int32_t entry, const top_k_entry& key) { entries[entry] = key; }

    __device__ eviction_order worst(const HeadParams& head_params, position_t q, position_t limit,
                                    std::int32_t taken) {
        eviction_order result;
        for (auto entry = static_cast<std::int32_t>(threadIdx.x); entry < taken; entry += Threads) {
            const top_k_entry key = entries[entry];
            const eviction_order its{value_at(head_params, key, q, limit).code, key.token};
            if (its.worse_than(result)) {
                result = its;
                worst_entry = entry;
            }
        }
        return result;
    }

    __device__ bool replace(std::int32_t token, const top_k_entry& by) {
        if (worst_entry < 0 || entries[worst_entry].token != token) {
            return false;
        }
        entries[worst_entry] = by;
        return true;
    }
};

template <int Threads>
struct decayed_top_k_shared {
    eviction_order worst[2][Threads / 32];  // in turns, so that one barrier per update is enough
    top_k_entry arriving[Threads];
    int total[Threads / 32];
};

/// One segment by one block.
template <int Threads, class Entries, class Gate, class Keep>
struct decayed_top_k_block {
    static constexpr int warps = Threads / 32;

    const mask_params<Gate, Keep>& params;
    decayed_top_k_shared<Threads>& memory;
    const segment_range& segment;
    const HeadParams& head_params;
    const std::int32_t n;  // tokens of the segment
    const bool packed;
    const float* const scores;
    expiry_t* const expiry;
    Entries entries;
    const int thread, lane, warp;
    bool nan = false;

    __device__ __forceinline__ decayed_top_k_block(const mask_params<Gate, Keep>& call,
                                                   const plane_view<expiry_t>& out, std::int64_t plane,
                                                   const segment_range& range, const HeadParams& of_head,
                                                   decayed_top_k_shared<Threads>& shared,
                                                   top_k_entry* entries_memory)
        : params(call),
          memory(shared),
          segment(range),
          head_params(of_head),
          n(range.length()),
          packed(call.edges != nullptr),
          scores(call.scores.head(call.sequence_of(plane), call.head_of(plane)) + range.begin),
          expiry(out.head(call.sequence_of(plane), call.head_of(plane)) + range.begin),
          entries(entries_memory),
          thread(static_cast<int>(threadIdx.x)),
          lane(lane_id()),
          warp(warp_id()) {}

    __device__ __forceinline__ void run() {
        std::int32_t taken = 0;  // entries that hold a key
        int turn = 0;            // of memory.worst
        for (std::int32_t first = 0; first < n; first += Threads) {
            const int candidates = gather_candidates(first + thread);  // 1
            int next = fill_open_slots(candidates, taken);             // 2
            for (; next < candidates; ++next) {
                update(memory.arriving[next], taken, turn);  // 3
                turn ^= 1;
            }
            __syncthreads();  // arriving is written again
        }
    }

  private:
    __device__ __forceinline__ void expire(std::int32_t token, expiry_t value) const {
        expiry[token] = in_sequence(value, segment, packed);
    }

    /// memory.arriving: the candidates among Threads tokens, token t this thread's. Writes the expiry of
    /// those that do not compete. Returns how many there are.
    __device__ __forceinline__ int gather_candidates(std::int32_t t) {
        bool competes = false;
        float score = 0.0f;
        if (t < n) {
            if (params.leaves(head_params, t, n)) {
                score = scores[t];
                nan = nan || score != score;
                competes = params.gate.open(score, head_params);
            }
            if (!competes) {
                expire(t, params.forever(head_params, t) ? never : window_expiry(t, head_params.window));
            }
        }
        const unsigned coming = __ballot_sync(all_lanes, competes);
        if (lane == 0) {
            memory.total[warp] = __popc(coming);
        }
        __syncthreads();
        const block_sum candidates = sum_of_warps<warps>(memory.total);
        if (competes) {
            memory.arriving[candidates.before + __popc(coming & lanes_before(lane))] = {score, t};
        }
        __syncthreads();
        return candidates.total;
    }

    /// Entry p belongs to thread p % Threads. Returns how many candidates found an open entry.
    __device__ __forceinline__ int fill_open_slots(int candidates, std::int32_t& taken) {
        int decided = 0;
        for (; decided < candidates && taken < head_params.budget; ++taken, ++decided) {
            if (taken % Threads == thread) {
                const top_k_entry key = memory.arriving[decided];
                entries.put(taken, key);
                expire(key.token, never);
            }
        }
        return decided;
    }

    /// The top-k update of one candidate: it, or the worst key that holds an entry, is evicted.
    __device__ __forceinline__ void update(const top_k_entry candidate, std::int32_t taken, int turn) {
        const position_t q = std::int64_t{candidate.token} + head_params.window;
        const eviction_order mine = worst_of_warp(entries.worst(head_params, q, params.limit, taken));
        if (lane == 0) {
            memory.worst[turn][warp] = mine;
        }
        __syncthreads();
        const eviction_order worst = worst_of_warp(memory.worst[turn][lane < warps ? lane : 0]);
        const eviction_order its{value_at(head_params, candidate, q, params.limit).code, candidate.token};
        if (!worst.worse_than(its)) {
            if (thread == 0) {
                expire(candidate.token, static_cast<expiry_t>(q));
            }
        } else if (entries.replace(worst.token, candidate)) {
            expire(worst.token, static_cast<expiry_t>(q));
            expire(candidate.token, never);
        }
    }
};

/// decayed_top_k: expiries where the order of keys depends on the query, of heads that decayed_rounds_kernel
/// leaves out. One top-k update after another.
///
/// Grid: planes * segments. Block: Threads. Shared memory: decayed_top_k_shared<Threads> (dynamic). Reads
/// scores [B, Hkv, S], fp32. Overwrites out [B, Hkv, S], int32. `entries_memory` [grid, capacity] holds the
/// top-k entries where Entries needs memory. Reports status_bad_length and status_nan_score.
/// Per Threads tokens:
/// 1. Gather the candidates.
/// 2. Fill open entries.
/// 3. Update: one candidate is admitted or evicted.
template <int Threads, class Entries, class Gate, class Keep>
__global__ void __launch_bounds__(Threads)
    decayed_top_k_kernel(const mask_params<Gate, Keep> params, const plane_view<expiry_t> out,
                         top_k_entry* const entries_memory, const std::int64_t capacity) {
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(params.segments);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(params.segments));
    const auto b = params.sequence_of(plane);
    const auto h = params.head_of(plane);
    if (threadIdx.x == 0 && index == 0 && h == 0) {
        params.check_length(b);
    }
    const segment_range segment = params.segment(b, index);
    const HeadParams head_params = params.all_params.of(h);
    if (segment.length() == 0 || !params.by_decayed_top_k(head_params) ||
        params.by_decayed_rounds(head_params)) {
        return;
    }
    decayed_top_k_block<Threads, Entries, Gate, Keep> block(
        params, out, plane, segment, head_params,
        *reinterpret_cast<decayed_top_k_shared<Threads>*>(dynamic_shared()),
        entries_memory + static_cast<std::int64_t>(blockIdx.x) * capacity);
    block.run();
    if (block.nan) {
        params.report(b, status_nan_score);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
