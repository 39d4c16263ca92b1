// The naive cache (naive_cache.hpp) run beside a real one: told the same tokens, it knows what every head
// must hold and what every query must get.
#pragma once

#include <kvpolicy/caches/fixed_budget.hpp>

#include "support/bound_cache.hpp"
#include "support/naive_cache.hpp"

#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace test {

/// Rounding in storing a number of type T, relative.
template <class T>
inline constexpr double storage_unit = std::is_same_v<T, double>           ? 0x1p-53
                                       : std::is_same_v<T, float>          ? 0x1p-24
                                       : std::is_same_v<T, kvpolicy::fp16> ? 0x1p-11
                                                                           : 0x1p-8;
/// What fp32 arithmetic may add for standard normal inputs, head_dim up to 256 and a few hundred keys: logits
/// are off by up to a few 1e-6, and so are the weights, relative; values are below 5. Wrong by a key means
/// off by 1e-2 and more.
template <class T>
inline constexpr double compute_error = std::is_same_v<T, double> ? 1e-12 : 2e-5;

/// One layer of a cache.
template <class P, class T>
class Shadow {
  public:
    Shadow(const P& policy, const kvpolicy::CacheShape& shape, std::int32_t layer = 0,
           kvpolicy::AttentionParams attention = {},
           kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit)
        : heads_(shape.kv_heads),
          group_(shape.query_heads / shape.kv_heads),
          head_dim_qk_(shape.head_dim_qk),
          head_dim_vo_(shape.head_dim_vo) {
        // The scale is an fp32 number, for double storage too.
        scale_ = attention.sm_scale != 0.0f ? attention.sm_scale
                                            : 1.0f / std::sqrt(static_cast<float>(shape.head_dim_qk));
        logits_soft_cap_ = attention.logits_soft_cap;
        for (std::int32_t seq = 0; seq < shape.max_sequences; ++seq) {
            for (std::int32_t h = 0; h < heads_; ++h) {
                NaiveHead one;
                one.head_params = policy.params(layer, h);
                one.rebase_limit = rebase_limit;
                const auto gate = policy.gate();
                const kvpolicy::HeadParams head_params = one.head_params;
                one.open = [gate, head_params](float score) { return gate.open(score, head_params); };
                all_.push_back(one);
            }
        }
        scores_.resize(all_.size());
    }

    [[nodiscard]] std::size_t index(std::int32_t seq, std::int32_t h) const {
        return static_cast<std::size_t>(seq) * static_cast<std::size_t>(heads_) + static_cast<std::size_t>(h);
    }
    NaiveHead& head(std::int32_t seq, std::int32_t h) { return all_[index(seq, h)]; }

    void clear(std::int32_t seq) {
        for (std::int32_t h = 0; h < heads_; ++h) {
            head(seq, h).rows.clear();
            head(seq, h).length = 0;
            scores_[index(seq, h)].clear();
        }
    }

    /// Appends token j of entry i to a sequence. `scores` may be empty (then every score is 0).
    void append(std::int32_t seq, std::int32_t i, std::int32_t j, kvpolicy::rows_view<const T> k,
                kvpolicy::rows_view<const T> v, kvpolicy::plane_view<const float> scores) {
        for (std::int32_t h = 0; h < heads_; ++h) {
            std::vector<float>& known = scores_[index(seq, h)];
            known.push_back(scores ? scores.head(i, h)[j] : 0.0f);
            head(seq, h).append(real_row(k.row(i, h, j), head_dim_qk_),
                                real_row(v.row(i, h, j), head_dim_vo_),
                                [&](kvpolicy::position_t t) { return known[static_cast<std::size_t>(t)]; });
        }
    }

    /// How far the outputs of token j of entry i are off, in units of what is allowed; and the
    /// log-sum-exps, if given.
    double off(std::int32_t seq, std::int32_t i, std::int32_t j, kvpolicy::rows_view<const T> q,
               kvpolicy::rows_view<const T> out, kvpolicy::plane_view<const float> lse = {}) {
        double worst = 0.0;
        const auto note = [&](double got, double wanted, double allowed) {
            const double ratio = got == wanted ? 0.0 : std::abs(got - wanted) / allowed;
            worst = ratio <= worst ? worst : ratio == ratio ? ratio : std::numeric_limits<double>::infinity();
        };
        for (std::int32_t hq = 0; hq < heads_ * group_; ++hq) {
            const NaiveHead& mine = head(seq, hq / group_);
            const AttentionResult wanted =
                mine.attend(real_row(q.row(i, hq, j), head_dim_qk_), scale_, logits_soft_cap_);
            for (std::int32_t c = 0; c < head_dim_vo_; ++c) {
                const double value = wanted.out.empty() ? 0.0 : wanted.out[static_cast<std::size_t>(c)];
                note(real(out.row(i, hq, j)[c]), value, compute_error<T> + storage_unit<T> * std::abs(value));
            }
            if (lse) {
                note(lse.head(i, hq)[j], wanted.lse, 2e-5 + 0x1p-24 * std::abs(wanted.lse));
            }
        }
        return worst;
    }

    /// Whether the cache holds the positions that it must.
    bool same_sets(const BoundCache<P, T>& under_test, std::int32_t layer, std::int32_t seq) {
        for (std::int32_t h = 0; h < heads_; ++h) {
            if (under_test.sorted(layer, seq, h) != head(seq, h).positions()) {
                return false;
            }
        }
        return true;
    }

  private:
    std::int32_t heads_, group_, head_dim_qk_, head_dim_vo_;
    double scale_, logits_soft_cap_;
    std::vector<NaiveHead> all_;
    std::vector<std::vector<float>> scores_;
};

/// Runs `length` random tokens through a cache of one sequence, cut into chunks by `sizes` (chunks_of; one
/// token goes through step where `steps`), beside its shadow. Returns the worst error in units of what is
/// allowed; infinity where the sets differ.
template <class T, class P>
double run_beside_shadow(const kvpolicy::host& ctx, const P& policy, kvpolicy::CacheShape shape,
                         std::int32_t length, const std::vector<std::int32_t>& sizes, bool steps,
                         std::uint32_t seed, const kvpolicy::AttentionParams& attention = {},
                         kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit) {
    std::mt19937 generator(seed);
    shape.max_sequences = 1;
    Tensor<T> q(1, shape.query_heads, length, shape.head_dim_qk),
        k(1, shape.kv_heads, length, shape.head_dim_qk);
    Tensor<T> v(1, shape.kv_heads, length, shape.head_dim_vo),
        out(1, shape.query_heads, length, shape.head_dim_vo);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    out.fill(std::numeric_limits<float>::quiet_NaN());
    Plane<float> scores(1, shape.kv_heads, length), lse(1, shape.query_heads, length);
    fill_scores(scores, Scores::random, generator);
    BoundCache<P, T> under_test(ctx, shape, policy, nullptr, attention, rebase_limit);
    Shadow<P, T> shadow(policy, shape, 0, attention, rebase_limit);
    double worst = 0.0;
    std::int32_t at = 0;
    for (const std::int32_t chunk : chunks_of(length, sizes)) {
        const kvpolicy::Batch batch{.count = 1, .length = chunk};
        kvpolicy::plane_view<float> sums = lse.view();
        sums.data += at;
        sums.length = chunk;
        call<P, T>(ctx, under_test, 0, batch, q.tokens(at, chunk), k.tokens(at, chunk), v.tokens(at, chunk),
                   out.tokens(at, chunk), {.scores = scores.tokens(at, chunk), .lse = sums},
                   steps && chunk == 1);
        under_test.cache.advance(ctx, batch);
        for (std::int32_t j = 0; j < chunk; ++j, ++at) {
            shadow.append(0, 0, at, k.view(), v.view(), std::as_const(scores).view());
            worst = std::max(worst, shadow.off(0, 0, at, q.view(), out.view(), std::as_const(lse).view()));
        }
        if (!shadow.same_sets(under_test, 0, 0)) {
            return std::numeric_limits<double>::infinity();
        }
    }
    return worst;
}

}  // namespace test
