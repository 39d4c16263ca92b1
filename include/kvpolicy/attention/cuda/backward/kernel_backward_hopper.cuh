// The backward pass on Hopper: one block per SM takes one work item after another. A producer
// warpgroup gathers keys and values and streams tiles of packed queries; two warpgroups of 64 keys each
// multiply.
//
// S^T = K Q^T and dP^T = V dO^T have keys on the rows, so weights and gradients are register operands of dV
// += P^T dO and dK += dS^T Q. dS^T also goes through shared memory, where the warpgroups meet, for dQ = dS K,
// whose sums leave for global memory by bulk reductions.
#pragma once

#include <kvpolicy/attention/cuda/backward/agent_backward_warpgroup.cuh>
#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if KVPOLICY_HOPPER_CODE
/// An item in shared memory.
template <int Keys>
struct hopper_item {
    backward_item item;  // list < 0: no more
    std::int32_t b, h, head;
    std::int32_t valid;
    std::int32_t unused;
    block_interval interval[Keys / 32];
    std::int32_t first_from[Keys / 32];
    std::int32_t last_from[Keys / 32];
    std::int32_t row[Keys];
    std::int32_t begin[Keys];
    std::int32_t expiry[Keys];
    std::int32_t from[Keys];
    float bias[Keys];

    /// Tiles of `queries` packed rows that any of its keys can see: [first, end).
    __device__ void tiles(int queries, block_interval& all, std::int32_t& first, std::int32_t& end) const {
        all = interval[0];
        for (int i = 1; i < Keys / 32; ++i) {
            all.join(interval[i]);
        }
        const std::int32_t stop = min(all.last_expiry, valid);
        first = all.first_begin < stop ? all.first_begin / queries : 0;
        end = all.first_begin < stop ? (stop + queries - 1) / queries : 0;
    }
};

template <class T, int Dim, bool Bias, bool Softcap>
struct hopper_backward_block : agent_backward_warpgroup<T, Dim, Bias, Softcap> {
    using warpgroup = agent_backward_warpgroup<T, Dim, Bias, Softcap>;
    using L = hopper_backward<Dim>;
    using item_type = hopper_item<L::keys>;
    using warpgroup::base, warpgroup::p, warpgroup::score_values, warpgroup::shared, warpgroup::sum_values,
        warpgroup::thread;

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

    __device__ hopper_backward_block(const backward_params<T>& params, unsigned char* memory)
        : warpgroup(params, memory) {
        static_assert(sizeof(item_type) <= L::meta_bytes);
        if (threadIdx.x == 0) {
            for (int i = 0; i < 2; ++i) {
                barrier_init(full_meta(i), 128);
                barrier_init(full_q(i), 1);
                barrier_init(full_d_out(i), 1);
                barrier_init(empty(i), 4 * L::consumers * arrivals_of_warp);
            }
            barrier_init(full_k(), 128);
            barrier_init(full_v(), 128);
            barrier_init(empty_keys(), 4 * L::consumers * arrivals_of_warp);
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
            // 1. Take an item.
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
                item.row[i] = has && e.begin < e.expiry ? e.row : -1;
                item.begin[i] = e.begin;
                item.expiry[i] = e.expiry;
                item.from[i] = e.from;
                item.bias[i] = e.bias;
                item.interval[i / 32] = block_interval::of_warp(e, has);
                if constexpr (Bias) {
                    const bool counts = has && e.begin < e.expiry;
                    item.first_from[i / 32] = __reduce_min_sync(all_lanes, counts ? e.from : 0x7fffffff);
                    item.last_from[i / 32] = __reduce_max_sync(all_lanes, counts ? e.from : 0);
                }
            }
            named_barrier(2, 128);
            barrier_arrive(full_meta(n % 2));
            // 2. Gather its keys and values.
            barrier_wait(empty_keys(), (n & 1) ^ 1);
            gather(p.call.rows.k, item, base + L::k);
            barrier_arrive_after_copies(full_k());
            gather(p.call.rows.v, item, base + L::v);
            barrier_arrive_after_copies(full_v());
            // 3. Stream query tiles.
            block_interval interval;
            std::int32_t first, stop;
            item.tiles(L::queries, interval, first, stop);
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
                    copy_bulk(base + L::d_out + stage * L::query_bytes, p.packed_d_out + at * Dim,
                              L::query_bytes, full_d_out(stage));
                }
            }
            __syncwarp();
        }
    }

    /// What a warpgroup knows of an item, whose keys `key` and key + 8 a thread has.
    struct item_view {
        block_interval interval;
        std::int32_t first, stop;  // tiles
        packed_interval sees[2];
        std::int32_t from[2];
        float bias[2];
        std::int32_t first_from, last_from;

        __device__ item_view(const item_type& item, int key) {
            item.tiles(L::queries, interval, first, stop);
            first_from = 0x7fffffff;
            last_from = 0;
            if constexpr (Bias) {
                for (int x = 0; x < L::keys / 32; ++x) {
                    first_from = min(first_from, item.first_from[x]);
                    last_from = max(last_from, item.last_from[x]);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const std::int32_t begin = item.begin[key + 8 * r], expiry = item.expiry[key + 8 * r];
                sees[r] = {begin, static_cast<std::uint32_t>(begin < expiry ? expiry - begin : 0)};
                from[r] = Bias ? item.from[key + 8 * r] : 0;
                bias[r] = Bias ? item.bias[key + 8 * r] : 0.0f;
            }
        }
        __device__ bool whole(std::int32_t m) const { return interval.whole(m, m + L::queries); }
        /// Whether biases count for every query of a tile; mixed: for some.
        __device__ bool biased(std::int32_t m) const { return Bias && m >= last_from; }
        __device__ bool mixed(std::int32_t m) const {
            return Bias && !biased(m) && m + L::queries > first_from;
        }
    };

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
                    bulk_wait_read<0>();  // shared memory ends with the block
                }
                return;
            }
            const item_view view(item, key);
            float sum_bias[2] = {};
            float* const sum_q = p.sum_q == nullptr
                                     ? nullptr
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

            if (view.first >= view.stop) {  // nobody is there to see these keys
                warp_arrive(empty_keys(), lane);
                continue;
            }
            // 1. The first tile's S^T.
            float s[score_values];
            barrier_wait(full_q(static_cast<int>(tile_number % L::stages)), tile_number / L::stages & 1);
            wgmma_fence();
            this->multiply_scores(s, own_k,
                                  base + L::q + static_cast<int>(tile_number % L::stages) * L::query_bytes);
            wgmma_wait<0>();
            pin(s);
            for (std::int32_t i = view.first; i < view.stop; ++i, ++tile_number) {
                const int stage = static_cast<int>(tile_number % L::stages);
                const std::uint32_t q = base + L::q + stage * L::query_bytes;
                const std::uint32_t d_out = base + L::d_out + stage * L::query_bytes;
                const float* const lse2 =
                    reinterpret_cast<const float*>(shared + L::lse2 + stage * L::numbers_bytes);
                const float* const delta =
                    reinterpret_cast<const float*>(shared + L::delta + stage * L::numbers_bytes);
                // 1. dP^T. S^T was made with the tile before.
                float d[score_values];
                barrier_wait(full_d_out(stage), tile_number / L::stages & 1);
                wgmma_fence();
                this->multiply_scores(d, own_v, d_out);

                // 2. Weights and dV.
                const std::int32_t m = i * L::queries;
                std::uint32_t weights[score_values / 8][4], gradients[score_values / 8][4];
                std::uint32_t slopes[Softcap ? score_values / 2 : 1];
                const bool whole = view.whole(m);
                if (Softcap && !whole) {
                    this->hide(s, m, view.sees);  // the slope of a product with a hidden key may be anything
                }
                // Most tiles lie before or after the rows from which on biases count.
                const bool biased = view.biased(m), mixed = view.mixed(m);
                if (mixed) {
                    this->template to_weights<true>(s, slopes, lse2, m, view.from, view.bias);
                } else {
                    const float whole_bias[2] = {biased ? view.bias[0] : 0.0f, biased ? view.bias[1] : 0.0f};
                    this->template to_weights<false>(s, slopes, lse2, m, view.from, whole_bias);
                }
                if (!whole) {
                    this->hide(s, m, view.sees);
                }
                this->pack_rows(s, weights);
                pin(weights);
                pin(d_v);
                wgmma_fence();
                this->multiply_sums(d_v, weights, d_out);
                wgmma_wait<1>();
                pin(d);
                // 3. Gradients of logits and dK.
                this->to_gradients(s, d, delta, m, whole, view.sees, mixed, biased, view.from, sum_bias);
                if constexpr (Softcap) {
                    this->multiply_slopes(s, slopes);
                }
                this->pack_rows(s, gradients);
                pin(gradients);
                pin(d_k);
                wgmma_fence();
                this->multiply_sums(d_k, gradients, q);
                wgmma_wait<1>();
                pin(weights);  // their registers are needed
                pin(d_v);
                // 4. dQ through shared memory.
                const std::uint32_t turn =
                    base + L::gradients + static_cast<int>(tile_number % 2) * L::gradient_bytes;
                this->store_gradients(gradients, turn, group);
                fence_async_proxy();
                named_barrier(1, 128 * L::consumers);
                // Of 64 columns one warpgroup makes all, in turn; of 128, two make half each.
                const bool mine =
                    sum_q != nullptr && (Dim != 64 || static_cast<int>(tile_number % L::consumers) == group);
                if (mine) {
                    this->multiply_queries(
                        d, turn, Dim == 64 ? 0 : group);  // in dP's registers: there are none to spare
                }
                const bool more = i + 1 < view.stop;
                const int after = more ? static_cast<int>((tile_number + 1) % L::stages) : stage;
                if (more) {
                    barrier_wait(full_q(after), (tile_number + 1) / L::stages & 1);
                }
                wgmma_wait<0>();
                pin(d);
                pin(d_k);
                pin(gradients);
                // The next tile's scores run beside the additions. After the last tile they are made once
                // more for nothing, since a branch around them would make the compiler wait for every
                // product.
                wgmma_fence();
                this->multiply_scores(s, own_k, base + L::q + after * L::query_bytes);
                __syncwarp();  // all lanes have read the tile's numbers
                if (arrives_for_warp(lane) && more) {
                    barrier_arrive(empty(stage));
                }
                if (mine) {
                    this->add_queries(sum_q + m * Dim, d, group);
                }
                wgmma_wait<0>();  // not after the jump back: the compiler would wait for every product
                pin(s);
            }
            // 5. Add dK, dV and the bias gradient.
            const std::int32_t row[2] = {item.row[key], item.row[key + 8]};
            const std::int64_t key_line = static_cast<std::int64_t>(item.head) * p.call.rows.k.length;
            __syncwarp();  // nothing below reads the item
            if (arrives_for_warp(lane)) {
                barrier_arrive(empty(static_cast<int>((tile_number - 1) % L::stages)));
                barrier_arrive(empty_keys());
            }
            this->add_sums(d_k, p.sum_k, key_line, row);
            this->add_sums(d_v, p.sum_v, key_line, row);
            if (Bias && p.sum_bias != nullptr) {
                this->add_bias(sum_bias, key_line, row);
            }
        }
    }
};
#endif

/// backward_portable_kernel by wgmma (compute capability 9.0a), head_dim up to 128, 128 keys per item.
///
/// Grid: as many blocks as fit. Block: 384 threads: two consumer warpgroups of 64 keys, one producer. Shared
/// memory: hopper_backward<Dim>::shared_bytes (dynamic). Inputs and accumulated outputs as there.
/// Producer:
/// 1. Take an item.
/// 2. Gather its keys and values.
/// 3. Stream query tiles.
/// Consumers, per query tile:
/// 1. S^T = K Q^T, dP^T = V dO^T.
/// 2. Weights and dV.
/// 3. Gradients of logits and dK.
/// 4. dQ through shared memory.
/// After the item:
/// 5. Add dK, dV and the bias gradient.
template <class T, int Dim, bool Bias, bool Softcap>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(hopper_backward<Dim>::threads), 1)
    backward_hopper_kernel(const __grid_constant__ backward_params<T> p, const std::int32_t begin,
                           const std::int32_t end, const std::int32_t counter) {
#if KVPOLICY_HOPPER_CODE
    unsigned char* const memory = dynamic_shared() + (1024 - shared_address(dynamic_shared()) % 1024) % 1024;
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
