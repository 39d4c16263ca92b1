// Gradients by finite differences, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace test {

/// d f / d x by central differences of fourth order around the present x; `set(x)` puts a value in, f()
/// evaluates. Values that are stored as floats take their rounding into account only if x +- 2 step is exact.
template <class Set, class F>
double difference(double x, double step, Set&& set, F&& f) {
    const auto at = [&](double offset) {
        set(x + offset);
        return static_cast<double>(f());
    };
    const double near = at(step) - at(-step);
    const double far = at(2.0 * step) - at(-2.0 * step);
    set(x);
    return (8.0 * near - far) / (12.0 * step);
}

/// |a - b| relative to `scale`, the size of the array that they come from (a single entry may be 0 for good
///     reason).
inline double relative(double a, double b, double scale) { return std::abs(a - b) / std::max(scale, 1e-12); }

}  // namespace test
