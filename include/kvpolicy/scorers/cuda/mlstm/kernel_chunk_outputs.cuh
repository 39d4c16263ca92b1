// The delayed reads of a chunk: h = N / max(g, clamp), then scores, or the gradients of what the
// outputs depend on.
//
// Eight warps: warp i has rows 16 (i % 4) .. + 15 of the chunk and half i / 4 of whatever columns a product
// has; or, where Parts is 4, sixteen warps and quarters. Sums along rows meet in shared memory.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int mlstm_threads = 256;
/// Blocks per SM: one loads while another multiplies.
template <class T>
inline constexpr int mlstm_blocks = shared_tile<T>::plain ? 1 : 2;

/// Sums along rows from the parts of a row's columns.
template <int Parts>
struct mlstm_sums_along {
    float* of;  // [Parts][64]

    /// One lane of a quad writes.
    __device__ void set(int row, float x) const {
        if (lane_id() % 4 == 0) {
            of[warp_id() / 4 * scorer_chunk + row] = x;
        }
    }
    __device__ float get(int row) const {
        float sum = of[row];
#pragma unroll
        for (int part = 1; part < Parts; ++part) {
            sum += of[part * scorer_chunk + row];
        }
        return sum;
    }
};
using mlstm_row_sums = mlstm_sums_along<2>;

/// Waits for the other warps of the same rows.
template <int Parts = 2>
__device__ inline void sync_rows() {
    named_barrier(1 + warp_id() % 4, 32 * Parts);
}

/// 1 / (1 + exp(-x)); where results are rounded to 16 bits, by the special function unit.
template <class E>
__device__ inline float sigmoid(float x) {
    if constexpr (shared_tile<E>::plain) {
        return __fdividef(1.0f, 1.0f + expf(-x));
    } else {
        return fast_reciprocal(1.0f + fast_exp2(-1.4426950408889634f * x));
    }
}

/// Shared memory of a block that reads. Small, for gradients where blocks have less than the 110 KB that 128
/// features and values take: d N takes the place of the queries, which are loaded once more where the values
/// were.
template <class E, int F, int V, bool Backward, bool Small = false>
struct mlstm_chunk_outputs_memory {
    static_assert(!Small || (Backward && F == V));
    shared_tile<E> q, k, v, c, weights, d_n;
    shared_tile<E> z_tile;  // z in two rows, rounded and what rounding takes away; of 16
    float* z;
    float* ref_value;
    float* qz;
    float* d_score;
    mlstm_row_sums sums[5];
    mlstm_exponents<E> exponents;
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_chunk_outputs_memory(unsigned char* memory) {
        shared_parts parts(memory);
        parts.tiles(scorer_chunk, F, q, k);
        v = parts.tile<E>(scorer_chunk, V);
        c = parts.tile<E>(F, V);
        weights = parts.tile<E>(scorer_chunk, scorer_chunk);
        if (Backward && !Small) {
            d_n = parts.tile<E>(scorer_chunk, V);
            z_tile = {d_n.data, 16};
        } else {
            z_tile = parts.tile<E>(16, F);
            d_n = q;
        }
        z = parts.take<float>(F);
        ref_value = parts.take<float>(V);
        qz = parts.take<float>(scorer_chunk);
        d_score = parts.take<float>(scorer_chunk);
        for (mlstm_row_sums& one : sums) {
            one.of = parts.take<float>(2 * scorer_chunk);
        }
        exponents.take(parts);
        bytes = parts.bytes();
    }
    /// The queries once d N is there.
    [[nodiscard]] __device__ shared_tile<E> queries() const { return Small ? v : q; }
    /// [V][2]: sums down the columns of a warp's 16 rows, where those rows' weights are.
    [[nodiscard]] __device__ float* columns(int warp) const {
        static_assert(16 * scorer_chunk * sizeof(E) >= V * 2 * sizeof(float));
        return reinterpret_cast<float*>(weights.data + weights.offset(16 * warp, 0));
    }
};

/// What a warp's reads give: N of its 16 rows and its part of the values, and the divisors.
template <int V, int Parts = 2>
struct mlstm_chunk_outputs {
    static constexpr int columns = V / Parts;

    float h[1][columns / 8][4];
    float divisor[2];
};

/// Queries as the left side of products: in shared memory, or a warp's 16 rows in registers, which all of its
/// products share.
template <class E, int F>
struct mlstm_query_tile {
    const shared_tile<E>& q;

    template <bool TransB, int NI>
    __device__ void add(float (&acc)[1][NI][4], const shared_tile<E>& b, int n0) const {
        add_product<1, NI, F, false, TransB>(acc, q, 16 * (warp_id() % 4), b, n0);
    }
};
template <class E, int F>
struct mlstm_query_rows {
    std::uint32_t of[F / 16][4];

    __device__ void load(const shared_tile<E>& q) {
        const std::uint32_t at =
            shared_address(q.data) + swizzled(q.rows, 16 * (warp_id() % 4) + lane_id() % 16, lane_id() / 16);
#pragma unroll
        for (int k = 0; k < F; k += 16) {
            load_matrices(of[k / 16], (at ^ static_cast<std::uint32_t>(k % 64 * 2)) +
                                          static_cast<std::uint32_t>(k / 64 * q.rows * 128));
        }
    }
    template <bool TransB, int NI>
    __device__ void add(float (&acc)[1][NI][4], const shared_tile<E>& b, int n0) const {
        add_held_product<NI, F, TransB>(acc, of, b, n0);
    }
};

/// q~_l . k~_j of a warp's rows and its part of the tokens.
template <int Parts, class Query, class E>
__device__ inline void multiply_pairs(float (&products)[1][scorer_chunk / Parts / 8][4], const Query& query,
                                      const shared_tile<E>& k) {
    constexpr int columns = scorer_chunk / Parts;
    clear(products);
    if (columns * (warp_id() / 4) <
        16 * (warp_id() % 4) + 16) {  // other pairs are of tokens after the output
        query.template add<false>(products, k, columns * (warp_id() / 4));
    }
}

/// From those, w_lj (q~_l . k~_j) into memory.weights and their sums; and q~_l . z. All of it is for the
/// warps of a row.
template <class E, int Parts, class Memory, class Query>
__device__ inline void weigh_pairs(const Memory& memory, const Query& query,
                                   const float (&products)[1][scorer_chunk / Parts / 8][4]) {
    constexpr int columns = scorer_chunk / Parts, NI = columns / 8;
    const int m0 = 16 * (warp_id() % 4), part = warp_id() / 4, lane = lane_id();
    if (part == Parts - 1) {
        float of_z[1][2][4];
        clear(of_z);
        query.template add<false>(of_z, memory.z_tile, 0);
        if (lane % 4 == 0) {
            memory.qz[m0 + lane / 4] = of_z[0][0][0] + of_z[0][0][1];
            memory.qz[m0 + lane / 4 + 8] = of_z[0][0][2] + of_z[0][0][3];
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        float sum = 0.0f;
        const auto weights = memory.weights.pairs_of(l, columns * part + lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < NI; ++j) {
            const int column = columns * part + 8 * j + lane % 4 * 2;
            float first = products[0][j][2 * r] * memory.exponents.weight(l, column);
            float second = products[0][j][2 * r + 1] * memory.exponents.weight(l, column + 1);
            round_pair<E>(first, second);
            weights.set(j, first, second);
            sum += first + second;
        }
        memory.sums[0].set(l, row_sum(sum));
    }
}

/// q~_l^T C of a warp's rows and its part of the values.
template <int V, int Parts, class Query, class E>
__device__ inline void multiply_state(mlstm_chunk_outputs<V, Parts>& outputs, const Query& query,
                                      const shared_tile<E>& c) {
    clear(outputs.h);
    query.template add<true>(outputs.h, c, mlstm_chunk_outputs<V, Parts>::columns * (warp_id() / 4));
}

/// Values of the outputs from that and from what weigh_pairs left.
template <int V, int Parts, class Memory>
__device__ inline void apply_pairs(const Memory& memory, mlstm_chunk_outputs<V, Parts>& outputs) {
    constexpr int columns = mlstm_chunk_outputs<V, Parts>::columns, NI = columns / 8;
    const int m0 = 16 * (warp_id() % 4), n0 = columns * (warp_id() / 4), lane = lane_id();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        const float state_decay = memory.exponents.state_decay[l], of_state = state_decay * memory.qz[l];
        outputs.divisor[r] = of_state + memory.sums[0].get(l);
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& h = outputs.h[0][j][2 * r + e];
                h = state_decay * h + of_state * memory.ref_value[n0 + 8 * j + lane % 4 * 2 + e];
            }
        }
    }
    add_product<1, NI, scorer_chunk, false, true>(outputs.h, memory.weights, m0, memory.v, n0);
}

/// Starts the copies of a chunk's rows, `Columns` numbers each, from row `row` of an array on.
template <int Columns, class E>
__device__ __forceinline__ void copy_chunk_rows(const shared_tile<E>& to, const E* of, std::int64_t row) {
    copy_slice<scorer_chunk, Columns, mlstm_threads>(to, 0, of + row * Columns, Columns);
}

/// Loads a chunk and reads it. w_lj (q~_l . k~_j) stays in memory.weights; divisors are sums of the weights
/// as rounded there, so that h is a mean of values with the very weights that multiply them. The caller has d
/// scores written before, if any.
template <int F, int V, class T, class Memory>
__device__ inline void compute_chunk_outputs(const mlstm_params<T>& params, const scorer_span& s,
                                             const Memory& memory, const mlstm_chunk_stats& stats,
                                             mlstm_chunk_outputs<V>& outputs) {
    using E = mlstm_element<T>;
    // 1. Rows, state and numbers.
    const std::int64_t row = s.row(params.streams.chunks), chunk = params.chunk(s);
    copy_chunk_rows<F>(memory.q, static_cast<const E*>(params.q), row);
    copy_chunk_rows<F>(memory.k, static_cast<const E*>(params.k), row);
    copy_commit();
    copy_slice<F, V, mlstm_threads>(memory.c, 0, static_cast<const E*>(params.memory + chunk * F * V), V);
    copy_chunk_rows<V>(memory.v, static_cast<const E*>(params.v), row);
    copy_commit();
    mlstm_look_ahead<T> next(params);
    next.arrays(scorer_chunk * F, params.q, params.k);
    next.array(params.v, scorer_chunk * V);
    next.array(params.memory, F * V);
    const auto thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < 16 * F / 8; i += mlstm_threads) {
        const int r = i / (F / 8), c = i % (F / 8) * 8;
        float x[8] = {};
        if (r < 2) {
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const float whole[2] = {params.sums[chunk * F + c + e], params.sums[chunk * F + c + e + 1]};
                x[e] = whole[0];
                x[e + 1] = whole[1];
                round_pair<E>(x[e], x[e + 1]);
                if (r == 0) {
                    memory.z[c + e] = whole[0];
                    memory.z[c + e + 1] = whole[1];
                } else {
                    x[e] = whole[0] - x[e];
                    x[e + 1] = whole[1] - x[e + 1];
                }
            }
        }
        memory.z_tile.set_eight(r, c, x);
    }
    if (thread < V) {
        memory.ref_value[thread] =
            reference_before(params, stats, row - std::int64_t{s.chunk_index} * scorer_chunk, V, thread);
    }
    memory.exponents.load(params.log_source + row, params.log_top + row, stats.m);
    copy_wait<1>();
    __syncthreads();
    // 2. Pairs, and q~_l . z.
    const mlstm_query_tile<E, F> query{memory.q};
    float products[1][4][4];
    multiply_pairs<2>(products, query, memory.k);
    weigh_pairs<E, 2>(memory, query, products);
    copy_wait<0>();
    __syncthreads();
    // 3. The state, then the pairs.
    multiply_state(outputs, query, memory.c);
    apply_pairs(memory, outputs);
}

inline constexpr auto mlstm_clamp = static_cast<float>(mLSTMScorer<>::clamp);
inline constexpr auto mlstm_norm_epsilon = static_cast<float>(mLSTMScorer<>::norm_epsilon);

/// Means of a warp's two rows over their `width` values, whose sums the warps of a row exchange in `sums`; it
/// may be written again after the next sync_rows.
template <int Parts, int NI>
__device__ inline void find_means(const mlstm_sums_along<Parts>& sums, const float (&h)[1][NI][4],
                                  std::int32_t width, float (&mean)[2]) {
    const int l = 16 * (warp_id() % 4) + lane_id() / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < NI; ++j) {
            sum += h[0][j][2 * r] + h[0][j][2 * r + 1];
        }
        sums.set(l + 8 * r, row_sum(sum));
    }
    sync_rows<Parts>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        mean[r] = sums.get(l + 8 * r) / static_cast<float>(width);
    }
}
/// h <- h + times * by[row], of a warp's part of the values, `Columns` of them; those beyond `width` stay.
template <int Columns, int NI>
__device__ inline void add_to_values(float (&h)[1][NI][4], std::int32_t width, const float (&by)[2],
                                     float times) {
    const int n0 = Columns * (warp_id() / 4) + lane_id() % 4 * 2;
#pragma unroll
    for (int j = 0; j < NI; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            h[0][j][e] = n0 + 8 * j + e % 2 < width ? fmaf(times, by[e / 2], h[0][j][e]) : h[0][j][e];
        }
    }
}

/// Per value of a plane's head, the norm's gain and the readout's weight: (1, 0) beyond the width.
template <int V, int Threads, class T>
__device__ __forceinline__ void load_readout(const mlstm_params<T>& params, std::int32_t plane,
                                             float2* numbers) {
    const std::int64_t at = std::int64_t{plane % params.streams.heads} * params.width;
    for (int i = static_cast<int>(threadIdx.x); i < V; i += Threads) {
        const bool there = i < params.width;
        numbers[i] = make_float2(there && params.norm_gain != nullptr ? params.norm_gain[at + i] : 1.0f,
                                 there ? params.readout[at + i] : 0.0f);
    }
}

/// Writes the scores of a chunk's outputs l from `skipped` to `count` to scores[l]. `number(i, gain,
/// readout)` gives the norm's gain and the weight of value i, 0 beyond the width, and `added(l)` what a
/// score has besides.
template <class E, int V, int Parts, class T, class Memory, class Number, class Added>
__device__ inline void score_outputs(const mlstm_params<T>& params, const Memory& memory, float* scores,
                                     std::int32_t skipped, std::int32_t count, std::int32_t bad,
                                     mlstm_chunk_outputs<V, Parts>& outputs, const Number& number,
                                     const Added& added) {
    constexpr int columns = mlstm_chunk_outputs<V, Parts>::columns, NI = columns / 8;
    const int m0 = 16 * (warp_id() % 4), n0 = columns * (warp_id() / 4), lane = lane_id();
    const bool norm = params.norm_gain != nullptr;
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        scale[r] = __fdividef(1.0f, outputs.divisor[r] < mlstm_clamp ? mlstm_clamp : outputs.divisor[r]);
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                outputs.h[0][j][e] *= scale[r];
            }
        }
    }
    if (params.centered) {
        float mean[2];
        find_means<Parts>(memory.sums[2], outputs.h, params.width, mean);
        add_to_values<columns>(outputs.h, params.width, mean, -1.0f);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                square += outputs.h[0][j][e] * outputs.h[0][j][e];
            }
        }
        memory.sums[1].set(m0 + lane / 4 + 8 * r, row_sum(square));
    }
    if (norm) {
        sync_rows<Parts>();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        scale[r] = norm
                       ? rsqrtf(memory.sums[1].get(m0 + lane / 4 + 8 * r) / static_cast<float>(params.width) +
                                mlstm_norm_epsilon)
                       : 1.0f;
    }
    float score[2] = {};
#pragma unroll
    for (int j = 0; j < NI; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float gain, readout;
            number(n0 + 8 * j + lane % 4 * 2 + e, gain, readout);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float x = outputs.h[0][j][2 * r + e] * scale[r] * gain;
                score[r] += x * sigmoid<E>(x) * readout;
            }
        }
    }
    memory.sums[2].set(m0 + lane / 4, row_sum(score[0]));
    memory.sums[2].set(m0 + lane / 4 + 8, row_sum(score[1]));
    sync_rows<Parts>();
    const int l = m0 + lane;
    if (warp_id() / 4 == 0 && lane < 16 && l >= skipped && l < count) {
        scores[l] = l < bad ? memory.sums[2].get(l) + added(l) : NAN;
    }
}

/// chunk_outputs: scores of the tokens that a chunk reads.
/// Grid: a block per chunk. Block: 256 threads. Shared memory: mlstm_chunk_outputs_memory<E, F, V, false>.
/// In: rows q, k [planes, chunks * 64, F], v [.., V] E; memory [chunks, F, V] E and sums [chunks, F] fp32,
/// the states before the chunks; chunk_stats of chunk_stabilizers; log_source, log_top, skipped; readout,
/// norm_gain, readout_bias.
/// Out: scores [B, heads, S] fp32, overwritten for the tokens that the chunk reads.
/// 1. The chunk's rows, state and numbers to shared memory.
/// 2. Pairs, w_lj (q~_l . k~_j), and q~_l . z. 3. h_l from the state and the pairs.
/// 4. Norm, SiLU, readout: scores.
template <class T, int F, int V>
__global__ void __launch_bounds__(mlstm_threads, mlstm_blocks<T>)
    mlstm_chunk_outputs_kernel(const mlstm_params<T> params) {
    if constexpr (!portable_code<T>) {
        return;
    }
    using E = mlstm_element<T>;
    const scorer_streams& streams = params.streams;
    const scorer_span s = streams.span_of_block();
    const std::int32_t skipped = params.first_output(s);
    if (skipped >= s.count) {
        return;
    }
    const mlstm_chunk_outputs_memory<E, F, V, false> memory(aligned_dynamic_shared());
    const mlstm_chunk_stats& stats = params.chunk_stats[params.chunk(s)];
    mlstm_chunk_outputs<V> outputs;
    compute_chunk_outputs<F, V>(params, s, memory, stats, outputs);
    const std::int64_t at = std::int64_t{s.h} * params.width;
    const auto number = [&](int i, float& gain, float& readout) {
        const bool there = i < params.width;
        gain = there && params.norm_gain != nullptr ? params.norm_gain[at + i] : 1.0f;
        readout = there ? params.readout[at + i] : 0.0f;
    };
    const auto added = [&](int l) {
        const float bias = params.readout_bias != nullptr ? params.readout_bias[s.h] : 0.0f;
        return bias + (params.skip != nullptr ? params.skipped[s.row(streams.chunks) + l] : 0.0f);
    };
    // 4. Norm, SiLU, readout.
    score_outputs<E>(params, memory, params.scores.head(s.b, s.h) + (s.first - streams.delay), skipped,
                     s.count, stats.bad, outputs, number, added);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
