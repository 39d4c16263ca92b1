// Logits up to +-1e30 on the CPU, forward and backward, with either instruction set, and masses of keys that
// an lse does not count.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/future_mass.hpp>

#include "support/cases.hpp"
#include "support/extreme_cases.hpp"
#include "support/loops.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

/// Whether all elements of rows are near one number a row.
template <class T>
void compare(const std::string& what, const std::vector<T>& rows, std::int32_t dim,
             const std::vector<double>& wanted, const std::vector<double>& bound) {
    std::int32_t wrong = 0;
    std::string first;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::size_t row = i / static_cast<std::size_t>(dim);
        const auto x = static_cast<double>(static_cast<compute_t<T>>(rows[i]));
        if (!(std::abs(x - wanted[row]) <= bound[row]) && wrong++ == 0) {
            first = "row " + std::to_string(row) + ": " + std::to_string(x) + " instead of " +
                    std::to_string(wanted[row]);
        }
    }
    CHECK_MESSAGE(wrong == 0, what, ": ", wrong, " numbers; ", first);
}

template <class T>
void check(const host& ctx, const Extreme& c) {
    const std::int32_t n = c.length();
    const Wanted<T> forward(c);
    const WantedGradients<T> wanted(c, forward);
    const std::vector<float> outs(forward.out.begin(), forward.out.end());
    const std::vector<T> q = rows_of<T>(std::vector<float>(c.k.size(), c.q), c.dim),
                         k = rows_of<T>(c.k, c.dim), v = rows_of<T>(c.v, c.dim),
                         d_out = rows_of<T>(wanted.d_out, c.dim), saved_out = rows_of<T>(outs, c.dim);
    std::vector<T> out(q.size()), d_q(q.size()), d_k(q.size()), d_v(q.size());
    std::vector<float> lse(c.k.size());
    const auto in = [&](const std::vector<T>& of) { return view_bhsd<const T>(of.data(), 1, 1, n, c.dim); };
    const auto to = [&](std::vector<T>& of) { return view_bhsd(of.data(), 1, 1, n, c.dim); };
    const kv_view<T> all{in(k), in(v)};
    const Sequences sequences{.batch = 1, .length = n};
    Workspace workspace(attend_workspace_bytes<T>(ctx, {}, in(q), all, sequences));
    attend<T>(ctx, {}, in(q), all, sequences, to(out), view_bhs(lse.data(), 1, 1, n), workspace);
    const double largest = 2.0 * (3.0 * roundoff<T>() + 0x1p-18);
    compare(c.what + ", out", out, c.dim, forward.out, std::vector<double>(c.k.size(), largest));
    std::vector<double> of_lse;
    for (const double l : forward.lse) {
        of_lse.push_back(0x1p-21 * std::abs(l) + 1e-3);
    }
    compare(c.what + ", lse", lse, 1, forward.lse, of_lse);
    AttentionGrads<T> grads;
    grads.d_q = to(d_q);
    grads.d_k = to(d_k);
    grads.d_v = to(d_v);
    const SavedForward<T> saved{in(saved_out), view_bhs<const float>(lse.data(), 1, 1, n), in(d_out)};
    Workspace more(attend_backward_workspace_bytes<T>(ctx, {}, in(q), all, sequences));
    attend_backward<T>(ctx, {}, in(q), all, sequences, saved, grads, more);
    const auto gradient = [&](const char* what, const std::vector<T>& got, const std::vector<double>& numbers,
                              std::vector<double> sizes) {
        for (double& size : sizes) {
            size = (2.0 * roundoff<T>() + 0x1p-16) * size + 1e-30;
        }
        compare(c.what + ", " + what, got, c.dim, numbers, sizes);
    };
    gradient("d_q", d_q, wanted.q, wanted.size_q);
    gradient("d_k", d_k, wanted.k, wanted.size_k);
    gradient("d_v", d_v, wanted.v, wanted.size_v);
}

template <class T>
void check_all(const std::vector<float>& logits) {
    for (const isa set : {isa::portable, detected_isa()}) {
        const host ctx(2, set);
        for (const std::int32_t dim : {64, 128}) {
            if (short_loops && dim != 64) {
                continue;
            }
            for (const float logit : logits) {
                for (const Extreme& c : cases(dim, logit, rounds(170, 40))) {
                    check<T>(ctx, c);
                }
            }
        }
    }
}

}  // namespace

TEST_CASE("bf16") { check_all<bf16>(wide); }
TEST_CASE("float") { check_all<float>(wide); }
TEST_CASE("double") { check_all<double>({1e6f, 1e13f, 1e30f}); }

TEST_CASE("masses of keys far above an lse") {
    // Queries and keys of logit 4000, of an lse of 0: masses of e^4000.
    constexpr std::int32_t n = 40, dim = 16;
    const std::vector<float> rows(std::size_t{n} * dim, std::sqrt(1000.0f));
    const std::vector<float> lse(n, 0.0f);
    const host ctx(1);
    const auto view = view_bhsd<const float>(rows.data(), 1, 1, n, dim);
    for (const group_aggregate aggregate : {group_aggregate::max, group_aggregate::mean}) {
        FutureMassOptions options;
        options.window = 3;
        options.aggregate = aggregate;
        options.normalize = false;
        std::vector<float> target(n, -1.0f);
        Workspace workspace(future_mass_workspace_bytes<float>(ctx, view, view));
        future_mass<float>(ctx, {}, view, view, view_bhs<const float>(lse.data(), 1, 1, n),
                           {.batch = 1, .length = n}, view_bhs(target.data(), 1, 1, n), workspace, options);
        for (std::int32_t t = 0; t < n - 3; ++t) {
            const double wanted = 4000.0 + std::log(static_cast<double>(n - 3 - t));
            CHECK(std::abs(static_cast<double>(target[static_cast<std::size_t>(t)]) - wanted) <= 0.01);
        }
        CHECK(target[n - 1] == doctest::Approx(std::log(1e-8)));
    }
}
