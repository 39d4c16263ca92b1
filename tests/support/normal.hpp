// Normally distributed numbers, by Marsaglia's polar method: those that libstdc++ draws, which takes a long
// double logarithm for each of them, half the time of a test that is not optimized.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

namespace test {

template <class Real>
class Normal {
  public:
    explicit Normal(Real mean = Real(0), Real spread = Real(1)) : mean_(mean), spread_(spread) {}

    Real operator()(std::mt19937& generator) {
        if (saved_) {
            saved_ = false;
            return next_ * spread_ + mean_;
        }
        Real x, y, square;
        do {
            x = between_ones(generator);
            y = between_ones(generator);
            square = x * x + y * y;
        } while (square > Real(1) || square == Real(0));
        const Real factor = std::sqrt(Real(-2) * std::log(square) / square);
        next_ = x * factor;
        saved_ = true;
        return y * factor * spread_ + mean_;
    }

  private:
    /// From [-1, 1), of as many draws as Real has words.
    static Real between_ones(std::mt19937& generator) {
        auto unit = static_cast<Real>(generator());
        if constexpr (sizeof(Real) == 8) {
            unit += static_cast<Real>(generator()) * Real(0x1p32);
            unit *= Real(0x1p-32);
        }
        unit = std::min(unit * Real(0x1p-32), std::nextafter(Real(1), Real(0)));
        return static_cast<Real>(2.0 * static_cast<double>(unit) - 1.0);
    }

    Real mean_, spread_, next_ = Real(0);
    bool saved_ = false;
};

}  // namespace test
