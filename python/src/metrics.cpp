// Metrics of masks.
#include <kvpolicy/metrics/density.hpp>
#include <kvpolicy/metrics/recall.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/metrics/cuda/dispatch_metrics.cuh>
#endif

#include "metrics.hpp"

namespace kvpolicy::python {

static_assert(sizeof(Recall) == 5 * sizeof(std::int64_t));

std::size_t metric(const Context& ctx, const MetricArgs& args, const workspace_view* workspace) {
    const auto expiry = plane_of<const expiry_t>(args.expiry);
    const Sequences sequences = sequences_of(args.sequences, expiry.batch, expiry.length);
    const std::int64_t planes = std::int64_t{expiry.batch} * expiry.heads;
    const workspace_view memory = workspace == nullptr ? workspace_view{} : *workspace;
    if (args.kind == "recall") {
        const auto student = plane_of<const expiry_t>(args.second);
        if (workspace == nullptr) {
            return oracle_recall_workspace_bytes(ctx, expiry, sequences);
        }
        oracle_recall(ctx, top_k_policy(args.policy), expiry, student, sequences,
                      reinterpret_cast<Recall*>(array_of<std::int64_t>(args.out, 5 * planes)), memory);
        return 0;
    }
    if (workspace == nullptr) {
        return 0;
    }
    if (args.kind == "live_keys") {
        live_keys(ctx, expiry, sequences, plane_of<std::int32_t>(args.out), memory);
    } else if (args.kind == "density") {
        density(ctx, expiry, sequences, array_of<double>(args.out, planes), memory);
    } else if (args.kind == "evict_ratio") {
        evict_ratio(ctx, window_policy(args.policy), expiry, sequences, array_of<double>(args.out, planes),
                    memory);
    } else {
        kvpolicy::detail::refuse("metric", args.kind, "live_keys, density, evict_ratio or recall");
    }
    return 0;
}

}  // namespace kvpolicy::python
