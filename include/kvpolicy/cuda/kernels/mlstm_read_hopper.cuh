// Reads of an mLSTM's chunks with a warpgroup a chunk: what one thread needs of a row is in four lanes, weights of pairs go from one product
// to the next in registers, and no two warps wait for each other but where tiles change hands. A block takes one chunk after another,
// whose rows come as soon as the tiles of the chunk before are free.
#pragma once

#include <kvpolicy/cuda/blocks/mlstm_problem.cuh>
#include <kvpolicy/cuda/blocks/mlstm_warpgroup.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/kernels/mlstm_read.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int mlstm_warpgroup_threads = 128;
/// Blocks that a multiprocessor has room for.
template <int V>
inline constexpr int mlstm_reads_blocks = V == 64 ? 3 : 2;

/// Shared memory of a block that reads.
template <class E, int F, int V>
struct mlstm_read_tiles {
    shared_tile<E> q, k, v, c;
    shared_tile<E> z_tile;  // z in two rows, rounded and what rounding takes away; of 8
    float* z;
    float* rho;
    float2* numbers;  // [V]: the norm's gain, the readout's weight
    float* added;     // [64]: what a score has besides
    mlstm_exponents<E> exponents;

    KVPOLICY_HOST_DEVICE explicit mlstm_read_tiles(shared_parts& parts) {
        q = parts.tile<E>(scorer_chunk, F);
        k = parts.tile<E>(scorer_chunk, F);
        v = parts.tile<E>(scorer_chunk, V);
        c = parts.tile<E>(F, V);
        z_tile = parts.tile<E>(8, F);
        z = parts.take<float>(F);
        rho = parts.take<float>(V);
        numbers = parts.take<float2>(V);
        added = parts.take<float>(scorer_chunk);
        exponents.source = parts.take<typename mlstm_exponents<E>::number>(scorer_chunk);
        exponents.most = parts.take<typename mlstm_exponents<E>::number>(scorer_chunk);
        exponents.kept = parts.take<float>(scorer_chunk);
    }
    [[nodiscard]] static std::size_t bytes() {
        shared_parts parts(nullptr);
        const mlstm_read_tiles all(parts);
        return parts.bytes();
    }

    /// Rows of z_tile that stay 0.
    __device__ void clear_sums() const {
        const float blank[8] = {};
        for (int i = static_cast<int>(threadIdx.x); i < 8 * F / 8; i += mlstm_warpgroup_threads) {
            z_tile.set_eight(i / (F / 8), i % (F / 8) * 8, blank);
        }
    }
    template <class T>
    __device__ void load_state(const mlstm_problem<T>& problem, std::int32_t chunk) const {
        copy_slice<F, V, mlstm_warpgroup_threads>(
            c, 0, static_cast<const E*>(problem.memory) + std::int64_t{chunk} * (F * V), V);
        copy_slice<scorer_chunk, V, mlstm_warpgroup_threads>(
            v, 0, static_cast<const E*>(problem.v) + std::int64_t{chunk} * (scorer_chunk * V), V);
    }
    template <class T>
    __device__ void load_queries(const mlstm_problem<T>& problem, std::int32_t chunk) const {
        copy_slice<scorer_chunk, F, mlstm_warpgroup_threads>(
            q, 0, static_cast<const E*>(problem.q) + std::int64_t{chunk} * (scorer_chunk * F), F);
    }
    template <class T>
    __device__ void load_keys(const mlstm_problem<T>& problem, std::int32_t chunk) const {
        copy_slice<scorer_chunk, F, mlstm_warpgroup_threads>(
            k, 0, static_cast<const E*>(problem.k) + std::int64_t{chunk} * (scorer_chunk * F), F);
    }
    /// What does not come by copies, from registers. The caller synchronises.
    template <class T, class Numbers>
    __device__ void store_numbers(const mlstm_problem<T>& problem, const Numbers& from) const {
        const auto thread = static_cast<int>(threadIdx.x);
        if (thread < F) {
            const E rounded = static_cast<E>(from.z);
            z[thread] = from.z;
            *reinterpret_cast<E*>(z_tile.data + z_tile.offset(0, thread)) = rounded;
            *reinterpret_cast<E*>(z_tile.data + z_tile.offset(1, thread)) =
                static_cast<E>(from.z - static_cast<float>(rounded));
        }
        if (thread < V) {
            const bool gained = thread < problem.width && problem.norm_gain != nullptr;
            rho[thread] = from.share * static_cast<float>(from.heavy);
            numbers[thread] = make_float2(gained ? from.gain : 1.0f, from.readout);
        }
        if (thread < scorer_chunk) {
            exponents.set(from.source, from.top, from.last, from.m);
            added[thread] = from.bias + from.skipped;
        }
    }
};

/// What a block must know of a chunk before it loads anything of it.
struct mlstm_read_frame {
    double m;
    float share;
    std::int32_t reads, count, bad, before;

    /// No tokens where there is no such chunk. What nobody asks for is not loaded, since its register would be waited for.
    template <bool Bad, bool Reference, class T>
    __device__ void load(const mlstm_problem<T>& problem, std::int32_t chunk, std::int32_t chunks) {
        const mlstm_frame* const frame = problem.frames + chunk;
        const bool there = chunk < chunks;
        m = load_if(there, &frame->m);
        reads = load_if(there, &frame->reads);
        count = load_if(there, &frame->count);
        if constexpr (Bad) {
            bad = load_if(there, &frame->bad);
        }
        if constexpr (Reference) {
            share = load_if(there, &frame->share);
            before = load_if(there, &frame->before);
        }
    }
    [[nodiscard]] __device__ bool reads_any() const { return reads < count; }
};

/// A thread's share of a chunk's numbers, on their way from global memory while the chunk before is still at work.
template <class E, int F, int V>
struct mlstm_read_numbers {
    double source, top, last, m;
    float z, share;
    E heavy;              // of the value that is the reference
    float gain, readout;  // the norm's gain, the readout's weight
    float bias, skipped;  // what a score has besides

    /// Nothing where the chunk does not read.
    template <class T>
    __device__ void load(const mlstm_problem<T>& problem, std::int32_t chunk, const mlstm_read_frame& frame) {
        const auto thread = static_cast<int>(threadIdx.x);
        const std::int32_t plane = chunk / problem.streams.slots, head = plane % problem.streams.heads;
        const std::int64_t row = std::int64_t{chunk} * scorer_chunk;
        const bool any = frame.reads_any(), of_row = any && thread < scorer_chunk,
                   of_value = any && thread < problem.width;
        m = frame.m;
        source = load_if(of_row, problem.log_source + row + thread);
        top = load_if(of_row, problem.log_top + row + thread);
        last = load_if(of_row, problem.log_top + row + scorer_chunk - 1);
        bias = load_if(of_row && problem.readout_bias != nullptr, problem.readout_bias + head);
        skipped = load_if(of_row && problem.skip != nullptr, problem.skipped + row + thread);
        z = load_if(any && thread < F, problem.sums + std::int64_t{chunk} * F + thread);
        const std::int64_t at = std::int64_t{head} * problem.width + thread;
        gain = load_if(of_value && problem.norm_gain != nullptr, problem.norm_gain + at);
        readout = load_if(of_value, problem.readout + at);
        share = frame.share;
        const std::int64_t reference =
            std::int64_t{plane} * problem.streams.slots * scorer_chunk + frame.before;
        heavy = load_if(any && thread < V && frame.before >= 0, problem.v + reference * V + thread);
    }
};

#if KVPOLICY_HOPPER_CODE
/// A thread's two rows of a chunk's reads: N, its divisor, and what weights of pairs are made of.
template <class E, int F, int V>
struct mlstm_warpgroup_reads {
    float n[V / 2];
    float divisor[2], kept[2], most[2];

    __device__ static int row(int r) { return 16 * warp_id() + lane_id() / 4 + 8 * r; }
    __device__ static int column() { return lane_id() % 4 * 2; }
    /// exp(s_j - M_l) of columns 8 j + column() and the next, 0 for a token after the read.
    template <class Memory>
    __device__ void weigh(const Memory& memory, int j, int r, float (&w)[2]) const {
        const float2 source = *reinterpret_cast<const float2*>(memory.exponents.source + 8 * j + column());
        w[0] = 8 * j + column() <= row(r) ? fast_exp2(source.x - most[r]) : 0.0f;
        w[1] = 8 * j + column() + 1 <= row(r) ? fast_exp2(source.y - most[r]) : 0.0f;
    }
    /// All of it, once the tiles are there.
    template <class Memory>
    __device__ void read(const Memory& memory) {
        float pairs[32], of_z[4];
        std::uint32_t held[4][4];  // weights of pairs, rounded
        wgmma_fence();
        start_product<F, false>(pairs, memory.q, memory.k);
        start_product<F, false>(of_z, memory.q, memory.z_tile);
        wgmma_commit();
        start_product<F, true>(n, memory.q, memory.c);
        wgmma_commit();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            kept[r] = memory.exponents.kept[row(r)];
            most[r] = memory.exponents.most[row(r)];
            divisor[r] = 0.0f;
        }
        wgmma_wait<1>();
        pin(pairs);
        pin(of_z);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float w[2];
                weigh(memory, j, r, w);
                rounded_pair<E> pair;
                pair.set(pairs[4 * j + 2 * r] * w[0], pairs[4 * j + 2 * r + 1] * w[1]);
                divisor[r] += pair.first() + pair.second();
                held[j / 2][j % 2 * 2 + r] = pair.both;
            }
        }
        float qz[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            qz[r] = __shfl_sync(all_lanes, of_z[2 * r] + of_z[2 * r + 1], lane_id() & ~3);
            divisor[r] = kept[r] * qz[r] + row_sum(divisor[r]);
        }
        wgmma_wait<0>();
        pin(n);
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
            const float2 rho = *reinterpret_cast<const float2*>(memory.rho + 8 * j + column());
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                n[4 * j + 2 * r] = kept[r] * fmaf(qz[r], rho.x, n[4 * j + 2 * r]);
                n[4 * j + 2 * r + 1] = kept[r] * fmaf(qz[r], rho.y, n[4 * j + 2 * r + 1]);
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
};
#endif

/// mlstm_read_kernel: scores of the tokens that chunks read.
template <class T, int F, int V>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_warpgroup_threads), mlstm_reads_blocks<V>)
    mlstm_read_hopper_kernel([[maybe_unused]] const mlstm_problem<T> problem) {
#if KVPOLICY_HOPPER_CODE
    using E = mlstm_element<T>;
    static_assert(!shared_tile<E>::plain);
    shared_parts parts(aligned_dynamic_shared());
    const mlstm_read_tiles<E, F, V> memory(parts);
    const scorer_streams& streams = problem.streams;
    const std::int32_t chunks = streams.batch * streams.heads * streams.slots;
    const auto step = static_cast<std::int32_t>(gridDim.x);
    const auto load_all = [&](std::int32_t chunk) {
        memory.load_state(problem, chunk);
        memory.load_queries(problem, chunk);
        memory.load_keys(problem, chunk);
    };
    memory.clear_sums();
    __syncthreads();
    auto chunk = static_cast<std::int32_t>(blockIdx.x);
    mlstm_read_frame frame, following;
    mlstm_read_numbers<E, F, V> numbers;
    frame.load<true, true>(problem, chunk, chunks);
    following.load<true, true>(problem, chunk + step, chunks);
    if (frame.reads_any()) {
        load_all(chunk);
    }
    copy_commit();
    numbers.load(problem, chunk, frame);
    for (; chunk < chunks; chunk += step) {
        const mlstm_read_frame own = frame;
        const std::int32_t next = chunk + step;
        // The next chunk's rows and numbers, once this one's tiles are free.
        const auto load_next = [&] {
            if (following.reads_any()) {
                load_all(next);
            }
            copy_commit();
            numbers.load(problem, next, following);
            frame = following;
            following.load<true, true>(problem, next + step, chunks);
        };
        if (!own.reads_any()) {
            load_next();
            continue;
        }
        memory.store_numbers(problem, numbers);
        const scorer_span s = streams.span(chunk / streams.slots, chunk % streams.slots);
        copy_wait<0>();
        fence_async_proxy();
        __syncthreads();
        mlstm_warpgroup_reads<E, F, V> reads;
        reads.read(memory);
        __syncthreads();  // the tiles are free
        load_next();
        const bool norm = problem.norm_gain != nullptr;
        float score[2] = {}, scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scale[r] = __fdividef(1.0f, reads.divisor[r] < mlstm_clamp ? mlstm_clamp : reads.divisor[r]);
            if (norm) {
                float square = 0.0f;
#pragma unroll
                for (int i = 0; i < V / 4; ++i) {
                    const float h = reads.n[4 * (i / 2) + 2 * r + i % 2] * scale[r];
                    square = fmaf(h, h, square);
                }
                scale[r] *= rsqrtf(row_sum(square) / static_cast<float>(problem.width) + mlstm_norm_epsilon);
            }
        }
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
            const float4 both = *reinterpret_cast<const float4*>(memory.numbers + 8 * j + reads.column());
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float x[2] = {reads.n[4 * j + 2 * r] * scale[r] * both.x,
                                    reads.n[4 * j + 2 * r + 1] * scale[r] * both.z};
                score[r] = fmaf(x[0] * sigmoid<E>(x[0]), both.y, score[r]);
                score[r] = fmaf(x[1] * sigmoid<E>(x[1]), both.w, score[r]);
            }
        }
        float* const scores = problem.scores.head(s.b, s.h) + (s.first - streams.delay);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int l = reads.row(r);
            score[r] = row_sum(score[r]);
            if (lane_id() % 4 == 0 && l >= own.reads && l < own.count) {
                scores[l] = l < own.bad ? score[r] + memory.added[l] : NAN;
            }
        }
        __syncthreads();  // the next chunk's numbers may come
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
