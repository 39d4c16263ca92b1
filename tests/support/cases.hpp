// Inputs that many tests share: random tensors, and score sequences that break careless rankings.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include "normal.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace test {

/// A contiguous [batch, heads, length, dim] tensor that owns its elements.
template <class T>
struct Tensor {
    std::int32_t batch, heads, length, dim;
    std::vector<T> data;

    Tensor(std::int32_t b, std::int32_t h, std::int32_t s, std::int32_t d)
        : batch(b),
          heads(h),
          length(s),
          dim(d),
          data(static_cast<std::size_t>(b) * static_cast<std::size_t>(h) * static_cast<std::size_t>(s) *
               static_cast<std::size_t>(d)) {}

    kvpolicy::rows_view<T> view() { return kvpolicy::view_bhsd(data.data(), batch, heads, length, dim); }
    kvpolicy::rows_view<const T> view() const {
        return kvpolicy::view_bhsd<const T>(data.data(), batch, heads, length, dim);
    }
    /// Tokens [from, from + count) of every head.
    kvpolicy::rows_view<const T> tokens(std::int32_t from, std::int32_t count) const {
        kvpolicy::rows_view<const T> all = view();
        all.data += from * all.row_stride;
        all.length = count;
        return all;
    }
    kvpolicy::rows_view<T> tokens(std::int32_t from, std::int32_t count) {
        kvpolicy::rows_view<T> all = view();
        all.data += from * all.row_stride;
        all.length = count;
        return all;
    }

    void fill_normal(std::mt19937& generator, float scale = 1.0f) {
        test::Normal<float> normal(0.0f, scale);
        for (T& x : data) {
            x = T(normal(generator));
        }
    }
    void fill(float value) {
        for (T& x : data) {
            x = T(value);
        }
    }
};

/// A contiguous [batch, heads, length] plane that owns its elements.
template <class T>
struct Plane {
    std::int32_t batch, heads, length;
    std::vector<T> data;

    Plane(std::int32_t b, std::int32_t h, std::int32_t s, T value = T{})
        : batch(b),
          heads(h),
          length(s),
          data(static_cast<std::size_t>(b) * static_cast<std::size_t>(h) * static_cast<std::size_t>(s),
               value) {}

    kvpolicy::plane_view<T> view() { return kvpolicy::view_bhs(data.data(), batch, heads, length); }
    kvpolicy::plane_view<const T> view() const {
        return kvpolicy::view_bhs<const T>(data.data(), batch, heads, length);
    }
    kvpolicy::plane_view<const T> tokens(std::int32_t from, std::int32_t count) const {
        kvpolicy::plane_view<const T> all = view();
        all.data += from;
        all.length = count;
        return all;
    }
    T& at(std::int32_t b, std::int32_t h, std::int32_t t) {
        return data[(static_cast<std::size_t>(b) * static_cast<std::size_t>(heads) +
                     static_cast<std::size_t>(h)) *
                        static_cast<std::size_t>(length) +
                    static_cast<std::size_t>(t)];
    }
};

/// Memory for a call, poisoned, so that a call that trusts its contents fails.
struct Workspace {
    std::vector<unsigned char> memory;
    explicit Workspace(std::size_t bytes) : memory(bytes, 0xa5) {}
    operator kvpolicy::workspace_view() { return {memory.data(), memory.size()}; }
};

/// Orders of scores that break careless rankings.
enum class Scores {
    random,
    equal,
    improving,
    worsening,
    few_values,
    signed_zeros,
    infinities,
    alternating,
    huge
};
inline constexpr Scores all_scores[] = {Scores::random,     Scores::equal,       Scores::improving,
                                        Scores::worsening,  Scores::few_values,  Scores::signed_zeros,
                                        Scores::infinities, Scores::alternating, Scores::huge};

inline std::string name(Scores kind) {
    static const char* const names[] = {"random",     "equal",       "improving",
                                        "worsening",  "few values",  "signed zeros",
                                        "infinities", "alternating", "huge"};
    return names[static_cast<int>(kind)];
}

inline void fill_scores(Plane<float>& plane, Scores kind, std::mt19937& generator) {
    test::Normal<float> normal;
    const float infinity = std::numeric_limits<float>::infinity();
    std::int32_t t = 0;
    for (float& x : plane.data) {
        const auto step = static_cast<float>(t);
        switch (kind) {
            case Scores::random:
                x = normal(generator);
                break;
            case Scores::equal:
                x = 1.5f;
                break;
            case Scores::improving:
                x = 0.25f * step;
                break;
            case Scores::worsening:
                x = -0.25f * step;
                break;
            case Scores::few_values:
                x = static_cast<float>(generator() % 3);
                break;
            case Scores::signed_zeros:
                x = generator() % 2 == 0 ? 0.0f : -0.0f;
                break;
            case Scores::infinities:
                x = generator() % 3 == 0 ? infinity : generator() % 2 == 0 ? -infinity : normal(generator);
                break;
            case Scores::alternating:
                x = t % 2 == 0 ? step : -step;
                break;
            case Scores::huge:
                x = (generator() % 2 == 0 ? 1.0f : -1.0f) * 3e38f / static_cast<float>(1 + generator() % 4);
                break;
        }
        t = t + 1 == plane.length ? 0 : t + 1;
    }
}

}  // namespace test
