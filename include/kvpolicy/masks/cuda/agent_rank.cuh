// Ranks of one head by one block: a radix sort in shared memory, and the cutoffs at the edges of chunks.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/masks/cuda/sorted_order.cuh>

#include <cub/block/block_radix_sort.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Ranks one segment of up to Threads * Items tokens, sorting `Bits` of the key per pass. Items must be even.
template <int Threads, int Items, int Bits, class Gate, class Keep>
struct agent_rank {
    static constexpr int capacity = Threads * Items;
    static constexpr int warps = Threads / 32;
    static constexpr int chunks = (capacity + mask_chunk - 1) / mask_chunk;
    static_assert(capacity <= 65535 && Items % 2 == 0 && mask_chunk % 32 == 0);

    using index = std::uint16_t;
    // Without memoized partial sums: they cost more in spilled registers than they save.
    using sorter = cub::BlockRadixSort<std::uint32_t, Threads, Items, index, Bits, false>;
    // A scan for a cutoff reads 256 ranks at a time.
    static constexpr int padded = (capacity + 255) / 256 * 256;
    static constexpr index none = ranking<index>::idle;

    struct shared {
        union {
            typename sorter::TempStorage sort;
            std::uint32_t staged[capacity + capacity / 32];  // keys on their way from striped to blocked
            std::uint32_t keys[capacity];                    // sorted
        };
        alignas(16) index order[padded];
        index rank[capacity];
        int count[chunks];
        HeadParams head_params;  // here and not in registers, which the sort needs
    };

    const mask_params<Gate, Keep>& params;
    const ranking<index>& out;
    shared& memory;
    const HeadParams& head_params;
    const std::int64_t plane;
    const segment_range& segment;
    const std::int32_t b, h;
    const std::int32_t n;  // tokens of the segment
    const int thread;
    index* const rank_out;
    int competitors;

    __device__ __forceinline__ agent_rank(const mask_params<Gate, Keep>& call, const ranking<index>& to,
                                          std::int64_t of_plane, const segment_range& range,
                                          shared& block_memory)
        : params(call),
          out(to),
          memory(block_memory),
          head_params(block_memory.head_params),
          plane(of_plane),
          segment(range),
          b(call.sequence_of(of_plane)),
          h(call.head_of(of_plane)),
          n(range.length()),
          thread(static_cast<int>(threadIdx.x)),
          rank_out(to.rank + of_plane * call.length + range.begin) {
        if (thread < chunks) {
            memory.count[thread] = 0;
        }
        if (thread == 0) {
            memory.head_params = call.all_params.of(h);
        }
        __syncthreads();
    }

    /// Without `wants_ranks`, which keys compete is enough where the budget evicts none.
    __device__ __forceinline__ void run(bool wants_ranks) {
        make_keys();  // 1
        count_competitors();
        if (!wants_ranks && (head_params.budget == 0 || head_params.budget >= competitors)) {  // 2
            for (int t = thread; t < n; t += Threads) {
                rank_out[t] = memory.staged[staged_at(t)] == idle_key ? none : index{0};
            }
            return;
        }
        sort();               // 3
        write_ranks();        // 4
        write_checkpoints();  // 5
    }

  private:
    static constexpr std::int32_t open_cutoff = never;

    /// Item i of a thread is staged where neither order of access meets bank conflicts.
    __device__ static int staged_at(int t) { return t + t / 32; }

    __device__ __forceinline__ float score_of(int t) const {
        return params.scores.head(b, h)[segment.begin + t];
    }

    /// Which keys compete, and by which sort key. One warp reads 32 neighbors.
    __device__ __forceinline__ void make_keys() const {
        bool nan = false;
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const int t = i * Threads + thread;
            std::uint32_t key = idle_key;
            if (params.leaves(head_params, t, n)) {
                const float score = score_of(t);
                nan = nan || score != score;
                if (params.gate.open(score, head_params)) {
                    key = priority_key(head_params, score, t);
                }
            }
            memory.staged[staged_at(t)] = key;
            const unsigned competing = __ballot_sync(all_lanes, key != idle_key);
            if (lane_id() == 0 && competing != 0u) {
                atomicAdd(&memory.count[t / mask_chunk], __popc(competing));
            }
        }
        if (nan) {
            params.report(b, status_nan_score);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void count_competitors() {
        competitors = 0;
        for (int c = 0; c < chunks; ++c) {
            competitors += memory.count[c];
        }
        if (thread == 0) {
            out.competitors[plane * params.segments + segment.index] = competitors;
        }
    }

    /// memory.order: the tokens that compete, best first. Pass 0 sorts by the 32-bit key. Where that leaves
    /// long runs of equal keys whose 64-bit codes differ, passes 1 and 2 sort by the code, its lower half
    /// first.
    __device__ __forceinline__ void sort() const {
        const auto code_of = [&](int t) {
            if (!params.leaves(head_params, t, n)) {
                return idle_code;
            }
            const float score = score_of(t);
            return params.gate.open(score, head_params) ? priority_code(head_params, score, t) : idle_code;
        };
        std::uint32_t keys[Items];
        index tokens[Items];
#pragma unroll 1
        for (int pass = 0; pass < 3; ++pass) {
#pragma unroll
            for (int i = 0; i < Items; ++i) {
                const int chunk_index = thread * Items + i;
                if (pass == 0) {
                    keys[i] = memory.staged[staged_at(chunk_index)];
                    tokens[i] = static_cast<index>(chunk_index);
                } else if (pass == 1) {
                    keys[i] = static_cast<std::uint32_t>(code_of(chunk_index));
                    tokens[i] = static_cast<index>(chunk_index);
                } else {
                    keys[i] = static_cast<std::uint32_t>(code_of(tokens[i]) >> 32);
                }
            }
            __syncthreads();
            sorter(memory.sort).Sort(keys, tokens);
            if (pass == 1) {
                continue;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < Items; ++i) {
                const int r = thread * Items + i;
                memory.order[r] = r < competitors ? tokens[i] : none;
                memory.keys[r] = keys[i];
            }
            __syncthreads();
            if (pass == 2 || head_params.log_gamma == 0.0f ||
                fix_short_ties<Threads>(memory.keys, memory.order, competitors,
                                        [&](index a, index b) { return code_of(a) > code_of(b); })) {
                break;
            }
        }
    }

    __device__ __forceinline__ void write_ranks() const {
        for (int r = thread; r < capacity; r += Threads) {
            memory.rank[r] = none;
        }
        __syncthreads();
        for (int r = thread; r < competitors; r += Threads) {
            memory.rank[memory.order[r]] = static_cast<index>(r);
        }
        __syncthreads();
        index* const order_out = out.order + plane * params.length + segment.begin;
        for (int t = thread; t < n; t += Threads) {
            rank_out[t] = memory.rank[t];
            if (t < competitors) {
                order_out[t] = memory.order[t];
            }
        }
    }

    /// The cutoff at the begin of every chunk, one warp each.
    __device__ __forceinline__ void write_checkpoints() const {
        cutoff_checkpoint* const checkpoints =
            out.checkpoints + plane * params.chunks + params.first_chunk(segment.index);
        for (int c = warp_id(); c * mask_chunk < n; c += warps) {
            int count = 0;
            for (int i = 0; i < c; ++i) {
                count += memory.count[i];
            }
            const std::int32_t cutoff =
                head_params.budget > 0 && count >= head_params.budget
                    ? kth_before<padded>(memory.order, static_cast<index>(c * mask_chunk), head_params.budget)
                    : open_cutoff;
            if (lane_id() == 0) {
                checkpoints[c] = {cutoff, count};
            }
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
