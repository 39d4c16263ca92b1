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
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpolicy {

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::require_device_slot(std::int32_t slot, const char* name) const {
    this->require_memory(true);
    this->require_slot_number(slot, name);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::bind(const cuda& on, void* buffer, std::size_t buffer_bytes) {
    namespace cb = cuda_backend;
    cb::require_device_policy<P>();
    detail::require(!this->rules_.empty(), "cache", "moved from", "one that still has its policy");
    detail::require(this->shape_.page_rows % cb::stream_tile == 0, "page_rows", this->shape_.page_rows,
                    [&] { return detail::text("a multiple of ", cb::stream_tile, " on CUDA"); });
    cb::check_selection(this->policy_, this->shape_.page_rows,
                        std::int64_t{pool_.slab_pages} * pool_.most_slabs);
    detail::require(buffer != nullptr, "buffer", "null", "device memory of bytes().total()");
    detail::require(buffer_bytes >= this->bytes_.total(), "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least bytes().total() = ", this->bytes_.total()); });
    const cb::device_scope device(on);
    cb::check_device_memory(device, "buffer", buffer);
    this->memory_ = host_backend::aligned(buffer);
    this->device_ = device.number();
    forget_slabs();
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
    if constexpr (P::has_selection) {
        copy(this->read_pages_at_, this->read_pages_);
    }
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
void DualCache<P, T>::lend(const cuda& on, const Slab<T>& slab) {
    namespace cb = cuda_backend;
    const cb::device_scope device(on, this->device_);
    cb::check_device_memory(device, "keys of the slab", slab.k);
    cb::check_device_memory(device, "values of the slab", slab.v);
    cb::check_device_memory(device, "notes of the slab", slab.position);
    cb::launch("lend_slab_kernel", cb::lend_slab_kernel<T>, 1, cb::admit_threads, 0, on, ref(0).pool,
               this->template at<Slab<T>>(slabs_at_), slabs(), spared_of(slabs()), slab);
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    lent_.push_back(slab);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::add_slab(const cuda& on, void* buffer, std::size_t buffer_bytes) {
    this->require_memory(true);
    this->template lend<Build>(on, slab_in(buffer, buffer_bytes));
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::add_pages(const cuda& on, T* k, T* v, void* notes, std::size_t notes_bytes) {
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
    this->template lend<Build>(on, slab_of(k, v, notes, notes_bytes));
}

template <AnyPolicy P, Storage T>
template <class Build>
std::int64_t DualCache<P, T>::free_pages(const cuda& on) const {
    namespace cb = cuda_backend;
    this->require_memory(true);
    const cb::device_scope device(on, this->device_);
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
    const cb::device_scope device(on, this->device_);
    auto* const answer = this->template at<std::int64_t>(answer_at_);
    const cb::reserve_launch<P, T> call{.refs = this->template at<const ref_type>(refs_at_),
                                        .layers = this->shape_.layers,
                                        .slots = this->shape_.slots,
                                        .longest = longest_slot(),
                                        .batch = batch,
                                        .claims = this->template at<PageClaim>(claims_at_),
                                        .answer = answer};
    cb::launch("count_reserved_kernel", cb::count_reserved_kernel<P, T>, batch.count, cb::admit_threads, 0,
               on, call);
    cb::launch("grant_reserved_kernel", cb::grant_reserved_kernel<P, T>, 1, cb::admit_threads, 0, on, call);
    cb::launch("take_reserved_kernel", cb::take_reserved_kernel<P, T>, batch.count, cb::admit_threads, 0, on,
               call);
    std::int64_t lacking = 0;
    cb::check(cudaMemcpyAsync(&lacking, answer, sizeof lacking, cudaMemcpyDeviceToHost, on.stream),
              "cudaMemcpyAsync");
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    return lacking == 0 ? 0 : slabs_of(lacking);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::clear(const cuda& on, std::int32_t slot) {
    namespace cb = cuda_backend;
    this->template require_device_slot<Build>(slot, "slot");
    const cb::device_scope device(on, this->device_);
    cb::launch("clear_slots_kernel", cb::clear_slots_kernel<ref_type>,
               std::int64_t{this->shape_.layers} * this->shape_.kv_heads, cb::slot_threads, 0, on,
               this->template at<const ref_type>(refs_at_), this->shape_.kv_heads, slot, 1, false);
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
std::size_t DualCache<P, T>::evict_workspace_bytes(const cuda& /*on*/) const requires P::has_eviction {
    this->require_memory(true);
    cuda_backend::evict_memory<T> memory{.rows = most_rows()};
    return cuda_backend::lay_out_eviction(memory, nullptr, this->shape_.kv_heads,
                                          std::int64_t{this->policy_.eviction().observing} *
                                              (this->shape_.query_heads / this->shape_.kv_heads));
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::evict(const cuda& on, const Batch& batch, workspace_view workspace,
                            EvictionReport* reports, std::uint32_t* status) requires P::has_eviction {
    namespace cb = cuda_backend;
    this->require_memory(true);
    detail::require(batch.count >= 0 && batch.count <= this->shape_.slots, "batch.count", batch.count,
                    [&] { return detail::text("0 to the cache's slots, ", this->shape_.slots); });
    cb::check_workspace(workspace, this->template evict_workspace_bytes<Build>(on));
    if (batch.count == 0) {
        return;
    }
    const cb::device_scope device(on, this->device_);
    const std::int32_t group = this->shape_.query_heads / this->shape_.kv_heads;
    const std::size_t row = static_cast<std::size_t>(this->shape_.dim_k + this->shape_.dim_v) * sizeof(T);
    cb::evict_memory<T> memory{.rows = most_rows()};
    memory.staged = static_cast<std::int32_t>(std::clamp<std::size_t>(16384 / row, 4, 32));
    cb::lay_out_eviction(memory, workspace.data, this->shape_.kv_heads,
                         std::int64_t{this->policy_.eviction().observing} * group);
    const std::size_t shared =
        std::max(static_cast<std::size_t>(memory.staged) * row,
                 static_cast<std::size_t>(cb::evict_tile) * static_cast<std::size_t>(this->shape_.dim_k) *
                     sizeof(compute_t<T>));
    cb::launch_cooperative("dual_evict_kernel", cb::dual_evict_kernel<P, T>, 4, device, cb::admit_threads,
                           shared, on, this->template at<const ref_type>(refs_at_), this->shape_.layers,
                           batch, memory, reports, status);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::advance(const cuda& on, const Batch& batch, std::uint32_t* status) {
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
                                  .longest = longest_slot(),
                                  .batch = batch,
                                  .status = status});
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The moves of fork and reorder, in all layers. `refused`: a word of the cache's.
template <class P, class T>
void move_dual_slots(const cuda& on, const DualRef<P, T>* refs, const DualRef<P, T>& any, std::int32_t layers,
                     const slot_moves& moves, std::int64_t* refused, std::uint32_t* status) {
    if (moves.count == 0) {
        return;
    }
    const device_scope device(on, any.device);
    const std::size_t a_thread = static_cast<std::size_t>(moves.count) * sizeof(std::uint32_t);
    const int threads = a_thread * slot_threads <= 64 * 1024 ? slot_threads : 32;
    const std::size_t scratch = a_thread * static_cast<std::size_t>(threads);
    const std::int64_t heads = std::int64_t{layers} * any.kv_heads;
    constexpr std::int32_t pieces = 16;  // blocks that share the rows of a head
    launch("dual_drop_kernel", dual_drop_kernel<P, T>, 1, admit_threads, 0, on, refs, layers, moves, refused,
           status);
    launch("dual_inherit_kernel", dual_inherit_kernel<P, T>, heads, threads, 2 * moves_bytes + scratch, on,
           refs, moves, refused);
    if constexpr (P::has_eviction) {
        launch("dual_queries_kernel", dual_queries_kernel<P, T>, heads * pieces, threads,
               moves_bytes + scratch, on, refs, moves, pieces, refused);
    }
    launch("dual_share_kernel", dual_share_kernel<P, T>, 1, admit_threads, 0, on, refs, layers, moves,
           refused);
    launch("dual_copy_kernel", dual_copy_kernel<P, T>, heads * pieces, slot_threads, 0, on, refs, moves,
           pieces, refused);
    launch("dual_lengths_kernel", dual_lengths_kernel<position_t>, 1, threads, moves_bytes + scratch, on,
           any.length, any.slots, moves, refused);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::fork(const cuda& on, std::int32_t from, std::int32_t to, std::uint32_t* status) {
    this->template require_device_slot<Build>(from, "from");
    this->template require_device_slot<Build>(to, "to");
    if (from != to) {
        cuda_backend::move_dual_slots<P, T>(on, this->template at<const ref_type>(refs_at_), ref(0),
                                            this->shape_.layers, {nullptr, 1, from, to},
                                            this->template at<std::int64_t>(answer_at_), status);
    }
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::reorder(const cuda& on, const std::int32_t* sources, std::int32_t count,
                              std::uint32_t* status) {
    this->require_memory(true);
    const std::int32_t most = std::min(this->shape_.slots, cuda_backend::most_reordered);
    detail::require(count >= 0 && count <= most, "count", count,
                    [&] { return detail::text("0 to ", most, ", the cache's slots and at most 512"); });
    detail::require(sources != nullptr || count == 0, "sources", "null", "device memory of count slots");
    cuda_backend::move_dual_slots<P, T>(on, this->template at<const ref_type>(refs_at_), ref(0),
                                        this->shape_.layers, {sources, count, 0, 0},
                                        this->template at<std::int64_t>(answer_at_), status);
}

/// A cache of the same kind with one slot in host memory, and the numbers that say which rows it has.
template <AnyPolicy P, Storage T>
template <class Build>
struct DualCache<P, T>::slot_copy {
    std::vector<unsigned char> tables, slab;
    std::vector<std::int64_t> first;  // [layers * kv_heads + 1]: rows of the heads before
    DualCache cache;

    /// With room for `rows` rows in heads of any lengths.
    slot_copy(const DualCache& of, std::int64_t rows)
        : cache(of.one_slot_shape(), of.one_slot_pool(rows), of.policy_, of.scorers_, of.attention_) {
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
            const ref_type ref = cache.ref(layer);
            for (std::int32_t head = 0; head < ref.kv_heads; ++head) {
                first.push_back(first.back() + ref.used(0, head));
            }
        }
    }
};

template <AnyPolicy P, Storage T>
template <class Build>
auto DualCache<P, T>::counted_slot(const cuda& on, std::int32_t slot) const {
    namespace cb = cuda_backend;
    cb::check_between_tokens(on, this->shape_, this->template at<const std::int32_t>(this->taken_at_), slot);
    // Rows in use depend on lengths and counters alone.
    const std::int32_t heads = this->shape_.kv_heads;
    std::vector<std::int32_t> kept(static_cast<std::size_t>(this->shape_.layers) *
                                   static_cast<std::size_t>(heads));
    position_t length = 0;
    const auto fetch = [&](auto* to, const auto* from, std::int64_t count) {
        cb::check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof *to,
                                  cudaMemcpyDeviceToHost, on.stream),
                  "cudaMemcpyAsync");
    };
    fetch(&length, ref(0).length + slot, 1);
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type of = ref(layer);
        fetch(kept.data() + std::int64_t{layer} * heads, of.kept + std::int64_t{slot} * heads, heads);
    }
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    std::int64_t rows = 0;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        for (std::int32_t head = 0; head < heads; ++head) {
            const HeadRule& rule = this->rule_of(layer, head);
            rows += HeadRows{rule.sinks, rule.window}.used(
                length, kept[static_cast<std::size_t>(layer * heads + head)]);
        }
    }
    slot_copy<Build> copy(*this, rows);
    *copy.cache.ref(0).length = length;
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type of = copy.cache.ref(layer);
        std::copy_n(kept.data() + std::int64_t{layer} * heads, heads, of.kept);
        for (std::int32_t head = 0; head < heads; ++head) {
            of.take_pages(0, head, of.used(0, head));
        }
    }
    copy.count();
    return copy;
}

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rows of a slot in device memory of their own, which these calls alone allocate.
template <class T>
class staged_rows {
  public:
    staged_rows(const cuda& on, const std::vector<std::int64_t>& first, std::int32_t dim_k,
                std::int32_t dim_v)
        : on_(on), rows_(static_cast<std::size_t>(first.back())), dim_k_(dim_k), dim_v_(dim_v) {
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
        k.resize(rows_ * static_cast<std::size_t>(dim_k_));
        v.resize(rows_ * static_cast<std::size_t>(dim_v_));
        position.resize(rows_);
        score.resize(rows_);
        move(rows.k, k.data(), k.size());
        move(rows.v, v.data(), v.size());
        move(rows.position, position.data(), rows_);
        move(rows.score, score.data(), rows_);
    }
    template <class Element>
    void copy(Element* to, const Element* from, std::size_t count) const {
        check(cudaMemcpyAsync(to, from, count * sizeof(Element), cudaMemcpyDefault, on_.stream),
              "cudaMemcpyAsync");
    }

    slot_rows<T> rows;

  private:
    void take(workspace_parts& parts, std::size_t edges) {
        rows.first = parts.take<std::int64_t>(static_cast<std::int64_t>(edges));
        const auto count = static_cast<std::int64_t>(rows_);
        rows.k = parts.take<T>(count * dim_k_);
        rows.v = parts.take<T>(count * dim_v_);
        rows.position = parts.take<position_t>(count);
        rows.score = parts.take<float>(count);
    }
    const cuda& on_;
    std::size_t rows_;
    std::int32_t dim_k_, dim_v_;
    void* memory_ = nullptr;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t DualCache<P, T>::snapshot_bytes(const cuda& on, std::int32_t slot) const {
    this->template require_device_slot<Build>(slot, "slot");
    const cuda_backend::device_scope device(on, this->device_);
    return this->template counted_slot<Build>(on, slot).cache.snapshot_bytes(0);
}

template <AnyPolicy P, Storage T>
template <class Build>
std::size_t DualCache<P, T>::snapshot(const cuda& on, std::int32_t slot, void* buffer,
                                      std::size_t buffer_bytes) const {
    namespace cb = cuda_backend;
    this->template require_device_slot<Build>(slot, "slot");
    const cb::device_scope device(on, this->device_);
    const auto copy = this->template counted_slot<Build>(on, slot);
    const cb::staged_rows<T> staged(on, copy.first, this->shape_.dim_k, this->shape_.dim_v);
    constexpr std::int32_t pieces = 16;  // blocks that share the rows of a head
    const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.kv_heads;
    cb::launch("dual_slot_rows_kernel", cb::dual_slot_rows_kernel<P, T>, heads * pieces, cb::slot_threads, 0,
               on, this->template at<const ref_type>(refs_at_), slot, staged.rows, pieces, false);
    std::vector<T> k, v;
    std::vector<position_t> position;
    std::vector<float> score;
    staged.each(k, v, position, score, [&](auto* of_device, auto* of_host, std::size_t count) {
        staged.copy(of_host, of_device, count);
    });
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = ref(layer), b = copy.cache.ref(layer);
        staged.copy(b.state, a.state + std::int64_t{slot} * a.kv_heads * a.state_size,
                    static_cast<std::size_t>(a.kv_heads * a.state_size));
        if constexpr (P::has_eviction) {
            const std::int64_t queries = std::int64_t{a.kv_heads} * a.eviction.observing * a.group * a.dim_k;
            staged.copy(b.queries, a.queries + slot * queries, static_cast<std::size_t>(queries));
        }
    }
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    for_each_row(copy, [&](const auto& rows, std::int32_t r, std::int64_t at) {
        std::copy_n(k.data() + at * this->shape_.dim_k, this->shape_.dim_k, rows.k(r));
        std::copy_n(v.data() + at * this->shape_.dim_v, this->shape_.dim_v, rows.v(r));
        rows.position(r) = position[static_cast<std::size_t>(at)];
        rows.score(r) = score[static_cast<std::size_t>(at)];
    });
    return copy.cache.snapshot(host{1}, 0, buffer, buffer_bytes);
}

template <AnyPolicy P, Storage T>
template <class Build>
void DualCache<P, T>::restore(const cuda& on, std::int32_t slot, const void* blob, std::size_t blob_bytes,
                              std::uint32_t* status) {
    namespace cb = cuda_backend;
    this->template require_device_slot<Build>(slot, "slot");
    const cb::device_scope device(on, this->device_);
    const std::size_t row = static_cast<std::size_t>(this->shape_.dim_k + this->shape_.dim_v) * sizeof(T);
    slot_copy<Build> copy(*this, static_cast<std::int64_t>(blob_bytes / row));  // more rows do not fit in it
    copy.cache.restore(host{1}, 0, blob, blob_bytes);
    copy.count();
    const cb::staged_rows<T> staged(on, copy.first, this->shape_.dim_k, this->shape_.dim_v);
    auto* const answer = this->template at<std::int64_t>(answer_at_);
    const auto* const refs = this->template at<const ref_type>(refs_at_);
    cb::launch("dual_refill_kernel", cb::dual_refill_kernel<P, T>, 1, cb::admit_threads, 0, on, refs,
               this->shape_.layers, slot, staged.rows.first, answer);
    std::int64_t lacking = 0;
    staged.copy(&lacking, answer, 1);
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");
    if (lacking != 0) {
        if (status == nullptr) {
            detail::refuse("pages that the pool lacks", lacking, "0 (add_slab lends more)");
        }
        *status |= status_pool_exhausted;
        return;
    }
    std::vector<T> k, v;
    std::vector<position_t> position;
    std::vector<float> score;
    staged.each(k, v, position, score, [](auto*, auto*, std::size_t) {});
    for_each_row(copy, [&](const auto& rows, std::int32_t r, std::int64_t at) {
        std::copy_n(rows.k(r), this->shape_.dim_k, k.data() + at * this->shape_.dim_k);
        std::copy_n(rows.v(r), this->shape_.dim_v, v.data() + at * this->shape_.dim_v);
        position[static_cast<std::size_t>(at)] = rows.position(r);
        score[static_cast<std::size_t>(at)] = rows.score(r);
    });
    staged.each(k, v, position, score, [&](auto* of_device, const auto* of_host, std::size_t count) {
        staged.copy(of_device, of_host, count);
    });
    constexpr std::int32_t pieces = 16;  // blocks that share the rows of a head
    const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.kv_heads;
    cb::launch("dual_slot_rows_kernel", cb::dual_slot_rows_kernel<P, T>, heads * pieces, cb::slot_threads, 0,
               on, refs, slot, staged.rows, pieces, true);
    if constexpr (P::has_selection) {
        cb::launch("dual_slot_bounds_kernel", cb::dual_slot_bounds_kernel<P, T>, heads * pieces,
                   cb::slot_threads, 0, on, refs, slot, staged.rows.first, pieces);
    }
    for (std::int32_t layer = 0; layer < this->shape_.layers; ++layer) {
        const ref_type a = ref(layer), b = copy.cache.ref(layer);
        const std::int64_t at = std::int64_t{slot} * a.kv_heads;
        const auto count = static_cast<std::size_t>(a.kv_heads);
        staged.copy(a.state + at * a.state_size, b.state, count * static_cast<std::size_t>(a.state_size));
        staged.copy(a.kept + at, b.kept, count);
        staged.copy(a.victim + at, b.victim, count);
        cb::check(cudaMemsetAsync(a.taken + at, 0, count * sizeof(std::int32_t), on.stream),
                  "cudaMemsetAsync");
        staged.copy(a.proposed + slot, b.proposed, 1);
        if constexpr (P::has_keep) {
            staged.copy(a.pinned + at, b.pinned, count);
        }
        if constexpr (P::has_eviction) {
            const std::int64_t queries = std::int64_t{a.kv_heads} * a.eviction.observing * a.group * a.dim_k;
            staged.copy(a.queries + slot * queries, b.queries, static_cast<std::size_t>(queries));
        }
    }
    staged.copy(ref(0).length + slot, copy.cache.ref(0).length, 1);
    staged.copy(ref(0).reserved + slot, copy.cache.ref(0).reserved, 1);
    cb::check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize");  // host memory may go
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
    const cb::device_scope device(on, cache.device);
    const cb::dual_view<T> view(cache);
    cb::launch("count_dual_pages_kernel", cb::count_dual_pages_kernel<T>, 1, cb::admit_threads, 0, on, view,
               batch, pages);
    cb::launch("fill_dual_pages_kernel", cb::fill_dual_pages_kernel<T>,
               std::int64_t{batch.count} * cache.kv_heads, cb::admit_threads, 0, on, view, batch, pages);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
