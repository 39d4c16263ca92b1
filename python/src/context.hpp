// The context of one extension module: the CPU in _host, a CUDA stream in _cuda. Every other file of this
// folder is compiled for either.
#pragma once

#include <kvpolicy/core/context.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/core/cuda_context.hpp>
#endif

namespace kvpolicy::python {

#if defined(KVPOLICY_PYTHON_CUDA)
using Context = kvpolicy::cuda;
inline constexpr bool on_cuda = true;
#else
using Context = kvpolicy::host;
inline constexpr bool on_cuda = false;
#endif

}  // namespace kvpolicy::python
