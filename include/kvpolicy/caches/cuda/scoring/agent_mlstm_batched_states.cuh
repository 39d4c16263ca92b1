// The entries of a block of agent_mlstm_batched.cuh, and the warp that copies their states into the ring and
// back.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_projections.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_step.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_score.cuh>
#include <kvpolicy/caches/cuda/scoring/mlstm_batched_memory.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/cluster.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The numbers of a block, and its states' way into the ring and back.
template <class View, std::int32_t D, class Feature, class Values>
struct mlstm_batched_states {
    using Scorer = mLSTMScorer<D, Feature, Values>;
    using Launch = score_params<View, Scorer>;
    using T = typename View::value_type;
    using Memory = mlstm_batched_memory<T>;

    __device__ mlstm_batched_states(const Launch& call, unsigned char* shared)
        : call_(call),
          rows_{call.projection, Values::projected ? call.width : 0, call.scorer.weights.skip != nullptr},
          inputs_(call.cache.head_dim_qk + call.cache.head_dim_vo),
          folds_(folds_of(call.features)),
          memory_(shared, rows_.count(), call.features, call.width, call.cache.state_size, call.stages) {
        const auto number = static_cast<std::int32_t>(blockIdx.x), cluster = number / batched_blocks;
        block_ = number % batched_blocks;
        head_ = cluster % call.cache.kv_heads;
        first_of_all_ = cluster / call.cache.kv_heads * batched_blocks * call.together;
        first_ = first_of_all_ + block_ * call.together;
        count_ = within(call.batch.count - first_, call.together);
        all_ = within(call.batch.count - first_of_all_, batched_blocks * call.together);
    }

    [[nodiscard]] __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }
    [[nodiscard]] __device__ static std::int32_t within(std::int32_t count, std::int32_t most) {
        return count < 0 ? 0 : count < most ? count : most;
    }
    [[nodiscard]] __device__ std::int64_t state_numbers() const {
        return std::int64_t{call_.features} * call_.width;
    }
    [[nodiscard]] __device__ float* new_states() const {
        return call_.state == nullptr ? call_.cache.state : call_.state;
    }
    /// The first number of the state of a slot, or of an entry where new ones go.
    [[nodiscard]] __device__ std::int64_t state_of(std::int64_t slot) const {
        return (slot * call_.cache.kv_heads + head_) * call_.cache.state_size;
    }
    /// What there is of entry e of the block.
    [[nodiscard]] __device__ active_entry entry_of(std::int32_t e) const {
        return active_entry(call_.cache, call_.batch, first_ + e, 1).once(call_.cache);
    }
    /// The block's entries that have a token, as bits; lane e gets the slot of entry e. By a warp.
    __device__ unsigned find_own(std::int32_t& slot) const {
        bool there = false;
        slot = 0;
        if (lane_id() < count_) {
            const active_entry entry = entry_of(lane_id());
            there = entry.tokens != 0;
            slot = entry.seq;
        }
        return __ballot_sync(all_lanes, there);
    }
    [[nodiscard]] __device__ static bool has(unsigned entries, std::int32_t e) {
        return (entries >> static_cast<unsigned>(e) & 1u) != 0;
    }

    /// Bytes that a state's place in memory is behind the beginning of a line.
    [[nodiscard]] __device__ static std::uint32_t offset_of(const float* state) {
        return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(state) % Memory::line);
    }
    /// Its first bytes that are no whole piece of 16: 0 or 8.
    [[nodiscard]] __device__ static std::uint32_t odd_bytes(const float* state) {
        return offset_of(state) % 16;
    }
    [[nodiscard]] __device__ std::uint32_t stage_address(std::int32_t stage) const {
        return shared_address(memory_.ring) +
               static_cast<std::uint32_t>(stage * Memory::stage_bytes(call_.cache.state_size));
    }
    /// The part of a state that lies in whole pieces of 16 bytes: all but, perhaps, the first two numbers, or
    /// the stabilizer.
    struct whole_part {
        const unsigned char* from;
        std::uint32_t skipped, bytes;
    };
    [[nodiscard]] __device__ whole_part whole_part_of(const float* state) const {
        const std::uint32_t skipped = odd_bytes(state),
                            all = static_cast<std::uint32_t>(call_.cache.state_size) * 4;
        return {reinterpret_cast<const unsigned char*>(state) + skipped, skipped, (all - skipped) / 16 * 16};
    }
    /// Sets out to bring a state, the block's n-th; one lane.
    __device__ void issue(const float* state, std::int32_t n) const {
        const whole_part part = whole_part_of(state);
        const std::int32_t stage = n % call_.stages;
        const std::uint32_t to = stage_address(stage) + offset_of(state),
                            barrier = shared_address(&memory_.tokens->full[stage]);
        barrier_expect(barrier, part.bytes);
        // An earlier tile may have had its bytes copied to where this one has others.
        fence_async_proxy();
        copy_bulk(to + part.skipped, part.from, part.bytes, barrier);
        if (part.skipped != 0) {
            copy_8(to, state);
        }
        barrier_arrive_after_copies(barrier);
    }
    /// Whether a state may go from its stage to where the new one goes by a bulk copy: both lie alike to 16
    /// bytes.
    [[nodiscard]] __device__ static bool alike(const float* state, const float* to) {
        return odd_bytes(state) == odd_bytes(to);
    }
    /// What it copies, behind the odd bytes: not the stabilizer, which is not the ring's.
    [[nodiscard]] __device__ std::uint32_t stored_bytes(std::uint32_t odd) const {
        return (static_cast<std::uint32_t>(state_numbers() + call_.features) * 4 - odd) / 16 * 16;
    }
    /// Sets out to store the block's n-th state, of entry e, once it has taken in its token.
    __device__ void store(std::int32_t n, std::int32_t e, std::int32_t slot_of_entry) const {
        const std::int32_t stage = n % call_.stages;
        barrier_wait(shared_address(&memory_.tokens->taken[stage]),
                     static_cast<std::uint32_t>(n / call_.stages) % 2);
        const float* const state = call_.cache.state + state_of(slot_of_entry);
        float* const to = new_states() + state_of(call_.state == nullptr ? slot_of_entry : first_ + e);
        if (lane_id() == 0 && alike(state, to)) {
            const std::uint32_t odd = odd_bytes(state);
            store_bulk(reinterpret_cast<unsigned char*>(to) + odd,
                       stage_address(stage) + offset_of(state) + odd, stored_bytes(odd));
            bulk_commit();
        }
    }
    __device__ void bring() {
        std::int32_t my_slot;
        const unsigned entries = find_own(my_slot);
        cluster_wait();
        const std::int32_t free = Memory::free_stages(rows_.count(), call_.cache.state_size, call_.stages);
        std::int32_t n = 0, stored = 0;  // states so far
        std::int32_t mine = 0;           // lane n: the entry of the n-th
        const auto store_next = [&] {
            const std::int32_t e = __shfl_sync(all_lanes, mine, stored);
            store(stored, e, __shfl_sync(all_lanes, my_slot, e));
            ++stored;
        };
        for (std::int32_t e = 0; e < count_; ++e) {
            const std::int32_t slot_of_entry = __shfl_sync(all_lanes, my_slot, e);
            if (!has(entries, e)) {
                continue;
            }
            if (n == free) {
                barrier_wait(shared_address(&memory_.tokens->joined), 0);
            }
            if (n >= call_.stages) {
                store_next();
                if (lane_id() == 0) {
                    bulk_wait_read<0>();
                }
            }
            mine = lane_id() == n ? e : mine;
            if (lane_id() == 0) {
                issue(call_.cache.state + state_of(slot_of_entry), n);
            }
            ++n;
        }
        while (stored < n) {
            store_next();
        }
        if (lane_id() == 0) {
            bulk_wait_read<0>();
        }
    }

    const Launch& call_;
    const int warp_ = whole_warp_id();
    mlstm_rows rows_;
    std::int32_t inputs_, folds_;
    Memory memory_;
    std::int32_t block_, head_, fold_ = 0, column_ = 0;
    std::int32_t first_of_all_, first_;  // entries of the cluster, of the block
    std::int32_t all_, count_;           // how many
    std::int32_t taken_ = 0;             // states so far, as the warp's role counts them
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
