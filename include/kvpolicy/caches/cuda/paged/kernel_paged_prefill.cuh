// What a chunk needs in a paged cache only: pages for the entries that it writes.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/caches/cuda/prefill/prefill_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Pages for a decided chunk.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory.
/// In: appended, num_long_range after the updates. Out: appended [count] (-1: no pages); status is OR-ed.
/// Overwrites: page tables, held, refcounts, the stack of free pages.
template <class T>
__global__ void __launch_bounds__(admit_threads)
    paged_prefill_pages_kernel(const __grid_constant__ prefill_params<paged_view<T>> call,
                               std::int32_t* const missing) {
    __shared__ admit_memory memory;
    const paged_view<T>& cache = call.cache;
    const admission wanted{call.tokens.most, call.appended, missing, call.status};
    agent_admit(cache, call.batch, wanted, memory, [&](std::int32_t pair, std::int32_t seq, std::int32_t h) {
        const HeadParams& head_params = cache.all_params[h];
        return HeadRows{head_params.sinks, head_params.window}.used(
            cache.length[seq] + call.appended[pair / cache.kv_heads], call.top_k.num_long_range[pair]);
    });
}

/// Outputs of sequences that found no pages: out 0, lse -inf.
///
/// Grid: count blocks. Block: prefill_threads; a warp per query row. In: appended; `asked` [count], null: all
/// `most` tokens. Out: out [count, Hq, most, Dv] of T, lse fp32.
template <class T>
__global__ void __launch_bounds__(prefill_threads)
    paged_prefill_refuse_kernel(const __grid_constant__ prefill_params<paged_view<T>> call,
                                const std::int32_t* const asked, const rows_view<T> out,
                                const plane_view<float> lse) {
    const auto entry = static_cast<std::int32_t>(blockIdx.x);
    if (call.appended[entry] >= 0) {
        return;
    }
    const packed_rows& packed = call.tokens.packed;
    const std::int32_t begin = packed.begin(entry);
    const std::int32_t tokens = packed.edges != nullptr ? packed.edges[entry + 1] - begin
                                : asked != nullptr      ? asked[entry]
                                                        : call.tokens.most;
    for (std::int32_t x = warp_id(); x < call.cache.kv_heads * call.cache.group * tokens;
         x += prefill_threads / 32) {
        T* const row = out.row(entry, x / tokens, begin + x % tokens);
        for (std::int32_t d = lane_id(); d < call.cache.head_dim_vo; d += 32) {
            row[d] = T(0.0f);
        }
        if (lane_id() == 0 && lse) {
            lse.head(entry, x / tokens)[begin + x % tokens] = minus_infinity();
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
