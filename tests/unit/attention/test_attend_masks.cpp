// attend through masks: lifetimes, biases, positions in any order, two segments, packed samples; and what
// invisible rows hold must not matter.
#include "attention_reference.hpp"

#include <cstring>

using namespace attention_test;

namespace {

template <class T>
bool identical(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// Rows of NaN and infinities, so that 0 times any of them shows.
template <class T>
void poison_row(std::vector<T>& rows, std::int64_t row, std::int32_t dim, bool nan) {
    const double with = nan ? std::numeric_limits<double>::quiet_NaN() : infinity;
    for (std::int32_t c = 0; c < dim; ++c) {
        rows[static_cast<std::size_t>(row * dim + c)] = stored<T>(with);
    }
}

}  // namespace

TEST_CASE("a window of 4 over one-hot values: exactly 4 nonzero weights") {
    const std::int32_t length = 64, window = 4;
    Problem<float> p({1, 1, 3, length, length, 64, 64}, 1);
    p.expiry.resize(p.planes());
    for (std::int32_t t = 0; t < length; ++t) {
        p.expiry[static_cast<std::size_t>(t)] = t + window;
        for (std::int32_t c = 0; c < 64; ++c) {
            p.v[static_cast<std::size_t>(t) * 64 + static_cast<std::size_t>(c)] = c == t ? 1.0f : 0.0f;
        }
    }
    check_all(p);
    for (const isa set : instruction_sets()) {
        const Result<float> result = run(host(1, set), p);
        for (std::int32_t head = 0; head < 3; ++head) {
            for (std::int32_t i = 0; i < length; ++i) {
                const float* weights = result.row(0, head, i);
                std::int32_t nonzero = 0;
                for (std::int32_t c = 0; c < 64; ++c) {
                    nonzero += weights[c] != 0.0f;
                    CHECK_MESSAGE((weights[c] == 0.0f || (c <= i && c > i - window)),
                                  "weight outside the window");
                }
                CHECK(nonzero == std::min(i + 1, window));
            }
        }
    }
}

TEST_CASE("all keys expired, or none begun: 0 and -inf") {
    for (const std::int32_t queries : {1, 50}) {
        Problem<bf16> p({2, 1, 4, queries, 80, 64, 64}, 2);
        p.starts = {80, 200};
        p.expiry.assign(p.planes(), 60);
        check_all(p);
        const Result<bf16> result = run(host(1), p);
        for (const bf16 x : result.out) {
            CHECK((x.bits & 0x7fffu) == 0u);
        }
        for (const float x : result.lse) {
            CHECK(x == -std::numeric_limits<float>::infinity());
        }
        p.expiry.clear();
        p.starts = {-100, -51};
        check_all(p);
    }
}

TEST_CASE("NaN and infinities in rows that nobody sees never leave") {
    unsigned seed = 3;
    for (const auto& [queries, group] :
         std::vector<std::pair<std::int32_t, std::int32_t>>{{1, 1}, {1, 4}, {4, 3}, {70, 3}, {130, 1}}) {
        Problem<float> p({1, 2, group, queries, queries + 150, 64, 64}, ++seed);
        const std::int32_t start = 100;  // the last keys have not begun yet
        p.starts = {start};
        p.random_expiry(seed);
        std::int32_t poisoned = 0;
        for (std::int32_t h = 0; h < 2; ++h) {
            for (std::int32_t t = 0; t < p.shape.rows; ++t) {
                const expiry_t expires = p.expiry[p.plane_at(0, h, t)];
                const bool seen = t < start + queries && expires > std::max(start, t);
                if (seen) {
                    continue;
                }
                ++poisoned;
                poison_row(p.k, static_cast<std::int64_t>(p.plane_at(0, h, t)), 64, t % 2 == 0);
                poison_row(p.v, static_cast<std::int64_t>(p.plane_at(0, h, t)), 64, t % 3 == 0);
            }
        }
        CHECK(poisoned > 20);
        check_all(p);
    }
}

TEST_CASE("a NaN value reaches the queries that see it and no others of the same tile") {
    for (const auto& [queries, group] :
         std::vector<std::pair<std::int32_t, std::int32_t>>{{8, 1}, {5, 3}, {60, 3}}) {
        Problem<float> p({1, 1, group, queries, queries, 64, 64}, 4);
        p.expiry.assign(p.planes(), never);
        p.expiry[1] = 3;  // seen by queries 1 and 2
        poison_row(p.k, 1, 64, true);
        poison_row(p.v, 1, 64, false);
        p.expiry[0] = 2;  // a NaN value under a finite logit, seen by 0 and 1
        poison_row(p.v, 0, 64, true);
        for (const isa set : instruction_sets()) {
            const Result<float> result = run(host(1, set), p);
            for (std::int32_t head = 0; head < group; ++head) {
                for (std::int32_t i = 0; i < queries; ++i) {
                    CAPTURE(i);
                    CHECK(std::isnan(result.row(0, head, i)[5]) == (i < 3));
                    CHECK(std::isnan(result.sum(0, head, i)) == (i == 1 || i == 2));
                    if (i < 3) {
                        continue;
                    }
                    const Expected e = expect(p, 0, head, i);
                    CHECK(std::fabs(number(result.row(0, head, i)[5]) - e.out[5]) <= e.out_tolerance);
                }
            }
        }
    }
}

TEST_CASE("log-biases from an age on, down to -100 and -inf") {
    unsigned seed = 5;
    for (const std::int32_t queries : {1, 6, 90}) {
        for (const bool with_expiry : {false, true}) {
            Problem<float> p({1, 2, 3, queries, queries + 60, 64, 64}, ++seed);
            p.starts = {60};
            p.bias_from = {0, 17};
            p.log_bias.resize(p.planes());
            std::mt19937 generator(seed);
            for (float& x : p.log_bias) {
                const unsigned kind = generator() % 4;
                x = kind == 0   ? -100.0f
                    : kind == 1 ? -std::numeric_limits<float>::infinity()
                    : kind == 2 ? 0.0f
                                : -0.7f;
            }
            if (with_expiry) {
                p.random_expiry(seed);
            }
            check_all(p);
        }
    }
    // All that a query sees is hidden by -inf, or carries the same -100: nothing, and no loss.
    Problem<float> p({1, 1, 1, 1, 40, 64, 64}, 6);
    p.starts = {39};
    p.log_bias.assign(40, -std::numeric_limits<float>::infinity());
    check_all(p);
    p.log_bias.assign(40, -100.0f);
    check_all(p);
    // Rows that -inf hides may hold anything.
    p.log_bias[7] = -std::numeric_limits<float>::infinity();
    poison_row(p.k, 7, 64, true);
    poison_row(p.v, 7, 64, true);
    Problem<float> clean = p;
    std::fill_n(clean.k.begin() + 7 * 64, 64, 0.0f);
    std::fill_n(clean.v.begin() + 7 * 64, 64, 0.0f);
    for (const isa set : instruction_sets()) {
        check(clean, run(host(1, set), p));
    }
}

TEST_CASE("positions in any order, as the rows of a cache have them") {
    for (const std::int32_t queries : {1, 3, 75}) {
        Problem<bf16> p({2, 2, 3, queries, 200, 64, 64}, 7);
        p.starts = {500, 10};
        p.position.resize(p.planes());
        std::mt19937 generator(8);
        for (std::int32_t& x : p.position) {
            x = static_cast<std::int32_t>(generator() % 560);
        }
        check_all(p);
        p.expiry.resize(p.planes());
        for (std::size_t i = 0; i < p.expiry.size(); ++i) {
            p.expiry[i] =
                generator() % 3 == 0 ? never : p.position[i] + static_cast<std::int32_t>(generator() % 300);
        }
        check_all(p);
    }
}

TEST_CASE("rows beyond a sequence's own count are never read") {
    Problem<float> p({2, 1, 2, 4, 90, 64, 64}, 9);
    p.starts = {200, 200};
    auto all = p.key_views();
    const std::int32_t counts[] = {37, 0};
    all.lengths = counts;
    for (std::int32_t t = 0; t < 90; ++t) {
        if (t >= 37) {
            poison_row(p.k, t, 64, true), poison_row(p.v, t, 64, true);
        }
        poison_row(p.k, 90 + t, 64, true), poison_row(p.v, 90 + t, 64, true);
    }
    // The reference knows no counts: keys that count as expired are the same thing.
    Problem<float> reference = p;
    reference.expiry.assign(p.planes(), 0);
    std::fill_n(reference.expiry.begin(), 37, never);
    for (const isa set : instruction_sets()) {
        const host ctx(1, set);
        Result<float> result(p.shape);
        std::vector<unsigned char> memory(
            attend_workspace_bytes(ctx, p.attention, p.q_view(), all, p.sequences()));
        attend(ctx, p.attention, p.q_view(), all, p.sequences(), result.out_view(), result.lse_view(),
               {memory.data(), memory.size()});
        check(reference, result);
    }
}

TEST_CASE("two segments are one list of keys") {
    unsigned seed = 10;
    for (const std::int32_t chunk : {1, 5, 33, 120}) {
        for (const std::int32_t before : {0, 1, 100}) {
            Problem<float> p({2, 2, 3, chunk, before + chunk, 64, 64}, ++seed);
            p.starts = {before, before};
            p.random_expiry(seed);
            const Shape& s = p.shape;
            const auto all = p.key_views();
            const auto rows = [&](std::int32_t from, std::int32_t count) {
                kvpolicy::kv_view<float> part = all;
                const auto cut = [&](auto& view, std::int64_t step) {
                    view.data += from * step, view.length = count;
                };
                cut(part.k, part.k.row_stride), cut(part.v, part.v.row_stride), cut(part.mask.expiry, 1);
                return part;
            };
            const kvpolicy::kv_view<float> past = rows(0, before), self = rows(before, chunk);
            ExpectedRows<float> expected(p);
            for (const isa set : instruction_sets()) {
                const host ctx(1, set);
                Result<float> result(s);
                std::vector<unsigned char> memory(
                    attend_workspace_bytes(ctx, p.attention, p.q_view(), past, self, p.sequences()));
                attend(ctx, p.attention, p.q_view(), past, self, p.sequences(), result.out_view(),
                       result.lse_view(), {memory.data(), memory.size()});
                check(p, expected, result);
                // The same keys in the same order go through the same blocks.
                const Result<float> whole = run(ctx, p);
                if (before % 64 == 0) {
                    CHECK(identical(result.out, whole.out));
                }
            }
        }
    }
}

TEST_CASE("packed samples see their own segment only") {
    for (const auto& edges : std::vector<std::vector<std::int32_t>>{
             {0, 200}, {0, 1, 2, 90, 90, 91, 200}, {0, 0, 64, 128, 192, 200, 200}}) {
        Problem<float> p({2, 2, 3, 200, 200, 64, 64}, 12);
        p.edges = edges;
        check_all(p);
        p.random_expiry(13);
        p.lengths = {200, 97};
        check_all(p);
    }
}
