// Projections of an mLSTM's tokens on the tensor cores, in pieces of one warp, for agent_mlstm_cluster.cuh
// and agent_mlstm_batched.cuh: the order of the weights' rows, and a quarter of their columns in parts whose
// products are exact.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rows of all weights of a head, one after the other: w_k, w_v, w_i, w_f, which the new token meets; then,
/// from the next tile on, w_q and skip, which the leaving key meets.
struct mlstm_rows {
    static constexpr std::int32_t tile = 16;
    std::int32_t projection, width;  // width 0: values are not projected
    bool has_skip;

    [[nodiscard]] __host__ __device__ constexpr std::int32_t values() const { return projection; }
    [[nodiscard]] __host__ __device__ constexpr std::int32_t gates() const { return projection + width; }
    [[nodiscard]] __host__ __device__ constexpr std::int32_t queries() const {
        return (gates() + 2 + tile - 1) / tile * tile;
    }
    [[nodiscard]] __host__ __device__ constexpr std::int32_t skip() const { return queries() + projection; }
    [[nodiscard]] __host__ __device__ constexpr std::int32_t tiles() const {
        return (skip() + (has_skip ? 1 : 0) + tile - 1) / tile;
    }
    [[nodiscard]] __host__ __device__ constexpr std::int32_t count() const { return tiles() * tile; }

    /// A row of the weights; for one that there is not, some other.
    template <class Weights>
    __device__ const float* weights(const Weights& of, std::int64_t head, std::int32_t row,
                                    std::int32_t inputs) const {
        const float* from = of.w_k;
        std::int32_t at = row, each = projection;
        if (row >= skip()) {
            from = has_skip ? of.skip : of.w_i;
            at = 0;
            each = 1;
        } else if (row >= queries()) {
            from = of.w_q;
            at = row - queries();
        } else if (row >= gates()) {
            from = row == gates() ? of.w_i : of.w_f;
            at = 0;
            each = 1;
        } else if (row >= values()) {
            from = of.w_v;
            at = row - values();
            each = width;
        }
        return from + (head * each + at) * inputs;
    }
};

/// Numbers of a token in shared memory lie so far apart: reads of eight tokens meet all banks. Those behind
/// the inputs are 0.
__host__ __device__ constexpr std::int32_t token_stride(std::int32_t inputs) {
    return (inputs + 31) / 32 * 32 + 16;
}

/// One number of eight neighboring lanes. All lanes of a warp.
template <class Join>
__device__ float over_eight(float x, const Join& join) {
#pragma unroll
    for (int step = 4; step != 0; step /= 2) {
        x = join(x, __shfl_xor_sync(all_lanes, x, step));
    }
    return x;
}

/// The warp's number, as the compiler knows it to be the same in all lanes: else it makes code for lanes that
/// part.
__device__ inline int whole_warp_id() { return __shfl_sync(all_lanes, warp_id(), 0); }

/// The first 11 bits of a number, which a tensor core takes as they are, and the rest.
__device__ inline float first_bits(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

/// sum += a b, a 16 x 8, b 8 x 8 of 11 bits each: a0, a1 in rows lane / 4 and + 8, column lane % 4, a2, a3 in
/// column + 4; b0, b1 in rows lane % 4 and + 4, column lane / 4.
__device__ inline void mma_16x8x8(float (&sum)[4], const float (&a)[4], float b0, float b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/// Four elements of a row, whose first is a multiple of 4. Those of 16 bits stay as they are until they are
/// needed, so that no thread waits for them where they are asked for.
template <class T>
struct four_elements {
    float4 x{};

    __device__ void load(const T* from) {
        x = make_float4(static_cast<float>(from[0]), static_cast<float>(from[1]), static_cast<float>(from[2]),
                        static_cast<float>(from[3]));
    }
    [[nodiscard]] __device__ float4 numbers() const { return x; }
};
template <class T>
requires(sizeof(T) == 2) struct four_elements<T> {
    uint2 bits{};

    __device__ void load(const T* from) { bits = *reinterpret_cast<const uint2*>(from); }
    [[nodiscard]] __device__ float4 numbers() const {
        T x[4];
        static_assert(sizeof(x) == sizeof(bits));
        std::memcpy(x, &bits, sizeof(bits));
        return make_float4(static_cast<float>(x[0]), static_cast<float>(x[1]), static_cast<float>(x[2]),
                           static_cast<float>(x[3]));
    }
};

/// Sixteen columns of a tile of the weights, in three parts that a tensor core takes as they are, so that
/// products are exact: rows lane / 4 and + 8, columns 4 (lane % 4) to + 3. T: of the tokens' numbers. For
/// bf16 parts have 8 bits, else 11.
template <class T>
struct weight_parts {
    static constexpr bool exact = sizeof(T) == 2;  // tokens have no more than 11 bits
    float high[2][4], middle[2][4], low[2][4];

    __device__ weight_parts(const float4& upper, const float4& lower) {
        split(0, upper.x, lower.x, upper.y, lower.y);
        split(1, upper.z, lower.z, upper.w, lower.w);
    }
    /// sum += the columns times eight tokens, four numbers of token lane / 4, columns 4 (lane % 4) to + 3, in
    /// each lane.
    __device__ void add(const float4& token, float (&sum)[4]) const {
        // Short sums of their own: those of tensor cores are cut off, not rounded.
        float some[4] = {};
        add_half(0, token.x, token.y, some);
        add_half(1, token.z, token.w, some);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] += some[i];
        }
    }

  private:
    __device__ void split(int half, float a, float b, float c, float d) {
        const float weight[4] = {a, b, c, d};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[half][i] = first_bits(weight[i]);
            const float rest = weight[i] - high[half][i];
            middle[half][i] = first_bits(rest);
            low[half][i] = rest - middle[half][i];
        }
    }
    __device__ void add_half(int half, float x, float y, float (&some)[4]) const {
        const float x_high = exact ? x : first_bits(x), y_high = exact ? y : first_bits(y);
        mma_16x8x8(some, low[half], x_high, y_high);
        if constexpr (!exact) {
            const float x_rest = x - x_high, y_rest = y - y_high;
            const float x_middle = first_bits(x_rest), y_middle = first_bits(y_rest);
            mma_16x8x8(some, high[half], x_rest - x_middle, y_rest - y_middle);
            mma_16x8x8(some, middle[half], x_middle, y_middle);
            mma_16x8x8(some, middle[half], x_high, y_high);
            mma_16x8x8(some, high[half], x_middle, y_middle);
        } else {
            mma_16x8x8(some, middle[half], x_high, y_high);
        }
        mma_16x8x8(some, high[half], x_high, y_high);
    }
};
template <>
struct weight_parts<bf16> {
    std::uint32_t high[4], middle[4], low[4];

    __device__ weight_parts(float4 upper, float4 lower) {
        const auto take = [&](std::uint32_t(&part)[4]) {
            part[0] = take_halves(upper.x, upper.y);
            part[1] = take_halves(lower.x, lower.y);
            part[2] = take_halves(upper.z, upper.w);
            part[3] = take_halves(lower.z, lower.w);
        };
        take(high);
        take(middle);
        take(low);
    }
    __device__ void add(const float4& token, float (&sum)[4]) const {
        const std::uint32_t x = first_halves(token.x, token.y), y = first_halves(token.z, token.w);
        float some[4] = {};
        mma_16x8x16<bf16>(some, low, x, y);
        mma_16x8x16<bf16>(some, middle, x, y);
        mma_16x8x16<bf16>(some, high, x, y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] += some[i];
        }
    }

  private:
    /// The first 8 bits of two numbers, as bf16.
    __device__ static std::uint32_t first_halves(float a, float b) {
        return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
    }
    /// Takes the first 8 bits from two numbers.
    __device__ static std::uint32_t take_halves(float& a, float& b) {
        const std::uint32_t halves = first_halves(a, b);
        a -= __uint_as_float(__float_as_uint(a) & 0xffff0000u);
        b -= __uint_as_float(__float_as_uint(b) & 0xffff0000u);
        return halves;
    }
};

/// A quarter of the columns, 64, of a tile of the weights, as the lanes of a warp hold them: of rows lane / 4
/// and lane / 4 + 8, columns 4 (lane % 4) to + 3 of every 16.
struct weight_quarter {
    static constexpr int blocks = 4;  // of 16 columns
    float4 upper[blocks], lower[blocks];

    /// `first`, `second`: the two rows of the lane.
    __device__ void load(const float* first, const float* second, std::int32_t quarter, std::int32_t inputs) {
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            load_block(b, first, second, quarter, inputs);
        }
    }
    __device__ void load_block(int b, const float* first, const float* second, std::int32_t quarter,
                               std::int32_t inputs) {
        const std::int32_t column = 16 * (blocks * quarter + b) + lane_id() % 4 * 4;
        upper[b] = lower[b] = float4{};
        if (column < inputs) {
            upper[b] = *reinterpret_cast<const float4*>(first + column);
            lower[b] = *reinterpret_cast<const float4*>(second + column);
        }
    }

    /// sum = the quarter times eight tokens at x, token_stride() apart: sum[0], sum[1] of row lane / 4,
    /// tokens 2 (lane % 4) and + 1, then of row + 8. T: of the tokens' numbers. Weights go in three parts, so
    /// that products are exact.
    template <class T>
    __device__ void multiply(const float* x, std::int32_t quarter, std::int32_t inputs,
                             float (&sum)[4]) const {
        sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            if (16 * (blocks * quarter + b) >= inputs) {
                break;
            }
            const float4 token = *reinterpret_cast<const float4*>(
                x + lane_id() / 4 * token_stride(inputs) + lane_id() % 4 * 4 + 16 * (blocks * quarter + b));
            weight_parts<T>(upper[b], lower[b]).add(token, sum);
        }
    }
};

/// A quarter for tokens that lie as they are stored, eight at a time.
template <class T>
struct quarter_parts {
    const weight_quarter& weight;

    __device__ explicit quarter_parts(const weight_quarter& of) : weight(of) {}
    /// sum = the quarter times eight tokens: x has the lane's four numbers of every 16 columns, sum is as
    /// weight_quarter's. All columns that there are not are 0.
    __device__ void multiply(const four_elements<T>* x, float (&sum)[4]) const {
        sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
        for (int b = 0; b < weight_quarter::blocks; ++b) {
            weight_parts<T>(weight.upper[b], weight.lower[b]).add(x[4 * b].numbers(), sum);
        }
    }
};
template <>
struct quarter_parts<bf16> {
    weight_parts<bf16> part[weight_quarter::blocks];

    __device__ explicit quarter_parts(const weight_quarter& of)
        : part{{of.upper[0], of.lower[0]},
               {of.upper[1], of.lower[1]},
               {of.upper[2], of.lower[2]},
               {of.upper[3], of.lower[3]}} {}
    __device__ void multiply(const four_elements<bf16>* x, float (&sum)[4]) const {
        constexpr int blocks = weight_quarter::blocks;
        uint2 token[blocks];
        float some[blocks][4] = {};
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            token[b] = x[4 * b].bits;
        }
        // A block's three products wait for each other: meanwhile others' begin.
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            mma_16x8x16<bf16>(some[b], part[b].low, token[b].x, token[b].y);
        }
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            mma_16x8x16<bf16>(some[b], part[b].middle, token[b].x, token[b].y);
        }
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            mma_16x8x16<bf16>(some[b], part[b].high, token[b].x, token[b].y);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] = 0.0f;
#pragma unroll
            for (int b = 0; b < blocks; ++b) {
                sum[i] += some[b][i];
            }
        }
    }
};

/// A projection from its quarters.
__device__ inline float join_quarters(float a, float b, float c, float d) { return (a + b) + (c + d); }

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
