// Tensors as DLPack describes them, and the views that calls of the library take. A view checks dtype, number
// of dimensions and strides; the library's calls check the rest.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvpolicy::python {

/// Becomes TypeError; invalid_argument becomes ValueError.
class type_error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

enum class dtype : std::uint8_t { bf16, fp16, fp32, fp64, int32, int64, uint8, other };

inline const char* name_of(dtype type) {
    constexpr const char* names[] = {"bfloat16", "float16", "float32", "float64",
                                     "int32",    "int64",   "uint8",   "another dtype"};
    return names[static_cast<int>(type)];
}

template <class T>
inline constexpr dtype dtype_of = dtype::other;
template <>
inline constexpr dtype dtype_of<bf16> = dtype::bf16;
template <>
inline constexpr dtype dtype_of<fp16> = dtype::fp16;
template <>
inline constexpr dtype dtype_of<float> = dtype::fp32;
template <>
inline constexpr dtype dtype_of<double> = dtype::fp64;
template <>
inline constexpr dtype dtype_of<std::int32_t> = dtype::int32;
template <>
inline constexpr dtype dtype_of<std::int64_t> = dtype::int64;
template <>
inline constexpr dtype dtype_of<std::uint8_t> = dtype::uint8;

/// A tensor of the caller. Strides count elements. Without data it stands for None.
struct Tensor {
    static constexpr int max_dims = 4;

    const char* name = "";
    void* data = nullptr;
    dtype type = dtype::other;
    int dims = 0;
    std::int64_t shape[max_dims]{};
    std::int64_t strides[max_dims]{};
    bool given = false;

    [[nodiscard]] std::int64_t count() const {
        std::int64_t product = given ? 1 : 0;
        for (int i = 0; i < dims; ++i) {
            product *= shape[i];
        }
        return product;
    }
    [[nodiscard]] bool contiguous() const {
        std::int64_t expected = 1;
        for (int i = dims - 1; i >= 0; --i) {
            if (shape[i] > 1 && strides[i] != expected) {
                return false;
            }
            expected *= shape[i];
        }
        return true;
    }
    [[nodiscard]] std::int32_t size(int i) const { return static_cast<std::int32_t>(shape[i]); }
};

namespace detail {

/// Checks dtype, dimensions and the last stride.
template <class T>
void check(const Tensor& tensor, int dims) {
    using kvpolicy::detail::text;
    if (!tensor.given) {
        throw type_error(text(tensor.name, ": None is not allowed; it must be a tensor"));
    }
    if (tensor.type != dtype_of<T>) {
        throw type_error(text(tensor.name, ": ", name_of(tensor.type), " is not allowed; it must be ",
                              name_of(dtype_of<T>)));
    }
    kvpolicy::detail::require(
        tensor.dims == dims, [&] { return text(tensor.name, ".dim()"); }, tensor.dims,
        [&] { return text(dims, " dimensions"); });
    for (int i = 0; i < dims; ++i) {
        kvpolicy::detail::require(
            tensor.shape[i] <= std::numeric_limits<std::int32_t>::max(),
            [&] { return text(tensor.name, ".size(", i, ")"); }, tensor.shape[i], "below 2^31");
    }
    kvpolicy::detail::require(
        tensor.shape[dims - 1] <= 1 || tensor.strides[dims - 1] == 1,
        [&] { return text(tensor.name, ".stride(-1)"); }, tensor.strides[dims - 1],
        "1: elements of the last dimension are contiguous");
}

}  // namespace detail

/// [B, H, S, D].
template <class T>
rows_view<T> rows_of(const Tensor& tensor) {
    detail::check<std::remove_const_t<T>>(tensor, 4);
    return {static_cast<T*>(tensor.data),
            tensor.size(0),
            tensor.size(1),
            tensor.size(2),
            tensor.size(3),
            tensor.strides[0],
            tensor.strides[1],
            tensor.strides[2]};
}

/// [B, H, S]; None is an empty view.
template <class T>
plane_view<T> plane_of(const Tensor& tensor) {
    if (!tensor.given) {
        return {};
    }
    detail::check<std::remove_const_t<T>>(tensor, 3);
    return {static_cast<T*>(tensor.data),
            tensor.size(0),
            tensor.size(1),
            tensor.size(2),
            tensor.strides[0],
            tensor.strides[1]};
}

/// `count` elements without gaps, of any shape; None is null.
template <class T>
T* array_of(const Tensor& tensor, std::int64_t count) {
    using kvpolicy::detail::text;
    if (!tensor.given) {
        return nullptr;
    }
    using Element = std::remove_const_t<T>;
    if (tensor.type != dtype_of<Element>) {
        throw type_error(text(tensor.name, ": ", name_of(tensor.type), " is not allowed; it must be ",
                              name_of(dtype_of<Element>)));
    }
    kvpolicy::detail::require(
        tensor.count() == count, [&] { return text(tensor.name, ".numel()"); }, tensor.count(),
        [&] { return text(count); });
    kvpolicy::detail::require(tensor.contiguous(), tensor.name, "a tensor with gaps", "contiguous");
    return static_cast<T*>(tensor.data);
}

/// `lengths` [B], `starts` [B] and `cu_seqlens` [segments + 1], int32; each may be None.
struct SequenceTensors {
    Tensor lengths, starts, cu_seqlens;
};

inline Sequences sequences_of(const SequenceTensors& tensors, std::int32_t batch, std::int32_t length) {
    Sequences sequences{.batch = batch, .length = length};
    sequences.lengths = array_of<const std::int32_t>(tensors.lengths, batch);
    sequences.starts = array_of<const std::int32_t>(tensors.starts, batch);
    if (tensors.cu_seqlens.given) {
        const std::int64_t edges = tensors.cu_seqlens.count();
        kvpolicy::detail::require(edges >= 2, "cu_seqlens.numel()", edges, "2 or more: segments + 1");
        sequences.cu_seqlens = array_of<const std::int32_t>(tensors.cu_seqlens, edges);
        sequences.segments = static_cast<std::int32_t>(edges - 1);
    }
    return sequences;
}

}  // namespace kvpolicy::python
