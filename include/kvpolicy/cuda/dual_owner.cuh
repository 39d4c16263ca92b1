// What the owner of a DualCache does on a device, and the export of its pages.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/dual_step.cuh>
#include <kvpolicy/cuda/kernels/cache_slots.cuh>
#include <kvpolicy/cuda/kernels/dual_slots.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpolicy {

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::require_device_slot(std::int32_t slot, const char* name) const {
    this->require_memory(true);
    detail::require(slot >= 0 && slot < this->shape_.slots, name, slot,
                    [&] { return detail::text("0 to ", this->shape_.slots - 1); });
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::bind(const cuda& on, void* buffer, std::size_t buffer_bytes) {
    namespace cb = cuda_backend;
    cb::require_device_dual<P>();
    detail::require(!this->rules_.empty(), "cache", "moved from", "one that still has its policy");
    detail::require(this->shape_.page_rows % cb::stream_tile == 0, "page_rows", this->shape_.page_rows,
                    [&] { return detail::text("a multiple of ", cb::stream_tile, " on CUDA"); });
    detail::require(buffer != nullptr, "buffer", "null", "device memory of bytes().total()");
    detail::require(buffer_bytes >= this->bytes_.total(), "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least bytes().total() = ", this->bytes_.total()); });
    const cb::device_scope device(on);
    this->memory_ = host_backend::aligned(buffer);
    this->on_device_ = true;
    lent_.clear();
    std::vector<ref_type> refs;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        refs.push_back(ref(layer));
    }
    const auto copy = [&](std::size_t to, const auto& from) {
        cb::check(cudaMemcpyAsync(this->memory_ + to, from.data(), from.size() * sizeof from[0],
                                  cudaMemcpyHostToDevice, on.stream),
                  "cudaMemcpyAsync");
    };
    copy(this->rules_at_, this->rules_);
    copy(offsets_at_, table_offset_);
    copy(tiles_at_, tile_offset_);
    copy(refs_at_, refs);
    cb::check(cudaMemsetAsync(this->memory_ + count_at_, 0, sizeof(std::int32_t), on.stream),
              "cudaMemsetAsync");
    const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.slots * this->shape_.kv_heads;
    cb::launch("clear_slots_kernel", cb::clear_slots_kernel<ref_type>, heads, cb::slot_threads, 0, on,
               this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, 0, this->shape_.slots,
               true);
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");  // `refs` may go
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::add_slab(const cuda& on, void* buffer, std::size_t buffer_bytes) {
    namespace cb = cuda_backend;
    this->require_memory(true);
    const Slab<T> lent = slab_in(buffer, buffer_bytes);
    const cb::device_scope device(on);
    cb::launch("lend_slab_kernel", cb::lend_slab_kernel<T>, 1, cb::admit_threads, 0, on, ref(0).pool,
               this->template at<Slab<T>>(slabs_at_), slabs(), lent);
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    lent_.push_back(lent);
}

template <AnyPolicy P, Storage T>
template <class Build>
std::int64_t DualCache<P, T>::free_pages(const cuda& on) const {
    namespace cb = cuda_backend;
    this->require_memory(true);
    const cb::device_scope device(on);
    std::int32_t count = 0;
    cb::check(
        cudaMemcpyAsync(&count, this->memory_ + count_at_, sizeof count, cudaMemcpyDeviceToHost, on.stream),
        "cudaMemcpyAsync");
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    return count;
}

template <AnyPolicy P, Storage T>
template <class Build>
std::int64_t DualCache<P, T>::reserve(const cuda& on, const Batch& batch) {
    namespace cb = cuda_backend;
    this->require_memory(true);
    detail::require(batch.count >= 0 && batch.count <= this->shape_.slots, "batch.count", batch.count,
                    [&] { return detail::text("0 to the cache's slots, ", this->shape_.slots); });
    if (batch.count == 0) {
        return 0;
    }
    const cb::device_scope device(on);
    auto* const answer = this->template at<std::int64_t>(answer_at_);
    cb::launch("reserve_pages_kernel", cb::reserve_pages_kernel<P, T>, 1, cb::admit_threads, 0, on,
               this->template at<const ref_type>(refs_at_), this->shape_.layers, batch, answer);
    std::int64_t lacking = 0;
    cb::check(cudaMemcpyAsync(&lacking, answer, sizeof lacking, cudaMemcpyDeviceToHost, on.stream),
              "cudaMemcpyAsync");
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    return (lacking + pool_.slab_pages - 1) / pool_.slab_pages;
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::clear(const cuda& on, std::int32_t slot) {
    namespace cb = cuda_backend;
    this->template require_device_slot<Build>(slot, "slot");
    const cb::device_scope device(on);
    cb::launch("clear_slots_kernel", cb::clear_slots_kernel<ref_type>,
               std::int64_t{this->shape_.layers} * this->shape_.kv_heads, cb::slot_threads, 0, on,
               this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, slot, 1, false);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::advance(const cuda& on, const Batch& batch, std::uint32_t* status) {
    namespace cb = cuda_backend;
    this->require_memory(true);
    detail::require(batch.count >= 0 && batch.count <= this->shape_.slots, "batch.count", batch.count,
                    [&] { return detail::text("0 to the cache's slots, ", this->shape_.slots); });
    const cb::device_scope device(on);
    cb::launch("advance_dual_kernel", cb::advance_dual_kernel<P, T>, batch.count, cb::admit_threads, 0, on,
               this->template at<const ref_type>(refs_at_), this->shape_.layers, batch, status);
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

template <class P, Storage T>
void export_heads(const cuda& on, const DualRef<P, T>& cache, const Batch& batch, const HeadPages& pages) {
    namespace cb = cuda_backend;
    cb::check_on_device(cache);
    detail::require(batch.count >= 0 && batch.count <= cache.slots, "batch.count", batch.count,
                    [&] { return detail::text("0 to the cache's slots, ", cache.slots); });
    host_backend::check_head_pages(cache, batch, pages, cache.page_count(),
                                   "the pages that the pool can have");
    const cb::device_scope device(on);
    const cb::dual_view<T> view(cache);
    cb::launch("count_dual_pages_kernel", cb::count_dual_pages_kernel<T>, 1, cb::admit_threads, 0, on, view,
               batch, pages);
    cb::launch("fill_dual_pages_kernel", cb::fill_dual_pages_kernel<T>,
               std::int64_t{batch.count} * cache.kv_heads, cb::admit_threads, 0, on, view, batch, pages);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
