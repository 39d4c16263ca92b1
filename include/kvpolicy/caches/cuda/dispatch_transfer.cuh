// The dispatch of save_layer and load_layer.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/kernel_transfer.cuh>
#include <kvpolicy/caches/cuda_transfer.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

namespace cuda_backend {

/// The launches of a call, and its checks.
template <class Ref>
transfer_params<Ref> transfer_of(const device_scope& device, const Ref& cache, std::int32_t seq,
                                 const void* buffer, std::size_t bytes, const StepOptions& options) {
    checks::check_transfer(cache, seq, buffer, bytes);
    cudaPointerAttributes of{};
    check(cudaPointerGetAttributes(&of, buffer), "cudaPointerGetAttributes");
    detail::require(of.type != cudaMemoryTypeUnregistered, "buffer", "pageable host memory",
                    "pinned host memory or device memory");
    check_device_memory(device, "buffer", buffer);
    return {cache,
            seq,
            static_cast<unsigned char*>(const_cast<void*>(buffer)),
            static_cast<std::int64_t>(bytes),
            row_pieces,
            options.status};
}

}  // namespace cuda_backend

template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void save_layer(const cuda& ctx, const Ref<P, T>& cache, std::int32_t seq, void* buffer, std::size_t bytes,
                const StepOptions& options) {
    namespace cb = cuda_backend;
    cb::check_on_device(cache);
    const cb::device_scope device(ctx, cache.device);
    const auto call = cb::transfer_of(device, cache, seq, buffer, bytes, options);
    cb::launch("save_layer_kernel", cb::save_layer_kernel<Ref<P, T>>,
               std::int64_t{cache.kv_heads} * call.pieces, cb::transfer_threads, 0, ctx, call);
}

template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void load_layer(const cuda& ctx, const Ref<P, T>& cache, std::int32_t seq, const void* buffer,
                std::size_t bytes, const StepOptions& options) {
    namespace cb = cuda_backend;
    cb::check_on_device(cache);
    const cb::device_scope device(ctx, cache.device);
    const auto call = cb::transfer_of(device, cache, seq, buffer, bytes, options);
    const std::int64_t blocks = std::int64_t{cache.kv_heads} * call.pieces;
    const std::size_t shared = (static_cast<std::size_t>(cache.kv_heads) + 1) * sizeof(std::int64_t);
    cb::launch("begin_load_layer_kernel", cb::begin_load_layer_kernel<Ref<P, T>>, 1, cb::admit_threads,
               shared, ctx, call);
    cb::launch("load_layer_kernel", cb::load_layer_kernel<Ref<P, T>>, blocks, cb::transfer_threads, 0, ctx,
               call);
    if constexpr (P::has_selection) {
        cb::launch("load_layer_bounds_kernel", cb::load_layer_bounds_kernel<Ref<P, T>>, blocks,
                   cb::transfer_threads, 0, ctx, call);
    }
    // The mark of a refusal goes.
    cb::check(cudaMemsetAsync(cache.num_draft + seq, 0, sizeof(std::int32_t), ctx.stream), "cudaMemsetAsync");
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
