// The workspace and the launches of a prompt into a cache whose policy ranks keys by the attention they
// receive. Blocks of the prompt follow one another; attention, its lists and pages are those of prefill_plan.
#pragma once

#include <kvpolicy/attention/cuda/dispatch_received_mass.cuh>
#include <kvpolicy/attention/cuda/received_mass/kernel_observed_list.cuh>
#include <kvpolicy/attention/cuda/received_mass/launch_received_mass.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_observed_prefill.cuh>
#include <kvpolicy/caches/cuda/prefill/prefill_plan.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A prompt of at most `tokens` tokens per entry.
template <class Cache, class Dims>
class observed_prefill_plan : prefill_plan<Cache, Dims> {
    using base = prefill_plan<Cache, Dims>;
    using P = typename Cache::policy_type;
    using T = typename Cache::value_type;
    using base::call_, base::ctx_, base::ref_, base::heads, base::missing_, base::paged;
    using typename base::View;

  public:
    observed_prefill_plan(const cuda& ctx, const Cache& cache, std::int32_t count, std::int32_t tokens)
        : base(ctx, cache, count, block_of(cache, tokens)), tokens_(tokens) {}

    /// Takes the parts of the workspace; with null only measures.
    std::size_t lay_out(void* memory) {
        const std::size_t before = base::lay_out(memory);
        workspace_parts parts(memory == nullptr ? nullptr : static_cast<unsigned char*>(memory) + before);
        const std::int64_t rows = heads() * call_.top_k.max_entries, most = heads() * call_.tokens.most;
        block_.seen = seen_;
        all_ = parts.template take<std::int32_t>(call_.batch.count);
        block_.past_mass = parts.template take<float>(rows);
        block_.chunk_mass = parts.template take<float>(most);
        block_.order = seen_.pool > 1 ? parts.template take<std::int32_t>(rows) : nullptr;
        block_.lost = parts.template take<unsigned char>(rows + most);
        block_.free_slot = parts.template take<std::int32_t>(rows);
        block_.moved = parts.template take<std::int32_t>(rows);
        block_.num_long_range = parts.template take<std::int32_t>(heads());
        const T* const any = nullptr;
        const std::int32_t count = call_.batch.count, heads_of_q = call_.cache.kv_heads * ref_.group;
        lse_ = parts.template take<float>(std::int64_t{count} * heads_of_q * tokens_);
        reduce_at_ = before + parts.bytes();
        reduce_.data = memory == nullptr ? nullptr : static_cast<unsigned char*>(memory) + reduce_at_;
        workspace_parts reduce(reduce_.data);
        const std::int32_t dim = call_.cache.head_dim_qk;
        static_cast<void>(
            qk_reduce_workspace::take(reduce, view_bhsd(any, count, heads_of_q, call_.tokens.most, dim),
                                      view_bhsd(any, count, call_.cache.kv_heads, call_.tokens.most, dim)));
        reduce_.bytes = reduce.bytes();
        return reduce_at_ + reduce_.bytes;
    }

    /// Tensors name all entries, packed ones too (by_entry).
    void run(const Batch& batch, const StepIO<T>& io, workspace_view workspace, std::uint32_t* status) {
        const std::int64_t max_rows = std::int64_t{batch.count} * tokens_;
        detail::require(io.cu_seqlens == nullptr || io.lse || io.q.length <= max_rows, "q.length",
                        io.q.length, [&] {
                            return detail::text("at most ", max_rows,
                                                ", the batch's entries times the most tokens of one, where "
                                                "entries are packed and io.lse is null");
                        });
        base::begin(batch, workspace, status, [this](void* memory) { return lay_out(memory); });
        const std::int32_t block = call_.tokens.most;
        prefill_params<View> whole = call_;
        whole.tokens.most = tokens_;
        whole.appended = all_;
        whole.tokens.packed = call_.tokens.packed = {io.cu_seqlens};
        whole.packed_total = io.q.length;
        launch("prefill_begin_kernel", prefill_begin_kernel<View>, call_.batch.count == 0 ? 0 : 1,
               prefill_threads, 0, ctx_, whole);
        whole.batch.q_len = all_;
        launch("observed_slots_after_kernel", observed_slots_after_kernel<View>,
               (heads() + prefill_threads - 1) / prefill_threads, prefill_threads, 0, ctx_, whole);
        if constexpr (paged) {
            launch("paged_prefill_pages_kernel", paged_prefill_pages_kernel<T>,
                   call_.batch.count == 0 ? 0 : 1, admit_threads, 0, ctx_, whole, missing_);
            launch("paged_prefill_refuse_kernel", paged_prefill_refuse_kernel<T>, call_.batch.count,
                   prefill_threads, 0, ctx_, whole, batch.q_len, io.out, io.lse);
        }
        call_.batch.q_len = call_.appended;
        for (std::int32_t done = 0; heads() != 0 && done < tokens_; done += block) {
            run_block(done, io);
        }
    }

  private:
    static std::int32_t block_of(const Cache& cache, std::int32_t tokens) {
        const std::int32_t chunk = cache.scorer.observation().chunk;
        return chunk == Observation::whole_call ? tokens : std::min(tokens, chunk);
    }

    /// A tensor or plane from token `from` on.
    template <class Rows>
    static Rows rows_from(Rows of, std::int32_t from, std::int32_t most) {
        std::int64_t stride = 1;
        if constexpr (requires { of.row_stride; }) {
            stride = of.row_stride;
        }
        of.data += from * stride;
        of.length = most;
        return of;
    }

    void run_block(std::int32_t done, const StepIO<T>& io) {
        const std::int32_t most = call_.tokens.most, count = call_.batch.count;
        const rows_view<const T> q = rows_from(io.q, done, most);
        call_.tokens.k = rows_from(io.k, done, most);
        call_.tokens.v = rows_from(io.v, done, most);
        const plane_view<float> lse = lse_of(done, io);
        call_.packed_total = io.q.length - done;
        block_.call = call_;
        block_.evicts_at_steps = P::scorer_type::evicts_at_steps;
        block_.done = done;
        launch("observed_tokens_kernel", observed_tokens_kernel<std::int32_t>, 1, prefill_threads, 0, ctx_,
               all_, call_.appended, count, done, most);
        launch("observed_past_kernel", observed_past_kernel<View>, heads(), choice_threads, 0, ctx_, block_);
        base::attend(q, rows_from(io.out, done, most), lse);
        observe(q, lse);
        if (block_.order != nullptr) {
            launch("observed_order_kernel", observed_order_kernel<View>, heads() * call_.pieces,
                   prefill_threads, 0, ctx_, block_);
        }
        launch("observed_end_block_kernel", observed_end_block_kernel<View>, heads(), choice_threads, 0, ctx_,
               block_);
        launch("observed_slots_kernel", observed_slots_kernel<View>, heads() * call_.pieces, prefill_threads,
               0, ctx_, block_);
        launch("observed_recent_kernel", observed_recent_kernel<View>, heads() * call_.pieces,
               prefill_threads, 0, ctx_, block_);
    }

    /// The lse of the block's queries: in the caller's plane, where that is given.
    [[nodiscard]] plane_view<float> lse_of(std::int32_t done, const StepIO<T>& io) const {
        const std::int32_t count = call_.batch.count, most = call_.tokens.most;
        plane_view<float> lse = view_bhs(lse_, count, call_.cache.kv_heads * ref_.group, most);
        if (io.lse) {
            lse = rows_from(io.lse, done, most);
        } else if (io.cu_seqlens != nullptr) {
            lse = rows_from(view_bhs(lse_, 1, lse.heads, io.q.length), done, most);
            lse.batch = count;
            lse.batch_stride = 0;
        }
        return lse;
    }

    /// The masses of entries and of the block's tokens.
    void observe(const rows_view<const T>& q, const plane_view<float>& lse) {
        const std::int32_t count = call_.batch.count, kv_heads = call_.cache.kv_heads;
        const Sequences block{.batch = count, .length = call_.tokens.most, .lengths = call_.appended};
        const packed_entries packed{call_.tokens.packed, call_.packed_total};
        rows_view<const T> k = call_.tokens.k;
        k.batch = count;
        rows_view<const T> queries = q;
        queries.batch = count;
        const bool halves = takes_tiles<Dims>(qk_reduce_path::hopper, queries, k);
        auto chunk =
            received_mass_params_of<T>(ref_.attention, queries, k, block, lse,
                                       view_bhs(block_.chunk_mass, count, kv_heads, call_.tokens.most));
        chunk.all_params = call_.cache.all_params;
        chunk.counted = seen_.queries == 0 ? -1 : seen_.queries;
        chunk.packed = packed.rows;
        chunk.rows.k.length = packed.rows.edges != nullptr ? packed.total : k.length;
        if (seen_.queries == unlimited &&
            (seen_.aggregate == group_aggregate::mean || call_.cache.group == 1)) {
            dense_mass_by<T, Dims>(ctx_, qk_reduce_path::hopper, ref_.attention, queries, k, block, lse, true,
                                   chunk.mass, reduce_, packed);
        } else {
            launch_received_mass<Dims>(ctx_, chunk, halves, seen_.aggregate);
        }
        received_mass_params<T> past = chunk;
        past.rows = base::past_keys();
        past.own = false;
        past.before = call_.past_rows;
        past.max_keys = call_.top_k.max_entries;
        past.mass = view_bhs(block_.past_mass, count, kv_heads, call_.top_k.max_entries);
        launch_received_mass<Dims>(ctx_, past, halves, seen_.aggregate);
        if (seen_.whole_layer && kv_heads > 1) {
            average(block_.past_mass, call_.top_k.max_entries, call_.past_rows, nullptr);
            average(block_.chunk_mass, call_.tokens.most, nullptr, call_.appended);
        }
    }
    void average(float* mass, std::int32_t keys, const std::int32_t* counts,
                 const std::int32_t* tokens) const {
        const std::int32_t tiles = (keys + choice_threads - 1) / choice_threads;
        launch("layer_mass_kernel", layer_mass_kernel<float>, std::int64_t{call_.batch.count} * tiles,
               choice_threads, 0, ctx_, mass, std::int64_t{keys}, call_.cache.kv_heads, tiles, counts,
               tokens);
    }

    std::int32_t tokens_;
    Observation seen_ = ref_.scorer.observation();
    observed_prefill_params<View> block_{.call = call_};
    std::int32_t* all_ = nullptr;  // [count]: tokens of the call
    float* lse_ = nullptr;         // [count, Hq, block], or packed [Hq, total]
    workspace_view reduce_{};      // of dense_mass_by
    std::size_t reduce_at_ = 0;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
