// An mLSTM's gates of a chunk, from keys and values: the products with their weights, their logarithms, and
// the numbers of the chunk (mlstm_chunk_stats).
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Numbers of gates' weights in shared memory stand so that what the two threads of a row read lies in
/// different banks.
KVPOLICY_HOST_DEVICE constexpr std::int32_t gate_weight(std::int32_t c) { return c + c / 32 * 4; }

/// Sums of two arrays' products with an input, two threads (neighbors) per row of a tile; both get them.
/// `finite` is 0 or NaN.
template <class T>
__device__ inline void row_products(const shared_tile<T>& x, int row, int part, const float* weights,
                                    std::int32_t padded, float& first, float& second, float& finite) {
    first = 0.0f;
    second = 0.0f;
    finite = 0.0f;
    const float* const others = weights + gate_weight(padded);
    for (std::int32_t c = 32 * part; c < padded; c += 64) {
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
            float of[8];
            x.get_eight(row, c + i, of);
#pragma unroll
            for (int h = 0; h < 8; h += 4) {
                const std::int32_t at = gate_weight(c) + i + h;
                const float4 a = *reinterpret_cast<const float4*>(weights + at);
                first += of[h] * a.x + of[h + 1] * a.y + of[h + 2] * a.z + of[h + 3] * a.w;
                const float4 b = *reinterpret_cast<const float4*>(others + at);
                second += of[h] * b.x + of[h + 1] * b.y + of[h + 2] * b.z + of[h + 3] * b.w;
                finite += of[h] * 0.0f + of[h + 1] * 0.0f + of[h + 2] * 0.0f + of[h + 3] * 0.0f;
            }
        }
    }
    first += __shfl_xor_sync(all_lanes, first, 1);
    second += __shfl_xor_sync(all_lanes, second, 1);
    finite += __shfl_xor_sync(all_lanes, finite, 1);
}

/// What the parts of a weight that is split are multiplied by: as many bits as T has.
template <class T>
inline constexpr float split_scale = std::is_same_v<T, bf16> ? 256.0f : 2048.0f;

/// Rows of a matrix whose products with an input, by tensor cores, are exact to fp32: two weights in three
/// parts each, high and middle of the first, of the second, then low of both, and twice 0, whose sum is NaN
/// where an input is not finite. Column c.
template <class T>
__device__ inline void split_weights(T* to, std::int32_t pitch, std::int32_t c, float first, float second) {
    constexpr float scale = split_scale<T>;
    const float weights[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const T high = static_cast<T>(weights[i]);
        // Nothing of a weight that is infinite is left, and inf - inf would make a NaN of its gate.
        const float rest =
            fabsf(weights[i]) <= 3.402823466e38f ? (weights[i] - static_cast<float>(high)) * scale : 0.0f;
        const T middle = static_cast<T>(rest);
        to[2 * i * pitch + c] = high;
        to[(2 * i + 1) * pitch + c] = middle;
        to[(4 + i) * pitch + c] = static_cast<T>((rest - static_cast<float>(middle)) * scale);
        to[(6 + i) * pitch + c] = static_cast<T>(0.0f);
    }
}
/// Products of 16 rows of a tile from `row` on with both weights: lane i has those of rows row + i / 4 and 8
/// further.
template <class T>
__device__ inline void split_products(const shared_tile<T>& x, int row, const T* split, std::int32_t padded,
                                      float (&first)[2], float (&second)[2], float (&finite)[2]) {
    const int lane = lane_id();
    const std::uint32_t rows = shared_address(x.data);
    const T* const own = split + lane / 4 * (padded + 8) + lane % 4 * 2;
    float acc[4] = {};
    for (std::int32_t k = 0; k < padded; k += 16) {
        std::uint32_t a[4];
        load_matrices(a, rows + swizzled(x.rows, row + lane % 16, k / 8 + lane / 16));
        mma_16x8x16<T>(acc, a, *reinterpret_cast<const std::uint32_t*>(own + k),
                       *reinterpret_cast<const std::uint32_t*>(own + k + 8));
    }
    constexpr float by = 1.0f / split_scale<T>;
    const int quad = lane & ~3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float upper = acc[2 * r] + acc[2 * r + 1] * by;
        first[r] =
            __shfl_sync(all_lanes, upper, quad) + __shfl_sync(all_lanes, acc[2 * r], quad + 2) * (by * by);
        second[r] = __shfl_sync(all_lanes, upper, quad + 1) +
                    __shfl_sync(all_lanes, acc[2 * r + 1], quad + 2) * (by * by);
        finite[r] = __shfl_sync(all_lanes, acc[2 * r], quad + 3);
    }
}

/// A token's gates from its weights' products with the input: logarithms into shared memory, slopes where a
/// backward pass wants them. A row that is not finite is marked, and counts as a token with open gates; in a
/// cache's chunk as one that writes nothing and leaves what was there (bad_token::drop).
template <class T>
__device__ inline void compute_gates(const mlstm_params<T>& params, const scorer_span& s, int r, float input,
                                     float forget, bool good, double& log_input, double& log_forget) {
    log_input = -INFINITY;
    log_forget = 0.0;
    const std::int64_t row = s.row(params.streams.chunks) + r;
    if (r < s.count && good) {
        input += params.b_i != nullptr ? params.b_i[s.h] : 0.0f;
        forget += params.b_f != nullptr ? params.b_f[s.h] : 0.0f;
        float slope_i = 1.0f, slope_f = 1.0f;
        if (params.gate_softcap > 0.0f) {
            const float of_input = tanhf(input / params.gate_softcap);
            const float of_forget = tanhf(forget / params.gate_softcap);
            slope_i = 1.0f - of_input * of_input;
            slope_f = 1.0f - of_forget * of_forget;
            input = params.gate_softcap * of_input;
            forget = params.gate_softcap * of_forget;
        }
        const float e = expf(-fabsf(forget));
        log_input = static_cast<double>(input);
        const float of_forget = (forget < 0.0f ? forget : 0.0f) - log1pf(e);
        constexpr auto least = static_cast<float>(mLSTMScorer<>::least_log_forget);
        log_forget = static_cast<double>(of_forget < least ? least : of_forget);
        if (params.slope_i != nullptr) {
            params.slope_i[row] = slope_i;
            params.slope_f[row] = slope_f * ((forget < 0.0f ? 1.0f : e) / (1.0f + e));  // 1 - sigmoid
        }
    } else if (r < s.count && params.cached_states != nullptr) {
        log_input = -1e30;  // below all others, and finite: a chunk may have no others
    } else if (r < s.count) {
        log_input = 0.0;
        if (params.slope_i != nullptr) {
            params.slope_i[row] = NAN;
            params.slope_f[row] = NAN;
        }
    }
}

/// s_j, top_l and the numbers of the chunk (mlstm_chunk_stats) from its gates, by one warp; each lane has two
/// tokens.
template <class T>
__device__ inline void scan_gates(const mlstm_params<T>& params, const scorer_span& s,
                                  const double* log_input, const double* log_forget,
                                  const std::int32_t* bad) {
    const int lane = lane_id(), at = 2 * lane;
    const double first = log_forget[at];
    double sum = first + log_forget[at + 1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(all_lanes, sum, static_cast<unsigned>(step));
        sum += lane >= step ? other : 0.0;
    }
    const double before = sum - log_forget[at + 1];  // b of the first of the two
    const double source[2] = {log_input[at] - before, log_input[at + 1] - sum};
    double most = source[0] > source[1] ? source[0] : source[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(all_lanes, most, static_cast<unsigned>(step));
        most = lane >= step && other > most ? other : most;
    }
    const double earlier = __shfl_up_sync(all_lanes, most, 1u);
    const double first_top = lane > 0 && earlier > source[0] ? earlier : source[0];
    const double top = __shfl_sync(all_lanes, most, 31);
    const std::int64_t row = s.row(params.streams.chunks) + at;
    float weights = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        params.log_source[row + i] = source[i];
        params.log_top[row + i] = i == 0 ? first_top : most;
        const float weight = expf(static_cast<float>(source[i] - top));
        params.weight[row + i] = weight;
        weights += weight;
    }
    weights = warp_sum(weights);
    const unsigned even = __ballot_sync(all_lanes, bad[at]);
    const unsigned odd = __ballot_sync(all_lanes, bad[at + 1]);
    const unsigned tops = __ballot_sync(all_lanes, source[0] == top || source[1] == top ? 1 : 0);
    const int lane_of_top = tops != 0u ? __ffs(static_cast<int>(tops)) - 1 : 0;
    const int second = __shfl_sync(all_lanes, source[0] == top ? 0 : 1, lane_of_top);
    const double forgotten = __shfl_sync(all_lanes, sum, 31);
    if (lane == 0) {
        const int first_even = even != 0u ? 2 * (__ffs(static_cast<int>(even)) - 1) : scorer_chunk;
        const int first_odd = odd != 0u ? 2 * (__ffs(static_cast<int>(odd)) - 1) + 1 : scorer_chunk;
        mlstm_chunk_stats stats{};
        stats.top = top;
        stats.forgotten = forgotten;
        stats.weights = weights;
        stats.ref_token = 2 * lane_of_top + second;
        stats.bad = params.cached_states != nullptr ? scorer_chunk
                    : first_even < first_odd        ? first_even
                                                    : first_odd;
        params.chunk_stats[params.chunk(s)] = stats;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
