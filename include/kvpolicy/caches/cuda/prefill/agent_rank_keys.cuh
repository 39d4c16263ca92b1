// Ranks of a round's keys, by one block: all pairs where there are few, else a radix sort in shared memory.
#pragma once

#include <kvpolicy/caches/cuda/prefill/agent_top_k_round.cuh>
#include <kvpolicy/caches/cuda/prefill/top_k_round.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/masks/cuda/sorted_order.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A round whose keys are ranked: memory.order and memory.rank.
template <int Threads, int Items>
struct agent_rank_keys : agent_top_k_round<Threads, Items, static_round_memory<Threads, Items>> {
    using shared = static_round_memory<Threads, Items>;
    using round = agent_top_k_round<Threads, Items, shared>;
    template <int Each>
    using sorter = typename shared::template sorter<Each>;
    using pairs_memory = typename shared::pairs_memory;
    using select_memory = typename shared::select_memory;
    static constexpr int counted = shared::counted, padded = shared::padded;
    static constexpr bool sorts = shared::sorts;
    using round::capacity, round::none;
    using round::memory, round::thread, round::head, round::head_params, round::old, round::candidates,
        round::key_of;
    using round::round;
    using typename round::index;

    /// `count` rounded up to a size that rank_all has.
    __device__ static constexpr int sorted_size(int count) {
        int size = counted;
        while (size < count) {
            size = size < 2 * Threads ? 2 * Threads : 2 * size;
        }
        return size;
    }

    /// Writes memory.order and memory.rank.
    __device__ __forceinline__ void rank_all() {
        const int keys = old + candidates;
        for (int r = thread; r < padded; r += Threads) {
            memory.order[r] = none;
        }
        if (keys <= counted) {
            compare_all_pairs(keys);
        } else if constexpr (sorts) {
            __syncthreads();
            sort_any<2>(keys);
        }
        for (int r = thread; r < keys; r += Threads) {
            memory.rank[memory.order[r]] = static_cast<index>(r);
        }
        __syncthreads();
    }

  private:
    __device__ __forceinline__ void compare_all_pairs(int keys) {
        pairs_memory& pairs = memory.pairs;
        for (int v = thread; v < keys; v += Threads) {
            const eviction_rank key = key_of(v);
            pairs.code[v] = key.code;
            pairs.position[v] = key.position;
        }
        __syncthreads();
        for (int v = thread; v < keys; v += Threads) {
            const eviction_rank mine{pairs.code[v], pairs.position[v]};
            int better = 0;
            for (int other = 0; other < keys; ++other) {
                better += mine.before({pairs.code[other], pairs.position[other]}) ? 1 : 0;
            }
            memory.order[better] = static_cast<index>(v);
        }
        __syncthreads();
    }

    /// The smallest sort that is large enough.
    template <int Each>
    __device__ __forceinline__ void sort_any(int keys) {
        if constexpr (Each < Items) {
            if (keys > Threads * Each) {
                sort_any<2 * Each>(keys);
                return;
            }
        }
        sort<Each>(keys);
    }

    /// Pass 0 sorts by 32 bits of the priority. Where that leaves long runs of equal ones out of order, the
    /// other passes sort by the position, lower half first, and then by the 64-bit code, lower half first.
    template <int Each>
    __device__ __forceinline__ void sort(int keys) {
        static_assert(sizeof(typename sorter<Each>::TempStorage) <= sizeof(memory.sort));
        auto& storage = reinterpret_cast<typename sorter<Each>::TempStorage&>(memory.sort);
        std::uint32_t key[Each];
        index member[Each];
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            member[i] = static_cast<index>(thread * Each + i);
        }
#pragma unroll 1
        for (int pass = 0; pass < 5; pass = pass_after(pass)) {
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                key[i] = idle_key;
                if (member[i] < keys) {
                    const eviction_rank its = key_of(member[i]);
                    const std::uint64_t number =
                        pass <= 2 ? static_cast<std::uint64_t>(its.position) : its.code;
                    key[i] = pass == 0 ? short_key(its.code)
                                       : static_cast<std::uint32_t>(pass % 2 == 1 ? number : number >> 32);
                }
            }
            sorter<Each>(storage).Sort(key, member);
            __syncthreads();
            if (pass != 0 && pass != 4) {
                continue;
            }
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                const int r = thread * Each + i;
                if (r < keys) {
                    memory.order[r] = member[i];
                    memory.keys[r] = key[i];
                }
            }
            __syncthreads();
            if (pass == 4 || fix_short_ties<Threads>(memory.keys, memory.order, keys, [&](index a, index b) {
                    return key_of(a).before(key_of(b));
                })) {
                break;
            }
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                member[i] = static_cast<index>(thread * Each + i);
            }
        }
        __syncthreads();
    }
    /// Candidates are in the order of their positions from the first; halves that are all 0 need no pass.
    __device__ __forceinline__ int pass_after(int pass) const {
        int next = pass + 1;
        if (next == 1 && old == 0) {
            next = 3;
        }
        if (next == 2 && head.base + head.tokens < position_t{1} << 32) {
            next = 3;
        }
        return next == 3 && head_params.log_gamma == 0.0f ? 4 : next;
    }
    /// 32 bits in the order of codes.
    __device__ __forceinline__ std::uint32_t short_key(std::uint64_t of) const {
        if (head_params.log_gamma == 0.0f) {
            return static_cast<std::uint32_t>(of >> 32);
        }
        if (of == nan_code) {
            return nan_key;
        }
        constexpr std::uint64_t sign = std::uint64_t{1} << 63;
        const std::uint64_t bits = (of & sign) != 0 ? of : ~(of | sign);
        return descending_key(__double2float_rn(__longlong_as_double(static_cast<long long>(bits))));
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
