// Metrics of masks: one block per plane, in one pass over its keys or queries.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/kernel_write_head_params.cuh>
#include <kvpolicy/metrics/gates.hpp>
#include <kvpolicy/metrics/recall.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int metric_threads = 512;
inline constexpr int metric_warps = metric_threads / 32;

/// A length from device memory; what cannot be counts as 0.
__device__ inline std::int32_t metric_length(const Sequences& sequences, std::int32_t b) {
    const std::int32_t length = sequences.length_of(b);
    return length < 0 || length > sequences.length ? 0 : length;
}

/// The block's sum, in thread 0, in an order that is always the same. `memory` has metric_warps numbers.
template <class T>
__device__ inline T sum_of_block(T value, T* memory) {
    for (int step = 16; step > 0; step /= 2) {
        value += __shfl_down_sync(all_lanes, value, static_cast<unsigned>(step));
    }
    if (lane_id() == 0) {
        memory[warp_id()] = value;
    }
    __syncthreads();
    T sum = memory[0];
    for (int w = 1; w < metric_warps; ++w) {
        sum += memory[w];
    }
    __syncthreads();
    return sum;
}

/// Sums of a whole block over successive tiles: what is before this thread's number, itself included.
struct running_sum {
    int so_far = 0;

    /// `memory` has metric_warps numbers. Every thread calls it once per tile.
    __device__ int through(int value, int* memory) {
        const int inclusive = warp_inclusive_sum(value);
        if (lane_id() == 31) {
            memory[warp_id()] = inclusive;
        }
        __syncthreads();
        const block_sum sums = sum_of_warps<metric_warps>(memory);
        __syncthreads();
        const int result = so_far + sums.before + inclusive;
        so_far += sums.total;
        return result;
    }
};

/// live[q] = how many keys query q sees.
///
/// Grid: B * H planes. Block: metric_threads. Shared memory: one number per warp (static). Reads expiry [B,
/// H, S]. Overwrites live [B, H, S], int32.
/// 1. +1 where a key becomes visible.
/// 2. -1 where it expires.
/// 3. Prefix sums.
template <class Expiry>
__global__ void __launch_bounds__(metric_threads)
    live_keys_kernel(const plane_view<const Expiry> expiry, const Sequences sequences,
                     const plane_view<std::int32_t> live) {
    __shared__ int memory[metric_warps];
    const auto b = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(expiry.heads));
    const auto h = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(expiry.heads));
    const std::int32_t length = metric_length(sequences, b);
    const Expiry* const e = expiry.head(b, h);
    std::int32_t* const out = live.head(b, h);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    // 1. Where a key becomes visible.
    for (std::int32_t t = thread; t < length; t += metric_threads) {
        out[t] = e[t] > t ? 1 : 0;  // a key with expiry <= t is not visible to any query
    }
    __syncthreads();
    // 2. Where it expires.
    for (std::int32_t t = thread; t < length; t += metric_threads) {
        if (e[t] > t && e[t] < length) {
            atomicAdd(out + e[t], -1);
        }
    }
    __syncthreads();
    // 3. Prefix sums.
    running_sum sum;
    for (std::int32_t first = 0; first < length; first += metric_threads) {
        const std::int32_t q = first + thread;
        const int now = sum.through(q < length ? out[q] : 0, memory);
        if (q < length) {
            out[q] = now;
        }
    }
}

/// out = visible pairs over causal pairs of a plane; 0 for an empty sequence.
///
/// Grid: B * H planes. Block: metric_threads. Shared memory: one number per warp (static). Reads expiry [B,
/// H, S]. Overwrites out [B, H], double.
template <class Expiry>
__global__ void __launch_bounds__(metric_threads)
    density_kernel(const plane_view<const Expiry> expiry, const Sequences sequences, double* const out) {
    __shared__ long long memory[metric_warps];
    const auto b = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(expiry.heads));
    const auto h = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(expiry.heads));
    const std::int32_t length = metric_length(sequences, b);
    const Expiry* const e = expiry.head(b, h);
    long long pairs = 0;
    for (auto t = static_cast<std::int32_t>(threadIdx.x); t < length; t += metric_threads) {
        const std::int32_t end = e[t] < length ? e[t] : length;
        pairs += end > t ? end - t : 0;
    }
    pairs = sum_of_block(pairs, memory);
    if (threadIdx.x == 0) {
        const double causal =
            static_cast<double>(length) * static_cast<double>(length + std::int64_t{1}) / 2.0;
        out[blockIdx.x] = length == 0 ? 0.0 : static_cast<double>(pairs) / causal;
    }
}

/// out = the share of (query, eligible key) pairs that are evicted, sinks and window aside.
///
/// Grid: B * batch.count, head batch.first + i of sequence b. Block: metric_threads. Shared memory: two
/// numbers per warp (static). Reads expiry [B, H, S]. Overwrites out [B, H], double.
template <class Expiry>
__global__ void __launch_bounds__(metric_threads)
    evict_ratio_kernel(const plane_view<const Expiry> expiry, const Sequences sequences,
                       const head_params_batch batch, double* const out) {
    __shared__ long long memory[2][metric_warps];
    const auto b = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(batch.count));
    const auto i = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(batch.count));
    const std::int32_t length = metric_length(sequences, b);
    const HeadParams head_params = batch.all_params[i];
    const Expiry* const e = expiry.head(b, batch.first + i);
    long long pairs = 0;
    long long gone = 0;
    for (std::int64_t t = std::int64_t{head_params.sinks} + threadIdx.x; t + head_params.window < length;
         t += metric_threads) {
        const auto eligible = static_cast<std::int32_t>(t + head_params.window);
        const std::int32_t end = e[t] < eligible ? eligible : e[t] < length ? e[t] : length;
        pairs += length - eligible;
        gone += length - end;
    }
    pairs = sum_of_block(pairs, memory[0]);
    gone = sum_of_block(gone, memory[1]);
    if (threadIdx.x == 0) {
        out[std::int64_t{b} * expiry.heads + batch.first + i] =
            pairs == 0 ? 0.0 : static_cast<double>(gone) / static_cast<double>(pairs);
    }
}

/// Which head a block of these kernels has, and its sequence.
struct metric_head {
    std::int32_t b, h;
    const HeadParams& head_params;
    std::int64_t plane, length;

    __device__ metric_head(const head_params_batch& batch, const Sequences& sequences, std::int32_t heads)
        : b(static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(batch.count))),
          h(batch.first + static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(batch.count))),
          head_params(batch.all_params[h - batch.first]),
          plane(std::int64_t{b} * heads + h),
          length(metric_length(sequences, b)) {}
};

/// out = the share of keys whose gate is open; 0 for an empty sequence.
///
/// Grid: B * batch.count, head batch.first + i of sequence b. Block: metric_threads. Shared memory: one
/// number per warp (static). Reads scores [B, H, S], fp32. Overwrites out [B, H], double. Reports
/// status_nan_score.
template <class Gate>
__global__ void __launch_bounds__(metric_threads)
    open_gates_kernel(const plane_view<const float> scores, const Sequences sequences,
                      const head_params_batch batch, const Gate gate, std::uint32_t* const status,
                      double* const out) {
    __shared__ long long memory[metric_warps];
    const metric_head of(batch, sequences, scores.heads);
    const float* const row = scores.head(of.b, of.h);
    long long open = 0;
    for (std::int64_t t = threadIdx.x; t < of.length; t += metric_threads) {
        if (row[t] != row[t] && status != nullptr) {
            atomicOr(status + of.b, std::uint32_t{status_nan_score});
        }
        open += gate.open(row[t], of.head_params) ? 1 : 0;
    }
    open = sum_of_block(open, memory);
    if (threadIdx.x == 0) {
        out[of.plane] = of.length == 0 ? 0.0 : static_cast<double>(open) / static_cast<double>(of.length);
    }
}

/// out = the reference's long-range keys, and how many of them the other mask has.
///
/// Grid: B * batch.count, head batch.first + i of sequence b. Block: metric_threads. Shared memory: two
/// numbers per warp (static). Reads reference and other [B, H, S]. Overwrites out [B, H].
template <class Expiry>
__global__ void __launch_bounds__(metric_threads)
    coverage_kernel(const plane_view<const Expiry> reference, const plane_view<const Expiry> other,
                    const Sequences sequences, const head_params_batch batch, Coverage* const out) {
    __shared__ long long memory[2][metric_warps];
    const metric_head of(batch, sequences, reference.heads);
    const Expiry *const mine = reference.head(of.b, of.h), *const theirs = other.head(of.b, of.h);
    long long keys = 0, covered = 0;
    for (std::int64_t t = std::int64_t{of.head_params.sinks} + threadIdx.x;
         t + of.head_params.window < of.length; t += metric_threads) {
        const std::int64_t eligible = t + of.head_params.window;
        keys += mine[t] > eligible ? 1 : 0;
        covered += mine[t] > eligible && theirs[t] > eligible ? 1 : 0;
    }
    keys = sum_of_block(keys, memory[0]);
    covered = sum_of_block(covered, memory[1]);
    if (threadIdx.x == 0) {
        out[of.plane] = Coverage{keys, covered};
    }
}

/// Means over `queries` queries, and `last`: recall and chance of the last one.
__device__ __forceinline__ Recall recall_of(double recall_sum, double chance_sum, const double* last,
                                            std::int64_t queries) {
    Recall result;
    result.last = last[0];
    result.chance_last = last[1];
    result.queries = queries;
    if (queries > 0) {
        result.mean = recall_sum / static_cast<double>(queries);
        result.chance_mean = chance_sum / static_cast<double>(queries);
    }
    return result;
}

/// One more live key at the queries [from, to), as differences.
__device__ __forceinline__ void add_interval(std::int32_t* live, std::int64_t from, std::int64_t to,
                                             std::int64_t length) {
    if (from >= (to < length ? to : length)) {
        return;
    }
    atomicAdd(live + from, 1);
    if (to < length) {
        atomicAdd(live + to, -1);
    }
}

/// Recall of the student's long-range keys against the teacher's, and what chance would give: means, and the
/// last query's.
///
/// Grid: B * batch.count, head batch.first + i of sequence b. Block: metric_threads. Shared memory: two
/// numbers per warp (static). Reads teacher and student [B, H, S]. Overwrites out [B, H] and counts [B, H, 3,
/// S], int32 workspace.
/// 1. Clear.
/// 2. Differences of the live counts of both, of the teacher and of the student.
/// 3. Prefix sums, and one recall per query.
/// 4. Means.
template <class Expiry>
__global__ void __launch_bounds__(metric_threads)
    oracle_recall_kernel(const plane_view<const Expiry> teacher, const plane_view<const Expiry> student,
                         const Sequences sequences, const head_params_batch batch, Recall* const out,
                         std::int32_t* const counts) {
    __shared__ int memory[metric_warps];
    __shared__ double sums[metric_warps];
    __shared__ double last[2];  // recall and chance of the last query
    const auto b = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(batch.count));
    const auto i = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(batch.count));
    const std::int64_t plane = std::int64_t{b} * teacher.heads + batch.first + i;
    const std::int64_t length = metric_length(sequences, b);
    const HeadParams head_params = batch.all_params[i];
    const Expiry* const of_teacher = teacher.head(b, batch.first + i);
    const Expiry* const of_student = student.head(b, batch.first + i);
    std::int32_t* const both = counts + plane * 3 * sequences.length;
    std::int32_t* const kept = both + length;   // by the teacher
    std::int32_t* const tried = kept + length;  // by the student
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    // 1. Clear.
    for (std::int64_t q = thread; q < 3 * length; q += metric_threads) {
        both[q] = 0;
    }
    if (thread == 0) {
        last[0] = 1.0;
        last[1] = 1.0;
    }
    __syncthreads();
    // 2. Differences of live counts.
    for (std::int64_t t = std::int64_t{head_params.sinks} + thread; t + head_params.window < length;
         t += metric_threads) {
        const std::int64_t from = t + head_params.window;
        add_interval(both, from, of_teacher[t] < of_student[t] ? of_teacher[t] : of_student[t], length);
        add_interval(kept, from, of_teacher[t], length);
        add_interval(tried, from, of_student[t], length);
    }
    __syncthreads();
    const std::int64_t first = std::int64_t{head_params.sinks} + head_params.window + head_params.budget;
    // 3. Prefix sums, and the recall of each query.
    running_sum in_both;
    running_sum in_kept;
    running_sum in_tried;
    double recall_sum = 0.0;
    double chance_sum = 0.0;
    for (std::int64_t base = 0; base < length; base += metric_threads) {
        const std::int64_t q = base + thread;
        const bool inside = q < length;
        const int now_both = in_both.through(inside ? both[q] : 0, memory);
        const int now_kept = in_kept.through(inside ? kept[q] : 0, memory);
        const int now_tried = in_tried.through(inside ? tried[q] : 0, memory);
        if (!inside) {
            continue;  // and so has every later tile of this thread, if there were one
        }
        const std::int64_t eligible = q - head_params.window + 1 - head_params.sinks > 0
                                          ? q - head_params.window + 1 - head_params.sinks
                                          : 0;
        const double recall =
            now_kept == 0 ? 1.0 : static_cast<double>(now_both) / static_cast<double>(now_kept);
        const double chance =
            eligible == 0 ? 1.0 : static_cast<double>(now_tried) / static_cast<double>(eligible);
        if (q >= first) {
            recall_sum += recall;
            chance_sum += chance;
        }
        if (q == length - 1) {
            last[0] = recall;
            last[1] = chance;
        }
    }
    // 4. Means.
    recall_sum = sum_of_block(recall_sum, sums);
    chance_sum = sum_of_block(chance_sum, sums);
    if (thread == 0) {
        out[plane] = recall_of(recall_sum, chance_sum, last, length > first ? length - first : 0);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
