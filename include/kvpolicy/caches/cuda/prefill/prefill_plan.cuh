// The workspace and the launches of a chunk into a cache: prefill, append_draft, accept, append_chunk,
// chunk_expiry.
#pragma once

#include <kvpolicy/attention/cuda/dispatch_attend.cuh>
#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/decode/decode_plan.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_decode.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_prefill.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_chunk_expiry.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_decayed_update.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_lifetimes.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_top_k_update.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_write_entries.cuh>
#include <kvpolicy/caches/cuda/scoring/dispatch_chunk_scores.cuh>
#include <kvpolicy/caches/cuda/scoring/kernel_cache_score.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The most rows of a head whose slots may change their key.
template <class P, class T>
std::int64_t max_top_k_slots_of(const FixedBudgetRef<P, T>& cache) {
    return cache.max_capacity;
}
template <class P, class T>
std::int64_t max_top_k_slots_of(const DualRef<P, T>& cache) {
    return cache.max_budgeted_rows;
}

/// Bytes of attention's lists of a DualCache's rows that a chunk makes at once, unless a single entry can
/// have more.
#if defined(KVPOLICY_TEST_LISTS_BYTES)
inline constexpr std::int64_t lists_bytes = KVPOLICY_TEST_LISTS_BYTES;  // so that tests have rounds
#else
inline constexpr std::int64_t lists_bytes = std::int64_t{1} << 30;
#endif

/// Chunks of so few tokens take a small block per head.
inline constexpr std::int32_t few_tokens = 64;

/// Of up to `keys` keys of a head, those that a block ranks at once, by the shared memory that it can have.
/// Results do not depend on it.
inline std::int32_t select_sorted_keys(const device_scope& device, std::int64_t keys) {
    constexpr std::size_t bytes = sizeof(agent_top_k_update<1024, 16>::shared);
    return keys > 4096 && bytes <= device.shared_limit() ? 16384 : 4096;
}

/// A chunk of at most `tokens` tokens per entry. Dims: head_dims<...> of attention; void: a plan of calls
/// without attention, for which none is compiled.
template <class Cache, class Dims>
class prefill_plan {
    using P = typename Cache::policy_type;
    using T = typename Cache::value_type;
    using Scorer = asked_scorer<P>;
    static constexpr bool scored = scored_before<Scorer> || scores_by_warp<Scorer>, late = scored_late<P>;
    // Whether keys may live on after their window by the top-k updates of this plan.
    static constexpr bool retains = (P::ranked && !P::observed) || P::has_keep;

  protected:  // observed_prefill_plan adds to a plan
    using View = decltype(view_of(std::declval<const Cache&>()));
    static constexpr bool paged = Cache::pooled, has_attention = !std::is_void_v<Dims>;

  public:
    prefill_plan(const cuda& ctx, const Cache& cache, std::int32_t count, std::int32_t tokens)
        : ctx_(ctx),
          device_(ctx, cache.device),
          ref_(cache),
          call_{.cache = view_of(cache)},
          gate_(gate_in<P>(cache)),
          scorer_(scorer_of<P>(cache.scorer)) {
        require_device_policy<P>();
        call_.batch.count = count;
        call_.tokens.most = tokens;
        call_.on_leaving = late || Scorer::when == score_time::on_leaving;
        if constexpr (P::has_selection && !paged) {
            call_.bounds = cache.bounds;
            call_.bound_rows = cache.selection.page_size();
        }
        top_k_update_params& top_k = call_.top_k;
        top_k.most = tokens;
        top_k.rebase_limit = cache.rebase_limit;
        top_k.max_entries = static_cast<std::int32_t>(max_rows_of(cache));
        top_k.top_k_slots = static_cast<std::int32_t>(
            std::max<std::int64_t>(max_top_k_slots_of(cache), std::min(tokens, top_k.max_entries)));
        const std::int64_t keys = max_top_k_slots_of(cache) + tokens;
        // Half of a small block's keys: gather() takes so many tokens in a turn that may all be candidates.
        sorted_keys_ = tokens <= few_tokens ? 2 * few_tokens : select_sorted_keys(device_, keys);
        top_k.max_members = static_cast<std::int32_t>(std::min<std::int64_t>(
            keys, P::ranks_by_query ? std::max(sorted_keys_, decayed_round_keys) : sorted_keys_));
        call_.pieces = pieces_of(std::max(tokens, top_k.max_entries));
        detail::require(heads() * std::max<std::int64_t>(tokens, 1) <= 0x7fffffff, "entries x heads x tokens",
                        heads() * tokens, "below 2^31: split the batch");
        together_ = count;
        if constexpr (paged && has_attention) {
            // Attention lists the rows that queries see, 8 bytes each, for so many tiles of queries.
            const std::int64_t lists = std::clamp<std::int64_t>(max_plan_lists(tokens), 1, plan_full_lists);
            of_entry_ =
                std::max<std::int64_t>(std::int64_t{call_.cache.kv_heads} * top_k.max_entries * 8 * lists, 1);
            together_ = static_cast<std::int32_t>(
                std::clamp<std::int64_t>(lists_bytes / of_entry_, 1, std::max(count, 1)));
        }
    }

    /// Takes the parts of the workspace; with null only measures.
    std::size_t lay_out(void* memory) {
        workspace_parts parts(memory);
        const std::int64_t rows = heads() * call_.top_k.max_entries, tokens = heads() * call_.tokens.most;
        top_k_update_params& top_k = call_.top_k;
        call_.appended = parts.take<std::int32_t>(call_.batch.count);
        call_.first_row = parts.take<std::int64_t>(heads());
        call_.past_rows = parts.take<std::int32_t>(heads());
        top_k.past_expiry = parts.take<expiry_t>(rows);
        top_k.chunk_expiry = parts.take<expiry_t>(tokens);
        top_k.num_long_range = parts.take<std::int32_t>(heads());
        if constexpr (P::has_keep) {
            top_k.num_protected = parts.take<std::int32_t>(heads());
        }
        if constexpr (retains) {
            const std::int64_t num_slots = heads() * top_k.top_k_slots;
            top_k.heads = call_.heads = parts.take<top_k_head>(heads());
            top_k.leaving_score = parts.take<float>(tokens);
            top_k.leaving_kind = parts.take<unsigned char>(tokens);
            top_k.slot_score = parts.take<float>(num_slots);
            top_k.slot_position = parts.take<position_t>(num_slots);
            top_k.holder = parts.take<std::int32_t>(num_slots);
            if constexpr (P::has_keep) {
                top_k.slot_protected = parts.take<unsigned char>(num_slots);
            }
            top_k.members = parts.take<std::int32_t>(heads() * 3 * top_k.max_members);
        }
        if constexpr (P::has_selection) {
            call_.num_long_range_before = parts.take<std::int32_t>(heads());
        }
        arriving_.lay_out(ctx_, ref_.scorer, call_.batch.count, call_.cache.kv_heads, call_.tokens.most,
                          parts);
        computed_ = parts.take<float>(scored || late ? tokens : 0);
        if constexpr (late) {
            of_tokens_ = parts.take<float>(tokens);
            late_.emplace(device_, ref_.scorer, call_.cache, gate_, call_.batch.count, call_.tokens.most,
                          call_.top_k.max_entries, parts);
        }
        state_ = parts.take<float>(heads() * call_.cache.state_size);
        if constexpr (paged) {
            missing_ = parts.take<std::int32_t>(heads());
        }
        attention_bytes_ = 0;
        if constexpr (has_attention) {
            each_round([this](std::int32_t first, std::int32_t count) {
                attention_bytes_ = std::max(
                    attention_bytes_,
                    attention(nullptr, first, count, [](auto& attend) { return attend.lay_out(nullptr); }));
            });
        }
        if constexpr (scored) {
            chunk_score_bytes_ = chunk_score_bytes(ctx_, scores_of_tokens(nullptr));
        }
        scratch_ = parts.take<unsigned char>(
            static_cast<std::int64_t>(std::max(attention_bytes_, chunk_score_bytes_)));
        return parts.bytes();
    }

    /// prefill; with `draft` append_draft, without attention where io.out is null.
    void attend_chunk(bool draft, const Batch& batch, const StepIO<T>& io, workspace_view workspace,
                      std::uint32_t* status) {
        begin(batch, workspace, status);
        bring(io, io.out.data != nullptr ? io.q.length : io.k.length);
        decide(!draft);
        if constexpr (paged) {
            if (!draft) {
                launch("paged_prefill_refuse_kernel", paged_prefill_refuse_kernel<T>, batch.count,
                       prefill_threads, 0, ctx_, call_, batch.q_len, io.out, io.lse);
            }
        }
        if (io.out.data != nullptr) {
            attend(io.q, io.out, io.lse);
        }
        if (draft) {
            launch("prefill_draft_kernel", prefill_draft_kernel<View>, heads() * call_.pieces,
                   prefill_threads, 0, ctx_, call_);
        } else {
            write();
        }
        remember(io.q, draft);
    }

    void append_chunk(const Batch& batch, const StepIO<T>& io, workspace_view workspace,
                      std::uint32_t* status) {
        begin(batch, workspace, status);
        bring(io, io.k.length);
        decide(true);
        write();
        remember(io.q, false);
    }

    /// The chunk is io's, or of draft tokens where io.k is null.
    void chunk_expiry(const Batch& batch, const StepIO<T>& io, const ChunkExpiry& expiry,
                      workspace_view workspace, std::uint32_t* status) {
        begin(batch, workspace, status);
        if (io.k.data != nullptr) {
            bring(io, io.k.length);
        } else {
            call_.tokens.spare = true;
            count_tokens();
        }
        decide(false, true);
        launch("chunk_expiry_kernel", chunk_expiry_kernel<View>, heads() * call_.pieces, prefill_threads, 0,
               ctx_, call_, expiry);
    }

    void accept(const Batch& batch, workspace_view workspace, std::uint32_t* status) {
        begin(batch, workspace, status);
        call_.tokens.spare = true;
        count_tokens();
        decide(true);
        write();
        remember({}, false);
    }

  protected:
    [[nodiscard]] std::int64_t heads() const {
        return std::int64_t{call_.batch.count} * call_.cache.kv_heads;
    }
    /// Blocks that share a head of `rows` rows: enough to fill a GPU, with some rows for each.
    [[nodiscard]] std::int32_t pieces_of(std::int32_t rows) const {
        constexpr std::int64_t blocks = 1024, rows_of_block = 64, most = 128;
        const std::int64_t pieces = blocks / std::max<std::int64_t>(heads(), 1);
        return static_cast<std::int32_t>(
            std::clamp<std::int64_t>(pieces, 1, std::min<std::int64_t>(rows / rows_of_block + 1, most)));
    }

    void begin(const Batch& batch, workspace_view workspace, std::uint32_t* status) {
        begin(batch, workspace, status, [this](void* memory) { return lay_out(memory); });
    }
    /// Takes the workspace by `take`, which is lay_out() of this plan or of one that adds to it.
    template <class Take>
    void begin(const Batch& batch, workspace_view workspace, std::uint32_t* status, const Take& take) {
        if constexpr (paged) {  // as many at once as fit: more than was asked for makes for fewer rounds
            together_ = std::max(call_.batch.count, 1);
            while (together_ > 1 && take(nullptr) > workspace.bytes) {
                together_ = (together_ + 1) / 2;
            }
        }
        check_workspace(workspace, take(nullptr));
        take(workspace.data);
        call_.batch = batch;
        call_.status = status;
    }
    /// The tokens are a call's tensors, of `rows` rows where entries are packed.
    void bring(const StepIO<T>& io, std::int32_t rows) {
        call_.tokens.k = io.k;
        call_.tokens.v = io.v;
        call_.tokens.k.length = call_.tokens.v.length = call_.tokens.most;
        call_.tokens.packed = {io.cu_seqlens};
        call_.packed_total = rows;
        if constexpr (scores_given<P>) {
            call_.packed_scores = call_.tokens.packed;
        }
        count_tokens();
        call_.scores = arriving_.of(ctx_, ref_.scorer, call_.batch, detail::extras_of(io));
    }
    /// The tokens that count are those of the batch, from here on.
    void count_tokens() {
        launch("prefill_begin_kernel", prefill_begin_kernel<View>, call_.batch.count == 0 ? 0 : 1,
               prefill_threads, 0, ctx_, call_);
        call_.batch.q_len = call_.appended;
    }

    /// Whether the chunk `writes` to the cache later, or only looks ahead: with `as_chunk` to what
    /// append_chunk or accept will do, else to what append_draft shows.
    void decide(bool writes, bool as_chunk = false) {
        // A scorer's states advance in the cache, where nothing can go wrong any more.
        [[maybe_unused]] float* const state = writes && !paged ? nullptr : state_;
        if constexpr (Scorer::when == score_time::on_leaving) {
            call_.advanced = writes ? state : nullptr;
        }
        if constexpr (scored) {
            call_.computed = computed_;
            if (chunk_score_bytes_ != 0 && (writes || as_chunk) && !call_.tokens.spare) {
                launch_chunk_scores(ctx_, scores_of_tokens(state), {scratch_, chunk_score_bytes_});
            } else {
                launch_scores(ctx_, scores_of_tokens(state));
            }
        }
        if constexpr (late) {
            call_.computed = computed_;
            call_.late = writes ? of_tokens_ : nullptr;
            late_->begin(ctx_, device_, call_.batch, call_.tokens, call_.status);
            late_->decide(ctx_, device_, computed_, writes ? of_tokens_ : nullptr);
        }
        launch("prefill_lifetimes_kernel", prefill_lifetimes_kernel<View, gate_of<P>>, heads() * call_.pieces,
               prefill_threads, 0, ctx_, call_, gate_);
        if constexpr (retains) {
            update_top_k();
        }
        if constexpr (paged) {
            if (writes) {
                launch("paged_prefill_pages_kernel", paged_prefill_pages_kernel<T>,
                       call_.batch.count == 0 ? 0 : 1, admit_threads, 0, ctx_, call_, missing_);
            }
        }
    }

    /// Scores before the chunk is decided, and the states after it, in `state`.
    [[nodiscard]] score_params<View, Scorer> scores_of_tokens(float* state) const {
        return {.cache = call_.cache,
                .batch = call_.batch,
                .tokens = call_.tokens,
                .scores = computed_,
                .state = state,
                .scorer = scorer_};
    }

    /// The top-k updates: heads with static priorities, then those whose keys rank by the query.
    void update_top_k() {
        if (sorted_keys_ == 2 * few_tokens) {
            launch_top_k_update<2 * few_tokens, 1>(ctx_, heads(), call_.top_k);
        } else if (sorted_keys_ == 4096) {
            launch_top_k_update<1024, 4>(ctx_, heads(), call_.top_k);
        } else {
            launch_top_k_update<1024, 16>(ctx_, heads(), call_.top_k);
        }
        if constexpr (P::ranks_by_query) {
            launch("decayed_update_kernel", decayed_update_kernel<top_k_update_params>, heads(),
                   decayed_round_threads, sizeof(decayed_update_memory), ctx_, call_.top_k);
        }
    }

    void write() {
        if constexpr (late) {
            late_->in_rows(ctx_, device_, call_.batch);
        }
        if constexpr (retains) {
            launch("prefill_top_k_kernel", prefill_top_k_kernel<View>, heads() * call_.pieces,
                   prefill_threads, 0, ctx_, call_);
        }
        launch("prefill_recent_kernel", prefill_recent_kernel<View>, heads() * call_.pieces, prefill_threads,
               0, ctx_, call_);
        if constexpr (P::has_selection) {
            launch("prefill_bounds_kernel", prefill_bounds_kernel<View>, heads() * call_.pieces,
                   prefill_threads, 0, ctx_, call_);
        }
    }
    /// Keeps the tokens' queries for an eviction part: those of a call, or without any the draft tokens.
    void remember([[maybe_unused]] const rows_view<const T>& q, [[maybe_unused]] bool num_draft) {
        if constexpr (P::has_eviction) {
            launch("prefill_queries_kernel", prefill_queries_kernel<View>, heads() * call_.pieces,
                   prefill_threads, 0, ctx_, call_, q, num_draft);
        }
    }

    /// Calls body(first, count) for entries that are attended to at once, in rounds; or once for every size
    /// of a round.
    template <class Body>
    void each_round(const Body& body, bool all = false) const {
        const std::int32_t count = call_.batch.count;
        std::int32_t first = 0;
        do {
            if (all || first == 0 || count - first < together_) {
                body(first, std::min(together_, count - first));
            }
            first += together_;
        } while (first < count);
    }

    /// Calls body(attend_plan) for attention of entries of the chunk over the cache's rows and themselves;
    /// with null queries for its sizes only.
    template <class Body>
    auto attention(const rows_view<const T>* queries, std::int32_t first, std::int32_t count,
                   const Body& body) {
        const std::int32_t kv_heads = call_.cache.kv_heads, most = call_.tokens.most;
        const std::int64_t head = std::int64_t{first} * kv_heads;
        // Sizes alone never look at the tensors: rows of the cache stand for them.
        const T *k = nullptr, *v = nullptr, *any = nullptr;
        if constexpr (paged) {
            any = reinterpret_cast<const T*>(call_.cache.table);
            k = v = queries != nullptr ? queries->data : any;  // the pages say where rows are
        } else {
            k = any = call_.cache.k;
            v = call_.cache.v;
        }
        rows_view<const T> q =
            queries != nullptr ? entries(*queries, first, count)
                               : view_bhsd(any, count, kv_heads * ref_.group, most, call_.cache.head_dim_qk);
        q.length = most;
        kv_view<T> past, self;
        past.k = {k,
                  count,
                  kv_heads,
                  call_.top_k.max_entries,
                  call_.cache.head_dim_qk,
                  0,
                  0,
                  call_.cache.head_dim_qk};
        past.v = {v,
                  count,
                  kv_heads,
                  call_.top_k.max_entries,
                  call_.cache.head_dim_vo,
                  0,
                  0,
                  call_.cache.head_dim_vo};
        past.first = -call_.top_k.max_entries;  // all rows before the chunk: which position, nobody asks
        past.mask.expiry =
            view_bhs<const expiry_t>(call_.top_k.past_expiry, count, kv_heads, call_.top_k.max_entries);
        self.k = queries != nullptr ? entries(call_.tokens.k, first, count)
                                    : view_bhsd(any, count, kv_heads, most, call_.cache.head_dim_qk);
        self.v = queries != nullptr ? entries(call_.tokens.v, first, count)
                                    : view_bhsd(any, count, kv_heads, most, call_.cache.head_dim_vo);
        self.mask.expiry = view_bhs<const expiry_t>(call_.top_k.chunk_expiry, count, kv_heads, most);
        Sequences sequences;
        sequences.batch = count;
        sequences.length = most;
        sequences.lengths = call_.appended;
        if (queries != nullptr) {
            past.mask.expiry.data += head * call_.top_k.max_entries;
            self.mask.expiry.data += head * most;
            sequences.lengths += first;
        }
        if (queries == nullptr) {  // planes that are not there would be another call
            const auto* const there = reinterpret_cast<const std::int32_t*>(any);
            past.mask.expiry.data = self.mask.expiry.data = there;
        }
        attend_plan<T, Dims> call(ctx_, ref_.attention, q, past, &self, sequences, AttendOptions{});
        const std::int64_t* const first_row = call_.first_row + (queries != nullptr ? head : 0);
        if constexpr (paged) {
            call.past_pages(pages_of(call_.cache, first_row));
        } else {
            call.past_begins(first_row);
        }
        call.past_counts(call_.past_rows + (queries != nullptr ? head : 0));
        if (call_.tokens.packed.edges != nullptr) {
            call.entries_packed({{call_.tokens.packed.edges + first}, call_.packed_total});
        }
        return body(call);
    }
    /// A paged cache's entries as attention finds them.
    static key_pages<T> pages_of(const paged_view<T>& cache, const std::int64_t* first_page) {
        static_assert(sizeof(Slab<T>) % sizeof(T*) == 0);
        key_pages<T> pages;
        pages.table = cache.table;
        pages.first_page = first_page;
        pages.k = &cache.pool.slabs->k;
        pages.v = &cache.pool.slabs->v;
        pages.slab_step = sizeof(Slab<T>) / sizeof(T*);
        pages.slab_pages = cache.pool.slab_pages;
        pages.page_size = cache.pool.page_size;
        pages.k_page = cache.pool.strides.k_page;
        pages.k_row = cache.pool.strides.k_row;
        pages.v_page = cache.pool.strides.v_page;
        pages.v_row = cache.pool.strides.v_row;
        return pages;
    }
    /// The entries of the heads by number, where they lie.
    [[nodiscard]] key_rows<T> past_keys() const {
        const prefill_params<View>& call = call_;
        key_rows<T> rows;
        const std::int32_t dim = call.cache.head_dim_qk;
        rows.k = {nullptr, call.batch.count, call.cache.kv_heads, call.top_k.max_entries, dim, 0, 0, dim};
        if constexpr (paged) {
            rows.pages = pages_of(call.cache, call.first_row);
        } else {
            rows.k.data = call.cache.k;
            rows.first_row = call.first_row;
        }
        return rows;
    }
    /// Some of a tensor's entries.
    template <class View_>
    static View_ entries(View_ of, std::int32_t first, std::int32_t count) {
        of.data += of.data != nullptr ? first * of.batch_stride : 0;
        of.batch = count;
        return of;
    }
    void attend(const rows_view<const T>& q, const rows_view<T>& out, const plane_view<float>& lse) {
        if (heads() * call_.tokens.most == 0) {
            return;
        }
        // Tensors may be longer than the chunk; attention takes those of one length.
        rows_view<T> to = out;
        plane_view<float> sums = lse;
        to.length = sums.length = call_.tokens.most;
        const auto round = [&](std::int32_t first, std::int32_t count) {
            attention(&q, first, count, [&](auto& call) {
                call.run(entries(to, first, count), entries(sums, first, count),
                         {scratch_, attention_bytes_});
            });
        };
        each_round(round, true);
    }

    const cuda& ctx_;
    device_scope device_;
    const Cache& ref_;
    prefill_params<View> call_;
    gate_of<P> gate_;
    Scorer scorer_;
    std::optional<late_scores<View, gate_of<P>>> late_;
    std::int32_t sorted_keys_ = 0;  // that a block ranks at once
    arriving_scores<P> arriving_;
    float* computed_ = nullptr;
    float* of_tokens_ = nullptr;
    float* state_ = nullptr;
    std::int32_t together_ = 1;         // entries that are attended to at once
    std::int64_t of_entry_ = 0;         // of a DualCache: bytes of the lists of an entry's rows
    std::int32_t* missing_ = nullptr;   // of a DualCache: scratch
    unsigned char* scratch_ = nullptr;  // of scores, then of attention
    std::size_t attention_bytes_ = 0;
    std::size_t chunk_score_bytes_ = 0;  // of a scorer's kernels for chunks; 0: it scores as in steps
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
