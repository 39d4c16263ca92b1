// What the owner of a FixedBudgetCache does on a device, and the export of its pages.
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/caches/cuda/read_counts.cuh>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/workspace.hpp>
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
void FixedBudgetCache<P, T>::require_device_seq(std::int32_t seq, const char* name) const {
    this->require_memory(true);
    this->require_seq_number(seq, name);
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::bind(const cuda& ctx, void* buffer, std::size_t buffer_bytes) {
    namespace cb = cuda_backend;
    cb::require_device_policy<P>();
    detail::require(!this->all_params_.empty(), "cache", "moved from", "one that still has its policy");
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        cb::check_selection(this->policy_, this->shape_.page_size,
                            this->shape_.max_sequences * (rows(layer) / this->shape_.page_size));
    }
    detail::require(buffer != nullptr, "buffer", "null", "device memory of bytes().total()");
    detail::require(buffer_bytes >= this->bytes_.total(), "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least bytes().total() = ", this->bytes_.total()); });
    const cb::device_scope device(ctx);
    cb::check_device_memory(device, "buffer", buffer);
    this->memory_ = detail::aligned(buffer);
    this->device_ = device.number();
    std::vector<ref_type> refs;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        refs.push_back(this->layer(layer));
    }
    const auto copy = [&](std::size_t to, const void* from, std::size_t bytes) {
        cb::check(cudaMemcpyAsync(this->memory_ + to, from, bytes, cudaMemcpyHostToDevice, ctx.stream),
                  "cudaMemcpyAsync");
    };
    copy(this->all_params_at_, this->all_params_.data(), this->all_params_.size() * sizeof(HeadParams));
    copy(offsets_at_, row_offset_.data(), row_offset_.size() * sizeof(std::int64_t));
    copy(refs_at_, refs.data(), refs.size() * sizeof(ref_type));
    if constexpr (P::has_selection) {
        copy(this->read_pages_at_, this->read_pages_.data(), this->read_pages_.size() * sizeof(std::int32_t));
        cb::launch("lay_out_pages_kernel", cb::lay_out_pages_kernel<P, T>, this->shape_.layers,
                   cb::sequence_threads, 0, ctx, this->template at<const ref_type>(refs_at_));
    }
    const std::int64_t heads =
        std::int64_t{this->shape_.layers} * this->shape_.max_sequences * this->shape_.kv_heads;
    cb::launch("clear_sequences_kernel", cb::clear_sequences_kernel<ref_type>, heads, cb::sequence_threads, 0,
               ctx, this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, 0,
               this->shape_.max_sequences, true);
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");  // `refs` may go
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::clear(const cuda& ctx, std::int32_t seq) {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, this->device_);
    cb::launch("clear_sequences_kernel", cb::clear_sequences_kernel<ref_type>,
               std::int64_t{this->shape_.layers} * this->shape_.kv_heads, cb::sequence_threads, 0, ctx,
               this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, seq, 1, false);
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::advance(const cuda& ctx, const Batch& named, const StepOptions& options) {
    namespace cb = cuda_backend;
    this->require_memory(true);
    const Batch batch = checks::batch_of(named, this->shape_.max_sequences);
    checks::check_count("batch.count", batch.count, this->shape_.max_sequences);
    const cb::device_scope device(ctx, this->device_);
    cb::launch("advance_kernel", cb::advance_kernel<cb::advance_params>, batch.count, cb::advance_threads, 0,
               ctx,
               cb::advance_params{.length = this->template at<position_t>(this->length_at_),
                                  .appended = this->template at<std::int32_t>(this->appended_at_),
                                  .layers = this->shape_.layers,
                                  .max_sequences = this->shape_.max_sequences,
                                  .kv_heads = this->shape_.kv_heads,
                                  .max_seq_len = std::numeric_limits<position_t>::max(),
                                  .batch = batch,
                                  .status = options.status,
                                  .says_tokens = batch.q_len != nullptr || batch.length != Batch::not_set,
                                  .least = named.count == Batch::not_set ? 0 : 1});
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The moves of fork and reorder, in all layers, on the device that the cache is bound to.
template <class P, class T>
void move_sequences(const cuda& ctx, const FixedBudgetRef<P, T>* refs, const CacheShape& shape,
                    const sequence_moves& moves, int bound, std::uint32_t* status) {
    if (moves.count == 0) {
        return;
    }
    const device_scope device(ctx, bound);
    constexpr std::size_t scratch = 64 * 1024;
    const auto run = [&]<class Word>(Word) {
        const std::size_t a_thread = static_cast<std::size_t>(moves.count) * sizeof(Word);
        const int threads = a_thread * sequence_threads <= scratch ? sequence_threads : 32;
        const std::size_t shared = moves_bytes + a_thread * static_cast<std::size_t>(threads);
        constexpr std::int32_t pieces = 16;  // blocks that share the rows of a head
        launch("move_rows_kernel", move_rows_kernel<Word, P, T>,
               std::int64_t{shape.layers} * shape.kv_heads * pieces, threads, shared, ctx, refs, moves,
               pieces);
        launch("move_counters_kernel", move_counters_kernel<P, T>, shape.layers, threads, shared, ctx, refs,
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
void FixedBudgetCache<P, T>::fork(const cuda& ctx, std::int32_t from, std::int32_t to,
                                  const StepOptions& /*options*/) {
    this->template require_device_seq<Build>(from, "from");
    this->template require_device_seq<Build>(to, "to");
    if (from != to) {
        cuda_backend::move_sequences<P, T>(ctx, this->template at<const ref_type>(refs_at_), this->shape_,
                                           {nullptr, 1, from, to}, this->device_, nullptr);
    }
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::reorder(const cuda& ctx, const std::int32_t* sources, std::int32_t count,
                                     const StepOptions& options) {
    this->require_memory(true);
    const std::int32_t most = std::min(this->shape_.max_sequences, cuda_backend::max_reordered);
    detail::require(count >= 0 && count <= most, "count", count, [&] {
        return detail::text("0 to ", most, ", the cache's max_sequences and at most 512");
    });
    detail::require(sources != nullptr || count == 0, "sources", "null", "device memory of count sequences");
    cuda_backend::move_sequences<P, T>(ctx, this->template at<const ref_type>(refs_at_), this->shape_,
                                       {sources, count, 0, 0}, this->device_, options.status);
}

/// A cache of the same kind with one sequence, in host memory. Unused entries are not touched there.
template <AnyPolicy P, Storage T>
template <class Build>
struct FixedBudgetCache<P, T>::sequence_copy {
    FixedBudgetCache cache;
    std::unique_ptr<unsigned char[]> memory;

    explicit sequence_copy(const FixedBudgetCache& of)
        : cache(of.one_sequence_shape(), of.policy_, of.scorers_, of.attention_) {
        cache.rebase_limit(of.rebase_limit_);
        const std::size_t bytes = cache.bytes().total();
        memory.reset(new unsigned char[bytes]);
        cache.bind(host{1}, memory.get(), bytes);
    }
};

/// A sequence's counters, which say what rows it has. Waits for the stream.
template <AnyPolicy P, Storage T>
template <class Build>
auto FixedBudgetCache<P, T>::counted_sequence(const cuda& ctx, std::int32_t seq) const {
    namespace cb = cuda_backend;
    cb::check_between_tokens(ctx, this->shape_, this->template at<const std::int32_t>(this->appended_at_),
                             seq);
    sequence_copy<Build> copy(*this);
    const auto fetch = [&](auto* to, const auto* from, std::int64_t count) {
        cb::check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof *to,
                                  cudaMemcpyDeviceToHost, ctx.stream),
                  "cudaMemcpyAsync");
    };
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = this->layer(layer), b = copy.cache.layer(layer);
        fetch(b.num_long_range, a.num_long_range + std::int64_t{seq} * a.kv_heads, a.kv_heads);
        if (layer == 0) {
            fetch(b.length, a.length + seq, 1);
        }
    }
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    return copy;
}

/// Calls copy(array of sequence `seq`, array of other's sequence 0, bytes) for all that a sequence consists
/// of, of rows for those that other's sequence uses. Heads that use all of theirs are one piece.
template <AnyPolicy P, Storage T>
template <class Build, class Copy>
void FixedBudgetCache<P, T>::for_each_slice(const FixedBudgetCache& other, std::int32_t seq,
                                            const Copy& copy) const {
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = this->layer(layer), b = other.layer(layer);
        const auto some = [&](auto* mine, auto* theirs, std::int64_t each, std::int64_t first,
                              std::int64_t count) {
            copy(mine + seq * each + first, theirs + first, static_cast<std::size_t>(count) * sizeof *mine);
        };
        const auto slice = [&](auto* mine, auto* theirs, std::int64_t each) {
            some(mine, theirs, each, 0, each);
        };
        std::int64_t begin = 0, end = 0;
        const auto rows = [&] {
            if (begin == end) {
                return;
            }
            some(a.k, b.k, a.rows * a.head_dim_qk, begin * a.head_dim_qk, (end - begin) * a.head_dim_qk);
            some(a.v, b.v, a.rows * a.head_dim_vo, begin * a.head_dim_vo, (end - begin) * a.head_dim_vo);
            some(a.position, b.position, a.rows, begin, end - begin);
            some(a.score, b.score, a.rows, begin, end - begin);
            if constexpr (P::has_selection) {
                const std::int64_t size = a.selection.page_size(), each = 2 * std::int64_t{a.head_dim_qk};
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
        slice(a.num_long_range, b.num_long_range, a.kv_heads);
        slice(a.victim, b.victim, a.kv_heads);
        slice(a.state, b.state, a.kv_heads * a.state_size);
        slice(a.num_draft, b.num_draft, 1);
        if (layer == 0) {
            slice(a.length, b.length, 1);
        }
    }
}

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t FixedBudgetCache<P, T>::snapshot_bytes(const cuda& ctx, std::int32_t seq) const {
    this->template require_device_seq<Build>(seq, "seq");
    const cuda_backend::device_scope device(ctx, this->device_);
    return this->template counted_sequence<Build>(ctx, seq).cache.snapshot_bytes(0);
}

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t FixedBudgetCache<P, T>::snapshot(const cuda& ctx, std::int32_t seq, void* buffer,
                                             std::size_t buffer_bytes) const {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, this->device_);
    const auto copy = this->template counted_sequence<Build>(ctx, seq);
    this->template for_each_slice<Build>(
        copy.cache, seq, [&](const void* mine, void* theirs, std::size_t bytes) {
            cb::check(cudaMemcpyAsync(theirs, mine, bytes, cudaMemcpyDeviceToHost, ctx.stream),
                      "cudaMemcpyAsync");
        });
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    return copy.cache.snapshot(host{1}, 0, buffer, buffer_bytes);
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::restore(const cuda& ctx, std::int32_t seq, const void* blob,
                                     std::size_t blob_bytes, const StepOptions& /*options*/) {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, this->device_);
    sequence_copy<Build> copy(*this);
    copy.cache.restore(host{1}, 0, blob, blob_bytes);
    this->template for_each_slice<Build>(
        copy.cache, seq, [&](void* mine, const void* theirs, std::size_t bytes) {
            cb::check(cudaMemcpyAsync(mine, theirs, bytes, cudaMemcpyHostToDevice, ctx.stream),
                      "cudaMemcpyAsync");
        });
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type of = this->layer(layer);
        cb::check(cudaMemsetAsync(of.appended + of.head_index(seq, 0), 0,
                                  static_cast<std::size_t>(of.kv_heads) * sizeof(std::int32_t), ctx.stream),
                  "cudaMemsetAsync");
    }
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");  // host memory may go
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

template <class Ref>
void measure_on(const cuda& ctx, Ref& cache) {
    cache.device = cuda_backend::device_scope(ctx).number();
}

template <class Dims, class P, Storage T>
void export_heads(const cuda& ctx, const FixedBudgetRef<P, T>& cache, const Batch& named,
                  const HeadPages& pages, workspace_view /*workspace*/, const StepOptions& /*options*/) {
    namespace cb = cuda_backend;
    cb::check_on_device(cache);
    const Batch batch = checks::batch_of(named, cache.max_sequences);
    checks::check_count("batch.count", batch.count, cache.max_sequences);
    const std::int64_t most = batch.count * (cache.rows / cache.page_size);
    checks::check_head_pages(cache, batch, pages, most, "the pages that the batch's sequences can have");
    const cb::device_scope device(ctx, cache.device);
    const cb::contiguous_view<T> view(cache);
    cb::launch("count_pages_kernel", cb::count_pages_kernel<T>, 1, cb::sequence_threads, 0, ctx, view, batch,
               cache.page_size, pages);
    cb::launch("fill_pages_kernel", cb::fill_pages_kernel<T>, std::int64_t{batch.count} * cache.kv_heads,
               cb::sequence_threads, 0, ctx, view, batch, cache.page_size, pages);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
