// What one warpgroup of the Hopper backward pass does with a tile of queries: products by wgmma, the
// arithmetic between them in registers, and sums on their way out.
// attention/cuda/backward/kernel_backward_hopper.cuh puts it together.
#pragma once

#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes and the layout of shared memory, in bytes from a multiple of 1024. Sizes of a block with `Keys` keys
/// of head_dim up to Dim, and the beginning of its shared memory, in bytes from a multiple of 1024.
template <int Dim, int Keys>
struct hopper_backward_sizes {
    static constexpr int consumers = 2;  // warpgroups
    static constexpr int keys = Keys;
    static constexpr int queries = 64;
    static constexpr int stages = 2;
    static constexpr int threads = 128 * (consumers + 1);
    static constexpr int key_bytes = keys * Dim * 2;
    static constexpr int query_bytes = queries * Dim * 2;
    static constexpr int gradient_bytes = keys * queries * 2;
    static constexpr int numbers_bytes = queries * 4;
    static constexpr int meta_bytes = 32 + keys / 32 * 24 + keys * 5 * 4;  // item; visible intervals; entries

    static constexpr int k = 0;
    static constexpr int v = k + key_bytes;
    static constexpr int q = v + key_bytes;                         // [stages]
    static constexpr int d_out = q + stages * query_bytes;          // [stages]
    static constexpr int gradients = d_out + stages * query_bytes;  // dS^T
};

/// Each consumer has 64 keys.
template <int Dim>
struct hopper_backward : hopper_backward_sizes<Dim, 128> {
    static_assert(Dim == 64 || Dim == 128);
    using sizes = hopper_backward_sizes<Dim, 128>;
    static constexpr int consumer_registers = Dim == 64 ? 232 : 240;
    static constexpr int producer_registers = Dim == 64 ? 40 : 24;

    static constexpr int sums = sizes::gradients + 2 * sizes::gradient_bytes;  // of d_q, 4 KB per warp
    static constexpr int lse2 = sums + sizes::consumers * 4 * 4096;            // [stages]
    static constexpr int delta = lse2 + sizes::stages * sizes::numbers_bytes;  // [stages]
    static constexpr int meta = delta + sizes::stages * sizes::numbers_bytes;  // [2]
    static constexpr int barriers = meta + 2 * sizes::meta_bytes;
    static constexpr int bytes = barriers + 16 * 8;
    static constexpr int shared_bytes = bytes + 1024;
};

/// Of head_dims above 128 a block has 64 keys, and their sums fill the registers of both warpgroups: one has
/// those of d_v, the other those of d_k (attention/cuda/backward/kernel_backward_hopper_wide.cuh). Sums of
/// d_q leave straight from registers.
template <>
struct hopper_backward<256> : hopper_backward_sizes<256, 64> {
    static constexpr int consumer_registers = 240;
    static constexpr int producer_registers = 24;

    static constexpr int weights = gradients + gradient_bytes;   // P^T as fp16, and slopes of a soft cap
    static constexpr int lse2 = weights + 2 * gradient_bytes;    // [stages]
    static constexpr int delta = lse2 + stages * numbers_bytes;  // [stages]
    static constexpr int meta = delta + stages * numbers_bytes;  // [2]
    static constexpr int barriers = meta + 2 * meta_bytes;
    static constexpr int bytes = barriers + 16 * 8;
    static constexpr int shared_bytes = bytes + 1024;
    static_assert(shared_bytes <= 232448);
};

#if KVPOLICY_HOPPER_CODE
__device__ inline void store_four(std::uint32_t to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

template <class T, int Dim, bool Bias, bool Softcap>
struct agent_backward_warpgroup {
    using L = hopper_backward<Dim>;
    static constexpr int score_values = L::queries / 2;  // of a thread
    static constexpr int sum_values = Dim / 2;

    const backward_params<T>& p;
    unsigned char* const shared;
    const std::uint32_t base;
    const int thread = static_cast<int>(threadIdx.x) % 128;

    __device__ agent_backward_warpgroup(const backward_params<T>& params, unsigned char* memory)
        : p(params), shared(memory), base(shared_address(memory)) {}

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

    /// Products to weights. Mixed: a bias counts for some queries of the tile only.
    template <bool Mixed>
    __device__ void to_weights(float (&s)[score_values],
                               std::uint32_t (&slopes)[Softcap ? score_values / 2 : 1], const float* lse2,
                               std::int32_t m, const std::int32_t (&from)[2], const float (&bias)[2]) const {
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

    __device__ void hide(float (&s)[score_values], std::int32_t m, const packed_interval (&sees)[2]) const {
#pragma unroll
        for (int i = 0; i < score_values; ++i) {
            if (!sees[i / 2 % 2].sees(m + i / 4 * 8 + 2 * (thread % 4) + i % 2)) {
                s[i] = 0.0f;
            }
        }
    }

    /// As a register operand [key][query].
    __device__ static void pack_rows(const float (&s)[score_values],
                                     std::uint32_t (&rows)[score_values / 8][4]) {
#pragma unroll
        for (int k = 0; k < score_values / 8; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                rows[k][i] = pack<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
            }
        }
    }

    /// Weights to gradients of logits, dS^T = P^T (dP^T - delta). Masked: `sees` says of which pairs;
    /// products of others may be anything.
    template <bool Mixed, bool Masked>
    __device__ void to_gradients(float (&s)[score_values], const float (&d)[score_values], const float* delta,
                                 std::int32_t m, const packed_interval (&sees)[2],
                                 const std::int32_t (&from)[2], float counts, float (&sum_bias)[2]) const {
        const int column = 2 * (thread % 4);
#pragma unroll
        for (int j = 0; j < score_values / 4; ++j) {
            const float2 less = *reinterpret_cast<const float2*>(delta + 8 * j + column);
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; ++i) {
                s[i] *= d[i] - (i % 2 == 0 ? less.x : less.y);
                if constexpr (Masked) {
                    s[i] = sees[i / 2 % 2].sees(m + 8 * j + column + i % 2) ? s[i] : 0.0f;
                }
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
    /// The same; a bias counts for all queries of the tile (biased), for some (mixed) or for none.
    __device__ void to_gradients(float (&s)[score_values], const float (&d)[score_values], const float* delta,
                                 std::int32_t m, bool whole, const packed_interval (&sees)[2], bool mixed,
                                 bool biased, const std::int32_t (&from)[2], float (&sum_bias)[2]) const {
        const float counts = biased ? 1.0f : 0.0f;
        if (Bias && mixed) {
            if (whole) {
                to_gradients<true, false>(s, d, delta, m, sees, from, counts, sum_bias);
            } else {
                to_gradients<true, true>(s, d, delta, m, sees, from, counts, sum_bias);
            }
        } else if (whole) {
            to_gradients<false, false>(s, d, delta, m, sees, from, counts, sum_bias);
        } else {
            to_gradients<false, true>(s, d, delta, m, sees, from, counts, sum_bias);
        }
    }
    __device__ static void multiply_slopes(float (&s)[score_values],
                                           const std::uint32_t (&slopes)[Softcap ? score_values / 2 : 1]) {
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

    /// 64 x 64 of d_q = dS K: columns [64 block, 64 block + 64).
    __device__ void multiply_queries(float (&d_q)[32], std::uint32_t turn, int block) const {
        const std::uint64_t a = describe_mn_major(turn, L::keys * 128);
        const std::uint64_t b = describe_mn_major(base + L::k + block * L::keys * 128, L::keys * 128);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < L::keys / 16; ++k) {
            wgmma<T, 1, 1>(d_q, a + k * 2048 / 16, b + k * 2048 / 16, k != 0);
        }
        wgmma_commit();
    }

    /// Adds 64 x 64 sums by way of shared memory, where a bulk reduction of every warp's rows takes them from
    /// while the warps go on. (Additions straight from registers are as fast in themselves, but warps wait
    /// for them to be taken.)
    __device__ void add_queries(float* to, const float (&d_q)[32], int group) const {
        const int warp = thread / 32, lane = thread % 32;
        const std::uint32_t at = base + L::sums + (group * 4 + warp) * 4096;
        if (lane == 0) {
            bulk_wait_read<0>();
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
            bulk_commit();
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
    __device__ void add_bias(const float (&sum_bias)[2], std::int64_t line,
                             const std::int32_t (&row)[2]) const {
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

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
