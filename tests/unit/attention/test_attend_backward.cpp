// Gradients of attention through a mask: against their definition pair by pair in double, and
// against differences.
#include "../../support/differences.hpp"
#include "../../support/normal.hpp"
#include "../../support/refusal.hpp"
#include "attention_reference.hpp"

#include <doctest/doctest.h>

#include <cstring>

using namespace attention_test;

namespace {

template <class T>
struct Gradients {
    std::vector<T> d_q, d_k, d_v;
    std::vector<compute_t<T>> d_bias;
};

/// d_out, and where it is used.
template <class T>
std::vector<T> draw_d_out(const Problem<T>& p, unsigned seed) {
    std::mt19937 generator(seed);
    test::Normal<double> normal;
    std::vector<T> d(static_cast<std::size_t>(std::int64_t{p.shape.batch} * p.shape.kv_heads * p.shape.group *
                                              p.shape.queries * p.shape.head_dim_vo));
    for (T& x : d) {
        x = stored<T>(normal(generator));
    }
    return d;
}

template <class T>
Gradients<T> run_backward(const host& ctx, const Problem<T>& p, Result<T>& forward,
                          const std::vector<T>& d_out) {
    const Shape& s = p.shape;
    const std::int32_t heads = s.kv_heads * s.group;
    Gradients<T> out;
    out.d_q.assign(p.q.size(), stored<T>(-77.0));
    out.d_k.assign(p.k.size(), stored<T>(-77.0));
    out.d_v.assign(p.v.size(), stored<T>(-77.0));
    out.d_bias.assign(p.planes(), -77);
    const auto all = p.key_views();
    const Sequences sequences = p.sequences();
    const SavedForward<T> saved{forward.out_view(), forward.lse_view(),
                                view_bhsd<const T>(d_out.data(), s.batch, heads, s.queries, s.head_dim_vo)};
    AttentionGrads<T> grads{view_bhsd(out.d_q.data(), s.batch, heads, s.queries, s.head_dim_qk),
                            view_bhsd(out.d_k.data(), s.batch, s.kv_heads, s.rows, s.head_dim_qk),
                            view_bhsd(out.d_v.data(), s.batch, s.kv_heads, s.rows, s.head_dim_vo)};
    if (!p.log_bias.empty()) {
        grads.d_log_bias = view_bhs(out.d_bias.data(), s.batch, s.kv_heads, s.rows);
    }
    std::vector<unsigned char> memory(
        attend_backward_workspace_bytes(ctx, p.attention, p.q_view(), all, sequences), 0xff);
    attend_backward(ctx, p.attention, p.q_view(), all, sequences, saved, grads,
                    {memory.data(), memory.size()});
    return out;
}

/// A sum and the sum of its terms' magnitudes, which rounding is relative to.
struct Sum {
    double value = 0.0, size = 0.0;
    void add(double x, double magnitude) {
        value += x;
        size += magnitude;
    }
};

struct Reference {
    std::vector<Sum> d_q, d_k, d_v, d_bias;
};

template <class T>
std::vector<double> numbers(const std::vector<T>& values) {
    std::vector<double> all;
    all.reserve(values.size());
    for (const T& x : values) {
        all.push_back(number(x));
    }
    return all;
}

/// By the definition; delta from the outputs as stored.
template <class T>
Reference reference(const Problem<T>& p, const Result<T>& forward, const std::vector<T>& d_outputs) {
    const Shape& s = p.shape;
    const std::vector<double> queries = numbers(p.q), keys = numbers(p.k), values = numbers(p.v),
                              outputs = numbers(forward.out), d_out_rows = numbers(d_outputs);
    const auto dim_qk = static_cast<std::size_t>(s.head_dim_qk),
               dim_vo = static_cast<std::size_t>(s.head_dim_vo);
    Reference r;
    r.d_q.resize(queries.size());
    r.d_k.resize(keys.size());
    r.d_v.resize(values.size());
    r.d_bias.resize(p.planes());
    const double scale = static_cast<double>(p.attention.sm_scale != 0.0f
                                                 ? p.attention.sm_scale
                                                 : 1.0f / std::sqrt(static_cast<float>(s.head_dim_qk)));
    const double cap = static_cast<double>(p.attention.logits_soft_cap);
    for (std::int32_t b = 0; b < s.batch; ++b) {
        for (std::int32_t head = 0; head < s.kv_heads * s.group; ++head) {
            const std::int32_t h = head / s.group;
            for (std::int32_t i = 0; i < p.tokens(b); ++i) {
                const std::int32_t at = (p.starts.empty() ? 0 : p.starts[static_cast<std::size_t>(b)]) + i;
                const std::size_t q_at =
                    static_cast<std::size_t>((std::int64_t{b} * s.kv_heads * s.group + head) * s.queries + i);
                const double lse = expect(p, b, head, i).lse;
                if (lse == -infinity) {
                    continue;
                }
                const double* const q = queries.data() + q_at * dim_qk;
                const double* const out = outputs.data() + q_at * dim_vo;
                const double* const d_out = d_out_rows.data() + q_at * dim_vo;
                Sum* const d_q = r.d_q.data() + q_at * dim_qk;
                double delta = 0.0, delta_size = 0.0;
                for (std::size_t c = 0; c < dim_vo; ++c) {
                    delta += out[c] * d_out[c];
                    delta_size += std::fabs(out[c] * d_out[c]);
                }
                for (std::int32_t t = 0; t < s.rows; ++t) {
                    const std::size_t k_at = p.plane_at(b, h, t);
                    const std::int32_t begins = p.position.empty() ? p.first + t : p.position[k_at];
                    if (begins > at || (!p.expiry.empty() && at >= p.expiry[k_at])) {
                        continue;
                    }
                    const auto segment = [&](std::int32_t x) {
                        return std::upper_bound(p.edges.begin(), p.edges.end(), x) - p.edges.begin();
                    };
                    if (!p.edges.empty() && segment(begins) != segment(at)) {
                        continue;
                    }
                    const double* const k = keys.data() + k_at * dim_qk;
                    const double* const v = values.data() + k_at * dim_vo;
                    double x = 0.0, dp = 0.0, dp_size = 0.0;
                    for (std::size_t c = 0; c < dim_qk; ++c) {
                        x += scale * q[c] * k[c];
                    }
                    const double y = cap > 0.0 ? std::tanh(x / cap) : 0.0;
                    double logit = cap > 0.0 ? cap * y : x;
                    const bool biased =
                        !p.log_bias.empty() &&
                        at - begins >= (p.bias_from.empty() ? 0 : p.bias_from[static_cast<std::size_t>(h)]);
                    if (biased) {
                        logit += static_cast<double>(p.log_bias[k_at]);
                    }
                    if (logit == -infinity) {
                        continue;
                    }
                    const double weight = std::exp(logit - lse);
                    Sum* const d_k = r.d_k.data() + k_at * dim_qk;
                    Sum* const d_v = r.d_v.data() + k_at * dim_vo;
                    for (std::size_t c = 0; c < dim_vo; ++c) {
                        const double term = d_out[c] * v[c], of_value = weight * d_out[c];
                        dp += term;
                        dp_size += std::fabs(term);
                        d_v[c].add(of_value, std::fabs(of_value));
                    }
                    const double d = weight * (dp - delta), size = weight * (dp_size + delta_size);
                    if (biased) {
                        r.d_bias[k_at].add(d, size);
                    }
                    const double slope = scale * (1.0 - y * y);
                    for (std::size_t c = 0; c < dim_qk; ++c) {
                        d_q[c].add(d * slope * k[c], std::fabs(size * scale * k[c]));
                        d_k[c].add(d * slope * q[c], std::fabs(size * scale * q[c]));
                    }
                }
            }
        }
    }
    return r;
}

/// Every term of a sum is off by at most about 40 u relative to its size (its logit by 2 sqrt(Dk) u |x|
/// with |x| below 8 or so, exp and the products by a few u), sums of n terms by sqrt(n) u; lse is stored as
/// fp32 for every type.
template <class T>
void compare(const char* name, const std::vector<T>& got, const std::vector<Sum>& expected,
             std::int64_t& wrong) {
    const double u = std::max(compute_rounding<T>(), 0x1p-26);
    for (std::size_t i = 0; i < got.size(); ++i) {
        const double tolerance = 100.0 * u * expected[i].size +
                                 storage_rounding<T>() * std::fabs(expected[i].value) +
                                 (std::is_same_v<T, fp16> ? 0x1p-24 : 1e-30);
        if (!(std::fabs(number(got[i]) - expected[i].value) <= tolerance)) {
            if (wrong == 0) {
                MESSAGE(name << " " << i << ": " << number(got[i]) << " for " << expected[i].value);
            }
            ++wrong;
        }
    }
}

template <class T>
void check_problem(const Problem<T>& p, unsigned seed) {
    for (const isa set : instruction_sets()) {
        const host ctx(2, set);
        Result<T> forward = run(ctx, p);
        const std::vector<T> d_out = draw_d_out(p, seed);
        const Gradients<T> got = run_backward(ctx, p, forward, d_out);
        // Where loops are short, the gradients of one instruction set are worked out.
        if (test::short_loops && set != instruction_sets()[(seed + seed / 20) % instruction_sets().size()]) {
            continue;
        }
        Reference expected = reference(p, forward, d_out);
        // Beyond a sequence's length nothing is written.
        for (std::size_t i = 0; i < got.d_q.size(); ++i) {
            const auto row = static_cast<std::int32_t>(i / static_cast<std::size_t>(p.shape.head_dim_qk));
            const std::int32_t b = row / p.shape.queries / (p.shape.kv_heads * p.shape.group);
            if (row % p.shape.queries >= p.tokens(b)) {
                expected.d_q[i].value = -77.0;
            }
        }
        std::int64_t wrong = 0;
        compare("d_q", got.d_q, expected.d_q, wrong);
        compare("d_k", got.d_k, expected.d_k, wrong);
        compare("d_v", got.d_v, expected.d_v, wrong);
        if (!p.log_bias.empty()) {
            compare("d_log_bias", got.d_bias, expected.d_bias, wrong);
        }
        CAPTURE(p.shape.queries);
        CAPTURE(p.shape.head_dim_qk);
        CHECK(wrong == 0);
    }
}

template <class T>
void add_bias(Problem<T>& p, unsigned seed) {
    std::mt19937 generator(seed);
    test::Normal<float> normal;
    p.log_bias.resize(p.planes());
    for (float& x : p.log_bias) {
        x = generator() % 9 == 0 ? -std::numeric_limits<float>::infinity() : -std::fabs(normal(generator));
    }
    p.bias_from.assign(static_cast<std::size_t>(p.shape.kv_heads), 0);
    for (std::size_t h = 0; h < p.bias_from.size(); ++h) {
        p.bias_from[h] = static_cast<std::int32_t>(5 * h);
    }
}

template <class T>
std::vector<Problem<T>> problems() {
    std::vector<Problem<T>> all;
    all.emplace_back(Shape{1, 2, 1, 70, 70, 16, 16}, 1u);
    all.emplace_back(Shape{2, 1, 3, 130, 130, 24, 40}, 2u);
    all.back().random_expiry(3);
    all.back().lengths = {130, 77};
    all.emplace_back(Shape{1, 2, 2, 200, 200, 64, 8}, 4u);
    all.back().random_expiry(5);
    add_bias(all.back(), 6);
    all.back().attention.logits_soft_cap = 3.0f;
    all.emplace_back(Shape{1, 1, 5, 33, 300, 8, 64}, 7u);  // a chunk that follows a prefix
    all.back().starts = {267};
    all.back().random_expiry(8);
    all.emplace_back(Shape{1, 1, 2, 90, 90, 16, 16}, 9u);
    all.back().edges = {0, 31, 40, 90};
    all.back().random_expiry(10);
    add_bias(all.back(), 11);
    all.emplace_back(Shape{1, 2, 1, 3, 40, 16, 16}, 12u);  // rows in no order
    all.back().starts = {20};
    all.back().attention.sm_scale = 0.5f;
    for (std::int32_t i = 0; i < 80; ++i) {
        all.back().position.push_back((i * 13) % 41 - 3);
    }
    all.emplace_back(Shape{1, 1, 1, 0, 5, 8, 8}, 13u);
    return all;
}

}  // namespace

TEST_CASE("attention gradients by their definition, double") {
    unsigned seed = 1;
    for (const Problem<double>& p : problems<double>()) {
        check_problem(p, seed++);
    }
}
TEST_CASE("attention gradients by their definition, fp32") {
    unsigned seed = 21;
    for (const Problem<float>& p : problems<float>()) {
        check_problem(p, seed++);
    }
}
TEST_CASE("attention gradients by their definition, bf16") {
    unsigned seed = 41;
    for (const Problem<bf16>& p : problems<bf16>()) {
        check_problem(p, seed++);
    }
}

TEST_CASE("attention gradients by differences") {
    const host ctx(2);
    unsigned seed = 61;
    for (Problem<double>& p : problems<double>()) {
        if (p.shape.queries == 0) {
            continue;
        }
        Result<double> forward = run(ctx, p);
        const std::vector<double> d_out = draw_d_out(p, seed++);
        const Gradients<double> got = run_backward(ctx, p, forward, d_out);
        const auto loss = [&] {
            const Result<double> again = run(ctx, p);
            double sum = 0.0;
            for (std::size_t i = 0; i < again.out.size(); ++i) {
                sum += again.out[i] == -77.0 ? 0.0 : again.out[i] * d_out[i];
            }
            return sum;
        };
        const auto check = [&](std::vector<double>& values, const std::vector<double>& d) {
            double scale = 0.0;
            for (const double x : d) {
                scale = std::max(scale, x == -77.0 ? 0.0 : std::fabs(x));
            }
            for (std::size_t i = 3; i < values.size(); i += values.size() / 9 + 1) {
                if (d[i] == -77.0) {
                    continue;
                }
                const double slope = test::difference(
                    values[i], 1e-3, [&](double x) { values[i] = x; }, loss);
                CHECK(test::relative(d[i], slope, scale) < 1e-6);
            }
        };
        check(p.q, got.d_q);
        check(p.k, got.d_k);
        check(p.v, got.d_v);
        for (std::size_t i = 1; i < p.log_bias.size(); i += p.log_bias.size() / 12 + 1) {
            if (std::isinf(p.log_bias[i])) {
                continue;
            }
            p.log_bias[i] = std::nearbyint(p.log_bias[i] * 1024.0f) / 1024.0f;
            forward = run(ctx, p);
            const double d = run_backward(ctx, p, forward, d_out).d_bias[i];
            const double slope = test::difference(
                static_cast<double>(p.log_bias[i]), 0x1p-9,
                [&](double x) { p.log_bias[i] = static_cast<float>(x); }, loss);
            CHECK(std::fabs(d - slope) < 1e-6);
        }
    }
}

TEST_CASE("attention gradients: unseen garbage, rows that see nothing, any threads") {
    Problem<float> p(Shape{1, 1, 2, 60, 60, 16, 16}, 1u);
    p.expiry.assign(60, never);
    for (std::size_t t = 0; t < 60; t += 3) {
        p.expiry[t] = 0;
    }  // never seen
    p.expiry[1] = 1;
    for (std::size_t t = 0; t < 60; t += 3) {
        for (std::size_t c = 0; c < 16; ++c) {
            p.k[t * 16 + c] = p.v[t * 16 + c] = std::nanf("");
        }
    }
    const host ctx(1);
    Result<float> forward = run(ctx, p);
    const std::vector<float> d_out = draw_d_out(p, 2);
    const Gradients<float> got = run_backward(ctx, p, forward, d_out);
    CHECK(forward.lse[0] == -std::numeric_limits<float>::infinity());
    for (std::size_t c = 0; c < 16; ++c) {
        CHECK(got.d_q[c] == 0.0f);  // query 0 sees nothing
        CHECK(got.d_k[c] == 0.0f);
        CHECK(got.d_v[3 * 16 + c] == 0.0f);
    }
    for (const float x : got.d_q) {
        CHECK(std::isfinite(x));
    }
    for (const int threads : {2, 5}) {
        const host more(threads);
        const Gradients<float> again = run_backward(more, p, forward, d_out);
        CHECK(std::memcmp(again.d_k.data(), got.d_k.data(), got.d_k.size() * sizeof(float)) == 0);
        CHECK(std::memcmp(again.d_q.data(), got.d_q.data(), got.d_q.size() * sizeof(float)) == 0);
    }
    const auto call = [&] { return run_backward(ctx, p, forward, d_out); };
    p.k[4 * 16 + 2] = std::nanf("");
    CHECK_REFUSED(call(), "k[0][0][4]: NaN or infinite");
    const auto reported = [&] {
        std::uint32_t status = status_ok;
        Gradients<float> to = got;
        const SavedForward<float> from{forward.out_view(), forward.lse_view(),
                                       view_bhsd<const float>(d_out.data(), 1, 2, 60, 16)};
        const AttentionGrads<float> where{view_bhsd(to.d_q.data(), 1, 2, 60, 16),
                                          view_bhsd(to.d_k.data(), 1, 1, 60, 16),
                                          view_bhsd(to.d_v.data(), 1, 1, 60, 16)};
        std::vector<unsigned char> memory(attend_backward_workspace_bytes<float>(
            ctx, p.attention, p.q_view(), p.key_views(), p.sequences()));
        attend_backward(ctx, p.attention, p.q_view(), p.key_views(), p.sequences(), from, where,
                        {memory.data(), memory.size()}, {.status = &status});
        return status;
    };
    CHECK(reported() == status_not_finite);
    p.k[4 * 16 + 2] = 0.0f;
    CHECK(reported() == status_ok);
    p.v[5 * 16] = std::numeric_limits<float>::infinity();
    CHECK_REFUSED(call(), "v[0][0][5]: NaN or infinite");
    p.v[5 * 16] = 0.0f;
    p.q[61 * 16] = std::nanf("");
    CHECK_REFUSED(call(), "q[0][1][1]: NaN or infinite");
    p.q[61 * 16] = 0.0f;
    forward.lse[7] = std::nanf("");
    CHECK_REFUSED(call(), "lse[0][0][7]: nan");
    forward.lse[7] = 0.0f;
    const auto all = p.key_views();
    Gradients<float> grads = got;
    SavedForward<float> saved{forward.out_view(), forward.lse_view(),
                              view_bhsd<const float>(d_out.data(), 1, 2, 60, 16)};
    AttentionGrads<float> where{view_bhsd(grads.d_q.data(), 1, 2, 60, 16),
                                view_bhsd(grads.d_k.data(), 1, 1, 60, 16),
                                view_bhsd(grads.d_v.data(), 1, 1, 60, 16)};
    const auto direct = [&] {
        attend_backward(ctx, p.attention, p.q_view(), all, p.sequences(), saved, where, {});
    };
    CHECK_REFUSED(direct(), "workspace.bytes: 0");
    where.d_log_bias = view_bhs(grads.d_bias.data(), 1, 1, 60);
    CHECK_REFUSED(direct(), "d_log_bias: given");
    where.d_log_bias = {};
    where.d_k.length = 59;
    CHECK_REFUSED(direct(), "d_k: [1, 1, 59]");
    where.d_k.length = 60;
    saved.d_out.dim = 8;
    CHECK_REFUSED(direct(), "d_out.dim: 8");
}
