// Caches on both backends whose scores are known on arrival, of keys (WG-KV's write gate) or of hidden states
// (SP-KV's predictor): random steps, chunks, draft tokens, forks, reorders, snapshots and clears. Both hold
// the same keys, with scores near those in double.
#pragma once

#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/mlp.hpp>

#include "cache_case.hpp"
#include "paged_case.hpp"
#include "support/refusal.hpp"
#include "two_scorers.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace test {

/// w2 . act(W1 x + b1) + b2 in double, for the hidden layer `layer`.
template <class Act>
double exact_mlp(const kvpolicy::MlpParameters<const float>& weights, std::int32_t hidden, std::int32_t layer,
                 std::int32_t head, const std::vector<double>& x) {
    const auto inputs = static_cast<std::int64_t>(x.size());
    double score = weights.b2 != nullptr ? static_cast<double>(weights.b2[head]) : 0.0;
    for (std::int64_t j = 0; j < hidden; ++j) {
        const std::int64_t row = layer * std::int64_t{hidden} + j;
        double y = weights.b1 != nullptr ? static_cast<double>(weights.b1[row]) : 0.0;
        for (std::int64_t i = 0; i < inputs; ++i) {
            y += static_cast<double>(weights.w1[row * inputs + i]) * x[static_cast<std::size_t>(i)];
        }
        const double act = std::is_same_v<Act, kvpolicy::Silu>
                               ? y / (1.0 + std::exp(-y))
                               : 0.5 * y * (1.0 + std::erf(y / std::sqrt(2.0)));
        score += static_cast<double>(weights.w2[head * std::int64_t{hidden} + j]) * act;
    }
    return score;
}

/// WG-KV, 3.2: [RMSNorm(k before RoPE); RMSNorm(k)]. The angle is a product in fp32 up to position 2^24, as
/// engines have it, and one in double beyond.
inline std::vector<double> exact_gate_input(const kvpolicy::WriteGateInput& input, std::vector<double> k,
                                            kvpolicy::position_t t) {
    std::vector<double> before = k;
    const auto dims = static_cast<std::size_t>(input.rope.dims == 0 ? static_cast<std::int32_t>(k.size())
                                                                    : input.rope.dims);
    const bool neighbors = input.rope.layout == kvpolicy::rope_layout::interleaved;
    for (std::size_t i = 0; i < dims / 2; ++i) {
        const float f =
            input.rope.frequencies != nullptr
                ? input.rope.frequencies[i]
                : static_cast<float>(std::pow(static_cast<double>(input.rope.base),
                                              -2.0 * static_cast<double>(i) / static_cast<double>(dims)));
        const double angle = t <= kvpolicy::position_t{1} << 24
                                 ? static_cast<double>(static_cast<float>(t) * f)
                                 : static_cast<double>(t) * static_cast<double>(f);
        const std::size_t a = neighbors ? 2 * i : i, b = neighbors ? 2 * i + 1 : i + dims / 2;
        before[a] = k[a] * std::cos(angle) + k[b] * std::sin(angle);
        before[b] = k[b] * std::cos(angle) - k[a] * std::sin(angle);
    }
    std::vector<double> x;
    for (const std::vector<double>* half : {&before, &k}) {
        double squares = 0.0;
        for (const double number : *half) {
            squares += number * number;
        }
        const double norm =
            std::sqrt(squares / static_cast<double>(half->size()) + static_cast<double>(input.norm.epsilon));
        for (const double number : *half) {
            x.push_back(number / norm);
        }
    }
    return x;
}

template <class Number>
std::vector<double> in_double(const Number* from, std::int32_t count) {
    std::vector<double> numbers;
    for (std::int32_t i = 0; i < count; ++i) {
        numbers.push_back(static_cast<double>(static_cast<kvpolicy::compute_t<Number>>(from[i])));
    }
    return numbers;
}

/// The score in double of token t of entry i, for a head, at `position`.
template <std::int32_t D, class Act, class T>
double exact_score(const kvpolicy::BasicMlpScorer<kvpolicy::WriteGateInput, Act, D>& scorer,
                   const CallTensors<T>& in, std::int64_t i, std::int32_t head, std::int32_t t,
                   kvpolicy::position_t position) {
    const auto k = in.k.view();
    return exact_mlp<Act>(scorer.weights, scorer.hidden, head, head,
                          exact_gate_input(scorer.input, in_double(k.row(i, head, t), k.dim), position));
}
template <std::int32_t D, class Act, class T>
double exact_score(const kvpolicy::BasicMlpScorer<kvpolicy::HiddenInput, Act, D>& scorer,
                   const CallTensors<T>& in, std::int64_t i, std::int32_t head, std::int32_t t,
                   kvpolicy::position_t /*position*/) {
    const auto states = in.hidden.view();
    return exact_mlp<Act>(scorer.weights, scorer.hidden, 0, head, in_double(states.row(i, 0, t), states.dim));
}

/// The scores in double of all tokens of every sequence, beside those that the caches hold.
template <class S>
class NearExact {
  public:
    NearExact(const S& scorer, const kvpolicy::CacheShape& shape, std::int32_t sinks)
        : scorer_(scorer),
          heads_(shape.kv_heads),
          sinks_(sinks),
          scores_(static_cast<std::size_t>(shape.max_sequences)) {}

    template <class T>
    void take(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& tokens,
              const CallTensors<T>& in) {
        for (std::size_t i = 0; i < seq_ids.size(); ++i) {
            auto& scores = of(seq_ids[i]);
            for (std::int32_t t = 0; t < tokens[i]; ++t) {
                const auto position = static_cast<kvpolicy::position_t>(scores.size()) / heads_;
                for (std::int32_t h = 0; h < heads_; ++h) {
                    scores.push_back(exact_score(scorer_, in, static_cast<std::int64_t>(i), h, t, position));
                    closest_ = std::min(closest_, std::abs(scores.back()));
                }
            }
        }
    }
    void fork(std::int32_t from, std::int32_t to) { of(to) = std::vector<double>(of(from)); }
    void reorder(const std::vector<std::int32_t>& sources) {
        const auto before = scores_;
        for (std::size_t i = 0; i < sources.size(); ++i) {
            scores_[i] = before[static_cast<std::size_t>(sources[i])];
        }
    }
    void clear(std::int32_t seq) { of(seq).clear(); }

    void score(std::int32_t seq, std::int32_t head, kvpolicy::position_t position, float of_device,
               float of_host) {
        if (position < sinks_) {
            return;  // not read
        }
        const auto at = static_cast<std::size_t>(position * heads_ + head);
        REQUIRE(at < of(seq).size());
        const double wanted = of(seq)[at];
        const auto off = [&](float got) {
            const double share = std::abs(static_cast<double>(got) - wanted) / (1.0 + std::abs(wanted));
            return std::isnan(share) ? 1e30 : share;
        };
        device_ = std::max(device_, off(of_device));
        host_ = std::max(host_, off(of_host));
    }
    void states(std::int32_t, std::int32_t, const float*, const float*, std::int64_t) {}
    void check() const {
        MESSAGE("the furthest from double: ", device_, ", the host's ", host_,
                "; the score next to the threshold: ", closest_);
        CHECK(device_ <= score_tolerance);
        CHECK(host_ <= score_tolerance);
        // Else one of the backends may decide otherwise, and be right.
        CHECK(closest_ > std::max(device_, host_));
    }

  private:
    std::vector<double>& of(std::int32_t seq) { return scores_[static_cast<std::size_t>(seq)]; }
    S scorer_;
    std::int32_t heads_, sinks_;
    std::vector<std::vector<double>> scores_;  // [position, head] of a sequence
    double device_ = 0.0, host_ = 0.0;
    double closest_ = INFINITY;  // the least |score|: thresholds are logit 0
};

/// Random calls; with `chunks` prefills and drafts, too.
template <class T, class Both, class S>
void arriving_life(Both& both, NearExact<S>& near, std::int32_t hidden_width, bool chunks, std::int32_t turns,
                   std::mt19937& generator) {
    const kvpolicy::CacheShape& shape = both.shape;
    const auto pick = [&](std::int32_t below) {
        return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(below));
    };
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        const std::int32_t what = pick(16);
        const std::int32_t a = pick(shape.max_sequences), b = pick(shape.max_sequences);
        CAPTURE(turn);
        CAPTURE(what);
        if constexpr (requires { both.add_slab(); }) {
            // So that no fork is refused for want of pages, and `near` has what the caches have.
            while (what < 3 && both.cache.free_pages(both.device) < 20 + 12 * shape.max_sequences) {
                REQUIRE(both.add_slab());
            }
        }
        if (what == 0) {
            both.fork(a, b);
            near.fork(a, b);
        } else if (what == 1) {
            std::vector<std::int32_t> sources(static_cast<std::size_t>(1 + pick(shape.max_sequences)));
            for (std::int32_t& source : sources) {
                source = pick(shape.max_sequences);
            }
            both.reorder(sources);
            near.reorder(sources);
        } else if (what == 2) {
            both.snapshot(a, b);
            near.fork(a, b);
        } else if (what == 3) {
            both.oracle.cache.clear(both.ctx, a);
            both.cache.clear(both.device, a);
            near.clear(a);
        } else {
            const Mode mode = what < 8 || !chunks ? Mode::step
                              : what < 12         ? Mode::prefill
                                                  : Mode::append_draft;
            const std::int32_t most = mode == Mode::step           ? 1
                                      : mode == Mode::append_draft ? shape.max_draft_tokens
                                                                   : 1 + pick(25);
            std::vector<std::int32_t> seq_ids, q_len, accepted;
            for (std::int32_t i = 0; i < shape.max_sequences; ++i) {
                seq_ids.push_back((i + turn) % shape.max_sequences);
                q_len.push_back(mode == Mode::step ? (pick(8) != 0 ? 1 : 0) : pick(most + 1));
                accepted.push_back(pick(q_len.back() + 1));
            }
            const CallTensors<T> in(shape, shape.max_sequences, most, Scores::random, generator,
                                    hidden_width);
            both.call(mode, seq_ids, q_len, in, accepted);
            near.take(seq_ids, mode == Mode::append_draft ? accepted : q_len, in);
        }
        both.near_rows(near);
    }
    near.check();
}

/// A NaN that a token brings with `entry` 1 in the third of five steps, or in a chunk of five tokens: both
/// backends report it for that entry, and keep the same keys. `spoil` writes it into the tensors of the one
/// token.
template <class T, class Both, class Spoil>
void check_nan_scores(Both& both, std::int32_t hidden_width, bool chunk, const Spoil& spoil) {
    using P = typename std::remove_cvref_t<decltype(both.cache.layer(0))>::policy_type;
    std::mt19937 generator(9);
    const kvpolicy::CacheShape& shape = both.shape;
    const std::int32_t tokens = chunk ? 5 : 1, count = 2;
    for (std::int32_t t = 0; t < 5; t += tokens) {
        CallTensors<T> in(shape, count, tokens, Scores::random, generator, hidden_width);
        const bool spoiled = chunk || t == 2;
        if (spoiled) {
            spoil(in, chunk ? 2 : 0);
        }
        const ArrivingInputs<P> arriving(in);
        const Device<T> q(in.q.data), k(in.k.data), v(in.v.data), out(in.q.data.size() * 8);
        Tensor<T> host_out(count, shape.query_heads, tokens, shape.head_dim_vo);
        Extras extras, device_extras;
        arriving.add(in, extras, device_extras);
        std::vector<std::uint32_t> wanted(2, 0);
        const Device<std::uint32_t> status(wanted);
        const auto ref = both.cache.layer(0);
        const kvpolicy::Batch batch{.count = count, .length = tokens};
        const auto io = step_io(
            batch,
            kvpolicy::view_bhsd<const T>(q.data(), count, shape.query_heads, tokens, shape.head_dim_qk),
            kvpolicy::view_bhsd<const T>(k.data(), count, shape.kv_heads, tokens, shape.head_dim_qk),
            kvpolicy::view_bhsd<const T>(v.data(), count, shape.kv_heads, tokens, shape.head_dim_vo),
            kvpolicy::view_bhsd(out.data(), count, shape.query_heads, tokens, shape.head_dim_vo),
            device_extras);
        using Dims = kvpolicy::head_dims<64>;
        const Device<unsigned char> workspace(
            kvpolicy::workspace_bytes<Dims>(both.device, ref, {.batch = count, .tokens = tokens}));
        if (chunk) {
            kvpolicy::prefill<Dims>(both.device, ref, io, workspace, {.status = status.data()});
        } else {
            kvpolicy::step<Dims>(both.device, ref, io, workspace, {.status = status.data()});
        }
        call_ref<P, T>(both.ctx, both.oracle.cache.layer(0), batch, in.q.view(), in.k.view(), in.v.view(),
                       host_out.view(), extras, !chunk, wanted.data());
        CHECK(wanted == std::vector<std::uint32_t>{0, spoiled ? kvpolicy::status_nan_score : 0u});
        CHECK(status.read() == wanted);
        both.oracle.cache.advance(both.ctx, batch);
        both.cache.advance(both.device, batch);
        struct {
            bool same = true;
            void score(std::int32_t, std::int32_t, kvpolicy::position_t, float a, float b) {
                same = same && (std::isnan(b) ? std::isnan(a) : std::abs(a - b) <= 1e-4f);
            }
            void states(std::int32_t, std::int32_t, const float*, const float*, std::int64_t) {}
        } near;
        both.near_rows(near);
        CHECK(near.same);
    }
}

/// Sizes of a cache for a scorer of 2 heads.
inline kvpolicy::CacheShape arriving_shape(std::int32_t max_sequences, std::int32_t head_dim_qk,
                                           std::int32_t head_dim_vo) {
    return {.layers = 1,
            .max_sequences = max_sequences,
            .query_heads = 4,
            .kv_heads = 2,
            .head_dim_qk = head_dim_qk,
            .head_dim_vo = head_dim_vo,
            .page_size = 16,
            .max_draft_tokens = 6};
}

/// A gate, and a budget that bounds a FixedBudgetCache.
template <class S>
using GatedBudget =
    kvpolicy::Policy<kvpolicy::Sink<2>, kvpolicy::Window<7>, kvpolicy::ThresholdGate<kvpolicy::at_least>,
                     kvpolicy::TopKBudget<40>, S>;

/// In a FixedBudgetCache.
template <class T, bool Chunks, class S>
void contiguous_life(const S& sizes, const kvpolicy::CacheShape& shape, bool optional,
                     std::int32_t hidden_width, std::int32_t turns, std::uint32_t seed) {
    using P = GatedBudget<S>;
    std::mt19937 generator(seed);
    const TwoScorers<S> scorers(sizes, optional, generator);
    BothCaches<P, T, kvpolicy::head_dims<64>, Chunks> both(shape, P{{}, {}, {}, {}, scorers.of_host},
                                                           &scorers.of_host, &scorers.of_device);
    NearExact<S> near(scorers.of_host, shape, 2);
    arriving_life<T>(both, near, hidden_width, Chunks, turns, generator);
}

/// In a DualCache. P: a policy of S with a gate and no budget, and `parts` behind its scorer.
template <class P, class T, bool Chunks, class S, class... Parts>
void paged_life(const S& sizes, const kvpolicy::CacheShape& shape, std::int32_t sinks, bool optional,
                std::int32_t hidden_width, std::int32_t turns, std::uint32_t seed, const Parts&... parts) {
    std::mt19937 generator(seed);
    const TwoScorers<S> scorers(sizes, optional, generator);
    BothDuals<P, T, kvpolicy::head_dims<64>, Chunks> both(
        shape, {.slab_pages = 3, .max_slabs = 400, .max_seq_len = 2000},
        P{{}, {}, {}, scorers.of_host, parts...}, &scorers.of_host, &scorers.of_device);
    NearExact<S> near(scorers.of_host, shape, sinks);
    arriving_life<T>(both, near, hidden_width, Chunks, turns, generator);
}

}  // namespace test
