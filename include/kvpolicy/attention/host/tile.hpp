// A tile of host attention: its memory, its rows, and what happens to a block of keys. kernel.hpp has the
// whole picture.
#pragma once

#include <kvpolicy/attention/host/collect.hpp>
#include <kvpolicy/attention/host/portable.hpp>
#include <kvpolicy/attention/host/types.hpp>
#include <kvpolicy/attention/softmax_state.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/expiry.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvpolicy::host_backend {

constexpr std::int64_t rounded_up(std::int64_t value, std::int64_t step) {
    return (value + step - 1) / step * step;
}

/// The memory of one tile.
template <Storage T>
struct tile_scratch {
    using real = compute_t<T>;

    real* q = nullptr;
    real* out = nullptr;
    real* scores = nullptr;
    real* keys = nullptr;
    real* values = nullptr;
    real* max = nullptr;
    double* sum = nullptr;
    real* decay = nullptr;
    std::int32_t* position = nullptr;
    T* zeros = nullptr;
    std::size_t bytes = 0;

    /// Lays the parts out from `data`, or only counts their bytes where that is null.
    tile_scratch(void* data, const attention_shape& shape, std::int64_t rows) {
        std::byte* at = data != nullptr ? detail::aligned(data) : nullptr;
        const bool packed = rows > direct_rows;
        const std::int64_t padded = rounded_up(rows, panel_rows);
        const std::int64_t columns = rounded_up(shape.head_dim_vo, panel_lanes);
        take(at, q, padded * shape.head_dim_qk);
        take(at, out, padded * columns);
        take(at, scores, std::int64_t{strip_rows} * block_keys);
        take(at, keys, packed ? std::int64_t{block_keys} * shape.head_dim_qk : 0);
        take(at, values, packed ? block_keys * columns : 0);
        take(at, max, padded);
        take(at, sum, padded);
        take(at, decay, padded);
        take(at, position, padded);
        take(at, zeros, shape.head_dim_vo);
        bytes += detail::alignment;
    }

  private:
    template <class Part>
    void take(std::byte*& at, Part*& part, std::int64_t count) {
        const std::size_t size = detail::aligned_size(static_cast<std::size_t>(count) * sizeof(Part));
        bytes += size;
        if (at != nullptr) {
            part = reinterpret_cast<Part*>(at);
            at += size;
        }
    }
};

/// One tile: rows, their state, and what happens to a block of keys.
template <class Kernels, Storage T>
class tile_pass {
  public:
    using real = compute_t<T>;

    tile_pass(const attention_shape& shape, const query_block<T>& block, std::int32_t begin, std::int32_t end,
              void* scratch)
        : shape_(shape),
          block_(block),
          begin_(begin),
          queries_(end - begin),
          rows_((end - begin) * block.group),
          padded_(static_cast<std::int32_t>(rounded_up(rows_, panel_rows))),
          columns_(static_cast<std::int32_t>(rounded_up(shape.head_dim_vo, panel_lanes))),
          packed_(rows_ > direct_rows),
          memory_(scratch, shape, rows_) {
        load_queries();
        for (std::int32_t r = 0; r < padded_; ++r) {
            memory_.position[r] = block.first + begin + std::min(r / block.group, queries_ - 1);
            memory_.max[r] = -std::numeric_limits<real>::infinity();
            memory_.sum[r] = 0.0;
        }
        std::fill_n(memory_.out, std::int64_t{padded_} * columns_, real(0));
        // T{} would do, but the storage types are trivial on purpose.
        std::fill_n(memory_.zeros, shape.head_dim_vo, static_cast<T>(0.0f));
    }

    /// Runs over rows [key_begin, key_end) of all segments put end to end. `segments(visit)` hands each
    /// key_segment to visit, in order: a cache makes them from its page table as they are needed.
    template <class Segments>
    void run(const Segments& segments, std::int64_t key_begin, std::int64_t key_end) {
        key_collector<Kernels, T, tile_pass> collector(memory_.position[0], memory_.position[rows_ - 1],
                                                       *this, packed_);
        std::int64_t start = 0;
        segments([&](const key_segment<T>& segment) {
            const std::int64_t begin = std::clamp<std::int64_t>(key_begin - start, 0, segment.count);
            const std::int64_t end = std::clamp<std::int64_t>(key_end - start, 0, segment.count);
            if (begin < end) {
                collector.take(segment, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end));
            }
            start += segment.count;
        });
        collector.finish();
    }

    /// Takes one block of keys.
    void operator()(key_block<T>& keys) {
        poisoned_ = 0;
        if (keys.masked && queries_ > 1) {
            set_poison_aside(keys);
        }
        if (!packed_) {
            const strip_state<real> state{memory_.position, memory_.max, memory_.sum, memory_.decay};
            Kernels::direct_qk(shape_, keys, rows_, memory_.q, memory_.scores);
            Kernels::softmax(shape_, keys.masked ? &keys : nullptr, rows_, keys.count, state, memory_.scores);
            Kernels::direct_pv(shape_, keys, rows_, memory_.scores, memory_.decay, memory_.out, columns_);
            if (poisoned_ != 0) {
                add_poison(keys, 0, rows_, keys.count);
            }
            return;
        }
        Kernels::pack_keys(keys.k, keys.count, shape_.head_dim_qk, memory_.keys);
        Kernels::pack_values(keys.v, keys.count, shape_.head_dim_vo, memory_.values);
        // Survivors lie anywhere: the processor does not foresee where, so the next block is fetched in
        // between.
        const std::int32_t strips = (padded_ + strip_rows - 1) / strip_rows;
        for (std::int32_t strip = 0; strip < strips; ++strip) {
            if (keys.next != nullptr) {
                fetch(*keys.next, strip, strips);
            }
            take_strip(keys, strip * strip_rows);
        }
    }

    /// Writes the outputs and log-sum-exps of the tile.
    void store() const {
        for (std::int32_t r = 0; r < rows_; ++r) {
            const std::int64_t i = begin_ + r / block_.group;
            const std::int64_t g = r % block_.group;
            T* out = block_.out + i * block_.out_row_stride + g * block_.out_head_stride;
            const real* from = memory_.out + std::int64_t{r} * columns_;
            const real inverse = inverse_sum(r);
            for (std::int32_t c = 0; c < shape_.head_dim_vo; ++c) {
                out[c] = static_cast<T>(from[c] * inverse);
            }
            if (block_.lse != nullptr) {
                block_.lse[i * block_.lse_row_stride + g * block_.lse_head_stride] = log_sum(r);
            }
        }
    }

    /// Writes a partial result: out [rows][Dv] and lse [rows], row = (query - begin) * group + head.
    void store_partial(real* out, float* lse_out) const {
        for (std::int32_t r = 0; r < rows_; ++r, out += shape_.head_dim_vo) {
            const real* from = memory_.out + std::int64_t{r} * columns_;
            const real inverse = inverse_sum(r);
            for (std::int32_t c = 0; c < shape_.head_dim_vo; ++c) {
                out[c] = from[c] * inverse;
            }
            lse_out[r] = log_sum(r);
        }
    }

    /// The log-sum-exp of one row of the tile, and its largest logit; -inf where it saw nothing.
    [[nodiscard]] float log_sum(std::int32_t r) const {
        return static_cast<float>(
            lse_of(softmax_state<double>{static_cast<double>(memory_.max[r]), memory_.sum[r]}));
    }
    [[nodiscard]] float largest(std::int32_t r) const { return static_cast<float>(memory_.max[r]); }

  private:
    void load_queries() {
        for (std::int32_t r = 0; r < padded_; ++r) {
            const std::int64_t i = begin_ + r / block_.group;
            const T* from = block_.q + i * block_.row_stride + (r % block_.group) * block_.head_stride;
            // Packed: panels of [Dk][6]. In place: rows.
            const std::int64_t step = packed_ ? panel_rows : 1;
            real* to = packed_ ? memory_.q + std::int64_t{r / panel_rows} * panel_rows * shape_.head_dim_qk +
                                     r % panel_rows
                               : memory_.q + std::int64_t{r} * shape_.head_dim_qk;
            for (std::int32_t d = 0; d < shape_.head_dim_qk; ++d) {
                to[d * step] = r < rows_ ? to_compute(from[d]) : real(0);
            }
        }
    }

    /// Fetches part `part` of `parts` of a block's keys and values.
    void fetch(const key_block<T>& keys, std::int32_t part, std::int32_t parts) const {
        // g++ takes a function that only fetches for one without effect, and drops calls of it.
        __asm__ volatile("");
        constexpr std::int32_t line = 64 / sizeof(T);
        for (std::int32_t j = keys.count * part / parts; j < keys.count * (part + 1) / parts; ++j) {
            for (std::int32_t c = 0; c < shape_.head_dim_qk; c += line) {
                __builtin_prefetch(keys.k[j] + c, 0, 2);
            }
            for (std::int32_t c = 0; c < shape_.head_dim_vo; c += line) {
                __builtin_prefetch(keys.v[j] + c, 0, 2);
            }
        }
    }

    void take_strip(const key_block<T>& keys, std::int32_t row) {
        const std::int32_t rows = std::min(strip_rows, padded_ - row);
        const strip_extent extent = extent_of(keys, memory_.position[row], memory_.position[row + rows - 1]);
        if (extent.count == 0) {
            return;
        }
        const strip_state<real> state{memory_.position + row, memory_.max + row, memory_.sum + row,
                                      memory_.decay + row};
        const std::int32_t panels = rows / panel_rows;
        real* out = memory_.out + std::int64_t{row} * columns_;
        Kernels::multiply_qk(memory_.q + std::int64_t{row} * shape_.head_dim_qk, panels, shape_.head_dim_qk,
                             memory_.keys, extent.count, memory_.scores);
        Kernels::softmax(shape_, extent.all ? nullptr : &keys, rows, extent.count, state, memory_.scores);
        Kernels::multiply_pv(memory_.scores, panels, memory_.values, extent.count, state.decay, out,
                             columns_);
        if (poisoned_ != 0) {
            add_poison(keys, row, rows, extent.count);
        }
    }

    static bool finite(const T* row, std::int32_t dim) {
        bool all = true;
        for (std::int32_t c = 0; c < dim; ++c) {
            if constexpr (std::is_same_v<T, bf16>) {
                all &= (row[c].bits & 0x7f80u) != 0x7f80u;
            } else if constexpr (std::is_same_v<T, fp16>) {
                all &= (row[c].bits & 0x7c00u) != 0x7c00u;
            } else {
                all &= std::abs(row[c]) <= std::numeric_limits<T>::max();
            }
        }
        return all;
    }

    /// In a masked block a weight of 0 may meet a value that is NaN or infinite for good reason: its row
    /// belongs to somebody else. Such values leave the products and reach only the rows that see them.
    void set_poison_aside(key_block<T>& keys) {
        for (std::int32_t j = 0; j < keys.count; ++j) {
            if (finite(keys.v[j], shape_.head_dim_vo)) {
                continue;
            }
            poison_[poisoned_] = keys.v[j];
            poison_key_[poisoned_++] = j;
            keys.v[j] = memory_.zeros;
        }
    }

    void add_poison(const key_block<T>& keys, std::int32_t row, std::int32_t rows, std::int32_t count) {
        for (std::int32_t n = 0; n < poisoned_; ++n) {
            const std::int32_t j = poison_key_[n];
            if (j >= count) {
                continue;
            }
            for (std::int32_t r = 0; r < rows; ++r) {
                if (!visible(memory_.position[row + r], keys.begins[j], keys.expires[j])) {
                    continue;
                }
                real* out = memory_.out + std::int64_t{row + r} * columns_;
                const real weight = memory_.scores[r * block_keys + j];
                for (std::int32_t c = 0; c < shape_.head_dim_vo; ++c) {
                    out[c] += weight * to_compute(poison_[n][c]);
                }
            }
        }
    }

    real inverse_sum(std::int32_t r) const {
        return memory_.sum[r] == 0.0 ? real(0) : static_cast<real>(1.0 / memory_.sum[r]);
    }
    attention_shape shape_;
    const query_block<T>& block_;
    std::int32_t begin_;
    std::int32_t queries_;
    std::int32_t rows_;
    std::int32_t padded_;
    std::int32_t columns_;
    bool packed_;
    tile_scratch<T> memory_;
    const T* poison_[block_keys];
    std::int32_t poison_key_[block_keys];
    std::int32_t poisoned_ = 0;
};

}  // namespace kvpolicy::host_backend
