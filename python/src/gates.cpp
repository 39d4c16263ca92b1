// Gate losses, and LTE's counts.
#include <kvpolicy/losses/dms.hpp>
#include <kvpolicy/losses/gates.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/losses/cuda/dispatch_gates.cuh>
#endif

#include "gates.hpp"

namespace kvpolicy::python {

namespace {

static_assert(sizeof(LossValue) == 2 * sizeof(std::int64_t));
static_assert(sizeof(EvictionSums) == 2 * sizeof(std::int64_t));

template <class Record>
Record* record_of(const Tensor& tensor) {
    return reinterpret_cast<Record*>(array_of<std::int64_t>(tensor, sizeof(Record) / sizeof(std::int64_t)));
}

CompressionLoss compression_of(const GateLossArgs& args) {
    return {.target = args.target,
            .scale = args.scale,
            .gate = {args.gate.temperature, args.gate.noise, args.gate.seed},
            .straight_through = args.straight_through,
            .scope = scope_of(args)};
}

/// The call of one loss, or the bytes that it needs.
template <class Real, class Loss, class... Options>
std::size_t call_loss(const Context& ctx, const Loss& loss, const GateLossArgs& args,
                      const workspace_view* workspace, const Options&... options) {
    const auto scores = plane_of<const Real>(args.scores);
    const Sequences sequences = sequences_of(args.sequences, scores.batch, scores.length);
    const WindowPolicy policy = window_policy(args.policy);
    if (workspace == nullptr) {
        return loss.workspace_bytes(ctx, policy, sequences, scores.heads);
    }
    loss(ctx, policy, scores, sequences, plane_of<Real>(args.d_scores), record_of<LossValue>(args.value),
         *workspace, options...);
    return 0;
}

}  // namespace

template <class Real>
std::size_t gate_loss(const Context& ctx, const GateLossArgs& args, const workspace_view* workspace) {
    if (args.kind == "sparsity") {
        return call_loss<Real>(ctx, GateSparsity{.scale = args.scale, .scope = scope_of(args)}, args,
                               workspace);
    }
    if (args.kind == "density") {
        return call_loss<Real>(ctx, GateDensity{.scale = args.scale, .scope = scope_of(args)}, args,
                               workspace);
    }
    if (args.kind == "retention") {
        const RetentionTerm term{array_of<const float>(args.lambda, args.scores.shape[1])};
        return call_loss<Real>(ctx,
                               RetentionPenalty{.scale = args.scale, .scope = scope_of(args), .term = term},
                               args, workspace);
    }
    if (args.kind == "compression") {
        const CompressionOptions options{.total = record_of<const EvictionSums>(args.total)};
        return call_loss<Real>(ctx, compression_of(args), args, workspace, options);
    }
    kvpolicy::detail::refuse("gate loss", args.kind, "sparsity, density, retention or compression");
}

template <class Real>
std::size_t eviction_sums(const Context& ctx, const GateLossArgs& args, const workspace_view* workspace) {
    const auto scores = plane_of<const Real>(args.scores);
    const Sequences sequences = sequences_of(args.sequences, scores.batch, scores.length);
    const WindowPolicy policy = window_policy(args.policy);
    const CompressionLoss loss = compression_of(args);
    if (workspace == nullptr) {
        return loss.workspace_bytes(ctx, policy, sequences, scores.heads);
    }
    loss.sums(ctx, policy, scores, sequences, record_of<EvictionSums>(args.value), *workspace);
    return 0;
}

template <class Real>
std::size_t retention_counts(const Context& ctx, const RetentionArgs& args, const workspace_view* workspace) {
    const auto scores = plane_of<const Real>(args.scores);
    const Sequences sequences = sequences_of(args.sequences, scores.batch, scores.length);
    const WindowPolicy policy = window_policy(args.policy);
    if (workspace == nullptr) {
        return retention_counts_workspace_bytes(ctx, policy, sequences, scores.heads);
    }
    retention_counts(ctx, policy, scores, sequences, array_of<double>(args.counts, scores.heads), *workspace,
                     {.scope = scope_of(args)});
    return 0;
}

#define KVPOLICY_PYTHON_INSTANCE(Real)                                                                    \
    template std::size_t gate_loss<Real>(const Context&, const GateLossArgs&, const workspace_view*);     \
    template std::size_t eviction_sums<Real>(const Context&, const GateLossArgs&, const workspace_view*); \
    template std::size_t retention_counts<Real>(const Context&, const RetentionArgs&, const workspace_view*);
KVPOLICY_PYTHON_FOR_SCORES(KVPOLICY_PYTHON_INSTANCE)

}  // namespace kvpolicy::python
