// From keys and values to an mLSTM's features, values and gates.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_scorer_weights.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_gates.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Slabs of weights, 64 columns of `rows` rows, that are on their way at once: as many as leave space for two
/// blocks on an SM. Blocks of one chunk are those of wide inputs, which need the shared memory themselves.
template <class T, int Chunks>
KVPOLICY_HOST_DEVICE constexpr int mlstm_slabs(int rows) {
    return !shared_tile<T>::plain && Chunks == 2 && rows <= 64 ? 4 : 2;
}

/// Shared memory of the projections of `Chunks` neighboring chunks: their inputs, slabs of weights, and the
/// gates.
template <class T, int Chunks>
struct mlstm_project_memory {
    shared_tile<T> x;  // of the first; the others' follow
    unsigned char* slabs;
    float* weights;      // [2][gate_weight(padded)]: of the gates, or of the skip; float rows
    T* split;            // [8][padded + 8]: the same in parts (split_weight); 16-bit rows
    double* log_input;   // [Slots][64]
    double* log_forget;  // [Slots][64]
    float* ones;         // [64]: an mLSTM's input has no norms
    std::int32_t* bad;   // [Slots][64]
    float2* stats;       // [Slots][2][2][64]: of softmaxes
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE mlstm_project_memory(unsigned char* memory, std::int32_t padded,
                                              std::int32_t slab_rows) {
        shared_parts parts(memory);
        x = {parts.tile<T>(scorer_chunk, Chunks * padded).data, scorer_chunk};
        slabs = parts.tile<T>(slab_rows, 64).data;
        for (int i = 1; i < mlstm_slabs<T, Chunks>(slab_rows); ++i) {
            parts.tile<T>(slab_rows, 64);
        }
        weights = parts.take<float>(shared_tile<T>::plain ? 2 * gate_weight(padded) : 0);
        split = parts.take<T>(shared_tile<T>::plain ? 0 : 8 * (padded + 8));
        log_input = parts.take<double>(Chunks * scorer_chunk);
        log_forget = parts.take<double>(Chunks * scorer_chunk);
        ones = parts.take<float>(scorer_chunk);
        bad = parts.take<std::int32_t>(Chunks * scorer_chunk);
        stats = parts.take<float2>(Chunks * 4 * scorer_chunk);
        bytes = parts.bytes();
    }
};

/// Whether a product with 16 NI rows of weights is wgmma's: on Hopper the four warps of a chunk are a
/// warpgroup.
template <class T, int NI>
inline constexpr bool project_by_warpgroup = !shared_tile<T>::plain && KVPOLICY_HOPPER_CODE == 1 && NI >= 4;

/// Where a warp's part of a product stands, four warps a chunk: 32 rows and half of the columns; of a
/// warpgroup 16 rows and all columns.
template <bool Warpgroup>
struct mlstm_project_warp {
    static constexpr int down = Warpgroup ? 1 : 2;  // times 16 rows
    static constexpr int wide = Warpgroup ? 2 : 1;  // times the columns of a half

    int row, half;
    int barrier;  // of the two warps of the same rows

    __device__ mlstm_project_warp()
        : row(Warpgroup ? warp_id() % 4 * 16 : warp_id() % 2 * 32),
          half(Warpgroup ? 0 : warp_id() / 2 % 2),
          barrier(1 + warp_id() / 4 * 2 + warp_id() % 2) {}
    __device__ int row_of(int i, int r) const { return row + 16 * i + lane_id() / 4 + 8 * r; }
};
/// The same, with the numbers of a product with 16 NI rows of weights.
template <class T, int NI>
struct mlstm_product : mlstm_project_warp<project_by_warpgroup<T, NI>> {
    using warp = mlstm_project_warp<project_by_warpgroup<T, NI>>;
    static constexpr int MI = warp::down, across = NI * warp::wide;
    using numbers = float[MI][across][4];

    /// Column of number j, e.
    __device__ int column(int j, int e) const {
        return this->half * 8 * across + 8 * j + lane_id() % 4 * 2 + e;
    }
};

/// softmax over the first `count` columns of sign * y; other columns become 0. y and p may be the same. What
/// the two warps of a row must know of each other, maxima and sums, goes through `stats` [2][64]. Rounded is
/// what the result will be rounded to: 16 bits are content with the special function unit's 2^x.
template <class Rounded, class Product, int MI, int NI>
__device__ inline void softmax_rows(const Product& warp, const float (&y)[MI][NI][4], float (&p)[MI][NI][4],
                                    float sign, std::int32_t count, float2* stats) {
    constexpr float log2e = 1.4426950408889634f;
    const int lane = lane_id();
    const std::int32_t left = count - warp.column(0, 0);
    const auto in = [&](int j, int e) { return 8 * j + e < left; };
    const auto power = [](float x) {
        if constexpr (std::is_same_v<Rounded, float>) {
            return expf(x);
        } else {
            return fast_exp2(x * log2e);
        }
    };
    float most[MI][2], sum[MI][2];
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float high = -INFINITY;
#pragma unroll
            for (int j = 0; j < NI; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    high = fmaxf(high, in(j, e) ? sign * y[i][j][2 * r + e] : -INFINITY);
                }
            }
            high = row_max(high);
            float all = 0.0f;
#pragma unroll
            for (int j = 0; j < NI; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = p[i][j][2 * r + e];
                    x = in(j, e) ? power(sign * y[i][j][2 * r + e] - high) : 0.0f;
                    all += x;
                }
            }
            most[i][r] = high;
            sum[i][r] = row_sum(all);
            if (MI == 2 && lane % 4 == 0) {
                stats[warp.half * scorer_chunk + warp.row_of(i, r)] = make_float2(high, sum[i][r]);
            }
        }
    }
    if constexpr (MI == 2) {
        named_barrier(warp.barrier, 64);
    }
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float scale;
            if constexpr (MI == 2) {
                const float2 other = stats[(1 - warp.half) * scorer_chunk + warp.row_of(i, r)];
                const float high = fmaxf(most[i][r], other.x);
                const float own = power(most[i][r] - high);
                scale = own / (own * sum[i][r] + power(other.x - high) * other.y);
            } else {
                scale = fast_reciprocal(sum[i][r]);
            }
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                p[i][j][2 * r] *= scale;
                p[i][j][2 * r + 1] *= scale;
            }
        }
    }
}

/// A warp's part of an accumulator to rows of `stride` elements from column `column` on.
template <class Product, int MI, int NI, class E>
__device__ inline void store_rows(const Product& warp, E* to, std::int64_t stride, int column,
                                  const float (&acc)[MI][NI][4]) {
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            E* const row = to + warp.row_of(i, r) * stride + column + warp.column(0, 0);
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                store_pair(row + 8 * j, acc[i][j][2 * r], acc[i][j][2 * r + 1]);
            }
        }
    }
}

/// The weights of a block's one or two products, 16-bit rows of `padded` numbers, which go through shared
/// memory in slabs of 64 columns, one after the other, as many at once as fit.
template <int First, int Second, int SlabRows, int Chunks, class T>
struct mlstm_weight_slabs {
    static constexpr int ring = mlstm_slabs<T, Chunks>(SlabRows), threads = 128 * Chunks;
    static_assert(First <= SlabRows && Second <= SlabRows);

    const T *first, *second;  // First and Second rows
    std::int32_t padded, total;
    unsigned char* data;

    [[nodiscard]] __device__ unsigned char* slab(std::int32_t i) const {
        return data + shared_tile<T>::bytes(SlabRows, 64) * (i % ring);
    }
    /// Sends for slab i, which may not be there; a group of copies in any case.
    __device__ void bring(std::int32_t i) const {
        const std::int32_t each = padded / 64;
        if (i < total) {
            if (i < each) {
                copy_rows(shared_tile<T>{slab(i), First}, first + i * 64, padded, 64, First, threads);
            } else {
                copy_rows(shared_tile<T>{slab(i), Second}, second + (i - each) * 64, padded, 64, Second,
                          threads);
            }
        }
        copy_commit();
    }
    __device__ void begin() const {
#pragma unroll
        for (int i = 0; i < ring - 1; ++i) {
            bring(i);
        }
    }
};

/// y = W x of 64 inputs by each four warps, with one load of the weights for all chunks of the block: 16 NI
/// rows, whose slabs are those from `begin` on. Warps whose chunk has nothing to do (`active` false) only
/// help to load.
template <int NI, class T, class Slabs>
__device__ inline void project_chunk(const mlstm_product<T, NI>& warp,
                                     typename mlstm_product<T, NI>::numbers& acc, const shared_tile<T>& x,
                                     bool active, const Slabs& slabs, std::int32_t begin) {
    constexpr int rows = 16 * NI;
    const std::int32_t count = slabs.padded / 64;
    clear(acc);
    for (std::int32_t i = 0; i < count; ++i) {
        copy_wait<Slabs::ring - 2>();
        if constexpr (project_by_warpgroup<T, NI>) {
            fence_async_proxy();
        }
        __syncthreads();  // the slab has arrived, and the one before is free
        slabs.bring(begin + i + Slabs::ring - 1);
        const shared_tile<T> of_weights{slabs.slab(begin + i), rows};
        if (!active) {
            continue;
        }
        if constexpr (project_by_warpgroup<T, NI>) {
            auto& flat = reinterpret_cast<float(&)[8 * NI]>(acc);
            const std::uint64_t a = describe_k_major(shared_address(x.from(64 * i).data));
            const std::uint64_t b = describe_k_major(shared_address(of_weights.data));
            pin(flat);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                wgmma<T, 0, 0>(flat, a + static_cast<std::uint64_t>(2 * k),
                               b + static_cast<std::uint64_t>(2 * k), 1);
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin(flat);
        } else {
            add_product<2, NI, 64, false, false>(acc, x.from(64 * i), warp.row, of_weights,
                                                 warp.half * 8 * NI);
        }
    }
}

/// phi(W x) of 64 inputs into rows of F elements.
template <int F, bool Hedgehog, class T, class E, class Slabs>
__device__ inline void project_features(const shared_tile<T>& x, bool active, const Slabs& slabs,
                                        std::int32_t projection, float2* stats, E* to) {
    constexpr int NI = (Hedgehog ? F / 2 : F) / 16;
    const mlstm_product<T, NI> warp;
    typename mlstm_product<T, NI>::numbers y;
    project_chunk(warp, y, x, active, slabs, 0);
    if (!active) {
        return;
    }
    if constexpr (Hedgehog) {
        typename mlstm_product<T, NI>::numbers p;
        softmax_rows<E>(warp, y, p, -1.0f, projection, stats + 2 * scorer_chunk);
        store_rows(warp, to, F, F / 2, p);
    }
    softmax_rows<E>(warp, y, y, 1.0f, projection, stats);
    store_rows(warp, to, F, 0, y);
}

/// The block of mlstm_project_kernel: four warps per chunk, `Chunks` neighboring chunks of a plane. queries:
/// the chunks' queries; else their tokens (k~, v~, gates).
template <class T, int F, int V, bool Hedgehog, int Chunks>
struct project_agent {
    static constexpr int of_features = Hedgehog ? F / 2 : F;
    static constexpr int slab_rows = of_features > V ? of_features : V;
    using memory_type = mlstm_project_memory<T, Chunks>;
    using slabs_type = mlstm_weight_slabs<of_features, V, slab_rows, Chunks, T>;

    const mlstm_params<T>& params;
    const scorer_source<T>& source;
    const scorer_span& s;
    const bool queries, active, projects;  // active: the warp's chunk has rows
    const std::int32_t skipped;
    const int own, thread;  // the warp's chunk of the block, the thread's number of 128
    const memory_type memory;
    const shared_tile<T> x;
    float2* const stats;
    const std::int32_t first;
    const std::int64_t row;

    __device__ __forceinline__ project_agent(const mlstm_params<T>& of, const scorer_span& span,
                                             bool of_queries, bool has_rows, bool direct_values,
                                             std::int32_t unread)
        : params(of),
          source(of.source),
          s(span),
          queries(of_queries),
          active(has_rows),
          projects(!of_queries && (!direct_values || of.source.k.dim % 8 != 0)),
          skipped(unread),
          own(warp_id() / 4),
          thread(static_cast<int>(threadIdx.x) % 128),
          memory(aligned_dynamic_shared(), of.source.padded, slab_rows),
          x(memory.x.from(own * of.source.padded)),
          stats(memory.stats + own * 4 * scorer_chunk),
          first(of.packed.begin(span.b) + span.first - (of_queries ? of.streams.delay : 0)),
          row(span.row(of.streams.chunks)) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        load_inputs();  // 1
        const T* const weights = queries ? params.stack_q + std::int64_t{s.h} * params.rows_q * source.padded
                                         : params.stack_k + std::int64_t{s.h} * params.rows_k * source.padded;
        const slabs_type slabs{weights, weights + std::int64_t{params.at_v} * source.padded, source.padded,
                               source.padded / 64 * (projects ? 2 : 1), memory.slabs};
        slabs.begin();
        load_gate_weights();
        copy_wait<slabs_type::ring - 1>();  // the inputs have arrived
        __syncthreads();
        if (queries) {
            if (params.skip != nullptr && active) {  // rows without an output have inputs that are 0
                for_each_row([&](int r, float product, float, float) { params.skipped[row + r] = product; });
            }
            project_features<F, Hedgehog>(x, active, slabs, params.projection, stats, params.q + row * F);
            return;
        }
        make_gates();  // 2
        __syncthreads();
        project_features<F, Hedgehog>(x, active, slabs, params.projection, stats, params.k + row * F);  // 3
        if (!projects) {
            if (active) {
                store_direct_values();  // 4
            }
            scan();  // 5
            return;
        }
        project_values(slabs);  // 4, 5
    }

  private:
    /// Phase 1: the inputs first, which come from memory; then the weights of the gates.
    __device__ __forceinline__ void load_inputs() const {
        if constexpr (shared_tile<T>::plain) {
            if (static_cast<int>(threadIdx.x) < scorer_chunk) {
                memory.ones[threadIdx.x] = 1.0f;
            }
            __syncthreads();
        }
        if (active && queries && params.leaving != nullptr) {
            load_leaving();
        } else if (active) {
            source.load(s, first, skipped, s.count, memory.ones, memory.ones, x, 0, source.padded, thread,
                        128);
        } else {
            copy_commit();
        }
    }
    /// The keys that leave a cache's window, from wherever they are.
    __device__ __forceinline__ void load_leaving() const {
        const leaving_key<T>* const leaving =
            params.leaving + (std::int64_t{s.plane} * params.streams.length + s.first);
        const std::int32_t across = source.padded / 8, of_key = source.k.dim;
#pragma unroll 4
        for (std::int32_t i = thread; i < scorer_chunk * across; i += 128) {
            const std::int32_t r = i / across, c = i % across * 8;
            const bool in = r >= skipped && r < s.count && c < source.size;
            leaving_key<T> row{};
            if (in) {
                row = leaving[r];
            }
            if constexpr (shared_tile<T>::plain) {
                float of[8] = {};
#pragma unroll
                for (std::int32_t e = c; e < c + 8; ++e) {
                    if (in && e < source.size) {
                        of[e - c] = e < of_key ? row.key[e] : row.value[e - of_key];
                    }
                }
                x.set_eight(r, c, of);
            } else {  // widths are multiples of 8
                const T* const from = !in          ? source.k.data
                                      : c < of_key ? row.key + c
                                                   : row.value + (c - of_key);
                copy_16(shared_address(x.data) + x.offset(r, c), from, in ? 16 : 0);
            }
        }
        copy_commit();
    }
    __device__ __forceinline__ void load_gate_weights() const {
        const float* const w = queries ? params.skip : params.w_i;
        const std::int64_t at = std::int64_t{s.h} * source.size;
        for (auto c = static_cast<std::int32_t>(threadIdx.x); c < source.padded; c += 128 * Chunks) {
            const float of_first = w != nullptr && c < source.size ? w[at + c] : 0.0f;
            const float of_second = !queries && c < source.size ? params.w_f[at + c] : 0.0f;
            if constexpr (shared_tile<T>::plain) {
                memory.weights[gate_weight(c)] = of_first;
                memory.weights[gate_weight(source.padded) + gate_weight(c)] = of_second;
            } else {
                split_weights(memory.split, source.padded + 8, c, of_first, of_second);
            }
        }
    }
    /// Calls body(row, products with both weights, 0 or NaN) for each row of the chunk, one thread per row.
    template <class Body>
    __device__ void for_each_row(const Body& body) const {
        if constexpr (shared_tile<T>::plain) {
            float of_first, of_second, finite;
            row_products(x, thread / 2, thread % 2, memory.weights, source.padded, of_first, of_second,
                         finite);
            if (thread % 2 == 0) {
                body(thread / 2, of_first, of_second, finite);
            }
        } else {
            float of_first[2], of_second[2], finite[2];
            const int from = thread / 32 * 16, lane = lane_id(), r = lane % 4;
            split_products(x, from, memory.split, source.padded, of_first, of_second, finite);
            if (r < 2) {
                body(from + lane / 4 + 8 * r, r == 0 ? of_first[0] : of_first[1],
                     r == 0 ? of_second[0] : of_second[1], r == 0 ? finite[0] : finite[1]);
            }
        }
    }

    /// Phase 2: the gates of the chunk's tokens; tokens that are not finite become 0.
    __device__ __forceinline__ void make_gates() const {
        double* const log_input = memory.log_input + own * scorer_chunk;
        double* const log_forget = memory.log_forget + own * scorer_chunk;
        std::int32_t* const bad = memory.bad + own * scorer_chunk;
        if (active) {
            for_each_row([&](int r, float input, float forget, float finite) {
                const bool good = finite == 0.0f;
                double of_input, of_forget;
                compute_gates(params, s, r, input, forget, good, of_input, of_forget);
                log_input[r] = of_input;
                log_forget[r] = of_forget;
                bad[r] = good ? 0 : 1;
            });
        }
        __syncthreads();
        if (active) {
            // What is not finite must not reach the outputs before it, not even multiplied by 0.
            for (int r = warp_id() % 4; r < s.count; r += 4) {
                if (bad[r] != 0) {
                    for (int c = 2 * lane_id(); c < source.padded; c += 64) {
                        x.set_pair(r, c, 0.0f, 0.0f);
                    }
                }
            }
        }
    }

    /// Phase 4: the values as they are,
    __device__ __forceinline__ void store_direct_values() const {
        for (int i = thread; i < scorer_chunk * V / 8; i += 128) {
            const int r = i / (V / 8), c = i % (V / 8) * 8;
            float of[8] = {};
            if (c < params.width) {
                x.get_eight(r, source.k.dim + c, of);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    of[e] = c + e < params.width ? of[e] : 0.0f;
                }
            }
            store_eight(params.v + row * V + i * 8, of);
        }
    }
    /// or their projection; then the scan.
    __device__ __forceinline__ void project_values(const slabs_type& slabs) const {
        const mlstm_product<T, V / 16> warp;
        typename mlstm_product<T, V / 16>::numbers y;
        project_chunk(warp, y, x, active, slabs, source.padded / 64);
        if (!active) {
            return;
        }
#pragma unroll
        for (auto& rows : y) {
#pragma unroll
            for (int j = 0; j < warp.across; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (warp.column(j, e % 2) >= params.width) {
                        rows[j][e] = 0.0f;  // the stack's next rows
                    }
                }
            }
        }
        store_rows(warp, params.v + row * V, V, 0, y);
        scan();
    }
    /// Phase 5: the chunk's frame, by one warp; no other warp waits for it.
    __device__ void scan() const {
        if (active && warp_id() % 4 == 0) {
            scan_gates(params, s, memory.log_input + own * scorer_chunk,
                       memory.log_forget + own * scorer_chunk, memory.bad + own * scorer_chunk);
        }
    }
};

/// Features, values and gates of all tokens, and features of all queries.
/// Grid: 2 x planes x ceil(chunks / Slots): the tokens of `Chunks` neighboring chunks of a plane, then as
/// many blocks for their queries. Block: 128 Slots threads, four warps per chunk. Shared memory:
/// mlstm_project_memory.
/// In: source (k, v) T, or for a cache's queries `leaving` [planes, length]; stack_q [heads, rows_q, padded],
/// stack_k [heads, rows_k, padded] T; w_i, b_i, w_f, b_f, skip fp32. direct_values: v~ are the values
/// themselves.
/// Out, overwritten: rows q, k [.., F], v [.., V] E; log_source, log_top fp64, weight, skipped fp32; slope_i,
/// slope_f where a backward pass wants them; frames [planes, chunks] with top, forgotten, weights, ref_token
/// and bad of each chunk. Rows without a token are made of inputs that are 0.
/// 1. The inputs and the gates' weights to shared memory.
/// 2. The gates of the tokens; tokens that are not finite become 0.
/// 3. Features: projection and softmax.
/// 4. Values.
/// 5. The chunk's frame, by a scan over its gates. Queries: 1 and 3, and skip.
template <class T, int F, int V, bool Hedgehog, int Chunks>
__global__ void __launch_bounds__(128 * Chunks, shared_tile<T>::plain || Chunks == 1 ? 1 : 2)
    mlstm_project_kernel(const mlstm_params<T> params, const bool direct_values) {
    const scorer_streams& streams = params.streams;
    const std::int32_t groups = (streams.chunks + Chunks - 1) / Chunks;
    const std::int32_t blocks = streams.batch * streams.heads * groups;
    const bool queries = static_cast<std::int32_t>(blockIdx.x) >= blocks;
    const std::int32_t block = static_cast<std::int32_t>(blockIdx.x) - (queries ? blocks : 0);
    const std::int32_t chunk_index = block % groups * Chunks + warp_id() / 4;
    const scorer_span s =
        streams.span(block / groups, chunk_index < streams.chunks ? chunk_index : streams.chunks - 1);
    const std::int32_t skipped = queries ? params.first_output(s) : 0;
    const bool active = chunk_index < streams.chunks && skipped < s.count;
    if (!queries && !active && chunk_index < streams.chunks && threadIdx.x % 128 == 0) {
        params.chunk_stats[params.chunk(s)] = mlstm_chunk_stats{};  // chunk_stabilizers reads all of them
    }
    if (__syncthreads_or(active ? 1 : 0) == 0) {
        return;
    }
    project_agent<T, F, V, Hedgehog, Chunks>(params, s, queries, active, direct_values, skipped).run();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
