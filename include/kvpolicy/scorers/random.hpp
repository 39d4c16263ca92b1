// Random scores, a baseline for every scorer.
#pragma once

#include <kvpolicy/core/random.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// Uniform numbers in [0, 1) that depend on (seed, layer, head, position) only: under a budget the long-range
/// keys are at every query a uniform choice of k among those that left the window. The number of a key is
/// drawn when it leaves, at query q = t + w, with stream layer * 2^32 + head and index q (core/random.hpp).
/// One value per layer: RandomScorer{seed, layer}. The state counts tokens, in two numbers that floats hold
/// exactly, up to 2^44 tokens.
struct RandomScorer {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;

    std::uint64_t seed = 0;
    std::int32_t layer = 0;

    [[nodiscard]] std::size_t state_size() const { return 2; }
    [[nodiscard]] std::size_t scratch_size() const { return 0; }
    template <class Real>
    void reset(Real* state) const {
        state[0] = state[1] = Real(0);
    }
    template <class Real>
    void absorb(std::int32_t, Real* state, const Real*, const Real*, Real*) const {
        state[0] += Real(1);
        if (state[0] == Real(digit)) {
            state[0] = Real(0);
            state[1] += Real(1);
        }
    }
    template <class Real>
    Real read(std::int32_t head, const Real* state, const Real*, const Real*, Real*) const {
        const std::uint64_t tokens =
            static_cast<std::uint64_t>(state[1]) * digit + static_cast<std::uint64_t>(state[0]);
        const std::uint64_t stream =
            (static_cast<std::uint64_t>(layer) << 32) + static_cast<std::uint64_t>(head);
        return static_cast<Real>(random_unit(seed, stream, tokens - 1));
    }
    [[nodiscard]] std::uint64_t fingerprint() const {
        return random_bits(seed, static_cast<std::uint64_t>(layer), 0);
    }

  private:
    static constexpr std::uint64_t digit = std::uint64_t{1} << 20;
};

static_assert(StatefulScorer<RandomScorer>);

}  // namespace kvpolicy
