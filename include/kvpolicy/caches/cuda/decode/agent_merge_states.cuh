// Softmax states of several warps or blocks become one.
#pragma once

#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/cluster.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The most blocks of a head that share its rows.
inline constexpr std::int32_t max_splits = 32;

/// Four columns of one query head.
template <class Compute>
struct alignas(16) four_columns {
    Compute x[4];
};

/// Reads what other blocks wrote: past the L1 cache.
struct load_shared_between_blocks {
    __device__ float operator()(const float* from) const { return __ldcg(from); }
    __device__ double operator()(const double* from) const { return __ldcg(from); }
    template <class Four>
    __device__ Four operator()(const Four* from) const {
        Four to;
        static_assert(sizeof(Four) % sizeof(float4) == 0);
#pragma unroll
        for (unsigned i = 0; i < sizeof(Four) / sizeof(float4); ++i) {
            reinterpret_cast<float4*>(&to)[i] = __ldcg(reinterpret_cast<const float4*>(from) + i);
        }
        return to;
    }
};
struct load_of_block {
    template <class Value>
    __device__ Value operator()(const Value* from) const {
        return *from;
    }
};

/// Where softmax states are: those of a block's warps, or of the blocks of a cluster, in a block's shared
/// memory, or those of blocks in the workspace, which are read past the L1 cache.
template <class Compute, class Load>
struct stored_states {
    const Compute* first;
    std::int64_t stride;

    __device__ const Compute* at(std::int32_t i) const { return first + i * stride; }
    template <class Value>
    __device__ static Value load(const Value* from) {
        return Load{}(from);
    }
};
template <class Compute>
using states_of_warps = stored_states<Compute, load_of_block>;
template <class Compute>
using states_of_blocks = stored_states<Compute, load_shared_between_blocks>;

/// The softmax states of a part of a group of query heads.
template <class States>
struct states_of_part {
    States states;
    std::int32_t count;
};

/// Destination of a block's state: global memory, which the last block reads.
template <class Compute>
struct state_in_memory {
    Compute* to;

    __device__ void columns(std::int32_t slot, const four_columns<Compute>& x) const {
        *reinterpret_cast<four_columns<Compute>*>(to + slot) = x;
    }
    __device__ void number(std::int32_t slot, Compute x) const { to[slot] = x; }
};
/// Destination of a block's state: the leader's shared memory, whose mbarrier counts the bytes.
struct state_in_cluster {
    std::uint32_t to, barrier;

    __device__ void columns(std::int32_t slot, const four_columns<float>& x) const {
        send_in_cluster(to + 4u * static_cast<std::uint32_t>(slot),
                        make_float4(x.x[0], x.x[1], x.x[2], x.x[3]), barrier);
    }
    __device__ void number(std::int32_t slot, float x) const {
        send_in_cluster(to + 4u * static_cast<std::uint32_t>(slot), x, barrier);
    }
};

/// Results of weigh() per query head: the weights of the states, the largest logit, and the sum.
template <class Rows>
struct state_weights {
    using Compute = typename Rows::Compute;
    static constexpr std::int32_t most = 64;  // a head of a DualCache may have more states
    static_assert(most > max_splits);
    Compute weight[Rows::heads][most];
    Compute top[Rows::heads], sum[Rows::heads];
};

/// Merges states of `width` columns per head, head_dim_vo of them in use. By all threads of a block.
template <class Rows>
class agent_merge_states {
    using Compute = typename Rows::Compute;
    using Four = four_columns<Compute>;
    static constexpr std::int32_t max_states = state_weights<Rows>::most;

  public:
    static constexpr int batch = sizeof(Compute) == 4 ? 11 : 3;  // 33 states in three turns

    __device__ agent_merge_states(state_weights<Rows>& memory, std::int32_t width, std::int32_t head_dim_vo)
        : memory_(memory), width_(width), head_dim_vo_(head_dim_vo) {}

    /// Weights of the softmax states of `count` warps or blocks, for all threads to read. It runs once with a
    /// cold instruction cache, so few instructions matter.
    template <class States>
    __device__ void weigh(const States& states, std::int32_t count, std::int32_t heads) const {
        constexpr int turns = (max_states + 31) / 32;
        for (std::int32_t head = warp_id(); head < heads; head += Rows::warps) {
            Compute m[turns], l[turns];
            Compute top = static_cast<Compute>(minus_infinity()), sum = Compute(0);
#pragma unroll
            for (int t = 0; t < turns; ++t) {
                const std::int32_t i = 32 * t + lane_id();
                const Compute* const state = states.at(i < count ? i : 0) + head;
                m[t] = i < count ? states.load(state) : static_cast<Compute>(minus_infinity());
                l[t] = i < count ? states.load(state + Rows::heads) : Compute(0);
                top = fmax(top, m[t]);
            }
#pragma unroll
            for (int step = 16; step != 0; step /= 2) {
                top = fmax(top, __shfl_xor_sync(all_lanes, top, step));
            }
            const Compute finite = top == static_cast<Compute>(minus_infinity()) ? Compute(0) : top;
#pragma unroll
            for (int t = 0; t < turns; ++t) {
                const std::int32_t i = 32 * t + lane_id();
                const Compute weight = exp2(m[t] - finite);
                sum += weight * l[t];
                if (i < count) {
                    memory_.weight[head][i] = weight;
                }
            }
#pragma unroll
            for (int step = 16; step != 0; step /= 2) {
                sum += __shfl_xor_sync(all_lanes, sum, step);
            }
            if (lane_id() == 0) {
                memory_.top[head] = top;
                memory_.sum[head] = sum;
            }
        }
        __syncthreads();
    }
    /// Four columns of the states that were weighed, `Batch` of them asked for at once.
    template <int Batch, class States>
    __device__ Four mix(const States& states, std::int32_t count, std::int32_t head,
                        std::int32_t column) const {
        const std::int64_t at = stream_state<Rows::heads>::header + head * width_ + column;
        Four all{};
#pragma unroll 1
        for (std::int32_t first = 0; first < count; first += Batch) {
            Four some[Batch];
#pragma unroll
            for (int i = 0; i < Batch; ++i) {
                some[i] = states.load(
                    reinterpret_cast<const Four*>(states.at(first + i < count ? first + i : 0) + at));
            }
#pragma unroll
            for (int i = 0; i < Batch; ++i) {
                const Compute weight = first + i < count ? memory_.weight[head][first + i] : Compute(0);
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    all.x[c] += first + i < count ? weight * some[i].x[c] : Compute(0);
                }
            }
        }
        return all;
    }

    /// The warps' states become the block's: to.columns(place in a state, four columns), to.number(place, its
    /// number).
    template <class To>
    __device__ void merge_warps(const states_of_warps<Compute>& of_warps, std::int32_t heads,
                                const To& to) const {
        merge<Rows::warps>(of_warps, Rows::warps, heads, to);
    }
    /// `count` states, `stride` numbers apart in global memory, or as few as weigh() takes in their place.
    /// While there are more, those of a round become one, where its first was.
    [[nodiscard]] __device__ states_of_part<states_of_blocks<Compute>> few_of(Compute* states,
                                                                              std::int32_t count,
                                                                              std::int64_t stride,
                                                                              std::int32_t heads) const {
#pragma unroll 1
        while (count > max_states) {
#pragma unroll 1
            for (std::int32_t first = 0; first < count; first += max_states) {
                const std::int32_t now = count - first < max_states ? count - first : max_states;
                Compute* const round = states + first * stride;
                if (now > 1) {
                    merge<batch>(states_of_blocks<Compute>{round, stride}, now, heads,
                                 state_in_memory<Compute>{round});
                    __syncthreads();  // the weights have been read, and the state is there
                }
            }
            count = (count + max_states - 1) / max_states;
            stride *= max_states;
        }
        return {{states, stride}, count};
    }
    /// Bytes that merge_warps() sends.
    [[nodiscard]] __device__ std::uint32_t merged_bytes(std::int32_t heads) const {
        return static_cast<std::uint32_t>(heads * (head_dim_vo_ + 2)) *
               static_cast<std::uint32_t>(sizeof(Compute));
    }

  private:
    template <int Batch, class States, class To>
    __device__ void merge(const States& states, std::int32_t count, std::int32_t heads, const To& to) const {
        const std::int32_t fours = head_dim_vo_ / 4;
        weigh(states, count, heads);
        for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < heads * fours; i += Rows::threads) {
            const std::int32_t head = i / fours, column = i % fours * 4;
            to.columns(stream_state<Rows::heads>::header + head * width_ + column,
                       mix<Batch>(states, count, head, column));
            if (column == 0) {
                to.number(head, memory_.top[head]);
                to.number(Rows::heads + head, memory_.sum[head]);
            }
        }
    }

    state_weights<Rows>& memory_;
    std::int32_t width_, head_dim_vo_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
