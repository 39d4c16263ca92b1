// The block of chunk_outputs_backward on Hopper: one warpgroup takes one chunk after another. The equations
// are those of kernel_chunk_outputs_backward.cuh, the outputs those of agent_chunk_outputs_hopper.cuh.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_backward.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class E, int F, int V>
struct mlstm_chunk_outputs_backward_memory : mlstm_output_tiles<E, F, V> {
    /// Whether d q~ has a tile of its own; else it takes that of k~.
    static constexpr bool apart = F == V;

    shared_tile<E> d_n;
    float* d_score;
    float* columns;  // [4][V][2]: sums down the columns of a warp's 16 rows

    KVPOLICY_HOST_DEVICE explicit mlstm_chunk_outputs_backward_memory(shared_parts& parts)
        : mlstm_output_tiles<E, F, V>(parts),
          d_n(parts.tile<E>(scorer_chunk, V)),
          d_score(parts.take<float>(scorer_chunk)),
          columns(parts.take<float>(4 * V * 2)) {}
    [[nodiscard]] static std::size_t bytes() {
        shared_parts parts(nullptr);
        const mlstm_chunk_outputs_backward_memory all(parts);
        return parts.bytes();
    }
};

#if KVPOLICY_HOPPER_CODE
/// From a thread's h_l and d score to d N_l, which set_pair(j, r, ref_value, first, second) takes up, and the
/// warp's sums of d readout down its rows. First of a readout without a norm,
template <class Memory, int N, class Set>
__device__ inline void through_readout(const Memory& memory, const float (&n)[N], const float (&d_score)[2],
                                       const float (&inverse)[2], float* of_warp, const Set& set_pair) {
    using E = mlstm_element<bf16>;
    const int lane = lane_id(), c0 = lane % 4 * 2;
    const float slope[2] = {d_score[0] * inverse[0], d_score[1] * inverse[1]};
#pragma unroll
    for (int four = 0; four < N / 4; four += 4) {
        float down[8];  // of the readout's weight, by columns: [4 x 8 columns][2 neighbors]
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = four + i;
            const float4 both = *reinterpret_cast<const float4*>(memory.numbers + 8 * j + c0);
            const float2 ref_value = *reinterpret_cast<const float2*>(memory.ref_value + 8 * j + c0);
            float to[2][2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float readout = e == 0 ? both.y : both.w;
                float of_readout = 0.0f;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float h = n[4 * j + 2 * r + e], open = sigmoid<E>(h), silu = h * open;
                    of_readout = fmaf(d_score[r], silu, of_readout);
                    // silu' = open (1 + h (1 - open))
                    to[r][e] = slope[r] * readout * (open + fmaf(-silu, open, silu));
                }
                down[2 * i + e] = of_readout;
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                set_pair(j, r, ref_value, to[r][0], to[r][1]);
            }
        }
        const float sum = sums_down(down);
        const int at = lane / 4;
        of_warp[(8 * (four + at / 2) + c0 + at % 2) * 2] = sum;
    }
}
/// and of one with a norm, whose gain's sums stand beside the readout's. Centered: a LayerNorm, for which the
/// means leave n and come back; d - n back, less its mean, is then what d - n back is of an RMS norm.
template <class Memory, int N, class Set>
__device__ inline void through_norm(const Memory& memory, float (&n)[N], const float (&d_score)[2],
                                    const float (&inverse)[2], std::int32_t width, bool centered,
                                    float* of_warp, const Set& set_pair) {
    using E = mlstm_element<bf16>;
    const int lane = lane_id(), c0 = lane % 4 * 2;
    float scale[2], mean[2] = {};
    if (centered) {
        find_row_means(n, width, mean);
        add_to_row_values(n, width, mean, -1.0f);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                square = fmaf(n[4 * j + e], n[4 * j + e], square);
            }
        }
        scale[r] = rsqrtf(row_sum(square) / static_cast<float>(width) + mlstm_norm_epsilon);
    }
    float d[N], along[2] = {};
#pragma unroll
    for (int pair = 0; pair < N / 4; pair += 2) {
        float down[8];  // of the readout's weight and of the gain: [2 x 8 columns][2 neighbors][which]
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = pair + i;
            const float4 both = *reinterpret_cast<const float4*>(memory.numbers + 8 * j + c0);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float gain = e == 0 ? both.x : both.z, readout = e == 0 ? both.y : both.w;
                float of_readout = 0.0f, of_gain = 0.0f;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float x = n[4 * j + 2 * r + e] * scale[r], y = x * gain;
                    const float open = sigmoid<E>(y), silu = y * open;
                    of_readout = fmaf(d_score[r], silu, of_readout);
                    // silu' = open (1 + y (1 - open))
                    const float to = d_score[r] * readout * (open + fmaf(-silu, open, silu));
                    of_gain = fmaf(to, x, of_gain);
                    d[4 * j + 2 * r + e] = to * gain;
                    along[r] = fmaf(to * gain, n[4 * j + 2 * r + e], along[r]);
                }
                down[4 * i + 2 * e] = of_readout;
                down[4 * i + 2 * e + 1] = of_gain;
            }
        }
        const float sum = sums_down(down);
        const int at = lane / 8;
        of_warp[(8 * (pair + at / 2) + c0 + at % 2) * 2 + lane / 4 % 2] = sum;
    }
    float back[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        back[r] = row_sum(along[r]) * scale[r] * scale[r] / static_cast<float>(width);
    }
    if (centered) {
        float shift[2];
        find_row_means(d, width, shift);
        shift[0] = mean[0] * back[0] - shift[0];
        shift[1] = mean[1] * back[1] - shift[1];
        add_to_row_values(d, width, shift, 1.0f);
        add_to_row_values(n, width, mean, 1.0f);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float by = scale[r] * inverse[r];
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
            const float2 ref_value = *reinterpret_cast<const float2*>(memory.ref_value + 8 * j + c0);
            set_pair(j, r, ref_value, by * fmaf(-n[4 * j + 2 * r], back[r], d[4 * j + 2 * r]),
                     by * fmaf(-n[4 * j + 2 * r + 1], back[r], d[4 * j + 2 * r + 1]));
        }
    }
}
#endif

#if KVPOLICY_HOPPER_CODE
/// Norm: the readout has a norm. While the warpgroup is at work on one chunk, the tiles of the next are
/// loaded into the shared memory that is free already, and its numbers into registers.
template <class T, int F, int V, bool Norm>
struct chunk_outputs_backward_hopper_agent {
    using E = mlstm_element<T>;
    static_assert(!shared_tile<E>::plain);
    using memory_type = mlstm_chunk_outputs_backward_memory<E, F, V>;
    static constexpr int threads = mlstm_warpgroup_threads;
    // Arrays in registers are objects of run(), one each (agent_chunk_states.cuh says why).
    using reads_type = mlstm_warpgroup_outputs<E, F, V>;
    using d_n_type = std::uint32_t[V / 16][4];  // d N, rounded
    using held_type = std::uint32_t[4][4];      // w_lj G_lj, rounded

    /// Numbers of the thread's two rows.
    struct row_numbers {
        bool in[2], clamped[2];  // the row is an output; its divisor is below the clamp
        float d_score[2], inverse[2];
        float d_g[2], of_state[2];  // d g_l, and d N_l . ref_value + d g_l
    };

    const mlstm_params<T>& params;
    const memory_type& memory;
    const scorer_streams& streams;
    const std::int32_t chunks, width;
    const int thread, lane, l0, c0;
    const std::int32_t step;
    std::int32_t chunk;
    mlstm_output_stats stats, following;
    mlstm_output_numbers<E, F, V> numbers;
    float slope = 0.0f;  // d of the score that row `thread` has

    __device__ __forceinline__ chunk_outputs_backward_hopper_agent(const mlstm_params<T>& of,
                                                                   const memory_type& shared)
        : params(of),
          memory(shared),
          streams(of.streams),
          chunks(of.streams.batch * of.streams.heads * of.streams.chunks),
          width(of.width),
          thread(static_cast<int>(threadIdx.x)),
          lane(lane_id()),
          l0(16 * warp_id() + lane / 4),
          c0(lane % 4 * 2),
          step(static_cast<std::int32_t>(gridDim.x)),
          chunk(static_cast<std::int32_t>(blockIdx.x)) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        begin();  // 1
        for (; chunk < chunks; chunk += step) {
            const bool follows = following.has_outputs();
            if (!stats.has_outputs()) {
                skip_chunk(follows);
                continue;
            }
            const std::int32_t skipped = stats.first_output, count = stats.count;
            wait_for_chunk(follows);  // 2
            reads_type outputs;
            outputs.compute(memory);  // 3
            row_numbers rows;
            divide(skipped, count, outputs, rows);
            d_n_type to_n;
            through_scores(outputs, rows, to_n);  // 4
            store_rows(rows, outputs.state_decay);
            float d_q[F / 2];
            held_type held;
            multiply_values(outputs, rows, to_n, d_q, held);  // 5
            __syncthreads();  // the state and the values are free; d N and the sums of columns are complete
            load_state_of_next(follows);
            add_state_part(outputs.state_decay, rows, d_q);  // 6
            multiply_keys(d_q, held);
            through_features(d_q, follows, count);  // 7
        }
    }

  private:
    __device__ void load_all(std::int32_t of) const {
        memory.load_state(params, of);
        memory.load_queries(params, of);
        memory.load_keys(params, of);
    }
    __device__ void load_numbers(std::int32_t of, const mlstm_output_stats& from) {
        numbers.load(params, of, from);
        const bool in = thread >= from.first_output && thread < from.count;
        const float* at = nullptr;
        if (in) {
            const scorer_span s = streams.span(of / streams.chunks, of % streams.chunks);
            at = params.d_scores.head(s.b, s.h) + (s.first + thread - streams.delay);
        }
        slope = load_if(in, at);
    }

    /// Phase 1: the first chunk's loads.
    __device__ __forceinline__ void begin() {
        memory.clear_sums();
        __syncthreads();
        stats.template load<false, true>(params, chunk, chunks);
        following.template load<false, true>(params, chunk + step, chunks);
        if (stats.has_outputs()) {
            load_all(chunk);
        }
        copy_commit();
        load_numbers(chunk, stats);
    }
    /// A chunk without outputs: its gradients are 0.
    __device__ __forceinline__ void skip_chunk(bool follows) {
        const std::int32_t next = chunk + step;
        float* const sums = params.d_readout + std::int64_t{chunk} * (2 * width + 1);
        T* const d_rows = params.d_rows_q + std::int64_t{chunk} * scorer_chunk * params.rows_q;
        for (int i = thread; i <= 2 * width; i += threads) {
            sums[i] = 0.0f;
        }
        for (int i = thread; i < stats.count * params.rows_q / 8; i += threads) {
            *reinterpret_cast<uint4*>(d_rows + std::int64_t{i} * 8) = make_uint4(0, 0, 0, 0);
        }
        load_numbers(next, following);
        if (follows) {
            load_all(next);
        }
        copy_commit();
        stats = following;
        following.template load<false, true>(params, next + step, chunks);
    }

    /// Phase 2: the chunk's numbers to shared memory; its tiles have arrived.
    __device__ __forceinline__ void wait_for_chunk(bool follows) const {
        if (thread < scorer_chunk) {
            memory.d_score[thread] = slope;
            if (!(fabsf(slope) <= 3.402823466e38f)) {
                streams.report(chunk / streams.chunks / streams.heads, status_not_finite);
            }
        }
        memory.store_numbers(params, numbers);
        mlstm_look_ahead<T> ahead(chunk + step, follows);
        ahead.array(params.q, scorer_chunk * F);
        ahead.array(params.k, scorer_chunk * F);
        copy_wait<0>();
        fence_async_proxy();
        __syncthreads();
    }

    /// Phase 3: h_l from N and its divisor, in place.
    __device__ __forceinline__ void divide(std::int32_t skipped, std::int32_t count, reads_type& outputs,
                                           row_numbers& rows) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int l = l0 + 8 * r;
            rows.d_score[r] = memory.d_score[l];
            rows.in[r] = l >= skipped && l < count;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.clamped[r] = outputs.divisor[r] < mlstm_clamp;
            rows.inverse[r] = __fdividef(1.0f, rows.clamped[r] ? mlstm_clamp : outputs.divisor[r]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int j = 0; j < V / 8; ++j) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    float& h = outputs.n[4 * j + e];
                    h = rows.in[r] ? h * rows.inverse[r] : 0.0f;
                }
            }
        }
    }

    /// Phase 4: d N, rounded; the sums of the readout's gradients; d g_l, and d N_l . ref_value + d g_l.
    __device__ __forceinline__ void through_scores(reads_type& outputs, row_numbers& rows,
                                                   d_n_type& to_n) const {
        float(&n)[V / 2] = outputs.n;
        float of_divisor[2] = {}, of_state[2] = {};
        float to_h[2];
        float* const of_warp = memory.columns + warp_id() * (2 * V);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            to_h[r] = rows.clamped[r] ? 0.0f : 1.0f;
        }
        const auto set_pair = [&](int j, int r, const float2& ref_value, float first, float second) {
            const float h[2] = {n[4 * j + 2 * r], n[4 * j + 2 * r + 1]};
            rounded_pair<E> pair;
            pair.set(first, second);
            to_n[j / 2][j % 2 * 2 + r] = pair.both;
            first = pair.first();
            second = pair.second();
            of_divisor[r] = fmaf(first, h[0], fmaf(second, h[1], of_divisor[r]));
            of_state[r] = fmaf(first, fmaf(-to_h[r], h[0], ref_value.x),
                               fmaf(second, fmaf(-to_h[r], h[1], ref_value.y), of_state[r]));
        };
        if constexpr (Norm) {
            through_norm(memory, n, rows.d_score, rows.inverse, width, params.centered, of_warp, set_pair);
        } else {
            through_readout(memory, n, rows.d_score, rows.inverse, of_warp, set_pair);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.of_state[r] = row_sum(of_state[r]);
            rows.d_g[r] = rows.clamped[r] ? 0.0f : -row_sum(of_divisor[r]);
        }
    }
    __device__ __forceinline__ void store_rows(const row_numbers& rows, const float (&state_decay)[2]) const {
        const std::int64_t row = std::int64_t{chunk} * scorer_chunk;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (lane % 4 == 0) {
                params.d_g[row + l0 + 8 * r] = rows.d_g[r];
                params.state_decay[row + l0 + 8 * r] = rows.in[r] ? state_decay[r] : 0.0f;
            }
        }
    }

    /// Phase 5: C d N into d_q, and from d N_l . v~_j the gradients of pairs, w_lj G_lj with G_lj = d N_l .
    /// v~_j + d g_l.
    __device__ __forceinline__ void multiply_values(const reads_type& outputs, const row_numbers& rows,
                                                    d_n_type& to_n, float (&d_q)[F / 2],
                                                    held_type& held) const {
        float pairs[32];
        pin(to_n);
        wgmma_fence();
        start_held_product<false>(pairs, to_n, memory.v, false);
        wgmma_commit();
        start_held_product<false>(d_q, to_n, memory.c, false);
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < V / 16; ++k) {
            store_rows_of(memory.d_n, k, to_n[k]);
        }
        wgmma_wait<1>();
        pin(pairs);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float w[2] = {outputs.weights[4 * j + 2 * r], outputs.weights[4 * j + 2 * r + 1]};
                held[j / 2][j % 2 * 2 + r] = pack<E>(w[0] * (pairs[4 * j + 2 * r] + rows.d_g[r]),
                                                     w[1] * (pairs[4 * j + 2 * r + 1] + rows.d_g[r]));
            }
        }
        wgmma_wait<0>();
        pin(d_q);
        pin(to_n);
    }
    __device__ __forceinline__ void load_state_of_next(bool follows) {
        const std::int32_t next = chunk + step;
        if (follows) {
            memory.load_state(params, next);
        }
        copy_commit();
        load_numbers(next, following);
        stats = following;
        following.template load<false, true>(params, next + step, chunks);
    }

    /// Phase 6: d q~ = exp(m - M_l) (C d N + z d g) + sum_j w_lj G_lj k~_j, the part of the state first;
    __device__ __forceinline__ void add_state_part(const float (&state_decay)[2], const row_numbers& rows,
                                                   float (&d_q)[F / 2]) const {
#pragma unroll
        for (int j = 0; j < F / 8; ++j) {
            const float2 z = *reinterpret_cast<const float2*>(memory.z + 8 * j + c0);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                d_q[4 * j + 2 * r] = state_decay[r] * fmaf(rows.of_state[r], z.x, d_q[4 * j + 2 * r]);
                d_q[4 * j + 2 * r + 1] = state_decay[r] * fmaf(rows.of_state[r], z.y, d_q[4 * j + 2 * r + 1]);
            }
        }
    }
    /// then the product with the keys. Meanwhile d N and the sums of the readout's gradients go to memory.
    __device__ __forceinline__ void multiply_keys(float (&d_q)[F / 2], held_type& held) const {
        const std::int64_t row = std::int64_t{chunk} * scorer_chunk;
        float* const sums = params.d_readout + std::int64_t{chunk} * (2 * width + 1);
        float of_q[2][2] = {};
        add_along<F>(of_q, d_q, memory.q);
        pin(d_q);
        pin(held);
        wgmma_fence();
        start_held_product<true>(d_q, held, memory.k, true);
        wgmma_commit();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float cross_chunk = row_sum(of_q[0][r] + of_q[1][r]);
            if (lane % 4 == 0) {
                params.cross_chunk[row + l0 + 8 * r] = cross_chunk;
            }
        }
        write_columns_of<V, threads>(params.d_n + row * V, V, memory.d_n, scorer_chunk, thread);
        for (int i = thread; i < (Norm ? 2 : 1) * width; i += threads) {
            const int at = i < width ? 2 * i : 2 * (i - width) + 1;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                sum += memory.columns[w * (2 * V) + at];
            }
            sums[i] = sum;
        }
        if (warp_id() == 3) {
            const float sum = warp_sum(memory.d_score[lane] + memory.d_score[lane + 32]);
            if (lane == 0) {
                sums[2 * width] = sum;
            }
        }
        wgmma_wait<0>();
        pin(d_q);
        pin(held);
    }

    /// Phase 7: d q~ through the feature map, to the chunk's rows of d_rows_q. The next chunk's rows are
    /// loaded.
    __device__ __forceinline__ void through_features(float (&d_q)[F / 2], bool follows,
                                                     std::int32_t count) const {
        const std::int32_t next = chunk + step;
        T* const d_rows = params.d_rows_q + std::int64_t{chunk} * scorer_chunk * params.rows_q;
        float whole[2][2] = {};
        add_along<F>(whole, d_q, memory.q);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                whole[half][r] = row_sum(whole[half][r]);
            }
        }
        through_feature_map<F>(params, d_q, memory.q, whole);
        __syncthreads();  // the keys and d N are free
        const shared_tile<T> to{memory_type::apart ? memory.d_n.data : memory.k.data, scorer_chunk};
        store_rounded(to, d_q);
        __syncthreads();  // the queries are free, and d q~ is complete
        if (follows) {
            memory.load_queries(params, next);
            if (memory_type::apart) {
                memory.load_keys(params, next);
            }
        }
        copy_commit();
        write_tile<threads>(d_rows, params.rows_q, to, params.at_skip, count, thread);
        write_eighths<threads>(d_rows, params.rows_q, params.at_skip, params.used_q, count, thread,
                               [&](int r, int c) { return c == params.at_skip ? memory.d_score[r] : 0.0f; });
        __syncthreads();  // the numbers are free
        if (follows && !memory_type::apart) {
            memory.load_keys(params, next);
        }
        copy_commit();
    }
};
#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
