// A pointer that a moved-from object no longer has.
#pragma once

#include <utility>

namespace kvpolicy::detail {

/// Null once it was moved from, so that a class with a defaulted move does not keep what it gave away.
template <class V>
class owned_pointer {
  public:
    owned_pointer() = default;
    owned_pointer(const owned_pointer&) = delete;
    owned_pointer& operator=(const owned_pointer&) = delete;
    owned_pointer(owned_pointer&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
    owned_pointer& operator=(owned_pointer&& other) noexcept {
        pointer_ = std::exchange(other.pointer_, nullptr);
        return *this;
    }
    owned_pointer& operator=(V* pointer) noexcept {
        pointer_ = pointer;
        return *this;
    }
    operator V*() const noexcept {
        return pointer_;
    }  // NOLINT(google-explicit-constructor): stands for a pointer

  private:
    V* pointer_ = nullptr;
};

}  // namespace kvpolicy::detail
