// A round of top-k updates where the order of keys depends on the query (decay steps n > 1), by one block.
//
//     V = the keys that hold a top-k slot, then the candidates, in the order of their positions
//
// The first `places` keys of V hold a top-k slot at first. Each later candidate is compared, at its query,
// with the minimum of the keys that hold one, and the worse of the two is evicted.
//
// Keys of a class (decay_classes.cuh) are sorted once. A bitmap has the ranks that hold a top-k slot, so the
// minimum is among the last held ranks of the n classes: O(n / 32 + 1) per update of one warp. Values fall
// with ages, so the minimum of all keys at the last query of 32 candidates rejects most of them at once. An
// admitted candidate may fall below that minimum until then, and becomes the bound where it does.
//
// Values of a class are rounded numbers in the order of exact ones. So the key of the last rank has the least
// value, but better ranks may have the same. If they do, all held keys are searched for the youngest of
// those.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/decay_classes.cuh>
#include <kvpolicy/masks/cuda/sorted_order.cuh>

#include <cub/block/block_radix_sort.cuh>

#include <cstdint>
#include <limits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A candidate of the 32 that are updated next.
struct decayed_candidate {
    std::uint64_t code;   // at its query
    std::uint64_t after;  // at the last query of the 32
    decay_point query;
    std::int32_t phase;
    std::int32_t rank;
};

/// Shared memory of a block that ranks up to Threads * Items keys at once.
template <int Threads, int Items>
struct decayed_round_memory {
    static constexpr int capacity = Threads * Items;
    using index = std::uint16_t;
    static_assert(capacity < 0xffff && capacity % 32 == 0);
    template <int Each>
    using sorter = cub::BlockRadixSort<std::uint32_t, Threads, Each, index, 4, false>;

    union {
        unsigned char sort[sizeof(typename sorter<Items>::TempStorage)];
        std::uint32_t keys[capacity];   // sorted
        decayed_key by_rank[capacity];  // the key of a rank
    };
    index order[capacity];                   // a rank -> its key in V
    index rank[capacity];                    // a key of V -> its rank; then the key that it evicts
    std::uint32_t present[capacity / 32];    // bit r: the key of rank r holds a slot
    decay_class classes[max_decay_classes];  // a class is its lane's: class % 32
    decayed_candidate candidates[32];
    int total[2][Threads / 32];  // in turns, so that one barrier a scan is enough
};

/// Keys has score(v) and token(v) of V's keys; tokens are positions relative to the first candidate's.
template <int Threads, int Items, class Memory, class Keys>
struct agent_decayed_round {
    using index = std::uint16_t;
    static constexpr std::int32_t no_token = std::numeric_limits<std::int32_t>::min();

    Memory& memory;
    const Keys& keys;
    const decay_clock clock;
    const std::int32_t classes, window;
    const int old, candidates, places;
    const int thread = static_cast<int>(threadIdx.x), lane = lane_id();

    __device__ __forceinline__ agent_decayed_round(Memory& block_memory, const Keys& of,
                                                   const decay_clock& its_clock,
                                                   const HeadParams& head_params, int old_keys, int new_keys,
                                                   int top_k_slots)
        : memory(block_memory),
          keys(of),
          clock(its_clock),
          classes(head_params.decay_step),
          window(head_params.window),
          old(old_keys),
          candidates(new_keys),
          places(top_k_slots) {}

    /// memory.rank of every admitted candidate becomes the key that it evicts, of other keys the key itself;
    /// memory.present those that hold slots in the end, by rank; memory.order the key of a rank.
    __device__ __forceinline__ void run() {
        if (old + candidates <= Threads) {
            sort<1>();
        } else {
            sort<Items>();
        }
        begin_classes();
        if (thread < 32) {
            if (classes <= 32) {
                update<true>();
            } else {
                update<false>();
            }
        }
        __syncthreads();
    }

    /// Whether the key of rank r holds a slot.
    __device__ __forceinline__ bool holds(int r) const {
        return (memory.present[r / 32] >> r % 32 & 1u) != 0u;
    }

  private:
    __device__ __forceinline__ exact_priority priority(int v) const {
        const std::int32_t token = keys.token(v);
        return clock.priority({keys.score(v), clock.at(token).period}, token);
    }
    /// What V's keys are sorted by in a pass. Pass 0: the class and the first bits of the priority. Where
    /// that leaves long runs of equal ones out of order, the other passes sort by all there is, the last
    /// first.
    __device__ __forceinline__ std::uint32_t sort_key(int v, int pass) const {
        const auto phase = static_cast<std::uint32_t>(clock.at(keys.token(v)).phase);
        const exact_priority its = priority(v);
        switch (pass) {
            case 0: {
                constexpr std::uint64_t sign = std::uint64_t{1} << 63;
                const std::uint64_t bits = (its.high & sign) != 0 ? its.high : ~(its.high | sign);
                const double high = __longlong_as_double(static_cast<long long>(bits));
                const std::uint32_t key =
                    its.high == nan_code ? nan_key : descending_key(__double2float_rn(high));
                const int class_bits = 32 - __clz(classes - 1);
                return phase << (32 - class_bits) | key >> class_bits;
            }
            case 1:
                return static_cast<std::uint32_t>(its.token) ^ 0x80000000u;
            case 2:
                return static_cast<std::uint32_t>(descending_code(its.low));
            case 3:
                return static_cast<std::uint32_t>(descending_code(its.low) >> 32);
            case 4:
                return static_cast<std::uint32_t>(its.high);
            case 5:
                return static_cast<std::uint32_t>(its.high >> 32);
            default:
                return phase;
        }
    }

    /// memory.order: V by class, best first.
    template <int Each>
    __device__ __forceinline__ void sort() {
        using sorter = typename Memory::template sorter<Each>;
        static_assert(sizeof(typename sorter::TempStorage) <= sizeof(memory.sort));
        constexpr int last_pass = 6;
        const int count = old + candidates;
        std::uint32_t key[Each];
        index member[Each];
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            member[i] = static_cast<index>(thread * Each + i);
        }
#pragma unroll 1
        for (int pass = 0; pass <= last_pass; ++pass) {
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                key[i] = member[i] < count ? sort_key(member[i], pass) : idle_key;
            }
            sorter(reinterpret_cast<typename sorter::TempStorage&>(memory.sort)).Sort(key, member);
            __syncthreads();
            if (pass != 0 && pass != last_pass) {
                continue;
            }
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                memory.order[thread * Each + i] = member[i];
                memory.keys[thread * Each + i] = key[i];
                member[i] = static_cast<index>(thread * Each + i);
            }
            __syncthreads();
            if (pass == 0 && fix_short_ties<Threads>(memory.keys, memory.order, count, [&](index a, index b) {
                    return priority(b).before(priority(a));
                })) {
                break;
            }
        }
        __syncthreads();
    }

    /// memory.by_rank, rank, present, and of every class its first rank and its minimum.
    __device__ __forceinline__ void begin_classes() {
        for (int k = thread; k < classes; k += Threads) {
            memory.classes[k] = {{}, -1, Memory::capacity};
        }
        __syncthreads();
        for (int r = thread; r < Memory::capacity; r += Threads) {
            const bool is = r < old + candidates;
            const int v = is ? memory.order[r] : 0;
            const decay_point point = clock.at(is ? keys.token(v) : 0);
            const std::int32_t phase = is ? point.phase : -1;
            const bool held = is && v < places;
            const unsigned word = __ballot_sync(all_lanes, held);
            // Keys of a class are neighbors: the first and the last of a warp's speak for them.
            const unsigned behind = word & ~lanes_before(lane) & ~(1u << lane);
            const std::int32_t before = __shfl_up_sync(all_lanes, phase, 1);
            const std::int32_t next =
                __shfl_sync(all_lanes, phase, behind == 0u ? lane : __ffs(static_cast<int>(behind)) - 1);
            if (is) {
                memory.by_rank[r] = {keys.score(v), point.period};
                memory.rank[v] = static_cast<index>(v < places ? v : r);
                if (lane == 0 || before != phase) {
                    atomicMin(&memory.classes[phase].first, r);
                }
                if (held && (behind == 0u || next != phase)) {
                    atomicMax(&memory.classes[phase].rank, r);
                }
            }
            if (lane == 0) {
                memory.present[r / 32] = word;
            }
        }
        __syncthreads();
        for (int k = thread; k < classes; k += Threads) {
            decay_class& one = memory.classes[k];
            if (one.rank >= 0) {
                one.worst = memory.by_rank[one.rank];
            }
        }
        __syncthreads();
    }

    /// A lane's minimum of its classes at a query.
    struct lane_minimum {
        std::uint64_t code = 0;  // 0: none of them holds a slot
        std::int32_t phase = 0;
        bool tied = false;  // several classes have it
    };

    /// Class `phase`, this lane's. Single: the only one.
    template <bool Single>
    __device__ __forceinline__ decay_class& class_of(decay_class& single, std::int32_t phase) const {
        if constexpr (Single) {
            return single;
        } else {
            return memory.classes[phase];
        }
    }
    template <bool Single>
    __device__ __forceinline__ lane_minimum minimum(decay_class& single, const decay_point& query) const {
        lane_minimum least;
        for (std::int32_t phase = lane; phase < classes; phase += 32) {
            const decay_class& one = class_of<Single>(single, phase);
            const std::uint64_t code = one.rank >= 0 ? clock.code(one.worst, phase, query) : 0;
            least.tied = code == least.code || (least.tied && code < least.code);
            if (code > least.code) {
                least.code = code;
                least.phase = phase;
            }
            if constexpr (Single) {
                break;
            }
        }
        return least;
    }
    /// The lanes that have the largest code; at least one has one.
    __device__ __forceinline__ static unsigned lanes_of_largest(std::uint64_t code) {
        const auto high = static_cast<std::uint32_t>(code >> 32), low = static_cast<std::uint32_t>(code);
        bool is = __reduce_max_sync(all_lanes, high) == high;
        unsigned lanes = __ballot_sync(all_lanes, is);
        if ((lanes & (lanes - 1)) != 0u) {
            const std::uint32_t most = __reduce_max_sync(all_lanes, is ? low : 0u);
            is = is && most == low;
            lanes = __ballot_sync(all_lanes, is);
        }
        return lanes;
    }

    /// The largest present rank below `rank`, from `first` on; -1: there is none.
    __device__ __forceinline__ std::int32_t last_held(std::int32_t first, std::int32_t rank) const {
        std::int32_t word = rank / 32;
        unsigned bits = memory.present[word] & lanes_before(rank % 32);
        while (bits == 0u && 32 * word > first) {
            bits = memory.present[--word];
        }
        const std::int32_t r = 32 * word + 31 - __clz(static_cast<int>(bits));
        return bits != 0u && r >= first ? r : -1;
    }

    /// The updates, by the first warp: 32 candidates at a time.
    template <bool Single>
    __device__ __forceinline__ void update() {
        decay_class single = memory.classes[lane];
        if (Single && lane >= classes) {
            single.rank = -1;
        }
        for (int first = places - old; first < candidates; first += 32) {
            const int x = first + lane;
            const decay_point last = clock.at(keys.token(old + min(first + 32, candidates) - 1) + window);
            std::uint64_t code = idle_code;
            if (x < candidates) {
                const std::int32_t token = keys.token(old + x), r = memory.rank[old + x];
                const decayed_key key = memory.by_rank[r];
                const decay_point mine = clock.at(token), query = clock.at(token + window);
                code = clock.code(key, mine.phase, query);
                memory.rank[old + x] = static_cast<index>(old + x);
                memory.candidates[lane] = {code, clock.code(key, mine.phase, last), query, mine.phase, r};
            }
            __syncwarp();
            const std::uint64_t least = minimum<Single>(single, last).code;
            std::uint64_t bound = of_lane(least, lanes_of_largest(least));
            for (unsigned waiting = __ballot_sync(all_lanes, code < bound); waiting != 0u;) {
                const int i = __ffs(static_cast<int>(waiting)) - 1;
                const decayed_candidate candidate = memory.candidates[i];
                if (compete<Single>(single, candidate, old + first + i) && candidate.after > bound) {
                    bound = candidate.after;
                }
                waiting = __ballot_sync(all_lanes, lane > i && code < bound);
            }
            __syncwarp();
        }
    }
    /// The number of the first of some lanes.
    __device__ __forceinline__ static std::uint64_t of_lane(std::uint64_t number, unsigned lanes) {
        return __shfl_sync(all_lanes, static_cast<unsigned long long>(number),
                           __ffs(static_cast<int>(lanes)) - 1);
    }

    /// Candidate v against the minimum at its query. Whether it is admitted.
    template <bool Single>
    __device__ __forceinline__ bool compete(decay_class& single, const decayed_candidate& candidate, int v) {
        const decay_point query = candidate.query;
        const lane_minimum least = minimum<Single>(single, query);
        const unsigned worst = lanes_of_largest(least.code);
        bool evicts = (worst >> lane & 1u) != 0u;
        // The candidate is the youngest: of equal values it is the one that is rejected.
        if (__ballot_sync(all_lanes, evicts && candidate.code < least.code) == 0u) {
            return false;
        }
        std::int32_t phase = least.phase, victim = -1, next = -1, token = no_token;
        decayed_key next_key{};
        bool ties = false;  // with a key that is not the last of its class
        if (evicts) {
            const std::int32_t stride = least.tied ? 32 : max_decay_classes;
            for (std::int32_t k = least.tied ? lane : least.phase; k < classes; k += stride) {
                const decay_class& one = class_of<Single>(single, k);
                if (one.rank < 0 || clock.code(one.worst, k, query) != least.code) {
                    continue;
                }
                const std::int32_t second = last_held(one.first, one.rank);
                const decayed_key second_key = memory.by_rank[second < 0 ? 0 : second];
                ties = ties || (second >= 0 && clock.code(second_key, k, query) == least.code &&
                                !clock.absorbs(one.worst.score));
                if (const std::int32_t its = one.worst.period * classes + k; its >= token) {
                    token = its;
                    phase = k;
                    victim = one.rank;
                    next = second;
                    next_key = second_key;
                }
            }
        }
        if (__any_sync(all_lanes, ties) != 0) {
            victim = youngest_of(of_lane(least.code, worst), query, phase);
            evicts = lane == phase % 32;
            if (evicts) {
                const decay_class& one = class_of<Single>(single, phase);
                next = victim == one.rank ? last_held(one.first, victim) : one.rank;
                next_key = memory.by_rank[next < 0 ? 0 : next];
            }
        } else if ((worst & (worst - 1)) != 0u) {
            const std::int32_t youngest = __reduce_max_sync(all_lanes, token);
            evicts = evicts && youngest == token;
        }
        if (evicts) {
            memory.rank[v] = memory.order[victim];
            memory.present[victim / 32] &= ~(1u << victim % 32);
            decay_class& one = class_of<Single>(single, phase);
            one.worst = next_key;
            one.rank = next;
        }
        __syncwarp();
        if (lane == candidate.phase % 32) {
            memory.present[candidate.rank / 32] |= 1u << candidate.rank % 32;
            decay_class& one = class_of<Single>(single, candidate.phase);
            if (candidate.rank > one.rank) {
                one.worst = memory.by_rank[candidate.rank];
                one.rank = candidate.rank;
            }
        }
        __syncwarp();
        return true;
    }

    /// The rank of the youngest held key with a value, and its class. There is one.
    __device__ __forceinline__ std::int32_t youngest_of(std::uint64_t code, const decay_point& query,
                                                        std::int32_t& phase) const {
        std::int32_t rank = -1, youngest = no_token, its_phase = 0;
        for (int r = lane; r < old + candidates; r += 32) {
            if (!holds(r)) {
                continue;
            }
            const std::int32_t token = keys.token(memory.order[r]);
            const decay_point point = clock.at(token);
            if (token >= youngest && clock.code(memory.by_rank[r], point.phase, query) == code) {
                rank = r;
                youngest = token;
                its_phase = point.phase;
            }
        }
        const std::int32_t of_all = __reduce_max_sync(all_lanes, youngest);
        const unsigned lanes = __ballot_sync(all_lanes, rank >= 0 && youngest == of_all);
        phase = __shfl_sync(all_lanes, its_phase, __ffs(static_cast<int>(lanes)) - 1);
        return __shfl_sync(all_lanes, rank, __ffs(static_cast<int>(lanes)) - 1);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
