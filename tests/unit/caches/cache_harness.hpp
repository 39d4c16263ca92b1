// Runs one policy over one input three ways - as a mask, step by step, and in chunks - in every kind of cache
// that can hold it, and compares what each keeps and what each query gets.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/masks/build.hpp>

#include "../../support/cases.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace test {

struct Sizes {
    std::int32_t batch = 1;
    std::int32_t kv_heads = 2;
    std::int32_t group = 2;
    std::int32_t length = 0;
    std::int32_t dim = 8;
};

/// A kind of cache, as a template argument.
template <class P, class T>
using Fixed = kvpolicy::FixedBudgetCache<P, T>;
template <class P, class T>
using Dual = kvpolicy::DualCache<P, T>;

/// One cache with its memory (poisoned: NaN in every float that is not written). A DualCache starts with an
/// empty pool, and feed() attaches one slab of 3 pages after another, when a call has run out.
template <class P, class T, template <class, class> class Kind = Fixed>
struct CacheUnderTest {
    static constexpr bool pooled = Kind<P, T>::ref_type::pooled;

    Kind<P, T> cache;
    std::vector<unsigned char> memory;
    std::vector<std::unique_ptr<std::vector<unsigned char>>> slabs;

    CacheUnderTest(const kvpolicy::host& ctx, const Sizes& sizes, const P& policy,
                   kvpolicy::position_t rebase_limit, const typename P::scorer_type* scorers = nullptr,
                   std::int32_t page_size = 1)
        : cache(make(kvpolicy::CacheShape{.layers = 1,
                                          .max_sequences = sizes.batch,
                                          .query_heads = sizes.kv_heads * sizes.group,
                                          .kv_heads = sizes.kv_heads,
                                          .head_dim_qk = sizes.dim,
                                          .head_dim_vo = sizes.dim,
                                          .page_size = page_size},
                     sizes, policy, scorers)),
          memory(cache.bytes().total(), 0xff) {
        cache.rebase_limit(rebase_limit);
        cache.bind(ctx, memory.data(), memory.size());
    }

    void add_slab(const kvpolicy::host& ctx) requires pooled {
        slabs.push_back(std::make_unique<std::vector<unsigned char>>(cache.slab_bytes(), 0xff));
        cache.add_slab(ctx, slabs.back()->data(), slabs.back()->size());
    }

    std::vector<kvpolicy::position_t> sorted_positions(std::int32_t seq, std::int32_t head) const {
        std::vector<kvpolicy::position_t> kept(static_cast<std::size_t>(cache.usage(0, seq, head).size()));
        cache.retained(0, seq, head, kept.data());
        std::sort(kept.begin(), kept.end());
        return kept;
    }

  private:
    static Kind<P, T> make(const kvpolicy::CacheShape& shape, [[maybe_unused]] const Sizes& sizes,
                           const P& policy, const typename P::scorer_type* scorers) {
        if constexpr (pooled) {
            const std::int32_t heads = sizes.batch * sizes.kv_heads;
            return Kind<P, T>(
                shape,
                {.slab_pages = 3, .max_slabs = heads * (sizes.length + 1), .max_seq_len = sizes.length + 1},
                policy, scorers);
        } else {
            return Kind<P, T>(shape, policy, scorers);
        }
    }
};

template <class T>
struct Inputs {
    Tensor<T> q, k, v;
    Plane<float> scores;
    Inputs(const Sizes& s, Scores kind, std::mt19937& generator)
        : q(s.batch, s.kv_heads * s.group, s.length, s.dim),
          k(s.batch, s.kv_heads, s.length, s.dim),
          v(s.batch, s.kv_heads, s.length, s.dim),
          scores(s.batch, s.kv_heads, s.length) {
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        fill_scores(scores, kind, generator);
    }
};

/// What is kept after each token, by mask: positions t <= q < expiry[t], for one head.
inline std::vector<kvpolicy::position_t> visible(const kvpolicy::expiry_t* expiry, std::int32_t q) {
    std::vector<kvpolicy::position_t> keys;
    for (std::int32_t t = 0; t <= q; ++t) {
        if (q < expiry[t]) {
            keys.push_back(t);
        }
    }
    return keys;
}

/// The largest difference of two tensors.
template <class T>
double difference(const Tensor<T>& a, const Tensor<T>& b) {
    double most = 0.0;
    for (std::size_t i = 0; i < a.data.size(); ++i) {
        const double x = static_cast<double>(static_cast<float>(a.data[i]));
        const double y = static_cast<double>(static_cast<float>(b.data[i]));
        most = std::max(most, x == y ? 0.0 : std::abs(x - y));
        if (x != x || y != y) {
            return std::numeric_limits<double>::infinity();
        }
    }
    return most;
}

/// Feeds tokens [from, from + count) of every sequence; one token goes through step, more through prefill. A
/// cache that runs out of pages grows by a slab and tries the rest again.
template <class P, class T, template <class, class> class Kind>
void feed(const kvpolicy::host& ctx, CacheUnderTest<P, T, Kind>& under_test, const Inputs<T>& in,
          Tensor<T>& out, std::int32_t from, std::int32_t count, bool as_step) {
    const kvpolicy::Batch batch{.count = in.q.batch, .length = count};
    const auto ref = under_test.cache.layer(0);
    Workspace workspace(kvpolicy::workspace_bytes(ctx, ref, {.batch = in.q.batch, .tokens = count}));
    test::Extras extras;
    if constexpr (P::ranked && P::scorer_type::when == kvpolicy::score_time::given) {
        extras.scores = in.scores.tokens(from, count);
    }
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(in.q.batch), count);
    for (bool again = true; again;) {
        std::vector<std::uint32_t> status(tokens.size(), 0);
        const kvpolicy::Batch rest{.count = in.q.batch, .q_len = tokens.data(), .length = count};
        if (as_step) {
            kvpolicy::step(ctx, ref,
                           test::step_io(rest, in.q.tokens(from, count), in.k.tokens(from, count),
                                         in.v.tokens(from, count), out.tokens(from, count), extras),
                           workspace, {.status = status.data()});
        } else {
            kvpolicy::prefill(ctx, ref,
                              test::step_io(rest, in.q.tokens(from, count), in.k.tokens(from, count),
                                            in.v.tokens(from, count), out.tokens(from, count), extras),
                              workspace, {.status = status.data()});
        }
        again = false;
        for (std::size_t i = 0; i < status.size(); ++i) {
            if (status[i] == kvpolicy::status_ok) {
                tokens[i] = 0;
            } else {
                again = true;
            }
        }
        if constexpr (CacheUnderTest<P, T, Kind>::pooled) {
            if (again) {
                under_test.add_slab(ctx);
            }
        } else if (again) {
            FAIL_CHECK("a cache of fixed size ran out of pages");
            return;
        }
    }
    under_test.cache.advance(ctx, batch);
}

/// Softmax weights are at most 1 and sum to 1, so an output differs by a few units in the last place of the
/// largest value. The order of the keys differs between paths: the error of a sum of n terms grows like
/// sqrt(n); n is a few hundred here.
inline constexpr double output_tolerance = 64 * 1.2e-7 * 5.0;

/// mask = steps = one chunk = random chunks, for one policy whose scores are given, in one kind of cache.
template <template <class, class> class Kind, class T = float, class P>
void check_policy_in(const kvpolicy::host& ctx, const P& policy, const Sizes& sizes, Scores kind,
                     std::mt19937& generator, kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit,
                     std::int32_t page_size = 1) {
    CAPTURE(name(kind));
    CAPTURE(sizes.length);
    CAPTURE(page_size);
    const auto fresh = [&] {
        return CacheUnderTest<P, T, Kind>(ctx, sizes, policy, rebase_limit, nullptr, page_size);
    };
    const Inputs<T> in(sizes, kind, generator);
    const kvpolicy::Sequences sequences{.batch = sizes.batch, .length = sizes.length};
    const kvpolicy::MaskOptions options{.rebase_limit = rebase_limit};

    Plane<kvpolicy::expiry_t> expiry(sizes.batch, sizes.kv_heads, sizes.length, -7);
    Workspace mask_workspace(
        kvpolicy::build_mask_workspace_bytes(ctx, policy, sequences, sizes.kv_heads, options));
    kvpolicy::build_mask(ctx, policy, in.scores.view(), sequences, expiry.view(), mask_workspace, options);

    Tensor<T> by_mask(sizes.batch, sizes.kv_heads * sizes.group, sizes.length, sizes.dim);
    const kvpolicy::kv_view<T> keys{.k = in.k.view(), .v = in.v.view(), .mask = {.expiry = expiry.view()}};
    Workspace attention_workspace(
        kvpolicy::attend_workspace_bytes(ctx, kvpolicy::AttentionParams{}, in.q.view(), keys, sequences));
    kvpolicy::attend(ctx, kvpolicy::AttentionParams{}, in.q.view(), keys, sequences, by_mask.view(), {},
                     attention_workspace);

    CacheUnderTest<P, T, Kind> stepped = fresh();
    Tensor<T> by_steps(sizes.batch, sizes.kv_heads * sizes.group, sizes.length, sizes.dim);
    by_steps.fill(std::numeric_limits<float>::quiet_NaN());
    bool same = true;
    for (std::int32_t q = 0; q < sizes.length; ++q) {
        feed(ctx, stepped, in, by_steps, q, 1, true);
        for (std::int32_t b = 0; b < sizes.batch; ++b) {
            for (std::int32_t h = 0; h < sizes.kv_heads; ++h) {
                const bool equal = stepped.sorted_positions(b, h) == visible(expiry.view().head(b, h), q);
                if (!equal && same) {
                    CAPTURE(q);
                    CAPTURE(h);
                    CHECK(equal);
                }
                same = same && equal;
            }
        }
    }
    CHECK(same);
    CHECK(difference(by_mask, by_steps) <= output_tolerance);

    const auto check_chunked = [&](const std::vector<std::int32_t>& chunks, bool steps_between) {
        CacheUnderTest<P, T, Kind> chunked = fresh();
        Tensor<T> out(sizes.batch, sizes.kv_heads * sizes.group, sizes.length, sizes.dim);
        out.fill(std::numeric_limits<float>::quiet_NaN());
        std::int32_t at = 0;
        bool equal = true;
        for (const std::int32_t chunk : chunks) {
            feed(ctx, chunked, in, out, at, chunk, steps_between && chunk == 1);
            at += chunk;
            for (std::int32_t b = 0; b < sizes.batch && at > 0; ++b) {
                for (std::int32_t h = 0; h < sizes.kv_heads; ++h) {
                    equal =
                        equal && chunked.sorted_positions(b, h) == visible(expiry.view().head(b, h), at - 1);
                }
            }
        }
        CHECK(equal);
        CHECK(difference(by_mask, out) <= output_tolerance);
        // The rows themselves stand where stepping would have put them, and hold the same keys,
        // values and scores.
        const auto a = chunked.cache.layer(0), b = stepped.cache.layer(0);
        bool rows_equal = true;
        for (std::int32_t seq = 0; seq < sizes.batch; ++seq) {
            for (std::int32_t h = 0; h < sizes.kv_heads; ++h) {
                const std::int32_t used = a.used(seq, h);
                rows_equal = rows_equal && used == b.used(seq, h);
                const auto x = a.head_rows(seq, h), y = b.head_rows(seq, h);
                const auto same_number = [](T m, T n) {
                    return static_cast<float>(m) == static_cast<float>(n);
                };
                for (std::int32_t r = 0; r < used && rows_equal; ++r) {
                    rows_equal = x.position(r) == y.position(r) && x.score(r) == y.score(r) &&
                                 std::equal(x.k(r), x.k(r) + a.head_dim_qk, y.k(r), same_number) &&
                                 std::equal(x.v(r), x.v(r) + a.head_dim_vo, y.v(r), same_number);
                }
            }
        }
        CHECK(rows_equal);
    };
    check_chunked({sizes.length}, false);
    std::vector<std::int32_t> chunks;
    for (std::int32_t at = 0; at < sizes.length;) {
        const auto most = static_cast<std::uint32_t>(generator() % 2 == 0 ? 3 : sizes.length);
        const auto chunk = std::min(static_cast<std::int32_t>(generator() % most) + 1, sizes.length - at);
        chunks.push_back(chunk);
        at += chunk;
    }
    check_chunked(chunks, true);
}

/// Whether a FixedBudgetCache can hold the policy.
template <class P>
bool bounded(const P& policy, std::int32_t kv_heads) {
    for (std::int32_t h = 0; h < kv_heads; ++h) {
        if (policy.params(0, h).budget == kvpolicy::unlimited) {
            return false;
        }
    }
    return true;
}

/// The same in every kind of cache that can hold the policy.
template <class T = float, class P>
void check_policy(const kvpolicy::host& ctx, const P& policy, const Sizes& sizes, Scores kind,
                  std::mt19937& generator, kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit) {
    if constexpr (!P::has_keep && !P::shares_budget && (!P::has_gate || P::has_budget)) {
        if (bounded(policy, sizes.kv_heads)) {
            check_policy_in<Fixed, T>(ctx, policy, sizes, kind, generator, rebase_limit);
        }
    }
    constexpr std::int32_t pages[] = {1, 2, 3, 5, 16};
    check_policy_in<Dual, T>(ctx, policy, sizes, kind, generator, rebase_limit, pages[generator() % 5]);
}

}  // namespace test
