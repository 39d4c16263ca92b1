// The top-k updates of a chunk for one head by one block, without a serial scan of the candidates.
//
// A candidate is a key that leaves the window while the chunk's tokens come, and that the gate lets compete.
// Steps would compare one after another with the minimum of the top-k slots: the worse of the two is evicted.
// With static priorities the minimum only rises, so a round decides thousands of candidates at once:
//
//     V           = the old keys that can be evicted, then the candidates, in the order of their positions
//     rank(x)     = how many keys of V are better than x
//     cutoff(x)   = rank of the K-th best key of V that came before x      (K: top-k slots that V has)
//     x is admitted  <=>  rank(x) < cutoff(x);  then it evicts the key whose rank is cutoff(x)
//
// A sort gives the ranks. The cutoffs at the begin of every warp's share of the candidates follow from the
// sorted order. Each warp then takes its share, 32 candidates at a time: one comparison rejects those beyond
// the cutoff, and only admitted keys take turns. An admitted key takes the slot of the key that it evicts, so
// slots are the roots of chains of evictions, which pointer doubling finds.
//
// For the same scores, positions and slots equal those of single steps.
#pragma once

#include <kvpolicy/caches/cuda/prefill/agent_rank_keys.cuh>
#include <kvpolicy/caches/cuda/prefill/top_k_round.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/block_find_largest.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/sorted_order.cuh>
#include <kvpolicy/policies/cutoff.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <int Threads, int Items>
struct agent_top_k_update : agent_rank_keys<Threads, Items> {
    using ranked = agent_rank_keys<Threads, Items>;
    using ranked::head, ranked::used, ranked::outside;
    using ranked::ranked;
    using typename ranked::index, typename ranked::select_memory;

    __device__ __forceinline__ void run() {
        for (std::int32_t next = head.first_leaving; next < head.tokens;) {
            begin_round(next);                        // 1
            const int staying = gather_better(next);  // 2
            if (candidates > free) {
                choose_old();        // 3
                rank_all();          // 4
                find_checkpoints();  // 5
                evict();             // 6
                // Candidates among the `places` best hold their slots in the end.
                write_decided(places, [](int) { return true; });  // 7, 8, 9
            } else {
                write_into_free_slots();
            }
            end_round(staying);
        }
    }

  private:
    using ranked::capacity, ranked::none, ranked::warps, ranked::padded, ranked::params, ranked::memory,
        ranked::head_params, ranked::thread, ranked::lane, ranked::warp, ranked::scores, ranked::base,
        ranked::free, ranked::old, ranked::candidates, ranked::places, ranked::leaving, ranked::code,
        ranked::key_of_slot, ranked::competes, ranked::sorted_size, ranked::rank_all, ranked::find_minimum,
        ranked::gather, ranked::write_into_free_slots, ranked::list_old, ranked::write_decided,
        ranked::end_round;

    /// Base of priorities, free slots, and where none is free the minimum of all slots.
    __device__ __forceinline__ void begin_round(std::int32_t next) {
        base = priority_base(head.base + next, params.rebase_limit);
        const std::int32_t competing = used - outside;
        free = head_params.budget == unlimited ? unlimited : head_params.budget - competing;
        full = free == 0 && head_params.budget != 0;
        if (full) {
            std::int32_t slot = -1;
            minimum = find_minimum([this](std::int32_t p) { return key_of_slot(p); }, slot);
        }
    }

    /// Collects candidates. Stops where priorities get another base, and before the round has more keys than
    /// the block can rank.
    __device__ __forceinline__ int gather_better(std::int32_t& next) {
        const std::int32_t competing = used - outside;
        const int most = competing <= capacity / 2 ? capacity - competing : capacity / 2;
        position_t end = head.tokens;
        if (head_params.log_gamma != 0.0f) {
            end = min(end, base + params.rebase_limit - head.base);
        }
        return gather(next, end, most,
                      [this](std::int32_t j) { return !full || code(scores[j], leaving(j)) < minimum.code; });
    }

    /// V's old keys: at most as many as can be evicted, those that are evicted first. All of them where that
    /// makes no larger sort.
    __device__ __forceinline__ void choose_old() {
        const int competing = used - outside, evictions = candidates - free;
        old = min(competing, evictions);
        eviction_rank last{0, -1};  // of those that are chosen
        if (old != competing && sorted_size(competing + candidates) == sorted_size(old + candidates)) {
            old = competing;
        }
        if (old != competing) {
            last = find_last(old);
        }
        places = free + old;
        list_old([&](std::int32_t p) { return old == competing || !last.before(key_of_slot(p)); });
    }

    /// The `wanted`-th key to be evicted of those in top-k slots, or a bound between it and the next one.
    /// Radix selection, 8 bits per pass: first the code, then the position.
    __device__ __forceinline__ eviction_rank find_last(int wanted) {
        select_memory& select = memory.select;
        eviction_rank last{0, 0};
        std::uint64_t known = 0;
        for (int digit = 0; digit < 16; ++digit) {
            const int shift = 56 - digit % 8 * 8;
            const bool of_code = digit < 8;
            if (digit == 8) {
                known = 0;
            }
            const std::uint64_t prefix = of_code ? last.code : static_cast<std::uint64_t>(last.position);
            for (int i = thread; i < 256; i += Threads) {
                select.counts[i] = 0;
            }
            __syncthreads();
            for (std::int32_t first = 0; first < used; first += Threads) {
                const std::int32_t p = first + thread;
                bool counts = p < used && competes(p);
                std::uint64_t number = 0;
                if (counts) {
                    const eviction_rank key = key_of_slot(p);
                    number = of_code ? key.code : static_cast<std::uint64_t>(key.position);
                    counts = (number & known) == prefix && (of_code || key.code == last.code);
                }
                count_digit(select.counts, static_cast<int>(number >> shift & 255), counts);
            }
            __syncthreads();
            if (warp == 0) {
                choose_digit(select, prefix, wanted, shift);
            }
            __syncthreads();
            if (of_code) {
                last.code = select.prefix;
            } else {
                last.position = static_cast<position_t>(select.prefix);
            }
            wanted = select.wanted;
            known |= std::uint64_t{255} << shift;
            const bool all = select.counts[select.prefix >> shift & 255] == wanted;
            __syncthreads();
            if (all) {
                break;
            }
        }
        return last;
    }

    /// A warp's share of the candidates that find no free slot, and its first one.
    __device__ __forceinline__ int share() const {
        return ((candidates - free + warps - 1) / warps + 31) / 32 * 32;
    }
    __device__ __forceinline__ int first_of_share() const { return min(candidates, free + warp * share()); }

    /// The cutoff at the begin of every share, a warp each.
    __device__ __forceinline__ void find_checkpoints() {
        const int begin = first_of_share();
        if (begin < candidates) {
            const std::int32_t cutoff =
                kth_before<padded>(memory.order, static_cast<index>(old + begin), places);
            if (lane == 0) {
                memory.checkpoint[warp] = cutoff;
            }
        } else if (lane == 0) {
            memory.checkpoint[warp] = places - 1;
        }
        if (lane == 0) {
            if (warp == 0) {
                memory.checkpoint[warps] = places - 1;
            }
        }
        __syncthreads();
    }

    /// Each warp takes its share of the candidates: memory.rank of one that is admitted becomes the key that
    /// it evicts, of all other keys of V the key itself.
    __device__ __forceinline__ void evict() {
        const int begin = first_of_share();
        const int end = min(candidates, begin + share());
        std::uint32_t* const present = memory.present[warp];
        std::int32_t cutoff = memory.checkpoint[warp];
        if (begin < end) {
            // Keys with ranks below the next share's cutoff stay; those above this one's were evicted before.
            const int last_word = cutoff / 32;
            for (int word = memory.checkpoint[warp + 1] / 32; word <= last_word; ++word) {
                const int r = 32 * word + lane;
                const unsigned bits = __ballot_sync(all_lanes, memory.order[r] < old + begin);
                if (lane == 0) {
                    present[word] = bits;
                }
            }
            __syncwarp();
        }
        for (int first = begin; first < end; first += 32) {
            evict_for(first + lane, end, present, cutoff);
        }
        for (int v = thread; v < old + free; v += Threads) {
            memory.rank[v] = static_cast<index>(v);
        }
        __syncthreads();
    }

    /// 32 candidates, x of them this lane's.
    __device__ __forceinline__ void evict_for(int x, int end, std::uint32_t* present,
                                              std::int32_t& cutoff) const {
        const std::int32_t r = x < end ? memory.rank[old + x] : never;
        if (x < end) {
            memory.rank[old + x] = static_cast<index>(old + x);
        }
        bool waits = x < end && r < cutoff;
        for (unsigned lanes = __ballot_sync(all_lanes, waits); lanes != 0u;
             lanes = __ballot_sync(all_lanes, waits)) {
            const int admitted = __ffs(static_cast<int>(lanes)) - 1;
            if (lane == admitted) {
                const int evicted = memory.order[cutoff];
                memory.rank[old + x] = static_cast<index>(evicted);
                present[r / 32] |= 1u << r % 32;
            }
            __syncwarp();
            cutoff = last_present(present, cutoff / 32, cutoff);
            waits = waits && lane > admitted && r < cutoff;
        }
    }

    /// The largest present rank below `rank`, which is in or just behind word `word`. There is one.
    __device__ __forceinline__ static std::int32_t last_present(const std::uint32_t* present, int word,
                                                                std::int32_t rank) {
        const int within = rank - 32 * word;
        std::uint32_t bits = present[word] & (within >= 32 ? all_lanes : lanes_before(within));
        while (bits == 0u) {
            bits = present[--word];
        }
        return 32 * word + 31 - __clz(static_cast<int>(bits));
    }

    bool full = false;      // no slot was free at the round's begin
    eviction_rank minimum;  // the key that is evicted first, where `full`
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
