// The boundary loss: value and gradients in one call.
#include <kvpolicy/losses/boundary.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/losses/cuda/dispatch_boundary.cuh>
#endif

#include "operators.hpp"

namespace kvpolicy::python {

static_assert(sizeof(BoundaryValue) == 5 * sizeof(std::int64_t));

template <class Real>
std::size_t boundary_loss(const Context& ctx, const BoundaryArgs& args, const workspace_view* workspace) {
    const BoundaryLoss loss{.temperature = args.temperature,
                            .margin = {args.omega_min, args.margin_temperature},
                            .balance = {args.balance, args.balance_least, args.balance_most},
                            .sampler = {args.count, args.late, args.seed},
                            .scale = args.scale};
    const auto scores = plane_of<const Real>(args.scores);
    const Sequences sequences = sequences_of(args.sequences, scores.batch, scores.length);
    const TopKPolicy policy = top_k_policy(args.policy);
    if (workspace == nullptr) {
        return loss.workspace_bytes(ctx, policy, sequences, scores.heads);
    }
    BoundaryOptions options;
    options.log_gamma = array_of<const float>(args.log_gamma, scores.heads);
    loss(ctx, policy, scores, plane_of<const float>(args.target), sequences, plane_of<Real>(args.d_scores),
         array_of<double>(args.d_log_gamma, scores.heads),
         reinterpret_cast<BoundaryValue*>(array_of<std::int64_t>(args.value, 5)), *workspace, options);
    return 0;
}

#define KVPOLICY_PYTHON_INSTANCE(Real) \
    template std::size_t boundary_loss<Real>(const Context&, const BoundaryArgs&, const workspace_view*);
KVPOLICY_PYTHON_FOR_SCORES(KVPOLICY_PYTHON_INSTANCE)

}  // namespace kvpolicy::python
