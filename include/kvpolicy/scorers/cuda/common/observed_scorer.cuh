// What kernels of a decode step know of a scorer whose scores come from attention (scorers/observed.hpp):
// whether steps evict. All such scorers share the kernels; how weights become scores is their Observation, a
// value that a scorer of a user's own has too.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/policies/concept.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Stands for the scorer of an observed policy in the types of kernels.
template <bool Evicts>
struct observed_scorer {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::observed;
    static constexpr bool evicts_at_steps = Evicts;
};

/// Whether keys stay at every step, though their head has a budget.
template <class S>
inline constexpr bool keeps_all_at_steps = requires {
    requires S::when == score_time::observed;
    requires !S::evicts_at_steps;
};
/// Whether a step ends with new scores of all keys, from the weights of its query.
template <class S>
inline constexpr bool scored_by_steps = S::when == score_time::observed && !keeps_all_at_steps<S>;

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
