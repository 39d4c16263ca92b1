// d_q without atomic additions on Hopper: one block has 128 packed rows, two warpgroups of 64, and goes over
// all entries of their list that any of them sees. A producer warpgroup gathers blocks of 64 keys and values
// into a ring.
#pragma once

#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_prepare.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes and the layout of shared memory, in bytes from a multiple of 1024.
template <int Dim>
struct hopper_queries {
    static_assert(Dim == 64 || Dim == 128);
    static constexpr int rows = 128;
    static constexpr int keys = 64;
    static constexpr int stages = 4;
    static constexpr int threads = 384;
    static constexpr int tile_bytes = 64 * Dim * 2;  // of 64 rows of anything

    static constexpr int q = 0;                           // [2]
    static constexpr int d_out = q + 2 * tile_bytes;      // [2]
    static constexpr int k = d_out + 2 * tile_bytes;      // [stages]
    static constexpr int v = k + stages * tile_bytes;     // [stages]
    static constexpr int meta = v + stages * tile_bytes;  // [stages]
    static constexpr int meta_bytes = 16 + keys * 5 * 4;
    static constexpr int intervals = meta + stages * meta_bytes;  // [2][2], of the producer's warps
    static constexpr int barriers = intervals + 4 * 16;
    static constexpr int bytes = barriers + (1 + 2 * stages) * 8;
    static constexpr int shared_bytes = bytes + 1024;
};

#if KVPOLICY_HOPPER_CODE
/// A block of keys in shared memory.
struct queries_block_keys {
    std::int32_t
        kind;  // 0: some rows do not see some keys; 1: all see all; 2: there is no block, and none will come
    std::int32_t unused[3];
    std::int32_t row[64];
    std::int32_t begin[64];
    std::int32_t expiry[64];
    std::int32_t from[64];
    float bias[64];
};

template <class T, int Dim, bool Bias, bool Softcap>
struct hopper_queries_block {
    using L = hopper_queries<Dim>;
    static constexpr int sum_values = Dim / 2;

    const backward_params<T>& p;
    unsigned char* const shared;
    const std::uint32_t base;
    const std::int32_t list;
    const std::int32_t first_row;
    const std::int32_t b, h;
    const int thread = static_cast<int>(threadIdx.x) % 128;

    __device__ std::uint32_t full_q() const { return base + L::barriers; }
    __device__ std::uint32_t full(int stage) const { return base + L::barriers + 8 + 8 * stage; }
    __device__ std::uint32_t empty(int stage) const { return full(stage) + 8 * L::stages; }
    __device__ queries_block_keys& meta(int stage) const {
        return *reinterpret_cast<queries_block_keys*>(shared + L::meta + stage * L::meta_bytes);
    }

    __device__ hopper_queries_block(const backward_params<T>& params, unsigned char* memory,
                                    std::int32_t at_list, std::int32_t row)
        : p(params),
          shared(memory),
          base(shared_address(memory)),
          list(at_list),
          first_row(row),
          b(at_list / params.plan.supers / params.call.kv_heads),
          h(at_list / params.plan.supers % params.call.kv_heads) {
        static_assert(sizeof(queries_block_keys) <= L::meta_bytes);
        if (threadIdx.x == 0) {
            barrier_init(full_q(), 1);
            for (int i = 0; i < L::stages; ++i) {
                barrier_init(full(i), 256);  // of every producer: its copies, and what it wrote itself
                barrier_init(empty(i), 8 * arrivals_of_warp);
            }
            barrier_init_fence();
        }
        __syncthreads();
    }

    __device__ void gather(const rows_view<const T>& rows, const queries_block_keys& keys,
                           std::uint32_t to) const {
        constexpr int chunks = Dim / 8, lines = 128 / chunks;
        const int chunk = thread % chunks;
        const bool inside = chunk * 8 < rows.dim;
        const T* const from = rows.row(b, h, 0) + (inside ? chunk * 8 : 0);
#pragma unroll 4
        for (int e = thread / chunks; e < L::keys; e += lines) {
            const std::int32_t row = keys.row[e];
            copy_16(to + swizzled(L::keys, e, chunk), from + (row < 0 ? 0 : row) * rows.row_stride,
                    row >= 0 && inside ? 16 : 0);
        }
    }

    __device__ void produce() const {
        // 1. Load queries.
        if (thread == 0) {
            const std::int64_t at = (static_cast<std::int64_t>(list) * p.padded_rows + first_row) * Dim;
            barrier_expect(full_q(), 4 * L::tile_bytes);
            copy_bulk(base + L::q, p.packed_q + at, 2 * L::tile_bytes, full_q());
            copy_bulk(base + L::d_out, p.packed_d_out + at, 2 * L::tile_bytes, full_q());
        }
        __syncwarp();
        const backward_list all = p.list_of(list);
        const std::int32_t blocks = list_blocks(all, L::keys).all;
        auto* const intervals = reinterpret_cast<block_interval*>(shared + L::intervals);
        std::uint32_t filled = 0;
        // 2. Gather blocks of keys that some row sees.
        for (std::int32_t i = 0; i < blocks; ++i) {
            const backward_item item = block_at(list, all, i, L::keys);
            const bool has = thread < item.count;
            backward_entry e{};
            if (thread < L::keys) {  // whole warps
                if (has) {
                    e = p.entry_of(list, all, item.first + thread);
                }
                intervals[i % 2 * 2 + thread / 32] = block_interval::of_warp(e, has);
            }
            named_barrier(2, 128);
            block_interval interval = intervals[i % 2 * 2];
            interval.join(intervals[i % 2 * 2 + 1]);
            if (interval.first_begin >= first_row + L::rows || interval.last_expiry <= first_row) {
                continue;
            }
            const int stage = static_cast<int>(filled % L::stages);
            barrier_wait(empty(stage), (filled / L::stages & 1) ^ 1);
            ++filled;
            queries_block_keys& keys = meta(stage);
            if (thread < L::keys) {
                keys.row[thread] = has && e.begin < e.expiry ? e.row : -1;
                keys.begin[thread] = e.begin;
                keys.expiry[thread] = e.expiry;
                keys.from[thread] = e.from;
                keys.bias[thread] = e.bias;
            }
            if (thread == 0) {
                keys.kind = interval.whole(first_row, first_row + L::rows) ? 1 : 0;
            }
            named_barrier(2, 128);
            gather(p.call.rows.k, keys, base + L::k + stage * L::tile_bytes);
            gather(p.call.rows.v, keys, base + L::v + stage * L::tile_bytes);
            barrier_arrive(full(stage));
            barrier_arrive_after_copies(full(stage));
        }
        const int stage = static_cast<int>(filled % L::stages);
        barrier_wait(empty(stage), (filled / L::stages & 1) ^ 1);
        if (thread == 0) {
            meta(stage).kind = 2;
        }
        barrier_arrive(full(stage));
        barrier_arrive_after_copies(full(stage));
    }

    __device__ void multiply_scores(float (&scores)[32], std::uint32_t a, std::uint32_t from) const {
        const std::uint64_t from_a = describe_k_major(a), from_b = describe_k_major(from);
#pragma unroll
        for (int i = 0; i < Dim / 16; ++i) {
            const std::uint64_t step = (i / 4 * 64 * 128 + i % 4 * 32) / 16;
            wgmma<T, 0, 0>(scores, from_a + step, from_b + step, i != 0);
        }
        wgmma_commit();
    }

    __device__ void consume(int group) const {
        const int lane = thread % 32, column = 2 * (thread % 4);
        const std::int32_t m = first_row + group * 64 + thread / 32 * 16 + lane / 4;  // and m + 8
        const std::int64_t line = static_cast<std::int64_t>(list) * p.padded_rows + m;
        const float lse2[2] = {p.lse2[line], p.lse2[line + 8]}, delta[2] = {p.delta[line], p.delta[line + 8]};
        float d_q[sum_values];
#pragma unroll
        for (int i = 0; i < sum_values; ++i) {
            d_q[i] = 0.0f;
        }
        barrier_wait(full_q(), 0);
        for (std::uint32_t n = 0;; ++n) {
            const int stage = static_cast<int>(n % L::stages);
            barrier_wait(full(stage), n / L::stages & 1);
            const queries_block_keys& keys = meta(stage);
            if (keys.kind == 2) {
                break;
            }
            fence_async_proxy();  // keys were written by cp.async
            const std::uint32_t k = base + L::k + stage * L::tile_bytes;
            float s[32], d[32];
            // 1. Scores and weights.
            wgmma_fence();
            multiply_scores(s, base + L::q + group * L::tile_bytes, k);
            multiply_scores(d, base + L::d_out + group * L::tile_bytes, base + L::v + stage * L::tile_bytes);
            wgmma_wait<1>();
            pin(s);
            const bool whole = keys.kind == 1;
            float slopes[Softcap ? 32 : 1];
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const int r = i / 2 % 2, c = i / 4 * 8 + column + i % 2;
                float rest = -lse2[r];
                if constexpr (Bias) {
                    rest += m + 8 * r >= keys.from[c] ? keys.bias[c] : 0.0f;
                }
                float derivative = 1.0f;
                s[i] = weight_of<Softcap>(s[i], p.slope, p.height, rest, derivative);
                if constexpr (Softcap) {
                    slopes[i] = derivative;
                }
            }
            wgmma_wait<0>();
            pin(d);
            // 2. Gradients of logits.
            std::uint32_t gradients[4][4];
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                s[i] *= d[i] - delta[i / 2 % 2];
                if constexpr (Softcap) {
                    s[i] *= slopes[i];
                }
            }
            if (!whole) {  // products with a hidden key may be anything
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    const int c = i / 4 * 8 + column + i % 2;
                    const std::int32_t row = m + 8 * (i / 2 % 2);
                    if (row < keys.begin[c] || row >= keys.expiry[c]) {
                        s[i] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (int x = 0; x < 4; ++x) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    gradients[x][i] = pack<T>(s[8 * x + 2 * i], s[8 * x + 2 * i + 1]);
                }
            }
            // 3. dQ += dS K.
            const std::uint64_t from_k = describe_mn_major(k, 64 * 128);
            pin(gradients);
            pin(d_q);
            wgmma_fence();
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                wgmma<T, 1>(d_q, gradients[x], from_k + x * 2048 / 16, 1);
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin(d_q);
            pin(gradients);
            warp_arrive(empty(stage), lane);  // all lanes have read what is said of the keys
        }
        // 4. Scale, round and write dQ.
        const std::int32_t valid = p.valid_rows(b, list % p.plan.supers);
        if (zero_if_finite(d_q) != 0.0f) {
            *p.not_finite = 1;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (m + 8 * r >= valid) {
                continue;
            }
            const packed_row<T> row(p, list, m + 8 * r);
            T* const to = p.d_q.row(row.b, row.head, row.query);
#pragma unroll
            for (int j = 0; j < Dim / 8; ++j) {
                if (8 * j < p.d_q.dim) {
                    *reinterpret_cast<std::uint32_t*>(to + 8 * j + column) =
                        pack<T>(d_q[4 * j + 2 * r] * p.call.scale, d_q[4 * j + 2 * r + 1] * p.call.scale);
                }
            }
        }
    }
};
#endif

/// backward_queries_kernel by wgmma (compute capability 9.0a), head_dim up to 128.
///
/// Grid: lists * padded_rows / 128, 128 packed rows each. Block: 384 threads: two consumer warpgroups of 64
/// rows, one producer. Shared memory: hopper_queries<Dim>::shared_bytes (dynamic). Inputs and outputs as
/// there.
/// Producer:
/// 1. Load queries.
/// 2. Gather blocks of 64 keys that some row sees.
/// Consumers:
/// 1. Scores and weights.
/// 2. Gradients of logits.
/// 3. dQ += dS K.
/// After the list:
/// 4. Scale, round and write dQ.
template <class T, int Dim, bool Bias, bool Softcap>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(384), 1)
    backward_queries_hopper_kernel(const __grid_constant__ backward_params<T> p) {
#if KVPOLICY_HOPPER_CODE
    using L = hopper_queries<Dim>;
    const std::int32_t tiles = p.padded_rows / L::rows;
    const std::int32_t list = p.list_at(static_cast<std::int32_t>(blockIdx.x) / tiles);
    const std::int32_t m = static_cast<std::int32_t>(blockIdx.x) % tiles * L::rows;
    if (m >= p.valid_rows(list / p.plan.supers / p.call.kv_heads, list % p.plan.supers)) {
        return;
    }
    unsigned char* const memory = dynamic_shared() + (1024 - shared_address(dynamic_shared()) % 1024) % 1024;
    const hopper_queries_block<T, Dim, Bias, Softcap> block(p, memory, list, m);
    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (group == 2) {
        give_registers<40>();
        block.produce();
    } else {
        take_registers<232>();
        block.consume(group);
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
