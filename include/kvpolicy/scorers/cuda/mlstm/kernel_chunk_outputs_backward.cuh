// The backward pass of an mLSTM scorer (scorers/host/mlstm_backward_stream.hpp has the equations): the outputs of each chunk, which
// give d N, d g and d q~; then, with the state A that runs backwards (kernel_chunk_states.cuh), the tokens it absorbed.
//
// A pair is a token j and an output l from it on; its share of the gradient is T_lj = w_lj (q~_l . k~_j) G_lj. d log i_j is the sum of
// its pairs, d log f_t that of all pairs with j < t <= l. Both are summed as they are, pairs that leave the chunk through the
// states, so that what is small because few pairs count is not a difference of large sums: with d g_l = -d N_l . h_l of d N_l as it is
// rounded, G_lj = d N_l . (v~_j - h_l) cancels where it should.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_mlp.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A warp's gradients of its 16 rows of features: the same F / 4 columns of either half, so that Hedgehog's pairs meet in a thread.
template <int F>
struct feature_gradients {
    float of[2][1][F / 32][4];

    __device__ void clear_all() {
        clear(of[0]);
        clear(of[1]);
    }
    __device__ static int column(int half, int j) {
        return F / 2 * half + F / 4 * (warp_id() / 4) + 8 * j + lane_id() % 4 * 2;
    }
    template <int Depth, bool TransB, class E>
    __device__ void add(const shared_tile<E>& a, int m0, const shared_tile<E>& b) {
        add_product<1, F / 32, Depth, false, TransB>(of[0], a, m0, b, F / 4 * (warp_id() / 4));
        add_product<1, F / 32, Depth, false, TransB>(of[1], a, m0, b, F / 2 + F / 4 * (warp_id() / 4));
    }
    /// Of either half, sums over this warp's columns of features times gradients, to where a row's other warp's are.
    template <class E>
    __device__ void sum_along(const shared_tile<E>& features, int m0, const mlstm_row_sums& low,
                              const mlstm_row_sums& high) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = m0 + lane_id() / 4 + 8 * r;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float along = 0.0f;
                const auto of_row = features.pairs_of(row, column(half, 0));
#pragma unroll
                for (int j = 0; j < F / 32; ++j) {
                    float p[2];
                    of_row.get(j, p[0], p[1]);
                    along += of[half][0][j][2 * r] * p[0] + of[half][0][j][2 * r + 1] * p[1];
                }
                (half == 0 ? low : high).set(row, row_sum(along));
            }
        }
    }
    /// Through the feature map, in place: d y = p (d - p . d) for a softmax, and Hedgehog's second half with the other sign.
    template <class T, class E>
    __device__ void through_map(const mlstm_params<T>& params, const shared_tile<E>& features, int m0,
                                const mlstm_row_sums& low, const mlstm_row_sums& high) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = m0 + lane_id() / 4 + 8 * r;
            float along[2] = {low.get(row), high.get(row)};
            if (!params.hedgehog) {
                along[0] += along[1];
                along[1] = along[0];
            }
            const auto of_low = features.pairs_of(row, column(0, 0));
            const auto of_high = features.pairs_of(row, column(1, 0));
#pragma unroll
            for (int j = 0; j < F / 32; ++j) {
                float p[2][2];
                of_low.get(j, p[0][0], p[0][1]);
                of_high.get(j, p[1][0], p[1][1]);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float y[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        y[half] = p[half][e] * (of[half][0][j][2 * r + e] - along[half]);
                    }
                    if (params.hedgehog) {
                        y[0] -= y[1];
                        y[1] = 0.0f;
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        of[half][0][j][2 * r + e] = column(half, j) + e < params.projection ? y[half] : 0.0f;
                    }
                }
            }
        }
    }
    template <class T>
    __device__ void store(const shared_tile<T>& to, int m0) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto row = to.pairs_of(m0 + lane_id() / 4 + 8 * r, column(half, 0));
#pragma unroll
                for (int j = 0; j < F / 32; ++j) {
                    row.set(j, of[half][0][j][2 * r], of[half][0][j][2 * r + 1]);
                }
            }
        }
    }
};

/// Of rows [0, count) of `width` numbers, `across` times eight columns from `from` on (all multiples of 8), from get(row, column, x), by thread
/// `thread` of `threads`.
template <class T, class Get>
__device__ inline void write_columns(T* rows, std::int32_t width, std::int32_t from, std::int32_t across,
                                     int count, int thread, int threads, const Get& get) {
    if (across == 0) {
        return;
    }
    std::int32_t r = thread / across, c = thread % across;
    const std::int32_t step_r = threads / across, step_c = threads % across;
    while (r < count) {
        float x[8] = {};
        get(r, from + 8 * c, x);
        store_eight(rows + std::int64_t{r} * width + from + 8 * c, x);
        r += step_r;
        c += step_c;
        if (c >= across) {
            c -= across;
            ++r;
        }
    }
}
/// The same for whole rows, by all threads.
template <class T, class Get>
__device__ inline void write_rows(T* rows, std::int32_t width, int count, const Get& get) {
    write_columns(rows, width, 0, width / 8, count, static_cast<int>(threadIdx.x), mlstm_threads, get);
}

/// Of a chunk's outputs: d N_l, d g_l, exp(m - M_l) and their pairs with tokens before the chunk into rows, d (Wq x) and d score into d_rows_q, and the chunk's sums of
/// the readout's gradients.
template <class T, int F, int V, bool Small>
__global__ void __launch_bounds__(mlstm_threads, mlstm_blocks<T>)
    mlstm_chunk_outputs_backward_kernel(const mlstm_params<T> params) {
    using E = mlstm_element<T>;
    const scorer_streams& streams = params.streams;
    const scorer_span s = streams.span(static_cast<std::int32_t>(blockIdx.x) / streams.chunks,
                                       static_cast<std::int32_t>(blockIdx.x) % streams.chunks);
    const std::int32_t width = params.width;
    const std::int64_t row = s.row(streams.chunks), chunk = params.chunk(s);
    float* const sums = params.d_readout + chunk * (2 * width + 1);
    T* const d_rows = params.d_rows_q + row * params.rows_q;
    const auto thread = static_cast<int>(threadIdx.x);
    const std::int32_t skipped = max(0, s.begin + streams.delay - s.first);
    if (skipped >= s.count) {
        for (int i = thread; i <= 2 * width; i += mlstm_threads) {
            sums[i] = 0.0f;
        }
        write_rows(d_rows, params.rows_q, s.count, [](int, int, float(&)[8]) {});
        return;
    }
    const mlstm_chunk_outputs_memory<E, F, V, true, Small> memory(aligned_dynamic_shared());
    if (thread < scorer_chunk) {
        memory.d_score[thread] =
            thread >= skipped && thread < s.count
                ? gradient_of_score(streams, params.d_scores, s, s.first + thread - streams.delay)
                : 0.0f;
    }
    mlstm_chunk_outputs<V> outputs;
    compute_chunk_outputs<F, V>(params, s, memory, params.chunk_stats[chunk], outputs);

    const int m0 = 16 * (warp_id() % 4), half = warp_id() / 4, lane = lane_id();
    const std::int64_t at = std::int64_t{s.h} * width;
    const bool norm = params.norm_gain != nullptr;
    float inverse[2], scale[2], d_score[2];
    bool in[2], clamped[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        in[r] = l >= skipped && l < s.count;
        d_score[r] = memory.d_score[l];
        clamped[r] = outputs.divisor[r] < mlstm_clamp;
        inverse[r] = __fdividef(1.0f, clamped[r] ? mlstm_clamp : outputs.divisor[r]);
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < V / 16; ++j) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                outputs.h[0][j][e] = in[r] ? outputs.h[0][j][e] * inverse[r] : 0.0f;
                square += outputs.h[0][j][e] * outputs.h[0][j][e];
            }
        }
        memory.sums[1].set(l, row_sum(square));
    }
    sync_rows();            // these rows' weights are free too: sums down the columns take their place
    float d[1][V / 16][4];  // d h, then d N
    float along[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        scale[r] = norm ? rsqrtf(memory.sums[1].get(m0 + lane / 4 + 8 * r) / static_cast<float>(width) +
                                 mlstm_norm_epsilon)
                        : 1.0f;
    }
#pragma unroll
    for (int pair = 0; pair < V / 16; pair += 2) {
        float down
            [8];  // sums of the readout's gradient and the gain's by columns: [2 x 8 columns][2 neighbors][which]
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int j = pair + n / 2, e = n % 2;
            const std::int32_t i = V / 2 * half + 8 * j + lane % 4 * 2 + e;
            const bool there = i < width;
            const float gain = there && norm ? params.norm_gain[at + i] : 1.0f;
            const float readout = there ? params.readout[at + i] : 0.0f;
            float of_readout = 0.0f, of_gain = 0.0f;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float h = outputs.h[0][j][2 * r + e], y = h * scale[r] * gain;
                const float open = sigmoid<E>(y);
                of_readout += d_score[r] * y * open;
                const float to = d_score[r] * readout * (open * (1.0f + y * (1.0f - open)));
                of_gain += to * h * scale[r];
                d[0][j][2 * r + e] = to * gain;
                along[r] += to * gain * h;
            }
            down[2 * n] = of_readout;
            down[2 * n + 1] = of_gain;
        }
        const float sum = sums_down(down);
        const int n = lane / 8;
        memory.columns(warp_id() %
                       4)[(V / 2 * half + 8 * (pair + n / 2) + lane % 4 * 2 + n % 2) * 2 + lane / 4 % 2] =
            sum;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        memory.sums[2].set(m0 + lane / 4 + 8 * r, row_sum(along[r]));
    }
    __syncthreads();
    for (int i = thread; i < 2 * width; i += mlstm_threads) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            sum += memory.columns(w)[i % width * 2 + i / width];
        }
        sums[i] = sum;
    }
    if (warp_id() == 7) {
        const float sum = warp_sum(memory.d_score[lane] + memory.d_score[lane + 32]);
        if (lane == 0) {
            sums[2 * width] = sum;
        }
    }
    float of_divisor[2] = {}, of_state[2] = {};  // - d g_l, and d N_l . ref_value + d g_l
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        const float back =
            norm ? memory.sums[2].get(l) * scale[r] * scale[r] / static_cast<float>(width) : 0.0f;
        const auto to_d_n = memory.d_n.pairs_of(l, V / 2 * half + lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < V / 16; ++j) {
            const int column = V / 2 * half + 8 * j + lane % 4 * 2;
            float pair[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                pair[e] = scale[r] * (d[0][j][2 * r + e] - outputs.h[0][j][2 * r + e] * back) * inverse[r];
            }
            round_pair<E>(pair[0], pair[1]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float h = outputs.h[0][j][2 * r + e];
                of_divisor[r] += pair[e] * h;
                of_state[r] += pair[e] * (memory.ref_value[column + e] - (clamped[r] ? 0.0f : h));
            }
            to_d_n.set(j, pair[0], pair[1]);
        }
        memory.sums[3].set(l, row_sum(of_divisor[r]));
        memory.sums[4].set(l, row_sum(of_state[r]));
    }
    __syncthreads();  // nobody reads the columns' sums any more either
    for (int i = thread; i < scorer_chunk * V / 8; i += mlstm_threads) {
        float x[8];
        memory.d_n.get_eight(i / (V / 8), i % (V / 8) * 8, x);
        store_eight(params.d_n + row * V + i * 8, x);
    }

    // w_lj G_lj, with G_lj = d N_l . v~_j + d g_l, takes the place of the weights.
    float g[1][4][4];
    clear(g);
    if (32 * half < m0 + 16) {
        add_product<1, 4, V, false, false>(g, memory.d_n, m0, memory.v, 32 * half);
    }
    const shared_tile<E> queries = memory.queries();
    if constexpr (Small) {
        __syncthreads();  // nobody reads values any more
        copy_slice<scorer_chunk, F, mlstm_threads>(queries, 0, static_cast<const E*>(params.q + row * F), F);
        copy_commit();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        const float d_g = clamped[r] ? 0.0f : -memory.sums[3].get(l);
        if (half == 0 && lane % 4 == 0) {
            params.d_g[row + l] = d_g;
            params.kept[row + l] = in[r] ? memory.exponents.kept[l] : 0.0f;
        }
        const auto weights = memory.weights.pairs_of(l, 32 * half + lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = 32 * half + 8 * j + lane % 4 * 2;
            weights.set(j, memory.exponents.weight(l, column) * (g[0][j][2 * r] + d_g),
                        memory.exponents.weight(l, column + 1) * (g[0][j][2 * r + 1] + d_g));
        }
    }
    // d q~ = exp(m - M_l) (C d N + z d g) + sum_j w_lj G_lj k~_j, the state's part first
    feature_gradients<F> d_q;
    d_q.clear_all();
    d_q.template add<V, false>(memory.d_n, m0, memory.c);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int l = m0 + lane / 4 + 8 * r;
        const float kept = memory.exponents.kept[l], state = memory.sums[4].get(l);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < F / 32; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = d_q.of[i][0][j][2 * r + e];
                    x = kept * (x + state * memory.z[d_q.column(i, j) + e]);
                }
            }
        }
    }
    if constexpr (Small) {
        copy_wait<0>();
        __syncthreads();
    }
    d_q.sum_along(queries, m0, memory.sums[0], memory.sums[1]);
    sync_rows();
    if (half == 0 && lane < 16) {
        params.carried[row + m0 + lane] = memory.sums[0].get(m0 + lane) + memory.sums[1].get(m0 + lane);
    }
    d_q.template add<scorer_chunk, true>(memory.weights, m0, memory.k);
    d_q.sum_along(queries, m0, memory.sums[2], memory.sums[3]);
    __syncthreads();
    d_q.through_map(params, queries, m0, memory.sums[2], memory.sums[3]);
    const shared_tile<T> to{memory.k.data, scorer_chunk};
    d_q.store(to, m0);
    __syncthreads();
    write_rows(d_rows, params.rows_q, s.count, [&](int r, int c, float(&x)[8]) {
        if (c < params.at_skip) {
            to.get_eight(r, c, x);
        } else if (c == params.at_skip) {
            x[0] = memory.d_score[r];
        }
    });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
