// The producer of a Hopper qk_reduce block: one thread fetches rows, tiles of columns and biases by TMA.
#pragma once

#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_pipeline.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/tensor_map.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if KVPOLICY_HOPPER_CODE

/// Everything here is called by one thread.
template <class T, int Dim, class Pass>
struct qk_reduce_producer {
    using sizes = qk_reduce_hopper_sizes<Dim>;
    static constexpr std::uint32_t bias_bytes = Pass::mass ? sizes::columns * 4 : 0;
    /// Tiles of an item that fit into the ring before the item before it is done with its rows.
    static constexpr std::int32_t early = sizes::stages - 1;

    const qk_reduce_params<T>& params;
    const CUtensorMap& rows_map;
    const CUtensorMap& columns;
    const qk_reduce_memory<Dim>& memory;
    int stage = 0;
    std::uint32_t parity = 1;

    __device__ __forceinline__ qk_reduce_producer(const qk_reduce_params<T>& call, const CUtensorMap& of_rows,
                                                  const CUtensorMap& of_columns,
                                                  const qk_reduce_memory<Dim>& shared)
        : params(call), rows_map(of_rows), columns(of_columns), memory(shared) {}

    /// One item, whose `tiles` pass once: a block per item.
    __device__ __forceinline__ void run_one(const qk_reduce_item& item) {
        const std::int32_t head = params.column_head(item.head, 0);
        if (item.tiles > 0) {
            barrier_expect(memory.rows_filled, sizes::row_bytes);
            fetch_rows(item);
        }
        for (std::int32_t turn = 0; turn < item.tiles; ++turn) {
            fetch_tile(item, head, qk_reduce_column<Pass, sizes::columns>(item, turn));
        }
    }

    /// Items of `count` until there are no more: a block stays.
    __device__ __forceinline__ void run(std::int32_t count) {
        auto number = static_cast<std::int32_t>(blockIdx.x);
        if (Pass::reduce == row_reduce::running && params.flags != nullptr && params.flags[number] == 0) {
            number = next_item<Pass>(params, number, count);
        }
        for (std::uint32_t n = 0;; ++n) {
            // 1. Take an item.
            qk_reduce_item item;
            find_item(item, number, count);
            const bool more = number < count;
            // 2., 3. Its rows and tiles. The first tiles come before the rows, which wait for the item
            // before.
            fetch_item(item, number, count, n);
            if (!more) {
                break;
            }
        }
    }

  private:
    /// The first item from `number` on that has rows. Clears the flags of those without.
    __device__ __forceinline__ void find_item(qk_reduce_item& item, std::int32_t& number,
                                              std::int32_t count) {
        for (; number < count; number = next_item<Pass>(params, number, count)) {
            item = qk_reduce_item_of<Pass, sizes::rows, sizes::columns>(params, number);
            if (item.first < item.length) {
                break;
            }
            if constexpr (Pass::quick) {
                params.flags[number] = 0;
            }
        }
    }

    /// The rows and all tiles of item n of this block; `number` becomes that of the next.
    __device__ __forceinline__ void fetch_item(const qk_reduce_item& item, std::int32_t& number,
                                               std::int32_t count, std::uint32_t n) {
        const bool more = number < count;
        const std::int32_t own = more ? number : -1;
        const std::int32_t turns = more ? item.tiles * params.streams : 0;
        std::int32_t stream = 0;
        std::int32_t inside = 0;
        for (std::int32_t turn = 0; turn < turns; ++turn) {
            if (turn == early) {
                announce(item, own, turns, n);
            }
            // Known by the time that it is needed. Taken earlier, another block could not take it.
            if (turn == turns - 1) {
                number = next_item<Pass>(params, number, count);
            }
            fetch_tile(item, params.column_head(item.head, stream),
                       qk_reduce_column<Pass, sizes::columns>(item, inside));
            if (++inside == item.tiles) {
                inside = 0;
                ++stream;
            }
        }
        if (turns <= early) {
            announce(item, own, turns, n);
        }
        if (more && turns == 0) {
            number = next_item<Pass>(params, number, count);
        }
    }

    /// Tells consumers of item n, and fetches its rows, once they are done with the rows of item n - 1. Then
    /// they are also done with all that belongs to item n - 2.
    __device__ __forceinline__ void announce(const qk_reduce_item& item, std::int32_t number,
                                             std::int32_t turns, std::uint32_t n) {
        barrier_wait(memory.rows_emptied, (n & 1) ^ 1);
        memory.taken()[n & 1].item = item;
        memory.taken()[n & 1].number = number;
        barrier_expect(memory.rows_filled, turns > 0 ? sizes::row_bytes : 0);
        if (turns > 0) {
            fetch_rows(item);
        }
    }

    /// The rows of an item: 64 at a time, the swizzled tiles that one wgmma reads.
    __device__ __forceinline__ void fetch_rows(const qk_reduce_item& item) const {
        const std::int32_t first = params.packed.rows.begin(item.b) + item.first;
#pragma unroll 1
        for (int m = 0; m < sizes::rows / 64; ++m) {
#pragma unroll
            for (int x = 0; x < Dim / 64; ++x) {
                copy_box(memory.rows + static_cast<std::uint32_t>(m * Dim / 64 + x) * 64 * 128, rows_map,
                         64 * x, first + 64 * m, item.head, params.packed.rows.sequence(item.b),
                         memory.rows_filled);
            }
        }
    }

    /// The tile of columns from `column` on, and its biases, into the next stage of the ring.
    __device__ __forceinline__ void fetch_tile(const qk_reduce_item& item, std::int32_t head,
                                               std::int32_t column) {
        const std::uint32_t full = memory.filled + static_cast<std::uint32_t>(stage) * 8;
        barrier_wait(memory.emptied + static_cast<std::uint32_t>(stage) * 8, parity);
        barrier_expect(full, sizes::column_bytes + bias_bytes);
        if constexpr (Pass::mass) {
            copy_bulk(memory.ring + sizes::stages * sizes::column_bytes +
                          static_cast<std::uint32_t>(stage) * bias_bytes,
                      params.bias + params.bias_row(item.b, head) + column, bias_bytes, full);
        }
        const std::uint32_t to = memory.ring + static_cast<std::uint32_t>(stage) * sizes::column_bytes;
        const std::int32_t first = params.packed.rows.begin(item.b) + column,
                           sequence = params.packed.rows.sequence(item.b);
#pragma unroll
        for (int x = 0; x < Dim / 64; ++x) {
            copy_box(to + static_cast<std::uint32_t>(x) * sizes::columns * 128, columns, 64 * x, first, head,
                     sequence, full);
        }
        if (++stage == sizes::stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#endif

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
