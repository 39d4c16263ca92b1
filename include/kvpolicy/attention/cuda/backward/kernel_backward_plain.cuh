// The backward pass of float and double inputs: plain loops in that precision, to check with. A warp has a
// query, or a key; lanes share the columns. What a query does not see is not read, so that d_q of fast
// kernels falls back on it for rows that a hidden key has spoilt.
#pragma once

#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_prepare.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/rounded.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int plain_threads = 128;
inline constexpr int plain_columns = 8;  // of a lane: head_dims up to 256

/// A row of up to 256 columns, spread over a warp.
template <class T>
struct spread_row {
    T x[plain_columns];

    template <class S>
    __device__ static spread_row load(const S* from, std::int32_t dim) {
        spread_row row;
#pragma unroll
        for (int i = 0; i < plain_columns; ++i) {
            const int c = 32 * i + lane_id();
            row.x[i] = c < dim ? static_cast<T>(from[c]) : T(0);
        }
        return row;
    }
    __device__ T dot(const spread_row& other) const {
        T sum = 0;
#pragma unroll
        for (int i = 0; i < plain_columns; ++i) {
            sum += x[i] * other.x[i];
        }
        for (int step = 16; step > 0; step /= 2) {
            sum += __shfl_xor_sync(all_lanes, sum, step);
        }
        return sum;
    }
    __device__ void add(T factor, const spread_row& other) {
#pragma unroll
        for (int i = 0; i < plain_columns; ++i) {
            x[i] += factor * other.x[i];
        }
    }
};

/// The logit of a product, its bias included, and its derivative. Rounded, so that it is the same number
/// wherever it is subtracted from.
template <class T>
struct plain_logit_of {
    T logit, derivative;

    template <class S>
    __device__ plain_logit_of(const attention_params<S>& call, T product, T bias)
        : logit(rounded_product(product, static_cast<T>(call.scale))),
          derivative(static_cast<T>(call.scale)) {
        if (call.logits_soft_cap > 0.0f) {
            const T cap = static_cast<T>(call.logits_soft_cap);
            const T t = tanh(logit / cap);
            logit = rounded_product(cap, t);
            derivative *= 1 - t * t;
        }
        logit += bias;
    }
};

/// One pair of a query and a key that sees it: the weight, and the gradients of logit and of <q, k>.
template <class T>
struct plain_pair {
    T weight, d_logit, d_product;

    template <class S>
    __device__ plain_pair(const attention_params<S>& call, T product, T bias, const row_total<T>& total,
                          T d_weight, T delta) {
        const plain_logit_of<T> of(call, product, bias);
        weight = exp(of.logit - total.reference) * total.factor;
        d_logit = weight * (d_weight - delta);
        d_product = d_logit * of.derivative;
    }
};

/// Calls body(entry, its bias) for the entries of a list that packed row m sees, in the list's order.
template <class S, class Body>
__device__ inline void for_each_seen(const backward_params<S>& p, std::int32_t list, std::int32_t m,
                                     const Body& body) {
    const backward_list all = p.list_of(list);
    for (std::int32_t i = 0; i < all.total; ++i) {
        const backward_entry e = p.entry_of(list, all, i);
        if (m >= e.begin && m < e.expiry) {
            body(e, m >= e.from ? static_cast<compute_t<S>>(e.natural_bias) : compute_t<S>(0));
        }
    }
}

/// The total of a packed row from the keys that it sees, by one warp. The saved lse may be that of these keys
/// and others; where it is no more than its rounding off theirs, it is theirs.
template <class S>
__device__ inline row_total<compute_t<S>> total_of_row(const backward_params<S>& p, std::int32_t list,
                                                       std::int32_t m, const packed_row<S>& own) {
    using T = compute_t<S>;
    const std::int32_t h = list / p.plan.supers % p.call.kv_heads;
    const auto q = spread_row<T>::load(p.call.q.row(own.b, own.head, own.query), p.call.q.dim);
    T largest = -static_cast<T>(INFINITY), sum = T(0);
    for_each_seen(p, list, m, [&](const backward_entry& e, T bias) {
        const auto k = spread_row<T>::load(p.call.rows.k.row(own.b, h, e.row), p.call.q.dim);
        const T logit = plain_logit_of<T>(p.call, q.dot(k), bias).logit;
        if (logit > largest) {
            sum = sum * exp(largest - logit) + T(1);
            largest = logit;
        } else {
            sum += logit == -static_cast<T>(INFINITY) ? T(0) : exp(logit - largest);
        }
    });
    if (sum == T(0)) {
        return {T(0), T(0)};
    }
    const T off = largest + log(sum) - static_cast<T>(own.lse);
    const T rounding = static_cast<T>(0x1p-21) * fabs(static_cast<T>(own.lse));
    return {largest, (fabs(off) <= rounding ? T(1) : exp(off)) / sum};
}

/// The total of a packed row: its lse, or what backward_plain_queries_kernel has found.
template <class S>
__device__ inline row_total<compute_t<S>> known_total(const backward_params<S>& p, std::int32_t list,
                                                      std::int32_t m, const packed_row<S>& own) {
    if (own.large && p.totals != nullptr) {
        return p.totals[static_cast<std::int64_t>(list) * p.super_rows + m];
    }
    return {static_cast<compute_t<S>>(own.lse), compute_t<S>(1)};
}

/// d_q of a packed row, by one warp; sums run in the order of the list. visit(entry, pair, q, d_out) sees
/// every pair, too.
template <class S, class Visit>
__device__ inline void plain_query_gradient(const backward_params<S>& p, std::int32_t list, std::int32_t m,
                                            const packed_row<S>& own, const row_total<compute_t<S>>& total,
                                            const Visit& visit) {
    using T = compute_t<S>;
    using row = spread_row<T>;
    const std::int32_t h = list / p.plan.supers % p.call.kv_heads;
    row d_q{};
    if (own.counts) {
        const row q = row::load(p.call.q.row(own.b, own.head, own.query), p.call.q.dim);
        const row d_out = row::load(p.d_out.row(own.b, own.head, own.query), p.d_out.dim);
        const T delta = d_out.dot(row::load(p.out.row(own.b, own.head, own.query), p.d_out.dim));
        for_each_seen(p, list, m, [&](const backward_entry& e, T bias) {
            const row k = row::load(p.call.rows.k.row(own.b, h, e.row), p.call.q.dim);
            const row v = row::load(p.call.rows.v.row(own.b, h, e.row), p.d_out.dim);
            const plain_pair<T> pair(p.call, q.dot(k), bias, total, d_out.dot(v), delta);
            d_q.add(pair.d_product, k);
            visit(e, pair, q, d_out);
        });
    }
    S* const to = p.d_q.row(own.b, own.head, own.query);
#pragma unroll
    for (int i = 0; i < plain_columns; ++i) {
        const int c = 32 * i + lane_id();
        if (c < p.d_q.dim) {
            to[c] = static_cast<S>(d_q.x[i]);
        }
    }
}

/// Where only d_q is wanted.
struct plain_pair_unseen {
    template <class... Of>
    __device__ void operator()(const Of&...) const {}
};

/// d_q by plain loops in compute_t<T>; sums run in the order of the list. Totals of rows whose lse is
/// large are found here, for backward_plain_keys_kernel too.
///
/// Grid: lists * super_rows / (plain_threads / 32), a warp per packed row. Block: plain_threads. Shared
/// memory: none. Reads the call's tensors, not the packed ones. Overwrites d_q [B, Hq, S, Dk] and, of those
/// rows, totals [lists, super_rows].
template <class T>
__global__ void __launch_bounds__(plain_threads) backward_plain_queries_kernel(const backward_params<T> p) {
    const std::int64_t line = static_cast<std::int64_t>(blockIdx.x) * (plain_threads / 32) + threadIdx.x / 32;
    if (line >= static_cast<std::int64_t>(p.lists()) * p.super_rows) {
        return;
    }
    const auto list = static_cast<std::int32_t>(line / p.super_rows);
    const auto m = static_cast<std::int32_t>(line % p.super_rows);
    const packed_row<T> own(p, list, m);
    if (m >= p.valid_rows(own.b, list % p.plan.supers)) {
        return;
    }
    row_total<compute_t<T>> total{static_cast<compute_t<T>>(own.lse), compute_t<T>(1)};
    if (own.large) {
        total = total_of_row(p, list, m, own);
        p.totals[line] = total;
    }
    plain_query_gradient(p, list, m, own, total, plain_pair_unseen{});
}

/// Gradients of packed rows whose lse is large, which the kernels on matrix instructions leave out: where
/// *large is set, by plain loops in fp32. Normally it returns at once.
///
/// Grid: as many blocks as fit; warps take packed rows in turn. One block whose first warp takes all of them
/// gives deterministic sums. Block: plain_threads. Shared memory: none. Overwrites d_q [B, Hq, S, Dk] of
/// those rows; adds to sum_k, sum_v [B, Hkv, rows, Dim] and sum_bias [B, Hkv, rows].
template <class T, int Dim>
__global__ void __launch_bounds__(plain_threads) backward_large_kernel(const backward_params<T> p) {
    if (*p.large == 0) {
        return;
    }
    const std::int64_t lines = static_cast<std::int64_t>(p.lists()) * p.super_rows;
    const int warps = gridDim.x == 1 ? 1 : static_cast<int>(gridDim.x) * (plain_threads / 32);
    const auto warp =
        static_cast<int>(blockIdx.x) * (plain_threads / 32) + static_cast<int>(threadIdx.x) / 32;
    for (std::int64_t line = warp; warp < warps && line < lines; line += warps) {
        const auto list = static_cast<std::int32_t>(line / p.super_rows);
        const auto m = static_cast<std::int32_t>(line % p.super_rows);
        const packed_row<T> own(p, list, m);
        if (!own.large) {
            continue;
        }
        using row = spread_row<float>;
        const std::int64_t head = list / p.plan.supers;
        plain_query_gradient(
            p, list, m, own, total_of_row(p, list, m, own),
            [&](const backward_entry& e, const plain_pair<float>& pair, const row& q, const row& d_out) {
                if (pair.weight == 0.0f) {
                    return;
                }
                const std::int64_t key = head * p.call.rows.k.length + e.row;
                const float d_k = pair.d_product / p.call.scale;  // sums of keys are without the scale
#pragma unroll
                for (int i = 0; i < plain_columns; ++i) {
                    const int c = 32 * i + lane_id();
                    if (c < p.d_k.dim) {
                        atomicAdd(p.sum_k + key * Dim + c, d_k * q.x[i]);
                    }
                    if (c < p.d_v.dim) {
                        atomicAdd(p.sum_v + key * Dim + c, pair.weight * d_out.x[i]);
                    }
                }
                if (p.sum_bias != nullptr && m >= e.from && lane_id() == 0) {
                    atomicAdd(p.sum_bias + key, pair.d_logit);
                }
            });
    }
}

/// fix_nonfinite of the backward pass: where *not_finite is set, recomputes every row of d_q that is not
/// finite from the keys that its query sees. Normally it returns at once. Rows whose own q, out or d_out is
/// not finite stay.
///
/// Grid: as many blocks as fit; warps take packed rows in turn. Block: plain_threads. Shared memory: none.
/// Reads and overwrites d_q [B, Hq, S, Dk].
template <class T>
__global__ void __launch_bounds__(plain_threads) backward_fix_nonfinite_kernel(const backward_params<T> p) {
    if (*p.not_finite == 0) {
        return;
    }
    const std::int64_t lines = static_cast<std::int64_t>(p.lists()) * p.super_rows;
    for (std::int64_t line = static_cast<std::int64_t>(blockIdx.x) * (plain_threads / 32) + threadIdx.x / 32;
         line < lines; line += static_cast<std::int64_t>(gridDim.x) * (plain_threads / 32)) {
        const auto list = static_cast<std::int32_t>(line / p.super_rows);
        const auto m = static_cast<std::int32_t>(line % p.super_rows);
        const packed_row<T> own(p, list, m);
        if (m >= p.valid_rows(own.b, list % p.plan.supers)) {
            continue;
        }
        const T* const d_q = p.d_q.row(own.b, own.head, own.query);
        // What the query itself brought, or its gradient (an overflow that a loss scaler will throw away),
        // cannot be repaired.
        if (!finite_row(d_q, p.d_q.dim) && finite_row(p.d_out.row(own.b, own.head, own.query), p.d_out.dim) &&
            finite_row(p.out.row(own.b, own.head, own.query), p.out.dim) &&
            finite_row(p.call.q.row(own.b, own.head, own.query), p.call.q.dim)) {
            plain_query_gradient(p, list, m, own, known_total(p, list, m, own), plain_pair_unseen{});
        }
    }
}

/// The (sequence, KV head) and the row that a warp of a kernel over all keys works on.
struct plain_key {
    bool beyond;  // there is none
    std::int32_t head = 0, row = 0;

    template <class T>
    __device__ explicit plain_key(const backward_params<T>& p) {
        const std::int32_t rows = p.call.rows.k.length;
        const std::int64_t line =
            static_cast<std::int64_t>(blockIdx.x) * (plain_threads / 32) + threadIdx.x / 32;
        beyond = line >= static_cast<std::int64_t>(p.heads()) * rows;
        if (!beyond) {
            head = static_cast<std::int32_t>(line / rows);
            row = static_cast<std::int32_t>(line % rows);
        }
    }
};

/// d_k, d_v and d_log_bias += what the queries of super-tile j give. Launches go super-tile by super-tile.
///
/// Grid: B * Hkv * rows / (plain_threads / 32), a warp per list entry. Block: plain_threads. Shared memory:
/// none. Accumulates in d_k, d_v [B, Hkv, rows, D] and d_log_bias [B, Hkv, rows].
template <class T>
__global__ void __launch_bounds__(plain_threads)
    backward_plain_keys_kernel(const backward_params<T> p, const std::int32_t j) {
    using row = spread_row<T>;
    const plain_key of(p);
    if (of.beyond) {
        return;
    }
    const std::int32_t head = of.head, i = of.row;
    const std::int32_t list = head * p.plan.supers + j;
    const std::int32_t b = head / p.call.kv_heads, h = head % p.call.kv_heads;
    const backward_list all = p.list_of(list);
    if (i >= all.total) {
        return;
    }
    const backward_entry e = p.entry_of(list, all, i);
    if (e.begin >= e.expiry) {
        return;
    }
    const row k = row::load(p.call.rows.k.row(b, h, e.row), p.call.q.dim);
    const row v = row::load(p.call.rows.v.row(b, h, e.row), p.d_out.dim);
    row d_k{}, d_v{};
    T d_bias = 0;
    const std::int32_t stop = min(e.expiry, p.valid_rows(b, j));
    for (std::int32_t m = e.begin; m < stop; ++m) {
        const packed_row<T> other(p, list, m);
        if (!other.counts) {
            continue;
        }
        const row q = row::load(p.call.q.row(b, other.head, other.query), p.call.q.dim);
        const row d_out = row::load(p.d_out.row(b, other.head, other.query), p.d_out.dim);
        const T delta = d_out.dot(row::load(p.out.row(b, other.head, other.query), p.d_out.dim));
        const bool biased = m >= e.from;
        const plain_pair<T> pair(p.call, q.dot(k), biased ? static_cast<T>(e.natural_bias) : T(0),
                                 known_total(p, list, m, other), d_out.dot(v), delta);
        d_v.add(pair.weight, d_out);
        d_k.add(pair.d_product, q);
        d_bias += biased ? pair.d_logit : T(0);
    }
    T* const to_k = p.d_k.row(b, h, e.row);
    T* const to_v = p.d_v.row(b, h, e.row);
#pragma unroll
    for (int c = lane_id(), n = 0; n < plain_columns; ++n, c += 32) {
        if (c < p.d_k.dim) {
            to_k[c] += d_k.x[n];
        }
        if (c < p.d_v.dim) {
            to_v[c] += d_v.x[n];
        }
    }
    if (p.d_log_bias && lane_id() == 0) {
        p.d_log_bias.head(b, h)[e.row] += d_bias;
    }
}

/// d_k, d_v and d_log_bias = 0 for the keys that count.
///
/// Grid: B * Hkv * rows / (plain_threads / 32), a warp per key. Block: plain_threads. Shared memory: none.
/// Overwrites d_k, d_v [B, Hkv, rows, D] and d_log_bias [B, Hkv, rows].
template <class T>
__global__ void __launch_bounds__(plain_threads) backward_plain_zero_kernel(const backward_params<T> p) {
    const plain_key of(p);
    if (of.beyond) {
        return;
    }
    const std::int32_t head = of.head, row = of.row;
    const std::int32_t b = head / p.call.kv_heads, h = head % p.call.kv_heads;
    if (row >= p.keys_of(b)) {
        return;
    }
    for (std::int32_t c = lane_id(); c < p.d_k.dim; c += 32) {
        p.d_k.row(b, h, row)[c] = T(0);
    }
    for (std::int32_t c = lane_id(); c < p.d_v.dim; c += 32) {
        p.d_v.row(b, h, row)[c] = T(0);
    }
    if (p.d_log_bias && lane_id() == 0) {
        p.d_log_bias.head(b, h)[row] = T(0);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
