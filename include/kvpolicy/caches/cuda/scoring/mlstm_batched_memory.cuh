// Shared memory of a block of agent_mlstm_batched.cuh, and the sizes that it depends on.
#pragma once

#include <kvpolicy/caches/cuda/scoring/agent_mlstm_step.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int batched_warps = 16;  // that work
inline constexpr int batched_workers = 32 * batched_warps;
inline constexpr int batched_readers = 3;
inline constexpr int batched_threads = batched_workers + 32 + 32 * batched_readers;
inline constexpr int batched_entries = 16;  // of a block
inline constexpr int batched_blocks = 2;    // of a cluster: each has half of the columns of the weights
inline constexpr int batched_tokens = batched_blocks * batched_entries;
inline constexpr int batched_stages = 8;  // of the ring, at most
inline constexpr int batched_min_stages = 2;
// States that the L2 cache is asked for before the kernel before has ended.
inline constexpr int batched_early = 1;
inline constexpr int batched_reads = 4;  // entries that wait to be read out
static_assert(batched_tokens == 2 * batched_warps && 2 * batched_entries <= 32);

/// Whether a scorer's sizes fit: a thread has two columns of a fold.
constexpr bool batched_fits(std::int32_t inputs, std::int32_t features, std::int32_t width) {
    return inputs <= max_mlstm_inputs && inputs % 4 == 0 && width <= max_mlstm_width && width % 2 == 0 &&
           features <= max_mlstm_features && features % 2 == 0 &&
           folds_of(features) * (width / 2) <= batched_workers;
}

/// Shared memory of a block.
template <class T>
struct mlstm_batched_memory {
    // Four numbers of a token, as they are stored, or as fp32.
    using four = four_elements<T>;
    static constexpr std::int32_t quarter = 16 * weight_quarter::blocks;  // columns
    static constexpr std::int32_t quarters_each = 4 / batched_blocks;     // that a block has
    static constexpr std::int32_t columns = quarter * quarters_each;
    // Of a token's columns, in fours: reads of tokens next to each other meet all banks.
    static constexpr std::int32_t stride = (columns + 16) / 4;

    struct alignas(16) Tokens {
        const T* value[batched_entries];  // the new tokens'
        std::int64_t state[batched_entries], new_state[batched_entries];
        std::int32_t count[batched_entries], leaves[batched_entries];
        // Barriers: a state has come, has taken in its token; an entry may be read out, has been.
        std::uint64_t full[batched_stages], taken[batched_stages], summed[batched_reads], read[batched_reads];
        std::uint64_t projected;  // quarters of projections have come from all blocks
        std::uint64_t joined;     // they are no longer needed
    };
    Tokens* tokens;
    unsigned char* ring;  // [stages, stage_bytes]
    float*
        quarters;  // [4, tiles, batched_entries, tile] in the ring's last stages, which get no states before
    four* x;       // [2, batched_tokens, stride], where y, k, q and h will be
    float* y;      // [batched_entries, rows]
    float *k, *q;  // [batched_entries, padded]
    float* h;      // [batched_reads, folds, width]
    float* gate;   // [batched_entries, 2]
    float* divisor;         // [batched_reads, folds]
    float *readout, *gain;  // [width]
    float* value;           // [batched_entries, width], if values are not projected

    /// A state lies in a stage as in memory to lines: copies of whole lines are quicker. It begins at a
    /// multiple of 8 bytes.
    static constexpr std::int32_t line = 128;
    __host__ __device__ static constexpr std::int64_t stage_bytes(std::int64_t state_size) {
        return (state_size * 4 + line - 8 + line - 1) / line * line;
    }
    __host__ __device__ static constexpr std::int64_t quarters_bytes(std::int32_t rows) {
        return std::int64_t{4} * 4 * batched_entries * rows;
    }
    /// Stages that have states before projections are done.
    __host__ __device__ static constexpr std::int32_t free_stages(std::int32_t rows, std::int64_t state_size,
                                                                  std::int32_t stages) {
        const std::int64_t left = stages * stage_bytes(state_size) - quarters_bytes(rows);
        return left < 0 ? 0 : static_cast<std::int32_t>(left / stage_bytes(state_size));
    }
    __host__ __device__ static constexpr std::int64_t ring_bytes(std::int32_t rows, std::int64_t state_size,
                                                                 std::int32_t stages) {
        const std::int64_t all = stages * stage_bytes(state_size), least = quarters_bytes(rows);
        return all > least ? all : least;
    }
    /// Of x, or of y, k, q and h.
    __host__ __device__ static constexpr std::int64_t middle_bytes(std::int32_t rows, std::int32_t features,
                                                                   std::int32_t width) {
        const std::int64_t folds = folds_of(features),
                           x = std::int64_t{2} * batched_tokens * stride * sizeof(four),
                           others = 4 * (batched_entries * (rows + 2 * folds * fold_rows) +
                                         batched_reads * folds * width);
        return x > others ? x : others;
    }
    __host__ __device__ static constexpr std::int64_t bytes(std::int32_t rows, std::int32_t features,
                                                            std::int32_t width, std::int64_t state_size,
                                                            std::int32_t stages, bool projected) {
        return static_cast<std::int64_t>((sizeof(Tokens) + 127) / 128 * 128) +
               ring_bytes(rows, state_size, stages) + middle_bytes(rows, features, width) +
               4 * (std::int64_t{2} * batched_entries + batched_reads * folds_of(features) + 2 * width +
                    (projected ? 0 : batched_entries * width));
    }
    __device__ mlstm_batched_memory(unsigned char* at, std::int32_t rows, std::int32_t features,
                                    std::int32_t width, std::int64_t state_size, std::int32_t stages)
        : tokens(reinterpret_cast<Tokens*>(at)), ring(at + (sizeof(Tokens) + 127) / 128 * 128) {
        const std::int32_t folds = folds_of(features);
        const std::int64_t of_ring = ring_bytes(rows, state_size, stages);
        unsigned char* const middle = ring + of_ring;
        quarters = reinterpret_cast<float*>(middle - quarters_bytes(rows));
        x = reinterpret_cast<four*>(middle);
        y = reinterpret_cast<float*>(middle);
        k = y + batched_entries * rows;
        q = k + batched_entries * folds * fold_rows;
        h = q + batched_entries * folds * fold_rows;
        gate = reinterpret_cast<float*>(middle + middle_bytes(rows, features, width));
        divisor = gate + batched_entries * 2;
        readout = divisor + batched_reads * folds;
        gain = readout + width;
        value = gain + width;
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
