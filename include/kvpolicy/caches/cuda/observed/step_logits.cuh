// What the kernels of a decode step leave for what makes scores of it, in the workspace: the logits of the
// step's query, by the row that each key has after the step.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>

#include <cmath>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// victim of a head whose tiles all have records (tile_victims), and no more than that.
inline constexpr std::int32_t victim_in_records = -2;

/// Where the logits of a step go whose scores do not come from attention.
struct no_logits {
    template <class... Numbers>
    __device__ void put(Numbers...) const {}
};

/// Logits of a key, of two query heads.
template <class Compute>
struct alignas(2 * sizeof(Compute)) logit_pair {
    Compute x, y;
};

/// Where the logits of one head's part of a group go. The keys of two rows may change places in the step.
template <class Compute>
struct logit_rows {
    Compute* to = nullptr;      // [rows, stride], from the part's first query head on; null: nowhere
    std::int32_t stride = 0;    // numbers of a row, even
    std::int32_t heads = 0;     // of the part
    std::int32_t changes = -1;  // the two rows; -1: none
    std::int32_t with = -1;

    /// Logits of query heads `head`, which is even, and head + 1; those beyond the part's are nobody's.
    __device__ void put(std::int32_t row, std::int32_t head, Compute x, Compute y) const {
        if (to != nullptr && head < heads) {
            *reinterpret_cast<logit_pair<Compute>*>(at(row) + head) = {x, y};
        }
    }
    /// The logit of the part's only query head.
    __device__ void put(std::int32_t row, Compute x) const {
        if (to != nullptr) {
            *at(row) = x;
        }
    }

  private:
    [[nodiscard]] __device__ Compute* at(std::int32_t row) const {
        const std::int32_t after = row == changes ? with : row == with ? changes : row;
        return to + std::int64_t{after} * stride;
    }
};

/// What makes weights of a query head's logits: 2^(logit - largest) inverse. Their log-sum-exp in one number
/// would not do: beyond 2^24 it holds the largest logit alone.
template <class Compute>
struct alignas(2 * sizeof(Compute)) logit_total {
    Compute largest;  // +inf where the query sees nothing
    Compute inverse;  // of the sum of 2^(logit - largest); NaN where a logit is NaN
};

/// What a step did to a head.
struct alignas(16) step_rows {
    std::int32_t used;  // rows in use after it; 0: the entry took no token
    std::int32_t num_long_range;
    std::int32_t seq;
    std::int32_t unused;
};

/// The parts of the workspace. All logits are in units of log 2.
template <class Compute>
struct step_logits {
    using compute = Compute;
    Compute* logit = nullptr;               // [count, Hkv, rows, stride]
    logit_total<Compute>* total = nullptr;  // [count, Hq]
    step_rows* after = nullptr;             // [count, Hkv]
    std::int64_t rows = 0;                  // the most that a head can have
    std::int32_t stride = 0;                // query heads of a group, rounded up to an even number
    // How they become scores.
    bool accumulate = true;    // else a mass takes the place of a score
    bool mean = true;          // of a group's query heads; else the largest
    bool whole_layer = false;  // mean over the KV heads, which hold the same keys
    bool in_step = false;      // by the blocks of the step themselves; else by step_mass_kernel

    /// For query heads first .. first + heads - 1 of the group of `pair`, an entry's KV head.
    [[nodiscard]] __device__ logit_rows<Compute> of(std::int64_t pair, std::int32_t first,
                                                    std::int32_t heads) const {
        return {logit + pair * rows * stride + first, stride, heads};
    }
    /// By one thread, with the largest logit and the sum of 2^(logit - largest) of query head `head`.
    __device__ void put_total(std::int64_t head, Compute largest, Compute sum) const {
        const bool nothing = sum == Compute(0);
        total[head] = {nothing ? static_cast<Compute>(INFINITY) : largest,
                       nothing ? Compute(0) : Compute(1) / sum};
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
