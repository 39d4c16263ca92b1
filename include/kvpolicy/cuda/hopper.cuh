// Two paths of one kernel: sm_90a code (wgmma, setmaxnreg) where the binary has it and the GPU is one, else
// portable code.
//
// A Hopper kernel is a __global__ function of its own. Its body stands under #if KVPOLICY_HOPPER_CODE, and
// its launch bounds are KVPOLICY_HOPPER_THREADS(n): other architectures compile an empty body of at most 32
// threads. So the dispatch can ask the driver which of the two the GPU would get: code for 9.0 without the
// "a" looks the same otherwise.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
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

/// Whether a portable kernel of rows of T, for which a Hopper kernel stands in on every GPU that runs sm_90a
/// code, has its body in this pass. KVPOLICY_ONE_PATH, defined for a whole program, leaves it out of sm_90a
/// code, which then takes about two thirds of the time to compile; options that ask for portable kernels are
/// refused there.
#if defined(KVPOLICY_ONE_PATH) && KVPOLICY_HOPPER_CODE
template <class T>
inline constexpr bool portable_code = !is_half<T>;
#else
template <class T>
inline constexpr bool portable_code = true;
#endif

/// Refuses portable kernels where they were left out.
inline void check_portable([[maybe_unused]] bool portable) {
#if defined(KVPOLICY_ONE_PATH)
    detail::require(!portable, "options.portable", "true", "false in a build with KVPOLICY_ONE_PATH");
#endif
}

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
