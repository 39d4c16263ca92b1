// Rows of a cache, of any storage type, as the fp32 vectors that a scorer reads.
#pragma once

#include <kvpolicy/host/check.hpp>
#include <kvpolicy/scorers/concept.hpp>

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

/// Reads rows as fp32 for a scorer: one token at a time, or blocks of them where the scorer takes blocks.
template <class S, class T>
class scorer_input {
  public:
    static std::size_t bytes(const S& scorer, std::int32_t dim_k, std::int32_t dim_v) {
        return rows_bytes(dim_k) + rows_bytes(dim_v) + aligned_size(scratch_floats(scorer) * sizeof(float));
    }
    /// `set` goes to the scorer where it takes one: built-in ones do, a user's own need not.
    scorer_input(isa set, const S& scorer, std::int32_t head, std::int32_t dim_k, std::int32_t dim_v,
                 std::byte* memory)
        : set_(set),
          scorer_(scorer),
          head_(head),
          dim_k_(dim_k),
          dim_v_(dim_v),
          k_(reinterpret_cast<float*>(memory)),
          v_(reinterpret_cast<float*>(memory + rows_bytes(dim_k))),
          scratch_(reinterpret_cast<float*>(memory + rows_bytes(dim_k) + rows_bytes(dim_v))) {}

    float score(const T* k, const T* v) {
        load(k, v, 0);
        return score_loaded();
    }
    /// Scores tokens [0, count) of rows `stride` apart.
    void score_all(const T* k, std::int64_t k_stride, const T* v, std::int64_t v_stride, std::int32_t count,
                   float* scores) {
        for (std::int32_t begin = 0; begin < count; begin += block) {
            const std::int32_t rows = std::min(block, count - begin);
            for (std::int32_t r = 0; r < rows; ++r) {
                load(k + (begin + r) * k_stride, v + (begin + r) * v_stride, r);
            }
            if constexpr (BlockScorer<S>) {
                scorer_.score_block(head_, rows, k_, v_, scores + begin, scratch_, set_);
            } else {
                scores[begin] = score_loaded();
            }
        }
    }
    void absorb(float* state, const T* k, const T* v) {
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
    static constexpr std::int32_t block = BlockScorer<S> ? scorer_block : 1;

    static std::size_t rows_bytes(std::int32_t dim) {
        return aligned_size(static_cast<std::size_t>(block) * static_cast<std::size_t>(dim) * sizeof(float));
    }
    static std::size_t scratch_floats(const S& scorer) {
        if constexpr (BlockScorer<S>) {
            return std::max<std::size_t>(scorer.scratch_size(), scorer.block_scratch_size());
        } else {
            return scorer.scratch_size();
        }
    }
    float score_loaded() {
        if constexpr (requires { scorer_.score(head_, k_, v_, scratch_, set_); }) {
            return static_cast<float>(scorer_.score(head_, k_, v_, scratch_, set_));
        } else {
            return static_cast<float>(scorer_.score(head_, k_, v_, scratch_));
        }
    }
    void load(const T* k, const T* v, std::int32_t r) {
        convert_row(k, dim_k_, k_ + std::int64_t{r} * dim_k_);
        convert_row(v, dim_v_, v_ + std::int64_t{r} * dim_v_);
    }
    isa set_;
    const S& scorer_;
    std::int32_t head_, dim_k_, dim_v_;
    float* k_;
    float* v_;
    float* scratch_;
};

/// What a layer's scorer needs for one head: a copy of its state, then its input and scratch.
template <class Cache>
std::size_t scorer_bytes(const Cache& cache) {
    using P = typename Cache::policy_type;
    using S = typename P::scorer_type;
    if constexpr (!P::ranked || S::when == score_time::given) {
        return 0;
    } else {
        return scorer_input<S, typename Cache::value_type>::bytes(cache.scorer, cache.dim_k, cache.dim_v) +
               aligned_size(static_cast<std::size_t>(cache.state_size) * sizeof(float));
    }
}

}  // namespace kvpolicy::host_backend
