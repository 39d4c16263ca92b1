// From ranks to expiries, one chunk of keys by one block, without a serial walk.
//
// Let a chunk be the keys that leave the window one after another between two moments whose cutoffs are known: c0 before
// it, c1 <= c0 after it (a cutoff only improves). A key of the chunk with a rank up to c1 is among the k best at the end,
// so it was admitted when it came; one with a rank beyond c0 was rejected at once. For those between (c1, c0] it takes a count of
// the better keys that came before. Who is evicted in the chunk is known as well: the keys with ranks in (c1, c0] that held
// a place, old ones and admitted keys of the chunk. And since every admitted key evicts the worst key of its moment, and the worst only
// improves, the first admitted key evicts the worst of them, the second the next: two prefix sums, one over time and one over
// ranks, pair them. No order of scores is worse than another, but for the length of the rank window (c1, c0], and the
// windows of all chunks together are no longer than the number of keys.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/config.cuh>
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

template <class Index>
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

    template <class Gate, class Keep>
    __device__ static void run(const mask_params<Gate, Keep>& params, const ranking<Index>& ranks,
                               const mask_output& out, std::int64_t plane, const segment_range& segment,
                               std::int32_t first, shared& memory) {
        const auto b = params.sequence_of(plane);
        const auto h = params.head_of(plane);
        const std::int32_t n = segment.length();
        const HeadParams head_params = params.all_params.of(h);
        const bool packed = params.edges != nullptr;
        const int thread = static_cast<int>(threadIdx.x);
        const int lane = lane_id();
        const int warp = warp_id();
        const std::int64_t row = plane * params.length + segment.begin;
        const Index* const order = ranks.order + row;

        const std::int32_t t = first + thread;
        const bool inside = t < n;
        const Index stored = inside ? ranks.rank[row + t] : ranking<Index>::idle;
        const bool competes = stored != ranking<Index>::idle;
        const auto rank = static_cast<std::int32_t>(stored);  // where it competes

        const auto expire = [&](std::int32_t token, expiry_t value) {
            if (out.expiry) {
                out.expiry.head(b, h)[segment.begin + token] = in_sequence(value, segment, packed);
            }
        };
        const auto cut = [&](std::int32_t value) {
            if (inside && t + std::int64_t{head_params.window} < n) {
                out.cutoff.head(b, h)[t + head_params.window] = value;
            }
        };

        if (out.rank && inside) {
            out.rank.head(b, h)[segment.begin + t] = competes ? rank : no_rank;
        }
        if (out.cutoff && inside && t < head_params.window) {
            out.cutoff.head(b, h)[t] = head_params.budget == 0 ? -1 : open_cutoff;
        }
        if (inside && !competes) {
            expire(t, params.forever(head_params, t) ? never : window_expiry(t, head_params.window));
        }

        const std::int32_t competitors = ranks.competitors[plane * params.segments + segment.index];
        if (head_params.budget == 0) {
            if (competes) {
                expire(t, window_expiry(t, head_params.window));
            }
            if (out.cutoff) {
                cut(-1);
            }
            return;
        }
        if (competes && (head_params.budget >= competitors || rank < head_params.budget)) {
            expire(t, never);
        }
        if (head_params.budget >= competitors && !out.cutoff) {
            return;
        }

        const cutoff_checkpoint* const checkpoints =
            ranks.checkpoints + plane * params.chunks + params.first_chunk(segment.index);
        const int c = first / chunk;
        const cutoff_checkpoint before = checkpoints[c];
        const cutoff_checkpoint after =
            first + chunk < n
                ? checkpoints[c + 1]
                : cutoff_checkpoint{competitors >= head_params.budget ? head_params.budget - 1 : open_cutoff,
                                    competitors};
        if (after.count <= head_params.budget) {
            // Every key so far found a free place.
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
            return;
        }

        const std::int32_t free_entries =
            before.count < head_params.budget ? head_params.budget - before.count : 0;
        const std::int32_t worst = free_entries > 0 ? competitors - 1 : before.cutoff;
        const bool certain = competes && rank <= after.cutoff;
        const bool refused = competes && rank > worst;
        const bool uncertain = competes && !certain && !refused;
        if (refused) {
            expire(t, t + head_params.window);
        }

        // The list: every warp takes an equal part of the rank window, counts, and writes behind the warps before it.
        const std::int32_t window_first = after.cutoff + 1;
        const std::int32_t window_length = worst + 1 - window_first;
        const std::int32_t share = ((window_length + warps - 1) / warps + 31) / 32 * 32;
        const std::int32_t from =
            window_first + (warp * share < window_length ? warp * share : window_length);
        const std::int32_t to = from + share < worst + 1 ? from + share : worst + 1;
        const std::int32_t behind = first + chunk;
        int in_list = 0;
        int old = 0;
        {
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
        const unsigned certain_lanes = __ballot_sync(all_lanes, certain);
        // Three sums in one: 11 bits for the list, 10 each for the others, which count up to `chunk`.
        static_assert(listed < 1 << 11 && chunk < 1 << 10);
        if (lane == 0) {
            memory.total_a[warp] = in_list | old << 11 | __popc(certain_lanes) << 21;
        }
        __syncthreads();
        const block_sum packed_sums = sum_of_warps<warps>(memory.total_a);
        const block_sum lists{packed_sums.before & 0x7ff, packed_sums.total & 0x7ff};
        const int old_count = packed_sums.total >> 11 & 0x3ff;
        const int certain_before = (packed_sums.before >> 21) + __popc(certain_lanes & lanes_before(lane));
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

        // An uncertain key wins iff fewer than k better ones came before it: those of the window, the certain ones, and
        // the k - free_entries - old_count that were better than the whole window all along.
        bool admitted = certain;
        const unsigned uncertain_lanes = __ballot_sync(all_lanes, uncertain);
        if (uncertain_lanes != 0u) {
            const int mine = uncertain ? memory.list_index[thread] : 0;
            const std::int32_t warp_first = first + warp * 32;
            int better = 0;
            for (int base = 0; base < lists.total; base += 32) {
                const bool came = base + lane < lists.total &&
                                  static_cast<std::int32_t>(memory.list[base + lane]) < warp_first;
                const unsigned word = __ballot_sync(all_lanes, came);
                const int below = mine - base;
                better += below >= 32 ? __popc(word) : below > 0 ? __popc(word & lanes_before(below)) : 0;
            }
            for (unsigned rest = uncertain_lanes; rest != 0u; rest &= rest - 1u) {
                const int other = __ffs(static_cast<int>(rest)) - 1;
                const int list_index = __shfl_sync(all_lanes, mine, other);
                better += other < lane && list_index < mine ? 1 : 0;
            }
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
        const int wins_before = (won_and_came & 0xffff) + __popc(admitted_lanes & lanes_before(lane));
        if (admitted) {
            memory.admitted_offset[wins_before] = static_cast<std::uint16_t>(thread);
        }
        // Warp w looks at places 64 w .. 64 w + 63 of the list.
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
        const int came_before = (won_and_came >> 16) + __popc(coming_lanes & lanes_before(lane));
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
            // The cutoff after key t is the worst rank that still has a place: the next one to leave.
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
