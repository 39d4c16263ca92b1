// segment_states on Hopper: what each segment adds to a state, starting from zero. chunk_states needs the
// state before each chunk; here only the last one counts. So the rows of a chunk are scaled by what the
// chunks after it keep, too, and a segment is one sum of products whose accumulators are not touched between
// two products. A block has the whole state. Segments are cut further, into as many parts as blocks fit on
// the GPU.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Threads of a block: a warpgroup for every 64 features of the state.
template <int F>
inline constexpr int mlstm_segment_states_threads = 2 * F;

/// A chunk's part in a segment.
struct alignas(16) mlstm_segment_step {
    float keep, add;
    std::int32_t adds, fresh;
};

template <class E, int F, int V>
struct mlstm_segment_states_memory {
    static constexpr int stages = 3, batch = 64;

    unsigned char* tiles;       // [stages]: k~ or q~, then v~ or d N
    float* scale;               // [stages][64]
    float* ratio;               // [stages][64]
    mlstm_segment_step* steps;  // [2][batch]
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_segment_states_memory(unsigned char* memory) {
        shared_parts parts(memory);
        tiles = parts.tile<E>(scorer_chunk, stages * (F + V)).data;
        scale = parts.take<float>(stages * scorer_chunk);
        ratio = parts.take<float>(stages * scorer_chunk);
        steps = parts.take<mlstm_segment_step>(2 * batch);
        bytes = parts.bytes();
    }
    [[nodiscard]] __device__ shared_tile<E> tile(int stage) const {
        return {tiles + shared_tile<E>::bytes(scorer_chunk, F + V) * stage, scorer_chunk};
    }
};

#if KVPOLICY_HOPPER_CODE
/// One block, one part of a segment (mlstm_params::cuts), and the whole state: a warp has 16 features of it.
template <class T, int F, int V, bool Backward>
struct segment_states_hopper_agent {
    using E = mlstm_element<T>;
    using memory_type = mlstm_segment_states_memory<E, F, V>;
    static_assert(!shared_tile<E>::plain);
    static constexpr int threads = mlstm_segment_states_threads<F>, stages = memory_type::stages,
                         batch = memory_type::batch;
    static constexpr int NI = V / 8;

    const mlstm_params<T>& params;
    const scorer_streams& streams;
    const memory_type memory;
    // The last segment adds to no other.
    const std::int32_t num_segments, each, plane, cut, begun, count;
    const std::int64_t first_chunk;
    const int thread, lane;

    __device__ __forceinline__ explicit segment_states_hopper_agent(const mlstm_params<T>& of)
        : params(of),
          streams(of.streams),
          memory(aligned_dynamic_shared()),
          num_segments((of.segments - 1) * of.cuts),
          each(of.segment_chunks / of.cuts),
          plane(static_cast<std::int32_t>(blockIdx.x) / num_segments),
          cut(static_cast<std::int32_t>(blockIdx.x) % num_segments),
          begun(cut * each),
          count(min(each, of.streams.chunks - begun)),
          first_chunk(std::int64_t{plane} * of.streams.chunks),
          thread(static_cast<int>(threadIdx.x)),
          lane(lane_id()) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        fill_ring();  // 1
        const mlstm_state_part part{16 * warp_id(), 0, true};
        const std::int64_t partial = std::int64_t{plane} * params.segments * params.cuts + cut;
        float acc[NI][4], of_sums[4];
        mlstm_state_part::clear(acc, of_sums);
        const float* const state = Backward || cut != 0 ? nullptr : params.state_before(plane);
        if (state != nullptr) {  // 2
            part.take(params, F, state, state + std::int64_t{params.features} * params.width, acc, of_sums);
            part.template write_partial<F, V>(params, partial, acc, of_sums);
            mlstm_state_part::clear(acc, of_sums);
        }
        float decay = 1.0f;   // of a state by the chunks after this one
        bool begins = false;  // a sequence, at or after this chunk
        int stage = 0;
        for (std::int32_t n = 0; n < count; ++n) {  // 3
            copy_wait<stages - 2>();
            fence_async_proxy();
            __syncthreads();
            prefetch(n + stages - 1, stage == 0 ? stages - 1 : stage - 1);
            const mlstm_segment_step step = memory.steps[n % (2 * batch)];
            // Nothing goes back beyond a sequence's first chunk, that chunk's own outputs included.
            begins = begins || (Backward && step.fresh != 0);
            if (step.adds != 0 && !begins) {
                add_chunk(stage, step.add * decay, acc, of_sums);
            }
            begins = begins || step.fresh != 0;
            decay *= step.keep;
            stage = stage + 1 == stages ? 0 : stage + 1;
            if (n % batch == 1) {  // the batch before is no longer read
                load_steps(n - 1 + batch);
            }
        }
        part.template write_partial<F, V>(params, partial + 1, acc, of_sums);  // 4
        if (thread == 0) {
            params.partial_keeps[partial] = begins ? -1.0f : decay;
        }
        copy_wait<0>();
    }

  private:
    /// Step n is the n-th chunk from the end of the segment.
    __device__ std::int32_t chunk_at(std::int32_t n) const {
        const std::int32_t chunk_index = begun + count - 1 - n;
        return Backward ? streams.chunks - 1 - chunk_index : chunk_index;
    }
    __device__ __forceinline__ void fill_ring() const {
        load_steps(0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < stages - 1; ++n) {
            prefetch(n, n);
        }
    }
    __device__ void load_steps(std::int32_t base) const {
        if (thread < batch) {
            mlstm_segment_step step{1.0f, 0.0f, 0, 0};
            if (base + thread < count) {
                const mlstm_chunk_stats& stats = params.chunk_stats[first_chunk + chunk_at(base + thread)];
                if (stats.count > 0) {
                    step.keep = stats.keep;
                    step.add = Backward ? 1.0f : stats.add;
                    step.adds = !Backward || stats.first_output < scorer_chunk ? 1 : 0;
                    step.fresh = stats.fresh;
                }
            }
            memory.steps[base % (2 * batch) + thread] = step;
        }
    }
    __device__ void prefetch(std::int32_t n, int stage) const {
        if (n < count && memory.steps[n % (2 * batch)].adds != 0) {
            const std::int64_t row = (first_chunk + chunk_at(n)) * scorer_chunk;
            const shared_tile<E> tile = memory.tile(stage);
            copy_slice<scorer_chunk, F, threads>(
                tile, 0, static_cast<const E*>(Backward ? params.q : params.k) + row * F, F);
            copy_slice<scorer_chunk, V, threads>(
                tile, F, static_cast<const E*>(Backward ? params.d_n : params.v) + row * V, V);
            copy_line(memory.scale + stage * scorer_chunk,
                      (Backward ? params.state_decay : params.weight) + row, scorer_chunk, 0);
            if (Backward) {
                copy_line(memory.ratio + stage * scorer_chunk, params.d_g + row, scorer_chunk, 32);
            }
        }
        copy_commit();
    }
    /// Phase 3: the chunk's outer products, times what the chunks after it keep.
    __device__ __forceinline__ void add_chunk(int stage, float by, float (&acc)[NI][4],
                                              float (&of_sums)[4]) const {
        mlstm_outer_product<E> product;
        product.load(memory.tile(stage), memory.scale + stage * scorer_chunk, by);
        if constexpr (Backward) {
            const float* const ratio = memory.ratio + stage * scorer_chunk + lane % 4 * 2;
#pragma unroll
            for (int k = 0; k < product.steps; ++k) {
                std::uint32_t split[2];  // a ratio as a rounded number and the rest
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 of = *reinterpret_cast<const float2*>(ratio + 16 * k + 8 * i);
                    rounded_pair<E> pair;
                    pair.set(of.x, of.y);
                    split[i] = lane < 4   ? pair.both
                               : lane < 8 ? pack<E>(of.x - pair.first(), of.y - pair.second())
                                          : 0u;
                }
                mma_16x8x16<E>(of_sums, product.a[k], split[0], split[1]);
            }
        } else {
            product.add_sums(of_sums, nullptr);
        }
        product.start(acc, memory.tile(stage), F);
        product.wait(acc);
    }
};
#endif

/// segment_states on Hopper, 16-bit rows: what each segment adds to a state and how much of one it keeps,
/// from zero.
/// Grid: planes x (segments - 1) x cuts. Block: 2 F threads, a warpgroup per 64 features; two blocks per
/// SM. Shared memory: mlstm_segment_states_memory<E, F, V>, 3 stages.
/// In: chunk_stats; forward rows k, v E and weight fp32; backward rows q, d_n E, state_decay and d_g fp32;
/// the caller's states. Out, overwritten: partial_states [planes, segments * cuts, F (V + 1)] fp32,
/// partial_keeps [planes, segments * cuts] fp32.
/// 1. The first stages of the ring.
/// 2. The caller's state, to number 0 of its plane. 3.
/// Per chunk, the last first: its outer products, times what the chunks after it keep; the accumulators are
/// not touched between two products.
/// 4. The sums and what the segment keeps.
template <class T, int F, int V, bool Backward>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_segment_states_threads<F>), 2)
    mlstm_segment_states_hopper_kernel([[maybe_unused]] const mlstm_params<T> params) {
#if KVPOLICY_HOPPER_CODE
    segment_states_hopper_agent<T, F, V, Backward>(params).run();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
