// How far an mLSTM's scores and states in fp32 may be from those in double: what its roundings come
// to, token by token.
//
// A step makes each number from earlier ones by operations that are off by at most u = 2^-24 of their result
// (exponentials, logarithms and tanh by 4 u). They are taken as independent, u as each one's standard
// deviation (a rounding's own is u / sqrt(3)), and what they change in a score to first order, so that their
// variances add up:
//
// - A sum of n products adds the squares of u times its partial sums, in the order of the numbers. A
//   device adds sixteen products in tensor cores, which cut off, then those sums: fewer roundings of the
//   same partial sums.
// - Projections y of head_dim_qk + head_dim_vo products go on as values v~ with derivative 1, as gates
//   through cap(y), whose derivative is 1 - (cap(y) / c)^2, and log sigmoid; as features through a softmax,
//   whose relative change is dy_f - sum_g p_g dy_g.
// - With W_t = exp(b_t - m) <q~, k~_t>, b_t = log i_t + the log f after t, and D = max(sum_t W_t, clamp), h =
//   sum_t W_t v~_t / D. A relative change w of W_t moves h by w W_t (v~_t - h) / D: relative to h, since the
//   divisor moves too (not where the clamp is it). That of a gate's logarithm is w itself; that of log f_s is
//   w for all tokens before s.
// - A state keeps what it lost: C <- f C + i k~ v~ rounds every number of it at every step, and f takes those
//   roundings away with the rest, so that memories of forget gates near 1 lose more.
// - J = d score / d h, through the norm and SiLU, takes all of these to the score, with J's own roundings and
//   the read-out's, a . SiLU and s . x, added.
//
// Of normal numbers with the same variance one in 3e5 is off by more than 4.65 standard deviations, and since
// a rounding's is counted 1.7 times, that is 8 of theirs: `deviations` = 4.65.
#pragma once

#include <kvpolicy/scorers/mlstm.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

namespace test {

/// A number in double, and how far fp32 may be from it.
struct RoundedNumber {
    double value = 0.0, error = 0.0;
};

template <class S>
class mLSTMRounding {
  public:
    static constexpr double unit = 0x1p-24, function = 4.0 * unit, deviations = 4.65;

    /// For one head of one sequence. The scorer's weights are in host memory.
    mLSTMRounding(const S& scorer, std::int32_t head, std::int32_t sinks, std::int32_t window)
        : scorer_(scorer),
          head_(head),
          sinks_(sinks),
          window_(window),
          inputs_(size(scorer.input_size())),
          projection_(size(scorer.projection())),
          features_(size(scorer.features())),
          width_(size(scorer.value_width())),
          state_(scorer.state_size()),
          scratch_(scorer.scratch_size()),
          rounded_(features_ * (width_ + 1)),
          off_(features_ * (width_ + 1)) {
        scorer.reset(state_.data());
    }

    /// Takes in a token, and has the score of the key that leaves then.
    template <class T>
    void take(const T* key, const T* value) {
        tokens_.push_back(token_of(key, value));
        const Token& now = tokens_.back();
        const double before = stabilizer();
        scorer_.absorb(head_, state_.data(), now.x.data(), now.x.data() + scorer_.head_dim_qk,
                       scratch_.data());
        decay(now, before);
        const auto u = static_cast<std::int64_t>(tokens_.size()) - 1 - window_;
        if (u >= 0) {
            scores_.push_back(u < sinks_ ? RoundedNumber{} : read(tokens_[static_cast<std::size_t>(u)]));
        }
    }
    /// By position, of the keys that have left the window; sinks have none.
    [[nodiscard]] const std::vector<RoundedNumber>& scores() const { return scores_; }
    /// Number x of the state.
    [[nodiscard]] RoundedNumber state(std::size_t x) const {
        const bool number = x < off_.size();  // else the stabilizer
        return {number ? state_[x] : stabilizer(),
                deviations * std::sqrt(number ? off_[x] : off_stabilizer_)};
    }
    [[nodiscard]] std::size_t state_size() const { return off_.size() + 1; }

  private:
    /// A number and its variance.
    struct Sum {
        double value = 0.0, variance = 0.0;
    };
    struct Token {
        std::vector<double> x, value, features;  // [inputs], [width], [features]
        std::vector<double> of_value, of_projection,
            own;              // variances; `own`: of features, relative, but for the projection's
        Sum input, forget;    // logarithms
        double behind = 0.0;  // log f of this token and all before
    };

    static std::size_t size(std::int32_t n) { return static_cast<std::size_t>(n); }
    static double square(double x) { return x * x; }
    [[nodiscard]] double stabilizer() const { return state_[state_.size() - 2] + state_[state_.size() - 1]; }
    [[nodiscard]] static constexpr std::size_t parts() {
        return std::is_same_v<typename S::feature_map, kvpolicy::Hedgehog> ? 2 : 1;
    }

    [[nodiscard]] Sum dot(const double* x, const float* w, std::size_t count, double bias = 0.0) const {
        Sum sum;
        for (std::size_t i = 0; i < count; ++i) {
            const double product = x[i] * static_cast<double>(w[i]);
            sum.value += product;
            sum.variance += square(unit * product) + square(unit * sum.value);
        }
        sum.value += bias;
        sum.variance += square(unit * sum.value);
        return sum;
    }
    [[nodiscard]] const float* rows(const float* of, std::size_t each) const {
        return of + size(head_) * each * inputs_;
    }
    [[nodiscard]] double bias(const float* of) const {
        return of != nullptr ? static_cast<double>(of[head_]) : 0.0;
    }

    [[nodiscard]] Sum gate(const std::vector<double>& x, const float* w, const float* b) const {
        Sum sum = dot(x.data(), rows(w, 1), inputs_, bias(b));
        if (const auto cap = static_cast<double>(scorer_.gate_softcap); cap > 0.0) {
            const double t = std::tanh(sum.value / cap);
            sum = {cap * t, square(1.0 - t * t) * sum.variance + square(function * cap * t)};
        }
        return sum;
    }

    /// phi(W x), the variances of W x, and those of features that have other causes.
    void features_of(const std::vector<double>& x, const float* w, std::vector<double>& features,
                     std::vector<double>& of_projection, std::vector<double>& own) const {
        std::vector<double> y(projection_);
        features.resize(features_);
        of_projection.resize(projection_);
        own.resize(features_);
        for (std::size_t j = 0; j < projection_; ++j) {
            const Sum sum = dot(x.data(), rows(w, projection_) + j * inputs_, inputs_);
            y[j] = sum.value;
            of_projection[j] = sum.variance;
        }
        for (std::size_t part = 0; part < parts(); ++part) {
            const double sign = part == 0 ? 1.0 : -1.0;
            double largest = -INFINITY, all = 0.0;
            for (const double number : y) {
                largest = std::max(largest, sign * number);
            }
            for (const double number : y) {
                all += std::exp(sign * number - largest);
            }
            for (std::size_t j = 0; j < projection_; ++j) {
                const double off = sign * y[j] - largest;
                features[part * projection_ + j] = std::exp(off) / all;
                own[part * projection_ + j] = square(function) + square(unit * off);
            }
        }
    }

    template <class T>
    [[nodiscard]] Token token_of(const T* key, const T* value) const {
        Token token;
        for (std::int32_t i = 0; i < scorer_.head_dim_qk; ++i) {
            token.x.push_back(static_cast<double>(static_cast<float>(key[i])));
        }
        for (std::int32_t i = 0; i < scorer_.head_dim_vo; ++i) {
            token.x.push_back(static_cast<double>(static_cast<float>(value[i])));
        }
        const auto& weights = scorer_.weights;
        features_of(token.x, weights.w_k, token.features, token.of_projection, token.own);
        for (std::size_t e = 0; e < width_; ++e) {
            Sum sum{token.x[size(scorer_.head_dim_qk) + (S::value_path::projected ? 0 : e)], 0.0};
            if constexpr (S::value_path::projected) {
                sum = dot(token.x.data(), rows(weights.w_v, width_) + e * inputs_, inputs_);
            }
            token.value.push_back(sum.value);
            token.of_value.push_back(sum.variance);
        }
        token.input = gate(token.x, weights.w_i, weights.b_i);
        const Sum forget = gate(token.x, weights.w_f, weights.b_f);
        const double f = forget.value, logarithm = std::min(f, 0.0) - std::log1p(std::exp(-std::fabs(f)));
        token.forget = {std::max(S::least_log_forget, logarithm),
                        square(1.0 / (1.0 + std::exp(f))) * forget.variance + square(function * logarithm)};
        return token;
    }

    /// The variance of a factor exp(x) that is made from x, x = 0 being exact.
    static double of_factor(double x) { return x == 0.0 ? 0.0 : square(function) + square(unit * x); }

    /// What the newest token does to the roundings of the state.
    void decay(const Token& token, double before) {
        const double m = stabilizer(), kept = token.forget.value + before;
        const double f = std::exp(kept - m), i = std::exp(token.input.value - m);
        const double of_f = of_factor(std::isfinite(kept) ? kept - m : 0.0),
                     of_i = of_factor(token.input.value - m);
        Token& last = tokens_.back();
        last.input.variance += of_i;
        last.forget.variance += of_f;
        last.behind = (tokens_.size() > 1 ? tokens_[tokens_.size() - 2].behind : 0.0) + token.forget.value;
        // In the frame of m one of the factors is 1, and exact: the other has the variance of
        // both logarithms.
        const double apart = token.forget.variance + token.input.variance + off_stabilizer_;
        const double factor_f = kept < m ? apart : 0.0, factor_i = kept < m ? 0.0 : apart;
        off_stabilizer_ = kept < m ? token.input.variance : off_stabilizer_ + token.forget.variance;
        double mean = 0.0;
        for (std::size_t j = 0; j < projection_; ++j) {
            mean += square(token.features[j]) * token.of_projection[j];
        }
        for (std::size_t k = 0; k < features_; ++k) {
            const double feature = token.features[k],
                         of_feature = token.own[k] + token.of_projection[k % projection_] + mean;
            for (std::size_t e = 0; e <= width_; ++e) {  // the last: z
                const bool divisor = e == width_;
                const std::size_t at = divisor ? features_ * width_ + k : k * width_ + e;
                const double written = i * feature * (divisor ? 1.0 : token.value[e]);
                const double after = state_[at], was = after - written;  // f C
                const double rounding = square(unit) * (square(after) + 2.0 * square(written));
                rounded_[at] = square(f) * rounded_[at] + rounding;
                off_[at] = square(f) * off_[at] + square(was) * factor_f + rounding +
                           square(written) * (factor_i + of_feature) +
                           (divisor ? 0.0 : square(i * feature) * token.of_value[e]);
            }
        }
    }

    [[nodiscard]] RoundedNumber read(const Token& leaving) {
        const auto& weights = scorer_.weights;
        const double score = scorer_.read(head_, state_.data(), leaving.x.data(),
                                          leaving.x.data() + scorer_.head_dim_qk, scratch_.data());
        std::vector<double> q, of_query, own;
        features_of(leaving.x, weights.w_q, q, of_query, own);
        const double* const z = state_.data() + features_ * width_;
        // h, and the variances of what the sums over features lose, of the state's numbers among it.
        const auto sum_of = [&](const double* numbers, const double* rounded, std::size_t stride) {
            Sum sum;
            for (std::size_t k = 0; k < features_; ++k) {
                sum.value += q[k] * numbers[k * stride];
                sum.variance += square(unit * sum.value) + square(q[k]) * rounded[k * stride];
            }
            return sum;
        };
        const Sum divisor = sum_of(z, rounded_.data() + features_ * width_, 1);
        const bool clamped = divisor.value < S::clamp;
        const double d = clamped ? S::clamp : divisor.value;
        std::vector<double> h(width_), of_h(width_);
        double mean = 0.0, squares = 0.0;
        for (std::size_t e = 0; e < width_; ++e) {
            const Sum sum = sum_of(state_.data() + e, rounded_.data() + e, width_);
            h[e] = sum.value / d;
            of_h[e] = sum.variance / square(d) + square(2.0 * unit * h[e]);
            mean += scorer_.centered() ? h[e] / static_cast<double>(width_) : 0.0;
        }
        // h is centered for a LayerNorm, down to j.
        for (std::size_t e = 0; e < width_ && scorer_.centered(); ++e) {
            of_h[e] += square(2.0 * unit * (std::fabs(h[e]) + std::fabs(mean)));
            h[e] -= mean;
        }
        for (const double x : h) {
            squares += square(x);
        }
        // The score, J = d score / d h, and the roundings from h on.
        const bool normed = weights.norm_gain != nullptr;
        const auto width = static_cast<double>(width_);
        const double scale = normed ? 1.0 / std::sqrt(squares / width + S::norm_epsilon) : 1.0;
        std::vector<double> j(width_);
        double along = 0.0, common = 0.0, variance = 0.0, sum = 0.0;
        for (std::size_t e = 0; e < width_; ++e) {
            const double gain =
                normed ? static_cast<double>(weights.norm_gain[size(head_) * width_ + e]) : 1.0;
            const double y = h[e] * scale * gain, sigmoid = 1.0 / (1.0 + std::exp(-y));
            const double a = static_cast<double>(weights.readout[size(head_) * width_ + e]);
            const double slope = a * sigmoid * (1.0 + y * (1.0 - sigmoid));
            j[e] = slope * scale * gain;
            along += j[e] * h[e];
            common += slope * y;
            sum += a * y * sigmoid;
            // 1 + exp(-y), exp by the GPU's own 2^x of a rounded product, a quotient, two products.
            variance += square((function + unit * std::fabs(y) * 2.0) * a * y * sigmoid) +
                        square(2.0 * unit * slope * y) + square(unit * sum);
        }
        if (normed) {
            variance += square(common) * square(unit) * (width + 16.0);
            for (std::size_t e = 0; e < width_; ++e) {
                j[e] -= h[e] * square(scale) * along / width;
            }
        }
        if (scorer_.centered()) {
            const double shift = std::accumulate(j.begin(), j.end(), 0.0) / width;
            for (std::size_t e = 0; e < width_; ++e) {
                j[e] -= shift;
                h[e] += mean;  // as the quotients below have it
            }
        }
        variance += square(unit * score);
        if (weights.skip != nullptr) {
            variance += dot(leaving.x.data(), rows(weights.skip, 1), inputs_).variance;
        }
        double center = 0.0;
        for (std::size_t e = 0; e < width_; ++e) {
            variance += square(j[e]) * of_h[e];
            center += clamped ? 0.0 : j[e] * h[e];
        }
        variance += clamped ? 0.0 : square(center / d) * divisor.variance;
        variance += of_queries(q, of_query, own, j, center, d) + of_tokens(q, j, center, d);
        return {score, deviations * std::sqrt(variance)};
    }

    /// What the query's features do: sum_f dq_f (J . (C_f - h z_f)) / D.
    [[nodiscard]] double of_queries(const std::vector<double>& q, const std::vector<double>& of_query,
                                    const std::vector<double>& own, const std::vector<double>& j,
                                    double center, double d) const {
        const double* const z = state_.data() + features_ * width_;
        std::vector<double> sees(features_), mean(parts());
        for (std::size_t k = 0; k < features_; ++k) {
            double along = -center * z[k];
            for (std::size_t e = 0; e < width_; ++e) {
                along += j[e] * state_[k * width_ + e];
            }
            sees[k] = along / d;
            mean[k / projection_] += q[k] * sees[k];
        }
        double variance = 0.0;
        for (std::size_t p = 0; p < projection_; ++p) {
            double slope = 0.0;
            for (std::size_t part = 0; part < parts(); ++part) {
                const std::size_t k = part * projection_ + p;
                slope += (part == 0 ? 1.0 : -1.0) * q[k] * (sees[k] - mean[part]);
                variance += square(q[k] * (sees[k] - mean[part])) * own[k];
            }
            variance += square(slope) * of_query[p];
        }
        for (const double all : mean) {  // a softmax's own sum
            variance += square(all * function);
        }
        return variance;
    }

    /// What the tokens' features, values and gates do.
    [[nodiscard]] double of_tokens(const std::vector<double>& q, const std::vector<double>& j, double center,
                                   double d) const {
        const double m = stabilizer(), behind = tokens_.back().behind;
        double variance = 0.0,
               before = 0.0;  // `before`: what a relative change of all tokens up to here does
        for (std::size_t t = 0; t < tokens_.size(); ++t) {
            const Token& token = tokens_[t];
            variance += square(before) * token.forget.variance;
            const double weight = std::exp(token.input.value + (behind - token.behind) - m) / d;
            if (weight == 0.0) {
                continue;
            }
            double along = -center, of_value = 0.0, match = 0.0;
            std::vector<double> mean(parts());
            for (std::size_t e = 0; e < width_; ++e) {
                along += j[e] * token.value[e];
                of_value += square(j[e]) * token.of_value[e];
            }
            for (std::size_t k = 0; k < features_; ++k) {
                mean[k / projection_] += q[k] * token.features[k];
                match += q[k] * token.features[k];
            }
            double of_match = square(function * match) + square(match) * token.input.variance;
            for (std::size_t p = 0; p < projection_; ++p) {
                double slope = 0.0;
                for (std::size_t part = 0; part < parts(); ++part) {
                    const std::size_t k = part * projection_ + p;
                    const double moves = token.features[k] * (q[k] - mean[part]);
                    slope += (part == 0 ? 1.0 : -1.0) * moves;
                    of_match += square(moves) * token.own[k];
                }
                of_match += square(slope) * token.of_projection[p];
            }
            variance += square(weight) * (square(along) * of_match + square(match) * of_value);
            before += weight * match * along;
        }
        return variance;
    }

    S scorer_;
    std::int32_t head_, sinks_, window_;
    std::size_t inputs_, projection_, features_, width_;
    std::vector<double> state_, scratch_;
    std::vector<double> rounded_,
        off_;  // [features, width], [features]: variances by the state's own roundings, and by all
    double off_stabilizer_ = 0.0;
    std::vector<Token> tokens_;
    std::vector<RoundedNumber> scores_;
};

}  // namespace test
