// The calls of caches/calls.hpp on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it
// where they are instantiated.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/step_io.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/head_dims.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// All calls below take the ref of a cache that was bound with a cuda context (bind of its owner). Tensors,
// planes, hidden states, cu_seqlens, options.status, scorer weights, and of the batch the arrays seq_ids and
// q_len are device memory. Work is enqueued on the context's stream; nothing is allocated, nothing waited
// for. Grids depend on shapes and capacities, and whatever changes from step to step is read from device
// memory when the work runs, so one captured graph serves all later steps.
//
// Policies: all; those that rank keys by attention without drafts and without chunks of an engine's attention
// (append_draft, accept, append_chunk and chunk_expiry do not compile).
// Scorers: given scores, LinearScorer, MlpScorer, WriteGateScorer, UtilityPredictor, mLSTMScorer, ConvScorer,
// all that observe attention, and what specializes device_scorer (others do not compile). Given the same
// scores, the same keys are kept as on the host; steps put them in the same rows too.
//
// bf16 and fp16: head_dims that are multiples of 8 up to the largest of Dims, any group, fp32 sums; rows
// begin at multiples of 16 bytes, and those of a chunk's keys and values one after another: a row stride of 0
// or more. float and double: plain kernels, to check others with.
//
// What a host would refuse but a device finds too late: a NaN score ranks last and sets status_nan_score; for
// a policy that ranks keys by attention, a query head whose weights are NaN (q or k is not finite, or a logit
// overflows fp32) gives no mass in its step and sets status_nan_score; a
// token count that the call does not take, or a sequence that the cache does not have, counts as no token and
// sets status_bad_length (an entry of sequence -1 is padding: it brings no token, and nothing is wrong);
// tokens for a layer that has taken some already, before advance() has counted them, count as none and set
// status_layer_repeated, and advance() does not move a sequence that some layer has not taken
// (status_layer_skipped). Not detected: sequences named twice in a batch.
// options.status [count], where given, is OR-ed into.
//
// Packed batches (io.cu_seqlens; prefill, append_draft, append_chunk and chunk_expiry): an entry brings as
// many tokens as its edges say, at most batch.length. Without batch.length that is the total of q (of k in a
// call without attention), in append_draft at most max_draft_tokens. Workspace and grids are those of
// CallSize{count, that most}, however long the tensors are, so give a batch of many entries its batch.length.
// Where q_len is given, too, it must agree. An entry with edges beyond q, with more tokens than the most, or
// with another q_len counts as one of no token and sets status_bad_length; so do all entries from the first
// that an edge falls in, and all of them where the first edge is not 0. Results are those of the same entries
// in padded tensors, bit for bit. A policy that ranks keys by attention reads the lse of its queries: where
// io.lse is null, tensors of more rows than count times the most tokens of an entry are refused.
//
// A DualCache takes the same calls. Where its pool has no pages for an entry, the entry is left as it is, its
// out is 0, its lse -inf, and status_pool_exhausted is set: the same entries as on the host. Pages may have
// other ids. Without options.status that is left unsaid, where the host refuses: until then advance() does
// not move the sequence, so give one.
//
// Refused before anything is enqueued: shapes that disagree, a head_dim beyond Dims, rows that are not
// aligned, too little workspace, cu_seqlens in step, append and attend. Failing CUDA calls throw
// kvpolicy::cuda_error.

/// Gives a ref of an unbound cache, of which sizes are taken, the context's device.
template <class Ref>
void measure_on(const cuda& ctx, Ref& cache);

/// Bytes of device workspace for all calls below with at most size.batch entries of at most
/// size.tokens tokens.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t workspace_bytes(const cuda& ctx, const Ref<P, T>& cache,
                                                         const CallSize& size);
/// The same for step and attend alone, of at most `batch` entries: much less, and a program that only decodes
/// then compiles no kernel of prefill.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t step_workspace_bytes(const cuda& ctx, const Ref<P, T>& cache,
                                                              std::int32_t batch);

/// One decode step of one layer (the host's step has the order, the shapes and what is overwritten). A
/// FixedBudgetCache takes one launch; a DualCache two: one block takes pages and lays out the work, then all
/// blocks of the GPU share the rows of all heads evenly, however ragged they are. A scorer with a hidden
/// layer or a state has one more before it, one of hidden states two. Outputs equal the host's to rounding.
///
/// A scorer that observes attention and evicts at steps (H2O, TOVA) has one more launch after it, except
/// where the blocks of a head are a cluster (few heads, scores per head, compute capability 9.0). For all
/// entries t of a head score(t) = mass(t), or score(t) + mass(t), fp32, with the step's query; so a key is
/// ranked by the masses up to the query before. One that keeps decoded tokens (SnapKV) leaves scores as they
/// are. bind() refuses a policy that averages over a layer whose heads differ in sinks, window or budget.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void step(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
          const StepOptions& options = {});

/// A chunk of up to n tokens a sequence, as the host's prefill: what as many steps would keep. Entry i brings
/// batch.q_len[i] tokens, or batch.length, or all n of q; packed, those between its edges, up to n.
/// io.q [count, Hq, n, Dk], io.k and io.v [count, Hkv, n, D], io.out [count, Hq, n, Dv]. Top-k updates of
/// heads with static priorities are decided together, by a sort; with a decay step above 1, one after another
/// by the least of each class of positions. Chunks of up to 16 tokens look at all slots for every candidate.
/// With n > 32 an mLSTM of up to 128 features and values
/// scores by chunks, as score_sequence does: it agrees with steps to rounding, of 16-bit rows to that of
/// bf16.
///
/// A policy that ranks keys by attention decides as the host does, once per block (ObservedPrefill), by
/// masses in fp32: the same keys in the same rows, unless two masses agree to rounding. A mass that is NaN (q
/// or k is not finite) ranks last and sets status_nan_score. A block takes a second pass over the pairs of
/// keys and queries that count, and about a dozen launches.
///
/// Of a DualCache a chunk fits, or the call leaves the sequence unchanged. Attention reads rows in their
/// pages. It takes as many entries at once as have their lists of rows in 1 GiB, or in the workspace if that
/// is larger than workspace_bytes (at least one). docs/cuda.md, Ragged heads, has the workspace's parts.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void prefill(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
             const StepOptions& options = {});

/// As the host's append, but that keys are not looked at: one that is not finite shows in the masses of later
/// queries. One launch for a FixedBudgetCache, two for pages; a scorer has launches of its own
/// before them, as in a step. No kernel of attention is compiled for it. `Dims` is ignored.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
            const StepOptions& options = {});

/// As the host's observe. One launch. A mass that is no number of 0 or more counts as 0 and sets
/// status_nan_score. Refuses masses below the rows that a head of the layer can ever use: in a DualCache at
/// most PoolShape::max_seq_len; rows that are not in use are not read. `Dims` and `workspace` are ignored.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void observe(const cuda& ctx, const Ref<P, T>& cache, const Batch& batch, input_plane<float> masses,
             workspace_view workspace = {}, const StepOptions& options = {});

/// As the host's chunk_expiry. Refuses expiry.cached below the rows that a head of the layer can ever use: in
/// a DualCache at most PoolShape::max_seq_len.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void chunk_expiry(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, const ChunkExpiry& expiry,
                  workspace_view workspace, const StepOptions& options = {});

/// As the host's append_chunk; scores as in prefill.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_chunk(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
                  const StepOptions& options = {});

/// Bytes of device workspace for append, and where size.tokens is above 1 for append_chunk and chunk_expiry
/// too (which need much more), with at most size.batch entries of at most size.tokens tokens.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t append_workspace_bytes(const cuda& ctx, const Ref<P, T>& cache,
                                                                const CallSize& size);

/// As the host's append_draft; n is at most CacheShape::max_draft_tokens.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append_draft(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
                  const StepOptions& options = {});

/// As the host's accept. An entry of more tokens than were drafted, or drafted at another length, counts as
/// one of no token (which forgets the draft) and sets status_bad_length.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void accept(const cuda& ctx, const Ref<P, T>& cache, const Batch& batch, workspace_view workspace,
            const StepOptions& options = {});

/// As the host's attend: attention of io.q [count, Hq, 1, Dk] over the rows that the named sequences hold
/// now. The cache is not changed.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void attend(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
            const StepOptions& options = {});

/// Fills `pages`, device memory, as the host's export_heads does. A sequence that there is not has no pages.
/// Refuses a capacity below what the batch's sequences could ever need in a FixedBudgetCache, count * rows /
/// page_size, and below the pages of a DualCache's pool, max_slabs * slab_pages. Forks share pages, so a
/// batch of them may name more: indptr says how many, and those beyond the capacity are not written.
template <class Dims = all_head_dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void export_heads(const cuda& ctx, const Ref<P, T>& cache, const Batch& batch, const HeadPages& pages,
                  workspace_view workspace = {}, const StepOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
