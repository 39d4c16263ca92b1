// What kernels see of a layer of a cache of either kind: counters, states and sizes. Views of a kind
// (contiguous_view, paged_view) add where entries lie.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

struct cache_view {
    const HeadParams* all_params = nullptr;  // [kv_heads]
    position_t* length = nullptr;            // [max_sequences]
    std::int32_t* num_long_range = nullptr;  // [max_sequences, kv_heads]
    std::int32_t* victim = nullptr;          // [max_sequences, kv_heads]
    std::int32_t* num_draft = nullptr;       // [max_sequences]
    std::int32_t* appended = nullptr;        // [max_sequences, kv_heads]
    std::uint32_t* arrivals = nullptr;       // [max_sequences, kv_heads]
    std::int32_t* tile_victims = nullptr;    // [max_sequences, tiles of all heads]
    float* state = nullptr;                  // [max_sequences, kv_heads, state_size]
    std::int64_t state_size = 0;
    position_t rebase_limit = kvpolicy::rebase_limit;
    std::int32_t max_sequences = 0;
    std::int32_t kv_heads = 0;
    std::int32_t group = 1;
    std::int32_t head_dim_qk = 0;
    std::int32_t head_dim_vo = 0;
    std::int32_t max_draft_tokens = 0;

    template <class Ref>
    __host__ __device__ explicit cache_view(const Ref& ref)
        : all_params(ref.all_params),
          length(ref.length),
          num_long_range(ref.num_long_range),
          victim(ref.victim),
          num_draft(ref.num_draft),
          appended(ref.appended),
          arrivals(ref.arrivals),
          tile_victims(ref.tile_victims),
          state(ref.state),
          state_size(ref.state_size),
          rebase_limit(ref.rebase_limit),
          max_sequences(ref.max_sequences),
          kv_heads(ref.kv_heads),
          group(ref.group),
          head_dim_qk(ref.head_dim_qk),
          head_dim_vo(ref.head_dim_vo),
          max_draft_tokens(ref.max_draft_tokens) {}
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
