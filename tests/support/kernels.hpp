// The inner loops of host attention for every storage type, instantiated in kernels.cpp. Where a variant is
// not optimized, its tests spend half their time in them; so they are compiled once for it, and optimized.
#pragma once

#include <kvpolicy/attention/host/avx2.hpp>
#include <kvpolicy/attention/host/portable.hpp>

#if !defined(KVPOLICY_TEST_KERNELS)
#define KVPOLICY_TEST_KERNELS extern
#endif

namespace kvpolicy::host_backend {

KVPOLICY_TEST_KERNELS template struct portable_kernels<float>;
KVPOLICY_TEST_KERNELS template struct portable_kernels<double>;
KVPOLICY_TEST_KERNELS template struct portable_kernels<fp16>;
KVPOLICY_TEST_KERNELS template struct portable_kernels<bf16>;
#if KVPOLICY_X86
KVPOLICY_TEST_KERNELS template struct avx2_direct<float>;
KVPOLICY_TEST_KERNELS template struct avx2_direct<fp16>;
KVPOLICY_TEST_KERNELS template struct avx2_direct<bf16>;
KVPOLICY_TEST_KERNELS template struct avx2_kernels<float>;
KVPOLICY_TEST_KERNELS template struct avx2_kernels<fp16>;
KVPOLICY_TEST_KERNELS template struct avx2_kernels<bf16>;
#endif

}  // namespace kvpolicy::host_backend
