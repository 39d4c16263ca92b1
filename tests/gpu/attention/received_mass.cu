// The mass that keys receive on CUDA, against NumPy in float64 (tests/reference/baselines.py) and against the
// host in double.
#include <kvpolicy/attention/cuda/dispatch_received_mass.cuh>
#include <kvpolicy/cuda.cuh>

#include "../../support/baseline_cases.hpp"
#include "../../support/refusal.hpp"
#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;
using cuda_backend::qk_reduce_path;

namespace {

using Dims = head_dims<64, 128>;
constexpr float poison = -77.0f;

/// What the tensors of a call look like.
struct Shape {
    std::int32_t batch = 1, kv_heads = 2, group = 2, length = 64, dim = 64;
    std::vector<std::int32_t> lengths = {};  // empty: all of `length`
    std::int32_t extra = 0;                  // elements between rows
    AttentionParams attention = {};
    bool masked = false, biased = false;

    [[nodiscard]] std::int32_t heads() const { return kv_heads * group; }
    [[nodiscard]] std::int32_t length_of(std::int32_t b) const {
        return lengths.empty() ? length : lengths[static_cast<std::size_t>(b)];
    }
    [[nodiscard]] std::string text() const {
        return std::to_string(batch) + " x " + std::to_string(kv_heads) + " heads x " +
               std::to_string(group) + ", S " + std::to_string(length) + ", D " + std::to_string(dim) +
               (masked ? ", mask" : "") + (biased ? ", log-bias" : "");
    }
};

/// Tensors of a shape on both sides; the host has double.
template <class T>
class MassCall {
  public:
    explicit MassCall(const Shape& of)
        : c(of),
          q_(c.batch, c.heads(), c.length, c.dim),
          k_(c.batch, c.kv_heads, c.length, c.dim),
          q_there_(made(q_, 1)),
          k_there_(made(k_, 2)),
          expiry_(made_expiry()),
          bias_(made_bias()),
          from_(std::vector<std::int32_t>(static_cast<std::size_t>(c.kv_heads), 3)),
          lengths_(c.lengths) {}

    /// Both results agree, and the device's comes back.
    std::vector<float> check(const ReceivedMassOptions& options,
                             qk_reduce_path path = qk_reduce_path::hopper) const {
        const kvpolicy::cuda ctx{};
        const auto q = view(q_there_, c.heads()), k = view(k_there_, c.kv_heads);
        const Device<unsigned char> workspace(received_mass_workspace_bytes<T>(ctx, q, k));
        const auto all = static_cast<std::size_t>(c.batch * c.kv_heads * c.length);
        const Device<float> mass(std::vector<float>(all, poison));
        const Sequences sequences{
            .batch = c.batch, .length = c.length, .lengths = c.lengths.empty() ? nullptr : lengths_.data()};
        const Device<expiry_t> expiry(expiry_);
        const Device<float> bias(bias_);
        mask_view mask;
        if (c.masked) {
            mask.expiry = view_bhs<const expiry_t>(expiry.data(), c.batch, c.kv_heads, c.length);
        }
        if (c.biased) {
            mask.log_bias = view_bhs<const float>(bias.data(), c.batch, c.kv_heads, c.length);
            mask.bias_from = from_.data();
        }
        cuda_backend::received_mass_by<T, Dims>(ctx, path, c.attention, q, k, mask, sequences,
                                                view_bhs(mass.data(), c.batch, c.kv_heads, c.length),
                                                workspace, options);
        const std::vector<float> got = mass.read();
        compare(got, of_host(options), options);
        return got;
    }

  private:
    [[nodiscard]] std::vector<float> of_host(const ReceivedMassOptions& options) const {
        const kvpolicy::host ctx{2};
        Workspace workspace(received_mass_workspace_bytes<double>(ctx, q_.view(), k_.view()));
        std::vector<float> mass(static_cast<std::size_t>(c.batch * c.kv_heads * c.length), poison);
        const std::vector<std::int32_t> from(static_cast<std::size_t>(c.kv_heads), 3);
        mask_view mask;
        if (c.masked) {
            mask.expiry = view_bhs<const expiry_t>(expiry_.data(), c.batch, c.kv_heads, c.length);
        }
        if (c.biased) {
            mask.log_bias = view_bhs<const float>(bias_.data(), c.batch, c.kv_heads, c.length);
            mask.bias_from = from.data();
        }
        received_mass<double>(
            ctx, c.attention, q_.view(), k_.view(), mask,
            {.batch = c.batch, .length = c.length, .lengths = c.lengths.empty() ? nullptr : c.lengths.data()},
            view_bhs(mass.data(), c.batch, c.kv_heads, c.length), workspace, options);
        return mass;
    }

    /// A weight's exponent has the error of its logit twice (its own and the lse's) and that of the lse's
    /// sum: see mass_check.hpp. Sums add a rounding per tile and thread.
    void compare(const std::vector<float>& got, const std::vector<float>& wanted,
                 const ReceivedMassOptions& options) const {
        const double scale = c.attention.sm_scale != 0.0f
                                 ? std::abs(static_cast<double>(c.attention.sm_scale))
                                 : 1.0 / std::sqrt(static_cast<double>(c.dim));
        const double most = scale * largest(q_) * largest(k_);
        const double of_logit = most * ((c.dim / 16 + 1) * 0x1p-22 + 0x1p-22) +
                                static_cast<double>(c.attention.logits_soft_cap) * 0x1p-20;
        const double relative = 2.0 * of_logit + 8e-5 + (128 + c.length / 32.0) * 0x1p-24 + most * 0x1p-21;
        std::int64_t wrong = 0;
        double worst = 0.0;
        for (std::size_t i = 0; i < got.size(); ++i) {
            const double a = static_cast<double>(got[i]), b = static_cast<double>(wanted[i]);
            const double error = std::abs(a - b);
            worst = std::max(worst, error / (std::abs(b) + 1e-30));
            // Weights below 2^-126 are 0 where exponents are not shifted.
            wrong += error <= relative * std::abs(b) + 1e-35 ? 0 : 1;
        }
        CHECK_MESSAGE(wrong == 0, c.text(), ", queries ", options.queries, ": ", wrong, " of ", got.size(),
                      " differ by more than ", relative, ", the worst by ", worst);
    }

    static double largest(const Tensor<double>& of) {
        double most = 0.0;
        for (std::size_t row = 0; row < of.data.size(); row += static_cast<std::size_t>(of.dim)) {
            double sum = 0.0;
            for (std::int32_t i = 0; i < of.dim; ++i) {
                sum +=
                    of.data[row + static_cast<std::size_t>(i)] * of.data[row + static_cast<std::size_t>(i)];
            }
            most = std::max(most, sum);
        }
        return std::sqrt(most);
    }

    /// Normal numbers of T, with NaN between rows and beyond a sequence's length.
    std::vector<T> made(Tensor<double>& of, unsigned seed) const {
        std::mt19937 generator(seed + static_cast<unsigned>(c.length));
        std::normal_distribution<float> normal;
        const auto wide = static_cast<std::size_t>(c.dim + c.extra);
        std::vector<T> out(static_cast<std::size_t>(of.batch * of.heads * of.length) * wide,
                           T(std::numeric_limits<float>::quiet_NaN()));
        for (std::int32_t b = 0; b < of.batch; ++b) {
            for (std::int32_t h = 0; h < of.heads; ++h) {
                for (std::int32_t t = 0; t < c.length_of(b); ++t) {
                    const auto row = static_cast<std::size_t>((b * of.heads + h) * of.length + t);
                    for (std::int32_t d = 0; d < c.dim; ++d) {
                        const T x(normal(generator));
                        out[row * wide + static_cast<std::size_t>(d)] = x;
                        of.view().row(b, h, t)[d] = static_cast<double>(static_cast<compute_t<T>>(x));
                    }
                }
            }
        }
        return out;
    }
    [[nodiscard]] std::vector<expiry_t> made_expiry() const {
        std::mt19937 generator(9);
        std::vector<expiry_t> expiry(static_cast<std::size_t>(c.batch * c.kv_heads * c.length));
        for (std::size_t i = 0; i < expiry.size(); ++i) {
            const auto t = static_cast<std::int32_t>(i) % c.length;
            // Every fifth stays; some are gone before they come, so that early queries may see nothing.
            expiry[i] = generator() % 5 == 0 ? never : t + static_cast<std::int32_t>(generator() % 90);
        }
        return expiry;
    }
    [[nodiscard]] std::vector<float> made_bias() const {
        std::mt19937 generator(11);
        std::normal_distribution<float> normal;
        std::vector<float> bias(static_cast<std::size_t>(c.batch * c.kv_heads * c.length));
        std::generate(bias.begin(), bias.end(), [&] { return normal(generator); });
        return bias;
    }
    [[nodiscard]] rows_view<const T> view(const Device<T>& of, std::int32_t heads) const {
        rows_view<const T> rows = view_bhsd<const T>(of.data(), c.batch, heads, c.length, c.dim + c.extra);
        rows.dim = c.dim;
        return rows;
    }

    Shape c;
    Tensor<double> q_, k_;
    Device<T> q_there_, k_there_;
    std::vector<expiry_t> expiry_;
    std::vector<float> bias_;
    Device<std::int32_t> from_, lengths_;
};

constexpr group_aggregate aggregates[] = {group_aggregate::mean, group_aggregate::max};

/// All and few queries, both aggregates, with and without a mask.
template <class T>
void check_all(Shape shape) {
    for (const bool masked : {false, true}) {
        shape.masked = masked;
        const MassCall<T> call(shape);
        for (const group_aggregate aggregate : aggregates) {
            for (const std::int32_t queries : {unlimited, 1, 33}) {
                call.check({.queries = queries, .aggregate = aggregate});
            }
        }
    }
}

template <class T>
void check_baselines() {
    for (const BaselineCase& one : baseline_cases()) {
        CAPTURE(one.seed);
        const Device<T> q(one.drawn<T>(0)), k(one.drawn<T>(1));
        const auto queries = view_bhsd<const T>(q.data(), 1, one.heads(), one.length, one.dim);
        const auto keys = view_bhsd<const T>(k.data(), 1, one.kv_heads, one.length, one.dim);
        std::vector<expiry_t> lives(one.expiry.begin(), one.expiry.end());
        std::replace(lives.begin(), lives.end(), one.length, never);
        const Device<expiry_t> expiry(lives);
        const kvpolicy::cuda ctx{};
        const Device<unsigned char> workspace(received_mass_workspace_bytes<T>(ctx, queries, keys));
        for (const bool sparse : {false, true}) {
            mask_view mask;
            ReceivedMassOptions options{.aggregate = one.aggregate()};
            if (sparse) {
                mask.expiry = view_bhs<const expiry_t>(expiry.data(), 1, one.kv_heads, one.length);
            } else {
                options.queries = one.kind == BaselineCase::h2o    ? unlimited
                                  : one.kind == BaselineCase::tova ? 1
                                                                   : one.window;
            }
            const Device<float> mass(lives.size());
            received_mass<T, Dims>(ctx, one.attention, queries, keys, mask,
                                   {.batch = 1, .length = one.length},
                                   view_bhs(mass.data(), 1, one.kv_heads, one.length), workspace, options);
            const std::vector<float> got = mass.read();
            const std::vector<double>& expected = sparse ? one.sparse_mass : one.mass;
            std::int64_t wrong = 0;
            for (std::size_t i = 0; i < got.size(); ++i) {
                // Beside the roundings of sums: the cubic of a Hopper lse and its logarithm, 1e-4.
                wrong += !(std::fabs(static_cast<double>(got[i]) - expected[i]) <=
                           mass_tolerance<float>(one, expected[i]) + 1e-4 * expected[i]);
            }
            CHECK(wrong == 0);
        }
    }
}

}  // namespace

TEST_CASE("masses of small sequences") {
    check_all<bf16>({.length = 70});
    check_all<float>({.length = 70, .dim = 24});
}

TEST_CASE("masses against NumPy") {
    check_baselines<bf16>();
    check_baselines<float>();
}

TEST_CASE("masses at lengths around tiles") {
    for (const std::int32_t length : {1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 640}) {
        check_all<bf16>({.length = length, .dim = 128});
    }
}

TEST_CASE("masses of any group, head_dim, scale and soft cap") {
    for (const std::int32_t group : {1, 4, 7}) {
        check_all<bf16>({.group = group, .length = 300});
    }
    for (const std::int32_t dim : {8, 40, 72, 96, 136}) {
        check_all<bf16>({.length = 200, .dim = dim});
    }
    check_all<bf16>({.length = 200, .attention = {.sm_scale = 0.3f, .logits_soft_cap = 5.0f}});
    check_all<bf16>({.length = 200, .attention = {.sm_scale = -0.2f}});
    check_all<bf16>({.length = 200, .biased = true});
    check_all<float>({.group = 7, .length = 150, .dim = 40, .biased = true});
}

TEST_CASE("masses of sequences of different lengths, of strided views, and NaN beyond them") {
    check_all<bf16>({.batch = 5, .length = 400, .lengths = {400, 0, 129, 1, 256}});
    check_all<bf16>({.batch = 2, .length = 300, .dim = 80, .lengths = {300, 170}, .extra = 8});
    check_all<bf16>({.batch = 2, .length = 300, .lengths = {299, 31}, .extra = 3});  // no 16-byte copies
}

TEST_CASE("masses by the portable and the plain kernels") {
    for (const qk_reduce_path path : {qk_reduce_path::plain, qk_reduce_path::portable}) {
        const MassCall<bf16> call({.group = 3, .length = 333, .dim = 128});
        call.check({}, path);
        call.check({.queries = 40, .aggregate = group_aggregate::max}, path);
    }
}

TEST_CASE("no query counts") {
    const std::vector<float> mass = MassCall<bf16>({.length = 70}).check({.queries = 0});
    CHECK(std::all_of(mass.begin(), mass.end(), [](float x) { return x == 0.0f; }));
}

TEST_CASE("masses are the same bits every time") {
    const MassCall<bf16> call({.kv_heads = 4, .group = 4, .length = 700, .dim = 128});
    for (const group_aggregate aggregate : aggregates) {
        const std::vector<float> first = call.check({.aggregate = aggregate});
        for (int i = 0; i < 20; ++i) {
            const std::vector<float> again = call.check({.aggregate = aggregate});
            CHECK(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)) == 0);
        }
    }
}

TEST_CASE("received_mass on CUDA refuses what the host refuses") {
    const Device<bf16> q(4 * 8 * 16), k(2 * 8 * 16);
    const Device<float> mass(2 * 8);
    const Device<unsigned char> memory(1 << 16);
    const kvpolicy::cuda ctx{};
    const auto call = [&](const ReceivedMassOptions& options, workspace_view provided, std::int32_t dim = 16,
                          std::int32_t length = 8, const float* of = nullptr) {
        received_mass<bf16, Dims>(
            ctx, {}, view_bhsd<const bf16>(q.data(), 1, 4, 8, dim),
            view_bhsd<const bf16>(k.data(), 1, 2, 8, dim), {}, {.batch = 1, .length = length},
            view_bhs(of != nullptr ? const_cast<float*>(of) : nullptr, 1, 2, 8), provided, options);
    };
    CHECK_REFUSED(call({.queries = -1}, memory, 16, 8, mass.data()), "queries: -1");
    CHECK_REFUSED(call({}, memory), "mass: null");
    CHECK_REFUSED(call({}, workspace_view{}, 16, 8, mass.data()), "workspace.bytes: 0");
    CHECK_REFUSED(call({}, memory, 12, 8, mass.data()), "head_dim: 12");
    CHECK_REFUSED(call({}, memory, 16, 9, mass.data()), "sequences.length: 9");
}
