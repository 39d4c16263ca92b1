// The band pass by wgmma (compute capability 9.0a): bf16 and fp16, head_dim up to 256.
//
// A block has 256 rows at a time and two consumer warpgroups of 128. One thread fetches the rows, and streams tiles of
// columns and their biases into a ring, by TMA. A consumer has two accumulators of 64 rows: while one is reduced, the products of
// the other are under way. A block stays and takes one item after another; the next one's rows and first tiles come while the last
// tiles of an item are reduced. (Slower, by measurement: three or four warpgroups of 64 rows with one accumulator each, tiles by
// cp.async, whose instructions and waits the consumers feel, and biases in registers.)
#pragma once

#include <kvpolicy/attention/cuda/future_mass/agent_row_reduce.cuh>
#include <kvpolicy/attention/cuda/future_mass/kernel_qk_reduce_portable.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/row_result.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/cuda/tensor_map.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// An item that a block has taken, and what it says about it.
struct taken_item {
    qk_reduce_item item;
    std::int32_t number;  // -1: there are no more
    int overflow;
};

/// Sizes for head_dim up to Dim, within the 227 KB of a block.
template <int Dim>
struct qk_reduce_hopper_sizes {
    static constexpr int threads = 384;
    /// Of all registers of a block, 384 x 168, as many as there are: a warpgroup that asked for more would wait for ever.
    static constexpr int consumer_registers = 232, producer_registers = 40;
    /// The same of normalizer_hopper_kernel, whose producer has less to remember.
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

/// Columns that a block of qk_reduce_bias_kernel makes the biases of.
inline constexpr std::int32_t bias_columns = 2048;

/// How a pass reduces, chosen by measurement.
template <int Dim, class Pass>
struct qk_reduce_hopper_tuning {
    /// Of 8 exponents, how many by polynomial. Its instructions read registers while the products that run beside them add up
    /// in registers, so that more of them cost more than the special function unit gains.
    static constexpr int polynomial = Pass::mass || Dim > 128 ? 0 : 1;
    /// Whether products are issued one at a time between parts of the reduction, or all before it.
    static constexpr bool mixed = Pass::quick && (!Pass::mass || Dim <= 128);
    /// Whether a consumer's first 64 rows, and its second, stand in registers: wgmma reads rows in shared memory anew with every tile,
    /// and tiles, rows and biases together ask for nearly all of its bandwidth.
    static constexpr bool first_held = Pass::quick && Dim <= (Pass::mass ? 128 : 64);
    static constexpr bool second_held = Pass::quick && Dim <= (Pass::mass ? 128 : 64);
};

/// Makes the biases of all columns. Blocks: for every column head as many as its row of biases takes.
template <class T>
__global__ void __launch_bounds__(256) qk_reduce_bias_kernel(const qk_reduce_params<T> params) {
    const std::int64_t blocks = (params.bias_stride + bias_columns - 1) / bias_columns;
    const std::int64_t row = blockIdx.x / blocks;
    const std::int64_t b = row / params.columns.heads;
    const std::int64_t head = row % params.columns.heads;
    const std::int64_t first = blockIdx.x % blocks * bias_columns;
    const std::int64_t end =
        first + bias_columns < params.bias_stride ? first + bias_columns : params.bias_stride;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *params.next = 0;
    }
    const std::int32_t length = params.length_of(b);
    const float* const lse = params.lse.head(b, head);
    float* const bias = params.bias + params.bias_row(b, head);
    for (std::int64_t i = first + threadIdx.x; i < end; i += blockDim.x) {
        bias[i] = qk_reduce_bias(params, lse, static_cast<std::int32_t>(i), length);
    }
}

#if KVPOLICY_HOPPER_CODE

/// The number of a block's next item after `number`; `count` or more: there are no more. By one thread. Items are handed out, those
/// with the longest way first; of a careful pass after a quick one a block does those of its share whose sums have overflowed.
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

/// Whether a block of a careful pass has anything to do; all its threads get the same.
template <class T>
__device__ inline bool some_overflowed(const qk_reduce_params<T>& params, std::int32_t count) {
    bool some = params.flags == nullptr;
    for (std::int64_t i = blockIdx.x + std::int64_t{threadIdx.x} * gridDim.x; !some && i < count;
         i += std::int64_t{blockDim.x} * gridDim.x) {
        some = params.flags[i] != 0;
    }
    return __syncthreads_or(some ? 1 : 0) != 0;
}

/// 64 rows as an operand: in shared memory, where every product reads them anew, ...
template <int Dim, bool Held>
struct qk_operand_rows {
    std::uint64_t at;

    __device__ explicit qk_operand_rows(std::uint32_t shared) : at(describe_k_major(shared)) {}
    template <class T, int N>
    __device__ void multiply(float (&s)[N], int k, std::uint64_t columns) const {
        wgmma<T, 0, 0>(s, at + static_cast<std::uint64_t>((k % 4 * 32 + k / 4 * 64 * 128) / 16), columns,
                       k != 0);
    }
};
/// ... or held in registers, which leaves a third more of shared memory's bandwidth.
template <int Dim>
struct qk_operand_rows<Dim, true> {
    std::uint32_t part[Dim / 16][4];

    __device__ explicit qk_operand_rows(std::uint32_t shared) {
        const int lane = lane_id();
        const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < Dim / 16; ++k) {
            load_matrices(part[k], shared + swizzled(64, row, 2 * k + lane / 16));
        }
    }
    template <class T, int N>
    __device__ void multiply(float (&s)[N], int k, std::uint64_t columns) const {
        wgmma<T, 0>(s, part[k], columns, k != 0);
    }
};

/// s = 64 rows times the columns of a tile. `beside(k)`, after the k-th of Dim / 16 products, does something else meanwhile.
template <class T, int Dim, bool Held, int N, class Beside>
__device__ inline void qk_products(float (&s)[N], const qk_operand_rows<Dim, Held>& rows,
                                   std::uint64_t columns, const Beside& beside) {
    constexpr int width = 2 * N;  // columns of the tile
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Dim / 16; ++k) {
        rows.template multiply<T>(
            s, k, columns + static_cast<std::uint64_t>((k % 4 * 32 + k / 4 * width * 128) / 16));
        if (k == Dim / 16 - 1) {
            wgmma_commit();
        }
        beside(k);
    }
}
template <class T, int Dim, bool Held, int N>
__device__ inline void qk_products(float (&s)[N], const qk_operand_rows<Dim, Held>& rows,
                                   std::uint64_t columns) {
    qk_products<T>(s, rows, columns, [](int) {});
}

/// The rows of an item: 64 at a time, the swizzled tiles that one wgmma reads. By one thread.
template <int Dim>
__device__ inline void fetch_row_tiles(std::uint32_t to, const CUtensorMap& map, const qk_reduce_item& item,
                                       std::uint32_t barrier) {
#pragma unroll 1
    for (int m = 0; m < qk_reduce_hopper_sizes<Dim>::rows / 64; ++m) {
#pragma unroll
        for (int x = 0; x < Dim / 64; ++x) {
            copy_box(to + static_cast<std::uint32_t>(m * Dim / 64 + x) * 64 * 128, map, 64 * x,
                     item.first + 64 * m, item.head, item.b, barrier);
        }
    }
}
/// A tile of columns into its place in the ring. By one thread.
template <int Dim>
__device__ inline void fetch_column_tiles(std::uint32_t to, const CUtensorMap& map, std::int32_t column,
                                          std::int32_t head, std::int32_t b, std::uint32_t barrier) {
#pragma unroll
    for (int x = 0; x < Dim / 64; ++x) {
        copy_box(to + static_cast<std::uint32_t>(x) * qk_reduce_hopper_sizes<Dim>::columns * 128, map, 64 * x,
                 column, head, b, barrier);
    }
}

/// Where a consumer's thread is in 64 rows: it has rows own and own + 8, and in them every fourth pair of columns.
struct qk_reduce_thread {
    int pair, own;
};

/// Takes in a tile of 64 rows from `first` on. `bias`: of the ring's tiles, of which this one is in place `at`; an lse has none.
template <int Dim, class Pass, int Width>
__device__ inline void reduce_tile(const float (&s)[Width], row_state<Pass>& state,
                                   const qk_reduce_item& item, const qk_reduce_thread& place,
                                   const row_constants& constants, std::int32_t first, std::int32_t column,
                                   const float* bias, int at) {
    constexpr int columns = qk_reduce_hopper_sizes<Dim>::columns;
    const std::int32_t apart = column + 2 * place.pair - (first + place.own);
    const std::int32_t left = item.length - (column + 2 * place.pair);
    const float* const of = bias + at * columns + 2 * place.pair;
    if (item.full(first, 64, column, columns)) {
        state.template absorb<false, qk_reduce_hopper_tuning<Dim, Pass>::polynomial>(
            s, of, constants, apart, left, item.low, item.span);
    } else if (item.any(first, 64, column, columns)) {
        state.template absorb<true, 0>(s, of, constants, apart, left, item.low, item.span);
    }
}

/// Adds what 64 rows from `first` on came to, and notes whether some row overflowed; those beyond the sequence may hold anything.
template <class Pass, class T>
__device__ inline void finish_rows(const qk_reduce_params<T>& params, const qk_reduce_item& item,
                                   const qk_reduce_thread& place, row_state<Pass>& state, std::int32_t first,
                                   float* totals, bool& overflow) {
    float result[2];
    bool over[2];
    state.reduce(result, over);
    state.clear();
    overflow = overflow || (over[0] && first + place.own < item.length) ||
               (over[1] && first + place.own + 8 < item.length);
    if (place.pair == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            add_to_total<Pass>(params, item, totals, first - item.first + place.own + 8 * r, result[r]);
        }
    }
}

#endif

/// As many blocks as fit; each takes items as long as there are any of `count`.
template <class T, int Dim, class Pass>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(384), 1)
    qk_reduce_hopper_kernel(const __grid_constant__ qk_reduce_params<T> params,
                            const __grid_constant__ CUtensorMap rows_map,
                            const __grid_constant__ CUtensorMap columns, const std::int32_t count) {
#if KVPOLICY_HOPPER_CODE
    using sizes = qk_reduce_hopper_sizes<Dim>;
    using tuning = qk_reduce_hopper_tuning<Dim, Pass>;
    if constexpr (Pass::reduce == row_reduce::running) {
        if (!some_overflowed(params, count)) {
            return;
        }
    }
    unsigned char* shared = dynamic_shared();
    shared += (1024 - shared_address(shared) % 1024) % 1024;
    const std::uint32_t rows = shared_address(shared);
    const std::uint32_t ring = rows + sizes::row_bytes;
    float* const bias = reinterpret_cast<float*>(shared + sizes::bias);
    float* const totals = reinterpret_cast<float*>(shared + sizes::totals);  // [2], of items in turn
    const std::uint32_t filled = rows + sizes::barriers;
    const std::uint32_t emptied = filled + sizes::stages * 8;
    const std::uint32_t rows_filled = emptied + sizes::stages * 8;
    const std::uint32_t rows_emptied = rows_filled + 8;
    taken_item* const taken = reinterpret_cast<taken_item*>(shared + sizes::taken);  // [2], in turn

    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < sizes::stages; ++i) {
            barrier_init(filled + i * 8, 1);
            barrier_init(emptied + i * 8, 8 * arrivals_of_warp);
        }
        barrier_init(rows_filled, 1);
        barrier_init(rows_emptied, 8 * arrivals_of_warp);
        taken[0].overflow = taken[1].overflow = 0;
        barrier_init_fence();
    }
    for (int i = static_cast<int>(threadIdx.x); i < 2 * sizes::rows; i += sizes::threads) {
        totals[i] = -INFINITY;
    }
    __syncthreads();

    if (group == 2) {  // the producer
        give_registers<sizes::producer_registers>();
        if (thread == 0) {
            int stage = 0;
            std::uint32_t parity = 1;
            auto number = static_cast<std::int32_t>(blockIdx.x);
            if (Pass::reduce == row_reduce::running && params.flags != nullptr && params.flags[number] == 0) {
                number = next_item<Pass>(params, number, count);
            }
            for (std::uint32_t n = 0;; ++n) {
                qk_reduce_item item;
                for (; number < count; number = next_item<Pass>(params, number, count)) {
                    item = qk_reduce_item_of<Pass, sizes::rows, sizes::columns>(params, number);
                    if (item.first < item.length) {
                        break;
                    }
                    if constexpr (Pass::quick) {
                        params.flags[number] = 0;
                    }
                }
                const bool more = number < count;
                const std::int32_t own = more ? number : -1;
                const std::int32_t turns = more ? item.tiles * params.streams : 0;
                // Once consumers are done with the rows of the item before, they are done with all that belongs to the one before that.
                const auto fetch_rows = [&] {
                    barrier_wait(rows_emptied, (n & 1) ^ 1);
                    taken[n & 1].item = item;
                    taken[n & 1].number = own;
                    barrier_expect(rows_filled, turns > 0 ? sizes::row_bytes : 0);
                    if (turns > 0) {
                        fetch_row_tiles<Dim>(rows, rows_map, item, rows_filled);
                    }
                };
                std::int32_t stream = 0;
                std::int32_t inside = 0;
                constexpr std::uint32_t bias_bytes = Pass::mass ? sizes::columns * 4 : 0;
                // The first tiles find room before the item before is done with its rows.
                constexpr std::int32_t early = sizes::stages - 1;
                for (std::int32_t turn = 0; turn < turns; ++turn) {
                    if (turn == early) {
                        fetch_rows();
                    }
                    // Known by the time that it is needed; taken earlier, it would be kept from others.
                    if (turn == turns - 1) {
                        number = next_item<Pass>(params, number, count);
                    }
                    const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, inside);
                    const std::int32_t head = params.column_head(item.head, stream);
                    const std::uint32_t full = filled + static_cast<std::uint32_t>(stage) * 8;
                    barrier_wait(emptied + static_cast<std::uint32_t>(stage) * 8, parity);
                    barrier_expect(full, sizes::column_bytes + bias_bytes);
                    if constexpr (Pass::mass) {
                        copy_bulk(ring + sizes::stages * sizes::column_bytes +
                                      static_cast<std::uint32_t>(stage) * bias_bytes,
                                  params.bias + params.bias_row(item.b, head) + column, bias_bytes, full);
                    }
                    fetch_column_tiles<Dim>(ring + static_cast<std::uint32_t>(stage) * sizes::column_bytes,
                                            columns, column, head, item.b, full);
                    if (++inside == item.tiles) {
                        inside = 0;
                        ++stream;
                    }
                    if (++stage == sizes::stages) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
                if (turns <= early) {
                    fetch_rows();
                }
                if (!more) {
                    break;
                }
                if (turns == 0) {
                    number = next_item<Pass>(params, number, count);
                }
            }
        }
    } else {
        take_registers<sizes::consumer_registers>();
        const int lane = thread % 32;
        const qk_reduce_thread place{lane % 4, thread / 32 * 16 + lane / 4};
        const row_constants constants = constants_of(params.exponents);
        constexpr int width = sizes::columns / 2;
        int stage = 0;
        std::uint32_t parity = 0;
        for (std::uint32_t n = 0;; ++n) {
            barrier_wait(rows_filled, n & 1);
            taken_item& its = taken[n & 1];
            if (its.number < 0) {
                break;
            }
            const qk_reduce_item item = its.item;
            const std::int32_t turns = item.tiles * params.streams;
            const std::int32_t first_row = item.first + 128 * group;
            float* const own_totals = totals + (n & 1) * sizes::rows;
            float s0[width], s1[width];
            row_state<Pass> state0, state1;
            state0.clear();
            state1.clear();
            bool overflow = false;

            const auto tile_of = [&](int at) {
                return describe_k_major(ring + static_cast<std::uint32_t>(at) * sizes::column_bytes);
            };
            const auto reduce = [&](const float(&s)[width], row_state<Pass>& state, std::int32_t first,
                                    std::int32_t column, int at) {
                reduce_tile<Dim>(s, state, item, place, constants, first, column, bias, at);
            };
            // Most tiles: exponents go as they are, and all pairs count. `next` is multiplied beside the reduction of s.
            const auto is_plain = [&](std::int32_t column) {
                return tuning::mixed && constants.cap == 0.0f && (Pass::mass || column != 0) &&
                       item.full(first_row, 128, column, sizes::columns);
            };
            const auto reduce_part = [&](const float(&s)[width], row_state<Pass>& state, int at, int k) {
                constexpr int steps = Dim / 16;
                if constexpr (tuning::mixed) {
                    state.template absorb_part<tuning::polynomial>(
                        s, k * (width / 4) / steps, (k + 1) * (width / 4) / steps,
                        bias + at * sizes::columns + 2 * place.pair, params.exponents.scale);
                }
            };
            const auto finish = [&](row_state<Pass>& state, std::int32_t first) {
                finish_rows<Pass>(params, item, place, state, first, own_totals, overflow);
            };

            if (turns > 0) {
                const qk_operand_rows<Dim, tuning::first_held> a0(
                    rows + static_cast<std::uint32_t>(2 * group) * 64 * Dim * 2);
                const qk_operand_rows<Dim, tuning::second_held> a1(
                    rows + static_cast<std::uint32_t>(2 * group + 1) * 64 * Dim * 2);
                if constexpr (tuning::second_held) {
                    warp_arrive(rows_emptied, lane);  // the next item's may come
                }
                std::int32_t inside = 0;
                barrier_wait(filled + stage * 8, parity);
                qk_products<T>(s0, a0, tile_of(stage));
                wgmma_wait<0>();
                pin(s0);
                // At the head of the loop s0 is done and nothing is under way: ptxas takes products that cross its edge apart.
                for (std::int32_t turn = 1; turn < turns; ++turn) {
                    const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, inside);
                    const bool last = ++inside == item.tiles;
                    inside = last ? 0 : inside;
                    const int next = stage + 1 == sizes::stages ? 0 : stage + 1;
                    parity ^= next == 0 ? 1u : 0u;
                    if (is_plain(column)) {
                        qk_products<T>(s1, a1, tile_of(stage),
                                       [&](int k) { reduce_part(s0, state0, stage, k); });
                        wgmma_wait<0>();
                        pin(s1);
                        barrier_wait(filled + next * 8, parity);
                        qk_products<T>(s0, a0, tile_of(next),
                                       [&](int k) { reduce_part(s1, state1, stage, k); });
                        wgmma_wait<0>();
                        pin(s0);
                        warp_arrive(emptied + stage * 8, lane);
                        if (last) {
                            finish(state0, first_row);
                            finish(state1, first_row + 64);
                        }
                        stage = next;
                        continue;
                    }
                    qk_products<T>(s1, a1, tile_of(stage));
                    reduce(s0, state0, first_row, column, stage);
                    if (last) {
                        finish(state0, first_row);
                    }
                    barrier_wait(filled + next * 8, parity);
                    qk_products<T>(s0, a0, tile_of(next));
                    wgmma_wait<1>();
                    pin(s1);
                    reduce(s1, state1, first_row + 64, column, stage);
                    if (last) {
                        finish(state1, first_row + 64);
                    }
                    warp_arrive(emptied + stage * 8, lane);
                    wgmma_wait<0>();
                    pin(s0);
                    stage = next;
                }
                const std::int32_t column = qk_reduce_column<Pass, sizes::columns>(item, inside);
                qk_products<T>(s1, a1, tile_of(stage));
                reduce(s0, state0, first_row, column, stage);
                finish(state0, first_row);
                wgmma_wait<0>();
                pin(s1);
                if constexpr (!tuning::second_held) {
                    warp_arrive(rows_emptied, lane);
                }
                reduce(s1, state1, first_row + 64, column, stage);
                finish(state1, first_row + 64);
                warp_arrive(emptied + stage * 8, lane);
                stage = stage + 1 == sizes::stages ? 0 : stage + 1;
                parity ^= stage == 0 ? 1u : 0u;
            } else {
                warp_arrive(rows_emptied, lane);
            }
            if constexpr (Pass::quick) {
                if (overflow) {
                    its.overflow = 1;
                }
            }
            named_barrier(1, 256);
            // Consumers are the first 256 threads. What a thread resets here is used again after the next item's barrier.
            const int row = static_cast<int>(threadIdx.x);
            write_total<Pass>(params, item, own_totals, row, its.number, &its.overflow);
            own_totals[row] = -INFINITY;
            if (Pass::quick && row == 0) {
                its.overflow = 0;
            }
        }
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
