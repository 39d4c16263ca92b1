// What the owners of both kinds of caches do on a device: bind, clear, advance, fork, reorder, snapshot and
// restore, and the two numbers that the host waits for.
//
// An owner of a kind (contiguous/dispatch_contiguous.cuh, paged/dispatch_paged.cuh) says where entries lie:
//     check_device_pages()            refuses pages that kernels cannot read
//     lay_out_on_device(ctx)          writes what is its own into memory that was just bound
//     max_seq_len()                   tokens that a sequence can have
//     move_sequences(ctx, moves, ..)  what fork and reorder launch
//     sequence_of(counts)             a cache in host memory of one sequence with so many rows
//     restored_sequence(blob, bytes)  the same, of a snapshot
//     fetch_rows(ctx, seq, copy)      rows of a sequence into such a cache
//     store_rows(ctx, seq, copy, ..)  and back; false where the pool lacks pages. Waits for the stream
#pragma once

#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Copies elements between the memory of the host and of a device, or within one, on the context's stream.
template <class Element>
void copy_elements(const cuda& ctx, Element* to, const Element* from, std::size_t count) {
    check(cudaMemcpyAsync(to, from, count * sizeof(Element), cudaMemcpyDefault, ctx.stream),
          "cudaMemcpyAsync");
}

inline void wait_for(const cuda& ctx) { check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize"); }

/// A number in device memory. Waits for the stream.
template <class Number>
Number fetched(const cuda& ctx, const Number* from) {
    Number number{};
    copy_elements(ctx, &number, from, 1);
    wait_for(ctx);
    return number;
}

}  // namespace cuda_backend

template <class Ref>
void measure_on(const cuda& ctx, Ref& cache) {
    cache.device = cuda_backend::device_scope(ctx).number();
}

}  // namespace KVPOLICY_HIDDEN

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
void CacheOwner<Derived, P, T>::require_device_seq(std::int32_t seq, const char* name) const {
    require_memory(true);
    require_seq_number(seq, name);
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build, class Element>
void CacheOwner<Derived, P, T>::put_on_device(const cuda& ctx, std::size_t to,
                                              const std::vector<Element>& from) const {
    cuda_backend::copy_elements(ctx, at<Element>(to), from.data(), from.size());
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
void CacheOwner<Derived, P, T>::bind(const cuda& ctx, void* buffer, std::size_t buffer_bytes) {
    namespace cb = cuda_backend;
    using Ref = typename Derived::ref_type;
    cb::require_device_policy<P>();
    detail::require(!all_params_.empty(), "cache", "moved from", "one that still has its policy");
    self().template check_device_pages<Build>();
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        cb::check_observed_params<P>(scorer_of(layer), shape_.kv_heads,
                                     [&](std::int32_t head) { return head_params_of(layer, head); });
    }
    detail::require(buffer != nullptr, "buffer", "null", "device memory of bytes().total()");
    detail::require(buffer_bytes >= bytes_.total(), "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least bytes().total() = ", bytes_.total()); });
    const cb::device_scope device(ctx);
    cb::check_device_memory(device, "buffer", buffer);
    memory_ = detail::aligned(buffer);
    device_ = device.number();
    std::vector<Ref> refs;
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        refs.push_back(self().layer(layer));
    }
    this->template put_on_device<Build>(ctx, all_params_at_, all_params_);
    if constexpr (P::has_selection) {
        this->template put_on_device<Build>(ctx, read_pages_at_, read_pages_);
    }
    this->template put_on_device<Build>(ctx, refs_at_, refs);
    static_cast<Derived&>(*this).template lay_out_on_device<Build>(ctx);
    const std::int64_t heads = std::int64_t{shape_.layers} * shape_.max_sequences * shape_.kv_heads;
    cb::launch("clear_sequences_kernel", cb::clear_sequences_kernel<Ref>, heads, cb::sequence_threads, 0, ctx,
               device_refs(), shape_.kv_heads, 0, shape_.max_sequences, true);
    cb::wait_for(ctx);  // `refs` may go
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
void CacheOwner<Derived, P, T>::clear(const cuda& ctx, std::int32_t seq) {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, device_);
    cb::launch("clear_sequences_kernel", cb::clear_sequences_kernel<typename Derived::ref_type>,
               std::int64_t{shape_.layers} * shape_.kv_heads, cb::sequence_threads, 0, ctx, device_refs(),
               shape_.kv_heads, seq, 1, false);
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
void CacheOwner<Derived, P, T>::advance(const cuda& ctx, const Batch& named, const StepOptions& options) {
    namespace cb = cuda_backend;
    require_memory(true);
    const Batch batch = checks::batch_of(named, shape_.max_sequences);
    checks::check_count("batch.count", batch.count, shape_.max_sequences);
    const cb::device_scope device(ctx, device_);
    const cb::advance_params call{
        .length = at<position_t>(length_at_),
        .appended = at<std::int32_t>(appended_at_),
        .layers = shape_.layers,
        .max_sequences = shape_.max_sequences,
        .kv_heads = shape_.kv_heads,
        .max_seq_len = self().max_seq_len(),
        .batch = batch,
        .status = options.status,
        .says_tokens = batch.q_len != nullptr || batch.length != Batch::not_set,
        .least = named.count == Batch::not_set ? 0 : 1,
    };
    cb::launch("advance_kernel", cb::advance_kernel<cb::advance_params>, batch.count, cb::advance_threads, 0,
               ctx, call);
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
position_t CacheOwner<Derived, P, T>::length(const cuda& ctx, std::int32_t seq) const {
    this->template require_device_seq<Build>(seq, "seq");
    const cuda_backend::device_scope device(ctx, device_);
    return cuda_backend::fetched(ctx, at<const position_t>(length_at_) + seq);
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
HeadUsage CacheOwner<Derived, P, T>::usage(const cuda& ctx, std::int32_t layer, std::int32_t seq,
                                           std::int32_t head) const {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    check_layer(layer);
    require_head(head);
    const cb::device_scope device(ctx, device_);
    const auto cache = self().layer(layer);
    const std::int64_t index = cache.head_index(seq, head);
    std::int32_t num_long_range = 0, appended = 0;
    cb::copy_elements(ctx, &num_long_range, cache.num_long_range + index, 1);
    cb::copy_elements(ctx, &appended, cache.appended + index, 1);
    const position_t tokens = this->template length<Build>(ctx, seq);  // which waits
    return usage_of(layer, head, tokens, detail::appended_tokens(appended), num_long_range);
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
void CacheOwner<Derived, P, T>::fork(const cuda& ctx, std::int32_t from, std::int32_t to,
                                     const StepOptions& options) {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(from, "from");
    this->template require_device_seq<Build>(to, "to");
    if (from != to) {
        const cb::device_scope device(ctx, device_);
        self().template move_sequences<Build>(ctx, cb::sequence_moves{nullptr, 1, from, to}, options.status);
    }
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
void CacheOwner<Derived, P, T>::reorder(const cuda& ctx, const std::int32_t* sources, std::int32_t count,
                                        const StepOptions& options) {
    namespace cb = cuda_backend;
    require_memory(true);
    const std::int32_t most = std::min(shape_.max_sequences, cb::max_reordered);
    detail::require(count >= 0 && count <= most, "count", count, [&] {
        return detail::text("0 to ", most, ", the cache's max_sequences and at most 512");
    });
    detail::require(sources != nullptr || count == 0, "sources", "null", "device memory of count sequences");
    if (count != 0) {
        const cb::device_scope device(ctx, device_);
        self().template move_sequences<Build>(ctx, cb::sequence_moves{sources, count, 0, 0}, options.status);
    }
}

/// A sequence's copy in host memory, with its counters, which say what rows it has, and not yet its rows.
/// Waits for the stream.
template <class Derived, AnyPolicy P, Storage T>
template <class Build>
auto CacheOwner<Derived, P, T>::counted_sequence(const cuda& ctx, std::int32_t seq) const {
    namespace cb = cuda_backend;
    cb::check_between_tokens(ctx, shape_, at<const std::int32_t>(appended_at_), seq);
    const auto heads = static_cast<std::size_t>(shape_.kv_heads);
    sequence_counts counts;
    counts.num_long_range.resize(static_cast<std::size_t>(shape_.layers) * heads);
    cb::copy_elements(ctx, &counts.length, at<const position_t>(length_at_) + seq, 1);
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto of = self().layer(layer);
        cb::copy_elements(ctx, counts.num_long_range.data() + static_cast<std::size_t>(layer) * heads,
                          of.num_long_range + of.head_index(seq, 0), heads);
    }
    cb::wait_for(ctx);
    return self().template sequence_of<Build>(counts);
}

/// Calls copy(array of sequence `seq`, array of other's sequence 0, elements) for the counters, scorer states
/// and queries of a sequence.
template <class Derived, AnyPolicy P, Storage T>
template <class Build, class Copy>
void CacheOwner<Derived, P, T>::for_each_counter(const Derived& other, std::int32_t seq,
                                                 const Copy& copy) const {
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto a = self().layer(layer), b = other.layer(layer);
        const auto array = [&](auto* mine, auto* theirs, std::int64_t each) {
            copy(mine + seq * each, theirs, static_cast<std::size_t>(each));
        };
        array(a.num_long_range, b.num_long_range, a.kv_heads);
        array(a.victim, b.victim, a.kv_heads);
        array(a.state, b.state, a.kv_heads * a.state_size);
        array(a.num_draft, b.num_draft, 1);
        if constexpr (P::has_keep) {
            array(a.num_protected, b.num_protected, a.kv_heads);
        }
        if constexpr (P::has_eviction) {
            array(a.queries, b.queries,
                  std::int64_t{a.kv_heads} * a.eviction.observing * a.group * a.head_dim_qk);
        }
        if (layer == 0) {
            array(a.length, b.length, 1);
        }
    }
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
std::size_t CacheOwner<Derived, P, T>::snapshot_bytes(const cuda& ctx, std::int32_t seq) const {
    this->template require_device_seq<Build>(seq, "seq");
    const cuda_backend::device_scope device(ctx, device_);
    return this->template counted_sequence<Build>(ctx, seq).cache.snapshot_bytes(0);
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
std::size_t CacheOwner<Derived, P, T>::snapshot(const cuda& ctx, std::int32_t seq, void* buffer,
                                                std::size_t buffer_bytes) const {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, device_);
    const auto copy = this->template counted_sequence<Build>(ctx, seq);
    this->template for_each_counter<Build>(copy.cache, seq,
                                           [&](const auto* mine, auto* theirs, std::size_t count) {
                                               cb::copy_elements(ctx, theirs, mine, count);
                                           });
    self().template fetch_rows<Build>(ctx, seq, copy);
    return copy.cache.snapshot(host{1}, 0, buffer, buffer_bytes);
}

template <class Derived, AnyPolicy P, Storage T>
template <class Build>
void CacheOwner<Derived, P, T>::restore(const cuda& ctx, std::int32_t seq, const void* blob,
                                        std::size_t blob_bytes, const StepOptions& options) {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, device_);
    const auto copy = self().template restored_sequence<Build>(blob, blob_bytes);
    if (!self().template store_rows<Build>(ctx, seq, copy, options)) {
        return;
    }
    this->template for_each_counter<Build>(copy.cache, seq,
                                           [&](auto* mine, const auto* theirs, std::size_t count) {
                                               cb::copy_elements(ctx, mine, theirs, count);
                                           });
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto of = self().layer(layer);
        cb::check(cudaMemsetAsync(of.appended + of.head_index(seq, 0), 0,
                                  static_cast<std::size_t>(of.kv_heads) * sizeof(std::int32_t), ctx.stream),
                  "cudaMemsetAsync");
    }
    cb::wait_for(ctx);  // host memory may go
}

}  // namespace kvpolicy
