// The products of the backward pass for one block of keys and one tile of queries, on any GPU from compute
// capability 8.0.
//
// Keys stand on the rows of S^T = K Q^T, so that the weights are P^T and the gradients of logits dS^T,
// [key][query] in shared memory: dV += P^T dO and dK += dS^T Q read them as they are, dQ += dS K reads them
// transposed. Everything is stored as swizzled tiles of 64 columns (cuda/primitives/wgmma.cuh).
#pragma once

#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/tile_product.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes of the portable kernels for head_dims up to Dim.
template <int Dim>
struct portable_sizes {
    static constexpr int keys = Dim <= 128 ? 64 : 32;
    static constexpr int queries = keys;
    static constexpr int warps = Dim <= 128 ? 8 : 4;
    static constexpr int threads = 32 * warps;
    static constexpr int blocks = 2;  // per SM: one computes while the other waits for its rows
    static constexpr int score_columns = queries / (warps / (keys / 16));  // of a warp, beside its 16 keys
    static constexpr int across = 4;  // warps beside each other in a product of Dim columns, 32 rows each
    static constexpr int columns = Dim / across;
    static_assert(warps == across * (keys / 32) && columns % 16 == 0 && score_columns % 16 == 0);
};

/// Shared memory of a block. Begins at a multiple of 128 bytes, so that addresses swizzle as offsets do.
template <int Dim>
struct portable_memory {
    using S = portable_sizes<Dim>;
    __align__(128) unsigned char k[S::keys * Dim * 2];
    unsigned char v[S::keys * Dim * 2];
    unsigned char q[S::queries * Dim * 2];
    unsigned char d_out[S::queries * Dim * 2];
    unsigned char weights[S::keys * 128];    // P^T; rows of 64 columns
    unsigned char gradients[S::keys * 128];  // dS^T
    float lse2[S::queries];
    float delta[S::queries];
    std::int32_t row[S::keys];
    std::int32_t begin[S::keys];
    std::int32_t expiry[S::keys];
    std::int32_t from[S::keys];
    float bias[S::keys];
    float sum_bias[S::keys];
    block_interval interval[S::keys / 32];
    backward_item item;
};

template <class T, int Dim, bool Bias, bool Softcap>
struct agent_backward_tile {
    using S = portable_sizes<Dim>;
    static constexpr int product_columns = S::columns / 8;
    using product = float[2][product_columns][4];

    const backward_params<T>& p;
    portable_memory<Dim>& memory;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = warp_id();
    const int lane = lane_id();
    const int own_keys = warp % (S::keys / 16) * 16;
    const int own_queries = warp / (S::keys / 16) * S::score_columns;
    const int product_row = warp / S::across * 32;
    const int product_column = warp % S::across * S::columns;

    __device__ agent_backward_tile(const backward_params<T>& params, portable_memory<Dim>& shared)
        : p(params), memory(shared) {}

    /// Gathers an item's keys and values. Ends with a barrier, before which nothing may read what was there.
    __device__ block_interval load_keys(const backward_item& item) {
        if (thread < S::keys) {
            const bool has = thread < item.count;
            backward_entry e{};
            if (has) {
                e = p.entry_of(item.list, p.list_of(item.list), item.first + thread);
            }
            memory.row[thread] = has && e.begin < e.expiry ? e.row : -1;
            memory.begin[thread] = e.begin;
            memory.expiry[thread] = e.expiry;
            memory.from[thread] = e.from;
            memory.bias[thread] = e.bias;
            memory.sum_bias[thread] = 0.0f;
            memory.interval[thread / 32] = block_interval::of_warp(e, has);
        }
        __syncthreads();
        const std::int32_t head = item.list / p.plan.supers;
        const std::int32_t b = head / p.call.kv_heads, h = head % p.call.kv_heads;
        constexpr int chunks = Dim / 8;
        for (int i = thread; i < S::keys * chunks; i += S::threads) {
            const int e = i / chunks, chunk = i % chunks;
            const std::int32_t row = memory.row[e];
            const std::int32_t from = row < 0 ? 0 : row;
            const std::uint32_t at = swizzled(S::keys, e, chunk);
            const bool in_k = row >= 0 && chunk * 8 < p.call.rows.k.dim;
            const bool in_v = row >= 0 && chunk * 8 < p.call.rows.v.dim;
            copy_16(shared_address(memory.k) + at, p.call.rows.k.row(b, h, from) + (in_k ? chunk * 8 : 0),
                    in_k ? 16 : 0);
            copy_16(shared_address(memory.v) + at, p.call.rows.v.row(b, h, from) + (in_v ? chunk * 8 : 0),
                    in_v ? 16 : 0);
        }
        block_interval interval = memory.interval[0];
        for (int i = 1; i < S::keys / 32; ++i) {
            interval.join(memory.interval[i]);
        }
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        return interval;
    }

    /// Brings a tile of packed rows, of which `m` is the first. Ends with a barrier.
    __device__ void load_queries(std::int32_t list, std::int32_t m) {
        constexpr int blocks = Dim / 64, line_chunks = S::queries * 8;  // 16-byte chunks of 64 columns
        const std::int64_t first = static_cast<std::int64_t>(list) * p.padded_rows + m;
        const std::int64_t tile = first / packed_tile;
        const std::int64_t inside = first % packed_tile;
        for (int i = thread; i < blocks * line_chunks; i += S::threads) {
            const int block = i / line_chunks, chunk = i % line_chunks;
            const std::int64_t at = (tile * blocks + block) * (packed_tile * 64) + inside * 64 + chunk * 8;
            copy_16(shared_address(memory.q) + i * 16, p.packed_q + at);
            copy_16(shared_address(memory.d_out) + i * 16, p.packed_d_out + at);
        }
        if (thread < S::queries) {
            memory.lse2[thread] = p.lse2[first + thread];
            memory.delta[thread] = p.delta[first + thread];
        }
        copy_commit();
        copy_wait<0>();
        __syncthreads();
    }

    /// P^T and dS^T of this tile into shared memory. Ends with a barrier.
    __device__ void scores(std::int32_t m, const block_interval& interval) {
        constexpr int wide = S::score_columns / 8;
        float s[1][wide][4] = {};
        float d[1][wide][4] = {};
        tile_product<T, 1, wide, Dim, false, false>(s, shared_address(memory.k), S::keys, own_keys,
                                                    shared_address(memory.q), S::queries, own_queries);
        tile_product<T, 1, wide, Dim, false, false>(d, shared_address(memory.v), S::keys, own_keys,
                                                    shared_address(memory.d_out), S::queries, own_queries);
        const bool whole = interval.whole(m, m + S::queries);
        float sum_bias[2] = {};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = own_keys + lane / 4 + 8 * r;
            const std::int32_t begin = memory.begin[key], expiry = memory.expiry[key];
            const packed_interval sees{begin,
                                       static_cast<std::uint32_t>(begin < expiry ? expiry - begin : 0)};
            const float bias = Bias ? memory.bias[key] : 0.0f;
            const std::int32_t from = Bias ? memory.from[key] : 0;
#pragma unroll
            for (int j = 0; j < wide; ++j) {
                const int column = own_queries + 8 * j + 2 * (lane % 4);
                float weight[2], gradient[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const std::int32_t row = m + column + e;
                    const bool biased = Bias && row >= from;
                    float derivative = 1.0f;
                    weight[e] =
                        weight_of<Softcap>(s[0][j][2 * r + e], p.slope, p.height,
                                           (biased ? bias : 0.0f) - memory.lse2[column + e], derivative);
                    gradient[e] = weight[e] * (d[0][j][2 * r + e] - memory.delta[column + e]);
                    if (!whole && !sees.sees(row)) {  // products with a hidden key may be anything
                        weight[e] = 0.0f;
                        gradient[e] = 0.0f;
                        derivative = 0.0f;
                    }
                    if (biased) {
                        sum_bias[r] += gradient[e];
                    }
                    gradient[e] *= derivative;
                }
                const std::uint32_t at =
                    swizzled(S::keys, key, column / 8) + static_cast<std::uint32_t>(column % 8 * 2);
                *reinterpret_cast<std::uint32_t*>(memory.weights + at) = pack<T>(weight[0], weight[1]);
                *reinterpret_cast<std::uint32_t*>(memory.gradients + at) = pack<T>(gradient[0], gradient[1]);
            }
        }
        if constexpr (Bias) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sum_bias[r] += __shfl_xor_sync(all_lanes, sum_bias[r], 1);
                sum_bias[r] += __shfl_xor_sync(all_lanes, sum_bias[r], 2);
                bias_[r] += sum_bias[r];
            }
        }
        __syncthreads();
    }

    __device__ void add_values(product& sum) {
        tile_product<T, 2, product_columns, S::queries, false, true>(
            sum, shared_address(memory.weights), S::keys, product_row, shared_address(memory.d_out),
            S::queries, product_column);
    }
    __device__ void add_keys(product& sum) {
        tile_product<T, 2, product_columns, S::queries, false, true>(
            sum, shared_address(memory.gradients), S::keys, product_row, shared_address(memory.q), S::queries,
            product_column);
    }
    __device__ void add_queries(product& sum) {
        tile_product<T, 2, product_columns, S::keys, true, true>(
            sum, shared_address(memory.gradients), S::keys, product_row, shared_address(memory.k), S::keys,
            product_column);
    }

    /// Adds the sums of log-biases of this warp's rows since the last time.
    __device__ void add_bias(std::int32_t head) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (lane % 4 == 0) {
                // Two warps at most share a key, and the sum of two does not depend on their order.
                atomicAdd(memory.sum_bias + own_keys + lane / 4 + 8 * r, bias_[r]);
            }
            bias_[r] = 0.0f;
        }
        __syncthreads();
        if (thread < S::keys && memory.row[thread] >= 0) {
            atomicAdd(
                p.sum_bias + static_cast<std::int64_t>(head) * p.call.rows.k.length + memory.row[thread],
                memory.sum_bias[thread]);
        }
    }

  private:
    float bias_[2] = {};
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
