// The cases of baselines.kvpv (tests/reference/baselines.py): sequences drawn as there, and policies made
// of their numbers.
#pragma once

#include <kvpolicy/h2o.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/tova.hpp>

#include "cases.hpp"
#include "draw.hpp"
#include "vectors.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace test {

/// One case: its numbers, and q and k of one sequence.
struct BaselineCase {
    enum : std::int32_t { h2o, tova, snapkv };
    std::int32_t seed, kind, kv_heads, group, length, dim, budget, window, prompt, chunk, pool;
    bool pool_max, group_max, whole_layer, flat;
    kvpolicy::AttentionParams attention;
    std::vector<std::int32_t> expiry;  // [kv_heads, length], clamped to length
    std::vector<double> mass, sparse_mass;

    [[nodiscard]] std::int32_t heads() const { return kv_heads * group; }
    [[nodiscard]] kvpolicy::ObservedPrefill prefill() const { return {chunk}; }
    [[nodiscard]] kvpolicy::group_aggregate aggregate() const {
        return group_max ? kvpolicy::group_aggregate::max : kvpolicy::group_aggregate::mean;
    }

    /// array 0: queries, 1: keys, 2: values; head by head.
    template <class T>
    [[nodiscard]] std::vector<T> drawn(std::uint64_t array) const {
        const std::int32_t rows = (array == 0 ? heads() : kv_heads) * length;
        const std::vector<float> numbers = draw(3 * static_cast<std::uint64_t>(seed) + array,
                                                static_cast<std::size_t>(std::int64_t{rows} * dim), 2.0f);
        std::vector<T> out(numbers.size());
        for (std::size_t i = 0; i < out.size(); ++i) {
            const std::size_t per_head = static_cast<std::size_t>(length) * static_cast<std::size_t>(dim);
            const std::size_t from =
                flat && array == 1 ? i / per_head * per_head + i % static_cast<std::size_t>(dim) : i;
            out[i] = static_cast<T>(std::floor(numbers[from] * 64.0f) / 64.0f);
        }
        return out;
    }

    /// Calls run(policy) with the case's policy.
    template <class Run>
    void with_policy(Run&& run) const {
        using namespace kvpolicy;
        if (kind == h2o) {
            run(h2o_for_total(budget, window, {prefill(), aggregate()}));
        } else if (kind == tova) {
            run(tova_for_total(budget, {prefill(), whole_layer, aggregate()}));
        } else {
            run(snapkv_for_total(budget, window, {prefill(), {pool, pool_max}, aggregate()}));
        }
    }
};

inline const std::vector<BaselineCase>& baseline_cases() {
    static const std::vector<BaselineCase> all = [] {
        const auto file = kvpolicy_test::vectors::load("baselines.kvpv");
        const auto& cases = file.get<std::int32_t>("cases");
        std::vector<BaselineCase> read;
        for (std::int64_t n = 0; n < cases.shape[0]; ++n) {
            const std::int32_t* c = cases.row(n);
            BaselineCase one{};
            one.seed = c[0], one.kind = c[1], one.kv_heads = c[2], one.group = c[3], one.length = c[4];
            one.dim = c[5], one.budget = c[6], one.window = c[7], one.prompt = c[8], one.chunk = c[9];
            one.pool = c[10], one.pool_max = c[11] != 0, one.group_max = c[12] != 0;
            one.whole_layer = c[13] != 0, one.flat = c[14] != 0;
            const float* levels = file.get<float>("levels").row(n);
            one.attention = {levels[0], levels[1]};
            const std::int64_t begin = file.get<std::int32_t>("offsets")[n];
            const std::int64_t end = file.get<std::int32_t>("offsets")[n + 1];
            const auto part = [&](auto& to, const auto& from) {
                to.assign(from.data() + begin, from.data() + end);
            };
            part(one.expiry, file.get<std::int32_t>("expiry"));
            part(one.mass, file.get<double>("mass"));
            part(one.sparse_mass, file.get<double>("sparse_mass"));
            read.push_back(std::move(one));
        }
        return read;
    }();
    return all;
}

/// How much a sum of `count` softmax weights computed in T may be off: logits of size 1 to 20 carry that many
/// roundings of a product of `dim` terms into the exponent, and a weight is at most 1.
template <class T>
double mass_tolerance(const BaselineCase& one, double value) {
    const double unit = std::is_same_v<T, double> ? 0x1p-52 : 0x1p-23;
    // |scale q.k| <= 0.3 * dim * 4, rounded at every of dim / 8 + 3 additions; exp turns it into a relative
    //     error.
    const double logit = 0.3 * one.dim * 4.0 * (one.dim / 8.0 + 4.0);
    return unit * (logit + 8.0) * (value + 1e-6) + unit * value * 8.0 + 0x1p-24 * value;
}

}  // namespace test
