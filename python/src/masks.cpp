// build_mask, build_log_bias and its gradient.
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/masks/dms_gate.hpp>
#include <kvpolicy/masks/log_bias.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/masks/cuda/dispatch_build_mask.cuh>
#include <kvpolicy/masks/cuda/dispatch_log_bias.cuh>
#endif

#include "operators.hpp"

namespace kvpolicy::python {

std::size_t build_mask(const Context& ctx, const MaskArgs& args, const workspace_view* workspace) {
    const auto expiry = plane_of<expiry_t>(args.expiry);
    const auto scores = plane_of<const float>(args.scores);
    const Sequences sequences = sequences_of(args.sequences, expiry.batch, expiry.length);
    return with_policy(args.policy, [&](const auto& policy) -> std::size_t {
        if (workspace == nullptr) {
            return build_mask_workspace_bytes(ctx, policy, sequences, expiry.heads);
        }
        build_mask(ctx, policy, scores, sequences, expiry, *workspace);
        return 0;
    });
}

namespace {

/// Calls visit(gate) with the gate of that kind.
template <class Visit>
std::size_t with_gate(const GateNumbers& numbers, Visit&& visit) {
    const std::string& kind = numbers.kind;
    if (kind == "soft") {
        return visit(SoftGate{});
    }
    if (kind == "soft_write") {
        return visit(SoftWriteGate{numbers.epsilon});
    }
    if (kind == "annealed") {
        return visit(AnnealedGate{numbers.alpha, numbers.tau});
    }
    if (kind == "threshold_soft") {
        return visit(ThresholdSoftGate{numbers.tau});
    }
    if (kind == "bernoulli") {
        return visit(BernoulliGate{numbers.clip, numbers.seed});
    }
    if (kind == "dms") {
        return visit(DmsGate{numbers.temperature, numbers.noise, numbers.seed});
    }
    kvpolicy::detail::refuse("gate", kind, "soft, soft_write, annealed, threshold_soft, bernoulli or dms");
}

/// Calls visit(policy, gate, sequences, Real{}), or returns the bytes that the call needs.
template <class Visit>
std::size_t gated_call(const Context& ctx, const LogBiasArgs& args, const workspace_view* workspace,
                       Visit&& visit) {
    return with_type(score_types{}, args.scores, [&]<class Real>() -> std::size_t {
        const auto scores = plane_of<const Real>(args.scores);
        const Sequences sequences = sequences_of(args.sequences, scores.batch, scores.length);
        const WindowPolicy policy = window_policy(args.policy);
        if (workspace == nullptr) {
            return log_bias_workspace_bytes(ctx, policy, sequences, scores.heads);
        }
        return with_gate(args.gate, [&](const auto& gate) -> std::size_t {
            visit(policy, gate, sequences, scores);
            return 0;
        });
    });
}

}  // namespace

std::size_t build_log_bias(const Context& ctx, const LogBiasArgs& args, const workspace_view* workspace) {
    return gated_call(ctx, args, workspace,
                      [&](const auto& policy, const auto& gate, const Sequences& sequences, auto scores) {
                          build_log_bias(ctx, policy, gate, scores, sequences,
                                         plane_of<expiry_t>(args.expiry), plane_of<float>(args.log_bias),
                                         *workspace);
                      });
}

std::size_t log_bias_backward(const Context& ctx, const LogBiasArgs& args, const workspace_view* workspace) {
    return gated_call(ctx, args, workspace,
                      [&]<class Real>(const auto& policy, const auto& gate, const Sequences& sequences,
                                      plane_view<const Real> scores) {
                          log_bias_backward(ctx, policy, gate, scores, plane_of<const Real>(args.d_log_bias),
                                            sequences, plane_of<Real>(args.d_scores), *workspace);
                      });
}

}  // namespace kvpolicy::python
