// Steps of observed policies on a device beside the host's. Masses differ by rounding, and a decision may
// hang on the last bit of one. So before every step the host takes over the device's state, scores included:
// then both must evict the same keys, and the masses that the step adds differ by no more than the logits.
#pragma once

#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/observed.hpp>

#include "paged_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace test {

using Observation = kvpolicy::Observation;

/// Any observation, so that one policy's kernels serve all tests.
struct AnyMass {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::scorer;
    static constexpr kvpolicy::score_time when = kvpolicy::score_time::observed;
    static constexpr bool evicts_at_steps = true;
    Observation seen{};
    [[nodiscard]] constexpr Observation observation() const { return seen; }
};
using Observed = kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::TopKBudget<>, AnyMass>;

/// H2O's observation, and TOVA's of a layer or of a head.
inline constexpr Observation accumulated{};
inline constexpr Observation last_of_head{.queries = 1, .accumulate = false};
inline constexpr Observation last_of_layer{.queries = 1, .accumulate = false, .whole_layer = true};

/// Three heads whose top-k slots begin at rows 1, 6 and 18 of a tile of 64; budgets around its size, or none.
inline constexpr std::int32_t observed_sinks[] = {0, 2, 1}, observed_windows[] = {1, 4, 17},
                              observed_budgets[] = {63, 0, 130},
                              partly_unbounded[] = {63, kvpolicy::unlimited, 130};

/// A policy whose three heads differ.
inline Observed ragged(const Observation& seen, const std::int32_t (&budget)[3] = observed_budgets) {
    using kvpolicy::per_head;
    return Observed{kvpolicy::Sink<>{per_head(observed_sinks, 1, 3)},
                    kvpolicy::Window<>{per_head(observed_windows, 1, 3)},
                    kvpolicy::TopKBudget<>{per_head(budget, 1, 3)}, AnyMass{seen}};
}
/// A policy whose heads do not differ.
inline Observed even(const Observation& seen) {
    return Observed{kvpolicy::Sink<>{1}, kvpolicy::Window<>{3}, kvpolicy::TopKBudget<>{66}, AnyMass{seen}};
}
/// A cache of one layer; a FixedBudgetCache has no pages.
inline kvpolicy::CacheShape shape_of(std::int32_t kv_heads, std::int32_t group, std::int32_t head_dim = 64,
                                     std::int32_t sequences = 3) {
    return {.layers = 1,
            .max_sequences = sequences,
            .query_heads = kv_heads * group,
            .kv_heads = kv_heads,
            .head_dim_qk = head_dim,
            .head_dim_vo = head_dim,
            .page_size = 16};
}

/// Keys of a step: normal; half of them zero, which receive equal masses; or long ones, most of which receive
/// none in fp32.
enum class Keys { random, equal, far };

/// Whether masses are near, and how near they must be. Either side rounds a sum of Dk products, so a logit is
/// off by Dk units of |q| |k| at most, its own and those of the sum of weights; exponentials by 2^-20.
class NearMasses {
  public:
    /// The inputs of a step: keys of earlier ones count, too.
    template <class T>
    void take(const CallTensors<T>& in, const kvpolicy::AttentionParams& attention) {
        q_ = std::max(q_, longest(in.q));
        k_ = std::max(k_, longest(in.k));
        const double dim = in.q.dim;
        const double scale =
            attention.sm_scale != 0.0f ? static_cast<double>(attention.sm_scale) : 1.0 / std::sqrt(dim);
        relative_ = 4.0 * dim * 0x1p-24 * scale * q_ * k_ + 0x1p-18;
    }
    void score(std::int32_t /*sequence*/, std::int32_t /*head*/, kvpolicy::position_t /*position*/,
               float of_device, float of_host) {
        const double a = of_device, b = of_host;
        near_ = near_ && std::abs(a - b) <= relative_ * std::abs(b) + 1e-37;
    }
    void states(std::int32_t, std::int32_t, const float*, const float*, std::int64_t) {}
    void check() {
        CHECK(near_);
        near_ = true;
    }

  private:
    template <class T>
    static double longest(const Tensor<T>& rows) {
        double most = 0.0;
        for (std::size_t first = 0; first < rows.data.size(); first += static_cast<std::size_t>(rows.dim)) {
            double sum = 0.0;
            for (std::int32_t d = 0; d < rows.dim; ++d) {
                const auto x = static_cast<double>(
                    static_cast<kvpolicy::compute_t<T>>(rows.data[first + static_cast<std::size_t>(d)]));
                sum += x * x;
            }
            most = std::max(most, std::sqrt(sum));
        }
        return most;
    }
    double q_ = 0.0, k_ = 0.0, relative_ = 0.0;
    bool near_ = true;
};

/// The host's cache becomes what the device's is.
template <class Both>
void take_over(Both& both) {
    for (std::int32_t seq = 0; seq < both.shape.max_sequences; ++seq) {
        std::vector<unsigned char> blob(both.cache.snapshot_bytes(both.device, seq));
        both.cache.snapshot(both.device, seq, blob.data(), blob.size());
        both.oracle.cache.restore(both.ctx, seq, blob.data(), blob.size());
    }
}

/// The tokens of a step, the same zero keys in all heads.
template <class T>
CallTensors<T> observed_tokens(const kvpolicy::CacheShape& shape, std::int32_t count, Keys kind,
                               std::mt19937& generator) {
    CallTensors<T> in(shape, count, 1, Scores::random, generator);
    const auto each = in.k.data.size() / static_cast<std::size_t>(count);
    for (std::size_t entry = 0; entry < static_cast<std::size_t>(count) && kind != Keys::random; ++entry) {
        const float factor = kind == Keys::far ? 20.0f : generator() % 2 == 0 ? 0.0f : 1.0f;
        for (std::size_t i = entry * each; i < (entry + 1) * each; ++i) {
            in.k.data[i] = T(factor * static_cast<float>(in.k.data[i]));
        }
    }
    return in;
}

/// Turns of random batches, some of whose entries bring no token, and now and then another call between two
/// tokens. before(), then take(sequences, tokens) or the other call, then after(what was done).
template <class Both, class Before, class Take, class After>
void observed_turns(Both& both, std::int32_t turns, std::mt19937& generator, const Before& before,
                    const Take& take, const After& after) {
    const std::int32_t all = both.shape.max_sequences;
    const auto pick = [&](std::int32_t below) {
        return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(below));
    };
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        CAPTURE(turn);
        before();
        std::vector<std::int32_t> seq_ids(static_cast<std::size_t>(all)), q_len;
        for (std::size_t i = 0; i < seq_ids.size(); ++i) {
            seq_ids[i] = static_cast<std::int32_t>(i);
        }
        std::shuffle(seq_ids.begin(), seq_ids.end(), generator);
        if (pick(4) == 0) {
            seq_ids.resize(static_cast<std::size_t>(1 + pick(all)));
        }
        for (std::size_t i = 0; i < seq_ids.size(); ++i) {
            q_len.push_back(pick(8) != 0 ? 1 : 0);
        }
        const std::int32_t what = pick(24), a = pick(all), b = pick(all);
        std::string done = "tokens";
        if (what == 0) {
            both.fork(a, b);
            done = "fork";
        } else if (what == 1) {
            std::vector<std::int32_t> sources(static_cast<std::size_t>(1 + a));
            for (std::int32_t& source : sources) {
                source = pick(all);
            }
            both.reorder(sources);
            done = "reorder";
        } else if (what == 2) {
            both.snapshot(a, b);
            done = "snapshot";
        } else if (what == 3 && pick(8) == 0) {
            both.oracle.cache.clear(both.ctx, a);
            both.cache.clear(both.device, a);
            done = "clear";
        } else {
            take(seq_ids, q_len);
        }
        after(done);
    }
}

/// Steps of random sequences, each from the device's state.
template <class T, class Both>
void observed_life(Both& both, Keys kind, std::int32_t turns, std::mt19937& generator,
                   const kvpolicy::AttentionParams& attention = {}) {
    NearMasses near;
    observed_turns(
        both, turns, generator, [&] { take_over(both); },
        [&](const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len) {
            const auto in =
                observed_tokens<T>(both.shape, static_cast<std::int32_t>(seq_ids.size()), kind, generator);
            near.take(in, attention);
            both.call(Mode::step, seq_ids, q_len, in);
        },
        [&](const std::string& done) {
            CAPTURE(done);
            both.near_rows(near);
            near.check();
        });
}

}  // namespace test
