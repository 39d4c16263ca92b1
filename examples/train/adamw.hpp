// AdamW for small training programs: decoupled weight decay, bias correction, clipping by the global norm,
// and a schedule with a linear warm-up and a cosine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

namespace train {

/// Learning rate at step 0, 1, ...: linear from peak / warm_up to peak over `warm_up` steps, then a
/// cosine from peak to last at step `steps` - 1, and `last` from there on. KVpop, table 3: 1e-3 to 8e-5
/// after 100 steps.
struct Schedule {
    double peak = 1e-3;
    double last = 8e-5;
    std::int64_t warm_up = 100;
    std::int64_t steps = 1000;

    [[nodiscard]] double at(std::int64_t step) const {
        if (step < warm_up) {
            return peak * static_cast<double>(step + 1) / static_cast<double>(warm_up);
        }
        const std::int64_t span = steps - 1 - warm_up;
        if (span <= 0 || step >= steps - 1) {
            return last;
        }
        const double place = static_cast<double>(step - warm_up) / static_cast<double>(span);
        return last + 0.5 * (peak - last) * (1.0 + std::cos(std::numbers::pi * place));
    }
};

struct AdamWOptions {
    double beta1 = 0.9;
    double beta2 = 0.95;
    double epsilon = 1e-8;
    double weight_decay = 1e-4;
    double clip = 1.0;  ///< the largest global norm of a step's gradient; 0 leaves it as it is
};

/// Parameters in named arrays that the caller keeps; gradients and moments are here. One step:
///
///     g <- g min(1, clip / |g|)        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
///     p <- p - rate (m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + epsilon) + decay p)
///
/// with the step's rate times the array's own factor. All in one order, so that the same gradients give the
/// same bits. Saving `arrays` (moments) and steps_taken beside the parameters resumes exactly.
class AdamW {
  public:
    struct Array {
        std::string name;
        float* parameters;
        std::vector<float> gradient, first, second;
        bool decays;
        double rate;  ///< times the step's
    };

    explicit AdamW(AdamWOptions options = {}) : options_(options) {}

    /// Adds an array; its gradient's address stays. Norm gains and biases, say, should not decay.
    float* add(std::string name, float* parameters, std::size_t count, bool decays, double rate = 1.0) {
        const std::vector<float> zeros(count, 0.0f);
        arrays.push_back({std::move(name), parameters, zeros, zeros, zeros, decays, rate});
        return arrays.back().gradient.data();
    }

    void zero_gradients() {
        for (Array& array : arrays) {
            std::fill(array.gradient.begin(), array.gradient.end(), 0.0f);
        }
    }

    /// The global norm of the gradients.
    [[nodiscard]] double norm() const {
        double sum = 0.0;
        for (const Array& array : arrays) {
            for (const float g : array.gradient) {
                sum += static_cast<double>(g) * static_cast<double>(g);
            }
        }
        return std::sqrt(sum);
    }

    /// One step; returns the gradient's norm before clipping. A norm that is not finite leaves everything as
    /// it was, and the caller to say so.
    double step(double rate) {
        const double size = norm();
        if (!std::isfinite(size)) {
            return size;
        }
        ++steps_taken;
        const double shrink = options_.clip > 0.0 && size > options_.clip ? options_.clip / size : 1.0;
        const double correct1 = 1.0 - std::pow(options_.beta1, static_cast<double>(steps_taken));
        const double correct2 = 1.0 - std::pow(options_.beta2, static_cast<double>(steps_taken));
        for (Array& array : arrays) {
            const double decay = array.decays ? options_.weight_decay : 0.0;
            for (std::size_t i = 0; i < array.gradient.size(); ++i) {
                const double g = shrink * static_cast<double>(array.gradient[i]);
                const double m =
                    options_.beta1 * static_cast<double>(array.first[i]) + (1.0 - options_.beta1) * g;
                const double v =
                    options_.beta2 * static_cast<double>(array.second[i]) + (1.0 - options_.beta2) * g * g;
                array.first[i] = static_cast<float>(m);
                array.second[i] = static_cast<float>(v);
                const double p = static_cast<double>(array.parameters[i]);
                const double move = m / correct1 / (std::sqrt(v / correct2) + options_.epsilon);
                array.parameters[i] = static_cast<float>(p - rate * array.rate * (move + decay * p));
            }
        }
        return size;
    }

    std::vector<Array> arrays;
    std::int64_t steps_taken = 0;

  private:
    AdamWOptions options_;
};

}  // namespace train
