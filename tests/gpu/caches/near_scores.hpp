// Whether scores and states that a device computed are near the host's: by a few units where they are short
// sums, an mLSTM's by how far either may be from the numbers in double.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>

#include "cache_case.hpp"
#include "mlstm_rounding.hpp"
#include "two_scorers.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

/// For sequences in the sequences of a cache with Sink<2> and Window<7>.
template <class S>
class NearScores : public NearHost {
  public:
    NearScores(const S& /*scorer*/, const kvpolicy::CacheShape& /*shape*/) : NearHost{score_tolerance} {}

    /// Entry i brings its first q_len[i] tokens.
    template <class T>
    void take(const std::vector<std::int32_t>&, const std::vector<std::int32_t>&, const CallTensors<T>&) {}
};

template <std::int32_t D, class Feature, class Values>
class NearScores<kvpolicy::mLSTMScorer<D, Feature, Values>> {
    using S = kvpolicy::mLSTMScorer<D, Feature, Values>;

  public:
    NearScores(const S& scorer, const kvpolicy::CacheShape& shape) : heads_(shape.kv_heads) {
        for (std::int32_t x = 0; x < shape.max_sequences * heads_; ++x) {
            exact_.emplace_back(scorer, x % heads_, 2, 7);
        }
    }
    template <class T>
    void take(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
              const CallTensors<T>& in) {
        const auto k = in.k.view(), v = in.v.view();
        for (std::size_t i = 0; i < seq_ids.size(); ++i) {
            for (std::int32_t h = 0; h < heads_; ++h) {
                for (std::int32_t t = 0; t < q_len[i]; ++t) {
                    const auto entry = static_cast<std::int64_t>(i);
                    of(seq_ids[i], h).take(k.row(entry, h, t), v.row(entry, h, t));
                }
            }
        }
    }
    void score(std::int32_t seq, std::int32_t head, kvpolicy::position_t position, float of_device,
               float of_host) {
        const std::vector<RoundedNumber>& wanted = of(seq, head).scores();
        const auto t = static_cast<std::size_t>(position);
        if (position >= 2 && t < wanted.size()) {
            scores_ = std::max(scores_, share(static_cast<double>(of_device), wanted[t]));
            of_host_ = std::max(of_host_, share(static_cast<double>(of_host), wanted[t]));
        } else {  // none
            CHECK(of_device == of_host);
        }
    }
    void states(std::int32_t seq, std::int32_t head, const float* of_device, const float* of_host,
                std::int64_t /*count*/) {
        const mLSTMRounding<S>& wanted = of(seq, head);
        const std::size_t last = wanted.state_size() - 1;  // the stabilizer, two numbers
        const auto number = [&](const float* from, std::size_t x) {
            return static_cast<double>(from[x]) + (x == last ? static_cast<double>(from[x + 1]) : 0.0);
        };
        for (std::size_t x = 0; x <= last; ++x) {
            states_ = std::max(states_, share(number(of_device, x), wanted.state(x)));
            of_host_ = std::max(of_host_, share(number(of_host, x), wanted.state(x)));
        }
    }
    void check() const {
        MESSAGE("the furthest from double, in shares of the bound: scores ", scores_, ", states ", states_,
                ", the host's ", of_host_);
        CHECK(scores_ <= 1.0);
        CHECK(states_ <= 1.0);
        CHECK(of_host_ <= 1.0);
    }

  private:
    mLSTMRounding<S>& of(std::int32_t seq, std::int32_t head) {
        return exact_[static_cast<std::size_t>(seq * heads_ + head)];
    }
    /// Numbers below 1e-30 lose digits. A NaN is the worst.
    static double share(double got, const RoundedNumber& wanted) {
        const double off = got == wanted.value ? 0.0 : std::abs(got - wanted.value);
        const double share = off <= 1e-30 ? 0.0 : off / wanted.error;
        return std::isnan(share) ? INFINITY : share;
    }
    std::int32_t heads_;
    std::vector<mLSTMRounding<S>> exact_;
    double scores_ = 0.0, of_host_ = 0.0, states_ = 0.0;
};

}  // namespace test
