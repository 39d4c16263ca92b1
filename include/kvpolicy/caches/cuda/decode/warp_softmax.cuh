// Softmax states of a warp: sizes, how a state lies in memory, and how a warp attends to keys.
#pragma once

#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/rounded.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The query heads of a part of a group.
template <class T>
struct stream_queries {
    const T* q;
    std::int64_t head_stride;
    std::int32_t heads;
};

/// Logits in units of log 2: slope * <q, k>; with cap != 0 cap (1 - 2 / (1 + 2^(slope <q, k>))), a soft cap.
template <class Compute>
struct stream_logits {
    Compute slope = Compute(0);
    Compute cap = Compute(0);
};

inline constexpr int stream_tile = 16;

/// A state in memory: max[heads], sum[heads] (in a header of 4 numbers at least), weighted values
/// [heads][width].
template <int Heads>
struct stream_state {
    static constexpr int header = 2 * Heads < 4 ? 4 : 2 * Heads;
    __host__ __device__ static constexpr std::int32_t width(std::int32_t dim) { return dim + 4; }
    __host__ __device__ static constexpr std::int64_t size(std::int32_t width) {
        return header + std::int64_t{Heads} * width;
    }
};

/// Sizes for the tensor cores: T is bf16 or fp16, head_dims up to Dim, 8 query heads at once. Layout: where
/// the cache's rows lie, and how warps and blocks share them (contiguous_layout, paged_layout).
template <class T_, int Dim_, class Layout>
struct tensor_rows {
    using T = T_;
    using Compute = float;
    using Source = typename Layout::template source<T>;
    static constexpr int Dim = Dim_;
    static constexpr int heads = 8;
    static constexpr bool clusters = Layout::clusters;
    static constexpr int warps = Dim > 128 ? 2 : 4;
    static constexpr int threads = 32 * warps;
    static constexpr int half_bytes = stream_tile * Dim * 2;  // the keys of a tile, or the values
    static constexpr int tile_bytes = 2 * half_bytes;
    static constexpr int blocks = Layout::blocks;
    static constexpr bool in_turn = Layout::in_turn;
    static constexpr int stages = Layout::kilobytes * 1024 / warps / tile_bytes;
    static constexpr int region_bytes = stages * tile_bytes;
    static_assert(stages >= 2 && 2 * stream_state<heads>::size(Dim + 4) * 4 <= region_bytes);
    __host__ __device__ static constexpr std::int32_t width(std::int32_t /*head_dim_vo*/) {
        return stream_state<heads>::width(Dim);
    }
    /// Shared memory of one warp.
    __host__ __device__ static constexpr int shared_bytes(std::int32_t /*head_dim_vo*/) {
        return region_bytes;
    }
};

/// Sizes for everything else: one query head at a time, in the precision of T.
template <class T_, class Layout>
struct plain_rows {
    using T = T_;
    using Compute = T_;
    using Source = typename Layout::template source<T>;
    static constexpr int heads = 1;
    static constexpr bool clusters = false;
    static constexpr int warps = 4;
    static constexpr int threads = 32 * warps;
    static constexpr int blocks = 2;
    static constexpr bool in_turn = false;  // one lane per row: two tiles at once
    __host__ __device__ static constexpr std::int32_t width(std::int32_t head_dim_vo) {
        return stream_state<heads>::width(head_dim_vo);
    }
    __host__ __device__ static constexpr int shared_bytes(std::int32_t head_dim_vo) {
        return static_cast<int>(stream_state<heads>::size(width(head_dim_vo)) * sizeof(Compute));
    }
};

/// A lane's operands of 8 query heads, of which there may be fewer, with zeros beyond a head_dim.
template <class T, int Steps>
__device__ void load_tensor_queries(const stream_queries<T>& queries, std::int32_t dim,
                                    std::uint32_t (&q)[Steps][2]) {
    const int head = lane_id() / 4;
    const T* const from = queries.q + (head < queries.heads ? head : 0) * queries.head_stride;
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int first = 16 * k + 8 * i;
            q[k][i] = head < queries.heads && first < dim
                          ? *reinterpret_cast<const std::uint32_t*>(from + first + lane_id() % 4 * 2)
                          : 0;
        }
    }
}

/// Writes a warp's state over its own tiles, which it has read. `sum` has a lane's share.
template <class S, int Steps>
__device__ void store_tensor_state(unsigned char* region, const float (&max)[2], const float (&sum)[2],
                                   const float (&o)[Steps][4]) {
    constexpr std::int32_t width = S::width(0);
    auto* const state = reinterpret_cast<float*>(region);
    const int group = lane_id() / 4, head = lane_id() % 4 * 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float all = sum[i];
        all += __shfl_xor_sync(all_lanes, all, 4);
        all += __shfl_xor_sync(all_lanes, all, 8);
        all += __shfl_xor_sync(all_lanes, all, 16);
        if (group == 0) {
            state[head + i] = max[i];
            state[S::heads + head + i] = all;
        }
    }
    float* const values = state + stream_state<S::heads>::header;
#pragma unroll
    for (int m = 0; m < Steps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[(head + i % 2) * width + 16 * m + group + i / 2 * 8] = o[m][i];
        }
    }
}

/// A softmax state of 8 query heads, on the tensor cores. Keys stand on the rows of the products (mma's M),
/// query heads on the columns: S^T = K Q^T, O^T = V^T P^T. So one tile of 16 rows serves 8 heads. In an
/// accumulator lane 4 group + pair has rows group, group + 8 and heads 2 pair, 2 pair + 1.
template <class S>
class tensor_softmax {
    using T = typename S::T;
    static constexpr int steps = S::Dim / 16;
    static constexpr int at_once = steps < 8 ? steps : 8;
    static_assert(at_once % 4 == 0, "flips repeat after four steps");

  public:
    /// Sets out to read the queries.
    __device__ void ask(const stream_queries<T>& queries, std::int32_t head_dim_qk) {
        load_tensor_queries(queries, head_dim_qk, q_);
    }
    /// Nothing has been seen yet.
    __device__ void begin(const stream_logits<typename S::Compute>& logits) {
        slope_ = logits.slope;
        cap_ = logits.cap;
#pragma unroll
        for (int m = 0; m < steps; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                o_[m][i] = 0.0f;
            }
        }
    }
    /// Attends to a tile in shared memory at `at`, its keys before its values: to rows below `limit` but a
    /// and b. Chunks beyond a head_dim hold zeros. note(row, head, logits of head and head + 1), head even,
    /// hears of each row that counts.
    template <class Note>
    __device__ void take(std::uint32_t at, std::int32_t limit, std::int32_t a, std::int32_t b,
                         const Note& note) {
        const int lane = lane_id();
        // ldmatrix: lane i names row i % 8 of matrix i / 8. Keys: matrices 0, 1 are rows 0..7 and 8..15 of
        // the first 8 dims, 2, 3 of the next. Values, transposed: 0, 1 are the first and next 8 dims of rows
        // 0..7, 2, 3 of rows 8..15. A chunk of 16 bytes stands where its number, flipped by the row's last 3
        // bits, says; those are bits 4 to 6 of an address.
        const int k_row = lane % 16, v_row = lane % 8 + 8 * (lane / 16);
        const std::uint32_t k_at = at + k_row * S::Dim * 2;
        const std::uint32_t v_at = at + S::half_bytes + v_row * S::Dim * 2;
        const std::uint32_t k_flip = ((lane / 16) ^ (k_row % 8)) << 4;
        const std::uint32_t v_flip = ((lane / 8 % 2) ^ (v_row % 8)) << 4;
        // A product waits for its operands, so those of many are asked for at once, and the values before the
        // softmax.
        std::uint32_t operands[at_once][4];
        float s[2][4] = {};
#pragma unroll
        for (int first = 0; first < steps; first += at_once) {
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                load_matrices(operands[k], k_at + (k_flip ^ (k % 4 << 5)) + (first + k) / 4 * 128);
            }
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                mma_16x8x16<T>(s[k % 2], operands[k], q_[first + k][0], q_[first + k][1]);
            }
        }
        const auto load_values = [&](int first) {
#pragma unroll
            for (int m = 0; m < at_once; ++m) {
                load_matrices_transposed(operands[m], v_at + (v_flip ^ (m % 4 << 5)) + (first + m) / 4 * 128);
            }
        };
        load_values(0);
        float weight[4];
        const std::int32_t row = lane / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = s[0][i] + s[1][i];
            const float logit = cap_ != 0.0f ? cap_ - __fdividef(2.0f * cap_, 1.0f + fast_exp2(x * slope_))
                                             : rounded_product(x, slope_);
            weight[i] = row + i / 2 * 8 < limit ? logit : minus_infinity();
        }
        if (a >= 0 || b >= 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const std::int32_t mine = row + i / 2 * 8;
                weight[i] = mine == a || mine == b ? minus_infinity() : weight[i];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const std::int32_t mine = row + i / 2 * 8;
            if (mine < limit && mine != a && mine != b) {
                note(mine, lane % 4 * 2, weight[i], weight[i + 1]);
            }
        }
        float largest[2] = {fmaxf(weight[0], weight[2]), fmaxf(weight[1], weight[3])};
#pragma unroll
        for (int step = 4; step != 32; step *= 2) {
            const float other[2] = {__shfl_xor_sync(all_lanes, largest[0], step),
                                    __shfl_xor_sync(all_lanes, largest[1], step)};
            largest[0] = fmaxf(largest[0], other[0]);
            largest[1] = fmaxf(largest[1], other[1]);
        }
        float decay[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float top = fmaxf(largest[i], max_[i]);
            // Where nothing has been seen yet -inf must not be subtracted from -inf.
            const float finite = top == minus_infinity() ? 0.0f : top;
            decay[i] = fast_exp2(max_[i] - finite);
            max_[i] = top;
            weight[i] = fast_exp2(weight[i] - finite);
            weight[i + 2] = fast_exp2(weight[i + 2] - finite);
            sum_[i] = sum_[i] * decay[i] + weight[i] + weight[i + 2];  // this lane's share
        }
        const std::uint32_t p0 = transpose_8x8(pack<T>(weight[0], weight[1]));
        const std::uint32_t p1 = transpose_8x8(pack<T>(weight[2], weight[3]));
        // The largest logit seldom changes.
        if (__any_sync(all_lanes, !(decay[0] == 1.0f && decay[1] == 1.0f))) {
#pragma unroll
            for (int m = 0; m < steps; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    o_[m][i] *= decay[i % 2];
                }
            }
        }
#pragma unroll
        for (int first = 0; first < steps; first += at_once) {
            if (first != 0) {
                load_values(first);
            }
#pragma unroll
            for (int m = 0; m < at_once; ++m) {
                mma_16x8x16<T>(o_[first + m], operands[m], p0, p1);
            }
        }
    }
    __device__ void store(unsigned char* region) const { store_tensor_state<S>(region, max_, sum_, o_); }

  private:
    std::uint32_t q_[steps][2];
    float slope_ = 0.0f, cap_ = 0.0f;
    float max_[2] = {minus_infinity(), minus_infinity()};
    float sum_[2] = {0.0f, 0.0f};
    float o_[steps][4];
};

/// A softmax state by plain loops, one lane per key: to check others with, and for storage that the tensor
/// cores do not take.
template <class S>
class plain_softmax {
    using T = typename S::T;
    static constexpr int most = 32;  // columns a lane: head_dims up to 1024

  public:
    __device__ plain_softmax(std::int32_t head_dim_qk, std::int32_t head_dim_vo)
        : head_dim_qk_(head_dim_qk), head_dim_vo_(head_dim_vo) {
#pragma unroll
        for (int i = 0; i < most; ++i) {
            o_[i] = T(0);
        }
    }

    /// Attends to rows [begin, end), but those that are hidden(row): key_of(row) and value_of(row) say where
    /// they are. note(row, logit) hears of each row that counts.
    template <class Hidden, class Key, class Value, class Note>
    __device__ void take(std::int32_t begin, std::int32_t end, const stream_queries<T>& queries,
                         const stream_logits<typename S::Compute>& logits, const Hidden& hidden,
                         const Key& key_of, const Value& value_of, const Note& note) {
        const T slope = static_cast<T>(logits.slope), cap = static_cast<T>(logits.cap);
        for (std::int32_t first = begin; first < end; first += 32) {
            const std::int32_t row = first + lane_id();
            T logit = nothing();
            if (row < end && !hidden(row)) {
                const T* const key = key_of(row);
                T sum = T(0);
                for (std::int32_t d = 0; d < head_dim_qk_; ++d) {
                    sum += queries.q[d] * key[d];
                }
                logit = cap != T(0) ? cap - T(2) * cap / (T(1) + exp2(sum * slope))
                                    : rounded_product(sum, slope);
                note(row, logit);
            }
            T largest = logit;
#pragma unroll
            for (int step = 16; step != 0; step /= 2) {
                largest = fmax(largest, __shfl_xor_sync(all_lanes, largest, step));
            }
            largest = fmax(largest, max_);
            const T finite = largest == nothing() ? T(0) : largest;
            const T decay = exp2(max_ - finite), weight = exp2(logit - finite);
            max_ = largest;
            sum_ = sum_ * decay + weight;
#pragma unroll
            for (int i = 0; i < most; ++i) {
                o_[i] *= decay;
            }
            for (std::int32_t x = 0; x < 32 && first + x < end; ++x) {
                const T w = __shfl_sync(all_lanes, weight, x);
                if (hidden(first + x)) {
                    continue;
                }
                const T* const value = value_of(first + x);
#pragma unroll
                for (int i = 0; i < most; ++i) {
                    const std::int32_t column = 32 * i + lane_id();
                    if (column < head_dim_vo_) {
                        o_[i] += w * value[column];
                    }
                }
            }
        }
    }

    __device__ void store(unsigned char* region) const {
        T* const state = reinterpret_cast<T*>(region);
        T sum = sum_;
#pragma unroll
        for (int step = 16; step != 0; step /= 2) {
            sum += __shfl_xor_sync(all_lanes, sum, step);
        }
        if (lane_id() == 0) {
            state[0] = max_;
            state[S::heads] = sum;
        }
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const std::int32_t column = 32 * i + lane_id();
            if (column < head_dim_vo_) {
                state[stream_state<S::heads>::header + column] = o_[i];
            }
        }
    }

  private:
    __device__ static T nothing() { return static_cast<T>(minus_infinity()); }

    std::int32_t head_dim_qk_, head_dim_vo_;
    T max_ = nothing();
    T sum_ = T(0);
    T o_[most];
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
