// The block of token_gradients: the tokens of one chunk.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_backward.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Shared memory of mlstm_token_gradients_kernel. Small, as in kernel_chunk_outputs.cuh: the state's upper 64
/// values take the place of the queries, which are loaded once more where d N was.
template <class E, int F, int V, bool Small = false>
struct mlstm_token_gradients_memory {
    static_assert(!Small || (F == 128 && V == 128));
    shared_tile<E> q, d_n, k, v, a;
    shared_tile<E> pairs;  // w_lj (q~_l . k~_j), then w_lj G_lj, tokens on rows
    float* a_z;
    float* z;
    float* ref_value;  // before the chunk
    float* d_g;
    float* cross_chunk;
    float* columns;  // [4][64]: sums down the columns, of 16 rows each
    float* across;   // [8]
    float* d_gates;  // [64][2]
    float* slopes;   // [2][64]: of the input gates, of the forget gates
    float* later;    // [64]: a token's pairs with outputs after the chunk
    mlstm_row_sums inside, low, high;
    mlstm_exponents<E> exponents;
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_token_gradients_memory(unsigned char* memory) {
        shared_parts parts(memory);
        if (Small) {
            a = parts.tile<E>(F, 64);  // and on into the queries
        }
        q = parts.tile<E>(scorer_chunk, F);
        d_n = parts.tile<E>(scorer_chunk, V);
        k = parts.tile<E>(scorer_chunk, F);
        v = parts.tile<E>(scorer_chunk, V);
        if (!Small) {
            a = parts.tile<E>(F, V);
        }
        pairs = parts.tile<E>(scorer_chunk, scorer_chunk);
        a_z = parts.take<float>(F);
        z = parts.take<float>(F);
        ref_value = parts.take<float>(V);
        d_g = parts.take<float>(scorer_chunk);
        cross_chunk = parts.take<float>(scorer_chunk);
        columns = parts.take<float>(4 * scorer_chunk);
        across = parts.take<float>(8);
        d_gates = parts.take<float>(2 * scorer_chunk);
        slopes = parts.take<float>(2 * scorer_chunk);
        later = parts.take<float>(scorer_chunk);
        for (mlstm_row_sums* one : {&inside, &low, &high}) {
            one->of = parts.take<float>(2 * scorer_chunk);
        }
        exponents.take(parts);
        bytes = parts.bytes();
    }
};

/// The pairs of a chunk's tokens with its own outputs, tokens on rows and outputs on columns: w_lj (q~_l .
/// k~_j) into memory.pairs, w_lj G_lj into registers, sums over a token's pairs, and sums of pairs across
/// tokens: a pair (j, l) is across t where j < t <= l. In either half of the columns, sums along rows from l
/// to the half's end, then down the columns over j < l.
template <class E, int F, int V, bool Small>
__device__ inline void pairs_of_chunk(const mlstm_token_gradients_memory<E, F, V, Small>& memory,
                                      rounded_pair<E> (&gradients)[4][2]) {
    const int m0 = 16 * (warp_id() % 4), half = warp_id() / 4, lane = lane_id();
    float products[1][4][4], g[1][4][4];
    clear(products);
    clear(g);
    if (32 * half + 32 > m0) {  // other pairs are of tokens after the output
        add_product<1, 4, F, false, false>(products, memory.k, m0, memory.q, 32 * half);
        add_product<1, 4, V, false, false>(g, memory.v, m0, memory.d_n, 32 * half);
    }
    float down[8] = {};  // [8 columns][2 neighbors]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int j = m0 + lane / 4 + 8 * r;
        const auto pairs = memory.pairs.pairs_of(j, 32 * half + lane % 4 * 2);
        float behind = 0.0f;  // of the row's pairs in later columns
#pragma unroll
        for (int i = 3; i >= 0; --i) {
            const int l = 32 * half + 8 * i + lane % 4 * 2;
            float w[2], weight[2], of_pair[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                w[e] = memory.exponents.weight(l + e, j);
                weight[e] = w[e] * products[0][i][2 * r + e];
                of_pair[e] = g[0][i][2 * r + e] + memory.d_g[l + e];
            }
            gradients[i][r].set(w[0] * of_pair[0], w[1] * of_pair[1]);
            // Rounded as the output's, so that its pairs add up to what its quotient says.
            round_pair<E>(weight[0], weight[1]);
            pairs.set(i, weight[0], weight[1]);
            const float second = weight[1] * of_pair[1], both = weight[0] * of_pair[0] + second;
            float from = both;  // of this lane's columns and the quad's later ones
            float other = __shfl_down_sync(all_lanes, from, 1u);
            from += lane % 4 < 3 ? other : 0.0f;
            other = __shfl_down_sync(all_lanes, from, 2u);
            from += lane % 4 < 2 ? other : 0.0f;
            other = __shfl_down_sync(all_lanes, from, 1u);
            const float after = behind + (lane % 4 < 3 ? other : 0.0f);
            down[2 * i] += j < l ? after + both : 0.0f;
            down[2 * i + 1] += j < l + 1 ? after + second : 0.0f;
            behind += __shfl_sync(all_lanes, from, lane & ~3);
        }
        memory.inside.set(j, behind);
    }
    const float sum = sums_down(down);
    memory.columns[warp_id() % 4 * scorer_chunk + 32 * half + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2] =
        sum;
}

/// d of a chunk's gates from its pairs, by one warp, into memory.d_gates and the chunk's sums. `across`:
/// pairs of a token before the chunk and an output after it; inside(j): token j's pairs with outputs of the
/// chunk; over(j): those that memory.columns leaves out for tokens after j, null where it has all.
template <class T, class Memory, class Inside, class Over>
__device__ inline void gate_gradients(const mlstm_params<T>& params, const scorer_span& s, std::int64_t chunk,
                                      const Memory& memory, float across, const Inside& inside,
                                      const Over& over) {
    // d log f_t = pairs across the chunk + outputs from t on of earlier tokens + tokens before t read later +
    // those inside; two tokens a lane.
    const int lane = lane_id(), at = 2 * lane;
    const float cross_chunk[2] = {memory.cross_chunk[at], memory.cross_chunk[at + 1]};
    const float later[2] = {memory.later[at], memory.later[at + 1]};
    constexpr bool all = std::is_null_pointer_v<Over>;
    float left_out[2] = {};
    if constexpr (!all) {
        left_out[0] = over(at);
        left_out[1] = over(at + 1);
    }
    float suffix = cross_chunk[0] + cross_chunk[1], prefix = later[0] + later[1],
          middle = left_out[0] + left_out[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float behind = __shfl_down_sync(all_lanes, suffix, static_cast<unsigned>(step));
        const float ahead = __shfl_up_sync(all_lanes, prefix, static_cast<unsigned>(step));
        const float before = all ? 0.0f : __shfl_up_sync(all_lanes, middle, static_cast<unsigned>(step));
        suffix += lane + step < 32 ? behind : 0.0f;
        prefix += lane >= step ? ahead : 0.0f;
        middle += lane >= step ? before : 0.0f;
    }
    const float ahead = __shfl_up_sync(all_lanes, prefix, 1u);
    const float before = all ? 0.0f : __shfl_up_sync(all_lanes, middle, 1u);
    const float behind = __shfl_down_sync(all_lanes, suffix, 1u);
    prefix = lane > 0 ? ahead : 0.0f;
    middle = lane > 0 ? before : 0.0f;
    const float suffixes[2] = {suffix, cross_chunk[1] + (lane < 31 ? behind : 0.0f)};
    const float prefixes[2] = {prefix, prefix + later[0]};
    const float middles[2] = {middle, middle + left_out[0]};
    float of_gates[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int j = at + i;
        float d_i = 0.0f, d_f = 0.0f;
        if (j < s.count) {
            float d_log_f = across + suffixes[i] + prefixes[i] + (j < scorer_chunk / 2 ? middles[i] : 0.0f);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                d_log_f += memory.columns[w * scorer_chunk + j];
            }
            d_i = (inside(j) + later[i]) * memory.slopes[j];
            // Nothing is forgotten before a stream's first token.
            d_f = s.first + j == s.begin ? 0.0f : d_log_f * memory.slopes[scorer_chunk + j];
            of_gates[0] += d_i;
            of_gates[1] += d_f;
        }
        memory.d_gates[2 * j] = d_i;
        memory.d_gates[2 * j + 1] = d_f;
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {  // side by side, since a shuffle takes its time
        of_gates[0] += __shfl_xor_sync(all_lanes, of_gates[0], by);
        of_gates[1] += __shfl_xor_sync(all_lanes, of_gates[1], by);
    }
    if (lane == 0) {
        params.d_gates[chunk * 2] = of_gates[0];
        params.d_gates[chunk * 2 + 1] = of_gates[1];
    }
}

/// Small: as in mlstm_token_gradients_memory. Eight warps, as in kernel_chunk_outputs.cuh: warp i has rows 16
/// (i % 4) to 16 (i % 4) + 15 and half i / 4 of the columns of each product.
template <class T, int F, int V, bool Small>
struct token_gradients_agent {
    using E = mlstm_element<T>;
    using memory_type = mlstm_token_gradients_memory<E, F, V, Small>;
    // Arrays in registers are objects of run(), one each (agent_chunk_states.cuh says why).
    using pairs_type = rounded_pair<E>[4][2];
    using values_type = float[1][V / 16][4];

    const mlstm_params<T>& params;
    const scorer_span& s;
    const memory_type memory;
    const std::int64_t row, chunk;
    const bool outputs;  // the chunk has reads
    const int thread, m0, half, lane;

    __device__ __forceinline__ token_gradients_agent(const mlstm_params<T>& of, const scorer_span& span)
        : params(of),
          s(span),
          memory(aligned_dynamic_shared()),
          row(span.row(of.streams.chunks)),
          chunk(of.chunk(span)),
          outputs(of.chunk_stats[chunk].first_output < scorer_chunk),
          thread(static_cast<int>(threadIdx.x)),
          m0(16 * (warp_id() % 4)),
          half(warp_id() / 4),
          lane(lane_id()) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        load();  // 1
        copy_wait<1>();
        __syncthreads();
        pairs_type gradients = {};
        multiply_pairs(gradients);  // 2
        copy_wait<0>();
        __syncthreads();
        // exp(s_j - M at the chunk's end): how much of a token the state after the chunk has.
        float out[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            out[r] = memory.exponents.weight(scorer_chunk - 1, m0 + lane / 4 + 8 * r);
        }
        values_type d_v;
        multiply_values(out, d_v);  // 3
        const shared_tile<E> queries = Small ? memory.d_n : memory.q;
        if (Small && outputs) {
            __syncthreads();  // d N is free as well
            copy_chunk_rows<F>(queries, static_cast<const E*>(params.q), row);
            copy_commit();
        }
        feature_gradients<F> d_k;
        multiply_keys(gradients, out, queries, d_k);  // 4
        __syncthreads();
        d_k.through_map(params, memory.k, m0, memory.low, memory.high);
        // To the warp's own places of k and v, which no other warp reads.
        const shared_tile<T> to_k{memory.k.data, scorer_chunk}, to_v{memory.v.data, scorer_chunk};
        d_k.store(to_k, m0);
        store_values(d_v, to_v);
        sum_pairs_across();  // 5
        __syncthreads();
        write_gradients(to_k, to_v);  // 6
    }

  private:
    __device__ __forceinline__ const mlstm_chunk_stats& stats() const { return params.chunk_stats[chunk]; }
    /// Phase 1: the chunk's rows, the state after it, and its numbers.
    __device__ __forceinline__ void load() const {
        copy_chunk_rows<F>(memory.k, static_cast<const E*>(params.k), row);
        copy_chunk_rows<V>(memory.v, static_cast<const E*>(params.v), row);
        if (outputs) {
            copy_chunk_rows<F>(memory.q, static_cast<const E*>(params.q), row);
            copy_chunk_rows<V>(memory.d_n, static_cast<const E*>(params.d_n), row);
        }
        copy_commit();
        copy_slice<F, Small ? 64 : V, mlstm_threads>(memory.a, 0, state_after(), V);
        copy_commit();
        mlstm_look_ahead<T> next(params);
        next.array(params.q, scorer_chunk * F);
        next.array(params.d_n, scorer_chunk * V);
        next.array(params.k, scorer_chunk * F);
        next.array(params.v, scorer_chunk * V);
        next.array(params.d_memory, F * V);
        next.array(params.memory, F * V);
        for (int i = thread; i < F; i += mlstm_threads) {
            float sum = 0.0f;
#pragma unroll 1
            for (int part = 0; part < params.sum_parts; ++part) {
                sum += params.d_sums[(chunk * params.sum_parts + part) * F + i];
            }
            memory.a_z[i] = sum;
            memory.z[i] = params.sums[chunk * F + i];
        }
        if (thread < V) {
            memory.ref_value[thread] = reference_before(
                params, stats(), row - std::int64_t{s.chunk_index} * scorer_chunk, V, thread);
        }
        if (thread < scorer_chunk) {
            memory.d_g[thread] = outputs ? params.d_g[row + thread] : 0.0f;
            memory.cross_chunk[thread] = outputs ? params.cross_chunk[row + thread] : 0.0f;
            const bool there = thread < s.count;
            memory.slopes[thread] = there ? params.slope_i[row + thread] : 0.0f;
            memory.slopes[scorer_chunk + thread] = there ? params.slope_f[row + thread] : 0.0f;
        }
        memory.exponents.load(params.log_source + row, params.log_top + row, stats().m);
        if (thread == 0 && stats().bad < s.count) {
            params.streams.report(s.b, status_not_finite);
        }
    }
    __device__ __forceinline__ const E* state_after() const { return params.d_memory + chunk * F * V; }

    /// Phase 2: the pairs of the chunk's tokens with its own outputs.
    __device__ __forceinline__ void multiply_pairs(pairs_type& gradients) const {
        if (outputs) {
            pairs_of_chunk<E, F, V, Small>(memory, gradients);
        } else {
            memory.columns[thread] = 0.0f;
            if (thread < 2 * scorer_chunk) {
                memory.inside.of[thread] = 0.0f;
            }
        }
        if constexpr (Small) {
            __syncthreads();  // the queries are free
            copy_slice<F, 64, mlstm_threads>(memory.a, 64, state_after() + 64, V);
            copy_commit();
        }
    }

    /// Phase 3: d v~_j = sum_l w_lj (q~_l . k~_j) d N_l + o_j A^T k~_j.
    __device__ __forceinline__ void multiply_values(const float (&out)[2], values_type& d_v) const {
        clear(d_v);
        add_product<1, V / 16, F, false, true>(d_v, memory.k, m0, memory.a, V / 2 * half);
#pragma unroll
        for (int i = 0; i < V / 16; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                d_v[0][i][e] *= out[e / 2];
            }
        }
        if (outputs) {
            add_product<1, V / 16, scorer_chunk, false, true>(d_v, memory.pairs, m0, memory.d_n,
                                                              V / 2 * half);
        }
    }
    __device__ __forceinline__ void store_values(const values_type& d_v, const shared_tile<T>& to_v) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto to = to_v.pairs_of(m0 + lane / 4 + 8 * r, V / 2 * half + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < V / 16; ++i) {
                const std::int32_t column = V / 2 * half + 8 * i + lane % 4 * 2;
                to.set(i, column < params.width ? d_v[0][i][2 * r] : 0.0f,
                       column + 1 < params.width ? d_v[0][i][2 * r + 1] : 0.0f);
            }
        }
    }

    /// Phase 4: d k~_j = sum_l w_lj G_lj q~_l + o_j (A v~_j + a), the part of the state first.
    __device__ __forceinline__ void multiply_keys(const pairs_type& gradients, const float (&out)[2],
                                                  const shared_tile<E>& queries,
                                                  feature_gradients<F>& d_k) const {
        d_k.clear_all();
        d_k.template add<V, false>(memory.v, m0, memory.a);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < F / 32; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& x = d_k.of[i][0][j][e];
                    x = out[e / 2] * (x + memory.a_z[d_k.column(i, j) + e % 2]);
                }
            }
        }
        d_k.sum_along(memory.k, m0, memory.low, memory.high);
        sync_rows();  // these rows of the pairs are free
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto pairs = memory.pairs.pairs_of(m0 + lane / 4 + 8 * r, 32 * half + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                pairs.set(i, gradients[i][r].first(), gradients[i][r].second());
            }
        }
        if (half == 0 && lane < 16) {
            memory.later[m0 + lane] = memory.low.get(m0 + lane) + memory.high.get(m0 + lane);
        }
        if constexpr (Small) {
            copy_wait<0>();
            __syncthreads();
        } else {
            sync_rows();
        }
        if (outputs) {
            d_k.template add<scorer_chunk, true>(memory.pairs, m0, queries);
        }
        d_k.sum_along(memory.k, m0, memory.low, memory.high);
    }

    /// Phase 5: the pairs across the whole chunk: a token before it, an output after it. The state before the
    /// chunk comes straight to registers, all of a thread's part at once.
    __device__ __forceinline__ void sum_pairs_across() const {
        float across = 0.0f;
        constexpr int parts = F * V / 8 / mlstm_threads, together = shared_tile<E>::plain ? 1
                                                                    : parts < 8           ? parts
                                                                                          : 8;
        static_assert(parts % together == 0);
        const E* const before = params.memory + chunk * F * V;
#pragma unroll 1
        for (int first = 0; first < parts; first += together) {
            eight_of<E> states[together];
#pragma unroll
            for (int i = 0; i < together; ++i) {
                states[i].load(before + ((first + i) * mlstm_threads + thread) * 8);
            }
#pragma unroll
            for (int i = 0; i < together; ++i) {
                const int at = (first + i) * mlstm_threads + thread, f = at / (V / 8),
                          column = at % (V / 8) * 8;
                const float z = memory.z[f];
                float x[8], y[8];
                states[i].get(x);
                memory.a.get_eight(f, column, y);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    across += (x[e] + z * memory.ref_value[column + e]) * y[e];
                }
            }
        }
        for (int i = thread; i < F; i += mlstm_threads) {
            across += memory.z[i] * memory.a_z[i];
        }
        across = warp_sum(across) * stats().keep;
        if (lane == 0) {
            memory.across[warp_id()] = across;
        }
    }

    /// Phase 6: the gates' gradients by one warp; meanwhile the other warps write the columns that do not
    /// need them.
    __device__ __forceinline__ void write_gradients(const shared_tile<T>& to_k,
                                                    const shared_tile<T>& to_v) const {
        if (warp_id() == 0) {
            float whole = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                whole += memory.across[i];
            }
            // Pairs of the first 32 tokens with outputs of the second half.
            const auto over = [&](int j) {
                return j < scorer_chunk / 2 ? memory.inside.of[scorer_chunk + j] : 0.0f;
            };
            gate_gradients(
                params, s, chunk, memory, whole, [&](int j) { return memory.inside.get(j); }, over);
        }
        T* const rows = params.d_rows_k + row * params.rows_k;
        if (warp_id() != 0) {
            constexpr int others = mlstm_threads - 32;
            const std::int32_t across_k = params.at_v / 8, across_v = (params.at_i - params.at_v) / 8;
            write_columns(rows, params.rows_k, 0, across_k, s.count, thread - 32, others,
                          [&](int r, int c, float(&x)[8]) { to_k.get_eight(r, c, x); });
            write_columns(rows, params.rows_k, params.at_v, across_v, s.count, thread - 32, others,
                          [&](int r, int c, float(&x)[8]) { to_v.get_eight(r, c - params.at_v, x); });
        }
        __syncthreads();
        write_columns(rows, params.rows_k, params.at_i, (params.rows_k - params.at_i) / 8, s.count, thread,
                      mlstm_threads, [&](int r, int c, float(&x)[8]) {
                          if (c == params.at_i) {
                              x[0] = memory.d_gates[2 * r];
                          } else if (c == params.at_f) {
                              x[0] = memory.d_gates[2 * r + 1];
                          }
                      });
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
