// What the owner of a DualCache does on a device, and the export of its pages.
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged_decode.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_page_pool.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_copy.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_evict.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_reserve.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_snapshot.cuh>
#include <kvpolicy/caches/cuda/read_counts.cuh>
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
void DualCache<P, T>::require_device_seq(std::int32_t seq, const char* name) const {
    this->require_memory(true);
    this->require_seq_number(seq, name);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::bind(const cuda& ctx, void* buffer, std::size_t buffer_bytes) {
    namespace cb = cuda_backend;
    cb::require_device_policy<P>();
    detail::require(!this->all_params_.empty(), "cache", "moved from", "one that still has its policy");
    detail::require(this->shape_.page_size % cb::stream_tile == 0, "page_size", this->shape_.page_size,
                    [&] { return detail::text("a multiple of ", cb::stream_tile, " on CUDA"); });
    cb::check_selection(this->policy_, this->shape_.page_size,
                        std::int64_t{pool_.slab_pages} * pool_.max_slabs);
    detail::require(buffer != nullptr, "buffer", "null", "device memory of bytes().total()");
    detail::require(buffer_bytes >= this->bytes_.total(), "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least bytes().total() = ", this->bytes_.total()); });
    const cb::device_scope device(ctx);
    cb::check_device_memory(device, "buffer", buffer);
    this->memory_ = detail::aligned(buffer);
    this->device_ = device.number();
    forget_slabs();
    std::vector<ref_type> refs;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        refs.push_back(this->layer(layer));
    }
    const auto copy = [&](std::size_t to, const auto& from) {
        cb::check(cudaMemcpyAsync(this->memory_ + to, from.data(), from.size() * sizeof from[0],
                                  cudaMemcpyHostToDevice, ctx.stream),
                  "cudaMemcpyAsync");
    };
    copy(this->all_params_at_, this->all_params_);
    if constexpr (P::has_selection) {
        copy(this->read_pages_at_, this->read_pages_);
    }
    copy(offsets_at_, table_offset_);
    copy(tiles_at_, tile_offset_);
    copy(refs_at_, refs);
    cb::check(cudaMemsetAsync(this->memory_ + count_at_, 0, sizeof(std::int32_t), ctx.stream),
              "cudaMemsetAsync");
    const std::int64_t heads =
        std::int64_t{this->shape_.layers} * this->shape_.max_sequences * this->shape_.kv_heads;
    cb::launch("clear_sequences_kernel", cb::clear_sequences_kernel<ref_type>, heads, cb::sequence_threads, 0,
               ctx, this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, 0,
               this->shape_.max_sequences, true);
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");  // `refs` may go
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
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
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
    std::int32_t count = 0;
    cb::check(
        cudaMemcpyAsync(&count, this->memory_ + count_at_, sizeof count, cudaMemcpyDeviceToHost, ctx.stream),
        "cudaMemcpyAsync");
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    return count;
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
    const cb::reserve_params<P, T> call{.refs = this->template at<const ref_type>(refs_at_),
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
    std::int64_t lacking = 0;
    cb::check(cudaMemcpyAsync(&lacking, answer, sizeof lacking, cudaMemcpyDeviceToHost, ctx.stream),
              "cudaMemcpyAsync");
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    return lacking == 0 ? 0 : slabs_of(lacking);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::clear(const cuda& ctx, std::int32_t seq) {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, this->device_);
    cb::launch("clear_sequences_kernel", cb::clear_sequences_kernel<ref_type>,
               std::int64_t{this->shape_.layers} * this->shape_.kv_heads, cb::sequence_threads, 0, ctx,
               this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, seq, 1, false);
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
                           shared, ctx, this->template at<const ref_type>(refs_at_), this->shape_.layers,
                           batch, memory, options.reports, options.status);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::advance(const cuda& ctx, const Batch& named, const StepOptions& options) {
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
                                  .max_seq_len = max_seq_len(),
                                  .batch = batch,
                                  .status = options.status,
                                  .says_tokens = batch.q_len != nullptr || batch.length != Batch::not_set,
                                  .least = named.count == Batch::not_set ? 0 : 1});
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The moves of fork and reorder, in all layers. `refused`: a word of the cache's.
template <class P, class T>
void move_paged_sequences(const cuda& ctx, const DualRef<P, T>* refs, const DualRef<P, T>& any,
                          std::int32_t layers, const sequence_moves& moves, std::int64_t* refused,
                          std::uint32_t* status) {
    if (moves.count == 0) {
        return;
    }
    const device_scope device(ctx, any.device);
    const std::size_t a_thread = static_cast<std::size_t>(moves.count) * sizeof(std::uint32_t);
    const int threads = a_thread * sequence_threads <= 64 * 1024 ? sequence_threads : 32;
    const std::size_t scratch = a_thread * static_cast<std::size_t>(threads);
    const std::int64_t heads = std::int64_t{layers} * any.kv_heads;
    constexpr std::int32_t pieces = 16;  // blocks that share the rows of a head
    launch("paged_drop_kernel", paged_drop_kernel<P, T>, 1, admit_threads, 0, ctx, refs, layers, moves,
           refused, status);
    launch("paged_inherit_kernel", paged_inherit_kernel<P, T>, heads, threads, 2 * moves_bytes + scratch, ctx,
           refs, moves, refused);
    if constexpr (P::has_eviction) {
        launch("paged_queries_kernel", paged_queries_kernel<P, T>, heads * pieces, threads,
               moves_bytes + scratch, ctx, refs, moves, pieces, refused);
    }
    launch("paged_share_kernel", paged_share_kernel<P, T>, 1, admit_threads, 0, ctx, refs, layers, moves,
           refused);
    launch("paged_copy_kernel", paged_copy_kernel<P, T>, heads * pieces, sequence_threads, 0, ctx, refs,
           moves, pieces, refused);
    launch("paged_lengths_kernel", paged_lengths_kernel<position_t>, 1, threads, moves_bytes + scratch, ctx,
           any.length, any.max_sequences, moves, refused);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::fork(const cuda& ctx, std::int32_t from, std::int32_t to, const StepOptions& options) {
    this->template require_device_seq<Build>(from, "from");
    this->template require_device_seq<Build>(to, "to");
    if (from != to) {
        cuda_backend::move_paged_sequences<P, T>(ctx, this->template at<const ref_type>(refs_at_),
                                                 this->layer(0), this->shape_.layers, {nullptr, 1, from, to},
                                                 this->template at<std::int64_t>(answer_at_), options.status);
    }
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::reorder(const cuda& ctx, const std::int32_t* sources, std::int32_t count,
                              const StepOptions& options) {
    this->require_memory(true);
    const std::int32_t most = std::min(this->shape_.max_sequences, cuda_backend::max_reordered);
    detail::require(count >= 0 && count <= most, "count", count, [&] {
        return detail::text("0 to ", most, ", the cache's max_sequences and at most 512");
    });
    detail::require(sources != nullptr || count == 0, "sources", "null", "device memory of count sequences");
    cuda_backend::move_paged_sequences<P, T>(ctx, this->template at<const ref_type>(refs_at_), this->layer(0),
                                             this->shape_.layers, {sources, count, 0, 0},
                                             this->template at<std::int64_t>(answer_at_), options.status);
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
auto DualCache<P, T>::counted_sequence(const cuda& ctx, std::int32_t seq) const {
    namespace cb = cuda_backend;
    cb::check_between_tokens(ctx, this->shape_, this->template at<const std::int32_t>(this->appended_at_),
                             seq);
    // Rows in use depend on lengths and counters alone.
    const std::int32_t heads = this->shape_.kv_heads;
    std::vector<std::int32_t> num_long_range(static_cast<std::size_t>(this->shape_.layers) *
                                             static_cast<std::size_t>(heads));
    position_t length = 0;
    const auto fetch = [&](auto* to, const auto* from, std::int64_t count) {
        cb::check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof *to,
                                  cudaMemcpyDeviceToHost, ctx.stream),
                  "cudaMemcpyAsync");
    };
    fetch(&length, this->layer(0).length + seq, 1);
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type of = this->layer(layer);
        fetch(num_long_range.data() + std::int64_t{layer} * heads,
              of.num_long_range + std::int64_t{seq} * heads, heads);
    }
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    std::int64_t rows = 0;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        for (std::int32_t head = 0; head < heads; ++head) {
            const HeadParams& head_params = this->head_params_of(layer, head);
            rows += HeadRows{head_params.sinks, head_params.window}.used(
                length, num_long_range[static_cast<std::size_t>(layer * heads + head)]);
        }
    }
    sequence_copy<Build> copy(*this, rows);
    *copy.cache.layer(0).length = length;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type of = copy.cache.layer(layer);
        std::copy_n(num_long_range.data() + std::int64_t{layer} * heads, heads, of.num_long_range);
        for (std::int32_t head = 0; head < heads; ++head) {
            of.take_pages(0, head, of.used(0, head));
        }
    }
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
        : ctx_(ctx),
          rows_(static_cast<std::size_t>(first.back())),
          head_dim_qk_(head_dim_qk),
          head_dim_vo_(head_dim_vo) {
        workspace_parts measure(nullptr);
        take(measure, first.size());
        check(cudaMalloc(&memory_, measure.bytes()), "cudaMalloc");
        workspace_parts parts(memory_);
        take(parts, first.size());
        copy(const_cast<std::int64_t*>(rows.first), first.data(), first.size());
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
    template <class Element>
    void copy(Element* to, const Element* from, std::size_t count) const {
        check(cudaMemcpyAsync(to, from, count * sizeof(Element), cudaMemcpyDefault, ctx_.stream),
              "cudaMemcpyAsync");
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
    const cuda& ctx_;
    std::size_t rows_;
    std::int32_t head_dim_qk_, head_dim_vo_;
    void* memory_ = nullptr;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t DualCache<P, T>::snapshot_bytes(const cuda& ctx, std::int32_t seq) const {
    this->template require_device_seq<Build>(seq, "seq");
    const cuda_backend::device_scope device(ctx, this->device_);
    return this->template counted_sequence<Build>(ctx, seq).cache.snapshot_bytes(0);
}

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t DualCache<P, T>::snapshot(const cuda& ctx, std::int32_t seq, void* buffer,
                                      std::size_t buffer_bytes) const {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, this->device_);
    const auto copy = this->template counted_sequence<Build>(ctx, seq);
    const cb::staged_rows<T> staged(ctx, copy.first, this->shape_.head_dim_qk, this->shape_.head_dim_vo);
    constexpr std::int32_t pieces = 16;  // blocks that share the rows of a head
    const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.kv_heads;
    cb::launch("paged_sequence_rows_kernel", cb::paged_sequence_rows_kernel<P, T>, heads * pieces,
               cb::sequence_threads, 0, ctx, this->template at<const ref_type>(refs_at_), seq, staged.rows,
               pieces, false);
    std::vector<T> k, v;
    std::vector<position_t> position;
    std::vector<float> score;
    staged.each(k, v, position, score, [&](auto* of_device, auto* of_host, std::size_t count) {
        staged.copy(of_host, of_device, count);
    });
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = this->layer(layer), b = copy.cache.layer(layer);
        staged.copy(b.state, a.state + std::int64_t{seq} * a.kv_heads * a.state_size,
                    static_cast<std::size_t>(a.kv_heads * a.state_size));
        if constexpr (P::has_eviction) {
            const std::int64_t queries =
                std::int64_t{a.kv_heads} * a.eviction.observing * a.group * a.head_dim_qk;
            staged.copy(b.queries, a.queries + seq * queries, static_cast<std::size_t>(queries));
        }
    }
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    for_each_row(copy, [&](const auto& rows, std::int32_t r, std::int64_t at) {
        std::copy_n(k.data() + at * this->shape_.head_dim_qk, this->shape_.head_dim_qk, rows.k(r));
        std::copy_n(v.data() + at * this->shape_.head_dim_vo, this->shape_.head_dim_vo, rows.v(r));
        rows.position(r) = position[static_cast<std::size_t>(at)];
        rows.score(r) = score[static_cast<std::size_t>(at)];
    });
    return copy.cache.snapshot(host{1}, 0, buffer, buffer_bytes);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::restore(const cuda& ctx, std::int32_t seq, const void* blob, std::size_t blob_bytes,
                              const StepOptions& options) {
    namespace cb = cuda_backend;
    this->template require_device_seq<Build>(seq, "seq");
    const cb::device_scope device(ctx, this->device_);
    const std::size_t row =
        static_cast<std::size_t>(this->shape_.head_dim_qk + this->shape_.head_dim_vo) * sizeof(T);
    sequence_copy<Build> copy(*this,
                              static_cast<std::int64_t>(blob_bytes / row));  // more rows do not fit in it
    copy.cache.restore(host{1}, 0, blob, blob_bytes);
    copy.count();
    const cb::staged_rows<T> staged(ctx, copy.first, this->shape_.head_dim_qk, this->shape_.head_dim_vo);
    auto* const answer = this->template at<std::int64_t>(answer_at_);
    const auto* const refs = this->template at<const ref_type>(refs_at_);
    cb::launch("paged_refill_kernel", cb::paged_refill_kernel<P, T>, 1, cb::admit_threads, 0, ctx, refs,
               this->shape_.layers, seq, staged.rows.first, answer);
    std::int64_t lacking = 0;
    staged.copy(&lacking, answer, 1);
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    if (lacking != 0) {
        if (options.status == nullptr) {
            detail::refuse("pages that the pool lacks", lacking, "0 (add_slab adds more)");
        }
        std::uint32_t status = 0;
        staged.copy(&status, options.status, 1);
        cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
        status |= status_pool_exhausted;
        staged.copy(options.status, &status, 1);
        cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
        return;
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
        staged.copy(of_device, of_host, count);
    });
    constexpr std::int32_t pieces = 16;  // blocks that share the rows of a head
    const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.kv_heads;
    cb::launch("paged_sequence_rows_kernel", cb::paged_sequence_rows_kernel<P, T>, heads * pieces,
               cb::sequence_threads, 0, ctx, refs, seq, staged.rows, pieces, true);
    if constexpr (P::has_selection) {
        cb::launch("paged_sequence_bounds_kernel", cb::paged_sequence_bounds_kernel<P, T>, heads * pieces,
                   cb::sequence_threads, 0, ctx, refs, seq, staged.rows.first, pieces);
    }
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = this->layer(layer), b = copy.cache.layer(layer);
        const std::int64_t at = std::int64_t{seq} * a.kv_heads;
        const auto count = static_cast<std::size_t>(a.kv_heads);
        staged.copy(a.state + at * a.state_size, b.state, count * static_cast<std::size_t>(a.state_size));
        staged.copy(a.num_long_range + at, b.num_long_range, count);
        staged.copy(a.victim + at, b.victim, count);
        cb::check(cudaMemsetAsync(a.appended + at, 0, count * sizeof(std::int32_t), ctx.stream),
                  "cudaMemsetAsync");
        staged.copy(a.num_draft + seq, b.num_draft, 1);
        if constexpr (P::has_keep) {
            staged.copy(a.num_protected + at, b.num_protected, count);
        }
        if constexpr (P::has_eviction) {
            const std::int64_t queries =
                std::int64_t{a.kv_heads} * a.eviction.observing * a.group * a.head_dim_qk;
            staged.copy(a.queries + seq * queries, b.queries, static_cast<std::size_t>(queries));
        }
    }
    staged.copy(this->layer(0).length + seq, copy.cache.layer(0).length, 1);
    staged.copy(this->layer(0).reserved + seq, copy.cache.layer(0).reserved, 1);
    cb::check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");  // host memory may go
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

template <class Dims, class P, Storage T>
void export_heads(const cuda& ctx, const DualRef<P, T>& cache, const Batch& named, const HeadPages& pages,
                  workspace_view /*workspace*/, const StepOptions& /*options*/) {
    namespace cb = cuda_backend;
    cb::check_on_device(cache);
    const Batch batch = checks::batch_of(named, cache.max_sequences);
    checks::check_count("batch.count", batch.count, cache.max_sequences);
    checks::check_head_pages(cache, batch, pages, cache.page_count(), "the pages that the pool can have");
    const cb::device_scope device(ctx, cache.device);
    const cb::paged_view<T> view(cache);
    cb::launch("count_paged_pages_kernel", cb::count_paged_pages_kernel<T>, 1, cb::admit_threads, 0, ctx,
               view, batch, pages);
    cb::launch("fill_paged_pages_kernel", cb::fill_paged_pages_kernel<T>,
               std::int64_t{batch.count} * cache.kv_heads, cb::admit_threads, 0, ctx, view, batch, pages);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
