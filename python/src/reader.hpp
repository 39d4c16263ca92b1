// Tensors of Python as those of tensor.hpp, by DLPack. The binary does not link against PyTorch.
#pragma once

#include "context.hpp"
#include "operators.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvpolicy::python {

namespace nb = nanobind;

/// The number of a device that is neither the CPU (-1) nor one of CUDA.
inline constexpr std::int32_t elsewhere = -2;

/// DLPack's table of functions of a tensor type (version 1), which torch has from 2.10 on: a tensor is
/// described without a capsule, and without a reference. Layouts are those of dlpack.h.
struct ManagedTensor {
    std::uint32_t major, minor;
    void* context;
    void (*free)(ManagedTensor* self);
    std::uint64_t flags;
    nb::dlpack::dltensor tensor;
};
struct ExchangeApi {
    std::uint32_t major, minor;
    const void* previous;
    int (*allocate)(nb::dlpack::dltensor* like, ManagedTensor** out, void* context,
                    void (*set_error)(void* context, const char* kind, const char* message));
    const void *from_object, *to_object;
    int (*describe)(void* object, nb::dlpack::dltensor* out);
    const void* current_stream;
};

/// What Python knows of torch. References are kept for the life of the process.
class Torch {
  public:
    static const Torch& get() {
        static const Torch* torch = new Torch;
        return *torch;
    }

    [[nodiscard]] bool owns(nb::handle object) const {
        return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(tensor_.ptr())) != 0;
    }

    /// Fills all but the name; returns the ordinal of the tensor's GPU, or -1.
    std::int32_t read(nb::handle object, Tensor& tensor) const {
        if (api_ == nullptr) {
            return read_attributes(object, tensor);
        }
        nb::dlpack::dltensor found{};
        if (api_->describe(object.ptr(), &found) != 0) {
            nb::raise_python_error();
        }
        return read_dlpack(found, tensor);
    }

    /// Memory of torch's allocator, until it goes; it goes with the interpreter's lock.
    struct Memory {
        std::unique_ptr<ManagedTensor, void (*)(ManagedTensor*)> managed{nullptr, nullptr};
        nb::object tensor;
        void* data = nullptr;
    };
    /// `bytes` of a GPU, on its current stream, or of the CPU for device -1.
    [[nodiscard]] Memory allocate(std::size_t bytes, std::int32_t device) const {
        Memory memory;
        if (api_ == nullptr) {
            const std::string name = device < 0 ? "cpu" : kvpolicy::detail::text("cuda:", device);
            memory.tensor = empty_(bytes, nb::arg("dtype") = types_[static_cast<int>(dtype::uint8)],
                                   nb::arg("device") = name);
            memory.data = pointer_of(memory.tensor);
            return memory;
        }
        auto count = static_cast<std::int64_t>(bytes);
        nb::dlpack::dltensor like{};
        like.device.device_type = device < 0 ? nb::device::cpu::value : nb::device::cuda::value;
        like.device.device_id = std::max(device, 0);
        like.ndim = 1, like.shape = &count;
        like.dtype = nb::dtype<std::uint8_t>();
        ManagedTensor* found = nullptr;
        std::string message;
        const auto set_error = [](void* to, const char*, const char* text) {
            *static_cast<std::string*>(to) = text;
        };
        if (api_->allocate(&like, &found, &message, set_error) != 0) {
            throw std::runtime_error(message);
        }
        memory.managed = {found, found->free};
        memory.data = static_cast<std::uint8_t*>(found->tensor.data) + found->tensor.byte_offset;
        return memory;
    }

    static std::int32_t read_dlpack(const nb::dlpack::dltensor& found, Tensor& tensor) {
        check_dims(tensor, found.ndim);
        tensor.given = true;
        tensor.data = static_cast<std::uint8_t*>(found.data) + found.byte_offset;
        tensor.type = dtype_from(found.dtype);
        std::copy_n(found.shape, found.ndim, tensor.shape);
        std::copy_n(found.strides, found.ndim, tensor.strides);
        const std::int32_t kind = found.device.device_type;
        return kind == nb::device::cuda::value  ? found.device.device_id
               : kind == nb::device::cpu::value ? -1
                                                : elsewhere;
    }

    static void check_dims(Tensor& tensor, std::int64_t dims) {
        using kvpolicy::detail::text;
        kvpolicy::detail::require(
            dims <= Tensor::max_dims, [&] { return text(tensor.name, ".dim()"); }, dims, "at most 4");
        tensor.dims = static_cast<int>(dims);
    }

  private:
    Torch() {
        const nb::module_ torch = nb::module_::import_("torch");
        tensor_ = torch.attr("Tensor");
        empty_ = torch.attr("empty");
        for (std::size_t i = 0; i < types_.size(); ++i) {
            types_[i] = torch.attr(name_of(static_cast<dtype>(i)));
        }
        const nb::object table = nb::getattr(tensor_, "__dlpack_c_exchange_api__", nb::none());
        if (!table.is_none()) {
            const auto* api =
                static_cast<const ExchangeApi*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
            PyErr_Clear();
            api_ = api != nullptr && api->major == 1 && api->describe != nullptr && api->allocate != nullptr
                       ? api
                       : nullptr;
        }
    }

    /// For older versions of torch.
    std::int32_t read_attributes(nb::handle object, Tensor& tensor) const {
        const nb::object shape = object.attr("shape"), strides = object.attr("stride")();
        check_dims(tensor, static_cast<std::int64_t>(nb::len(shape)));
        for (int i = 0; i < tensor.dims; ++i) {
            tensor.shape[i] = nb::cast<std::int64_t>(shape[i]);
            tensor.strides[i] = nb::cast<std::int64_t>(strides[i]);
        }
        tensor.given = true;
        tensor.data = pointer_of(object);
        const nb::object type = object.attr("dtype");
        for (std::size_t i = 0; i < types_.size(); ++i) {
            if (type.is(types_[i])) {
                tensor.type = static_cast<dtype>(i);
            }
        }
        return nb::cast<bool>(object.attr("is_cuda"))  ? nb::cast<std::int32_t>(object.attr("get_device")())
               : nb::cast<bool>(object.attr("is_cpu")) ? -1
                                                       : elsewhere;
    }

    static void* pointer_of(nb::handle object) {
        return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")()));
    }

    static dtype dtype_from(const nb::dlpack::dtype& type) {
        const auto is = [&](nb::dlpack::dtype_code code, int bits) {
            return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
        };
        using code = nb::dlpack::dtype_code;
        return is(code::Bfloat, 16)  ? dtype::bf16
               : is(code::Float, 16) ? dtype::fp16
               : is(code::Float, 32) ? dtype::fp32
               : is(code::Float, 64) ? dtype::fp64
               : is(code::Int, 32)   ? dtype::int32
               : is(code::Int, 64)   ? dtype::int64
               : is(code::UInt, 8)   ? dtype::uint8
                                     : dtype::other;
    }

    nb::object tensor_, empty_;
    std::array<nb::object, static_cast<std::size_t>(dtype::other)> types_;
    const ExchangeApi* api_ = nullptr;
};

/// The tensors of a call: all on one device, the context's.
class Reader {
  public:
    explicit Reader(std::int32_t device) : device_(device) {}

    Tensor operator()(const char* name, nb::handle object) const {
        Tensor tensor;
        tensor.name = name;
        if (object.is_none()) {
            return tensor;
        }
        const Torch& torch = Torch::get();
        const std::int32_t found = torch.owns(object) ? torch.read(object, tensor) : read(object, tensor);
        if (found != (on_cuda ? device_ : -1)) [[unlikely]] {
            refuse(name, found);
        }
        return tensor;
    }

    std::vector<Tensor> each(const char* name, const nb::list& objects) const {
        std::vector<Tensor> tensors;
        for (const nb::handle object : objects) {
            tensors.push_back((*this)(name, object));
        }
        return tensors;
    }

    /// (lengths, starts, cu_seqlens)
    SequenceTensors sequences(const nb::tuple& tensors) const {
        return {(*this)("lengths", tensors[0]), (*this)("starts", tensors[1]),
                (*this)("cu_seqlens", tensors[2])};
    }

  private:
    [[noreturn]] void refuse(const char* name, std::int32_t found) const {
        using kvpolicy::detail::text;
        kvpolicy::detail::refuse(
            text(name, ".device").c_str(),
            found == elsewhere ? "another device"
            : found < 0        ? "cpu"
                               : text("cuda:", found),
            on_cuda ? text("cuda:", device_, ", as the other tensors") : "cpu, as the other tensors");
    }

    /// Torch::read of any tensor that DLPack describes.
    static std::int32_t read(nb::handle object, Tensor& tensor) {
        nb::ndarray<> array;
        if (!nb::try_cast(object, array)) {
            throw type_error(kvpolicy::detail::text(tensor.name, ": is no tensor that DLPack describes"));
        }
        nb::dlpack::dltensor found{};
        found.data = array.data_handle(), found.byte_offset = array.byte_offset();
        found.device.device_type = array.device_type(), found.device.device_id = array.device_id();
        found.ndim = static_cast<std::int32_t>(array.ndim()), found.dtype = array.dtype();
        found.shape = const_cast<std::int64_t*>(array.shape_ptr());
        found.strides = const_cast<std::int64_t*>(array.stride_ptr());
        return Torch::read_dlpack(found, tensor);
    }

    std::int32_t device_;
};

}  // namespace kvpolicy::python
