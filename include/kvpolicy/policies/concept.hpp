// What a part of a policy is. A policy is a list of parts; each part says its kind and writes its numbers
// into the HeadParams of a head. A part of one's own needs nothing else.
#pragma once

#include <kvpolicy/policies/parameters.hpp>

#include <concepts>
#include <cstdint>

namespace kvpolicy {

/// The kinds of parts. A policy has at most one of each, except `keep`, of which it may have several.
enum class part_kind : std::uint8_t {
    sink,       ///< the first keys never leave
    window,     ///< the most recent keys are always visible
    keep,       ///< keys that never leave, by position: bool keeps(position_t) const
    gate,       ///< admission at the window's edge: bool open(float score, const HeadParams&) const
    budget,     ///< eviction: the k best eligible keys
    decay,      ///< how scores age
    scorer,     ///< where scores come from
    eviction,   ///< after the write, over all heads of a sequence
    selection,  ///< at the read: which pages of rows a query reads
};

/// A part that writes numbers: Sink, Window, budgets, Decay, and gates with a threshold. A part that reads
/// arrays may have `void check_values(int layers, int heads) const`, which refuses arrays of another shape
/// (PerHead::check), and `void check_layer(int layer, int heads) const`, which refuses numbers that the heads
/// of a layer cannot have together. A decay part whose step is 1 for all heads may say `static constexpr bool
/// static_order = true`; a budget part that the heads of a layer share, `static constexpr bool
/// shared_by_heads = true`.
template <class P>
concept RulePart = requires(const P& part, HeadParams& head_params, std::int32_t layer, std::int32_t head) {
    { P::kind } -> std::convertible_to<part_kind>;
    {part.write(head_params, layer, head)};
};

/// An admission gate: says from a key's score (a raw logit) whether it is kept when it leaves the window.
template <class P>
concept Gate = RulePart<P> && P::kind ==
               part_kind::gate&& requires(const P& part, float score, const HeadParams& head_params) {
    { part.open(score, head_params) } -> std::same_as<bool>;
};

/// Which pages of rows a decoded token reads: page_size() rows each, pages.at(layer, head) of them, by bounds
/// that `aggregate` joins over the query heads of a KV head (policies/selection.hpp).
template <class P>
concept SelectionPart = P::kind == part_kind::selection&& requires(const P& part, std::int32_t at) {
    { part.page_size() } -> std::same_as<std::int32_t>;
    { part.pages.at(at, at) } -> std::convertible_to<std::int32_t>;
    { part.aggregate } -> std::convertible_to<group_aggregate>;
};

/// What a sequence drops when all its heads together hold too much (policies/eviction.hpp).
template <class P>
concept EvictionPart = P::kind == part_kind::eviction&& requires(const P& part) {
    { part.average } -> std::convertible_to<std::int64_t>;
    { part.share } -> std::convertible_to<float>;
    { part.observing } -> std::convertible_to<std::int32_t>;
    { part.pool } -> std::convertible_to<std::int32_t>;
    { part.aggregate } -> std::convertible_to<group_aggregate>;
};

/// Keys that never leave because of where they stand (every 16th, say).
template <class P>
concept KeepPart = P::kind == part_kind::keep&& requires(const P& part, position_t position) {
    { part.keeps(position) } -> std::same_as<bool>;
};

}  // namespace kvpolicy
