// The block of chunk_outputs_backward: the outputs of one chunk.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A warp's gradients of its 16 rows of features: the same F / 4 columns of either half, so that Hedgehog's
/// pairs meet in a thread.
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
    /// Of either half, sums over this warp's columns of features times gradients, to where a row's other
    /// warp's are.
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
    /// Through the feature map, in place: d y = p (d - p . d) for a softmax, and Hedgehog's second half with
    /// the other sign.
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

/// Of rows [0, count) of `width` numbers, `across` times eight columns from `from` on (all multiples of 8),
/// from get(row, column, x), by thread `thread` of `threads`.
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

/// Small: as in mlstm_chunk_outputs_memory. Eight warps: warp i has rows 16 (i % 4) to 16 (i % 4) + 15 and
/// half i / 4 of the columns of each product.
template <class T, int F, int V, bool Small>
struct chunk_outputs_backward_agent {
    using E = mlstm_element<T>;
    using memory_type = mlstm_chunk_outputs_memory<E, F, V, true, Small>;
    // Arrays in registers are objects of run(), one each (agent_chunk_states.cuh says why).
    using values_type = float[1][V / 16][4];

    /// Numbers of the thread's two rows.
    struct row_numbers {
        bool in[2], clamped[2];  // the row is an output; its divisor is below the clamp
        float inverse[2], scale[2], d_score[2];
        float mean[2];  // what a LayerNorm takes from h
    };

    const mlstm_params<T>& params;
    const scorer_span& s;
    const memory_type memory;
    const std::int32_t skipped, width;
    const std::int64_t row, chunk;
    const int thread, m0, half, lane;
    const bool norm;

    __device__ __forceinline__ chunk_outputs_backward_agent(const mlstm_params<T>& of,
                                                            const scorer_span& span, std::int32_t reads_from)
        : params(of),
          s(span),
          memory(aligned_dynamic_shared()),
          skipped(reads_from),
          width(of.width),
          row(span.row(of.streams.chunks)),
          chunk(of.chunk(span)),
          thread(static_cast<int>(threadIdx.x)),
          m0(16 * (warp_id() % 4)),
          half(warp_id() / 4),
          lane(lane_id()),
          norm(of.norm_gain != nullptr) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        if (thread < scorer_chunk) {  // 1
            memory.d_score[thread] = thread >= skipped && thread < s.count
                                         ? gradient_of_score(params.streams, params.d_scores, s,
                                                             s.first + thread - params.streams.delay)
                                         : 0.0f;
        }
        mlstm_chunk_outputs<V> outputs;
        compute_chunk_outputs<F, V>(params, s, memory, params.chunk_stats[chunk], outputs);
        row_numbers rows;
        divide(outputs, rows);
        sync_rows();    // these rows' weights are free: sums down the columns take their place
        values_type d;  // d h, then d N
        through_scores(outputs, rows, d);  // 2
        __syncthreads();
        store_sums();
        store_d_n(outputs, rows, d);  // 3
        __syncthreads();              // the columns' sums are free as well
        for (int i = thread; i < scorer_chunk * V / 8; i += mlstm_threads) {
            float x[8];
            memory.d_n.get_eight(i / (V / 8), i % (V / 8) * 8, x);
            store_eight(params.d_n + row * V + i * 8, x);
        }
        const shared_tile<E> queries = memory.queries();
        weigh_gradients(rows, queries);  // 4
        feature_gradients<F> d_q;
        through_pairs(d_q, queries);  // 5
        __syncthreads();
        d_q.through_map(params, queries, m0, memory.sums[2], memory.sums[3]);  // 6
        const shared_tile<T> to{memory.k.data, scorer_chunk};
        d_q.store(to, m0);
        __syncthreads();
        write_rows(params.d_rows_q + row * params.rows_q, params.rows_q, s.count,
                   [&](int r, int c, float(&x)[8]) {
                       if (c < params.at_skip) {
                           to.get_eight(r, c, x);
                       } else if (c == params.at_skip) {
                           x[0] = memory.d_score[r];
                       }
                   });
    }

  private:
    /// Phase 1: h_l from N and its divisor, in place, centered for a LayerNorm, and the sums of its squares.
    __device__ __forceinline__ void divide(mlstm_chunk_outputs<V>& outputs, row_numbers& rows) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int l = m0 + lane / 4 + 8 * r;
            rows.in[r] = l >= skipped && l < s.count;
            rows.d_score[r] = memory.d_score[l];
            rows.clamped[r] = outputs.divisor[r] < mlstm_clamp;
            rows.inverse[r] = __fdividef(1.0f, rows.clamped[r] ? mlstm_clamp : outputs.divisor[r]);
#pragma unroll
            for (int j = 0; j < V / 16; ++j) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    outputs.h[0][j][e] = rows.in[r] ? outputs.h[0][j][e] * rows.inverse[r] : 0.0f;
                }
            }
        }
        if (params.centered) {
            find_means<2>(memory.sums[3], outputs.h, width, rows.mean);
            add_to_values<V / 2>(outputs.h, width, rows.mean, -1.0f);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < V / 16; ++j) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    square += outputs.h[0][j][e] * outputs.h[0][j][e];
                }
            }
            memory.sums[1].set(m0 + lane / 4 + 8 * r, row_sum(square));
        }
    }

    /// Phase 2: back through the readout, SiLU and the norm's gain to d h; the sums of the readout's
    /// gradients.
    __device__ __forceinline__ void through_scores(const mlstm_chunk_outputs<V>& outputs, row_numbers& rows,
                                                   values_type& d) const {
        const std::int64_t at = std::int64_t{s.h} * width;
        float along[2] = {};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.scale[r] =
                norm ? rsqrtf(memory.sums[1].get(m0 + lane / 4 + 8 * r) / static_cast<float>(width) +
                              mlstm_norm_epsilon)
                     : 1.0f;
        }
#pragma unroll
        for (int pair = 0; pair < V / 16; pair += 2) {
            // Sums of the readout's gradient and the gain's by columns: [2 x 8 columns][2 neighbors][which].
            float down[8];
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
                    const float h = outputs.h[0][j][2 * r + e], y = h * rows.scale[r] * gain;
                    const float open = sigmoid<E>(y);
                    of_readout += rows.d_score[r] * y * open;
                    const float to = rows.d_score[r] * readout * (open * (1.0f + y * (1.0f - open)));
                    of_gain += to * h * rows.scale[r];
                    d[0][j][2 * r + e] = to * gain;
                    along[r] += to * gain * h;
                }
                down[2 * n] = of_readout;
                down[2 * n + 1] = of_gain;
            }
            const float sum = sums_down(down);
            const int n = lane / 8;
            float* const columns = memory.columns(warp_id() % 4);
            columns[(V / 2 * half + 8 * (pair + n / 2) + lane % 4 * 2 + n % 2) * 2 + lane / 4 % 2] = sum;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            memory.sums[2].set(m0 + lane / 4 + 8 * r, row_sum(along[r]));
        }
    }
    /// The chunk's sums of the readout's gradients.
    __device__ __forceinline__ void store_sums() const {
        float* const sums = params.d_readout + chunk * (2 * width + 1);
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
    }

    /// Back through a LayerNorm's mean: h with its mean again, and what that adds to d so that phase 3 may
    /// take d - h back as it does of an RMS norm, less its mean.
    __device__ __forceinline__ void leave_center(mlstm_chunk_outputs<V>& outputs, const row_numbers& rows,
                                                 values_type& d) const {
        float shift[2];
        find_means<2>(memory.sums[0], d, width, shift);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            shift[r] = rows.mean[r] * back_of(rows, r) - shift[r];
        }
        add_to_values<V / 2>(d, width, shift, 1.0f);
        add_to_values<V / 2>(outputs.h, width, rows.mean, 1.0f);
    }
    /// d x . x scale^2 / width of the thread's row r, x being what the norm scales.
    __device__ __forceinline__ float back_of(const row_numbers& rows, int r) const {
        return norm ? memory.sums[2].get(m0 + lane / 4 + 8 * r) * rows.scale[r] * rows.scale[r] /
                          static_cast<float>(width)
                    : 0.0f;
    }

    /// Phase 3: back through the norm to d N, rounded; - d g_l, and d N_l . ref_value + d g_l.
    __device__ __forceinline__ void store_d_n(mlstm_chunk_outputs<V>& outputs, const row_numbers& rows,
                                              values_type& d) const {
        float of_divisor[2] = {}, of_state[2] = {};
        if (params.centered) {
            leave_center(outputs, rows, d);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int l = m0 + lane / 4 + 8 * r;
            const float back = back_of(rows, r);
            const auto to_d_n = memory.d_n.pairs_of(l, V / 2 * half + lane % 4 * 2);
#pragma unroll
            for (int j = 0; j < V / 16; ++j) {
                const int column = V / 2 * half + 8 * j + lane % 4 * 2;
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    pair[e] = rows.scale[r] * (d[0][j][2 * r + e] - outputs.h[0][j][2 * r + e] * back) *
                              rows.inverse[r];
                }
                round_pair<E>(pair[0], pair[1]);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float h = outputs.h[0][j][2 * r + e];
                    of_divisor[r] += pair[e] * h;
                    of_state[r] += pair[e] * (memory.ref_value[column + e] - (rows.clamped[r] ? 0.0f : h));
                }
                to_d_n.set(j, pair[0], pair[1]);
            }
            memory.sums[3].set(l, row_sum(of_divisor[r]));
            memory.sums[4].set(l, row_sum(of_state[r]));
        }
    }

    /// Phase 4: w_lj G_lj, with G_lj = d N_l . v~_j + d g_l, takes the place of the weights.
    __device__ __forceinline__ void weigh_gradients(const row_numbers& rows,
                                                    [[maybe_unused]] const shared_tile<E>& queries) const {
        float g[1][4][4];
        clear(g);
        if (32 * half < m0 + 16) {
            add_product<1, 4, V, false, false>(g, memory.d_n, m0, memory.v, 32 * half);
        }
        if constexpr (Small) {
            __syncthreads();  // the values are free
            copy_chunk_rows<F>(queries, static_cast<const E*>(params.q), row);
            copy_commit();
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int l = m0 + lane / 4 + 8 * r;
            const float d_g = rows.clamped[r] ? 0.0f : -memory.sums[3].get(l);
            if (half == 0 && lane % 4 == 0) {
                params.d_g[row + l] = d_g;
                params.state_decay[row + l] = rows.in[r] ? memory.exponents.state_decay[l] : 0.0f;
            }
            const auto weights = memory.weights.pairs_of(l, 32 * half + lane % 4 * 2);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int column = 32 * half + 8 * j + lane % 4 * 2;
                weights.set(j, memory.exponents.weight(l, column) * (g[0][j][2 * r] + d_g),
                            memory.exponents.weight(l, column + 1) * (g[0][j][2 * r + 1] + d_g));
            }
        }
    }

    /// Phase 5: d q~ = exp(m - M_l) (C d N + z d g) + sum_j w_lj G_lj k~_j, the part of the state first.
    __device__ __forceinline__ void through_pairs(feature_gradients<F>& d_q,
                                                  const shared_tile<E>& queries) const {
        d_q.clear_all();
        d_q.template add<V, false>(memory.d_n, m0, memory.c);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int l = m0 + lane / 4 + 8 * r;
            const float state_decay = memory.exponents.state_decay[l], state = memory.sums[4].get(l);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < F / 32; ++j) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = d_q.of[i][0][j][2 * r + e];
                        x = state_decay * (x + state * memory.z[d_q.column(i, j) + e]);
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
            params.cross_chunk[row + m0 + lane] =
                memory.sums[0].get(m0 + lane) + memory.sums[1].get(m0 + lane);
        }
        d_q.template add<scorer_chunk, true>(memory.weights, m0, memory.k);
        d_q.sum_along(queries, m0, memory.sums[2], memory.sums[3]);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
