// The backward pass on Hopper: one block a multiprocessor takes one work item after another. A producer warpgroup gathers
// keys and values and streams tiles of packed queries; two warpgroups of 64 keys each multiply.
//
// S^T = K Q^T and dP^T = V dO^T have keys on the rows, so weights and gradients are register operands of dV += P^T dO and
// dK += dS^T Q. dS^T also goes through shared memory, where the warpgroups meet, for dQ = dS K, which is added
// to the sums in global memory straight from registers.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/backward_problem.cuh>
#include <kvpolicy/cuda/blocks/mma.cuh>
#include <kvpolicy/cuda/blocks/warp.cuh>
#include <kvpolicy/cuda/blocks/wgmma.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes and the layout of shared memory, in bytes from a multiple of 1024.
template <int Dim>
struct hopper_backward {
    static_assert(Dim == 64 || Dim == 128);
    static constexpr int consumers = 2;  // warpgroups, 64 keys each
    static constexpr int keys = 64 * consumers;
    static constexpr int queries = 64;
    static constexpr int stages = 2;
    static constexpr int threads = 128 * (consumers + 1);
    static constexpr int consumer_registers = 240;
    static constexpr int producer_registers = 24;
    static constexpr int key_bytes = keys * Dim * 2;
    static constexpr int query_bytes = queries * Dim * 2;
    static constexpr int gradient_bytes = keys * queries * 2;
    static constexpr int numbers_bytes = queries * 4;

    static constexpr int k = 0;
    static constexpr int v = k + key_bytes;
    static constexpr int q = v + key_bytes;                               // [stages]
    static constexpr int d_out = q + stages * query_bytes;                // [stages]
    static constexpr int gradients = d_out + stages * query_bytes;        // [2], dS^T
    static constexpr int sums = gradients + 2 * gradient_bytes;           // of d_q, 4 KB a warp
    static constexpr int lse2 = sums + consumers * 4 * 4096;              // [stages]
    static constexpr int delta = lse2 + stages * numbers_bytes;           // [stages]
    static constexpr int meta = delta + stages * numbers_bytes;           // [2]
    static constexpr int meta_bytes = 32 + keys / 32 * 24 + keys * 5 * 4;  // item; lives; entries
    static constexpr int barriers = meta + 2 * meta_bytes;
    static constexpr int bytes = barriers + 16 * 8;
    static constexpr int shared_bytes = bytes + 1024;
};

#if KVPOLICY_HOPPER_CODE
/// An item in shared memory.
template <int Keys>
struct hopper_item {
    backward_item item;  // list < 0: no more
    std::int32_t b, h, head;
    std::int32_t valid;
    std::int32_t unused;
    block_life life[Keys / 32];
    std::int32_t first_from[Keys / 32];
    std::int32_t last_from[Keys / 32];
    std::int32_t row[Keys];
    std::int32_t born[Keys];
    std::int32_t dies[Keys];
    std::int32_t from[Keys];
    float bias[Keys];

    /// Tiles of `queries` packed rows that any of its keys can see: [first, end).
    __device__ void tiles(int queries, block_life& all, std::int32_t& first, std::int32_t& end) const {
        all = life[0];
        for (int i = 1; i < Keys / 32; ++i) {
            all.join(life[i]);
        }
        const std::int32_t stop = min(all.last_dies, valid);
        first = all.first_born < stop ? all.first_born / queries : 0;
        end = all.first_born < stop ? (stop + queries - 1) / queries : 0;
    }
};

/// Stores four 8 x 8 matrices of 16-bit elements; lane i names the shared address of row i % 8 of matrix i / 8.
__device__ inline void store_matrices(std::uint32_t row, const std::uint32_t (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

__device__ inline void store_four(std::uint32_t to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

template <class T, int Dim, bool Bias, bool Softcap>
struct hopper_backward_block {
    using L = hopper_backward<Dim>;
    using item_type = hopper_item<L::keys>;
    static constexpr int score_values = L::queries / 2;  // of a thread
    static constexpr int sum_values = Dim / 2;

    const backward_problem<T>& p;
    unsigned char* const shared;
    const std::uint32_t base;
    const int thread = static_cast<int>(threadIdx.x) % 128;

    // Barriers.
    __device__ std::uint32_t barrier(int i) const { return base + L::barriers + 8 * i; }
    __device__ std::uint32_t full_meta(int i) const { return barrier(i); }
    __device__ std::uint32_t full_k() const { return barrier(2); }
    __device__ std::uint32_t full_v() const { return barrier(3); }
    __device__ std::uint32_t empty_keys() const { return barrier(4); }
    __device__ std::uint32_t full_q(int stage) const { return barrier(5 + stage); }
    __device__ std::uint32_t full_d_out(int stage) const { return barrier(7 + stage); }
    __device__ std::uint32_t empty(int stage) const { return barrier(9 + stage); }
    __device__ item_type& meta(int i) const {
        return *reinterpret_cast<item_type*>(shared + L::meta + i * L::meta_bytes);
    }

    __device__ hopper_backward_block(const backward_problem<T>& problem, unsigned char* memory)
        : p(problem), shared(memory), base(shared_address(memory)) {
        static_assert(sizeof(item_type) <= L::meta_bytes);
        if (threadIdx.x == 0) {
            for (int i = 0; i < 2; ++i) {
                barrier_init(full_meta(i), 128);
                barrier_init(full_q(i), 1);
                barrier_init(full_d_out(i), 1);
                barrier_init(empty(i), 4 * L::consumers);
            }
            barrier_init(full_k(), 128);
            barrier_init(full_v(), 128);
            barrier_init(empty_keys(), 4 * L::consumers);
            barrier_init_fence();
        }
        __syncthreads();
    }

    __device__ void gather(const rows_view<const T>& rows, const item_type& item, std::uint32_t to) const {
        constexpr int chunks = Dim / 8, lines = 128 / chunks;
        const int chunk = thread % chunks;
        const bool inside = chunk * 8 < rows.dim;
        const T* const from = rows.row(item.b, item.h, 0) + (inside ? chunk * 8 : 0);
#pragma unroll 4
        for (int e = thread / chunks; e < L::keys; e += lines) {
            const std::int32_t row = item.row[e];
            copy_16(to + swizzled(L::keys, e, chunk), from + (row < 0 ? 0 : row) * rows.row_stride,
                    row >= 0 && inside ? 16 : 0);
        }
    }

    __device__ void produce(std::int32_t begin, std::int32_t end, std::int32_t counter) const {
        const std::int32_t first_item = p.items[begin], items = p.items[end] - first_item;
        std::uint32_t tile_number = 0;
        for (std::uint32_t n = 0;; ++n) {
            item_type& item = meta(n % 2);
            if (thread == 0) {
                const std::int32_t next = atomicAdd(p.taken + counter, 1);
                item.item.list = -1;
                if (next < items) {
                    item.item = item_at(p, first_item + next, L::keys);
                    const std::int32_t head = item.item.list / p.plan.supers;
                    item.head = head;
                    item.b = head / p.call.kv_heads;
                    item.h = head - item.b * p.call.kv_heads;
                    item.valid = p.valid_rows(item.b, item.item.list - head * p.plan.supers);
                }
            }
            named_barrier(2, 128);
            const backward_item own = item.item;
            if (own.list < 0) {
                barrier_arrive(full_meta(n % 2));
                return;
            }
            const backward_list all = p.list_of(own.list);
            for (int i = thread; i < L::keys; i += 128) {  // whole warps
                const bool has = i < own.count;
                backward_entry e{};
                if (has) {
                    e = p.entry_of(own.list, all, own.first + i);
                }
                item.row[i] = has && e.born < e.dies ? e.row : -1;
                item.born[i] = e.born;
                item.dies[i] = e.dies;
                item.from[i] = e.from;
                item.bias[i] = e.bias;
                item.life[i / 32] = block_life::of_warp(e, has);
                if constexpr (Bias) {
                    const bool counts = has && e.born < e.dies;
                    item.first_from[i / 32] = __reduce_min_sync(all_lanes, counts ? e.from : 0x7fffffff);
                    item.last_from[i / 32] = __reduce_max_sync(all_lanes, counts ? e.from : 0);
                }
            }
            named_barrier(2, 128);
            barrier_arrive(full_meta(n % 2));
            barrier_wait(empty_keys(), (n & 1) ^ 1);
            gather(p.call.rows.k, item, base + L::k);
            barrier_arrive_after_copies(full_k());
            gather(p.call.rows.v, item, base + L::v);
            barrier_arrive_after_copies(full_v());
            block_life life;
            std::int32_t first, stop;
            item.tiles(L::queries, life, first, stop);
            if (thread == 0) {
                const std::int64_t line = static_cast<std::int64_t>(own.list) * p.padded_rows;
                for (std::int32_t i = first; i < stop; ++i, ++tile_number) {
                    const int stage = static_cast<int>(tile_number % L::stages);
                    const std::int64_t at = line + i * L::queries;
                    barrier_wait(empty(stage), (tile_number / L::stages & 1) ^ 1);
                    barrier_expect(full_q(stage), L::query_bytes + 2 * L::numbers_bytes);
                    copy_bulk(base + L::q + stage * L::query_bytes, p.packed_q + at * Dim, L::query_bytes,
                              full_q(stage));
                    copy_bulk(base + L::lse2 + stage * L::numbers_bytes, p.lse2 + at, L::numbers_bytes,
                              full_q(stage));
                    copy_bulk(base + L::delta + stage * L::numbers_bytes, p.delta + at, L::numbers_bytes,
                              full_q(stage));
                    barrier_expect(full_d_out(stage), L::query_bytes);
                    copy_bulk(base + L::d_out + stage * L::query_bytes, p.packed_d_out + at * Dim, L::query_bytes,
                              full_d_out(stage));
                }
            }
            __syncwarp();
        }
    }

    /// scores = a b^T, both K-major: a this warpgroup's 64 rows of a matrix of 128, b a tile of queries.
    __device__ void multiply_scores(float (&scores)[score_values], std::uint32_t a, std::uint32_t b) const {
        const std::uint64_t from_a = describe_k_major(a), from_b = describe_k_major(b);
#pragma unroll
        for (int k = 0; k < Dim / 16; ++k) {
            wgmma<T, 0, 0>(scores, from_a + (k / 4 * L::keys * 128 + k % 4 * 32) / 16,
                           from_b + (k / 4 * L::queries * 128 + k % 4 * 32) / 16, k != 0);
        }
        wgmma_commit();
    }
    /// sums += a b, a in registers [key][query], b a tile of queries.
    __device__ void multiply_sums(float (&sums)[sum_values], const std::uint32_t (&a)[score_values / 8][4],
                                  std::uint32_t b) const {
        const std::uint64_t from_b = describe_mn_major(b, L::queries * 128);
#pragma unroll
        for (int k = 0; k < L::queries / 16; ++k) {
            wgmma<T, 1>(sums, a[k], from_b + k * 2048 / 16, 1);
        }
        wgmma_commit();
    }

    __device__ void consume(int group) const {
        const int lane = thread % 32;
        const int key = group * 64 + thread / 32 * 16 + lane / 4;  // and key + 8
        const std::uint32_t own_k = base + L::k + group * 64 * 128, own_v = base + L::v + group * 64 * 128;
        std::uint32_t tile_number = 0;
        for (std::uint32_t n = 0;; ++n) {
            barrier_wait(full_meta(n % 2), n / 2 & 1);
            const item_type& item = meta(n % 2);
            if (item.item.list < 0) {
                if (lane == 0) {
                    reduce_wait_read<0>();  // shared memory ends with the block
                }
                return;
            }
            block_life life;
            std::int32_t first, stop;
            item.tiles(L::queries, life, first, stop);
            packed_life sees[2];
            std::int32_t from[2];
            float bias[2], sum_bias[2] = {};
            std::int32_t first_from = 0x7fffffff, last_from = 0;
            if constexpr (Bias) {
                for (int x = 0; x < L::keys / 32; ++x) {
                    first_from = min(first_from, item.first_from[x]);
                    last_from = max(last_from, item.last_from[x]);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const std::int32_t born = item.born[key + 8 * r], dies = item.dies[key + 8 * r];
                sees[r] = {born, static_cast<std::uint32_t>(born < dies ? dies - born : 0)};
                from[r] = Bias ? item.from[key + 8 * r] : 0;
                bias[r] = Bias ? item.bias[key + 8 * r] : 0.0f;
            }
            float* const sum_q = p.sum_q == nullptr ? nullptr
                                                    : p.sum_q +
                                                          static_cast<std::int64_t>(item.item.list) * p.padded_rows * Dim +
                                                          (Dim == 64 ? 0 : group * (packed_tile * 64));
            float d_k[sum_values], d_v[sum_values];
#pragma unroll
            for (int i = 0; i < sum_values; ++i) {
                d_k[i] = 0.0f;
                d_v[i] = 0.0f;
            }
            barrier_wait(full_k(), n & 1);
            barrier_wait(full_v(), n & 1);
            fence_async_proxy();  // keys were written by cp.async

            if (first >= stop) {  // nobody is there to see these keys
                if (lane == 0) {
                    barrier_arrive(empty_keys());
                }
                continue;
            }
            float s[score_values];
            barrier_wait(full_q(static_cast<int>(tile_number % L::stages)), tile_number / L::stages & 1);
            wgmma_fence();
            multiply_scores(s, own_k, base + L::q + static_cast<int>(tile_number % L::stages) * L::query_bytes);
            wgmma_wait<0>();
            pin(s);
            for (std::int32_t i = first; i < stop; ++i, ++tile_number) {
                const int stage = static_cast<int>(tile_number % L::stages);
                const std::uint32_t q = base + L::q + stage * L::query_bytes;
                const std::uint32_t d_out = base + L::d_out + stage * L::query_bytes;
                const float* const lse2 =
                    reinterpret_cast<const float*>(shared + L::lse2 + stage * L::numbers_bytes);
                const float* const delta =
                    reinterpret_cast<const float*>(shared + L::delta + stage * L::numbers_bytes);
                float d[score_values];
                barrier_wait(full_d_out(stage), tile_number / L::stages & 1);
                wgmma_fence();
                multiply_scores(d, own_v, d_out);

                const std::int32_t m = i * L::queries;
                std::uint32_t weights[score_values / 8][4], gradients[score_values / 8][4];
                std::uint32_t slopes[Softcap ? score_values / 2 : 1];
                // Most tiles lie before or after the rows from which on biases count.
                const bool biased = Bias && m >= last_from;
                const bool mixed = Bias && !biased && m + L::queries > first_from;
                if (mixed) {
                    to_weights<true>(s, slopes, lse2, m, from, bias);
                } else {
                    const float whole_bias[2] = {biased ? bias[0] : 0.0f, biased ? bias[1] : 0.0f};
                    to_weights<false>(s, slopes, lse2, m, from, whole_bias);
                }
                if (!life.whole(m, m + L::queries)) {
                    hide(s, m, sees);
                }
                pack_rows(s, weights);
                pin(weights);
                pin(d_v);
                wgmma_fence();
                multiply_sums(d_v, weights, d_out);
                wgmma_wait<1>();
                pin(d);
                if (mixed) {
                    to_gradients<true>(s, d, delta, m, from, 1.0f, sum_bias);
                } else {
                    to_gradients<false>(s, d, delta, m, from, biased ? 1.0f : 0.0f, sum_bias);
                }
                if constexpr (Softcap) {
                    multiply_slopes(s, slopes);
                }
                pack_rows(s, gradients);
                pin(gradients);
                pin(d_k);
                wgmma_fence();
                multiply_sums(d_k, gradients, q);
                wgmma_wait<1>();
                pin(weights);  // their registers are needed
                pin(d_v);
                const std::uint32_t turn =
                    base + L::gradients + static_cast<int>(tile_number % 2) * L::gradient_bytes;
                store_gradients(gradients, turn, group);
                fence_async_proxy();
                named_barrier(1, 128 * L::consumers);
                // Of 64 columns one warpgroup makes all, in turn; of 128, two make half each.
                const bool mine = sum_q != nullptr && (Dim != 64 || static_cast<int>(tile_number % L::consumers) == group);
                if (mine) {
                    multiply_queries(d, turn, group);  // in dP's registers: there are none to spare
                }
                const bool more = i + 1 < stop;
                const int after = more ? static_cast<int>((tile_number + 1) % L::stages) : stage;
                if (more) {
                    barrier_wait(full_q(after), (tile_number + 1) / L::stages & 1);
                }
                wgmma_wait<0>();
                pin(d);
                pin(d_k);
                pin(gradients);
                // The next tile's scores run beside the additions. After the last tile they are made once more for nothing,
                // since a branch around them would make the compiler wait for every product.
                wgmma_fence();
                multiply_scores(s, own_k, base + L::q + after * L::query_bytes);
                if (lane == 0 && more) {
                    barrier_arrive(empty(stage));
                }
                if (mine) {
                    add_queries(sum_q + m * Dim, d, group);
                }
                wgmma_wait<0>();  // not after the jump back: the compiler would wait for every product
                pin(s);
            }
            const std::int32_t row[2] = {item.row[key], item.row[key + 8]};
            const std::int64_t key_line = static_cast<std::int64_t>(item.head) * p.call.rows.k.length;
            __syncwarp();  // nothing below reads the item
            if (lane == 0) {
                barrier_arrive(empty(static_cast<int>((tile_number - 1) % L::stages)));
                barrier_arrive(empty_keys());
            }
            add_sums(d_k, p.sum_k, key_line, row);
            add_sums(d_v, p.sum_v, key_line, row);
            if (Bias && p.sum_bias != nullptr) {
                add_bias(sum_bias, key_line, row);
            }
        }
    }

    /// Products to weights. Mixed: a bias counts for some queries of the tile only.
    template <bool Mixed>
    __device__ void to_weights(float (&s)[score_values], std::uint32_t (&slopes)[Softcap ? score_values / 2 : 1],
                               const float* lse2, std::int32_t m, const std::int32_t (&from)[2],
                               const float (&bias)[2]) const {
        const int column = 2 * (thread % 4);
#pragma unroll
        for (int j = 0; j < score_values / 4; ++j) {
            const float2 sum = *reinterpret_cast<const float2*>(lse2 + 8 * j + column);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float derivative[2] = {1.0f, 1.0f};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[4 * j + 2 * r + e];
                    float rest = -(e == 0 ? sum.x : sum.y);
                    if constexpr (Bias) {
                        rest += !Mixed || m + 8 * j + column + e >= from[r] ? bias[r] : 0.0f;
                    }
                    x = weight_of<Softcap>(x, p.slope, p.height, rest, derivative[e]);
                }
                if constexpr (Softcap) {
                    slopes[2 * j + r] = pack<fp16>(derivative[0], derivative[1]);
                }
            }
        }
    }

    __device__ void hide(float (&s)[score_values], std::int32_t m, const packed_life (&sees)[2]) const {
#pragma unroll
        for (int i = 0; i < score_values; ++i) {
            if (!sees[i / 2 % 2].sees(m + i / 4 * 8 + 2 * (thread % 4) + i % 2)) {
                s[i] = 0.0f;
            }
        }
    }

    /// As a register operand [key][query].
    __device__ static void pack_rows(const float (&s)[score_values], std::uint32_t (&rows)[score_values / 8][4]) {
#pragma unroll
        for (int k = 0; k < score_values / 8; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                rows[k][i] = pack<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
            }
        }
    }

    /// Weights to gradients of logits, dS^T = P^T (dP^T - delta).
    template <bool Mixed>
    __device__ void to_gradients(float (&s)[score_values], const float (&d)[score_values], const float* delta,
                                 std::int32_t m, const std::int32_t (&from)[2], float counts,
                                 float (&sum_bias)[2]) const {
        const int column = 2 * (thread % 4);
#pragma unroll
        for (int j = 0; j < score_values / 4; ++j) {
            const float2 less = *reinterpret_cast<const float2*>(delta + 8 * j + column);
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; ++i) {
                s[i] *= d[i] - (i % 2 == 0 ? less.x : less.y);
                if constexpr (Bias) {
                    const int r = i / 2 % 2;
                    if constexpr (Mixed) {
                        sum_bias[r] += m + 8 * j + column + i % 2 >= from[r] ? s[i] : 0.0f;
                    } else {
                        sum_bias[r] = fmaf(s[i], counts, sum_bias[r]);
                    }
                }
            }
        }
    }
    __device__ static void multiply_slopes(float (&s)[score_values], const std::uint32_t (&slopes)[Softcap ? score_values / 2 : 1]) {
#pragma unroll
        for (int i = 0; i < score_values / 2; ++i) {
            s[2 * i] *= half_of(slopes[i]);
            s[2 * i + 1] *= half_of(slopes[i] >> 16);
        }
    }
    __device__ static float half_of(std::uint32_t bits) {
        float x;
        asm("{\n.reg .b16 h;\ncvt.u16.u32 h, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(x) : "r"(bits));
        return x;
    }

    /// This warpgroup's rows of dS^T, [key][query].
    __device__ void store_gradients(const std::uint32_t (&gradients)[score_values / 8][4], std::uint32_t to,
                                    int group) const {
        const int lane = thread % 32;
        const int row = group * 64 + thread / 32 * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < score_values / 8; ++k) {
            store_matrices(to + swizzled(L::keys, row, 2 * k + lane / 16), gradients[k]);
        }
    }

    /// 64 x 64 of d_q = dS K.
    __device__ void multiply_queries(float (&d_q)[32], std::uint32_t turn, int group) const {
        const std::uint64_t a = describe_mn_major(turn, L::keys * 128);
        const std::uint64_t b =
            describe_mn_major(base + L::k + (Dim == 64 ? 0 : group * L::keys * 128), L::keys * 128);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < L::keys / 16; ++k) {
            wgmma<T, 1, 1>(d_q, a + k * 2048 / 16, b + k * 2048 / 16, k != 0);
        }
        wgmma_commit();
    }

    /// Adds 64 x 64 sums by way of shared memory, where a bulk reduction of every warp's rows takes them from while the warps
    /// go on. (Additions straight from registers are as fast in themselves, but warps wait for them to be taken.)
    __device__ void add_queries(float* to, const float (&d_q)[32], int group) const {
        const int warp = thread / 32, lane = thread % 32;
        const std::uint32_t at = base + L::sums + (group * 4 + warp) * 4096;
        if (lane == 0) {
            reduce_wait_read<0>();
        }
        __syncwarp();
#pragma unroll
        for (int x = 0; x < 8; ++x) {
            store_four(at + (x * 32 + lane) * 16, d_q[4 * x], d_q[4 * x + 1], d_q[4 * x + 2], d_q[4 * x + 3]);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            reduce_add_bulk(to + warp * 1024, at, 4096);
            reduce_commit();
        }
    }
    __device__ void add_sums(const float (&sums)[sum_values], float* to, std::int64_t line,
                             const std::int32_t (&row)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row[r] < 0) {
                continue;
            }
            float* const at = to + (line + row[r]) * Dim + 2 * (thread % 4);
#pragma unroll
            for (int j = 0; j < Dim / 8; ++j) {
                add_two(at + 8 * j, sums[4 * j + 2 * r], sums[4 * j + 2 * r + 1]);
            }
        }
    }
    __device__ void add_bias(const float (&sum_bias)[2], std::int64_t line, const std::int32_t (&row)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float x = sum_bias[r];
            x += __shfl_xor_sync(all_lanes, x, 1);
            x += __shfl_xor_sync(all_lanes, x, 2);
            if (thread % 4 == 0 && row[r] >= 0) {
                atomicAdd(p.sum_bias + line + row[r], x);
            }
        }
    }
};
#endif

/// As backward_portable_kernel.
template <class T, int Dim, bool Bias, bool Softcap>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(hopper_backward<Dim>::threads), 1)
    backward_hopper_kernel(const __grid_constant__ backward_problem<T> p, const std::int32_t begin,
                           const std::int32_t end, const std::int32_t counter) {
#if KVPOLICY_HOPPER_CODE
    unsigned char* const memory =
        dynamic_shared() + (1024 - shared_address(dynamic_shared()) % 1024) % 1024;
    const hopper_backward_block<T, Dim, Bias, Softcap> block(p, memory);
    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (group == hopper_backward<Dim>::consumers) {
        give_registers<hopper_backward<Dim>::producer_registers>();
        block.produce(begin, end, counter);
    } else {
        take_registers<hopper_backward<Dim>::consumer_registers>();
        block.consume(group);
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
