// Masks of H2O, TOVA and SnapKV on CUDA: against NumPy in float64 (tests/reference/baselines.py), and choice
// by choice against masses that the host computes in double under the same mask.
#include <kvpolicy/attention/cuda/dispatch_observed_mask.cuh>
#include <kvpolicy/cuda.cuh>

#include "../../support/baseline_cases.hpp"
#include "../../support/refusal.hpp"
#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64>;

template <class P, class T>
std::vector<expiry_t> mask_on_device(const P& policy, const AttentionParams& attention, rows_view<const T> q,
                                     rows_view<const T> k, const Sequences& sequences,
                                     const ObservedMaskOptions& options = {}) {
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(build_observed_mask_workspace_bytes<T>(ctx, policy, q, k));
    const Device<expiry_t> expiry(
        std::vector<expiry_t>(static_cast<std::size_t>(k.batch * k.heads * sequences.length), -7));
    build_observed_mask<P, T, Dims>(ctx, policy, attention, q, k, sequences,
                                    view_bhs(expiry.data(), k.batch, k.heads, sequences.length), workspace,
                                    options);
    return expiry.read();
}

template <class T>
void check_baselines() {
    for (const BaselineCase& one : baseline_cases()) {
        CAPTURE(one.seed);
        const Device<T> q(one.drawn<T>(0)), k(one.drawn<T>(1));
        one.with_policy([&](const auto& policy) {
            std::vector<expiry_t> expiry = mask_on_device<std::decay_t<decltype(policy)>, T>(
                policy, one.attention, view_bhsd<const T>(q.data(), 1, one.heads(), one.length, one.dim),
                view_bhsd<const T>(k.data(), 1, one.kv_heads, one.length, one.dim),
                {.batch = 1, .length = one.length}, {.prompt = one.prompt});
            for (expiry_t& end : expiry) {
                end = std::min(end, one.length);
            }
            CHECK(expiry == one.expiry);
        });
    }
}

/// Sequences of normal numbers, with NaN beyond their lengths.
template <class T>
struct Inputs {
    std::int32_t batch, kv_heads, group, length, dim;
    std::vector<std::int32_t> lengths;
    Tensor<double> q, k;
    Device<T> device_q, device_k;
    Device<std::int32_t> device_lengths;

    Inputs(std::vector<std::int32_t> of, std::int32_t heads, std::int32_t heads_of_group)
        : batch(static_cast<std::int32_t>(of.size())),
          kv_heads(heads),
          group(heads_of_group),
          length(std::max(1, *std::max_element(of.begin(), of.end()))),
          dim(16),
          lengths(std::move(of)),
          q(batch, heads * group, length, dim),
          k(batch, heads, length, dim),
          device_q(made(q, 1)),
          device_k(made(k, 2)),
          device_lengths(lengths) {}

    [[nodiscard]] rows_view<const T> queries() const {
        return view_bhsd<const T>(device_q.data(), batch, kv_heads * group, length, dim);
    }
    [[nodiscard]] rows_view<const T> keys() const {
        return view_bhsd<const T>(device_k.data(), batch, kv_heads, length, dim);
    }
    [[nodiscard]] Sequences sequences() const {
        return {.batch = batch, .length = length, .lengths = device_lengths.data()};
    }

  private:
    std::vector<T> made(Tensor<double>& tensor, unsigned seed) const {
        std::mt19937 generator(seed);
        std::normal_distribution<float> normal(0.0f, 1.5f);
        std::vector<T> out(tensor.data.size());
        const auto head = static_cast<std::size_t>(tensor.heads) * static_cast<std::size_t>(length * dim);
        for (std::size_t i = 0; i < out.size(); ++i) {
            const auto t = static_cast<std::int32_t>(i / static_cast<std::size_t>(dim)) % length;
            out[i] = T(normal(generator));
            tensor.data[i] = static_cast<double>(static_cast<compute_t<T>>(out[i]));
            if (t >= lengths[i / head]) {
                out[i] = T(std::numeric_limits<float>::quiet_NaN());
                tensor.data[i] = 0.0;
            }
        }
        return out;
    }
};

/// The choices of one sequence, replayed in double.
template <class P>
class Replay {
  public:
    template <class T>
    Replay(const P& policy, const Inputs<T>& in, std::int32_t b, const std::vector<expiry_t>& expiry,
           std::int32_t prompt)
        : policy_(policy),
          seen_(policy.scorer().observation()),
          heads_(in.kv_heads),
          length_(in.lengths[static_cast<std::size_t>(b)]),
          all_(in.length),
          prompt_(std::min(prompt, length_)) {
        q_ = in.q.view(), k_ = in.k.view();
        q_.data += b * q_.batch_stride, k_.data += b * k_.batch_stride;
        q_.batch = k_.batch = 1;
        expiry_ = expiry.data() + static_cast<std::ptrdiff_t>(b) * heads_ * all_;
    }

    /// Every block of the prompt and every decoded token.
    void check() {
        const std::int32_t chunk =
            seen_.chunk == Observation::whole_call ? std::max(prompt_, 1) : seen_.chunk;
        for (std::int32_t a = 0; a < length_;) {
            const bool prompt = a < prompt_;
            const std::int32_t b = prompt ? std::min(a + chunk, prompt_) : a + 1;
            if (prompt || P::scorer_type::evicts_at_steps) {
                check_boundary(a, b, prompt);
            }
            a = b;
        }
        for (std::int32_t h = 0; h < heads_; ++h) {
            for (std::int32_t t = 0; t < length_; ++t) {
                const expiry_t end = expiry_of(h, t);
                wrong_ += end > t && (end <= length_ || end == never) ? 0 : 1;
            }
        }
        CHECK(wrong_ == 0);
    }

  private:
    [[nodiscard]] expiry_t expiry_of(std::int32_t h, std::int32_t t) const { return expiry_[h * all_ + t]; }

    /// Evictions between queries b - 1 and b, after a block [a, b).
    void check_boundary(std::int32_t a, std::int32_t b, bool prompt) {
        const std::vector<double> masses = masses_at(a, b);
        for (std::int32_t h = 0; h < heads_; ++h) {
            const HeadParams one = policy_.params(0, h);
            // The choice when the block ends, and that when the next begins, which one more key joins.
            const bool next = P::scorer_type::evicts_at_steps && b < length_;
            const std::int32_t last = next ? b - one.window : prompt ? b - 1 - one.window : -1;
            std::vector<std::int32_t> competing;
            for (std::int32_t t = one.sinks; t <= last; ++t) {
                if (expiry_of(h, t) >= b) {
                    competing.push_back(t);
                }
            }
            double least = INFINITY, most = -1.0;
            std::int32_t kept = 0;
            for (std::size_t i = 0; i < competing.size(); ++i) {
                const double value = pooled(competing, i, masses.data() + std::ptrdiff_t{h} * b);
                const bool stays = expiry_of(h, competing[i]) > b;
                kept += stays ? 1 : 0;
                least = stays ? std::min(least, value) : least;
                most = stays ? most : std::max(most, value);
            }
            const auto places = static_cast<std::int32_t>(
                std::min<std::int64_t>(one.budget, static_cast<std::int64_t>(competing.size())));
            wrong_ += kept == places ? 0 : 1;
            // Relative rounding of a mass: of 16-bit products' exponents, of the lse's cubic and of sums.
            wrong_ += most <= least * (1.0 + 4e-4) + 1e-30 ? 0 : 1;
            for (std::int32_t t = 0; t < b; ++t) {  // nothing else leaves
                const bool may = std::find(competing.begin(), competing.end(), t) != competing.end();
                wrong_ += expiry_of(h, t) == b && !may ? 1 : 0;
            }
        }
    }

    /// Masses of the keys before b from the queries that count, under the mask up to here.
    [[nodiscard]] std::vector<double> masses_at(std::int32_t a, std::int32_t b) const {
        const kvpolicy::host ctx{2};
        std::vector<double> all(static_cast<std::size_t>(heads_ * b));
        for (std::int32_t h = 0; h < heads_; ++h) {
            const std::int32_t group = q_.heads / k_.heads;
            rows_view<const double> q = q_, k = k_;
            q.data += h * group * q.head_stride, k.data += h * k.head_stride;
            q.heads = group, k.heads = 1, q.length = k.length = b;
            const std::int32_t counted = seen_.queries == 0 ? policy_.params(0, h).window : seen_.queries;
            std::vector<float> mass(static_cast<std::size_t>(b));
            mask_view mask;
            mask.expiry = {expiry_ + std::ptrdiff_t{h} * all_, 1, 1, b, all_, all_};
            Workspace workspace(received_mass_workspace_bytes<double>(ctx, q, k));
            received_mass<double>(ctx, {}, q, k, mask, {.batch = 1, .length = b},
                                  view_bhs(mass.data(), 1, 1, b), workspace,
                                  {.queries = seen_.accumulate ? unlimited : std::min(counted, b - a),
                                   .aggregate = seen_.aggregate});
            std::copy(mass.begin(), mass.end(), all.begin() + std::ptrdiff_t{h} * b);
        }
        for (std::int32_t t = 0; seen_.whole_layer && t < b; ++t) {
            double sum = 0.0;
            for (std::int32_t h = 0; h < heads_; ++h) {
                sum += all[static_cast<std::size_t>(h * b + t)];
            }
            for (std::int32_t h = 0; h < heads_; ++h) {
                all[static_cast<std::size_t>(h * b + t)] = sum / heads_;
            }
        }
        return all;
    }
    [[nodiscard]] double pooled(const std::vector<std::int32_t>& keys, std::size_t at,
                                const double* mass) const {
        const auto reach = static_cast<std::ptrdiff_t>(seen_.pool / 2);
        double sum = 0.0, largest = 0.0;
        for (std::ptrdiff_t i = static_cast<std::ptrdiff_t>(at) - reach;
             i <= static_cast<std::ptrdiff_t>(at) + reach; ++i) {
            if (i >= 0 && i < static_cast<std::ptrdiff_t>(keys.size())) {
                sum += mass[keys[static_cast<std::size_t>(i)]];
                largest = std::max(largest, mass[keys[static_cast<std::size_t>(i)]]);
            }
        }
        return seen_.pool_largest ? largest : sum / seen_.pool;
    }

    const P& policy_;
    Observation seen_;
    std::int32_t heads_, length_, all_, prompt_;
    rows_view<const double> q_, k_;
    const expiry_t* expiry_;
    std::int64_t wrong_ = 0;
};

template <class P, class T>
void check_choices(const P& policy, const Inputs<T>& in, std::int32_t prompt = unlimited) {
    const std::vector<expiry_t> expiry =
        mask_on_device<P, T>(policy, {}, in.queries(), in.keys(), in.sequences(), {.prompt = prompt});
    for (std::int32_t b = 0; b < in.batch; ++b) {
        CAPTURE(b);
        Replay<P>(policy, in, b, expiry, prompt).check();
        const std::int32_t own = in.lengths[static_cast<std::size_t>(b)];
        for (std::int32_t h = 0; h < in.kv_heads; ++h) {  // what is beyond a length is not written
            const auto* const head =
                expiry.data() + static_cast<std::ptrdiff_t>(b * in.kv_heads + h) * in.length;
            CHECK(std::all_of(head + own, head + in.length, [](expiry_t end) { return end == -7; }));
        }
    }
}

constexpr std::int32_t chunks[] = {Observation::whole_call, 1, 7, 64};

template <class T>
void check_systems(const Inputs<T>& in, std::int32_t prompt) {
    for (const std::int32_t chunk : chunks) {
        CAPTURE(chunk);
        for (const group_aggregate aggregate : {group_aggregate::mean, group_aggregate::max}) {
            check_choices(h2o_for_total(40, 11, {{chunk}, aggregate}), in, prompt);
        }
        for (const bool whole_layer : {true, false}) {
            check_choices(tova_for_total(33, {{chunk}, whole_layer}), in, prompt);
        }
        for (const MassPooling pooling : {MassPooling::none(), MassPooling::mean(5), MassPooling::max(7)}) {
            check_choices(snapkv_for_total(50, 8, {{chunk}, pooling}), in, prompt);
        }
    }
}

}  // namespace

TEST_CASE("observed masks against NumPy") {
    check_baselines<bf16>();
    check_baselines<float>();
}

TEST_CASE("every choice of small sequences") {
    const Inputs<bf16> in({130, 70, 1, 0}, 2, 2);
    check_systems(in, 100);
}

TEST_CASE("every choice of groups of 1 and 7") {
    check_systems(Inputs<bf16>({150}, 3, 1), 150);
    check_systems(Inputs<bf16>({129, 100}, 1, 7), 90);
}

TEST_CASE("every choice of fp32 and fp16") {
    check_systems(Inputs<float>({140, 65}, 2, 4), 140);
    check_systems(Inputs<fp16>({128}, 2, 1), 100);
}

TEST_CASE("choices after long prompts") {
    const Inputs<bf16> in({700, 640}, 2, 2);
    check_choices(h2o_for_total(200), in);
    check_choices(h2o_for_total(200, {ObservedPrefill::in_chunks(128)}), in);
    check_choices(tova_for_total(150), in, 690);
    check_choices(snapkv_for_total(256), in);
}

TEST_CASE("budgets of 0, and larger than the sequence") {
    const Inputs<bf16> in({90, 3}, 2, 1);
    for (const std::int32_t prompt : {0, 60, 90}) {
        check_choices(h2o_for_total(6, 6), in, prompt);
        check_choices(h2o_for_total(500), in, prompt);
        check_choices(tova_for_total(0), in, prompt);
        check_choices(snapkv_for_total(8, 8), in, prompt);
    }
}

TEST_CASE("numbers by head, and sinks") {
    using Own = Policy<Sink<>, Window<>, TopKBudget<>, AccumulatedMass>;
    static const std::array<std::int32_t, 3> windows{1, 9, 32}, budgets{20, 1, 47}, sinks{0, 4, 2};
    const Own policy{Sink<>{per_head(sinks.data(), 1, 3)}, Window<>{per_head(windows.data(), 1, 3)},
                     TopKBudget<>{per_head(budgets.data(), 1, 3)},
                     AccumulatedMass{ObservedPrefill::in_chunks(30)}};
    check_choices(policy, Inputs<bf16>({120, 64}, 3, 2), 90);
}

TEST_CASE("of equal masses the older key stays") {
    // All keys are the same, and so are the weights of a query.
    const std::int32_t length = 300;
    const Device<bf16> q(std::vector<bf16>(static_cast<std::size_t>(length) * 64, bf16(0.5f))),
        k(std::vector<bf16>(static_cast<std::size_t>(length) * 64, bf16(0.25f)));
    const auto rows = [&](const Device<bf16>& of) {
        return view_bhsd<const bf16>(of.data(), 1, 1, length, 64);
    };
    const auto stay = [&](const auto& policy, std::int32_t best, std::int32_t window) {
        using P = std::decay_t<decltype(policy)>;
        const std::vector<expiry_t> expiry =
            mask_on_device<P, bf16>(policy, {}, rows(q), rows(k), {.batch = 1, .length = length});
        std::int32_t wrong = 0;
        for (std::int32_t t = 0; t < length; ++t) {
            wrong +=
                (expiry[static_cast<std::size_t>(t)] == never) == (t < best || t >= length - window) ? 0 : 1;
        }
        CHECK(wrong == 0);
    };
    stay(tova_for_total(37), 37, 1);
    stay(snapkv_for_total(100, 32, {.pooling = MassPooling::none()}), 68, 32);
    stay(snapkv_for_total(100, 32, {.pooling = MassPooling::max(7)}), 68, 32);
}

TEST_CASE("build_observed_mask on CUDA refuses what the host refuses") {
    const Device<bf16> q(4 * 8 * 16), k(2 * 8 * 16);
    const Device<expiry_t> expiry(2 * 8);
    const Device<unsigned char> memory(1 << 16);
    const kvpolicy::cuda ctx{};
    const auto call = [&](const auto& policy, const ObservedMaskOptions& options, workspace_view provided) {
        build_observed_mask<std::decay_t<decltype(policy)>, bf16, Dims>(
            ctx, policy, {}, view_bhsd<const bf16>(q.data(), 1, 4, 8, 16),
            view_bhsd<const bf16>(k.data(), 1, 2, 8, 16), {.batch = 1, .length = 8},
            view_bhs(expiry.data(), 1, 2, 8), provided, options);
    };
    CHECK_REFUSED(call(tova_for_total(3), {.prompt = -1}, memory), "prompt: -1");
    CHECK_REFUSED(call(tova_for_total(3), {}, workspace_view{}), "workspace.bytes: 0");
    CHECK_REFUSED(call(snapkv_for_total(8, 4, {.pooling = MassPooling::mean(4)}), {}, memory),
                  "pooling width: 4");
    static const std::array<std::int32_t, 2> budgets{3, 4};
    const TOVA<> uneven{Window<1>{}, TopKBudget<>{per_head(budgets.data(), 1, 2)}, LastMass{}};
    CHECK_REFUSED(call(uneven, {}, memory), "of head 1");
}
