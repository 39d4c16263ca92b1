// Rows of a cache, of any storage type, as the fp32 vectors that a scorer reads.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/finite_rows.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

template <class T>
void convert_row(const T* row, std::int32_t dim, float* out) {
    for (std::int32_t d = 0; d < dim; ++d) {
        out[d] = static_cast<float>(row[d]);
    }
}

/// Whether no number of a key and its value is NaN or infinite.
template <class T>
bool finite_token(const T* k, std::int32_t head_dim_qk, const T* v, std::int32_t head_dim_vo) {
    return checks::finite_row(k, head_dim_qk) && checks::finite_row(v, head_dim_vo);
}

/// Reads rows as fp32 for a scorer: one token at a time, blocks of them where the scorer takes blocks, or
/// spans of tokens with their neighbors.
template <class S, class T>
class scorer_input {
  public:
    static std::size_t bytes(const S& scorer, std::int32_t head_dim_qk, std::int32_t head_dim_vo) {
        return rows_bytes(head_dim_qk) + rows_bytes(head_dim_vo) +
               detail::aligned_size(scratch_floats(scorer) * sizeof(float));
    }
    /// `set` goes to the scorer where it takes one: built-in ones do, a user's own need not.
    scorer_input(isa set, const S& scorer, std::int32_t head, std::int32_t head_dim_qk,
                 std::int32_t head_dim_vo, std::byte* memory)
        : set_(set),
          scorer_(scorer),
          head_(head),
          head_dim_qk_(head_dim_qk),
          head_dim_vo_(head_dim_vo),
          k_(reinterpret_cast<float*>(memory)),
          v_(reinterpret_cast<float*>(memory + rows_bytes(head_dim_qk))),
          scratch_(reinterpret_cast<float*>(memory + rows_bytes(head_dim_qk) + rows_bytes(head_dim_vo))) {}

    float score(const T* k, const T* v, position_t t) {
        load(k, v, 0);
        return score_loaded(t);
    }
    /// Scores `count` tokens of rows `stride` apart, from position `first` on.
    void score_all(const T* k, std::int64_t k_stride, const T* v, std::int64_t v_stride, std::int32_t count,
                   position_t first, float* scores) {
        for (std::int32_t begin = 0; begin < count; begin += block) {
            const std::int32_t rows = std::min(block, count - begin);
            for (std::int32_t r = 0; r < rows; ++r) {
                load(k + (begin + r) * k_stride, v + (begin + r) * v_stride, r);
            }
            if constexpr (BlockScorer<S>) {
                if constexpr (requires {
                                  scorer_.score_block(head_, rows, k_, v_, scores, scratch_, set_, first);
                              }) {
                    scorer_.score_block(head_, rows, k_, v_, scores + begin, scratch_, set_, first + begin);
                } else {
                    scorer_.score_block(head_, rows, k_, v_, scores + begin, scratch_, set_);
                }
            } else {
                scores[begin] = score_loaded(first + begin);
            }
        }
    }
    /// Scores tokens from .. from + count - 1 of a sequence, from the rows that key_at(t) and value_at(t)
    /// say.
    template <class KeyAt, class ValueAt>
    void score_spans(position_t from, std::int64_t count, KeyAt&& key_at, ValueAt&& value_at, float* scores) {
        for (std::int64_t begin = 0; begin < count; begin += scorer_block) {
            const auto tokens =
                static_cast<std::int32_t>(std::min<std::int64_t>(scorer_block, count - begin));
            const position_t first = from + begin;
            for (std::int32_t r = 0; r < tokens + 2 * S::reach; ++r) {
                const position_t t = first - S::reach + r;
                if (t >= 0) {
                    load(key_at(t), value_at(t), r);
                }
            }
            scorer_.score_span(head_, first, tokens, static_cast<const float*>(k_),
                               static_cast<const float*>(v_), scores + begin, scratch_, set_);
        }
    }
    /// A token that is not finite leaves the state as it is.
    void absorb(float* state, const T* k, const T* v) {
        if (!finite_token(k, head_dim_qk_, v, head_dim_vo_)) {
            return;
        }
        load(k, v, 0);
        if constexpr (requires { scorer_.absorb(head_, state, k_, v_, scratch_, set_); }) {
            scorer_.absorb(head_, state, k_, v_, scratch_, set_);
        } else {
            scorer_.absorb(head_, state, k_, v_, scratch_);
        }
    }
    float read(const float* state, const T* k, const T* v) {
        load(k, v, 0);
        if constexpr (requires { scorer_.read(head_, state, k_, v_, scratch_, set_); }) {
            return static_cast<float>(scorer_.read(head_, state, k_, v_, scratch_, set_));
        } else {
            return static_cast<float>(scorer_.read(head_, state, k_, v_, scratch_));
        }
    }

  private:
    static constexpr std::int32_t rows_at_once() {
        if constexpr (ContextScorer<S>) {
            return scorer_block + 2 * S::reach;
        } else {
            return BlockScorer<S> ? scorer_block : 1;
        }
    }
    static constexpr std::int32_t block = rows_at_once();

    static std::size_t rows_bytes(std::int32_t dim) {
        return detail::aligned_size(static_cast<std::size_t>(block) * static_cast<std::size_t>(dim) *
                                    sizeof(float));
    }
    static std::size_t scratch_floats(const S& scorer) {
        if constexpr (ContextScorer<S>) {
            return scorer.span_scratch_size();
        } else if constexpr (BlockScorer<S>) {
            return std::max<std::size_t>(scorer.scratch_size(), scorer.block_scratch_size());
        } else {
            return scorer.scratch_size();
        }
    }
    float score_loaded([[maybe_unused]] position_t t) {
        if constexpr (requires { scorer_.score(head_, k_, v_, scratch_, set_, t); }) {
            return static_cast<float>(scorer_.score(head_, k_, v_, scratch_, set_, t));
        } else if constexpr (requires { scorer_.score(head_, k_, v_, scratch_, set_); }) {
            return static_cast<float>(scorer_.score(head_, k_, v_, scratch_, set_));
        } else {
            return static_cast<float>(scorer_.score(head_, k_, v_, scratch_));
        }
    }
    void load(const T* k, const T* v, std::int32_t r) {
        convert_row(k, head_dim_qk_, k_ + std::int64_t{r} * head_dim_qk_);
        convert_row(v, head_dim_vo_, v_ + std::int64_t{r} * head_dim_vo_);
    }
    isa set_;
    const S& scorer_;
    std::int32_t head_, head_dim_qk_, head_dim_vo_;
    float* k_;
    float* v_;
    float* scratch_;
};

/// What a layer's scorer needs on each thread: its input and scratch.
template <class Cache>
std::size_t scorer_thread_bytes(const Cache& cache) {
    using P = typename Cache::policy_type;
    using S = typename P::scorer_type;
    if constexpr (!P::ranked || scores_come_along<S>) {
        return 0;
    } else {
        return detail::aligned_size(scorer_input<S, typename Cache::value_type>::bytes(
            cache.scorer, cache.head_dim_qk, cache.head_dim_vo));
    }
}

/// A copy of one head's scorer state.
template <class Cache>
std::size_t state_bytes(const Cache& cache) {
    return detail::aligned_size(static_cast<std::size_t>(cache.state_size) * sizeof(float));
}

/// Whether keys get their scores while they are in the window.
template <class P>
inline constexpr bool scores_late = P::ranked&& P::scorer_type::when == score_time::in_window;

/// Tokens 0 .. scored_until - 1 of a sequence have their scores once `length` tokens have come
/// (ContextScorer).
template <class S>
position_t scored_until(const S& scorer, std::int32_t window, position_t length) {
    const position_t together = scorer.tokens_at_once(window);
    return length <= S::reach ? 0 : (length - S::reach) / together * together;
}

/// The most keys of a head that get their scores in one step; 0 where scores are known otherwise.
template <class Cache>
std::int32_t late_scores([[maybe_unused]] const Cache& cache, [[maybe_unused]] std::int32_t head) {
    if constexpr (scores_late<typename Cache::policy_type>) {
        return cache.scorer.tokens_at_once(cache.all_params[head].window);
    }
    return 0;
}

}  // namespace kvpolicy::host_backend
