// The band pass by wgmma (compute capability 9.0a): bf16 and fp16, head_dim up to 256.
//
// A block has three consumer warpgroups of 64 rows each, whose rows stay in registers: from shared memory, rows and columns
// together would take all of its bandwidth. A producer warpgroup streams tiles of columns into a ring. A consumer multiplies,
// waits and folds, one accumulator at a time; the three take turns to multiply, so that one of them has the tensor cores
// while the others fold.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/band_problem.cuh>
#include <kvpolicy/cuda/blocks/row_fold.cuh>
#include <kvpolicy/cuda/blocks/row_result.cuh>
#include <kvpolicy/cuda/blocks/wgmma.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/kernels/band_portable.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes for head_dim up to Dim, within the 227 KB of a block.
template <int Dim>
struct band_hopper_sizes {
    static constexpr int consumers = 3;  // warpgroups
    static constexpr int threads = 128 * (consumers + 1);
    static constexpr int rows = 64 * consumers;
    static constexpr int columns = Dim <= 128 ? 128 : 64;
    static constexpr int stages = 6;
    /// Of 8 exponents, how many by polynomial: where products take half the time of exponentials, more of them.
    static constexpr int polynomial = Dim <= 64 ? 3 : Dim <= 128 ? 2 : 0;
    static constexpr int column_bytes = columns * Dim * 2;
    static constexpr int bias = stages * column_bytes;  // offsets from a multiple of 1024
    static constexpr int totals = bias + stages * columns * 4;
    static constexpr int barriers = totals + rows * 4;
    static constexpr int shared = barriers + 2 * stages * 8 + 16 + 1024;
    static_assert(shared <= 232448);
};

#if KVPOLICY_HOPPER_CODE

/// s = 64 rows times the columns of a tile.
template <class T, int Dim, int N>
__device__ inline void band_products(float (&s)[N], std::uint32_t (&rows)[Dim / 16][4],
                                     std::uint64_t columns) {
    constexpr int width = 2 * N;  // columns of the tile
    pin(rows);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Dim / 16; ++k) {
        wgmma<T, 0>(s, rows[k], columns + static_cast<std::uint64_t>((k % 4 * 32 + k / 4 * width * 128) / 16),
                    k != 0);
    }
    wgmma_commit();
}

/// This thread's part of 64 rows from `first` on, as wgmma takes a left operand from registers. 0 beyond length and head_dim.
template <int Dim, class T>
__device__ inline void load_band_rows(std::uint32_t (&to)[Dim / 16][4], const rows_view<const T>& from,
                                      std::int64_t b, std::int64_t head, std::int32_t first,
                                      std::int32_t length, int thread) {
    const int column = thread % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const std::int32_t t = first + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
        const T* const row = from.row(b, head, t < length ? t : 0);
#pragma unroll
        for (int k = 0; k < Dim / 16; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int x = 16 * k + 8 * half + column;
                to[k][2 * half + r] =
                    t < length && x < from.dim ? *reinterpret_cast<const std::uint32_t*>(row + x) : 0u;
            }
        }
    }
}

/// The producers: all tiles of all column heads into the ring, and the biases of their columns.
template <int Dim, class Pass, class T>
__device__ inline void produce_band_tiles(const band_problem<T>& problem, const band_item& item,
                                          std::uint32_t ring, float* bias, std::uint32_t filled,
                                          std::uint32_t emptied, int thread) {
    using sizes = band_hopper_sizes<Dim>;
    const std::int32_t turns = item.tiles * problem.streams;
    float ahead = 0.0f;
    const auto fetch_bias = [&](std::int32_t stream, std::int32_t inside) {
        if (Pass::mass && stream < problem.streams && thread < sizes::columns) {
            const float* const lse = problem.lse.head(item.b, problem.column_head(item.head, stream));
            ahead = band_bias(problem, lse, band_column<Pass, sizes::columns>(item, inside) + thread,
                              item.length);
        }
    };
    // wgmma reads by another proxy than these copies write: each thread fences its own before its warp says so.
    const auto announce = [&](int stage) {
        fence_async_proxy();
        __syncwarp();
        if (thread % 32 == 0) {
            barrier_arrive(filled + stage * 8);
        }
    };
    std::int32_t stream = 0;
    std::int32_t inside = 0;
    int stage = 0;
    int previous = 0;
    std::uint32_t parity = 1;
    if (turns > 0) {
        fetch_bias(0, 0);
    }
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        barrier_wait(emptied + stage * 8, parity);
        copy_band_tile<sizes::columns, Dim, 128, true>(
            ring + static_cast<std::uint32_t>(stage) * sizes::column_bytes, problem.columns, item.b,
            problem.column_head(item.head, stream), band_column<Pass, sizes::columns>(item, inside),
            item.length, thread);
        copy_commit();
        if (Pass::mass && thread < sizes::columns) {
            bias[stage * sizes::columns + thread] = ahead;
        }
        if (++inside == item.tiles) {
            inside = 0;
            ++stream;
        }
        fetch_bias(stream, inside);
        if (turn > 0) {
            copy_wait<1>();
            announce(previous);
        }
        previous = stage;
        if (++stage == sizes::stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    if (turns > 0) {
        copy_wait<0>();
        announce(previous);
    }
}

#endif

template <class T, int Dim, class Pass>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(512), 1)
    band_hopper_kernel(const __grid_constant__ band_problem<T> problem) {
#if KVPOLICY_HOPPER_CODE
    using sizes = band_hopper_sizes<Dim>;
    if constexpr (Pass::fold == row_fold::running) {
        if (problem.flags != nullptr && problem.flags[blockIdx.x] == 0) {
            return;
        }
    }
    const band_item item =
        band_item_of<Pass, sizes::rows, sizes::columns>(problem, static_cast<std::int32_t>(blockIdx.x));
    if (item.first >= item.length) {
        if (Pass::mass && Pass::fold == row_fold::sum && threadIdx.x == 0) {
            problem.flags[blockIdx.x] = 0;
        }
        return;
    }
    unsigned char* shared = dynamic_shared();
    shared += (1024 - shared_address(shared) % 1024) % 1024;
    const std::uint32_t ring = shared_address(shared);
    float* const bias = reinterpret_cast<float*>(shared + sizes::bias);
    float* const totals = reinterpret_cast<float*>(shared + sizes::totals);
    const std::uint32_t filled = ring + sizes::barriers;
    const std::uint32_t emptied = filled + sizes::stages * 8;
    int* const flag = reinterpret_cast<int*>(shared + sizes::barriers + 2 * sizes::stages * 8);

    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int lane = lane_id();
    if (threadIdx.x == 0) {
        for (int i = 0; i < sizes::stages; ++i) {
            barrier_init(filled + i * 8, 4);
            barrier_init(emptied + i * 8, 4 * sizes::consumers);
        }
        *flag = 0;
        barrier_init_fence();
    }
    if (threadIdx.x < sizes::rows) {
        totals[threadIdx.x] = -INFINITY;
    }
    __syncthreads();

    const std::int32_t turns = item.tiles * problem.streams;
    if (group == sizes::consumers) {
        give_registers<56>();
        produce_band_tiles<Dim, Pass>(problem, item, ring, bias, filled, emptied, thread);
        return;
    }
    take_registers<152>();
    const int pair = lane % 4;
    const int own = thread / 32 * 16 + lane / 4;  // this thread's rows of the warpgroup's 64: own and own + 8
    const row_constants constants = constants_of(problem.exponents);
    const std::int32_t first_row = item.first + 64 * group;
    std::uint32_t of_rows[Dim / 16][4];
    load_band_rows<Dim>(of_rows, problem.rows, item.b, item.head, first_row, item.length, thread);
    row_state<Pass> state;
    state.clear();
    bool overflow = false;
    std::int32_t inside = 0;
    int stage = 0;
    std::uint32_t parity = 0;
    // Barrier 2 + g: warpgroup g's turn to multiply. The last warpgroup opens the round.
    const int own_turn = 2 + group;
    const int next_turn = group + 1 == sizes::consumers ? 2 : 3 + group;
    if (group + 1 == sizes::consumers && turns > 0) {
        named_barrier_arrive(2, 256);
    }
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        const std::int32_t column = band_column<Pass, sizes::columns>(item, inside);
        const auto pass_turn = [&] {
            if (group + 1 < sizes::consumers || turn + 1 < turns) {
                named_barrier_arrive(next_turn, 256);
            }
        };
        barrier_wait(filled + stage * 8, parity);
        named_barrier(own_turn, 256);
        if (item.any(first_row, 64, column, sizes::columns)) {
            float s[sizes::columns / 2];
            band_products<T, Dim>(
                s, of_rows, describe_k_major(ring + static_cast<std::uint32_t>(stage) * sizes::column_bytes));
            pass_turn();
            wgmma_wait<0>();
            pin(s);
            const std::int32_t apart = column + 4 * pair - (first_row + own);
            const float* const of = bias + stage * sizes::columns + 4 * pair;
            if (item.full(first_row, 64, column, sizes::columns)) {
                state.template absorb<false, sizes::polynomial>(s, of, constants, apart, item.low, item.span);
            } else {
                state.template absorb<true, 0>(s, of, constants, apart, item.low, item.span);
            }
        } else {
            pass_turn();
        }
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(emptied + stage * 8);
        }
        if (++stage == sizes::stages) {
            stage = 0;
            parity ^= 1;
        }
        if (++inside == item.tiles) {  // the last tile of a column head
            inside = 0;
            float result[2];
            state.reduce(result, overflow);
            state.clear();
            if (pair == 0) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = 64 * group + own + 8 * r;
                    if constexpr (Pass::mass) {
                        mass_total<float> total{totals[row]};
                        total.add(log_mass_of(problem, item, item.first + row, result[r]), problem.rule.mean);
                        totals[row] = total.log_mass;
                    } else {
                        totals[row] = result[r] * ln_2<float>;
                    }
                }
            }
        }
    }
    if constexpr (Pass::mass && Pass::fold == row_fold::sum) {
        if (overflow) {
            *flag = 1;
        }
    }
    named_barrier(1, 128 * sizes::consumers);
    const int row = static_cast<int>(threadIdx.x);
    if (row < sizes::rows && item.first + row < item.length) {
        float* const out = problem.out.head(item.b, item.head) + item.first + row;
        if constexpr (Pass::mass) {
            *out = target_of(problem, mass_total<float>{totals[row]});
        } else {
            *out = totals[row];
        }
    }
    if constexpr (Pass::mass && Pass::fold == row_fold::sum) {
        if (row == 0) {
            problem.flags[blockIdx.x] = *flag;
        }
    }
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
