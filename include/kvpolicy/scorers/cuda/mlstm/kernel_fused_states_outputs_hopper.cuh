// fused_states_outputs on Hopper. A block has the whole state of a plane's segment in the accumulators of
// warpgroups that only add chunks to it. Before each chunk they leave it in shared memory, rounded. Other
// warpgroups read the chunk from there, down to scores, while the first go on. One more warpgroup loads rows
// and numbers. States go to memory only where a backward pass wants them. A backward pass that makes them
// itself wants no scores.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
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
struct mlstm_sweep_groups {
    static constexpr int readers = 2, adders = F / 64, all = readers + adders + 1;
    static constexpr int threads = 128 * all;
    static constexpr int first_adder = 128 * readers, first_loader = 128 * (readers + adders);  // threads
    // Registers of a thread: what a launch of so many threads gives each, and who has how many of them then.
    static constexpr int at_first = all == 5 ? 96 : 128, of_adder = 112, of_loader = 32;
    static constexpr int of_reader = (at_first * all - of_adder * adders - of_loader) / readers / 8 * 8;
    static constexpr bool few = of_reader < 168;  // too few for two products of a read at once
};
template <int F>
inline constexpr int mlstm_sweep_hopper_threads = mlstm_sweep_groups<F>::threads;

/// A chunk's numbers in shared memory.
template <int V>
struct alignas(16) mlstm_sweep_chunk {
    float weight[scorer_chunk];
    float source[scorer_chunk], most[scorer_chunk], kept[scorer_chunk];
    float added[scorer_chunk];  // what a score has besides
    float rho[V];
    mlstm_frame frame;
};

/// Shared memory of mlstm_sweep_hopper_kernel: rings of chunks, and of states before them.
template <class E, int F, int V>
struct mlstm_sweep_hopper_memory {
    static constexpr int stages = 3, held = 2;
    static constexpr int tile_bytes = scorer_chunk * (2 * F + V) * 2;

    unsigned char* tiles;          // [stages]: q~, k~, v~
    unsigned char* states;         // [held]
    unsigned char* sums;           // [held][8][F]: z in two rows, rounded and what rounding takes away
    mlstm_sweep_chunk<V>* chunks;  // [stages]
    float2* numbers;               // [V]: the norm's gain, the readout's weight
    std::uint64_t* barriers;       // chunks [stages] full, [stages] free, states [held] full, [held] free
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_sweep_hopper_memory(unsigned char* memory) {
        shared_parts parts(memory);
        tiles = parts.tile<E>(scorer_chunk, stages * (2 * F + V)).data;
        states = parts.tile<E>(F, held * V).data;
        sums = parts.tile<E>(8, held * F).data;
        chunks = parts.take<mlstm_sweep_chunk<V>>(stages);
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
/// A place in a ring of `Size`, and the parity of its turn.
template <int Size>
struct mlstm_ring_place {
    int at = 0;
    std::uint32_t parity = 0;

    __device__ void next() {
        if (++at == Size) {
            at = 0;
            parity ^= 1u;
        }
    }
};

/// Where a block is in its plane.
struct mlstm_sweep_range {
    std::int32_t plane, segment, first, count;  // chunks of all planes, from first on
};

/// What the loading warpgroup must know of a chunk before it loads its rows.
struct fused_load_frame {
    double m;
    float share;
    std::int32_t before, reads, count;

    template <class T>
    __device__ void load(const mlstm_problem<T>& of, const mlstm_sweep_range& in, std::int32_t n) {
        const bool there = n < in.count;
        const mlstm_frame* const frame = of.frames + (in.first + n);
        m = load_if(there, &frame->m);
        share = load_if(there, &frame->share);
        before = load_if(there, &frame->before);
        reads = load_if(there, &frame->reads);
        count = load_if(there, &frame->count);
    }
};

/// Brings one chunk after another. Numbers come a chunk ahead of their rows, in registers.
template <class T, int F, int V>
__device__ inline void load_of_sweep(const mlstm_problem<T>& problem, const mlstm_sweep_range& range,
                                     const mlstm_sweep_hopper_memory<mlstm_element<T>, F, V>& memory) {
    using E = mlstm_element<T>;
    constexpr int base = mlstm_sweep_groups<F>::first_loader;
    const int thread = static_cast<int>(threadIdx.x) - base;
    const float bias =
        problem.readout_bias != nullptr ? problem.readout_bias[range.plane % problem.streams.heads] : 0.0f;
    const std::int64_t plane_row = std::int64_t{range.plane} * problem.streams.slots * scorer_chunk;
    double source, top, last;
    float skipped;
    E heavy;
    const auto load_numbers = [&](std::int32_t n, const fused_load_frame& frame) {
        const bool any = problem.sweep_reads && frame.reads < frame.count,
                   of_row = any && thread < scorer_chunk;
        const std::int64_t row = std::int64_t{range.first + n} * scorer_chunk;
        source = load_if(of_row, problem.log_source + row + thread);
        top = load_if(of_row, problem.log_top + row + thread);
        last = load_if(of_row, problem.log_top + row + scorer_chunk - 1);
        skipped = load_if(of_row && problem.skip != nullptr, problem.skipped + row + thread);
        heavy = load_if(frame.count > 0 && thread < V && frame.before >= 0,
                        static_cast<const E*>(problem.v) + (plane_row + frame.before) * V + thread);
    };
    fused_load_frame frame, following;
    frame.load(problem, range, 0);
    following.load(problem, range, 1);
    load_numbers(0, frame);
    mlstm_ring_place<mlstm_sweep_hopper_memory<E, F, V>::stages> place;
    for (std::int32_t n = 0; n < range.count; ++n) {
        barrier_wait(memory.free(place.at), place.parity ^ 1u);
        mlstm_sweep_chunk<V>& chunk = memory.chunks[place.at];
        const std::int64_t row = std::int64_t{range.first + n} * scorer_chunk;
        if (frame.count > 0) {
            copy_slice<scorer_chunk, F, 128>(memory.keys(place.at), 0,
                                             static_cast<const E*>(problem.k) + row * F, F, thread);
            copy_slice<scorer_chunk, V, 128>(memory.values(place.at), 0,
                                             static_cast<const E*>(problem.v) + row * V, V, thread);
            copy_line(chunk.weight, problem.weight + row, scorer_chunk, base);
        }
        if (frame.count > 0 && thread < V) {
            chunk.rho[thread] = frame.share * static_cast<float>(heavy);
        }
        if (problem.sweep_reads && frame.reads < frame.count) {
            copy_slice<scorer_chunk, F, 128>(memory.queries(place.at), 0,
                                             static_cast<const E*>(problem.q) + row * F, F, thread);
            if (thread < scorer_chunk) {
                mlstm_exponents<E>{chunk.source, chunk.most, chunk.kept}.set(source, top, last, frame.m,
                                                                             static_cast<unsigned>(thread));
                chunk.added[thread] = bias + skipped;
            }
        }
        static_assert(sizeof(mlstm_frame) == 64);
        if (thread >= 124) {
            const int i = 16 * (thread - 124);
            copy_16(shared_address(&chunk.frame) + static_cast<std::uint32_t>(i),
                    reinterpret_cast<const unsigned char*>(problem.frames + (range.first + n)) + i);
        }
        barrier_arrive_after_copies(memory.full(place.at));
        barrier_arrive(memory.full(place.at));
        frame = following;
        load_numbers(n + 1, frame);
        following.load(problem, range, n + 2);
        place.next();
    }
    copy_commit();
    copy_wait<0>();
}

/// A warp's 16 rows of the state before a chunk, less z rho^T and rounded, and z, to shared memory.
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
            const float2 rho = *reinterpret_cast<const float2*>(rho_of_chunk + 8 * j + lane % 4 * 2);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rounded[2 * i + r] =
                    pack<E>(fmaf(-z[r], rho.x, acc[j][2 * r]), fmaf(-z[r], rho.y, acc[j][2 * r + 1]));
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
__device__ __forceinline__ void keep_fused_state(const mlstm_problem<T>& problem,
                                                 const mlstm_state_part& part, int warp, std::int64_t number,
                                                 const shared_tile<E>& state, const float (&z)[2]) {
    const int lane = lane_id();
    if (lane == 0) {  // the warp's 16 rows
        E* const to = problem.memory + number * (F * V) + 16 * 64 * warp;
        const std::uint32_t from = shared_address(state.data) + static_cast<std::uint32_t>(16 * 128 * warp);
#pragma unroll
        for (int panel = 0; panel < V / 64; ++panel) {
            store_bulk(to + panel * (F * 64), from + static_cast<std::uint32_t>(panel * F * 128), 16 * 128);
        }
        bulk_commit();
    }
    if (lane % 4 == 0) {
        problem.sums[number * F + part.feature(0)] = z[0];
        problem.sums[number * F + part.feature(1)] = z[1];
    }
}

/// Waits until the copy to memory that used this place of shared memory has read it.
__device__ __forceinline__ void wait_for_kept_state(bool reads, int lane) {
    if (lane == 0) {
        if (reads) {
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
__device__ inline void add_in_sweep(const mlstm_problem<T>& problem, const mlstm_sweep_range& range,
                                    const mlstm_sweep_hopper_memory<mlstm_element<T>, F, V>& memory) {
    using E = mlstm_element<T>;
    constexpr int NI = V / 8;
    const int lane = lane_id(), warp = warp_id() - mlstm_sweep_groups<F>::first_adder / 32;
    const mlstm_state_part part{16 * warp, 0, true};
    float acc[NI][4], of_sums[4];
    mlstm_state_part::clear(acc, of_sums);
    part.template begin<F, V>(problem, range.plane, range.segment, false, acc, of_sums);
    using memory_type = mlstm_sweep_hopper_memory<E, F, V>;
    mlstm_ring_place<memory_type::stages> place;
    mlstm_ring_place<memory_type::held> held;
    int turn = 0;  // of two places, where no score is wanted
    for (std::int32_t n = 0; n < range.count; ++n) {
        barrier_wait(memory.full(place.at), place.parity);
        fence_async_proxy();
        const mlstm_sweep_chunk<V>& chunk = memory.chunks[place.at];
        if (chunk.frame.count > 0) {
            if (chunk.frame.fresh != 0) {
                asm volatile("" ::: "memory");  // a branch: no selection of every number in every step
                mlstm_state_part::clear(acc, of_sums);
            }
            const bool reads = problem.sweep_reads && chunk.frame.reads < chunk.frame.count;
            if (reads || problem.sweep_keeps) {
                barrier_wait(memory.free_state(held.at), held.parity ^ 1u);
                int at = held.at;
                if (problem.sweep_keeps) {
                    if (!problem.sweep_reads) {
                        at = turn;
                        turn ^= 1;
                    }
                    wait_for_kept_state(problem.sweep_reads, lane);
                }
                float z[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    z[r] = __shfl_sync(all_lanes, of_sums[2 * r] + of_sums[2 * r + 1], lane & ~3);
                }
                const shared_tile<E> state = memory.state(at);
                store_fused_state<E, F>(part, warp, state, memory.sums_of(at), chunk.rho, z, acc);
                fence_async_proxy();
                if (reads) {
                    warp_arrive(memory.full_state(held.at), lane);
                    held.next();
                } else {
                    __syncwarp();
                }
                if (problem.sweep_keeps) {
                    keep_fused_state<F, V>(problem, part, warp, range.first + n, state, z);
                }
            }
            const float keep = chunk.frame.keep;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                of_sums[e] *= keep;
#pragma unroll
                for (int j = 0; j < NI; ++j) {
                    acc[j][e] *= keep;
                }
            }
            mlstm_outer_product<E> product;
            product.load(memory.keys(place.at), chunk.weight, chunk.frame.add, warp);
            product.add_sums(of_sums, nullptr);
            product.start(acc, memory.values(place.at), 0);
            product.wait(acc);
        }
        warp_arrive(memory.free(place.at), lane);
        place.next();
    }
    if (problem.sweep_keeps && lane == 0) {
        bulk_wait_read<0>();
    }
    if (range.segment == problem.segments - 1) {
        part.end(problem, range.plane, F, acc, of_sums);
    }
}

/// Reads one chunk after another, down to scores.
template <class T, int F, int V>
__device__ inline void read_in_sweep(const mlstm_problem<T>& problem, const mlstm_sweep_range& range,
                                     const mlstm_sweep_hopper_memory<mlstm_element<T>, F, V>& memory) {
    using E = mlstm_element<T>;
    struct tiles_of_chunk {
        shared_tile<E> q, k, v, c, z_tile;
        const float* rho;
        mlstm_exponents<E> exponents;
    };
    const scorer_streams& streams = problem.streams;
    const int lane = lane_id();
    const std::int32_t slot = range.first - range.plane * streams.slots;
    constexpr int readers = mlstm_sweep_groups<F>::readers;
    const int own = warp_id() / 4;  // of the readers
    int turn = 0;
    scorer_span s = streams.span(range.plane, slot);
    float* const scores = problem.scores.head(s.b, s.h);
    using memory_type = mlstm_sweep_hopper_memory<E, F, V>;
    mlstm_ring_place<memory_type::stages> place;
    mlstm_ring_place<memory_type::held> held;
    for (std::int32_t n = 0; n < range.count; ++n) {
        barrier_wait(memory.full(place.at), place.parity);
        fence_async_proxy();
        mlstm_sweep_chunk<V>& chunk = memory.chunks[place.at];
        const std::int32_t skipped = chunk.frame.reads, count = chunk.frame.count, bad = chunk.frame.bad;
        const bool reads_any = skipped < count;
        const bool mine = reads_any && turn == own;
        if (reads_any) {
            turn = turn + 1 == readers ? 0 : turn + 1;
        }
        if (mine) {
            const tiles_of_chunk tiles{memory.queries(place.at),
                                       memory.keys(place.at),
                                       memory.values(place.at),
                                       memory.state(held.at),
                                       memory.sums_of(held.at),
                                       chunk.rho,
                                       {chunk.source, chunk.most, chunk.kept}};
            barrier_wait(memory.full_state(held.at), held.parity);
            mlstm_warpgroup_reads<E, F, V> reads;
            reads.template read<mlstm_sweep_groups<F>::few>(tiles);
            warp_arrive(memory.free_state(held.at), lane);
            float added[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                added[r] = chunk.added[reads.row(r)];
            }
            warp_arrive(memory.free(place.at), lane);
            float score[2];
            reads.score(problem, memory.numbers, score);
            if (streams.edges != nullptr) {
                s = streams.span(range.plane, slot + n);
            } else {
                s.first = s.from + (slot + n) * scorer_chunk;
            }
            float* const to = scores + (s.first - streams.delay);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int l = reads.row(r);
                if (lane % 4 == 0 && l >= skipped && l < count) {
                    to[l] = l < bad ? score[r] + added[r] : NAN;
                }
            }
        } else {
            warp_arrive(memory.free(place.at), lane);
        }
        if (reads_any) {
            held.next();
        }
        place.next();
    }
}
#endif

/// fused_states_outputs on Hopper, 16-bit rows: scores (sweep_reads), states in memory (sweep_keeps), or
/// both.
/// Grid: planes x segments. Block: mlstm_sweep_hopper_threads<F>: warpgroups that read (2), that add chunks
/// (F / 64), and one that loads; one block per multiprocessor. Shared memory: mlstm_sweep_hopper_memory: 3
/// chunks, 2 states.
/// In: as mlstm_sweep_kernel.
/// Out: scores [B, heads, S] fp32; memory [chunks, F V] E in the image of the tiles and sums [chunks, F]
/// fp32. Overwritten. The last segment overwrites the caller's states.
/// 1. What all chunks share; barriers. Then each role, per chunk: 2. load_of_sweep: rows and numbers to the
///    ring. 3. add_in_sweep: the state before the chunk to shared memory (and to memory), then decay and the
///    outer products. 4. read_in_sweep: the chunk's reads, down to scores. The roles wait for each other at
///    mbarriers only.
template <class T, int F, int V>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_sweep_hopper_threads<F>), 1)
    mlstm_sweep_hopper_kernel([[maybe_unused]] const mlstm_problem<T> problem) {
#if KVPOLICY_HOPPER_CODE
    using E = mlstm_element<T>;
    using memory_type = mlstm_sweep_hopper_memory<E, F, V>;
    static_assert(!shared_tile<E>::plain);
    constexpr int threads = mlstm_sweep_hopper_threads<F>;
    const scorer_streams& streams = problem.streams;
    const memory_type memory(aligned_dynamic_shared());
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t plane = block / problem.segments, segment = block % problem.segments;
    const std::int32_t begun = segment * problem.segment_chunks;
    const mlstm_sweep_range range{plane, segment, plane * streams.slots + begun,
                                  min(problem.segment_chunks, streams.slots - begun)};
    // 1. What all chunks share; barriers.
    const auto thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < memory_type::held * 8 * F / 8; i += threads) {
        reinterpret_cast<uint4*>(memory.sums)[i] = make_uint4(0u, 0u, 0u, 0u);
    }
    load_readout<V, threads>(problem, plane, memory.numbers);
    using groups = mlstm_sweep_groups<F>;
    if (thread == 0) {
        constexpr std::uint32_t of_adders = 4 * groups::adders,
                                of_reader = 4;  // warps of all adders, of one reader
#pragma unroll
        for (int i = 0; i < memory_type::stages; ++i) {
            barrier_init(memory.full(i), 2 * 128);
            barrier_init(
                memory.free(i),
                (of_adders + (problem.sweep_reads ? groups::readers * of_reader : 0)) * arrivals_of_warp);
        }
#pragma unroll
        for (int i = 0; i < memory_type::held; ++i) {
            barrier_init(memory.full_state(i), of_adders * arrivals_of_warp);
            barrier_init(memory.free_state(i), of_reader * arrivals_of_warp);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (thread < groups::first_adder) {
        take_registers<groups::of_reader>();
        if (problem.sweep_reads) {
            // 4. Reads chunks.
            read_in_sweep<T, F, V>(problem, range, memory);
        }
    } else if (thread < groups::first_loader) {
        if constexpr (groups::of_adder > groups::at_first) {
            take_registers<groups::of_adder>();
        } else {
            give_registers<groups::of_adder>();
        }
        // 3. Adds chunks.
        add_in_sweep<T, F, V>(problem, range, memory);
    } else {
        give_registers<groups::of_loader>();
        // 2. Loads.
        load_of_sweep<T, F, V>(problem, range, memory);
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
