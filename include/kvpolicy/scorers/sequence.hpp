// Scores of whole sequences: prefill, masks and training score many tokens at once.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/dropout.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// How a stateful scorer goes through a sequence.
enum class form : std::uint8_t {
    fastest,    ///< chunkwise for an mLSTMScorer, recurrent for any other scorer
    recurrent,  ///< absorb and read, token by token: the very scores of stepping, bit for bit
    chunkwise,  ///< matrix products over chunks of scorer_block tokens: the same scores to rounding
};

/// Options of score_sequence. Real is compute_t of the rows' type: float, double for double.
template <class Real>
struct BasicScoreOptions {
    form how = form::fastest;
    /// States of a stateful scorer [B, Hkv, state_size()], read where sequences.starts[b] > 0 and
    /// written at the end: after the last token of each sequence (of its last packed segment). Null
    /// where they are not needed.
    Real* states = nullptr;
    /// For training a scorer that has it (ConvScorer); a rate above 0 is refused for others.
    Dropout dropout{};
    /// A backward pass of the same tokens follows, with the same workspace, which stays untouched until then:
    /// score_sequence_backward with `kept` then starts from the results that this call leaves there (an
    /// mLSTMScorer's features, gates and states on CUDA; none elsewhere). The workspace needs more
    /// (score_sequence_workspace_bytes says so), as much as the backward pass.
    bool for_backward = false;
    /// [B], OR-ed into: status_bad_length, for a length that then counts as 0. Null: not wanted; the host
    /// refuses such a length.
    std::uint32_t* status = nullptr;
};
using ScoreOptions = BasicScoreOptions<float>;

/// Bytes of workspace that score_sequence needs for a call with the same arguments. Depends on the
/// threads of `ctx`.
template <class Widths = all_mlstm_widths, Scorer S, class K, class V>
std::size_t score_sequence_workspace_bytes(const host& ctx, const S& scorer, rows_view<K> k, rows_view<V> v,
                                           const Sequences& sequences,
                                           const BasicScoreOptions<real_of<K>>& options = {});

/// Scores the keys of sequences. k [B, Hkv, S, Dk] and v [B, Hkv, S, Dv] are as they are cached (keys after
/// RoPE), of any Storage type, the same for both; scores [B, Hkv, S] are fp32 (double for double).
///
/// A stateless scorer writes scores[b][h][t] for every t < length of the sequence; `delay` is not used. A
/// stateful one absorbs token after token, and right after token q it reads token t = q - delay (the window's
/// w for KVpop; 0 reads each token as it comes): scores[b][h][t] is written where t + delay < length. **Other
/// entries are not written**: the entry of a key that does not leave its window keeps its old value, and must
/// not be read. A scorer that reads neighbors (ConvScorer) writes the same scores, for a window of `delay`
/// keys, and -infinity to the entries of the last `delay` keys, which have no score; a delay of its reach
/// scores every key that has all its later neighbors. With cu_seqlens the state is empty at each segment's
/// start, where positions count from 0 again, and t and t + delay are of one segment.
///
/// Continued sequences: with starts[b] = s > 0 the call brings tokens s .. s + length - 1 of sequence b, in
/// rows of the same numbers; the rows before s are tokens of earlier calls. A stateless scorer does not
/// touch those. A stateful one takes up options.states, where an earlier call left it, and reads the last
/// `delay` of them as they leave; one that reads neighbors reads the last delay + reach. starts and
/// cu_seqlens do not go together.
///
/// Synchronous, on the threads of `ctx`; scores depend neither on their number nor on the instruction set. A
/// NaN in an input makes every score NaN that depends on it: the token's own, those read after a stateful
/// scorer absorbed it, those of its neighbors. Such inputs are not refused here. Refuses, before anything is
/// written: views that disagree, lengths below 0 or over S, a scorer that does not fit (check()), a delay
/// below 0 (below reach where neighbors are read), starts > 0 without states, a form or dropout that the
/// scorer lacks, too little workspace.
template <class Widths = all_mlstm_widths, Scorer S, class K, class V>
void score_sequence(const host& ctx, const S& scorer, rows_view<K> k, rows_view<V> v,
                    const Sequences& sequences, std::int32_t delay, plane_view<real_of<K>> scores,
                    workspace_view workspace, const BasicScoreOptions<real_of<K>>& options = {});

/// The k of a cache whose scorer has a state, such that it takes no more memory than a cache of `budget` keys
/// whose scorer has none (KVpop, section 4, compares so): per (sequence, KV head), state_bytes are taken off
/// `budget` rows of row_bytes (keys, values, and the other bytes that a cache stores per entry), rounded
/// against the stateful scorer. `unlimited` stays so. Refuses a state that is larger than the budget.
std::int32_t budget_matching_state(std::int32_t budget, std::size_t state_bytes, std::size_t row_bytes);

/// The same for a scorer whose state is fp32.
template <StatefulScorer S>
std::int32_t budget_matching_state(std::int32_t budget, const S& scorer, std::size_t row_bytes) {
    return budget_matching_state(budget, scorer.state_size() * sizeof(float), row_bytes);
}

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_sequence.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/scorers/cuda_sequence.cuh>
#endif
