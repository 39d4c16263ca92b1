// Log-sum-exps of the queries that count, over the keys that they see.
#pragma once

#include <kvpolicy/attention/cuda/received_mass/mass_tile.cuh>
#include <kvpolicy/attention/cuda/received_mass/received_mass_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/rounded.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// 128 queries of one query head by one block; a thread has parts of four of them.
template <class Tile>
struct agent_counted_lse {
    using T = typename Tile::value_type;
    using C = typename Tile::compute;
    using Params = received_mass_params<T>;
    static constexpr int width = Tile::columns / 2;

    const Params& params;
    const std::int64_t b, head, h;
    const std::int32_t length, first, before, keys;  // keys: that the last query of the tile sees
    C top[2][2], sum[2][2];                          // base 2; sums relative to `top`

    __device__ agent_counted_lse(const Params& call, std::int64_t of_b, std::int32_t of_head,
                                 std::int32_t tile)
        : params(call),
          b(of_b),
          head(of_head),
          h(of_head / call.group),
          length(call.length_of(of_b)),
          first(call.first_counted(h, length) + tile * mass_tile_rows),
          before(call.before_of(of_b, h)),
          keys(!call.own ? before : before + min(first + mass_tile_rows, length)) {}

    __device__ void run() {
        if (first >= length) {
            return;
        }
        clear();
        const query_source<T> rows{params.q, b, head, first, length, 0};
        const auto columns = [&](std::int32_t from) { return key_source<Params>{params, b, h, from, keys}; };
        const Tile tile(params.q.dim);
        tile.load_rows(rows);  // 1
        tile.load_columns(0, columns(0));
        int buffer = 0;
        for (std::int32_t column = 0; column < keys; column += Tile::columns, buffer ^= 1) {  // 2
            tile.wait();
            if (column + Tile::columns < keys) {
                tile.load_columns(buffer ^ 1, columns(column + Tile::columns));
            }
            C s[2][width];
            tile.multiply(s, buffer, rows, columns(column));
            absorb(s, column);
        }
        tile.wait();
        write();  // 3
    }

  private:
    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top[m][r] = static_cast<C>(-1e30);  // below all logits, and finite
                sum[m][r] = C(0);
            }
        }
    }

    __device__ void absorb(C (&s)[2][width], std::int32_t column) {
        C scale = params.logits.scale;
        if (!params.plain_logits()) {
            params.make_exponents(s, b, h, [&](int m, int i) {
                const std::int32_t query = first + mass_tile_row(m, i), j = column + mass_tile_column(i);
                return mass_pair{query, j, query < length && j < keys};
            });
            scale = C(1);
        }
        const bool whole =
            column + Tile::columns <= keys && (!params.own || column + Tile::columns - 1 - before <= first);
        if (whole) {
            reduce<false>(s, column, scale);
        } else {
            reduce<true>(s, column, scale);
        }
    }

    /// A tile into the sums; `Masked`: not all queries see all of its keys.
    template <bool Masked>
    __device__ void reduce(C (&s)[2][width], std::int32_t column, C scale) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            C most[2] = {top[m][0], top[m][1]}, part[2] = {C(0), C(0)};
#pragma unroll
            for (int i = 0; i < width; ++i) {
                s[m][i] = rounded_product(s[m][i], scale);
                if constexpr (Masked) {
                    const std::int32_t j = column + mass_tile_column(i);
                    const bool seen = j < keys && (!params.own || j - before <= first + mass_tile_row(m, i));
                    s[m][i] = seen ? s[m][i] : -static_cast<C>(INFINITY);
                }
                most[i / 2 % 2] = s[m][i] > most[i / 2 % 2] ? s[m][i] : most[i / 2 % 2];
            }
#pragma unroll
            for (int i = 0; i < width; ++i) {
                part[i / 2 % 2] += exp2_of(s[m][i] - most[i / 2 % 2]);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sum[m][r] = sum[m][r] * exp2_of(top[m][r] - most[r]) + part[r];
                top[m][r] = most[r];
            }
        }
    }

    /// Joins the four threads of a query.
    __device__ void write() const {
        constexpr C ln_2 = static_cast<C>(0.693147180559945309417232121458);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                C most = top[m][r];
                for (int step = 1; step < 4; step *= 2) {
                    const C other = __shfl_xor_sync(all_lanes, most, step);
                    most = other > most ? other : most;
                }
                C total = sum[m][r] * exp2_of(top[m][r] - most);
                for (int step = 1; step < 4; step *= 2) {
                    total += __shfl_xor_sync(all_lanes, total, step);
                }
                const std::int32_t query = first + mass_tile_row(m, 2 * r);
                if (lane_id() % 4 == 0 && query < length) {
                    params.lse.head(b, head)[query] =
                        total == C(0) ? -INFINITY : static_cast<float>((most + log2(total)) * ln_2);
                }
            }
        }
    }
};

/// lse = log sum over the keys that a query sees of exp(logit), of the queries that count.
///
/// Grid: B * Hq * tiles blocks, `tiles` of 128 queries from the first that counts on. Block: 128 threads.
/// Shared memory: Tile::shared_bytes (dynamic). Reads q [B, Hq, n, Dk] and keys in T, `before` [B, Hkv],
/// lengths [B]; the mask. Overwrites lse [B, Hq, n] of those queries, fp32; -inf for one that sees nothing.
/// 1. Copy the queries and the first tile of keys.
/// 2. Per tile: copy the next, multiply, reduce.
/// 3. Write 128 results.
template <class Tile>
__global__ void __launch_bounds__(mass_tile_threads, 2)
    counted_lse_kernel(const __grid_constant__ received_mass_params<typename Tile::value_type> params,
                       const std::int32_t tiles) {
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t heads = params.kv_heads * params.group, pair = block / tiles;
    agent_counted_lse<Tile>(params, pair / heads, pair % heads, block % tiles).run();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
