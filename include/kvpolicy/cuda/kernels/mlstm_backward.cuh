// The backward pass of an mLSTM scorer (host/scorers/mlstm_backward_stream.hpp has the equations): the reads of each chunk, which
// give d N, d g and d q~; then, with the state A that runs backwards (mlstm_states.cuh), the tokens it absorbed.
//
// A pair is a token j and a read l from it on; its share of the gradient is T_lj = w_lj (q~_l . k~_j) G_lj. d log i_j is the sum of
// its pairs, d log f_t that of all pairs with j < t <= l. Both are summed as they are, pairs that leave the chunk through the
// states, so that what is small because few pairs count is not a difference of large sums: with d g_l = -d N_l . h_l of d N_l as it is
// rounded, G_lj = d N_l . (v~_j - h_l) cancels where it should.
#pragma once

#include <kvpolicy/cuda/blocks/mlstm_problem.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/kernels/mlp_scorer.cuh>
#include <kvpolicy/cuda/kernels/mlstm_read.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A warp's gradients of features, through the feature map, to the projections' columns of its rows: d y = p (d p - p . d p) for a
/// softmax, and Hedgehog's second half with the other sign. Rows [low, high) of the chunk; others are not written.
template <int F, class T, class E>
__device__ inline void store_through_features(const mlstm_problem<T>& problem, const shared_tile<E>& features,
                                              const float (&d)[1][F / 8][4], int high, std::int32_t width,
                                              T* to) {
    const int lane = lane_id();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 16 * warp_id() + lane / 4 + 8 * r;
        float along[2] = {};
#pragma unroll
        for (int j = 0; j < F / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                along[j / (F / 16)] += d[0][j][2 * r + e] * features.get(row, 8 * j + lane % 4 * 2 + e);
            }
        }
        along[0] = row_sum(along[0]);
        along[1] = row_sum(along[1]);
        if (!problem.hedgehog) {
            along[0] += along[1];
            along[1] = along[0];
        }
        if (row >= high) {
            continue;
        }
#pragma unroll
        for (int j = 0; j < F / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * j + lane % 4 * 2 + e;
                if (column >= problem.projection) {
                    continue;
                }
                float y = features.get(row, column) * (d[0][j][2 * r + e] - along[j / (F / 16)]);
                if (j < F / 16 && problem.hedgehog) {
                    y -= features.get(row, column + F / 2) *
                         (d[0][(j + F / 16) % (F / 8)][2 * r + e] - along[1]);
                }
                to[std::int64_t{row} * width + column] = static_cast<T>(y);
            }
        }
    }
}

/// Zeros in the columns [from, to) of rows [0, count).
template <class T>
__device__ inline void clear_columns(T* rows, std::int32_t width, std::int32_t from, std::int32_t to,
                                     int count) {
    const std::int32_t across = to - from;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < across * count;
         i += static_cast<std::int32_t>(blockDim.x)) {
        rows[std::int64_t{i / across} * width + from + i % across] = static_cast<T>(0.0f);
    }
}

/// Of a chunk's reads: d N_l, d g_l, exp(m - M_l) and their pairs with tokens before the chunk into rows, d (Wq x) and d score into d_rows_q, and the chunk's sums of
/// the readout's gradients.
template <class T, int F, int V>
__global__ void __launch_bounds__(128) mlstm_reads_backward_kernel(const mlstm_problem<T> problem) {
    using E = mlstm_element<T>;
    const scorer_streams& streams = problem.streams;
    const scorer_span s = streams.span(static_cast<std::int32_t>(blockIdx.x) / streams.slots,
                                       static_cast<std::int32_t>(blockIdx.x) % streams.slots);
    const std::int32_t width = problem.width;
    const std::int64_t row = s.row(streams.slots), chunk = problem.chunk(s);
    float* const sums = problem.d_readout + chunk * (2 * width + 1);
    T* const d_rows = problem.d_rows_q + row * problem.rows_q;
    const auto thread = static_cast<int>(threadIdx.x);
    const std::int32_t skipped = max(0, s.begin + streams.delay - s.first);
    if (skipped >= s.count) {
        for (int i = thread; i <= 2 * width; i += 128) {
            sums[i] = 0.0f;
        }
        clear_columns(d_rows, problem.rows_q, 0, problem.rows_q, s.count);
        return;
    }
    const mlstm_read_memory<E, F, V, true> memory(aligned_dynamic_shared());
    const double m = problem.frames[chunk].m;
    mlstm_reads<V> reads;
    read_chunk<F, V>(problem, s, memory, m, reads);

    const int m0 = 16 * warp_id(), lane = lane_id();
    const std::int64_t at = std::int64_t{s.h} * width;
    float d_g[2];
    bool clamped[2];
    float of_readout[V / 8][2] = {}, of_gain[V / 8][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        const bool in = l >= skipped && l < s.count;
        const float d_score =
            in ? gradient_of_score(streams, problem.d_scores, s, s.first + l - streams.delay) : 0.0f;
        clamped[r] = reads.divisor[r] < mlstm_clamp;
        const float inverse = 1.0f / (clamped[r] ? mlstm_clamp : reads.divisor[r]);
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                reads.h[0][j][e] = in ? reads.h[0][j][e] * inverse : 0.0f;
                square += reads.h[0][j][e] * reads.h[0][j][e];
            }
        }
        const bool norm = problem.norm_gain != nullptr;
        const float scale =
            norm ? 1.0f / sqrtf(row_sum(square) / static_cast<float>(width) + mlstm_norm_epsilon) : 1.0f;
        // d h, in a second set of registers.
        float d_h[V / 8][2];
        float along = 0.0f;
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const std::int32_t i = 8 * j + lane % 4 * 2 + e;
                d_h[j][e] = 0.0f;
                if (i < width) {
                    const float h = reads.h[0][j][2 * r + e];
                    const float gain = norm ? problem.norm_gain[at + i] : 1.0f;
                    float slope;
                    of_readout[j][e] +=
                        d_score * activated<true>(scorer_activation::silu, h * scale * gain, slope);
                    const float d = d_score * problem.readout[at + i] * slope;
                    of_gain[j][e] += d * h * scale;
                    d_h[j][e] = d * gain;
                    along += d_h[j][e] * h;
                }
            }
        }
        along = norm ? row_sum(along) * scale * scale / static_cast<float>(width) : 0.0f;
        float of_divisor = 0.0f;
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float h = reads.h[0][j][2 * r + e];
                const float d = scale * (d_h[j][e] - h * along);
                const float d_n = static_cast<float>(static_cast<E>(d * inverse));
                of_divisor += d_n * h;
                reads.h[0][j][2 * r + e] = d_n;
            }
        }
        of_divisor = row_sum(of_divisor);
        d_g[r] = clamped[r] ? 0.0f : -of_divisor;
        if (lane % 4 == 0) {
            problem.d_g[row + l] = d_g[r];
            problem.kept[row + l] = in ? reads.kept[r] : 0.0f;
            if (l < s.count) {
                d_rows[std::int64_t{l} * problem.rows_q + problem.at_skip] = static_cast<T>(d_score);
            }
        }
#pragma unroll
        for (int j = 0; j < V / 8; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            memory.d_n.set_pair(l, column, reads.h[0][j][2 * r], reads.h[0][j][2 * r + 1]);
            store_pair(problem.d_n + (row + l) * V + column, reads.h[0][j][2 * r], reads.h[0][j][2 * r + 1]);
        }
    }
    // Sums over the chunk's reads: over a warp's rows, then over the warps.
#pragma unroll
    for (int j = 0; j < V / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                of_readout[j][e] += __shfl_xor_sync(all_lanes, of_readout[j][e], step);
                of_gain[j][e] += __shfl_xor_sync(all_lanes, of_gain[j][e], step);
            }
            if (lane < 4) {
                float* const to = memory.columns + (warp_id() * V + 8 * j + lane * 2 + e) * 2;
                to[0] = of_readout[j][e];
                to[1] = of_gain[j][e];
            }
        }
    }
    __syncthreads();
    for (int i = thread; i < 2 * width; i += 128) {
        float sum = 0.0f;
        for (int w = 0; w < 4; ++w) {
            sum += memory.columns[(w * V + i % width) * 2 + i / width];
        }
        sums[i] = sum;
    }
    if (thread == 0) {
        float sum = 0.0f;
        for (int l = skipped; l < s.count; ++l) {
            sum += problem.d_scores.head(s.b, s.h)[s.first + l - streams.delay];
        }
        sums[2 * width] = sum;
    }

    // w_lj G_lj, with G_lj = d N_l . v~_j + d g_l, takes the place of the weights.
    float g[1][8][4];
    clear(g);
    add_product<1, 8, V, false, false>(g, memory.d_n, m0, memory.v, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            memory.weights.set_pair(l, column, memory.exponents.weight(l, column) * (g[0][j][2 * r] + d_g[r]),
                                    memory.exponents.weight(l, column + 1) * (g[0][j][2 * r + 1] + d_g[r]));
        }
    }
    __syncwarp();
    // d q~ = exp(m - M_l) (C d N + z d g) + sum_j w_lj G_lj k~_j
    float d_q[1][F / 8][4];
    clear(d_q);
    add_product<1, F / 8, V, false, false>(d_q, memory.d_n, m0, memory.c, 0);
#pragma unroll
    for (int j = 0; j < F / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            d_q[0][j][e] =
                reads.kept[e / 2] * (d_q[0][j][e] + d_g[e / 2] * memory.z[8 * j + lane % 4 * 2 + e % 2]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        float along = 0.0f;
#pragma unroll
        for (int j = 0; j < F / 8; ++j) {
            const int column = 8 * j + lane % 4 * 2;
            along += d_q[0][j][2 * r] * memory.q.get(l, column) +
                     d_q[0][j][2 * r + 1] * memory.q.get(l, column + 1);
        }
        along = row_sum(along);
        if (lane % 4 == 0) {
            problem.carried[row + l] = along;
        }
    }
    add_product<1, F / 8, scorer_chunk, false, true>(d_q, memory.weights, m0, memory.k, 0);
    store_through_features<F>(problem, memory.q, d_q, s.count, problem.rows_q, d_rows);
    clear_columns(d_rows, problem.rows_q, problem.projection, problem.at_skip, s.count);
    clear_columns(d_rows, problem.rows_q, problem.at_skip + 1, problem.rows_q, s.count);
}

/// Shared memory of mlstm_tokens_backward_kernel.
template <class E, int F, int V>
struct mlstm_tokens_memory {
    static constexpr int pitch = scorer_chunk + 1;

    shared_tile<E> q, k, v, d_n, weights, gradients;
    shared_tile<E> a;  // where pairs was
    float* pairs;      // [64][pitch]: T_lj in row j, then its sums from column l to the end of a half
    float* a_z;
    float* d_g;
    float* carried;
    float* later;   // pairs of a token with reads after the chunk
    float* inside;  // with reads in it
    float* across;  // [4]
    float* halves;  // [2][64]: pairs in the chunk across a token, by halves of their tokens
    mlstm_exponents exponents;
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_tokens_memory(unsigned char* memory) {
        shared_parts parts(memory);
        q = parts.tile<E>(scorer_chunk, F);
        k = parts.tile<E>(scorer_chunk, F);
        v = parts.tile<E>(scorer_chunk, V);
        d_n = parts.tile<E>(scorer_chunk, V);
        weights = parts.tile<E>(scorer_chunk, scorer_chunk);
        gradients = parts.tile<E>(scorer_chunk, scorer_chunk);
        a = parts.tile<E>(F, V);
        pairs = reinterpret_cast<float*>(a.data);
        constexpr int more = scorer_chunk * pitch * 4 - static_cast<int>(shared_tile<E>::bytes(F, V));
        parts.take<unsigned char>(more > 0 ? more : 0);
        a_z = parts.take<float>(F);
        d_g = parts.take<float>(scorer_chunk);
        carried = parts.take<float>(scorer_chunk);
        later = parts.take<float>(scorer_chunk);
        inside = parts.take<float>(scorer_chunk);
        across = parts.take<float>(4);
        halves = parts.take<float>(2 * scorer_chunk);
        exponents.source = parts.take<double>(scorer_chunk);
        exponents.most = parts.take<double>(scorer_chunk);
        bytes = parts.bytes();
    }
};

/// The pairs of a chunk's tokens with its own reads, tokens on rows and reads on columns, four warps of 16 tokens: weights w_lj (q~_l . k~_j)
/// and w_lj G_lj into shared memory, sums over a token's pairs, and over all pairs across each token. Ends with a barrier.
template <class E, int F, int V>
__device__ inline void pairs_of_chunk(const mlstm_tokens_memory<E, F, V>& memory) {
    constexpr int pitch = mlstm_tokens_memory<E, F, V>::pitch;
    const int m0 = 16 * warp_id(), lane = lane_id();
    float products[1][8][4], g[1][8][4];
    clear(products);
    clear(g);
    add_product<1, 8, F, false, false>(products, memory.k, m0, memory.q, 0);
    add_product<1, 8, V, false, false>(g, memory.v, m0, memory.d_n, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int j = m0 + lane / 4 + 8 * r;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float weight[2], gradient[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int l = 8 * i + lane % 4 * 2 + e;
                const float w = memory.exponents.weight(l, j);
                // Rounded as the read's, so that its pairs add up to what its quotient says.
                weight[e] = static_cast<float>(static_cast<E>(w * products[0][i][2 * r + e]));
                const float of_pair = g[0][i][2 * r + e] + memory.d_g[l];
                gradient[e] = w * of_pair;
                memory.pairs[j * pitch + l] = weight[e] * of_pair;
                sum += weight[e] * of_pair;
            }
            memory.weights.set_pair(j, 8 * i + lane % 4 * 2, weight[0], weight[1]);
            memory.gradients.set_pair(j, 8 * i + lane % 4 * 2, gradient[0], gradient[1]);
        }
        sum = row_sum(sum);
        if (lane % 4 == 0) {
            memory.inside[j] = sum;
        }
    }
    __syncthreads();
    // Pairs across t: tokens j < t, reads l >= t. Sums along each row from l to the end of its half, then down the columns.
    const int at = static_cast<int>(threadIdx.x) % scorer_chunk,
              half = static_cast<int>(threadIdx.x) / scorer_chunk;
    float sum = 0.0f;
    for (int l = 32 * half + 31; l >= 32 * half; --l) {
        sum += memory.pairs[at * pitch + l];
        memory.pairs[at * pitch + l] = sum;
    }
    __syncthreads();
    sum = 0.0f;
    for (int j = 32 * half; j < min(32 * half + 32, at); ++j) {
        sum += memory.pairs[j * pitch + at] + (at < 32 ? memory.pairs[j * pitch + 32] : 0.0f);
    }
    memory.halves[half * scorer_chunk + at] = sum;
    __syncthreads();
}

/// Of a chunk's tokens: d (Wk x), d v~ and d of the gates' preactivations into d_rows_k, and the sums of the latter. Four warps of 16
/// tokens each.
template <class T, int F, int V>
__global__ void __launch_bounds__(128) mlstm_tokens_backward_kernel(const mlstm_problem<T> problem) {
    using E = mlstm_element<T>;
    const scorer_streams& streams = problem.streams;
    const scorer_span s = streams.span(static_cast<std::int32_t>(blockIdx.x) / streams.slots,
                                       static_cast<std::int32_t>(blockIdx.x) % streams.slots);
    const std::int64_t row = s.row(streams.slots), chunk = problem.chunk(s);
    const auto thread = static_cast<int>(threadIdx.x);
    if (s.count == 0) {
        if (thread < 2) {
            problem.d_gates[chunk * 2 + thread] = 0.0f;
        }
        return;
    }
    report_bad_rows(streams, problem.source, s);
    const mlstm_tokens_memory<E, F, V> memory(aligned_dynamic_shared());
    const mlstm_frame& frame = problem.frames[chunk];
    const bool reads = frame.reads < scorer_chunk;
    copy_rows(memory.k, problem.k + row * F, F, F, scorer_chunk, 128);
    copy_rows(memory.v, problem.v + row * V, V, V, scorer_chunk, 128);
    if (reads) {
        copy_rows(memory.q, problem.q + row * F, F, F, scorer_chunk, 128);
        copy_rows(memory.d_n, problem.d_n + row * V, V, V, scorer_chunk, 128);
    }
    copy_commit();
    for (int i = thread; i < F; i += 128) {
        memory.a_z[i] = problem.d_sums[chunk * F + i];
    }
    if (thread < scorer_chunk) {
        memory.d_g[thread] = reads ? problem.d_g[row + thread] : 0.0f;
        memory.carried[thread] = reads ? problem.carried[row + thread] : 0.0f;
        memory.inside[thread] = 0.0f;
        memory.halves[thread] = 0.0f;
        memory.halves[scorer_chunk + thread] = 0.0f;
    }
    memory.exponents.load(problem.log_source + row, problem.log_top + row, frame.m);
    copy_wait<0>();
    __syncthreads();
    if (reads) {
        pairs_of_chunk<E, F, V>(memory);
    }
    copy_rows(memory.a, problem.d_memory + chunk * F * V, V, V, F, 128);
    copy_commit();
    copy_wait<0>();
    __syncthreads();

    const int m0 = 16 * warp_id(), lane = lane_id();
    // exp(s_j - M at the chunk's end): how much of a token the state after the chunk has.
    float out[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        out[r] = memory.exponents.weight(scorer_chunk - 1, m0 + lane / 4 + 8 * r);
    }
    T* const d_rows = problem.d_rows_k + row * problem.rows_k;
    {
        // d k~_j = sum_l w_lj G_lj q~_l + o_j (A v~_j + a)
        float d_k[1][F / 8][4];
        clear(d_k);
        add_product<1, F / 8, V, false, false>(d_k, memory.v, m0, memory.a, 0);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int j = m0 + lane / 4 + 8 * r;
            float along = 0.0f;
#pragma unroll
            for (int i = 0; i < F / 8; ++i) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = 8 * i + lane % 4 * 2 + e;
                    float& d = d_k[0][i][2 * r + e];
                    d = out[r] * (d + memory.a_z[column]);
                    along += d * memory.k.get(j, column);
                }
            }
            along = row_sum(along);
            if (lane % 4 == 0) {
                memory.later[j] = along;
            }
        }
        if (reads) {
            add_product<1, F / 8, scorer_chunk, false, true>(d_k, memory.gradients, m0, memory.q, 0);
        }
        store_through_features<F>(problem, memory.k, d_k, s.count, problem.rows_k, d_rows);
    }
    {
        // d v~_j = sum_l w_lj (q~_l . k~_j) d N_l + o_j A^T k~_j
        float d_v[1][V / 8][4];
        clear(d_v);
        add_product<1, V / 8, F, false, true>(d_v, memory.k, m0, memory.a, 0);
#pragma unroll
        for (int i = 0; i < V / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                d_v[0][i][e] *= out[e / 2];
            }
        }
        if (reads) {
            add_product<1, V / 8, scorer_chunk, false, true>(d_v, memory.weights, m0, memory.d_n, 0);
        }
#pragma unroll
        for (int i = 0; i < V / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = m0 + lane / 4 + 8 * (e / 2);
                const std::int32_t column = 8 * i + lane % 4 * 2 + e % 2;
                if (j < s.count && column < problem.width) {
                    d_rows[std::int64_t{j} * problem.rows_k + problem.at_v + column] =
                        static_cast<T>(d_v[0][i][e]);
                }
            }
        }
    }
    clear_columns(d_rows, problem.rows_k, problem.projection, problem.at_v, s.count);
    clear_columns(d_rows, problem.rows_k, problem.at_v + problem.width, problem.at_i, s.count);
    clear_columns(d_rows, problem.rows_k, problem.at_i + 1, problem.at_f, s.count);
    clear_columns(d_rows, problem.rows_k, problem.at_f + 1, problem.rows_k, s.count);

    // Pairs across the whole chunk: a token before it, a read after it.
    float across = 0.0f;
    const E* const before = problem.memory + chunk * F * V;
    for (int i = thread; i < F * V; i += 128) {
        across += static_cast<float>(before[i]) * memory.a.get(i / V, i % V);
    }
    for (int i = thread; i < F; i += 128) {
        across += problem.sums[chunk * F + i] * memory.a_z[i];
    }
    across = warp_sum(across) * frame.keep;
    if (lane == 0) {
        memory.across[warp_id()] = across;
    }
    __syncthreads();
    if (warp_id() != 0) {
        return;
    }
    // d log f_t = pairs across the chunk + reads from t on of earlier tokens + tokens before t read later + those inside; two tokens a
    // lane.
    const int at = 2 * lane;
    const float carried[2] = {memory.carried[at], memory.carried[at + 1]};
    const float later[2] = {memory.later[at], memory.later[at + 1]};
    float suffix = carried[0] + carried[1], prefix = later[0] + later[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float behind = __shfl_down_sync(all_lanes, suffix, static_cast<unsigned>(step));
        const float ahead = __shfl_up_sync(all_lanes, prefix, static_cast<unsigned>(step));
        suffix += lane + step < 32 ? behind : 0.0f;
        prefix += lane >= step ? ahead : 0.0f;
    }
    const float ahead = __shfl_up_sync(all_lanes, prefix, 1u);
    prefix = lane > 0 ? ahead : 0.0f;
    const float whole = memory.across[0] + memory.across[1] + memory.across[2] + memory.across[3];
    const float behind = __shfl_down_sync(all_lanes, suffix, 1u);
    const float suffixes[2] = {suffix, carried[1] + (lane < 31 ? behind : 0.0f)};
    const float prefixes[2] = {prefix, prefix + later[0]};
    float of_gates[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int j = at + i;
        if (j < s.count) {
            const float d_log_f =
                whole + suffixes[i] + prefixes[i] + memory.halves[j] + memory.halves[scorer_chunk + j];
            const float d_i = (memory.inside[j] + memory.later[j]) * problem.slope_i[row + j];
            // Nothing is forgotten before a stream's first token.
            const float d_f = s.first + j == s.begin ? 0.0f : d_log_f * problem.slope_f[row + j];
            d_rows[std::int64_t{j} * problem.rows_k + problem.at_i] = static_cast<T>(d_i);
            d_rows[std::int64_t{j} * problem.rows_k + problem.at_f] = static_cast<T>(d_f);
            of_gates[0] += d_i;
            of_gates[1] += d_f;
        }
    }
    of_gates[0] = warp_sum(of_gates[0]);
    of_gates[1] = warp_sum(of_gates[1]);
    if (lane == 0) {
        problem.d_gates[chunk * 2] = of_gates[0];
        problem.d_gates[chunk * 2 + 1] = of_gates[1];
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
