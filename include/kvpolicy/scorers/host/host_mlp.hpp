// Bodies of scorers/mlp.hpp on the host.
#pragma once

#include <kvpolicy/scorers/check.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/mlp.hpp>

namespace kvpolicy {

namespace host_backend {

/// The input of the token at position t.
template <class Input>
constexpr Input input_at(const Input& input, [[maybe_unused]] position_t t) {
    if constexpr (requires { input.at(t); }) {
        return input.at(t);
    } else {
        return input;
    }
}

}  // namespace host_backend

template <MlpInput Input, Activation Act, std::int32_t D>
template <class Real>
Real BasicMlpScorer<Input, Act, D>::score(std::int32_t head, const Real* key, const Real* value,
                                          Real* scratch, isa set, position_t position) const
    requires(!takes_hidden_state<Input>) {
    Real result;  // a block of one, so that both give the same bits
    score_block(head, 1, key, value, &result, scratch, set, position);
    return result;
}

template <MlpInput Input, Activation Act, std::int32_t D>
template <class Real>
void BasicMlpScorer<Input, Act, D>::score_block(std::int32_t head, std::int32_t count, const Real* keys,
                                                const Real* values, Real* scores, Real* scratch, isa set,
                                                position_t first) const requires(!takes_hidden_state<Input>) {
    using namespace host_backend;
    const std::int32_t k_dim = D == dynamic ? head_dim_qk : D;
    const std::int32_t v_dim = D == dynamic ? head_dim_vo : D;
    const std::int32_t inner = input.size(k_dim, v_dim);
    const std::ptrdiff_t layer = Input::per_head ? head : 0;
    Real* x = scratch;                                               // [count, inner]
    Real* y = scratch + static_cast<std::ptrdiff_t>(count) * inner;  // [count, hidden]
    for (std::int32_t t = 0; t < count; ++t) {
        const std::ptrdiff_t row = t;
        input_at(input, first + t)
            .gather(set, head, keys + row * k_dim, values + row * v_dim, k_dim, v_dim, x + row * inner);
    }
    run_kernel<project_kernel>(set, x, std::ptrdiff_t{inner}, count, weights.w1 + layer * hidden * inner,
                               std::ptrdiff_t{inner}, hidden, inner,
                               weights.b1 == nullptr ? weights.b1 : weights.b1 + layer * hidden, y,
                               std::ptrdiff_t{hidden});
    // Row by row: the activation of a token must not depend on where its row stands in a vector.
    for (std::int32_t t = 0; t < count; ++t) {
        Act::apply(set, y + static_cast<std::ptrdiff_t>(t) * hidden, hidden);
    }
    run_kernel<project_kernel>(set, y, std::ptrdiff_t{hidden}, count,
                               weights.w2 + static_cast<std::ptrdiff_t>(head) * hidden, std::ptrdiff_t{0}, 1,
                               hidden, weights.b2 == nullptr ? weights.b2 : weights.b2 + head, scores,
                               std::ptrdiff_t{1});
}

template <MlpInput Input, Activation Act, std::int32_t D>
template <class Real>
void BasicMlpScorer<Input, Act, D>::score_tokens(std::int32_t count, const Real* states, Real* scores,
                                                 std::int64_t head_stride, Real* scratch, isa set) const
    requires(takes_hidden_state<Input>) {
    using namespace host_backend;
    const std::int32_t inner = input_size();
    Real* const y = scratch;                                            // [count, hidden]
    Real* const all = y + static_cast<std::ptrdiff_t>(count) * hidden;  // [count, heads]
    run_kernel<project_kernel>(set, states, std::ptrdiff_t{inner}, count, weights.w1, std::ptrdiff_t{inner},
                               hidden, inner, weights.b1, y, std::ptrdiff_t{hidden});
    for (std::int32_t t = 0; t < count; ++t) {
        Act::apply(set, y + static_cast<std::ptrdiff_t>(t) * hidden, hidden);
    }
    run_kernel<project_kernel>(set, y, std::ptrdiff_t{hidden}, count, weights.w2, std::ptrdiff_t{hidden},
                               heads, hidden, weights.b2, all, std::ptrdiff_t{heads});
    for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t t = 0; t < count; ++t) {
            scores[h * head_stride + t] = all[static_cast<std::ptrdiff_t>(t) * heads + h];
        }
    }
}

template <MlpInput Input, Activation Act, std::int32_t D>
void BasicMlpScorer<Input, Act, D>::check(std::int32_t kv_heads, [[maybe_unused]] std::int32_t key_dim,
                                          [[maybe_unused]] std::int32_t value_dim) const {
    const auto member = [](const char* of) { return [=] { return detail::text(name, ".", of); }; };
    if constexpr (takes_hidden_state<Input>) {
        detail::require(heads == kv_heads, member("heads"), heads,
                        [&] { return detail::text("the layer's KV heads, ", kv_heads); });
        detail::require(input_size() >= 1, member("input.width"), input_size(), "the width of hidden states");
    } else {
        checks::check_scorer_shape(name, D, *this, kv_heads, key_dim, value_dim);
    }
    if constexpr (requires { input.check(name, key_dim); }) {
        input.check(name, key_dim);
    }
    detail::require(hidden >= 1, member("hidden"), hidden, "1 or more");
    checks::check_parameters(name, *this, weights);
}

}  // namespace kvpolicy
