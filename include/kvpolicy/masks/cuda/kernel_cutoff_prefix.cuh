// From the sorted order of long sequences to ranks, and to the cutoffs at the edges of chunks.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/sorted_keys.cuh>
#include <kvpolicy/policies/cutoff.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Counts of keys by bucket of ranks and chunk of arrival. A bucket is `bucket` neighbors of a plane's sorted part.
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

/// From the sorted order: the rank of every token, the order without the segments' offsets (without packed segments
/// out.order is sorted.tokens itself), how many compete, and the counts. One block a bucket of a plane.
template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    invert_and_count_kernel(const mask_params<Gate, Keep> params, const sorted_keys sorted,
                            const ranking<std::int32_t> out, const cutoff_prefix_counts counts) {
    constexpr int warps = device_threads / 32;
    auto* const total = reinterpret_cast<int*>(dynamic_shared());  // [warps]
    auto* const count = total + 32;                                // [min(chunks, counted_chunks)]
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(counts.buckets);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(counts.buckets));
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t row = plane * params.length;
    const std::int32_t from = index * counts.bucket;
    const std::int32_t to = from + counts.bucket < params.length ? from + counts.bucket : params.length;
    std::int32_t* const counted = counts.before + (plane * counts.buckets + index) * params.chunks;
    int so_far = 0;  // keys of the rounds before
    for (std::int32_t round = 0; round < params.chunks; round += counted_chunks) {
        const std::int32_t chunks =
            params.chunks - round < counted_chunks ? params.chunks - round : counted_chunks;
        for (int i = thread; i < chunks; i += device_threads) {
            count[i] = 0;
        }
        __syncthreads();
        const auto count_one = [&](std::int32_t x, std::uint64_t key, std::uint64_t next_key,
                                   std::int32_t token) {
            const auto segment =
                params.segments == 1
                    ? 0
                    : static_cast<std::int32_t>(sorted.task_of(key) - plane * params.segments);
            const std::int32_t begin = params.edges == nullptr ? 0 : params.edges[segment];
            const bool competes = sorted.prefix_of(key) != sorted.idle();
            if (round == 0) {
                out.rank[row + token] = competes ? x - begin : no_rank;
                if (out.order != sorted.tokens) {
                    out.order[row + x] = token - begin;
                }
                const std::int32_t end = params.edges == nullptr ? params.length : params.edges[segment + 1];
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
        };
        // All loads of a step before its first store, which the compiler could not know to be elsewhere.
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
                    count_one(at, key[i], next_key[i], token[i]);
                }
            }
        }
        __syncthreads();
        // Exclusive sums over the chunks: a thread takes neighbors.
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
        so_far += sums.total;
        __syncthreads();
        for (int i = thread; i < chunks; i += device_threads) {
            counted[round + i] = count[i];
        }
        __syncthreads();
    }
}

/// The cutoff at the begin of every chunk, one warp each: first the bucket, then the rank in it.
template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    cutoff_checkpoints_kernel(const mask_params<Gate, Keep> params, const ranking<std::int32_t> ranks,
                              const cutoff_prefix_counts counts) {
    const std::int64_t task =
        (std::int64_t{blockIdx.x} * device_threads + static_cast<std::int64_t>(threadIdx.x)) / 32;
    if (task >= params.planes() * params.chunks) {
        return;
    }
    const std::int64_t plane = task / params.chunks;
    const auto chunk_index = static_cast<std::int32_t>(task % params.chunks);
    const auto b = params.sequence_of(plane);
    const int lane = lane_id();
    const segment_range segment = params.segment(b, params.segment_of_chunk(chunk_index));
    const std::int32_t base = params.first_chunk(segment.index);
    const std::int32_t edge = (chunk_index - base) * mask_chunk;  // keys that arrive before it count
    if (edge >= segment.length()) {
        return;
    }
    const HeadParams head_params = params.all_params.of(params.head_of(plane));
    const std::int32_t k = head_params.budget;

    const std::int32_t first = segment.begin / counts.bucket;
    const std::int32_t last = (segment.end - 1) / counts.bucket;
    std::int32_t count = 0;
    std::int32_t found = -1;
    std::int32_t missing = 0;
    for (std::int32_t bucket = first; bucket <= last; bucket += 32) {
        std::int32_t mine = 0;
        if (bucket + lane <= last) {
            const std::int32_t* const row = counts.row(plane, bucket + lane, params.chunks);
            mine = row[chunk_index] - row[base];
        }
        const int through = warp_inclusive_sum(mine);
        const unsigned reached = __ballot_sync(all_lanes, count + through >= k);
        if (found < 0 && reached != 0u) {
            const int lane_found = __ffs(static_cast<int>(reached)) - 1;
            found = bucket + lane_found;
            missing = k - count - __shfl_sync(all_lanes, through - mine, lane_found);
        }
        count += __shfl_sync(all_lanes, through, 31);
    }
    std::int32_t cutoff = open_cutoff;
    if (k > 0 && count >= k) {
        const std::int64_t row = plane * params.length;
        const std::int32_t competitors = ranks.competitors[plane * params.segments + segment.index];
        const std::int32_t from =
            found * counts.bucket > segment.begin ? found * counts.bucket : segment.begin;
        const std::int32_t behind = segment.begin + competitors;
        const std::int32_t to = (found + 1) * counts.bucket < behind ? (found + 1) * counts.bucket : behind;
        constexpr int ahead = 8;  // 256 ranks a step
        for (std::int32_t x = from; x < to && missing > 0; x += 32 * ahead) {
            unsigned came[ahead];
            int group = 0;
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const std::int32_t at = x + i * 32 + lane;
                came[i] = __ballot_sync(all_lanes, at < to && ranks.order[row + at] < edge);
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
                    cutoff = x + i * 32 + __ffs(static_cast<int>(word)) - 1 - segment.begin;
                } else {
                    missing -= here;
                }
            }
        }
    }
    if (lane == 0) {
        ranks.checkpoints[plane * params.chunks + chunk_index] = {cutoff, count};
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
