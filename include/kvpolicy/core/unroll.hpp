// A pragma that unrolls the loop after it. Small arrays of sums live in registers only where the loops over
// them are unrolled, which g++ does not do at -O2. nvcc takes no such pragma for its host compiler: build
// host code that matters under nvcc with -O3.
#pragma once

#if defined(__CUDACC__)
#define KVPOLICY_UNROLL
#elif defined(__clang__)
#define KVPOLICY_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define KVPOLICY_UNROLL _Pragma("GCC unroll 16")
#else
#define KVPOLICY_UNROLL
#endif
