// Random lives of the sequences of a cache, of any kind, policy and backend, through all public calls: what a
// sequence holds after each call is what a fresh cache holds after a replay of that sequence's calls alone,
// byte for byte; and where a naive cache (naive_cache.hpp) knows the policy, its keys and outputs.
//
// Calls: step, prefill, append, append_chunk, append_draft and accept, evict, fork (between layers of a token
// and with draft tokens waiting, too), reorder, clear, reserve, snapshot and restore; entries of length 0;
// the pool runs out on the way. On the CPU also calls that are refused: NaN, bad sequences, damaged
// snapshots, layers and tokens out of order.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/core/status.hpp>

#include "support/bound_cache.hpp"
#include "support/naive_cache.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace test {

/// Memory and context of the CPU.
struct HostSide {
    static constexpr bool device = false;
    static constexpr bool fixed_caches = true;  // lives of FixedBudgetCaches are compiled, too
    static constexpr bool appends = true;       // so are append and append_chunk
    using dims = kvpolicy::all_head_dims;
    kvpolicy::host ctx{1};

    template <class X>
    class array {
      public:
        explicit array(std::vector<X> values) : values_(std::move(values)) {}
        explicit array(std::size_t count) : values_(count) {
            auto* const bytes = reinterpret_cast<unsigned char*>(values_.data());
            std::fill_n(bytes, count * sizeof(X), poison_byte);
        }
        [[nodiscard]] X* data() const { return values_.data(); }
        [[nodiscard]] std::size_t size() const { return values_.size(); }
        [[nodiscard]] std::vector<X> read() const { return values_; }

      private:
        mutable std::vector<X> values_;
    };
};

/// Ends a life that went wrong.
inline void life_check(bool good, const std::string& what) {
    if (!good) {
        throw std::runtime_error(what);
    }
}

enum class LifeKind { step, prefill, append, append_chunk, draft, evict };
inline const char* name_of(LifeKind kind) {
    constexpr const char* names[] = {"step", "prefill", "append", "append_chunk", "draft", "evict"};
    return names[static_cast<int>(kind)];
}

/// A call on one sequence, kept for replays.
template <class T>
struct LifeCall {
    struct Layer {
        std::vector<T> q, k, v;    // [heads, tokens, dim]
        std::vector<float> score;  // [kv_heads, tokens]
    };
    LifeKind kind = LifeKind::evict;
    std::int32_t tokens = 0;
    std::int32_t accepted = 0;  // of a draft
    std::vector<Layer> layers;
    [[nodiscard]] std::int32_t taken() const { return kind == LifeKind::draft ? accepted : tokens; }
};

/// The numbers of a life.
struct LifeShape {
    kvpolicy::CacheShape shape;
    kvpolicy::PoolShape pool;
    kvpolicy::position_t rebase = kvpolicy::rebase_limit;
    std::int32_t max_tokens = 8;  // of a chunk
    /// Exact, so that masses do not depend on who rounds it.
    kvpolicy::AttentionParams attention{.sm_scale = 0.375f};
};

/// A cache and its memory. Calls report exhaustion by a status, and never refuse.
template <class Side, class P, class Cache>
class LifeCache {
  public:
    using T = typename Cache::ref_type::value_type;
    using Call = LifeCall<T>;
    using Dims = typename Side::dims;
    static constexpr bool pooled = Cache::ref_type::pooled;

    LifeCache(Side& side, const LifeShape& numbers, const P& policy,
              const typename P::scorer_type* scorers = nullptr)
        : side_(side),
          numbers_(numbers),
          cache(make(numbers, policy, scorers)),
          memory_(cache.bytes().total()) {
        cache.rebase_limit(numbers.rebase);
        cache.bind(side.ctx, memory_.data(), memory_.size());
    }

    void add_slab() {
        if constexpr (pooled) {
            life_check(cache.slabs() < numbers_.pool.max_slabs, "more slabs are needed than there may be");
            slabs_.push_back(std::make_unique<bytes>(cache.slab_bytes()));
            cache.add_slab(side_.ctx, slabs_.back()->data(), slabs_.back()->size());
        } else {
            life_check(false, "a cache of fixed size ran out of rows");
        }
    }

    /// One layer's part of calls of one kind on the named sequences. Fills status and, where the kind
    /// attends, out [entries][query_heads, tokens, dim].
    void run_layer(LifeKind kind, std::int32_t layer, const std::vector<std::int32_t>& seqs,
                   const std::vector<const Call*>& calls, std::vector<std::uint32_t>& status,
                   std::vector<std::vector<T>>& out) {
        using namespace kvpolicy;
        const CacheShape& shape = numbers_.shape;
        const auto count = static_cast<std::int32_t>(seqs.size());
        std::vector<std::int32_t> tokens;
        for (const Call* const call : calls) {
            tokens.push_back(call->tokens);
        }
        const std::int32_t most = std::max(1, *std::max_element(tokens.begin(), tokens.end()));
        const auto at = static_cast<std::size_t>(layer);
        const auto pack = [&](std::int32_t heads, std::int32_t dim, auto&& of) {
            using X = typename std::decay_t<decltype(of(*calls[0]))>::value_type;
            std::vector<X> all(static_cast<std::size_t>(count * heads * most * dim),
                               std::numeric_limits<float>::quiet_NaN());
            for (std::int32_t i = 0; i < count; ++i) {
                const Call& call = *calls[static_cast<std::size_t>(i)];
                for (std::int32_t h = 0; call.tokens != 0 && h < heads; ++h) {
                    std::copy_n(of(call).begin() + h * call.tokens * dim, call.tokens * dim,
                                all.begin() + (i * heads + h) * most * dim);
                }
            }
            return typename Side::template array<X>(all);
        };
        const auto q = pack(
            shape.query_heads,
            shape.head_dim_qk, [&](const Call& c) -> const auto& { return c.layers[at].q; });
        const auto k = pack(
            shape.kv_heads, shape.head_dim_qk, [&](const Call& c) -> const auto& { return c.layers[at].k; });
        const auto v = pack(
            shape.kv_heads, shape.head_dim_vo, [&](const Call& c) -> const auto& { return c.layers[at].v; });
        const auto score = pack(
            shape.kv_heads, 1, [&](const Call& c) -> const auto& { return c.layers[at].score; });
        const std::int64_t outputs = std::int64_t{shape.query_heads} * most * shape.head_dim_vo;
        const typename Side::template array<T> result(
            std::vector<T>(static_cast<std::size_t>(count * outputs), T(-55.0f)));
        const ints names(seqs), lengths(tokens);
        const words found(std::vector<std::uint32_t>(seqs.size(), 0));
        StepIO<T> io{
            .q = view_bhsd(q.data(), count, shape.query_heads, most, shape.head_dim_qk),
            .k = view_bhsd(k.data(), count, shape.kv_heads, most, shape.head_dim_qk),
            .v = view_bhsd(v.data(), count, shape.kv_heads, most, shape.head_dim_vo),
            .out = view_bhsd(result.data(), count, shape.query_heads, most, shape.head_dim_vo),
            .batch = {.count = count, .seq_ids = names.data(), .q_len = lengths.data(), .length = most}};
        if constexpr (P::ranked && std::is_same_v<typename P::scorer_type, GivenScores>) {
            io.scores = view_bhs<const float>(score.data(), count, shape.kv_heads, most);
        }
        invoke(kind, layer, io, {.batch = count, .tokens = most}, {.status = found.data()});
        status = found.read();
        out.assign(seqs.size(), {});
        if (kind == LifeKind::append || kind == LifeKind::append_chunk) {
            return;
        }
        const std::vector<T> all = result.read();
        for (std::int32_t i = 0; i < count; ++i) {
            std::vector<T>& mine = out[static_cast<std::size_t>(i)];
            for (std::int32_t h = 0; h < shape.query_heads; ++h) {
                const auto first = all.begin() + i * outputs + h * most * shape.head_dim_vo;
                mine.insert(mine.end(), first,
                            first + tokens[static_cast<std::size_t>(i)] * shape.head_dim_vo);
            }
        }
    }

    void invoke(LifeKind kind, std::int32_t layer, const kvpolicy::StepIO<T>& io,
                const kvpolicy::CallSize& size, const kvpolicy::StepOptions& options) {
        using namespace kvpolicy;
        const auto ref = cache.layer(layer);
        if constexpr (!P::observed && Side::appends) {
            if (kind == LifeKind::append || kind == LifeKind::append_chunk) {
                const bytes workspace(append_workspace_bytes<Dims>(side_.ctx, ref, size));
                if (kind == LifeKind::append) {
                    append<Dims>(side_.ctx, ref, io, view(workspace), options);
                } else {
                    append_chunk<Dims>(side_.ctx, ref, io, view(workspace), options);
                }
                return;
            }
        }
        const bytes workspace(workspace_bytes<Dims>(side_.ctx, ref, size));
        if constexpr (!P::observed) {
            if (kind == LifeKind::draft) {
                append_draft<Dims>(side_.ctx, ref, io, view(workspace), options);
                return;
            }
        }
        if (kind == LifeKind::step) {
            step<Dims>(side_.ctx, ref, io, view(workspace), options);
        } else {
            prefill<Dims>(side_.ctx, ref, io, view(workspace), options);
        }
    }

    /// Accepts m draft tokens of a sequence in one layer; adds slabs.
    void accept(std::int32_t layer, std::int32_t seq, std::int32_t m) {
        if constexpr (!P::observed) {
            const auto ref = cache.layer(layer);
            const ints names(std::vector<std::int32_t>{seq});
            const bytes workspace(kvpolicy::workspace_bytes<Dims>(
                side_.ctx, ref, {.batch = 1, .tokens = numbers_.shape.max_draft_tokens}));
            with_slabs([&](std::uint32_t* status) {
                kvpolicy::accept<Dims>(side_.ctx, ref, {.count = 1, .seq_ids = names.data(), .length = m},
                                       view(workspace), {.status = status});
            });
        }
    }

    void advance(const std::vector<std::int32_t>& seqs, const std::vector<std::int32_t>& tokens) {
        const ints names(seqs), lengths(tokens);
        const words status(std::vector<std::uint32_t>(seqs.size(), 0));
        cache.advance(side_.ctx,
                      {.count = static_cast<std::int32_t>(seqs.size()),
                       .seq_ids = names.data(),
                       .q_len = lengths.data(),
                       .length = std::max(1, *std::max_element(tokens.begin(), tokens.end()))},
                      {.status = status.data()});
        for (const std::uint32_t one : status.read()) {
            life_check(one == 0, "advance left a sequence where it was");
        }
    }

    kvpolicy::EvictionReport evict(std::int32_t seq) {
        kvpolicy::EvictionReport report;
        if constexpr (P::has_eviction) {
            const ints names(std::vector<std::int32_t>{seq});
            const typename Side::template array<kvpolicy::EvictionReport> reports(
                std::vector<kvpolicy::EvictionReport>(1));
            const words status(std::vector<std::uint32_t>{0});
            const bytes workspace(cache.evict_workspace_bytes(side_.ctx));
            cache.evict(side_.ctx, {.count = 1, .seq_ids = names.data(), .length = 1}, view(workspace),
                        {.reports = reports.data(), .status = status.data()});
            life_check(status.read()[0] == 0, "evict left a sequence as it was");
            report = reports.read()[0];
        }
        return report;
    }

    /// Calls call(status) until it finds the pages that it needs. `refused` sees every time that it does not.
    template <class CallOnce, class Refused>
    void with_slabs(CallOnce&& call, Refused&& refused) {
        for (;;) {
            const words status(std::vector<std::uint32_t>{0});
            call(status.data());
            const std::uint32_t found = status.read()[0];
            if (found == 0) {
                return;
            }
            life_check(found == kvpolicy::status_pool_exhausted, "a status that nothing explains");
            refused();
            add_slab();
        }
    }
    template <class CallOnce>
    void with_slabs(CallOnce&& call) {
        with_slabs(call, [] {});
    }

    /// A whole call on one sequence, alone; layers' outputs.
    std::vector<std::vector<T>> replay(std::int32_t seq, const Call& call) {
        std::vector<std::vector<T>> outputs;
        if (call.kind == LifeKind::evict) {
            evict(seq);
            return outputs;
        }
        for (std::int32_t layer = 0; layer < numbers_.shape.layers; ++layer) {
            std::vector<std::vector<T>> out;
            for (std::vector<std::uint32_t> status{1}; status[0] != 0;) {
                run_layer(call.kind, layer, {seq}, {&call}, status, out);
                if (status[0] != 0) {
                    life_check(status[0] == kvpolicy::status_pool_exhausted, "a replay is refused");
                    add_slab();
                }
            }
            outputs.push_back(out[0]);
        }
        for (std::int32_t layer = 0; call.kind == LifeKind::draft && layer < numbers_.shape.layers; ++layer) {
            accept(layer, seq, call.accepted);
        }
        advance({seq}, {call.taken()});
        return outputs;
    }

    [[nodiscard]] std::vector<unsigned char> blob(std::int32_t seq) const {
        std::vector<unsigned char> bytes(cache.snapshot_bytes(side_.ctx, seq));
        cache.snapshot(side_.ctx, seq, bytes.data(), bytes.size());
        return bytes;
    }
    [[nodiscard]] std::vector<kvpolicy::position_t> sorted(std::int32_t layer, std::int32_t seq,
                                                           std::int32_t head) const {
        std::vector<kvpolicy::position_t> held(
            static_cast<std::size_t>(cache.usage(layer, seq, head).size()));
        cache.retained(layer, seq, head, held.data());
        std::sort(held.begin(), held.end());
        return held;
    }

  private:
    using bytes = typename Side::template array<unsigned char>;
    using ints = typename Side::template array<std::int32_t>;
    using words = typename Side::template array<std::uint32_t>;

    static kvpolicy::workspace_view view(const bytes& memory) { return {memory.data(), memory.size()}; }
    static Cache make(const LifeShape& numbers, const P& policy, const typename P::scorer_type* scorers) {
        if constexpr (pooled) {
            return Cache(numbers.shape, numbers.pool, policy, scorers, numbers.attention);
        } else {
            return Cache(numbers.shape, policy, scorers, numbers.attention);
        }
    }

    Side& side_;
    LifeShape numbers_;

  public:
    Cache cache;

  private:
    bytes memory_;
    std::vector<std::unique_ptr<bytes>> slabs_;
};

/// The life of all sequences of one cache.
template <class Side, class P, class Cache>
class CacheLife {
  public:
    using Bound = LifeCache<Side, P, Cache>;
    using T = typename Bound::T;
    using Call = LifeCall<T>;
    static constexpr bool given = std::is_same_v<typename P::scorer_type, kvpolicy::GivenScores>;
    /// Whether a naive cache knows which keys stay, and what queries get.
    static constexpr bool naive = given && !P::observed;
    static constexpr bool naive_outputs = naive && !P::has_selection;

    CacheLife(const LifeShape& numbers, const P& policy, std::uint32_t seed,
              const typename P::scorer_type* scorers = nullptr)
        : numbers_(numbers),
          policy_(policy),
          scorers_(scorers),
          generator_(seed),
          bound_(side_, numbers, policy, scorers),
          log_(static_cast<std::size_t>(numbers.shape.max_sequences)),
          shadow_(log_.size()),
          naive_(log_.size()) {
        for (std::int32_t seq = 0; seq < numbers.shape.max_sequences; ++seq) {
            start(seq);
        }
    }

    /// So many operations. Throws where something differs.
    void run(std::int32_t operations) {
        for (std::int32_t n = 0; n < operations; ++n) {
            operation_ = n;
            try {
                what_.clear();
                operate();
                compare();
            } catch (const std::exception& error) {
                throw std::runtime_error("operation " + std::to_string(n) + ", " + what_ + ": " +
                                         error.what());
            }
        }
        for (std::int32_t seq = 0; seq < numbers_.shape.max_sequences; ++seq) {
            bound_.cache.clear(side_.ctx, seq);
        }
        if constexpr (Bound::pooled) {
            life_check(bound_.cache.free_pages(side_.ctx) == bound_.cache.attached_pages(),
                       "pages were lost");
        }
    }
    [[nodiscard]] std::int64_t dropped() const { return dropped_; }
    [[nodiscard]] std::int32_t forks() const { return forks_; }

  private:
    using Log = std::vector<std::shared_ptr<const Call>>;

    std::int32_t pick(std::int32_t below) {
        return static_cast<std::int32_t>(generator_() % static_cast<std::uint32_t>(below));
    }
    static std::size_t index(std::int32_t seq) { return static_cast<std::size_t>(seq); }

    // ---- what stands beside the cache --------------------------------------------------------------------

    std::vector<NaiveHead> fresh_heads() const {
        std::vector<NaiveHead> heads;
        for (std::int32_t layer = 0; layer < numbers_.shape.layers; ++layer) {
            for (std::int32_t h = 0; h < numbers_.shape.kv_heads; ++h) {
                NaiveHead one;
                one.head_params = policy_.params(layer, h);
                one.rebase_limit = numbers_.rebase;
                one.keeps = [policy = policy_](kvpolicy::position_t t) { return policy.keeps(t); };
                one.open = [gate = policy_.gate(), params = one.head_params](float score) {
                    return gate.open(score, params);
                };
                heads.push_back(std::move(one));
            }
        }
        return heads;
    }
    struct Naive {
        std::vector<NaiveHead> heads;            // [layers, kv_heads]
        std::vector<std::vector<float>> scores;  // the same, by position
    };

    void start(std::int32_t seq) {
        log_[index(seq)].clear();
        renew(seq);
        naive_[index(seq)] = {};
        if constexpr (naive) {
            naive_[index(seq)] = {fresh_heads(), {}};
            naive_[index(seq)].scores.resize(naive_[index(seq)].heads.size());
        }
    }
    void renew(std::int32_t seq) {
        shadow_[index(seq)] = std::make_unique<Bound>(side_, numbers_, policy_, scorers_);
    }
    /// Sequence `to` has lived what `log` says.
    void relive(std::int32_t to, Log log, Naive known) {
        renew(to);
        for (const auto& call : log) {
            shadow_[index(to)]->replay(0, *call);
        }
        log_[index(to)] = std::move(log);
        naive_[index(to)] = std::move(known);
    }

    /// What the naive cache says of tokens of a call: appends the first `taken`, and compares the outputs of
    /// all, where there are any.
    void follow(Naive& known, const Call& call, std::int32_t taken, std::int32_t layer,
                const std::vector<T>& out) {
        if constexpr (naive) {
            const kvpolicy::CacheShape& shape = numbers_.shape;
            const std::int32_t dim = shape.head_dim_qk, dim_vo = shape.head_dim_vo,
                               group = shape.query_heads / shape.kv_heads;
            const auto& of = call.layers[static_cast<std::size_t>(layer)];
            for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
                const auto place = static_cast<std::size_t>(layer * shape.kv_heads + h);
                NaiveHead& head = known.heads[place];
                std::vector<float>& scores = known.scores[place];
                for (std::int32_t j = 0; j < taken; ++j) {
                    const std::int32_t row = h * call.tokens + j;
                    scores.push_back(of.score[static_cast<std::size_t>(row)]);
                    head.append(real_row(of.k.data() + row * dim, dim),
                                real_row(of.v.data() + row * dim_vo, dim_vo),
                                [&](kvpolicy::position_t t) { return scores[static_cast<std::size_t>(t)]; });
                    for (std::int32_t g = 0; g < group; ++g) {
                        const std::int32_t query = (h * group + g) * call.tokens + j;
                        const std::vector<double> asked = real_row(of.q.data() + query * dim, dim);
                        if constexpr (P::has_eviction) {
                            head.asked(g, asked);
                        }
                        if (!naive_outputs || out.empty()) {
                            continue;
                        }
                        const AttentionResult wanted =
                            head.attend(asked, static_cast<double>(numbers_.attention.sm_scale));
                        for (std::int32_t c = 0; c < dim_vo; ++c) {
                            const double off =
                                std::abs(real(out[static_cast<std::size_t>(query * dim_vo + c)]) -
                                         wanted.out[static_cast<std::size_t>(c)]);
                            life_check(off < 1e-4, "outputs are off by " + std::to_string(off));
                        }
                    }
                }
            }
        }
    }

    void compare() {
        for (std::int32_t seq = 0; seq < numbers_.shape.max_sequences; ++seq) {
            const std::string name = "sequence " + std::to_string(seq);
            life_check(bound_.blob(seq) == shadow_[index(seq)]->blob(0),
                       name + " is not what a replay gives");
            if constexpr (naive && !Side::device) {
                for (std::int32_t layer = 0; layer < numbers_.shape.layers; ++layer) {
                    for (std::int32_t h = 0; h < numbers_.shape.kv_heads; ++h) {
                        const auto place = static_cast<std::size_t>(layer * numbers_.shape.kv_heads + h);
                        life_check(
                            bound_.sorted(layer, seq, h) == naive_[index(seq)].heads[place].positions(),
                            name + " holds other keys than the naive cache");
                    }
                }
            }
        }
    }

    // ---- operations --------------------------------------------------------------------------------------

    std::shared_ptr<Call> draw(LifeKind kind, std::int32_t tokens) {
        auto call = std::make_shared<Call>();
        call->kind = kind;
        call->tokens = tokens;
        std::normal_distribution<float> normal;
        const kvpolicy::CacheShape& shape = numbers_.shape;
        const auto fill = [&](auto& into, std::int32_t heads, std::int32_t dim, bool ties) {
            into.resize(static_cast<std::size_t>(heads * tokens * dim));
            for (auto& x : into) {
                const float drawn = normal(generator_);
                x = static_cast<std::decay_t<decltype(x)>>(ties ? std::round(2.0f * drawn) * 0.5f : drawn);
            }
        };
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            auto& of = call->layers.emplace_back();
            fill(of.q, shape.query_heads, shape.head_dim_qk, false);
            fill(of.k, shape.kv_heads, shape.head_dim_qk, false);
            fill(of.v, shape.kv_heads, shape.head_dim_vo, false);
            fill(of.score, shape.kv_heads, 1, true);
        }
        return call;
    }

    LifeKind draw_kind() {
        if constexpr (P::observed) {
            return pick(3) == 0 ? LifeKind::prefill : LifeKind::step;
        } else {
            constexpr LifeKind kinds[] = {LifeKind::step,  LifeKind::step,   LifeKind::prefill,
                                          LifeKind::draft, LifeKind::append, LifeKind::append_chunk};
            return kinds[pick(Side::appends ? 6 : 4)];
        }
    }

    void operate() {
        const std::int32_t max_sequences = numbers_.shape.max_sequences;
        const std::int32_t seq = pick(max_sequences), other = pick(max_sequences);
        const std::int32_t what = pick(Side::device ? 13 : 15);
        if (what < 7) {
            tokens(seq);
        } else if (what < 9) {
            what_ = "fork";
            fork(seq, other);
        } else if (what == 9) {
            reorder();
        } else if (what == 10 && pick(3) == 0) {
            what_ = "clear";
            bound_.cache.clear(side_.ctx, seq);
            start(seq);
        } else if (what <= 11) {
            reserve(seq);
        } else if (what == 12) {
            restore(seq, other);
        } else {
            refuse(seq);
        }
    }

    bool has_space(std::int32_t seq, std::int32_t tokens) const {
        return bound_.cache.length(side_.ctx, seq) + tokens <= numbers_.pool.max_seq_len;
    }

    /// A call on some sequences, at times forked between its layers, or with draft tokens waiting.
    void tokens(std::int32_t first) {
        LifeKind kind = draw_kind();
        const std::int32_t max_sequences = numbers_.shape.max_sequences;
        std::vector<std::int32_t> seqs{first};
        // On a device a call's masses may depend on what else is in the batch, to rounding.
        for (std::int32_t seq = 0; !Side::device && kind != LifeKind::draft && seq < max_sequences; ++seq) {
            if (seq != first && pick(3) == 0) {
                seqs.push_back(seq);
            }
        }
        const bool one = kind == LifeKind::step || kind == LifeKind::append;
        std::vector<std::shared_ptr<Call>> calls;
        for (const std::int32_t seq : seqs) {
            std::int32_t n = kind == LifeKind::draft ? 1 + pick(numbers_.shape.max_draft_tokens)
                             : one                   ? pick(8) != 0
                                                     : pick(numbers_.max_tokens + 1);
            if (!has_space(seq, n)) {  // it leaves, and another joins
                bound_.cache.clear(side_.ctx, seq);
                start(seq);
            }
            calls.push_back(draw(kind, n));
            calls.back()->accepted = pick(n + 1);
            what_ += std::string(what_.empty() ? "" : ", ") + name_of(kind) + " of " + std::to_string(n) +
                     " on " + std::to_string(seq);
        }
        std::vector<std::vector<std::vector<T>>> outputs(seqs.size());
        for (std::int32_t layer = 0; layer < numbers_.shape.layers; ++layer) {
            run_layer(kind, layer, seqs, calls, outputs);
            if constexpr (!Side::device) {
                if (kind != LifeKind::draft && calls[0]->tokens != 0 && pick(4) == 0) {
                    refuse_again(kind, layer, seqs[0], calls[0]);
                }
            }
            if (kind != LifeKind::draft && calls[0]->tokens != 0 && pick(6) == 0) {
                fork_within(seqs, calls, outputs, pick(max_sequences));
            }
        }
        if (kind == LifeKind::draft) {
            if (pick(4) == 0) {
                const std::int32_t other = pick(max_sequences);
                what_ += ", fork while they wait";
                if (other != first) {
                    fork(first, other);
                }
            }
            for (std::int32_t layer = 0; layer < numbers_.shape.layers; ++layer) {
                bound_.accept(layer, first, calls[0]->accepted);
            }
        }
        std::vector<std::int32_t> counts;
        for (const auto& call : calls) {
            counts.push_back(call->taken());
        }
        bound_.advance(seqs, counts);
        for (std::size_t i = 0; i < seqs.size(); ++i) {
            lived(seqs[i], calls[i], outputs[i]);
        }
        for (std::size_t i = 0; i < seqs.size(); ++i) {
            evict(seqs[i]);
        }
    }

    void run_layer(LifeKind kind, std::int32_t layer, const std::vector<std::int32_t>& seqs,
                   const std::vector<std::shared_ptr<Call>>& calls,
                   std::vector<std::vector<std::vector<T>>>& outputs) {
        std::vector<std::size_t> left(seqs.size());
        for (std::size_t i = 0; i < left.size(); ++i) {
            left[i] = i;
            outputs[i].resize(static_cast<std::size_t>(layer) + 1);
        }
        while (!left.empty()) {
            std::vector<std::int32_t> names;
            std::vector<const Call*> named;
            for (const std::size_t i : left) {
                names.push_back(seqs[i]);
                named.push_back(calls[i].get());
            }
            std::vector<std::uint32_t> status;
            std::vector<std::vector<T>> out;
            bound_.run_layer(kind, layer, names, named, status, out);
            std::vector<std::size_t> again;
            for (std::size_t x = 0; x < left.size(); ++x) {
                const std::size_t i = left[x];
                if (status[x] == kvpolicy::status_pool_exhausted && Bound::pooled) {
                    for (const T value : out[x]) {
                        life_check(real(value) == 0.0, "an entry without pages has outputs");
                    }
                    again.push_back(i);
                    continue;
                }
                life_check(status[x] == 0, "status " + std::to_string(status[x]));
                outputs[i][static_cast<std::size_t>(layer)] = out[x];
            }
            left = again;
            if (!left.empty()) {
                bound_.add_slab();
            }
        }
    }

    /// After all layers of a call and advance.
    void lived(std::int32_t seq, const std::shared_ptr<Call>& call,
               const std::vector<std::vector<T>>& outputs) {
        const auto wanted = shadow_[index(seq)]->replay(0, *call);
        log_[index(seq)].push_back(call);
        for (std::int32_t layer = 0; layer < numbers_.shape.layers; ++layer) {
            const std::vector<T>&out = outputs[static_cast<std::size_t>(layer)],
                  &of_replay = wanted[static_cast<std::size_t>(layer)];
            life_check(out.size() == of_replay.size(), "outputs are missing");
            for (std::size_t x = 0; x < out.size(); ++x) {
                const double off = std::abs(real(out[x]) - real(of_replay[x]));
                life_check(off < 1e-4, "outputs differ from a replay's by " + std::to_string(off));
            }
            Naive& known = naive_[index(seq)];
            if (call->kind == LifeKind::draft && naive_outputs) {
                Naive ahead = known;
                follow(ahead, *call, call->tokens, layer, out);
                follow(known, *call, call->accepted, layer, {});
            } else {
                follow(known, *call, call->taken(), layer, out);
            }
        }
    }

    void evict(std::int32_t seq) {
        if constexpr (P::has_eviction) {
            if (pick(4) == 0 || bound_.cache.length(side_.ctx, seq) == 0) {
                return;
            }
            const kvpolicy::EvictionReport report = bound_.evict(seq);
            dropped_ += report.dropped;
            const auto call = std::make_shared<Call>();
            shadow_[index(seq)]->replay(0, *call);
            log_[index(seq)].push_back(call);
            if constexpr (naive) {
                const auto part = policy_.eviction();
                auto& heads = naive_[index(seq)].heads;
                std::int64_t dropped = 0;
                for (std::int64_t all = 1; all != 0; dropped += all) {
                    std::int64_t rows = all = 0;
                    for (const NaiveHead& head : heads) {
                        rows += static_cast<std::int64_t>(head.rows.size());
                    }
                    for (NaiveHead& head : heads) {
                        all += rows > part.average * static_cast<std::int64_t>(heads.size())
                                   ? head.evict(part, static_cast<double>(numbers_.attention.sm_scale))
                                   : 0;
                    }
                }
                life_check(dropped == report.dropped, "evict dropped another number of rows");
            }
        }
    }

    /// A fork between layers of a token: the copy goes on with the other layers.
    void fork_within(std::vector<std::int32_t>& seqs, std::vector<std::shared_ptr<Call>>& calls,
                     std::vector<std::vector<std::vector<T>>>& outputs, std::int32_t to) {
        if (to == seqs[0]) {
            return;
        }
        what_ += ", forked within to " + std::to_string(to);
        bound_.with_slabs(
            [&](std::uint32_t* status) { bound_.cache.fork(side_.ctx, seqs[0], to, {.status = status}); });
        relive(to, log_[index(seqs[0])], naive_[index(seqs[0])]);
        const auto place = static_cast<std::size_t>(std::find(seqs.begin(), seqs.end(), to) - seqs.begin());
        if (place == seqs.size()) {
            seqs.push_back(to);
            calls.push_back(calls[0]);
            outputs.push_back(outputs[0]);
        } else {
            calls[place] = calls[0];
            outputs[place] = outputs[0];
        }
        ++forks_;
    }

    void fork(std::int32_t from, std::int32_t to) {
        bound_.with_slabs(
            [&](std::uint32_t* status) { bound_.cache.fork(side_.ctx, from, to, {.status = status}); });
        if (from != to) {
            relive(to, log_[index(from)], naive_[index(from)]);
            ++forks_;
        }
    }

    void reorder() {
        what_ = "reorder";
        const std::int32_t max_sequences = numbers_.shape.max_sequences;
        std::vector<std::int32_t> sources(static_cast<std::size_t>(1 + pick(max_sequences)));
        for (std::int32_t& one : sources) {
            one = pick(max_sequences);
            what_ += " " + std::to_string(one);
        }
        const typename Side::template array<std::int32_t> given_sources(sources);
        bound_.with_slabs([&](std::uint32_t* status) {
            bound_.cache.reorder(side_.ctx, given_sources.data(), static_cast<std::int32_t>(sources.size()),
                                 {.status = status});
        });
        const std::vector<Log> logs = log_;
        const std::vector<Naive> known = naive_;
        for (std::size_t i = 0; i < sources.size(); ++i) {
            if (sources[i] != static_cast<std::int32_t>(i)) {
                relive(static_cast<std::int32_t>(i), logs[index(sources[i])], known[index(sources[i])]);
            }
        }
    }

    void reserve([[maybe_unused]] std::int32_t seq) {
        if constexpr (Bound::pooled) {
            what_ = "reserve";
            const std::int32_t ahead = pick(6);
            if (has_space(seq, ahead)) {
                const typename Side::template array<std::int32_t> names(std::vector<std::int32_t>{seq});
                const kvpolicy::Batch batch{.count = 1, .seq_ids = names.data(), .length = ahead};
                if (bound_.cache.reserve(side_.ctx, batch) > 0 && pick(2) == 0) {
                    bound_.add_slab();
                }
            }
        }
    }

    void restore(std::int32_t from, std::int32_t to) {
        what_ = "snapshot of " + std::to_string(from) + ", restored to " + std::to_string(to);
        const std::vector<unsigned char> blob = bound_.blob(from);
        bound_.with_slabs([&](std::uint32_t* status) {
            bound_.cache.restore(side_.ctx, to, blob.data(), blob.size(), {.status = status});
        });
        if (from != to) {
            relive(to, log_[index(from)], naive_[index(from)]);
        }
    }

    // ---- what is refused leaves everything as it is ------------------------------------------------------

    template <class CallOnce>
    void refused(const char* name, CallOnce&& call) {
        const std::string sentence = refusal_of(call);
        life_check(sentence.find(" is not allowed; it must be ") != std::string::npos,
                   std::string(name) + " is not refused: " + sentence);
    }

    /// A layer that has the token already.
    void refuse_again(LifeKind kind, std::int32_t layer, std::int32_t seq,
                      const std::shared_ptr<Call>& call) {
        what_ += ", a second call of a layer";
        refused("a second call of a layer", [&] {
            std::vector<std::uint32_t> status;
            std::vector<std::vector<T>> out;
            bound_.run_layer(kind, layer, {seq}, {call.get()}, status, out);
        });
    }

    void refuse(std::int32_t seq) {
        using namespace kvpolicy;
        const CacheShape& shape = numbers_.shape;
        const auto call = draw(LifeKind::step, 1);
        auto& of = call->layers[0];
        StepIO<T> io{.q = view_bhsd<const T>(of.q.data(), 1, shape.query_heads, 1, shape.head_dim_qk),
                     .k = view_bhsd<const T>(of.k.data(), 1, shape.kv_heads, 1, shape.head_dim_qk),
                     .v = view_bhsd<const T>(of.v.data(), 1, shape.kv_heads, 1, shape.head_dim_vo)};
        std::vector<T> out(of.q.size() / static_cast<std::size_t>(shape.head_dim_qk) *
                           static_cast<std::size_t>(shape.head_dim_vo));
        io.out = view_bhsd(out.data(), 1, shape.query_heads, 1, shape.head_dim_vo);
        if constexpr (P::ranked && given && !P::observed) {
            io.scores = view_bhs<const float>(of.score.data(), 1, shape.kv_heads, 1);
        }
        std::int32_t names[] = {seq, seq};
        io.batch = Batch{.count = 1, .seq_ids = names, .length = 1};
        const LifeKind kind = pick(2) == 0 ? LifeKind::step : LifeKind::prefill;
        const auto attempt = [&](const char* name) {
            what_ = name;
            refused(name, [&] { bound_.invoke(kind, 0, io, {.batch = 2, .tokens = 1}, {}); });
        };
        constexpr float nan = std::numeric_limits<float>::quiet_NaN();
        switch (pick(6)) {
            case 0:
                names[0] = pick(2) == 0 ? -1 : shape.max_sequences;
                return attempt("a sequence out of range");
            case 1:
                io.batch.count = 2;
                return attempt("more entries than the tensors have");
            case 2:
                io.batch.length = 2;
                return attempt("more tokens than the tensors have");
            case 3:
                what_ = "a snapshot that is damaged";
                return refused("a snapshot that is damaged", [&] {
                    std::vector<unsigned char> blob = bound_.blob(seq);
                    blob[static_cast<std::size_t>(pick(static_cast<std::int32_t>(blob.size())))] ^= 1;
                    bound_.cache.restore(side_.ctx, seq, blob.data(), blob.size());
                });
            case 4:
                if constexpr (P::observed) {
                    of.k[static_cast<std::size_t>(pick(static_cast<std::int32_t>(of.k.size())))] = T(nan);
                    return attempt("a NaN key");
                } else if constexpr (P::ranked && given) {
                    const std::int32_t head = pick(shape.kv_heads);
                    const position_t t = bound_.cache.length(seq);
                    // Scores of sinks and of kept keys are not read.
                    if (t >= policy_.params(0, head).sinks && !policy_.keeps(t) && has_space(seq, 1)) {
                        of.score[static_cast<std::size_t>(head)] = nan;
                        return attempt("a NaN score");
                    }
                }
                return;
            default:
                what_ = "advance of a token that no layer has";
                return refused("advance of a token that no layer has", [&] {
                    bound_.cache.advance(side_.ctx, {.count = 1, .seq_ids = names, .length = 1});
                });
        }
    }

    LifeShape numbers_;
    P policy_;
    const typename P::scorer_type* scorers_;
    std::mt19937 generator_;
    Side side_;
    Bound bound_;
    std::vector<Log> log_;
    std::vector<std::unique_ptr<Bound>> shadow_;
    std::vector<Naive> naive_;
    std::int32_t operation_ = 0, forks_ = 0;
    std::int64_t dropped_ = 0;
    std::string what_;
};

}  // namespace test
