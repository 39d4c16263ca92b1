// The mass that keys receive from the queries that count.
#pragma once

#include <kvpolicy/attention/cuda/received_mass/mass_tile.cuh>
#include <kvpolicy/attention/cuda/received_mass/received_mass_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// 128 keys of one KV head by one block; a thread has parts of four of them. A tile of queries passes once
/// per query head of the group.
template <class Tile, bool Largest>
struct agent_received_mass {
    using T = typename Tile::value_type;
    using C = typename Tile::compute;
    using Params = received_mass_params<T>;
    static constexpr int width = Tile::columns / 2;

    const Params& params;
    const std::int64_t b, h;
    const std::int32_t length, before, first, keys;  // keys: of the head
    const std::int32_t row;                          // of query 0
    std::int32_t begin, end;                         // queries that count and see some key of the tile
    C sum[2][2];
    C best[2][Largest ? width : 1];  // of the group's heads so far

    __device__ agent_received_mass(const Params& call, std::int64_t of_b, std::int64_t of_h,
                                   std::int32_t tile)
        : params(call),
          b(of_b),
          h(of_h),
          length(call.length_of(of_b)),
          before(call.before_of(of_b, of_h)),
          first(tile * mass_tile_rows),
          keys(call.own ? before + length : before),
          row(call.packed.begin(of_b)),
          begin(call.first_counted(of_h, length)),
          end(length) {}

    /// `bias`: two buffers of a number per column, `last` one word, in shared memory.
    __device__ void run(C (*bias)[Tile::columns], std::int32_t& last) {
        if (first >= keys) {
            return;
        }
        clear();
        skip_queries(last);
        const key_source<Params> rows{params, b, h, first, keys};
        const Tile tile(params.q.dim);
        tile.load_rows(rows);  // 1
        const std::int32_t group = params.group;
        const std::int32_t turns =
            begin < end ? (end - begin + Tile::columns - 1) / Tile::columns * group : 0;
        fetch(tile, bias, 0, turns);
        for (std::int32_t turn = 0; turn < turns; ++turn) {  // 2
            tile.wait();
            fetch(tile, bias, turn + 1, turns);
            C s[2][width];
            tile.multiply(s, turn % 2, rows, queries(turn));
            absorb(s, begin + turn / group * Tile::columns, turn % group, bias[turn % 2]);
        }
        tile.wait();
        write();  // 3
    }

  private:
    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            sum[m][0] = sum[m][1] = C(0);
        }
    }

    /// Queries before the tile's first key, and those to which the mask hides all of the tile.
    __device__ void skip_queries(std::int32_t& last) {
        if (params.own) {
            begin = max(begin, first - before);
        }
        if (!params.mask.expiry) {
            return;
        }
        if (threadIdx.x == 0) {
            last = 0;
        }
        __syncthreads();
        const std::int32_t j = first + static_cast<std::int32_t>(threadIdx.x);
        if (j < keys) {
            atomicMax(&last, params.mask.expiry.head(b, h)[j]);
        }
        __syncthreads();
        end = min(end, last);
    }

    __device__ query_source<T> queries(std::int32_t turn) const {
        return {
            params.q, b,  h * params.group + turn % params.group, begin + turn / params.group * Tile::columns,
            length,   row};
    }

    /// The queries of a turn, and -lse of each in base 2; -inf where the query gives nothing.
    __device__ void fetch(const Tile& tile, C (*bias)[Tile::columns], std::int32_t turn,
                          std::int32_t turns) const {
        if (turn >= turns) {
            return;
        }
        const query_source<T> source = queries(turn);
        tile.load_columns(turn % 2, source);
        if (threadIdx.x < Tile::columns) {
            const std::int32_t i = source.first + static_cast<std::int32_t>(threadIdx.x);
            const float lse = i < end ? params.lse.head(b, source.head)[row + i] : -INFINITY;
            bias[turn % 2][threadIdx.x] = fabsf(lse) < INFINITY ? params.logits.of_lse * static_cast<C>(lse)
                                                                : -static_cast<C>(INFINITY);
        }
    }

    __device__ void absorb(C (&s)[2][width], std::int32_t query, std::int32_t g, const C* bias) {
        C scale = params.logits.scale;
        if (!params.plain_logits()) {
            params.make_exponents(s, b, h, [&](int m, int i) {
                const std::int32_t column = query + mass_tile_column(i), j = first + mass_tile_row(m, i);
                return mass_pair{column, j, column < end && j < keys};
            });
            scale = C(1);
        }
        if (!params.own || first + mass_tile_rows - 1 - before <= query) {
            add_weights<false>(s, query, g, bias, scale);
        } else {
            add_weights<true>(s, query, g, bias, scale);
        }
    }

    /// A tile into the sums. `Masked`: not all of its queries see all keys. Queries that give nothing have a
    /// bias of -inf.
    template <bool Masked>
    __device__ void add_weights(const C (&s)[2][width], std::int32_t query, std::int32_t g, const C* bias,
                                C scale) {
        const bool last = g == params.group - 1;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            C part[2] = {C(0), C(0)};
#pragma unroll
            for (int i = 0; i < width; ++i) {
                // Fused in every case: equal products must give equal weights.
                C x = fma(s[m][i], scale, bias[mass_tile_column(i)]);
                if constexpr (Masked) {
                    const bool seen = first + mass_tile_row(m, i) - before <= query + mass_tile_column(i);
                    x = seen ? x : -static_cast<C>(INFINITY);
                }
                const C p = exp2_of(x);
                if constexpr (Largest) {
                    best[m][i] = g == 0 || p > best[m][i] ? p : best[m][i];
                    part[i / 2 % 2] += last ? best[m][i] : C(0);
                } else {
                    part[i / 2 % 2] += p;
                }
            }
            sum[m][0] += part[0];
            sum[m][1] += part[1];
        }
    }

    /// Joins the four threads of a key.
    __device__ void write() const {
        const C share = Largest ? C(1) : C(1) / static_cast<C>(params.group);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                C total = sum[m][r];
                for (int step = 1; step < 4; step *= 2) {
                    total += __shfl_xor_sync(all_lanes, total, step);
                }
                const std::int32_t j = first + mass_tile_row(m, 2 * r);
                if (lane_id() % 4 == 0 && j < keys) {
                    params.mass.head(b, h)[j] = static_cast<float>(total * share);
                }
            }
        }
    }
};

/// mass[j] = sum over the queries that count and see key j of agg_g exp(logit - lse_g), agg being the mean
/// over the group, or with `Largest` its maximum.
///
/// Grid: B * Hkv * tiles blocks, `tiles` of 128 keys. Block: 128 threads. Shared memory: Tile::shared_bytes
/// (dynamic). Reads q [B, Hq, n, Dk] and keys in T, lse [B, Hq, n] fp32, `before` [B, Hkv], lengths [B]; the
/// mask. Overwrites mass [B, Hkv, max_keys] of the keys that there are, fp32.
/// 1. Copy the keys and the first tile of queries.
/// 2. Per tile and query head of the group: copy the next, multiply, reduce.
/// 3. Write 128 results.
template <class Tile, bool Largest>
__global__ void __launch_bounds__(mass_tile_threads, 2)
    received_mass_kernel(const __grid_constant__ received_mass_params<typename Tile::value_type> params,
                         const std::int32_t tiles) {
    __shared__ typename Tile::compute bias[2][Tile::columns];
    __shared__ std::int32_t last;
    // Early keys have the most queries: those of all heads come first.
    const std::int32_t pairs = params.batch * params.kv_heads;
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t pair = block % pairs;
    agent_received_mass<Tile, Largest>(params, pair / params.kv_heads, pair % params.kv_heads, block / pairs)
        .run(bias, last);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
