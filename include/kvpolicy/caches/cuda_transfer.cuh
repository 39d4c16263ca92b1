// The calls of caches/transfer.hpp on CUDA: declarations. kvpolicy/cuda.cuh has the bodies.
#pragma once

#include <kvpolicy/caches/transfer.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

/// As the host's load_layer. `buffer` is memory that the device reaches: pinned host memory
/// (cudaMallocHost, or pin_memory() of PyTorch), which the kernel reads over the bus, or device memory.
/// Enqueued on the context's stream: nothing is allocated or waited for. Bytes that no such layer wrote set
/// status_bad_length, too few free pages status_pool_exhausted: the layer is then as it was, but for draft
/// tokens. options.status is one word of device memory.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void load_layer(const cuda& ctx, const Ref<P, T>& cache, std::int32_t seq, const void* buffer,
                std::size_t bytes, const StepOptions& options = {});

/// As the host's save_layer, to such memory, enqueued alike: read the buffer when the stream is done. A
/// sequence in the middle of a token sets status_layer_skipped, too few bytes set status_bad_length; the
/// buffer is then no saved layer.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void save_layer(const cuda& ctx, const Ref<P, T>& cache, std::int32_t seq, void* buffer, std::size_t bytes,
                const StepOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
