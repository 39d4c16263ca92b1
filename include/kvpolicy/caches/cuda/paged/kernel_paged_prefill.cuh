// What a chunk needs in a paged cache only: pages for the entries that it writes, and a contiguous copy of
// the entries that it attends to, since the attention kernels name an entry by its distance from the first of
// its head.
#pragma once

#include <kvpolicy/caches/cuda/copy_rows.cuh>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/caches/cuda/prefill/prefill_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Pages for a decided chunk, where it `writes`, and where the entries of each head begin in the workspace,
/// round by round.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory.
/// In: appended, num_long_range after the updates. Out: appended [count] (-1: no pages), first_row [count, Hkv] int64;
/// status is OR-ed.
/// Overwrites: page tables, held, refcounts, the stack of free pages.
///
/// Phases: 1. Admission. 2. Running sums of the entries per head.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    paged_prefill_plan_kernel(const __grid_constant__ prefill_params<paged_view<T>> call,
                              std::int32_t* const missing, const bool writes) {
    __shared__ admit_memory memory;
    const paged_view<T>& cache = call.cache;
    const std::int32_t pairs = call.batch.count * cache.kv_heads;
    // 1. Admission.
    if (writes) {
        const admission wanted{call.tokens.most, call.appended, missing, call.status};
        agent_admit(cache, call.batch, wanted, memory,
                    [&](std::int32_t pair, std::int32_t seq, std::int32_t h) {
                        const HeadParams& head_params = cache.all_params[h];
                        return HeadRows{head_params.sinks, head_params.window}.used(
                            cache.length[seq] + call.appended[pair / cache.kv_heads],
                            call.top_k.num_long_range[pair]);
                    });
    }
    // 2. Where the entries of each head begin.
    for (std::int32_t first = 0; first < call.batch.count; first += call.together) {
        const std::int32_t begin = first * cache.kv_heads;
        running_sums(
            memory, min(call.together * cache.kv_heads, pairs - begin),
            [&](std::int32_t x) {
                const std::int32_t pair = begin + x, entry = pair / cache.kv_heads;
                if (call.appended[entry] <= 0) {
                    return 0;
                }
                const std::int32_t seq = call.batch.seq(entry);
                const paged_head<T> head(cache, seq, pair % cache.kv_heads);
                return head.layout.used(cache.length[seq], cache.num_long_range[head.index]);
            },
            [&](std::int32_t x, std::int32_t before) { call.first_row[begin + x] = before; });
    }
}

/// Outputs of sequences that found no pages: out 0, lse -inf.
///
/// Grid: count blocks. Block: prefill_threads; a warp per query row. Out: out [count, Hq, most, Dv] of T, lse
/// fp32.
template <class T>
__global__ void __launch_bounds__(prefill_threads)
    paged_prefill_refuse_kernel(const __grid_constant__ prefill_params<paged_view<T>> call,
                                const std::int32_t* const asked, const rows_view<T> out,
                                const plane_view<float> lse) {
    const auto entry = static_cast<std::int32_t>(blockIdx.x);
    if (call.appended[entry] >= 0) {
        return;
    }
    const std::int32_t tokens = asked != nullptr ? asked[entry] : call.tokens.most;
    for (std::int32_t x = warp_id(); x < call.cache.kv_heads * call.cache.group * tokens;
         x += prefill_threads / 32) {
        T* const row = out.row(entry, x / tokens, x % tokens);
        for (std::int32_t d = lane_id(); d < call.cache.head_dim_vo; d += 32) {
            row[d] = T(0.0f);
        }
        if (lane_id() == 0 && lse) {
            lse.head(entry, x / tokens)[x % tokens] = minus_infinity();
        }
    }
}

/// Copies the entries of a round's heads from their pages to contiguous rows, which the attention kernels
/// read.
///
/// Grid: heads of the round * pieces blocks. Block: prefill_threads; a warp per entry.
/// In: first_row, page tables. Out: k [rows, Dk] and v [rows, Dv] of T.
template <class T>
__global__ void __launch_bounds__(prefill_threads)
    paged_prefill_gather_kernel(const __grid_constant__ prefill_params<paged_view<T>> call, T* const k,
                                T* const v, const std::int32_t begin, const std::int32_t pieces) {
    const prefill_head<paged_view<T>> at(call, begin + static_cast<std::int32_t>(blockIdx.x) / pieces);
    if (at.active.tokens == 0) {
        return;
    }
    const paged_view<T>& cache = call.cache;
    const std::int32_t used = at.rows.layout.used(at.base, cache.num_long_range[at.rows.index]);
    constexpr std::int32_t warps = prefill_threads / 32;
    const std::int64_t first = call.first_row[at.pair];
    for (std::int32_t row = static_cast<std::int32_t>(blockIdx.x) % pieces * warps + warp_id(); row < used;
         row += pieces * warps) {
        copy_entry<T>(at.rows.key(row), at.rows.value(row), k + (first + row) * cache.head_dim_qk,
                      v + (first + row) * cache.head_dim_vo, cache.head_dim_qk, cache.head_dim_vo);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
