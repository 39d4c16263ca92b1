// What attention found for a query head, on its way to the caller's tensors.
#pragma once

#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/cuda/decode/agent_merge_states.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Four columns, not yet divided by the sum of weights, and the largest logit.
template <class Compute>
struct output_columns {
    four_columns<Compute> x;
    Compute top, sum;

    /// Together with columns from `column` on of head `head` of a softmax state in shared memory.
    template <int Heads>
    [[nodiscard]] __device__ output_columns with(const Compute* state, std::int32_t width, std::int32_t head,
                                                 std::int32_t column) const {
        const Compute other = state[head];
        output_columns both;
        both.top = fmax(top, other);
        // Where nothing has been seen -inf must not be subtracted from -inf.
        const Compute finite = both.top == static_cast<Compute>(minus_infinity()) ? Compute(0) : both.top;
        const Compute ours = exp2(top - finite), its = exp2(other - finite);
        both.sum = ours * sum + its * state[Heads + head];
        const auto its_x = *reinterpret_cast<const four_columns<Compute>*>(
            state + stream_state<Heads>::header + head * width + column);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            both.x.x[c] = ours * x.x[c] + its * its_x.x[c];
        }
        return both;
    }

    /// To columns from `column` on of query head `head` of an entry.
    template <class Launch>
    __device__ void write(const Launch& call, std::int32_t entry, std::int64_t head,
                          std::int32_t column) const {
        using T = typename Launch::T;
        const Compute scale = sum == Compute(0) ? Compute(0) : Compute(1) / sum;
        T* const to = call.out.row(entry, head, 0) + column;
        if constexpr (sizeof(T) == 2) {
            *reinterpret_cast<uint2*>(to) =
                make_uint2(pack<T>(x.x[0] * scale, x.x[1] * scale), pack<T>(x.x[2] * scale, x.x[3] * scale));
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                to[c] = x.x[c] * scale;
            }
        }
        if (column == 0 && call.lse) {
            constexpr Compute ln_2 = static_cast<Compute>(0.693147180559945309417);
            call.lse.head(entry, head)[0] =
                sum == Compute(0) ? minus_infinity() : static_cast<float>((top + log2(sum)) * ln_2);
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
