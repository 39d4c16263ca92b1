// Shared memory of a block of agent_mlstm_cluster.cuh, and the sizes that it depends on.
#pragma once

#include <kvpolicy/caches/cuda/scoring/agent_mlstm_projections.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_step.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int cluster_blocks = 8;
inline constexpr int cluster_warps = 8;  // of a block
inline constexpr int cluster_threads = 32 * cluster_warps;
/// Of a thread: beside two warps of so many a quarter of an SM has space for a warp of the step.
inline constexpr int cluster_registers = 168;

/// Sizes: the most sequences of a cluster at once, and folds of their states that a thread has.
template <int Entries_, int Folds_>
struct cluster_sizes {
    static constexpr int Entries = Entries_, Folds = Folds_;
    static constexpr int tokens = 8;  // that a product takes
    static_assert(Entries <= tokens && Entries <= cluster_blocks && Entries <= cluster_warps);

    __host__ __device__ static constexpr std::int32_t folds_each(std::int32_t features) {
        return (folds_of(features) + cluster_blocks - 1) / cluster_blocks;
    }
    /// Whether a scorer's sizes fit.
    __host__ __device__ static constexpr bool fit(std::int32_t inputs, std::int32_t features,
                                                  std::int32_t width) {
        return inputs <= max_mlstm_inputs && inputs % 4 == 0 && width <= max_mlstm_width &&
               features <= max_mlstm_features && width % 2 == 0 && features % 2 == 0 &&
               Entries * folds_each(features) * (width / 2) <= Folds * cluster_threads &&
               Entries * folds_each(features) * fold_rows <= cluster_threads;
    }
};

/// Shared memory of a block of a cluster.
template <class Sizes, class T>
struct cluster_memory {
    static constexpr int Entries = Sizes::Entries;
    static constexpr int sent_stride = mlstm_rows::tile + 4;  // of a token; so that banks differ
    static constexpr int tile_numbers = sent_stride * Sizes::tokens;

    struct alignas(16) Tokens {
        const T* from[Entries][2][2];  // the new token's key and value, those of the key that leaves
        std::int64_t state[Entries], new_state[Entries];
        std::int32_t count[Entries], leaves[Entries];
        std::int32_t most;
        std::uint64_t projected, summed;  // barriers
    };

    Tokens* tokens;
    float* x;               // [2, Sizes::tokens, token_stride]: new tokens, leaving keys
    float* sent;            // [cluster_warps, tile_numbers]: this block's quarters of projections
    float* y;               // [Entries, rows]: every projection, from all blocks
    float *k, *q;           // [Entries, padded]
    float* gate;            // [Entries, 2]: write, forget
    float* h;               // [folds, width] of the entry that this block reads, from all blocks
    float* divisor;         // [folds]
    float *readout, *gain;  // [width]

    __host__ __device__ static constexpr std::int64_t bytes(std::int32_t inputs, std::int32_t rows,
                                                            std::int32_t features, std::int32_t width) {
        const std::int64_t folds = folds_of(features);
        return static_cast<std::int64_t>(sizeof(Tokens)) +
               4 * (2 * Sizes::tokens * std::int64_t{token_stride(inputs)} + cluster_warps * tile_numbers +
                    Entries * (std::int64_t{rows} + 2 * folds * fold_rows + 2) + folds * (width + 1) +
                    2 * width);
    }
    __device__ cluster_memory(unsigned char* at, std::int32_t inputs, std::int32_t rows,
                              std::int32_t features, std::int32_t width)
        : tokens(reinterpret_cast<Tokens*>(at)), x(reinterpret_cast<float*>(at + sizeof(Tokens))) {
        const std::int32_t folds = folds_of(features);
        sent = x + 2 * Sizes::tokens * token_stride(inputs);
        y = sent + cluster_warps * tile_numbers;
        k = y + Entries * rows;
        q = k + Entries * folds * fold_rows;
        gate = q + Entries * folds * fold_rows;
        h = gate + 2 * Entries;
        divisor = h + folds * width;
        readout = divisor + folds;
        gain = readout + width;
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
