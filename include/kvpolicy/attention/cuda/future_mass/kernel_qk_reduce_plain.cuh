// The qk_reduce pass without matrix instructions: any storage type, any head_dim, any alignment. For fp32 and
// double inputs, which exist for checking, and for views that 16-byte copies cannot read.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/row_result.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

struct qk_reduce_plain_sizes {
    static constexpr int threads = 256;
    static constexpr int rows = 32;     // eight threads each
    static constexpr int columns = 32;  // a tile; four a thread
    static constexpr int dims = 32;     // of rows and columns that are in shared memory at a time
};

/// Two tiles of `dims` numbers per row in shared memory.
template <class C>
struct qk_reduce_plain_memory {
    C rows[qk_reduce_plain_sizes::rows][qk_reduce_plain_sizes::dims + 1];
    C columns[qk_reduce_plain_sizes::columns][qk_reduce_plain_sizes::dims + 1];
};

/// dot[i] = row `own` of the item times column `column` + part + 8 i, by all threads of a block.
template <class T, class C>
__device__ __forceinline__ void multiply_band_plain(const qk_reduce_params<T, C>& params,
                                                    const qk_reduce_item& item, std::int32_t of_columns,
                                                    std::int32_t column, qk_reduce_plain_memory<C>& memory,
                                                    C (&dot)[4]) {
    using sizes = qk_reduce_plain_sizes;
    const auto thread = static_cast<int>(threadIdx.x);
    const int own = thread / 8;
    const int part = thread % 8;
    const T* const rows = params.rows.row(item.b, item.head, params.packed.rows.begin(item.b));
    const T* const columns = params.columns.row(item.b, of_columns, params.packed.rows.begin(item.b));
    for (std::int32_t from = 0; from < params.rows.dim; from += sizes::dims) {
        __syncthreads();
        for (int i = thread; i < sizes::rows * sizes::dims; i += sizes::threads) {
            const int r = i / sizes::dims;
            const int x = i % sizes::dims;
            const bool inside = from + x < params.rows.dim;
            memory.rows[r][x] =
                inside && item.first + r < item.length
                    ? static_cast<C>(rows[(item.first + r) * params.rows.row_stride + from + x])
                    : static_cast<C>(0);
            memory.columns[r][x] =
                inside && column + r < item.length
                    ? static_cast<C>(columns[(column + r) * params.columns.row_stride + from + x])
                    : static_cast<C>(0);
        }
        __syncthreads();
        for (int x = 0; x < sizes::dims; ++x) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                dot[i] += memory.rows[own][x] * memory.columns[part + 8 * i][x];
            }
        }
    }
}

/// qk_reduce without matrix instructions, in compute_t<T>. Pass is careful_lse_pass, careful_mass_pass or
/// largest_mass_pass.
///
/// Grid: items = B * Hr * S / 32, one per block. Block: 256 threads, eight per row. Shared memory:
/// qk_reduce_plain_memory (static). Reads rows [B, Hr, S, D], columns [B, Hc, S, D] and, for a mass, lse [B,
/// Hc, S]. Overwrites out [B, Hr, S] in fp32.
/// 1. Per tile: 32 x 32 products.
/// 2. Reduce them.
/// 3. Join the threads of a row, and the heads of a group.
/// 4. Write.
template <class T, class Pass>
__global__ void __launch_bounds__(256)
    qk_reduce_plain_kernel(const qk_reduce_params<T, compute_t<T>> params) {
    using C = compute_t<T>;
    using sizes = qk_reduce_plain_sizes;
    static_assert(Pass::reduce != row_reduce::sum);
    __shared__ qk_reduce_plain_memory<C> memory;
    const qk_reduce_item item =
        qk_reduce_item_of<Pass, sizes::rows, sizes::columns>(params, static_cast<std::int32_t>(blockIdx.x));
    if (item.first >= item.length) {
        return;
    }
    const auto thread = static_cast<int>(threadIdx.x);
    const int own = thread / 8;
    const int part = thread % 8;
    const std::int32_t row = item.first + own;
    constexpr C lowest = static_cast<C>(-1e30);
    mass_total<C> total;
    total.clear();
    for (std::int32_t stream = 0; stream < params.streams && item.tiles > 0; ++stream) {
        const std::int32_t of_columns = params.column_head(item.head, stream);
        C top = Pass::reduce == row_reduce::largest ? static_cast<C>(-INFINITY) : lowest;
        C sum = 0;
        for (std::int32_t turn = 0; turn < item.tiles; ++turn) {
            const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, turn);
            // 1. Products.
            C dot[4] = {0, 0, 0, 0};
            multiply_band_plain(params, item, of_columns, column, memory, dot);
            // 2. Reduce them.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const std::int32_t c = column + part + 8 * i;
                if (c >= item.length || !item.full(row, 1, c, 1)) {
                    continue;
                }
                const qk_reduce_exponents<C>& e = params.exponents;
                C x = e.scale * (e.cap > static_cast<C>(0) ? e.cap * tanh(dot[i] * e.inner) : dot[i]);
                if constexpr (Pass::mass) {
                    const float of = params.lse_of(item.b, of_columns)[c];
                    x = of == -INFINITY ? static_cast<C>(-INFINITY)
                                        : x + e.of_lse * static_cast<C>(of) + e.shift;
                }
                const C most = x > top ? x : top;
                if constexpr (Pass::reduce == row_reduce::running) {
                    sum = sum * exp2(top - most) + exp2(x - most);
                }
                top = most;
            }
        }
        // 3. Join the threads of a row, and the heads of a group.
        C most = top;
        for (int step = 1; step < 8; step *= 2) {
            const C other = __shfl_xor_sync(all_lanes, most, step);
            most = other > most ? other : most;
        }
        C result = most;
        if constexpr (Pass::reduce == row_reduce::running) {
            sum *= exp2(top - most);
            for (int step = 1; step < 8; step *= 2) {
                sum += __shfl_xor_sync(all_lanes, sum, step);
            }
            result = sum == static_cast<C>(0) ? static_cast<C>(-INFINITY) : most + log2(sum);
        }
        if constexpr (Pass::mass) {
            total.add(log_mass_of(params, item, row, result), params.mass.mean);
        } else {
            total.log_mass = result * ln_2<C>;
        }
    }
    // 4. Write.
    if (part == 0 && row < item.length) {
        params.out.head(item.b, item.head)[row] =
            static_cast<float>(Pass::mass ? target_of(params, total) : total.log_mass);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
