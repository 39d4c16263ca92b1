// Where device code lives. A kernel, and every function that may reach one, is hidden and stands in an inline
// namespace made of the library's version and of the architectures that nvcc was asked for. So two libraries
// of one process that use different versions, or were built for different GPUs, each run their own code:
// without this the dynamic linker would give one of them the other's launch stubs, whose binary may lack code
// for the GPU.
//
// Policies, views, contexts and errors stay outside of it: they are what users' signatures mention.
#pragma once

#include <kvpolicy/version.hpp>

#define KVPOLICY_HIDDEN __attribute__((visibility("hidden")))

// v0_1_0_800_900: each step pastes one more architecture of the list (a comma-separated list of numbers).
#define KVPOLICY_DETAIL_PASTE(a, b) a##_##b
#define KVPOLICY_DETAIL_JOIN_1(p, a) KVPOLICY_DETAIL_PASTE(p, a)
#define KVPOLICY_DETAIL_JOIN_2(p, a, ...) KVPOLICY_DETAIL_JOIN_1(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_3(p, a, ...) KVPOLICY_DETAIL_JOIN_2(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_4(p, a, ...) KVPOLICY_DETAIL_JOIN_3(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_5(p, a, ...) KVPOLICY_DETAIL_JOIN_4(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_6(p, a, ...) KVPOLICY_DETAIL_JOIN_5(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_7(p, a, ...) KVPOLICY_DETAIL_JOIN_6(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_8(p, a, ...) KVPOLICY_DETAIL_JOIN_7(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_9(p, a, ...) KVPOLICY_DETAIL_JOIN_8(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_10(p, a, ...) KVPOLICY_DETAIL_JOIN_9(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_11(p, a, ...) KVPOLICY_DETAIL_JOIN_10(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_JOIN_12(p, a, ...) KVPOLICY_DETAIL_JOIN_11(KVPOLICY_DETAIL_PASTE(p, a), __VA_ARGS__)
#define KVPOLICY_DETAIL_PICK(_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11, _12, name, ...) name
#define KVPOLICY_DETAIL_JOIN(p, ...)                                                              \
    KVPOLICY_DETAIL_PICK(__VA_ARGS__, KVPOLICY_DETAIL_JOIN_12, KVPOLICY_DETAIL_JOIN_11,           \
                         KVPOLICY_DETAIL_JOIN_10, KVPOLICY_DETAIL_JOIN_9, KVPOLICY_DETAIL_JOIN_8, \
                         KVPOLICY_DETAIL_JOIN_7, KVPOLICY_DETAIL_JOIN_6, KVPOLICY_DETAIL_JOIN_5,  \
                         KVPOLICY_DETAIL_JOIN_4, KVPOLICY_DETAIL_JOIN_3, KVPOLICY_DETAIL_JOIN_2,  \
                         KVPOLICY_DETAIL_JOIN_1, unused)                                          \
    (p, __VA_ARGS__)
// tools/gpu's build for racecheck (cuda/primitives/async.cuh) and one without portable kernels
// (cuda/hopper.cuh) are other code, so they have other names.
#if defined(KVPOLICY_ONE_PATH)
#define KVPOLICY_DETAIL_VERSIONED_(a, b, c) v##a##_##b##_##c##_one_path
#elif defined(KVPOLICY_RACECHECK)
#define KVPOLICY_DETAIL_VERSIONED_(a, b, c) v##a##_##b##_##c##_racecheck
#else
#define KVPOLICY_DETAIL_VERSIONED_(a, b, c) v##a##_##b##_##c
#endif
#define KVPOLICY_DETAIL_VERSIONED(a, b, c) KVPOLICY_DETAIL_VERSIONED_(a, b, c)
#define KVPOLICY_DETAIL_VERSION \
    KVPOLICY_DETAIL_VERSIONED(KVPOLICY_VERSION_MAJOR, KVPOLICY_VERSION_MINOR, KVPOLICY_VERSION_PATCH)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "kvpolicy: needs nvcc -arch=sm_80 or later, CUDA_ARCHITECTURES in CMake (the default is sm_75)"
#endif

// The architectures of this translation unit, as a list and as text.
#if defined(__CUDA_ARCH_LIST__)
#define KVPOLICY_DETAIL_CUDA_ARCHS __CUDA_ARCH_LIST__
#else
#define KVPOLICY_DETAIL_CUDA_ARCHS any
#endif
#define KVPOLICY_DETAIL_TEXT_OF_(...) #__VA_ARGS__
#define KVPOLICY_DETAIL_TEXT_OF(...) KVPOLICY_DETAIL_TEXT_OF_(__VA_ARGS__)
#define KVPOLICY_CUDA_ARCHS_TEXT KVPOLICY_DETAIL_TEXT_OF(KVPOLICY_DETAIL_CUDA_ARCHS)

/// namespace kvpolicy { inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN { ... } }
#define KVPOLICY_CUDA_NAMESPACE KVPOLICY_DETAIL_JOIN(KVPOLICY_DETAIL_VERSION, KVPOLICY_DETAIL_CUDA_ARCHS)

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

/// Stands for this build in the names of templates that are not in its namespace, members of a cache say: as
/// a template argument that nobody gives.
struct cuda_build {};

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
