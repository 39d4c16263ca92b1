// The loops that the host's scorers are made of. Each output is computed in one fixed order of operations
// whatever the blocking, so one token, a block of tokens and any instruction set give the same bits: prefill
// scores equal step scores.
#pragma once

#include <kvpolicy/core/lanes.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// y[t][r] = bias[r] + sum_i w[r][i] x[t][i], for `tokens` rows of x and `rows` rows of w. bias may be null.
/// Strides count elements. Sums run over lanes first, then the tail.
struct project_kernel {
    template <isa Set, int Tokens, int Rows, class Real, class Weight>
    [[gnu::always_inline]] static inline void tile(const Real* x, std::ptrdiff_t x_stride, const Weight* w,
                                                   std::ptrdiff_t w_stride, int inner, const float* bias,
                                                   Real* y, std::ptrdiff_t y_stride) {
        using vec = lanes<Real, Set>;
        vec sums[Tokens][Rows] = {};
        int i = 0;
        for (; i + vec::width <= inner; i += vec::width) {
            vec weights[Rows];
            unroll<Rows>([&](auto r) __attribute__((always_inline)) {
                weights[r].load_weights(w + r * w_stride + i);
            });
            unroll<Tokens>([&](auto t) __attribute__((always_inline)) {
                vec inputs;
                inputs.load(x + t * x_stride + i);
                unroll<Rows>([&](auto r) __attribute__((always_inline)) {
                    sums[t][r].add_product(inputs, weights[r]);
                });
            });
        }
        unroll<Tokens>([&](auto t) __attribute__((always_inline)) {
            unroll<Rows>([&](auto r) __attribute__((always_inline)) {
                Real sum = sums[t][r].sum();
                for (int tail = i; tail < inner; ++tail) {
                    multiply_add(sum, x[t * x_stride + tail], static_cast<Real>(w[r * w_stride + tail]));
                }
                if (bias != nullptr) {
                    sum += static_cast<Real>(bias[r]);
                }
                y[t * y_stride + r] = sum;
            });
        });
    }

    template <isa Set, int Tokens, class Real, class Weight>
    [[gnu::always_inline]] static inline void strip(const Real* x, std::ptrdiff_t x_stride, const Weight* w,
                                                    std::ptrdiff_t w_stride, int rows, int inner,
                                                    const float* bias, Real* y, std::ptrdiff_t y_stride) {
        constexpr int block = Tokens == 1 ? 8 : 2;
        int r = 0;
        for (; r + block <= rows; r += block) {
            tile<Set, Tokens, block>(x, x_stride, w + r * w_stride, w_stride, inner,
                                     bias ? bias + r : nullptr, y + r, y_stride);
        }
        for (; r < rows; ++r) {
            tile<Set, Tokens, 1>(x, x_stride, w + r * w_stride, w_stride, inner, bias ? bias + r : nullptr,
                                 y + r, y_stride);
        }
    }

    template <isa Set, class Real, class Weight>
    [[gnu::always_inline]] static inline void run(const Real* x, std::ptrdiff_t x_stride, int tokens,
                                                  const Weight* w, std::ptrdiff_t w_stride, int rows,
                                                  int inner, const float* bias, Real* y,
                                                  std::ptrdiff_t y_stride) {
        int t = 0;
        for (; t + 4 <= tokens; t += 4) {
            strip<Set, 4>(x + t * x_stride, x_stride, w, w_stride, rows, inner, bias, y + t * y_stride,
                          y_stride);
        }
        for (; t < tokens; ++t) {
            strip<Set, 1>(x + t * x_stride, x_stride, w, w_stride, rows, inner, bias, y + t * y_stride,
                          y_stride);
        }
    }
};

/// out[r][e] = (add ? out[r][e] : 0) + sum_j a[r][j] b[j][e], j rising. a has any two strides.
struct combine_kernel {
    template <isa Set, int Rows, int Vectors, class Real>
    [[gnu::always_inline]] static inline void tile(const Real* a, std::ptrdiff_t a_row,
                                                   std::ptrdiff_t a_column, int inner, const Real* b,
                                                   std::ptrdiff_t b_stride, Real* out,
                                                   std::ptrdiff_t out_stride, bool add) {
        using vec = lanes<Real, Set>;
        vec sums[Rows][Vectors] = {};
        if (add) {
            unroll<Rows>([&](auto r) __attribute__((always_inline)) {
                unroll<Vectors>([&](auto e) __attribute__((always_inline)) {
                    sums[r][e].load(out + r * out_stride + e * vec::width);
                });
            });
        }
        for (int j = 0; j < inner; ++j) {
            vec row[Vectors];
            unroll<Vectors>([&](auto e) __attribute__((always_inline)) {
                row[e].load(b + j * b_stride + e * vec::width);
            });
            unroll<Rows>([&](auto r) __attribute__((always_inline)) {
                const Real factor = a[r * a_row + j * a_column];
                unroll<Vectors>([&](auto e) __attribute__((always_inline)) {
                    sums[r][e].add_product(factor, row[e]);
                });
            });
        }
        unroll<Rows>([&](auto r) __attribute__((always_inline)) {
            unroll<Vectors>([&](auto e) __attribute__((always_inline)) {
                sums[r][e].store(out + r * out_stride + e * vec::width);
            });
        });
    }

    template <isa Set, int Rows, class Real>
    [[gnu::always_inline]] static inline void strip(const Real* a, std::ptrdiff_t a_row,
                                                    std::ptrdiff_t a_column, int inner, const Real* b,
                                                    std::ptrdiff_t b_stride, int columns, Real* out,
                                                    std::ptrdiff_t out_stride, bool add) {
        constexpr int width = lanes<Real, Set>::width;
        constexpr int vectors = Rows == 1 ? 8 : 2;
        int e = 0;
        for (; e + vectors * width <= columns; e += vectors * width) {
            tile<Set, Rows, vectors>(a, a_row, a_column, inner, b + e, b_stride, out + e, out_stride, add);
        }
        for (; e + width <= columns; e += width) {
            tile<Set, Rows, 1>(a, a_row, a_column, inner, b + e, b_stride, out + e, out_stride, add);
        }
        for (; e < columns; ++e) {
            for (int r = 0; r < Rows; ++r) {
                Real sum = add ? out[r * out_stride + e] : Real(0);
                for (int j = 0; j < inner; ++j) {
                    multiply_add(sum, a[r * a_row + j * a_column], b[j * b_stride + e]);
                }
                out[r * out_stride + e] = sum;
            }
        }
    }

    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void run(const Real* a, std::ptrdiff_t a_row,
                                                  std::ptrdiff_t a_column, int rows, int inner, const Real* b,
                                                  std::ptrdiff_t b_stride, int columns, Real* out,
                                                  std::ptrdiff_t out_stride, bool add) {
        int r = 0;
        for (; r + 4 <= rows; r += 4) {
            strip<Set, 4>(a + r * a_row, a_row, a_column, inner, b, b_stride, columns, out + r * out_stride,
                          out_stride, add);
        }
        for (; r < rows; ++r) {
            strip<Set, 1>(a + r * a_row, a_row, a_column, inner, b, b_stride, columns, out + r * out_stride,
                          out_stride, add);
        }
    }
};

/// c[d][e] = forget * c[d][e] + (write * k[d]) * v[e], and z[d] = forget * z[d] + write * k[d].
struct update_kernel {
    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void run(Real forget, Real write, const Real* k, int d_qk,
                                                  const Real* v, int d_v, Real* c, Real* z) {
        using vec = lanes<Real, Set>;
        for (int d = 0; d < d_qk; ++d) {
            const Real factor = write * k[d];
            Real sum = factor;
            multiply_add(sum, forget, z[d]);
            z[d] = sum;
            Real* row = c + static_cast<std::ptrdiff_t>(d) * d_v;
            int e = 0;
            for (; e + vec::width <= d_v; e += vec::width) {
                vec old, value;
                old.load(row + e);
                value.load(v + e);
                old.multiply(forget);
                old.add_product(factor, value);
                old.store(row + e);
            }
            for (; e < d_v; ++e) {
                row[e] *= forget;
                multiply_add(row[e], factor, v[e]);
            }
        }
    }
};

/// One step of a scan over chunk states: the running state takes in delta, and delta becomes the state before
/// it.
///     (delta, state) <- (state, keep * state + add * delta)
struct scan_kernel {
    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void run(Real keep, Real add, Real* delta, Real* state, int count) {
        using vec = lanes<Real, Set>;
        int i = 0;
        for (; i + vec::width <= count; i += vec::width) {
            vec before, after, change;
            before.load(state + i);
            change.load(delta + i);
            after.load(state + i);
            after.multiply(keep);
            after.add_product(add, change);
            after.store(state + i);
            before.store(delta + i);
        }
        for (; i < count; ++i) {
            const Real before = state[i];
            state[i] *= keep;
            multiply_add(state[i], add, delta[i]);
            delta[i] = before;
        }
    }
};

/// out = softmax(sign * y), sign = +1 or -1. out may be y. A NaN makes all of out NaN.
struct softmax_kernel {
    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void load(lanes<Real, Set>& to, const Real* y, int count,
                                                   bool negative) {
        constexpr Real lowest = -std::numeric_limits<Real>::infinity();
        if (count >= lanes<Real, Set>::width) {
            to.load(y);
        } else {
            to.load_some(y, count, negative ? -lowest : lowest);
        }
        if (negative) {
            to.negate();
        }
    }

    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void run(const Real* y, int count, bool negative, Real* out) {
        using vec = lanes<Real, Set>;
        vec most;
        most.fill(-std::numeric_limits<Real>::infinity());
        for (int i = 0; i < count; i += vec::width) {
            vec value;
            load<Set>(value, y + i, count - i, negative);
            most.raise_to(value);
        }
        vec top, sum;
        top.fill(-most.largest());
        sum.fill(Real(0));
        for (int i = 0; i < count; i += vec::width) {
            vec value;
            load<Set>(value, y + i, count - i, negative);
            value.add(top);
            value.exponentiate();
            sum.add(value);
            if (count - i >= vec::width) {
                value.store(out + i);
            } else {
                value.store_some(out + i, count - i);
            }
        }
        const Real scale = Real(1) / sum.sum();
        int i = 0;
        for (; i + vec::width <= count; i += vec::width) {
            vec value;
            value.load(out + i);
            value.multiply(scale);
            value.store(out + i);
        }
        for (; i < count; ++i) {
            out[i] *= scale;
        }
    }
};

/// y = y * sigmoid(y), in place.
struct silu_kernel {
    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void run(Real* y, int count) {
        using vec = lanes<Real, Set>;
        for (int at = 0; at < count; at += vec::width) {
            vec value, rest;
            const bool whole = count - at >= vec::width;
            if (whole) {
                value.load(y + at);
            } else {
                value.load_some(y + at, count - at, Real(0));
            }
            rest = value;
            rest.negate();
            rest.exponentiate();
            unroll<vec::parts>([&](auto i)
                                   __attribute__((always_inline)) { value.p[i] /= (rest.p[i] + Real(1)); });
            if (whole) {
                value.store(y + at);
            } else {
                value.store_some(y + at, count - at);
            }
        }
    }
};

/// y = e to y, in place.
struct exp_kernel {
    template <isa Set, class Real>
    [[gnu::always_inline]] static inline void run(Real* y, int count) {
        using vec = lanes<Real, Set>;
        for (int i = 0; i < count; i += vec::width) {
            vec value;
            const bool whole = count - i >= vec::width;
            if (whole) {
                value.load(y + i);
            } else {
                value.load_some(y + i, count - i, Real(0));
            }
            value.exponentiate();
            if (whole) {
                value.store(y + i);
            } else {
                value.store_some(y + i, count - i);
            }
        }
    }
};

/// One row of weights against one row of x, in project_kernel's order.
template <class Real, class Weight>
Real dot(isa set, const Real* x, const Weight* w, int count, const float* bias = nullptr) {
    Real sum = Real(0);
    run_kernel<project_kernel>(set, x, std::ptrdiff_t{0}, 1, w, std::ptrdiff_t{0}, 1, count, bias, &sum,
                               std::ptrdiff_t{0});
    return sum;
}

/// log(sigmoid(x)), exact in relative terms at both ends.
inline double log_sigmoid(double x) {
    return x < 0.0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x));
}

}  // namespace kvpolicy::host_backend
