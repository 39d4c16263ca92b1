// Tensors of Python as those of tensor.hpp: torch's by their attributes, which takes a third of a microsecond,
// others by DLPack. The binary does not link against PyTorch.
#pragma once

#include "context.hpp"
#include "operators.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpolicy::python {

namespace nb = nanobind;

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
        using kvpolicy::detail::require;
        using kvpolicy::detail::text;
        const nb::object shape = attribute(object, shape_), strides = call(object, stride_);
        tensor.dims = static_cast<int>(PyTuple_Size(shape.ptr()));
        require(tensor.dims <= Tensor::max_dims, text(tensor.name, ".dim()"), tensor.dims, "at most 4");
        for (int i = 0; i < tensor.dims; ++i) {
            tensor.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape.ptr(), i));
            tensor.strides[i] = PyLong_AsLongLong(PyTuple_GetItem(strides.ptr(), i));
        }
        require(!is_true(call(object, is_neg_)), tensor.name, "a view with a negative bit",
                "a tensor that holds its numbers");
        tensor.data = PyLong_AsVoidPtr(call(object, data_ptr_).ptr());
        const nb::object type = attribute(object, dtype_);
        for (std::size_t i = 0; i < types_.size(); ++i) {
            if (type.is(types_[i])) {
                tensor.type = static_cast<dtype>(i);
            }
        }
        tensor.given = true;
        const auto device = static_cast<std::int32_t>(PyLong_AsLong(call(object, get_device_).ptr()));
        if (PyErr_Occurred() != nullptr) {
            nb::raise_python_error();
        }
        return is_true(attribute(object, is_cuda_)) ? device : -1;
    }

  private:
    Torch() {
        const nb::module_ torch = nb::module_::import_("torch");
        tensor_ = torch.attr("Tensor");
        for (std::size_t i = 0; i < types_.size(); ++i) {
            types_[i] = torch.attr(name_of(static_cast<dtype>(i)));
        }
    }

    static nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
    static nb::object owned(PyObject* result) {
        if (result == nullptr) {
            nb::raise_python_error();
        }
        return nb::steal(result);
    }
    static nb::object attribute(nb::handle object, const nb::object& name) {
        return owned(PyObject_GetAttr(object.ptr(), name.ptr()));
    }
    static nb::object call(nb::handle object, const nb::object& name) {
        PyObject* arguments[] = {object.ptr()};
        return owned(PyObject_VectorcallMethod(name.ptr(), arguments, 1, nullptr));
    }
    static bool is_true(const nb::object& object) { return object.ptr() == Py_True; }

    nb::object tensor_, shape_ = name("shape"), stride_ = name("stride"), is_neg_ = name("is_neg"),
                        data_ptr_ = name("data_ptr"), dtype_ = name("dtype"),
                        get_device_ = name("get_device"), is_cuda_ = name("is_cuda");
    std::array<nb::object, static_cast<std::size_t>(dtype::other)> types_;
};

/// The tensors of a call: all on one device, the context's.
class Reader {
  public:
    explicit Reader(std::int32_t device) : device_(device) {}

    Tensor operator()(const char* name, nb::handle object) const {
        using kvpolicy::detail::text;
        Tensor tensor;
        tensor.name = name;
        if (object.is_none()) {
            return tensor;
        }
        const Torch& torch = Torch::get();
        const std::int32_t found = torch.owns(object) ? torch.read(object, tensor) : read(object, tensor);
        kvpolicy::detail::require(
            found == (on_cuda ? device_ : -1), text(name, ".device"),
            found < 0 ? std::string("cpu") : text("cuda:", found),
            on_cuda ? text("cuda:", device_, ", as the other tensors") : text("cpu, as the other tensors"));
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

    /// Torch::read of any tensor that DLPack describes.
    static std::int32_t read(nb::handle object, Tensor& tensor) {
        using kvpolicy::detail::text;
        nb::ndarray<> array;
        if (!nb::try_cast(object, array)) {
            throw type_error(text(tensor.name, ": is no tensor that DLPack describes"));
        }
        kvpolicy::detail::require(array.ndim() <= Tensor::max_dims, text(tensor.name, ".dim()"), array.ndim(),
                                  "at most 4");
        tensor.given = true;
        tensor.data = array.data();
        tensor.type = dtype_from(array.dtype());
        tensor.dims = static_cast<int>(array.ndim());
        for (int i = 0; i < tensor.dims; ++i) {
            tensor.shape[i] = static_cast<std::int64_t>(array.shape(static_cast<std::size_t>(i)));
            tensor.strides[i] = array.stride(static_cast<std::size_t>(i));
        }
        return array.device_type() == nb::device::cuda::value ? array.device_id() : -1;
    }

    std::int32_t device_;
};

}  // namespace kvpolicy::python
