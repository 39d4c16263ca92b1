// How a call lays out the workspace that it was lent.
#pragma once

#include <kvpolicy/core/check.hpp>

#include <cstddef>

namespace kvpolicy::host_backend {

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

}  // namespace kvpolicy::host_backend
