// From ranks to expiries, one chunk of keys by one block, without a serial scan.
//
// A chunk is mask_chunk keys that leave the window one after another, between two moments whose cutoffs are
// known: c0 before it, c1 <= c0 after it (a cutoff only improves). A key of the chunk with a rank up to c1 is
// among the k best at the end, so it was admitted when it came. A key with a rank beyond c0 was evicted at
// once. For a key in (c1, c0] it takes a count of the better keys that came before. The evicted keys of the
// chunk are known as well: those with ranks in (c1, c0] that held a top-k slot, old keys and keys admitted in
// the chunk. Every admitted key evicts the worst key of its moment, and the worst only improves, so the first
// admitted key evicts the worst of them, the second the next. Two prefix sums pair them, one over time and
// one over ranks. The cost depends on the scores only by the length of the rank window (c1, c0], and the
// windows of all chunks together are no longer than the number of keys.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/policies/cutoff.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Where a mask, or the paper's pair of ranks and cutoffs, goes. Empty planes are not written.
struct mask_output {
    plane_view<expiry_t> expiry;
    plane_view<std::int32_t> rank;
    plane_view<std::int32_t> cutoff;
};

/// One chunk by one block of mask_chunk threads, a key of the chunk per thread.
template <class Index, class Params>
struct agent_expire {
    static constexpr int chunk = mask_chunk;
    static constexpr int warps = chunk / 32;
    static constexpr int listed =
        2 * chunk;  // at most `chunk` evicted keys are old, and as many are the chunk's

    struct shared {
        Index list[listed];  // tokens with ranks in (c1, c0] that came before the chunk's end, best first
        std::uint16_t list_index[chunk];       // a token of the chunk -> its index in the list
        std::uint16_t admitted_offset[chunk];  // the j-th admitted key, as an offset into the chunk
        std::int32_t evicted[listed];          // the ranks of evicted keys, worst first (for cutoffs)
        std::uint32_t admitted[warps];
        int total_a[warps];
        int total_b[warps];
        int total_c[warps];
    };

    const Params& params;
    const ranking<Index>& ranks;
    const mask_output& out;
    shared& memory;
    const std::int32_t b, h;
    const segment_range& segment;
    const std::int32_t first;  // the chunk's first token in its segment
    const std::int32_t n;      // tokens of the segment
    const HeadParams head_params;
    const int thread, lane, warp;
    const std::int64_t row;  // the segment's begin in [planes, length]
    const Index* const order;
    const std::int32_t t;  // the thread's token
    const bool inside;
    // From read_rank.
    bool competes;
    std::int32_t rank;
    // From classify.
    cutoff_checkpoint before, after;  // at the chunk's begin and end
    std::int32_t free_entries, worst;
    bool certain, uncertain;
    // From list_window.
    block_sum lists;
    int old_count, certain_before;
    // From admit.
    bool admitted;
    int wins_before, came_before;

    __device__ __forceinline__ agent_expire(const Params& call, const ranking<Index>& ranked,
                                            const mask_output& to, std::int64_t plane,
                                            const segment_range& range, std::int32_t first_token,
                                            shared& block_memory)
        : params(call),
          ranks(ranked),
          out(to),
          memory(block_memory),
          b(call.sequence_of(plane)),
          h(call.head_of(plane)),
          segment(range),
          first(first_token),
          n(range.length()),
          head_params(call.head_params_of(plane)),
          thread(static_cast<int>(threadIdx.x)),
          lane(lane_id()),
          warp(warp_id()),
          row(plane * call.length + range.begin),
          order(ranked.order + row),
          t(first_token + thread),
          inside(t < n) {}

    __device__ __forceinline__ void run(std::int64_t plane) {
        read_rank();  // 1
        const std::int32_t competitors = ranks.competitors[plane * params.segments + segment.index];
        if (decide_alone(competitors)) {  // 2
            return;
        }
        read_checkpoints(plane, competitors);  // 3
        if (after.count <= head_params.budget) {
            write_cutoffs_of_open_slots();
            return;
        }
        classify(competitors);  // 4
        list_window();          // 5
        admit();                // 6
        pair_evictions();       // 7
    }

  private:
    __device__ __forceinline__ void expire(std::int32_t token, expiry_t value) const {
        if (out.expiry) {
            params.expire(out.expiry, b, h, segment, token, value);
        }
    }
    __device__ __forceinline__ void cut(std::int32_t value) const {
        if (inside && t + std::int64_t{head_params.window} < n) {
            out.cutoff.head(b, h)[segment.begin + t + head_params.window] = value;
        }
    }

    /// Rank of the thread's key, and what is known without others: keys that do not compete, and the cutoffs
    /// of the first window.
    __device__ __forceinline__ void read_rank() {
        const Index stored = inside ? ranks.rank[row + t] : ranking<Index>::idle;
        competes = stored != ranking<Index>::idle;
        rank = static_cast<std::int32_t>(stored);  // where it competes
        if (out.rank && inside) {
            out.rank.head(b, h)[segment.begin + t] = competes ? rank : no_rank;
        }
        if (out.cutoff && inside && t < head_params.window) {
            out.cutoff.head(b, h)[segment.begin + t] = head_params.budget == 0 ? -1 : open_cutoff;
        }
        if (inside && !competes && out.expiry) {
            params.expire_alone(out.expiry, b, h, segment, head_params, t);
        }
    }

    /// Budgets of 0 and budgets that hold every key. Whether the chunk is finished.
    __device__ __forceinline__ bool decide_alone(std::int32_t competitors) const {
        if (head_params.budget == 0) {
            if (competes) {
                expire(t, window_expiry(t, head_params.window));
            }
            if (out.cutoff) {
                cut(-1);
            }
            return true;
        }
        if (competes && (head_params.budget >= competitors || rank < head_params.budget)) {
            expire(t, never);
        }
        return head_params.budget >= competitors && !out.cutoff;
    }

    __device__ __forceinline__ void read_checkpoints(std::int64_t plane, std::int32_t competitors) {
        const cutoff_checkpoint* const checkpoints =
            ranks.checkpoints + plane * params.chunks + params.first_chunk(segment.index);
        const int c = first / chunk;
        before = checkpoints[c];
        after =
            first + chunk < n
                ? checkpoints[c + 1]
                : cutoff_checkpoint{competitors >= head_params.budget ? head_params.budget - 1 : open_cutoff,
                                    competitors};
    }

    /// Cutoffs of a chunk in which every key found an open slot.
    __device__ __forceinline__ void write_cutoffs_of_open_slots() const {
        if (out.cutoff) {
            const unsigned comes = __ballot_sync(all_lanes, competes);
            if (lane == 0) {
                memory.total_a[warp] = __popc(comes);
            }
            __syncthreads();
            const int count = before.count + sum_of_warps<warps>(memory.total_a).before +
                              __popc(comes & lanes_before(lane)) + (competes ? 1 : 0);
            cut(count < head_params.budget ? open_cutoff : after.cutoff);
        }
    }

    /// By rank: certainly admitted, evicted on arrival, or uncertain.
    __device__ __forceinline__ void classify(std::int32_t competitors) {
        free_entries = before.count < head_params.budget ? head_params.budget - before.count : 0;
        worst = free_entries > 0 ? competitors - 1 : before.cutoff;
        certain = competes && rank <= after.cutoff;
        const bool refused = competes && rank > worst;
        uncertain = competes && !certain && !refused;
        if (refused) {
            expire(t, t + head_params.window);
        }
    }

    /// Keys among ranks [from, to) that came before token `behind` (in_list) and before the chunk (old), by
    /// one warp.
    __device__ __forceinline__ void count_window(std::int32_t from, std::int32_t to, std::int32_t behind,
                                                 int& in_list, int& old) const {
        constexpr int ahead = 8;  // loads in flight, for the few chunks whose window is long
        std::int32_t x = from;
        for (; x + ahead * 32 <= to; x += ahead * 32) {
            std::int32_t token[ahead];
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                token[i] = static_cast<std::int32_t>(order[x + i * 32 + lane]);
            }
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                in_list += token[i] < behind ? 1 : 0;
                old += token[i] < first ? 1 : 0;
            }
        }
        for (; x + lane < to; x += 32) {
            const auto token = static_cast<std::int32_t>(order[x + lane]);
            in_list += token < behind ? 1 : 0;
            old += token < first ? 1 : 0;
        }
        in_list = __reduce_add_sync(all_lanes, in_list);
        old = __reduce_add_sync(all_lanes, old);
    }

    /// The list: every warp takes an equal part of the rank window, counts, and writes behind the warps
    /// before it.
    __device__ __forceinline__ void list_window() {
        const std::int32_t window_first = after.cutoff + 1;
        const std::int32_t window_length = worst + 1 - window_first;
        const std::int32_t share = ((window_length + warps - 1) / warps + 31) / 32 * 32;
        const std::int32_t from =
            window_first + (warp * share < window_length ? warp * share : window_length);
        const std::int32_t to = from + share < worst + 1 ? from + share : worst + 1;
        const std::int32_t behind = first + chunk;
        int in_list = 0;
        int old = 0;
        count_window(from, to, behind, in_list, old);
        const unsigned certain_lanes = __ballot_sync(all_lanes, certain);
        // Three sums in one: 11 bits for the list, 10 each for the others, which count up to `chunk`.
        static_assert(listed < 1 << 11 && chunk < 1 << 10);
        if (lane == 0) {
            memory.total_a[warp] = in_list | old << 11 | __popc(certain_lanes) << 21;
        }
        __syncthreads();
        const block_sum packed_sums = sum_of_warps<warps>(memory.total_a);
        lists = {packed_sums.before & 0x7ff, packed_sums.total & 0x7ff};
        old_count = packed_sums.total >> 11 & 0x3ff;
        certain_before = (packed_sums.before >> 21) + __popc(certain_lanes & lanes_before(lane));
        if (in_list > 0) {
            int next = lists.before;
            for (std::int32_t x = from; x < to; x += 32) {
                const std::int32_t token = x + lane < to ? static_cast<std::int32_t>(order[x + lane]) : never;
                const unsigned hits = __ballot_sync(all_lanes, token < behind);
                if (token < behind) {
                    const int at = next + __popc(hits & lanes_before(lane));
                    memory.list[at] = static_cast<Index>(token);
                    if (token >= first) {
                        memory.list_index[token - first] = static_cast<std::uint16_t>(at);
                    }
                }
                next += __popc(hits);
            }
        }
        __syncthreads();
    }

    /// Keys of the list that came before the thread's and are better than it.
    __device__ __forceinline__ int better_before(unsigned uncertain_lanes) const {
        const int mine = uncertain ? memory.list_index[thread] : 0;
        const std::int32_t warp_first = first + warp * 32;
        int better = 0;
        for (int base = 0; base < lists.total; base += 32) {
            const bool came =
                base + lane < lists.total && static_cast<std::int32_t>(memory.list[base + lane]) < warp_first;
            const unsigned word = __ballot_sync(all_lanes, came);
            const int below = mine - base;
            better += below >= 32 ? __popc(word) : below > 0 ? __popc(word & lanes_before(below)) : 0;
        }
        for (unsigned rest = uncertain_lanes; rest != 0u; rest &= rest - 1u) {
            const int other = __ffs(static_cast<int>(rest)) - 1;
            const int list_index = __shfl_sync(all_lanes, mine, other);
            better += other < lane && list_index < mine ? 1 : 0;
        }
        return better;
    }

    /// An uncertain key is admitted iff fewer than k better ones came before it: those of the window, the
    /// certain ones, and the k - free_entries - old_count that were better than the whole window all along.
    __device__ __forceinline__ void admit() {
        admitted = certain;
        const unsigned uncertain_lanes = __ballot_sync(all_lanes, uncertain);
        if (uncertain_lanes != 0u) {
            const int better = better_before(uncertain_lanes);
            if (uncertain) {
                admitted = better + certain_before < old_count + free_entries;
                if (!admitted) {
                    expire(t, t + head_params.window);
                }
            }
        }
        const unsigned admitted_lanes = __ballot_sync(all_lanes, admitted);
        const unsigned coming_lanes = __ballot_sync(all_lanes, competes);
        if (lane == 0) {
            memory.admitted[warp] = admitted_lanes;
            memory.total_b[warp] = __popc(admitted_lanes) | __popc(coming_lanes) << 16;
        }
        __syncthreads();

        const int won_and_came = sum_of_warps<warps>(memory.total_b).before;
        wins_before = (won_and_came & 0xffff) + __popc(admitted_lanes & lanes_before(lane));
        came_before = (won_and_came >> 16) + __popc(coming_lanes & lanes_before(lane));
        if (admitted) {
            memory.admitted_offset[wins_before] = static_cast<std::uint16_t>(thread);
        }
    }

    /// The evicted keys of the list, worst first, each with the admitted key that evicts it. Then the
    /// cutoffs.
    __device__ __forceinline__ void pair_evictions() const {
        // Warp w looks at entries 64 w .. 64 w + 63 of the list.
        unsigned leaving[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = warp * 64 + i * 32 + lane;
            bool leaves = false;
            if (at < lists.total) {
                const std::int32_t offset = static_cast<std::int32_t>(memory.list[at]) - first;
                leaves = offset < 0 || (memory.admitted[offset / 32] >> (offset % 32) & 1u) != 0u;
            }
            leaving[i] = __ballot_sync(all_lanes, leaves);
        }
        if (lane == 0) {
            memory.total_c[warp] = __popc(leaving[0]) + __popc(leaving[1]);
        }
        __syncthreads();

        const block_sum evictions = sum_of_warps<warps>(memory.total_c);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if ((leaving[i] >> lane & 1u) == 0u) {
                continue;
            }
            const int better = evictions.before + (i == 1 ? __popc(leaving[0]) : 0) +
                               __popc(leaving[i] & lanes_before(lane));
            const int nth = evictions.total - 1 - better;  // 0: the worst, the first to leave
            const auto token = static_cast<std::int32_t>(memory.list[warp * 64 + i * 32 + lane]);
            expire(token, first + memory.admitted_offset[nth + free_entries] + head_params.window);
            if (out.cutoff) {
                memory.evicted[nth] = static_cast<std::int32_t>(ranks.rank[row + token]);
            }
        }
        if (out.cutoff) {
            __syncthreads();
            // The cutoff after key t is the worst rank that still has a chunk: the next one to leave.
            const int gone = wins_before + (admitted ? 1 : 0) - free_entries;
            const int count = before.count + came_before + (competes ? 1 : 0);
            cut(count < head_params.budget ? open_cutoff
                : gone < evictions.total   ? memory.evicted[gone > 0 ? gone : 0]
                                           : after.cutoff);
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
