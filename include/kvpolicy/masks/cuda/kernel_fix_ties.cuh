// Runs of equal sort keys whose priorities differ: short ones are put right here, long ones listed for
// kernel_sort_long_ties.cuh.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/sorted_keys.cuh>
#include <kvpolicy/masks/cuda/sorted_order.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Work lists of runs of equal keys that are too long for one thread. Runs above `tile` are cut into tiles
/// for all blocks; the others are one block's each.
struct tie_list {
    static constexpr std::int32_t tile = 4096;

    std::int32_t* counts = nullptr;   // [3]: runs for one block, runs in tiles, tiles; cleared before
    std::uint64_t* varies = nullptr;  // [1]: code bits that differ within some tiled run; cleared before
    std::int32_t* first = nullptr;  // where a run begins in the sorted arrays; tiled runs from the list's end
    std::int32_t* length = nullptr;
    std::int32_t* first_tile = nullptr;   // [max_tiled], of tiled runs
    std::uint64_t* key = nullptr;         // [max_tiled]
    std::int32_t* run_of_tile = nullptr;  // [max_tiles]
    std::int32_t* digits = nullptr;       // [max_tiles, 256]: how often, then where to
    std::int32_t size = 0;

    /// What `count` keys can give at most.
    static std::int64_t max_runs(std::int64_t count) { return count / (short_tie + 1) + 1; }
    static std::int64_t max_tiled(std::int64_t count) { return count / (tile + 1) + 1; }
    static std::int64_t max_tiles(std::int64_t count) { return 2 * max_tiled(count); }

    /// Where tiled run i is in `first` and `length`: they fill up from the end.
    __device__ std::int32_t tiled(std::int32_t i) const { return size - 1 - i; }
};

/// Keys that a thread of fix_ties_kernel looks at.
inline constexpr int fix_ties_keys = 4;

/// fix_ties: sort keys hold a prefix of decayed priorities, so runs of equal keys may be out of order. Sorts
/// short runs by the 64-bit code, and lists long ones for kernel_sort_long_ties.cuh.
///
/// Grid: planes * S / (fix_ties_keys * device_threads), fix_ties_keys keys per thread. Block: device_threads.
/// Shared memory: none. Reads sorted.keys [planes, S]. Reorders sorted.tokens. Appends to runs (counts begin
/// as 0).
/// 1. Find the runs that begin here.
/// 2. Sort a short run.
/// 3. List a long one.
template <class Params>
__global__ void __launch_bounds__(device_threads)
    fix_ties_kernel(const Params params, const sorted_keys sorted, const tie_list runs) {
    const std::int64_t count = params.planes() * params.length;
    const std::int64_t base =
        fix_ties_keys * (std::int64_t{blockIdx.x} * device_threads + static_cast<std::int64_t>(threadIdx.x));
    if (base + 1 >= count) {
        return;
    }
    // 1. Find the runs that begin here. The key before the first, and the one behind the last; idle keys
    // stand in at the ends: no run of theirs counts.
    std::uint64_t around[fix_ties_keys + 2];
#pragma unroll
    for (int i = 0; i < fix_ties_keys + 2; ++i) {
        const std::int64_t at = base + i - 1;
        around[i] = at >= 0 && at < count ? sorted.keys[at] : ~std::uint64_t{0};
    }
    unsigned begins = 0;
#pragma unroll
    for (int i = 0; i < fix_ties_keys; ++i) {
        const std::uint64_t key = around[i + 1];
        const bool run = around[i + 2] == key && around[i] != key && sorted.prefix_of(key) < sorted.nan();
        begins |= static_cast<unsigned>(run) << i;
    }
    for (; begins != 0; begins &= begins - 1) {
        const std::int64_t at = base + __ffs(static_cast<int>(begins)) - 1;
        const std::uint64_t key = sorted.keys[at];
        const sorted_segment segment = segment_of_task(params, sorted.task_of(key));
        if (params.has_exact_keys(segment.head_params)) {
            continue;  // the key is exact
        }
        int length = 2;
        while (length <= short_tie && at + length < count && sorted.keys[at + length] == key) {
            ++length;
        }
        // 2. Sort a short run.
        if (length <= short_tie) {
            insertion_sort(sorted.tokens + at, length, [&](std::int32_t a, std::int32_t b) {
                return code_of_token(params, segment, a) > code_of_token(params, segment, b);
            });
            continue;
        }
        // 3. List a long one.
        std::int64_t low = at + length;  // the first key behind the run
        std::int64_t high = count;
        while (low < high) {
            const std::int64_t middle = low + (high - low) / 2;
            if (sorted.keys[middle] <= key) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        const auto whole = static_cast<std::int32_t>(low - at);
        std::int32_t place;
        if (whole <= tie_list::tile) {
            place = atomicAdd(runs.counts, 1);
        } else {
            const std::int32_t index = atomicAdd(runs.counts + 1, 1);
            const std::int32_t tiles = (whole + tie_list::tile - 1) / tie_list::tile;
            const std::int32_t first_tile = atomicAdd(runs.counts + 2, tiles);
            place = runs.tiled(index);
            runs.first_tile[index] = first_tile;
            runs.key[index] = key;
            for (std::int32_t tile = 0; tile < tiles; ++tile) {
                runs.run_of_tile[first_tile + tile] = index;
            }
        }
        runs.first[place] = static_cast<std::int32_t>(at);
        runs.length[place] = whole;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
