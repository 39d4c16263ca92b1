// What a call on a device reports when it cannot throw: bits OR-ed into a word per sequence. The host sets
// the same bits where a status is given, and throws where none is.
#pragma once

#include <cstdint>

namespace kvpolicy {

/// Bits of a status word. A word is only ever OR-ed into; the caller clears it.
enum status_bits : std::uint32_t {
    status_ok = 0,
    status_nan_score = 1u << 0,       ///< a score was NaN; it ranked last
    status_pool_exhausted = 1u << 1,  ///< no page was left: the step was a no-op for this sequence
    status_bad_length = 1u << 2,      ///< a length in device memory was negative or too large: treated as 0
    /// A NaN or infinity in what a loss or a backward pass reads: its results mean nothing.
    status_not_finite = 1u << 3,
    status_bad_index = 1u << 4,  ///< a label or index in device memory was outside its row: left out
    /// A layer of a cache was called again before advance(): the second call left this sequence alone.
    status_layer_repeated = 1u << 5,
    /// advance(): a layer of a cache has not taken these tokens, or has taken others: the sequence
    /// did not move. evict(): some layer has taken tokens that advance() has not counted: the
    /// sequence was left as it is.
    status_layer_skipped = 1u << 6,
    /// evict() in a graph captured before slabs were attached: the sequence has more rows than its workspace
    /// is for; nothing was evicted.
    status_small_workspace = 1u << 7,
};

/// What one bit of a status word says, as a sentence; null for a word of no bit or of several.
constexpr const char* status_sentence(std::uint32_t bit) {
    switch (bit) {
        case status_nan_score:
            return "a score was NaN, and ranked last";
        case status_pool_exhausted:
            return "no page was left: add a slab (add_slab) and call the layer again for this sequence";
        case status_bad_length:
            return "a length, token count or sequence in device memory was out of range: it counted as no "
                   "token";
        case status_not_finite:
            return "what a backward pass reads was NaN or infinite: its results mean nothing";
        case status_bad_index:
            return "a label or index in device memory was outside its row, and left out";
        case status_layer_repeated:
            return "a layer was called again before advance(): the second call left this sequence alone";
        case status_layer_skipped:
            return "the layers have not all taken the same tokens: advance() did not move the sequence, and "
                   "evict() left it alone; call the layers that lack them, then advance() again";
        case status_small_workspace:
            return "a graph captured before slabs were attached has a workspace for fewer rows: nothing was "
                   "evicted "
                   "from this sequence; capture it again";
        default:
            return nullptr;
    }
}
/// Calls visit(sentence) for every bit of a status word.
template <class Visit>
constexpr void for_each_status(std::uint32_t word, Visit&& visit) {
    for (std::uint32_t bit = 1; bit != 0; bit <<= 1) {
        if (const char* const sentence = status_sentence(word & bit); sentence != nullptr) {
            visit(sentence);
        }
    }
}

}  // namespace kvpolicy
