// Products of 128 rows with tiles of columns, by a block of four warps: of 16-bit rows by mma.sync, of all
// others by plain loops. A thread's products lie the same way in both.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/agent_qk_reduce_portable.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int mass_tile_threads = 128, mass_tile_rows = 128;

/// Value i of s[m] belongs to this row of the 128 and this column of the tile.
__device__ inline int mass_tile_row(int m, int i) {
    return 32 * warp_id() + 16 * m + 8 * (i / 2 % 2) + lane_id() / 4;
}
__device__ inline int mass_tile_column(int i) { return 8 * (i / 4) + 2 * (lane_id() % 4) + i % 2; }

/// 2^x: 2 ulp in fp32.
__device__ inline float exp2_of(float x) { return fast_exp2(x); }
__device__ inline double exp2_of(double x) { return exp2(x); }

/// Rows and two buffers of columns in dynamic shared memory, by cp.async. A source gives row r of a tile, or
/// null where there is none: that becomes 0.
template <class T, int Dim>
struct half_mass_tile {
    using value_type = T;
    using compute = float;
    using sizes = qk_reduce_portable_sizes<Dim>;
    static constexpr int columns = sizes::columns;
    static constexpr int shared_bytes = sizes::row_bytes + 2 * sizes::column_bytes;

    std::uint32_t rows;
    std::int32_t dim;

    __device__ explicit half_mass_tile(std::int32_t of) : rows(shared_address(dynamic_shared())), dim(of) {}

    template <class Source>
    __device__ void load_rows(const Source& row) const {
        copy<mass_tile_rows>(rows, row);
    }
    template <class Source>
    __device__ void load_columns(int buffer, const Source& column) const {
        copy<columns>(buffer_at(buffer), column);
    }
    /// All that has been loaded is there, and no thread reads the other buffer any more.
    __device__ void wait() const {
        copy_commit();
        copy_wait<0>();
        __syncthreads();
    }
    template <class Rows, class Columns>
    __device__ void multiply(float (&s)[2][columns / 2], int buffer, const Rows& /*row*/,
                             const Columns& /*column*/) const {
        multiply_band_tile<T, Dim>(s, rows, buffer_at(buffer), warp_id(), lane_id());
    }

  private:
    __device__ std::uint32_t buffer_at(int buffer) const {
        return rows + sizes::row_bytes + static_cast<std::uint32_t>(buffer) * sizes::column_bytes;
    }
    template <int Count, class Source>
    __device__ void copy(std::uint32_t to, const Source& source) const {
        constexpr int chunks = Dim / 8, at_once = mass_tile_threads / chunks;
        static_assert(mass_tile_threads % chunks == 0 && Count % at_once == 0);
        constexpr int each = Count / at_once < 8 ? Count / at_once : 8;
        const int chunk = static_cast<int>(threadIdx.x) % chunks;
        const bool inside = chunk * 8 < dim;
#pragma unroll 1
        for (int first = static_cast<int>(threadIdx.x) / chunks; first < Count; first += each * at_once) {
            // Where rows lie may have to be looked up: of several rows at once.
            const T* from[each];
#pragma unroll
            for (int i = 0; i < each; ++i) {
                from[i] = inside ? source(first + i * at_once) : nullptr;
            }
#pragma unroll
            for (int i = 0; i < each; ++i) {
                // A copy of no bytes takes any address that is aligned.
                copy_16(to + swizzled(Count, first + i * at_once, chunk),
                        from[i] != nullptr ? from[i] + chunk * 8 : source.any(),
                        from[i] != nullptr ? 16u : 0u);
            }
        }
    }
};

/// Any type and alignment: slices of rows and columns pass through static shared memory.
template <class T>
struct plain_mass_tile {
    using value_type = T;
    using compute = compute_t<T>;
    static constexpr int columns = 32, slice = 16;
    static constexpr int shared_bytes = 0;
    struct memory {
        compute rows[mass_tile_rows][slice + 1];
        compute columns[plain_mass_tile::columns][slice + 1];
    };

    memory* slices;
    std::int32_t dim;

    __device__ explicit plain_mass_tile(std::int32_t of) : dim(of) {
        __shared__ memory of_block;
        slices = &of_block;
    }
    template <class Source>
    __device__ void load_rows(const Source& /*row*/) const {}
    template <class Source>
    __device__ void load_columns(int /*buffer*/, const Source& /*column*/) const {}
    __device__ void wait() const { __syncthreads(); }

    template <class Rows, class Columns>
    __device__ void multiply(compute (&s)[2][columns / 2], int /*buffer*/, const Rows& row,
                             const Columns& column) const {
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) {
            s[0][i] = s[1][i] = compute(0);
        }
        for (std::int32_t from = 0; from < dim; from += slice) {
            copy<mass_tile_rows>(slices->rows, row, from);
            copy<columns>(slices->columns, column, from);
            __syncthreads();
            for (int x = 0; x < slice; ++x) {
#pragma unroll
                for (int i = 0; i < columns / 2; ++i) {
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        s[m][i] +=
                            slices->rows[mass_tile_row(m, i)][x] * slices->columns[mass_tile_column(i)][x];
                    }
                }
            }
            __syncthreads();
        }
    }

  private:
    template <int Count, class Source>
    __device__ void copy(compute (&to)[Count][slice + 1], const Source& source, std::int32_t from) const {
        for (int i = static_cast<int>(threadIdx.x); i < Count * slice; i += mass_tile_threads) {
            const T* const row = source(i / slice);
            const std::int32_t x = from + i % slice;
            to[i / slice][i % slice] =
                row != nullptr && x < dim ? static_cast<compute>(row[x]) : static_cast<compute>(0);
        }
    }
};

/// Query heads of a tile: queries [first, length) of head `head`; query 0 is row `begin`.
template <class T>
struct query_source {
    const rows_view<const T>& q;
    std::int64_t b, head;
    std::int32_t first, length, begin;

    __device__ const T* operator()(int r) const {
        return first + r < length ? q.row(b, head, begin + first + r) : nullptr;
    }
    __device__ const T* any() const { return q.data; }
};

/// Keys [first, end) of a head, by number.
template <class Params>
struct key_source {
    const Params& params;
    std::int64_t b, h;
    std::int32_t first, end;

    __device__ auto operator()(int r) const {
        return first + r < end ? params.key(b, h, first + r) : nullptr;
    }
    __device__ auto any() const { return params.q.data; }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
