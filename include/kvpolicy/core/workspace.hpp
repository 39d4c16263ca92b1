// How a call lays out the workspace that it was given.
#pragma once

#include <kvpolicy/core/check.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy::detail {

/// Parts of a memory begin at multiples of so many bytes. A GPU reads its memory by lines of 128 bytes, and
/// often by two of them: keys and values that straddle lines cost a decode step a tenth of its bandwidth.
inline constexpr std::size_t alignment = 256;
/// The first aligned address at or after `data`; it is less than `alignment` bytes away.
inline std::byte* aligned(void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return static_cast<std::byte*>(data) + (alignment - address % alignment) % alignment;
}
constexpr std::size_t aligned_size(std::size_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
}

/// The most bytes that a plan may come to: a quarter of the address space, so that sums of a few
/// such cannot wrap.
inline constexpr std::size_t max_bytes = static_cast<std::size_t>(-1) / 4;
/// The product of sizes, none of them negative, or max_bytes + 1 where it is more than that: a plan of sizes
/// that nobody has must not wrap to a small one.
template <class... Sizes>
constexpr std::size_t product_of(Sizes... sizes) {
    std::size_t product = 1;
    bool fits = true;
    const auto times = [&](std::size_t size) {
        fits = fits && (size == 0 || product <= max_bytes / size);
        product = fits ? product * size : product;
    };
    const bool empty = ((static_cast<std::size_t>(sizes) == 0) || ...);
    (times(static_cast<std::size_t>(sizes)), ...);
    return empty ? 0 : fits ? product : max_bytes + 1;
}

/// Memory taken piece by piece; with null it only counts.
class arena {
  public:
    explicit arena(void* data) : at_(data == nullptr ? nullptr : aligned(data)) {}
    template <class Part>
    Part* take(std::size_t count) {
        // NOLINTNEXTLINE(bugprone-sizeof-expression): a Part may be a pointer, e.g. to a row
        const std::size_t size = aligned_size(count * sizeof(Part));
        bytes_ += size;
        if (at_ == nullptr) {
            return nullptr;
        }
        auto* part = reinterpret_cast<Part*>(at_);
        at_ += size;
        return part;
    }
    [[nodiscard]] std::size_t bytes() const { return bytes_ + alignment; }

  private:
    std::byte* at_;
    std::size_t bytes_ = 0;
};

}  // namespace kvpolicy::detail
