// A tile of the attention's backward pass: a range of queries against the live keys, collected in blocks as
// in the forward pass (collect.hpp) and multiplied by the same register-blocked products.
//
// A block of up to 64 keys meets the tile's rows in strips of 48: q k and d_out v, weights and their
// gradients point by point, then d q += dx k, and with the weights transposed d k += dx^T q and d v += P^T
// d_out.
#pragma once

#include <kvpolicy/attention/host/backward_weights.hpp>
#include <kvpolicy/attention/host/collect.hpp>
#include <kvpolicy/attention/host/portable.hpp>
#include <kvpolicy/attention/host/tile.hpp>
#include <kvpolicy/attention/host/types.hpp>
#include <kvpolicy/attention/large_lse.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/lanes.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kvpolicy::host_backend {

/// What the backward pass reads and writes of one KV head's queries, beside query_block's q, group, count and
/// first.
template <Storage T>
struct gradient_block {
    const T* out = nullptr;  // row i, head g at out + i * row_stride + g * head_stride
    std::int64_t out_row_stride = 0, out_head_stride = 0;
    const T* d_out = nullptr;
    std::int64_t d_out_row_stride = 0, d_out_head_stride = 0;
    const float* lse = nullptr;  // lse[i + g * head_stride]
    std::int64_t lse_head_stride = 0;
    T* d_q = nullptr;
    std::int64_t d_q_row_stride = 0, d_q_head_stride = 0;
};

/// Sums of one KV head's keys: d k [rows][columns_k], d v [rows][columns_v], d log_bias [rows].
template <class Real>
struct key_sums {
    Real *k, *v, *bias;
};

/// One tile of queries.
template <class Kernels, Storage T>
class backward_tile {
  public:
    using real = compute_t<T>;

    static std::size_t scratch_bytes(const attention_shape& shape, std::int32_t group, std::int32_t queries) {
        detail::arena counter(nullptr);
        backward_tile(shape, queries * group).lay_out(counter);
        return counter.bytes();
    }

    backward_tile(isa set, const attention_shape& shape, const query_block<T>& block,
                  const gradient_block<T>& gradients, std::int32_t begin, std::int32_t end,
                  const key_segment<T>& keys, const key_sums<real>& sums, void* scratch)
        : backward_tile(shape, (end - begin) * block.group) {
        set_ = set;
        block_ = &block;
        gradients_ = &gradients;
        begin_ = begin;
        keys_ = &keys;
        sums_ = sums;
        detail::arena from(scratch);
        lay_out(from);
        load(end - begin);
    }

    void run() {
        if (any_large_) {
            totals_ = true;
            key_collector<Kernels, T, backward_tile> again(position_[0], position_[rows_ - 1], *this);
            again.take(*keys_, 0, keys_->count);
            again.finish();
            totals_ = false;
            use_totals();
        }
        key_collector<Kernels, T, backward_tile> collector(position_[0], position_[rows_ - 1], *this);
        collector.take(*keys_, 0, keys_->count);
        collector.finish();
        for (std::int32_t r = 0; r < rows_; ++r) {
            const std::int64_t i = begin_ + r / block_->group, g = r % block_->group;
            T* to = gradients_->d_q + i * gradients_->d_q_row_stride + g * gradients_->d_q_head_stride;
            const real* from = d_q_ + std::int64_t{r} * columns_k_;
            for (std::int32_t c = 0; c < shape_.head_dim_qk; ++c) {
                to[c] = static_cast<T>(from[c]);
            }
        }
    }

    /// Takes one block of keys.
    void operator()(key_block<T>& keys) {
        if (totals_) {
            add_to_totals(keys);
            return;
        }
        for (std::int32_t j = keys.count; j % panel_lanes != 0; ++j) {
            keys.v[j] = keys.v[keys.count - 1];
        }
        Kernels::pack_keys(keys.k, keys.count, shape_.head_dim_qk, k_);
        Kernels::pack_keys(keys.v, keys.count, shape_.head_dim_vo, v_);
        Kernels::pack_values(keys.k, keys.count, shape_.head_dim_qk, k_values_);
        constexpr std::int32_t always = std::numeric_limits<std::int32_t>::min();
        for (std::int32_t j = 0; j < block_keys; ++j) {
            const bool plain = !keys.masked, real_key = j < keys.count;
            begins_[j] = plain ? always : keys.begins[j];
            expires_[j] = !real_key ? always : plain ? never : keys.expires[j];
            bias_start_[j] = plain || !real_key ? never : keys.bias_start[j];
            log_bias_[j] = plain || !real_key ? real(0) : static_cast<real>(keys.bias[j]);
            bias_[j] = real(0);
        }
        std::fill_n(d_k_, std::int64_t{key_rows} * columns_k_, real(0));
        std::fill_n(d_v_, std::int64_t{key_rows} * columns_v_, real(0));
        for (std::int32_t row = 0; row < rows_; row += backward_strip) {
            take_strip(keys, row);
        }
        for (std::int32_t j = 0; j < keys.count; ++j) {
            const std::int64_t row = (keys.k[j] - keys_->k) / keys_->k_stride;
            add(d_k_ + std::int64_t{j} * columns_k_, sums_.k + row * columns_k_, columns_k_);
            add(d_v_ + std::int64_t{j} * columns_v_, sums_.v + row * columns_v_, columns_v_);
            sums_.bias[row] += bias_[j];
        }
    }

  private:
    static constexpr std::int32_t key_rows = (block_keys + panel_rows - 1) / panel_rows * panel_rows;

    backward_tile(const attention_shape& shape, std::int32_t rows)
        : shape_(shape),
          rows_(rows),
          padded_(static_cast<std::int32_t>(rounded_up(rows, panel_rows))),
          columns_k_(static_cast<std::int32_t>(rounded_up(shape.head_dim_qk, panel_lanes))),
          columns_v_(static_cast<std::int32_t>(rounded_up(shape.head_dim_vo, panel_lanes))) {}

    void lay_out(detail::arena& from) {
        const auto take = [&](std::int64_t count) {
            return from.take<real>(static_cast<std::size_t>(count));
        };
        const std::int64_t strips = (rows_ + backward_strip - 1) / backward_strip;
        q_ = take(std::int64_t{padded_} * shape_.head_dim_qk);
        d_out_ = take(std::int64_t{padded_} * shape_.head_dim_vo);
        q_values_ = take(strips * block_keys * columns_k_);
        d_out_values_ = take(strips * block_keys * columns_v_);
        d_q_ = take(std::int64_t{padded_} * columns_k_);
        lse_ = take(padded_);
        factor_ = take(padded_);
        largest_ = take(padded_);
        decay_ = take(padded_);
        sum_ = from.take<double>(static_cast<std::size_t>(padded_));
        delta_ = take(padded_);
        k_ = take(std::int64_t{block_keys} * shape_.head_dim_qk);
        v_ = take(std::int64_t{block_keys} * shape_.head_dim_vo);
        k_values_ = take(std::int64_t{block_keys} * columns_k_);
        s_ = take(std::int64_t{backward_strip} * block_keys);
        g_ = take(std::int64_t{backward_strip} * block_keys);
        p_t_ = take(std::int64_t{key_rows} * block_keys);
        x_t_ = take(std::int64_t{key_rows} * block_keys);
        d_k_ = take(std::int64_t{key_rows} * columns_k_);
        d_v_ = take(std::int64_t{key_rows} * columns_v_);
        ones_ = take(std::max(key_rows, backward_strip));
        position_ = from.take<std::int32_t>(static_cast<std::size_t>(padded_));
    }

    void load(std::int32_t queries) {
        const query_block<T>& block = *block_;
        std::fill_n(d_q_, std::int64_t{padded_} * columns_k_, real(0));
        std::fill_n(ones_, std::max(key_rows, backward_strip), real(1));
        const T *q_rows[block_keys], *d_rows[block_keys];
        for (std::int32_t r = 0; r < padded_; ++r) {
            const std::int64_t i = begin_ + std::min(r, rows_ - 1) / block.group,
                               g = std::min(r, rows_ - 1) % block.group;
            const T* q = block.q + i * block.row_stride + g * block.head_stride;
            const T* d_out =
                gradients_->d_out + i * gradients_->d_out_row_stride + g * gradients_->d_out_head_stride;
            const T* out = gradients_->out + i * gradients_->out_row_stride + g * gradients_->out_head_stride;
            position_[r] = block.first + begin_ + std::min(r / block.group, queries - 1);
            const float lse = gradients_->lse[i + g * gradients_->lse_head_stride];
            // exp(x - infinity) is 0: rows that see nothing, and those that only fill up a panel.
            const bool counts = r < rows_ && lse > -std::numeric_limits<float>::infinity();
            lse_[r] = counts ? static_cast<real>(lse) : std::numeric_limits<real>::infinity();
            factor_[r] = real(1);
            largest_[r] = -std::numeric_limits<real>::infinity();
            sum_[r] = 0.0;
            any_large_ = any_large_ || (counts && detail::is_large_lse(lse));
            double delta = 0.0;
            for (std::int32_t c = 0; counts && c < shape_.head_dim_vo; ++c) {
                delta += static_cast<double>(to_compute(out[c])) * static_cast<double>(to_compute(d_out[c]));
            }
            delta_[r] = static_cast<real>(delta);
            panel_row(q, shape_.head_dim_qk, r, q_);
            panel_row(d_out, shape_.head_dim_vo, r, d_out_);
            const std::int32_t in_strip = r % backward_strip;
            q_rows[in_strip] = q;
            d_rows[in_strip] = d_out;
            if (r < rows_ && (in_strip + 1 == backward_strip || r + 1 == rows_)) {
                const std::int64_t strip = r / backward_strip;
                Kernels::pack_values(q_rows, in_strip + 1, shape_.head_dim_qk,
                                     q_values_ + strip * block_keys * columns_k_);
                Kernels::pack_values(d_rows, in_strip + 1, shape_.head_dim_vo,
                                     d_out_values_ + strip * block_keys * columns_v_);
            }
        }
    }

    /// The largest logits and the sums of weights of all rows take in a block of keys.
    void add_to_totals(const key_block<T>& keys) {
        Kernels::pack_keys(keys.k, keys.count, shape_.head_dim_qk, k_);
        for (std::int32_t row = 0; row < padded_; row += strip_rows) {
            const std::int32_t rows = std::min(strip_rows, padded_ - row);
            const strip_extent extent = extent_of(keys, position_[row], position_[row + rows - 1]);
            if (extent.count == 0) {
                continue;
            }
            Kernels::multiply_qk(q_ + std::int64_t{row} * shape_.head_dim_qk, rows / panel_rows,
                                 shape_.head_dim_qk, k_, extent.count, s_);
            Kernels::softmax(shape_, extent.all ? nullptr : &keys, rows, extent.count,
                             {position_ + row, largest_ + row, sum_ + row, decay_ + row}, s_);
        }
    }
    /// Rows of a large lse weigh by their largest logit and a factor. The saved lse may be that of these keys
    /// and others; where it is no more than its rounding off theirs, it is theirs.
    void use_totals() {
        for (std::int32_t r = 0; r < rows_; ++r) {
            const auto lse = static_cast<double>(lse_[r]);
            if (!detail::is_large_lse(static_cast<float>(lse)) || !(sum_[r] > 0.0)) {
                continue;
            }
            const double off = static_cast<double>(largest_[r]) + std::log(sum_[r]) - lse;
            const double rest = std::abs(off) <= 0x1p-21 * std::abs(lse) ? 1.0 : std::exp(off);
            lse_[r] = largest_[r];
            factor_[r] = static_cast<real>(rest / sum_[r]);
        }
    }

    static void panel_row(const T* from, std::int32_t dim, std::int32_t r, real* panels) {
        real* to = panels + std::int64_t{r / panel_rows} * panel_rows * dim + r % panel_rows;
        for (std::int32_t c = 0; c < dim; ++c) {
            to[std::int64_t{c} * panel_rows] = to_compute(from[c]);
        }
    }

    static void add(const real* from, real* to, std::int32_t count) {
        for (std::int32_t c = 0; c < count; ++c) {
            to[c] += from[c];
        }
    }

    void take_strip(const key_block<T>& keys, std::int32_t row) {
        const std::int32_t rows = std::min(backward_strip, rows_ - row);
        const std::int32_t padded = std::min(backward_strip, padded_ - row);
        const std::int32_t count = extent_of(keys, position_[row], position_[row + rows - 1]).count;
        if (count == 0) {
            return;
        }
        const std::int32_t panels = padded / panel_rows;
        Kernels::multiply_qk(q_ + std::int64_t{row} * shape_.head_dim_qk, panels, shape_.head_dim_qk, k_,
                             count, s_);
        Kernels::multiply_qk(d_out_ + std::int64_t{row} * shape_.head_dim_vo, panels, shape_.head_dim_vo, v_,
                             count, g_);
        const backward_weights::arguments<real> arguments{
            shape_,     begins_,       expires_,     log_bias_, bias_start_, position_ + row,
            lse_ + row, factor_ + row, delta_ + row, padded,    count,       s_,
            g_,         p_t_,          x_t_,         bias_};
        run_kernel<backward_weights>(set_, &arguments);
        Kernels::multiply_pv(s_, panels, k_values_, count, ones_, d_q_ + std::int64_t{row} * columns_k_,
                             columns_k_);
        const std::int32_t key_panels = (count + panel_rows - 1) / panel_rows;
        // Whole panels are multiplied: keys of this block that no row of the strip sees still hold the last
        // block's weights.
        const std::int64_t weighed = rounded_up(count, panel_lanes);
        const std::int64_t rest = std::max<std::int64_t>(0, std::int64_t{key_panels} * panel_rows - weighed);
        std::fill_n(x_t_ + weighed * block_keys, rest * block_keys, real(0));
        std::fill_n(p_t_ + weighed * block_keys, rest * block_keys, real(0));
        const std::int64_t strip = row / backward_strip;
        Kernels::multiply_pv(x_t_, key_panels, q_values_ + strip * block_keys * columns_k_, rows, ones_, d_k_,
                             columns_k_);
        Kernels::multiply_pv(p_t_, key_panels, d_out_values_ + strip * block_keys * columns_v_, rows, ones_,
                             d_v_, columns_v_);
    }

    isa set_ = isa::portable;
    attention_shape shape_;
    const query_block<T>* block_ = nullptr;
    const gradient_block<T>* gradients_ = nullptr;
    const key_segment<T>* keys_ = nullptr;
    std::int32_t begin_ = 0;
    std::int32_t rows_, padded_, columns_k_, columns_v_;
    key_sums<real> sums_{};
    real *q_ = nullptr, *d_out_ = nullptr, *q_values_ = nullptr, *d_out_values_ = nullptr, *d_q_ = nullptr,
         *lse_ = nullptr, *factor_ = nullptr, *largest_ = nullptr, *decay_ = nullptr, *delta_ = nullptr,
         *k_ = nullptr, *v_ = nullptr, *k_values_ = nullptr, *s_ = nullptr, *g_ = nullptr, *p_t_ = nullptr,
         *x_t_ = nullptr, *d_k_ = nullptr, *d_v_ = nullptr, *ones_ = nullptr;
    double* sum_ = nullptr;
    std::int32_t* position_ = nullptr;
    bool any_large_ = false, totals_ = false;
    std::int32_t begins_[block_keys], bias_start_[block_keys];
    expiry_t expires_[block_keys];
    real log_bias_[block_keys], bias_[block_keys];
};

}  // namespace kvpolicy::host_backend
