// What the kernels of a step are given, whichever cache it is of.
#pragma once

#include <kvpolicy/caches/cuda/agent_decode_stream.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rows: sizes of the stream; Gate and Scorer: the policy's; View: the cache.
template <class Rows_, class Gate_, class Scorer_, class View_>
struct decode_params {
    using Rows = Rows_;
    using Gate = Gate_;
    using Scorer = Scorer_;
    using View = View_;
    using T = typename Rows::T;
    using Compute = typename Rows::Compute;

    View cache;
    Batch batch{};
    rows_view<const T> q{};  // [count, Hq, 1, Dk]
    rows_view<const T> k{};  // [count, Hkv, 1, Dk]
    rows_view<const T> v{};  // [count, Hkv, 1, Dv]
    rows_view<T> out{};      // [count, Hq, 1, Dv]
    plane_view<float> lse{};
    plane_view<const float> scores{};  // the new tokens', where they are given
    const float* computed = nullptr;   // [count, Hkv], of a scorer that is scored_before: see score_params
    Compute* states = nullptr;         // of blocks that share a head
    std::uint32_t* status = nullptr;   // [count]
    std::int32_t parts = 1;            // of a group of query heads, Rows::heads each
    std::int32_t width = 0;            // of a state
    stream_logits<Compute> logits{};
    bool writes = true;  // a step; else attention over the rows as they are
    Gate gate;
    Scorer scorer;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
