// What segments of a scan over chunks add to a state, on Hopper, where each begins from nothing: unlike a scan over chunks that stores states it need not go from
// chunk to chunk. A chunk's rows are scaled by what the chunks after it keep of a state, and then all of a segment is one sum of products.
#pragma once

#include <kvpolicy/cuda/config.cuh>
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

/// As mlstm_chunk_states_kernel with Ends, a block a part of a segment (mlstm_params::cuts).
template <class T, int F, int V, bool Backward>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_segment_states_threads<F>), 2)
    mlstm_segment_states_hopper_kernel([[maybe_unused]] const mlstm_params<T> params) {
#if KVPOLICY_HOPPER_CODE
    using E = mlstm_element<T>;
    using memory_type = mlstm_segment_states_memory<E, F, V>;
    static_assert(!shared_tile<E>::plain);
    constexpr int threads = mlstm_segment_states_threads<F>, stages = memory_type::stages,
                  batch = memory_type::batch;
    constexpr int NI = V / 8;
    const scorer_streams& streams = params.streams;
    const memory_type memory(aligned_dynamic_shared());
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t num_segments = (params.segments - 1) * params.cuts;  // the last segment adds to nobody
    const std::int32_t each = params.segment_chunks / params.cuts;
    const std::int32_t plane = block / num_segments, cut = block % num_segments, begun = cut * each;
    const std::int32_t count = min(each, streams.chunks - begun);
    const std::int64_t first_chunk = std::int64_t{plane} * streams.chunks;
    const int thread = static_cast<int>(threadIdx.x), lane = lane_id();
    // Step n is the segment's last chunk but n.
    const auto chunk_at = [&](std::int32_t n) {
        const std::int32_t chunk_index = begun + count - 1 - n;
        return Backward ? streams.chunks - 1 - chunk_index : chunk_index;
    };
    const auto load_steps = [&](std::int32_t base) {
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
    };
    const auto prefetch = [&](std::int32_t n, int stage) {
        if (n < count && memory.steps[n % (2 * batch)].adds != 0) {
            const std::int64_t row = (first_chunk + chunk_at(n)) * scorer_chunk;
            const shared_tile<E> tile = memory.tile(stage);
            copy_slice<scorer_chunk, F, threads>(
                tile, 0, static_cast<const E*>(Backward ? params.q : params.k) + row * F, F);
            copy_slice<scorer_chunk, V, threads>(
                tile, F, static_cast<const E*>(Backward ? params.d_n : params.v) + row * V, V);
            copy_line(memory.scale + stage * scorer_chunk, (Backward ? params.kept : params.weight) + row,
                      scorer_chunk, 0);
            if (Backward) {
                copy_line(memory.ratio + stage * scorer_chunk, params.d_g + row, scorer_chunk, 32);
            }
        }
        copy_commit();
    };
    load_steps(0);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < stages - 1; ++n) {
        prefetch(n, n);
    }
    const mlstm_state_part part{16 * warp_id(), 0, true};
    const std::int64_t partial = std::int64_t{plane} * params.segments * params.cuts + cut;
    float acc[NI][4], of_sums[4];
    mlstm_state_part::clear(acc, of_sums);
    if (!Backward && cut == 0 && part.takes_state(params, plane)) {
        const float* const state = part.state_of(params, plane);
        part.take(params, F, state, state + std::int64_t{params.features} * params.width, acc, of_sums);
        part.template write_partial<F, V>(params, partial, acc, of_sums);
        mlstm_state_part::clear(acc, of_sums);
    }
    float kept = 1.0f;    // of a state by the chunks after this one
    bool begins = false;  // a stream, at or after this chunk
    int stage = 0;
    for (std::int32_t n = 0; n < count; ++n) {
        copy_wait<stages - 2>();
        fence_async_proxy();
        __syncthreads();
        prefetch(n + stages - 1, stage == 0 ? stages - 1 : stage - 1);
        const mlstm_segment_step step = memory.steps[n % (2 * batch)];
        // Nothing goes back beyond a stream's first chunk, that chunk's own outputs included.
        begins = begins || (Backward && step.fresh != 0);
        if (step.adds != 0 && !begins) {
            mlstm_outer_product<E> product;
            product.load(memory.tile(stage), memory.scale + stage * scorer_chunk, step.add * kept);
            if constexpr (Backward) {
                const float* const ratio = memory.ratio + stage * scorer_chunk + lane % 4 * 2;
#pragma unroll
                for (int k = 0; k < product.steps; ++k) {
                    std::uint32_t split[2];  // a ratio rounded, and what rounding takes away
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
        begins = begins || step.fresh != 0;
        kept *= step.keep;
        stage = stage + 1 == stages ? 0 : stage + 1;
        if (n % batch == 1) {  // nobody looks at the batch before any more
            load_steps(n - 1 + batch);
        }
    }
    part.template write_partial<F, V>(params, partial + 1, acc, of_sums);
    if (thread == 0) {
        params.partial_keeps[partial] = begins ? -1.0f : kept;
    }
    copy_wait<0>();
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
