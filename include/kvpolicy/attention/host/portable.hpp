// The passes of host attention in plain C++ loops: for processors without AVX2, for double, and as the oracle
// of the vectorized bodies. Loops have constant trip counts where it matters, so that compilers vectorize
// them.
#pragma once

#include <kvpolicy/attention/host/collect.hpp>
#include <kvpolicy/attention/host/math.hpp>
#include <kvpolicy/attention/host/types.hpp>
#include <kvpolicy/core/unroll.hpp>

#include <cstdint>
#include <limits>

namespace kvpolicy::host_backend {

template <Storage T>
constexpr compute_t<T> to_compute(T value) {
    return static_cast<compute_t<T>>(value);
}

/// A set of bodies: what kernel.hpp calls for one storage type. Layouts, with C = compute_t<T>:
///
///   query panels  [rows / 6][Dk][6]         key panels    [keys / 16][Dk][16]
///   scores        [rows][block_keys]        value panels  [Dv / 16][block_keys][16]
///   output        [rows][stride], stride = Dv up to a multiple of 16
template <Storage T>
struct portable_kernels {
    using real = compute_t<T>;

    static seen_rows scan(const expiry_t* expiry, const std::int32_t* position, std::int64_t first,
                          std::int32_t count, std::int32_t first_query, std::int32_t last_query) {
        return scan_rows(expiry, position, first, count, first_query, last_query);
    }

    /// Key panels of `count` rows; the lanes that fill up the last panel may hold anything.
    static void pack_keys(const T* const* k, std::int32_t count, std::int32_t dim, real* panel) {
        for (std::int32_t j = 0; j < count; j += panel_lanes, panel += std::int64_t{dim} * panel_lanes) {
            for (std::int32_t lane = 0; lane < panel_lanes; ++lane) {
                const T* row = j + lane < count ? k[j + lane] : nullptr;
                for (std::int32_t d = 0; d < dim; ++d) {
                    panel[d * panel_lanes + lane] = row != nullptr ? to_compute(row[d]) : real(0);
                }
            }
        }
    }

    /// Value panels of `count` rows; the columns that fill up the last panel become 0.
    static void pack_values(const T* const* v, std::int32_t count, std::int32_t dim, real* panel) {
        for (std::int32_t c = 0; c < dim; c += panel_lanes, panel += block_keys * panel_lanes) {
            const std::int32_t width = dim - c < panel_lanes ? dim - c : panel_lanes;
            for (std::int32_t j = 0; j < count; ++j) {
                for (std::int32_t lane = 0; lane < panel_lanes; ++lane) {
                    panel[j * panel_lanes + lane] = lane < width ? to_compute(v[j][c + lane]) : real(0);
                }
            }
        }
    }

    /// scores[6 * panels][0..count) = queries . keys
    static void multiply_qk(const real* q, std::int32_t panels, std::int32_t dim, const real* k,
                            std::int32_t count, real* scores) {
        for (std::int32_t j = 0; j < count; j += panel_lanes, k += std::int64_t{dim} * panel_lanes) {
            for (std::int32_t p = 0; p < panels; ++p) {
                for (std::int32_t part = 0; part < panel_lanes; part += lanes) {
                    real sum[panel_rows][lanes] = {};
                    add_products(sum, q + std::int64_t{p} * dim * panel_rows, panel_rows, 1, k + part, dim);
                    real* to = scores + p * panel_rows * block_keys + j + part;
                    for (std::int32_t r = 0; r < panel_rows; ++r) {
                        for (std::int32_t lane = 0; lane < lanes; ++lane) {
                            to[r * block_keys + lane] = sum[r][lane];
                        }
                    }
                }
            }
        }
    }

    /// out = decay * out + weights[6 * panels][0..count) . values, over whole panels of columns. The block's
    /// own sum starts at 0, so that rounding grows with the block and with the number of blocks, not with the
    /// number of keys.
    static void multiply_pv(const real* weights, std::int32_t panels, const real* v, std::int32_t count,
                            const real* decay, real* out, std::int32_t stride) {
        for (std::int32_t c = 0; c < stride; c += lanes) {
            const real* values =
                v + std::int64_t{c / panel_lanes} * block_keys * panel_lanes + c % panel_lanes;
            for (std::int32_t p = 0; p < panels; ++p) {
                real sum[panel_rows][lanes] = {};
                add_products(sum, weights + p * panel_rows * block_keys, 1, block_keys, values, count);
                for (std::int32_t r = 0; r < panel_rows; ++r) {
                    real* target = out + std::int64_t{p * panel_rows + r} * stride + c;
                    const real factor = decay[p * panel_rows + r];
                    for (std::int32_t lane = 0; lane < lanes; ++lane) {
                        target[lane] = factor * target[lane] + sum[r][lane];
                    }
                }
            }
        }
    }

    /// Turns products into logits and weights, in place, and moves the running maximum and sum. `mask` is
    /// null where every row sees every key.
    static void softmax(const attention_shape& shape, const key_block<T>* mask, std::int32_t rows,
                        std::int32_t count, const strip_state<real>& state, real* scores) {
        constexpr real nothing = -std::numeric_limits<real>::infinity();
        const real scale = static_cast<real>(shape.scale);
        const real cap = static_cast<real>(shape.logits_soft_cap);
        for (std::int32_t r = 0; r < rows; ++r, scores += block_keys) {
            const std::int32_t p = state.position[r];
            real largest = state.max[r];
            for (std::int32_t j = 0; j < count; ++j) {
                real x = scale * scores[j];
                if (cap > real(0)) {
                    x = cap * tanh_of(x / cap);
                }
                if (mask != nullptr) {
                    if (p >= mask->bias_start[j]) {
                        x += static_cast<real>(mask->bias[j]);
                    }
                    // A choice, not an addition: the product may be NaN where it is hidden.
                    x = mask->begins[j] <= p && p < mask->expires[j] ? x : nothing;
                }
                scores[j] = x;
                largest = x > largest ? x : largest;
            }
            // With nothing seen yet every exponent is to be -inf, not -inf - -inf.
            const real base = largest == nothing ? real(0) : largest;
            real sum = real(0);
            for (std::int32_t j = 0; j < count; ++j) {
                scores[j] = exp_nonpositive(scores[j] - base);
                sum += scores[j];
            }
            const real decay = exp_nonpositive(state.max[r] - base);
            state.sum[r] = state.sum[r] * static_cast<double>(decay) + static_cast<double>(sum);
            state.max[r] = largest;
            state.decay[r] = decay;
        }
    }

    /// scores[rows][0..count) = q[rows][Dk] . keys, read in place.
    static void direct_qk(const attention_shape& shape, const key_block<T>& keys, std::int32_t rows,
                          const real* q, real* scores) {
        const std::int32_t dim = shape.head_dim_qk;
        for (std::int32_t j = 0; j < keys.count; ++j) {
            for (std::int32_t r = 0; r < rows; ++r) {
                real sum[8] = {};
                for (std::int32_t d = 0; d < dim; d += 8) {
                    for (std::int32_t lane = 0; lane < 8; ++lane) {
                        sum[lane] += q[std::int64_t{r} * dim + d + lane] * to_compute(keys.k[j][d + lane]);
                    }
                }
                scores[r * block_keys + j] =
                    ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
            }
        }
    }

    /// out = decay * out + weights[rows][0..count) . values, read in place.
    static void direct_pv(const attention_shape& shape, const key_block<T>& keys, std::int32_t rows,
                          const real* weights, const real* decay, real* out, std::int32_t stride) {
        for (std::int32_t r = 0; r < rows; ++r) {
            for (std::int32_t c = 0; c < shape.head_dim_vo; c += 8) {
                real sum[8] = {};
                for (std::int32_t j = 0; j < keys.count; ++j) {
                    for (std::int32_t lane = 0; lane < 8; ++lane) {
                        sum[lane] += weights[r * block_keys + j] * to_compute(keys.v[j][c + lane]);
                    }
                }
                real* target = out + std::int64_t{r} * stride + c;
                for (std::int32_t lane = 0; lane < 8; ++lane) {
                    target[lane] = decay[r] * target[lane] + sum[lane];
                }
            }
        }
    }

  private:
    static constexpr std::int32_t lanes = 4;

    /// sum[r][lane] += x[i * step + r * row_step] * y[i * 16 + lane] for i in [0, count)
    static void add_products(real (&sum)[panel_rows][lanes], const real* x, std::int32_t step,
                             std::int32_t row_step, const real* y, std::int32_t count) {
        for (std::int32_t i = 0; i < count; ++i, x += step, y += panel_lanes) {
            KVPOLICY_UNROLL
            for (std::int64_t r = 0; r < panel_rows; ++r) {
                KVPOLICY_UNROLL
                for (std::int32_t lane = 0; lane < lanes; ++lane) {
                    sum[r][lane] += x[r * row_step] * y[lane];
                }
            }
        }
    }
};

}  // namespace kvpolicy::host_backend
