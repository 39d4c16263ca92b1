// received_mass and the masks of observed policies.
#include <kvpolicy/attention/observed_mask.hpp>
#include <kvpolicy/attention/received_mass.hpp>
#include <kvpolicy/scorers/observed.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/attention/cuda/dispatch_observed_mask.cuh>
#include <kvpolicy/attention/cuda/dispatch_received_mass.cuh>
#endif

#include "observed.hpp"
#include "shared_kernels.hpp"

#if defined(KVPOLICY_PYTHON_CUDA)
namespace kvpolicy {
#define KVPOLICY_PYTHON_OTHERS(T) KVPOLICY_PYTHON_PAIR_KERNELS(extern template, T)
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_OTHERS)
}  // namespace kvpolicy
#endif

namespace kvpolicy::python {

namespace {

group_aggregate aggregate_of(bool largest) { return largest ? group_aggregate::max : group_aggregate::mean; }

/// Calls visit(policy) with the policy of args.policy.instance.
template <class Visit>
std::size_t with_observed_policy(const ObservedMaskArgs& args, Visit&& visit) {
    const auto call = [&](auto scorer) {
        scorer.prefill = {args.chunk};
        scorer.aggregate = aggregate_of(args.largest);
        return visit(Policy<Sink<>, Window<>, TopKBudget<>, decltype(scorer)>{
            Sink<>{per_head_of(args.policy.sinks)}, Window<>{per_head_of(args.policy.windows)},
            TopKBudget<>{per_head_of(args.policy.budgets)}, scorer});
    };
    if (args.policy.instance == "h2o") {
        return call(AccumulatedMass{});
    }
    if (args.policy.instance == "tova") {
        return call(LastMass{.whole_layer = args.whole_layer});
    }
    if (args.policy.instance == "snapkv") {
        return call(WindowMass{.pooling = {args.pool, args.pool_largest}});
    }
    kvpolicy::detail::refuse("policy", args.policy.instance, "h2o, tova or snapkv");
}

}  // namespace

template <class T>
std::size_t received_mass(const Context& ctx, const ReceivedMassArgs& args, const workspace_view* workspace) {
    const auto q = rows_of<const T>(args.q), k = rows_of<const T>(args.k);
    if (workspace == nullptr) {
        return received_mass_workspace_bytes<T>(ctx, q, k);
    }
    mask_view mask;
    mask.expiry = plane_of<const expiry_t>(args.expiry);
    received_mass<T>(ctx, args.params, q, k, mask, sequences_of(args.sequences, q.batch, q.length),
                     plane_of<float>(args.mass), *workspace,
                     {.queries = args.queries, .aggregate = aggregate_of(args.largest)});
    return 0;
}

template <class T>
std::size_t observed_mask(const Context& ctx, const ObservedMaskArgs& args, const workspace_view* workspace) {
    const auto q = rows_of<const T>(args.q), k = rows_of<const T>(args.k);
    return with_observed_policy(args, [&](const auto& policy) -> std::size_t {
        if (workspace == nullptr) {
            return build_observed_mask_workspace_bytes<T>(ctx, policy, q, k);
        }
        build_observed_mask(ctx, policy, args.params, q, k, sequences_of(args.sequences, q.batch, q.length),
                            plane_of<expiry_t>(args.expiry), *workspace, {.prompt = args.prompt});
        return 0;
    });
}

#define KVPOLICY_PYTHON_INSTANCE(T)                                                                        \
    template std::size_t received_mass<T>(const Context&, const ReceivedMassArgs&, const workspace_view*); \
    template std::size_t observed_mask<T>(const Context&, const ObservedMaskArgs&, const workspace_view*);
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_INSTANCE)

}  // namespace kvpolicy::python

#if defined(KVPOLICY_PYTHON_CUDA)
namespace kvpolicy {
#define KVPOLICY_PYTHON_SHARED(T) KVPOLICY_PYTHON_MASS_KERNELS(template, T)
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_SHARED)
}  // namespace kvpolicy
#endif
