// An mLSTM that scores a key when it arrives, in a cache that asks for scores when keys leave: KVpop's
// ablation without the delayed read (KVpop, figure 5). A stateful scorer of one's own, made of the library's.
#pragma once

#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace examples {

/// The state is the mLSTM's, then the scores of the last `window` + 1 tokens in a ring, then the place of
/// the next one. Token q - window is read right after token q was absorbed: the place after the newest
/// holds the oldest.
template <class Inner>
struct ImmediateScorer {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::scorer;
    static constexpr kvpolicy::score_time when = kvpolicy::score_time::on_leaving;

    Inner inner;
    std::int32_t window = 0;

    [[nodiscard]] std::size_t ring_size() const { return static_cast<std::size_t>(window) + 1; }
    [[nodiscard]] std::size_t state_size() const { return inner.state_size() + ring_size() + 1; }
    [[nodiscard]] std::size_t scratch_size() const { return inner.scratch_size(); }

    template <class Real>
    void reset(Real* state) const {
        inner.reset(state);
        std::fill_n(state + inner.state_size(), ring_size() + 1, Real(0));
    }
    template <class Real>
    void absorb(std::int32_t head, Real* state, const Real* key, const Real* value, Real* scratch,
                kvpolicy::isa set = kvpolicy::detected_isa()) const {
        inner.absorb(head, state, key, value, scratch, set);
        Real* ring = state + inner.state_size();
        const auto place = static_cast<std::size_t>(ring[ring_size()]);
        ring[place] = inner.read(head, state, key, value, scratch, set);
        ring[ring_size()] = static_cast<Real>((place + 1) % ring_size());
    }
    template <class Real>
    Real read(std::int32_t, const Real* state, const Real*, const Real*, Real*,
              kvpolicy::isa = kvpolicy::detected_isa()) const {
        const Real* ring = state + inner.state_size();
        return ring[static_cast<std::size_t>(ring[ring_size()])];
    }
    void check(std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim) const {
        inner.check(kv_heads, key_dim, value_dim);
    }
};

static_assert(kvpolicy::StatefulScorer<ImmediateScorer<kvpolicy::mLSTMScorer<>>>);

}  // namespace examples
