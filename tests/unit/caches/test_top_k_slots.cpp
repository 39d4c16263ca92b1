// The decisions that kernels run, on a group of one thread and on groups of several in step, against the
// host's cache: the same keys in the same rows after every step, whatever the scores.
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/bound_dual.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

using namespace kvpolicy;

namespace {

/// What the threads of a group exchange.
struct Exchange {
    explicit Exchange(std::int32_t threads) : meet(threads), worst(static_cast<std::size_t>(threads)) {}
    std::barrier<> meet;
    std::vector<detail::ranked_slot> worst;
};

/// One thread of a group: every call is made by all of them, as a warp's are.
class LaneGroup {
    Exchange& all_;
    std::int32_t rank_;

    template <class Value, class Take>
    auto exchange(std::vector<Value>& of, const Value& mine, Take&& take) const {
        of[static_cast<std::size_t>(rank_)] = mine;
        sync();
        const auto result = take(of);
        sync();
        return result;
    }

  public:
    LaneGroup(Exchange& all, std::int32_t rank) : all_(all), rank_(rank) {}
    [[nodiscard]] std::int32_t rank() const { return rank_; }
    [[nodiscard]] std::int32_t size() const { return static_cast<std::int32_t>(all_.worst.size()); }
    [[nodiscard]] detail::ranked_slot worst(const detail::ranked_slot& mine) const {
        return exchange(all_.worst, mine, [](const auto& of) {
            return *std::min_element(of.begin(), of.end(),
                                     [](const auto& a, const auto& b) { return detail::gives_way(a, b); });
        });
    }
    void sync() const { all_.meet.arrive_and_wait(); }
};

/// Runs body(group) on `threads` threads in step.
template <class Body>
void on_group(std::int32_t threads, const Body& body) {
    if (threads == 1) {
        body(detail::single_thread_group{});
        return;
    }
    Exchange all(threads);
    std::vector<std::thread> others;
    for (std::int32_t rank = 1; rank < threads; ++rank) {
        others.emplace_back([&, rank] { body(LaneGroup(all, rank)); });
    }
    body(LaneGroup(all, 0));
    for (std::thread& other : others) {
        other.join();
    }
}

/// A policy's gate as kernels take it.
template <class P>
auto gate_in(const P& policy) {
    if constexpr (P::has_keep) {
        return detail::held_gate<typename P::gate_type, typename P::keep_type>{policy.gate(), policy.keep()};
    } else {
        return policy.gate();
    }
}

/// One head of a cache as kernels keep it, without keys and values, of at most `longest` rows.
template <class P>
struct Emulated {
    HeadParams head_params;
    decltype(gate_in(std::declval<const P&>())) gate;
    position_t limit;
    std::int32_t max_seq_len;
    position_t length = 0;
    std::int32_t kept = 0, num_protected = 0, victim = -1;
    std::vector<float> score;
    std::vector<position_t> position;
    std::vector<std::int32_t> record;

    Emulated(const P& policy, position_t rebase_limit, std::int32_t most)
        : head_params(policy.params(0, 0)),
          gate(gate_in(policy)),
          limit(rebase_limit),
          max_seq_len(most),
          score(capacity(), std::numeric_limits<float>::quiet_NaN()),
          position(capacity(), -1),
          record(static_cast<std::size_t>(detail::tiles_of_slots(P::has_keep ? most : head_params.budget)),
                 -9) {}

    [[nodiscard]] std::size_t capacity() const {
        return static_cast<std::size_t>(std::int64_t{head_params.sinks} + head_params.window +
                                        (P::has_keep ? max_seq_len : head_params.budget));
    }
    [[nodiscard]] HeadRows layout() const { return {head_params.sinks, head_params.window}; }
    [[nodiscard]] auto slots() {
        return detail::competing(detail::head_slots{head_params, limit, score.data() + layout().slot(0),
                                                    position.data() + layout().slot(0)},
                                 gate);
    }

    void step(std::int32_t threads, float candidate) {
        const position_t q = length++, u = q - head_params.window;
        const float of_u =
            u >= head_params.sinks ? score[static_cast<std::size_t>(layout().recent(u))] : 0.0f;
        detail::step_decision step =
            detail::begin_step(head_params, gate, limit, q, kept, victim, of_u, num_protected);
        const auto all = slots();
        std::int32_t next = -2;
        on_group(threads, [&](const auto& group) {
            detail::step_decision mine = step;  // as every warp of a kernel does it
            detail::next_victims victims;
            const detail::ranked_slot u_ranked = all.rank(of_u, u, -1, q);
            if (mine.full) {
                const detail::ranked_slot worst =
                    mine.known >= 0 ? all.at(mine.known, q)
                                    : detail::worst_of_tiles(group, all, record.data(), 0, 1, kept, q);
                victims = detail::find_next_victims(group, all, record.data(), kept, q, worst.slot);
                detail::resolve_eviction(mine, head_params, u_ranked, worst);
            }
            // The same from what was known before the top-k update.
            std::vector<std::int32_t> records = record;
            std::int32_t early = -2;
            if (mine.full) {
                early = detail::next_victim(group, head_params, victims, records.data(), mine, u_ranked);
            }
            group.sync();
            const std::int32_t found = detail::next_victim(group, all, record.data(), mine, u_ranked, q);
            group.sync();
            if (group.rank() == 0) {
                if (mine.full) {
                    CHECK(early == found);
                    CHECK(records == record);
                }
                next = found;
                step = mine;
            }
        });
        // What a kernel attends to: the rows before the step but those of u and of the worst, the one of the
        // two that stays, and the candidate. That must be the keys of the rows afterwards.
        const std::int32_t used_after = layout().used(q + 1, step.num_long_range);
        const std::int32_t of_worst = worst_row(q, kept),
                           of_leaving = u >= head_params.sinks ? step.newest : -1;
        std::vector<position_t> seen;
        for (std::int32_t row = 0; row < step.used; ++row) {
            if (row != of_worst && row != of_leaving) {
                seen.push_back(position[static_cast<std::size_t>(row)]);
            }
        }
        if (const std::int32_t stays = step.promoted >= 0 ? of_leaving : of_worst; stays >= 0) {
            seen.push_back(position[static_cast<std::size_t>(stays)]);
        }
        seen.push_back(q);
        if (step.promoted >= 0) {
            score[static_cast<std::size_t>(step.promoted)] = of_u;
            position[static_cast<std::size_t>(step.promoted)] = u;
        }
        score[static_cast<std::size_t>(step.newest)] = candidate;
        position[static_cast<std::size_t>(step.newest)] = q;
        std::vector<position_t> held(position.begin(), position.begin() + used_after);
        std::sort(seen.begin(), seen.end());
        std::sort(held.begin(), held.end());
        CHECK(seen == held);
        kept = step.num_long_range;
        num_protected += step.num_protected ? 1 : 0;
        victim = next;
    }

    /// The row of the worst long-range key at query q where a key that leaves has to top-k update it;
    /// -1: there is none.
    [[nodiscard]] std::int32_t worst_row(position_t q, std::int32_t places_used) {
        const position_t u = q - head_params.window;
        if (u < head_params.sinks || head_params.budget == 0 ||
            places_used - num_protected < head_params.budget || detail::holds(gate, u)) {
            return -1;
        }
        detail::ranked_slot worst;
        for (std::int32_t p = 0; p < places_used; ++p) {
            const detail::ranked_slot one = slots().at(p, q);
            worst = detail::gives_way(one, worst) ? one : worst;
        }
        return layout().slot(worst.slot);
    }

    [[nodiscard]] std::vector<position_t> held() const {
        return {position.begin(), position.begin() + layout().used(length, kept)};
    }
};

/// The host's cache of one head of at most `length` tokens, and the positions that it holds, row by row.
template <class P>
struct Oracle : test::BoundCache<P, float> {
    Oracle(const host& ctx, const CacheShape& shape, const P& policy, position_t limit,
           std::int32_t /*length*/)
        : test::BoundCache<P, float>(ctx, shape, policy, nullptr, {}, limit) {}
    [[nodiscard]] std::vector<position_t> held() const { return this->positions(0, 0, 0); }
};
template <class P>
requires P::has_keep struct Oracle<P> : test::BoundDual<P, float> {
    Oracle(const host& ctx, const CacheShape& shape, const P& policy, position_t limit, std::int32_t length)
        : test::BoundDual<P, float>(ctx, shape, {.slab_pages = length, .max_slabs = 1, .max_seq_len = length},
                                    policy, nullptr, limit) {
        this->add_slab(ctx);
    }
    [[nodiscard]] std::vector<position_t> held() const {
        std::vector<position_t> all(static_cast<std::size_t>(this->cache.usage(0, 0, 0).size()));
        this->cache.retained(0, 0, 0, all.data());
        return all;
    }
};

/// Steps beside the host's cache.
template <class P>
void check(const P& policy, test::Scores kind, std::int32_t length, std::int32_t threads,
           position_t limit = rebase_limit) {
    CAPTURE(test::name(kind));
    CAPTURE(threads);
    CAPTURE(length);
    std::mt19937 generator(static_cast<unsigned>(length + threads));
    const host ctx{1};
    Oracle<P> oracle(ctx,
                     {.layers = 1,
                      .max_sequences = 1,
                      .query_heads = 1,
                      .kv_heads = 1,
                      .head_dim_qk = 8,
                      .head_dim_vo = 8},
                     policy, limit, length);
    Emulated<P> emulated(policy, limit, length);
    const test::Tensor<float> rows(1, 1, length, 8);
    test::Tensor<float> out(1, 1, length, 8);
    test::Plane<float> scores(1, 1, length);
    test::fill_scores(scores, kind, generator);
    bool same = true;
    for (std::int32_t at = 0; at < length && same; ++at) {
        const Batch batch{.count = 1, .length = 1};
        test::Extras extras;
        if constexpr (P::ranked) {
            extras.scores = std::as_const(scores).tokens(at, 1);
        }
        test::call<P, float>(ctx, oracle, 0, batch, rows.tokens(at, 1), rows.tokens(at, 1),
                             rows.tokens(at, 1), out.tokens(at, 1), extras, true);
        oracle.cache.advance(ctx, batch);
        emulated.step(threads, P::ranked ? scores.at(0, 0, at) : 0.0f);
        // Every key is in the row that the host gives it.
        same = emulated.held() == oracle.held();
        CAPTURE(at);
        CHECK(same);
    }
}

}  // namespace

TEST_CASE("kernels' decisions are the host's: steps, every order of scores") {
    const auto one_or_three = [](auto policy, position_t limit = rebase_limit) {
        for (const test::Scores kind : test::all_scores) {
            check(policy, kind, 700, 1, limit);
        }
        check(policy, test::Scores::random, 150, 3, limit);
        check(policy, test::Scores::few_values, 150, 3, limit);
        check(policy, test::Scores::improving, 150, 3, limit);
    };
    SUBCASE("budget over several tiles") { one_or_three(Policy<Sink<4>, Window<8>, TopKBudget<150>>{}); }
    SUBCASE("a budget of one, a window of one") { one_or_three(Policy<Window<1>, TopKBudget<1>>{}); }
    SUBCASE("no budget") { one_or_three(Policy<Sink<2>, Window<5>>{}); }
    SUBCASE("decay, rebased often") {
        one_or_three(Policy<Sink<1>, Window<3>, TopKBudget<70>, Decay<1>>{Sink<1>{}, Window<3>{},
                                                                          TopKBudget<70>{}, Decay<1>{-0.03f}},
                     7);
    }
    SUBCASE("decay by steps of 5") {
        one_or_three(Policy<Sink<1>, Window<3>, TopKBudget<20>, Decay<5>>{Sink<1>{}, Window<3>{},
                                                                          TopKBudget<20>{}, Decay<5>{-0.2f}});
    }
    SUBCASE("a capped gate") {
        one_or_three(Policy<Sink<2>, Window<4>, ThresholdGate<above>, TopKBudget<66>>{
            Sink<2>{}, Window<4>{}, ThresholdGate<above>{-0.5f}, TopKBudget<66>{}});
    }
    SUBCASE("a stride") { one_or_three(Policy<Sink<2>, Window<4>, Stride<5>>{}); }
    SUBCASE("a stride beside a capped gate, decay, rebased often") {
        one_or_three(
            Policy<Sink<2>, Window<4>, ThresholdGate<above>, TopKBudget<66>, Decay<1>, Stride<3>>{
                Sink<2>{}, Window<4>{}, ThresholdGate<above>{-0.5f}, TopKBudget<66>{}, Decay<1>{-0.03f},
                Stride<3>{}},
            7);
    }
}
