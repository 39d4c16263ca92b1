// What a block of agent_chunk_states.cuh brings to shared memory: numbers of the chunks of its segment, and a
// ring of the rows that they add.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/chunk_states_memory.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A block's part and segment, and the ring through which rows come. Template arguments: chunk_states_agent.
template <class T, int F, int V, int FS, int VS, bool Backward, bool SegmentStates, bool Hopper>
struct chunk_states_ring {
    using E = mlstm_element<T>;
    using memory_type = mlstm_chunk_states_memory<E, FS, VS, Hopper>;
    static constexpr int threads = mlstm_chunk_states_threads<Hopper>;
    static constexpr int stages = memory_type::stages, batch = memory_type::batch;
    static constexpr int WM = memory_type::down, WN = memory_type::across;
    static constexpr int NI = VS / 8 / WN, parts = F / FS * (V / VS);
    static constexpr int direction = Backward ? -scorer_chunk : scorer_chunk;

#if KVPOLICY_HOPPER_CODE
    /// Hopper: the left side of a step's product, made while the step before is multiplied.
    using product_type = mlstm_outer_product<E>;
#else
    struct product_type {};
#endif

    const mlstm_params<T>& params;
    const memory_type memory;
    const std::int32_t block;
    // The last segment adds to no other: Ends leaves it out.
    const std::int32_t num_segments, plane, segment, chunks, begun, count;
    const int f0, part_v, v0, thread, lane, m0, wn, n0;
    const std::int64_t first_chunk, first_row;
    // Where the rows of the next step to load are; prefetch takes the steps in order.
    const E *next_a, *next_b;
    const float *next_scale, *next_ratio;
    const E* const values;
    // Hopper: where the block's part of a state begins in the image of all of it (mlstm_params::memory).
    const E* const state_of_part;
    const float* const sums_of_part;
    const mlstm_state_part part;
    const std::int64_t partial;  // number of what the segment begins with in partial_states, plus 1

    __device__ __forceinline__ explicit chunk_states_ring(const mlstm_params<T>& of)
        : params(of),
          memory(aligned_dynamic_shared()),
          block(static_cast<std::int32_t>(blockIdx.x)),
          num_segments(SegmentStates ? of.segments - 1 : of.segments),
          plane(block / parts / num_segments),
          segment(block / parts % num_segments),
          chunks(of.streams.chunks),
          begun(segment * of.segment_chunks),
          count(min(of.segment_chunks, chunks - begun)),
          f0(block % parts / (V / VS) * FS),
          part_v(block % (V / VS)),
          v0(part_v * VS),
          thread(static_cast<int>(threadIdx.x)),
          lane(lane_id()),
          m0(warp_id() % WM * 16),
          wn(warp_id() / WM),
          n0(wn * (VS / WN)),
          first_chunk(std::int64_t{plane} * chunks),
          first_row(first_chunk * scorer_chunk),
          values(of.v + first_row * V + v0),
          state_of_part(of.memory + first_chunk * F * V + image_of_part(f0, v0)),
          sums_of_part(of.sums + first_chunk * F + f0),
          part{f0 + m0, v0 + n0, part_v == 0 && wn == 0},
          partial(std::int64_t{plane} * of.segments + segment + 1) {
        const std::int64_t from = first_row + std::int64_t{chunk_at(0)} * scorer_chunk;
        next_a = (Backward ? of.q : of.k) + from * F + f0;
        next_b = (Backward ? of.d_n : of.v) + from * V + v0;
        next_scale = (Backward ? of.state_decay : of.weight) + from;
        next_ratio = Backward ? of.d_g + from : nullptr;
    }

    __device__ __forceinline__ static constexpr int image_of_part(int f, int v) {
        return v / 64 * (F * 64) + f * 64;
    }
    __device__ __forceinline__ std::int32_t chunk_at(std::int32_t n) const {
        return Backward ? chunks - 1 - begun - n : begun + n;
    }
    __device__ __forceinline__ mlstm_state_step step_of(std::int32_t n) const {
        return memory.steps[n % (2 * batch)];
    }
    __device__ __forceinline__ int row_of(int r) const { return m0 + lane / 4 + 8 * r; }

    /// Phase 1: steps of the first chunks, then the rows of the first stages.
    __device__ __forceinline__ void fill_ring() {
        load_steps(0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < stages - 1; ++n) {
            prefetch(n, step_of(n), n);
        }
    }
    __device__ __forceinline__ void load_steps(std::int32_t base) const {
        if (thread < batch) {
            mlstm_state_step step{};
            step.ref_token = -1;
            step.before = -1;
            if (base + thread < count) {
                const std::int32_t chunk_index = chunk_at(base + thread);
                const mlstm_chunk_stats& stats = params.chunk_stats[first_chunk + chunk_index];
                step.there = stats.count > 0 ? 1 : 0;
                step.adds = step.there != 0 && (!Backward || stats.first_output < scorer_chunk) ? 1 : 0;
                step.fresh = stats.fresh;
                step.keep = stats.keep;
                step.add = Backward ? 1.0f : stats.add;
                if (!Backward) {
                    step.ref_token = stats.before;
                    step.ref_weight = stats.ref_weight;
                } else if (chunk_index + 1 <
                           chunks) {  // the reference after the chunk; a sequence's end needs none
                    step.ref_token = params.chunk_stats[first_chunk + chunk_index + 1].before;
                    step.ref_weight = params.chunk_stats[first_chunk + chunk_index + 1].ref_weight;
                }
                step.before = Hopper && step.there != 0 ? stats.before : -1;
                step.ref_weight_before = step.before >= 0 ? stats.ref_weight : 0.0f;
            }
            memory.steps[base % (2 * batch) + thread] = step;
        }
    }
    __device__ __forceinline__ void prefetch(std::int32_t n, const mlstm_state_step& step, int stage) {
        if (n < count) {
            if (step.adds != 0) {
                const shared_tile<E> tile = memory.tile(stage);
                copy_slice<scorer_chunk, FS, threads>(tile, 0, next_a, F);
                copy_slice<scorer_chunk, VS, threads>(tile, FS, next_b, V);
                copy_line(memory.scale + stage * scorer_chunk, next_scale, scorer_chunk, 0);
                if (Backward) {
                    copy_line(memory.ratio + stage * scorer_chunk, next_ratio, scorer_chunk, 32);
                }
            }
            if (!SegmentStates && step.ref_token >= 0) {
                copy_line(memory.ref_token + stage * VS, values + std::int64_t{step.ref_token} * V, VS, 64);
            }
            if (Hopper && step.there != 0) {
                const std::int64_t chunk_index = chunk_at(n);
                copy_image<FS * VS, threads>(memory.state(stage), state_of_part + chunk_index * (F * V));
                copy_line(memory.z + stage * FS, sums_of_part + chunk_index * F, FS, 112);
                if (step.before >= 0) {
                    copy_line(memory.before + stage * VS, values + std::int64_t{step.before} * V, VS, 96);
                }
            }
            next_a += direction * F;
            next_b += direction * V;
            next_scale += direction;
            next_ratio += Backward ? direction : 0;
        }
        copy_commit();
    }
    /// Multiplies the rows of step n by their scales (on Hopper: on the way to the product), and splits its
    /// ratios.
    __device__ __forceinline__ void scale_stage(std::int32_t n, const mlstm_state_step& step,
                                                int stage) const {
        if constexpr (Hopper) {  // ref_value of both references as well
            static_assert(threads == 2 * VS && !shared_tile<E>::plain);
            if (thread < VS) {
                memory.ref_value[n % 2 * (2 * VS) + thread] =
                    step.ref_token >= 0
                        ? step.ref_weight * static_cast<float>(memory.ref_token[stage * VS + thread])
                        : 0.0f;
            } else {
                memory.ref_value[n % 2 * (2 * VS) + thread] =
                    step.before >= 0
                        ? step.ref_weight_before * static_cast<float>(memory.before[stage * VS + thread - VS])
                        : 0.0f;
            }
        }
        if (step.adds == 0) {
            return;
        }
        const shared_tile<E> tile = memory.tile(stage);
        if constexpr (!Hopper) {
#pragma unroll
            for (int i = thread; i < scorer_chunk * FS / 8; i += threads) {
                const int r = i / (FS / 8), c = i % (FS / 8) * 8;
                const float by = memory.scale[stage * scorer_chunk + r] * step.add;
                float x[8];
                tile.get_eight(r, c, x);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    x[e] *= by;
                }
                tile.set_eight(r, c, x);
            }
        }
        if (Backward && thread < scorer_chunk) {
            const float ratio = memory.ratio[stage * scorer_chunk + thread];
            E* const split = memory.split + n % 2 * 2 * scorer_chunk + thread;
            split[0] = static_cast<E>(ratio);
            split[scorer_chunk] = static_cast<E>(ratio - static_cast<float>(split[0]));
        }
    }
    __device__ __forceinline__ void load_following([[maybe_unused]] product_type& following,
                                                   [[maybe_unused]] const mlstm_state_step& step,
                                                   [[maybe_unused]] int stage) const {
#if KVPOLICY_HOPPER_CODE
        if constexpr (Hopper) {
            if (step.adds != 0) {
                following.load(memory.tile(stage), memory.scale + stage * scorer_chunk, step.add);
            }
        }
#endif
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
