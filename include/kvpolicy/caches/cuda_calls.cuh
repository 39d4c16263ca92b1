// The calls of caches/calls.hpp on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it
// where they are instantiated.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/head_dims.hpp>
#include <kvpolicy/cuda/config.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

template <class P, class T>
struct DualRef;

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// All calls below take the ref of a cache that was bound with a cuda context (bind of its owner). Tensors,
// planes, status, scorer weights, and of `batch` the arrays sequences and q_len are device memory. Work is
// enqueued on the context's stream; nothing is allocated, nothing waited for. Grids depend on shapes and
// capacities, and whatever changes from step to step is read from device memory when the work runs, so one
// captured graph serves all later steps.
//
// Policies: all but those that rank keys by attention. Scorers: given scores, LinearScorer, MlpScorer,
// mLSTMScorer, ConvScorer (others do not compile). Given the same scores, the same keys are kept as on the
// host; steps put them in the same rows too.
//
// bf16 and fp16: head_dims that are multiples of 8 up to the largest of Dims, any group, fp32 sums; rows
// begin at multiples of 16 bytes, and those of a chunk's keys and values one after another: a row stride of 0
// or more. float and double: plain kernels, to check others with.
//
// What a host would refuse but a device finds too late: a NaN score ranks last and sets status_nan_score; a
// token count that the call does not take, or a sequence that the cache does not have, counts as no token and
// sets status_bad_length (an entry of sequence -1 is padding: it brings no token, and nothing is wrong); tokens
// for a layer that has taken some already, before advance() has counted them, count as none and set
// status_layer_repeated, and advance() does not move a sequence that some layer has not taken
// (status_layer_skipped). Not detected: sequences named twice in a batch. `status` [count], where given, is OR-ed
// into.
//
// A DualCache takes the same calls. Where its pool has no pages for an entry, the entry is left as it is, its
// out is 0, its lse -inf, and status_pool_exhausted is set: the same entries as on the host. Pages may have
// other ids. A null `status` leaves that unsaid, where the host refuses: until then advance() does not move
// the sequence, so give one.
//
// Refused before anything is enqueued: shapes that disagree, a head_dim beyond Dims, rows that are not
// aligned, too little workspace, cu_seqlens (entries of different lengths have batch.q_len). Failing CUDA
// calls throw kvpolicy::cuda_error.

/// Bytes of device workspace for all calls below with at most `count` entries of at most `tokens` tokens.
template <class Dims = all_head_dims, class P, Storage T>
std::size_t cache_workspace_bytes(const cuda& on, const FixedBudgetRef<P, T>& cache, std::int32_t count,
                                  std::int32_t tokens);
/// The same for step and attend alone: much less, and a program that only decodes then compiles no kernel of
/// prefill.
template <class Dims = all_head_dims, class P, Storage T>
std::size_t step_workspace_bytes(const cuda& on, const FixedBudgetRef<P, T>& cache, std::int32_t count);

/// Both for all layers of a cache, of either kind: the most that any of them needs, where budgets differ by
/// layer.
template <class Dims = all_head_dims, CacheObject Cache>
std::size_t cache_workspace_bytes(const cuda& on, const Cache& cache, std::int32_t count,
                                  std::int32_t tokens) {
    std::size_t most = 0;
    for (std::int32_t layer = 0; layer < cache.shape().layers; ++layer) {
        const std::size_t bytes = cache_workspace_bytes<Dims>(on, cache.layer(layer), count, tokens);
        most = bytes > most ? bytes : most;
    }
    return most;
}
template <class Dims = all_head_dims, CacheObject Cache>
std::size_t step_workspace_bytes(const cuda& on, const Cache& cache, std::int32_t count) {
    std::size_t most = 0;
    for (std::int32_t layer = 0; layer < cache.shape().layers; ++layer) {
        const std::size_t bytes = step_workspace_bytes<Dims>(on, cache.layer(layer), count);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/// One decode step of one layer (the host's step has the order, the shapes and what is overwritten), in one
/// launch; a scorer with a hidden layer or a state has one more before it. Outputs equal the host's to
/// rounding.
template <class Dims = all_head_dims, class P, Storage T>
void step(const cuda& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, input_rows<T> q,
          input_rows<T> k, input_rows<T> v, output_rows<T> out, workspace_view workspace,
          std::uint32_t* status = nullptr, const CacheExtras& extras = {});

/// A chunk of up to n tokens per sequence, as the host's prefill: what as many steps would keep. Entry i
/// brings batch.q_len[i] tokens, or batch.length. q [count, Hq, n, Dk], k and v [count, Hkv, n, D], out
/// [count, Hq, n, Dv]; n is the length of q. Top-k updates run one after another, in one warp per head: an
/// admitted candidate costs about half a microsecond (with a decay step above 1 every candidate looks at all
/// places). An mLSTM absorbs token by token.
template <class Dims = all_head_dims, class P, Storage T>
void prefill(const cuda& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, input_rows<T> q,
             input_rows<T> k, input_rows<T> v, output_rows<T> out, workspace_view workspace,
             std::uint32_t* status = nullptr, const CacheExtras& extras = {});

/// As the host's propose; n is at most CacheShape::max_draft_tokens.
template <class Dims = all_head_dims, class P, Storage T>
void append_draft(const cuda& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, input_rows<T> q,
                  input_rows<T> k, input_rows<T> v, output_rows<T> out, workspace_view workspace,
                  std::uint32_t* status = nullptr, const CacheExtras& extras = {});

/// The host's form of it, for code that is compiled for both.
template <class Dims = all_head_dims, class P, Storage T>
void append_draft(const cuda& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, input_rows<T> q,
                  input_rows<T> k, input_rows<T> v, output_rows<T> out, workspace_view workspace,
                  const CacheExtras& extras) {
    append_draft<Dims>(on, cache, batch, q, k, v, out, workspace, static_cast<std::uint32_t*>(nullptr),
                       extras);
}

/// As the host's commit. An entry of more tokens than were proposed, or proposed at another length, counts as
/// one of no token (which forgets what was proposed) and sets status_bad_length.
template <class Dims = all_head_dims, class P, Storage T>
void accept(const cuda& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, workspace_view workspace,
            std::uint32_t* status = nullptr);

/// As the host's attend: attention of q [count, Hq, 1, Dk] over the rows that the named sequences hold now;
/// changes nothing.
template <class Dims = all_head_dims, class P, Storage T>
void attend(const cuda& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, input_rows<T> q,
            output_rows<T> out, plane_view<float> lse, workspace_view workspace,
            std::uint32_t* status = nullptr);

/// Fills `pages`, device memory, as the host's export_heads does. Refuses a capacity below what the batch's
/// sequences could ever need, count * rows / page_size. A sequence that there is not has no pages.
template <class P, Storage T>
void export_heads(const cuda& on, const FixedBudgetRef<P, T>& cache, const Batch& batch,
                  const HeadPages& pages);

// The same for a DualCache. A step is two launches: one block takes pages and lays out the work, then all
// blocks of the GPU share the rows of all heads evenly, however ragged they are.

template <class Dims = all_head_dims, class P, Storage T>
std::size_t step_workspace_bytes(const cuda& on, const DualRef<P, T>& cache, std::int32_t count);
template <class Dims = all_head_dims, class P, Storage T>
std::size_t cache_workspace_bytes(const cuda& on, const DualRef<P, T>& cache, std::int32_t count,
                                  std::int32_t tokens);

template <class Dims = all_head_dims, class P, Storage T>
void step(const cuda& on, const DualRef<P, T>& cache, const Batch& batch, input_rows<T> q, input_rows<T> k,
          input_rows<T> v, output_rows<T> out, workspace_view workspace, std::uint32_t* status = nullptr,
          const CacheExtras& extras = {});

/// A chunk fits, or nothing of it is kept. Rows are brought together once a chunk, which costs what reading
/// them twice does: those of as many entries at once as have room in 1 GiB, or in the workspace if that is
/// larger than cache_workspace_bytes (at least one), each with all the rows that it can hold, but no more
/// than the pool has. docs/cuda.md, Ragged heads, has the workspace's other parts.
template <class Dims = all_head_dims, class P, Storage T>
void prefill(const cuda& on, const DualRef<P, T>& cache, const Batch& batch, input_rows<T> q, input_rows<T> k,
             input_rows<T> v, output_rows<T> out, workspace_view workspace, std::uint32_t* status = nullptr,
             const CacheExtras& extras = {});

template <class Dims = all_head_dims, class P, Storage T>
void append_draft(const cuda& on, const DualRef<P, T>& cache, const Batch& batch, input_rows<T> q,
                  input_rows<T> k, input_rows<T> v, output_rows<T> out, workspace_view workspace,
                  std::uint32_t* status = nullptr, const CacheExtras& extras = {});

template <class Dims = all_head_dims, class P, Storage T>
void append_draft(const cuda& on, const DualRef<P, T>& cache, const Batch& batch, input_rows<T> q,
                  input_rows<T> k, input_rows<T> v, output_rows<T> out, workspace_view workspace,
                  const CacheExtras& extras) {
    append_draft<Dims>(on, cache, batch, q, k, v, out, workspace, static_cast<std::uint32_t*>(nullptr),
                       extras);
}

template <class Dims = all_head_dims, class P, Storage T>
void accept(const cuda& on, const DualRef<P, T>& cache, const Batch& batch, workspace_view workspace,
            std::uint32_t* status = nullptr);

template <class Dims = all_head_dims, class P, Storage T>
void attend(const cuda& on, const DualRef<P, T>& cache, const Batch& batch, input_rows<T> q,
            output_rows<T> out, plane_view<float> lse, workspace_view workspace,
            std::uint32_t* status = nullptr);

/// Refuses a capacity below the pages of the pool, max_slabs * slab_pages. Forks share pages, so a batch of
/// them may name more: indptr says how many, and those beyond the capacity are not written.
template <class P, Storage T>
void export_heads(const cuda& on, const DualRef<P, T>& cache, const Batch& batch, const HeadPages& pages);

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
