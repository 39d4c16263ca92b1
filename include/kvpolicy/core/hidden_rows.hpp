// Hidden states as a call takes them beside its tensors: of any storage type, whatever the call's own is.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// Hidden states [batch, length, width] of bf16, fp16, fp32 or double numbers; a row's are contiguous. Made
/// implicitly from rows of one head, view_bhsd(data, batch, 1, length, width).
struct HiddenRows {
    enum class type : std::uint8_t { none, bf16, fp16, fp32, fp64 };

    const void* data = nullptr;
    type of = type::none;
    std::int32_t batch = 0;
    std::int32_t heads = 1;  // must be 1
    std::int32_t length = 0;
    std::int32_t width = 0;
    std::int64_t batch_stride = 0;
    std::int64_t row_stride = 0;

    HiddenRows() = default;
    template <class T>
    requires Storage<std::remove_const_t<T>> KVPOLICY_HOST_DEVICE constexpr HiddenRows(
        const rows_view<T>& rows)
        : data(rows.data),
          of(type_of<std::remove_const_t<T>>()),
          batch(rows.batch),
          heads(rows.heads),
          length(rows.length),
          width(rows.dim),
          batch_stride(rows.batch_stride),
          row_stride(rows.row_stride) {}

    KVPOLICY_HOST_DEVICE constexpr explicit operator bool() const { return data != nullptr; }

    /// Copies the row of token t of sequence b to `to` [width], converted.
    template <class Real>
    void read(std::int64_t b, std::int64_t t, Real* to) const {
        switch (of) {
            case type::bf16:
                return convert(static_cast<const kvpolicy::bf16*>(data), b, t, to);
            case type::fp16:
                return convert(static_cast<const kvpolicy::fp16*>(data), b, t, to);
            case type::fp32:
                return convert(static_cast<const float*>(data), b, t, to);
            case type::fp64:
                return convert(static_cast<const double*>(data), b, t, to);
            case type::none:
                return;
        }
    }

  private:
    template <class T>
    KVPOLICY_HOST_DEVICE static constexpr type type_of() {
        return std::is_same_v<T, kvpolicy::bf16>   ? type::bf16
               : std::is_same_v<T, kvpolicy::fp16> ? type::fp16
               : std::is_same_v<T, float>          ? type::fp32
                                                   : type::fp64;
    }
    template <class T, class Real>
    void convert(const T* from, std::int64_t b, std::int64_t t, Real* to) const {
        from += b * batch_stride + t * row_stride;
        for (std::int32_t i = 0; i < width; ++i) {
            if constexpr (std::is_same_v<T, double> || std::is_same_v<T, float>) {
                to[i] = static_cast<Real>(from[i]);
            } else {
                to[i] = static_cast<Real>(static_cast<float>(from[i]));
            }
        }
    }
};

}  // namespace kvpolicy
