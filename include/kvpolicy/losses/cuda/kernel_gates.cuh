// Losses of gates: a thread per key, as in log_bias.cuh, and each block's share of a sum in workspace, added
// up in one order.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/sigmoid.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/primitives/block_reduce.cuh>
#include <kvpolicy/losses/dms.hpp>
#include <kvpolicy/losses/gates.hpp>
#include <kvpolicy/masks/cuda/kernel_log_bias.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int gate_sum_threads = 512;

/// The score of a thread's key; NaN is reported.
template <class Gate, class Keep>
__device__ __forceinline__ float read_score(const mask_params<Gate, Keep>& params, const gated_key& key) {
    const float score = params.scores.head(key.b, key.h)[key.t];
    if (score != score) {
        params.report(key.b, status_nan_score);
    }
    return score;
}

/// shares[block] = threads of the block whose key counts; lengths are checked on the way.
template <class Gate, class Keep>
__device__ __forceinline__ void write_share(const mask_params<Gate, Keep>& params, const gated_key& key,
                                            bool counts, long long* shares) {
    __shared__ long long shared[mask_chunk / 32];
    if (blockIdx.x < static_cast<unsigned>(params.planes()) && threadIdx.x == 0 && key.h == 0) {
        params.check_length(key.b);
    }
    const long long sum = sum_over_block<mask_chunk>(counts ? 1ll : 0ll, shared);
    if (threadIdx.x == 0) {
        shares[blockIdx.x] = sum;
    }
}

/// shares[block] = keys of the block that the loss is about.
///
/// Grid: planes * chunks. Block: mask_chunk threads, a key each. Shared memory: one number per warp (static).
/// Reads scores [B, Hkv, S], fp32. Overwrites shares [grid], int64. Reports status_bad_length and
/// status_nan_score.
template <class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    gate_count_kernel(const mask_params<Gate, Keep> params, const bool all, long long* const shares) {
    const gated_key key = key_of_thread(params);
    const bool counts = key.inside && (all || key.decided);
    if (counts) {
        static_cast<void>(read_score(params, key));
    }
    write_share(params, key, counts, shares);
}

/// shares[block] = keys of the block that are retained: by a score above 0, or by their position. Without
/// `all`, only keys out of the window before the end.
///
/// Grid: planes * chunks. Block: mask_chunk threads, a key each. Shared memory: one number per warp (static).
/// Reads scores [B, Hkv, S], fp32. Overwrites shares [grid], int64. Reports status_bad_length and
/// status_nan_score.
template <class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    retained_count_kernel(const mask_params<Gate, Keep> params, const bool all, long long* const shares) {
    const gated_key key = key_of_thread(params);
    bool counts = key.inside && (all || key.outside);
    if (counts && !key.by_position) {
        counts = read_score(params, key) > 0.0f;
    }
    write_share(params, key, counts, shares);
}

/// The sum of `count` shares, in every thread of a block of gate_sum_threads, in one order.
template <class Number>
__device__ __forceinline__ Number sum_of_shares(const Number* shares, std::int64_t count, Number* shared) {
    Number sum = 0;
    for (std::int64_t i = threadIdx.x; i < count; i += gate_sum_threads) {
        sum += shares[i];
    }
    return sum_over_block<gate_sum_threads>(sum, shared);
}

/// *total = the sum of shares, in one order.
///
/// Grid: one block. Block: gate_sum_threads. Shared memory: one number per warp (static). Reads shares
/// [count]. Overwrites *total.
template <class Number>
__global__ void __launch_bounds__(gate_sum_threads)
    gate_total_kernel(const Number* const shares, const std::int64_t count, Number* const total) {
    __shared__ Number shared[gate_sum_threads / 32];
    const Number sum = sum_of_shares(shares, count, shared);
    if (threadIdx.x == 0) {
        *total = sum;
    }
}

/// d_scores of a gate's loss, and values[block] = the block's part of the sum over keys.
///
/// Grid: planes * chunks. Block: mask_chunk threads, a key each. Shared memory: one number per warp (static).
/// Reads scores [B, Hkv, S] in fp32 and *count. Overwrites d_scores [B, Hkv, S] in fp32, values [grid] in
/// double.
template <class L, class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    gate_loss_kernel(const mask_params<Gate, Keep> params, const L loss, const long long* const count,
                     const plane_view<float> d_scores, double* const values) {
    __shared__ double shared[mask_chunk / 32];
    const gated_key key = key_of_thread(params);
    GateTerm one{0.0, 0.0};
    if (key.inside) {
        const float score = params.scores.head(key.b, key.h)[key.t];
        if ((loss.scope == gate_scope::all || key.decided) && score == score) {
            one = loss.term(static_cast<double>(loss.scale), key.h, static_cast<double>(score));
        }
        const double over = decltype(loss.term)::mean_over_keys ? static_cast<double>(*count) : params.batch;
        d_scores.head(key.b, key.h)[key.t] = *count == 0 ? 0.0f : static_cast<float>(one.slope / over);
    }
    const double sum = sum_over_block<mask_chunk>(one.value, shared);
    if (threadIdx.x == 0) {
        values[blockIdx.x] = sum;
    }
}

/// *value = the sum of the blocks' parts over the keys or over `over`.
///
/// Grid: one block. Block: gate_sum_threads. Shared memory: one number per warp (static). Reads values
/// [blocks] and *count. Overwrites *value.
template <class Value>
__global__ void __launch_bounds__(gate_sum_threads)
    gate_value_kernel(const double* const values, const std::int64_t blocks, const long long* const count,
                      const double over, Value* const value) {
    __shared__ double shared[gate_sum_threads / 32];
    const double sum = sum_of_shares(values, blocks, shared);
    if (threadIdx.x == 0) {
        const auto keys = static_cast<double>(*count);
        value->value = *count == 0 ? 0.0 : sum / (over > 0.0 ? over : keys);
        value->count = *count;
    }
}

/// evicted[block] = the sum of the block's decisions to evict. Their number comes from gate_count_kernel.
///
/// Grid: planes * chunks. Block: mask_chunk threads, a key each. Shared memory: one number per warp (static).
/// Reads scores [B, Hkv, S] in fp32. Overwrites evicted [grid] in double.
template <class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    decisions_kernel(const mask_params<Gate, Keep> params, const CompressionLoss loss,
                     double* const evicted) {
    __shared__ double shared[mask_chunk / 32];
    const gated_key key = key_of_thread(params);
    double alpha = 0.0;
    if (key.inside && (loss.scope == gate_scope::all || key.decided)) {
        const float score = params.scores.head(key.b, key.h)[key.t];
        if (score == score) {
            const double x = loss.gate.relaxed(static_cast<double>(score), key.place);
            alpha = !loss.straight_through ? detail::sigmoid(x) : x > 0.0 ? 1.0 : 0.0;
        }
    }
    const double sum = sum_over_block<mask_chunk>(alpha, shared);
    if (threadIdx.x == 0) {
        evicted[blockIdx.x] = sum;
    }
}

/// *sums += the blocks' sums, or = where `add` is not set.
///
/// Grid: one block. Block: gate_sum_threads. Shared memory: one number per warp (static). Reads evicted
/// [blocks] and *count.
template <class Sums>
__global__ void __launch_bounds__(gate_sum_threads)
    decisions_total_kernel(const double* const evicted, const std::int64_t blocks,
                           const long long* const count, const bool add, Sums* const sums) {
    __shared__ double shared[gate_sum_threads / 32];
    const double sum = sum_of_shares(evicted, blocks, shared);
    if (threadIdx.x == 0) {
        sums->evicted = sum + (add ? sums->evicted : 0.0);
        sums->keys = *count + (add ? sums->keys : 0);
    }
}

/// What the decisions of a model lack, of the share that should be evicted; 0 and below: nothing.
__device__ inline double missing_decisions(const CompressionLoss& loss, const EvictionSums& all) {
    return all.keys == 0 ? 0.0
                         : static_cast<double>(loss.target) - all.evicted / static_cast<double>(all.keys);
}

/// d_scores of the compression loss: 0 where the model evicts its target share.
///
/// Grid: planes * chunks. Block: mask_chunk threads, a key each. Shared memory: none. Reads scores [B, Hkv,
/// S] in fp32 and *total. Overwrites d_scores [B, Hkv, S] in fp32.
template <class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    compression_kernel(const mask_params<Gate, Keep> params, const CompressionLoss loss,
                       const EvictionSums* const total, const plane_view<float> d_scores) {
    const gated_key key = key_of_thread(params);
    if (!key.inside) {
        return;
    }
    const EvictionSums all = total == nullptr ? loss.total : *total;
    float slope = 0.0f;
    if ((loss.scope == gate_scope::all || key.decided) && missing_decisions(loss, all) > 0.0) {
        const float score = params.scores.head(key.b, key.h)[key.t];
        if (score == score) {
            const double x = loss.gate.relaxed(static_cast<double>(score), key.place);
            const double over = static_cast<double>(all.keys) * static_cast<double>(loss.gate.temperature);
            slope = static_cast<float>(-static_cast<double>(loss.scale) / over * detail::sigmoid(x) *
                                       detail::sigmoid(-x));
        }
    }
    d_scores.head(key.b, key.h)[key.t] = slope;
}

/// *value from the decisions of all layers.
///
/// Grid: one block. Block: 32. Shared memory: none. Reads *total and *count. Overwrites *value.
template <class Value>
__global__ void __launch_bounds__(32)
    compression_value_kernel(const CompressionLoss loss, const EvictionSums* const total,
                             const long long* const count, Value* const value) {
    if (threadIdx.x == 0) {
        const double missing = missing_decisions(loss, total == nullptr ? loss.total : *total);
        value->value = missing > 0.0 ? static_cast<double>(loss.scale) * missing : 0.0;
        value->count = *count;
    }
}

/// d_scores of gated values (straight-through): <v, d_v> times the derivative of the sigmoid at the score,
/// of every key (`all`) or of those whose gate is asked; 0 for the others.
///
/// Grid: planes * S / 8, a warp per key. Block: 256. Shared memory: none. Reads scores [B, Hkv, S] in fp32, v
/// and d_v [B, Hkv, S, D] in T. Overwrites d_scores [B, Hkv, S] in fp32. Reports bad lengths, NaN scores and
/// infinite sums.
template <class T, class Gate, class Keep>
__global__ void __launch_bounds__(256)
    straight_through_kernel(const mask_params<Gate, Keep> params, const bool all, const rows_view<const T> v,
                            const rows_view<const T> d_v, const plane_view<float> d_scores) {
    const std::int64_t task = std::int64_t{blockIdx.x} * 8 + warp_id();
    const std::int64_t plane = task / params.length;
    if (plane >= params.planes()) {
        return;
    }
    const auto at = static_cast<std::int32_t>(task % params.length);
    const std::int32_t b = params.sequence_of(plane), h = params.head_of(plane);
    if (at == 0 && h == 0 && lane_id() == 0) {
        params.check_length(b);
    }
    if (at >= params.length_of(b)) {
        return;
    }
    const segment_range segment = params.segment(b, params.segment_of_token(at));
    float slope = 0.0f;
    if (all || params.leaves(params.all_params.of(h), at - segment.begin, segment.length())) {
        double sum = 0.0;
        const T* const x = v.row(b, h, at);
        const T* const y = d_v.row(b, h, at);
        for (std::int32_t i = lane_id(); i < v.dim; i += 32) {
            sum +=
                static_cast<double>(static_cast<float>(x[i])) * static_cast<double>(static_cast<float>(y[i]));
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            sum += __shfl_xor_sync(all_lanes, sum, step);
        }
        const float score = params.scores.head(b, h)[at];
        const auto z = static_cast<double>(score);
        slope = static_cast<float>(sum * detail::sigmoid(z) * detail::sigmoid(-z));
        if (lane_id() == 0 && !(fabs(sum) <= 1.7976931348623157e308)) {
            params.report(b, status_not_finite);
        }
        if (score != score) {
            slope = 0.0f;
            if (lane_id() == 0) {
                params.report(b, status_nan_score);
            }
        }
    }
    if (lane_id() == 0) {
        d_scores.head(b, h)[at] = slope;
    }
}

/// counts[h] = the mean over sequences of what retained_count_kernel counted.
///
/// Grid: heads. Block: gate_sum_threads. Shared memory: one number per warp (static). Reads shares
/// [chunks, batch, heads], int64. Overwrites counts [heads].
template <class Number>
__global__ void __launch_bounds__(gate_sum_threads)
    retention_counts_kernel(const long long* const shares, const std::int64_t count, const std::int32_t batch,
                            Number* const counts) {
    __shared__ long long shared[gate_sum_threads / 32];
    long long sum = 0;
    for (std::int64_t i = std::int64_t{threadIdx.x} * gridDim.x + blockIdx.x; i < count;
         i += std::int64_t{gate_sum_threads} * gridDim.x) {
        sum += shares[i];
    }
    sum = sum_over_block<gate_sum_threads>(sum, shared);
    if (threadIdx.x == 0) {
        counts[blockIdx.x] = batch > 0 ? static_cast<Number>(sum) / static_cast<Number>(batch) : Number(0);
    }
}

enum class controller_action : std::uint8_t { start, observe, update };

/// One call of the controller of lambda, per head.
///
/// Grid: heads / 128, a thread per head. Block: 128. Shared memory: none. Reads counts [heads], double, in
/// `observe`. Overwrites the controller's state.
template <class Controller>
__global__ void __launch_bounds__(128)
    controller_kernel(const Controller controller, const controller_action call, const double* const counts) {
    const auto h = static_cast<std::int32_t>(blockIdx.x * 128 + threadIdx.x);
    if (h >= controller.heads) {
        return;
    }
    if (call == controller_action::start) {
        controller.start_head(h);
    } else if (call == controller_action::observe) {
        controller.observe_head(h, counts[h]);
    } else {
        controller.update_head(h);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
