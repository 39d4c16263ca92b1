// An mLSTM's state in the accumulators of a block: what chunks add to it, and the ways in and out.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// acc += sum_r a_r b_r^T and sums += sum_r a_r ratio_r over a chunk's rows r, for one warp: 16 columns of a
/// tile from m0 on and 8 NI from n0 on. `split` has ratio_r as two numbers of E (null: 1); the sums stand in
/// columns 0 and 1 of an accumulator.
template <int NI, class E>
__device__ inline void add_outer(float (&acc)[NI][4], float (&sums)[4], const shared_tile<E>& tile, int m0,
                                 int n0, const E* split) {
    const int lane = lane_id();
    if constexpr (shared_tile<E>::plain) {
        for (int k = 0; k < scorer_chunk; ++k) {
            for (int e = 0; e < 4; ++e) {
                const float a = tile.get(k, m0 + lane / 4 + 8 * (e / 2));
                for (int j = 0; j < NI; ++j) {
                    acc[j][e] += a * tile.get(k, n0 + 8 * j + lane % 4 * 2 + e % 2);
                }
                if (lane % 4 == 0 && e % 2 == 0) {
                    sums[e] += a * (split == nullptr ? 1.0f : split[k]);
                }
            }
        }
    } else {
        const int half = lane / 16, eighth = lane / 8 % 2, line = lane % 8, quarter = lane / 8;
        const std::uint32_t data = shared_address(tile.data);
        const std::uint32_t of_a = data + swizzled(scorer_chunk, half * 8 + line, m0 / 8 + eighth);
#pragma unroll
        for (int k = 0; k < scorer_chunk; k += 32) {
            std::uint32_t fa[2][4], of_ratio[2][2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                load_matrices_transposed(fa[h], of_a + static_cast<std::uint32_t>((k + 16 * h) * 128));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    of_ratio[h][i] =
                        split == nullptr ? (lane < 4 ? 0x3f803f80u : 0u)
                        : lane < 8       ? *reinterpret_cast<const std::uint32_t*>(
                                         split + lane / 4 * scorer_chunk + k + 16 * h + 8 * i + lane % 4 * 2)
                                   : 0u;
                }
            }
            if constexpr (NI == 1) {  // 8 columns of 32 rows at once
                std::uint32_t fb[4];
                load_matrices_transposed(fb, data + swizzled(scorer_chunk, k + quarter * 8 + line, n0 / 8));
                mma_16x8x16<E>(acc[0], fa[0], fb[0], fb[1]);
                mma_16x8x16<E>(acc[0], fa[1], fb[2], fb[3]);
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int j = 0; j < NI; j += 2) {
                        std::uint32_t fb[4];
                        load_matrices_transposed(fb,
                                                 data + swizzled(scorer_chunk, k + 16 * h + eighth * 8 + line,
                                                                 (n0 + 8 * j) / 8 + half));
                        mma_16x8x16<E>(acc[j], fa[h], fb[0], fb[1]);
                        mma_16x8x16<E>(acc[j + 1], fa[h], fb[2], fb[3]);
                    }
                }
            }
            mma_16x8x16<E>(sums, fa[0], of_ratio[0][0], of_ratio[0][1]);
            mma_16x8x16<E>(sums, fa[1], of_ratio[1][0], of_ratio[1][1]);
        }
    }
}

#if KVPOLICY_HOPPER_CODE
/// The same for a warpgroup, 64 columns of a tile and 64 or 128 of another from some column on, with row r of
/// the first times scale[r] * add, rounded. In steps, so that a block has other work while the tensor cores
/// multiply: the left side, in registers,
template <class E>
struct mlstm_outer_product {
    static constexpr int steps = scorer_chunk / 16;
    std::uint32_t a[steps][4];

    __device__ void load(const shared_tile<E>& tile, const float* scale, float add, int warp = warp_id()) {
        const int lane = lane_id(), half = lane / 16, eighth = lane / 8 % 2, line = lane % 8;
        const std::uint32_t from =
            shared_address(tile.data) + swizzled(scorer_chunk, half * 8 + line, 2 * warp + eighth);
#pragma unroll
        for (int k = 0; k < steps; ++k) {
            load_matrices_transposed(a[k], from + static_cast<std::uint32_t>(16 * k * 128));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 by = *reinterpret_cast<const float2*>(scale + 16 * k + 8 * i + lane % 4 * 2);
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; ++e) {
                    rounded_pair<E> pair;
                    pair.both = a[k][e];
                    pair.set(pair.first() * (by.x * add), pair.second() * (by.y * add));
                    a[k][e] = pair.both;
                }
            }
        }
    }
    /// the sums,
    __device__ void add_sums(float (&sums)[4], const E* split) const {
        const int lane = lane_id();
#pragma unroll
        for (int k = 0; k < steps; ++k) {
            std::uint32_t ratio[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                ratio[i] = split == nullptr ? (lane < 4 ? 0x3f803f80u : 0u)
                           : lane < 8       ? *reinterpret_cast<const std::uint32_t*>(
                                            split + lane / 4 * scorer_chunk + 16 * k + 8 * i + lane % 4 * 2)
                                      : 0u;
            }
            mma_16x8x16<E>(sums, a[k], ratio[0], ratio[1]);
        }
    }
    /// and the product with columns from b on, which must end (wgmma_wait) before acc and a are touched
    /// again.
    template <int NI>
    __device__ void start(float (&acc)[NI][4], const shared_tile<E>& tile, int b) {
        const std::uint64_t of_b = describe_mn_major(shared_address(tile.from(b).data), scorer_chunk * 128);
        auto& flat = reinterpret_cast<float(&)[4 * NI]>(acc);
        pin(flat);
        pin(a);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < steps; ++k) {
            wgmma<E, 1>(flat, a[k], of_b + static_cast<std::uint64_t>(k) * (2048 / 16), 1);
        }
        wgmma_commit();
    }
    template <int NI>
    __device__ void wait(float (&acc)[NI][4]) {
        wgmma_wait<0>();
        pin(reinterpret_cast<float(&)[4 * NI]>(acc));
        pin(a);
    }
};
#endif

/// As add_outer, of k~ and v~ in tiles of their own, with row r of k~ times by scale[r] * add and rounded as
/// it is loaded.
template <int NI, class E>
__device__ inline void add_scaled_outer(float (&acc)[NI][4], float (&sums)[4], const shared_tile<E>& a,
                                        int m0, const shared_tile<E>& b, int n0, const float* scale,
                                        float add) {
    int lane = lane_id();
    asm volatile("" : "+r"(lane));
    const int half = lane / 16, eighth = lane / 8 % 2, line = lane % 8;
    const std::uint32_t of_a =
        shared_address(a.data) + swizzled(scorer_chunk, half * 8 + line, m0 / 8 + eighth);
    const std::uint32_t of_b = shared_address(b.data);
    const std::uint32_t ones = lane < 4 ? 0x3f803f80u : 0u;
#pragma unroll
    for (int k = 0; k < scorer_chunk; k += 16) {
        std::uint32_t fa[4];
        load_matrices_transposed(fa, of_a + static_cast<std::uint32_t>(k * 128));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 by = *reinterpret_cast<const float2*>(scale + k + 8 * i + lane % 4 * 2);
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; ++e) {
                rounded_pair<E> pair;
                pair.both = fa[e];
                pair.set(pair.first() * (by.x * add), pair.second() * (by.y * add));
                fa[e] = pair.both;
            }
        }
#pragma unroll
        for (int j = 0; j < NI; j += 2) {
            std::uint32_t fb[4];
            load_matrices_transposed(
                fb, of_b + swizzled(scorer_chunk, k + eighth * 8 + line, (n0 + 8 * j) / 8 + half));
            mma_16x8x16<E>(acc[j], fa, fb[0], fb[1]);
            mma_16x8x16<E>(acc[j + 1], fa, fb[2], fb[3]);
        }
        mma_16x8x16<E>(sums, fa, ones, ones);
    }
}

/// `count` elements side by side, a multiple of 16 bytes, by the threads from `from` on.
template <class E>
__device__ inline void copy_line(E* to, const E* line, int count, int from) {
    constexpr int each = 16 / sizeof(E);
    const int i = static_cast<int>(threadIdx.x) - from;
    if (i >= 0 && i < count / each) {
        copy_16(shared_address(to + i * each), line + i * each, 16);
    }
}

/// Where a warp's accumulators stand in a state of F features and V values: 16 features from m0 on and 8 NI
/// values from n0 on.
struct mlstm_state_part {
    int m0, n0;
    bool owns_sums;  // writes the sums of its features

    __device__ int feature(int r) const { return m0 + lane_id() / 4 + 8 * r; }
    __device__ int value(int j) const { return n0 + 8 * j + lane_id() % 4 * 2; }

    /// Nothing, in a warp's accumulators and sums.
    template <int NI>
    __device__ static void clear(float (&acc)[NI][4], float (&sums)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[e] = 0.0f;
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                acc[j][e] = 0.0f;
            }
        }
    }
    /// Calls body(numbers of the accumulators, index of the caller's state) for what is there of a state in
    /// the caller's order.
    template <int NI, class T, class Body>
    __device__ void for_each_of_caller(const mlstm_params<T>& params, int F, const Body& body) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const std::int32_t feature_there = params.feature_of(feature(r), F);
            if (feature_there < 0) {
                continue;
            }
#pragma unroll
            for (int j = 0; j < NI; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (value(j) + e < params.width) {
                        body(j, 2 * r + e, std::int64_t{feature_there} * params.width + value(j) + e);
                    }
                }
            }
        }
    }
    /// Takes up a state of the caller, [features][width], and its sums.
    template <int NI, class T>
    __device__ void take(const mlstm_params<T>& params, int F, const float* state, const float* of_sums,
                         float (&acc)[NI][4], float (&sums)[4]) const {
        for_each_of_caller<NI>(params, F, [&](int j, int e, std::int64_t at) { acc[j][e] = state[at]; });
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const std::int32_t there = params.feature_of(feature(r), F);
            if (there >= 0 && lane_id() % 4 == 0) {
                sums[2 * r] = of_sums[there];
            }
        }
    }
    /// Leaves one there.
    template <int NI, class T>
    __device__ void leave(const mlstm_params<T>& params, int F, float* state, const float (&acc)[NI][4],
                          const float (&sums)[4]) const {
        for_each_of_caller<NI>(params, F, [&](int j, int e, std::int64_t at) { state[at] = acc[j][e]; });
        float* const of_sums = state + std::int64_t{params.features} * params.width;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const std::int32_t there = params.feature_of(feature(r), F);
            if (there >= 0 && owns_sums && lane_id() % 4 == 0) {
                of_sums[there] = sums[2 * r] + sums[2 * r + 1];
            }
        }
    }
    /// Number `index` of partial_states.
    template <int F, int V, int NI, class T>
    __device__ void write_partial(const mlstm_params<T>& params, std::int64_t index,
                                  const float (&acc)[NI][4], const float (&sums)[4]) const {
        float* const to = params.partial_states + index * (F * (V + 1));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                *reinterpret_cast<float2*>(to + feature(r) * V + value(j)) =
                    make_float2(acc[j][2 * r], acc[j][2 * r + 1]);
            }
            if (owns_sums && lane_id() % 4 == 0) {
                to[F * V + feature(r)] = sums[2 * r] + sums[2 * r + 1];
            }
        }
    }
    template <int F, int V, int NI, class T>
    __device__ void read_partial(const mlstm_params<T>& params, std::int64_t index, float (&acc)[NI][4],
                                 float (&sums)[4]) const {
        const float* const from = params.partial_states + index * (F * (V + 1));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                const float2 x = *reinterpret_cast<const float2*>(from + feature(r) * V + value(j));
                acc[j][2 * r] = x.x;
                acc[j][2 * r + 1] = x.y;
            }
            if (lane_id() % 4 == 0) {
                sums[2 * r] = from[F * V + feature(r)];
            }
        }
    }
    /// The state that segment `segment` of a plane begins with; a backward pass takes none of the caller's.
    template <int F, int V, int NI, class T>
    __device__ void begin(const mlstm_params<T>& params, std::int32_t plane, std::int32_t segment,
                          bool backward, float (&acc)[NI][4], float (&sums)[4]) const {
        const float* const state = backward ? nullptr : params.state_before(plane);
        if (params.segments == 1 && state != nullptr) {
            take(params, F, state, params.partial_states + std::int64_t{plane} * params.features, acc, sums);
        } else if (segment > 0 || state != nullptr) {
            // Of several segments the last may leave its state while another begins.
            const std::int64_t first = std::int64_t{plane} * params.segments;
            read_partial<F, V>(params, (first + segment) * params.cuts, acc, sums);
        }
    }
    /// Leaves the state after a plane's last chunk with the caller (mlstm_params::state_after).
    template <int NI, class T>
    __device__ void end(const mlstm_params<T>& params, std::int32_t plane, int F, const float (&acc)[NI][4],
                        const float (&sums)[4]) const {
        if (float* const state = params.state_after(plane)) {
            leave(params, F, state, acc, sums);
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
