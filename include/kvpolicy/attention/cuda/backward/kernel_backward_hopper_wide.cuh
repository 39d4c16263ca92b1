// The backward pass on Hopper for head_dims of 129 to 256. A block of 64 keys has 128 KB of sums, all the
// registers of two warpgroups: the first makes weights and sums d_v, the second makes gradients of logits and
// sums d_k, and each makes half the columns of d_q. Weights go from the first to the second by way of shared
// memory, thread to thread, as fp16, which is exact to 2^-12 of them, and 2^-25 for the smallest.
//
// Of a tile of queries the first warpgroup is one step ahead: while the second turns weights into gradients,
// it multiplies d_v and the next tile's scores, and while d_q and d_k are multiplied, it makes the next
// weights.
#pragma once

#include <kvpolicy/attention/cuda/backward/agent_backward_warpgroup.cuh>
#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_hopper.cuh>
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

#if KVPOLICY_HOPPER_CODE
template <class T, bool Bias, bool Softcap>
struct hopper_backward_wide : hopper_backward_block<T, 256, Bias, Softcap> {
    using block = hopper_backward_block<T, 256, Bias, Softcap>;
    using L = hopper_backward<256>;
    using block::base, block::p, block::score_values, block::shared, block::thread;
    using typename block::item_type;
    using typename block::item_view;

    // Named barriers of the consumers.
    static constexpr int weights_ready =
        1;  // and the sums of the tile before have been read from shared memory
    static constexpr int gradients_ready = 3;  // and the weights have been read

    using half_sums = float[2][64];  // of 64 keys, all 256 columns, a thread
    using operand = std::uint32_t[score_values / 8][4];

    __device__ hopper_backward_wide(const backward_params<T>& params, unsigned char* memory)
        : block(params, memory) {}

    __device__ std::uint32_t tile(int part, int stage) const {
        return base + part + static_cast<std::uint32_t>(stage) * L::query_bytes;
    }
    __device__ const float* numbers(int part, int stage) const {
        return reinterpret_cast<const float*>(shared + part + stage * L::numbers_bytes);
    }
    __device__ static int stage_of(std::uint32_t number) { return static_cast<int>(number % L::stages); }
    __device__ static std::uint32_t parity_of(std::uint32_t number) { return number / L::stages & 1; }

    /// sums += a b over all columns.
    __device__ void multiply_wide(half_sums& sums, const operand& a, std::uint32_t b) const {
        const std::uint64_t from_b = describe_mn_major(b, L::queries * 128);
#pragma unroll
        for (int k = 0; k < L::queries / 16; ++k) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                wgmma<T, 1>(sums[x], a[k], from_b + (x * 2 * L::queries * 128 + k * 2048) / 16, 1);
            }
        }
        wgmma_commit();
    }
    __device__ static void pin_wide(half_sums& sums) {
        pin(sums[0]);
        pin(sums[1]);
    }
    __device__ static void clear(half_sums& sums) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                sums[x][i] = 0.0f;
            }
        }
    }
    /// Adds 64 x 64 sums of d_q; `to` is the tile's.
    __device__ void add_block(float* to, const float (&d_q)[32]) const {
        float* const at = to + thread / 32 * 1024 + thread % 32 * 4;
#pragma unroll
        for (int x = 0; x < 8; ++x) {
            add_four(at + 128 * x, d_q[4 * x], d_q[4 * x + 1], d_q[4 * x + 2], d_q[4 * x + 3]);
        }
    }
    __device__ void add_wide(const half_sums& sums, float* to, const item_type& item, int key) const {
        const std::int64_t line = static_cast<std::int64_t>(item.head) * p.call.rows.k.length;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const std::int32_t row = item.row[key + 8 * r];
            if (row < 0) {
                continue;
            }
            float* const at = to + (line + row) * 256 + 2 * (thread % 4);
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                add_two(at + 8 * j, sums[j / 16][4 * (j % 16) + 2 * r],
                        sums[j / 16][4 * (j % 16) + 2 * r + 1]);
            }
        }
    }
    /// The tile's sums of d_q, or null.
    __device__ float* sums_of(const item_type& item, std::int32_t m) const {
        return p.sum_q == nullptr
                   ? nullptr
                   : p.sum_q + (static_cast<std::int64_t>(item.item.list) * p.padded_rows + m) * 256;
    }
    __device__ std::uint32_t message() const { return base + L::weights + thread * 16; }

    __device__ void send(std::uint32_t to, const float (&s)[score_values]) const {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + x * 2048),
                         "r"(pack<fp16>(s[8 * x], s[8 * x + 1])), "r"(pack<fp16>(s[8 * x + 2], s[8 * x + 3])),
                         "r"(pack<fp16>(s[8 * x + 4], s[8 * x + 5])),
                         "r"(pack<fp16>(s[8 * x + 6], s[8 * x + 7]))
                         : "memory");
        }
    }
    __device__ void receive(std::uint32_t from, float (&s)[score_values]) const {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            std::uint32_t w[4];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                         : "r"(from + x * 2048)
                         : "memory");
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[8 * x + 2 * i] = this->half_of(w[i]);
                s[8 * x + 2 * i + 1] = this->half_of(w[i] >> 16);
            }
        }
    }

    /// Scores of the tile at row m to weights, for this warpgroup's own product and for the other one.
    __device__ void make_weights(float (&s)[score_values], operand& weights, const float* lse2,
                                 std::int32_t m, const item_view& item) const {
        std::uint32_t slopes[Softcap ? score_values / 2 : 1];
        const bool whole = item.whole(m);
        if (Softcap && !whole) {
            this->hide(s, m, item.sees);  // the slope of a product with a hidden key may be anything
        }
        if (item.mixed(m)) {
            this->template to_weights<true>(s, slopes, lse2, m, item.from, item.bias);
        } else {
            const bool biased = item.biased(m);
            const float bias[2] = {biased ? item.bias[0] : 0.0f, biased ? item.bias[1] : 0.0f};
            this->template to_weights<false>(s, slopes, lse2, m, item.from, bias);
        }
        if (!whole) {
            this->hide(s, m, item.sees);
        }
        this->pack_rows(s, weights);
        send(message(), s);
        if constexpr (Softcap) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(message() + (4 + x) * 2048),
                             "r"(slopes[4 * x]), "r"(slopes[4 * x + 1]), "r"(slopes[4 * x + 2]),
                             "r"(slopes[4 * x + 3])
                             : "memory");
            }
        }
    }

    /// Waits for the block's item n. False where there is none.
    __device__ bool has_item(std::uint32_t n) const {
        barrier_wait(this->full_meta(n % 2), n / 2 & 1);
        return this->meta(n % 2).item.list >= 0;
    }
    /// Waits for the item's keys. False, and they are released, where no query sees them.
    __device__ bool takes_keys(std::uint32_t n, const item_view& view, int lane) const {
        barrier_wait(this->full_k(), n & 1);
        barrier_wait(this->full_v(), n & 1);
        fence_async_proxy();  // keys were written by cp.async
        if (view.first < view.stop) {
            return true;
        }
        warp_arrive(this->empty_keys(), lane);
        return false;
    }

    /// The first warpgroup.
    __device__ void consume_weights() const {
        const int lane = thread % 32, key = thread / 32 * 16 + lane / 4;  // and key + 8
        for (std::uint32_t n = 0, tile_number = 0; has_item(n); ++n) {
            const item_type& item = this->meta(n % 2);
            const item_view view(item, key);
            half_sums d_v;
            clear(d_v);
            if (!takes_keys(n, view, lane)) {
                continue;
            }
            float s[score_values];
            operand weights;
            barrier_wait(this->full_q(stage_of(tile_number)), parity_of(tile_number));
            wgmma_fence();
            this->multiply_scores(s, base + L::k, tile(L::q, stage_of(tile_number)));
            wgmma_wait<0>();
            pin(s);
            make_weights(s, weights, numbers(L::lse2, stage_of(tile_number)), view.first * L::queries, view);
            named_barrier_arrive(weights_ready, 256);
            for (std::int32_t i = view.first; i < view.stop; ++i, ++tile_number) {
                const int stage = stage_of(tile_number);
                const bool more = i + 1 < view.stop;
                const int after = more ? stage_of(tile_number + 1) : stage;
                barrier_wait(this->full_d_out(stage), parity_of(tile_number));
                pin(weights);
                pin_wide(d_v);
                wgmma_fence();
                multiply_wide(d_v, weights, tile(L::d_out, stage));
                if (more) {
                    barrier_wait(this->full_q(after), parity_of(tile_number + 1));
                }
                // Scores after the last tile are not used: a branch would make the compiler wait.
                wgmma_fence();
                this->multiply_scores(s, base + L::k, tile(L::q, after));
                named_barrier_of_any(gradients_ready, 256);
                float* const sum_q = sums_of(item, i * L::queries);
                float d[32];
                this->multiply_queries(d, base + L::gradients, 0);
                wgmma_wait<1>();
                pin(s);
                pin(weights);
                pin_wide(d_v);
                make_weights(s, weights, numbers(L::lse2, after), (more ? i + 1 : i) * L::queries, view);
                __syncwarp();  // all lanes have read the tile's numbers
                if (arrives_for_warp(lane) && more) {
                    barrier_arrive(this->empty(stage));
                }
                wgmma_wait<0>();
                pin(d);
                if (sum_q != nullptr) {
                    add_block(sum_q, d);
                }
                this->multiply_queries(d, base + L::gradients, 1);
                wgmma_wait<0>();
                pin(d);
                if (more) {
                    named_barrier_arrive(weights_ready, 256);
                }
                if (sum_q != nullptr) {
                    add_block(sum_q + packed_tile * 64, d);
                }
            }
            add_wide(d_v, p.sum_v, item, key);
            __syncwarp();  // nothing below reads the item
            if (arrives_for_warp(lane)) {
                barrier_arrive(this->empty(stage_of(tile_number - 1)));
                barrier_arrive(this->empty_keys());
            }
        }
    }

    /// The second warpgroup.
    __device__ void consume_gradients() const {
        const int lane = thread % 32, key = thread / 32 * 16 + lane / 4;  // and key + 8
        for (std::uint32_t n = 0, tile_number = 0; has_item(n); ++n) {
            const item_type& item = this->meta(n % 2);
            const item_view view(item, key);
            float sum_bias[2] = {};
            half_sums d_k;
            clear(d_k);
            if (!takes_keys(n, view, lane)) {
                continue;
            }
            float d[score_values];
            barrier_wait(this->full_d_out(stage_of(tile_number)), parity_of(tile_number));
            wgmma_fence();
            this->multiply_scores(d, base + L::v, tile(L::d_out, stage_of(tile_number)));
            wgmma_wait<0>();
            pin(d);
            for (std::int32_t i = view.first; i < view.stop; ++i, ++tile_number) {
                const int stage = stage_of(tile_number);
                const bool more = i + 1 < view.stop;
                const int after = more ? stage_of(tile_number + 1) : stage;
                const std::int32_t m = i * L::queries;
                const bool whole = view.whole(m);
                barrier_wait(this->full_q(stage), parity_of(tile_number));  // it has the tile's numbers, too
                float s[score_values];
                operand gradients;
                named_barrier(weights_ready, 256);
                receive(message(), s);
                const float* const delta = numbers(L::delta, stage);
                this->to_gradients(s, d, delta, m, whole, view.sees, view.mixed(m), view.biased(m), view.from,
                                   sum_bias);
                if constexpr (Softcap) {
                    float slopes[score_values];
                    receive(message() + 4 * 2048, slopes);
#pragma unroll
                    for (int x = 0; x < score_values; ++x) {
                        s[x] *= slopes[x];
                    }
                }
                this->pack_rows(s, gradients);
                this->store_gradients(gradients, base + L::gradients, 0);
                fence_async_proxy();
                named_barrier_of_any(gradients_ready, 256);
                float* const sum_q = sums_of(item, m);
                float e[32];
                pin(gradients);
                pin_wide(d_k);
                wgmma_fence();
                multiply_wide(d_k, gradients, tile(L::q, stage));
                this->multiply_queries(e, base + L::gradients, 2);
                if (more) {
                    barrier_wait(this->full_d_out(after), parity_of(tile_number + 1));
                }
                wgmma_fence();
                this->multiply_scores(d, base + L::v, tile(L::d_out, after));
                wgmma_wait<1>();
                pin(gradients);
                pin_wide(d_k);
                pin(e);
                __syncwarp();  // all lanes have read the tile's numbers
                if (arrives_for_warp(lane) && more) {
                    barrier_arrive(this->empty(stage));
                }
                if (sum_q != nullptr) {
                    add_block(sum_q + 2 * packed_tile * 64, e);
                }
                this->multiply_queries(e, base + L::gradients, 3);
                wgmma_wait<0>();
                pin(d);
                pin(e);
                if (sum_q != nullptr) {
                    add_block(sum_q + 3 * packed_tile * 64, e);
                }
            }
            add_wide(d_k, p.sum_k, item, key);
            if (Bias && p.sum_bias != nullptr) {
                const std::int32_t row[2] = {item.row[key], item.row[key + 8]};
                this->add_bias(sum_bias, static_cast<std::int64_t>(item.head) * p.call.rows.k.length, row);
            }
            __syncwarp();  // nothing below reads the item
            if (arrives_for_warp(lane)) {
                barrier_arrive(this->empty(stage_of(tile_number - 1)));
                barrier_arrive(this->empty_keys());
            }
        }
    }
};
#endif

/// backward_hopper_kernel for head_dims of 129 to 256, 64 keys per item: the first consumer makes weights and
/// dV, the second gradients of logits and dK, and each half of the columns of dQ.
///
/// Grid: as many blocks as fit. Block: 384 threads. Shared memory: hopper_backward<256>::shared_bytes
/// (dynamic). Inputs and accumulated outputs as backward_portable_kernel's.
template <class T, bool Bias, bool Softcap>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(hopper_backward<256>::threads), 1)
    backward_hopper_wide_kernel(const __grid_constant__ backward_params<T> p, const std::int32_t begin,
                                const std::int32_t end, const std::int32_t counter) {
#if KVPOLICY_HOPPER_CODE
    unsigned char* const memory = dynamic_shared() + (1024 - shared_address(dynamic_shared()) % 1024) % 1024;
    const hopper_backward_wide<T, Bias, Softcap> block(p, memory);
    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (group == hopper_backward<256>::consumers) {
        give_registers<hopper_backward<256>::producer_registers>();
        block.produce(begin, end, counter);
    } else {
        take_registers<hopper_backward<256>::consumer_registers>();
        if (group == 0) {
            block.consume_weights();
        } else {
            block.consume_gradients();
        }
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
