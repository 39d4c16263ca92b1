// Shared memory of a block of agent_chunk_states.cuh.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What a pass must know of a chunk.
struct alignas(16) mlstm_state_step {
    float keep, add;          // state <- keep * state + add * (the chunk's outer products)
    float ref_weight;         // ref_weight: the share of the reference token in all weights
    std::int32_t ref_token;   // ref_token: its row in the plane; -1: none
    std::int32_t there;       // the chunk has tokens
    std::int32_t adds;        // the chunk adds to the state
    std::int32_t fresh;       // the chunk is the first of a sequence
    std::int32_t before;      // backward: the reference token before the chunk
    float ref_weight_before;  // backward: its ref_weight
};

/// Threads of a block. On Hopper a block is one warpgroup, and its products are wgmma.
template <bool Hopper>
inline constexpr int mlstm_chunk_states_threads = Hopper ? 128 : 256;

/// Shared memory of a block: a ring of the rows that chunks add and, on Hopper, of the states before them.
template <class E, int FS, int VS, bool Hopper>
struct mlstm_chunk_states_memory {
    // Five stages fit into the 99 KB that every GPU gives a block, for float rows as well.
    static constexpr int stages = Hopper ? 4 : 5, batch = 64;
    static constexpr int columns = (FS + VS + 63) / 64 * 64;
    static constexpr int down = FS / 16,
                         across = mlstm_chunk_states_threads<Hopper> / 32 /
                                  down;  // warps over features, over values

    // Hopper, per stage: the state before the chunk, then the backward state on its way to memory.
    unsigned char* states;
    unsigned char* tiles;     // per stage: k~ or q~, FS columns, then v~ or d N, VS columns
    float* scale;             // [stages][64]
    float* ratio;             // [stages][64]
    E* split;                 // [2][2][64]: a ratio as a rounded number and the rest
    E* ref_token;             // [stages][VS]: value of the reference token
    E* before;                // [stages][VS], Hopper: value of the reference token before the chunk
    float* ref_value;         // [2][2][VS], Hopper: ref_value after and before the chunk
    float* z;                 // [stages][FS], Hopper
    float* crossing;          // [2][warps]
    float* lost;              // [2][across][FS]
    mlstm_state_step* steps;  // [2][batch]
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_chunk_states_memory(unsigned char* memory) {
        shared_parts parts(memory);
        states = parts.tile<E>(FS, Hopper ? stages * VS : 0).data;
        tiles = parts.tile<E>(scorer_chunk, stages * columns).data;
        scale = parts.take<float>(stages * scorer_chunk);
        ratio = parts.take<float>(stages * scorer_chunk);
        split = parts.take<E>(2 * 2 * scorer_chunk);
        ref_token = parts.take<E>(stages * VS);
        before = parts.take<E>(Hopper ? stages * VS : 0);
        ref_value = parts.take<float>(Hopper ? 2 * 2 * VS : 0);
        z = parts.take<float>(Hopper ? stages * FS : 0);
        crossing = parts.take<float>(2 * (mlstm_chunk_states_threads<Hopper> / 32));
        lost = parts.take<float>(2 * across * FS);
        steps = parts.take<mlstm_state_step>(2 * batch);
        bytes = parts.bytes();
    }
    [[nodiscard]] __device__ shared_tile<E> tile(int stage) const {
        return {tiles + shared_tile<E>::bytes(scorer_chunk, columns) * stage, scorer_chunk};
    }
    [[nodiscard]] __device__ shared_tile<E> state(int stage) const {
        return {states + shared_tile<E>::bytes(FS, VS) * stage, FS};
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
