// What one token asks of an mLSTM, in pieces that a warp or a thread does, for the kernels of score_cluster.cuh and score_many.cuh:
// projections on the tensor cores, features, gates, a few rows of the state, the read-out. Their sums are taken in one order,
// so that a score has the same bits whichever kernel takes its token, alone or among many.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/blocks/mma.cuh>
#include <kvpolicy/cuda/blocks/score_block.cuh>
#include <kvpolicy/cuda/blocks/warp.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr std::int32_t most_mlstm_inputs = 256, most_mlstm_features = 256, most_mlstm_width = 128;
/// Rows of a state that a thread takes in, one after the other; their sum is a number of its own until the read-out.
inline constexpr std::int32_t fold_rows = 8;

__host__ __device__ constexpr std::int32_t folds_of(std::int32_t features) {
    return (features + fold_rows - 1) / fold_rows;
}

/// Rows of all weights of a head, one after the other: w_k, w_v, w_i, w_f, which the newcomer meets; then, from the next tile on, w_q and
/// skip, which the leaving key meets.
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

/// Numbers of a token in shared memory lie so far apart: reads of eight tokens meet all banks. Those behind the inputs are 0.
__host__ __device__ constexpr std::int32_t token_stride(std::int32_t inputs) {
    return (inputs + 31) / 32 * 32 + 16;
}

/// One number of eight neighbouring lanes. All lanes of a warp.
template <class Join>
__device__ float over_eight(float x, const Join& join) {
#pragma unroll
    for (int step = 4; step != 0; step /= 2) {
        x = join(x, __shfl_xor_sync(all_lanes, x, step));
    }
    return x;
}

/// The warp's number, as the compiler knows it to be the same in all lanes: else it makes code for lanes that part.
__device__ inline int whole_warp_id() { return __shfl_sync(all_lanes, warp_id(), 0); }

/// The first 11 bits of a number, which a tensor core takes as they are, and the rest.
__device__ inline float first_bits(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

/// Asks the L2 cache for the line at an address.
__device__ inline void ask_for_line(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

/// sum += a b, a 16 x 8, b 8 x 8 of 11 bits each: a0, a1 in rows lane / 4 and + 8, column lane % 4, a2, a3 in column + 4; b0, b1 in
/// rows lane % 4 and + 4, column lane / 4.
__device__ inline void mma_16x8x8(float (&sum)[4], const float (&a)[4], float b0, float b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/// A quarter of the columns, 64, of a tile of the weights, as the lanes of a warp hold them: of rows lane / 4 and lane / 4 + 8, columns
/// 4 (lane % 4) to + 3 of every 16.
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

    /// sum = the quarter times eight tokens at x, token_stride() apart: sum[0], sum[1] of row lane / 4, tokens 2 (lane % 4) and + 1, then of
    /// row + 8. T: of the tokens' numbers. Weights go in three parts, so that products are exact.
    template <class T>
    __device__ void multiply(const float* x, std::int32_t quarter, std::int32_t inputs,
                             float (&sum)[4]) const {
        sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            if (16 * (blocks * quarter + b) >= inputs) {
                break;
            }
            multiply_block<T>(b, x, quarter, inputs, sum);
        }
    }
    /// The part of columns below `inputs`, added to sum.
    template <class T>
    __device__ void multiply_block(int b, const float* x, std::int32_t quarter, std::int32_t inputs,
                                   float (&sum)[4]) const {
        const float4 token = *reinterpret_cast<const float4*>(
            x + lane_id() / 4 * token_stride(inputs) + lane_id() % 4 * 4 + 16 * (blocks * quarter + b));
        // Short sums of their own: those of tensor cores are cut off, not rounded.
        float some[4] = {};
        if constexpr (std::is_same_v<T, bf16>) {
            add_short(some, upper[b], lower[b], first_halves(token.x, token.y),
                      first_halves(token.z, token.w));
        } else {
            constexpr bool exact = sizeof(T) == 2;  // no more than 11 bits
            add<exact>(some, {upper[b].x, lower[b].x, upper[b].y, lower[b].y}, token.x, token.y);
            add<exact>(some, {upper[b].z, lower[b].z, upper[b].w, lower[b].w}, token.z, token.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] += some[i];
        }
    }

  private:
    struct four {
        float at[4];
    };
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
    /// Tokens of 8 bits: twice as many columns a product, of weights in parts of 8 bits.
    __device__ static void add_short(float (&sum)[4], float4 upper, float4 lower, std::uint32_t x,
                                     std::uint32_t y) {
        const auto take = [&](std::uint32_t(&part)[4]) {
            part[0] = take_halves(upper.x, upper.y);
            part[1] = take_halves(lower.x, lower.y);
            part[2] = take_halves(upper.z, upper.w);
            part[3] = take_halves(lower.z, lower.w);
        };
        std::uint32_t high[4], middle[4], low[4];
        take(high);
        take(middle);
        take(low);
        mma_16x8x16<bf16>(sum, low, x, y);
        mma_16x8x16<bf16>(sum, middle, x, y);
        mma_16x8x16<bf16>(sum, high, x, y);
    }
    template <bool Exact>
    __device__ static void add(float (&sum)[4], const four& weight, float x, float y) {
        float high[4], middle[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = first_bits(weight.at[i]);
            const float rest = weight.at[i] - high[i];
            middle[i] = first_bits(rest);
            low[i] = rest - middle[i];
        }
        const float x_high = Exact ? x : first_bits(x), y_high = Exact ? y : first_bits(y);
        mma_16x8x8(sum, low, x_high, y_high);
        if constexpr (!Exact) {
            const float x_rest = x - x_high, y_rest = y - y_high;
            const float x_middle = first_bits(x_rest), y_middle = first_bits(y_rest);
            mma_16x8x8(sum, high, x_rest - x_middle, y_rest - y_middle);
            mma_16x8x8(sum, middle, x_middle, y_middle);
            mma_16x8x8(sum, middle, x_high, y_high);
            mma_16x8x8(sum, high, x_middle, y_middle);
        } else {
            mma_16x8x8(sum, middle, x_high, y_high);
        }
        mma_16x8x8(sum, high, x_high, y_high);
    }
};

/// A projection from its quarters.
__device__ inline float join_quarters(float a, float b, float c, float d) { return (a + b) + (c + d); }

/// Feature maps are softmaxes: one of y, for Hedgehog one of y and one of -y. Eight lanes take one.
__host__ __device__ constexpr int feature_parts(Softmax) { return 1; }
__host__ __device__ constexpr int feature_parts(Hedgehog) { return 2; }

/// Features of `tokens` tokens, as many as there are warps at most: projections y, [tokens, rows.count()], to k and q, [tokens, padded].
/// All lanes of a warp.
template <class Feature>
__device__ void make_features(const float* y, const mlstm_rows& rows, std::int32_t tokens,
                              std::int32_t features, std::int32_t padded, float* k, float* q, int warp) {
    constexpr int parts = feature_parts(Feature{}), lanes = 8,
                  each = 8;  // numbers that a lane looks at together
    const std::int32_t count = features / parts, job = warp * (32 / lanes) + lane_id() / lanes,
                       token = job / (2 * parts);
    const bool there = token < tokens, query = job / parts % 2 != 0, second = parts == 2 && job % 2 != 0;
    if (warp * (32 / lanes) / (2 * parts) >= tokens) {
        return;
    }
    const int lane = lane_id() % lanes;
    const float* const from = y + (there ? token : 0) * rows.count() + (query ? rows.queries() : 0) + lane;
    float* const to = (query ? q : k) + (there ? token : 0) * padded + (second ? count : 0) + lane;
    const std::int32_t mine = (count - lane + lanes - 1) / lanes;
    const float sign = second ? -1.0f : 1.0f;
    float largest = -INFINITY;
#pragma unroll 1
    for (std::int32_t first = 0; first < mine; first += each) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (first + i < mine) {
                largest = fmaxf(largest, sign * from[(first + i) * lanes]);
            }
        }
    }
    largest = over_eight(largest, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0.0f;
#pragma unroll 1
    for (std::int32_t first = 0; first < mine; first += each) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (first + i < mine) {
                const float weight = expf(sign * from[(first + i) * lanes] - largest);
                sum += weight;
                if (there) {
                    to[(first + i) * lanes] = weight;
                }
            }
        }
    }
    sum = over_eight(sum, [](float a, float b) { return a + b; });
    const float scale = 1.0f / sum;
#pragma unroll 1
    for (std::int32_t first = 0; first < mine && there; first += each) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (first + i < mine) {
                to[(first + i) * lanes] *= scale;
            }
        }
    }
}

/// Gates of one token, by a pair of lanes, the first with the input gate: what it writes and what it leaves of the state, and the stabiliser
/// after it, two numbers. All lanes of a warp.
struct mlstm_gates {
    float first = 0.0f, second = 0.0f;  // the stabiliser

    /// `gate`: this lane's projection, its bias included. Returns the factor: of what is written, or of what was there.
    __device__ float take(float gate, float cap, bool counts) {
        const bool input = lane_id() % 2 == 0;
        if (cap > 0.0f) {
            gate = cap * tanhf(gate / cap);
        }
        // Sums with the stabiliser in double: log f near 0 must survive being added to a large one.
        double logarithm = gate;
        if (!input) {
            constexpr auto least = static_cast<float>(mLSTMScorer<>::least_log_forget);
            const float log_forget = gate < 0.0f ? gate - log1pf(expf(gate)) : -log1pf(expf(-gate)),
                        of_forget = log_forget < least ? least : log_forget;  // a NaN stays one
            logarithm =
                static_cast<double>(of_forget) + (static_cast<double>(first) + static_cast<double>(second));
        }
        const double other = __shfl_xor_sync(all_lanes, logarithm, 1);
        const double of_input = input ? logarithm : other, of_forget = input ? other : logarithm;
        const double m = of_forget > of_input ? of_forget : of_input;
        if (counts) {
            first = static_cast<float>(m);
            second = isfinite(m) ? static_cast<float>(m - static_cast<double>(first)) : 0.0f;
        }
        return expf(static_cast<float>(logarithm - m));
    }
};

/// What fold_rows rows write, and how a query looks at them, from shared memory.
struct fold_factors {
    float at[fold_rows];
    __device__ explicit fold_factors(const float* from) {
        const float4 a = reinterpret_cast<const float4*>(from)[0],
                     b = reinterpret_cast<const float4*>(from)[1];
        at[0] = a.x, at[1] = a.y, at[2] = a.z, at[3] = a.w;
        at[4] = b.x, at[5] = b.y, at[6] = b.z, at[7] = b.w;
    }
};
/// Two columns of a fold of a state: what a thread holds.
struct state_piece {
    float2 c[fold_rows];

    /// `rows`: those that there are.
    __device__ void load(const float* from, std::int32_t width, std::int32_t rows) {
#pragma unroll
        for (int r = 0; r < fold_rows; ++r) {
            c[r] = r < rows ? *reinterpret_cast<const float2*>(from + r * width) : float2{};
        }
    }
    __device__ void store(float* to, std::int32_t width, std::int32_t rows) const {
#pragma unroll
        for (int r = 0; r < fold_rows; ++r) {
            if (r < rows) {
                *reinterpret_cast<float2*>(to + r * width) = c[r];
            }
        }
    }
    /// Takes in a token: its features k and value, and what the leaving key's features q find.
    __device__ float2 take(float write, float forget, const float* k, const float* q, float2 value) {
        const fold_factors of_k(k), of_q(q);
        float2 sum{};
#pragma unroll
        for (int r = 0; r < fold_rows; ++r) {
            const float written = __fmul_rn(write, of_k.at[r]);
            c[r].x = fmaf(forget, c[r].x, __fmul_rn(written, value.x));
            c[r].y = fmaf(forget, c[r].y, __fmul_rn(written, value.y));
            sum.x = fmaf(of_q.at[r], c[r].x, sum.x);
            sum.y = fmaf(of_q.at[r], c[r].y, sum.y);
        }
        return sum;
    }
};
/// A sum over the lanes of a fold.
__device__ inline float fold_total(float x) {
    static_assert(fold_rows == 8);
    return over_eight(x, [](float a, float b) { return a + b; });
}

/// The score of a token whose memory was read: h, [folds, width], and divisors, [folds], are sums over fold_rows rows each. By a warp; `skip`
/// counts in lane 0. readout and gain: [width].
template <class Weights>
__device__ float read_out(const float* h, const float* divisors, std::int32_t folds, std::int32_t width,
                          const float* readout, const float* gain, const Weights& weights, std::int64_t head,
                          float least, float epsilon) {
    float divisor = 0.0f;
#pragma unroll 4
    for (std::int32_t i = 0; i < folds; ++i) {
        divisor += divisors[i];
    }
    const float scale = 1.0f / (divisor < least ? least : divisor);
    constexpr int turns = most_mlstm_width / 32;
    float read[turns];
    float squares = 0.0f;
#pragma unroll
    for (int t = 0; t < turns; ++t) {
        const std::int32_t e = 32 * t + lane_id();
        read[t] = 0.0f;
        if (e < width) {
#pragma unroll 4
            for (std::int32_t i = 0; i < folds; ++i) {
                read[t] += h[i * width + e];
            }
            read[t] *= scale;
        }
        squares = fmaf(read[t], read[t], squares);
    }
    squares = warp_total(squares) / static_cast<float>(width);
    const float norm = weights.norm_gain != nullptr ? 1.0f / sqrtf(squares + epsilon) : 1.0f;
    float score = 0.0f;
#pragma unroll
    for (int t = 0; t < turns; ++t) {
        const std::int32_t e = 32 * t + lane_id();
        if (e < width) {
            score = fmaf(readout[e], silu(read[t] * norm * gain[e]), score);
        }
    }
    score = warp_total(score);
    return score + (weights.readout_bias != nullptr ? weights.readout_bias[head] : 0.0f);
}

/// Four elements of a row, whose first is a multiple of 4. Those of 16 bits stay as they are until they are needed, so that nobody waits
/// for them where they are asked for.
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

/// The numbers of an entry's token and of its leaving key, by the lanes of a warp.
template <class T>
struct token_rows {
    static constexpr int turns = most_mlstm_inputs / 128;
    four_elements<T> newcomer[turns], leaving[turns];

    /// from[leaving][of value]
    __device__ void load(const T* const (&from)[2][2], std::int32_t dim_k, std::int32_t inputs) {
#pragma unroll
        for (int t = 0; t < turns; ++t) {
            const std::int32_t column = 128 * t + 4 * lane_id();
            const int of_value = column >= dim_k ? 1 : 0;
            const std::int32_t at = column - of_value * dim_k;
            if (column < inputs && from[0][of_value] != nullptr) {
                newcomer[t].load(from[0][of_value] + at);
            }
            if (column < inputs && from[1][of_value] != nullptr) {
                leaving[t].load(from[1][of_value] + at);
            }
        }
    }
    __device__ void store(float* to, float* to_leaving, std::int32_t inputs) const {
#pragma unroll
        for (int t = 0; t < turns; ++t) {
            const std::int32_t column = 128 * t + 4 * lane_id();
            if (column < inputs) {
                *reinterpret_cast<float4*>(to + column) = newcomer[t].numbers();
                *reinterpret_cast<float4*>(to_leaving + column) = leaving[t].numbers();
            }
        }
    }
};

/// Asks the L2 cache for what token_entry reads of `count` entries, which need not be what it will be then. By a warp.
template <class View>
__device__ void ask_for_entries(const View& cache, const Batch& batch, std::int32_t head, std::int32_t first,
                                std::int32_t count) {
    if (lane_id() == 0) {
        ask_for_line(cache.rules + head);
        ask_for_line(cache.length);
        if constexpr (requires { cache.row_offset; }) {
            ask_for_line(cache.row_offset + head);
        }
    } else if (batch.slots == nullptr && lane_id() <= count && first + lane_id() <= batch.count) {
        ask_for_line(cache.taken + (first + lane_id() - 1) * std::int64_t{cache.kv_heads});
    }
}

/// What there is to know of an entry, all of it asked for at once, since it comes from afar.
template <class View>
struct token_entry {
    active_entry active;
    position_t base;  // the slot's length
    typename View::head_type rows;

    __device__ token_entry(const View& cache, const Batch& batch, std::int32_t entry, std::int32_t most,
                           std::int32_t head)
        : active(cache, batch, entry, most), base(cache.length[active.slot]), rows(cache, active.slot, head) {
        active = active.once(cache);
    }
};

/// Where token j of an entry is, or the key that leaves when it comes: the key's numbers, or the value's. Null where there is none.
template <class Head, class Tokens>
__device__ auto token_source(const Head& rows, const Tokens& tokens, std::int32_t entry, std::int32_t head,
                             position_t base, std::int32_t j, bool leaving, bool of_value)
    -> decltype(tokens.key(rows, entry, head, j)) {
    std::int32_t of_chunk = j;
    if (leaving) {
        const position_t u = base + j - rows.rule.window;
        if (u < rows.rule.sinks) {
            return nullptr;
        }
        if (u < base) {
            const std::int32_t row = rows.layout.recent(u);
            return of_value ? rows.value(row) : rows.key(row);
        }
        of_chunk = static_cast<std::int32_t>(u - base);
    }
    return of_value ? tokens.value(rows, entry, head, of_chunk) : tokens.key(rows, entry, head, of_chunk);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
