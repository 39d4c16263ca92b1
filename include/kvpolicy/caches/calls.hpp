// The calls that every kind of cache takes: step, prefill, attend, append_draft and accept, and the export of its
// pages.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/compose.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// Bytes of workspace for step, prefill, attend, append_draft and accept with at most `count` entries of at most
/// `tokens` tokens. Refuses counts below 0.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t cache_workspace_bytes(const host& on, const Ref<P, T>& cache,
                                                               std::int32_t count, std::int32_t tokens);

/// A FixedBudgetCache or a DualCache: layers of one shape, each with a ref.
template <class C>
concept CacheObject = requires(const C& cache) {
    cache.shape().layers;
    { cache.layer(0) } -> CacheRef;
};

/// The same for all layers of a cache: the most that any of them needs, where budgets differ by layer.
template <CacheObject Cache>
std::size_t cache_workspace_bytes(const host& on, const Cache& cache, std::int32_t count,
                                  std::int32_t tokens) {
    std::size_t most = 0;
    for (std::int32_t layer = 0; layer < cache.shape().layers; ++layer) {
        const std::size_t bytes = cache_workspace_bytes(on, cache.layer(layer), count, tokens);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/// One decode step of one layer, for the batch's sequences (0 or 1 token each). q [count, Hq, 1, Dk], k and v
/// [count, Hkv, 1, D], out [count, Hq, 1, Dv]: overwritten for entries with a token, untouched for others.
/// For each KV head, at position q = the sequence's length (docs/concepts.md, the order of a step):
///   1. (k_q, v_q) is appended;
///   2. a stateful scorer absorbs [k_q; v_q];
///   3. the key u = q - w, if u >= s, leaves the window and competes for the top-k sequences;
///   4. the query heads attend to sinks, window (q - w + 1 .. q) and top-k keys.
/// A key that loses at 3 is invisible to q already. Synchronous, no allocation. Refuses before anything is
/// written: shapes that disagree, more than one token, sequences out of range or named twice, a NaN score that is
/// read (given or computed), too little workspace, a second call of the same layer before advance(), which
/// would keep the token twice.
///
/// A policy that ranks keys by the attention they receive (H2O, TOVA, SnapKV; scorers/observed.hpp) decides
/// in 3 by the masses up to q - 1, and adds the query's own after 4. Its q and k must be finite: a number
/// that is not is refused.
///
/// A cache with a pool of pages (DualCache) may run out of them. The step is then a no-op for that sequence
/// in this layer: its out is 0, its lse -inf, and status[i] of its entry gets status_pool_exhausted. Lend a
/// slab and call this layer again for that entry. `status` [count] is OR-ed into; where it is null,
/// exhaustion is refused instead, before anything is written.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void step(const host& on, const Ref<P, T>& cache, const Batch& batch, input_rows<T> q, input_rows<T> k,
          input_rows<T> v, output_rows<T> out, workspace_view workspace, std::uint32_t* status = nullptr,
          const CacheExtras& extras = {});

/// A chunk of n tokens per sequence, at positions length .. length + n - 1: what n steps would do, at the
/// cost of one pass. q [count, Hq, n, Dk], k and v [count, Hkv, n, D], out [count, Hq, n, Dv]. Retained sets,
/// rows and scores are identical to stepping (given the same scores; the mLSTM runs recurrently, so its
/// scores are the same bits too); outputs agree to rounding. extras.cu_seqlens packs entries of different
/// lengths into one row. The chunk attends to two segments: the rows of the cache, and itself. Errors and
/// exhaustion as for step; a chunk counts as one: it fits, or nothing of it is kept.
///
/// A policy that ranks keys by the attention they receive takes the chunk as blocks of a prompt
/// (ObservedPrefill): within a block nothing is evicted, so blocks of more than one token keep other keys
/// than steps do.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void prefill(const host& on, const Ref<P, T>& cache, const Batch& batch, input_rows<T> q, input_rows<T> k,
             input_rows<T> v, output_rows<T> out, workspace_view workspace, std::uint32_t* status = nullptr,
             const CacheExtras& extras = {});

/// Speculation: what prefill(tokens) would give as out and lse, while the cache keeps its rows: in-place
/// replacement cannot be undone, so nothing is decided before accept(). The tokens, at most
/// CacheShape::max_draft_tokens a sequence, wait in spare rows; a second append_draft, a step or a prefill of the sequence
/// forgets them. Errors as for prefill; takes no pages. Not for policies that rank keys by the attention they
/// receive: they do not compile here.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_draft(const host& on, const Ref<P, T>& cache, const Batch& batch, input_rows<T> q,
                  input_rows<T> k, input_rows<T> v, output_rows<T> out, workspace_view workspace,
                  const CacheExtras& extras = {});

/// Applies the first batch.tokens(i) of the tokens that a sequence proposed in this layer, as prefill would
/// have (evictions, promotions, scorer state), and forgets the others; 0 forgets all. Once a layer, then
/// CacheOwner::advance(batch) once. Workspace as for that many tokens. Refuses more than was proposed, and
/// draft tokens made at another length. Exhaustion as for step: the draft tokens then stay, and the call of accept() can be
/// tried again.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void accept(const host& on, const Ref<P, T>& cache, const Batch& batch, workspace_view workspace,
            std::uint32_t* status = nullptr);

/// Attention of q [count, Hq, 1, Dk] over the rows that the named sequences hold now in this layer, those of a
/// token that it has taken before advance() among them; changes nothing. Entries with q_len 0 are untouched;
/// a sequence without rows gives 0 and LSE = -inf.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void attend(const host& on, const Ref<P, T>& cache, const Batch& batch, input_rows<T> q, output_rows<T> out,
            plane_view<float> lse, workspace_view workspace);

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

/// Fills `pages` with the rows that this layer holds now: after its step the newest token is among them,
/// whether advance() has been called or not, so that a kernel of the caller's attends between this layer and
/// the next. Refuses a capacity below the pages in use, naming both.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void export_heads(const host& on, const Ref<P, T>& cache, const Batch& batch, const HeadPages& pages);

}  // namespace kvpolicy

#include <kvpolicy/caches/host/prefill.hpp>
#include <kvpolicy/caches/host/step.hpp>
#include <kvpolicy/caches/whole_cache.hpp>

#if defined(__CUDACC__)
#include <kvpolicy/caches/cuda_calls.cuh>
#endif
