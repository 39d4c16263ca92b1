// causal_lse and future_mass on CUDA against the host's double path, every way a GPU has.
#pragma once

#include <kvpolicy/attention/cuda/dispatch_future_mass.cuh>
#include <kvpolicy/cuda.cuh>

#include "../../support/cases.hpp"
#include "device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace test {

using namespace kvpolicy;
using cuda_backend::qk_reduce_path;

inline constexpr float infinity = std::numeric_limits<float>::infinity();

/// How the normalizer that future_mass gets differs from the dense one.
enum class Lse { dense, sparse, far_below, partly_nothing, nothing };

/// What the tensors hold: normal numbers; one nonzero element a row, with logits up to +-6e4.
enum class Logits { normal, huge };

struct MassCase {
    std::int32_t batch = 1, length = 64, kv_heads = 1, group = 1, dim = 64;
    FutureMassOptions options;
    float logits_soft_cap = 0.0f;
    float scale = 0.0f;
    Lse lse = Lse::dense;
    Logits logits = Logits::normal;
    std::vector<std::int32_t> lengths = {};  // empty: all of `length`
    std::int32_t extra = 0;                  // elements between rows, and tokens beyond the sequence
    float spread = 1.0f;                     // of q and k
    float slope =
        0.0f;  // added to the logits of the last key, and its share of all others: of a key's position
};

inline std::string text_of(const MassCase& c) {
    std::string text = std::to_string(c.batch) + " x " + std::to_string(c.kv_heads) + " heads x " +
                       std::to_string(c.group) + ", S " + std::to_string(c.length) + ", D " +
                       std::to_string(c.dim) + ", w " +
                       std::to_string(c.options.window.at(c.options.layer, 0)) + ", beta " +
                       std::to_string(c.options.beta) + ", eps " + std::to_string(c.options.epsilon);
    if (c.options.look_ahead != unlimited) {
        text += ", L " + std::to_string(c.options.look_ahead);
    }
    if (c.logits_soft_cap != 0.0f) {
        text += ", logits_soft_cap " + std::to_string(c.logits_soft_cap);
    }
    const char* const lse[] = {"", ", sparse lse", ", lse far below", ", lse partly -inf", ", lse -inf"};
    return text + lse[static_cast<int>(c.lse)] + (c.logits == Logits::huge ? ", huge logits" : "") +
           (c.slope != 0.0f ? ", slope " + std::to_string(c.slope) : "") + (c.extra != 0 ? ", strided" : "") +
           (c.lengths.empty() ? "" : ", lengths");
}

/// Tensors and both results of a case.
template <class T>
class MassTest {
  public:
    explicit MassTest(const MassCase& given)
        : c(given),
          q_(c.batch, q_heads(), c.length, c.dim),
          k_(c.batch, c.kv_heads, c.length, c.dim),
          lse_(c.batch, q_heads(), c.length),
          lse_host(lse_),
          target_host(c.batch, c.kv_heads, c.length, poison) {
        std::mt19937 generator(static_cast<unsigned>(c.length * 31 + c.dim));
        fill(q_, generator);
        fill(k_, generator);
        for (std::int32_t b = 0; b < c.batch; ++b) {
            lengths_.push_back(c.lengths.empty() ? c.length : c.lengths[static_cast<std::size_t>(b)]);
        }
        bound_logits();
        run_host(generator);
    }

    /// Runs one path and compares. Returns the target's words, for comparisons of runs.
    std::vector<float> check(qk_reduce_path path, bool compare = true) {
        const std::int32_t hq = q_heads(), s = c.length + c.extra;
        const Device<T> q(spread_out(q_)), k(spread_out(k_));
        const Device<float> lse_out(
            std::vector<float>(static_cast<std::size_t>(c.batch) * hq * c.length, poison));
        const Device<float> lse_in(lse_.data);
        const Device<float> target(
            std::vector<float>(static_cast<std::size_t>(c.batch) * c.kv_heads * c.length, poison));
        const Device<std::int32_t> lengths(lengths_);
        const Sequences sequences{
            .batch = c.batch, .length = c.length, .lengths = c.lengths.empty() ? nullptr : lengths.data()};
        const auto view = [&](const Device<T>& of, std::int32_t heads) {
            rows_view<const T> rows = view_bhsd<const T>(of.data(), c.batch, heads, s, c.dim + c.extra);
            rows.dim = c.dim;
            rows.length = c.length;
            return rows;
        };
        const kvpolicy::cuda ctx{};
        const auto qv = view(q, hq), kv = view(k, c.kv_heads);
        const Device<unsigned char> workspace(future_mass_workspace_bytes<T>(ctx, qv, kv));
        cuda_backend::causal_lse_by<T>(ctx, path, attention(), qv, kv, sequences,
                                       view_bhs(lse_out.data(), c.batch, hq, c.length), workspace);
        cuda_backend::future_mass_by<T>(
            ctx, path, attention(), qv, kv, view_bhs<const float>(lse_in.data(), c.batch, hq, c.length),
            sequences, c.options, view_bhs(target.data(), c.batch, c.kv_heads, c.length), workspace);
        const std::vector<float> got_lse = lse_out.read(), got = target.read();
        if (compare) {
            const char* const names[] = {"plain", "portable", "hopper"};
            const std::string what = text_of(c) + " (" + names[static_cast<int>(path)] + ")";
            same("lse of " + what, got_lse, lse_host.data, hq, tolerance_of_lse());
            same("target of " + what, got, target_host.data, c.kv_heads, tolerance_of_target());
        }
        return got;
    }

    static constexpr float poison = -77.0f;
    MassCase c;

  private:
    [[nodiscard]] std::int32_t q_heads() const { return c.kv_heads * c.group; }
    [[nodiscard]] AttentionParams attention() const {
        return {.sm_scale = c.scale, .logits_soft_cap = c.logits_soft_cap};
    }
    [[nodiscard]] double scale() const {
        return c.scale != 0.0f ? static_cast<double>(c.scale) : 1.0 / std::sqrt(static_cast<double>(c.dim));
    }

    void fill(Tensor<T>& tensor, std::mt19937& generator) {
        if (c.logits == Logits::normal) {
            tensor.fill_normal(generator, c.spread);
            if (c.slope != 0.0f) {  // the first element: 1 / scale in a query, of a key what the slope says
                const auto dim = static_cast<std::size_t>(c.dim);
                for (std::size_t row = 0; row < tensor.data.size() / dim; ++row) {
                    const auto t = static_cast<float>(row % static_cast<std::size_t>(c.length));
                    tensor.data[row * dim] = T(&tensor == &q_ ? static_cast<float>(1.0 / scale())
                                                              : c.slope * t / static_cast<float>(c.length));
                }
            }
            return;
        }
        // One element: products are exact, so that a logit of 6e4 has no rounding but its own.
        tensor.fill(0.0f);
        const double side = std::sqrt(6e4 / scale());
        for (std::size_t row = 0; row < tensor.data.size() / static_cast<std::size_t>(c.dim); ++row) {
            const double part = static_cast<double>(generator() % 2001) / 1000.0 - 1.0;
            tensor.data[row * static_cast<std::size_t>(c.dim)] = T(static_cast<float>(side * part));
        }
    }

    /// The rows with `extra` elements and tokens between them, which hold NaN, as do the rows beyond a
    /// sequence's length.
    std::vector<T> spread_out(const Tensor<T>& tensor) const {
        const auto wide = static_cast<std::size_t>(c.dim + c.extra);
        const auto tall = static_cast<std::size_t>(c.length + c.extra);
        const T nan(std::numeric_limits<float>::quiet_NaN());
        std::vector<T> out(static_cast<std::size_t>(tensor.batch) * tensor.heads * tall * wide, nan);
        for (std::int32_t b = 0; b < tensor.batch; ++b) {
            for (std::int32_t h = 0; h < tensor.heads; ++h) {
                const std::size_t head =
                    static_cast<std::size_t>(b) * tensor.heads + static_cast<std::size_t>(h);
                for (std::int32_t t = 0; t < lengths_[static_cast<std::size_t>(b)]; ++t) {
                    const T* row = tensor.view().row(b, h, t);
                    std::copy(row, row + c.dim,
                              out.begin() + static_cast<std::ptrdiff_t>(
                                                (head * tall + static_cast<std::size_t>(t)) * wide));
                }
            }
        }
        return out;
    }

    void bound_logits() {
        const auto max_seq_len = [&](const Tensor<T>& tensor) {
            double most = 0.0;
            for (std::size_t row = 0; row < tensor.data.size() / static_cast<std::size_t>(c.dim); ++row) {
                double sum = 0.0;
                for (std::int32_t i = 0; i < c.dim; ++i) {
                    const auto x = static_cast<double>(static_cast<compute_t<T>>(
                        tensor.data[row * static_cast<std::size_t>(c.dim) + static_cast<std::size_t>(i)]));
                    sum += x * x;
                }
                most = std::max(most, sum);
            }
            return std::sqrt(most);
        };
        max_logit_ = std::abs(scale()) * max_seq_len(q_) *
                     max_seq_len(k_);  // Cauchy-Schwarz: of the sum of absolute products too
    }

    void run_host(std::mt19937& generator) {
        const host ctx{0};
        Tensor<double> q(c.batch, q_heads(), c.length, c.dim), k(c.batch, c.kv_heads, c.length, c.dim);
        for (std::size_t i = 0; i < q.data.size(); ++i) {
            q.data[i] = static_cast<double>(static_cast<compute_t<T>>(q_.data[i]));
        }
        for (std::size_t i = 0; i < k.data.size(); ++i) {
            k.data[i] = static_cast<double>(static_cast<compute_t<T>>(k_.data[i]));
        }
        const Sequences sequences{.batch = c.batch, .length = c.length, .lengths = lengths_.data()};
        Workspace workspace(future_mass_workspace_bytes<double>(ctx, q.view(), k.view()));
        std::fill(lse_host.data.begin(), lse_host.data.end(), poison);
        causal_lse<double>(ctx, attention(), q.view(), k.view(), sequences, lse_host.view(), workspace);
        lse_ = lse_host;
        for (float& x : lse_.data) {
            if (c.lse == Lse::nothing || (c.lse == Lse::partly_nothing && generator() % 3 == 0)) {
                x = -infinity;
            } else if (c.lse == Lse::sparse && generator() % 2 == 0) {
                x -= static_cast<float>(generator() % 8);
            } else if (c.lse == Lse::far_below && generator() % 16 == 0) {
                x -= 150.0f;
            }
            max_lse_ = std::isinf(x) ? max_lse_ : std::max(max_lse_, static_cast<double>(std::abs(x)));
        }
        future_mass<double>(ctx, attention(), q.view(), k.view(), std::as_const(lse_).view(), sequences,
                            target_host.view(), workspace, c.options);
    }

    /// Of a logit, absolute: D / 16 partial sums that a tensor core aligns and cuts to 24 bits, each with an
    /// error below 2^-22 of the absolute sum (none where a row has one element); the factor scale log2(e) and
    /// the fused multiply-add, 2^-24 each; soft cap's tanh, 4 x 2^-23 of the cap.
    [[nodiscard]] double error_of_logit() const {
        const double sums = c.logits == Logits::huge ? 0.0 : (c.dim / 16 + 1) * 0x1p-22;
        return max_logit_ * (sums + 0x1p-22) + static_cast<double>(c.logits_soft_cap) * 0x1p-20;
    }
    /// Of a sum of exponentials, relative: 7.5e-5 of the cubic (2 ulp otherwise), and one rounding an
    /// addition of a thread.
    [[nodiscard]] double error_of_sum() const { return 8e-5 + (64 + c.length / 64.0) * 0x1p-24; }
    [[nodiscard]] double tolerance_of_lse() const {
        return error_of_logit() + error_of_sum() + max_logit_ * 0x1p-22 + 1e-6;
    }
    /// The lse times log2(e) rounds too; logarithms of up to a hundred are written as fp32.
    [[nodiscard]] double tolerance_of_target() const {
        return error_of_logit() + error_of_sum() + (max_lse_ + max_logit_) * 0x1p-22 + 2e-5;
    }

    void same(const std::string& what, const std::vector<float>& got, const std::vector<float>& wanted,
              std::int32_t heads, double tolerance) const {
        std::int64_t wrong = 0;
        std::size_t first = 0;
        double worst = 0.0;
        for (std::size_t i = got.size(); i-- > 0;) {
            const bool equal = got[i] == wanted[i];  // infinities
            const double error =
                equal ? 0.0 : std::abs(static_cast<double>(got[i]) - static_cast<double>(wanted[i]));
            worst = std::max(worst, std::isnan(error) ? 1e30 : error);
            if (!(error <= tolerance)) {
                ++wrong;
                first = i;
            }
        }
        const auto row = static_cast<std::size_t>(c.length);
        CHECK_MESSAGE(wrong == 0, what, ": ", wrong, " of ", got.size(), " differ; the first in head ",
                      first / row % static_cast<std::size_t>(heads), " at token ", first % row, ": ",
                      wrong == 0 ? 0 : got[first], " instead of ", wrong == 0 ? 0 : wanted[first], "; worst ",
                      worst, ", tolerance ", tolerance);
    }

    Tensor<T> q_, k_;
    Plane<float> lse_;
    std::vector<std::int32_t> lengths_;
    double max_logit_ = 0.0, max_lse_ = 0.0;

  public:
    Plane<float> lse_host, target_host;
};

inline constexpr qk_reduce_path all_paths[] = {qk_reduce_path::plain, qk_reduce_path::portable,
                                               qk_reduce_path::hopper};

template <class T>
void check_mass(const MassCase& c) {
    MassTest<T> test(c);
    for (const qk_reduce_path path : all_paths) {
        test.check(path);
    }
}

}  // namespace test
