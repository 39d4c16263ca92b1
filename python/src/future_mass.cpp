// causal_lse and future_mass.
#include <kvpolicy/attention/future_mass.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/attention/cuda/dispatch_future_mass.cuh>
#endif

#include "operators.hpp"
#include "shared_kernels.hpp"

namespace kvpolicy::python {

template <class T>
std::size_t causal_lse(const Context& ctx, const FutureMassArgs& args, const workspace_view* workspace) {
    const auto q = rows_of<const T>(args.q), k = rows_of<const T>(args.k);
    if (workspace == nullptr) {
        return future_mass_workspace_bytes<T>(ctx, q, k);
    }
    causal_lse<T>(ctx, args.params, q, k, sequences_of(args.sequences, q.batch, q.length),
                  plane_of<float>(args.lse), *workspace);
    return 0;
}

template <class T>
std::size_t future_mass(const Context& ctx, const FutureMassArgs& args, const workspace_view* workspace) {
    const auto q = rows_of<const T>(args.q), k = rows_of<const T>(args.k);
    if (workspace == nullptr) {
        return future_mass_workspace_bytes<T>(ctx, q, k);
    }
    FutureMassOptions options;
    options.window = per_head_of(args.windows);
    options.look_ahead = args.look_ahead;
    options.normalize = args.normalize;
    options.epsilon = args.epsilon;
    options.aggregate = args.mean ? group_aggregate::mean : group_aggregate::max;
    options.beta = args.beta;
    future_mass<T>(ctx, args.params, q, k, plane_of<const float>(args.lse),
                   sequences_of(args.sequences, q.batch, q.length), plane_of<float>(args.target), *workspace,
                   options);
    return 0;
}

#define KVPOLICY_PYTHON_INSTANCE(T)                                                                   \
    template std::size_t causal_lse<T>(const Context&, const FutureMassArgs&, const workspace_view*); \
    template std::size_t future_mass<T>(const Context&, const FutureMassArgs&, const workspace_view*);
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_INSTANCE)

}  // namespace kvpolicy::python

#if defined(KVPOLICY_PYTHON_CUDA)
namespace kvpolicy {
#define KVPOLICY_PYTHON_SHARED(T) KVPOLICY_PYTHON_PAIR_KERNELS(template, T)
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_SHARED)
}  // namespace kvpolicy
#endif
