// Logits up to +-1e30 in every kernel of attention forward (../../support/extreme_cases.hpp).
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/cuda/dispatch_attend.cuh>

#include "../../support/extreme_cases.hpp"
#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

// fp16 shares all but the products with bf16.
template <class T>
using DimsOf = std::conditional_t<std::is_same_v<T, bf16>, head_dims<64, 128, 256>, head_dims<64>>;

template <class T>
void check(const Extreme& c, const AttendOptions& options) {
    const std::int32_t n = c.length();
    const Device<T> q(rows_of<T>(std::vector<float>(c.k.size(), c.q), c.dim)), k(rows_of<T>(c.k, c.dim)),
        v(rows_of<T>(c.v, c.dim)), out(q.size());
    const Device<float> lse(c.k.size());
    const auto view = [&](T* data) { return view_bhsd(data, 1, 1, n, c.dim); };
    const kv_view<T> all{view_bhsd<const T>(k.data(), 1, 1, n, c.dim),
                         view_bhsd<const T>(v.data(), 1, 1, n, c.dim)};
    const auto q_view = view_bhsd<const T>(q.data(), 1, 1, n, c.dim);
    const Sequences sequences{.batch = 1, .length = n};
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(
        attend_workspace_bytes<T, DimsOf<T>>(ctx, {}, q_view, all, sequences, options));
    attend<T, DimsOf<T>>(ctx, {}, q_view, all, sequences, view(out.data()), view_bhs(lse.data(), 1, 1, n),
                         workspace, options);
    const Wanted<T> wanted(c);
    const std::vector<T> got = out.read();
    const std::vector<float> got_lse = lse.read();
    // Weights and outputs are rounded to T; scale, logit and lse to fp32, as in attend_case.cpp. All products
    // of a logit have one sign here, and each of their sums in fp32 may round.
    const double of_lse = 0x1p-21 + c.dim * 0x1p-24;
    const double largest = std::abs(*std::max_element(
        c.v.begin(), c.v.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
    std::int32_t wrong = 0;
    std::string first;
    for (std::int32_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double l = wanted.lse[at];
        bool fine = std::abs(static_cast<double>(got_lse[at]) - l) <= of_lse * std::abs(l) + 1e-3;
        for (std::int32_t d = 0; d < c.dim; ++d) {
            const auto x = static_cast<double>(static_cast<compute_t<T>>(
                got[at * static_cast<std::size_t>(c.dim) + static_cast<std::size_t>(d)]));
            fine = fine && std::abs(x - wanted.out[at]) <= (3.0 * roundoff<T>() + 0x1p-18) * largest;
        }
        if (!fine && wrong++ == 0) {
            first = "query " + std::to_string(i) + ": " +
                    std::to_string(static_cast<double>(
                        static_cast<compute_t<T>>(got[at * static_cast<std::size_t>(c.dim)]))) +
                    " instead of " + std::to_string(wanted.out[at]) + ", lse " + std::to_string(got_lse[at]) +
                    " instead of " + std::to_string(l);
        }
    }
    CHECK_MESSAGE(wrong == 0, c.what, ", head_dim ", c.dim, ": ", wrong, " of ", n, " queries; ", first);
}

template <class T>
void check_all(std::int32_t dim, const AttendOptions& options, const std::vector<float>& logits) {
    for (const float logit : logits) {
        for (const Extreme& c : cases(dim, logit, 257)) {
            check<T>(c, options);
        }
        check<T>(moved_reference(dim, logit, 700), options);
    }
    // 1e6 and -1e6 in every element.
    if (!std::is_same_v<T, fp16>) {
        check<T>({"1e6 x -1e6", dim, 1e6f, std::vector<float>(257, -1e6f), std::vector<float>(257, 2.0f)},
                 options);
    }
}

}  // namespace

TEST_CASE("forward by Hopper's kernels") {
    for (const std::int32_t dim : {64, 128, 256}) {
        for (const attend_path path : {attend_path::scan, attend_path::gather}) {
            AttendOptions options;
            options.path = path;
            check_all<bf16>(dim, options, wide);
            if (dim == 64) {
                check_all<fp16>(dim, options, narrow);
            }
        }
    }
}

TEST_CASE("forward by the portable kernels") {
    for (const std::int32_t dim : {64, 128, 256}) {
        AttendOptions options;
        options.portable = true;
        check_all<bf16>(dim, options, wide);
        if (dim == 64) {
            check_all<fp16>(dim, options, narrow);
        }
    }
}

TEST_CASE("forward by plain loops") {
    for (const std::int32_t dim : {64, 128}) {
        check_all<float>(dim, {}, wide);
        check_all<double>(dim, {}, wide);
    }
}
