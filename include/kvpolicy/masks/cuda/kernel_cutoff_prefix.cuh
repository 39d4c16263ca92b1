// From the sorted order of long sequences to ranks, and to the cutoffs at the edges of chunks.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/sorted_keys.cuh>
#include <kvpolicy/policies/cutoff.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Counts of keys by bucket of ranks and chunk of arrival. A bucket is `bucket` neighbors of a plane's
/// sorted part.
struct cutoff_prefix_counts {
    std::int32_t* before =
        nullptr;  // [planes, buckets, chunks]: keys of the bucket that arrive in chunks before this one
    std::int32_t bucket = 0;
    std::int32_t buckets = 0;

    __device__ const std::int32_t* row(std::int64_t plane, std::int32_t index, std::int32_t chunks) const {
        return before + (plane * buckets + index) * chunks;
    }
};

/// Chunks that one round of counting holds in shared memory.
inline constexpr int counted_chunks = 8192;

/// One bucket of a plane by one block of device_threads: ranks, orders, competitors and counts. `count` and
/// `total` are the block's shared memory.
template <class Params>
struct invert_block {
    static constexpr int warps = device_threads / 32;

    const Params& params;
    const sorted_keys& sorted;
    const ranking<std::int32_t>& out;
    int* const total;  // [warps]
    int* const count;  // [min(chunks, counted_chunks)]
    const std::int64_t plane;
    const std::int64_t row;
    const std::int32_t from, to;  // the bucket's part of the plane's sorted keys
    std::int32_t* const counted;  // [chunks]
    const int thread = static_cast<int>(threadIdx.x);

    __device__ __forceinline__ invert_block(const Params& call, const sorted_keys& order,
                                            const ranking<std::int32_t>& ranks,
                                            const cutoff_prefix_counts& counts, std::int64_t of_plane,
                                            std::int32_t index, int* memory)
        : params(call),
          sorted(order),
          out(ranks),
          total(memory),
          count(memory + 32),
          plane(of_plane),
          row(of_plane * call.length),
          from(index * counts.bucket),
          to(from + counts.bucket < call.length ? from + counts.bucket : call.length),
          counted(counts.before + (of_plane * counts.buckets + index) * call.chunks) {}

    __device__ __forceinline__ void run() {
        int so_far = 0;  // keys of the rounds before
        for (std::int32_t round = 0; round < params.chunks; round += counted_chunks) {
            const std::int32_t chunks =
                params.chunks - round < counted_chunks ? params.chunks - round : counted_chunks;
            for (int i = thread; i < chunks; i += device_threads) {
                count[i] = 0;
            }
            __syncthreads();
            visit_keys(round, chunks);  // 1
            __syncthreads();
            so_far = scan_slots(chunks, so_far);  // 2
            __syncthreads();
            for (int i = thread; i < chunks; i += device_threads) {
                counted[round + i] = count[i];
            }
            __syncthreads();
        }
    }

  private:
    /// All loads of a step before its first store, which the compiler could not know to be elsewhere.
    __device__ __forceinline__ void visit_keys(std::int32_t round, std::int32_t chunks) const {
        constexpr int ahead = 4;
        for (std::int32_t x = from + thread; x < to; x += ahead * device_threads) {
            std::uint64_t key[ahead];
            std::uint64_t next_key[ahead];
            std::int32_t token[ahead];
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const std::int32_t at = x + i * device_threads;
                if (at < to) {
                    key[i] = sorted.keys[row + at];
                    next_key[i] = at + 1 < params.length ? sorted.keys[row + at + 1] : sorted.idle();
                    token[i] = sorted.tokens[row + at];
                }
            }
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const std::int32_t at = x + i * device_threads;
                if (at < to) {
                    visit(at, key[i], next_key[i], token[i], round, chunks);
                }
            }
        }
    }

    /// The key at x of the plane's sorted part: its rank, in round 0, and one more key in the count of its
    /// chunk.
    __device__ __forceinline__ void visit(std::int32_t x, std::uint64_t key, std::uint64_t next_key,
                                          std::int32_t token, std::int32_t round, std::int32_t chunks) const {
        const auto segment = params.segments == 1
                                 ? 0
                                 : static_cast<std::int32_t>(sorted.task_of(key) - plane * params.segments);
        const std::int32_t begin = params.edges == nullptr ? 0 : params.edge(segment);
        const bool competes = sorted.prefix_of(key) != sorted.idle();
        if (round == 0) {
            out.rank[row + token] = competes ? x - begin : no_rank;
            if (out.order != sorted.tokens) {
                out.order[row + x] = token - begin;
            }
            const std::int32_t end = params.edges == nullptr ? params.length : params.edge(segment + 1);
            // The border between those that compete and the others says how many do.
            const bool next_idle = x + 1 >= end || sorted.prefix_of(next_key) == sorted.idle();
            if (competes && next_idle) {
                out.competitors[plane * params.segments + segment] = x + 1 - begin;
            }
            if (!competes && x == begin) {
                out.competitors[plane * params.segments + segment] = 0;
            }
        }
        if (competes) {
            const std::int32_t chunk_index =
                params.first_chunk(segment) + (token - begin) / mask_chunk - round;
            if (chunk_index >= 0 && chunk_index < chunks) {
                atomicAdd(&count[chunk_index], 1);
            }
        }
    }

    /// count = exclusive sums over the chunks, `so_far` before the first; a thread takes neighbors. Returns
    /// the sum with the last.
    __device__ __forceinline__ int scan_slots(std::int32_t chunks, int so_far) const {
        const std::int32_t each = (chunks + device_threads - 1) / device_threads;
        const std::int32_t first = thread * each < chunks ? thread * each : chunks;
        const std::int32_t last = first + each < chunks ? first + each : chunks;
        int mine = 0;
        for (std::int32_t i = first; i < last; ++i) {
            mine += count[i];
        }
        const int through = warp_inclusive_sum(mine);
        if (lane_id() == 31) {
            total[warp_id()] = through;
        }
        __syncthreads();
        const block_sum sums = sum_of_warps<warps>(total);
        int before = so_far + sums.before + through - mine;
        for (std::int32_t i = first; i < last; ++i) {
            const int here = count[i];
            count[i] = before;
            before += here;
        }
        return so_far + sums.total;
    }
};

/// From the sorted order: the rank of every token, the order per segment, how many keys compete, and counts
/// by bucket of ranks and chunk of tokens. Without packed segments out.order is sorted.tokens itself.
///
/// Grid: planes * buckets. Block: device_threads. Shared memory: 32 + min(chunks, counted_chunks) int32
/// (dynamic). Reads sorted.keys and tokens [planes, S]. Overwrites out.rank, out.order [planes, S],
/// out.competitors [planes, segments] and counts.before [planes, buckets, chunks], all int32.
/// 1. Visit the keys of the bucket.
/// 2. Scan its counts over the chunks.
template <class Params>
__global__ void __launch_bounds__(device_threads)
    invert_and_count_kernel(const Params params, const sorted_keys sorted, const ranking<std::int32_t> out,
                            const cutoff_prefix_counts counts) {
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(counts.buckets);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(counts.buckets));
    invert_block<Params>(params, sorted, out, counts, plane, index, reinterpret_cast<int*>(dynamic_shared()))
        .run();
}

/// The bucket in which a plane's keys before chunk `chunk_index` reach k, and how many of the k are in it.
struct bucket_of_kth {
    std::int32_t count;    // keys of the segment before the chunk
    std::int32_t bucket;   // -1: fewer than k
    std::int32_t missing;  // of k, in the bucket
};

/// By one warp, a bucket per lane. `base` is the segment's first chunk.
__device__ __forceinline__ bucket_of_kth find_bucket(const cutoff_prefix_counts& counts, std::int64_t plane,
                                                     const segment_range& segment, std::int32_t chunks,
                                                     std::int32_t base, std::int32_t chunk_index,
                                                     std::int32_t k) {
    const int lane = lane_id();
    const std::int32_t last = (segment.end - 1) / counts.bucket;
    bucket_of_kth result{0, -1, 0};
    for (std::int32_t bucket = segment.begin / counts.bucket; bucket <= last; bucket += 32) {
        std::int32_t mine = 0;
        if (bucket + lane <= last) {
            const std::int32_t* const row = counts.row(plane, bucket + lane, chunks);
            mine = row[chunk_index] - row[base];
        }
        const int through = warp_inclusive_sum(mine);
        const unsigned reached = __ballot_sync(all_lanes, result.count + through >= k);
        if (result.bucket < 0 && reached != 0u) {
            const int lane_found = __ffs(static_cast<int>(reached)) - 1;
            result.bucket = bucket + lane_found;
            result.missing = k - result.count - __shfl_sync(all_lanes, through - mine, lane_found);
        }
        result.count += __shfl_sync(all_lanes, through, 31);
    }
    return result;
}

/// The rank in [from, to) of the `missing`-th of order[from, to) that is before token `edge`; open_cutoff
/// where there are fewer. By one warp.
__device__ __forceinline__ std::int32_t find_rank(const std::int32_t* order, std::int32_t from,
                                                  std::int32_t to, std::int32_t edge, std::int32_t missing) {
    const int lane = lane_id();
    std::int32_t rank = open_cutoff;
    constexpr int ahead = 8;  // 256 ranks a step
    for (std::int32_t x = from; x < to && missing > 0; x += 32 * ahead) {
        unsigned came[ahead];
        int group = 0;
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const std::int32_t at = x + i * 32 + lane;
            came[i] = __ballot_sync(all_lanes, at < to && order[at] < edge);
            group += __popc(came[i]);
        }
        if (group < missing) {
            missing -= group;
            continue;
        }
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const int here = __popc(came[i]);
            if (missing > 0 && here >= missing) {
                unsigned word = came[i];
                while (--missing > 0) {
                    word &= word - 1u;
                }
                rank = x + i * 32 + __ffs(static_cast<int>(word)) - 1;
            } else {
                missing -= here;
            }
        }
    }
    return rank;
}

/// cutoff_checkpoints: the cutoff at the begin of every chunk, and how many keys have left the window
/// before it.
///
/// Grid: planes * chunks / (device_threads / 32), a warp per chunk. Block: device_threads. Shared memory:
/// none. Reads counts.before, ranks.order and competitors. Overwrites ranks.checkpoints [planes, chunks].
/// 1. Find the bucket in which the keys reach k.
/// 2. Find the rank in it.
template <class Params>
__global__ void __launch_bounds__(device_threads)
    cutoff_checkpoints_kernel(const Params params, const ranking<std::int32_t> ranks,
                              const cutoff_prefix_counts counts) {
    const std::int64_t task =
        (std::int64_t{blockIdx.x} * device_threads + static_cast<std::int64_t>(threadIdx.x)) / 32;
    if (task >= params.planes() * params.chunks) {
        return;
    }
    const std::int64_t plane = task / params.chunks;
    const auto chunk_index = static_cast<std::int32_t>(task % params.chunks);
    const auto b = params.sequence_of(plane);
    const segment_range segment = params.segment(b, params.segment_of_chunk(chunk_index));
    const std::int32_t base = params.first_chunk(segment.index);
    const std::int32_t edge = (chunk_index - base) * mask_chunk;  // keys that arrive before it count
    if (edge >= segment.length()) {
        return;
    }
    const std::int32_t k = params.head_params_of(plane).budget;

    // 1. The bucket.
    const bucket_of_kth found = find_bucket(counts, plane, segment, params.chunks, base, chunk_index, k);
    std::int32_t cutoff = open_cutoff;
    // 2. The rank in it.
    if (k > 0 && found.count >= k) {
        const std::int32_t competitors = ranks.competitors[plane * params.segments + segment.index];
        const std::int32_t begin = found.bucket * counts.bucket;
        const std::int32_t from = begin > segment.begin ? begin : segment.begin;
        const std::int32_t behind = segment.begin + competitors;
        const std::int32_t to = begin + counts.bucket < behind ? begin + counts.bucket : behind;
        const std::int32_t at = find_rank(ranks.order + plane * params.length, from, to, edge, found.missing);
        cutoff = at == open_cutoff ? open_cutoff : at - segment.begin;
    }
    if (lane_id() == 0) {
        ranks.checkpoints[plane * params.chunks + chunk_index] = {cutoff, found.count};
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
