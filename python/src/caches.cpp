// The caches that are compiled ahead of time.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/scorers/observed.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_decode.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/caches/cuda/prefill/dispatch_prefill.cuh>
#include <kvpolicy/scorers/cuda/conv/device_conv.cuh>
#include <kvpolicy/scorers/cuda/mlstm/device_mlstm.cuh>
#endif

#include "shared_kernels.hpp"
#include "typed_cache.hpp"

#if defined(KVPOLICY_PYTHON_CUDA)
namespace kvpolicy {
KVPOLICY_PYTHON_PLAN_KERNELS(extern template)
KVPOLICY_PYTHON_TOP_K_KERNELS(extern template)
#define KVPOLICY_PYTHON_OTHERS(T)                       \
    KVPOLICY_PYTHON_FORWARD_KERNELS(extern template, T) \
    KVPOLICY_PYTHON_PAIR_KERNELS(extern template, T)    \
    KVPOLICY_PYTHON_MASS_KERNELS(extern template, T)    \
    KVPOLICY_PYTHON_CHUNK_KERNELS(extern template, T)
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_OTHERS)
}  // namespace kvpolicy
#endif

namespace kvpolicy::python {

template <class T>
std::unique_ptr<AnyCache> make_cache(const CacheArgs& args) {
    const auto fixed = [&]<class P>(std::type_identity<P>) -> std::unique_ptr<AnyCache> {
        return std::make_unique<TypedCache<FixedBudgetCache, P, T>>(args, policy_parts<P>::make);
    };
    const auto dual = [&]<class P>(std::type_identity<P>) -> std::unique_ptr<AnyCache> {
        return std::make_unique<TypedCache<DualCache, P, T>>(args, policy_parts<P>::make);
    };
    const bool is_fixed = args.kind == "fixed";
    kvpolicy::detail::require(is_fixed || args.kind == "dual", "kind of cache", args.kind, "fixed or dual");
    if (args.scorer == "given") {
        const std::type_identity<GivenPolicy> policy;
        return is_fixed ? fixed(policy) : dual(policy);
    }
    if (args.scorer == "mlstm") {
        const std::type_identity<mLSTMPolicy> policy;
        return is_fixed ? fixed(policy) : dual(policy);
    }
    if (args.scorer == "conv" && !is_fixed) {
        return dual(std::type_identity<ConvPolicy>{});
    }
    if (args.scorer == "evicting" && is_fixed) {
        return fixed(std::type_identity<MassPolicy<true>>{});
    }
    if (args.scorer == "keeping" && !is_fixed) {
        return dual(std::type_identity<MassPolicy<false>>{});
    }
    if (args.scorer == "selecting" && !is_fixed) {
        return dual(std::type_identity<SelectingPolicy>{});
    }
    kvpolicy::detail::refuse("scorer of a cache", args.scorer,
                             "given, mlstm, evicting (kind fixed), conv, keeping or selecting (kind dual)");
}

#define KVPOLICY_PYTHON_INSTANCE(T) template std::unique_ptr<AnyCache> make_cache<T>(const CacheArgs&);
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_INSTANCE)

}  // namespace kvpolicy::python
