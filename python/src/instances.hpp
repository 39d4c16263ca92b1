// The matrix of instances that are compiled ahead of time. Head dimensions, budgets and all other numbers are
// run-time values.
//
//     what              | _host                   | _cuda
//     ------------------+-------------------------+-----------------------------------------
//     rows (attention)  | bf16, fp16, fp32, fp64  | the same, or fewer; fp32, fp64 for checks
//     rows (scorers)    | bf16, fp16, fp32, fp64  | bf16, fp16, fp32
//     rows (distill)    | fp32, fp64              | bf16, fp16, fp32
//     scores in losses  | fp32, fp64              | fp32
//     policies          | the three below, and    | the same
//                       | those of observed.cpp   |
#pragma once

#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "context.hpp"
#include "tensor.hpp"
#if defined(KVPOLICY_PYTHON_CUDA) && !defined(KVPOLICY_PYTHON_CUDA_TYPES)
#include "cuda_types.hpp"  // written by CMake: KVPOLICY_PYTHON_CUDA_TYPES
#endif

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvpolicy::python {

template <class... T>
struct types {};

#if defined(KVPOLICY_PYTHON_CUDA)
using attention_types = types<KVPOLICY_PYTHON_CUDA_TYPES>;
#else
using attention_types = types<bf16, fp16, float, double>;
#endif

template <class Kept, class... T>
struct without_double;
template <class... Kept>
struct without_double<types<Kept...>> {
    using type = types<Kept...>;
};
template <class... Kept, class First, class... Rest>
struct without_double<types<Kept...>, First, Rest...>
    : without_double<std::conditional_t<std::is_same_v<First, double>, types<Kept...>, types<Kept..., First>>,
                     Rest...> {};
template <class... T>
auto scorer_types_of(types<T...>) -> typename without_double<types<>, T...>::type;

using scorer_types =
    std::conditional_t<on_cuda, decltype(scorer_types_of(attention_types{})), attention_types>;
using score_types = std::conditional_t<on_cuda, types<float>, types<float, double>>;
using distill_types = std::conditional_t<on_cuda, scorer_types, score_types>;

// Calls a macro with each type of rows or of scores that a source is compiled for. CMake defines the first
// where it compiles a source for some types at a time.
#if !defined(KVPOLICY_PYTHON_FOR_ROWS)
#define KVPOLICY_PYTHON_FOR_ROWS(instance) instance(bf16) instance(fp16) instance(float) instance(double)
#endif
#if defined(KVPOLICY_PYTHON_CUDA)
#define KVPOLICY_PYTHON_FOR_SCORES(instance) instance(float)
#else
#define KVPOLICY_PYTHON_FOR_SCORES(instance) instance(float) instance(double)
#endif

/// Calls visit.operator()<T>() for the T of `type`; another dtype is a TypeError that names `tensor`.
template <class... T, class Visit>
std::size_t with_type(types<T...>, const Tensor& tensor, Visit&& visit) {
    std::size_t result = 0;
    const bool found =
        ((tensor.type == dtype_of<T> && (result = visit.template operator()<T>(), true)) || ...);
    if (!found) {
        std::string allowed;
        ((allowed += std::string(allowed.empty() ? "" : ", ") + name_of(dtype_of<T>)), ...);
        throw type_error(std::string(tensor.name) + ": " + name_of(tensor.type) +
                         " is not allowed; it must be one of " + allowed);
    }
    return result;
}

/// The numbers of a policy for one layer: one of each for all KV heads, or one per KV head.
struct PolicyNumbers {
    std::string instance;
    std::vector<std::int32_t> sinks, windows, budgets;
    std::vector<float> thresholds, log_gammas;
};

template <class T>
PerHead<T> per_head_of(const std::vector<T>& values) {
    if (values.size() == 1) {
        return values[0];
    }
    return per_head(values.data(), 1, static_cast<std::int32_t>(values.size()));
}

/// The gates, chosen at run time. `all` is open for every score that is a number.
struct AnyGate {
    enum class rule : std::uint8_t { all, at_least, above, evict };
    static constexpr part_kind kind = part_kind::gate;
    PerHead<float> threshold;
    rule comparison = rule::all;

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.threshold = threshold.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        threshold.check("array of thresholds", layers, heads);
    }
    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const HeadParams& head_params) const {
        switch (comparison) {
            case rule::at_least:
                return score >= head_params.threshold;
            case rule::above:
                return score > head_params.threshold;
            case rule::evict:
                return score <= head_params.threshold;
            default:
                return true;
        }
    }
};
static_assert(Gate<AnyGate>);

inline AnyGate::rule rule_of(const std::string& instance) {
    using rule = AnyGate::rule;
    if (instance == "gate_at_least") {
        return rule::at_least;
    }
    if (instance == "gate_above") {
        return rule::above;
    }
    if (instance == "gate_evict") {
        return rule::evict;
    }
    kvpolicy::detail::require(instance == "window" || instance == "top_k", "policy", instance,
                              "window, top_k, gate_at_least, gate_above or gate_evict");
    return rule::all;
}

using WindowPolicy = Policy<Sink<>, Window<>>;
using TopKPolicy = Policy<Sink<>, Window<>, TopKBudget<>, Decay<1>>;
using GatedPolicy = Policy<Sink<>, Window<>, AnyGate, TopKBudget<>, Decay<1>>;

inline WindowPolicy window_policy(const PolicyNumbers& numbers) {
    return WindowPolicy{Sink<>{per_head_of(numbers.sinks)}, Window<>{per_head_of(numbers.windows)}};
}
inline TopKPolicy top_k_policy(const PolicyNumbers& numbers) {
    return TopKPolicy{Sink<>{per_head_of(numbers.sinks)}, Window<>{per_head_of(numbers.windows)},
                      TopKBudget<>{per_head_of(numbers.budgets)}, Decay<1>{per_head_of(numbers.log_gammas)}};
}
inline GatedPolicy gated_policy(const PolicyNumbers& numbers) {
    return GatedPolicy{Sink<>{per_head_of(numbers.sinks)}, Window<>{per_head_of(numbers.windows)},
                       AnyGate{per_head_of(numbers.thresholds), rule_of(numbers.instance)},
                       TopKBudget<>{per_head_of(numbers.budgets)}, Decay<1>{per_head_of(numbers.log_gammas)}};
}

/// Calls visit(policy) with the instance of that name; an unlimited budget stands for none.
template <class Visit>
std::size_t with_policy(const PolicyNumbers& numbers, Visit&& visit) {
    const std::string& name = numbers.instance;
    if (name == "window") {
        return visit(window_policy(numbers));
    }
    if (name == "top_k") {
        return visit(top_k_policy(numbers));
    }
    return visit(gated_policy(numbers));
}

}  // namespace kvpolicy::python
