// A loss of your own: the mean squared distance of a scorer's logits to a target, over the keys that
// leave the window.
//
// A loss is a functor that returns its value and writes its gradient; score_sequence_backward takes that on
// to the scorer's weights. (docs/training.md trains with the library's own boundary loss.)
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/losses/concept.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

struct SquaredDistance {
    using value_type = kvp::LossValue;  // the type of *value

    template <class P>
    std::size_t workspace_bytes(const kvp::host&, const P&, const kvp::Sequences&,
                                std::int32_t /*heads*/) const {
        return 0;
    }

    // scores, target and d_scores [B, Hkv, S]; d_scores is overwritten. A key that never leaves the
    // window is never ranked, so its score has no gradient. This loss does not move the decay, so
    // d_log_gamma is left alone.
    template <class P>
    void operator()(const kvp::host&, const P& policy, kvp::plane_view<const float> scores,
                    kvp::plane_view<const float> target, const kvp::Sequences& sequences,
                    kvp::plane_view<float> d_scores, double* /*d_log_gamma*/, kvp::LossValue* value,
                    kvp::workspace_view) const {
        kvp::LossValue loss;
        for (std::int32_t b = 0; b < sequences.batch; ++b) {
            for (std::int32_t h = 0; h < scores.heads; ++h) {
                loss.count += ranked(policy, sequences, b, h);
            }
        }
        for (std::int32_t b = 0; b < sequences.batch; ++b) {
            for (std::int32_t h = 0; h < scores.heads; ++h) {
                for (std::int32_t t = 0; t < sequences.length_of(b); ++t) {
                    const bool counts = t < ranked(policy, sequences, b, h);
                    const float off = counts ? scores.head(b, h)[t] - target.head(b, h)[t] : 0.0f;
                    loss.value += static_cast<double>(off) * off / static_cast<double>(loss.count);
                    d_scores.head(b, h)[t] = 2.0f * off / static_cast<float>(loss.count);
                }
            }
        }
        *value = loss;
    }

  private:
    template <class P>
    static std::int32_t ranked(const P& policy, const kvp::Sequences& sequences, std::int32_t b,
                               std::int32_t h) {
        return std::max(0, sequences.length_of(b) - policy.params(0, h).window);
    }
};

using Policy = kvp::Policy<kvp::Window<8>, kvp::TopKBudget<24>>;
static_assert(kvp::ScoreLoss<SquaredDistance, Policy>);

int main() {
    constexpr int tokens = 200, dim = 8;
    const kvp::host ctx{1};
    const Policy policy;
    const kvp::Sequences sequences{.batch = 1, .length = tokens};

    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> k(tokens * dim), v(tokens * dim), target(tokens), scores(tokens), d_scores(tokens);
    for (auto* rows : {&k, &v}) {
        for (float& x : *rows) {
            x = normal(generator);
        }
    }
    for (int t = 0; t < tokens; ++t) {
        target[t] = 2.0f * k[t * dim] - v[t * dim + 1];
    }  // what the scorer has to find
    const auto keys = kvp::view_bhsd<const float>(k.data(), 1, 1, tokens, dim);
    const auto values = kvp::view_bhsd<const float>(v.data(), 1, 1, tokens, dim);

    std::vector<float> weight(2 * dim), gradient(2 * dim);
    const kvp::LinearScorer<dim> scorer{.heads = 1, .weights = {.weight = weight.data()}};
    const kvp::ScoreBackward<float> call{keys, values, sequences, 0,
                                         kvp::view_bhs(d_scores.data(), 1, 1, tokens)};
    kvp::Buffer workspace{ctx,
                          std::max(kvp::score_sequence_workspace_bytes(ctx, scorer, keys, values, sequences),
                                   kvp::score_sequence_backward_workspace_bytes(ctx, scorer, call))};
    const SquaredDistance loss;
    kvp::LossValue value;
    double first = 0.0, last = 0.0;
    for (int step = 0; step < 60; ++step) {
        kvp::score_sequence(ctx, scorer, keys, values, sequences, 0,
                            kvp::view_bhs(scores.data(), 1, 1, tokens), workspace);
        loss(ctx, policy, kvp::view_bhs<const float>(scores.data(), 1, 1, tokens),
             kvp::view_bhs<const float>(target.data(), 1, 1, tokens), sequences,
             kvp::view_bhs(d_scores.data(), 1, 1, tokens), nullptr, &value, {});
        last = value.value;
        if (step == 0) {
            first = last;
        }
        std::fill(gradient.begin(), gradient.end(), 0.0f);
        kvp::score_sequence_backward(ctx, scorer, call, {.weight = gradient.data()}, workspace);
        for (std::size_t i = 0; i < weight.size(); ++i) {
            weight[i] -= 0.2f * gradient[i];
        }
    }
    std::printf("the loss fell below a thousandth: %s\n", last < 1e-3 * first ? "yes" : "no");
    std::printf("weights of k[0] and v[1]: %.2f %.2f\n", static_cast<double>(weight[0]),
                static_cast<double>(weight[dim + 1]));
}

// Prints:
// the loss fell below a thousandth: yes
// weights of k[0] and v[1]: 2.00 -1.00
