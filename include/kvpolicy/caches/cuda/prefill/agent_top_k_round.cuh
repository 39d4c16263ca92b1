// Phases of a round of top-k updates that do not depend on the order of keys.
#pragma once

#include <kvpolicy/caches/cuda/prefill/top_k_round.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <int Threads, int Items, class Shared>
struct agent_top_k_round : top_k_round<Threads, Items, Shared> {
    using round = top_k_round<Threads, Items, Shared>;
    using round::capacity, round::warps, round::none;
    using round::memory, round::params, round::outside, round::thread, round::lane, round::warp, round::used,
        round::free, round::old, round::candidates, round::old_slot, round::token, round::free_slot,
        round::holder, round::kinds, round::slot_protected, round::competes, round::scan, round::put,
        round::expire, round::name_of;
    using round::round;
    using typename round::index;

    /// The key that is evicted first of those that compete, by rank_of(slot). `slot`: its
    /// slot in the thread that found it, -1 in all others.
    template <class RankOf>
    __device__ __forceinline__ eviction_rank find_minimum(const RankOf& rank_of, std::int32_t& slot) {
        eviction_rank mine;
        for (std::int32_t p = thread; p < used; p += Threads) {
            const eviction_rank one = rank_of(p);
            if (competes(p) && one.before(mine)) {
                mine = one;
                slot = p;
            }
        }
        const eviction_rank own = mine;
        for (int step = 16; step > 0; step /= 2) {
            const eviction_rank other{__shfl_xor_sync(all_lanes, mine.code, step),
                                      static_cast<position_t>(__shfl_xor_sync(
                                          all_lanes, static_cast<long long>(mine.position), step))};
            mine = other.before(mine) ? other : mine;
        }
        if (lane == 0) {
            memory.worst[warp] = mine;
        }
        __syncthreads();
        eviction_rank minimum = memory.worst[0];
        for (int w = 1; w < warps; ++w) {
            minimum = memory.worst[w].before(minimum) ? memory.worst[w] : minimum;
        }
        if (own.position != minimum.position) {
            slot = -1;
        }
        return minimum;
    }

    /// Collects up to `most` candidates from token `next` to token `end`, and advances `next`: those of the
    /// keys that compete for which may(j). Keys that stay for their position get their slots at once; returns
    /// how many.
    template <class May>
    __device__ __forceinline__ int gather(std::int32_t& next, position_t end, int most, const May& may) {
        constexpr int each = Items < 8 ? 1 : Items / 4;  // neighbors that a thread takes in a turn
        static_assert(Items == 1 || each * Threads <= capacity / 2);  // a turn fits into a round
        int staying = 0;
        candidates = 0;
        for (; next < end; next += each * Threads) {
            const std::int32_t first = next + each * thread;
            unsigned comes = 0, stays = 0;  // bit i: of token first + i
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const std::int32_t j = first + i;
                const unsigned char kind = j < end ? kinds[j] : leaving_kind_evicted;
                comes |= kind == leaving_kind_competes && may(j) ? 1u << i : 0u;
                stays |= kind == leaving_kind_protected ? 1u << i : 0u;
            }
            const block_sum both = scan(__popc(comes) | __popc(stays) << 16);
            const int coming = both.total & 0xffff;
            if (candidates + coming > most) {
                break;
            }
            int nth = candidates + (both.before & 0xffff), stay = staying + (both.before >> 16);
            for (int i = 0; i < each; ++i) {
                if ((comes >> i & 1u) != 0u) {
                    token[nth] = first + i;
                    if (nth < free) {
                        free_slot[nth] = used + nth + stay;
                    }
                    ++nth;
                } else if ((stays >> i & 1u) != 0u) {
                    const std::int32_t p = used + min(nth, free) + stay;
                    put(p, first + i);
                    slot_protected[p] = 1;
                    ++stay;
                }
            }
            candidates += coming;
            staying += both.total >> 16;
        }
        next = next < end ? next : static_cast<std::int32_t>(end);
        __syncthreads();
        return staying;
    }

    __device__ __forceinline__ void write_into_free_slots() const {
        for (int x = thread; x < candidates; x += Threads) {
            put(free_slot[x], token[x]);
        }
    }

    /// Lists the slots of V's old keys: those that compete and for which is(slot).
    template <class Is>
    __device__ __forceinline__ void list_old(const Is& is) {
        int chosen = 0;
        for (std::int32_t first = 0; first < used; first += Threads) {
            const std::int32_t p = first + thread;
            const bool listed = p < used && competes(p) && is(p);
            const block_sum sums = scan(listed ? 1 : 0);
            if (listed) {
                old_slot[chosen + sums.before] = p;
            }
            chosen += sums.total;
        }
        __syncthreads();
    }

    /// Writes a round that memory.rank and memory.order have decided, since candidates found no free slot:
    /// expiries of evicted keys, and slots of candidates among the `ranks` best of V for which holds(rank).
    template <class Holds>
    __device__ __forceinline__ void write_decided(int ranks, const Holds& holds) {
        write_evictions();
        find_slots();
        for (int r = thread; r < ranks; r += Threads) {
            if (holds(r)) {
                write_admitted(memory.order[r]);
            }
        }
    }

    /// Counts what a round wrote, with `staying` keys that stay for their position. Begins with a barrier.
    __device__ __forceinline__ void end_round(int staying) {
        __syncthreads();
        used += min(candidates, free) + staying;
        outside += staying;
    }

    /// Slots in use after the last round.
    __device__ __forceinline__ void write_counts(std::int64_t pair) const {
        if (thread == 0) {
            params.num_long_range[pair] = used;
            if (params.num_protected != nullptr) {
                params.num_protected[pair] = outside;
            }
        }
    }

  private:
    /// The expiry of every key that is evicted: the token at which its evictor leaves the window.
    __device__ __forceinline__ void write_evictions() const {
        for (int x = thread; x < candidates; x += Threads) {
            const int evicted = memory.rank[old + x];
            if (evicted != old + x) {
                expire(evicted < old ? holder[old_slot[evicted]] : name_of(token[evicted - old]), token[x]);
            }
        }
        __syncthreads();
    }

    /// memory.rank: the first key of every chain of evictions, which has the slot.
    __device__ __forceinline__ void find_slots() {
        bool moved = true;
        while (__syncthreads_or(moved ? 1 : 0) != 0) {
            index next[Items];
#pragma unroll
            for (int i = 0; i < Items; ++i) {
                const int x = i * Threads + thread;
                next[i] = x < candidates ? memory.rank[memory.rank[old + x]] : none;
            }
            __syncthreads();
            moved = false;
#pragma unroll
            for (int i = 0; i < Items; ++i) {
                const int x = i * Threads + thread;
                if (x < candidates && memory.rank[old + x] != next[i]) {
                    memory.rank[old + x] = next[i];
                    moved = true;
                }
            }
        }
    }

    /// Key v of V holds its slot in the end; of old keys that is known.
    __device__ __forceinline__ void write_admitted(int v) const {
        if (v >= old) {
            const int root = memory.rank[v];
            put(root < old ? old_slot[root] : free_slot[root - old], token[v - old]);
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
