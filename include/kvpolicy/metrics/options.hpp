// The options of every metric.
#pragma once

#include <cstdint>

namespace kvpolicy {

/// What the metrics take besides masks and sequences.
struct MetricOptions {
    std::int32_t layer = 0;  ///< the layer whose sinks, windows and budgets count
    std::uint32_t* status =
        nullptr;  ///< [B], OR-ed into: status_bad_length, for a length that then counts as 0
};

}  // namespace kvpolicy
