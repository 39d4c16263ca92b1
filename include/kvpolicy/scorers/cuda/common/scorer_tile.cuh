// Tiles in shared memory as the scorers' kernels see them, and their products: swizzled tiles and tensor
// cores for 16-bit elements, padded rows and plain sums for float, which checks the others. Accumulators have
// mma's layout in both.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/tile_product.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A matrix of `rows` rows in shared memory, stored as blocks of 64 columns one after the other. 16-bit ones
/// begin at a multiple of 1024 bytes.
template <class T>
struct shared_tile {
    static constexpr bool plain = std::is_same_v<T, float>;
    static constexpr int pitch = 68;  // floats: rows of 64 do not fall on the same banks

    unsigned char* data;
    int rows;

    KVPOLICY_HOST_DEVICE static constexpr std::size_t bytes(int rows, int columns) {
        return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns / 64) *
               (plain ? pitch * 4 : 128);
    }
    __device__ std::uint32_t offset(int row, int column) const {
        if constexpr (plain) {
            return static_cast<std::uint32_t>(((column / 64) * rows + row) * pitch + column % 64) * 4;
        } else {
            return swizzled(rows, row, column / 8) + static_cast<std::uint32_t>(column % 8 * 2);
        }
    }
    __device__ float get(int row, int column) const {
        return static_cast<float>(*reinterpret_cast<const T*>(data + offset(row, column)));
    }
    /// Columns `column` (even) and the next.
    __device__ void get_pair(int row, int column, float& first, float& second) const {
        load_pair(data + offset(row, column), first, second);
    }
    __device__ void set_pair(int row, int column, float first, float second) const {
        store_pair_at(data + offset(row, column), first, second);
    }
    __device__ static void load_pair(const unsigned char* at, float& first, float& second) {
        if constexpr (plain) {
            const auto* from = reinterpret_cast<const float*>(at);
            first = from[0];
            second = from[1];
        } else if constexpr (std::is_same_v<T, bf16>) {
            const std::uint32_t both = *reinterpret_cast<const std::uint32_t*>(at);
            first = __uint_as_float(both << 16);
            second = __uint_as_float(both & 0xffff0000u);
        } else {
            struct alignas(4) pair {
                T of[2];
            };
            const pair both = *reinterpret_cast<const pair*>(at);
            first = static_cast<float>(both.of[0]);
            second = static_cast<float>(both.of[1]);
        }
    }
    __device__ static void store_pair_at(unsigned char* at, float first, float second) {
        if constexpr (plain) {
            auto* to = reinterpret_cast<float*>(at);
            to[0] = first;
            to[1] = second;
        } else {
            *reinterpret_cast<std::uint32_t*>(at) = pack<T>(first, second);
        }
    }
    /// Eight columns from `column`, a multiple of 8.
    __device__ void set_eight(int row, int column, const float (&values)[8]) const {
        if constexpr (plain) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                set_pair(row, column + i, values[i], values[i + 1]);
            }
        } else {
            *reinterpret_cast<uint4*>(data + offset(row, column)) =
                make_uint4(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
                           pack<T>(values[4], values[5]), pack<T>(values[6], values[7]));
        }
    }
    __device__ void get_eight(int row, int column, float (&values)[8]) const {
        if constexpr (plain) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] = get(row, column + i);
            }
        } else {
            if constexpr (std::is_same_v<T, bf16>) {
                const uint4 all = *reinterpret_cast<const uint4*>(data + offset(row, column));
                const std::uint32_t of[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    values[2 * i] = __uint_as_float(of[i] << 16);
                    values[2 * i + 1] = __uint_as_float(of[i] & 0xffff0000u);
                }
                return;
            }
            struct alignas(16) eight {
                T of[8];
            };
            const eight all = *reinterpret_cast<const eight*>(data + offset(row, column));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] = static_cast<float>(all.of[i]);
            }
        }
    }
    /// Pairs of columns of one row that are 8 apart, as accumulators have them: number j is of columns
    /// `column` + 8 j (even) and the next. All of them lie in the same 64 columns, and column / 8 is a
    /// multiple of how many there are, rounded up to a power of two: so the next is one exclusive or away.
    struct pairs {
        unsigned char* data;
        std::uint32_t first;

        __device__ unsigned char* at(int j) const {
            return data + (plain ? first + static_cast<std::uint32_t>(32 * j)
                                 : first ^ static_cast<std::uint32_t>(16 * j));
        }
        __device__ void get(int j, float& low, float& high) const { load_pair(at(j), low, high); }
        __device__ void set(int j, float low, float high) const { store_pair_at(at(j), low, high); }
    };
    __device__ pairs pairs_of(int row, int column) const { return {data, offset(row, column)}; }
    /// The columns from `column`, a multiple of 64, on.
    __device__ shared_tile from(int column) const { return {data + bytes(rows, 64) * (column / 64), rows}; }
};

/// Parts of a block's shared memory, one after the other: tiles at multiples of 1024 bytes, since they are
/// swizzled. Without memory it only measures.
class shared_parts {
  public:
    KVPOLICY_HOST_DEVICE explicit shared_parts(unsigned char* memory) : memory_(memory) {}

    template <class T>
    KVPOLICY_HOST_DEVICE shared_tile<T> tile(int rows, int columns) {
        return {take_bytes(shared_tile<T>::bytes(rows, columns), 1024), rows};
    }
    template <class T>
    KVPOLICY_HOST_DEVICE void tiles(int rows, int columns, shared_tile<T>& a, shared_tile<T>& b) {
        a = tile<T>(rows, columns);
        b = tile<T>(rows, columns);
    }
    template <class V>
    KVPOLICY_HOST_DEVICE V* take(int count) {
        return reinterpret_cast<V*>(take_bytes(sizeof(V) * static_cast<std::size_t>(count), 16));
    }
    /// What a launch asks for: dynamic shared memory may begin off the alignment (aligned_dynamic_shared).
    [[nodiscard]] KVPOLICY_HOST_DEVICE std::size_t bytes() const { return used_ + 1024; }

  private:
    KVPOLICY_HOST_DEVICE unsigned char* take_bytes(std::size_t bytes, std::size_t alignment) {
        used_ = (used_ + alignment - 1) / alignment * alignment;
        unsigned char* part = memory_ + used_;
        used_ += bytes;
        return part;
    }
    unsigned char* memory_;
    std::size_t used_ = 0;
};

/// The block's dynamic shared memory from a multiple of 1024 bytes on.
__device__ inline unsigned char* aligned_dynamic_shared() {
    unsigned char* memory = dynamic_shared();
    return memory + (1024 - shared_address(memory) % 1024) % 1024;
}

/// tile_product (cuda/primitives/tile_product.cuh) with its loop unrolled: a step along k changes an address
/// by a constant, where rows are k, or by an exclusive or with one, since k / 8 is even there and tiles begin
/// at multiples of 1024 bytes. For products whose number of registers is no concern.
template <class T, int MI, int NI, int Depth, bool TransA, bool TransB>
__device__ inline void unrolled_product(float (&acc)[MI][NI][4], std::uint32_t a, int a_rows, int m0,
                                        std::uint32_t b, int b_rows, int n0, int b_from) {
    static_assert(NI % 2 == 0);
    int lane = lane_id();
    asm volatile(
        ""
        : "+r"(lane));  // addresses are made anew in every call: in a loop they would fill the registers
    const int half = lane / 16, eighth = lane / 8 % 2, line = lane % 8;
    std::uint32_t of_a[MI], of_b[NI / 2];
#pragma unroll
    for (int i = 0; i < MI; ++i) {
        const int m = m0 + 16 * i;
        of_a[i] = a + (TransA ? swizzled(a_rows, half * 8 + line, m / 8 + eighth)
                              : swizzled(a_rows, m + lane % 16, half));
    }
#pragma unroll
    for (int j = 0; j < NI / 2; ++j) {
        const int n = n0 + 16 * j;
        of_b[j] = b + (TransB ? swizzled(b_rows, b_from + eighth * 8 + line, n / 8 + half)
                              : swizzled(b_rows, n + half * 8 + line, eighth));
    }
#pragma unroll
    for (int k = 0; k < Depth; k += 16) {
        const auto along = [&](std::uint32_t from, bool transposed, int rows) {
            return transposed ? from + static_cast<std::uint32_t>(k * 128)
                              : (from ^ static_cast<std::uint32_t>(k % 64 * 2)) +
                                    static_cast<std::uint32_t>(k / 64 * rows * 128);
        };
        std::uint32_t fa[MI][4];
#pragma unroll
        for (int i = 0; i < MI; ++i) {
            if constexpr (TransA) {
                load_matrices_transposed(fa[i], along(of_a[i], true, a_rows));
            } else {
                load_matrices(fa[i], along(of_a[i], false, a_rows));
            }
        }
#pragma unroll
        for (int j = 0; j < NI; j += 2) {
            std::uint32_t fb[4];
            if constexpr (TransB) {
                load_matrices_transposed(fb, along(of_b[j / 2], true, b_rows));
            } else {
                load_matrices(fb, along(of_b[j / 2], false, b_rows));
            }
#pragma unroll
            for (int i = 0; i < MI; ++i) {
                mma_16x8x16<T>(acc[i][j], fa[i], fb[0], fb[1]);
                mma_16x8x16<T>(acc[i][j + 1], fa[i], fb[2], fb[3]);
            }
        }
    }
}

/// acc[i][j] += a[m0 + 16 i ..][..] b[..][n0 + 8 j ..] over `Depth`, for one warp; as tile_product, for
/// either kind of tile.
template <int MI, int NI, int Depth, bool TransA, bool TransB, class T>
__device__ inline void add_product(float (&acc)[MI][NI][4], const shared_tile<T>& a, int m0,
                                   const shared_tile<T>& b, int n0, int b_from = 0) {
    if constexpr (shared_tile<T>::plain) {
        const int lane = lane_id();
        for (int i = 0; i < MI; ++i) {
            for (int j = 0; j < NI; ++j) {
                for (int e = 0; e < 4; ++e) {
                    const int m = m0 + 16 * i + lane / 4 + 8 * (e / 2), n = n0 + 8 * j + lane % 4 * 2 + e % 2;
                    float sum = 0.0f;
                    for (int k = 0; k < Depth; ++k) {
                        sum += (TransA ? a.get(k, m) : a.get(m, k)) *
                               (TransB ? b.get(b_from + k, n) : b.get(n, k));
                    }
                    acc[i][j][e] += sum;
                }
            }
        }
    } else {
        unrolled_product<T, MI, NI, Depth, TransA, TransB>(acc, shared_address(a.data), a.rows, m0,
                                                           shared_address(b.data), b.rows, n0, b_from);
    }
}

/// The same for 16 rows of a that are in registers already, `Depth` columns of 16-bit elements as fragments.
template <int NI, int Depth, bool TransB, class T>
__device__ inline void add_held_product(float (&acc)[1][NI][4], const std::uint32_t (&a)[Depth / 16][4],
                                        const shared_tile<T>& b, int n0) {
    static_assert(NI % 2 == 0);
    int lane = lane_id();
    asm volatile("" : "+r"(lane));  // as in unrolled_product
    const int half = lane / 16, eighth = lane / 8 % 2, line = lane % 8;
    std::uint32_t of_b[NI / 2];
#pragma unroll
    for (int j = 0; j < NI / 2; ++j) {
        const int n = n0 + 16 * j;
        of_b[j] = shared_address(b.data) + (TransB ? swizzled(b.rows, eighth * 8 + line, n / 8 + half)
                                                   : swizzled(b.rows, n + half * 8 + line, eighth));
    }
#pragma unroll
    for (int k = 0; k < Depth; k += 16) {
#pragma unroll
        for (int j = 0; j < NI; j += 2) {
            std::uint32_t fb[4];
            if constexpr (TransB) {
                load_matrices_transposed(fb, of_b[j / 2] + static_cast<std::uint32_t>(k * 128));
            } else {
                load_matrices(fb, (of_b[j / 2] ^ static_cast<std::uint32_t>(k % 64 * 2)) +
                                      static_cast<std::uint32_t>(k / 64 * b.rows * 128));
            }
            mma_16x8x16<T>(acc[0][j], a[k / 16], fb[0], fb[1]);
            mma_16x8x16<T>(acc[0][j + 1], a[k / 16], fb[2], fb[3]);
        }
    }
}

template <int MI, int NI>
__device__ inline void clear(float (&acc)[MI][NI][4]) {
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int j = 0; j < NI; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                acc[i][j][e] = 0.0f;
            }
        }
    }
}

/// A product over `count` slabs of its right side, two of them in shared memory: copy(i) starts the copies of
/// slab i and commits them, multiply(i) uses it. All threads of the block call it. Ends with a barrier.
template <class Copy, class Multiply>
__device__ __forceinline__ void for_each_slab(int count, const Copy& copy, const Multiply& multiply) {
    copy(0);
    for (int i = 0; i < count; ++i) {
        if (i + 1 < count) {
            copy(i + 1);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        multiply(i);
        __syncthreads();
    }
}

/// The sum over the four lanes that share a row of an accumulator.
__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(all_lanes, x, 1);
    return x + __shfl_xor_sync(all_lanes, x, 2);
}
__device__ inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x += __shfl_xor_sync(all_lanes, x, step);
    }
    return x;
}

/// Sums of eight numbers each over the eight lanes that share lane % 4; a lane gets that of number lane / 4.
__device__ inline float sums_down(float (&x)[8]) {
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = (lane_id() & (4 * half)) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float given = upper ? x[i] : x[i + half];
            x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(all_lanes, given, 4 * half);
        }
    }
    return x[0];
}

/// Rows [0, count) of `columns` (a multiple of 8) elements, `stride` apart in global memory, into a tile; the
/// tile's other rows up to tile.rows become 0, and columns from `filled` (a multiple of 8) on. Rows begin at
/// multiples of 16 bytes. The caller commits, waits and synchronizes.
template <class T>
__device__ inline void copy_rows(const shared_tile<T>& tile, const T* from, std::int64_t stride, int columns,
                                 int count, int threads, int filled = 1 << 30) {
    constexpr int each = 16 / sizeof(T);
    const int across = columns / each;
    for (int i = static_cast<int>(threadIdx.x); i < tile.rows * across; i += threads) {
        const int row = i / across, column = i % across * each;
        const bool in = row < count && column < filled;
        copy_16(shared_address(tile.data) + tile.offset(row, column), from + (in ? row * stride + column : 0),
                in ? 16 : 0);
    }
}

/// `Count` elements that stand in global memory as they do in a tile from its beginning on.
template <int Count, int Threads, class T>
__device__ inline void copy_image(const shared_tile<T>& tile, const T* image) {
    constexpr int each = 16 / sizeof(T);
    static_assert(Count % (Threads * each) == 0);
    const auto thread = static_cast<int>(threadIdx.x);
    const std::uint32_t to = shared_address(tile.data) + static_cast<std::uint32_t>(16 * thread);
    const T* const from = image + each * thread;
#pragma unroll
    for (int i = 0; i < Count / each; i += Threads) {
        copy_16(to + static_cast<std::uint32_t>(16 * i), from + each * i);
    }
}

/// The same as copy_rows for all `Rows` rows of `Columns` columns into a tile's columns from `at` on, by
/// `Threads` threads: with all of it known to the compiler a copy costs few instructions.
template <int Rows, int Columns, int Threads, class T>
__device__ inline void copy_slice(const shared_tile<T>& tile, int at, const T* from, int stride,
                                  int thread = static_cast<int>(threadIdx.x)) {
    constexpr int each = 16 / sizeof(T), across = Columns / each, step = Threads / across;
    static_assert(Threads % across == 0 && (step >= Rows ? step % 8 == 0 : Rows % step == 0));
    const int row = thread / across, column = thread % across * each;
    const T* const own = from + row * stride + column;
    const std::uint32_t to = shared_address(tile.data);
    if constexpr (shared_tile<T>::plain || step % 8 == 0) {  // rows whose 16 bytes stand in the same places
        const std::uint32_t first = to + tile.offset(row, at + column);
        constexpr int pitch = shared_tile<T>::plain ? shared_tile<T>::pitch * 4 : 128;
#pragma unroll
        for (int r = 0; r < Rows; r += step) {
            if (step <= Rows || row < Rows) {
                copy_16(first + static_cast<std::uint32_t>(r * pitch), own + r * stride, 16);
            }
        }
    } else {
#pragma unroll
        for (int r = 0; r < Rows; r += step) {
            copy_16(to + tile.offset(row + r, at + column), own + r * stride, 16);
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
