// What attention found for a query head, on its way to the caller's tensors.
#pragma once

#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/cuda/decode/agent_merge_states.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/scorers/cuda/common/observed_scorer.cuh>

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
        if constexpr (scored_by_steps<typename Launch::Scorer>) {
            if (column == 0 && call.writes) {
                call.observed.put_total(std::int64_t{entry} * call.cache.kv_heads * call.cache.group + head,
                                        top, sum);
            }
        }
        if (column == 0 && call.lse) {
            constexpr Compute ln_2 = static_cast<Compute>(0.693147180559945309417);
            call.lse.head(entry, head)[0] =
                sum == Compute(0) ? minus_infinity() : static_cast<float>((top + log2(sum)) * ln_2);
        }
    }
};

/// Outputs of all query heads of KV head `head` of entry `entry`, by all threads of a block.
template <class Launch>
class agent_decode_output {
    using Rows = typename Launch::Rows;
    using Columns = output_columns<typename Launch::Compute>;

  public:
    __device__ agent_decode_output(const Launch& call, const agent_merge_states<Rows>& mixer,
                                   const state_weights<Rows>& weights, std::int32_t entry, std::int32_t head)
        : call_(call), mixer_(mixer), weights_(weights), entry_(entry), head_(head) {}

    /// states_of(part, its query heads) has the states of a part, no more than state_weights takes.
    template <class StatesOf>
    __device__ void write(const StatesOf& states_of) const {
        const std::int32_t fours = call_.cache.head_dim_vo / 4;
        for (std::int32_t first = 0, part = 0; first < call_.cache.group; first += Rows::heads, ++part) {
            const std::int32_t left = call_.cache.group - first,
                               heads = left < Rows::heads ? left : Rows::heads;
            if (first != 0) {
                __syncthreads();  // all have read the weights
            }
            const auto of = states_of(part, heads);
            mixer_.weigh(of.states, of.count, heads);
            for (auto i = static_cast<std::int32_t>(threadIdx.x); i < heads * fours; i += Rows::threads) {
                const std::int32_t head = i / fours, column = i % fours * 4;
                const Columns columns{
                    mixer_.template mix<agent_merge_states<Rows>::batch>(of.states, of.count, head, column),
                    weights_.top[head], weights_.sum[head]};
                columns.write(call_, entry_, std::int64_t{head_} * call_.cache.group + first + head, column);
            }
        }
    }

  private:
    const Launch& call_;
    const agent_merge_states<Rows>& mixer_;
    const state_weights<Rows>& weights_;
    std::int32_t entry_, head_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
