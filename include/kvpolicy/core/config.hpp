// Compiler and build configuration. Everything here is a macro because it must exist before any
// other header is read.
//
//   KVPOLICY_HOST_DEVICE   marks a function that kernels may call (empty for plain C++ compilers).
//   KVPOLICY_EXCEPTIONS    1 when bad input throws, 0 under -fno-exceptions (then error_handler gets the same
//       text).
//   KVPOLICY_X86           1 where the host backend may pick AVX2/FMA/F16C bodies at run time.
#pragma once

#if defined(__cplusplus) && __cplusplus < 202002L
#error \
    "kvpolicy: needs C++20: -std=c++20, of nvcc too (CMake's target kvpolicy::kvpolicy asks for it by itself)"
// No such file: the compilation ends here, and not after thousands of lines about concepts.
#include <kvpolicy/needs_cpp20>
#endif

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ != 0
#error "kvpolicy: -ffast-math and -ffinite-math-only lose NaN and infinity: add -fno-finite-math-only"
#endif

#if defined(__CUDACC__)
#define KVPOLICY_HOST_DEVICE __host__ __device__
#else
#define KVPOLICY_HOST_DEVICE
#endif

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
#define KVPOLICY_EXCEPTIONS 1
#else
#define KVPOLICY_EXCEPTIONS 0
#endif

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__)) && \
    !defined(__CUDA_ARCH__)
#define KVPOLICY_X86 1
#else
#define KVPOLICY_X86 0
#endif
