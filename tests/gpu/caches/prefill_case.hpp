// Prefills of a cache on a device beside the same calls on the host: orders of scores and lengths of chunks
// for which top-k updates in parallel are hardest. Positions, scores, top-k slots (row by row), counters,
// status words and outputs agree. Keys and values are made once; scores are new in every case.
#pragma once

#include <kvpolicy/core/status.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "paged_case.hpp"
#include "score_orders.hpp"
#include "support/step_io.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace test {

inline constexpr std::int32_t prefill_heads = 3, prefill_dim = 8;
using PrefillDims = kvpolicy::head_dims<64>;

/// The host that calls are compared with.
inline const kvpolicy::host& all_cores() {
    static const kvpolicy::host ctx{
        static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u))};
    return ctx;
}

/// Numbers by head, which the policy of a cache points to.
struct HeadNumbers {
    static constexpr float all_open = -std::numeric_limits<float>::infinity();
    std::array<std::int32_t, prefill_heads> budgets{};
    std::array<float, prefill_heads> log_gammas{};
    std::array<std::int32_t, prefill_heads> steps{1, 1, 1};
    std::array<float, prefill_heads> gates{all_open, all_open, all_open};
    std::array<std::int32_t, prefill_heads> sinks{0, 2, 4}, windows{1, 8, 32};
};

template <class T>
kvpolicy::PerHead<T> of_heads(const std::array<T, prefill_heads>& values) {
    return kvpolicy::per_head(values.data(), 1, prefill_heads);
}

/// Caches under test: a policy of HeadNumbers, in a FixedBudgetCache or in a DualCache.
struct FixedSystem {
    static constexpr bool paged = false;
    using P = kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::TopKBudget<>,
                               kvpolicy::Decay<kvpolicy::dynamic>>;
    static P policy(const HeadNumbers& of) {
        return P{kvpolicy::Sink<>{of_heads(of.sinks)}, kvpolicy::Window<>{of_heads(of.windows)},
                 kvpolicy::TopKBudget<>{of_heads(of.budgets)},
                 kvpolicy::Decay<kvpolicy::dynamic>{of_heads(of.log_gammas), of_heads(of.steps)}};
    }
};
template <bool Paged>
struct GatedSystem {
    static constexpr bool paged = Paged;
    using P =
        kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::ThresholdGate<kvpolicy::at_least>,
                         kvpolicy::TopKBudget<>, kvpolicy::Decay<kvpolicy::dynamic>>;
    static P policy(const HeadNumbers& of) {
        return P{kvpolicy::Sink<>{of_heads(of.sinks)}, kvpolicy::Window<>{of_heads(of.windows)},
                 kvpolicy::ThresholdGate<kvpolicy::at_least>{of_heads(of.gates)},
                 kvpolicy::TopKBudget<>{of_heads(of.budgets)},
                 kvpolicy::Decay<kvpolicy::dynamic>{of_heads(of.log_gammas), of_heads(of.steps)}};
    }
};
/// With a keep part.
struct KeepSystem {
    static constexpr bool paged = true;
    using P =
        kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::ThresholdGate<kvpolicy::at_least>,
                         kvpolicy::TopKBudget<>, kvpolicy::Decay<kvpolicy::dynamic>, kvpolicy::Stride<>>;
    static P policy(const HeadNumbers& of) {
        return P{kvpolicy::Sink<>{of_heads(of.sinks)},
                 kvpolicy::Window<>{of_heads(of.windows)},
                 kvpolicy::ThresholdGate<kvpolicy::at_least>{of_heads(of.gates)},
                 kvpolicy::TopKBudget<>{of_heads(of.budgets)},
                 kvpolicy::Decay<kvpolicy::dynamic>{of_heads(of.log_gammas), of_heads(of.steps)},
                 kvpolicy::Stride<>{5}};
    }
};

/// Queries, keys and values of `batch` prompts, on the host and on the device.
struct PrefillTokens {
    Tensor<float> q, k, v;
    Device<float> device_q, device_k, device_v;
    double largest = 0.0;  // of the values

    PrefillTokens(std::int32_t batch, std::int32_t length)
        : q(made(batch, length, 1)),
          k(made(batch, length, 2)),
          v(made(batch, length, 3)),
          device_q(q.data),
          device_k(k.data),
          device_v(v.data) {
        for (const float x : v.data) {
            largest = std::max(largest, std::abs(static_cast<double>(x)));
        }
    }

    /// Tokens [from, from + length) of the first `count` prompts.
    template <class View>
    static View part(View all, std::int32_t count, std::int32_t from, std::int32_t length) {
        all.data += from * all.row_stride;
        all.batch = count;
        all.length = length;
        return all;
    }
    [[nodiscard]] kvpolicy::rows_view<const float> on_device(const Device<float>& of) const {
        return kvpolicy::view_bhsd<const float>(of.data(), q.batch, prefill_heads, q.length, prefill_dim);
    }

  private:
    static Tensor<float> made(std::int32_t batch, std::int32_t length, unsigned seed) {
        Tensor<float> tensor(batch, prefill_heads, length, prefill_dim);
        std::mt19937 generator(seed);
        tensor.fill_normal(generator);
        return tensor;
    }
};

/// Scores of the same prompts.
struct PrefillScores {
    Plane<float> given;
    Device<float> on_device;

    /// Token 0 is at position `first`. Every `nan_every`-th score of some, all with 1, is NaN.
    PrefillScores(Order order, const HeadNumbers& of, std::int32_t batch, std::int32_t length,
                  kvpolicy::position_t first, std::mt19937& generator, std::int32_t nan_every = 0)
        : given(made(order, of, batch, length, first, generator, nan_every)), on_device(given.data) {}

  private:
    static Plane<float> made(Order order, const HeadNumbers& of, std::int32_t batch, std::int32_t length,
                             kvpolicy::position_t first, std::mt19937& generator, std::int32_t nan_every) {
        Plane<float> plane(batch, prefill_heads, length);
        std::normal_distribution<float> normal;
        for (std::int32_t b = 0; b < batch; ++b) {
            for (std::int32_t h = 0; h < prefill_heads; ++h) {
                for (std::int32_t j = 0; j < length; ++j) {
                    float& x = plane.at(b, h, j);
                    x = score_of(order, {of.log_gammas[static_cast<std::size_t>(h)], h, length, j, first + j},
                                 normal, generator);
                    if (nan_every != 0 && generator() % static_cast<std::uint32_t>(nan_every) == 0) {
                        x = std::numeric_limits<float>::quiet_NaN();
                    }
                }
            }
        }
        return plane;
    }
};

struct PrefillOptions {
    std::int32_t max_sequences = 1;
    kvpolicy::position_t max_seq_len = 0;  // of a DualCache
    std::int32_t max_draft_tokens = 0;
    kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit;
    std::int32_t spared_pages = 0;  // of a DualCache: pages that the longest sequences lack
};

/// A cache of System on the device and one on the host.
template <class System>
class PrefillPair {
    using P = typename System::P;
    static constexpr bool paged = System::paged;
    using Both = std::conditional_t<paged, BothDuals<P, float, PrefillDims, true>,
                                    BothCaches<P, float, PrefillDims, true>>;

  public:
    PrefillPair(const HeadNumbers& of, const PrefillTokens& tokens, const PrefillOptions& options)
        : of_(of), tokens_(tokens), options_(options), both_(make<Both, false>()) {
        check_.largest = tokens.largest;
        if constexpr (paged) {
            both_->add_slab();
        }
    }
    PrefillPair(const PrefillPair&) = delete;
    PrefillPair& operator=(const PrefillPair&) = delete;

    void clear() {
        for (std::int32_t seq = 0; seq < options_.max_sequences; ++seq) {
            both_->oracle.cache.clear(both_->ctx, seq);
            both_->cache.clear(both_->device, seq);
        }
    }
    [[nodiscard]] kvpolicy::position_t length(std::int32_t seq) const {
        return both_->oracle.cache.length(seq);
    }

    /// A chunk of the tokens from `from` on: entry i brings q_len[i] tokens of prompt i to a sequence.
    /// Returns the tokens that no page was found for.
    std::int32_t prefill(const PrefillScores& scores, const std::vector<std::int32_t>& seq_ids,
                         const std::vector<std::int32_t>& q_len, std::int32_t from) {
        std::vector<std::int32_t> moved = q_len;
        const auto status = call(scores, seq_ids, q_len, from, false);
        std::int32_t refused = 0;
        for (std::size_t i = 0; i < status.size(); ++i) {
            if ((status[i] & kvpolicy::status_pool_exhausted) != 0) {
                refused += moved[i];
                moved[i] = 0;
            }
        }
        advance(seq_ids, moved);
        return refused;
    }
    /// One sequence.
    void prefill(const PrefillScores& scores, std::int32_t from, std::int32_t length) {
        CHECK(prefill(scores, {0}, {length}, from) == 0);
    }

    /// Draft tokens, of which some are accepted.
    void draft(const PrefillScores& scores, const std::vector<std::int32_t>& seq_ids,
               const std::vector<std::int32_t>& q_len, const std::vector<std::int32_t>& accepted,
               std::int32_t from) {
        call(scores, seq_ids, q_len, from, true);
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const std::int32_t most = options_.max_draft_tokens;
        const kvpolicy::Batch batch{count, seq_ids.data(), accepted.data(), most};
        const Device<std::int32_t> device_seq_ids(seq_ids), device_accepted(accepted);
        const kvpolicy::Batch device_batch{count, device_seq_ids.data(), device_accepted.data(), most};
        const auto ref = both_->cache.layer(0);
        const auto host_ref = both_->oracle.cache.layer(0);
        Memory memory = memory_for({.batch = count, .tokens = most});
        std::vector<std::uint32_t> wanted_status(seq_ids.size(), 0);
        const Device<std::uint32_t> status(wanted_status);
        kvpolicy::accept<PrefillDims>(both_->device, ref, device_batch, memory.device,
                                      {.status = status.data()});
        kvpolicy::accept(all_cores(), host_ref, batch, memory.host, {.status = wanted_status.data()});
        CHECK(status.read() == wanted_status);
        advance(seq_ids, accepted);
    }

    /// Both hold the same in the same rows.
    void same_rows(const std::string& when) const { both_->same_rows(when); }

    /// What a cache of the host holds, row by row, after steps of the same tokens.
    [[nodiscard]] std::vector<unsigned char> content_of_steps(const PrefillScores& scores,
                                                              std::int32_t tokens) const {
        using Stepped = std::conditional_t<paged, BoundDual<P, float>, BoundCache<P, float>>;
        const auto stepped = make<Stepped, true>();
        const kvpolicy::host& ctx = both_->ctx;
        if constexpr (paged) {
            stepped->add_slab(ctx);
        }
        Tensor<float> out(1, prefill_heads, 1, prefill_dim);
        const kvpolicy::Batch batch{.count = 1, .length = 1};
        for (std::int32_t t = 0; t < tokens; ++t) {
            const auto one = [&](const Tensor<float>& of) { return PrefillTokens::part(of.view(), 1, t, 1); };
            call_ref<P, float>(ctx, stepped->cache.layer(0), batch, one(tokens_.q), one(tokens_.k),
                               one(tokens_.v), out.view(), {.scores = scores.given.tokens(t, 1)}, true);
            stepped->cache.advance(ctx, batch);
        }
        return content_of(stepped->cache.layer(0), 0);
    }
    /// What the host's cache of the pair holds, in the same form.
    [[nodiscard]] std::vector<unsigned char> content_of_host() const {
        return content_of(both_->oracle.cache.layer(0), 0);
    }

    /// Moves all positions of sequence 0 but those of sinks, by a multiple of all windows.
    void shift(kvpolicy::position_t by) { move_positions(*both_, 0, by); }

  private:
    /// A cache of the host alone, or a pair.
    template <class Cache, bool OfHost>
    std::unique_ptr<Cache> make() const {
        constexpr std::int32_t page_size = 16;
        const kvpolicy::CacheShape shape{.layers = 1,
                                         .max_sequences = options_.max_sequences,
                                         .query_heads = prefill_heads,
                                         .kv_heads = prefill_heads,
                                         .head_dim_qk = prefill_dim,
                                         .head_dim_vo = prefill_dim,
                                         .page_size = page_size,
                                         .max_draft_tokens = options_.max_draft_tokens};
        const P policy = System::policy(of_);
        if constexpr (paged) {
            const kvpolicy::position_t pages =
                options_.max_sequences * prefill_heads *
                    ((options_.max_seq_len + options_.max_draft_tokens) / page_size + 2) -
                options_.spared_pages;
            const kvpolicy::PoolShape pool{.slab_pages = static_cast<std::int32_t>(pages),
                                           .max_slabs = 1,
                                           .max_seq_len = options_.max_seq_len};
            if constexpr (OfHost) {
                return std::make_unique<Cache>(all_cores(), shape, pool, policy, nullptr,
                                               options_.rebase_limit);
            } else {
                return std::make_unique<Cache>(shape, pool, policy, nullptr, nullptr,
                                               kvpolicy::AttentionParams{}, options_.rebase_limit);
            }
        } else if constexpr (OfHost) {
            return std::make_unique<Cache>(all_cores(), shape, policy, nullptr, kvpolicy::AttentionParams{},
                                           options_.rebase_limit);
        } else {
            return std::make_unique<Cache>(shape, policy, nullptr, nullptr, kvpolicy::AttentionParams{},
                                           options_.rebase_limit);
        }
    }

    struct Memory {
        Device<unsigned char> device;
        Workspace host;
    };
    [[nodiscard]] Memory memory_for(const kvpolicy::CallSize& size) const {
        return {Device<unsigned char>(
                    kvpolicy::workspace_bytes<PrefillDims>(both_->device, both_->cache.layer(0), size)),
                Workspace(kvpolicy::workspace_bytes(all_cores(), both_->oracle.cache.layer(0), size))};
    }

    /// Prefill or draft tokens on both; compares and returns status words.
    std::vector<std::uint32_t> call(const PrefillScores& scores, const std::vector<std::int32_t>& seq_ids,
                                    const std::vector<std::int32_t>& q_len, std::int32_t from, bool draft) {
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const std::int32_t length = *std::max_element(q_len.begin(), q_len.end());
        const kvpolicy::Batch batch{count, seq_ids.data(), q_len.data(), length};
        const Device<std::int32_t> device_seq_ids(seq_ids), device_len(q_len);
        const kvpolicy::Batch device_batch{count, device_seq_ids.data(), device_len.data(), length};
        Tensor<float> wanted(count, prefill_heads, length, prefill_dim);
        wanted.fill(7.0f);
        Plane<float> wanted_lse(count, prefill_heads, length, 7.0f);
        const Device<float> out(wanted.data), lse(wanted_lse.data);
        std::vector<std::uint32_t> wanted_status(seq_ids.size(), 0);
        const Device<std::uint32_t> status(wanted_status);
        const auto part = [&](const auto& view) { return PrefillTokens::part(view, count, from, length); };
        const auto plane = [&](kvpolicy::plane_view<const float> view) {
            view.data += from;
            view.batch = count;
            view.length = length;
            return view;
        };
        const auto io = test::step_io<float>(
            batch, part(std::as_const(tokens_.q).view()), part(std::as_const(tokens_.k).view()),
            part(std::as_const(tokens_.v).view()), wanted.view(),
            {.scores = plane(scores.given.view()), .lse = wanted_lse.view()});
        const auto device_io = test::step_io<float>(
            device_batch, part(tokens_.on_device(tokens_.device_q)),
            part(tokens_.on_device(tokens_.device_k)), part(tokens_.on_device(tokens_.device_v)),
            kvpolicy::view_bhsd(out.data(), count, prefill_heads, length, prefill_dim),
            {.scores = plane(kvpolicy::view_bhs<const float>(scores.on_device.data(), scores.given.batch,
                                                             prefill_heads, scores.given.length)),
             .lse = kvpolicy::view_bhs(lse.data(), count, prefill_heads, length)});
        const auto ref = both_->cache.layer(0);
        const auto host_ref = both_->oracle.cache.layer(0);
        Memory memory = memory_for({.batch = count, .tokens = length});
        if (draft) {
            kvpolicy::append_draft<PrefillDims>(both_->device, ref, device_io, memory.device,
                                                {.status = status.data()});
            kvpolicy::append_draft(all_cores(), host_ref, io, memory.host, {.status = wanted_status.data()});
        } else {
            kvpolicy::prefill<PrefillDims>(both_->device, ref, device_io, memory.device,
                                           {.status = status.data()});
            kvpolicy::prefill(all_cores(), host_ref, io, memory.host, {.status = wanted_status.data()});
        }
        CHECK(status.read() == wanted_status);
        check_.compare(out.read(), wanted, lse.read(), wanted_lse, q_len, Tensor<float>(0, 0, 0, 0));
        return wanted_status;
    }

    void advance(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& moved) {
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const std::int32_t most = std::max(1, *std::max_element(moved.begin(), moved.end()));
        const Device<std::int32_t> device_seq_ids(seq_ids), device_moved(moved);
        const std::vector<std::uint32_t> no_status(seq_ids.size(), 0);
        const Device<std::uint32_t> status(no_status);
        both_->oracle.cache.advance(all_cores(), {count, seq_ids.data(), moved.data(), most});
        both_->cache.advance(both_->device, {count, device_seq_ids.data(), device_moved.data(), most},
                             {.status = status.data()});
        CHECK(status.read() == no_status);
    }

    HeadNumbers of_;
    const PrefillTokens& tokens_;
    PrefillOptions options_;
    std::unique_ptr<Both> both_;
    OutputCheck<float> check_;
};

/// Prefills sequence 0 of an emptied pair by chunks.
template <class System>
void prefill_chunks(PrefillPair<System>& pair, const PrefillScores& scores,
                    const std::vector<std::int32_t>& chunks) {
    pair.clear();
    std::int32_t at = 0;
    for (const std::int32_t chunk : chunks) {
        CAPTURE(at);
        CAPTURE(chunk);
        pair.prefill(scores, at, chunk);
        pair.same_rows("after a chunk");
        at += chunk;
    }
}

/// Decays by head: none, a step of 1, and longer steps.
struct HeadDecay {
    const char* name;
    std::array<float, prefill_heads> log_gammas;
    std::array<std::int32_t, prefill_heads> steps;
};
inline constexpr HeadDecay no_decay{"no decay", {0.0f, 0.0f, 0.0f}, {1, 1, 1}},
    decay_of_step_1{"decay of step 1", {-0x1p-10f, -0.01f, -0.3f}, {1, 1, 1}},
    decay_of_longer_steps{"decay of longer steps", {-0.05f, -0x1p-6f, -0.01f}, {3, 2, 3}},
    decay_of_long_steps{"decay of long steps", {-0.05f, -0x1p-6f, -1.0f}, {33, 64, 1000}};

inline HeadNumbers with_decay(HeadNumbers of, const HeadDecay& decay) {
    of.log_gammas = decay.log_gammas;
    of.steps = decay.steps;
    return of;
}

/// Every order of scores with every decay.
template <class System>
void check_orders(const std::vector<HeadNumbers>& all, std::int32_t tokens_each = 1500) {
    const PrefillTokens tokens(1, tokens_each);
    std::mt19937 generator(1);
    for (const HeadNumbers& numbers : all) {
        CAPTURE(numbers.budgets[1]);
        for (const HeadDecay& decay : {no_decay, decay_of_step_1, decay_of_longer_steps}) {
            CAPTURE(decay.name);
            const HeadNumbers of = with_decay(numbers, decay);
            PrefillPair<System> pair(of, tokens, {.max_seq_len = tokens_each});
            for (const Order order : all_orders) {
                CAPTURE(name(order));
                const PrefillScores scores(order, of, 1, tokens_each, 0, generator);
                prefill_chunks(pair, scores, {tokens_each});
                prefill_chunks(pair, scores,
                               {tokens_each / 2 - 50, 1, 32, tokens_each - tokens_each / 2 + 17});
            }
        }
    }
}

/// Chunks whose lengths are those of warps, blocks and rounds, one less and one more, into a cache that is
/// empty, part full and full.
template <class System>
void check_chunk_lengths(const HeadNumbers& numbers, const std::vector<std::int32_t>& lengths,
                         const std::vector<std::int32_t>& before) {
    const std::int32_t most =
        *std::max_element(lengths.begin(), lengths.end()) + *std::max_element(before.begin(), before.end());
    const PrefillTokens tokens(1, most);
    std::mt19937 generator(2);
    for (const HeadDecay& decay : {no_decay, decay_of_step_1}) {
        CAPTURE(decay.name);
        const HeadNumbers of = with_decay(numbers, decay);
        PrefillPair<System> pair(of, tokens, {.max_seq_len = most});
        for (const Order order : {Order::random, Order::rising, Order::two_values, Order::uneven}) {
            CAPTURE(name(order));
            const PrefillScores scores(order, of, 1, most, 0, generator);
            for (const std::int32_t length : lengths) {
                for (const std::int32_t first : before) {
                    CAPTURE(first);
                    prefill_chunks(pair, scores,
                                   first == 0 ? std::vector<std::int32_t>{length}
                                              : std::vector<std::int32_t>{first, length});
                }
            }
        }
    }
}
inline const std::vector<std::int32_t>& edge_lengths() {
    static const std::vector<std::int32_t> lengths{1,    2,    31,   32,   33,   511,   512,   513,  2047,
                                                   2048, 2049, 4095, 4096, 4097, 16383, 16384, 16385};
    return lengths;
}

/// Long prompts, whole and in chunks.
template <class System>
void check_long(const HeadNumbers& numbers, const std::vector<Order>& orders,
                const std::vector<HeadDecay>& decays, const std::vector<std::vector<std::int32_t>>& cuts) {
    std::int32_t length = 0;
    for (const std::int32_t chunk : cuts.front()) {
        length += chunk;
    }
    const PrefillTokens tokens(1, length);
    std::mt19937 generator(3);
    for (const HeadDecay& decay : decays) {
        CAPTURE(decay.name);
        const HeadNumbers of = with_decay(numbers, decay);
        PrefillPair<System> pair(of, tokens, {.max_seq_len = length});
        for (const Order order : orders) {
            CAPTURE(name(order));
            const PrefillScores scores(order, of, 1, length, 0, generator);
            for (const std::vector<std::int32_t>& chunks : cuts) {
                prefill_chunks(pair, scores, chunks);
            }
        }
    }
}

/// Entries of ragged lengths, some without a token, in any order of sequences. With `spared_pages` a pool
/// that lacks pages. Returns the tokens that no page was found for.
template <class System>
std::int32_t check_ragged(const HeadNumbers& numbers, std::int32_t spared_pages = 0) {
    constexpr std::int32_t max_sequences = 5, most = 2600, calls = 4;
    const PrefillTokens tokens(max_sequences, most);
    std::mt19937 generator(4);
    const auto pick = [&](std::int32_t below) {
        return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(below));
    };
    std::int32_t refused = 0;
    for (const HeadDecay& decay : {no_decay, decay_of_step_1}) {
        const HeadNumbers of = with_decay(numbers, decay);
        for (const Order order : {Order::random, Order::two_values, Order::uneven}) {
            CAPTURE(name(order));
            PrefillPair<System> pair(
                of, tokens,
                {.max_sequences = max_sequences, .max_seq_len = most * calls, .spared_pages = spared_pages});
            for (std::int32_t call = 0; call < calls; ++call) {
                CAPTURE(call);
                const PrefillScores scores(order, of, max_sequences, most, std::int64_t{call} * most,
                                           generator);
                std::vector<std::int32_t> seq_ids{0, 1, 2, 3, 4}, q_len;
                std::shuffle(seq_ids.begin(), seq_ids.end(), generator);
                seq_ids.resize(static_cast<std::size_t>(max_sequences - call % 2));
                for (std::size_t i = 0; i < seq_ids.size(); ++i) {
                    const std::int32_t lengths[] = {0, 1, pick(40), pick(600), pick(most + 1)};
                    q_len.push_back(lengths[(i + static_cast<std::size_t>(call)) % 5]);
                }
                q_len[0] = std::max(q_len[0], 1);
                refused += pair.prefill(scores, seq_ids, q_len, 0);
                pair.same_rows("after a batch");
            }
        }
    }
    return refused;
}

/// Draft tokens, all or some or none of which are accepted, between chunks.
template <class System>
void check_drafts(const HeadNumbers& numbers) {
    constexpr std::int32_t most = 1200, max_draft_tokens = 600;
    const PrefillTokens tokens(2, most);
    std::mt19937 generator(5);
    for (const HeadDecay& decay : {no_decay, decay_of_step_1}) {
        const HeadNumbers of = with_decay(numbers, decay);
        for (const Order order : {Order::random, Order::rising, Order::equal, Order::falling}) {
            CAPTURE(name(order));
            PrefillPair<System> pair(
                of, tokens, {.max_sequences = 2, .max_seq_len = 12000, .max_draft_tokens = max_draft_tokens});
            const PrefillScores scores(order, of, 2, most, 0, generator);
            pair.prefill(scores, {1, 0}, {most, 40}, 0);
            for (const std::int32_t n : {1, 33, 513, max_draft_tokens}) {
                CAPTURE(n);
                for (const std::int32_t accepted : {0, 1, n / 2, n}) {
                    CAPTURE(accepted);
                    pair.draft(scores, {0, 1}, {n, (n + 1) / 2}, {accepted, std::min(accepted, (n + 1) / 2)},
                               n);
                    pair.same_rows("after draft tokens");
                }
                pair.prefill(scores, {0, 1}, {7, 300}, 100);
                pair.same_rows("after a chunk");
            }
        }
    }
}

/// A base of priorities that moves within a chunk.
template <class System>
void check_rebase(const HeadNumbers& numbers) {
    constexpr std::int32_t length = 5000;
    const PrefillTokens tokens(1, length);
    std::mt19937 generator(6);
    for (const kvpolicy::position_t limit : {64, 1000}) {
        CAPTURE(limit);
        for (const HeadDecay& decay : {no_decay, decay_of_step_1, decay_of_longer_steps}) {
            CAPTURE(decay.name);
            const HeadNumbers of = with_decay(numbers, decay);
            PrefillPair<System> pair(of, tokens, {.max_seq_len = length, .rebase_limit = limit});
            for (const Order order :
                 {Order::random, Order::rising, Order::falling, Order::equal, Order::level}) {
                CAPTURE(name(order));
                const PrefillScores scores(order, of, 1, length, 0, generator);
                prefill_chunks(pair, scores, {1500, 499, 1, 3000});
            }
        }
    }
}

/// Scores of which some, most or all are NaN: they rank last, behind -infinity, close their gates, and the
/// status words say so.
template <class System>
void check_nan(HeadNumbers numbers) {
    constexpr std::int32_t length = 3000;
    const PrefillTokens tokens(1, length);
    std::mt19937 generator(7);
    numbers.gates = {HeadNumbers::all_open, -3e38f, 0.0f};
    for (const HeadDecay& decay : {no_decay, decay_of_step_1, decay_of_longer_steps}) {
        CAPTURE(decay.name);
        const HeadNumbers of = with_decay(numbers, decay);
        PrefillPair<System> pair(of, tokens, {.max_seq_len = length});
        for (const Order order :
             {Order::random, Order::rising, Order::falling, Order::two_values, Order::infinities}) {
            CAPTURE(name(order));
            for (const std::int32_t nan_every : {1, 2, 1000}) {
                CAPTURE(nan_every);
                const PrefillScores scores(order, of, 1, length, 0, generator, nan_every);
                prefill_chunks(pair, scores, {length});
                prefill_chunks(pair, scores, {600, 33, 1000});
            }
        }
    }
}

/// Chunks of the host, and so of the device, equal the host's steps.
template <class System>
void check_steps(const HeadNumbers& numbers) {
    constexpr std::int32_t length = 400;
    const PrefillTokens tokens(1, length);
    std::mt19937 generator(8);
    for (const HeadDecay& decay : {no_decay, decay_of_step_1, decay_of_longer_steps}) {
        CAPTURE(decay.name);
        const HeadNumbers of = with_decay(numbers, decay);
        for (const kvpolicy::position_t limit : {kvpolicy::rebase_limit, kvpolicy::position_t{64}}) {
            PrefillPair<System> pair(of, tokens, {.max_seq_len = length, .rebase_limit = limit});
            for (const Order order : all_orders) {
                CAPTURE(name(order));
                const PrefillScores scores(order, of, 1, length, 0, generator);
                const std::vector<unsigned char> wanted = pair.content_of_steps(scores, length);
                for (const std::vector<std::int32_t>& chunks :
                     {std::vector<std::int32_t>{length}, {33, 200, 1, 166}}) {
                    prefill_chunks(pair, scores, chunks);
                    const bool same = pair.content_of_host() == wanted;
                    CHECK(same);
                }
            }
        }
    }
}

/// Positions around the first rebase, 2^31 and 2^32, and far beyond; with a small limit above 2^32, where the
/// base moves several times within a chunk.
template <class System>
void check_far_positions(const HeadNumbers& numbers) {
    constexpr std::int32_t before = 1200, length = 4000;
    // The base moves, too, where a chunk passes these.
    constexpr kvpolicy::position_t near_rebase = kvpolicy::rebase_limit - 2400,
                                   near_31_bits = (kvpolicy::position_t{1} << 31) - 2400,
                                   near_32_bits = (kvpolicy::position_t{1} << 32) - 2400;
    static_assert(near_rebase % 32 == 0 && near_31_bits % 32 == 0 && near_32_bits % 32 == 0);
    struct Far {
        kvpolicy::position_t rebase_limit;
        std::vector<kvpolicy::position_t> by;
    };
    const Far all[] = {
        {kvpolicy::rebase_limit, {near_rebase, near_31_bits, near_32_bits, kvpolicy::position_t{1} << 40}},
        {1000, {near_32_bits}}};
    const PrefillTokens tokens(1, length);
    std::mt19937 generator(9);
    for (const HeadDecay& decay : {no_decay, decay_of_step_1, decay_of_longer_steps}) {
        CAPTURE(decay.name);
        const HeadNumbers of = with_decay(numbers, decay);
        for (const Far& far : all) {
            CAPTURE(far.rebase_limit);
            PrefillPair<System> pair(of, tokens,
                                     {.max_seq_len = length + 600, .rebase_limit = far.rebase_limit});
            for (const Order order : {Order::random, Order::two_values, Order::falling}) {
                CAPTURE(name(order));
                const PrefillScores scores(order, of, 1, length, 0, generator);
                for (const kvpolicy::position_t by : far.by) {
                    CAPTURE(by);
                    prefill_chunks(pair, scores, {before});
                    pair.shift(by);
                    pair.same_rows("after the shift");
                    pair.prefill(scores, before, length - before);
                    pair.same_rows("after a chunk");
                    pair.prefill(scores, 0, 600);
                    pair.same_rows("after another");
                }
            }
        }
    }
}

}  // namespace test
