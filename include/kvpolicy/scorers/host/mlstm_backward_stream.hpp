// The mLSTM scorer's backward pass through one stream of tokens, chunk by chunk from the end.
//
// In the notation of mlstm_chunkwise.hpp, with w_lj = exp(s_j - M_l) for j <= l in the chunk and e_l = exp(m
// - M_l) for the state (C, z) before it, a read at l with query q~ of token l - delay and divisor g_l has
//
//     N_l = e_l q~ C + sum_j w_lj (q~ . k~_j) v~_j,   g_l = e_l q~ z + sum_j w_lj (q~ . k~_j)
//     h_l = N_l / max(g_l, clamp)
//
// so d N_l = d h_l / g_l, d g_l = -d h_l . h_l / g_l (0 where the clamp acts), and with G_lj = d N_l . v~_j +
// d g_l:
//
//     d q~   = e_l (C d N_l + z d g_l) + sum_j w_lj G_lj k~_j
//     d k~_j = sum_l w_lj G_lj q~_l + o_j (A v~_j + a),            o_j = exp(s_j - M_end)
//     d v~_j = sum_l w_lj (q~_l . k~_j) d N_l + o_j A^T k~_j
//     A      = sum over later reads of exp(m_end + b - m_l) q~_l d N_l^T,  a alike with d g_l
//
// (A, a) is a state that runs backwards in the forward state's frame:
//
//     A <- exp(m - M_end) A + sum_l e_l q~_l d N_l^T
//
// No exponent is above 0.
//
// A weight's exponent is log i_j + sum of log f from j + 1 to l. Hence d log i_j = sum_l (weight's gradient)
// = k~_j . d k~_j; d log f_t, over all pairs j < t <= l, is sum_{l >= t} q~_l . d q~_l - sum_{j >= t} k~_j .
// d k~_j, a sum from the end, kept in double. q~ . d q~ = 0 where the clamp does not act, since h does not
// depend on q~'s length.
#pragma once

#include <kvpolicy/scorers/activation.hpp>
#include <kvpolicy/scorers/host/host_mlstm.hpp>
#include <kvpolicy/scorers/host/kernels.hpp>
#include <kvpolicy/scorers/host/mlstm_backward_memory.hpp>
#include <kvpolicy/scorers/host/rows.hpp>
#include <kvpolicy/scorers/score_backward.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvpolicy {

namespace host_backend {

/// The streams of one (sequence, head), one after another.
template <class Scorer, class T>
class mlstm_backward_head {
  public:
    using Real = compute_t<T>;
    using memory_type = mlstm_backward_memory<Scorer, Real>;

    mlstm_backward_head(isa set, const Scorer& scorer, const ScoreBackward<T>& call,
                        const typename memory_type::scratch& memory, std::int64_t b, std::int64_t h,
                        Real* tokens, Real* readout)
        : set_(set),
          of_(scorer, static_cast<std::int32_t>(h)),
          call_(call),
          m_(memory),
          row_(scorer),
          b_(b),
          h_(h),
          tokens_(tokens),
          d_readout_(readout),
          d_gain_(readout + of_.width),
          state_size_(std::ptrdiff_t{of_.features} * (of_.width + 1)) {}

    void run(const stream_range& range) {
        const std::int64_t chunks = (range.end - range.begin + scorer_block - 1) / scorer_block;
        if (chunks == 0) {
            return;
        }
        begin_ = range.begin;
        forward(range, chunks);
        std::fill_n(m_.stack, state_size_, Real(0));
        double later = 0.0;  // sum of q~ . d q~ - k~ . d k~ over the tokens that follow
        for (std::int64_t c = chunks - 1; c >= 0; --c) {
            chunk_backward(range, c, later);
        }
        // Nothing is forgotten before the first token.
        tokens_[range.begin * row_.size + row_.f] = Real(0);
    }

  private:
    template <class Pointer>
    static const std::remove_pointer_t<Pointer>* read(Pointer p) {
        return p;
    }

    /// out[r][e] (+)= sum_j a[r][j] b[j][e]
    void combine(const Real* a, std::ptrdiff_t a_row, std::ptrdiff_t a_column, std::int32_t rows,
                 std::int32_t inner, const Real* b, std::int32_t columns, Real* out, bool add) const {
        run_kernel<combine_kernel>(set_, a, a_row, a_column, rows, inner, b, std::ptrdiff_t{columns}, columns,
                                   out, std::ptrdiff_t{columns}, add);
    }

    void gather(std::int64_t first, std::int32_t count, Real* x) const {
        for (std::int32_t t = 0; t < count; ++t, x += of_.inputs) {
            convert_row(call_.k.row(b_, h_, first + t), call_.k.dim, x);
            convert_row(call_.v.row(b_, h_, first + t), call_.v.dim, x + call_.k.dim);
        }
    }
    void map(const float* w, const Real* x, std::int32_t count, Real* features) const {
        of_.project(set_, x, count, w, of_.projection, m_.y);
        for (std::int32_t t = 0; t < count; ++t) {
            Scorer::feature_map::map(set_, read(m_.y + std::ptrdiff_t{t} * of_.projection), of_.features,
                                     features + std::ptrdiff_t{t} * of_.features);
        }
    }

    /// k~, v~, gates and their exponents of the chunk's tokens.
    void load(std::int64_t first, std::int32_t count) {
        first_ = first;
        count_ = count;
        gather(first, count, m_.x);
        map(of_.w_k(), m_.x, count, m_.k);
        if constexpr (Scorer::value_path::projected) {
            of_.project(set_, read(m_.x), count, of_.w_v(), of_.width, m_.v);
        } else {
            for (std::int32_t t = 0; t < count; ++t) {
                std::copy_n(m_.x + std::ptrdiff_t{t} * of_.inputs + call_.k.dim, of_.width,
                            m_.v + std::ptrdiff_t{t} * of_.width);
            }
        }
        const double cap = static_cast<double>(of_.scorer.gate_softcap);
        double forgotten = 0.0, top = -std::numeric_limits<double>::infinity();
        for (std::int32_t t = 0; t < count; ++t) {
            const Real* x = m_.x + std::ptrdiff_t{t} * of_.inputs;
            const auto input = static_cast<double>(dot(set_, x, of_.w_i(), of_.inputs, of_.b_i()));
            const auto forget = static_cast<double>(dot(set_, x, of_.w_f(), of_.inputs, of_.b_f()));
            const mlstm_gates gates = mlstm_gates_of(input, forget, cap);
            const auto slope = [cap](double a) {
                const double y = cap > 0.0 ? std::tanh(a / cap) : 0.0;
                return 1.0 - y * y;
            };
            slope_i_[t] = slope(input);
            slope_f_[t] = slope(forget) * -std::expm1(gates.log_forget);  // 1 - sigmoid
            forgotten += gates.log_forget;
            source_[t] = gates.log_input - forgotten;
            top = mlstm_max(top, source_[t]);
            top_[t] = top;
        }
        forgotten_ = forgotten;
    }

    /// States before each chunk.
    void forward(const stream_range& range, std::int64_t chunks) {
        double m = -std::numeric_limits<double>::infinity();
        std::fill_n(m_.states, state_size_, Real(0));
        m_.stabilizers[0] = m;
        for (std::int64_t c = 0; c + 1 < chunks; ++c) {
            load(range.begin + c * scorer_block, scorer_block);
            const Real* before = m_.states + c * state_size_;
            Real* after = m_.states + (c + 1) * state_size_;
            const double most = mlstm_max(m, top_[count_ - 1]);
            const auto keep = static_cast<Real>(std::exp(m - most));
            for (std::ptrdiff_t i = 0; i < state_size_; ++i) {
                after[i] = keep * before[i];
            }
            Real* z = after + std::ptrdiff_t{of_.features} * of_.width;
            for (std::int32_t j = 0; j < count_; ++j) {
                const auto add = static_cast<Real>(std::exp(source_[j] - most));
                Real* k = m_.k + std::ptrdiff_t{j} * of_.features;
                for (std::int32_t i = 0; i < of_.features; ++i) {
                    k[i] *= add;
                    z[i] += k[i];
                }
            }
            combine(m_.k, 1, of_.features, of_.features, count_, m_.v, of_.width, after, true);
            m = forgotten_ + most;
            m_.stabilizers[c + 1] = m;
        }
    }

    void chunk_backward(const stream_range& range, std::int64_t c, double& later) {
        const std::int64_t first = range.begin + c * scorer_block;
        load(first, static_cast<std::int32_t>(std::min<std::int64_t>(scorer_block, range.end - first)));
        const Real* state = m_.states + c * state_size_;
        const double m = m_.stabilizers[c];
        const std::int32_t features = of_.features, width = of_.width;
        const double end = mlstm_max(m, top_[count_ - 1]);
        Real* a_z = m_.stack + std::ptrdiff_t{features} * width;
        const std::int64_t skipped = range.begin + call_.delay - first;
        const auto begin = static_cast<std::int32_t>(std::clamp<std::int64_t>(skipped, 0, count_));
        const std::int32_t reads = count_ - begin;

        // What later chunks hand back: d k~ = o (A v~ + a), d v~ = o A^T k~.
        for (std::int32_t j = 0; j < count_; ++j) {
            std::copy_n(a_z, features, m_.dk + std::ptrdiff_t{j} * features);
        }
        multiply_transposed(m_.v, m_.stack, m_.dk);
        combine(m_.k, features, 1, count_, features, m_.stack, width, m_.dv, false);
        for (std::int32_t j = 0; j < count_; ++j) {
            const auto out = static_cast<Real>(std::exp(source_[j] - end));
            for (std::int32_t i = 0; i < features; ++i) {
                m_.dk[std::ptrdiff_t{j} * features + i] *= out;
            }
            for (std::int32_t e = 0; e < width; ++e) {
                m_.dv[std::ptrdiff_t{j} * width + e] *= out;
            }
        }
        if (reads > 0) {
            reads_backward(state, m, begin, reads);
        }

        // Gates, and down to the projections.
        for (std::int32_t j = count_ - 1; j >= 0; --j) {
            const Real* k = m_.k + std::ptrdiff_t{j} * features;
            Real* dk = m_.dk + std::ptrdiff_t{j} * features;
            double along = 0.0;
            for (std::int32_t i = 0; i < features; ++i) {
                along += static_cast<double>(k[i]) * static_cast<double>(dk[i]);
            }
            later += (j >= begin ? free_[j] : 0.0) - along;
            Real* row = tokens_ + (first + j) * row_.size;
            row[row_.i] = static_cast<Real>(along * slope_i_[j]);
            row[row_.f] = static_cast<Real>(later * slope_f_[j]);
            Scorer::feature_map::pull_back(k, read(dk), features, row + row_.k);
            std::copy_n(m_.dv + std::ptrdiff_t{j} * width, width, row + row_.v);
        }
        // The backward state, now before this chunk.
        const auto keep = static_cast<Real>(std::exp(m - end));
        for (std::ptrdiff_t i = 0; i < state_size_; ++i) {
            m_.stack[i] *= keep;
        }
        if (reads > 0) {
            for (std::int32_t r = 0; r < reads; ++r) {
                const auto inter = static_cast<Real>(std::exp(m - mlstm_max(m, top_[begin + r])));
                Real* q = m_.q + std::ptrdiff_t{r} * features;
                for (std::int32_t i = 0; i < features; ++i) {
                    q[i] *= inter;
                    a_z[i] += q[i] * m_.dz[r];
                }
            }
            combine(m_.q, 1, features, features, reads, m_.n, width, m_.stack, true);
        }
    }

    /// out[r][i] += sum_e rows[r][e] matrix[i][e], for the chunk's tokens and a matrix [features][d_v].
    void multiply_transposed(const Real* rows, const Real* matrix, Real* out, std::int32_t count = 0) const {
        const std::int32_t tokens = count > 0 ? count : count_;
        for (std::int32_t r = 0; r < tokens; ++r) {
            for (std::int32_t i = 0; i < of_.features; ++i) {
                out[std::ptrdiff_t{r} * of_.features + i] +=
                    dot(set_, rows + std::ptrdiff_t{r} * of_.width, matrix + std::ptrdiff_t{i} * of_.width,
                        of_.width);
            }
        }
    }

    /// The reads of a chunk: scores again, and their gradients. Leaves d N in m_.n, d g in m_.dz and q~ in
    /// m_.q.
    void reads_backward(const Real* state, double m, std::int32_t begin, std::int32_t reads) {
        const std::int64_t token = first_ + begin - call_.delay;
        Real inter[scorer_block], divisor[scorer_block];
        read_again(state, m, begin, reads, inter, divisor);
        for (std::int32_t r = 0; r < reads; ++r) {
            divide_backward(token + r, r, divisor[r]);
        }
        // m_.u becomes w_lj G_lj; m_.s is w_lj (q~ . k~_j).
        for (std::int32_t r = 0; r < reads; ++r) {
            Real* weight = m_.u + std::ptrdiff_t{r} * scorer_block;
            for (std::int32_t j = 0; j <= begin + r; ++j) {
                weight[j] *= dot(set_, read(m_.n + std::ptrdiff_t{r} * of_.width),
                                 read(m_.v + std::ptrdiff_t{j} * of_.width), of_.width) +
                             m_.dz[r];
            }
        }
        add_read_gradients(state, begin, reads, token, inter);
    }

    /// Forward again: q~ in m_.q, w_lj in m_.u, w_lj (q~ . k~_j) in m_.s, N in m_.h, e_l in `inter`, g_l in
    /// `divisor`.
    void read_again(const Real* state, double m, std::int32_t begin, std::int32_t reads, Real* inter,
                    Real* divisor) {
        const std::int32_t features = of_.features, width = of_.width;
        const Real* z = state + std::ptrdiff_t{features} * width;
        gather(first_ + begin - call_.delay, reads, m_.xq);
        map(of_.w_q(), m_.xq, reads, m_.q);
        combine(m_.q, features, 1, reads, features, state, width, m_.h, false);
        const float* none = nullptr;
        run_kernel<project_kernel>(set_, read(m_.q), std::ptrdiff_t{features}, reads, read(m_.k),
                                   std::ptrdiff_t{features}, count_, features, none, m_.s,
                                   std::ptrdiff_t{scorer_block});
        for (std::int32_t r = 0; r < reads; ++r) {
            const double most = mlstm_max(m, top_[begin + r]);
            inter[r] = static_cast<Real>(std::exp(m - most));
            Real* weight = m_.u + std::ptrdiff_t{r} * scorer_block;
            Real* product = m_.s + std::ptrdiff_t{r} * scorer_block;
            Real* h = m_.h + std::ptrdiff_t{r} * width;
            for (std::int32_t e = 0; e < width; ++e) {
                h[e] *= inter[r];
            }
            divisor[r] = inter[r] * dot(set_, read(m_.q + std::ptrdiff_t{r} * features), z, features);
            for (std::int32_t j = 0; j < count_; ++j) {
                // Later tokens are in no sum: their weight is 0.
                weight[j] = j <= begin + r ? static_cast<Real>(std::exp(source_[j] - most)) : Real(0);
                product[j] *= weight[j];
                divisor[r] += product[j];
            }
        }
        combine(m_.s, scorer_block, 1, reads, count_, m_.v, width, m_.h, true);
    }

    /// Read r, of token t: from d score to d N (in m_.n) and d g (in m_.dz).
    void divide_backward(std::int64_t t, std::int32_t r, Real divisor) {
        const std::int32_t width = of_.width;
        Real* h = m_.h + std::ptrdiff_t{r} * width;
        Real* n = m_.n + std::ptrdiff_t{r} * width;
        const bool clamped = divisor < static_cast<Real>(Scorer::clamp);
        const Real scale = Real(1) / (clamped ? static_cast<Real>(Scorer::clamp) : divisor);
        for (std::int32_t e = 0; e < width; ++e) {
            h[e] *= scale;
        }
        const Real mean = of_.center(h);
        finish_backward(t, h, n);
        Real along = Real(0);
        for (std::int32_t e = 0; e < width; ++e) {
            h[e] += mean;
            along += n[e] * h[e];
            n[e] *= scale;
        }
        m_.dz[r] = clamped ? Real(0) : -along * scale;
        clamped_[r] = clamped;
    }

    /// d q~, d k~ and d v~ of the reads, which begin with the one of `token`.
    void add_read_gradients(const Real* state, std::int32_t begin, std::int32_t reads, std::int64_t token,
                            const Real* inter) {
        const std::int32_t features = of_.features, width = of_.width;
        const Real* z = state + std::ptrdiff_t{features} * width;
        for (std::int32_t r = 0; r < reads; ++r) {
            for (std::int32_t i = 0; i < features; ++i) {
                m_.dq[std::ptrdiff_t{r} * features + i] = z[i] * m_.dz[r];
            }
        }
        multiply_transposed(m_.n, state, m_.dq, reads);
        for (std::int32_t r = 0; r < reads; ++r) {
            for (std::int32_t i = 0; i < features; ++i) {
                m_.dq[std::ptrdiff_t{r} * features + i] *= inter[r];
            }
        }
        combine(m_.u, scorer_block, 1, reads, count_, m_.k, features, m_.dq, true);
        combine(m_.u, 1, scorer_block, count_, reads, m_.q, features, m_.dk, true);
        combine(m_.s, 1, scorer_block, count_, reads, m_.n, width, m_.dv, true);
        for (std::int32_t r = 0; r < reads; ++r) {
            const Real* q = m_.q + std::ptrdiff_t{r} * features;
            const Real* dq = m_.dq + std::ptrdiff_t{r} * features;
            double along = 0.0;
            for (std::int32_t i = 0; clamped_[r] && i < features; ++i) {
                along += static_cast<double>(q[i]) * static_cast<double>(dq[i]);
            }
            free_[begin + r] = along;
            Scorer::feature_map::pull_back(q, dq, features, tokens_ + (token + r) * row_.size + row_.q);
        }
    }

    /// From d score of token t to d h (in `d`), through readout, SiLU and norm; h is centered where that is.
    void finish_backward(std::int64_t t, const Real* h, Real* d) {
        const auto& weights = of_.scorer.weights;
        const std::int32_t width = of_.width;
        const Real d_score = call_.d_scores.head(b_, h_)[t];
        tokens_[t * row_.size + row_.score] = d_score;
        d_readout_[std::ptrdiff_t{2} * width] += d_score;
        const float* readout = weights.readout + h_ * width;
        const float* gain = weights.norm_gain == nullptr ? nullptr : weights.norm_gain + h_ * width;
        Real scale = Real(1);
        if (gain != nullptr) {
            const Real mean_square = dot(set_, h, h, width) / static_cast<Real>(width);
            scale = Real(1) / std::sqrt(mean_square + static_cast<Real>(Scorer::norm_epsilon));
        }
        Real along = Real(0);
        for (std::int32_t e = 0; e < width; ++e) {
            const Real normed = gain == nullptr ? h[e] : h[e] * (scale * static_cast<Real>(gain[e]));
            const Real x = std::exp(-std::abs(normed));
            const Real open = (normed < Real(0) ? x : Real(1)) / (Real(1) + x);
            d_readout_[e] += d_score * normed * open;
            d[e] = d_score * static_cast<Real>(readout[e]);
            Silu::pull_back(&normed, d + e, 1);
            if (gain != nullptr) {
                d_gain_[e] += d[e] * h[e] * scale;
                d[e] *= static_cast<Real>(gain[e]);
                along += d[e] * h[e];
            }
        }
        if (gain == nullptr) {
            return;
        }
        along *= scale * scale / static_cast<Real>(width);
        for (std::int32_t e = 0; e < width; ++e) {
            d[e] = scale * (d[e] - h[e] * along);
        }
        of_.center(d);
    }

    isa set_;
    mlstm_head<Scorer> of_;
    const ScoreBackward<T>& call_;
    typename memory_type::scratch m_;
    mlstm_token_row row_;
    std::int64_t b_, h_, begin_ = 0, first_ = 0;
    std::int32_t count_ = 0;
    Real* tokens_;
    Real* d_readout_;
    Real* d_gain_;
    std::ptrdiff_t state_size_;
    double source_[scorer_block], top_[scorer_block], slope_i_[scorer_block], slope_f_[scorer_block];
    double free_[scorer_block];  // q~ . d q~ of the read at each token
    bool clamped_[scorer_block];
    double forgotten_ = 0.0;
};

}  // namespace host_backend

}  // namespace kvpolicy
