// What calls on a layer of a cache take: tensors and their entries, options, and sizes to ask
// a workspace for.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/hidden_rows.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// The tensors of one call, with n tokens per entry: step takes n = 1, prefill and append_draft chunks,
/// attend only q and out. cache.nhd() and cache.hnd() make one from pointers to contiguous tensors; views are
/// for other strides.
template <Storage T>
struct StepIO {
    rows_view<const T> q{};  ///< [count, Hq, n, Dk]
    rows_view<const T> k{};  ///< [count, Hkv, n, Dk]
    rows_view<const T> v{};  ///< [count, Hkv, n, Dv]
    rows_view<T> out{};      ///< [count, Hq, n, Dv]: written for entries with tokens, untouched for others
    /// Which sequences the entries are, and how many tokens they bring. Default: entry i is sequence i, with
    /// all tokens of q.
    Batch batch{};
    /// Scores of the new tokens [count, Hkv, n], for a policy whose scores are given (GivenScores).
    plane_view<const float> scores{};
    /// Hidden states of the new tokens [count, n, width], of any storage type, for a policy whose scorer
    /// reads them (SP-KV's UtilityPredictor).
    HiddenRows hidden{};
    /// Where to write the log-sum-exp of every query [count, Hq, n] (natural log), if wanted.
    plane_view<float> lse{};
    /// For prefill, append_draft, append_chunk and chunk_expiry of a packed batch: the edges [count + 1],
    /// rising from 0, of the entries' tokens in tensors of one sequence; in the context's memory. q is then
    /// [1, Hq, total, Dk], and likewise k, v, out, scores, lse and hidden; entry i is the tokens
    /// cu_seqlens[i] .. cu_seqlens[i + 1] - 1, as many as batch.tokens(i). On CUDA, whose host does not know
    /// the edges, batch.length is the most tokens of an entry instead (caches/cuda_calls.cuh), and
    /// batch.q_len may be null. Whether samples of a pack see each other is a question of sequences: one
    /// entry keeps attention across them, an entry and a sequence for each resets it.
    const std::int32_t* cu_seqlens = nullptr;
};

/// StepIO as a parameter from which no type is deduced, so that braces will do.
template <class T>
using step_io = std::type_identity_t<StepIO<T>>;

/// What a cache does with a token that its scorer cannot take: a key or value that is NaN or infinite, of a
/// policy whose scorer keeps a state (mLSTM) or reads neighbors (convolution), and a NaN score of any policy.
/// Policies that rank keys by attention refuse such keys and queries in any case on the host.
enum class bad_token : std::uint8_t {
    /// The host refuses the call, naming the token, before anything is written; with a `status` it does as
    /// `drop`. A device cannot refuse what lies in its memory, and does as `drop`.
    refuse,
    /// The token is stored, and later queries see it. Its update of the scorer's state is skipped. Its own
    /// score is NaN, and so are those that a convolution makes of it (of 6 keys on either side): such keys
    /// rank last, and their gates are closed. status_nan_score is set in the call in which that score becomes
    /// known.
    drop
};

/// Options of calls on a cache and its layers.
struct StepOptions {
    /// One word per entry (one word alone for fork and restore, and for reorder), OR-ed into, in the
    /// context's memory: status_bits. The host writes status_nan_score, status_pool_exhausted and
    /// status_layer_skipped, and refuses everything else that a device reports; without `status` it refuses
    /// these three as well, before anything is written. A device never refuses what lies in device memory.
    std::uint32_t* status = nullptr;
    /// Of all calls of a sequence: once a token was dropped, later calls meet its NaN score.
    bad_token bad_tokens = bad_token::refuse;

    /// Whether the host refuses bad tokens.
    [[nodiscard]] bool refuses_bad_tokens() const {
        return status == nullptr && bad_tokens == bad_token::refuse;
    }
};

/// The most entries of a call, and the most tokens of an entry, that a workspace is asked for.
struct CallSize {
    std::int32_t batch = 1;
    std::int32_t tokens = 1;
};

namespace checks {

inline void check_call_size(const CallSize& size) {
    detail::require(size.batch >= 0, "size.batch", size.batch, "0 or more");
    detail::require(size.tokens >= 0, "size.tokens", size.tokens, "0 or more");
}

/// The batch of a call, with what was left out taken from `rows`, whose batch `name` names.
template <class T>
Batch batch_of(const StepIO<T>& io, const rows_view<const T>& rows, const char* name) {
    Batch batch = io.batch;
    if (batch.count == Batch::not_set) {
        detail::require(io.cu_seqlens == nullptr, "io.batch.count", "not set",
                        "the entries that io.cu_seqlens packs");
        detail::require(rows.batch >= 1, name, rows.batch, "1 or more where io.batch.count is not set");
        batch.count = rows.batch;
    }
    if (batch.q_len == nullptr && batch.length == Batch::not_set) {
        batch.length = rows.length;
    }
    return batch;
}
/// The same, taken from q.
template <class T>
Batch batch_of(const StepIO<T>& io) {
    return batch_of(io, io.q, "q.batch");
}
/// The batch of a call whose entries bring one token or query each, and so no edges: `why` ends the sentence.
template <class T>
Batch single_batch_of(const StepIO<T>& io, const char* why) {
    detail::require(io.cu_seqlens == nullptr, "io.cu_seqlens", "given", why);
    return batch_of(io);
}
/// The batch of a call without tensors: all sequences where it names no count.
inline Batch batch_of(Batch batch, std::int32_t max_sequences) {
    batch.count = batch.count == Batch::not_set ? max_sequences : batch.count;
    return batch;
}

}  // namespace checks

namespace detail {

/// What the bodies of calls get of a StepIO beside its tensors and its batch.
struct step_extras {
    plane_view<const float> scores{};
    plane_view<float> lse{};
    HiddenRows hidden{};
    const std::int32_t* cu_seqlens = nullptr;
};
template <class T>
step_extras extras_of(const StepIO<T>& io) {
    return {io.scores, io.lse, io.hidden, io.cu_seqlens};
}

}  // namespace detail

}  // namespace kvpolicy
