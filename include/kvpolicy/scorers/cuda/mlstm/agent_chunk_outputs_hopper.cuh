// The outputs of an mLSTM's chunk by one warpgroup, which the kernels that score
// (kernel_fused_states_outputs_hopper.cuh) and that make gradients (kernel_chunk_outputs_backward_hopper.cuh)
// share: what one thread needs of a row is in four lanes, weights of pairs go from one product to the next in
// registers, and no two warps wait for each other but where tiles change hands.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int mlstm_warpgroup_threads = 128;
/// Blocks per SM.
template <int V>
inline constexpr int mlstm_chunk_outputs_blocks = V == 64 ? 3 : 2;

/// Shared memory of a block that reads one chunk after another.
template <class E, int F, int V>
struct mlstm_output_tiles {
    shared_tile<E> q, k, v, c;
    shared_tile<E> z_tile;  // z in two rows, rounded and what rounding takes away; of 8
    float* z;
    float* ref_value;
    float2* numbers;  // [V]: the norm's gain, the readout's weight
    mlstm_exponents<E> exponents;

    KVPOLICY_HOST_DEVICE explicit mlstm_output_tiles(shared_parts& parts) {
        q = parts.tile<E>(scorer_chunk, F);
        k = parts.tile<E>(scorer_chunk, F);
        v = parts.tile<E>(scorer_chunk, V);
        c = parts.tile<E>(F, V);
        z_tile = parts.tile<E>(8, F);
        z = parts.take<float>(F);
        ref_value = parts.take<float>(V);
        numbers = parts.take<float2>(V);
        exponents.take(parts);
    }

    /// Rows of z_tile that stay 0.
    __device__ void clear_sums() const {
        const float blank[8] = {};
        for (int i = static_cast<int>(threadIdx.x); i < 8 * F / 8; i += mlstm_warpgroup_threads) {
            z_tile.set_eight(i / (F / 8), i % (F / 8) * 8, blank);
        }
    }
    template <class T>
    __device__ void load_state(const mlstm_params<T>& params, std::int32_t chunk) const {
        copy_image<F * V, mlstm_warpgroup_threads>(
            c, static_cast<const E*>(params.memory) + std::int64_t{chunk} * (F * V));
        copy_slice<scorer_chunk, V, mlstm_warpgroup_threads>(
            v, 0, static_cast<const E*>(params.v) + std::int64_t{chunk} * (scorer_chunk * V), V);
    }
    template <class T>
    __device__ void load_queries(const mlstm_params<T>& params, std::int32_t chunk) const {
        copy_slice<scorer_chunk, F, mlstm_warpgroup_threads>(
            q, 0, static_cast<const E*>(params.q) + std::int64_t{chunk} * (scorer_chunk * F), F);
    }
    template <class T>
    __device__ void load_keys(const mlstm_params<T>& params, std::int32_t chunk) const {
        copy_slice<scorer_chunk, F, mlstm_warpgroup_threads>(
            k, 0, static_cast<const E*>(params.k) + std::int64_t{chunk} * (scorer_chunk * F), F);
    }
    /// What does not come by copies, from registers. The caller synchronizes.
    template <class T, class Numbers>
    __device__ void store_numbers(const mlstm_params<T>& params, const Numbers& from) const {
        const auto thread = static_cast<int>(threadIdx.x);
        if (thread < F) {
            const E rounded = static_cast<E>(from.z);
            z[thread] = from.z;
            *reinterpret_cast<E*>(z_tile.data + z_tile.offset(0, thread)) = rounded;
            *reinterpret_cast<E*>(z_tile.data + z_tile.offset(1, thread)) =
                static_cast<E>(from.z - static_cast<float>(rounded));
        }
        if (thread < V) {
            const bool gained = thread < params.width && params.norm_gain != nullptr;
            ref_value[thread] = from.ref_weight * static_cast<float>(from.ref_token);
            numbers[thread] = make_float2(gained ? from.gain : 1.0f, from.readout);
        }
        if (thread < scorer_chunk) {
            exponents.set(from.source, from.top, from.last, from.m);
        }
    }
};

/// What a block must know of a chunk before it loads anything of it.
struct mlstm_output_stats {
    double m;
    float ref_weight;
    std::int32_t first_output, count, bad, before;

    /// No tokens where there is no such chunk. What is not used is not loaded, since its register would
    /// be waited for.
    template <bool Bad, bool Reference, class T>
    __device__ void load(const mlstm_params<T>& params, std::int32_t chunk, std::int32_t chunks) {
        const mlstm_chunk_stats* const stats = params.chunk_stats + chunk;
        const bool there = chunk < chunks;
        m = load_if(there, &stats->m);
        first_output = load_if(there, &stats->first_output);
        count = load_if(there, &stats->count);
        if constexpr (Bad) {
            bad = load_if(there, &stats->bad);
        }
        if constexpr (Reference) {
            ref_weight = load_if(there, &stats->ref_weight);
            before = load_if(there, &stats->before);
        }
    }
    [[nodiscard]] __device__ bool has_outputs() const { return first_output < count; }
};

/// A thread's share of a chunk's numbers, on their way from global memory while the chunk before is still at
/// work.
template <class E, int F, int V>
struct mlstm_output_numbers {
    double source, top, last, m;
    float z, ref_weight;
    E ref_token;          // of the value that is the reference
    float gain, readout;  // the norm's gain, the readout's weight

    /// Nothing where the chunk does not read.
    template <class T>
    __device__ void load(const mlstm_params<T>& params, std::int32_t chunk, const mlstm_output_stats& stats) {
        const auto thread = static_cast<int>(threadIdx.x);
        const std::int32_t plane = chunk / params.streams.chunks, head = plane % params.streams.heads;
        const std::int64_t row = std::int64_t{chunk} * scorer_chunk;
        const bool any = stats.has_outputs(), of_row = any && thread < scorer_chunk,
                   of_value = any && thread < params.width;
        m = stats.m;
        source = load_if(of_row, params.log_source + row + thread);
        top = load_if(of_row, params.log_top + row + thread);
        last = load_if(of_row, params.log_top + row + scorer_chunk - 1);
        z = load_if(any && thread < F, params.sums + std::int64_t{chunk} * F + thread);
        const std::int64_t at = std::int64_t{head} * params.width + thread;
        gain = load_if(of_value && params.norm_gain != nullptr, params.norm_gain + at);
        readout = load_if(of_value, params.readout + at);
        ref_weight = stats.ref_weight;
        const std::int64_t reference =
            std::int64_t{plane} * params.streams.chunks * scorer_chunk + stats.before;
        ref_token = load_if(any && thread < V && stats.before >= 0, params.v + reference * V + thread);
    }
};

#if KVPOLICY_HOPPER_CODE
/// find_means of a warpgroup's rows, whose values are in the lanes of a quad,
template <int N>
__device__ inline void find_row_means(const float (&n)[N], std::int32_t width, float (&mean)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
            sum += n[4 * j + 2 * r] + n[4 * j + 2 * r + 1];
        }
        mean[r] = row_sum(sum) / static_cast<float>(width);
    }
}
/// and add_to_values.
template <int N>
__device__ inline void add_to_row_values(float (&n)[N], std::int32_t width, const float (&by)[2],
                                         float times) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        n[i] = 8 * (i / 4) + lane_id() % 4 * 2 + i % 2 < width ? fmaf(times, by[i / 2 % 2], n[i]) : n[i];
    }
}

/// A thread's two rows of a chunk's outputs: N, its divisor, and what weights of pairs are made of.
template <class E, int F, int V>
struct mlstm_warpgroup_outputs {
    float n[V / 2];
    float divisor[2], state_decay[2], most[2];
    float weights[32];  // of pairs

    __device__ static int row(int r) { return 16 * (warp_id() % 4) + lane_id() / 4 + 8 * r; }
    __device__ static int column() { return lane_id() % 4 * 2; }
    /// exp(s_j - M_l) of columns 8 j + column() and the next, 0 for a token after the output.
    template <class Memory>
    __device__ void weigh(const Memory& memory, int j, int r, float (&w)[2]) const {
        const float2 source = *reinterpret_cast<const float2*>(memory.exponents.source + 8 * j + column());
        w[0] = 8 * j + column() <= row(r) ? fast_exp2(source.x - most[r]) : 0.0f;
        w[1] = 8 * j + column() + 1 <= row(r) ? fast_exp2(source.y - most[r]) : 0.0f;
    }
    /// All of it, once the tiles are there. Few: with few registers, one product after the other.
    template <bool Few = false, class Memory>
    __device__ void compute(const Memory& memory) {
        float pairs[32], of_z[4];
        std::uint32_t held[4][4];  // weights of pairs, rounded
        wgmma_fence();
        start_product<F, false>(pairs, memory.q, memory.k);
        start_product<F, false>(of_z, memory.q, memory.z_tile);
        wgmma_commit();
        if constexpr (!Few) {
            start_product<F, true>(n, memory.q, memory.c);
            wgmma_commit();
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state_decay[r] = memory.exponents.state_decay[row(r)];
            most[r] = memory.exponents.most[row(r)];
            divisor[r] = 0.0f;
        }
        wgmma_wait<Few ? 0 : 1>();
        pin(pairs);
        pin(of_z);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float w[2];
                weigh(memory, j, r, w);
                weights[4 * j + 2 * r] = w[0];
                weights[4 * j + 2 * r + 1] = w[1];
                rounded_pair<E> pair;
                pair.set(pairs[4 * j + 2 * r] * w[0], pairs[4 * j + 2 * r + 1] * w[1]);
                divisor[r] += pair.first() + pair.second();
                held[j / 2][j % 2 * 2 + r] = pair.both;
            }
        }
        if constexpr (Few) {
            pin(held);
            wgmma_fence();
            start_product<F, true>(n, memory.q, memory.c);
            wgmma_commit();
        }
        float qz[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            qz[r] = __shfl_sync(all_lanes, of_z[2 * r] + of_z[2 * r + 1], lane_id() & ~3);
            divisor[r] = state_decay[r] * qz[r] + row_sum(divisor[r]);
        }
        wgmma_wait<0>();
        pin(n);
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
            const float2 ref_value = *reinterpret_cast<const float2*>(memory.ref_value + 8 * j + column());
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                n[4 * j + 2 * r] = state_decay[r] * fmaf(qz[r], ref_value.x, n[4 * j + 2 * r]);
                n[4 * j + 2 * r + 1] = state_decay[r] * fmaf(qz[r], ref_value.y, n[4 * j + 2 * r + 1]);
            }
        }
        pin(n);
        pin(held);
        wgmma_fence();
        start_held_product<true>(n, held, memory.v, true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(n);
        pin(held);
    }
    /// Scores of the rows, before bias and skip; numbers: the norm's gain and the readout's weight of each
    /// value. A LayerNorm takes their means from n.
    template <class T>
    __device__ void score(const mlstm_params<T>& params, const float2* numbers, float (&score)[2]) {
        const bool norm = params.norm_gain != nullptr;
        float scale[2];
        if (params.centered) {
            float mean[2];
            find_row_means(n, params.width, mean);
            add_to_row_values(n, params.width, mean, -1.0f);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            score[r] = 0.0f;
            scale[r] = __fdividef(1.0f, divisor[r] < mlstm_clamp ? mlstm_clamp : divisor[r]);
            if (norm) {
                float square = 0.0f;
#pragma unroll
                for (int i = 0; i < V / 4; ++i) {
                    const float h = n[4 * (i / 2) + 2 * r + i % 2] * scale[r];
                    square = fmaf(h, h, square);
                }
                scale[r] *= rsqrtf(row_sum(square) / static_cast<float>(params.width) + mlstm_norm_epsilon);
            }
        }
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
            const float4 both = *reinterpret_cast<const float4*>(numbers + 8 * j + column());
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float x[2] = {n[4 * j + 2 * r] * scale[r] * both.x,
                                    n[4 * j + 2 * r + 1] * scale[r] * both.z};
                score[r] = fmaf(x[0] * sigmoid<E>(x[0]), both.y, score[r]);
                score[r] = fmaf(x[1] * sigmoid<E>(x[1]), both.w, score[r]);
            }
        }
#pragma unroll
        for (float& one : score) {
            one = row_sum(one);
        }
    }
};
#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
