// The mass that the keys of one KV head receive from a range of queries, with the products of decoding: up to
// 16 rows (a query head at a position) go over keys that are read in place, wherever they lie. Logits of 16
// rows are held at once, so a weight is the exact softmax of its row and needs no log-sum-exp from elsewhere.
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

/// mass[t] += sum over queries of agg_g softmax(t). seen.count(i) keys concern query i; seen(i, t, logit) is
/// the logit or -inf. A row whose weights are no numbers (logits that overflow) contributes nothing, like one
/// that sees nothing. Rows are taken direct_rows at a time: load(), multiply(), then softmax() and add() of
/// each.
template <class Kernels, Storage T, class Seen>
class mass_rows {
  public:
    using real = compute_t<T>;

    mass_rows(const attention_shape& shape, group_aggregate aggregate, const mass_queries<T>& queries,
              const T* const* key, const Seen& seen, double* mass, std::byte* memory, std::int64_t capacity)
        : shape_(shape),
          queries_(queries),
          key_(key),
          seen_(seen),
          mass_(mass),
          scratch_(memory, shape.head_dim_qk, capacity),
          mean_(aggregate == group_aggregate::mean || queries.group == 1) {}

    void run() const {
        const std::int64_t end = std::int64_t{queries_.end} * queries_.group;
        for (std::int64_t row = std::int64_t{queries_.begin} * queries_.group; row < end;
             row += direct_rows) {
            const auto rows = static_cast<std::int32_t>(std::min<std::int64_t>(direct_rows, end - row));
            multiply(rows, load(row, rows));
            for (std::int32_t r = 0; r < rows; ++r) {
                const auto i = static_cast<std::int32_t>((row + r) / queries_.group);
                const auto g = static_cast<std::int32_t>((row + r) % queries_.group);
                add(r, seen_.count(i), g, softmax(r, i, seen_.count(i)));
            }
        }
    }

  private:
    static constexpr real nothing = -std::numeric_limits<real>::infinity();
    static constexpr real most = std::numeric_limits<real>::max();

    /// Queries into the scratch; returns the keys that any of them sees.
    std::int32_t load(std::int64_t row, std::int32_t rows) const {
        std::int32_t count = 0;
        for (std::int32_t r = 0; r < rows; ++r) {
            const std::int64_t i = (row + r) / queries_.group, g = (row + r) % queries_.group;
            const T* from = queries_.q + i * queries_.row_stride + g * queries_.head_stride;
            for (std::int32_t d = 0; d < shape_.head_dim_qk; ++d) {
                scratch_.q[r * shape_.head_dim_qk + d] = to_compute(from[d]);
            }
            count = std::max(count, seen_.count(static_cast<std::int32_t>(i)));
        }
        return count;
    }

    /// Products q . k of all rows with the first `count` keys.
    void multiply(std::int32_t rows, std::int32_t count) const {
        for (std::int32_t first = 0; first < count; first += block_keys) {
            key_block<T> block;
            block.count = std::min(block_keys, count - first);
            const auto padded = static_cast<std::int32_t>(rounded_up(block.count, panel_lanes));
            for (std::int32_t j = 0; j < padded; ++j) {
                block.v[j] = block.k[j] = key_[first + std::min(j, block.count - 1)];
            }
            Kernels::direct_qk(shape_, block, rows, scratch_.q,
                               scratch_.logits + std::int64_t{first} * direct_rows);
        }
    }

    /// visit(logits, first key, keys) for the blocks of the first `count` logits of row r.
    template <class Visit>
    void for_each_block(std::int32_t r, std::int32_t count, Visit&& visit) const {
        for (std::int32_t first = 0; first < count; first += block_keys) {
            visit(scratch_.logits + std::int64_t{first} * direct_rows + r * block_keys, first,
                  std::min(block_keys, count - first));
        }
    }

    /// Turns the logits of row r, of query i, into exp(logit - largest); returns what makes weights of them,
    /// or 0.
    double softmax(std::int32_t r, std::int32_t i, std::int32_t count) const {
        const real scale = static_cast<real>(shape_.scale), cap = static_cast<real>(shape_.logits_soft_cap);
        real largest = nothing;
        for_each_block(r, count, [&](real* logit, std::int32_t first, std::int32_t n) {
            for (std::int32_t j = 0; j < n; ++j) {
                real x = scale * logit[j];
                if (cap > real(0)) {
                    x = cap * tanh_of(x / cap);
                }
                x = seen_(i, first + j, x);
                logit[j] = x = x > most ? most : x;
                largest = x > largest ? x : largest;
            }
        });
        double sum = 0.0;
        if (largest != nothing) {
            for_each_block(r, count, [&](real* logit, std::int32_t, std::int32_t n) {
                real part = real(0);
                for (std::int32_t j = 0; j < n; ++j) {
                    logit[j] = exp_nonpositive(logit[j] - largest);
                    part += logit[j];
                }
                sum += static_cast<double>(part);
            });
        }
        return sum > 0.0 ? 1.0 / sum : 0.0;
    }

    /// Adds the weights of row r, which is query head g of its group: at once, or the group's largest after
    /// its last head.
    void add(std::int32_t r, std::int32_t count, std::int32_t g, double weight) const {
        const std::int32_t group = queries_.group;
        double* const mass = mass_;
        if (mean_) {
            for_each_block(r, count, [&](const real* p, std::int32_t first, std::int32_t n) {
                for (std::int32_t j = 0; weight > 0.0 && j < n; ++j) {
                    mass[first + j] += static_cast<double>(p[j]) * (weight / group);
                }
            });
            return;
        }
        for_each_block(r, count, [&](const real* p, std::int32_t first, std::int32_t n) {
            real* best = scratch_.best + first;
            for (std::int32_t j = 0; j < n; ++j) {
                const real mine =
                    weight > 0.0 ? static_cast<real>(static_cast<double>(p[j]) * weight) : real(0);
                best[j] = g == 0 || mine > best[j] ? mine : best[j];
                if (g == group - 1) {
                    mass[first + j] += static_cast<double>(best[j]);
                }
            }
        });
    }

    const attention_shape& shape_;
    const mass_queries<T>& queries_;
    const T* const* key_;
    const Seen& seen_;
    double* mass_;
    mass_scratch<T> scratch_;
    bool mean_;
};

/// Adds to mass[0 .. capacity) what the queries give; `memory` has mass_scratch(capacity).bytes.
template <Storage T, class Seen>
void add_mass(isa set, const attention_shape& shape, group_aggregate aggregate,
              const mass_queries<T>& queries, const T* const* key, const Seen& seen, double* mass,
              std::byte* memory, std::int64_t capacity) {
    with_kernels<T>(set, [&](auto kernels) {
        mass_rows<decltype(kernels), T, Seen>(shape, aggregate, queries, key, seen, mass, memory, capacity)
            .run();
    });
}

}  // namespace kvpolicy::host_backend
