// device_scorer<S>: how a scorer runs on CUDA. A scorer is one folder: its kernels, and one specialization of
// this template beside them. No shared file of scorers/ names a scorer (caches/cuda/scoring has the decode
// kernels of the MLP and the mLSTM), and a scorer of a user's own specializes it in the user's header
// (examples/recipes/own_scorer_on_cuda.cu).
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/hidden_rows.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/packed_rows.cuh>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

/// One of the blocks that share the work of some tokens.
struct block_share {
    std::int32_t index = 0;
    std::int32_t count = 1;
};
/// A token that a block scores: its rows, of the cache's type, and where its score goes.
template <class T>
struct block_token {
    const T* key;  // null: there is no token
    const T* value;
    position_t position;
    float* score;
};
/// What score_by_block may count on.
inline constexpr int block_scorer_threads = 128;
inline constexpr int block_scorer_max_threads = 512;
inline constexpr int block_scorer_tokens = 16;

/// What a specialization may say. A scorer says nothing of what it lacks, by inheriting from this.
struct device_scorer_defaults {
    /// score_sequence: forward<Widths, T>(ctx, scorer, call, parts, measure, status) takes its memory from
    /// `parts`, returns where `measure` is true, and else enqueues its kernels, which write call.scores as
    /// the host's score_sequence does.
    static constexpr bool scores_sequences = false;
    /// score_sequence_backward: backward<Widths, T>(ctx, scorer, call, gradients, parts,
    /// measure, status), alike.
    static constexpr bool has_gradients = false;
    /// One warp scores an entry inside a decode step: score(scorer, head, key, value, head_dim_qk,
    /// head_dim_vo), called by all 32 lanes, with the score in each of them.
    static constexpr bool by_warp = false;
    /// Blocks score up to block_scorer_tokens new tokens of a head, in a launch before a step or a chunk. The
    /// tokens of a step are of several sequences. All threads of a block, a multiple of block_scorer_threads,
    /// call
    ///     prepare_block(scorer, head, share, head_dim_qk, head_dim_vo, shared)
    ///     score_by_block(scorer, head, tokens, count, share, head_dim_qk, head_dim_vo, shared)
    /// the first while kernels before may still run: it may prefetch, and use values of the scorer. The
    /// second overwrites *tokens[t].score for t < count where tokens[t].key is not null: with the token's
    /// score where share.count is 1, else with a part of it. share.count is 1 or block_shares(scorer); the
    /// parts are added in the order of share.index. Scores have the same bits in both cases, and whichever
    /// tokens share the block. `shared`: block_floats(scorer, count, head_dim_qk, head_dim_vo) numbers.
    static constexpr bool by_block = false;
    template <class S>
    static std::int32_t block_shares(const S& /*scorer*/) {
        return 1;
    }
    template <class S>
    __device__ static void prepare_block(const S& /*scorer*/, std::int32_t /*head*/, block_share /*share*/,
                                         std::int32_t /*head_dim_qk*/, std::int32_t /*head_dim_vo*/,
                                         float* /*shared*/) {}
    /// A kernel of its own scores new tokens before a decode step (caches/cuda/scoring).
    static constexpr bool before_step = false;
    /// Scores come from hidden states, for all heads of a token at once, before a cache's call looks at any:
    /// score_hidden(ctx, scorer, call, parts, measure) takes its memory from `parts`, returns where
    /// `measure` is true, and else enqueues its kernels, which overwrite call.scores of tokens that count.
    static constexpr bool from_hidden = false;
    /// A step need not wait for score_hidden: hidden_layer(ctx, scorer, call, parts, measure), alike,
    /// enqueues what comes before the heads' sums, and returns its result in device memory. One warp computes
    /// a score of it, read_score(scorer, result, token, head), with the score in each lane, and the bits of
    /// score_hidden. The kernels of hidden_layer let the next kernel start, but only once all kernels before
    /// have ended.
    static constexpr bool reads_hidden_layer = false;
    /// Keys get their scores while they are in the window (caches/cuda/scoring).
    static constexpr bool in_window = false;
    /// Prefill of a cache with at least min_chunk tokens per entry: score_chunk<T>(ctx, scorer, call, parts,
    /// measure) takes its memory from `parts`. It returns false where it has no kernels for these sizes on
    /// this GPU; sizes and GPU alone decide, and so does `min_chunk`. Else it returns true, and enqueues its
    /// kernels unless `measure` is true. Other chunks are scored as steps are (caches/cuda/scoring).
    static constexpr bool scores_chunks = false;
    static constexpr std::int32_t min_chunk = 1;
};

template <class S>
struct device_scorer : device_scorer_defaults {};

/// The arguments of score_sequence, of a call that is checked. k [B, Hkv, S, Dk], v [B, Hkv, S, Dv],
/// scores [B, Hkv, S].
template <class T>
struct score_sequence_params {
    rows_view<const T> k;
    rows_view<const T> v;
    Sequences sequences;
    std::int32_t delay = 0;
    plane_view<float> scores{};
    ScoreOptions options{};
};

/// The arguments of score_hidden: the new tokens of a cache's call. What is device memory: the hidden states,
/// sequences, lengths and scores. Tokens that count are those of an entry's length, of entries that are a
/// sequence.
struct score_hidden_params {
    HiddenRows hidden;     // [B, >= S, width]; rows of tokens that do not count may be no memory
    packed_rows packed{};  // of hidden
    const std::int32_t* seq_ids = nullptr;  // [B]: Batch::no_seq where an entry is padding; null: none is
    const std::int32_t* lengths = nullptr;  // [B]: tokens of an entry; null: `length`
    std::int32_t length = 1;                // tokens of an entry, at most
    plane_view<float> scores{};             // [B, heads, S]
};

/// A key that leaves the window, wherever its entry is.
template <class T>
struct alignas(16) leaving_key {
    const T* key;
    const T* value;
};
/// Where a head's state is before a chunk, and where it goes after it: perhaps the same memory. Null for an
/// entry without tokens.
struct chunk_state {
    const float* before;
    float* after;
};

/// The arguments of score_chunk: a chunk of tokens of a cache whose scorer scores keys as they leave the
/// window (score_time::on_leaving). All pointers are to device memory.
template <class T>
struct score_chunk_params {
    rows_view<const T> k;                         // [B, Hkv, S, Dk]
    rows_view<const T> v;                         // [B, Hkv, S, Dv]
    packed_rows packed{};                         // of k and v
    const std::int32_t* lengths = nullptr;        // [B]: tokens of an entry, 0 to S
    const leaving_key<T>* leaving = nullptr;      // [B, Hkv, S]: the key that leaves when token j comes
    const std::int32_t* first_leaving = nullptr;  // [B, Hkv]: the first j with such a key; S or more: none
    const chunk_state* states = nullptr;          // [B, Hkv]
    float* scores = nullptr;  // [B, Hkv, S]: of leaving[j], for j from first_leaving to the length
};

namespace cuda_backend {

/// A scorer so small that a warp scores an entry beside other work.
template <class S>
inline constexpr bool scores_by_warp = device_scorer<S>::by_warp;
/// A scorer of which a block scores a few tokens.
template <class S>
inline constexpr bool scores_by_block = device_scorer<S>::by_block;
/// A scorer that takes a launch of its own before a step.
template <class S>
inline constexpr bool scored_before = device_scorer<S>::before_step || scores_by_block<S>;
/// A scorer of hidden states whose heads' sums are a step's own.
template <class S>
inline constexpr bool reads_hidden_layer = device_scorer<S>::reads_hidden_layer;
/// Whether the launches before a step compute the new token's score, which the step only stores.
template <class S>
inline constexpr bool arrives_late =
    (scored_before<S> && S::when == score_time::on_arrival) || reads_hidden_layer<S>;
/// Whether they compute the score that the step decides by.
template <class S>
inline constexpr bool decides_late = scored_before<S>&& S::when == score_time::on_leaving;

template <class S>
inline constexpr bool has_device_scorer =
    S::when == score_time::given || S::when == score_time::observed || scores_by_warp<S> || scored_before<S>;

/// In how many parts the launch before a step computes the new tokens' scores.
template <class S>
std::int32_t score_parts_of([[maybe_unused]] const S& scorer) {
    if constexpr (scores_by_block<S>) {
        return device_scorer<S>::block_shares(scorer);
    } else {
        return 1;
    }
}

}  // namespace cuda_backend

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
