// Attention in float64 from its definition, as plain loops over all keys, and what a result
// may differ from it.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include "../../support/loops.hpp"
#include "../../support/normal.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace attention_test {

using namespace kvpolicy;

inline constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
double number(T value) {
    if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, fp16>) {
        return static_cast<double>(static_cast<float>(value));
    } else {
        return static_cast<double>(value);
    }
}

template <class T>
T stored(double value) {
    if constexpr (std::is_same_v<T, double>) {
        return value;
    } else {
        return static_cast<T>(static_cast<float>(value));
    }
}

/// Half a unit in the last place of the storage type, and of what it is computed in.
template <class T>
constexpr double storage_rounding() {
    return std::is_same_v<T, bf16>    ? 0x1p-8
           : std::is_same_v<T, fp16>  ? 0x1p-11
           : std::is_same_v<T, float> ? 0x1p-24
                                      : 0x1p-53;
}
template <class T>
constexpr double compute_rounding() {
    return std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
}

struct Shape {
    std::int32_t batch = 1, kv_heads = 1, group = 1, queries = 1, rows = 1, head_dim_qk = 64,
                 head_dim_vo = 64;
};

/// A call with memory of its own. Everything optional is off until it is filled.
template <class T>
struct Problem {
    Shape shape;
    std::vector<T> q, k, v;
    std::vector<expiry_t> expiry;
    std::vector<float> log_bias;
    std::vector<std::int32_t> bias_from, position, starts, lengths, edges;
    AttentionParams attention;
    std::int32_t first = 0;

    explicit Problem(const Shape& s, unsigned seed = 1, double spread = 1.0) : shape(s) {
        std::mt19937 generator(seed);
        test::Normal<double> normal(0.0, spread);
        const auto fill = [&](std::vector<T>& to, std::int64_t count) {
            to.resize(static_cast<std::size_t>(count));
            for (T& x : to) {
                x = stored<T>(normal(generator));
            }
        };
        const std::int64_t heads = std::int64_t{s.batch} * s.kv_heads;
        fill(q, heads * s.group * s.queries * s.head_dim_qk);
        fill(k, heads * s.rows * s.head_dim_qk);
        fill(v, heads * s.rows * s.head_dim_vo);
    }

    [[nodiscard]] std::size_t planes() const {
        return static_cast<std::size_t>(shape.batch) * static_cast<std::size_t>(shape.kv_heads) *
               static_cast<std::size_t>(shape.rows);
    }
    [[nodiscard]] std::size_t plane_at(std::int32_t b, std::int32_t h, std::int32_t t) const {
        return static_cast<std::size_t>((std::int64_t{b} * shape.kv_heads + h) * shape.rows + t);
    }

    /// Lifetimes of which a third never end, a third end soon and the rest anywhere, some before the key.
    void random_expiry(unsigned seed) {
        std::mt19937 generator(seed);
        expiry.resize(planes());
        for (std::size_t i = 0; i < expiry.size(); ++i) {
            const auto t = static_cast<std::int32_t>(i % static_cast<std::size_t>(shape.rows)) + first;
            switch (generator() % 4) {
                case 0:
                    expiry[i] = never;
                    break;
                case 1:
                    expiry[i] = t + static_cast<std::int32_t>(generator() % 40);
                    break;
                case 2:
                    expiry[i] = t + static_cast<std::int32_t>(generator() % 400);
                    break;
                default:
                    expiry[i] = static_cast<std::int32_t>(generator() % 200);
                    break;
            }
        }
    }

    [[nodiscard]] rows_view<const T> q_view() const {
        return view_bhsd<const T>(q.data(), shape.batch, shape.kv_heads * shape.group, shape.queries,
                                  shape.head_dim_qk);
    }
    [[nodiscard]] kvpolicy::kv_view<T> key_views() const {
        kvpolicy::kv_view<T> all{
            view_bhsd<const T>(k.data(), shape.batch, shape.kv_heads, shape.rows, shape.head_dim_qk),
            view_bhsd<const T>(v.data(), shape.batch, shape.kv_heads, shape.rows, shape.head_dim_vo)};
        const auto plane = [&](const auto& values) {
            return view_bhs(values.data(), shape.batch, shape.kv_heads, shape.rows);
        };
        if (!expiry.empty()) {
            all.mask.expiry = plane(expiry);
        }
        if (!log_bias.empty()) {
            all.mask.log_bias = plane(log_bias);
        }
        if (!bias_from.empty()) {
            all.mask.bias_from = bias_from.data();
        }
        if (!position.empty()) {
            all.position = plane(position);
        }
        all.first = first;
        return all;
    }
    [[nodiscard]] Sequences sequences() const {
        Sequences s;
        s.batch = shape.batch;
        s.length = shape.queries;
        s.lengths = lengths.empty() ? nullptr : lengths.data();
        s.starts = starts.empty() ? nullptr : starts.data();
        if (!edges.empty()) {
            s.cu_seqlens = edges.data();
            s.segments = static_cast<std::int32_t>(edges.size()) - 1;
        }
        return s;
    }

    [[nodiscard]] std::int32_t tokens(std::int32_t b) const {
        return lengths.empty() ? shape.queries : lengths[static_cast<std::size_t>(b)];
    }
};

template <class T>
struct Result {
    Shape shape;
    std::vector<T> out;
    std::vector<float> lse;

    explicit Result(const Shape& s)
        : shape(s),
          out(static_cast<std::size_t>(std::int64_t{s.batch} * s.kv_heads * s.group * s.queries *
                                       s.head_dim_vo),
              stored<T>(-77.0)),
          lse(static_cast<std::size_t>(std::int64_t{s.batch} * s.kv_heads * s.group * s.queries), -77.0f) {}

    rows_view<T> out_view() {
        return view_bhsd(out.data(), shape.batch, shape.kv_heads * shape.group, shape.queries,
                         shape.head_dim_vo);
    }
    plane_view<float> lse_view() {
        return view_bhs(lse.data(), shape.batch, shape.kv_heads * shape.group, shape.queries);
    }
    [[nodiscard]] const T* row(std::int32_t b, std::int32_t head, std::int32_t i) const {
        return out.data() + ((std::int64_t{b} * shape.kv_heads * shape.group + head) * shape.queries + i) *
                                shape.head_dim_vo;
    }
    [[nodiscard]] float sum(std::int32_t b, std::int32_t head, std::int32_t i) const {
        return lse[static_cast<std::size_t>(
            (std::int64_t{b} * shape.kv_heads * shape.group + head) * shape.queries + i)];
    }
};

/// Runs attend with a workspace of exactly the size asked for, poisoned.
template <class T>
Result<T> run(const host& ctx, const Problem<T>& problem) {
    Result<T> result(problem.shape);
    const auto all = problem.key_views();
    const Sequences sequences = problem.sequences();
    std::vector<unsigned char> memory(
        attend_workspace_bytes(ctx, problem.attention, problem.q_view(), all, sequences), 0xff);
    attend(ctx, problem.attention, problem.q_view(), all, sequences, result.out_view(), result.lse_view(),
           {memory.data(), memory.size()});
    return result;
}

/// What one query should give, and how far off a body may be. With u the unit roundoff of the compute type, a
/// logit is off by at most about 2 sqrt(Dk) u sum_d |q_d k_d| scale (random signs; the worst case has Dk for
/// sqrt(Dk)), plus 4u of its magnitude; a weight by that, relatively, and 4u more from exp; sums over n keys
/// by (8 + sqrt(n)) u. The output adds half a unit of its storage type.
struct Expected {
    std::vector<double> out;
    double lse = -infinity;
    std::int32_t seen = 0;
    double out_tolerance = 0.0, lse_tolerance = 0.0;
};

template <class T>
Expected expect(const Problem<T>& p, std::int32_t b, std::int32_t head, std::int32_t i) {
    const Shape& s = p.shape;
    const std::int32_t h = head / s.group;
    const std::int32_t at = (p.starts.empty() ? 0 : p.starts[static_cast<std::size_t>(b)]) + i;
    const double scale = p.attention.sm_scale != 0.0f
                             ? static_cast<double>(p.attention.sm_scale)
                             : static_cast<double>(1.0f / std::sqrt(static_cast<float>(s.head_dim_qk)));
    const double cap = static_cast<double>(p.attention.logits_soft_cap);
    const double u = compute_rounding<T>();
    const T* q =
        p.q.data() + ((std::int64_t{b} * s.kv_heads * s.group + head) * s.queries + i) * s.head_dim_qk;

    std::vector<double> logits;
    std::vector<std::int32_t> keys;
    double magnitude = 0.0, largest = -infinity, largest_value = 0.0;
    for (std::int32_t t = 0; t < s.rows; ++t) {
        const std::size_t at_plane = p.plane_at(b, h, t);
        const std::int32_t begins = p.position.empty() ? p.first + t : p.position[at_plane];
        if (begins > at || (!p.expiry.empty() && at >= p.expiry[at_plane])) {
            continue;
        }
        if (!p.edges.empty()) {
            const auto segment = [&](std::int32_t x) {
                return std::upper_bound(p.edges.begin(), p.edges.end(), x) - p.edges.begin();
            };
            if (segment(begins) != segment(at)) {
                continue;
            }
        }
        const T* k = p.k.data() + static_cast<std::int64_t>(at_plane) * s.head_dim_qk;
        double product = 0.0, sum = 0.0;
        for (std::int32_t d = 0; d < s.head_dim_qk; ++d) {
            const double term = number(q[d]) * number(k[d]);
            product += term;
            sum += std::fabs(term);
        }
        double logit = scale * product;
        if (cap > 0.0) {
            logit = cap * std::tanh(logit / cap);
        }
        if (!p.log_bias.empty()) {
            const std::int32_t from = p.bias_from.empty() ? 0 : p.bias_from[static_cast<std::size_t>(h)];
            if (at - begins >= from) {
                logit += static_cast<double>(p.log_bias[at_plane]);
            }
        }
        if (logit == -infinity) {
            continue;
        }
        magnitude = std::max(magnitude, 2.0 * std::sqrt(s.head_dim_qk) * u * std::fabs(scale) * sum +
                                            4.0 * u * (std::fabs(logit) + cap));
        largest = std::max(largest, logit);
        logits.push_back(logit);
        keys.push_back(t);
    }
    Expected e;
    e.out.assign(static_cast<std::size_t>(s.head_dim_vo), 0.0);
    e.seen = static_cast<std::int32_t>(keys.size());
    if (keys.empty()) {
        return e;
    }
    double total = 0.0;
    for (const double logit : logits) {
        total += std::exp(logit - largest);
    }
    for (std::size_t n = 0; n < keys.size(); ++n) {
        const double weight = std::exp(logits[n] - largest) / total;
        const T* v = p.v.data() + static_cast<std::int64_t>(p.plane_at(b, h, keys[n])) * s.head_dim_vo;
        double* const out = e.out.data();
        for (std::int32_t c = 0; c < s.head_dim_vo; ++c) {
            const double x = number(v[c]);
            out[c] += weight * x;
            largest_value = std::max(largest_value, std::fabs(x));
        }
    }
    e.lse = largest + std::log(total);
    const double sums = (8.0 + std::sqrt(static_cast<double>(e.seen))) * u;
    e.out_tolerance = largest_value * (2.0 * magnitude + 4.0 * u + sums + storage_rounding<T>()) + 0x1p-25;
    if (std::is_same_v<T, double>) {
        e.out_tolerance -= 0x1p-25;
    }
    e.lse_tolerance = magnitude + 4.0 * u + sums + 0x1p-23 * (1.0 + std::fabs(e.lse));
    return e;
}

/// What expect() says of the rows of one problem, worked out once a row: the same for every instruction set.
template <class T>
class ExpectedRows {
  public:
    explicit ExpectedRows(const Problem<T>& problem)
        : problem_(problem),
          heads_(problem.shape.kv_heads * problem.shape.group),
          rows_(
              static_cast<std::size_t>(std::int64_t{problem.shape.batch} * heads_ * problem.shape.queries)) {}

    const Expected& at(std::int32_t b, std::int32_t head, std::int32_t i) {
        auto& row =
            rows_[static_cast<std::size_t>((std::int64_t{b} * heads_ + head) * problem_.shape.queries + i)];
        if (!row) {
            row = expect(problem_, b, head, i);
        }
        return *row;
    }

  private:
    const Problem<T>& problem_;
    std::int32_t heads_;
    std::vector<std::optional<Expected>> rows_;
};

/// Compares all outputs with the definition; rows past a sequence's length must be untouched. Where loops
/// are short, the definition is worked out for a third of the rows.
template <class T>
void check(const Problem<T>& problem, ExpectedRows<T>& expected, const Result<T>& result) {
    const Shape& s = problem.shape;
    std::int64_t wrong = 0, empty = 0;
    std::string first;
    for (std::int32_t b = 0; b < s.batch; ++b) {
        for (std::int32_t head = 0; head < s.kv_heads * s.group; ++head) {
            for (std::int32_t i = 0; i < s.queries; ++i) {
                const T* row = result.row(b, head, i);
                const double lse = static_cast<double>(result.sum(b, head, i));
                bool right = true;
                if (i >= problem.tokens(b)) {
                    right = lse == -77.0;
                    for (std::int32_t c = 0; c < s.head_dim_vo; ++c) {
                        right = right && number(row[c]) == -77.0;
                    }
                } else if (!test::short_loops || (b + head + i) % 3 == 0) {
                    const Expected& e = expected.at(b, head, i);
                    empty += e.seen == 0;
                    right = e.seen == 0 ? lse == -infinity : std::fabs(lse - e.lse) <= e.lse_tolerance;
                    for (std::int32_t c = 0; c < s.head_dim_vo; ++c) {
                        const double difference =
                            std::fabs(number(row[c]) - e.out[static_cast<std::size_t>(c)]);
                        right =
                            right && (e.seen == 0 ? number(row[c]) == 0.0 : difference <= e.out_tolerance);
                    }
                    if (!right && first.empty()) {
                        first = "b " + std::to_string(b) + ", head " + std::to_string(head) + ", query " +
                                std::to_string(i) + ", lse " + std::to_string(lse) + " for " +
                                std::to_string(e.lse) + ", out[0] " + std::to_string(number(row[0])) +
                                " for " + std::to_string(e.out[0]);
                    }
                }
                wrong += !right;
            }
        }
    }
    CAPTURE(s.group);
    CAPTURE(s.queries);
    CAPTURE(s.rows);
    CAPTURE(s.head_dim_qk);
    CAPTURE(s.head_dim_vo);
    CAPTURE(empty);
    CAPTURE(first);
    CHECK(wrong == 0);
}
template <class T>
void check(const Problem<T>& problem, const Result<T>& result) {
    ExpectedRows<T> expected(problem);
    check(problem, expected, result);
}

/// The instruction sets that this machine can run.
inline std::vector<isa> instruction_sets() {
    if (detected_isa() == isa::portable) {
        return {isa::portable};
    }
    return {isa::portable, isa::avx2};
}

template <class T>
void check_all(const Problem<T>& problem) {
    ExpectedRows<T> expected(problem);
    for (const isa set : instruction_sets()) {
        CAPTURE(static_cast<int>(set));
        const host ctx(1, set);
        check(problem, expected, run(ctx, problem));
    }
}

}  // namespace attention_test
