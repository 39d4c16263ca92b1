// The passes of host attention for AVX2, FMA and F16C.
#pragma once

#include <kvpolicy/host/attention_portable.hpp>

#if KVPOLICY_X86
namespace kvpolicy::host_backend {

template <Storage T>
struct avx2_kernels : portable_kernels<T> {};

}  // namespace kvpolicy::host_backend
#endif
