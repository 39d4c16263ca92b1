// What the queries of a chunk see, for attention of the caller's.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/cuda/prefill/prefill_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Copies the expiries of a decided chunk to the caller's planes.
///
/// Grid: count * Hkv * pieces blocks. Block: prefill_threads. Shared memory: none.
/// In: appended [count] int32, past_rows [count, Hkv] int32, past_expiry [count, Hkv, max_entries] and
/// chunk_expiry [count, Hkv, most] int32.
/// Out: expiry.cached [count, Hkv, rows in use] and expiry.tokens [count, Hkv, tokens] int32, of packed
/// entries [1, Hkv, total]; of entries with tokens.
template <class View>
__global__ void __launch_bounds__(prefill_threads)
    chunk_expiry_kernel(const __grid_constant__ prefill_params<View> call, const ChunkExpiry expiry) {
    const std::int32_t pair = static_cast<std::int32_t>(blockIdx.x) / call.pieces,
                       piece = static_cast<std::int32_t>(blockIdx.x) % call.pieces;
    const std::int32_t entry = pair / call.cache.kv_heads, head = pair % call.cache.kv_heads;
    const bool packed = call.tokens.packed.edges != nullptr;
    const std::int32_t tokens = call.appended[entry], rows = tokens > 0 ? call.past_rows[pair] : 0;
    const std::int32_t first = piece * prefill_threads + static_cast<std::int32_t>(threadIdx.x),
                       stride = call.pieces * prefill_threads;
    const expiry_t* const cached = call.top_k.past_expiry + std::int64_t{pair} * call.top_k.max_entries;
    const expiry_t* const own = call.top_k.chunk_expiry + std::int64_t{pair} * call.top_k.most;
    for (std::int32_t r = first; r < rows; r += stride) {
        expiry.cached.head(entry, head)[r] = cached[r];
    }
    for (std::int32_t j = first; j < tokens; j += stride) {
        expiry.tokens.head(packed ? 0 : entry, head)[call.tokens.packed.begin(entry) + j] = own[j];
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
