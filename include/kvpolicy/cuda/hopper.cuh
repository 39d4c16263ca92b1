// Two paths of one kernel: sm_90a code (wgmma, setmaxnreg) where the binary has it and the GPU is one, else
// portable code.
//
// A Hopper kernel is a __global__ function of its own. Its body stands under #if KVPOLICY_HOPPER_CODE, and
// its launch bounds are KVPOLICY_HOPPER_THREADS(n): other architectures compile an empty body of at most 32
// threads. So the dispatch can ask the driver which of the two the GPU would get: code for 9.0 without the
// "a" looks the same otherwise.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cuda_runtime.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVPOLICY_HOPPER_CODE 1
#define KVPOLICY_HOPPER_THREADS(n) (n)
#else
#define KVPOLICY_HOPPER_CODE 0
#define KVPOLICY_HOPPER_THREADS(n) 32
#endif

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Whether the present GPU would run the sm_90a body of this kernel.
template <class... Parameters>
bool has_hopper_code(const device_scope& device, void (*kernel)(Parameters...)) {
    if (device.attribute(cudaDevAttrComputeCapabilityMajor) != 9) {
        return false;
    }
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "cudaFuncGetAttributes");
    return attributes.maxThreadsPerBlock > 32;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
