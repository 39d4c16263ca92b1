// A policy is a type: a list of parts, composed. expiry = max(sink, keep, window, min(gate, budget)).
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/concept.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cmath>
#include <string>
#include <tuple>
#include <type_traits>

namespace kvpolicy {

namespace detail {

template <class P>
concept has_kind = requires {
    { P::kind } -> std::convertible_to<part_kind>;
};

template <part_kind Kind, class... Parts>
inline constexpr int count_of = (0 + ... + (Parts::kind == Kind ? 1 : 0));

/// The part of a kind, or Default where the policy has none.
template <part_kind Kind, class Default, class... Parts>
struct part_of {
    using type = Default;
};
template <part_kind Kind, class Default, class First, class... Rest>
struct part_of<Kind, Default, First, Rest...> {
    using type = typename std::conditional_t<First::kind == Kind, std::type_identity<First>,
                                             part_of<Kind, Default, Rest...>>::type;
};

/// Whether a part may order keys by the query: a decay, unless it says that its order is static.
template <class P>
constexpr bool orders_by_query() {
    if constexpr (requires { P::static_order; }) {
        return !P::static_order;
    } else {
        return P::kind == part_kind::decay;
    }
}

/// Whether a part's budget is one for all heads of a layer.
template <class P>
constexpr bool shares_budget() {
    if constexpr (requires { P::shared_by_heads; }) {
        return P::kind == part_kind::budget && P::shared_by_heads;
    } else {
        return false;
    }
}

/// A gate that is always open, for policies without one.
struct no_gate {
    static constexpr part_kind kind = part_kind::gate;
    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams&, std::int32_t, std::int32_t) const {}
    KVPOLICY_HOST_DEVICE constexpr bool open(float, const HeadParams&) const { return true; }
};

/// Whether a scorer leaves what is decoded alone.
template <class S>
constexpr bool keeps_decoded() {
    if constexpr (ObservedScorer<S>) {
        return !S::evicts_at_steps;
    } else {
        return false;
    }
}

/// For policies that read everything, and for those that leave what is written.
struct no_selection {
    static constexpr part_kind kind = part_kind::selection;
    KVPOLICY_HOST_DEVICE constexpr std::int32_t page_size() const { return 1; }
};
struct no_eviction {
    static constexpr part_kind kind = part_kind::eviction;
};

/// Says which member a scorer lacks; the concepts of policies/scorer_concept.hpp only say that one does.
template <class S>
constexpr bool has_scorer_members() {
    constexpr auto when = S::when;
    if constexpr (when == score_time::on_arrival) {
        static_assert(
            requires(const S& scorer, const float* in, float* scratch) {
                { scorer.score(0, in, in, scratch) } -> std::convertible_to<float>;
            },
            "kvpolicy: a scorer on arrival needs `float score(int head, const float* key, const float* "
            "value, float* scratch) const`");
    }
    if constexpr (when == score_time::on_arrival || when == score_time::on_leaving) {
        static_assert(
            requires(const S& scorer) {
                { scorer.scratch_size() } -> std::convertible_to<std::size_t>;
            },
            "kvpolicy: a scorer on arrival or on leaving needs `size_t scratch_size() const`");
    }
    if constexpr (when == score_time::on_leaving) {
        static_assert(
            requires(const S& scorer) {
                { scorer.state_size() } -> std::convertible_to<std::size_t>;
            },
            "kvpolicy: a scorer on leaving needs `size_t state_size() const`");
        static_assert(
            requires(const S& scorer, float* state) { scorer.reset(state); },
            "kvpolicy: a scorer on leaving needs `void reset(float* state) const`");
        static_assert(
            requires(const S& scorer, const float* in, float* state) {
                scorer.absorb(0, state, in, in, state);
            },
            "kvpolicy: a scorer on leaving needs `void absorb(int head, float* state, const float* key, "
            "const float* value, float* scratch) const`");
        static_assert(
            requires(const S& scorer, const float* in, float* scratch) {
                { scorer.read(0, in, in, in, scratch) } -> std::convertible_to<float>;
            },
            "kvpolicy: a scorer on leaving needs `float read(int head, const float* state, const float* "
            "key, const float* value, float* scratch) const`");
    }
    if constexpr (when == score_time::in_window) {
        static_assert(
            requires {
                { S::reach } -> std::convertible_to<std::int32_t>;
            },
            "kvpolicy: a scorer in the window needs `static constexpr int reach`, at least 1");
        static_assert(
            requires(const S& scorer) {
                scorer.tokens_at_once(1);
                scorer.span_scratch_size();
            },
            "kvpolicy: a scorer in the window needs `int tokens_at_once(int window) const` and `size_t "
            "span_scratch_size() const`");
    }
    if constexpr (when == score_time::from_hidden) {
        static_assert(
            requires(const S& scorer) {
                scorer.hidden_width();
                scorer.block_scratch_size();
            },
            "kvpolicy: a scorer of hidden states needs `int hidden_width() const` and `size_t "
            "block_scratch_size() const`");
    }
    return true;
}

/// Keep parts as one plain value, for kernels and the refs of caches.
template <class... Parts>
struct keep_set {
    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t) const { return false; }
};
// An error of nvcc's in here: a part's keeps() lacks KVPOLICY_HOST_DEVICE. By itself nvcc warns, and a
// kernel's answer is anything.
#if defined(__NVCC__) && defined(__CUDACC__)
#pragma nv_diagnostic push
#pragma nv_diag_error 20011, 20013, 20014, 20015
#endif
template <class First, class... Rest>
struct keep_set<First, Rest...> {
    First first;
    keep_set<Rest...> rest;
    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t t) const { return first.keeps(t) || rest.keeps(t); }
};
#if defined(__NVCC__) && defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif

constexpr keep_set<> make_keep_set() { return {}; }
template <class First, class... Rest>
constexpr auto make_keep_set(const First& first, const Rest&... rest) {
    if constexpr (KeepPart<First>) {
        const auto set = [&]<class... Kept>(const keep_set<Kept...>& others) {
            return keep_set<First, Kept...>{first, others};
        };
        return set(make_keep_set(rest...));
    } else {
        return make_keep_set(rest...);
    }
}

}  // namespace detail

/// A KV-cache policy: `Policy<Sink<4>, Window<256>, TopKBudget<3836>, mLSTMScorer<128>>`. Parts in any order,
/// at most one of a kind (keep parts: several). A policy of fixed parts needs no argument; otherwise all its
/// parts are given to the constructor. A policy with a budget or a gate and no scorer takes scores from its
/// caller (GivenScores).
///
/// Lifetimes, for KV head h (docs/concepts.md): sinks and kept keys never expire; every key is visible for w
/// queries; a key that leaves the window with its gate open competes for the top-k slots of its head or,
/// with a SharedBudget, of its layer. Without gate and budget a key expires with its window (StreamingLLM).
template <class... Parts>
class Policy {
    template <part_kind Kind>
    static constexpr auto count = detail::count_of<Kind, Parts...>;

    static_assert((detail::has_kind<Parts> && ...),
                  "kvpolicy: every part of a Policy needs `static constexpr kvpolicy::part_kind kind`");
    static_assert(count<part_kind::sink> <= 1, "kvpolicy: a Policy has at most one Sink");
    static_assert(count<part_kind::window> <= 1, "kvpolicy: a Policy has at most one Window");
    static_assert(count<part_kind::gate> <= 1, "kvpolicy: a Policy has at most one gate");
    static_assert(count<part_kind::budget> <= 1, "kvpolicy: a Policy has at most one budget");
    static_assert(count<part_kind::decay> <= 1, "kvpolicy: a Policy has at most one Decay");
    static_assert(count<part_kind::scorer> <= 1, "kvpolicy: a Policy has at most one scorer");
    static_assert(count<part_kind::eviction> <= 1, "kvpolicy: a Policy has at most one eviction part");
    static_assert(count<part_kind::selection> <= 1, "kvpolicy: a Policy has at most one selection part");
    static_assert(count<part_kind::scorer> == 0 || count<part_kind::budget> + count<part_kind::gate> > 0,
                  "kvpolicy: a scorer ranks keys for a TopKBudget or a gate, and this Policy has neither");

  public:
    static constexpr bool has_gate = count<part_kind::gate> == 1;
    static constexpr bool has_budget = count<part_kind::budget> == 1;
    static constexpr bool has_decay = count<part_kind::decay> == 1;
    /// Whether the budget is one for all KV heads of a layer. The operations and caches that decide head by
    /// head refuse such a policy.
    static constexpr bool shares_budget = (false || ... || detail::shares_budget<Parts>());
    /// Whether the order of keys may depend on the query: with decay steps above 1, and where keys of heads
    /// with different decays are compared.
    static constexpr bool ranks_by_query =
        (false || ... || detail::orders_by_query<Parts>()) || (shares_budget && has_decay);
    static constexpr bool has_keep = count<part_kind::keep> > 0;
    /// Whether a key's fate depends on its score.
    static constexpr bool ranked = has_gate || has_budget;

    static constexpr bool has_eviction = count<part_kind::eviction> == 1;
    static constexpr bool has_selection = count<part_kind::selection> == 1;

    using eviction_type = typename detail::part_of<part_kind::eviction, detail::no_eviction, Parts...>::type;
    using selection_type =
        typename detail::part_of<part_kind::selection, detail::no_selection, Parts...>::type;
    using gate_type = typename detail::part_of<part_kind::gate, detail::no_gate, Parts...>::type;
    using scorer_type = typename detail::part_of<part_kind::scorer, GivenScores, Parts...>::type;
    using keep_type = decltype(detail::make_keep_set(std::declval<const Parts&>()...));
    /// Whether keys are ranked by the attention that they receive (scorers/observed.hpp).
    static constexpr bool observed = ObservedScorer<scorer_type>;
    /// Whether decoded tokens stay although there is a budget: nothing bounds such a policy's rows.
    static constexpr bool grows = detail::keeps_decoded<scorer_type>();
    static_assert(!observed || (has_budget && !has_gate && !has_decay && !has_keep),
                  "kvpolicy: a policy that ranks keys by the attention they receive takes a TopKBudget, and "
                  "no gate, decay "
                  "or keep part");
    static_assert(!shares_budget || (!observed && !has_eviction),
                  "kvpolicy: a budget that the heads of a layer share compares scores of keys and bounds a "
                  "layer already: no scorer of received attention and no eviction part");
    static_assert(Gate<gate_type>,
                  "kvpolicy: a gate needs `bool open(float score, const HeadParams&) const` and `void "
                  "write(HeadParams&, "
                  "int layer, int head) const`");
    static_assert(((Parts::kind == part_kind::keep || Parts::kind == part_kind::scorer ||
                    Parts::kind == part_kind::eviction || Parts::kind == part_kind::selection ||
                    RulePart<Parts>)&&...),
                  "kvpolicy: a part of this kind needs `void write(HeadParams&, int layer, int head) const`");
    static_assert(((Parts::kind != part_kind::eviction || EvictionPart<Parts>)&&...),
                  "kvpolicy: an eviction part needs average, share, observing, pool and aggregate");
    static_assert(
        ((Parts::kind != part_kind::selection || SelectionPart<Parts>)&&...),
        "kvpolicy: a selection part needs `page_size()`, `pages` by layer and head, and `aggregate`");
    static_assert(!observed || (!has_eviction && !has_selection),
                  "kvpolicy: a policy that ranks keys by the attention they receive evicts already, and must "
                  "read all keys: no "
                  "eviction and no selection part");
    static_assert(((Parts::kind != part_kind::keep || KeepPart<Parts>)&&...),
                  "kvpolicy: a keep part needs `bool keeps(position_t) const`");
    static_assert(detail::has_scorer_members<scorer_type>());
    static_assert(
        Scorer<scorer_type>,
        "kvpolicy: a scorer needs `kind = part_kind::scorer`, `when`, and either `score(head, key, "
        "value)`, or state_size, reset, absorb and read, or score_span for one that reads neighbors, or "
        "observation and evicts_at_steps");

    /// A policy whose parts are all fixed (or whose run-time parts keep their defaults).
    constexpr Policy() = default;
    /// A policy from its parts, in the order of the type.
    constexpr explicit Policy(Parts... parts) requires(sizeof...(Parts) > 0) : parts_(parts...) {}

    /// The numbers for one KV head. Not checked: check() does that once, where a policy meets a shape.
    constexpr HeadParams params(std::int32_t layer, std::int32_t head) const {
        HeadParams head_params;
        std::apply([&](const auto&... part) { (write_part(part, head_params, layer, head), ...); }, parts_);
        if (has_gate && !has_budget) {
            head_params.budget = unlimited;
        }
        return head_params;
    }

    /// The top-k slots that the heads of a layer share: the sum of their budgets.
    constexpr std::int64_t shared_slots(std::int32_t layer, std::int32_t heads) const
        requires(shares_budget) {
        std::int64_t sum = 0;
        for (std::int32_t head = 0; head < heads; ++head) {
            sum += params(layer, head).budget;
        }
        return sum;
    }

    /// Whether the order of the keys of all heads of a layer is static: one log gamma, and decay step 1 (or
    /// no decay). Otherwise keys are compared at each query, and candidates with the keys that hold slots
    /// alone.
    constexpr bool has_static_shared_order(std::int32_t layer, std::int32_t heads) const
        requires(shares_budget) {
        const float log_gamma = params(layer, 0).log_gamma;
        for (std::int32_t head = 0; head < heads; ++head) {
            const HeadParams head_params = params(layer, head);
            if (head_params.log_gamma != log_gamma || (log_gamma != 0.0f && head_params.decay_step != 1)) {
                return false;
            }
        }
        return true;
    }

    constexpr gate_type gate() const { return part_or_default<gate_type>(); }
    constexpr eviction_type eviction() const { return part_or_default<eviction_type>(); }
    constexpr selection_type selection() const { return part_or_default<selection_type>(); }
    constexpr scorer_type scorer() const { return part_or_default<scorer_type>(); }

    /// The keep parts alone, as a value that may go to a kernel (a tuple may not).
    constexpr keep_type keep() const {
        return std::apply([](const auto&... part) { return detail::make_keep_set(part...); }, parts_);
    }

    /// Whether a keep part holds position t for good.
    constexpr bool keeps(position_t t) const {
        return std::apply([&](const auto&... part) { return (false || ... || part_keeps(part, t)); }, parts_);
    }

    /// Calls visit(part) for every part, in the order of the type.
    template <class Visit>
    constexpr void for_each_part(Visit&& visit) const {
        std::apply([&](const auto&... part) { (visit(part), ...); }, parts_);
    }

    /// Refuses numbers that no policy can have, naming layer and head, and arrays that do not
    /// cover the heads.
    void check(std::int32_t layers, std::int32_t heads) const {
        std::apply([&](const auto&... part) { (check_values(part, layers, heads), ...); }, parts_);
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            check_layer(layer, heads);
        }
    }

    /// The same for the heads of one layer.
    void check_layer(std::int32_t layer, std::int32_t heads) const {
        detail::require(layer >= 0 && layer < never, "layer", layer, "0 or more, and below 2^31 - 1");
        std::apply([&](const auto&... part) { (check_values(part, layer + 1, heads), ...); }, parts_);
        for (std::int32_t head = 0; head < heads; ++head) {
            check(params(layer, head), layer, head);
        }
        std::apply([&](const auto&... part) { (check_heads(part, layer, heads), ...); }, parts_);
    }

  private:
    /// The part of that type, or the default that stands for a kind that the policy does not have.
    template <class Part>
    constexpr Part part_or_default() const {
        if constexpr ((std::is_same_v<Part, Parts> || ...)) {
            return std::get<Part>(parts_);
        } else {
            return {};
        }
    }

    template <class Part>
    static constexpr void write_part(const Part& part, HeadParams& head_params, std::int32_t layer,
                                     std::int32_t head) {
        if constexpr (RulePart<Part>) {
            part.write(head_params, layer, head);
        }
    }
    template <class Part>
    static void check_values(const Part& part, std::int32_t layers, std::int32_t heads) {
        if constexpr (requires { part.check_values(layers, heads); }) {
            part.check_values(layers, heads);
        }
    }
    template <class Part>
    static void check_heads(const Part& part, std::int32_t layer, std::int32_t heads) {
        if constexpr (requires { part.check_layer(layer, heads); }) {
            part.check_layer(layer, heads);
        }
    }
    template <class Part>
    static constexpr bool part_keeps(const Part& part, position_t t) {
        if constexpr (KeepPart<Part>) {
            return part.keeps(t);
        } else {
            return false;
        }
    }

    static void check(const HeadParams& head_params, std::int32_t layer, std::int32_t head) {
        // The text is made only where it is needed: a mask is checked at every call.
        const auto require = [&](bool condition, const char* argument, auto value, const char* allowed) {
            if (condition) [[likely]] {
                return;
            }
            const std::string name = detail::text(argument, " of layer ", layer, ", head ", head);
            detail::refuse(name.c_str(), value, allowed);
        };
        require(head_params.sinks >= 0, "sinks", head_params.sinks, "0 or more");
        require(head_params.window >= 1, "window", head_params.window,
                "1 or more, since a query sees itself");
        require(head_params.budget >= 0, "budget k", head_params.budget, "0 or more, or kvpolicy::unlimited");
        require(head_params.decay_step >= 1, "decay step n", head_params.decay_step, "1 or more");
        require(head_params.log_gamma <= 0.0f && std::isfinite(head_params.log_gamma), "log gamma",
                head_params.log_gamma, "finite and at most 0 (0 < gamma <= 1)");
        require(head_params.threshold == head_params.threshold, "tau", head_params.threshold, "a number");
        if constexpr (ranked && scorer_type::when == score_time::in_window) {
            constexpr std::int32_t least = 2 * scorer_type::reach + 1;
            if (head_params.window < least) [[unlikely]] {
                detail::refuse(detail::text("window of layer ", layer, ", head ", head).c_str(),
                               head_params.window,
                               detail::text(least, " or more, since the scorer reads ", scorer_type::reach,
                                            " keys on either side of a key while the window holds them"));
            }
        }
    }

    // Each by itself: g++ 12 clears a part of the tuple's default behind some empty ones.
    std::tuple<Parts...> parts_{Parts{}...};
};

namespace detail {
template <class T>
inline constexpr bool is_policy = false;
template <class... Parts>
inline constexpr bool is_policy<Policy<Parts...>> = true;
}  // namespace detail

/// Anything made by Policy<...>.
template <class P>
concept AnyPolicy = detail::is_policy<P>;

/// k for a total budget B = s + w + k (KVpop, eq. 1). Refuses B < s + w, and a k that 31 bits do not hold.
inline std::int32_t budget_for_total(std::int64_t total, std::int32_t sinks, std::int32_t window) {
    detail::require(sinks >= 0, "sinks", sinks, "0 or more");
    detail::require(window >= 1, "window", window, "1 or more, since a query sees itself");
    const std::int64_t least = std::int64_t{sinks} + window;
    detail::require(total >= least, "total budget", total,
                    [&] { return detail::text("at least sinks + window = ", least); });
    detail::require(total - least < unlimited, "total budget", total,
                    [&] { return detail::text("below sinks + window + 2^31 - 1 = ", least + unlimited); });
    return static_cast<std::int32_t>(total - least);
}

}  // namespace kvpolicy
