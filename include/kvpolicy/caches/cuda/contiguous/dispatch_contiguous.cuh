// Where the entries of a FixedBudgetCache lie, for its owner on a device (dispatch_owner.cuh).
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/dispatch_owner.cuh>
#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvpolicy {

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::check_device_pages() const {
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        cuda_backend::check_selection(this->policy_, this->shape_.page_size,
                                      this->shape_.max_sequences * (rows(layer) / this->shape_.page_size));
    }
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::lay_out_on_device(const cuda& ctx) {
    namespace cb = cuda_backend;
    this->template put_on_device<Build>(ctx, offsets_at_, row_offset_);
    if constexpr (P::has_selection) {
        cb::launch("lay_out_pages_kernel", cb::lay_out_pages_kernel<P, T>, this->shape_.layers,
                   cb::sequence_threads, 0, ctx, this->device_refs());
    }
}

/// The moves of fork and reorder, in all layers.
template <AnyPolicy P, Storage T>
template <class Build, class Moves>
void FixedBudgetCache<P, T>::move_sequences(const cuda& ctx, const Moves& moves,
                                            std::uint32_t* status) const {
    namespace cb = cuda_backend;
    constexpr std::size_t scratch = 64 * 1024;
    const auto run = [&]<class Word>(Word) {
        const std::size_t a_thread = static_cast<std::size_t>(moves.count) * sizeof(Word);
        const int threads = a_thread * cb::sequence_threads <= scratch ? cb::sequence_threads : 32;
        const std::size_t shared = cb::moves_bytes + a_thread * static_cast<std::size_t>(threads);
        cb::launch("move_rows_kernel", cb::move_rows_kernel<Word, P, T>,
                   std::int64_t{this->shape_.layers} * this->shape_.kv_heads * cb::row_pieces, threads,
                   shared, ctx, this->device_refs(), moves, cb::row_pieces);
        cb::launch("move_counters_kernel", cb::move_counters_kernel<P, T>, this->shape_.layers, threads,
                   shared, ctx, this->device_refs(), moves, status);
    };
    if (static_cast<std::size_t>(moves.count) * sizeof(uint4) * 32 <= scratch) {
        run(uint4{});
    } else {
        run(std::uint32_t{});
    }
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

template <AnyPolicy P, Storage T>
template <class Build>
auto FixedBudgetCache<P, T>::sequence_of(const typename base::sequence_counts& counts) const {
    sequence_copy<Build> copy(*this);
    const std::int32_t heads = this->shape_.kv_heads;
    *copy.cache.layer(0).length = counts.length;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        std::copy_n(counts.num_long_range.data() + std::int64_t{layer} * heads, heads,
                    copy.cache.layer(layer).num_long_range);
    }
    return copy;
}

template <AnyPolicy P, Storage T>
template <class Build>
auto FixedBudgetCache<P, T>::restored_sequence(const void* blob, std::size_t blob_bytes) const {
    sequence_copy<Build> copy(*this);
    copy.cache.restore(host{1}, 0, blob, blob_bytes);
    return copy;
}

/// Calls copy(array of sequence `seq`, array of other's sequence 0, elements) for the rows that other's
/// sequence uses. Heads that use all of theirs are one piece.
template <AnyPolicy P, Storage T>
template <class Build, class Copy>
void FixedBudgetCache<P, T>::for_each_slice(const FixedBudgetCache& other, std::int32_t seq,
                                            const Copy& copy) const {
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = this->layer(layer), b = other.layer(layer);
        const auto some = [&](auto* mine, auto* theirs, std::int64_t each, std::int64_t first,
                              std::int64_t count) {
            copy(mine + seq * each + first, theirs + first, static_cast<std::size_t>(count));
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
    }
}

template <AnyPolicy P, Storage T>
template <class Build>
void FixedBudgetCache<P, T>::fetch_rows(const cuda& ctx, std::int32_t seq,
                                        const sequence_copy<Build>& copy) const {
    this->template for_each_slice<Build>(copy.cache, seq,
                                         [&](const auto* mine, auto* theirs, std::size_t count) {
                                             cuda_backend::copy_elements(ctx, theirs, mine, count);
                                         });
    cuda_backend::wait_for(ctx);
}

template <AnyPolicy P, Storage T>
template <class Build>
bool FixedBudgetCache<P, T>::store_rows(const cuda& ctx, std::int32_t seq, const sequence_copy<Build>& copy,
                                        const StepOptions& /*options*/) const {
    this->template for_each_slice<Build>(copy.cache, seq,
                                         [&](auto* mine, const auto* theirs, std::size_t count) {
                                             cuda_backend::copy_elements(ctx, mine, theirs, count);
                                         });
    cuda_backend::wait_for(ctx);
    return true;
}

}  // namespace kvpolicy
