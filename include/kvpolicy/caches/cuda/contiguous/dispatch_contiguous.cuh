// What the owner of a FixedBudgetCache does on a device, and the export of its pages.
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/cuda/cache_call.cuh>
#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/caches/cuda/read_counts.cuh>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace kvpolicy {

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::require_device_slot(std::int32_t slot, const char* name) const {
    this->require_memory(true);
    this->require_slot_number(slot, name);
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::bind(const cuda& on, void* buffer, std::size_t buffer_bytes) {
    namespace cb = cuda_backend;
    cb::require_device_policy<P>();
    detail::require(!this->rules_.empty(), "cache", "moved from", "one that still has its policy");
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        cb::check_selection(this->policy_, this->shape_.page_rows,
                            this->shape_.slots * (rows(layer) / this->shape_.page_rows));
    }
    detail::require(buffer != nullptr, "buffer", "null", "device memory of bytes().total()");
    detail::require(buffer_bytes >= this->bytes_.total(), "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least bytes().total() = ", this->bytes_.total()); });
    const cb::device_scope device(on);
    cb::check_device_memory(device, "buffer", buffer);
    this->memory_ = host_backend::aligned(buffer);
    this->device_ = device.number();
    std::vector<ref_type> refs;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        refs.push_back(ref(layer));
    }
    const auto copy = [&](std::size_t to, const void* from, std::size_t bytes) {
        cb::check(cudaMemcpyAsync(this->memory_ + to, from, bytes, cudaMemcpyHostToDevice, on.stream),
                  "cudaMemcpyAsync");
    };
    copy(this->rules_at_, this->rules_.data(), this->rules_.size() * sizeof(HeadRule));
    copy(offsets_at_, row_offset_.data(), row_offset_.size() * sizeof(std::int64_t));
    copy(refs_at_, refs.data(), refs.size() * sizeof(ref_type));
    if constexpr (P::has_selection) {
        copy(this->read_pages_at_, this->read_pages_.data(), this->read_pages_.size() * sizeof(std::int32_t));
        cb::launch("place_pages_kernel", cb::place_pages_kernel<P, T>, this->shape_.layers, cb::slot_threads,
                   0, on, this->template at<const ref_type>(refs_at_));
    }
    const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.slots * this->shape_.kv_heads;
    cb::launch("clear_slots_kernel", cb::clear_slots_kernel<ref_type>, heads, cb::slot_threads, 0, on,
               this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, 0, this->shape_.slots,
               true);
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");  // `refs` may go
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::clear(const cuda& on, std::int32_t slot) {
    namespace cb = cuda_backend;
    this->template require_device_slot<Build>(slot, "slot");
    const cb::device_scope device(on, this->device_);
    cb::launch("clear_slots_kernel", cb::clear_slots_kernel<ref_type>,
               std::int64_t{this->shape_.layers} * this->shape_.kv_heads, cb::slot_threads, 0, on,
               this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, slot, 1, false);
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::advance(const cuda& on, const Batch& batch, std::uint32_t* status) {
    namespace cb = cuda_backend;
    this->require_memory(true);
    detail::require(batch.count >= 0 && batch.count <= this->shape_.slots, "batch.count", batch.count,
                    [&] { return detail::text("0 to the cache's slots, ", this->shape_.slots); });
    const cb::device_scope device(on, this->device_);
    cb::launch("advance_kernel", cb::advance_kernel<cb::advance_launch>, batch.count, cb::advance_threads, 0,
               on,
               cb::advance_launch{.length = this->template at<position_t>(this->length_at_),
                                  .taken = this->template at<std::int32_t>(this->taken_at_),
                                  .layers = this->shape_.layers,
                                  .slots = this->shape_.slots,
                                  .kv_heads = this->shape_.kv_heads,
                                  .longest = std::numeric_limits<position_t>::max(),
                                  .batch = batch,
                                  .status = status});
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The moves of fork and reorder, in all layers, on the device that the cache is bound to.
template <class P, class T>
void move_slots(const cuda& on, const FixedBudgetRef<P, T>* refs, const CacheShape& shape,
                const slot_moves& moves, int bound, std::uint32_t* status) {
    if (moves.count == 0) {
        return;
    }
    const device_scope device(on, bound);
    constexpr std::size_t scratch = 64 * 1024;
    const auto run = [&]<class Word>(Word) {
        const std::size_t a_thread = static_cast<std::size_t>(moves.count) * sizeof(Word);
        const int threads = a_thread * slot_threads <= scratch ? slot_threads : 32;
        const std::size_t shared = moves_bytes + a_thread * static_cast<std::size_t>(threads);
        constexpr std::int32_t pieces = 16;  // blocks that share the rows of a head
        launch("move_rows_kernel", move_rows_kernel<Word, P, T>,
               std::int64_t{shape.layers} * shape.kv_heads * pieces, threads, shared, on, refs, moves,
               pieces);
        launch("move_counters_kernel", move_counters_kernel<P, T>, shape.layers, threads, shared, on, refs,
               moves, status);
    };
    if (static_cast<std::size_t>(moves.count) * sizeof(uint4) * 32 <= scratch) {
        run(uint4{});
    } else {
        run(std::uint32_t{});
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::fork(const cuda& on, std::int32_t from, std::int32_t to) {
    this->template require_device_slot<Build>(from, "from");
    this->template require_device_slot<Build>(to, "to");
    if (from != to) {
        cuda_backend::move_slots<P, T>(on, this->template at<const ref_type>(refs_at_), this->shape_,
                                       {nullptr, 1, from, to}, this->device_, nullptr);
    }
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::reorder(const cuda& on, const std::int32_t* sources, std::int32_t count,
                                     std::uint32_t* status) {
    this->require_memory(true);
    const std::int32_t most = std::min(this->shape_.slots, cuda_backend::most_reordered);
    detail::require(count >= 0 && count <= most, "count", count,
                    [&] { return detail::text("0 to ", most, ", the cache's slots and at most 512"); });
    detail::require(sources != nullptr || count == 0, "sources", "null", "device memory of count slots");
    cuda_backend::move_slots<P, T>(on, this->template at<const ref_type>(refs_at_), this->shape_,
                                   {sources, count, 0, 0}, this->device_, status);
}

/// A cache of the same kind with one slot, in host memory. Unused entries are not touched there.
template <AnyPolicy P, Storage T>
template <class Build>
struct FixedBudgetCache<P, T>::slot_copy {
    FixedBudgetCache cache;
    std::unique_ptr<unsigned char[]> memory;

    explicit slot_copy(const FixedBudgetCache& of)
        : cache(of.one_slot_shape(), of.policy_, of.scorers_, of.attention_) {
        cache.rebase_limit(of.rebase_limit_);
        const std::size_t bytes = cache.bytes().total();
        memory.reset(new unsigned char[bytes]);
        cache.bind(host{1}, memory.get(), bytes);
    }
};

/// A slot's counters, which say what rows it has. Waits for the stream.
template <AnyPolicy P, Storage T>
template <class Build>
auto FixedBudgetCache<P, T>::counted_slot(const cuda& on, std::int32_t slot) const {
    namespace cb = cuda_backend;
    cb::check_between_tokens(on, this->shape_, this->template at<const std::int32_t>(this->taken_at_), slot);
    slot_copy<Build> copy(*this);
    const auto fetch = [&](auto* to, const auto* from, std::int64_t count) {
        cb::check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof *to,
                                  cudaMemcpyDeviceToHost, on.stream),
                  "cudaMemcpyAsync");
    };
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = ref(layer), b = copy.cache.ref(layer);
        fetch(b.kept, a.kept + std::int64_t{slot} * a.kv_heads, a.kv_heads);
        if (layer == 0) {
            fetch(b.length, a.length + slot, 1);
        }
    }
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    return copy;
}

/// Calls copy(array of slot `slot`, array of other's slot 0, bytes) for all that a slot consists of, of rows
/// for those that other's slot uses. Heads that use all of theirs are one piece.
template <AnyPolicy P, Storage T>
template <class Build, class Copy>
void FixedBudgetCache<P, T>::for_each_slice(const FixedBudgetCache& other, std::int32_t slot,
                                            const Copy& copy) const {
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = ref(layer), b = other.ref(layer);
        const auto some = [&](auto* mine, auto* theirs, std::int64_t each, std::int64_t first,
                              std::int64_t count) {
            copy(mine + slot * each + first, theirs + first, static_cast<std::size_t>(count) * sizeof *mine);
        };
        const auto slice = [&](auto* mine, auto* theirs, std::int64_t each) {
            some(mine, theirs, each, 0, each);
        };
        std::int64_t begin = 0, end = 0;
        const auto rows = [&] {
            if (begin == end) {
                return;
            }
            some(a.k, b.k, a.rows * a.dim_k, begin * a.dim_k, (end - begin) * a.dim_k);
            some(a.v, b.v, a.rows * a.dim_v, begin * a.dim_v, (end - begin) * a.dim_v);
            some(a.position, b.position, a.rows, begin, end - begin);
            some(a.score, b.score, a.rows, begin, end - begin);
            if constexpr (P::has_selection) {
                const std::int64_t size = a.selection.page_rows(), each = 2 * std::int64_t{a.dim_k};
                const std::int64_t first = begin / size, pages = (end + size - 1) / size - first;
                some(a.bounds, b.bounds, a.rows / size * each, first * each, pages * each);
            }
        };
        for (std::int32_t head = 0; head < a.kv_heads; ++head) {
            const std::int64_t first = b.first_row(0, head), used = b.used(0, head);
            if (used == 0) {
                continue;
            }
            if (first != end) {
                rows();
                begin = first;
            }
            end = first + used;
        }
        rows();
        slice(a.kept, b.kept, a.kv_heads);
        slice(a.victim, b.victim, a.kv_heads);
        slice(a.state, b.state, a.kv_heads * a.state_size);
        slice(a.proposed, b.proposed, 1);
        if (layer == 0) {
            slice(a.length, b.length, 1);
        }
    }
}

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t FixedBudgetCache<P, T>::snapshot_bytes(const cuda& on, std::int32_t slot) const {
    this->template require_device_slot<Build>(slot, "slot");
    const cuda_backend::device_scope device(on, this->device_);
    return this->template counted_slot<Build>(on, slot).cache.snapshot_bytes(0);
}

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t FixedBudgetCache<P, T>::snapshot(const cuda& on, std::int32_t slot, void* buffer,
                                             std::size_t buffer_bytes) const {
    namespace cb = cuda_backend;
    this->template require_device_slot<Build>(slot, "slot");
    const cb::device_scope device(on, this->device_);
    const auto copy = this->template counted_slot<Build>(on, slot);
    this->template for_each_slice<Build>(
        copy.cache, slot, [&](const void* mine, void* theirs, std::size_t bytes) {
            cb::check(cudaMemcpyAsync(theirs, mine, bytes, cudaMemcpyDeviceToHost, on.stream),
                      "cudaMemcpyAsync");
        });
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    return copy.cache.snapshot(host{1}, 0, buffer, buffer_bytes);
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::restore(const cuda& on, std::int32_t slot, const void* blob,
                                     std::size_t blob_bytes) {
    namespace cb = cuda_backend;
    this->template require_device_slot<Build>(slot, "slot");
    const cb::device_scope device(on, this->device_);
    slot_copy<Build> copy(*this);
    copy.cache.restore(host{1}, 0, blob, blob_bytes);
    this->template for_each_slice<Build>(
        copy.cache, slot, [&](void* mine, const void* theirs, std::size_t bytes) {
            cb::check(cudaMemcpyAsync(mine, theirs, bytes, cudaMemcpyHostToDevice, on.stream),
                      "cudaMemcpyAsync");
        });
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type of = ref(layer);
        cb::check(cudaMemsetAsync(of.taken + of.head_index(slot, 0), 0,
                                  static_cast<std::size_t>(of.kv_heads) * sizeof(std::int32_t), on.stream),
                  "cudaMemsetAsync");
    }
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");  // host memory may go
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

template <class P, Storage T>
void export_heads(const cuda& on, const FixedBudgetRef<P, T>& cache, const Batch& batch,
                  const HeadPages& pages) {
    namespace cb = cuda_backend;
    cb::check_on_device(cache);
    detail::require(batch.count >= 0 && batch.count <= cache.slots, "batch.count", batch.count,
                    [&] { return detail::text("0 to the cache's slots, ", cache.slots); });
    const std::int64_t most = batch.count * (cache.rows / cache.page_rows);
    host_backend::check_head_pages(cache, batch, pages, most, "the pages that the batch's slots can have");
    const cb::device_scope device(on, cache.device);
    const cb::cache_view<T> view(cache);
    cb::launch("count_pages_kernel", cb::count_pages_kernel<T>, 1, cb::slot_threads, 0, on, view, batch,
               cache.page_rows, pages);
    cb::launch("fill_pages_kernel", cb::fill_pages_kernel<T>, std::int64_t{batch.count} * cache.kv_heads,
               cb::slot_threads, 0, on, view, batch, cache.page_rows, pages);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
