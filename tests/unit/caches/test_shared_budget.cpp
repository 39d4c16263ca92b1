// Caches whose heads share a budget: random lives of sequences beside the naive model (naive_shared.hpp) and
// beside a second cache that only steps.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_dual.hpp"
#include "support/loops.hpp"
#include "support/naive_shared.hpp"
#include "support/refusal.hpp"
#include "support/shadow.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

using namespace kvpolicy;

namespace {

constexpr std::int32_t max_sequences = 3, layers = 2, max_drafts = 4, dim = 8;
constexpr float inf = std::numeric_limits<float>::infinity();

/// Scores on leaving: the sum of all first numbers so far, less the key's second.
struct RunningSum {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;
    std::size_t state_size() const { return 1; }
    std::size_t scratch_size() const { return 0; }
    void reset(float* state) const { *state = 0.0f; }
    void absorb(std::int32_t, float* state, const float* key, const float*, float*) const {
        *state += key[0];
    }
    float read(std::int32_t, const float* state, const float* key, const float*, float*) const {
        return *state - key[1];
    }
};

using Plain = Policy<Sink<>, Window<>, SharedBudget<>>;
using Decayed = Policy<Sink<>, Window<>, ThresholdGate<at_least>, SharedBudget<>, Decay<dynamic>>;
using Kept = Policy<Sink<>, Window<>, SharedBudget<>, Decay<dynamic>, Stride<>>;
using Stateful = Policy<Sink<>, Window<>, SharedBudget<>, RunningSum>;

/// Scores that are hard on a search for the worst pair.
float score_of(int order, position_t t, std::int32_t head, std::mt19937& generator) {
    switch (order) {
        case 0:
            return static_cast<float>(generator() % 2001) * 1e-3f - 1.0f;
        case 1:
            return 1.0f;
        case 2:
            return static_cast<float>(t);
        case 3:
            return static_cast<float>(-t) + 1000.0f;
        case 4:
            return static_cast<float>(generator() % 3);
        case 5:
            return generator() % 3 == 0 ? inf : generator() % 2 == 0 ? -inf : 2.0f;
        case 6:
            return static_cast<float>(head) + (t % 7 == 0 ? 3.0f : 0.0f);
        default:
            return t % 3 == 0 ? -0.0f : 0.0f;
    }
}
constexpr int orders = 8;

/// Tokens of one sequence for all layers: q, k, v [layers, heads, tokens, dim] and scores.
struct Tokens {
    std::vector<test::Tensor<float>> q, k, v, out;
    std::vector<test::Plane<float>> scores, lse;
    std::int32_t count;
    Tokens(std::int32_t heads, std::int32_t group, std::int32_t tokens, position_t first, int order,
           std::mt19937& generator)
        : count(tokens) {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            q.emplace_back(1, heads * group, tokens, dim);
            k.emplace_back(1, heads, tokens, dim);
            v.emplace_back(1, heads, tokens, dim);
            out.emplace_back(1, heads * group, tokens, dim);
            scores.emplace_back(1, heads, tokens);
            lse.emplace_back(1, heads * group, tokens);
            q.back().fill_normal(generator);
            k.back().fill_normal(generator);
            v.back().fill_normal(generator);
            for (std::int32_t h = 0; h < heads; ++h) {
                for (std::int32_t j = 0; j < tokens; ++j) {
                    scores.back().at(0, h, j) = score_of(order, first + j, h, generator);
                }
            }
        }
    }
};

template <class P>
class Life {
  public:
    Life(const host& ctx, const P& policy, std::int32_t heads, std::int32_t page_size, position_t limit,
         std::uint32_t seed, bool from_all)
        : ctx_(ctx),
          policy_(policy),
          heads_(heads),
          shape_{.layers = layers,
                 .max_sequences = max_sequences,
                 .query_heads = heads * group_,
                 .kv_heads = heads,
                 .head_dim = dim,
                 .page_size = page_size,
                 .max_draft_tokens = max_drafts},
          generator_(seed),
          order_(static_cast<int>(seed % orders)),
          cache_(ctx, shape_, {.slab_pages = 3, .max_slabs = 4000, .max_seq_len = longest_}, policy, nullptr,
                 limit),
          stepped_(ctx, shape_, {.slab_pages = 3, .max_slabs = 4000, .max_seq_len = longest_}, policy,
                   nullptr, limit) {
        for (std::int32_t i = 0; i < layers * max_sequences; ++i) {
            test::NaiveShared one;
            const std::int32_t layer = i / max_sequences;
            for (std::int32_t h = 0; h < heads; ++h) {
                const HeadParams params = policy.params(layer, h);
                one.heads.push_back({params, params.floor, params.cap});
                one.places += params.budget;
            }
            const auto gate = policy.gate();
            one.open = [gate, numbers = one.heads](std::size_t h, float score) {
                return gate.open(score, numbers[h].params);
            };
            one.keeps = [policy](position_t t) { return policy.keeps(t); };
            one.rebase_limit = limit;
            one.from_all = from_all;
            one.clear();
            naive_.push_back(one);
            scores_.emplace_back(static_cast<std::size_t>(heads));
            sums_.emplace_back(static_cast<std::size_t>(heads), 0.0f);
        }
    }

    /// Rounds of random calls, and checks after each.
    void run(int rounds) {
        for (int round = 0; round < rounds; ++round) {
            const auto seq = static_cast<std::int32_t>(generator_() % max_sequences);
            const auto what = static_cast<int>(generator_() % 12);
            CAPTURE(round);
            CAPTURE(what);
            const position_t left = longest_ - at(0, seq).length();
            const auto most = static_cast<std::uint32_t>(std::min<position_t>(left, 2 + generator_() % 24));
            if (left == 0 || what == 11) {
                cache_.cache.clear(ctx_, seq);
                stepped_.cache.clear(ctx_, seq);
                for (std::int32_t layer = 0; layer < layers; ++layer) {
                    forget(layer, seq);
                }
            } else if (what < 6) {
                feed(seq, what < 3 ? 1 : 1 + static_cast<std::int32_t>(generator_() % most), what < 3,
                     what == 5);
            } else if (what < 8) {
                draft(seq, 1 + static_cast<std::int32_t>(generator_() %
                                                         std::min<std::uint32_t>(most, max_drafts)));
            } else if (what == 8) {
                copy(seq, static_cast<std::int32_t>(generator_() % max_sequences));
            } else if (what == 9) {
                reorder();
            } else {
                move_by_snapshot(seq, static_cast<std::int32_t>(generator_() % max_sequences));
            }
            check();
        }
        CHECK(worst_ <= 1.0);
        // Every page is free once all sequences are gone.
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            cache_.cache.clear(ctx_, seq);
        }
        CHECK(cache_.cache.free_pages() == cache_.cache.attached_pages());
    }

  private:
    static constexpr std::int32_t group_ = 2;
    static constexpr position_t longest_ = 160;

    test::NaiveShared& at(std::int32_t layer, std::int32_t seq) {
        return naive_[static_cast<std::size_t>(layer * max_sequences + seq)];
    }
    std::vector<std::vector<float>>& scores_of(std::int32_t layer, std::int32_t seq) {
        return scores_[static_cast<std::size_t>(layer * max_sequences + seq)];
    }
    std::vector<float>& sums_of(std::int32_t layer, std::int32_t seq) {
        return sums_[static_cast<std::size_t>(layer * max_sequences + seq)];
    }
    void forget(std::int32_t layer, std::int32_t seq) {
        at(layer, seq).clear();
        for (std::vector<float>& one : scores_of(layer, seq)) {
            one.clear();
        }
        sums_of(layer, seq).assign(static_cast<std::size_t>(heads_), 0.0f);
    }
    void take_over(std::int32_t from, std::int32_t to) {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            if (from != to) {
                at(layer, to) = at(layer, from);
                scores_of(layer, to) = scores_of(layer, from);
                sums_of(layer, to) = sums_of(layer, from);
            }
        }
    }

    /// Tells the naive model token j, and compares the outputs of the query.
    void tell(std::int32_t layer, std::int32_t seq, Tokens& in, std::int32_t j, bool outputs) {
        const auto l = static_cast<std::size_t>(layer);
        std::vector<std::vector<double>> keys, values;
        std::vector<std::vector<float>>& known = scores_of(layer, seq);
        std::vector<float>& sums = sums_of(layer, seq);
        for (std::int32_t h = 0; h < heads_; ++h) {
            const float* const key = in.k[l].view().row(0, h, j);
            keys.push_back(test::real_row(key, dim));
            values.push_back(test::real_row(in.v[l].view().row(0, h, j), dim));
            known[static_cast<std::size_t>(h)].push_back(
                P::scorer_type::when == score_time::given ? in.scores[l].at(0, h, j) : key[1]);
            sums[static_cast<std::size_t>(h)] += key[0];
        }
        at(layer, seq).append(keys, values, [&](std::size_t h, position_t t) {
            const float score = known[h][static_cast<std::size_t>(t)];
            return P::scorer_type::when == score_time::given ? score : sums[h] - score;
        });
        for (std::int32_t hq = 0; outputs && hq < heads_ * group_; ++hq) {
            const test::AttentionResult wanted =
                at(layer, seq)
                    .rows[static_cast<std::size_t>(hq / group_)]
                    .attend(test::real_row(in.q[l].view().row(0, hq, j), dim),
                            1.0f / std::sqrt(static_cast<float>(dim)));
            for (std::int32_t c = 0; c < dim; ++c) {
                const double value = wanted.out[static_cast<std::size_t>(c)];
                note(in.out[l].view().row(0, hq, j)[c], value,
                     test::compute_error<float> + test::storage_unit<float> * std::abs(value));
            }
            note(in.lse[l].at(0, hq, j), wanted.lse, 2e-5 + 0x1p-24 * std::abs(wanted.lse));
        }
    }
    void note(double got, double wanted, double allowed) {
        const double ratio = std::abs(got - wanted) / allowed;
        worst_ = ratio <= worst_ ? worst_ : ratio == ratio ? ratio : std::numeric_limits<double>::infinity();
    }

    /// A call that finds no page changes nothing (a copy: but for the order of free pages), and can be made
    /// again.
    template <class Call>
    void with_pages(test::BoundDual<P, float>& bound, const Call& call, bool copies = false) {
        for (bool again = true; again;) {
            std::uint32_t status = 0;
            const std::vector<unsigned char> before =
                !copies && generator_() % 16 == 0 ? bound.everything() : std::vector<unsigned char>{};
            call(&status);
            again = (status & status_pool_exhausted) != 0;
            if (again) {
                CHECK((before.empty() || before == bound.everything()));
                bound.add_slab(ctx_);
            }
        }
    }
    StepIO<float> io_of(Tokens& in, std::int32_t layer, std::int32_t seq, std::int32_t from,
                        std::int32_t tokens) {
        const auto l = static_cast<std::size_t>(layer);
        seq_ = seq;
        plane_view<float> lse = in.lse[l].view();
        lse.data += from;
        lse.length = tokens;
        StepIO<float> io{.q = std::as_const(in.q[l]).tokens(from, tokens),
                         .k = std::as_const(in.k[l]).tokens(from, tokens),
                         .v = std::as_const(in.v[l]).tokens(from, tokens),
                         .out = in.out[l].tokens(from, tokens),
                         .batch = {.count = 1, .seq_ids = &seq_, .length = tokens},
                         .lse = lse};
        if constexpr (P::scorer_type::when == score_time::given) {
            io.scores = std::as_const(in.scores[l]).tokens(from, tokens);
        }
        return io;
    }
    /// n tokens of the second cache, one by one.
    void step_all(std::int32_t seq, Tokens& in, std::int32_t n) {
        for (std::int32_t j = 0; j < n; ++j) {
            for (std::int32_t layer = 0; layer < layers; ++layer) {
                const auto ref = stepped_.cache.layer(layer);
                test::Workspace workspace(step_workspace_bytes(ctx_, ref, 1));
                with_pages(stepped_, [&](std::uint32_t* status) {
                    step(ctx_, ref, io_of(in, layer, seq, j, 1), workspace, {.status = status});
                });
            }
            stepped_.cache.advance(ctx_, {.count = 1, .seq_ids = &seq, .length = 1});
        }
    }

    void feed(std::int32_t seq, std::int32_t n, bool as_step, bool without_attention) {
        Tokens in(heads_, group_, n, at(0, seq).length(), order_, generator_);
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            const auto ref = cache_.cache.layer(layer);
            test::Workspace workspace(without_attention
                                          ? append_workspace_bytes(ctx_, ref, {.batch = 1, .tokens = n})
                                          : workspace_bytes(ctx_, ref, {.batch = 1, .tokens = n}));
            const StepIO<float> io = io_of(in, layer, seq, 0, n);
            with_pages(cache_, [&](std::uint32_t* status) {
                if (without_attention) {
                    append_chunk(ctx_, ref, io, workspace, {.status = status});
                } else if (as_step) {
                    step(ctx_, ref, io, workspace, {.status = status});
                } else {
                    prefill(ctx_, ref, io, workspace, {.status = status});
                }
            });
            for (std::int32_t j = 0; j < n; ++j) {
                tell(layer, seq, in, j, !without_attention);
            }
        }
        cache_.cache.advance(ctx_, {.count = 1, .seq_ids = &seq, .length = n});
        step_all(seq, in, n);
    }
    void draft(std::int32_t seq, std::int32_t n) {
        const auto accepted = static_cast<std::int32_t>(generator_() % static_cast<std::uint32_t>(n + 1));
        Tokens in(heads_, group_, n, at(0, seq).length(), order_, generator_);
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            const auto ref = cache_.cache.layer(layer);
            const std::vector<unsigned char> before = test::content_of(ref, seq);
            test::Workspace workspace(workspace_bytes(ctx_, ref, {.batch = 1, .tokens = n}));
            append_draft(ctx_, ref, io_of(in, layer, seq, 0, n), workspace);
            CHECK(before == test::content_of(ref, seq));
            const test::NaiveShared naive = at(layer, seq);
            const auto known = scores_of(layer, seq);
            const auto sums = sums_of(layer, seq);
            for (std::int32_t j = 0; j < n; ++j) {
                tell(layer, seq, in, j, true);
            }
            at(layer, seq) = naive;
            scores_of(layer, seq) = known;
            sums_of(layer, seq) = sums;
            for (std::int32_t j = 0; j < accepted; ++j) {
                tell(layer, seq, in, j, false);
            }
            with_pages(cache_, [&](std::uint32_t* status) {
                accept(ctx_, ref, {.count = 1, .seq_ids = &seq, .length = accepted}, workspace,
                       {.status = status});
            });
        }
        cache_.cache.advance(ctx_, {.count = 1, .seq_ids = &seq, .length = accepted});
        step_all(seq, in, accepted);
    }
    void copy(std::int32_t from, std::int32_t to) {
        for (test::BoundDual<P, float>* bound : {&cache_, &stepped_}) {
            const auto call = [&](std::uint32_t* status) {
                bound->cache.fork(ctx_, from, to, {.status = status});
            };
            with_pages(*bound, call, true);
        }
        take_over(from, to);
    }
    void reorder() {
        std::int32_t sources[max_sequences];
        for (std::int32_t& source : sources) {
            source = static_cast<std::int32_t>(generator_() % max_sequences);
        }
        for (test::BoundDual<P, float>* bound : {&cache_, &stepped_}) {
            const auto call = [&](std::uint32_t* status) {
                bound->cache.reorder(ctx_, sources, max_sequences, {.status = status});
            };
            with_pages(*bound, call, true);
        }
        const auto naive = naive_;
        const auto known = scores_;
        const auto sums = sums_;
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
                const auto from = static_cast<std::size_t>(layer * max_sequences + sources[seq]);
                at(layer, seq) = naive[from];
                scores_of(layer, seq) = known[from];
                sums_of(layer, seq) = sums[from];
            }
        }
    }
    /// A sequence of one cache goes on in the other, too.
    void move_by_snapshot(std::int32_t from, std::int32_t to) {
        std::vector<unsigned char> blob(cache_.cache.snapshot_bytes(from));
        cache_.cache.snapshot(ctx_, from, blob.data(), blob.size());
        for (test::BoundDual<P, float>* bound : {&cache_, &stepped_}) {
            const auto call = [&](std::uint32_t* status) {
                bound->cache.restore(ctx_, to, blob.data(), blob.size(), {.status = status});
            };
            with_pages(*bound, call, true);
        }
        take_over(from, to);
    }

    void check() {
        bool same_keys = true, same_rows = true, in_pages = true, interval = true, bounded = true;
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            const auto ref = cache_.cache.layer(layer);
            for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
                std::int64_t pages = ref.stashed[seq], long_range = 0;
                for (std::int32_t h = 0; h < heads_; ++h) {
                    same_keys = same_keys && cache_.sorted(layer, seq, h) ==
                                                 at(layer, seq).rows[static_cast<std::size_t>(h)].positions();
                    const std::int32_t held = ref.held[ref.head_index(seq, h)];
                    in_pages = in_pages && held == (ref.used(seq, h) + ref.page_size - 1) / ref.page_size;
                    pages += held;
                    long_range += ref.num_long_range[ref.head_index(seq, h)];
                }
                if (!P::has_keep) {
                    bounded = bounded && pages <= cache_.cache.pages_per_sequence(layer) &&
                              long_range <= ref.shared_slots;
                }
                same_rows = same_rows &&
                            test::content_of(ref, seq) == test::content_of(stepped_.cache.layer(layer), seq);
                interval = interval && !at(layer, seq).returned;
            }
        }
        CHECK(same_keys);
        CHECK(same_rows);
        CHECK(in_pages);
        CHECK(bounded);
        CHECK(interval);
    }

    const host& ctx_;
    P policy_;
    std::int32_t heads_;
    CacheShape shape_;
    std::mt19937 generator_;
    int order_;
    test::BoundDual<P, float> cache_, stepped_;
    std::vector<test::NaiveShared> naive_;                 // [layers, max_sequences]
    std::vector<std::vector<std::vector<float>>> scores_;  // [layers, max_sequences, heads], by position
    std::vector<std::vector<float>> sums_;                 // [layers, max_sequences, heads]
    std::int32_t seq_ = 0;
    double worst_ = 0.0;
};

struct Numbers {
    std::int32_t heads, sinks, window, k, floor, cap;
};
constexpr Numbers numbers[] = {
    {1, 2, 3, 5, 0, unlimited}, {2, 0, 1, 3, 0, unlimited},   {3, 1, 4, 6, 2, unlimited},
    {3, 2, 2, 4, 0, 6},         {5, 1, 3, 4, 1, 9},           {2, 3, 5, 0, 0, unlimited},
    {4, 0, 2, 1, 1, 2},         {2, 1, 2, 200, 3, unlimited}, {8, 1, 1, 2, 0, 5},
};
constexpr std::int32_t page_sizes[] = {1, 2, 3, 4, 16};

SharedBudget<> budget_of(const Numbers& n) { return SharedBudget<>{n.k, {.floor = n.floor, .cap = n.cap}}; }

}  // namespace

TEST_CASE("lives of sequences: sinks, window, floors and caps, every order of scores") {
    const host ctx(2);
    std::uint32_t seed = 0;
    for (const Numbers& n : numbers) {
        for (int i = 0; i < test::rounds(8, 2); ++i, ++seed) {
            CAPTURE(seed);
            CAPTURE(n.heads);
            CAPTURE(n.k);
            Life<Plain>(ctx, Plain{Sink<>{n.sinks}, Window<>{n.window}, budget_of(n)}, n.heads,
                        page_sizes[seed % 5], rebase_limit, seed, true)
                .run(test::rounds(60, 30));
        }
    }
}

TEST_CASE("lives of sequences: gates and decay, one for all heads or by head, of steps 1 and more") {
    const host ctx(1);
    std::uint32_t seed = 100;
    for (const Numbers& n : numbers) {
        for (int i = 0; i < test::rounds(8, 2); ++i, ++seed) {
            CAPTURE(seed);
            CAPTURE(n.heads);
            CAPTURE(n.k);
            std::mt19937 generator(seed);
            const bool one = i % 2 == 0;
            std::vector<float> slopes;
            std::vector<std::int32_t> steps;
            for (std::int32_t h = 0; h < layers * n.heads; ++h) {
                slopes.push_back(one ? -0.05f : -0.01f * static_cast<float>(generator() % 20));
                steps.push_back(i % 4 == 1 ? 1 : i % 4 == 2 ? 5 : i % 4 == 0 ? 1 : 1 + h % 40);
            }
            const Decayed policy{Sink<>{n.sinks}, Window<>{n.window}, ThresholdGate<at_least>{-0.5f},
                                 budget_of(n),
                                 Decay<dynamic>{per_head(slopes.data(), layers, n.heads),
                                                per_head(steps.data(), layers, n.heads)}};
            Life<Decayed>(ctx, policy, n.heads, page_sizes[seed % 5], 1 + seed % 40, seed,
                          policy.has_static_shared_order(0, n.heads))
                .run(test::rounds(60, 30));
        }
    }
}

TEST_CASE("lives of sequences: numbers by head and layer, and offsets of scores") {
    const host ctx(2);
    for (std::uint32_t seed = 300; seed < 300 + std::uint32_t{test::rounds(16, 4)}; ++seed) {
        CAPTURE(seed);
        std::mt19937 generator(seed);
        const std::int32_t heads = 3;
        std::vector<std::int32_t> sinks, windows, keys, floors, caps;
        std::vector<float> offsets;
        for (std::int32_t h = 0; h < layers * heads; ++h) {
            sinks.push_back(static_cast<std::int32_t>(generator() % 4));
            windows.push_back(1 + static_cast<std::int32_t>(generator() % 6));
            keys.push_back(static_cast<std::int32_t>(2 + generator() % 9));
            floors.push_back(static_cast<std::int32_t>(generator() % 3));
            caps.push_back(floors.back() + static_cast<std::int32_t>(generator() % 12));
            offsets.push_back(static_cast<float>(generator() % 5) * 0.25f);
        }
        const Plain policy{Sink<>{per_head(sinks.data(), layers, heads)},
                           Window<>{per_head(windows.data(), layers, heads)},
                           SharedBudget<>{per_head(keys.data(), layers, heads),
                                          {.floor = per_head(floors.data(), layers, heads),
                                           .cap = per_head(caps.data(), layers, heads),
                                           .score_offset = per_head(offsets.data(), layers, heads)}}};
        Life<Plain>(ctx, policy, heads, page_sizes[seed % 5], rebase_limit, seed, true)
            .run(test::rounds(60, 30));
    }
}

TEST_CASE("lives of sequences: keys that are kept for their position, and a scorer with a state") {
    const host ctx(2);
    for (std::uint32_t seed = 400; seed < 400 + std::uint32_t{test::rounds(12, 4)}; ++seed) {
        CAPTURE(seed);
        const Numbers n = numbers[seed % std::size(numbers)];
        Life<Kept>(
            ctx,
            Kept{Sink<>{n.sinks}, Window<>{n.window}, budget_of(n), Decay<dynamic>{-0.02f, 1}, Stride<>{5}},
            n.heads, page_sizes[seed % 5], rebase_limit, seed, false)
            .run(test::rounds(60, 30));
        Life<Stateful>(ctx, Stateful{Sink<>{n.sinks}, Window<>{n.window}, budget_of(n), RunningSum{}},
                       n.heads, page_sizes[seed % 5], rebase_limit, seed, true)
            .run(test::rounds(60, 30));
    }
}

namespace {

/// Feeds given scores [heads][length] to a cache of one layer and one sequence, in chunks of `chunk` tokens
/// (0: by steps); after each it calls visit(tokens so far).
template <class P, class Visit>
void feed_scores(const host& ctx, test::BoundDual<P, float>& bound,
                 const std::vector<std::vector<float>>& scores, std::int32_t chunk, const Visit& visit) {
    const auto heads = static_cast<std::int32_t>(scores.size()),
               length = static_cast<std::int32_t>(scores[0].size()), count = std::max(chunk, 1);
    std::mt19937 generator(1);
    test::Tensor<float> q(1, heads, length, dim), k(1, heads, length, dim), out(1, heads, length, dim);
    q.fill_normal(generator);
    k.fill_normal(generator);
    test::Plane<float> plane(1, heads, length);
    for (std::int32_t h = 0; h < heads; ++h) {
        std::copy(scores[static_cast<std::size_t>(h)].begin(), scores[static_cast<std::size_t>(h)].end(),
                  &plane.at(0, h, 0));
    }
    for (std::int32_t t = 0; t < length; t += count) {
        const std::int32_t n = std::min(count, length - t);
        const Batch batch{.count = 1, .length = n};
        bound.reserve(ctx, batch);
        test::call_ref<P, float>(ctx, bound.cache.layer(0), batch, std::as_const(q).tokens(t, n),
                                 std::as_const(k).tokens(t, n), std::as_const(k).tokens(t, n),
                                 out.tokens(t, n), {.scores = std::as_const(plane).tokens(t, n)}, chunk == 0);
        bound.cache.advance(ctx, batch);
        visit(t + n);
    }
}
CacheShape shape_of(std::int32_t heads, std::int32_t page_size) {
    return {.layers = 1,
            .max_sequences = 3,
            .query_heads = heads,
            .kv_heads = heads,
            .head_dim = dim,
            .page_size = page_size};
}
using Positions = std::vector<position_t>;

}  // namespace

TEST_CASE("decays that differ by head: an evicted pair does not return") {
    const host ctx(1);
    const float slopes[] = {0.0f, -1.0f};
    using P = Policy<Window<1>, SharedBudget<>, Decay<1>>;
    const std::int32_t keys[] = {1, 0};
    const P policy{{}, SharedBudget<>{per_head(keys, 1, 2)}, Decay<1>{per_head(slopes, 1, 2)}};
    for (const std::int32_t chunk : {0, 1, 2, 5}) {
        test::BoundDual<P, float> bound(ctx, shape_of(2, 2),
                                        {.slab_pages = 4, .max_slabs = 4, .max_seq_len = 16}, policy);
        feed_scores(ctx, bound, {{0.5f, -9, -9, -9, -9}, {3, -9, -9, -9, -9}}, chunk, [&](std::int32_t n) {
            if (n >= 2) {
                // (1, 0) won at q = 1; at q = 4 its value is below 0.5, but (0, 0) is gone.
                CHECK(bound.sorted(0, 0, 0) == Positions{n - 1});
                CHECK(bound.sorted(0, 0, 1) == Positions{0, n - 1});
            }
        });
    }
}

TEST_CASE("slots: a candidate takes that of the oldest evicted key, and the last slots fill the others") {
    const host ctx(1);
    using P = Policy<Window<1>, SharedBudget<>>;
    const P policy{{}, SharedBudget<>{2}};  // 3 heads: 6 slots
    // Head 0 holds 5 keys and head 1 one, until better keys of heads 1 and 2 evict keys of head 0.
    const std::vector<std::vector<float>> scores = {
        {1, 2, 3, 4, 5, -9, -9, 0}, {-8, -8, -8, -8, 9, 9, 9, 0}, {-7, -7, -7, -7, -7, 8, 8, 0}};
    for (const std::int32_t chunk : {0, 1, 3, 8}) {
        CAPTURE(chunk);
        test::BoundDual<P, float> bound(ctx, shape_of(3, 2),
                                        {.slab_pages = 4, .max_slabs = 9, .max_seq_len = 16}, policy);
        const auto rows = [&](std::int32_t h) {
            Positions held(static_cast<std::size_t>(bound.cache.usage(0, 0, h).size()));
            bound.cache.retained(0, 0, h, held.data());
            return held;
        };
        feed_scores(ctx, bound, scores, chunk, [&](std::int32_t n) {
            if (n == 6) {
                CHECK(rows(0) == Positions{5, 0, 1, 2, 3, 4});
                CHECK(rows(1) == Positions{5, 4});
                CHECK(rows(2) == Positions{5});
            } else if (n == 7) {  // for (1, 5) and (2, 5) go (0, 0) and (0, 1), slots 0 and 1
                CHECK(rows(0) == Positions{6, 3, 4, 2});
                CHECK(rows(1) == Positions{6, 4, 5});
                CHECK(rows(2) == Positions{6, 5});
            } else if (n == 8) {  // then (0, 2) and (0, 3), slots 2 and 0
                CHECK(rows(0) == Positions{7, 4});
                CHECK(rows(1) == Positions{7, 4, 5, 6});
                CHECK(rows(2) == Positions{7, 5, 6});
                CHECK(bound.cache.layer(0).stashed[0] <= bound.cache.pages_per_sequence(0));
            }
        });
    }
}

TEST_CASE("pages_per_sequence() is the most that any division of the slots needs") {
    for (std::uint32_t seed = 0; seed < 300; ++seed) {
        std::mt19937 generator(seed);
        const auto draw = [&](std::uint32_t below) { return static_cast<std::int32_t>(generator() % below); };
        const std::int32_t heads = 1 + draw(3), page = 1 + draw(5), total = draw(9), length = 1 + draw(14);
        std::vector<HeadParams> params(static_cast<std::size_t>(heads));
        for (HeadParams& one : params) {
            one.sinks = draw(4);
            one.window = 1 + draw(5);
            one.cap = draw(3) == 0 ? unlimited : draw(8);
        }
        // All divisions, one head after another.
        std::int64_t most = 0;
        const auto divide = [&](const auto& again, std::int32_t head, std::int32_t left,
                                std::int64_t pages) -> void {
            if (head == heads) {
                most = std::max(most, pages);
                return;
            }
            const HeadParams& one = params[static_cast<std::size_t>(head)];
            const std::int32_t recent = std::min(one.sinks + one.window, length);
            for (std::int32_t n = 0; n <= std::min({left, one.cap, length - recent}); ++n) {
                again(again, head + 1, left - n, pages + (recent + n + page - 1) / page);
            }
        };
        divide(divide, 0, total, 0);
        CHECK(detail::shared_pages_at_most<Plain>(params.data(), heads, total, page, length) == most);
    }
}

TEST_CASE("a pool of pages_per_sequence() for each sequence and layer is never exhausted") {
    const host ctx(1);
    for (std::uint32_t seed = 0; seed < std::uint32_t{test::rounds(12, 4)}; ++seed) {
        CAPTURE(seed);
        const Numbers n = numbers[seed % std::size(numbers)];
        const Plain policy{Sink<>{n.sinks}, Window<>{n.window}, budget_of(n)};
        CacheShape shape = shape_of(n.heads, page_sizes[seed % 5]);
        const DualCache<Plain, float> plan(shape, {.slab_pages = 1, .max_seq_len = 300}, policy);
        const auto pages = static_cast<std::int32_t>(3 * plan.pages_per_sequence(0));
        test::BoundDual<Plain, float> bound(
            ctx, shape, {.slab_pages = pages, .max_slabs = 1, .max_seq_len = 300}, policy);
        bound.add_slab(ctx);
        std::mt19937 generator(seed);
        // Which heads have the better keys changes from time to time.
        for (int round = 0; round < 120; ++round) {
            const std::int32_t seq = static_cast<std::int32_t>(generator() % 3);
            const std::int32_t tokens =
                generator() % 2 == 0 ? 1 : 1 + static_cast<std::int32_t>(generator() % 9);
            if (bound.cache.length(seq) + tokens > 300) {
                bound.cache.clear(ctx, seq);
            }
            test::Tensor<float> rows(1, n.heads, tokens, dim), out(1, n.heads, tokens, dim);
            rows.fill_normal(generator);
            test::Plane<float> scores(1, n.heads, tokens);
            for (std::int32_t h = 0; h < n.heads; ++h) {
                for (std::int32_t j = 0; j < tokens; ++j) {
                    scores.at(0, h, j) =
                        static_cast<float>(round) + static_cast<float>((h + round / 10) % n.heads) * 40.0f;
                }
            }
            const Batch batch{.count = 1, .seq_ids = &seq, .length = tokens};
            // Without a status exhaustion would be refused.
            test::call_ref<Plain, float>(ctx, bound.cache.layer(0), batch, std::as_const(rows).view(),
                                         std::as_const(rows).view(), std::as_const(rows).view(), out.view(),
                                         {.scores = scores.view()}, tokens == 1);
            bound.cache.advance(ctx, batch);
        }
        // And with reserve() for all that may come, nothing is left for others.
        const Batch all{.count = 3, .length = 300};
        for (std::int32_t seq = 0; seq < 3; ++seq) {
            bound.cache.clear(ctx, seq);
        }
        CHECK(bound.cache.reserve(ctx, all) == 0);
        CHECK(bound.cache.free_pages() == 0);
    }
}

TEST_CASE("sequences of a batch are as if alone, and one without pages is left alone") {
    const host ctx(2);
    for (std::uint32_t seed = 0; seed < std::uint32_t{test::rounds(8, 3)}; ++seed) {
        CAPTURE(seed);
        const Numbers n = numbers[1 + seed % (std::size(numbers) - 1)];
        const Plain policy{Sink<>{n.sinks}, Window<>{n.window}, budget_of(n)};
        const CacheShape shape = shape_of(n.heads, page_sizes[seed % 5]);
        const PoolShape pool{.slab_pages = 2, .max_slabs = 900, .max_seq_len = 200};
        test::BoundDual<Plain, float> together(ctx, shape, pool, policy), alone(ctx, shape, pool, policy);
        std::mt19937 generator(seed);
        std::int32_t refused = 0;
        bool same = true, same_out = true;
        for (int round = 0; round < 25; ++round) {
            const bool steps = generator() % 2 == 0;
            constexpr std::int32_t longest = 7;
            std::int32_t ids[] = {0, 1, 2}, lengths[3];
            std::shuffle(ids, ids + 3, generator);
            for (std::int32_t& length : lengths) {
                length = static_cast<std::int32_t>(generator() % (steps ? 2 : longest + 1));
            }
            test::Tensor<float> q(3, n.heads, longest, dim), k(3, n.heads, longest, dim),
                out(3, n.heads, longest, dim), wanted(3, n.heads, longest, dim);
            q.fill_normal(generator);
            k.fill_normal(generator);
            test::Plane<float> scores(3, n.heads, longest);
            test::fill_scores(scores, test::Scores::random, generator);
            std::int32_t left[] = {lengths[0], lengths[1], lengths[2]};
            for (bool again = true; again;) {
                std::uint32_t status[3] = {};
                const std::int32_t most = steps ? 1 : longest;
                test::call_ref<Plain, float>(
                    ctx, together.cache.layer(0), {.count = 3, .seq_ids = ids, .q_len = left, .length = most},
                    std::as_const(q).tokens(0, most), std::as_const(k).tokens(0, most),
                    std::as_const(k).tokens(0, most), out.tokens(0, most),
                    {.scores = std::as_const(scores).tokens(0, most)}, steps, status);
                again = false;
                for (std::int32_t i = 0; i < 3; ++i) {
                    left[i] = status[i] == 0 ? 0 : left[i];
                    again = again || status[i] != 0;
                }
                if (again) {
                    ++refused;
                    together.add_slab(ctx);
                }
            }
            together.cache.advance(ctx, {.count = 3, .seq_ids = ids, .q_len = lengths, .length = longest});
            for (std::int32_t i = 0; i < 3; ++i) {
                for (std::int32_t j = 0; j < lengths[i]; ++j) {
                    const Batch one{.count = 1, .seq_ids = ids + i, .length = 1};
                    alone.reserve(ctx, one);
                    auto mine = [&](const test::Tensor<float>& tensor) {
                        auto rows = tensor.tokens(j, 1);
                        rows.data += i * rows.batch_stride;
                        rows.batch = 1;
                        return rows;
                    };
                    auto score = std::as_const(scores).tokens(j, 1);
                    score.data += i * score.batch_stride;
                    score.batch = 1;
                    auto result = wanted.tokens(j, 1);
                    result.data += i * result.batch_stride;
                    result.batch = 1;
                    test::call_ref<Plain, float>(ctx, alone.cache.layer(0), one, mine(q), mine(k), mine(k),
                                                 result, {.scores = score}, true);
                    alone.cache.advance(ctx, one);
                    for (std::int32_t h = 0; h < n.heads; ++h) {
                        for (std::int32_t c = 0; c < dim; ++c) {
                            same_out = same_out && std::abs(out.view().row(i, h, j)[c] -
                                                            wanted.view().row(i, h, j)[c]) < 2e-5f;
                        }
                    }
                }
            }
            for (std::int32_t seq = 0; seq < 3; ++seq) {
                same = same && test::content_of(together.cache.layer(0), seq) ==
                                   test::content_of(alone.cache.layer(0), seq);
            }
        }
        CHECK(same);
        CHECK(same_out);
        CHECK(refused > 0);
    }
}

TEST_CASE("a NaN score is refused with nothing changed; with a status it ranks last") {
    const host ctx(1);
    const Plain policy{Sink<>{0}, Window<>{1}, SharedBudget<>{1}};
    for (const std::int32_t tokens : {1, 4}) {
        test::BoundDual<Plain, float> bound(ctx, shape_of(2, 2),
                                            {.slab_pages = 9, .max_slabs = 1, .max_seq_len = 16}, policy);
        bound.add_slab(ctx);
        test::Tensor<float> rows(1, 2, 4, dim), out(1, 2, 4, dim);
        test::Plane<float> scores(1, 2, 4, 1.0f);
        const auto call = [&](std::uint32_t* status, std::int32_t first, std::int32_t n) {
            test::call_ref<Plain, float>(
                ctx, bound.cache.layer(0), {.count = 1, .length = n}, std::as_const(rows).tokens(first, n),
                std::as_const(rows).tokens(first, n), std::as_const(rows).tokens(first, n),
                out.tokens(first, n), {.scores = std::as_const(scores).tokens(first, n)}, n == 1, status);
        };
        scores.at(0, 1, 0) = std::numeric_limits<float>::quiet_NaN();
        const std::vector<unsigned char> before = bound.everything();
        CHECK_REFUSED(call(nullptr, 0, tokens), "io.scores[0][1][0]: NaN");
        CHECK(bound.everything() == before);
        std::uint32_t status = 0;
        for (std::int32_t t = 0; t < 4; t += tokens) {
            call(&status, t, tokens);
            bound.cache.advance(ctx, {.count = 1, .length = tokens});
        }
        CHECK(status == status_nan_score);
        CHECK(bound.sorted(0, 0, 0) == Positions{0, 1, 3});
        CHECK(bound.sorted(0, 0, 1) == Positions{3});
    }
}
