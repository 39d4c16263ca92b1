// attend's numbers: logits beyond what exp holds, soft caps, double, and results that do not depend on
// threads, splits or the instruction set.
#include "attention_reference.hpp"

#include <cstring>

using namespace attention_test;

namespace {

template <class T>
bool identical(const Result<T>& a, const Result<T>& b) {
    return std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(T)) == 0 &&
           std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("logits of +-6e4") {
    // Two nonzero components keep the products exact, so the tolerance stays that of small logits.
    for (const std::int32_t queries : {1, 40}) {
        Problem<float> p({1, 1, 2, queries, 100, 64, 64}, 1);
        p.starts = {100 - queries};
        p.attention.sm_scale = 1.0f;
        std::mt19937 generator(2);
        std::fill(p.q.begin(), p.q.end(), 0.0f);
        for (std::size_t i = 0; i < p.q.size(); i += 64) {
            p.q[i] = generator() % 2 == 0 ? 1.0f : -1.0f;
        }
        for (std::size_t i = 0; i < p.k.size(); i += 64) {
            p.k[i] = (generator() % 2 == 0 ? 6.0e4f : -6.0e4f) + static_cast<float>(generator() % 5);
        }
        check_all(p);
        // All of one sign: every logit is near -6e4 for some heads and +6e4 for others.
        for (std::size_t i = 0; i < p.k.size(); i += 64) {
            p.k[i] = 6.0e4f + static_cast<float>(generator() % 3);
        }
        check_all(p);
        Problem<fp16> half({1, 1, 3, queries, 100, 64, 64}, 3);
        half.starts = {100 - queries};
        half.attention.sm_scale = 1.0f;
        for (std::size_t i = 0; i < half.k.size(); ++i) {
            half.k[i] = fp16(i % 64 == 0 ? (i % 128 == 0 ? 6.0e4f : -6.0e4f) : 0.0f);
        }
        for (std::size_t i = 0; i < half.q.size(); ++i) {
            half.q[i] = fp16(i % 64 == 0 ? 1.0f : 0.0f);
        }
        check_all(half);
    }
}

TEST_CASE("logit logits_soft_cap, and scales of any sign") {
    unsigned seed = 10;
    for (const float cap : {1.0f, 30.0f, 50.0f}) {
        for (const float scale : {0.0f, 0.02f, 3.0f, -0.3f}) {
            for (const std::int32_t queries : {1, 30}) {
                Problem<float> p({1, 2, 3, queries, 90, 64, 64}, ++seed);
                p.starts = {90 - queries};
                p.attention = {scale, cap};
                if (queries > 1) {
                    p.random_expiry(seed);
                }
                check_all(p);
                p.attention.logits_soft_cap = 0.0f;
                check_all(p);
            }
        }
    }
}

TEST_CASE("double agrees with the definition to 1e-12") {
    Problem<double> p({1, 2, 3, 90, 150, 64, 80}, 20);
    p.starts = {60};
    p.random_expiry(21);
    const Result<double> result = run(host(1), p);
    double worst = 0.0;
    for (std::int32_t head = 0; head < 6; ++head) {
        for (std::int32_t i = 0; i < 90; ++i) {
            const Expected e = expect(p, 0, head, i);
            for (std::size_t c = 0; c < 80; ++c) {
                worst = std::max(worst, std::fabs(result.row(0, head, i)[c] - e.out[c]));
            }
        }
    }
    CHECK(worst < 1e-12);
}

TEST_CASE("the number of threads changes no bit") {
    for (const std::int32_t queries : {1, 5, 300}) {
        // 9000 rows of one head: decode splits them, whatever the number of threads.
        const std::int32_t rows = queries == 300 ? 400 : 9000;
        Problem<bf16> p({1, 1, 3, queries, rows, 64, 64}, 30);
        p.starts = {rows - queries};
        if (queries != 1) {
            p.random_expiry(31);
        }
        ExpectedRows<bf16> expected(p);
        for (const isa set : instruction_sets()) {
            const Result<bf16> one = run(host(1, set), p);
            CHECK(identical(one, run(host(2, set), p)));
            CHECK(identical(one, run(host(3, set), p)));
            CHECK(identical(one, run(host(7, set), p)));
            check(p, expected, one);
        }
    }
}

TEST_CASE("splits whose keys nobody sees merge to the same result") {
    // Live keys only in the first, the last, or no part of the rows.
    for (const std::int32_t live : {0, 1, 2}) {
        Problem<float> p({1, 1, 2, 1, 10000, 64, 64}, 40);
        p.starts = {9999};
        p.expiry.assign(p.planes(), 5);
        for (std::size_t t = 0; t < 30; ++t) {
            if (live == 1) {
                p.expiry[t] = never;
            }
            if (live == 2) {
                p.expiry[9999 - t] = never;
            }
        }
        check_all(p);
    }
}

TEST_CASE("portable and AVX2 bodies agree to rounding") {
    if (detected_isa() == isa::portable) {
        return;
    }
    for (const std::int32_t queries : {1, 4, 100}) {
        Problem<float> p({1, 2, 3, queries, 300, 128, 128}, 50);
        p.starts = {300 - queries};
        const Result<float> a = run(host(1, isa::portable), p);
        const Result<float> b = run(host(1, isa::avx2), p);
        float worst = 0.0f;
        for (std::size_t i = 0; i < a.out.size(); ++i) {
            worst = std::max(worst, std::fabs(a.out[i] - b.out[i]));
        }
        // Twice what one of them may differ from the definition; values are normal, so rarely beyond 4.
        CHECK(worst < 1e-5f);
        CHECK(worst > 0.0f);
    }
}

TEST_CASE("exp is within 2 units in the last place from -87 to 0, and 0 below") {
    double worst = 0.0;
    for (std::int32_t i = 0; i <= 870000; ++i) {
        const float x = -1e-4f * static_cast<float>(i);
        if (x < host_backend::exp_constants::lowest) {
            continue;
        }
        const double exact = std::exp(static_cast<double>(x));
        const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
        worst =
            std::max(worst, std::fabs(static_cast<double>(host_backend::exp_nonpositive(x)) - exact) / unit);
    }
    CHECK(worst < 1.5);
    CHECK(host_backend::exp_nonpositive(0.0f) == 1.0f);
    CHECK(host_backend::exp_nonpositive(-88.0f) == 0.0f);
    CHECK(host_backend::exp_nonpositive(-std::numeric_limits<float>::infinity()) == 0.0f);
    CHECK(std::isnan(host_backend::exp_nonpositive(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("long sums stay accurate: a million equal keys") {
    // The naive fp32 sum of a million values drifts by percents; the mean of a constant is the constant.
    Problem<bf16> p({1, 1, 1, 1, 1 << 20, 8, 8}, 60);
    p.starts = {(1 << 20) - 1};
    std::fill(p.k.begin(), p.k.end(), bf16(0.0f));
    std::fill(p.v.begin(), p.v.end(), bf16(0.1f));
    for (const isa set : instruction_sets()) {
        const Result<bf16> result = run(host(1, set), p);
        CHECK(static_cast<float>(result.out[0]) == static_cast<float>(bf16(0.1f)));
        CHECK(std::fabs(result.lse[0] - 20.0f * 0.69314718f) < 2e-6f);
    }
}
