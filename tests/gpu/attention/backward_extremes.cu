// Logits up to +-1e30 in every kernel of attention backward, whose rows of a large lse are computed apart
// (../../support/extreme_cases.hpp).
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/cuda/dispatch_attend_backward.cuh>

#include "../../support/extreme_cases.hpp"
#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64, 128>;

template <class T>
void check_backward(const Extreme& c, const BackwardOptions& options) {
    const std::int32_t n = c.length();
    const Wanted<T> forward(c);
    const WantedGradients<T> wanted(c, forward);
    const std::vector<float> outs(forward.out.begin(), forward.out.end()),
        lses(forward.lse.begin(), forward.lse.end());
    const Device<T> q(rows_of<T>(std::vector<float>(c.k.size(), c.q), c.dim)), k(rows_of<T>(c.k, c.dim)),
        v(rows_of<T>(c.v, c.dim)), out(rows_of<T>(outs, c.dim)), d_out(rows_of<T>(wanted.d_out, c.dim)),
        d_q(q.size()), d_k(q.size()), d_v(q.size());
    const Device<float> lse(lses);
    const auto in = [&](const Device<T>& of) { return view_bhsd<const T>(of.data(), 1, 1, n, c.dim); };
    const auto to = [&](const Device<T>& of) { return view_bhsd(of.data(), 1, 1, n, c.dim); };
    const kv_view<T> all{in(k), in(v)};
    const Sequences sequences{.batch = 1, .length = n};
    const kvpolicy::cuda ctx{};
    const SavedForward<T> saved{in(out), view_bhs<const float>(lse.data(), 1, 1, n), in(d_out)};
    AttentionGrads<T> grads;
    grads.d_q = to(d_q);
    grads.d_k = to(d_k);
    grads.d_v = to(d_v);
    const Device<unsigned char> workspace(
        attend_backward_workspace_bytes<T, Dims>(ctx, {}, in(q), all, sequences, options));
    attend_backward<T, Dims>(ctx, {}, in(q), all, sequences, saved, grads, workspace, options);
    const auto compare = [&](const char* what, const Device<T>& got, const std::vector<double>& numbers,
                             const std::vector<double>& sizes) {
        const std::vector<T> rows = got.read();
        std::int32_t wrong = 0;
        std::string first;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const std::size_t row = i / static_cast<std::size_t>(c.dim);
            const auto x = static_cast<double>(static_cast<compute_t<T>>(rows[i]));
            // Weights, gradients of logits and results are rounded to T; the rest is fp32.
            const double bound = (4.0 * roundoff<T>() + 0x1p-16) * sizes[row] + 1e-30;
            if (!(std::abs(x - numbers[row]) <= bound) && wrong++ == 0) {
                first = "row " + std::to_string(row) + ": " + std::to_string(x) + " instead of " +
                        std::to_string(numbers[row]) + ", size " + std::to_string(sizes[row]);
            }
        }
        CHECK_MESSAGE(wrong == 0, c.what, ", head_dim ", c.dim, ", ", what, ": ", wrong, " numbers; ", first);
    };
    compare("d_q", d_q, wanted.q, wanted.size_q);
    compare("d_k", d_k, wanted.k, wanted.size_k);
    compare("d_v", d_v, wanted.v, wanted.size_v);
}

template <class T>
void check_backward_all(std::int32_t dim, const BackwardOptions& options, const std::vector<float>& logits) {
    for (const float logit : logits) {
        for (const Extreme& c : cases(dim, logit, 257)) {
            check_backward<T>(c, options);
        }
    }
}

}  // namespace

TEST_CASE("backward by Hopper's kernels") {
    for (const std::int32_t dim : {64, 128}) {
        for (const bool deterministic : {false, true}) {
            BackwardOptions options;
            options.deterministic = deterministic;
            check_backward_all<bf16>(dim, options, wide);
        }
    }
}

TEST_CASE("backward by the portable kernels") {
    for (const std::int32_t dim : {64, 128}) {
        BackwardOptions options;
        options.portable = true;
        check_backward_all<bf16>(dim, options, wide);
    }
}

TEST_CASE("backward by plain loops") { check_backward_all<float>(64, {}, wide); }
