// LTE's straight-through gradient.
#include <kvpolicy/losses/gates.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/losses/cuda/dispatch_gates.cuh>
#endif

#include "gates.hpp"

namespace kvpolicy::python {

template <class T>
std::size_t straight_through_values(const Context& ctx, const StraightThroughArgs& args,
                                    const workspace_view* workspace) {
    using Real = compute_t<T>;
    const auto v = rows_of<const T>(args.v);
    const Sequences sequences = sequences_of(args.sequences, v.batch, v.length);
    const WindowPolicy policy = window_policy(args.policy);
    if (workspace == nullptr) {
        return straight_through_values_workspace_bytes(ctx, policy, sequences, v.heads);
    }
    straight_through_values(ctx, policy, plane_of<const Real>(args.scores), v, rows_of<const T>(args.d_v),
                            sequences, plane_of<Real>(args.d_scores), *workspace, {.scope = scope_of(args)});
    return 0;
}

#define KVPOLICY_PYTHON_INSTANCE(T)                                                             \
    template std::size_t straight_through_values<T>(const Context&, const StraightThroughArgs&, \
                                                    const workspace_view*);
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_INSTANCE)

}  // namespace kvpolicy::python
