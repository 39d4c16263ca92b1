// The calls that every kind of cache takes: step, prefill, attend, append_draft and accept, the export of
// its pages, and the same without attention, for an engine that has its own: append, append_chunk,
// chunk_expiry and observe.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/step_io.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/head_dims.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/compose.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

// Every call: kvpolicy::step(ctx, cache.layer(layer), io, workspace, options), with ctx a kvpolicy::host or
// a kvpolicy::cuda. `Dims` (head_dims<...>: the tiles that CUDA code is compiled for) comes first, as the
// only template argument that a caller names: kvpolicy::step<kvpolicy::head_dims<128>>(ctx, ...). The host
// accepts and ignores it.

/// A FixedBudgetCache or a DualCache: layers of one shape, each with a ref.
template <class C>
concept CacheObject = requires(const C& cache) {
    cache.shape().layers;
    { cache.layer(0) } -> CacheRef;
};

/// Bytes of workspace for step, prefill, attend, append_draft and accept of one layer with at most size.batch
/// entries of at most size.tokens tokens; cache.workspace_bytes(ctx, size) gives the bytes that the layer
/// needs that needs most. Refuses sizes below 0.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t workspace_bytes(const host& ctx, const Ref<P, T>& cache,
                                                         const CallSize& size);

/// The same for step and attend alone, of at most `batch` entries.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t step_workspace_bytes(const host& ctx, const Ref<P, T>& cache,
                                                              std::int32_t batch);

/// One decode step of one layer, for the batch's sequences (0 or 1 token each). io.q [count, Hq, 1, Dk],
/// io.k and io.v [count, Hkv, 1, D], io.out [count, Hq, 1, Dv]: overwritten for entries with a token,
/// untouched for others. For each KV head, at position q = the sequence's length (docs/concepts.md, the
/// order of a step):
///   1. (k_q, v_q) is appended;
///   2. a stateful scorer absorbs [k_q; v_q];
///   3. the key u = q - w, if u >= s, leaves the window and competes for the top-k slots;
///   4. the query heads attend to sinks, window (q - w + 1 .. q) and top-k keys.
/// A key that is evicted at 3 is invisible to q. Synchronous, no allocation. Refuses before anything is
/// written: shapes that disagree, more than one token, sequences out of range or named twice, a NaN score
/// that is read (given or computed; see below), under an mLSTM or a convolution a key or value that is NaN or
/// infinite (options.bad_tokens), too little workspace, a second call of the same layer before
/// advance(), which would keep the token twice.
///
/// With options.status, or bad_token::drop, a NaN score is not refused: it ranks last, after -inf and after
/// older NaN, closes its gate, and sets status_nan_score of its entry in the call in which it becomes known.
/// A given score that is NaN sets it for a key that is kept for its position too, but not for a sink.
///
/// A policy that ranks keys by the attention they receive (H2O, TOVA, SnapKV; scorers/observed.hpp) decides
/// in 3 by the masses up to q - 1, and adds the query's own after 4. Its q and k must be finite: a number
/// that is not is refused.
///
/// A cache with a pool of pages (DualCache) may run out of them. The step is then a no-op for that sequence
/// in this layer: its out is 0, its lse -inf, and options.status[i] of its entry gets status_pool_exhausted.
/// Add a slab and call this layer again for that entry. options.status [count] is OR-ed into; where it is
/// null, exhaustion is refused instead, before anything is written.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void step(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
          const StepOptions& options = {});

/// A chunk of n tokens per sequence, at positions length .. length + n - 1: the result of n steps, in one
/// pass. io.q [count, Hq, n, Dk], io.k and io.v [count, Hkv, n, D], io.out [count, Hq, n, Dv]. Retained sets,
/// rows and scores are identical to stepping (given the same scores; the mLSTM runs recurrently, so its
/// scores are the same bits too); outputs agree to rounding. io.cu_seqlens packs entries of different lengths
/// into one row. The chunk attends to the entries of the cache and to itself. Errors and exhaustion as for
/// step, for the chunk as a whole: it fits, or the call leaves the sequence unchanged.
///
/// A policy that ranks keys by the attention they receive takes the chunk as blocks of a prompt
/// (ObservedPrefill): eviction runs between blocks, so blocks of more than one token keep other keys than
/// steps do. A policy whose steps do not evict (SnapKV) prunes at the end of every call, of one token too:
/// decode with step(), which keeps decoded tokens.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void prefill(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
             const StepOptions& options = {});

/// A step without attention, for an engine whose own kernel reads the pages of export_heads: 1 to 3 of
/// step(). io.k, io.v and what the scorer reads are those of step; io.out and io.lse are not looked at, and
/// io.q only where the policy keeps queries (an eviction part). Without io.batch, entries are those
/// of io.k. The cache is then as step() leaves it, so the entries that it holds are what the token's query
/// sees; with a selection, the pages that it chooses from. Errors, status words, exhaustion and the order of
/// layers as for step. Workspace: append_workspace_bytes.
///
/// A policy that ranks keys by the attention they receive evicts by the masses that it has; give it those of
/// the token's query with observe(). Its k must be finite.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
            const StepOptions& options = {});

/// Until which query keys are seen, for attention of the caller's to a chunk of n tokens: query j (0 <= j <
/// n) sees the cached entry r <=> j < cached[r], and the chunk's token t <=> t <= j < tokens[t]. Entries of a
/// head are in the order of export_heads: entry r is row r mod page_size of its page r / page_size.
struct ChunkExpiry {
    plane_view<expiry_t> cached{};  ///< [count, Hkv, rows]: of the rows in use; others are untouched
    plane_view<expiry_t> tokens{};  ///< [count, Hkv, n]; of a packed batch [1, Hkv, total]
};

/// What the queries of a chunk see. The entries that a chunk leaves are not those (with a window of 2, query
/// 2 sees key 1, which tokens 2 and 3 evict), so an engine attends before the chunk is written: to the
/// exported pages and to the chunk's own keys and values, through `expiry`. The chunk is io's tokens, as
/// append_chunk() will take them; or where io.k is null the draft tokens that wait in spare rows, as accept()
/// will take them, io.batch's of each entry. The cache is not changed. Decisions are made here and again when
/// the chunk is written. Overwrites `expiry` for entries with tokens; leaves others untouched. Refuses planes
/// below the rows in use; errors else, NaN scores included, as for append_draft. Not for policies that rank
/// keys by the attention they receive: they do not compile here.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void chunk_expiry(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, const ChunkExpiry& expiry,
                  workspace_view workspace, const StepOptions& options = {});

/// prefill() without attention: the cache takes the chunk, and is as prefill() leaves it. Tensors as for
/// append, with n tokens per entry; io.cu_seqlens packs entries. Call chunk_expiry() and attend before.
/// Errors and exhaustion as for prefill. Not for policies that rank keys by the attention they receive: they
/// do not compile here; give them tokens one after another, with append() and observe().
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_chunk(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
                  const StepOptions& options = {});

/// Bytes of workspace for append, and where size.tokens is above 1 for append_chunk and chunk_expiry too, of
/// one layer with at most size.batch entries of at most size.tokens tokens. Refuses sizes below 0.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t append_workspace_bytes(const host& ctx, const Ref<P, T>& cache,
                                                                const CallSize& size);

/// The masses of the query of the token that append() wrote, for a policy that ranks keys by the attention
/// they receive at steps (H2O, TOVA): masses [count, Hkv, rows] fp32, entry r of a head in the order of
/// export_heads,
///     mass(r) = agg_g p_g(r),    p_g: softmax weights of query head g over the head's entries
/// with the scorer's aggregate over the G query heads of the KV head. They are added to those that keys have
/// (H2O), or replace them (TOVA, which averages over the layer's heads here). Call it once per append, after
/// the engine's attention and before the layer's next append; `batch` as there. Refuses masses that are no
/// numbers of 0 or more, and planes below the rows in use. Other policies do not compile here.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void observe(const host& ctx, const Ref<P, T>& cache, const Batch& batch, input_plane<float> masses,
             workspace_view workspace = {}, const StepOptions& options = {});

/// Speculative decoding: writes the out and lse of prefill(tokens) and leaves the entries of the cache as
/// they are. In-place replacement cannot be undone, so accept() makes all evictions. The draft tokens, at
/// most CacheShape::max_draft_tokens per sequence, stay in spare rows until accept(); a second append_draft,
/// a step or a prefill of the sequence drops them. Errors as for prefill; takes no pages. Not for policies
/// that rank keys by the attention they receive: they do not compile here. A NaN score is reported or refused
/// as in prefill; accept() does so again for the tokens that it takes. Where io.out is null there is no
/// attention, and tensors are as for append_chunk: an engine asks chunk_expiry() what the draft tokens see.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_draft(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
                  const StepOptions& options = {});

/// Applies the first batch.tokens(i) draft tokens of a sequence in this layer, as prefill would (evictions,
/// promotions, scorer state), and drops the others; 0 drops all. Call it once per layer, then
/// cache.advance(ctx, batch) once. Workspace as for that many tokens. Refuses more tokens than were drafted,
/// and draft tokens made at another length. Exhaustion as for step: the draft tokens then stay, and the call
/// of accept() can be tried again.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void accept(const host& ctx, const Ref<P, T>& cache, const Batch& batch, workspace_view workspace,
            const StepOptions& options = {});

/// Attention of io.q [count, Hq, 1, Dk] (io.k and io.v are not looked at) over the entries that the named
/// sequences hold now in this layer, a token that was appended before advance() included. The cache is not
/// changed. Entries with q_len 0 are untouched; a sequence without rows gives 0 and LSE = -inf.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void attend(const host& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
            const StepOptions& options = {});

/// A cache as "heads as sequences", for a paged attention kernel to read without a copy: pages of page_size
/// rows of one head. Entry i of the batch, head h is sequence i * Hkv + h with one KV head. indptr [count *
/// Hkv + 1], indices [indptr's last], last_page_len [count * Hkv] (0 for an empty head). In a
/// FixedBudgetCache page p starts at k + p * page_size * head_dim_qk; in a DualCache page p is page p mod
/// slab_pages of slab p / slab_pages. Rows in use come first, so only the last page is partial.
struct HeadPages {
    std::int32_t* indptr = nullptr;
    std::int32_t* indices = nullptr;
    std::int32_t* last_page_len = nullptr;
    std::int64_t indices_capacity = 0;
};

/// Fills `pages` with the entries that this layer holds now. After the layer's step they include the newest
/// token, before advance() too, so a kernel of the caller can attend between this layer and the next. Refuses
/// a capacity below the pages in use, naming both.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void export_heads(const host& ctx, const Ref<P, T>& cache, const Batch& batch, const HeadPages& pages,
                  workspace_view workspace = {}, const StepOptions& options = {});

}  // namespace kvpolicy

#include <kvpolicy/caches/host/append.hpp>
#include <kvpolicy/caches/host/prefill.hpp>
#include <kvpolicy/caches/host/step.hpp>
#include <kvpolicy/caches/whole_cache.hpp>

#if defined(__CUDACC__)
#include <kvpolicy/caches/cuda_calls.cuh>
#endif
