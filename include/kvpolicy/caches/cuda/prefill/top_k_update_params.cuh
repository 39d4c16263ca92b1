// What the top-k updates of a chunk know: numbers of each head, and its part of the workspace. Neither the
// policy nor the place of entries, so that all caches share the kernels.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One head of an entry of the batch, before the chunk.
struct top_k_head {
    HeadParams head_params;
    position_t base;             // of the chunk's first token
    std::int32_t tokens;         // of the chunk; 0: nothing is decided here
    std::int32_t first_leaving;  // the first token at which a key leaves the window
    std::int32_t num_long_range;
    std::int32_t num_protected;  // of these, keys that do not compete
    std::int32_t first_slot;     // the first slot that is in the workspace
    std::int32_t capacity;       // a key is named by its row below this, token j of the chunk capacity + j
};

/// Whether the order of a head's keys depends on the query.
__device__ inline bool ranks_by_query(const HeadParams& head_params) {
    return head_params.decay_step != 1 && head_params.log_gamma != 0.0f && head_params.budget != 0 &&
           head_params.budget != unlimited;
}

/// What becomes of a key that leaves the window.
inline constexpr unsigned char leaving_kind_evicted = 0;    // the gate is closed, or there is no budget
inline constexpr unsigned char leaving_kind_competes = 1;   // for a top-k slot
inline constexpr unsigned char leaving_kind_protected = 2;  // it gets a slot for its position

/// Pairs are entry * kv_heads + head. Slot p of a pair is at p - first_slot.
struct top_k_update_params {
    const top_k_head* heads = nullptr;        // [pairs]
    float* leaving_score = nullptr;           // [pairs, most]: of the key that leaves at token j
    unsigned char* leaving_kind = nullptr;    // [pairs, most]
    float* slot_score = nullptr;              // [pairs, top_k_slots]
    position_t* slot_position = nullptr;      // [pairs, top_k_slots]
    std::int32_t* holder = nullptr;           // [pairs, top_k_slots]: the name of the key in each slot
    unsigned char* slot_protected = nullptr;  // [pairs, top_k_slots]; null: no key is protected
    expiry_t* past_expiry = nullptr;          // [pairs, max_entries]: by row
    expiry_t* chunk_expiry = nullptr;         // [pairs, most]: by token
    std::int32_t* members = nullptr;          // [pairs, 3, max_members]: scratch
    std::int32_t* num_long_range = nullptr;   // [pairs]
    std::int32_t* num_protected = nullptr;    // [pairs]; null: no key is protected
    std::int32_t most = 0;                    // tokens
    std::int32_t top_k_slots = 0;
    std::int32_t max_entries = 0;
    std::int32_t max_members = 0;  // keys of a round, at most
    position_t rebase_limit = 0;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
