// fused_states_outputs on Hopper. A block has the whole state of a plane's segment in the accumulators of
// warpgroups that only add chunks to it. Before each chunk they leave it in shared memory, rounded. Other
// warpgroups read the chunk from there, down to scores, while the first go on. One more warpgroup loads rows
// and numbers. States go to memory only where a backward pass wants them. A backward pass that makes them
// itself wants no scores.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/pipeline_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Warpgroups of a block: two that read, one for every 64 features of the state, and one that brings rows.
template <int F>
struct mlstm_fused_warpgroups {
    static constexpr int output_groups = 2, adders = F / 64, all = output_groups + adders + 1;
    static constexpr int threads = 128 * all;
    static constexpr int first_adder = 128 * output_groups,
                         first_loader = 128 * (output_groups + adders);  // threads
    // Registers of a thread: what a launch of so many threads gives each, and who has how many of them then.
    static constexpr int at_first = all == 5 ? 96 : 128, of_adder = 112, of_loader = 32;
    static constexpr int of_output_group =
        (at_first * all - of_adder * adders - of_loader) / output_groups / 8 * 8;
    static constexpr bool few = of_output_group < 168;  // too few for two products of an output at once
};
template <int F>
inline constexpr int mlstm_fused_hopper_threads = mlstm_fused_warpgroups<F>::threads;

/// A chunk's numbers in shared memory.
template <int V>
struct alignas(16) mlstm_fused_chunk {
    float weight[scorer_chunk];
    float source[scorer_chunk], most[scorer_chunk], state_decay[scorer_chunk];
    float added[scorer_chunk];  // what a score has besides
    float ref_value[V];
    mlstm_chunk_stats stats;
};

/// Shared memory of mlstm_fused_states_outputs_hopper_kernel: rings of chunks, and of states before them.
template <class E, int F, int V>
struct mlstm_fused_hopper_memory {
    static constexpr int stages = 3, held = 2;
    static constexpr int tile_bytes = scorer_chunk * (2 * F + V) * 2;

    unsigned char* tiles;          // [stages]: q~, k~, v~
    unsigned char* states;         // [held]
    unsigned char* sums;           // [held][8][F]: z in two rows, rounded and what rounding takes away
    mlstm_fused_chunk<V>* chunks;  // [stages]
    float2* numbers;               // [V]: the norm's gain, the readout's weight
    std::uint64_t* barriers;       // chunks [stages] full, [stages] free, states [held] full, [held] free
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_fused_hopper_memory(unsigned char* memory) {
        shared_parts parts(memory);
        tiles = parts.tile<E>(scorer_chunk, stages * (2 * F + V)).data;
        states = parts.tile<E>(F, held * V).data;
        sums = parts.tile<E>(8, held * F).data;
        chunks = parts.take<mlstm_fused_chunk<V>>(stages);
        numbers = parts.take<float2>(V);
        barriers = parts.take<std::uint64_t>(2 * (stages + held));
        bytes = parts.bytes();
    }
    __device__ shared_tile<E> queries(int stage) const { return {tiles + stage * tile_bytes, scorer_chunk}; }
    __device__ shared_tile<E> keys(int stage) const {
        return {tiles + stage * tile_bytes + scorer_chunk * F * 2, scorer_chunk};
    }
    __device__ shared_tile<E> values(int stage) const {
        return {tiles + stage * tile_bytes + scorer_chunk * F * 4, scorer_chunk};
    }
    __device__ shared_tile<E> state(int i) const { return {states + i * (F * V * 2), F}; }
    __device__ shared_tile<E> sums_of(int i) const { return {sums + i * (8 * F * 2), 8}; }
    __device__ std::uint32_t full(int stage) const { return shared_address(barriers + stage); }
    __device__ std::uint32_t free(int stage) const { return shared_address(barriers + stages + stage); }
    __device__ std::uint32_t full_state(int i) const { return shared_address(barriers + 2 * stages + i); }
    __device__ std::uint32_t free_state(int i) const {
        return shared_address(barriers + 2 * stages + held + i);
    }
};

#if KVPOLICY_HOPPER_CODE
/// Where a block is in its plane.
struct mlstm_fused_range {
    std::int32_t plane, segment, first, count;  // chunks of all planes, from first on
};

/// What the loading warpgroup must know of a chunk before it loads its rows.
struct fused_chunk_numbers {
    double m;
    float ref_weight;
    std::int32_t before, first_output, count;

    template <class T>
    __device__ void load(const mlstm_params<T>& of, const mlstm_fused_range& in, std::int32_t n) {
        const bool there = n < in.count;
        const mlstm_chunk_stats* const stats = of.chunk_stats + (in.first + n);
        m = load_if(there, &stats->m);
        ref_weight = load_if(there, &stats->ref_weight);
        before = load_if(there, &stats->before);
        first_output = load_if(there, &stats->first_output);
        count = load_if(there, &stats->count);
    }
};

/// Brings one chunk after another. Numbers come a chunk ahead of their rows, in registers.
template <class T, int F, int V>
__device__ inline void fused_load_rows(const mlstm_params<T>& params, const mlstm_fused_range& range,
                                       const mlstm_fused_hopper_memory<mlstm_element<T>, F, V>& memory) {
    using E = mlstm_element<T>;
    constexpr int base = mlstm_fused_warpgroups<F>::first_loader;
    const int thread = static_cast<int>(threadIdx.x) - base;
    const float bias =
        params.readout_bias != nullptr ? params.readout_bias[range.plane % params.streams.heads] : 0.0f;
    const std::int64_t plane_row = std::int64_t{range.plane} * params.streams.chunks * scorer_chunk;
    double source, top, last;
    float skipped;
    E ref_token;
    const auto load_numbers = [&](std::int32_t n, const fused_chunk_numbers& stats) {
        const bool any = params.fused_writes_scores && stats.first_output < stats.count,
                   of_row = any && thread < scorer_chunk;
        const std::int64_t row = std::int64_t{range.first + n} * scorer_chunk;
        source = load_if(of_row, params.log_source + row + thread);
        top = load_if(of_row, params.log_top + row + thread);
        last = load_if(of_row, params.log_top + row + scorer_chunk - 1);
        skipped = load_if(of_row && params.skip != nullptr, params.skipped + row + thread);
        ref_token = load_if(stats.count > 0 && thread < V && stats.before >= 0,
                            static_cast<const E*>(params.v) + (plane_row + stats.before) * V + thread);
    };
    fused_chunk_numbers stats, following;
    stats.load(params, range, 0);
    following.load(params, range, 1);
    load_numbers(0, stats);
    pipeline_state<mlstm_fused_hopper_memory<E, F, V>::stages> pipe;
    for (std::int32_t n = 0; n < range.count; ++n) {
        barrier_wait(memory.free(pipe.stage), pipe.parity ^ 1u);
        mlstm_fused_chunk<V>& chunk = memory.chunks[pipe.stage];
        const std::int64_t row = std::int64_t{range.first + n} * scorer_chunk;
        if (stats.count > 0) {
            copy_slice<scorer_chunk, F, 128>(memory.keys(pipe.stage), 0,
                                             static_cast<const E*>(params.k) + row * F, F, thread);
            copy_slice<scorer_chunk, V, 128>(memory.values(pipe.stage), 0,
                                             static_cast<const E*>(params.v) + row * V, V, thread);
            copy_line(chunk.weight, params.weight + row, scorer_chunk, base);
        }
        if (stats.count > 0 && thread < V) {
            chunk.ref_value[thread] = stats.ref_weight * static_cast<float>(ref_token);
        }
        if (params.fused_writes_scores && stats.first_output < stats.count) {
            copy_slice<scorer_chunk, F, 128>(memory.queries(pipe.stage), 0,
                                             static_cast<const E*>(params.q) + row * F, F, thread);
            if (thread < scorer_chunk) {
                mlstm_exponents<E>{chunk.source, chunk.most, chunk.state_decay}.set(
                    source, top, last, stats.m, static_cast<unsigned>(thread));
                chunk.added[thread] = bias + skipped;
            }
        }
        static_assert(sizeof(mlstm_chunk_stats) == 64);
        if (thread >= 124) {
            const int i = 16 * (thread - 124);
            copy_16(shared_address(&chunk.stats) + static_cast<std::uint32_t>(i),
                    reinterpret_cast<const unsigned char*>(params.chunk_stats + (range.first + n)) + i);
        }
        barrier_arrive_after_copies(memory.full(pipe.stage));
        barrier_arrive(memory.full(pipe.stage));
        stats = following;
        load_numbers(n + 1, stats);
        following.load(params, range, n + 2);
        pipe.advance();
    }
    copy_commit();
    copy_wait<0>();
}

/// A warp's 16 rows of the state before a chunk, less z ref_value^T and rounded, and z, to shared memory.
template <class E, int F, int NI>
__device__ __forceinline__ void store_fused_state(const mlstm_state_part& part, int warp,
                                                  const shared_tile<E>& state, const shared_tile<E>& sums,
                                                  const float* rho_of_chunk, const float (&z)[2],
                                                  const float (&acc)[NI][4]) {
    const int lane = lane_id();
    const std::uint32_t own = shared_address(state.data) + swizzled(F, 16 * warp + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < NI / 2; ++k) {
        std::uint32_t rounded[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = 2 * k + i;
            const float2 ref_value = *reinterpret_cast<const float2*>(rho_of_chunk + 8 * j + lane % 4 * 2);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rounded[2 * i + r] = pack<E>(fmaf(-z[r], ref_value.x, acc[j][2 * r]),
                                             fmaf(-z[r], ref_value.y, acc[j][2 * r + 1]));
            }
        }
        store_matrices(own_columns(own, F, k), rounded);
    }
    if (lane % 4 < 2) {  // z rounded, and what rounding takes away
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float whole = static_cast<float>(static_cast<E>(z[r]));
            *reinterpret_cast<E*>(sums.data + sums.offset(lane % 4, part.feature(r))) =
                static_cast<E>(lane % 4 == 0 ? z[r] : z[r] - whole);
        }
    }
}
/// The same rows from shared memory to the states in memory; the warp waits for the copy later.
template <int F, int V, class T, class E>
__device__ __forceinline__ void keep_fused_state(const mlstm_params<T>& params, const mlstm_state_part& part,
                                                 int warp, std::int64_t number, const shared_tile<E>& state,
                                                 const float (&z)[2]) {
    const int lane = lane_id();
    if (lane == 0) {  // the warp's 16 rows
        E* const to = params.memory + number * (F * V) + 16 * 64 * warp;
        const std::uint32_t from = shared_address(state.data) + static_cast<std::uint32_t>(16 * 128 * warp);
#pragma unroll
        for (int panel = 0; panel < V / 64; ++panel) {
            store_bulk(to + panel * (F * 64), from + static_cast<std::uint32_t>(panel * F * 128), 16 * 128);
        }
        bulk_commit();
    }
    if (lane % 4 == 0) {
        params.sums[number * F + part.feature(0)] = z[0];
        params.sums[number * F + part.feature(1)] = z[1];
    }
}

/// Waits until the copy to memory that used this place of shared memory has read it.
__device__ __forceinline__ void wait_for_stored_state(bool has_outputs, int lane) {
    if (lane == 0) {
        if (has_outputs) {
            bulk_wait_read<0>();
        } else {
            bulk_wait_read<1>();
        }
    }
    __syncwarp();
}
/// Adds one chunk after another to 64 features of the state, and leaves the state before each that is read or
/// kept.
template <class T, int F, int V>
__device__ inline void fused_add_chunks(const mlstm_params<T>& params, const mlstm_fused_range& range,
                                        const mlstm_fused_hopper_memory<mlstm_element<T>, F, V>& memory) {
    using E = mlstm_element<T>;
    constexpr int NI = V / 8;
    const int lane = lane_id(), warp = warp_id() - mlstm_fused_warpgroups<F>::first_adder / 32;
    const mlstm_state_part part{16 * warp, 0, true};
    float acc[NI][4], of_sums[4];
    mlstm_state_part::clear(acc, of_sums);
    part.template begin<F, V>(params, range.plane, range.segment, false, acc, of_sums);
    using memory_type = mlstm_fused_hopper_memory<E, F, V>;
    pipeline_state<memory_type::stages> pipe;
    pipeline_state<memory_type::held> held;
    int turn = 0;  // of two places, where no score is wanted
    for (std::int32_t n = 0; n < range.count; ++n) {
        barrier_wait(memory.full(pipe.stage), pipe.parity);
        fence_async_proxy();
        const mlstm_fused_chunk<V>& chunk = memory.chunks[pipe.stage];
        if (chunk.stats.count > 0) {
            if (chunk.stats.fresh != 0) {
                asm volatile("" ::: "memory");  // a branch: no selection of every number in every step
                mlstm_state_part::clear(acc, of_sums);
            }
            const bool has_outputs =
                params.fused_writes_scores && chunk.stats.first_output < chunk.stats.count;
            if (has_outputs || params.fused_writes_states) {
                barrier_wait(memory.free_state(held.stage), held.parity ^ 1u);
                int at = held.stage;
                if (params.fused_writes_states) {
                    if (!params.fused_writes_scores) {
                        at = turn;
                        turn ^= 1;
                    }
                    wait_for_stored_state(params.fused_writes_scores, lane);
                }
                float z[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    z[r] = __shfl_sync(all_lanes, of_sums[2 * r] + of_sums[2 * r + 1], lane & ~3);
                }
                const shared_tile<E> state = memory.state(at);
                store_fused_state<E, F>(part, warp, state, memory.sums_of(at), chunk.ref_value, z, acc);
                fence_async_proxy();
                if (has_outputs) {
                    warp_arrive(memory.full_state(held.stage), lane);
                    held.advance();
                } else {
                    __syncwarp();
                }
                if (params.fused_writes_states) {
                    keep_fused_state<F, V>(params, part, warp, range.first + n, state, z);
                }
            }
            const float keep = chunk.stats.keep;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                of_sums[e] *= keep;
#pragma unroll
                for (int j = 0; j < NI; ++j) {
                    acc[j][e] *= keep;
                }
            }
            mlstm_outer_product<E> product;
            product.load(memory.keys(pipe.stage), chunk.weight, chunk.stats.add, warp);
            product.add_sums(of_sums, nullptr);
            product.start(acc, memory.values(pipe.stage), 0);
            product.wait(acc);
        }
        warp_arrive(memory.free(pipe.stage), lane);
        pipe.advance();
    }
    if (params.fused_writes_states && lane == 0) {
        bulk_wait_read<0>();
    }
    if (range.segment == params.segments - 1) {
        part.end(params, range.plane, F, acc, of_sums);
    }
}

/// Reads one chunk after another, down to scores.
template <class T, int F, int V>
__device__ inline void fused_score_chunks(const mlstm_params<T>& params, const mlstm_fused_range& range,
                                          const mlstm_fused_hopper_memory<mlstm_element<T>, F, V>& memory) {
    using E = mlstm_element<T>;
    struct tiles_of_chunk {
        shared_tile<E> q, k, v, c, z_tile;
        const float* ref_value;
        mlstm_exponents<E> exponents;
    };
    const scorer_streams& streams = params.streams;
    const int lane = lane_id();
    const std::int32_t chunk_index = range.first - range.plane * streams.chunks;
    constexpr int output_groups = mlstm_fused_warpgroups<F>::output_groups;
    const int own = warp_id() / 4;  // of the output groups
    int turn = 0;
    scorer_span s = streams.span(range.plane, chunk_index);
    float* const scores = params.scores.head(s.b, s.h);
    using memory_type = mlstm_fused_hopper_memory<E, F, V>;
    pipeline_state<memory_type::stages> pipe;
    pipeline_state<memory_type::held> held;
    for (std::int32_t n = 0; n < range.count; ++n) {
        barrier_wait(memory.full(pipe.stage), pipe.parity);
        fence_async_proxy();
        mlstm_fused_chunk<V>& chunk = memory.chunks[pipe.stage];
        const std::int32_t skipped = chunk.stats.first_output, count = chunk.stats.count,
                           bad = chunk.stats.bad;
        const bool has_outputs = skipped < count;
        const bool mine = has_outputs && turn == own;
        if (has_outputs) {
            turn = turn + 1 == output_groups ? 0 : turn + 1;
        }
        if (mine) {
            const tiles_of_chunk tiles{memory.queries(pipe.stage),
                                       memory.keys(pipe.stage),
                                       memory.values(pipe.stage),
                                       memory.state(held.stage),
                                       memory.sums_of(held.stage),
                                       chunk.ref_value,
                                       {chunk.source, chunk.most, chunk.state_decay}};
            barrier_wait(memory.full_state(held.stage), held.parity);
            mlstm_warpgroup_outputs<E, F, V> outputs;
            outputs.template compute<mlstm_fused_warpgroups<F>::few>(tiles);
            warp_arrive(memory.free_state(held.stage), lane);
            float added[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                added[r] = chunk.added[outputs.row(r)];
            }
            warp_arrive(memory.free(pipe.stage), lane);
            float score[2];
            outputs.score(params, memory.numbers, score);
            if (streams.edges != nullptr) {
                s = streams.span(range.plane, chunk_index + n);
            } else {
                s.first = s.from + (chunk_index + n) * scorer_chunk;
            }
            float* const to = scores + (s.first - streams.delay);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int l = outputs.row(r);
                if (lane % 4 == 0 && l >= skipped && l < count) {
                    to[l] = l < bad ? score[r] + added[r] : NAN;
                }
            }
        } else {
            warp_arrive(memory.free(pipe.stage), lane);
        }
        if (has_outputs) {
            held.advance();
        }
        pipe.advance();
    }
}
#endif

/// fused_states_outputs on Hopper, 16-bit rows: scores (fused_writes_scores), states in memory
/// (fused_writes_states), or both.
/// Grid: planes x segments. Block: mlstm_fused_hopper_threads<F>: warpgroups that read (2), that add chunks
/// (F / 64), and one that loads; one block per SM. Shared memory: mlstm_fused_hopper_memory: 3
/// chunks, 2 states.
/// In: as mlstm_fused_states_outputs_kernel.
/// Out: scores [B, heads, S] fp32; memory [chunks, F V] E in the image of the tiles and sums [chunks, F]
/// fp32. Overwritten. The last segment overwrites the caller's states.
/// 1. What all chunks share; barriers. Then each role, per chunk: 2. fused_load_rows: rows and numbers to the
///    ring. 3. fused_add_chunks: the state before the chunk to shared memory (and to memory), then decay and
///    the outer products. 4. fused_score_chunks: the chunk's outputs, down to scores. The roles wait for each
///    other at mbarriers only.
template <class T, int F, int V>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_fused_hopper_threads<F>), 1)
    mlstm_fused_states_outputs_hopper_kernel([[maybe_unused]] const mlstm_params<T> params) {
#if KVPOLICY_HOPPER_CODE
    using E = mlstm_element<T>;
    using memory_type = mlstm_fused_hopper_memory<E, F, V>;
    static_assert(!shared_tile<E>::plain);
    constexpr int threads = mlstm_fused_hopper_threads<F>;
    const scorer_streams& streams = params.streams;
    const memory_type memory(aligned_dynamic_shared());
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t plane = block / params.segments, segment = block % params.segments;
    const std::int32_t begun = segment * params.segment_chunks;
    const mlstm_fused_range range{plane, segment, plane * streams.chunks + begun,
                                  min(params.segment_chunks, streams.chunks - begun)};
    // 1. What all chunks share; barriers.
    const auto thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < memory_type::held * 8 * F / 8; i += threads) {
        reinterpret_cast<uint4*>(memory.sums)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    load_readout<V, threads>(params, plane, memory.numbers);
    using groups = mlstm_fused_warpgroups<F>;
    if (thread == 0) {
        constexpr std::uint32_t of_adders = 4 * groups::adders,
                                of_output_group = 4;  // warps of all adders, of one output group
#pragma unroll
        for (int i = 0; i < memory_type::stages; ++i) {
            barrier_init(memory.full(i), 2 * 128);
            barrier_init(
                memory.free(i),
                (of_adders + (params.fused_writes_scores ? groups::output_groups * of_output_group : 0)) *
                    arrivals_of_warp);
        }
#pragma unroll
        for (int i = 0; i < memory_type::held; ++i) {
            barrier_init(memory.full_state(i), of_adders * arrivals_of_warp);
            barrier_init(memory.free_state(i), of_output_group * arrivals_of_warp);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (thread < groups::first_adder) {
        take_registers<groups::of_output_group>();
        if (params.fused_writes_scores) {
            // 4. Reads chunks.
            fused_score_chunks<T, F, V>(params, range, memory);
        }
    } else if (thread < groups::first_loader) {
        if constexpr (groups::of_adder > groups::at_first) {
            take_registers<groups::of_adder>();
        } else {
            give_registers<groups::of_adder>();
        }
        // 3. Adds chunks.
        fused_add_chunks<T, F, V>(params, range, memory);
    } else {
        give_registers<groups::of_loader>();
        // 2. Loads.
        fused_load_rows<T, F, V>(params, range, memory);
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
