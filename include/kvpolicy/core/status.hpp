// What a call on a device reports when it cannot throw: bits OR-ed into a word per sequence. The host backend throws
// instead of setting nan_score (except where a call says that it runs in the device's mode).
#pragma once

#include <cstdint>

namespace kvpolicy {

/// Bits of a status word. A word is only ever OR-ed into; the caller clears it.
enum status_bits : std::uint32_t {
    status_ok = 0,
    status_nan_score = 1u << 0,       ///< a score was NaN; it ranked last
    status_pool_exhausted = 1u << 1,  ///< no page was left: the step was a no-op for this sequence
    status_bad_length = 1u << 2,      ///< a length in device memory was negative or too large: treated as 0
    status_not_finite =
        1u << 3,  ///< a NaN or infinity in what a backward pass reads; its results mean nothing
    status_bad_index = 1u << 4,  ///< a label or index in device memory was outside its row: left out
};

}  // namespace kvpolicy
