// The mass that the keys of one KV head receive from a range of queries, with the products of decoding: up to 16 rows (a
// query head at a position) go over keys that are read in place, wherever they lie. Logits of 16 rows are held at once, so a
// weight is the exact softmax of its row and needs no log-sum-exp from elsewhere.
#pragma once

#include <kvpolicy/attention/host/kernel.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvpolicy::host_backend {

/// The queries of a mass pass: query i, head g at q + i * row_stride + g * head_stride.
template <Storage T>
struct mass_queries {
    const T* q = nullptr;
    std::int64_t row_stride = 0;
    std::int64_t head_stride = 0;
    std::int32_t begin = 0;
    std::int32_t end = 0;
    std::int32_t group = 1;
};

/// All keys are seen by the first query, except that each query has one more than the one before it.
struct sees_prefix {
    std::int32_t before;  // keys that query 0 sees beside its own
    [[nodiscard]] std::int32_t count(std::int32_t i) const { return before + i + 1; }
    template <class Real>
    Real operator()(std::int32_t, std::int32_t, Real logit) const {
        return logit;
    }
};

/// Memory of a pass over at most `keys` keys.
template <Storage T>
struct mass_scratch {
    using real = compute_t<T>;
    real* q = nullptr;       // [16, Dk]
    real* logits = nullptr;  // [blocks of 64 keys][16][64]
    real* best = nullptr;    // [keys], the largest weight of a query's heads
    std::size_t bytes = 0;

    mass_scratch(void* data, std::int32_t dim, std::int64_t keys) {
        detail::arena memory(data);
        const std::int64_t padded = rounded_up(keys, block_keys);
        q = memory.take<real>(static_cast<std::size_t>(direct_rows) * static_cast<std::size_t>(dim));
        logits = memory.take<real>(static_cast<std::size_t>(padded * direct_rows));
        best = memory.take<real>(static_cast<std::size_t>(padded));
        bytes = memory.bytes();
    }
};

/// mass[t] += sum over queries of agg_g softmax(t). seen.count(i) keys concern query i; seen(i, t, logit) is the logit or
/// -inf. A row whose weights are no numbers (logits that overflow) contributes nothing, like one that sees nothing.
template <class Kernels, Storage T, class Seen>
void add_mass_rows(const attention_shape& shape, group_aggregate aggregate, const mass_queries<T>& queries,
                   const T* const* key, const Seen& seen, double* mass, std::byte* memory,
                   std::int64_t capacity) {
    using real = compute_t<T>;
    constexpr real nothing = -std::numeric_limits<real>::infinity();
    constexpr real most = std::numeric_limits<real>::max();
    const mass_scratch<T> scratch(memory, shape.head_dim_qk, capacity);
    const real scale = static_cast<real>(shape.scale), cap = static_cast<real>(shape.logits_soft_cap);
    const std::int32_t group = queries.group;
    const std::int64_t end = std::int64_t{queries.end} * group;
    for (std::int64_t row = std::int64_t{queries.begin} * group; row < end; row += direct_rows) {
        const auto rows = static_cast<std::int32_t>(std::min<std::int64_t>(direct_rows, end - row));
        std::int32_t count = 0;
        for (std::int32_t r = 0; r < rows; ++r) {
            const std::int64_t i = (row + r) / group, g = (row + r) % group;
            const T* from = queries.q + i * queries.row_stride + g * queries.head_stride;
            for (std::int32_t d = 0; d < shape.head_dim_qk; ++d) {
                scratch.q[r * shape.head_dim_qk + d] = to_compute(from[d]);
            }
            count = std::max(count, seen.count(static_cast<std::int32_t>(i)));
        }
        for (std::int32_t first = 0; first < count; first += block_keys) {
            key_block<T> block;
            block.count = std::min(block_keys, count - first);
            const auto padded = static_cast<std::int32_t>(rounded_up(block.count, panel_lanes));
            for (std::int32_t j = 0; j < padded; ++j) {
                block.v[j] = block.k[j] = key[first + std::min(j, block.count - 1)];
            }
            Kernels::direct_qk(shape, block, rows, scratch.q,
                               scratch.logits + std::int64_t{first} * direct_rows);
        }
        for (std::int32_t r = 0; r < rows; ++r) {
            const auto i = static_cast<std::int32_t>((row + r) / group);
            const auto g = static_cast<std::int32_t>((row + r) % group);
            const std::int32_t mine = seen.count(i);
            const auto blocks_of = [&](auto&& visit) {
                for (std::int32_t first = 0; first < mine; first += block_keys) {
                    visit(scratch.logits + std::int64_t{first} * direct_rows + r * block_keys, first,
                          std::min(block_keys, mine - first));
                }
            };
            real largest = nothing;
            blocks_of([&](real* logit, std::int32_t first, std::int32_t n) {
                for (std::int32_t j = 0; j < n; ++j) {
                    real x = scale * logit[j];
                    if (cap > real(0)) {
                        x = cap * tanh_of(x / cap);
                    }
                    x = seen(i, first + j, x);
                    logit[j] = x = x > most ? most : x;
                    largest = x > largest ? x : largest;
                }
            });
            double sum = 0.0;
            if (largest != nothing) {
                blocks_of([&](real* logit, std::int32_t, std::int32_t n) {
                    real part = real(0);
                    for (std::int32_t j = 0; j < n; ++j) {
                        logit[j] = exp_nonpositive(logit[j] - largest);
                        part += logit[j];
                    }
                    sum += static_cast<double>(part);
                });
            }
            const double weight = sum > 0.0 ? 1.0 / sum : 0.0;
            if (aggregate == group_aggregate::mean || group == 1) {
                blocks_of([&](const real* p, std::int32_t first, std::int32_t n) {
                    for (std::int32_t j = 0; weight > 0.0 && j < n; ++j) {
                        mass[first + j] += static_cast<double>(p[j]) * (weight / group);
                    }
                });
                continue;
            }
            blocks_of([&](const real* p, std::int32_t first, std::int32_t n) {
                real* best = scratch.best + first;
                for (std::int32_t j = 0; j < n; ++j) {
                    const real mine_now =
                        weight > 0.0 ? static_cast<real>(static_cast<double>(p[j]) * weight) : real(0);
                    best[j] = g == 0 || mine_now > best[j] ? mine_now : best[j];
                    if (g == group - 1) {
                        mass[first + j] += static_cast<double>(best[j]);
                    }
                }
            });
        }
    }
}

/// Adds to mass[0 .. capacity) what the queries give; `memory` has mass_scratch(capacity).bytes.
template <Storage T, class Seen>
void add_mass(isa set, const attention_shape& shape, group_aggregate aggregate,
              const mass_queries<T>& queries, const T* const* key, const Seen& seen, double* mass,
              std::byte* memory, std::int64_t capacity) {
    with_kernels<T>(set, [&](auto kernels) {
        add_mass_rows<decltype(kernels)>(shape, aggregate, queries, key, seen, mass, memory, capacity);
    });
}

}  // namespace kvpolicy::host_backend
