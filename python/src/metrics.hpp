// Metrics of masks: arguments and declarations, as in operators.hpp.
#pragma once

#include "operators.hpp"

namespace kvpolicy::python {

struct MetricArgs {
    std::string kind;       // live_keys, density, evict_ratio, recall
    PolicyNumbers policy;   // evict_ratio and recall
    Tensor expiry, second;  // [B, Hkv, S] int32; recall: of teacher and student
    SequenceTensors sequences;
    /// Written: live_keys [B, Hkv, S] int32; density, evict_ratio [B, Hkv] fp64; recall [B, Hkv, 5] int64,
    /// with the bits of Recall.
    Tensor out;
};
std::size_t metric(const Context& ctx, const MetricArgs& args, const workspace_view* workspace);

}  // namespace kvpolicy::python
