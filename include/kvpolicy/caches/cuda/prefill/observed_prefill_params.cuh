// What the kernels of an observed policy's prompt share: a block of the chunk, masses, and who stays where.
#pragma once

#include <kvpolicy/caches/cuda/prefill/prefill_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Keys of a head are named: row n of the cache is n, token j of the block max_entries + j. Pairs are entry *
/// kv_heads + head.
template <class View_>
struct observed_prefill_params {
    using View = View_;

    prefill_params<View> call;  // of the block: its tokens, and how many each entry brings
    Observation seen;
    bool evicts_at_steps = true;
    std::int32_t done = 0;              // tokens of the call before the block
    const std::int32_t* all = nullptr;  // [count], of the call; -1 where there are no pages
    float* past_mass = nullptr;         // [pairs, max_entries], by row; then the new scores
    float* chunk_mass = nullptr;        // [pairs, most], by token; then the new scores
    std::int32_t* order = nullptr;      // [pairs, max_entries]: competing rows by position; null: no pooling
    unsigned char* lost = nullptr;      // [pairs, max_entries + most]
    std::int32_t* free_slot = nullptr;  // [pairs, max_entries]: scratch
    std::int32_t* moved = nullptr;      // [pairs, max_entries]: the key that comes to each slot, or -1
    std::int32_t* num_long_range = nullptr;  // [pairs], after the block
};

/// One head of an entry, for a block of the chunk.
template <class View>
struct observed_prefill_head : prefill_head<View> {
    const observed_prefill_params<View>& params;
    std::int32_t tokens;
    position_t last;  // position of the block's last token

    __device__ observed_prefill_head(const observed_prefill_params<View>& of, std::int32_t number)
        : prefill_head<View>(of.call, number), params(of), tokens(this->active.tokens) {
        this->base += of.done;
        last = this->base + tokens - 1;
    }
    /// Whether a key is behind the window of the block's last token.
    __device__ bool behind_window(position_t t) const {
        return t >= this->rows.head_params.sinks && t <= last - this->rows.head_params.window;
    }
    __device__ std::int64_t past_plane() const {
        return std::int64_t{this->pair} * params.call.top_k.max_entries;
    }
    __device__ std::int64_t chunk_plane() const { return std::int64_t{this->pair} * params.call.tokens.most; }
    __device__ bool excluded(std::int32_t row) const {
        return params.call.top_k.past_expiry[past_plane() + row] == 0;
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
