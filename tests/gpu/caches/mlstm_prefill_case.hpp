// Prompts into caches with an mLSTMScorer, in chunks of many tokens. Scores in the entries, and states, are
// near the host's in double, by the tolerance of score_sequence. A prompt in one chunk has the bits of
// score_sequence on the same device, and keeps the keys that a cache with those scores given keeps.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/bound_cache.hpp"
#include "../scorers/mlstm_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mlstm_test {

using PromptDims = head_dims<64>;
using Lengths = std::vector<std::int32_t>;
using Given = Policy<Sink<>, Window<>, TopKBudget<>>;
template <class S>
using Scored = Policy<Sink<>, Window<>, TopKBudget<>, S>;

/// Of the two KV heads: their keys leave at different times.
inline constexpr std::int32_t prompt_heads = 2, prompt_sinks[] = {0, 3}, prompt_windows[] = {7, 40},
                              max_drafts = 6, max_prompt = 5100;

/// As for states that score_sequence takes up and leaves (../scorers).
template <class T>
double state_tolerance() {
    return std::is_same_v<T, float> ? 1e-4 : 1e-2;
}

template <class P, class S>
P prompt_policy(const std::int32_t* budgets, const S& scorer) {
    const auto of_heads = [](const std::int32_t* numbers) { return per_head(numbers, 1, prompt_heads); };
    const Sink<> sinks{of_heads(prompt_sinks)};
    const Window<> window{of_heads(prompt_windows)};
    const TopKBudget<> budget{of_heads(budgets)};
    if constexpr (std::is_same_v<P, Given>) {
        return P{sinks, window, budget};
    } else {
        return P{sinks, window, budget, scorer};
    }
}

/// A part of some prompts, each from a token of its own on: [count, length, heads, dim], with a gap after
/// every row. Rows without a token, and gaps, are NaN.
template <class T>
struct PromptChunk {
    std::int32_t count, length;
    Lengths q_len;
    Device<T> k, v, out;
    Device<std::int32_t> device_len;
    Device<float> scores;  // [count, heads, length]

    PromptChunk(const Case& c, const Inputs<T>& in, const Lengths& from, Lengths lengths, std::int32_t most,
                const std::vector<float>& all_scores = {})
        : count(c.batch),
          length(most),
          q_len(std::move(lengths)),
          k(rows(c, in.k, c.head_dim_qk, from)),
          v(rows(c, in.v, c.head_dim_vo, from)),
          out(static_cast<std::size_t>(count) * prompt_heads *
              static_cast<std::size_t>(length * c.head_dim_vo)),
          device_len(q_len),
          scores(plane(c, all_scores, from)) {}

    [[nodiscard]] rows_view<const T> view(const Device<T>& of, std::int32_t dim) const {
        const std::int64_t row = dim + gap;
        return {of.data(),         count, prompt_heads, length, dim, row * prompt_heads * length, row,
                row * prompt_heads};
    }

  private:
    static constexpr std::int32_t gap = 8;
    template <class Body>
    void each_token(const Case& c, const Lengths& from, const Body& body) const {
        for (std::int32_t i = 0; i < count; ++i) {
            for (std::int32_t h = 0; h < prompt_heads; ++h) {
                for (std::int32_t j = 0; j < q_len[static_cast<std::size_t>(i)]; ++j) {
                    body(i, h, j,
                         static_cast<std::size_t>((i * prompt_heads + h) * c.length +
                                                  from[static_cast<std::size_t>(i)] + j));
                }
            }
        }
    }
    [[nodiscard]] std::vector<T> rows(const Case& c, const std::vector<double>& all, std::int32_t dim,
                                      const Lengths& from) const {
        std::vector<T> data(static_cast<std::size_t>(count * length * prompt_heads * (dim + gap)),
                            stored<T>(std::numeric_limits<double>::quiet_NaN()));
        each_token(c, from, [&](std::int32_t i, std::int32_t h, std::int32_t j, std::size_t token) {
            T* const to = data.data() + std::int64_t{(i * length + j) * prompt_heads + h} * (dim + gap);
            for (std::int32_t d = 0; d < dim; ++d) {
                to[d] = stored<T>(all[token * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)]);
            }
        });
        return data;
    }
    [[nodiscard]] std::vector<float> plane(const Case& c, const std::vector<float>& all,
                                           const Lengths& from) const {
        std::vector<float> data(static_cast<std::size_t>(count * prompt_heads * length),
                                std::numeric_limits<float>::quiet_NaN());
        if (!all.empty()) {
            each_token(c, from, [&](std::int32_t i, std::int32_t h, std::int32_t j, std::size_t token) {
                data[static_cast<std::size_t>((i * prompt_heads + h) * length + j)] = all[token];
            });
        }
        return data;
    }
};

enum class Kind { prefill, step, draft };
struct Call {
    Kind kind;
    Lengths q_len;
};

/// The entries of a head by position, with their scores.
using Entries = std::map<position_t, float>;

/// A cache of either kind on the device, whose unused memory is NaN.
template <class Cache>
class PromptCache {
    using P = std::decay_t<decltype(std::declval<Cache>().policy())>;
    using T = typename Cache::ref_type::value_type;
    static constexpr bool paged = Cache::ref_type::pooled;

  public:
    PromptCache(const Case& c, const P& policy, const typename P::scorer_type* on_device)
        : c_(c), cache_(make(c, policy, on_device)), memory_(cache_.bytes().total()) {
        poison(memory_);
        cache_.bind(ctx_, memory_.data(), memory_.size());
        if constexpr (paged) {
            slab_ = std::make_unique<Device<unsigned char>>(cache_.slab_bytes());
            poison(*slab_);
            cache_.add_slab(ctx_, slab_->data(), slab_->size());
        }
    }

    [[nodiscard]] std::size_t workspace_bytes(std::int32_t count, std::int32_t tokens) const {
        return kvpolicy::workspace_bytes<PromptDims>(ctx_, cache_.layer(0),
                                                     {.batch = count, .tokens = tokens});
    }
    /// Enqueues a call and advances; `in` is for sequences seq_ids.
    void enqueue(const kvpolicy::cuda& ctx, Kind kind, const PromptChunk<T>& in,
                 const Device<std::int32_t>& seq_ids, workspace_view workspace, std::uint32_t* status) {
        const Batch batch{in.count, seq_ids.data(), in.device_len.data(), in.length};
        const auto k = in.view(in.k, c_.head_dim_qk), v = in.view(in.v, c_.head_dim_vo);
        StepIO<T> io{.q = k,
                     .k = k,
                     .v = v,
                     .out = view_bhsd(in.out.data(), in.count, prompt_heads, in.length, c_.head_dim_vo),
                     .batch = batch};
        if constexpr (std::is_same_v<P, Given>) {
            io.scores = view_bhs<const float>(in.scores.data(), in.count, prompt_heads, in.length);
        }
        const auto layer = cache_.layer(0);
        const StepOptions options{.status = status};
        if (kind == Kind::prefill) {
            kvpolicy::prefill<PromptDims>(ctx, layer, io, workspace, options);
        } else if (kind == Kind::step) {
            kvpolicy::step<PromptDims>(ctx, layer, io, workspace, options);
        } else {
            kvpolicy::append_draft<PromptDims>(ctx, layer, io, workspace, options);
            kvpolicy::accept<PromptDims>(ctx, layer, batch, workspace, options);
        }
        cache_.advance(ctx, batch, options);
    }
    void call(Kind kind, const PromptChunk<T>& in, const Lengths& seq_ids) {
        const Device<std::int32_t> device_seq_ids(seq_ids);
        const std::vector<std::uint32_t> none(seq_ids.size(), 0);
        const Device<std::uint32_t> status(none);
        const Device<unsigned char> workspace(
            workspace_bytes(in.count, std::max(in.length, kind == Kind::draft ? max_drafts : 1)));
        poison(workspace);
        enqueue(ctx_, kind, in, device_seq_ids, workspace, status.data());
        CHECK(status.read() == none);
    }

    /// Entries and states of a sequence, by way of a snapshot: [heads] and [heads, state_size].
    std::pair<std::vector<Entries>, std::vector<float>> read(std::int32_t seq, const P& on_host,
                                                             const typename P::scorer_type* scorer) const {
        std::vector<unsigned char> blob(cache_.snapshot_bytes(ctx_, seq));
        cache_.snapshot(ctx_, seq, blob.data(), blob.size());
        const host ctx(1);
        test::BoundCache<P, T> copy(ctx, shape(c_, 1), on_host, scorer);
        copy.cache.restore(ctx, 0, blob.data(), blob.size());
        const auto layer = copy.cache.layer(0);
        std::vector<Entries> entries(prompt_heads);
        for (std::int32_t h = 0; h < prompt_heads; ++h) {
            const std::int64_t first = layer.first_row(0, h);
            for (std::int64_t r = first; r < first + layer.used(0, h); ++r) {
                entries[static_cast<std::size_t>(h)][layer.position[r]] = layer.score[r];
            }
        }
        return {entries, {layer.state, layer.state + prompt_heads * layer.state_size}};
    }

  private:
    static void poison(const Device<unsigned char>& memory) {
        test::ok(cudaMemset(memory.data(), 0xff, memory.bytes()));
    }
    static CacheShape shape(const Case& c, std::int32_t max_sequences) {
        return {.layers = 1,
                .max_sequences = max_sequences,
                .query_heads = prompt_heads,
                .kv_heads = prompt_heads,
                .head_dim_qk = c.head_dim_qk,
                .head_dim_vo = c.head_dim_vo,
                .page_size = 16,
                .max_draft_tokens = max_drafts};
    }
    static Cache make(const Case& c, const P& policy, const typename P::scorer_type* on_device) {
        const CacheShape of = shape(c, c.batch + 1);
        if constexpr (paged) {
            const std::int32_t pages = of.max_sequences * prompt_heads * (max_prompt / of.page_size + 2);
            return Cache(of, {.slab_pages = pages, .max_slabs = 1, .max_seq_len = max_prompt}, policy,
                         on_device);
        } else {
            return Cache(of, policy, on_device);
        }
    }

    const Case& c_;
    kvpolicy::cuda ctx_{};
    Cache cache_;
    Device<unsigned char> memory_;
    std::unique_ptr<Device<unsigned char>> slab_;
};

/// Scores of whole prompts [B, heads, S], each head's read with its own window, and the states after them
/// [B, heads, state_size]. Sinks and keys that stay in the window have the number `none`.
template <class Real>
struct PromptScores {
    std::vector<Real> scores, states;
};
/// run(delay, scores, states) is score_sequence of all heads with one delay.
template <class Real, class Run>
PromptScores<Real> by_windows(const Case& c, std::size_t state_size, Real none, const Run& run) {
    PromptScores<Real> all;
    all.scores.assign(static_cast<std::size_t>(c.plane()), none);
    for (std::int32_t h = 0; h < prompt_heads; ++h) {
        std::vector<Real> scores(all.scores.size(), none),
            states(static_cast<std::size_t>(c.batch * prompt_heads) * state_size, Real{0});
        run(prompt_windows[h], scores, states);
        for (std::int32_t b = 0; b < c.batch; ++b) {
            const std::int32_t first = (b * prompt_heads + h) * c.length;
            for (std::int32_t t = prompt_sinks[h]; t < c.length; ++t) {
                all.scores[static_cast<std::size_t>(first + t)] = scores[static_cast<std::size_t>(first + t)];
            }
        }
        all.states = states;
    }
    return all;
}
template <class T, class S>
PromptScores<double> exact_scores(const Case& c, const Inputs<T>& in, const S& scorer) {
    return by_windows<double>(
        c, scorer.state_size(), untouched,
        [&](std::int32_t delay, std::vector<double>& scores, std::vector<double>& states) {
            BasicScoreOptions<double> options;
            options.states = states.data();
            std::vector<std::byte> memory(score_sequence_workspace_bytes(oracle(), scorer, in.keys(c),
                                                                         in.values(c), c.on_host(), options));
            score_sequence(oracle(), scorer, in.keys(c), in.values(c), c.on_host(), delay,
                           view_bhs(scores.data(), c.batch, c.heads, c.length),
                           {memory.data(), memory.size()}, options);
        });
}
template <class T, class S>
PromptScores<float> device_scores(const Case& c, const Inputs<T>& in, const S& scorer) {
    const Rows<T> k(c, in.k, c.head_dim_qk), v(c, in.v, c.head_dim_vo);
    const Device<std::int32_t> lengths(c.lengths);
    const Sequences sequences = c.sequences(lengths.data(), nullptr, nullptr);
    const kvpolicy::cuda ctx{};
    return by_windows<float>(c, scorer.state_size(), 0.0f,
                             [&](std::int32_t delay, std::vector<float>& scores, std::vector<float>& states) {
                                 const Device<float> to_scores(scores), to_states(states);
                                 ScoreOptions options;
                                 options.states = to_states.data();
                                 const Device<unsigned char> workspace(score_sequence_workspace_bytes(
                                     ctx, scorer, k.view, v.view, sequences, options));
                                 score_sequence(ctx, scorer, k.view, v.view, sequences, delay,
                                                view_bhs(to_scores.data(), c.batch, c.heads, c.length),
                                                workspace, options);
                                 scores = to_scores.read();
                                 states = to_states.read();
                             });
}

/// Prompts of c.lengths tokens into caches, call by call. `budgets` of `all` keep every key.
template <template <class, class> class Cache, class T, class S>
class Prompts {
    using P = Scored<S>;

  public:
    static constexpr std::int32_t all[] = {max_prompt, max_prompt};

    Prompts(Case c, const S& shape, unsigned seed = 3)
        : c_(prompt_case(std::move(c))),
          weights_(shape, drawing({}, true, true), seed),
          in_(c_),
          of_host_(weights_.on_host()),
          of_device_(weights_.on_device()),
          exact_(exact_scores<T>(c_, in_, of_host_)) {
        for (std::int32_t i = 0; i < c_.batch; ++i) {
            seq_ids_.push_back((i + 1) % (c_.batch + 1));
        }
    }

    /// Scores and states after these calls, which bring all tokens, are near the exact ones.
    void check(const std::vector<Call>& calls) const {
        PromptCache<Cache<P, T>> cache(c_, prompt_policy<P>(all, of_device_), &of_device_);
        Lengths from(static_cast<std::size_t>(c_.batch), 0);
        for (const Call& call : calls) {
            const std::int32_t most = std::max(*std::max_element(call.q_len.begin(), call.q_len.end()), 1);
            cache.call(call.kind, PromptChunk<T>(c_, in_, from, call.q_len, most), seq_ids_);
            for (std::size_t i = 0; i < from.size(); ++i) {
                from[i] += call.q_len[i];
            }
        }
        REQUIRE(from == c_.lengths);
        near_exact(cache, std::to_string(calls.size()) + " calls");
    }
    /// A workspace is large enough for fewer prompts and for shorter chunks, too.
    void check_sizes(const Lengths& tokens) const {
        const PromptCache<Cache<P, T>> cache(c_, prompt_policy<P>(all, of_device_), &of_device_);
        for (std::int32_t count = 1; count <= c_.batch; ++count) {
            for (std::size_t i = 0; i < tokens.size(); ++i) {
                CAPTURE(count);
                CAPTURE(tokens[i]);
                const std::size_t bytes = cache.workspace_bytes(count, tokens[i]);
                CHECK((i == 0 || cache.workspace_bytes(count, tokens[i - 1]) <= bytes));
                CHECK((count == 1 || cache.workspace_bytes(count - 1, tokens[i]) <= bytes));
            }
        }
    }
    /// A prefill of all tokens has the bits of score_sequence, and decides as with given scores.
    void check_whole(const std::int32_t* budgets) const {
        const PromptScores<float> given = device_scores<T>(c_, in_, of_device_);
        const P on_host = prompt_policy<P>(budgets, of_host_);
        const Given given_policy = prompt_policy<Given>(budgets, of_host_);
        const Lengths from(static_cast<std::size_t>(c_.batch), 0);
        const PromptChunk<T> chunk(c_, in_, from, c_.lengths, c_.length, given.scores);
        PromptCache<Cache<P, T>> cache(c_, prompt_policy<P>(budgets, of_device_), &of_device_);
        PromptCache<Cache<Given, T>> with_given(c_, given_policy, nullptr);
        cache.call(Kind::prefill, chunk, seq_ids_);
        with_given.call(Kind::prefill, chunk, seq_ids_);
        for (std::int32_t i = 0; i < c_.batch; ++i) {
            const std::int32_t seq = seq_ids_[static_cast<std::size_t>(i)];
            const auto [entries, states] = cache.read(seq, on_host, &of_host_);
            const auto of_given = with_given.read(seq, given_policy, nullptr).first;
            CAPTURE(c_.name);
            CAPTURE(i);
            for (std::size_t h = 0; h < entries.size(); ++h) {
                CAPTURE(h);
                CHECK(entries[h].size() == of_given[h].size());
                const bool same = entries[h] == of_given[h];
                CHECK(same);
            }
            if (c_.lengths[static_cast<std::size_t>(i)] != 0) {
                const auto each = static_cast<std::ptrdiff_t>(states.size());
                const bool same = same_bits(
                    states, {given.states.begin() + i * each, given.states.begin() + (i + 1) * each});
                CHECK(same);
            }
        }
    }

    [[nodiscard]] const Case& sizes() const { return c_; }
    [[nodiscard]] const Inputs<T>& inputs() const { return in_; }
    [[nodiscard]] const Lengths& seq_ids() const { return seq_ids_; }
    [[nodiscard]] PromptCache<Cache<P, T>> cache() const {
        return PromptCache<Cache<P, T>>(c_, prompt_policy<P>(all, of_device_), &of_device_);
    }
    void near_exact(const PromptCache<Cache<P, T>>& cache, const std::string& what) const {
        std::vector<double> got(exact_.scores.size(), untouched), got_states, wanted_states;
        const P on_host = prompt_policy<P>(all, of_host_);
        for (std::int32_t i = 0; i < c_.batch; ++i) {
            const std::int32_t length = c_.lengths[static_cast<std::size_t>(i)];
            const auto [entries, states] =
                cache.read(seq_ids_[static_cast<std::size_t>(i)], on_host, &of_host_);
            for (std::int32_t h = 0; h < prompt_heads; ++h) {
                CHECK(static_cast<std::int32_t>(entries[static_cast<std::size_t>(h)].size()) == length);
                for (const auto& [t, score] : entries[static_cast<std::size_t>(h)]) {
                    if (t >= prompt_sinks[h] && t + prompt_windows[h] < length) {
                        got[static_cast<std::size_t>((i * prompt_heads + h) * c_.length + t)] =
                            static_cast<double>(score);
                    } else {
                        CHECK(score == 0.0f);
                    }
                }
            }
            if (length != 0) {
                const auto each = static_cast<std::ptrdiff_t>(states.size());
                got_states.insert(got_states.end(), states.begin(), states.end());
                wanted_states.insert(wanted_states.end(), exact_.states.begin() + i * each,
                                     exact_.states.begin() + (i + 1) * each);
            }
        }
        const std::string name = c_.name + ", " + what;
        compare(name + ", scores", got, exact_.scores, tolerance<T>().scores, tolerance<T>().floor);
        compare(name + ", states", got_states, wanted_states, state_tolerance<T>());
    }

  private:
    static Case prompt_case(Case c) {
        c.heads = prompt_heads;
        c.batch = static_cast<std::int32_t>(c.lengths.size());
        c.length = *std::max_element(c.lengths.begin(), c.lengths.end());
        c.name.clear();
        for (const std::int32_t length : c.lengths) {
            c.name += std::to_string(length) + " ";
        }
        c.name += "tokens";
        return c;
    }

    Case c_;
    Weights<S> weights_;
    Inputs<T> in_;
    S of_host_, of_device_;
    PromptScores<double> exact_;
    Lengths seq_ids_;
};

inline Case prompts_of(Lengths lengths, std::int32_t dim = 64) {
    Case c = sized(0, 0, dim);
    c.lengths = std::move(lengths);
    return c;
}

/// One prompt of each length, in one chunk and in several, of which some are as short as steps.
template <template <class, class> class Cache, class T, class S>
void check_lengths(const S& shape, const Lengths& lengths) {
    for (const std::int32_t length : lengths) {
        const Prompts<Cache, T, S> prompts(prompts_of({length}), shape);
        prompts.check({{Kind::prefill, {length}}});
        if (length >= device_scorer<S>::min_chunk) {
            constexpr std::int32_t budgets[] = {20, 300};
            prompts.check_whole(prompts.all);
            prompts.check_whole(budgets);
        }
        for (const std::int32_t first : {33, 64, 100}) {
            if (first + 1 < length) {
                prompts.check({{Kind::prefill, {first}}, {Kind::prefill, {length - first}}});
            }
        }
        if (length > 200) {
            prompts.check({{Kind::prefill, {40}},
                           {Kind::step, {1}},
                           {Kind::prefill, {length - 100}},
                           {Kind::draft, {5}},
                           {Kind::prefill, {50}},
                           {Kind::step, {1}},
                           {Kind::prefill, {3}}});
        }
    }
}

/// Prompts of several lengths together, in calls that bring nothing to some of them.
template <template <class, class> class Cache, class T, class S>
void check_ragged(const S& shape) {
    const Prompts<Cache, T, S> prompts(prompts_of({300, 0, 129, 64}), shape);
    constexpr std::int32_t budgets[] = {20, 100};
    prompts.check_whole(prompts.all);
    prompts.check_whole(budgets);
    prompts.check({{Kind::prefill, {300, 0, 129, 64}}});
    prompts.check({{Kind::prefill, {0, 0, 65, 1}},
                   {Kind::prefill, {129, 0, 0, 63}},
                   {Kind::step, {1, 0, 1, 0}},
                   {Kind::draft, {4, 0, 6, 0}},
                   {Kind::prefill, {166, 0, 57, 0}}});
}

}  // namespace mlstm_test
