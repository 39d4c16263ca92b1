// Where the entries of a DualCache lie, for its owner on a device (dispatch_owner.cuh); its pool, and
// eviction.
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/cuda/dispatch_owner.cuh>
#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged_decode.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_page_pool.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_copy.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_evict.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_reserve.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_snapshot.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpolicy {

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::check_device_pages() const {
    namespace cb = cuda_backend;
    detail::require(this->shape_.page_size % cb::stream_tile == 0, "page_size", this->shape_.page_size,
                    [&] { return detail::text("a multiple of ", cb::stream_tile, " on CUDA"); });
    cb::check_selection(this->policy_, this->shape_.page_size,
                        std::int64_t{pool_.slab_pages} * pool_.max_slabs);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::lay_out_on_device(const cuda& ctx) {
    forget_slabs();
    this->template put_on_device<Build>(ctx, offsets_at_, table_offset_);
    this->template put_on_device<Build>(ctx, tiles_at_, tile_offset_);
    cuda_backend::check(cudaMemsetAsync(this->memory_ + count_at_, 0, sizeof(std::int32_t), ctx.stream),
                        "cudaMemsetAsync");
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::attach(const cuda& ctx, const Slab<T>& slab) {
    namespace cb = cuda_backend;
    const cb::device_scope device(ctx, this->device_);
    cb::check_device_memory(device, "keys of the slab", slab.k);
    cb::check_device_memory(device, "values of the slab", slab.v);
    cb::check_device_memory(device, "notes of the slab", slab.position);
    cb::launch("attach_slab_kernel", cb::attach_slab_kernel<T>, 1, cb::admit_threads, 0, ctx,
               this->layer(0).pool, this->template at<Slab<T>>(slabs_at_), slabs(), spared_of(slabs()), slab);
    cb::wait_for(ctx);
    attached_.push_back(slab);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::add_slab(const cuda& ctx, void* buffer, std::size_t buffer_bytes) {
    this->require_memory(true);
    this->template attach<Build>(ctx, slab_in(buffer, buffer_bytes));
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::add_pages(const cuda& ctx, T* k, T* v, void* notes, std::size_t notes_bytes) {
    this->require_memory(true);
    constexpr int each = sizeof(T) == 2 ? 8 : 1;  // numbers that kernels read at once
    const PageStrides& strides = pool_.strides;
    for (const std::int64_t stride :
         {strides.k_page, strides.v_page, std::int64_t{strides.k_row}, std::int64_t{strides.v_row}}) {
        detail::require(stride % each == 0, "strides of the pool's pages", stride,
                        [&] { return detail::text("multiples of ", each, " on CUDA"); });
    }
    const auto unaligned = [](const T* rows) {
        return reinterpret_cast<std::uintptr_t>(rows) % (each * sizeof(T));
    };
    detail::require(unaligned(k) == 0, "k", "a row that is not aligned", "rows at multiples of 16 bytes");
    detail::require(unaligned(v) == 0, "v", "a row that is not aligned", "rows at multiples of 16 bytes");
    this->template attach<Build>(ctx, slab_of(k, v, notes, notes_bytes));
}

template <AnyPolicy P, Storage T>
template <class Build>
std::int64_t DualCache<P, T>::free_pages(const cuda& ctx) const {
    namespace cb = cuda_backend;
    this->require_memory(true);
    const cb::device_scope device(ctx, this->device_);
    return cb::fetched(ctx, this->template at<const std::int32_t>(count_at_));
}

template <AnyPolicy P, Storage T>
template <class Build>
std::int64_t DualCache<P, T>::reserve(const cuda& ctx, const Batch& named) {
    namespace cb = cuda_backend;
    this->require_memory(true);
    const Batch batch = checks::batch_of(named, this->shape_.max_sequences);
    checks::check_count("batch.count", batch.count, this->shape_.max_sequences);
    if (batch.count == 0) {
        return 0;
    }
    const cb::device_scope device(ctx, this->device_);
    auto* const answer = this->template at<std::int64_t>(answer_at_);
    const cb::reserve_params<P, T> call{.refs = this->device_refs(),
                                        .layers = this->shape_.layers,
                                        .max_sequences = this->shape_.max_sequences,
                                        .max_seq_len = max_seq_len(),
                                        .batch = batch,
                                        .claims = this->template at<PageClaim>(claims_at_),
                                        .answer = answer};
    cb::launch("count_reserved_kernel", cb::count_reserved_kernel<P, T>, batch.count, cb::admit_threads, 0,
               ctx, call);
    cb::launch("grant_reserved_kernel", cb::grant_reserved_kernel<P, T>, 1, cb::admit_threads, 0, ctx, call);
    cb::launch("take_reserved_kernel", cb::take_reserved_kernel<P, T>, batch.count, cb::admit_threads, 0, ctx,
               call);
    const std::int64_t lacking = cb::fetched(ctx, answer);
    return lacking == 0 ? 0 : slabs_of(lacking);
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Takes the parts of evict's workspace; with null only measures.
template <class T>
std::size_t lay_out_eviction(evict_memory<T>& memory, void* data, std::int64_t kv_heads,
                             std::int64_t queries) {
    workspace_parts parts(data);
    memory.order = parts.take<std::int32_t>(kv_heads * memory.rows);
    memory.mass = parts.take<double>(kv_heads * memory.rows);
    memory.keys = parts.take<std::uint64_t>(kv_heads * memory.rows);
    memory.top = parts.take<typename evict_memory<T>::Real>(kv_heads * queries);
    memory.weight = parts.take<double>(kv_heads * queries);
    memory.dropped = parts.take<unsigned long long>(3);
    return parts.bytes();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t DualCache<P, T>::evict_workspace_bytes(const cuda& /*ctx*/) const requires P::has_eviction {
    this->require_memory(true);
    cuda_backend::evict_memory<T> memory{.rows = max_rows()};
    return cuda_backend::lay_out_eviction(memory, nullptr, this->shape_.kv_heads,
                                          std::int64_t{this->policy_.eviction().observing} *
                                              (this->shape_.query_heads / this->shape_.kv_heads));
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::evict(const cuda& ctx, const Batch& named, workspace_view workspace,
                            const EvictOptions& options) requires P::has_eviction {
    namespace cb = cuda_backend;
    this->require_memory(true);
    const Batch batch = checks::batch_of(named, this->shape_.max_sequences);
    checks::check_count("batch.count", batch.count, this->shape_.max_sequences);
    cb::check_workspace(workspace, this->template evict_workspace_bytes<Build>(ctx));
    if (batch.count == 0) {
        return;
    }
    const cb::device_scope device(ctx, this->device_);
    const std::int32_t group = this->shape_.query_heads / this->shape_.kv_heads;
    const std::size_t row =
        static_cast<std::size_t>(this->shape_.head_dim_qk + this->shape_.head_dim_vo) * sizeof(T);
    cb::evict_memory<T> memory{.rows = max_rows()};
    memory.staged = static_cast<std::int32_t>(std::clamp<std::size_t>(16384 / row, 4, 32));
    cb::lay_out_eviction(memory, workspace.data, this->shape_.kv_heads,
                         std::int64_t{this->policy_.eviction().observing} * group);
    const std::size_t shared =
        std::max(static_cast<std::size_t>(memory.staged) * row,
                 static_cast<std::size_t>(cb::evict_tile) *
                     static_cast<std::size_t>(this->shape_.head_dim_qk) * sizeof(compute_t<T>));
    cb::launch_cooperative("paged_evict_kernel", cb::paged_evict_kernel<P, T>, 4, device, cb::admit_threads,
                           shared, ctx, this->device_refs(), this->shape_.layers, batch, memory,
                           options.reports, options.status);
}

/// The moves of fork and reorder, in all layers.
template <AnyPolicy P, Storage T>
template <class Build, class Moves>
void DualCache<P, T>::move_sequences(const cuda& ctx, const Moves& moves, std::uint32_t* status) const {
    namespace cb = cuda_backend;
    const auto* const refs = this->device_refs();
    const ref_type any = this->layer(0);
    const std::int32_t layers = this->shape_.layers;
    auto* const refused = this->template at<std::int64_t>(answer_at_);
    const std::size_t a_thread = static_cast<std::size_t>(moves.count) * sizeof(std::uint32_t);
    const int threads = a_thread * cb::sequence_threads <= 64 * 1024 ? cb::sequence_threads : 32;
    const std::size_t shared = cb::moves_bytes + a_thread * static_cast<std::size_t>(threads);
    const std::int64_t heads = std::int64_t{layers} * any.kv_heads;
    cb::launch("paged_drop_kernel", cb::paged_drop_kernel<P, T>, 1, cb::admit_threads, 0, ctx, refs, layers,
               moves, refused, status);
    cb::launch("paged_inherit_kernel", cb::paged_inherit_kernel<P, T>, heads, threads,
               cb::moves_bytes + shared, ctx, refs, moves, refused);
    if constexpr (P::has_eviction) {
        cb::launch("paged_queries_kernel", cb::paged_queries_kernel<P, T>, heads * cb::row_pieces, threads,
                   shared, ctx, refs, moves, cb::row_pieces, refused);
    }
    cb::launch("paged_share_kernel", cb::paged_share_kernel<P, T>, 1, cb::admit_threads, 0, ctx, refs, layers,
               moves, refused);
    cb::launch("paged_copy_kernel", cb::paged_copy_kernel<P, T>, heads * cb::row_pieces, cb::sequence_threads,
               0, ctx, refs, moves, cb::row_pieces, refused);
    cb::launch("paged_lengths_kernel", cb::paged_lengths_kernel<position_t>, 1, threads, shared, ctx,
               any.length, any.max_sequences, moves, refused);
}

/// A cache of the same kind with one sequence in host memory, and the numbers that say which rows it has.
template <AnyPolicy P, Storage T>
template <class Build>
struct DualCache<P, T>::sequence_copy {
    std::vector<unsigned char> tables, slab;
    std::vector<std::int64_t> first;  // [layers * kv_heads + 1]: rows of the heads before
    DualCache cache;

    /// With space for `rows` rows in heads of any lengths.
    sequence_copy(const DualCache& of, std::int64_t rows)
        : cache(of.one_sequence_shape(), of.one_sequence_pool(rows), of.policy_, of.scorers_, of.attention_) {
        cache.rebase_limit(of.rebase_limit_);
        tables.resize(cache.bytes().total());
        slab.resize(cache.slab_bytes());
        cache.bind(host{1}, tables.data(), tables.size());
        cache.add_slab(host{1}, slab.data(), slab.size());
    }
    /// Counts the rows of all heads.
    void count() {
        first.assign(1, 0);
        for (std::int32_t layer = 0; layer < cache.shape_.layers; ++layer) {
            const ref_type ref = cache.layer(layer);
            for (std::int32_t head = 0; head < ref.kv_heads; ++head) {
                first.push_back(first.back() + ref.used(0, head));
            }
        }
    }
};

template <AnyPolicy P, Storage T>
template <class Build>
auto DualCache<P, T>::sequence_of(const typename base::sequence_counts& counts) const {
    const std::int32_t heads = this->shape_.kv_heads;
    std::int64_t rows = 0;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        for (std::int32_t head = 0; head < heads; ++head) {
            const HeadParams& head_params = this->head_params_of(layer, head);
            rows += HeadRows{head_params.sinks, head_params.window}.used(
                counts.length, counts.num_long_range[static_cast<std::size_t>(layer * heads + head)]);
        }
    }
    sequence_copy<Build> copy(*this, rows);
    *copy.cache.layer(0).length = counts.length;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type of = copy.cache.layer(layer);
        std::copy_n(counts.num_long_range.data() + std::int64_t{layer} * heads, heads, of.num_long_range);
        for (std::int32_t head = 0; head < heads; ++head) {
            of.take_pages(0, head, of.used(0, head));
        }
    }
    copy.count();
    return copy;
}

template <AnyPolicy P, Storage T>
template <class Build>
auto DualCache<P, T>::restored_sequence(const void* blob, std::size_t blob_bytes) const {
    const std::size_t row =
        static_cast<std::size_t>(this->shape_.head_dim_qk + this->shape_.head_dim_vo) * sizeof(T);
    // More rows do not fit in the blob.
    sequence_copy<Build> copy(*this, static_cast<std::int64_t>(blob_bytes / row));
    copy.cache.restore(host{1}, 0, blob, blob_bytes);
    copy.count();
    return copy;
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rows of a sequence in device memory of their own, which these calls alone allocate.
template <class T>
class staged_rows {
  public:
    staged_rows(const cuda& ctx, const std::vector<std::int64_t>& first, std::int32_t head_dim_qk,
                std::int32_t head_dim_vo)
        : rows_(static_cast<std::size_t>(first.back())),
          head_dim_qk_(head_dim_qk),
          head_dim_vo_(head_dim_vo) {
        workspace_parts measure(nullptr);
        take(measure, first.size());
        check(cudaMalloc(&memory_, measure.bytes()), "cudaMalloc");
        workspace_parts parts(memory_);
        take(parts, first.size());
        copy_elements(ctx, const_cast<std::int64_t*>(rows.first), first.data(), first.size());
    }
    staged_rows(const staged_rows&) = delete;
    staged_rows& operator=(const staged_rows&) = delete;
    ~staged_rows() { static_cast<void>(cudaFree(memory_)); }

    /// Calls move(device array, host array, count of its elements) for the parts of rows.
    template <class Move>
    void each(std::vector<T>& k, std::vector<T>& v, std::vector<position_t>& position,
              std::vector<float>& score, const Move& move) const {
        k.resize(rows_ * static_cast<std::size_t>(head_dim_qk_));
        v.resize(rows_ * static_cast<std::size_t>(head_dim_vo_));
        position.resize(rows_);
        score.resize(rows_);
        move(rows.k, k.data(), k.size());
        move(rows.v, v.data(), v.size());
        move(rows.position, position.data(), rows_);
        move(rows.score, score.data(), rows_);
    }
    slot_rows<T> rows;

  private:
    void take(workspace_parts& parts, std::size_t edges) {
        rows.first = parts.take<std::int64_t>(static_cast<std::int64_t>(edges));
        const auto count = static_cast<std::int64_t>(rows_);
        rows.k = parts.take<T>(count * head_dim_qk_);
        rows.v = parts.take<T>(count * head_dim_vo_);
        rows.position = parts.take<position_t>(count);
        rows.score = parts.take<float>(count);
    }
    std::size_t rows_;
    std::int32_t head_dim_qk_, head_dim_vo_;
    void* memory_ = nullptr;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::fetch_rows(const cuda& ctx, std::int32_t seq, const sequence_copy<Build>& copy) const {
    namespace cb = cuda_backend;
    const cb::staged_rows<T> staged(ctx, copy.first, this->shape_.head_dim_qk, this->shape_.head_dim_vo);
    const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.kv_heads;
    cb::launch("paged_sequence_rows_kernel", cb::paged_sequence_rows_kernel<P, T>, heads * cb::row_pieces,
               cb::sequence_threads, 0, ctx, this->device_refs(), seq, staged.rows, cb::row_pieces, false);
    std::vector<T> k, v;
    std::vector<position_t> position;
    std::vector<float> score;
    staged.each(k, v, position, score, [&](const auto* of_device, auto* of_host, std::size_t count) {
        cb::copy_elements(ctx, of_host, of_device, count);
    });
    cb::wait_for(ctx);
    for_each_row(copy, [&](const auto& rows, std::int32_t r, std::int64_t at) {
        std::copy_n(k.data() + at * this->shape_.head_dim_qk, this->shape_.head_dim_qk, rows.k(r));
        std::copy_n(v.data() + at * this->shape_.head_dim_vo, this->shape_.head_dim_vo, rows.v(r));
        rows.position(r) = position[static_cast<std::size_t>(at)];
        rows.score(r) = score[static_cast<std::size_t>(at)];
    });
}

template <AnyPolicy P, Storage T>
template <class Build>
bool DualCache<P, T>::store_rows(const cuda& ctx, std::int32_t seq, const sequence_copy<Build>& copy,
                                 const StepOptions& options) const {
    namespace cb = cuda_backend;
    const cb::staged_rows<T> staged(ctx, copy.first, this->shape_.head_dim_qk, this->shape_.head_dim_vo);
    auto* const answer = this->template at<std::int64_t>(answer_at_);
    const auto* const refs = this->device_refs();
    cb::launch("paged_refill_kernel", cb::paged_refill_kernel<P, T>, 1, cb::admit_threads, 0, ctx, refs,
               this->shape_.layers, seq, staged.rows.first, answer);
    if (const std::int64_t lacking = cb::fetched(ctx, answer); lacking != 0) {
        if (options.status == nullptr) {
            detail::refuse("pages that the pool lacks", lacking, "0 (add_slab adds more)");
        }
        const std::uint32_t status = cb::fetched(ctx, options.status) | status_pool_exhausted;
        cb::copy_elements(ctx, options.status, &status, 1);
        cb::wait_for(ctx);
        return false;
    }
    std::vector<T> k, v;
    std::vector<position_t> position;
    std::vector<float> score;
    staged.each(k, v, position, score, [](auto*, auto*, std::size_t) {});
    for_each_row(copy, [&](const auto& rows, std::int32_t r, std::int64_t at) {
        std::copy_n(rows.k(r), this->shape_.head_dim_qk, k.data() + at * this->shape_.head_dim_qk);
        std::copy_n(rows.v(r), this->shape_.head_dim_vo, v.data() + at * this->shape_.head_dim_vo);
        position[static_cast<std::size_t>(at)] = rows.position(r);
        score[static_cast<std::size_t>(at)] = rows.score(r);
    });
    staged.each(k, v, position, score, [&](auto* of_device, const auto* of_host, std::size_t count) {
        cb::copy_elements(ctx, of_device, of_host, count);
    });
    const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.kv_heads;
    cb::launch("paged_sequence_rows_kernel", cb::paged_sequence_rows_kernel<P, T>, heads * cb::row_pieces,
               cb::sequence_threads, 0, ctx, refs, seq, staged.rows, cb::row_pieces, true);
    if constexpr (P::has_selection) {
        cb::launch("paged_sequence_bounds_kernel", cb::paged_sequence_bounds_kernel<P, T>,
                   heads * cb::row_pieces, cb::sequence_threads, 0, ctx, refs, seq, staged.rows.first,
                   cb::row_pieces);
    }
    const position_t none = 0;
    cb::copy_elements(ctx, this->layer(0).reserved + seq, &none, 1);
    cb::wait_for(ctx);  // `staged` and host memory may go
    return true;
}

}  // namespace kvpolicy
