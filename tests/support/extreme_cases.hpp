// Causal calls of one KV head with large logits, up to +-1e30, and their results. All numbers of a row are
// equal, so a product is exact in any order of its sums, and the logits of different numbers differ by more
// than fp32's rounding: a weight is 1 over the number of keys with the largest logit, or 0.
#pragma once

#include <kvpolicy/core/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace test {

using kvpolicy::bf16;
using kvpolicy::compute_t;
using kvpolicy::fp16;

/// A causal call of one KV head: x is every element of all queries, k[t] every element of key t, v[t] every
/// element of value t.
struct Extreme {
    std::string what;
    std::int32_t dim;
    float q;
    std::vector<float> k, v;

    [[nodiscard]] std::int32_t length() const { return static_cast<std::int32_t>(k.size()); }
};

template <class T>
T stored(float x) {
    if constexpr (std::is_same_v<T, double>) {
        return static_cast<double>(x);
    } else {
        return static_cast<T>(x);
    }
}
template <class T>
double rounded(float x) {
    return static_cast<double>(static_cast<compute_t<T>>(stored<T>(x)));
}

template <class T>
std::vector<T> rows_of(const std::vector<float>& numbers, std::int32_t dim) {
    std::vector<T> rows;
    for (const float x : numbers) {
        rows.insert(rows.end(), static_cast<std::size_t>(dim), stored<T>(x));
    }
    return rows;
}

/// The logit of key t in double, and query i's output and log-sum-exp: the mean over the largest.
template <class T>
struct Wanted {
    std::vector<double> out, lse;

    explicit Wanted(const Extreme& c) {
        const double scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.dim)));
        double most = -INFINITY, sum = 0.0, count = 0.0;
        for (std::size_t t = 0; t < c.k.size(); ++t) {
            const double logit = rounded<T>(c.q) * rounded<T>(c.k[t]) * c.dim * scale;
            if (logit > most) {
                most = logit;
                sum = count = 0.0;
            }
            if (logit == most) {
                sum += rounded<T>(c.v[t]);
                count += 1.0;
            }
            out.push_back(sum / count);
            lse.push_back(most + std::log(count));
        }
    }
};

/// Half the distance of neighbors near 1.
template <class T>
constexpr double roundoff() {
    return std::is_same_v<T, bf16> ? 0x1p-9 : std::is_same_v<T, fp16> ? 0x1p-12 : 0x1p-24;
}

/// Gradients of a case in double, each the same in all elements of a row, with the sums of the sizes of what
/// is added up.
template <class T>
struct WantedGradients {
    std::vector<double> q, k, v, size_q, size_k, size_v;
    std::vector<float> d_out;

    WantedGradients(const Extreme& c, const Wanted<T>& forward)
        : q(c.k.size()), k(q), v(q), size_q(q), size_k(q), size_v(q) {
        const double scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.dim)));
        for (std::size_t i = 0; i < c.k.size(); ++i) {
            d_out.push_back((static_cast<float>(i % 3) - 0.75f) / 64.0f);
            const double d = rounded<T>(d_out[i]), out = rounded<T>(static_cast<float>(forward.out[i]));
            double most = -INFINITY, count = 0.0;
            for (std::size_t t = 0; t <= i; ++t) {
                const double key = rounded<T>(c.k[t]) * rounded<T>(c.q);
                count = key > most ? 1.0 : key == most ? count + 1.0 : count;
                most = std::max(most, key);
            }
            for (std::size_t t = 0; t <= i; ++t) {
                if (rounded<T>(c.k[t]) * rounded<T>(c.q) != most) {
                    continue;
                }
                const double p = 1.0 / count, value = rounded<T>(c.v[t]);
                const double s = p * c.dim * d * (value - out) * scale,
                             size = p * c.dim * std::abs(d) * (std::abs(value) + std::abs(out)) * scale;
                v[t] += p * d;
                size_v[t] += p * std::abs(d);
                q[i] += s * rounded<T>(c.k[t]);
                size_q[i] += size * std::abs(rounded<T>(c.k[t]));
                k[t] += s * rounded<T>(c.q);
                size_k[t] += size * std::abs(rounded<T>(c.q));
            }
        }
    }
};

/// Numbers whose products with each other are logits of about `logit`.
inline std::vector<Extreme> cases(std::int32_t dim, float logit, std::int32_t length) {
    // Of 8 bits, so that sums of up to 256 products are exact.
    const auto short_number = [](float y) { return static_cast<float>(bf16(y)); };
    const float x = short_number(std::sqrt(logit / std::sqrt(static_cast<float>(dim))));
    const auto n = static_cast<std::size_t>(length);
    std::vector<Extreme> all;
    const std::string size = std::to_string(logit);
    all.push_back(
        {"equal logits of -" + size, dim, x, std::vector<float>(n, -x), std::vector<float>(n, 2.0f)});
    all.push_back({"equal logits of " + size, dim, x, std::vector<float>(n, x), std::vector<float>(n, 2.0f)});
    Extreme mixed{"logits around +-" + size, dim, x, {}, {}}, rising{"rising to " + size, dim, x, {}, {}},
        falling{"falling to -" + size, dim, x, {}, {}}, late{"zeros, then " + size, dim, x, {}, {}};
    for (std::int32_t t = 0; t < length; ++t) {
        const float some[] = {-x, -1.25f * x, x, 0.75f * x, 0.0f, -0.5f * x, x};
        mixed.k.push_back(short_number(some[(t * t + t / 7) % 7]));
        rising.k.push_back(short_number(x * (1.0f + static_cast<float>(t / 20) / 16.0f)));
        falling.k.push_back(-rising.k.back());
        late.k.push_back(t < 150 ? 0.0f : x);
        for (Extreme* const c : {&mixed, &rising, &falling, &late}) {
            c->v.push_back(static_cast<float>(t % 5) - 2.0f);
        }
    }
    for (Extreme* const c : {&mixed, &rising, &falling, &late}) {
        all.push_back(*c);
    }
    return all;
}

/// Zeros in the first keys, then logits of about `logit` to the end: several blocks of a forward pass whose
/// reference has moved from 0. Values of the last 256 keys are others, so that a block without its weights
/// shows.
inline Extreme moved_reference(std::int32_t dim, float logit, std::int32_t length) {
    Extreme c{"zeros, then blocks of " + std::to_string(logit), dim, 0.0f, {}, {}};
    c.q = cases(dim, logit, 0).front().q;
    for (std::int32_t t = 0; t < length; ++t) {
        c.k.push_back(t < 150 ? 0.0f : c.q);
        c.v.push_back(t < length - 256 ? -2.0f : 2.0f);
    }
    return c;
}

// Beyond some 1e5 neighbors of a number of 16 bits differ by hundreds in their logits.
inline const std::vector<float> wide{1e5f, 1e6f, 3e7f, 1e9f, 1e13f, 1e20f, 1e30f},
    narrow{1e5f, 1e6f, 3e7f, 1e9f};

}  // namespace test
