// The block of token_gradients on Hopper: one warpgroup takes one chunk after another. The equations are
// those of kernel_chunk_outputs_backward.cuh and kernel_token_gradients.cuh.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_backward.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_backward_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_token_gradients.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Blocks per SM.
inline constexpr int mlstm_token_gradients_blocks = 2;

/// Parts of the sum of pairs across a chunk: blocks of chunk_states that share a plane's state.
template <int F, int V>
inline constexpr int mlstm_across_parts = F / 64 * (V / 64);

template <class T, int F, int V>
struct mlstm_token_gradients_hopper_memory {
    using E = mlstm_element<T>;

    shared_tile<E> q, d_n, k, v;
    shared_tile<E> a;  // then, in its place, gradients on their way out
    shared_tile<T> to_k, to_v;
    float* a_z;                                 // [F]
    float *d_g, *cross_chunk, *later, *inside;  // [64]
    float* columns;                             // [4][64]: sums down the columns, of 16 rows each
    float* across;                              // [parts]
    float* d_gates;                             // [64][2]
    float* slopes;                              // [2][64]: of the input gates, of the forget gates
    mlstm_exponents<E> exponents;
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_token_gradients_hopper_memory(unsigned char* memory) {
        static_assert(F * V <= scorer_chunk * (F + V) && sizeof(T) == sizeof(E));
        shared_parts parts(memory);
        q = parts.tile<E>(scorer_chunk, F);
        d_n = parts.tile<E>(scorer_chunk, V);
        k = parts.tile<E>(scorer_chunk, F);
        v = parts.tile<E>(scorer_chunk, V);
        to_k = parts.tile<T>(scorer_chunk, F);
        to_v = parts.tile<T>(scorer_chunk, V);
        a = {to_k.data, F};
        a_z = parts.take<float>(F);
        for (float** one : {&d_g, &cross_chunk, &later, &inside}) {
            *one = parts.take<float>(scorer_chunk);
        }
        columns = parts.take<float>(4 * scorer_chunk);
        across = parts.take<float>(mlstm_across_parts<F, V>);
        d_gates = parts.take<float>(2 * scorer_chunk);
        slopes = parts.take<float>(2 * scorer_chunk);
        exponents.take(parts);
        bytes = parts.bytes();
    }
};

/// A thread's share of a chunk's numbers, on their way from global memory while the chunk before is still at
/// work.
template <class E, int F, int V>
struct mlstm_token_numbers {
    double source, top, last, m;
    float a_z[V / 64], across;  // parts of sums
    float d_g, cross_chunk, slope_i, slope_f;
    std::int32_t first_output, count, bad;

    /// Nothing where there is no such chunk, or no token in it.
    template <class T>
    __device__ void load(const mlstm_params<T>& params, std::int32_t chunk, const mlstm_output_stats& stats) {
        const auto thread = static_cast<int>(threadIdx.x);
        const std::int64_t row = std::int64_t{chunk} * scorer_chunk;
        m = stats.m;
        first_output = stats.first_output;
        count = stats.count;
        bad = stats.bad;
        const bool any = count > 0, of_row = any && thread < scorer_chunk,
                   read = of_row && first_output < scorer_chunk, there = thread < count;
        source = load_if(of_row, params.log_source + row + thread);
        top = load_if(of_row, params.log_top + row + thread);
        last = load_if(of_row, params.log_top + row + scorer_chunk - 1);
        d_g = load_if(read, params.d_g + row + thread);
        cross_chunk = load_if(read, params.cross_chunk + row + thread);
        slope_i = load_if(there, params.slope_i + row + thread);
        slope_f = load_if(there, params.slope_f + row + thread);
#pragma unroll
        for (int part = 0; part < V / 64; ++part) {
            a_z[part] = load_if(any && thread < F,
                                params.d_sums + (std::int64_t{chunk} * (V / 64) + part) * F + thread);
        }
        constexpr int parts = mlstm_across_parts<F, V>;
        across = load_if(any && thread < parts, params.d_across + std::int64_t{chunk} * parts + thread);
    }
    template <class Memory>
    __device__ void store(const Memory& memory) const {
        const auto thread = static_cast<int>(threadIdx.x);
        if (thread < scorer_chunk) {
            memory.d_g[thread] = d_g;
            memory.cross_chunk[thread] = cross_chunk;
            memory.slopes[thread] = slope_i;
            memory.slopes[scorer_chunk + thread] = slope_f;
            memory.exponents.set(source, top, last, m);
        }
        if (thread < F) {
            float sum = 0.0f;
#pragma unroll
            for (const float part : a_z) {
                sum += part;
            }
            memory.a_z[thread] = sum;
        }
        if (thread < mlstm_across_parts<F, V>) {
            memory.across[thread] = across;
        }
    }
};

#if KVPOLICY_HOPPER_CODE
/// From q~_l . k~_j and d N_l . v~_j, tokens on rows and outputs on columns: w_lj (q~_l . k~_j) and w_lj G_lj
/// as they are rounded, a token's sums over its pairs, and sums of pairs across tokens down the columns
/// (pairs_of_chunk, scorers/cuda/mlstm/kernel_token_gradients.cuh).
template <class E, class Memory>
__device__ inline void weigh_pairs_of_tokens(const Memory& memory, const float (&products)[32],
                                             const float (&g)[32], std::uint32_t (&weights)[4][4],
                                             std::uint32_t (&gradients)[4][4]) {
    const int lane = lane_id(), pair = lane % 4, c0 = 2 * pair, j0 = 16 * warp_id() + lane / 4;
    const float source[2] = {memory.exponents.source[j0], memory.exponents.source[j0 + 8]};
    float behind[2] = {};  // of the row's pairs in later columns
    float down[2][8] = {};
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        if (i < 2 * warp_id()) {  // pairs of tokens after the output
            weights[i / 2][i % 2 * 2] = weights[i / 2][i % 2 * 2 + 1] = 0u;
            gradients[i / 2][i % 2 * 2] = gradients[i / 2][i % 2 * 2 + 1] = 0u;
            continue;
        }
        const int l = 8 * i + c0;
        const float2 most = *reinterpret_cast<const float2*>(memory.exponents.most + l);
        const float2 d_g = *reinterpret_cast<const float2*>(memory.d_g + l);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int j = j0 + 8 * r;
            const float w[2] = {j <= l ? fast_exp2(source[r] - most.x) : 0.0f,
                                j <= l + 1 ? fast_exp2(source[r] - most.y) : 0.0f};
            const float of_pair[2] = {g[4 * i + 2 * r] + d_g.x, g[4 * i + 2 * r + 1] + d_g.y};
            gradients[i / 2][i % 2 * 2 + r] = pack<E>(w[0] * of_pair[0], w[1] * of_pair[1]);
            // Rounded as the output's, so that its pairs add up to what its quotient says.
            rounded_pair<E> weight;
            weight.set(w[0] * products[4 * i + 2 * r], w[1] * products[4 * i + 2 * r + 1]);
            weights[i / 2][i % 2 * 2 + r] = weight.both;
            const float second = weight.second() * of_pair[1],
                        both = fmaf(weight.first(), of_pair[0], second);
            float from = both;  // of this lane's columns and the quad's later ones
            float other = __shfl_down_sync(all_lanes, from, 1u);
            from += pair < 3 ? other : 0.0f;
            other = __shfl_down_sync(all_lanes, from, 2u);
            from += pair < 2 ? other : 0.0f;
            other = __shfl_down_sync(all_lanes, from, 1u);
            const float after = behind[r] + (pair < 3 ? other : 0.0f);
            down[i / 4][2 * (i % 4)] += j < l ? after + both : 0.0f;
            down[i / 4][2 * (i % 4) + 1] += j < l + 1 ? after + second : 0.0f;
            behind[r] += __shfl_sync(all_lanes, from, lane & ~3);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (pair == 0) {
            memory.inside[j0 + 8 * r] = behind[r];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sums_down(down[half]);
        memory.columns[warp_id() * scorer_chunk + 32 * half + lane / 8 * 8 + c0 + lane / 4 % 2] = sum;
    }
}
#endif

#if KVPOLICY_HOPPER_CODE
/// While the warpgroup is at work on one chunk, the tiles of the next are loaded into the shared memory that
/// is free already, and its numbers into registers.
template <class T, int F, int V>
struct token_gradients_hopper_agent {
    using E = mlstm_element<T>;
    static_assert(!shared_tile<E>::plain);
    using memory_type = mlstm_token_gradients_hopper_memory<T, F, V>;
    static constexpr int threads = mlstm_warpgroup_threads;
    // Arrays in registers are objects of run(), one each (agent_chunk_states.cuh says why).
    using pairs_type = std::uint32_t[4][4];     // of 64 pairs of a thread, rounded
    using d_v_type = std::uint32_t[V / 16][4];  // d v~, rounded

    const mlstm_params<T>& params;
    const memory_type memory;
    const scorer_streams& streams;
    const std::int32_t chunks, steps;
    const int thread;
    mlstm_output_stats following;
    mlstm_token_numbers<E, F, V> numbers;

    __device__ __forceinline__ explicit token_gradients_hopper_agent(const mlstm_params<T>& of)
        : params(of),
          memory(aligned_dynamic_shared()),
          streams(of.streams),
          chunks(of.streams.batch * of.streams.heads * of.streams.chunks),
          steps(static_cast<std::int32_t>(gridDim.x)),
          thread(static_cast<int>(threadIdx.x)) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        begin();  // 1
        for (auto chunk = static_cast<std::int32_t>(blockIdx.x); chunk < chunks; chunk += steps) {
            const std::int32_t next = chunk + steps;
            if (numbers.count == 0) {
                skip_chunk(chunk, next);
                continue;
            }
            const std::int32_t count = numbers.count;
            wait_for_rows(chunk, count);  // 2
            const int lane = lane_id(), j0 = 16 * warp_id() + lane / 4, c0 = lane % 4 * 2;
            pairs_type weights, gradients;
            multiply_pairs_of_tokens(weights, gradients);  // 3
            copy_wait<0>();
            fence_async_proxy();
            __syncthreads();
            // exp(s_j - M at the chunk's end): how much of a token the state after the chunk has.
            float out[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                out[r] = memory.exponents.weight(scorer_chunk - 1, j0 + 8 * r);
            }
            float d_k[F / 2];
            d_v_type to_v;
            multiply_reads(weights, gradients, out, c0, d_k, to_v);  // 4
            __syncthreads();                                         // queries and d N are free
            load_output_rows(next, following);
            copy_commit();
            float along[2][2] = {};
            add_state_part(out, lane, j0, c0, d_k, along);  // 5
            through_feature_map<F>(params, d_k, memory.k, along);
            __syncthreads();  // keys, values and the state are free
            load_tokens(next, following);
            copy_commit();
            store_gradients(d_k, to_v);  // 6
            load_next_numbers(next);
            __syncthreads();
            write_gradients(chunk, count);  // 7
            __syncthreads();                // the state and the numbers are free
            load_state(next, numbers.count);
            copy_commit();
        }
    }

  private:
    // Rows of a chunk, as soon as the tiles of the chunk before are free; nothing where it has no tokens.
    __device__ void load_output_rows(std::int32_t chunk, const mlstm_output_stats& stats) const {
        const std::int64_t row = std::int64_t{chunk} * scorer_chunk;
        if (stats.count > 0 && stats.first_output < scorer_chunk) {
            copy_slice<scorer_chunk, F, threads>(memory.q, 0, static_cast<const E*>(params.q) + row * F, F);
            copy_slice<scorer_chunk, V, threads>(memory.d_n, 0, static_cast<const E*>(params.d_n) + row * V,
                                                 V);
        } else if (stats.count > 0) {  // no pairs: the same products of zeros
            const float blank[8] = {};
            for (int i = thread; i < scorer_chunk * F / 8; i += threads) {
                memory.q.set_eight(i / (F / 8), i % (F / 8) * 8, blank);
            }
            for (int i = thread; i < scorer_chunk * V / 8; i += threads) {
                memory.d_n.set_eight(i / (V / 8), i % (V / 8) * 8, blank);
            }
        }
    }
    __device__ void load_tokens(std::int32_t chunk, const mlstm_output_stats& stats) const {
        const std::int64_t row = std::int64_t{chunk} * scorer_chunk;
        if (stats.count > 0) {
            copy_slice<scorer_chunk, F, threads>(memory.k, 0, static_cast<const E*>(params.k) + row * F, F);
            copy_slice<scorer_chunk, V, threads>(memory.v, 0, static_cast<const E*>(params.v) + row * V, V);
        }
    }
    __device__ void load_state(std::int32_t chunk, std::int32_t count) const {
        if (count > 0) {
            copy_image<F * V, threads>(
                memory.a, static_cast<const E*>(params.d_memory) + std::int64_t{chunk} * (F * V));
        }
    }
    /// The next chunk's numbers, which are needed only after this one.
    __device__ void load_next_numbers(std::int32_t next) {
        numbers.load(params, next, following);
        following.template load<true, false>(params, next + steps, chunks);
    }

    /// Phase 1: the first chunk's loads.
    __device__ __forceinline__ void begin() {
        following.template load<true, false>(params, static_cast<std::int32_t>(blockIdx.x), chunks);
        load_output_rows(static_cast<std::int32_t>(blockIdx.x), following);
        load_tokens(static_cast<std::int32_t>(blockIdx.x), following);
        copy_commit();
        load_state(static_cast<std::int32_t>(blockIdx.x), following.count);
        copy_commit();
        numbers.load(params, static_cast<std::int32_t>(blockIdx.x), following);
        following.template load<true, false>(params, static_cast<std::int32_t>(blockIdx.x) + steps, chunks);
    }
    /// A chunk without tokens: its gates have no gradient.
    __device__ __forceinline__ void skip_chunk(std::int32_t chunk, std::int32_t next) {
        if (thread < 2) {
            params.d_gates[std::int64_t{chunk} * 2 + thread] = 0.0f;
        }
        load_output_rows(next, following);
        load_tokens(next, following);
        copy_commit();
        load_state(next, following.count);
        copy_commit();
        load_next_numbers(next);
    }

    /// Phase 2: the chunk's numbers to shared memory; its rows have arrived.
    __device__ __forceinline__ void wait_for_rows(std::int32_t chunk, std::int32_t count) const {
        numbers.store(memory);
        if (thread == 0 && numbers.bad < count) {
            streams.report(chunk / streams.chunks / streams.heads, status_not_finite);
        }
        copy_wait<1>();
        fence_async_proxy();
        __syncthreads();
    }

    /// Phase 3: the pairs of the chunk's tokens with its own outputs.
    __device__ __forceinline__ void multiply_pairs_of_tokens(pairs_type& weights,
                                                             pairs_type& gradients) const {
        float products[32], g[32];
        wgmma_fence();
        start_product<F, false>(products, memory.k, memory.q);
        start_product<V, false>(g, memory.v, memory.d_n);
        wgmma_commit();
        wgmma_wait<0>();
        pin(products);
        pin(g);
        weigh_pairs_of_tokens<E>(memory, products, g, weights, gradients);
    }

    /// Phase 4: d v~_j = sum_l w_lj (q~_l . k~_j) d N_l + o_j A^T k~_j, and the first part of d k~_j, sum_l
    /// w_lj G_lj q~_l.
    __device__ __forceinline__ void multiply_reads(pairs_type& weights, pairs_type& gradients,
                                                   const float (&out)[2], int c0, float (&d_k)[F / 2],
                                                   d_v_type& to_v) const {
        float d_v[V / 2];
        pin(gradients);
        wgmma_fence();
        start_product<F, true>(d_v, memory.k, memory.a);
        wgmma_commit();
        start_held_product<true>(d_k, gradients, memory.q, false);
        wgmma_commit();
        wgmma_wait<1>();
        pin(d_v);
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
            d_v[i] *= out[i / 2 % 2];
        }
        pin(d_v);
        pin(weights);
        wgmma_fence();
        start_held_product<true>(d_v, weights, memory.d_n, true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(d_v);
        pin(d_k);
#pragma unroll
        for (int k = 0; k < V / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                to_v[k][i] = pack<T>(d_v[8 * k + 2 * i], d_v[8 * k + 2 * i + 1]);
            }
        }
        if (params.width < V) {  // 0 beyond the values, whatever is there
#pragma unroll
            for (int k = 0; k < V / 16; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const std::int32_t left = params.width - (16 * k + 8 * (i / 2) + c0);
                    to_v[k][i] &= left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
                }
            }
        }
    }

    /// Phase 5: the second part of d k~_j, o_j (A v~_j + a), the pairs of a token with outputs after the
    /// chunk, and d k~_j . k~_j of either half of the columns.
    __device__ __forceinline__ void add_state_part(const float (&out)[2], int lane, int j0, int c0,
                                                   float (&d_k)[F / 2], float (&along)[2][2]) const {
        float later[2] = {};
        constexpr int parts = F / 64;  // one after the other, to save registers
#pragma unroll
        for (int part = 0; part < parts; ++part) {
            float state[32];
            wgmma_fence();
            start_product<V, false>(state, memory.v, shared_tile<E>{memory.a.data + part * 64 * 128, F});
            wgmma_commit();
            wgmma_wait<0>();
            pin(state);
#pragma unroll
            for (int k = 4 * part; k < 4 * part + 4; ++k) {
                std::uint32_t p[4];
                load_rows(p, memory.k, k);
                const float2 low = *reinterpret_cast<const float2*>(memory.a_z + 16 * k + c0);
                const float2 high = *reinterpret_cast<const float2*>(memory.a_z + 16 * k + 8 + c0);
                const float a_z[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int r = i / 2 % 2;
                    const float x = __uint_as_float(i % 2 == 0 ? p[i / 2] << 16 : p[i / 2] & 0xffff0000u);
                    const float of_state = out[r] * (state[8 * (k % 4) + i] + a_z[i / 4 * 2 + i % 2]);
                    later[r] = fmaf(x, of_state, later[r]);
                    d_k[8 * k + i] += of_state;
                    float& sum = along[k / (F / 32)][r];
                    sum = fmaf(x, d_k[8 * k + i], sum);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            later[r] = row_sum(later[r]);
            along[0][r] = row_sum(along[0][r]);
            along[1][r] = row_sum(along[1][r]);
            if (lane % 4 == 0) {
                memory.later[j0 + 8 * r] = later[r];
            }
        }
    }

    /// Phase 6: both gradients, rounded, to the shared memory where the state was.
    __device__ __forceinline__ void store_gradients(const float (&d_k)[F / 2], const d_v_type& to_v) const {
        store_rounded(memory.to_k, d_k);
#pragma unroll
        for (int k = 0; k < V / 16; ++k) {
            store_rows_of(memory.to_v, k, to_v[k]);
        }
    }

    /// Phase 7: the gates' gradients by one warp; meanwhile the other warps write the columns that do not
    /// need them.
    __device__ __forceinline__ void write_gradients(std::int32_t chunk, std::int32_t count) const {
        T* const rows = params.d_rows_k + std::int64_t{chunk} * scorer_chunk * params.rows_k;
        if (warp_id() == 0) {
            float across = 0.0f;
#pragma unroll
            for (int part = 0; part < mlstm_across_parts<F, V>; ++part) {
                across += memory.across[part];
            }
            gate_gradients(
                params, streams.span(chunk / streams.chunks, chunk % streams.chunks), std::int64_t{chunk},
                memory, across, [&](int j) { return memory.inside[j]; }, nullptr);
        } else {
            write_tile<threads - 32>(rows, params.rows_k, memory.to_k, params.at_v, count, thread - 32);
            write_tile<threads - 32>(rows + params.at_v, params.rows_k, memory.to_v,
                                     params.at_i - params.at_v, count, thread - 32);
        }
        __syncthreads();
        write_eighths<threads>(rows, params.rows_k, params.at_i, params.used_k, count, thread,
                               [&](int r, int c) {
                                   return c == params.at_i   ? memory.d_gates[2 * r]
                                          : c == params.at_f ? memory.d_gates[2 * r + 1]
                                                             : 0.0f;
                               });
    }
};
#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
