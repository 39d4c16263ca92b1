// fused_states_outputs: scores of an mLSTM in one pass. A block has the whole state of a plane's segment in
// its accumulators. For each chunk it reads the state, then adds the chunk to it. So states between chunks
// are not stored, which is what chunk_states and chunk_outputs spend their time on. Numbers and roundings are
// theirs.
//
// A chunk has two barriers for the whole block. The first says that its rows have arrived and that the chunk
// before is done with its shared memory; the second, that the state is in shared memory. Meanwhile the next
// chunk's rows arrive.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sixteen warps, to hide the latencies of a block that is alone on its SM.
inline constexpr int mlstm_fused_parts = 4, mlstm_fused_threads = 128 * mlstm_fused_parts;

/// Shared memory of mlstm_fused_states_outputs_kernel: what an output needs, its rows those of the present
/// chunk, and the rows of two chunks.
template <class E, int F, int V>
struct mlstm_fused_memory {
    static constexpr int stages = 2, stats_held = 4;

    shared_tile<E> q, k, v;  // of the present stage
    shared_tile<E> c, weights, z_tile;
    float* ref_value;
    float* qz;
    float2* numbers;  // [V]: the norm's gain, the readout's weight
    mlstm_sums_along<mlstm_fused_parts> sums[3];
    mlstm_exponents<E> exponents;
    shared_tile<E> first_q, first_k, first_v;  // of the first stage; the second's follow
    double *log_source, *log_top;              // [stages][64]
    float *weight, *skipped;                   // [stages][64]
    E* ref_token;                              // [stages][V]
    mlstm_chunk_stats* chunk_stats;            // [stats_held]
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_fused_memory(unsigned char* memory) {
        shared_parts parts(memory);
        first_q = {parts.tile<E>(scorer_chunk, stages * F).data, scorer_chunk};
        first_k = {parts.tile<E>(scorer_chunk, stages * F).data, scorer_chunk};
        first_v = {parts.tile<E>(scorer_chunk, stages * V).data, scorer_chunk};
        c = parts.tile<E>(F, V);
        weights = parts.tile<E>(scorer_chunk, scorer_chunk);
        z_tile = parts.tile<E>(16, F);
        ref_value = parts.take<float>(V);
        qz = parts.take<float>(scorer_chunk);
        numbers = parts.take<float2>(V);
        for (mlstm_sums_along<mlstm_fused_parts>& one : sums) {
            one.of = parts.take<float>(mlstm_fused_parts * scorer_chunk);
        }
        exponents.take(parts);
        log_source = parts.take<double>(stages * scorer_chunk);
        log_top = parts.take<double>(stages * scorer_chunk);
        weight = parts.take<float>(stages * scorer_chunk);
        skipped = parts.take<float>(stages * scorer_chunk);
        ref_token = parts.take<E>(stages * V);
        chunk_stats = parts.take<mlstm_chunk_stats>(stats_held);
        bytes = parts.bytes();
    }
    __device__ void at_stage(int stage) {
        q = first_q.from(stage * F);
        k = first_k.from(stage * F);
        v = first_v.from(stage * V);
    }
};

/// One block: all of a plane's segment. WM x WN warps have the state in registers, 16 features and 8 NI
/// values each.
template <class T, int F, int V>
struct fused_states_outputs_agent {
    using E = mlstm_element<T>;
    using memory_type = mlstm_fused_memory<E, F, V>;
    static_assert(!shared_tile<E>::plain);
    static constexpr int stages = memory_type::stages, stats_held = memory_type::stats_held;
    static constexpr int threads = mlstm_fused_threads, parts = mlstm_fused_parts;
    static constexpr int WM = F / 16, WN = threads / 32 / WM, NI = V / 8 / WN;
    // Arrays in registers are objects of run(), one each (agent_chunk_states.cuh says why).
    using state_type = float[NI][4];
    using sums_type = float[4];
    using reads_type = mlstm_chunk_outputs<V, parts>;

    const mlstm_params<T>& params;
    const scorer_streams& streams;
    memory_type& memory;
    const std::int32_t plane, segment, begun, count;
    const std::int64_t first_chunk;
    const int thread, lane;
    const mlstm_state_part part;
    float bias;
    scorer_span s;
    float* scores;

    __device__ __forceinline__ fused_states_outputs_agent(const mlstm_params<T>& of, memory_type& shared)
        : params(of),
          streams(of.streams),
          memory(shared),
          plane(static_cast<std::int32_t>(blockIdx.x) / of.segments),
          segment(static_cast<std::int32_t>(blockIdx.x) % of.segments),
          begun(segment * of.segment_chunks),
          count(min(of.segment_chunks, of.streams.chunks - begun)),
          first_chunk(std::int64_t{plane} * of.streams.chunks),
          thread(static_cast<int>(threadIdx.x)),
          lane(lane_id()),
          part{warp_id() % WM * 16, warp_id() / WM * (V / WN), warp_id() / WM == 0} {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        begin();  // 1
        state_type acc;
        sums_type of_sums;
        mlstm_state_part::clear(acc, of_sums);
        copy_wait<0>();
        __syncthreads();
        fetch(0);
        part.template begin<F, V>(params, plane, segment, false, acc, of_sums);
        for (std::int32_t n = 0; n < count; ++n) {
            copy_wait<0>();
            __syncthreads();
            fetch(n + 1);  // 2
            const mlstm_chunk_stats& stats = memory.chunk_stats[n % stats_held];
            if (stats.count == 0) {
                continue;
            }
            const int stage = n % stages;
            memory.at_stage(stage);
            if (stats.fresh != 0) {
                mlstm_state_part::clear(acc, of_sums);
            }
            const bool has_outputs = stats.first_output < stats.count;
            reads_type values;
            if (has_outputs) {
                store_state(stats, stage, acc, of_sums);  // 3
                mlstm_query_rows<E, F> query;             // 4
                query.load(memory.q);
                float products[1][scorer_chunk / parts / 8][4];
                multiply_pairs<parts>(products, query, memory.k);
                __syncthreads();
                multiply_state(values, query, memory.c);
                weigh_pairs<E, parts>(memory, query, products);
            }
            add_chunk(stats, stage, acc, of_sums);  // 5
            if (has_outputs) {
                sync_rows<parts>();  // the weights of these rows are complete
                apply_pairs(memory, values);
                write_scores(n, stage, stats, values);  // 6
            }
        }
        if (segment == params.segments - 1) {
            part.end(params, plane, F, acc, of_sums);  // 7
        }
    }

  private:
    /// Phase 1: the numbers of the first chunk, and what all chunks share.
    __device__ __forceinline__ void begin() {
        copy_stats(0);
        copy_commit();
        const float blank[8] = {};
        for (int i = thread; i < 16 * F / 8; i += threads) {
            memory.z_tile.set_eight(i / (F / 8), i % (F / 8) * 8, blank);
        }
        load_readout<V, threads>(params, plane, memory.numbers);
        bias = params.readout_bias != nullptr ? params.readout_bias[plane % streams.heads] : 0.0f;
        s = streams.span(plane, begun);
        scores = params.scores.head(s.b, s.h);
    }
    /// By the last four threads.
    __device__ void copy_stats(std::int32_t n) const {
        const int i = thread - (threads - 4);
        static_assert(sizeof(mlstm_chunk_stats) == 64);
        if (n < count && i >= 0) {
            copy_16(shared_address(memory.chunk_stats + n % stats_held) + static_cast<std::uint32_t>(16 * i),
                    reinterpret_cast<const unsigned char*>(params.chunk_stats + first_chunk + begun + n) +
                        16 * i);
        }
    }
    /// The rows of chunk n, whose numbers have arrived, and the next chunk's numbers.
    __device__ void fetch(std::int32_t n) const {
        copy_stats(n + 1);
        if (n < count) {
            const mlstm_chunk_stats& stats = memory.chunk_stats[n % stats_held];
            const int stage = n % stages;
            const std::int64_t row = (first_chunk + begun + n) * scorer_chunk;
            if (stats.count > 0) {
                copy_slice<scorer_chunk, F, threads>(memory.first_k.from(stage * F), 0,
                                                     static_cast<const E*>(params.k) + row * F, F);
                copy_slice<scorer_chunk, V, threads>(memory.first_v.from(stage * V), 0,
                                                     static_cast<const E*>(params.v) + row * V, V);
                copy_line(memory.weight + stage * scorer_chunk, params.weight + row, scorer_chunk, 0);
            }
            if (stats.first_output < stats.count) {
                copy_slice<scorer_chunk, F, threads>(memory.first_q.from(stage * F), 0,
                                                     static_cast<const E*>(params.q) + row * F, F);
                copy_line(memory.log_source + stage * scorer_chunk, params.log_source + row, scorer_chunk,
                          32);
                copy_line(memory.log_top + stage * scorer_chunk, params.log_top + row, scorer_chunk, 64);
                if (params.skip != nullptr) {
                    copy_line(memory.skipped + stage * scorer_chunk, params.skipped + row, scorer_chunk, 96);
                }
                if (stats.before >= 0) {
                    copy_line(
                        memory.ref_token + stage * V,
                        static_cast<const E*>(params.v) + (first_chunk * scorer_chunk + stats.before) * V, V,
                        128);
                }
            }
        }
        copy_commit();
    }
    /// Phase 3: the state before the chunk, less z ref_value^T and rounded, and z, to shared memory.
    __device__ __forceinline__ void store_state(const mlstm_chunk_stats& stats, int stage,
                                                const state_type& acc, const sums_type& of_sums) const {
        if (thread < V) {
            memory.ref_value[thread] =
                stats.before >= 0
                    ? stats.ref_weight * static_cast<float>(memory.ref_token[stage * V + thread])
                    : 0.0f;
        }
        memory.exponents.load(memory.log_source + stage * scorer_chunk, memory.log_top + stage * scorer_chunk,
                              stats.m);
        float ref_value[NI][2] = {};
        if (stats.before >= 0) {
            const E* const value = memory.ref_token + stage * V;
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                ref_value[j][0] = stats.ref_weight * static_cast<float>(value[part.value(j)]);
                ref_value[j][1] = stats.ref_weight * static_cast<float>(value[part.value(j) + 1]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float z = __shfl_sync(all_lanes, of_sums[2 * r] + of_sums[2 * r + 1], lane & ~3);
            const auto row = memory.c.pairs_of(part.feature(r), part.value(0));
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                static_assert(NI <= 8);
                row.set(j, acc[j][2 * r] - z * ref_value[j][0], acc[j][2 * r + 1] - z * ref_value[j][1]);
            }
            if (part.owns_sums && lane % 4 < 2) {  // z rounded, and what rounding takes away
                const float rounded = static_cast<float>(static_cast<E>(z));
                *reinterpret_cast<E*>(memory.z_tile.data + memory.z_tile.offset(lane % 4, part.feature(r))) =
                    static_cast<E>(lane % 4 == 0 ? z : z - rounded);
            }
        }
    }
    /// Phase 5: decay, then the chunk's outer products.
    __device__ __forceinline__ void add_chunk(const mlstm_chunk_stats& stats, int stage, state_type& acc,
                                              sums_type& of_sums) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                acc[j][e] *= stats.keep;
            }
            of_sums[e] *= stats.keep;
        }
        add_scaled_outer<NI>(acc, of_sums, memory.k, part.m0, memory.v, part.n0,
                             memory.weight + stage * scorer_chunk, stats.add);
    }
    /// Phase 6: scores of the chunk's outputs.
    __device__ __forceinline__ void write_scores(std::int32_t n, int stage, const mlstm_chunk_stats& stats,
                                                 reads_type& values) {
        if (streams.edges != nullptr) {
            s = streams.span(plane, begun + n);
        } else {
            s.first = s.from + (begun + n) * scorer_chunk;
        }
        const auto number = [&](int i, float& gain, float& readout) {
            gain = memory.numbers[i].x;
            readout = memory.numbers[i].y;
        };
        const auto added = [&](int l) {
            return bias + (params.skip != nullptr ? memory.skipped[stage * scorer_chunk + l] : 0.0f);
        };
        score_outputs<E>(params, memory, scores + (s.first - streams.delay), stats.first_output, stats.count,
                         stats.bad, values, number, added);
    }
};

/// fused_states_outputs, portable, 16-bit rows: scores without states in memory.
/// Grid: planes x segments. Block: 512 threads, sixteen warps. Shared memory: mlstm_fused_memory<E, F, V>, 2
/// stages.
/// In: rows q, k [.., F], v [.., V] E; log_source, log_top, weight, skipped; chunk_stats; partial_states of
/// segment_scan; readout, norm_gain, readout_bias.
/// Out: scores [B, heads, S] fp32, overwritten. The last segment overwrites the caller's states.
/// 1. The numbers of the first chunk, what all chunks share, and the state that the segment begins with.
/// Per chunk: 2. the next chunk's rows are copied.
/// 3. The state, less z ref_value^T and rounded, to shared memory.
/// 4. The chunk's outputs from the state and from its own tokens.
/// 5. Decay, and the chunk's outer products.
/// 6. Scores.
/// 7. The caller's state.
template <class T, int F, int V>
__global__ void __launch_bounds__(mlstm_fused_threads)
    mlstm_fused_states_outputs_kernel([[maybe_unused]] const mlstm_params<T> params) {
    if constexpr (portable_code<T>) {
        mlstm_fused_memory<mlstm_element<T>, F, V> memory(aligned_dynamic_shared());
        fused_states_outputs_agent<T, F, V>(params, memory).run();
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
