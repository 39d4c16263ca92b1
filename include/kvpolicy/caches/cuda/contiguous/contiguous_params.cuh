// What the kernel of a FixedBudgetCache's step is given.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/decode/decode_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A launch. `states` are [count, Hkv, parts, blocks(), stream_state], null where parts * blocks() = 1.
template <class Rows, class Gate, class Scorer>
struct contiguous_params : decode_params<Rows, Gate, Scorer, contiguous_view<typename Rows::T>> {
    decode_note* notes = nullptr;    // [count, Hkv]
    std::int32_t splits = 1;         // blocks that share the rows of a head
    std::int32_t leader_blocks = 0;  // 1: one more, which has no rows
    bool clustered = false;          // the blocks of a head are a cluster

    /// Blocks of a head, of one part.
    [[nodiscard]] __host__ __device__ std::int32_t blocks() const { return splits + leader_blocks; }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
