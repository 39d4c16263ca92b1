// What the kernel of a FixedBudgetCache's step is given.
#pragma once

#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/blocks/cache_view.cuh>
#include <kvpolicy/cuda/blocks/step_stream.cuh>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What the decider of a head tells the last block.
struct step_note {
    std::int32_t promoted;  // the row that u gets, or -1
    std::int32_t kept;      // long-range places in use after the step
    std::int32_t victim;    // the worst place after the step
    float arriving;         // the newcomer's score
    float leaving;          // u's
};

/// A launch. Rows: sizes of the stream; Gate and Scorer: the policy's.
template <class Rows, class Gate, class Scorer>
struct step_launch {
    using T = typename Rows::T;
    using Compute = typename Rows::Compute;

    cache_view<T> cache;
    Batch batch{};
    rows_view<const T> q{};  // [count, Hq, 1, Dk]
    rows_view<const T> k{};  // [count, Hkv, 1, Dk]
    rows_view<const T> v{};  // [count, Hkv, 1, Dv]
    rows_view<T> out{};      // [count, Hq, 1, Dv]
    plane_view<float> lse{};
    plane_view<const float> scores{};  // the newcomers', where they are given
    const float* computed = nullptr;   // [count, Hkv], of a scorer that is scored_before: see score_launch
    Compute* states =
        nullptr;  // [count, Hkv, parts, blocks(), stream_state]; null where parts * blocks() = 1
    step_note* notes = nullptr;       // [count, Hkv]
    std::uint32_t* status = nullptr;  // [count]
    std::int32_t splits = 1;          // blocks that share the rows of a head
    std::int32_t deciders = 0;        // 1: one more, which has no rows
    std::int32_t parts = 1;           // of a group of query heads, Rows::heads each
    std::int32_t width = 0;           // of a state
    stream_logits<Compute> logits{};
    bool clustered = false;  // the blocks of a head are a cluster
    bool writes = true;      // a step; else attention over the rows as they are
    Gate gate;
    Scorer scorer;

    /// Blocks of a head, of one part.
    [[nodiscard]] __host__ __device__ std::int32_t blocks() const { return splits + deciders; }
};

/// The most blocks of a head that share its rows.
inline constexpr std::int32_t most_splits = 32;

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
