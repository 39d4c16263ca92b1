// What the warpgroups of a Hopper qk_reduce block share: sizes, tuning, the layout of shared memory, its
// barriers, and the items that blocks take (compute capability 9.0a; bf16 and fp16, head_dim up to 256).
//
// A block has 256 rows at a time: a producer warpgroup and two consumer warpgroups of 128 rows each. One
// thread of the producer fetches the rows, and streams tiles of columns and their biases through a ring of
// stages, by TMA.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// An item that a block has taken, and whether a sum of it overflowed.
struct taken_item {
    qk_reduce_item item;
    std::int32_t number;  // -1: there are no more
    int overflow;
};

/// Sizes for head_dim up to Dim, within the 227 KB of a block.
template <int Dim>
struct qk_reduce_hopper_sizes {
    static constexpr int threads = 384;
    /// A block has 384 x 168 registers. A warpgroup that asks for more than are free waits without end.
    static constexpr int consumer_registers = 232, producer_registers = 40;
    /// The same for normalizer_hopper_kernel, whose producer keeps less.
    static constexpr int alone_consumer_registers = 240, alone_producer_registers = 24;
    static_assert(2 * consumer_registers + producer_registers <= 3 * 168);
    static_assert(2 * alone_consumer_registers + alone_producer_registers <= 3 * 168);
    static constexpr int rows = 256;
    static constexpr int columns = Dim <= 128 ? 128 : 64;
    static constexpr int stages = Dim <= 64 ? 6 : Dim <= 128 ? 4 : 2;
    static constexpr int row_bytes = rows * Dim * 2;
    static constexpr int column_bytes = columns * Dim * 2;
    static constexpr int bias = row_bytes + stages * column_bytes;  // offsets from a multiple of 1024
    static constexpr int totals = bias + stages * columns * 4;
    static constexpr int barriers = totals + 2 * rows * 4;
    static constexpr int taken = barriers + (2 * stages + 2) * 8;
    static constexpr int shared = taken + 2 * static_cast<int>(sizeof(taken_item)) + 1024;
    static_assert(shared <= 232448);
};

/// How a pass reduces, chosen by measurement.
template <int Dim, class Pass>
struct qk_reduce_hopper_tuning {
    /// Of 8 exponents, how many by polynomial. The polynomial reads registers while the products beside it
    /// add up in registers, so a larger share costs more than the special function unit gains.
    static constexpr int polynomial = Pass::mass || Dim > 128 ? 0 : 1;
    /// Whether products are issued one at a time between parts of the reduction, or all before it.
    static constexpr bool mixed = Pass::quick && (!Pass::mass || Dim <= 128);
    /// Whether a consumer's first 64 rows, and its second, stand in registers. wgmma reads rows from shared
    /// memory with every tile, and tiles, rows and biases together take nearly all of its bandwidth.
    static constexpr bool first_held = Pass::quick && Dim <= (Pass::mass ? 128 : 64);
    static constexpr bool second_held = Pass::quick && Dim <= (Pass::mass ? 128 : 64);
};

#if KVPOLICY_HOPPER_CODE

/// The parts of a block's dynamic shared memory. Addresses are those of the shared window.
///
///     rows     [256, Dim]              the item's rows, four swizzled tiles of 64
///     ring     [stages, columns, Dim]  swizzled tiles of columns
///     bias     [stages, columns]       fp32, of a mass
///     totals   [2, 256]                fp32, of items in turn
///     barriers filled and emptied by stage, rows_filled, rows_emptied
///     taken    [2]                     items in turn
template <int Dim>
struct qk_reduce_memory {
    using sizes = qk_reduce_hopper_sizes<Dim>;

    unsigned char* shared;  // a multiple of 1024
    std::uint32_t rows;
    std::uint32_t ring;
    float* bias;
    float* totals;
    std::uint32_t filled;   // [stages]
    std::uint32_t emptied;  // [stages]
    std::uint32_t rows_filled;
    std::uint32_t rows_emptied;

    __device__ __forceinline__ explicit qk_reduce_memory(unsigned char* memory)
        : shared(memory + (1024 - shared_address(memory) % 1024) % 1024),
          rows(shared_address(shared)),
          ring(rows + sizes::row_bytes),
          bias(reinterpret_cast<float*>(shared + sizes::bias)),
          totals(reinterpret_cast<float*>(shared + sizes::totals)),
          filled(rows + sizes::barriers),
          emptied(filled + sizes::stages * 8),
          rows_filled(emptied + sizes::stages * 8),
          rows_emptied(rows_filled + 8) {}

    __device__ __forceinline__ taken_item* taken() const {
        return reinterpret_cast<taken_item*>(shared + sizes::taken);
    }
    /// The flag of a block with one item.
    __device__ __forceinline__ int* flag() const { return reinterpret_cast<int*>(shared + sizes::taken); }

    /// Makes the barriers, and the totals and flags of `Items` items in turn: 1 where a block has one item,
    /// else 2. By all threads.
    template <int Items>
    __device__ __forceinline__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < sizes::stages; ++i) {
                barrier_init(filled + i * 8, 1);
                barrier_init(emptied + i * 8, 8 * arrivals_of_warp);
            }
            barrier_init(rows_filled, 1);
            if constexpr (Items == 1) {
                *flag() = 0;
            } else {
                barrier_init(rows_emptied, 8 * arrivals_of_warp);
                taken()[0].overflow = taken()[1].overflow = 0;
            }
            barrier_init_fence();
        }
        if constexpr (Items == 1) {
            if (threadIdx.x < sizes::rows) {
                totals[threadIdx.x] = -INFINITY;
            }
        } else {
            for (int i = static_cast<int>(threadIdx.x); i < Items * sizes::rows; i += sizes::threads) {
                totals[i] = -INFINITY;
            }
        }
        __syncthreads();
    }
};

/// The number of a block's next item after `number`; `count` or more: there are no more. By one thread. Items
/// are handed out, the longest first. In a careful pass after a quick one a block takes those of its share
/// whose sums overflowed.
template <class Pass, class T>
__device__ inline std::int32_t next_item(const qk_reduce_params<T>& params, std::int32_t number,
                                         std::int32_t count) {
    const auto blocks = static_cast<std::int32_t>(gridDim.x);
    if constexpr (Pass::reduce == row_reduce::running) {
        if (params.flags != nullptr) {
            do {
                number += blocks;
            } while (number < count && params.flags[number] == 0);
            return number;
        }
    }
    return blocks + atomicAdd(params.next, 1);
}

/// Whether a block of a careful pass has an item to do; all its threads get the same.
template <class T>
__device__ inline bool some_overflowed(const qk_reduce_params<T>& params, std::int32_t count) {
    bool some = params.flags == nullptr;
    for (std::int64_t i = blockIdx.x + std::int64_t{threadIdx.x} * gridDim.x; !some && i < count;
         i += std::int64_t{blockDim.x} * gridDim.x) {
        some = params.flags[i] != 0;
    }
    return __syncthreads_or(some ? 1 : 0) != 0;
}

#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
