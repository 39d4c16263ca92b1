// Sizes that depend on the GPU: a constexpr selector from compute capability to an aggregate. Results never
// depend on them.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes of build_mask's kernels.
struct mask_tuning {
    /// Sequences (or packed segments) up to this length are ranked by one block each, in shared memory;
    /// longer ones by a sort over the whole device. One of the lengths of rank_sizes.
    std::int32_t longest_block_sort;
    /// Blocks per SM, at most, of the kernel that sorts the listed runs.
    std::int32_t list_blocks;
};

/// `capability` is 10 * major + minor.
constexpr mask_tuning select_mask_tuning(int capability) {
    // 16k tokens per block take about 130 KB of shared memory. GPUs of 8.6 and 8.9 (and 12.x) give a block 99
    // KB.
    if (capability == 80 || capability == 87 || (capability >= 90 && capability < 120)) {
        return {16384, 4};
    }
    return {4096, 4};
}

static_assert(select_mask_tuning(90).longest_block_sort == 16384);

/// Keys a block of the expiry kernel decides, one a thread; cutoffs are found beforehand at every multiple of
/// it.
inline constexpr std::int32_t mask_chunk = 512;

/// Sizes of attend's Hopper kernels, for a head_dim of at most `dim`.
struct forward_hopper_tuning {
    int consumers;  ///< warpgroups of 64 rows
    int keys;       ///< a block
    int stages;     ///< tiles of keys or values in the ring
    int consumer_registers;
    int producer_registers;
    bool overlap;  ///< Q K^T of a block beside the softmax of the one before
};

/// Three warpgroups share what is gathered best; two have the registers that soft cap and biases, or a
/// head_dim of 256, take.
constexpr forward_hopper_tuning select_forward_hopper_tuning(int dim, bool general) {
    if (dim > 128) {
        return {2, 64, 4, 216, 72, true};
    }
    if (general) {
        return {2, 128, dim > 64 ? 5 : 8, 216, 72, true};
    }
    return {3, 128, dim > 64 ? 5 : 8, 160, 32, dim <= 64};
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
