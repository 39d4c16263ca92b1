// The policy of a cache as a mask for training: one integer a key, attention through it, and gradients.
//
// Whatever the policy was, attention reads the integers alone, and its cost goes with the pairs
// that see each other.
#include <kvpolicy/kvpop.hpp>

#include "backend.hpp"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

using Policy = kvp::Policy<kvp::Sink<4>, kvp::Window<32>, kvp::TopKBudget<28>>;

int main() {
    if (backend::missing()) {
        return 0;
    }
    constexpr int heads = 2, group = 2, tokens = 512, dim = 16;
    const backend::context ctx{};
    const Policy policy;
    const kvp::Sequences sequences{.batch = 1, .length = tokens};

    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    backend::array<float> q(heads * group * tokens * dim), k(heads * tokens * dim), v(k),
        scores(heads * tokens), out(q), d_out(q), lse(heads * group * tokens), d_q(q), d_k(k), d_v(k);
    for (auto* numbers : {&q, &k, &v, &scores, &d_out}) {
        for (float& x : *numbers) {
            x = normal(generator);
        }
    }
    const auto Q = [&](backend::array<float>& rows) {
        return kvp::view_bhsd(rows.data(), 1, heads * group, tokens, dim);
    };
    const auto KV = [&](backend::array<float>& rows) {
        return kvp::view_bhsd(rows.data(), 1, heads, tokens, dim);
    };

    // 1. Scores become lifetimes.
    backend::array<kvp::expiry_t> expiry(heads * tokens);
    backend::memory scratch{ctx, kvp::build_mask_workspace_bytes(ctx, policy, sequences, heads)};
    kvp::build_mask(ctx, policy, kvp::view_bhs<const float>(scores.data(), 1, heads, tokens), sequences,
                    kvp::view_bhs(expiry.data(), 1, heads, tokens), scratch);
    kvp::mask_view mask;
    mask.expiry = kvp::view_bhs<const kvp::expiry_t>(expiry.data(), 1, heads, tokens);

    // 2. Attention through them, and its gradients.
    const kvp::kv_view all{KV(k), KV(v), mask};
    backend::memory workspace{
        ctx, std::max(kvp::attend_workspace_bytes<float>(ctx, {}, Q(q), all, sequences),
                      kvp::attend_backward_workspace_bytes<float>(ctx, {}, Q(q), all, sequences))};
    kvp::attend<float>(ctx, {}, Q(q), all, sequences, Q(out),
                       kvp::view_bhs(lse.data(), 1, heads * group, tokens), workspace);
    kvp::attend_backward<float>(
        ctx, {}, Q(q), all, sequences,
        {Q(out), kvp::view_bhs<const float>(lse.data(), 1, heads * group, tokens), Q(d_out)},
        {Q(d_q), KV(d_k), KV(d_v)}, workspace);

    backend::wait(ctx);
    int most = 0;
    for (int query = 0; query < tokens; ++query) {
        int seen = 0;
        for (int t = 0; t <= query; ++t) {
            seen += kvp::visible(query, t, expiry[static_cast<std::size_t>(t)]);
        }
        most = std::max(most, seen);
    }
    const bool finite = std::all_of(d_k.begin(), d_k.end(), [](float x) { return x - x == 0.0f; });
    std::printf("a query sees at most %d of %d keys; gradients are finite: %s\n", most, tokens,
                finite ? "yes" : "no");
}

// Prints:
// a query sees at most 64 of 512 keys; gradients are finite: yes
