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
// Positions, scores and slots equal those of single steps.
#pragma once

#include <kvpolicy/caches/cuda/prefill/top_k_update_params.cuh>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/block_find_largest.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/masks/cuda/sorted_order.cuh>
#include <kvpolicy/policies/cutoff.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cub/block/block_radix_sort.cuh>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// How early a key is evicted: the larger code first, of equal ones the younger key.
struct eviction_rank {
    std::uint64_t code = 0;
    position_t position = -1;  // -1: no key, which is evicted after all others

    __device__ bool before(const eviction_rank& other) const {
        return code != other.code ? code > other.code : position > other.position;
    }
};

/// One head of an entry by one block of Threads. A round has up to Threads * Items keys.
template <int Threads, int Items>
struct agent_top_k_update {
    static constexpr int capacity = Threads * Items;
    static constexpr int warps = Threads / 32;
    static constexpr int counted = std::min(256, capacity);  // so many keys are ranked by comparing all pairs
    static constexpr int padded = (capacity + 255) / 256 * 256;
    static constexpr bool sorts = capacity > counted;

    using index = std::uint16_t;
    static constexpr index none = 0xffff;
    static_assert(capacity < none && capacity % 32 == 0);
    template <int Each>
    using sorter = cub::BlockRadixSort<std::uint32_t, Threads, Each, index, 5, false>;

    struct pairs_memory {
        std::uint64_t code[counted];
        position_t position[counted];
    };
    struct select_memory {
        std::int32_t counts[256];
        std::uint64_t prefix;
        std::int32_t wanted;
    };
    struct shared {
        union {
            pairs_memory pairs;
            select_memory select;
            unsigned char sort[sorts ? sizeof(typename sorter<Items>::TempStorage) : 1];
            std::uint32_t keys[capacity];                 // sorted
            std::uint32_t present[warps][capacity / 32];  // by warp, bit r: the key of rank r holds a slot
        };
        alignas(16) index order[padded];     // a rank -> its key in V
        index rank[capacity];                // a key of V -> its rank; then the key whose slot it takes
        std::int32_t checkpoint[warps + 1];  // the cutoff at the begin of a warp's share
        int total[2][warps];                 // in turns, so that one barrier a scan is enough
        eviction_rank worst[warps];
    };

    const top_k_update_params& params;
    const top_k_head& head;
    shared& memory;
    const HeadParams head_params;
    const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), warp = warp_id();
    // The head's parts of the workspace. Slots are numbered as in the cache.
    float* slot_score;
    position_t* slot_position;
    std::int32_t* holder;
    unsigned char* slot_protected;  // null: no key stays for its position
    expiry_t* past_expiry;
    expiry_t* chunk_expiry;
    const float* scores;         // [tokens]: of the key that leaves when token j comes
    const unsigned char* kinds;  // [tokens]
    std::int32_t* old_slot;      // [capacity]: of V's old keys
    std::int32_t* token;         // [capacity]: of V's candidates, the token at which it leaves
    std::int32_t* free_slot;     // [capacity]: of V's candidates, the slot of those that find a free one
    // The head between rounds.
    std::int32_t used, outside;  // slots in use, and those of them whose keys do not compete
    int turn = 0;                // of memory.total
    // A round.
    position_t base;            // of its priorities
    int free, old, candidates;  // free slots; keys of V
    int places;                 // K
    bool full;                  // no slot was free at its begin
    eviction_rank minimum;      // the key that is evicted first, where `full`

    __device__ __forceinline__ agent_top_k_update(const top_k_update_params& call, const top_k_head& of,
                                                  std::int64_t pair, shared& block_memory)
        : params(call),
          head(of),
          memory(block_memory),
          head_params(of.head_params),
          slot_score(call.slot_score + pair * call.top_k_slots - of.first_slot),
          slot_position(call.slot_position + pair * call.top_k_slots - of.first_slot),
          holder(call.holder + pair * call.top_k_slots - of.first_slot),
          slot_protected(call.slot_protected == nullptr
                             ? nullptr
                             : call.slot_protected + pair * call.top_k_slots - of.first_slot),
          past_expiry(call.past_expiry + pair * call.max_entries),
          chunk_expiry(call.chunk_expiry + pair * call.most),
          scores(call.leaving_score + pair * call.most),
          kinds(call.leaving_kind + pair * call.most),
          old_slot(call.members + pair * 3 * capacity),
          token(old_slot + capacity),
          free_slot(token + capacity),
          used(of.num_long_range),
          outside(of.num_protected) {}

    __device__ __forceinline__ void run() {
        for (std::int32_t next = head.first_leaving; next < head.tokens;) {
            begin_round(next);                 // 1
            const int staying = gather(next);  // 2
            if (candidates > free) {
                choose_old();        // 3
                rank_all();          // 4
                find_checkpoints();  // 5
                evict();             // 6
                write_evictions();   // 7
                find_slots();        // 8
                write_admitted();    // 9
            } else {
                write_into_free_slots();
            }
            __syncthreads();
            used += min(candidates, free) + staying;
            outside += staying;
        }
    }

  private:
    /// The position of the key that leaves at token j.
    __device__ __forceinline__ position_t leaving(std::int32_t j) const {
        return head.base + j - head_params.window;
    }
    /// Where the expiry of the key is that leaves at token j.
    __device__ __forceinline__ std::int32_t name_of(std::int32_t j) const {
        const position_t u = leaving(j);
        return u < head.base ? HeadRows{head_params.sinks, head_params.window}.recent(u)
                             : head.capacity + static_cast<std::int32_t>(u - head.base);
    }
    __device__ __forceinline__ void expire(std::int32_t name, expiry_t at) const {
        (name < head.capacity ? past_expiry[name] : chunk_expiry[name - head.capacity]) = at;
    }

    __device__ __forceinline__ std::uint64_t code(float score, position_t t) const {
        return head_params.log_gamma == 0.0f
                   ? static_cast<std::uint64_t>(descending_key(score)) << 32
                   : descending_code(static_priority(score, head_params.log_gamma, t, base));
    }
    /// A key of V.
    __device__ __forceinline__ eviction_rank key_of(int v) const {
        if (v < old) {
            const position_t t = slot_position[old_slot[v]];
            return {code(slot_score[old_slot[v]], t), t};
        }
        const std::int32_t j = token[v - old];
        return {code(scores[j], leaving(j)), leaving(j)};
    }
    __device__ __forceinline__ eviction_rank key_of_slot(std::int32_t p) const {
        return {code(slot_score[p], slot_position[p]), slot_position[p]};
    }
    __device__ __forceinline__ bool competes(std::int32_t p) const {
        return slot_protected == nullptr || slot_protected[p] == 0;
    }

    /// The sum of `mine` over the threads before, and over all. One barrier.
    __device__ __forceinline__ block_sum scan(int mine) {
        const int through = warp_inclusive_sum(mine);
        if (lane == 31) {
            memory.total[turn][warp] = through;
        }
        __syncthreads();
        const block_sum sums = sum_of_warps<warps>(memory.total[turn]);
        turn ^= 1;
        return {sums.before + through - mine, sums.total};
    }

    /// Base of priorities, free slots, and where none is free the minimum of all slots.
    __device__ __forceinline__ void begin_round(std::int32_t next) {
        base = priority_base(head.base + next, params.rebase_limit);
        const std::int32_t competing = used - outside;
        free = head_params.budget == unlimited ? unlimited : head_params.budget - competing;
        full = free == 0 && head_params.budget != 0;
        if (!full) {
            return;
        }
        eviction_rank mine;
        for (std::int32_t p = thread; p < used; p += Threads) {
            const eviction_rank one = key_of_slot(p);
            if (competes(p) && one.before(mine)) {
                mine = one;
            }
        }
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
        minimum = memory.worst[0];
        for (int w = 1; w < warps; ++w) {
            minimum = memory.worst[w].before(minimum) ? memory.worst[w] : minimum;
        }
    }

    /// The round's candidates, from `next` on, which moves behind them. A round ends where its priorities get
    /// another base, and before it has more keys than the block can rank. Keys that stay for their position
    /// get their slots at once; returns how many.
    __device__ __forceinline__ int gather(std::int32_t& next) {
        constexpr int each = Items < 8 ? 1 : Items / 4;  // neighbors that a thread takes in a turn
        const std::int32_t competing = used - outside;
        const int most = competing <= capacity / 2 ? capacity - competing : capacity / 2;
        static_assert(Items == 1 || each * Threads <= capacity / 2);  // a turn fits into a round
        position_t end = head.tokens;
        if (head_params.log_gamma != 0.0f) {
            end = min(end, base + params.rebase_limit - head.base);
        }
        int staying = 0;
        candidates = 0;
        for (; next < end; next += each * Threads) {
            const std::int32_t first = next + each * thread;
            unsigned comes = 0, stays = 0;  // bit i: of token first + i
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const std::int32_t j = first + i;
                const unsigned char kind = j < end ? kinds[j] : leaving_kind_evicted;
                const bool competes =
                    kind == leaving_kind_competes && (!full || code(scores[j], leaving(j)) < minimum.code);
                comes |= competes ? 1u << i : 0u;
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

    /// The key that leaves at token j holds slot p from now on.
    __device__ __forceinline__ void put(std::int32_t p, std::int32_t j) const {
        const std::int32_t name = name_of(j);
        expire(name, never);
        holder[p] = name;
        slot_score[p] = scores[j];
        slot_position[p] = leaving(j);
        if (slot_protected != nullptr) {
            slot_protected[p] = 0;
        }
    }

    __device__ __forceinline__ void write_into_free_slots() const {
        for (int x = thread; x < candidates; x += Threads) {
            put(free_slot[x], token[x]);
        }
    }

    /// Keys that are sorted for so many.
    __device__ static constexpr int sorted_size(int count) {
        int size = counted;
        while (size < count) {
            size = size < Threads ? Threads : 4 * size;
        }
        return size;
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
        int chosen = 0;
        for (std::int32_t first = 0; first < used; first += Threads) {
            const std::int32_t p = first + thread;
            bool is = p < used && competes(p);
            if (is && old != competing) {
                is = !last.before(key_of_slot(p));
            }
            const block_sum sums = scan(is ? 1 : 0);
            if (is) {
                old_slot[chosen + sums.before] = p;
            }
            chosen += sums.total;
        }
        __syncthreads();
    }

    /// A bound so that `wanted` of the keys in slots are evicted no later than it; found digit by digit, first
    /// of the code, then of the position, until all keys with the digits so far are wanted.
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

    /// memory.order and memory.rank.
    __device__ __forceinline__ void rank_all() {
        const int keys = old + candidates;
        for (int r = thread; r < padded; r += Threads) {
            memory.order[r] = none;
        }
        if (keys <= counted) {
            compare_all_pairs(keys);
        } else if constexpr (sorts) {
            __syncthreads();
            sort_any<1>(keys);
        }
        for (int r = thread; r < keys; r += Threads) {
            memory.rank[memory.order[r]] = static_cast<index>(r);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void compare_all_pairs(int keys) {
        pairs_memory& pairs = memory.pairs;
        for (int v = thread; v < keys; v += Threads) {
            const eviction_rank key = key_of(v);
            pairs.code[v] = key.code;
            pairs.position[v] = key.position;
        }
        __syncthreads();
        for (int v = thread; v < keys; v += Threads) {
            const eviction_rank mine{pairs.code[v], pairs.position[v]};
            int better = 0;
            for (int other = 0; other < keys; ++other) {
                better += mine.before({pairs.code[other], pairs.position[other]}) ? 1 : 0;
            }
            memory.order[better] = static_cast<index>(v);
        }
        __syncthreads();
    }

    /// The smallest sort that is large enough.
    template <int Each>
    __device__ __forceinline__ void sort_any(int keys) {
        if constexpr (Each < Items) {
            if (keys > Threads * Each) {
                sort_any<4 * Each>(keys);
                return;
            }
        }
        sort<Each>(keys);
    }

    /// Pass 0 sorts by 32 bits of the priority. Where that leaves long runs of equal ones out of order, the
    /// other passes sort by the position, lower half first, and then by the 64-bit code, lower half first.
    template <int Each>
    __device__ __forceinline__ void sort(int keys) {
        static_assert(sizeof(typename sorter<Each>::TempStorage) <= sizeof(memory.sort));
        auto& storage = reinterpret_cast<typename sorter<Each>::TempStorage&>(memory.sort);
        std::uint32_t key[Each];
        index member[Each];
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            member[i] = static_cast<index>(thread * Each + i);
        }
#pragma unroll 1
        for (int pass = 0; pass < 5; pass = pass_after(pass)) {
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                key[i] = idle_key;
                if (member[i] < keys) {
                    const eviction_rank its = key_of(member[i]);
                    const std::uint64_t number =
                        pass <= 2 ? static_cast<std::uint64_t>(its.position) : its.code;
                    key[i] = pass == 0 ? short_key(its.code)
                                       : static_cast<std::uint32_t>(pass % 2 == 1 ? number : number >> 32);
                }
            }
            sorter<Each>(storage).Sort(key, member);
            __syncthreads();
            if (pass != 0 && pass != 4) {
                continue;
            }
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                const int r = thread * Each + i;
                if (r < keys) {
                    memory.order[r] = member[i];
                    memory.keys[r] = key[i];
                }
            }
            __syncthreads();
            if (pass == 4 || fix_short_ties<Threads>(memory.keys, memory.order, keys, [&](index a, index b) {
                    return key_of(a).before(key_of(b));
                })) {
                break;
            }
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                member[i] = static_cast<index>(thread * Each + i);
            }
        }
        __syncthreads();
    }
    /// Candidates are in the order of their positions from the first; halves that are all 0 need no pass.
    __device__ __forceinline__ int pass_after(int pass) const {
        int next = pass + 1;
        if (next == 1 && old == 0) {
            next = 3;
        }
        if (next == 2 && head.base + head.tokens < position_t{1} << 32) {
            next = 3;
        }
        return next == 3 && head_params.log_gamma == 0.0f ? 4 : next;
    }
    /// 32 bits in the order of codes.
    __device__ __forceinline__ std::uint32_t short_key(std::uint64_t of) const {
        if (head_params.log_gamma == 0.0f) {
            return static_cast<std::uint32_t>(of >> 32);
        }
        if (of == nan_code) {
            return nan_key;
        }
        constexpr std::uint64_t sign = std::uint64_t{1} << 63;
        const std::uint64_t bits = (of & sign) != 0 ? of : ~(of | sign);
        return descending_key(__double2float_rn(__longlong_as_double(static_cast<long long>(bits))));
    }

    /// A warp's share of the candidates.
    __device__ __forceinline__ int share() const { return ((candidates + warps - 1) / warps + 31) / 32 * 32; }

    /// The cutoff at the begin of every share, a warp each; open_cutoff while slots are free.
    __device__ __forceinline__ void find_checkpoints() {
        const int begin = min(candidates, warp * share());
        std::int32_t cutoff = open_cutoff;
        if (old + begin >= places) {
            cutoff = begin == candidates
                         ? places - 1
                         : kth_before<padded>(memory.order, static_cast<index>(old + begin), places);
        }
        if (lane == 0) {
            memory.checkpoint[warp] = cutoff;
            if (warp == 0) {
                memory.checkpoint[warps] = places - 1;
            }
        }
        __syncthreads();
    }

    /// Each warp takes its share of the candidates: memory.rank of an admitted one becomes the key that it
    /// evicts, of the others the candidate itself.
    __device__ __forceinline__ void evict() {
        const int begin = min(candidates, warp * share());
        const int end = min(candidates, begin + share());
        const int keys = old + candidates;
        std::uint32_t* const present = memory.present[warp];
        const std::int32_t after = memory.checkpoint[warp + 1];
        std::int32_t cutoff = memory.checkpoint[warp];
        // Ranks below `after` keep their slots; ranks above `cutoff` had none.
        const int first_word = after == open_cutoff ? capacity / 32 : after / 32;
        const int last_word = (cutoff == open_cutoff ? keys - 1 : cutoff) / 32;
        if (begin < end) {
            for (int word = first_word; word <= last_word; ++word) {
                const int r = 32 * word + lane;
                const unsigned bits = __ballot_sync(all_lanes, memory.order[r] < old + begin);
                if (lane == 0) {
                    present[word] = bits;
                }
            }
            __syncwarp();
        }
        for (int first = begin; first < end; first += 32) {
            evict_for(first + lane, first, end, present, first_word, last_word, cutoff);
        }
        for (int v = thread; v < old; v += Threads) {
            memory.rank[v] = static_cast<index>(v);
        }
        __syncthreads();
    }

    /// 32 candidates, x of them this lane's.
    __device__ __forceinline__ void evict_for(int x, int first, int end, std::uint32_t* present,
                                              int first_word, int last_word, std::int32_t& cutoff) const {
        const std::int32_t r = x < end ? memory.rank[old + x] : never;
        if (x < end) {
            memory.rank[old + x] = static_cast<index>(old + x);
        }
        bool waits = x < end;
        if (cutoff == open_cutoff) {
            const bool finds_free = x < end && old + x < places;
            if (finds_free && r / 32 >= first_word) {
                atomicOr(present + r / 32, 1u << r % 32);
            }
            __syncwarp();
            if (old + min(first + 32, end) < places) {
                return;  // slots are free still
            }
            waits = waits && !finds_free;
            cutoff = last_present(present, last_word, 32 * last_word + 32);
        }
        waits = waits && r < cutoff;
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

    /// memory.rank: the first key of every chain of evictions, which has the slot. All threads may move
    /// links at once: whatever a link is, it leads to the same key.
    __device__ __forceinline__ void find_slots() {
        bool moved = true;
        while (__syncthreads_or(moved ? 1 : 0) != 0) {
            moved = false;
            for (int v = old + thread; v < old + candidates; v += Threads) {
                const volatile index* const links = memory.rank;
                const index link = links[v], next = links[link];
                if (next != link) {
                    memory.rank[v] = next;
                    moved = true;
                }
            }
        }
    }

    /// Candidates among the `places` best hold their slots in the end.
    __device__ __forceinline__ void write_admitted() const {
        for (int r = thread; r < places; r += Threads) {
            const int v = memory.order[r];
            if (v >= old) {
                const int root = memory.rank[v];
                put(root < old ? old_slot[root] : free_slot[root - old], token[v - old]);
            }
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
