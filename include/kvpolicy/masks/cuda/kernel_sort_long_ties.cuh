#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/agent_radix_pass.cuh>
#include <kvpolicy/masks/cuda/kernel_fix_ties.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/sorted_keys.cuh>

#include <cooperative_groups.h>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// keys[0, length) = the tokens' codes. Returns the bits in which the threads' codes differ from `reference`.
template <class Params>
__device__ inline std::uint64_t write_codes(const Params& params, const sorted_segment& segment,
                                            const std::int32_t* tokens, std::uint64_t* keys,
                                            std::int32_t length, std::uint64_t reference) {
    std::uint64_t varies = 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < length; i += device_threads) {
        const std::uint64_t code = code_of_token(params, segment, tokens[i]);
        keys[i] = code;
        varies |= code ^ reference;
    }
    return varies;
}

/// Runs of up to tie_list::tile keys, one block each.
template <class Params>
__device__ inline void sort_ties_by_block(const Params& params, const sorted_keys& sorted,
                                          const sorted_keys& spare, const tie_list& runs,
                                          radix_shared& memory) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int32_t listed = runs.counts[0];
    for (auto run = static_cast<std::int32_t>(blockIdx.x); run < listed;
         run += static_cast<std::int32_t>(gridDim.x)) {
        const std::int64_t first = runs.first[run];
        const std::int32_t length = runs.length[run];
        const std::uint64_t key = sorted.keys[first];
        const sorted_segment segment = segment_of_task(params, sorted.task_of(key));
        std::uint64_t* keys = sorted.keys + first;
        std::int32_t* tokens = sorted.tokens + first;
        std::uint64_t* other_keys = spare.keys + first;
        std::int32_t* other_tokens = spare.tokens + first;
        const std::uint64_t reference = code_of_token(params, segment, tokens[0]);
        if (thread == 0) {
            memory.varies = 0;
        }
        __syncthreads();
        std::uint64_t varies = write_codes(params, segment, tokens, keys, length, reference);
        if (varies != 0) {
            atomicOr(reinterpret_cast<unsigned long long*>(&memory.varies), varies);
        }
        __syncthreads();
        varies = memory.varies;
        for (int shift = 0; shift < 64; shift += 8) {
            if ((varies >> shift & 0xffu) == 0) {
                continue;
            }
            memory.count_digits(keys, length, shift);
            memory.sum_digits();
            memory.scatter(keys, tokens, other_keys, other_tokens, length, shift);
            std::uint64_t* const keys_now = other_keys;
            std::int32_t* const tokens_now = other_tokens;
            other_keys = keys;
            other_tokens = tokens;
            keys = keys_now;
            tokens = tokens_now;
        }
        for (std::int32_t i = thread; i < length; i += device_threads) {
            sorted.tokens[first + i] = tokens[i];
            sorted.keys[first + i] = key;
        }
        __syncthreads();
    }
}

/// Runs above tie_list::tile keys, sorted together by the whole grid, tile by tile.
template <class Params>
struct tiled_runs_sorter {
    /// A tile: its run, and its part [begin, begin + length) of the arrays.
    struct part {
        std::int32_t run;
        std::int64_t begin;
        std::int32_t length;
    };

    const Params& params;
    const tie_list& runs;
    radix_shared& memory;
    const std::int32_t tiled_runs, tiles;
    const std::int32_t blocks, block;
    const int thread;

    __device__ __forceinline__ tiled_runs_sorter(const Params& call, const tie_list& list,
                                                 radix_shared& shared)
        : params(call),
          runs(list),
          memory(shared),
          tiled_runs(list.counts[1]),
          tiles(list.counts[2]),
          blocks(static_cast<std::int32_t>(gridDim.x)),
          block(static_cast<std::int32_t>(blockIdx.x)),
          thread(static_cast<int>(threadIdx.x)) {}

    /// All blocks of the grid together.
    __device__ __forceinline__ void run(const sorted_keys& sorted, const sorted_keys& spare) const {
        const auto grid = cooperative_groups::this_grid();
        make_codes(sorted);
        grid.sync();
        const std::uint64_t varies = *runs.varies;

        sorted_keys from = sorted;
        sorted_keys to = spare;
        for (int shift = 0; shift < 64; shift += 8) {
            if ((varies >> shift & 0xffu) == 0) {
                continue;
            }
            count_digits(from, shift);
            grid.sync();
            sum_digits();
            grid.sync();
            scatter(from, to, shift);
            grid.sync();
            const sorted_keys swapped = from;
            from = to;
            to = swapped;
        }
        write_back(sorted, from);
    }

  private:
    __device__ __forceinline__ part part_of(std::int32_t tile) const {
        const std::int32_t run = runs.run_of_tile[tile];
        const std::int32_t at = (tile - runs.first_tile[run]) * tie_list::tile;
        const std::int32_t rest = runs.length[runs.tiled(run)] - at;
        return part{run, std::int64_t{runs.first[runs.tiled(run)]} + at,
                    rest < tie_list::tile ? rest : tie_list::tile};
    }

    __device__ __forceinline__ void make_codes(const sorted_keys& sorted) const {
        for (std::int32_t tile = block; tile < tiles; tile += blocks) {
            const part mine = part_of(tile);
            const sorted_segment segment = segment_of_task(params, sorted.task_of(runs.key[mine.run]));
            const std::uint64_t reference =
                code_of_token(params, segment, sorted.tokens[runs.first[runs.tiled(mine.run)]]);
            const std::uint64_t varies = write_codes(params, segment, sorted.tokens + mine.begin,
                                                     sorted.keys + mine.begin, mine.length, reference);
            if (varies != 0) {
                atomicOr(reinterpret_cast<unsigned long long*>(runs.varies), varies);
            }
        }
    }

    __device__ __forceinline__ void count_digits(const sorted_keys& from, int shift) const {
        for (std::int32_t tile = block; tile < tiles; tile += blocks) {
            const part mine = part_of(tile);
            memory.count_digits(from.keys + mine.begin, mine.length, shift);
            runs.digits[std::int64_t{tile} * 256 + thread] = memory.count[thread];
            __syncthreads();
        }
    }

    /// Counts become offsets in the run: by digit, then by tile.
    __device__ __forceinline__ void sum_digits() const {
        for (std::int32_t run = block; run < tiled_runs; run += blocks) {
            const std::int32_t length = runs.length[runs.tiled(run)];
            const std::int32_t of_run = (length + tie_list::tile - 1) / tie_list::tile;
            std::int32_t* const digits = runs.digits + std::int64_t{runs.first_tile[run]} * 256 + thread;
            std::int32_t total = 0;
#pragma unroll 8
            for (std::int32_t i = 0; i < of_run; ++i) {
                total += digits[std::int64_t{i} * 256];
            }
            memory.count[thread] = total;
            __syncthreads();
            memory.sum_digits();
            std::int32_t before = memory.offset[thread];
#pragma unroll 8
            for (std::int32_t i = 0; i < of_run; ++i) {
                const std::int32_t here = digits[std::int64_t{i} * 256];
                digits[std::int64_t{i} * 256] = before;
                before += here;
            }
            __syncthreads();
        }
    }

    __device__ __forceinline__ void scatter(const sorted_keys& from, const sorted_keys& to, int shift) const {
        for (std::int32_t tile = block; tile < tiles; tile += blocks) {
            const part mine = part_of(tile);
            const std::int64_t first = runs.first[runs.tiled(mine.run)];
            memory.offset[thread] = runs.digits[std::int64_t{tile} * 256 + thread];
            __syncthreads();
            memory.scatter(from.keys + mine.begin, from.tokens + mine.begin, to.keys + first,
                           to.tokens + first, mine.length, shift);
        }
    }

    __device__ __forceinline__ void write_back(const sorted_keys& sorted, const sorted_keys& from) const {
        for (std::int32_t tile = block; tile < tiles; tile += blocks) {
            const part mine = part_of(tile);
            const std::uint64_t key = runs.key[mine.run];
            for (std::int32_t i = thread; i < mine.length; i += device_threads) {
                sorted.tokens[mine.begin + i] = from.tokens[mine.begin + i];
                sorted.keys[mine.begin + i] = key;
            }
        }
    }
};

/// Sorts the long runs by their 64-bit codes, eight bits per pass. Rare: many priorities that agree to 28
/// bits or more, but not to 53. `spare` is a second pair of arrays like `sorted`.
///
/// Grid: cooperative, as many blocks as fit. Block: device_threads. Shared memory: radix_shared (dynamic).
/// Reads the run list. Reorders sorted.tokens [planes, S] within runs; uses sorted.keys for codes and
/// restores them.
/// 1. Runs of up to tie_list::tile keys, one block each.
/// 2. Longer runs, tile by tile, by the whole grid.
template <class Params>
__global__ void __launch_bounds__(device_threads)
    sort_long_ties_kernel(const Params params, const sorted_keys sorted, const sorted_keys spare,
                          const tie_list runs) {
    auto& memory = *reinterpret_cast<radix_shared*>(dynamic_shared());
    // 1. Runs of one block each.
    sort_ties_by_block(params, sorted, spare, runs, memory);
    // 2. Longer runs, by the whole grid.
    const tiled_runs_sorter<Params> sorter(params, runs, memory);
    if (sorter.tiled_runs > 0) {
        sorter.run(sorted, spare);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
