// Dropout in training. The mask depends on the position of a number only, so a recomputed forward pass drops
// the same ones.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/random.hpp>

#include <cstdint>

namespace kvpolicy {

/// Dropout of a call that trains: each activation becomes 0 with probability `rate`, and is multiplied by
/// 1 / (1 - rate) otherwise. Forward and backward of one step take the same seed; the next step another one.
struct Dropout {
    float rate = 0.0f;
    std::uint64_t seed = 0;

    void check() const {
        detail::require(rate >= 0.0f && rate < 1.0f, "dropout.rate", rate, "0 (none) or more, and below 1");
    }
};

/// The dropout of one head's sequence. Activation c of the row `at` of hidden layer l <= 3, of `width`
/// numbers, is decided by number at * width + c of stream 4 * stream + l. How rows are counted is the
/// scorer's business.
struct DropoutStream {
    Dropout dropout;
    std::uint64_t stream = 0;

    /// Multiplies row y [width] by the dropout mask.
    template <class Real>
    void apply(std::uint64_t layer, std::int64_t at, std::int32_t width, Real* y) const {
        if (dropout.rate == 0.0f) {
            return;
        }
        const auto first = static_cast<std::uint64_t>(at) * static_cast<std::uint64_t>(width);
        const Real scale = Real(1) / (Real(1) - static_cast<Real>(dropout.rate));
        for (std::int32_t c = 0; c < width; ++c) {
            const double u =
                random_unit(dropout.seed, 4 * stream + layer, first + static_cast<std::uint64_t>(c));
            y[c] = u < static_cast<double>(dropout.rate) ? Real(0) : y[c] * scale;
        }
    }
};

}  // namespace kvpolicy
