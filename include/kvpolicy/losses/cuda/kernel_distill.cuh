// Losses of rows: a block per token, its value in workspace, values added up in one order.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/block_reduce.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>

#include <cstdint>
#include <cstring>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int row_threads = 256;
inline constexpr int row_warps = row_threads / 32;

/// What kernels know of the rows of a call.
struct row_loss_params {
    std::int32_t batch = 0, heads = 0, length = 0;
    const std::int32_t* lengths = nullptr;
    std::uint32_t* status = nullptr;
    double scale = 1.0;
    double* values = nullptr;    // [batch, heads, length]
    long long* count = nullptr;  // tokens that the mean is over

    __device__ std::int32_t length_of(std::int32_t b) const {
        const std::int32_t given = lengths == nullptr ? length : lengths[b];
        return given < 0 || given > length ? 0 : given;
    }
    __device__ void report(std::int32_t b, std::uint32_t bits) const {
        if (status != nullptr) {
            atomicOr(status + b, bits);
        }
    }
};

/// The block's token.
struct row_token {
    std::int32_t b, h, t;
    bool inside;

    __device__ explicit row_token(const row_loss_params& p) {
        const std::int64_t plane = blockIdx.x / static_cast<unsigned>(p.length);
        t = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(p.length));
        b = static_cast<std::int32_t>(plane / p.heads);
        h = static_cast<std::int32_t>(plane % p.heads);
        inside = t < p.length_of(b);
    }
};

/// Whether a row can be moved 16 bytes at a time.
template <class T>
__device__ inline bool row_aligned(const T* row) {
    return reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
}

/// Calls visit(i, x) for this thread's share of a row.
template <class T, class Visit>
__device__ inline void for_each_number(const T* row, std::int32_t count, const Visit& visit) {
    constexpr int each = 16 / static_cast<int>(sizeof(T));
    const std::int32_t pieces = row_aligned(row) ? count / each : 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < pieces; i += row_threads) {
        const uint4 piece = reinterpret_cast<const uint4*>(row)[i];
        T x[each];
        memcpy(x, &piece, sizeof(piece));
#pragma unroll
        for (int j = 0; j < each; ++j) {
            visit(i * each + j, static_cast<float>(x[j]));
        }
    }
    for (std::int32_t i = pieces * each + static_cast<std::int32_t>(threadIdx.x); i < count;
         i += row_threads) {
        visit(i, static_cast<float>(row[i]));
    }
}

/// to[i] = number(i, from[i]) for this thread's share of a row.
template <class T, class Number>
__device__ inline void map_numbers(const T* from, T* to, std::int32_t count, const Number& number) {
    constexpr int each = 16 / static_cast<int>(sizeof(T));
    const std::int32_t pieces = row_aligned(from) && row_aligned(to) ? count / each : 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < pieces; i += row_threads) {
        uint4 piece = reinterpret_cast<const uint4*>(from)[i];
        T x[each];
        memcpy(x, &piece, sizeof(piece));
#pragma unroll
        for (int j = 0; j < each; ++j) {
            x[j] = static_cast<T>(number(i * each + j, static_cast<float>(x[j])));
        }
        memcpy(&piece, x, sizeof(piece));
        reinterpret_cast<uint4*>(to)[i] = piece;
    }
    for (std::int32_t i = pieces * each + static_cast<std::int32_t>(threadIdx.x); i < count;
         i += row_threads) {
        to[i] = static_cast<T>(number(i, static_cast<float>(from[i])));
    }
}

/// Zeros for this thread's share of a row.
template <class T>
__device__ inline void clear_numbers(T* row, std::int32_t count) {
    constexpr int each = 16 / static_cast<int>(sizeof(T));
    const std::int32_t pieces = row_aligned(row) ? count / each : 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < pieces; i += row_threads) {
        reinterpret_cast<uint4*>(row)[i] = uint4{0, 0, 0, 0};
    }
    for (std::int32_t i = pieces * each + static_cast<std::int32_t>(threadIdx.x); i < count;
         i += row_threads) {
        row[i] = static_cast<T>(0.0f);
    }
}

/// *count = tokens inside their sequences and, where labels are given, with a label of 0 to vocabulary - 1.
///
/// Grid: one block. Block: row_threads. Shared memory: one number per warp (static). Reads labels [B, H, S],
/// lengths [B]. Overwrites *p.count. Reports status_bad_length and status_bad_index.
template <class Label>
__global__ void __launch_bounds__(row_threads)
    row_count_kernel(const row_loss_params p, const plane_view<const Label> labels,
                     const std::int32_t vocabulary) {
    __shared__ long long shared[row_warps];
    long long count = 0;
    for (std::int32_t b = 0; b < p.batch; ++b) {
        const std::int32_t length = p.length_of(b);
        if (threadIdx.x == 0 && p.lengths != nullptr && length != p.lengths[b]) {
            p.report(b, status_bad_length);
        }
        if (labels.data == nullptr) {
            count += threadIdx.x == 0 ? std::int64_t{length} * p.heads : 0;
            continue;
        }
        for (std::int64_t i = threadIdx.x; i < std::int64_t{p.heads} * length; i += row_threads) {
            const Label label = labels.head(b, i / length)[i % length];
            count += label >= 0 && label < vocabulary ? 1 : 0;
            if (label < -1 || label >= vocabulary) {
                p.report(b, status_bad_index);
            }
        }
    }
    count = sum_over_block<row_threads>(count, shared);
    if (threadIdx.x == 0) {
        *p.count = count;
    }
}

/// *value = the sum of the tokens' values, in one order, and their count.
///
/// Grid: one block. Block: row_threads. Shared memory: one number per warp (static). Reads p.values [B, H,
/// S], double. Overwrites *value.
template <class Value>
__global__ void __launch_bounds__(row_threads) row_value_kernel(const row_loss_params p, Value* const value) {
    __shared__ double shared[row_warps];
    double sum = 0.0;
    const std::int64_t tokens = std::int64_t{p.batch} * p.heads * p.length;
    for (std::int64_t i = threadIdx.x; i < tokens; i += row_threads) {
        sum += p.values[i];
    }
    sum = sum_over_block<row_threads>(sum, shared);
    if (threadIdx.x == 0) {
        value->value = sum;
        value->count = *p.count;
    }
}

/// A logit's place in the order of top_logits, larger logits first, equal ones by index: ascending.
__device__ inline std::uint64_t logit_code(std::int32_t i, float logit) {
    return (static_cast<std::uint64_t>(descending_key(logit)) << 32) | static_cast<std::uint32_t>(i);
}

/// Buckets of a digit of a radix selection.
inline constexpr int digit_buckets = 256;

/// picked = the bucket in which the sum of the histogram reaches `wanted`, the sum before it, and what it
/// holds. By one warp.
__device__ __forceinline__ void pick_bucket(const int* histogram, int wanted, int* picked) {
    constexpr int each = digit_buckets / 32;
    int mine[each], sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
        mine[i] = histogram[lane_id() * each + i];
        sum += mine[i];
    }
    int before = warp_inclusive_sum(sum) - sum;
#pragma unroll
    for (int i = 0; i < each; ++i) {
        if (before < wanted && wanted <= before + mine[i]) {
            picked[0] = lane_id() * each + i;
            picked[1] = before;
            picked[2] = mine[i];
        }
        before += mine[i];
    }
}

/// Sorts `count` codes, a power of two, ascending: a bitonic sort by one block. A barrier comes before every
/// step, none after the last.
__device__ __forceinline__ void sort_codes(std::uint64_t* codes, int count) {
    for (int size = 2; size <= count; size *= 2) {
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = static_cast<int>(threadIdx.x); i < count / 2; i += row_threads) {
                const int low = (i / step) * 2 * step + i % step;
                const std::uint64_t a = codes[low], b = codes[low + step];
                if ((a > b) == ((low & size) == 0)) {
                    codes[low] = b;
                    codes[low + step] = a;
                }
            }
        }
    }
}

/// The largest values.dim logits of a token with their indices, larger first, equal ones by index.
///
/// Grid: B * H * S, a token each. Block: row_threads. Shared memory: `capacity` codes of 8 bytes (dynamic),
/// capacity being the power of two from values.dim on; a histogram of 256 (static). Reads logits [B, H, S,
/// vocabulary] in T. Overwrites values [B, H, S, K] in T and indices [B, H, S, K] in int32.
/// 1. Radix selection on codes, from the highest digit on.
/// 2. Collect the selected codes.
/// 3. Sort them.
/// 4. Write.
template <class T>
__global__ void __launch_bounds__(row_threads)
    top_logits_kernel(const row_loss_params p, const rows_view<const T> logits, const rows_view<T> values,
                      const rows_view<std::int32_t> indices, const int capacity) {
    constexpr int bins = digit_buckets;
    __shared__ int histogram[bins];
    __shared__ int picked[3];  // the bucket, what is before it, what is in it
    __shared__ int taken;
    auto* const codes = reinterpret_cast<std::uint64_t*>(dynamic_shared());
    const row_token token(p);
    if (threadIdx.x == 0 && token.t == 0 && token.h == 0 && p.lengths != nullptr &&
        p.length_of(token.b) != p.lengths[token.b]) {
        p.report(token.b, status_bad_length);
    }
    if (!token.inside) {
        return;
    }
    const T* const row = logits.row(token.b, token.h, token.t);
    const auto thread = static_cast<int>(threadIdx.x);
    std::uint64_t prefix = 0;  // of the last code that counts, from bit `shift` on
    int shift = 64, wanted = values.dim;
    bool bad = false;
    if (thread == 0) {
        // Here and not before the selection: it lies beside `picked`, and one load may bring both, so between
        // the loop's last look at that and a write to this there would have to be a barrier.
        taken = 0;
    }
    // 1. Select.
    for (bool first = true; shift > 0; first = false) {
        shift -= 8;
        for (int i = thread; i < bins; i += row_threads) {
            histogram[i] = 0;
        }
        __syncthreads();
        for_each_number(row, logits.dim, [&](std::int32_t i, float logit) {
            const std::uint64_t code = logit_code(i, logit);
            bad = bad || (first && (code >> 32) == nan_key);
            if (first || (code >> (shift + 8)) == prefix) {
                atomicAdd(histogram + ((code >> shift) & (bins - 1)), 1);
            }
        });
        __syncthreads();
        if (warp_id() == 0) {
            pick_bucket(histogram, wanted, picked);
        }
        __syncthreads();
        prefix = (prefix << 8) | static_cast<std::uint64_t>(picked[0]);
        wanted -= picked[1];
        if (wanted == picked[2]) {
            break;
        }
    }
    if (bad) {
        p.report(token.b, status_not_finite);
    }
    // 2. Collect.
    for (int i = thread; i < capacity; i += row_threads) {
        codes[i] = ~std::uint64_t{0};
    }
    __syncthreads();
    for_each_number(row, logits.dim, [&](std::int32_t i, float logit) {
        const std::uint64_t code = logit_code(i, logit);
        if ((code >> shift) <= prefix) {
            codes[atomicAdd(&taken, 1)] = code;
        }
    });
    // 3. Sort.
    sort_codes(codes, capacity);
    __syncthreads();
    // 4. Write.
    for (int i = thread; i < values.dim; i += row_threads) {
        const auto at = static_cast<std::int32_t>(codes[i] & 0xffffffffu);
        indices.row(token.b, token.h, token.t)[i] = at;
        values.row(token.b, token.h, token.t)[i] = row[at];
    }
}

/// log sum exp of `count` doubles that `at` gives, where `counts` says so; as the host's, an infinite largest
/// number is the result.
template <class Pick, class Counts>
__device__ inline double block_log_sum_exp(std::int32_t count, const Pick& at, const Counts& counts,
                                           double* shared) {
    double most = -INFINITY;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += row_threads) {
        most = counts(i) && at(i) > most ? at(i) : most;
    }
    most = max_over_block<row_threads>(most, shared);
    if (isinf(most)) {
        return most;
    }
    double sum = 0.0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += row_threads) {
        sum += counts(i) ? exp(at(i) - most) : 0.0;
    }
    return most + log(sum_over_block<row_threads>(sum, shared));
}

/// block_log_sum_exp of a whole row times `inverse`. Reports a NaN.
template <class T>
__device__ inline double row_log_sum_exp(const T* row, std::int32_t count, double inverse,
                                         const row_loss_params& p, std::int32_t b, double* shared) {
    double most = -INFINITY, sum = 0.0;
    bool bad = false;
    for_each_number(row, count, [&](std::int32_t, float x) {
        const double y = static_cast<double>(x) * inverse;
        bad = bad || y != y;
        most = y > most ? y : most;
    });
    if (bad) {
        p.report(b, status_not_finite);
    }
    most = max_over_block<row_threads>(most, shared);
    if (isinf(most)) {
        return most;
    }
    for_each_number(row, count,
                    [&](std::int32_t, float x) { sum += exp(static_cast<double>(x) * inverse - most); });
    return most + log(sum_over_block<row_threads>(sum, shared));
}

/// KL of teacher and student over a token's stored logits, in double, and its gradient. The teacher is
/// renormalized over them, the student too, or with `all` over its whole row.
///
/// Grid: B * H * S, a token each. Block: row_threads. Shared memory: one number per warp (static). Reads
/// values and indices [B, H, S, K], student [B, H, S, vocabulary] in T. Overwrites d_student [B, H, S,
/// vocabulary] in T and p.values [B, H, S] in double.
/// 1. Check.
/// 2. Log-sum-exps.
/// 3. Value.
/// 4. Gradient: zeros, or the student's softmax, then the stored logits.
template <class T>
__global__ void __launch_bounds__(row_threads)
    top_distillation_kernel(const row_loss_params p, const double inverse, const bool reverse, const bool all,
                            const rows_view<const T> values, const rows_view<const std::int32_t> indices,
                            const rows_view<const T> student, const rows_view<T> d_student) {
    __shared__ double shared[row_warps];
    const row_token token(p);
    if (!token.inside) {
        if (threadIdx.x == 0) {
            p.values[blockIdx.x] = 0.0;
        }
        return;
    }
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const T* const z = values.row(token.b, token.h, token.t);
    const T* const y = student.row(token.b, token.h, token.t);
    const std::int32_t* const index = indices.row(token.b, token.h, token.t);
    T* const d = d_student.row(token.b, token.h, token.t);
    const std::int32_t count = values.dim, vocabulary = d_student.dim;
    const auto counts = [&](std::int32_t i) { return index[i] >= 0 && index[i] < vocabulary; };
    const auto of_teacher = [&](std::int32_t i) {
        return static_cast<double>(static_cast<float>(z[i])) * inverse;
    };
    const auto of_student = [&](std::int32_t i) {
        return static_cast<double>(static_cast<float>(y[index[i]])) * inverse;
    };
    // 1. Check.
    for (std::int32_t i = thread; i < count; i += row_threads) {
        if (!counts(i)) {
            p.report(token.b, status_bad_index);
        } else if (isnan(of_teacher(i)) || isnan(of_student(i))) {
            p.report(token.b, status_not_finite);
        }
    }
    // 2. Log-sum-exps.
    const double teacher_lse = block_log_sum_exp(count, of_teacher, counts, shared);
    const double student_lse = all ? row_log_sum_exp(y, vocabulary, inverse, p, token.b, shared)
                                   : block_log_sum_exp(count, of_student, counts, shared);
    // 3. Value.
    double value = 0.0;
    for (std::int32_t i = thread; i < count; i += row_threads) {
        if (counts(i)) {
            const double log_p = of_teacher(i) - teacher_lse, log_s = of_student(i) - student_lse;
            const double weight = exp(reverse ? log_s : log_p);
            value += weight > 0.0 ? weight * (reverse ? log_s - log_p : log_p - log_s) : 0.0;
        }
    }
    value = sum_over_block<row_threads>(value, shared);
    // 4. Gradient.
    const double mean = p.scale / static_cast<double>(*p.count);
    if (all) {
        map_numbers(y, d, vocabulary, [&](std::int32_t, float x) {
            return static_cast<float>(mean * inverse * exp(static_cast<double>(x) * inverse - student_lse));
        });
    } else {
        clear_numbers(d, vocabulary);
    }
    __syncthreads();
    for (std::int32_t i = thread; i < count; i += row_threads) {
        if (counts(i)) {
            const double log_p = of_teacher(i) - teacher_lse, log_s = of_student(i) - student_lse;
            const double s = exp(log_s);
            const double slope = !reverse ? s - exp(log_p) : s > 0.0 ? s * (log_s - log_p - value) : 0.0;
            d[index[i]] = static_cast<T>(static_cast<float>(mean * inverse * slope));
        }
    }
    if (thread == 0) {
        p.values[blockIdx.x] = mean * value;
    }
}

/// Cross-entropy of a token and its gradient, softmax - one-hot. A label below 0 does not count.
///
/// Grid: B * H * S, a token each. Block: row_threads. Shared memory: two numbers per warp (static). Reads
/// labels [B, H, S] in int32, student [B, H, S, vocabulary] in T. Overwrites d_student in T, p.values in
/// double.
/// 1. Running maximum and sum.
/// 2. Join the threads.
/// 3. Gradient.
/// 4. Value.
template <class T>
__global__ void __launch_bounds__(row_threads)
    cross_entropy_kernel(const row_loss_params p, const plane_view<const std::int32_t> labels,
                         const rows_view<const T> student, const rows_view<T> d_student) {
    __shared__ float largest[row_warps];
    __shared__ double shared[row_warps];
    const row_token token(p);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t vocabulary = d_student.dim;
    std::int32_t label = token.inside ? labels.head(token.b, token.h)[token.t] : -1;
    label = label >= vocabulary ? -1 : label;
    if (label < 0) {
        if (thread == 0) {
            p.values[blockIdx.x] = 0.0;
        }
        if (token.inside) {
            clear_numbers(d_student.row(token.b, token.h, token.t), vocabulary);
        }
        return;
    }
    const T* const z = student.row(token.b, token.h, token.t);
    T* const d = d_student.row(token.b, token.h, token.t);
    // 1. Running maximum and sum.
    // A thread's largest logit, and its sum of exponentials over that.
    float most = -INFINITY, sum = 0.0f;
    bool bad = false;
    for_each_number(z, vocabulary, [&](std::int32_t, float x) {
        bad = bad || x != x;
        if (x > most) {
            sum = sum * expf(most - x) + 1.0f;
            most = x;
        } else if (most != -INFINITY) {
            sum += expf(x - most);
        }
    });
    if (bad) {
        p.report(token.b, status_not_finite);
    }
    // 2. Join the threads.
    const float of_all = max_over_block<row_threads>(most, largest);
    const double whole = sum_over_block<row_threads>(
        most == -INFINITY ? 0.0 : static_cast<double>(sum * expf(most - of_all)), shared);
    // As the host: an infinite largest logit is the log of the sum.
    const bool infinite = isinf(of_all);
    const double mean = p.scale / static_cast<double>(*p.count);
    const float inverse = infinite ? 1.0f : static_cast<float>(1.0 / whole);
    // 3. Gradient.
    map_numbers(z, d, vocabulary, [&](std::int32_t i, float x) {
        const float share = expf(x - of_all) * inverse;
        return static_cast<float>(mean) * (share - (i == label ? 1.0f : 0.0f));
    });
    if (thread == 0) {
        // 4. Value.
        const double lse = static_cast<double>(of_all) + (infinite ? 0.0 : log(whole));
        p.values[blockIdx.x] = mean * (lse - static_cast<double>(static_cast<float>(z[label])));
    }
}

/// Squared distance of teacher and student, mean over tokens and numbers, and its gradient.
///
/// Grid: B * H * S, a token each. Block: row_threads. Shared memory: one number per warp (static). Reads
/// teacher and student [B, H, S, D] in T. Overwrites d_student in T and p.values [B, H, S] in double.
template <class T>
__global__ void __launch_bounds__(row_threads)
    l2_kernel(const row_loss_params p, const rows_view<const T> teacher, const rows_view<const T> student,
              const rows_view<T> d_student) {
    __shared__ double shared[row_warps];
    const row_token token(p);
    double sum = 0.0;
    if (token.inside) {
        const T* const x = teacher.row(token.b, token.h, token.t);
        const T* const y = student.row(token.b, token.h, token.t);
        T* const d = d_student.row(token.b, token.h, token.t);
        const double mean = p.scale / (static_cast<double>(*p.count) * static_cast<double>(d_student.dim));
        for (auto i = static_cast<std::int32_t>(threadIdx.x); i < d_student.dim; i += row_threads) {
            const double off =
                static_cast<double>(static_cast<float>(y[i])) - static_cast<double>(static_cast<float>(x[i]));
            if (off != off) {
                p.report(token.b, status_not_finite);
            }
            sum += mean * off * off;
            d[i] = static_cast<T>(static_cast<float>(2.0 * mean * off));
        }
    }
    sum = sum_over_block<row_threads>(sum, shared);
    if (threadIdx.x == 0) {
        p.values[blockIdx.x] = sum;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
