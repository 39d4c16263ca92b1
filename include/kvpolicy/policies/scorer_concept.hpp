// What a scorer is: a value (sizes, and views of weights that the caller keeps) that gives a key a raw logit.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/concept.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// How a policy that ranks keys by the attention they receive looks at a block of queries, and when
/// it evicts. A block is one decoded token, or the part of a prompt that is attended to before
/// anything is evicted.
struct Observation {
    std::int32_t queries =
        unlimited;           ///< the block's last so many queries count; 0: as many as the head's window
    bool accumulate = true;  ///< add to what a key had received before; false: forget that
    group_aggregate aggregate = group_aggregate::mean;  ///< how a query's G heads become one number
    bool whole_layer = false;   ///< mean over the layer's KV heads, so that all of them keep the same keys
    std::int32_t pool = 1;      ///< keys of the pooling that precedes a choice, odd; 1: none
    bool pool_largest = false;  ///< the pool's largest number instead of its mean
    std::int32_t chunk = whole_call;  ///< a prompt's block: so many tokens, or all that a call brings

    /// ObservedPrefill::dense_then_prune(): a call's prompt is one block.
    static constexpr std::int32_t whole_call = 0;
};

/// When a key's score is known.
enum class score_time : std::uint8_t {
    given,        ///< the caller brings it with the key (injected scores, predictors on hidden states)
    on_arrival,   ///< from the key and value alone; stored with the row
    from_hidden,  ///< from the hidden state that the caller brings with the token, for all heads at once
    in_window,    ///< between two ages, from the key's neighbors: once the later ones have come, while the
                  ///< earlier are stored
    on_leaving,   ///< when the key leaves the window, from a state that has absorbed all tokens up to then
    observed,     ///< from the attention that the key has received so far: anew after every query
                  ///< (scorers/observed.hpp)
};

/// Scores come from the caller, with each key, as a plane [B, Hkv, S]. The scorer of a ranked policy
/// that names none.
struct GivenScores {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::given;
};

/// Whether a key's score comes with its token, rather than from what a cache holds.
template <class S>
inline constexpr bool scores_come_along = S::when == score_time::given || S::when == score_time::from_hidden;

/// A stateless scorer: float score(head, key, value, scratch) const, with key[Dk], value[Dv] as fp32
/// (cached values, so keys after RoPE) and scratch of scratch_size() floats. Called from several threads at
/// once. One scorer object serves one layer. A scorer with bodies for several instruction sets takes the
/// context's as one more argument, an isa with a default; so do absorb and read of a stateful one. One that
/// depends on the token's position takes that after the isa, a position_t with a default; score_block takes
/// the first token's.
template <class S>
concept StatelessScorer = S::when == score_time::on_arrival&& requires(const S& scorer, std::int32_t head,
                                                                       const float* key, const float* value,
                                                                       float* scratch) {
    { scorer.score(head, key, value, scratch) } -> std::convertible_to<float>;
    { scorer.scratch_size() } -> std::convertible_to<std::size_t>;
};

/// A scorer with a state per (sequence, head) of state_size() floats: reset(state); absorb(head, state, key,
/// value, scratch) takes in token q; read(head, state, key, value, scratch) scores the key that leaves at q.
template <class S>
concept StatefulScorer = S::when == score_time::on_leaving&& requires(const S& scorer, std::int32_t head,
                                                                      const float* key, const float* value,
                                                                      float* state, const float* same_state,
                                                                      float* scratch) {
    { scorer.state_size() } -> std::convertible_to<std::size_t>;
    { scorer.scratch_size() } -> std::convertible_to<std::size_t>;
    {scorer.reset(state)};
    {scorer.absorb(head, state, key, value, scratch)};
    { scorer.read(head, same_state, key, value, scratch) } -> std::convertible_to<float>;
};

/// A scorer that reads the `reach` >= 1 tokens before and after a key, from the window that holds them all:
/// so w >= 2 reach + 1. score_span(head, first, count, keys, values, scores, scratch, isa) scores tokens
/// first .. first + count - 1 of a sequence, count <= scorer_block, from the rows of tokens first - reach ..
/// first + count - 1 + reach, without gaps; those of tokens before 0 hold anything. scratch has
/// span_scratch_size() numbers. However a range is cut, the scores must be the same bits. A cache scores
/// tokens m L .. (m + 1) L - 1 in the step that brings token (m + 1) L - 1 + reach, with L =
/// tokens_at_once(w) between 1 and w - 2 reach.
template <class S>
concept ContextScorer = S::when == score_time::in_window&& requires(const S& scorer, std::int32_t head,
                                                                    position_t first, std::int32_t count,
                                                                    const float* keys, const float* values,
                                                                    float* scores, float* scratch, isa set) {
    { S::reach } -> std::convertible_to<std::int32_t>;
    requires(S::reach >= 1);
    { scorer.tokens_at_once(count) } -> std::convertible_to<std::int32_t>;
    { scorer.span_scratch_size() } -> std::convertible_to<std::size_t>;
    {scorer.score_span(head, first, count, keys, values, scores, scratch, set)};
};

/// A scorer of hidden states: score_tokens(count, states, scores, head_stride, scratch, isa) scores all heads
/// of count <= scorer_block tokens from states [count, hidden_width()] without gaps, into scores[h *
/// head_stride + t], with block_scratch_size() numbers of scratch.
template <class S>
concept HiddenScorer = S::when == score_time::from_hidden&& requires(const S& scorer, std::int32_t count,
                                                                     const float* states, float* scores,
                                                                     std::int64_t stride, float* scratch,
                                                                     isa set) {
    { scorer.hidden_width() } -> std::convertible_to<std::int32_t>;
    { scorer.block_scratch_size() } -> std::convertible_to<std::size_t>;
    {scorer.score_tokens(count, states, scores, stride, scratch, set)};
};

/// A scorer that reads attention weights only. `Observation observation() const` says which weights it needs.
/// `static constexpr bool evicts_at_steps` says whether decoded tokens evict (H2O, TOVA), or only the end of
/// a prompt's block does and decoded tokens stay (SnapKV).
template <class S>
concept ObservedScorer = S::when == score_time::observed&& requires(const S& scorer) {
    { scorer.observation() } -> std::same_as<Observation>;
    { S::evicts_at_steps } -> std::convertible_to<bool>;
};

/// A stateless scorer that also scores `count` <= scorer_block tokens at a time: keys [count, Dk] and values
/// [count, Dv] in rows without gaps, scores [count], scratch of block_scratch_size() numbers. Optional:
/// score_sequence uses it where it is there, and the scores must equal score()'s bit for bit. Both pointers'
/// types are float, or double for checks.
template <class S>
concept BlockScorer = StatelessScorer<S> &&
    requires(const S& scorer, std::int32_t head, std::int32_t count, const float* keys, const float* values,
             float* scores, float* scratch, isa set) {
    { scorer.block_scratch_size() } -> std::convertible_to<std::size_t>;
    {scorer.score_block(head, count, keys, values, scores, scratch, set)};
};

/// The most tokens that score_block is given at once, and the chunk of a chunkwise pass.
inline constexpr std::int32_t scorer_block = 64;

/// A scorer that can say what is wrong with it: check(heads, head_dim_qk, head_dim_vo) refuses missing
/// weights and widths that do not fit the keys and values of a layer. Optional: sequence calls and caches
/// call it where it is there, so that score, absorb and read need not check.
template <class S>
concept CheckedScorer = requires(const S& scorer, std::int32_t heads, std::int32_t head_dim_qk,
                                 std::int32_t head_dim_vo) {
    {scorer.check(heads, head_dim_qk, head_dim_vo)};
};

template <class S>
concept Scorer = S::kind == part_kind::scorer &&
                 (S::when == score_time::given || StatelessScorer<S> || StatefulScorer<S> ||
                  ContextScorer<S> || HiddenScorer<S> || ObservedScorer<S>);

static_assert(Scorer<GivenScores>);

}  // namespace kvpolicy
